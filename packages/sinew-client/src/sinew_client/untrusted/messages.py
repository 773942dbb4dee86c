"""A safe reader for MessagePack. Binary values are views of the message, without a copy.

The common libraries limit only the size of each list or map. A message of nested lists can still create millions of
objects that need gigabytes of memory. This reader counts every value, so ``max_values`` limits its time and memory.
Format: https://github.com/msgpack/msgpack/blob/master/spec.md.
"""

from __future__ import annotations

import struct
from typing import Any

from sinew_client.untrusted.words import UntrustedError

MAX_DEPTH = 12  # largest depth of lists and maps inside lists and maps
MAX_VALUES = 1 << 14  # largest number of values in a message; lists, maps and keys count as values too
MAX_TEXT = 1 << 18  # longest text, bytes
# All texts of a message together have at most this many bytes. Python may need four bytes of memory for each of them.
MAX_TEXTS = 1 << 22

# Key: the first byte of a value. Value: the number's format (for the module struct) and its size in bytes.
_NUMBERS = {
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
# Key: the first byte of a binary value. Value: the size in bytes of the length that follows this byte.
_BINARY = {0xC4: 1, 0xC5: 2, 0xC6: 4}
_TEXT = {0xD9: 1, 0xDA: 2, 0xDB: 4}
_ARRAY = {0xDC: 2, 0xDD: 4}
_MAP = {0xDE: 2, 0xDF: 4}


def unpack_msgpack(
    data: bytes | bytearray | memoryview,
    *,
    max_values: int = MAX_VALUES,
    max_depth: int = MAX_DEPTH,
    max_text: int = MAX_TEXT,
    max_texts: int = MAX_TEXTS,
) -> Any:
    """Decode a MessagePack message.

    Args:
        data: The message. The caller must limit its length.
        max_values: Largest number of values; lists, maps and keys count as values too.
        max_depth: Largest depth of lists and maps inside lists and maps.
        max_text: Longest text, bytes.
        max_texts: Largest total size of all texts, bytes.

    Returns:
        The value. Binary values are read-only views of the message. Keys of maps are text.

    Raises:
        UntrustedError: The message is not valid, or exceeds a limit. Extension types, keys other than text, and bytes
            after the value are not valid.

    Example:
        >>> unpack_msgpack(bytes([0x81, 0xA1, 0x61, 0x01]))
        {'a': 1}
    """
    reader = _Reader(memoryview(data).toreadonly(), max_values, max_depth, max_text, max_texts)
    value = reader.value(0)
    if reader.at != len(reader.buffer):
        raise UntrustedError("one message", f"{len(reader.buffer) - reader.at} bytes after its end")
    return value


class _Reader:
    def __init__(self, buffer: memoryview, max_values: int, max_depth: int, max_text: int, max_texts: int):
        self.buffer = buffer
        self.at, self.end = 0, len(buffer)
        # ``values`` counts down: it is the number of further values that are allowed.
        self.max_values = self.values = max_values
        self.max_depth, self.max_text, self.max_texts = max_depth, max_text, max_texts
        self.texts = 0  # total size of all texts that were read, bytes

    def value(self, depth: int) -> Any:
        self.values -= 1
        if self.values < 0:
            raise UntrustedError(f"at most {self.max_values} values", "more")
        if depth > self.max_depth:
            raise UntrustedError(f"at most {self.max_depth} levels of containers", "more")
        if self.at >= self.end:
            raise UntrustedError("a whole message", f"one that ends inside the value at byte {self.at}")
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
        # The value is an extension type, or begins with 0xc1, which MessagePack does not use.
        raise UntrustedError("a plain MessagePack type", f"type 0x{first:02x}")

    def array(self, count: int, depth: int) -> list[Any]:
        return [self.value(depth + 1) for _ in range(count)]

    def map(self, count: int, depth: int) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for _ in range(count):
            key = self.value(depth + 1)
            if not isinstance(key, str):
                if not isinstance(key, memoryview):
                    raise UntrustedError("a text as key", type(key).__name__)
                key = self.decoded(key)
            if key in values:
                raise UntrustedError("each key once", f"{key[:40]!r} twice")
            values[key] = self.value(depth + 1)
        return values

    def text(self, length: int) -> str:
        return self.decoded(self.take(length))

    def length(self, size: int) -> int:
        return int.from_bytes(self.take(size), "big") if size > 1 else self.take(1)[0]

    def take(self, size: int) -> memoryview:
        start, self.at = self.at, self.at + size
        if self.at > self.end:
            raise UntrustedError("a whole message", f"one that ends inside the value at byte {start}")
        return self.buffer[start : self.at]

    def decoded(self, data: memoryview) -> str:
        self.texts += len(data)
        if len(data) > self.max_text:
            raise UntrustedError(f"at most {self.max_text} bytes of text", str(len(data)))
        if self.texts > self.max_texts:
            raise UntrustedError(f"at most {self.max_texts} bytes of text in all", "more")
        try:
            return str(data, "utf-8")
        except UnicodeDecodeError as error:
            raise UntrustedError("UTF-8 text", error.reason) from None
