"""Readers for numpy arrays and torch tensors inside a pickle. Every argument is checked.

The data are not copied: each array is a view of the message, with exactly the bytes that its shape and dtype
need. A torch storage inside a pickle has its own file format (the format before torch's zip files, which
``pickle.dumps`` of a tensor writes). The same machine reads it, and allows only the names of storage types.
torch is not imported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from sinew.serve.wires.lerobot.pickle.machine import (
    BuiltObject,
    LongText,
    Machine,
    PickledName,
    SafePickleError,
)

MAX_DIMENSIONS = 8
_DTYPES = frozenset({"b1", "u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f2", "f4", "f8"})
_TORCH_MAGIC = 0x1950A86A20F9469CFC6C
_TORCH_PROTOCOL = 1001
_STORAGES = {
    "FloatStorage": "<f4",
    "DoubleStorage": "<f8",
    "HalfStorage": "<f2",
    "ByteStorage": "u1",
    "CharStorage": "i1",
    "ShortStorage": "<i2",
    "IntStorage": "<i4",
    "LongStorage": "<i8",
    "BoolStorage": "b1",
}


class _Dtype(BuiltObject):
    """A numpy dtype in a pickle: the call ``numpy.dtype(code, False, True)`` creates it, and BUILD sets its state. Only
    types of numbers and booleans are allowed.
    """

    def __init__(self, code: str):
        self._code = code
        self._order = "="

    def build(self, state: Any) -> None:
        # The state is (version, byte order, three parts of structured and sub-array dtypes,
        # size, alignment, flags).
        if (
            type(state) is not tuple
            or len(state) != 8
            or type(state[1]) is not str
            or state[1] not in _ORDERS
        ):
            raise SafePickleError(
                "pickle: the state of a numpy.dtype does not have the form that numpy writes"
            )
        if (state[0], *state[2:]) != (3, None, None, None, -1, -1, 0):
            raise SafePickleError(
                "pickle: numpy.dtype with fields, sub-arrays or flags is not allowed; send plain arrays"
            )
        self._order = state[1]

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(self._order + self._code)

    def finish(self, plain: Callable[[Any], Any]) -> Any:
        raise SafePickleError("pickle: expected data, got numpy.dtype")


class _Array(BuiltObject):
    """A numpy array in a pickle. The call ``_reconstruct(ndarray, (0,), b"b")`` creates it, and the opcode BUILD sets
    its state.
    """

    def __init__(self) -> None:
        self._array: np.ndarray | None = None

    def build(self, state: Any) -> None:
        if type(state) is not tuple or len(state) != 5 or state[0] != 1:
            raise SafePickleError("pickle: the state of a numpy.ndarray does not have five parts")
        _version, shape, dtype, fortran, data = state
        self._array = _array(data, dtype, shape, "F" if fortran is True else "C")

    def finish(self, plain: Callable[[Any], Any]) -> Any:
        if self._array is None:
            raise SafePickleError(
                "pickle: a numpy.ndarray has no state, so its shape and its numbers are missing"
            )
        return self._array


class _Storage:
    """A torch storage: a sequence of numbers."""

    name = "torch storage"

    def __init__(self, numbers: np.ndarray):
        self.numbers = numbers


def _dtype(_machine: Machine, code: Any, _align: Any = False, _copy: Any = True) -> _Dtype:
    if type(code) is not str or code not in _DTYPES:
        what = ascii(code) if type(code) is str else f"of a {type(code).__name__}"
        raise SafePickleError(f"pickle: numpy.dtype {what} is not allowed; send numbers or booleans")
    return _Dtype(code)


def _reconstruct(_machine: Machine, kind: Any, shape: Any, code: Any) -> _Array:
    empty = type(shape) is tuple and len(shape) == 1 and type(shape[0]) is int and shape[0] == 0
    if kind is not _NDARRAY or not empty or not (isinstance(code, memoryview) and bytes(code[:2]) == b"b"):
        raise SafePickleError("pickle: numpy _reconstruct is allowed only for an empty ndarray")
    return _Array()


def _from_buffer(
    _machine: Machine, data: Any, dtype: Any, shape: Any, order: Any, axes: Any = None
) -> np.ndarray:
    if type(order) is not str or order not in ("C", "F") or axes is not None:
        raise SafePickleError("pickle: expected a numpy array in order C or F")
    return _array(data, dtype, shape, order)


def _scalar(_machine: Machine, dtype: Any, data: Any) -> Any:
    return _array(data, dtype, (), "C")[()]


def _array(data: Any, dtype: Any, shape: Any, order: Any) -> np.ndarray:
    if not isinstance(dtype, _Dtype) or not isinstance(data, memoryview):
        raise SafePickleError(
            "pickle: expected a numpy array of bytes and a dtype; object arrays are not allowed"
        )
    sizes = _sizes("numpy shape", shape)
    item = dtype.dtype
    expected = item.itemsize
    for size in sizes:
        expected *= size
    if expected != len(data):
        raise SafePickleError(
            f"pickle: expected {expected} bytes for a numpy array of shape {list(sizes)}, got {len(data)}"
        )
    return np.frombuffer(data, item).reshape(sizes, order=order)


def _sizes(what: str, sizes: Any) -> tuple[int, ...]:
    if type(sizes) is not tuple or len(sizes) > MAX_DIMENSIONS:
        raise SafePickleError(f"pickle: {what}: expected at most {MAX_DIMENSIONS} numbers")
    for size in sizes:
        if type(size) is not int or not 0 <= size < 1 << 32:
            raise SafePickleError(f"pickle: {what}: expected numbers from 0 to 4294967295")
    return sizes


def _encode(_machine: Machine, text: Any, encoding: Any) -> memoryview:
    """Compute ``_codecs.encode(text, "latin1")``. Pickle protocol 2 writes bytes as such a call."""
    if type(encoding) is not str or encoding != "latin1" or not isinstance(text, (str, LongText)):
        raise SafePickleError("pickle: expected _codecs.encode of text as latin1")
    return memoryview(text.encode("latin1")) if isinstance(text, str) else text.latin1()


def _no_bytes(_machine: Machine) -> memoryview:
    return memoryview(b"")


def _ordered_dict(_machine: Machine) -> dict[str, Any]:
    return {}


def _load_from_bytes(outer: Machine, data: Any) -> _Storage:
    """Read one torch storage: five pickles, then for each storage the count of its numbers and the numbers."""
    if not isinstance(data, memoryview):
        raise SafePickleError("pickle: expected bytes as the content of a torch storage")
    at = 0

    def pickle(persistent: Callable[[Any], Any] | None = None) -> Any:
        nonlocal at
        machine = Machine(data, _STORAGE_NAMES, outer.opcodes, persistent, at)
        value = machine.run()
        at = machine.at
        return value

    for expected in (_TORCH_MAGIC, _TORCH_PROTOCOL):
        magic = pickle()
        if type(magic) is not int or magic != expected:
            raise SafePickleError("pickle: expected a torch storage in the format of pickle.dumps")
    system = pickle()
    if type(system) is not dict or system.get("little_endian") is not True:
        raise SafePickleError("pickle: expected a torch storage of a little-endian machine")
    storage = pickle(lambda identity: identity)
    keys = pickle()
    kind, key, count = _identity(storage)
    if type(keys) is not list or len(keys) != 1 or type(keys[0]) is not str or keys[0] != key:
        raise SafePickleError("pickle: a torch storage has another key than its tensor names")
    numbers = np.frombuffer(data[at + 8 :], np.dtype(_STORAGES[kind.name]))
    written = int.from_bytes(data[at : at + 8], "little")
    if not written == count == len(numbers):
        raise SafePickleError(
            f"pickle: expected {count} numbers in a torch storage ({written} in its file), got {len(numbers)}"
        )
    return _Storage(numbers)


def _identity(storage: Any) -> tuple[PickledName, str, int]:
    """Read ("storage", class, key, device, count of the numbers, None). Return the class, the key and the count."""
    if (
        type(storage) is tuple
        and len(storage) in (5, 6)
        and type(storage[0]) is str
        and storage[0] == "storage"
    ):
        kind, key, _device, count = storage[1:5]
        # If the last part is not None, the storage is a view of another storage.
        whole = len(storage) == 5 or storage[5] is None
        if isinstance(kind, PickledName) and type(key) is str and type(count) is int and whole:
            return kind, key, count
    raise SafePickleError("pickle: a persistent id does not describe a torch storage; send plain tensors")


def _rebuild_tensor(
    _machine: Machine,
    storage: Any,
    offset: Any,
    size: Any,
    stride: Any,
    _requires_grad: Any,
    _hooks: Any,
    _metadata: Any = None,
) -> np.ndarray:
    if not isinstance(storage, _Storage):
        raise SafePickleError("pickle: a torch tensor has no storage")
    sizes, strides = _sizes("torch size", size), _sizes("torch stride", stride)
    (first,) = _sizes("torch offset", (offset,))
    if len(sizes) != len(strides):
        raise SafePickleError(
            "pickle: the number of strides of a torch tensor differs from the number of its sizes"
        )
    total, last = 1, first
    for length, step in zip(sizes, strides, strict=True):
        total *= length
        last += (length - 1) * step
    numbers = storage.numbers
    if total == 0:
        return numbers[:0].reshape(sizes)
    if last >= len(numbers) or total > len(numbers):
        raise SafePickleError(
            f"pickle: a torch tensor of shape {list(sizes)} ends after the end of its storage"
        )
    steps = tuple(step * numbers.itemsize for step in strides)
    view: np.ndarray = np.lib.stride_tricks.as_strided(numbers[first:], sizes, steps, writeable=False)
    return view


_ORDERS = frozenset({"<", ">", "=", "|"})
_NDARRAY = PickledName("numpy.ndarray")
_STORAGE_NAMES = {("torch", name): PickledName(name) for name in _STORAGES}

ARRAY_NAMES = {
    ("numpy", "ndarray"): _NDARRAY,
    ("numpy", "dtype"): PickledName("numpy.dtype", _dtype),
    ("numpy._core.multiarray", "_reconstruct"): PickledName("_reconstruct", _reconstruct),
    ("numpy.core.multiarray", "_reconstruct"): PickledName("_reconstruct", _reconstruct),
    ("numpy._core.multiarray", "scalar"): PickledName("scalar", _scalar),
    ("numpy.core.multiarray", "scalar"): PickledName("scalar", _scalar),
    ("numpy._core.numeric", "_frombuffer"): PickledName("_frombuffer", _from_buffer),
    ("numpy.core.numeric", "_frombuffer"): PickledName("_frombuffer", _from_buffer),
    ("torch._utils", "_rebuild_tensor_v2"): PickledName("_rebuild_tensor_v2", _rebuild_tensor),
    ("torch.storage", "_load_from_bytes"): PickledName("_load_from_bytes", _load_from_bytes),
    ("collections", "OrderedDict"): PickledName("OrderedDict", _ordered_dict),
    ("_codecs", "encode"): PickledName("_codecs.encode", _encode),
    ("__builtin__", "bytes"): PickledName("bytes", _no_bytes),  # protocol 2 writes b"" as a call of bytes()
}
