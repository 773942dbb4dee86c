"""Compute the SHA-256 of files. A cache stores the results, because hashing gigabytes takes seconds.

As in git's index, a file is not read again if its size, inode and times are unchanged.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
from sinew_client.untrusted import open_regular, read_json

from sinew.core import machine

BLOCK = 1 << 22
MAX_MEMO = 1 << 24  # largest size of the cache file, in bytes
# A file that changed less than this time before Sinew read it may change again without a new time stamp, because clocks
# of file systems are coarse. Such a digest is not cached.
RACY_NS = 2_000_000_000


def sha256(path: Path, size: int, advance: Callable[[str], object] = lambda _: None) -> str:
    """Return the SHA-256 of a regular file in hexadecimal digits.

    Args:
        path: The file.
        size: Size of the file in bytes.
        advance: Called after each block, for a progress bar.

    Raises:
        OSError: The file cannot be read.
    """
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(min(BLOCK, size) or 1))
    with open_regular(path) as file:
        while got := file.readinto(buffer):  # type: ignore[attr-defined]
            digest.update(buffer[:got])
            advance("")
    return digest.hexdigest()


class DigestCache:
    """A cache of the digests of one folder's files. If the cache file cannot be read, the cache is empty.

    Args:
        root: The folder whose files are hashed.
        home: The folder with the cache files.
        read: Computes the digest of a file from its path and size.
    """

    def __init__(self, root: Path, home: Path, read: Callable[[Path, int], str] = sha256):
        self._read = read
        named = hashlib.sha256(str(root.resolve()).encode()).hexdigest()[:32]
        self.path = home / f"{named}.json"
        try:
            record = read_json(self.path, MAX_MEMO)
            self.entries = msgspec.convert(record, dict[str, tuple[tuple[int, ...], str]])
        # msgspec's errors are ValueErrors.
        except (OSError, ValueError, OverflowError):
            self.entries = {}
        self.before = dict(self.entries)

    def digest(self, path: Path) -> str:
        """Return the SHA-256 of a regular file. A file with a valid entry in the cache is not read.

        Raises:
            OSError: The file cannot be read.
        """
        where, status = str(path.resolve()), path.stat()
        identity = (status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_dev)
        entry = self.entries.get(where)
        if entry is not None and tuple(entry[0]) == identity:
            return entry[1]
        started = time.time_ns()
        digest = self._read(path, status.st_size)
        self.entries.pop(where, None)
        if started - max(status.st_mtime_ns, status.st_ctime_ns) > RACY_NS:
            self.entries[where] = (identity, digest)
        return digest

    def keep(self) -> None:
        """Write the cache file. If writing fails, the files are read again next time."""
        if self.entries != self.before:
            with contextlib.suppress(OSError):
                machine.write_whole(self.path, msgspec.json.encode(self.entries))
