"""Declare the allowed values of a record's fields in their types, and decode records from untrusted files.

This module is the only place that decodes such records. Every value is checked against its field. A rule about several
fields is a method ``problems`` of the record. It is called after each field has passed its own check.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from importlib.metadata import EntryPoint
from types import UnionType
from typing import Annotated, Any, ClassVar, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from sinew_client.solver import Solver
from sinew_client.types import MAX_HISTORY, MAX_HISTORY_STEPS, CameraSpec, KeyMap, PolicySpec, VectorSpec
from sinew_client.untrusted import UntrustedError, named, parse_json, shown

from sinew.core import MAX_SIZE, BundleError
from sinew.core.registry import loaded, place_of

T = TypeVar("T")
K = TypeVar("K", bound="Tagged")
STEPS = "sinew.steps"  # group of entry points for steps in other distributions
MAX_SOLVER_STEPS = 100
MAX_HZ = 10_000.0
MAX_NAME = 256  # a name may have at most this many characters
MAX_TEXT = 1 << 14  # a part of a prompt, a template or a default prompt may have at most this many characters
_MANY = (dict, list, tuple)
# Only one thread decodes a record at a time. msgspec 0.22 crashes (SIGSEGV) if two threads use a dataclass
# for the first time at once.
_READING = threading.RLock()


@dataclass(frozen=True)
class Must:
    """A condition for the value of a field, as a part of its type: ``Annotated[int, within(1, 100)]``.

    Attributes:
        expected: The allowed values as text, for the "expected ..." part of an error message.
        fits: Returns True if a value meets the condition.
        said: Returns the "got ..." part of an error message, from a value that does not meet the condition.
    """

    expected: str
    fits: Callable[[Any], bool]
    said: Callable[[Any], str] = lambda value: f"{value:g}" if isinstance(value, float) else shown(value)

    def problems(self, name: str, value: Any) -> Iterator[str]:
        """Yield "name: expected X, got Y" if the value does not meet the condition."""
        if not self.fits(value):
            yield f"{name}: expected {self.expected}, got {self.said(value)}"


def within(low: float, high: float) -> Must:
    """Require ``low <= value <= high``."""
    return Must(f"{low:g} to {high:g}", lambda value: low <= value <= high)


def positive(what: str = "a finite number") -> Must:
    """Require a finite number above zero. ``what`` describes the allowed numbers in error messages."""
    return Must(f"{what} above 0", lambda value: 0 < value < math.inf)


def share(what: str, none: bool = False) -> Must:
    """Require a number above 0 and at most 1, which is a share of something.

    Args:
        what: The thing of which the number is a share. Error messages contain this text.
        none: Also allow 0, which means that the share is not set.
    """
    expected = f"a part of {what}, above 0 and at most 1"
    return Must(expected, lambda value: 0 < value <= 1 or (none and value == 0))


def count(low: int, high: int, what: str) -> Must:
    """Require a list with ``low`` to ``high`` members. ``what`` describes the members in error messages."""
    expected = f"{low} to {high} {what}" if low else f"at most {high} {what}"
    return Must(expected, lambda value: low <= len(value) <= high, lambda value: str(len(value)))


def characters(low: int, high: int) -> Must:
    """Require a text with ``low`` to ``high`` characters."""
    return count(low, high, "characters")


def printable(low: int, high: int) -> Must:
    """Require a text with ``low`` to ``high`` printable characters."""
    expected = f"{low} to {high} printable characters" if low else f"at most {high} printable characters"
    return Must(expected, lambda value: low <= len(value) <= high and value.isprintable())


def word(low: int = 1) -> Must:
    """Require a name with at least ``low`` characters, all of which are safe inside quotes in generated programs and
    web pages."""
    expected = f"{low} to {MAX_NAME} characters, printable, without quotes, backticks and backslashes"
    fits = printable(low, MAX_NAME).fits
    return Must(expected, lambda value: fits(value) and not any(mark in value for mark in '"\\`'))


FINITE = Must("a finite number", math.isfinite)
SOME = Must("one or more", bool, lambda _: "none")

Side = Annotated[int, within(1, MAX_SIZE)]  # a side of a picture in pixels, or another count of at least 1
Width = Annotated[int, within(0, MAX_SIZE)]  # a count that may be 0
Finite = Annotated[float, FINITE]
NotBelowZero = Annotated[float, Must("a finite number of at least 0", within(0, sys.float_info.max).fits)]
Positive = Annotated[float, positive()]
Label = Annotated[str, printable(0, MAX_NAME)]
Word = Annotated[str, word()]
MaybeWord = Annotated[str, word(0)]

# The client package defines these types for older Pythons without Annotated, so their conditions are listed here.
SPECIFICATION: dict[type, dict[str, Any]] = {
    CameraSpec: {"name": Word, "height": Side, "width": Side},
    VectorSpec: {"names": tuple[Label, ...], "units": tuple[Label, ...]},
    KeyMap: {
        "wire": MaybeWord,
        "images": dict[MaybeWord, str],
        "state": tuple[MaybeWord, ...],
        "prompt": MaybeWord,
        "unread": tuple[MaybeWord, ...],
    },
    Solver: {"start": Finite, "end": Finite, "table": tuple[tuple[Finite, ...], ...]},
    PolicySpec: {
        "architecture": Label,
        "name": Label,
        "cameras": Annotated[tuple[CameraSpec, ...], count(1, 16, "cameras")],
        "embodiment": Label,
        "chunk_size": Side,
        "noise_dim": Width,
        "noise_rows": Width,
        "solver_steps": Annotated[int, within(1, MAX_SOLVER_STEPS)],
        "max_prompt_tokens": Side,
        "control_hz": Annotated[
            float,
            Must(f"actions per second, above 0 and at most {MAX_HZ:g}", lambda value: 0 < value <= MAX_HZ),
        ],
        "default_prompt": Annotated[str, characters(0, MAX_TEXT)],
        "history": Annotated[int, within(1, MAX_HISTORY)],
        "history_stride": Annotated[
            int, Must(f"1 or more, {MAX_HISTORY_STEPS} control steps in all", lambda value: value >= 1)
        ],
    },
}


def problems(record: Any, path: str = "") -> Iterator[str]:
    """Yield the errors in a record and its nested records, each as "path: expected X, got Y"."""
    place = path and (f"{path}: {record.kind}: " if isinstance(record, Tagged) else f"{path}.")
    right = True
    for name, shape in _held(record.__class__):
        for problem in _value_problems(getattr(record, name), shape, place + name):
            right = False
            yield problem
    if right and hasattr(record, "problems"):
        yield from (place + problem for problem in record.problems())


@dataclass(frozen=True)
class _Shape:
    """The conditions that a type in a record's declaration sets for values of this type.

    Attributes:
        musts: Conditions of the value itself.
        parts: Conditions of each member of a list, tuple or dict. The entry of a member without conditions is
            None.
        every: True if all members have the conditions of the first entry of ``parts``.
        alone: Conditions of a single value, for types that allow either a list or a single value.
    """

    musts: tuple[Must, ...] = ()
    parts: tuple[Any, ...] = ()
    every: bool = False
    alone: Any = None


@cache
def _shape(hint: Any) -> _Shape | None:
    """Return the conditions that a type in a record's declaration sets for its values; None if the type sets
    no conditions.
    """
    if get_origin(hint) is Annotated:
        inner, *conditions = get_args(hint)
        return replace(_shape(inner) or _Shape(), musts=tuple(conditions))
    if get_origin(hint) in (Union, UnionType):
        kinds = {get_origin(each) is tuple: _shape(each) for each in get_args(hint) if each is not type(None)}
        many = kinds.get(True)
        return kinds.get(False) if many is None else replace(many, alone=kinds.get(False))
    parts = tuple(_shape(each) for each in get_args(hint) if each is not ...)
    if any(part is not None for part in parts):
        return _Shape(parts=parts, every=... in get_args(hint))
    record = isinstance(hint, type) and (is_dataclass(hint) or issubclass(hint, Tagged))
    return _Shape() if record else None


@cache
def _held(kind: type) -> tuple[tuple[str, _Shape], ...]:
    """Return the fields of a class whose values must meet conditions, such as a range, in addition to their
    Python types.
    """
    hints = get_type_hints(kind, include_extras=True) | SPECIFICATION.get(kind, {})
    shapes = ((field.name, _shape(hints[field.name])) for field in fields(kind))
    return tuple((name, shape) for name, shape in shapes if shape is not None)


def _value_problems(value: Any, shape: _Shape, path: str) -> Iterator[str]:
    if value is None:
        return
    if shape.alone is not None and not isinstance(value, tuple):
        shape = shape.alone
    for must in shape.musts:
        if not must.fits(value):
            yield from must.problems(path, value)
            return
    parts = shape.parts
    if isinstance(value, tuple) and parts:
        first = parts[0]
        if shape.every and len(first.musts) == 1 and not first.parts and all(map(first.musts[0].fits, value)):
            return  # a fast loop has already checked all numbers of the list, which may be thousands
        for index, each in enumerate(value):
            if (part := parts[0 if shape.every else index]) is not None:
                yield from _value_problems(each, part, f"{path}[{index}]")
    elif isinstance(value, dict) and parts:
        of_key, of_value = parts
        for key, each in value.items():
            if of_key is not None:
                yield from _value_problems(key, of_key, f"{path}: a key")
            if of_value is not None:
                yield from _value_problems(each, of_value, f"{path}.{named(key)}")
    elif is_dataclass(value):
        yield from problems(value, path)


class Tagged:
    """A record that belongs to one of several classes, which its tag selects. Each class is a frozen dataclass with a
    field ``kind``, its tag.

    Attributes:
        kind: The tag.
        registry: Key: tag. Value: the class, as "module:class" (``sinew/steps/registry.py``).
    """

    kind: str
    registry: ClassVar[Mapping[str, str]] = {}

    @classmethod
    def registered(cls: type[K], kind: object) -> type[K]:
        """Return the class that belongs to a tag. The class may also be in another installed package. That package has
        an entry point in the group ``sinew.steps`` whose name is the tag.

        Raises:
            ValueError: The tag is unknown.
        """
        word = kind if isinstance(kind, str) else ""
        if ours := cls.registry.get(word):
            return cast(type[K], EntryPoint(word, ours, STEPS).load())
        place = place_of(STEPS, word)
        step = loaded(STEPS, word, place, cls.__name__) if place != word else None
        if not (isinstance(step, type) and issubclass(step, cls)):
            kinds = f"{', '.join(cls.registry)}, or a {cls.__name__} of an installed package ({STEPS})"
            raise ValueError(f"kind: expected one of {kinds}, got {kind!r}")
        return step

    @classmethod
    def read(cls: type[K], record: object) -> K:
        """Decode a record from plain dicts and lists.

        Raises:
            ValueError: The record is not valid. The message names the tag and the field.
        """
        # Import msgspec only here. Models also import this module, and a model that is already in memory must not need
        # any package except numpy.
        import msgspec

        if not isinstance(record, dict):
            raise ValueError(f'expected a step, an object with a "kind", got {type(record).__name__}')
        step = cls.registered(record.get("kind"))
        try:
            with _READING:
                return msgspec.convert(record, step, strict=True)
        except msgspec.ValidationError as error:
            raise ValueError(f"{record['kind']}: {error}") from None


def to_json(record: Any) -> str:
    # Import msgspec late, because a model in memory also uses this module and must need only numpy.
    import msgspec

    return msgspec.json.encode(record).decode()


def from_json(text: str, kind: type[T], where: str) -> T:
    """Decode JSON text to an object of the type ``kind``, and check every value.

    Args:
        text: The JSON text.
        kind: A dataclass or container type.
        where: Prefix of error messages.
    """
    return from_builtins(parsed(text, where), kind, where)


def parsed(text: str, where: str) -> Any:
    """Parse JSON. ``where`` is the prefix of the message.

    Raises:
        BundleError: The text is not valid JSON.
    """
    with BundleError.at(where, UntrustedError):
        return parse_json(text, finite=False)  # each field checks its own numbers


def from_builtins(raw: Any, kind: type[T], where: str) -> T:
    """Convert plain dicts and lists to an object of the type ``kind``, and check every value.

    Args:
        raw: The plain dicts and lists.
        kind: The type of the record.
        where: Prefix of error messages.

    Raises:
        BundleError: A type is wrong, a field is unknown, or a value does not meet its conditions. The message names the
            field.
    """
    import msgspec

    # msgspec calls this function for every type that it cannot decode itself.
    def tagged(kind: type, record: Any) -> Any:
        if issubclass(kind, Tagged):
            return kind.read(record)
        raise NotImplementedError(f"a field of {kind}")

    # All errors of msgspec are ValueErrors, and the error for an incomplete Unicode character is a ValueError too.
    with BundleError.at(where, ValueError, RecursionError), _READING:
        record = msgspec.convert(raw, kind, strict=True, dec_hook=tagged)
    if unknown := _unknown_field(raw, msgspec.to_builtins(record)):
        raise BundleError(
            f"{where}: unknown field {unknown!r}; correct the name, or update Sinew if a newer version wrote the file"
        )
    form: Any = kind
    if (shape := _shape(form)) is not None:
        for problem in _value_problems(record, shape, where):
            raise BundleError(problem)
    return record


def _unknown_field(raw: Any, decoded: Any, path: str = "") -> str | None:
    """Return the name of the first field in ``raw`` that the decoded record does not have. msgspec ignores unknown
    keys of dataclasses, but a misspelt hyper-parameter must not be ignored."""
    if isinstance(raw, dict) and isinstance(decoded, dict):
        for key, value in raw.items():
            if key not in decoded:
                return f"{path}{key}"
            if isinstance(value, dict | list) and (
                unknown := _unknown_field(value, decoded[key], f"{path}{key}.")
            ):
                return unknown
    # The function to_builtins does not convert the tuples of a record to lists, so accept tuples here.
    elif isinstance(raw, list | tuple) and isinstance(decoded, list | tuple):
        for left, right in zip(raw, decoded, strict=False):
            if isinstance(left, _MANY) and (unknown := _unknown_field(left, right, path)):
                return unknown
    return None
