"""Arrays from untrusted bytes: numpy's ``.npy`` format, and raw elements with a stated type and shape.

``numpy.load`` parses the header as a Python expression and asks the allocator for what the header says; here the
header is matched against the one form that numpy writes, and the size is checked first. Nothing is copied.
Format: numpy's ``numpy.lib.format``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import numpy as np

from sinew.core import ObservationError

MAX_DIMENSIONS = 8
MAX_HEADER = 4096  # bytes; numpy writes 118 for everything that a robot sends
MAX_EXTENT = 1 << 40  # bytes, with empty axes counted as one

_NUMBER = re.compile(r"[<>|=]?(?:b1|[ui][1248]|f[248])")
_TEXT = re.compile(r"[<>=]?U[0-9]{1,7}")
_HEADER = re.compile(
    r"\{\s*'descr':\s*'([^']{1,9})',\s*'fortran_order':\s*(True|False),\s*"
    r"'shape':\s*\(((?:\d{1,19}(?:,\s*|(?=\))))*)\),?\s*\}\s*"
)
_MAGIC = b"\x93NUMPY"


def load_npy(name: str, data: memoryview) -> np.ndarray:
    """The array in the bytes of an ``.npy`` file, as a read-only view of them. Raises ObservationError."""
    version, size = bytes(data[6:7]), 2
    if data[:6] != _MAGIC or version not in (b"\x01", b"\x02", b"\x03"):
        raise ObservationError(name, "a .npy file of version 1, 2 or 3", _start(data))
    if version != b"\x01":
        size = 4
    length = int.from_bytes(data[8 : 8 + size], "little")
    begin = 8 + size
    if length > min(MAX_HEADER, len(data) - begin):
        raise ObservationError(name, f"a .npy header of at most {MAX_HEADER} bytes", f"{length} bytes")
    header = str(data[begin : begin + length], "latin-1")
    found = _HEADER.fullmatch(header)
    if found is None:
        raise ObservationError(name, "a .npy header as numpy writes it", repr(header[:80]))
    shape = [int(each) for each in re.findall(r"\d+", found[3])]
    return raw_array(name, data[begin + length :], found[1], shape, "F" if found[2] == "True" else "C")


def raw_array(name: str, data: memoryview, dtype: str, shape: Sequence[int], order: str = "C") -> np.ndarray:
    """``data`` as an array of numbers, truth values or text; read-only, no copy. Raises ObservationError."""
    if not (_NUMBER.fullmatch(dtype) or _TEXT.fullmatch(dtype)):
        raise ObservationError(name, "numbers, truth values or text as dtype", repr(dtype[:20]))
    if len(shape) > MAX_DIMENSIONS:
        raise ObservationError(name, f"at most {MAX_DIMENSIONS} dimensions", str(len(shape)))
    item = np.dtype(dtype)
    if (
        math.prod(max(1, size) for size in shape) * item.itemsize > MAX_EXTENT
    ):  # numpy's own limit, also of nothing
        raise ObservationError(name, "a shape that can be", f"{list(shape)}"[:200])
    expected = math.prod(shape) * item.itemsize
    if expected != len(data) or item.itemsize == 0:
        raise ObservationError(
            name, f"{expected} bytes ({' x '.join(map(str, shape)) or 1} {item})", f"{len(data)}"
        )
    flat = np.frombuffer(data, item) if len(data) else np.empty(0, item)
    if (
        item.kind == "U" and flat.size
    ):  # numpy makes texts of any numbers, and what reads texts may die of them
        points = flat.view(f"{item.byteorder}u4")
        if points.max() > 0x10FFFF or ((points >= 0xD800) & (points < 0xE000)).any():
            raise ObservationError(name, "Unicode text", "code points that are no characters")
    return flat.reshape(shape, order="F" if order == "F" else "C")


def dump_npy(array: np.ndarray) -> bytes:
    """What ``numpy.save`` writes, for an array of numbers in C order; a tenth of its time."""
    array = np.ascontiguousarray(array)
    shape = f"({', '.join(map(str, array.shape))}{',' if array.ndim == 1 else ''})"
    header = f"{{'descr': '{array.dtype.str}', 'fortran_order': False, 'shape': {shape}, }}"
    padded = header.ljust(-(-(len(header) + 11) // 64) * 64 - 11) + "\n"  # data begins at a multiple of 64
    return b"".join(
        (_MAGIC, b"\x01\x00", len(padded).to_bytes(2, "little"), padded.encode(), array.tobytes())
    )


def _start(data: memoryview) -> str:
    return f"{len(data)} bytes that begin with {bytes(data[:8])!r}"
