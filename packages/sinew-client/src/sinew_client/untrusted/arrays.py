"""Arrays from untrusted bytes: numpy's ``.npy`` format, and raw elements with a stated type and shape.

``numpy.load`` parses the header as a Python expression and allocates as much memory as the header states. Here the
header is matched against the form that numpy writes, and the size is checked first. Nothing is copied. The format is
described in ``numpy.lib.format``.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Sequence

import numpy as np

from sinew_client.untrusted.files import read_bytes
from sinew_client.untrusted.words import UntrustedError

MAX_DIMENSIONS = 8
MAX_HEADER = 4096  # largest header of a .npy file, bytes; numpy writes 118 bytes for usual arrays
MAX_EXTENT = 1 << 40  # largest size of an array in bytes, where an axis of length 0 counts as length 1
MAX_ARRAY = 256 << 20  # largest .npy file, bytes

_NUMBER = re.compile(r"[<>|=]?(?:b1|[ui][1248]|f[248])")
_TEXT = re.compile(r"[<>=]?U[0-9]{1,7}")
_HEADER = re.compile(
    r"\{\s*'descr':\s*'([^']{1,9})',\s*'fortran_order':\s*(True|False),\s*"
    r"'shape':\s*\(((?:\d{1,19}(?:,\s*|(?=\))))*)\),?\s*\}\s*"
)
_MAGIC = b"\x93NUMPY"


def read_npy(path: Path | str, max_bytes: int = MAX_ARRAY) -> np.ndarray:
    """Return the array of an ``.npy`` file, read-only.

    Raises:
        OSError: the file cannot be read.
        UntrustedError: it is not an array of numbers, truth values or text, or is beyond a bound.
    """
    return parse_npy(memoryview(read_bytes(path, max_bytes)))


def parse_npy(data: memoryview) -> np.ndarray:
    """Return the array in the bytes of an ``.npy`` file, as a read-only view of them.

    Raises:
        UntrustedError: they are not an array of numbers, truth values or text.
    """
    version, size = bytes(data[6:7]), 2
    if data[:6] != _MAGIC or version not in (b"\x01", b"\x02", b"\x03"):
        start = f"{len(data)} bytes that begin with {bytes(data[:8])!r}"
        raise UntrustedError("a .npy file of version 1, 2 or 3", start)
    if version != b"\x01":
        size = 4
    length = int.from_bytes(data[8 : 8 + size], "little")
    begin = 8 + size
    if length > min(MAX_HEADER, len(data) - begin):
        raise UntrustedError(f"a .npy header of at most {MAX_HEADER} bytes", f"{length} bytes")
    header = str(data[begin : begin + length], "latin-1")
    match = _HEADER.fullmatch(header)
    if match is None:
        raise UntrustedError("a .npy header as numpy writes it", repr(header[:80]))
    shape = [int(each) for each in re.findall(r"\d+", match[3])]
    return raw_array(data[begin + length :], match[1], shape, "F" if match[2] == "True" else "C")


def raw_array(data: memoryview, dtype: str, shape: Sequence[int], order: str = "C") -> np.ndarray:
    """Return bytes as an array of numbers, truth values or text; read-only, no copy.

    Raises:
        UntrustedError: bytes, type and shape do not agree.
    """
    if not (_NUMBER.fullmatch(dtype) or _TEXT.fullmatch(dtype)):
        raise UntrustedError("numbers, truth values or text as dtype", repr(dtype[:20]))
    if len(shape) > MAX_DIMENSIONS:
        raise UntrustedError(f"at most {MAX_DIMENSIONS} dimensions", str(len(shape)))
    item = np.dtype(dtype)
    extent = expected = item.itemsize
    for side in shape:
        extent, expected = extent * max(1, side), expected * side
    # Count an axis of length 0 as 1, as numpy does: numpy also rejects huge shapes of arrays without elements.
    if extent > MAX_EXTENT:
        raise UntrustedError("a shape that can be", f"{list(shape)}"[:200])
    if expected != len(data) or item.itemsize == 0:
        text = " x ".join(map(str, shape)) or "1"
        raise UntrustedError(f"{expected} bytes ({text} {item})", f"{len(data)}")
    flat = np.frombuffer(data, item) if len(data) else np.empty(0, item)
    # Check the code points, because numpy accepts any numbers as text, and code that reads such text may crash.
    if item.kind == "U" and flat.size:
        points = flat.view(f"{item.byteorder}u4")
        if points.max() > 0x10FFFF or ((points >= 0xD800) & (points < 0xE000)).any():
            raise UntrustedError("Unicode text", "code points that are no characters")
    return flat.reshape(shape, order="F" if order == "F" else "C")
