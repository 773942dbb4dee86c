"""Regular files of a bounded size. A FIFO would block the reader for ever, and a device has no end."""

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
    """Open a regular file to read bytes. Links to regular files are followed.

    Raises:
        OSError: the file is missing, or is not a regular file.
    """
    number = _descriptor(path, os.O_RDONLY)
    return open(number, "rb")


def open_lock(path: Path | str) -> io.FileIO:
    """Open a regular file to lock it. Create the file if it is missing.

    Raises:
        OSError: the file cannot be created, or is not a regular file.
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
    """Return the content of a regular file.

    Raises:
        OSError: the file cannot be read.
        UntrustedError: it has more than ``max_bytes`` bytes.
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
    """Return the text of a file in UTF-8.

    Raises:
        OSError: the file cannot be read.
        UntrustedError: it has more than ``max_bytes`` bytes, or is not UTF-8.
    """
    return decode(read_bytes(path, max_bytes))


def decode(data: bytes | bytearray | memoryview) -> str:
    """Return bytes as text.

    Raises:
        UntrustedError: they are not UTF-8.
    """
    try:
        return str(data, "utf-8")
    except UnicodeDecodeError as error:
        raise UntrustedError("UTF-8 text", f"{error.reason} at byte {error.start}") from None
