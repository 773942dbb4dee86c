"""Read and write Protobuf messages without the library, which would copy or allocate too much."""

from __future__ import annotations

import numpy as np

from sinew.core import RequestError

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5  # wire types of Protobuf; proto3 has no groups (3, 4)
# Largest number of fields of a message. A request has about 15 fields, and further fields for its images and their
# names.
MAX_FIELDS = 512

Field = tuple[int, int, int, int, int]  # (field number, wire type, value or length, start, end)


def fields(buffer: memoryview, entries: list[Field] | None = None) -> list[Field]:
    """Return the top-level fields of a message. The contents of the fields are skipped.

    The fields are read in one loop and returned as a list, because a generator would cost a call for each field.

    Args:
        buffer: The message.
        entries: List to which the fields are added; None creates one. After an error, the list has the fields
            before the wrong field.

    Raises:
        RequestError: The message is malformed, or has too many fields.
    """
    entries = [] if entries is None else entries
    at, end = 0, len(buffer)
    try:
        while at < end:
            if len(entries) == MAX_FIELDS:
                raise RequestError(f"request: expected at most {MAX_FIELDS} fields, got more")
            start, tag, value = at, buffer[at], 0
            at += 1
            if tag > 0x7F:  # the field number is above 15, so the tag has a second byte
                second = buffer[at]
                if second < 0x80:
                    tag, at = tag & 0x7F | second << 7, at + 1
                else:
                    tag, at = _varint(buffer, start)
            wire_type = tag & 7
            if wire_type in (VARINT, BYTES):
                value = buffer[at]
                at += 1
                if value > 0x7F:
                    value, at = _varint(buffer, at - 1)
                if wire_type == BYTES:
                    at += value
            elif wire_type == FIXED32:
                at += 4
            elif wire_type == FIXED64:
                at += 8
            else:
                raise RequestError(f"request parse failed: unsupported wire type {wire_type} at byte {start}")
            if at > end:
                raise RequestError(
                    f"request parse failed: the field at byte {start} ends after the end of the message"
                )
            entries.append((tag >> 3, wire_type, value, start, at))
    except IndexError:
        raise RequestError("request parse failed: the message ends inside a number") from None
    return entries


def _varint(buffer: memoryview, start: int) -> tuple[int, int]:
    """Return the number that begins at ``start``, and the position of its end."""
    value, shift = 0, 0
    for at in range(start, start + 10):
        byte = buffer[at]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at + 1
        shift += 7
    raise RequestError(f"request parse failed: a number longer than ten bytes at byte {start}")


def packed(number: int, values: np.ndarray) -> bytes:
    """Return a repeated float field. The values are written at once, without a Python number for each value."""
    return nested(number, values.astype("<f4", copy=False).tobytes())


def nested(number: int, data: bytes) -> bytes:
    """Return a field with ``data``: a message inside another message, or packed numbers."""
    return _write_varint(number << 3 | BYTES) + _write_varint(len(data)) + data


def _write_varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
