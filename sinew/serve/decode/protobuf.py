"""The wire format of Protobuf messages, walked and written by hand where the library would copy or allocate too
much."""

from __future__ import annotations

import numpy as np

from sinew.core import RequestError

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5  # wire types; groups (3, 4) are not in proto3
_SIZES = {VARINT: 0, FIXED64: 8, BYTES: 0, FIXED32: 4}  # bytes after the tag and varint
MAX_FIELDS = 512  # of a message: a request has some fifteen beside its images and their names

Field = tuple[int, int, int, int, int]  # number, wire type, value or length, start, end


def fields(buffer: memoryview, found: list[Field] | None = None) -> list[Field]:
    """Return a message's top-level fields, added to ``found``; skips contents.

    Raises RequestError, with the fields before the wrong one in ``found``. It all happens in one call: a generator is
    called for each value, and a function for numbers once for each of them.
    """
    found = [] if found is None else found
    at, end = 0, len(buffer)
    while at < end:
        if len(found) == MAX_FIELDS:
            raise RequestError(f"request: expected at most {MAX_FIELDS} fields, got more")
        start, numbers = at, [0, 0]  # the tag; a value, or the length of the content
        for index in (0, 1):
            for shift in range(0, 70, 7):
                if at >= end:
                    raise RequestError("request parse failed: it ends inside a number")
                byte, at = buffer[at], at + 1
                numbers[index] |= (byte & 0x7F) << shift
                if byte < 0x80:
                    break
            else:
                raise RequestError(f"request parse failed: a number longer than ten bytes at byte {at - 10}")
            if numbers[0] & 7 not in (VARINT, BYTES):
                break
        tag, value = numbers
        wire_type = tag & 7
        if wire_type not in _SIZES:
            raise RequestError(f"request parse failed: wire type {wire_type} at byte {start}")
        at += value if wire_type == BYTES else _SIZES[wire_type]
        if at > end:
            raise RequestError(f"request parse failed: the field at byte {start} goes past the end")
        found.append((tag >> 3, wire_type, value, start, at))
    return found


def packed(number: int, values: np.ndarray) -> bytes:
    """A repeated float field, written without making a Python number of each value."""
    data = values.astype("<f4", copy=False).tobytes()
    return _write_varint(number << 3 | BYTES) + _write_varint(len(data)) + data


def _write_varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
