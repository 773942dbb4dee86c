"""Arrays in messages: bytes, a dtype and a shape that somebody else wrote, checked before anything is made of them.

Two encodings share it: msgpack-numpy (openpi's ``{b"__ndarray__": True, b"data", b"dtype", b"shape"}``, vLLM's
``{"nd": True, "type", "kind", "shape", "data"}``) and json_numpy (``{"__numpy__": base64, "dtype", "shape"}``).
"""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Mapping
from typing import Any

import msgpack
import numpy as np

from sinew.core import ObservationError, RequestError

MAX_NDIM = 6
MAX_ITEMS = 1 << 16  # of one list or map in a message; frames are binary, not lists
_DTYPES = {
    np.dtype(name)
    for name in ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64")
}


def array(name: str, data: Any, dtype: Any, shape: Any) -> np.ndarray:
    """A read-only view of ``data``. Raises ObservationError where the three do not agree."""
    if not isinstance(data, (bytes, memoryview)):
        raise ObservationError(name, "bytes of an array", type(data).__name__)
    text = dtype.decode("ascii", "replace") if isinstance(dtype, bytes) else dtype
    try:
        kind = np.dtype(text) if isinstance(text, str) and len(text) <= 16 else None
    except (TypeError, ValueError, SyntaxError):
        kind = None
    if kind is None or kind not in _DTYPES:
        raise ObservationError(name, "a plain number type, little-endian", f"dtype {str(dtype)[:40]!r}")
    if not (
        isinstance(shape, (list, tuple))
        and len(shape) <= MAX_NDIM
        and all(isinstance(n, int) and not isinstance(n, bool) and 0 <= n < 1 << 31 for n in shape)
    ):
        raise ObservationError(name, f"a shape of at most {MAX_NDIM} sizes", str(shape)[:80])
    expected = math.prod(shape) * kind.itemsize
    if expected != len(data):
        raise ObservationError(name, f"{expected} bytes ({list(shape)} x {kind})", f"{len(data)} bytes")
    return np.frombuffer(data, kind).reshape(shape)


# ----------------------------------------------------------------------------- msgpack


def unpack(payload: bytes | memoryview) -> Any:
    """A msgpack message with its arrays decoded. Raises RequestError or ObservationError.

    What is made of a message is bounded by its size: lists and maps are capped, extensions and time stamps refused.
    """
    try:
        return msgpack.unpackb(
            payload,
            object_hook=_from_map,
            strict_map_key=False,
            max_array_len=MAX_ITEMS,
            max_map_len=MAX_ITEMS,
            max_ext_len=0,
        )
    except ObservationError:
        raise
    except Exception as error:  # noqa: BLE001 - msgpack raises many kinds
        raise RequestError(f"not a msgpack message: {str(error)[:200] or type(error).__name__}") from None


def pack(tree: Any) -> bytes:
    """The opposite, in openpi's form: arrays and numpy scalars as maps with binary keys."""
    return msgpack.packb(tree, default=_to_map)


def _from_map(found: dict[Any, Any]) -> Any:
    if len(found) > MAX_NDIM:
        return found
    get = {key.decode("latin1") if isinstance(key, bytes) else key: value for key, value in found.items()}.get
    if get("__ndarray__") is True:
        return array("array", get("data"), get("dtype"), get("shape"))
    if get("__npgeneric__") is True:
        value = get("data")
        if not isinstance(value, (int, float, bool)):
            raise ObservationError("number", "a number", type(value).__name__)
        return value
    if get("nd") is True and get("data") is not None:  # numpy's own msgpack module, as vLLM uses it
        return array("array", get("data"), get("type"), get("shape"))
    return found


def _to_map(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        dense = np.ascontiguousarray(value)
        return {
            b"__ndarray__": True,
            b"data": dense.tobytes(),
            b"dtype": dense.dtype.str,
            b"shape": list(dense.shape),
        }
    if isinstance(value, np.generic):
        return {b"__npgeneric__": True, b"data": value.item(), b"dtype": value.dtype.str}
    raise TypeError(f"{type(value).__name__} does not travel")


# ----------------------------------------------------------------------------- JSON


def from_json_numpy(tree: Any, depth: int = 6) -> Any:
    """Containers of a JSON message with their arrays decoded. Raises ObservationError."""
    if depth == 0:
        raise ObservationError("message", "fewer levels of containers", "more")
    if isinstance(tree, Mapping):
        if "__numpy__" in tree:
            return array(
                "array", from_base64("array", tree["__numpy__"]), tree.get("dtype"), tree.get("shape")
            )
        return {key: from_json_numpy(value, depth - 1) for key, value in tree.items()}
    if isinstance(tree, list) and any(isinstance(value, (dict, list)) for value in tree[:1]):
        return [from_json_numpy(value, depth - 1) for value in tree]
    return tree


def to_json_numpy(value: np.ndarray) -> dict[str, Any]:
    dense = np.ascontiguousarray(value)
    return {
        "__numpy__": base64.b64encode(dense.data).decode(),
        "dtype": dense.dtype.str,
        "shape": list(dense.shape),
    }


def from_base64(name: str, text: Any) -> bytes:
    if not isinstance(text, str):
        raise ObservationError(name, "base64 text", type(text).__name__)
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ObservationError(name, "base64 text", f"something else ({error})") from None
