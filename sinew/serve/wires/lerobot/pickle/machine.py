"""Reads pickles of untrusted clients without executing code. The module supports the part of the format that plain
data needs.

A pickle is a program for a stack machine. This module has its own machine and does not use Python's ``pickle``.
It supports the opcodes that protocols 2 to 5 use for numbers, text, bytes and containers. A name such as
``numpy.ndarray`` is looked up in a table of the caller and never imported. Its entry is a function of Sinew that
checks its arguments. All other content is rejected: names outside the table, the extension registry, persistent
ids, out-of-band buffers, and the text opcodes of protocols 0 and 1.

Bytes are views of the message and never copies. So the result is not larger than the message, apart from a
limited cost per opcode. At the end, the depth and the size of the result are counted along every reference. So a
result with cycles, or with containers that repeat too often, is rejected.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np

from sinew.core import RequestError

MAX_OPCODES = 20_000  # largest number of opcodes; an observation of 14 joints and 4 cameras has about 200
MAX_TEXT = 1 << 16  # longest text, bytes
MAX_SHORT_TEXT = 256  # longest text that is decoded at once, bytes; keys and names are shorter
MAX_NAME = 128  # longest name of a module, and longest name in a module, characters
MAX_DEPTH = 8  # largest number of nested containers in the result
MAX_NODES = 20_000  # largest number of values in the result; each reference to a value counts
MAX_INTEGER = 16  # bytes
_PROTOCOLS = range(2, 6)


class SafePickleError(RequestError):
    """The bytes are not a pickle, or the pickle contains more than plain data."""


class PickledName:
    """Defines how the reader treats an allowed global name of a pickle, such as ``numpy.ndarray``.

    Attributes:
        name: The name, for errors.
        call: Function for REDUCE. Its arguments are the machine and the arguments in the pickle.
        new: Function for NEWOBJ, without arguments. If both functions are None, the name can only be an
            argument.
    """

    __slots__ = ("call", "name", "new")

    def __init__(
        self, name: str, call: Callable[..., Any] | None = None, new: Callable[[], BuiltObject] | None = None
    ):
        self.name, self.call, self.new = name, call, new


class BuiltObject:
    """An object that is not complete until the pickle's opcode BUILD sets its state, such as a numpy array or an
    instance of a dataclass.
    """

    def build(self, state: Any) -> None:
        """Set the state of the object, from the argument of the opcode BUILD.

        Raises:
            SafePickleError: The state is not allowed.
        """
        raise NotImplementedError

    def finish(self, plain: Callable[[Any], Any]) -> Any:
        """Return the value after the whole pickle has been read. ``plain`` converts the values inside the object."""
        raise NotImplementedError


class LongText(BuiltObject):
    """Text that is decoded only when it is needed, and only once. Protocol 2 has no bytes and writes them as text."""

    def __init__(self, data: memoryview):
        self._data = data
        self._latin1: memoryview | None = None
        self._text: str | None = None

    def latin1(self) -> memoryview:
        """Return the bytes that protocol 2 has encoded as this text."""
        if self._latin1 is None:
            # In UTF-8, a byte above 0xC3 starts a character outside latin1. Reject such text before it is decoded,
            # because it would become four times as large.
            if np.frombuffer(self._data, np.uint8).max() > 0xC3:
                raise SafePickleError("pickle: expected latin1 in _codecs.encode")
            self._latin1 = memoryview(str(self._data, "utf-8").encode("latin1"))
        return self._latin1

    def build(self, state: Any) -> None:
        raise SafePickleError("pickle: BUILD is not allowed for text")

    def finish(self, plain: Callable[[Any], Any]) -> str:
        if self._text is None:
            if len(self._data) > MAX_TEXT:
                raise SafePickleError(
                    f"pickle: expected text of at most {MAX_TEXT} bytes, got {len(self._data)}"
                )
            self._text = str(self._data, "utf-8")
        return self._text


Names = Mapping[tuple[str, str], PickledName]


def load(data: bytes, names: Names) -> Any:
    """Read the value of a pickle.

    Args:
        data: The pickle.
        names: The allowed global names.

    Returns:
        A value of None, bool, int, float, str, list, tuple and dict, of read-only memoryviews in place of bytes,
        and of the objects that ``names`` create.

    Raises:
        SafePickleError: The pickle is not valid or not allowed. No other error is raised.
    """
    if data[:1] != b"\x80":
        raise SafePickleError(
            f"pickle: expected protocol 2 to 5, got bytes that begin with {data[:4].hex()!r}"
        )
    machine = Machine(memoryview(data).toreadonly(), names, [MAX_OPCODES])
    try:
        value = machine.run()
        if machine.at != len(data):
            raise SafePickleError(
                f"pickle: expected no bytes after the end of the pickle, got {len(data) - machine.at}"
            )
        return plain(value)
    except (
        TypeError,
        ValueError,
        OverflowError,
    ) as error:
        # The text is not UTF-8, or a function got wrong arguments.
        reason = str(error)[:200]
        raise SafePickleError(f"pickle: invalid content before byte {machine.at} ({reason})") from error


def plain(value: Any) -> Any:
    """Replace every :class:`BuiltObject` in a value by the finished object.

    Raises:
        SafePickleError: The value is too large or nested too deeply.
    """
    left = MAX_NODES

    def walk(node: Any, depth: int) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise SafePickleError(f"pickle: expected at most {MAX_NODES} values")
        if depth > MAX_DEPTH:
            raise SafePickleError(f"pickle: expected at most {MAX_DEPTH} levels of containers")
        if isinstance(node, dict):
            return {key: walk(item, depth + 1) for key, item in node.items()}
        if isinstance(node, (list, tuple)):
            return type(node)([walk(item, depth + 1) for item in node])
        if isinstance(node, BuiltObject):
            return node.finish(lambda inner: walk(inner, depth + 1))
        if node is None or isinstance(node, _PLAIN):
            return node
        raise SafePickleError(f"pickle: expected data, got {getattr(node, 'name', type(node).__name__)}")

    return walk(value, 0)


class Machine:
    """Runs one pickle.

    Args:
        data: The bytes that contain the pickle.
        names: The allowed global names.
        opcodes: List with one number: how many opcodes may still run. Pickles inside this pickle share the list.
        persistent: Converts a persistent id; None rejects persistent ids.
        at: Position at which the pickle begins.

    Attributes:
        at: After ``run``, the position at which the pickle has ended.
        opcodes: The argument.
    """

    def __init__(
        self,
        data: memoryview,
        names: Names,
        opcodes: list[int],
        persistent: Callable[[Any], Any] | None = None,
        at: int = 0,
    ):
        self.at = at
        self._data = data
        self._names = names
        self.opcodes = opcodes
        self._persistent = persistent
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}

    def run(self) -> Any:
        start = self.at
        if self._u1() != 0x80 or self._u1() not in _PROTOCOLS:
            raise SafePickleError(f"pickle: expected protocol 2 to 5 at byte {start}")
        while True:
            at, code = self.at, self._u1()
            self.opcodes[0] -= 1
            if self.opcodes[0] < 0:
                raise SafePickleError(f"pickle: expected at most {MAX_OPCODES} opcodes")
            if code == _STOP:
                if len(self._stack) != 1 or self._marks:
                    raise SafePickleError("pickle: expected exactly one value at the end of the pickle")
                return self._stack[0]
            operation = self._operations.get(code)
            if operation is None:
                raise SafePickleError(f"pickle: opcode {code:#04x} at byte {at} is not allowed")
            operation(self)

    def _take(self, count: int) -> memoryview:
        end = self.at + count
        if end > len(self._data):
            raise SafePickleError(
                f"pickle: expected {count} more bytes at byte {self.at}, but it ends at byte {len(self._data)}"
            )
        taken, self.at = self._data[self.at : end], end
        return taken

    def _u1(self) -> int:
        return self._take(1)[0]

    def _integer(self, count: int, signed: bool = False) -> int:
        return int.from_bytes(self._take(count), "little", signed=signed)

    def _line(self) -> str:
        newline = bytes(self._data[self.at : self.at + MAX_NAME + 1]).find(b"\n")
        if newline < 0:
            raise SafePickleError(f"pickle: expected a name of at most {MAX_NAME} bytes at byte {self.at}")
        text = bytes(self._take(newline + 1)[:-1])
        return text.decode("ascii", "backslashreplace")

    def _push(self, value: Any) -> None:
        self._stack.append(value)

    def _pop(self) -> Any:
        if len(self._stack) <= (self._marks[-1] if self._marks else 0):
            raise SafePickleError(f"pickle: the stack is empty at byte {self.at}")
        return self._stack.pop()

    def _pop_mark(self) -> list[Any]:
        if not self._marks:
            raise SafePickleError(f"pickle: the stack has no mark at byte {self.at}")
        mark = self._marks.pop()
        items = self._stack[mark:]
        del self._stack[mark:]
        return items

    def _top(self, kind: type) -> Any:
        value = self._pop()
        if type(value) is not kind:
            raise SafePickleError(f"pickle: expected a {kind.__name__} before byte {self.at}")
        self._push(value)
        return value

    def _frame(self) -> None:
        length = self._integer(8)
        if length > len(self._data) - self.at:
            raise SafePickleError(
                f"pickle: a frame of {length} bytes at byte {self.at} ends after the end of the pickle"
            )

    def _text(self, length: int) -> None:
        data = self._take(length)
        self._push(LongText(data) if length > MAX_SHORT_TEXT else str(data, "utf-8"))

    def _long(self) -> None:
        length = self._u1()
        if length > MAX_INTEGER:
            raise SafePickleError(f"pickle: expected integers of at most {MAX_INTEGER} bytes, got {length}")
        self._push(self._integer(length, signed=True))

    def _tuple(self, count: int) -> None:
        items = [self._pop() for _ in range(count)]
        self._push(tuple(reversed(items)))

    def _append(self) -> None:
        value = self._pop()
        self._top(list).append(value)

    def _appends(self) -> None:
        items = self._pop_mark()
        self._top(list).extend(items)

    def _set_items(self, items: list[Any]) -> None:
        target = self._top(dict)
        if len(items) % 2:
            raise SafePickleError(f"pickle: a dictionary has a key without a value before byte {self.at}")
        for key, value in zip(items[::2], items[1::2], strict=True):
            # Accept only text as keys. Other keys could be slow to hash, or be chosen to have equal hashes,
            # as integers can.
            if type(key) is not str:
                most = f"text of at most {MAX_SHORT_TEXT} bytes"
                raise SafePickleError(f"pickle: expected {most} as keys, got {type(key).__name__}")
            target[key] = value

    def _set_item(self) -> None:
        value, key = self._pop(), self._pop()
        self._set_items([key, value])

    def _put(self, index: int) -> None:
        value = self._pop()
        self._push(value)
        self._memo[index] = value

    def _get(self, index: int) -> None:
        if index not in self._memo:
            raise SafePickleError(f"pickle: the memo has no entry {index}, before byte {self.at}")
        self._push(self._memo[index])

    def _global(self, module: Any, name: Any) -> None:
        if type(module) is not str or type(name) is not str or len(module) + len(name) > 2 * MAX_NAME:
            raise SafePickleError(f"pickle: expected a module and a name as short text before byte {self.at}")
        entry = self._names.get((module, name))
        if entry is None:
            raise SafePickleError(
                f"pickle: the global {ascii(module)[1:-1]}.{ascii(name)[1:-1]} is not allowed"
            )
        self._push(entry)

    def _stack_global(self) -> None:
        name, module = self._pop(), self._pop()
        self._global(module, name)

    def _reduce(self) -> None:
        arguments, function = self._pop(), self._pop()
        if not isinstance(function, PickledName) or function.call is None or type(arguments) is not tuple:
            raise SafePickleError(
                f"pickle: REDUCE of an object that may not be called, before byte {self.at}"
            )
        self._push(function.call(self, *arguments))

    def _new_object(self) -> None:
        arguments, kind = self._pop(), self._pop()
        if not isinstance(kind, PickledName) or kind.new is None or type(arguments) is not tuple or arguments:
            raise SafePickleError(f"pickle: NEWOBJ of an unknown class, before byte {self.at}")
        self._push(kind.new())

    def _build(self) -> None:
        state, target = self._pop(), self._pop()
        if not isinstance(target, BuiltObject):
            raise SafePickleError(f"pickle: BUILD of an object without a state, before byte {self.at}")
        target.build(state)
        self._push(target)

    def _persistent_id(self) -> None:
        if self._persistent is None:
            raise SafePickleError(f"pickle: a persistent id at byte {self.at} is not allowed")
        self._push(self._persistent(self._pop()))

    _operations: ClassVar[dict[int, Callable[[Machine], None]]] = {
        ord("N"): lambda self: self._push(None),
        0x88: lambda self: self._push(True),
        0x89: lambda self: self._push(False),
        ord("K"): lambda self: self._push(self._integer(1)),
        ord("M"): lambda self: self._push(self._integer(2)),
        ord("J"): lambda self: self._push(self._integer(4, signed=True)),
        0x8A: _long,
        ord("G"): lambda self: self._push(struct.unpack(">d", self._take(8))[0]),
        0x8C: lambda self: self._text(self._integer(1)),
        ord("X"): lambda self: self._text(self._integer(4)),
        0x8D: lambda self: self._text(self._integer(8)),
        ord("C"): lambda self: self._push(self._take(self._integer(1))),
        ord("B"): lambda self: self._push(self._take(self._integer(4))),
        0x8E: lambda self: self._push(self._take(self._integer(8))),
        0x96: lambda self: self._push(self._take(self._integer(8))),  # BYTEARRAY8, which is read like bytes
        ord("}"): lambda self: self._push({}),
        ord("]"): lambda self: self._push([]),
        ord(")"): lambda self: self._push(()),
        ord("("): lambda self: self._marks.append(len(self._stack)),
        0x85: lambda self: self._tuple(1),
        0x86: lambda self: self._tuple(2),
        0x87: lambda self: self._tuple(3),
        ord("t"): lambda self: self._push(tuple(self._pop_mark())),
        ord("a"): _append,
        ord("e"): _appends,
        ord("s"): _set_item,
        ord("u"): lambda self: self._set_items(self._pop_mark()),
        ord("q"): lambda self: self._put(self._integer(1)),
        ord("r"): lambda self: self._put(self._integer(4)),
        0x94: lambda self: self._put(len(self._memo)),
        ord("h"): lambda self: self._get(self._integer(1)),
        ord("j"): lambda self: self._get(self._integer(4)),
        ord("c"): lambda self: self._global(self._line(), self._line()),
        0x93: _stack_global,
        ord("R"): _reduce,
        0x81: _new_object,
        ord("b"): _build,
        ord("Q"): _persistent_id,
        0x95: _frame,
    }


_STOP = ord(".")
_PLAIN = (bool, int, float, str, memoryview, np.ndarray, np.generic)
