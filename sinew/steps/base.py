"""What every step has: a tag, rules of its numbers, words, and a class that a record of a bundle is read into."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any, ClassVar, TypeVar, cast

S = TypeVar("S", bound="Step")
# Held while msgspec reads a dataclass: 0.22 ends the process (SIGSEGV) where two threads meet a class first together.
READING = threading.RLock()


class Step:
    """A step is a frozen dataclass: its fields are what a bundle stores, and ``kind`` is its tag.

    registry: where the class of each tag is (``sinew/steps/registry.py``). ``str(step)`` is what `sinew inspect` says.
    """

    kind: str
    registry: ClassVar[Mapping[str, str]] = {}

    def problems(self) -> Iterator[str]:
        """Yield what is wrong with the fields, each as "field: expected X, got Y"."""
        yield from ()

    @classmethod
    def registered(cls: type[S], kind: object) -> type[S]:
        """Return the class of a tag. Raises ValueError for one that is not registered."""
        place = cls.registry.get(kind) if isinstance(kind, str) else None
        if place is None:
            raise ValueError(f"kind: expected one of {', '.join(cls.registry)}, got {kind!r}")
        module, name = place.split(":")
        return cast("type[S]", getattr(import_module(module), name))

    @classmethod
    def read(cls: type[S], record: object) -> S:
        """Return the step of a record from a file. Raises ValueError that names the step and the field."""
        import msgspec  # here: a model in memory has steps too, and needs numpy alone

        if not isinstance(record, dict):
            raise ValueError(f"expected a step, an object with its kind, got {type(record).__name__}")
        found = cls.registered(record.get("kind"))
        try:
            with READING:
                return msgspec.convert(record, found, strict=True)
        except msgspec.ValidationError as error:
            raise ValueError(f"{record['kind']}: {error}") from None


def read_step(kind: type, record: Any) -> Any:
    """Return the step of a record where a field is one. msgspec asks of every type that it does not know."""
    if issubclass(kind, Step):
        return kind.read(record)
    raise NotImplementedError(f"a field of {kind}")


def within(name: str, value: float, low: float, high: float) -> Iterator[str]:
    """Yield a problem unless ``low <= value <= high``."""
    if not low <= value <= high:  # which a whole number of any size may be, but not printed as a float
        got = f"{value:g}" if isinstance(value, float) else f"{value}"
        yield f"{name}: expected {low:g} to {high:g}, got {got}"
