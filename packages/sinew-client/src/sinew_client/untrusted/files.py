"""Open and read regular files of a limited size. A FIFO could block the reader forever, and a device has no end."""

from __future__ import annotations

import errno
import io
import os
import stat
from pathlib import Path

from sinew_client.untrusted.words import UntrustedError

MAX_BYTES = 1 << 18  # largest file that people write by hand, such as settings and limits, bytes
BLOCK = 1 << 24  # number of bytes that one call of `read` requests
_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def open_regular(path: Path | str) -> io.BufferedReader:
    """Open a regular file to read bytes. Links to regular files are allowed.

    Args:
        path: The file.

    Returns:
        The open file.

    Raises:
        OSError: The file does not exist, or is not a regular file.
    """
    number = _descriptor(path, os.O_RDONLY)
    return open(number, "rb")


def open_lock(path: Path | str) -> io.FileIO:
    """Open a regular file to lock it. Create the file if it does not exist.

    Args:
        path: The file.

    Returns:
        The open file.

    Raises:
        OSError: The file cannot be created, or is not a regular file.
    """
    number = _descriptor(path, os.O_RDWR | os.O_CREAT)
    return open(number, "r+b", buffering=0)


def _descriptor(path: Path | str, flags: int) -> int:
    for name in ("O_CLOEXEC", "O_NONBLOCK", "O_BINARY"):  # some systems do not have all three flags
        flags |= getattr(os, name, 0)
    try:
        number = os.open(path, flags, 0o666)
    except ValueError as error:  # the path contains a NUL character or a lone surrogate
        raise OSError(errno.EINVAL, str(error), str(path)) from None
    try:
        mode = os.fstat(number).st_mode
        if not stat.S_ISREG(mode):
            kind = next((name for is_kind, name in _KINDS if is_kind(mode)), "something else")
            raise OSError(errno.EINVAL, f"expected a regular file, got {kind}", str(path))
    except BaseException:
        os.close(number)
        raise
    return number


def read_bytes(path: Path | str, max_bytes: int = MAX_BYTES) -> bytes:
    """Read a regular file.

    Args:
        path: The file.
        max_bytes: Largest size of the file.

    Returns:
        The content.

    Raises:
        OSError: The file cannot be read.
        UntrustedError: The file is larger than ``max_bytes``.
    """
    with open_regular(path) as file:
        pieces, remaining = [], max_bytes + 1
        if os.fstat(file.fileno()).st_size > max_bytes:
            remaining = 0
        # Read until the end and do not rely on the stated size. It is 0 for files in /proc, and a file may grow.
        while remaining:
            piece = file.read(min(remaining, BLOCK))
            if not piece:
                break
            pieces.append(piece)
            remaining -= len(piece)
    if not remaining:
        raise UntrustedError(f"at most {max_bytes} bytes", "more")
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def read_text(path: Path | str, max_bytes: int = MAX_BYTES) -> str:
    """Read a text file in UTF-8.

    Args:
        path: A regular file.
        max_bytes: Largest size of the file.

    Returns:
        The text.

    Raises:
        OSError: The file cannot be read.
        UntrustedError: The file is larger than ``max_bytes``, or is not UTF-8.
    """
    return decode(read_bytes(path, max_bytes))


def decode(data: bytes | bytearray | memoryview) -> str:
    """Decode UTF-8 bytes to text.

    Raises:
        UntrustedError: The bytes are not UTF-8.
    """
    try:
        return str(data, "utf-8")
    except UnicodeDecodeError as error:
        raise UntrustedError("UTF-8 text", f"{error.reason} at byte {error.start}") from None
