"""MessagePack from untrusted bytes, without a copy: binary parts come back as views of the message.

Written out here because limits on single containers, which is what the common libraries offer, do not bound a
message: sixty million empty lists inside lists of a thousand are gigabytes of objects. This reader counts every
value, so its time and memory are bounded by ``max_values`` and not by the message's length.
Format: https://github.com/msgpack/msgpack/blob/master/spec.md.
"""

from __future__ import annotations

import struct
from typing import Any

from sinew.core import RequestError

MAX_DEPTH = 12  # containers inside containers
MAX_VALUES = 1 << 14  # of one message: containers, keys and leaves
MAX_TEXT = 1 << 18  # bytes of one text,
MAX_TEXTS = 1 << 22  # and of all of a message: one strange character makes four bytes of each of the others

_NUMBERS = {  # first byte -> format, bytes
    0xCA: (">f", 4),
    0xCB: (">d", 8),
    0xCC: (">B", 1),
    0xCD: (">H", 2),
    0xCE: (">I", 4),
    0xCF: (">Q", 8),
    0xD0: (">b", 1),
    0xD1: (">h", 2),
    0xD2: (">i", 4),
    0xD3: (">q", 8),
}
_CONSTANTS = {0xC0: None, 0xC2: False, 0xC3: True}
_BINARY = {0xC4: 1, 0xC5: 2, 0xC6: 4}  # first byte -> bytes of the length that follows
_TEXT = {0xD9: 1, 0xDA: 2, 0xDB: 4}
_ARRAY = {0xDC: 2, 0xDD: 4}
_MAP = {0xDE: 2, 0xDF: 4}


def unpack(buffer: memoryview, max_values: int = MAX_VALUES) -> Any:
    """The one value in ``buffer``. Keys of maps are text (binary ones are decoded), binary values are memoryviews.

    Raises RequestError for anything else: extension types, other keys, bytes left over.
    """
    reader = _Reader(buffer, max_values)
    value = reader.value(0)
    if reader.at != len(buffer):
        raise RequestError(f"MessagePack: {len(buffer) - reader.at} bytes after the end of the message")
    return value


class _Reader:
    def __init__(self, buffer: memoryview, max_values: int):
        self.buffer = buffer
        self.at, self.end = 0, len(buffer)
        self.left = max_values
        self.texts = 0  # bytes

    def value(self, depth: int) -> Any:
        self.left -= 1
        if self.left < 0:
            raise RequestError("MessagePack: the message has too many values")
        if depth > MAX_DEPTH:
            raise RequestError(f"MessagePack: expected at most {MAX_DEPTH} levels of containers, got more")
        if self.at >= self.end:
            raise RequestError(f"MessagePack: the message ends inside the value at byte {self.at}")
        first = self.buffer[self.at]
        self.at += 1
        if first < 0x80:
            return first
        if 0xA0 <= first < 0xC0:
            return self.text(first & 0x1F)
        if first >= 0xE0:
            return first - 0x100
        if first < 0x90:
            return self.map(first & 0x0F, depth)
        if first < 0xA0:
            return self.array(first & 0x0F, depth)
        if first in _BINARY:
            return self.take(self.length(_BINARY[first]))
        if first in _NUMBERS:
            form, size = _NUMBERS[first]
            return struct.unpack(form, self.take(size))[0]
        if first in _TEXT:
            return self.text(self.length(_TEXT[first]))
        if first in _ARRAY:
            return self.array(self.length(_ARRAY[first]), depth)
        if first in _MAP:
            return self.map(self.length(_MAP[first]), depth)
        if first in _CONSTANTS:
            return _CONSTANTS[first]
        raise RequestError(f"MessagePack: type 0x{first:02x} is not taken")  # extensions, and the unused one

    def array(self, count: int, depth: int) -> list[Any]:
        return [self.value(depth + 1) for _ in range(count)]

    def map(self, count: int, depth: int) -> dict[str, Any]:
        found = {}
        for _ in range(count):
            key = self.value(depth + 1)
            if not isinstance(key, str):
                if not isinstance(key, memoryview):
                    raise RequestError(f"MessagePack: expected text as key, got {type(key).__name__}")
                key = self.decoded(key)
            if key in found:
                raise RequestError(f"MessagePack: expected each key once, got {key[:40]!r} twice")
            found[key] = self.value(depth + 1)
        return found

    def text(self, length: int) -> str:
        return self.decoded(self.take(length))

    def length(self, size: int) -> int:
        return int.from_bytes(self.take(size), "big") if size > 1 else self.take(1)[0]

    def take(self, size: int) -> memoryview:
        start, self.at = self.at, self.at + size
        if self.at > self.end:
            raise RequestError(f"MessagePack: the message ends inside the value at byte {start}")
        return self.buffer[start : self.at]

    def decoded(self, data: memoryview) -> str:
        self.texts += len(data)
        if len(data) > MAX_TEXT:
            raise RequestError(f"MessagePack: expected at most {MAX_TEXT} bytes of text, got {len(data)}")
        if self.texts > MAX_TEXTS:
            raise RequestError(f"MessagePack: expected at most {MAX_TEXTS} bytes of text in all, got more")
        try:
            return str(data, "utf-8")
        except UnicodeDecodeError as error:
            raise RequestError(f"MessagePack: text that is not UTF-8: {error.reason}") from error
