"""Safe readers for arrays: the ``.npy`` format of numpy, and raw bytes with a stated type and shape.

``numpy.load`` parses the header as a Python expression, and allocates as much memory as the header states. This reader
compares the header with the form that numpy writes, and checks the size first. It does not copy the data. The module
``numpy.lib.format`` describes the format.
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
    """Read an ``.npy`` file.

    Args:
        path: A regular file.
        max_bytes: Largest size of the file.

    Returns:
        The array, read-only.

    Raises:
        OSError: The file cannot be read.
        UntrustedError: The file is not an array of numbers, booleans or text, or it is too large.
    """
    return parse_npy(memoryview(read_bytes(path, max_bytes)))


def parse_npy(data: memoryview) -> np.ndarray:
    """Parse the bytes of an ``.npy`` file.

    Args:
        data: The content of the file.

    Returns:
        The array, a read-only view of ``data``.

    Raises:
        UntrustedError: The bytes are not an array of numbers, booleans or text.
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
    """Interpret bytes as an array of numbers, booleans or text, without a copy.

    Args:
        data: The bytes of all elements.
        dtype: Type of the elements as numpy writes it, such as "<f4".
        shape: Shape of the array.
        order: "C" or "F" (Fortran).

    Returns:
        The array, read-only.

    Raises:
        UntrustedError: The type is not allowed, or the number of bytes does not fit type and shape.

    Example:
        >>> raw_array(memoryview(bytes(8)), "<f4", [2])
        array([0., 0.], dtype=float32)
    """
    if not (_NUMBER.fullmatch(dtype) or _TEXT.fullmatch(dtype)):
        raise UntrustedError("a dtype of numbers, booleans or text", repr(dtype[:20]))
    if len(shape) > MAX_DIMENSIONS:
        raise UntrustedError(f"at most {MAX_DIMENSIONS} dimensions", str(len(shape)))
    item = np.dtype(dtype)
    extent = expected = item.itemsize
    for side in shape:
        extent, expected = extent * max(1, side), expected * side
    # Count an axis of length 0 as 1, as numpy does: numpy also rejects huge shapes of arrays without elements.
    if extent > MAX_EXTENT:
        raise UntrustedError("a shape of at most 1 TiB", f"{list(shape)}"[:200])
    if expected != len(data) or item.itemsize == 0:
        text = " x ".join(map(str, shape)) or "1"
        raise UntrustedError(f"{expected} bytes ({text} {item})", f"{len(data)}")
    flat = np.frombuffer(data, item) if len(data) else np.empty(0, item)
    # Check the code points, because numpy accepts any numbers as text, and code that reads such text may crash.
    if item.kind == "U" and flat.size:
        points = flat.view(f"{item.byteorder}u4")
        if points.max() > 0x10FFFF or ((points >= 0xD800) & (points < 0xE000)).any():
            raise UntrustedError("Unicode text", "numbers that are not Unicode characters")
    return flat.reshape(shape, order="F" if order == "F" else "C")
