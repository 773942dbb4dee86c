"""Opening files that strangers may have prepared: regular ones only."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def open_regular(path: Path | str) -> BinaryIO:
    """Open a regular file for reading, unbuffered; links to one are followed.

    Raises OSError for anything else: a FIFO would wait for a writer, and a device has no end.
    """
    number = os.open(path, os.O_RDONLY | _flags("O_CLOEXEC", "O_NONBLOCK", "O_BINARY"))
    try:
        mode = os.fstat(number).st_mode
        if not stat.S_ISREG(mode):
            kind = next((name for is_kind, name in _KINDS if is_kind(mode)), "something else")
            raise OSError(errno.EINVAL, f"expected a regular file, got {kind}", str(path))
        return open(number, "rb", buffering=0)
    except BaseException:
        os.close(number)
        raise


def _flags(*names: str) -> int:
    """Flags of ``os.open`` by name, as far as this system has them."""
    return sum(getattr(os, name, 0) for name in names)
