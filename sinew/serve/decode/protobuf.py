"""The wire format of Protobuf messages, walked and written by hand where the library would copy or allocate too
much."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from sinew.core import RequestError

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5  # wire types; groups (3, 4) are not in proto3
_SIZES = {VARINT: 0, FIXED64: 8, BYTES: 0, FIXED32: 4}  # bytes after the tag and varint


def fields(buffer: memoryview) -> Iterator[tuple[int, int, int, int, int]]:
    """Walk a message's top-level fields: (number, wire type, value or length, start, end). Skips contents."""
    at, end = 0, len(buffer)
    while at < end:
        start, tag, value = at, buffer[at], 0
        # Most tags and lengths are one byte: a call for each was a quarter of the server's calls for a request.
        if tag < 0x80:
            at += 1
        else:
            tag, at = _varint(buffer, at)
        wire_type = tag & 7
        if wire_type in (VARINT, BYTES):
            if at < end and buffer[at] < 0x80:
                value, at = buffer[at], at + 1
            else:
                value, at = _varint(buffer, at)
        if wire_type not in _SIZES:
            raise RequestError(f"request parse failed: wire type {wire_type} at byte {start}")
        at += value if wire_type == BYTES else _SIZES[wire_type]
        if at > end:
            raise RequestError(f"request parse failed: the field at byte {start} goes past the end")
        yield tag >> 3, wire_type, value, start, at


def _varint(buffer: memoryview, at: int) -> tuple[int, int]:
    """(value, index after it) of the varint at ``at``."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(buffer):
            raise RequestError("request parse failed: it ends inside a number")
        byte = buffer[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise RequestError(f"request parse failed: a number longer than ten bytes at byte {at - 10}")


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
