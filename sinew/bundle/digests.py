"""SHA-256 of files, with a cache: hashing gigabytes takes seconds.

A file is not read again if its size, inode and times are unchanged, as in git's index.
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
MAX_MEMO = 1 << 24  # bytes of a memo
RACY_NS = 2_000_000_000  # a file changed this shortly before it was read may change again within one tick of its clock


def sha256(path: Path, size: int, advance: Callable[[str], object] = lambda _: None) -> str:
    """Return the SHA-256 of a regular file of ``size`` bytes in hexadecimal digits. advance: called after each block.

    Raises OSError.
    """
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(min(BLOCK, size) or 1))
    with open_regular(path) as file:
        while got := file.readinto(buffer):  # type: ignore[attr-defined]
            digest.update(buffer[:got])
            advance("")
    return digest.hexdigest()


class DigestCache:
    """Digests of one folder's files from earlier looks. A memo that does not read is an empty one.

    home: the folder where memos are kept. read: computes the digest of a file of so many bytes.
    """

    def __init__(self, root: Path, home: Path, read: Callable[[Path, int], str] = sha256):
        self._read = read
        named = hashlib.sha256(str(root.resolve()).encode()).hexdigest()[:32]
        self.path = home / f"{named}.json"
        try:
            record = read_json(self.path, MAX_MEMO)
            self.known = msgspec.convert(record, dict[str, tuple[tuple[int, ...], str]])
        except (OSError, ValueError, OverflowError):  # msgspec's are ValueErrors
            self.known = {}
        self.before = dict(self.known)

    def digest(self, path: Path) -> str:
        """Return the SHA-256 of a regular file, which is read unless it was read before. Raises OSError."""
        where, found = str(path.resolve()), path.stat()
        seen = (found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino, found.st_dev)
        known = self.known.get(where)
        if known is not None and tuple(known[0]) == seen:
            return known[1]
        started = time.time_ns()
        digest = self._read(path, found.st_size)
        self.known.pop(where, None)
        if started - max(found.st_mtime_ns, found.st_ctime_ns) > RACY_NS:
            self.known[where] = (seen, digest)
        return digest

    def keep(self) -> None:
        """Write the memo; where that fails the next look reads the files again."""
        if self.known != self.before:
            with contextlib.suppress(OSError):
                machine.write_whole(self.path, msgspec.json.encode(self.known))
