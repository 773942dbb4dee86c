"""Convert arrays that a request contains as nested lists. Every element is checked before memory is allocated.

``numpy.asarray`` makes all elements as wide as the widest. A list of five thousand numbers and one text of forty
thousand characters would then need 760 MiB. This module rejects text, truth values and other non-numbers while it walks
through the lists, so an array needs eight bytes for each number.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from sinew.core import ObservationError

MAX_NDIM = 8
KINDS = "fiu"  # accepted kinds of dtypes: floats and integers; others, such as bool and text, are rejected
_EXACT = frozenset({int, float})
_WORDS = {
    bool: "a truth value",
    str: "text",
    bytes: "bytes",
    type(None): "nothing",
    complex: "a complex number",
}


def numbers(key: str, value: Any, most: int | None = None) -> np.ndarray:
    """Return ``value`` as an array of real numbers.

    Args:
        key: Name of the field, for messages.
        value: An array, which is returned unchanged; nested lists of numbers, which become int64 if all are integers,
            else float64; or lists of arrays of one shape and dtype, which are joined.
        most: Largest allowed count of numbers; None for no limit.

    Raises:
        ObservationError: The value does not consist of numbers, or has too many.
    """
    array = value if type(value) is np.ndarray else _read(key, value, most)
    if array.dtype.kind not in KINDS:
        raise ObservationError(key, "numbers", f"dtype {array.dtype}")
    if most is not None and array.size > most:
        raise ObservationError(key, f"at most {most} numbers", str(array.size))
    return array


def _read(key: str, value: Any, most: int | None) -> np.ndarray:
    if isinstance(value, np.ma.MaskedArray):
        raise ObservationError(key, "numbers", "a masked array, whose gaps have no value")
    if isinstance(value, (list, tuple)):
        return _of_lists(key, value, most)
    if isinstance(value, (str, bytes, bytearray, bool, complex, Mapping, type(None))):
        raise ObservationError(key, "numbers", _word(value))
    try:
        return np.asarray(value)
    except (ValueError, TypeError, OverflowError) as error:
        raise ObservationError(key, "numbers", f"{type(value).__name__} ({str(error)[:80]})") from None


def _of_lists(key: str, value: Any, most: int | None) -> np.ndarray:
    """Convert nested lists to an array.

    A loop processes one level of nesting after the other, without recursion, so deep nesting cannot overflow the stack.
    It stops at ``MAX_NDIM`` levels, also for a list that contains itself.
    """
    shape: list[int] = []
    level: list[Any] = [value]
    while level and isinstance(level[0], (list, tuple)):
        if len(shape) == MAX_NDIM:
            raise ObservationError(key, f"lists in at most {MAX_NDIM} levels", "more")
        width = len(level[0])
        for each in level:
            if not isinstance(each, (list, tuple)) or len(each) != width:
                raise ObservationError(key, "numbers", "a ragged sequence")
        shape.append(width)
        if most is not None and width * len(level) > most:
            raise ObservationError(key, f"at most {most} numbers", "more")
        level = [item for each in level for item in each]
    kinds = set(map(type, level))
    if kinds <= _EXACT:
        return _filled(key, level, shape, np.int64 if kinds == {int} else np.float64)
    if any(hasattr(each, "__array__") for each in level):
        return _joined(key, level, shape)
    for index, each in enumerate(level):
        if type(each) not in _EXACT:
            where = np.unravel_index(index, shape)
            raise ObservationError(key, "numbers", f"{_word(each)} at {[int(at) for at in where]}")
    raise AssertionError(
        "an element has an unexpected type, but no such element was found; please report this"
    )


def _filled(key: str, level: list[Any], shape: list[int], dtype: type) -> np.ndarray:
    try:
        return np.array(level, dtype).reshape(shape)
    except OverflowError:
        raise ObservationError(key, "numbers", "an integer beyond 64 bits") from None


def _joined(key: str, level: list[Any], shape: list[int]) -> np.ndarray:
    """Join a list of arrays, numpy numbers or tensors to one array. The list may also contain plain Python numbers."""
    parts = [
        each if type(each) is np.ndarray else numbers(key, each) for each in level if not _is_plain(each)
    ]
    if len({part.shape for part in parts}) > 1 or (len(parts) < len(level) and parts[0].shape):
        raise ObservationError(key, "numbers", "a ragged sequence")
    for part in parts:
        if part.dtype.kind not in KINDS:
            raise ObservationError(key, "numbers", f"dtype {part.dtype} inside a list")
    # The shape () means that each part is a single number (of numpy, or a tensor without axes).
    if not parts[0].shape:
        plain = [each if _is_plain(each) else each.item() for each in level]
        whole = all(type(each) is int for each in plain)
        return _filled(key, plain, shape, np.int64 if whole else np.float64)
    # np.stack would convert all parts to the widest dtype.
    if len({part.dtype for part in parts}) > 1:
        raise ObservationError(key, "arrays of one dtype in a list", "several")
    return np.stack(parts).reshape(*shape, *parts[0].shape)


def _is_plain(value: Any) -> bool:
    return type(value) in _EXACT


def _word(value: Any) -> str:
    return _WORDS.get(type(value), type(value).__name__)
