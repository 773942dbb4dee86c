"""Safe readers for zip archives and ``.npz`` files. Each entry is read on request.

The directory of an archive states the sizes of its entries. The reader compares these sizes with limits before it
allocates memory, because a file of 2 MB can unpack to gigabytes. The reader writes no files.
"""

from __future__ import annotations

import os
import re
import struct
import zlib
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np

from sinew_client.untrusted.arrays import parse_npy
from sinew_client.untrusted.files import open_regular
from sinew_client.untrusted.words import UntrustedError, named, reason

MAX_ARRAYS = 128  # largest number of arrays in a file; 16 observation steps of 6 cameras have 96 arrays
MAX_ENTRIES = 1 << 12
MAX_UNPACKED = 256 << 20  # largest total size of all unpacked entries of a file, bytes
# The directory of an archive has at most this many bytes. The directory of 64 arrays is much smaller.
MAX_DIRECTORY = 1 << 18
STEP = 1 << 18  # number of bytes that are unpacked in one step
DENSEST = 1032  # the compression method deflate unpacks one byte to at most this many bytes
# Allow only these compression methods. LZMA and bzip2 allocate as much memory as the file states.
STORED, DEFLATED = 0, 8
_ENCRYPTED = 1  # this bit of an entry's flags means that the entry is encrypted

# Reading a damaged archive can raise any of these exceptions. RuntimeError is raised for an encrypted entry, and its
# subclass NotImplementedError for a zip version that Python does not support.
_NOT_READ = (
    *(OSError, ValueError, KeyError, TypeError, EOFError, RuntimeError, OverflowError, MemoryError),
    *(zlib.error, struct.error),
)


class Archive:
    """A zip archive. The constructor checks all its entries. Use it in a ``with`` block.

    Args:
        path: A regular file.
        max_entries: Largest number of entries.
        max_unpacked: Largest total size of all unpacked entries, bytes.
        max_directory: Largest size of the archive's directory, bytes.
        methods: The allowed compression methods.
        paths: True if the names of the entries must be relative paths inside the archive.

    Raises:
        OSError: The file cannot be read.
        UntrustedError: The file is not a valid zip archive, or exceeds a limit.
    """

    def __init__(
        self,
        path: Path | str,
        *,
        max_entries: int = MAX_ENTRIES,
        max_unpacked: int = MAX_UNPACKED,
        max_directory: int = MAX_DIRECTORY,
        methods: tuple[int, ...] = (STORED, DEFLATED),
        paths: bool = True,
    ):
        import zipfile  # imported here, because a control loop does not need this module

        self._failures = (*_NOT_READ, zipfile.BadZipFile)
        self._file = open_regular(path)
        try:
            stepwise: Any = _Stepwise(self._file, max(max_directory, STEP))
            self._zip = zipfile.ZipFile(stepwise)
            self._infos = self._checked(max_entries, max_unpacked, methods, paths)
        except UntrustedError:
            self._file.close()
            raise
        except self._failures as error:
            self._file.close()
            raise _none(error) from error
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Archive:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._zip.close()
        self._file.close()

    def __contains__(self, name: str) -> bool:
        return name in self._infos

    @property
    def names(self) -> list[str]:
        """The names of the entries, in the order of the file, without folders."""
        return list(self._infos)

    def size(self, name: str) -> int:
        """Return the unpacked size of an entry, bytes."""
        return int(self._infos[name].file_size)

    def read(self, name: str) -> memoryview:
        """Read an entry.

        Args:
            name: Name of the entry.

        Returns:
            The unpacked bytes.

        Raises:
            UntrustedError: The archive has no such entry, or the entry is damaged.
        """
        if name not in self._infos:
            raise UntrustedError("an entry with this name", "no such entry", named(name))
        info = self._infos[name]
        try:
            data = memoryview(bytearray(info.file_size))
            member: Any
            with self._zip.open(info) as member:
                at = 0
                while at < len(data):
                    count = member.readinto(data[at : at + STEP])
                    if not count:
                        raise UntrustedError(f"{len(data)} bytes", str(at), named(name))
                    at += count
            return data
        except UntrustedError:
            raise
        except self._failures as error:
            raise _none(error) from error

    def _checked(
        self, max_entries: int, max_unpacked: int, methods: tuple[int, ...], paths: bool
    ) -> dict[str, Any]:
        """Check the sizes, names and methods of all entries. Return the entries by name.

        Raises:
            UntrustedError: An entry exceeds a limit, or is not allowed.
        """
        infos = [info for info in self._zip.infolist() if not info.filename.endswith("/")]
        if len(infos) > max_entries:
            raise UntrustedError(f"at most {max_entries} entries", str(len(infos)))
        entries: dict[str, Any] = {}
        for info in infos:
            name = info.filename
            where = named(name)
            if name in entries:
                raise UntrustedError("each entry once", "this entry twice", where)
            if paths and not _is_inside(name):
                raise UntrustedError("a relative path inside the archive", "another path", where)
            if info.flag_bits & _ENCRYPTED:
                raise UntrustedError("an entry without a password", "an encrypted entry", where)
            if info.compress_type not in methods:
                words = " or ".join(
                    {STORED: "stored", DEFLATED: "deflated"}.get(each, str(each)) for each in methods
                )
                raise UntrustedError(f"an entry that is {words}", f"method {info.compress_type}", where)
            most = DENSEST * info.compress_size + STEP
            if info.file_size > most:
                packed = f"at most {most} unpacked bytes from {info.compress_size} packed bytes"
                raise UntrustedError(packed, str(info.file_size), where)
            entries[name] = info
        size = os.fstat(self._file.fileno()).st_size
        if sum(info.compress_size for info in infos) > size:
            raise UntrustedError(f"packed entries of at most {size} bytes", "more")
        total = sum(info.file_size for info in infos)
        if total > max_unpacked:
            raise UntrustedError(f"at most {max_unpacked} unpacked bytes", str(total))
        return entries


def open_archive(path: Path | str, **bounds: Any) -> Archive:
    """Open a zip archive. The limits and the errors are those of :class:`Archive`."""
    return Archive(path, **bounds)


class Npz:
    """An ``.npz`` file, whose arrays are read on request. Use it in a ``with`` block.

    Args:
        path: A regular file. Entries other than ``.npy`` are ignored.
        max_arrays: Largest number of entries.
        max_unpacked: Largest total size of all unpacked entries, bytes.

    Raises:
        OSError: The file cannot be read.
        UntrustedError: The file is not a valid zip archive, or exceeds a limit.
    """

    def __init__(self, path: Path | str, *, max_arrays: int = MAX_ARRAYS, max_unpacked: int = MAX_UNPACKED):
        # Allow any name, because the names of arrays are only keys of a dict. No files with these names are written.
        self._archive = Archive(path, max_entries=max_arrays, max_unpacked=max_unpacked, paths=False)

    def __enter__(self) -> Npz:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._archive.__exit__(kind, error, trace)

    def __contains__(self, name: str) -> bool:
        return f"{name}.npy" in self._archive

    @property
    def names(self) -> list[str]:
        """The names of the arrays, in the order of the file."""
        return [name[: -len(".npy")] for name in self._archive.names if name.endswith(".npy")]

    def read(self, name: str) -> np.ndarray:
        """Read one array.

        Args:
            name: Name of the array.

        Returns:
            A read-only array of numbers, booleans or text.

        Raises:
            UntrustedError: The file has no such array, or the array is damaged.
        """
        if name not in self:
            raise UntrustedError("an array with this name", "no such array", named(name))
        try:
            return parse_npy(self._archive.read(f"{name}.npy").toreadonly())
        except UntrustedError as error:
            raise UntrustedError(error.expected, error.got, named(name)) from None


def open_npz(path: Path | str, **bounds: int) -> Npz:
    """Open an ``.npz`` file. The limits and the errors are those of :class:`Npz`."""
    return Npz(path, **bounds)


def read_npz(path: Path | str, **bounds: int) -> dict[str, np.ndarray]:
    """Read all arrays of an ``.npz`` file by name. The limits and the errors are those of :class:`Npz`."""
    with Npz(path, **bounds) as arrays:
        return {name: arrays.read(name) for name in arrays.names}


def _is_inside(name: str) -> bool:
    outside = name.startswith("/") or "\\" in name or "\0" in name or re.match(r"[A-Za-z]:", name)
    return not outside and ".." not in name.split("/")


def _none(error: BaseException) -> UntrustedError:
    got = f"a file that is not a zip archive ({type(error).__name__}: {reason(error)})"
    return UntrustedError("a zip archive", got)


class _Stepwise:
    """A file with a limit for each read, so that a false size in the archive's directory cannot exhaust the memory."""

    def __init__(self, file: BinaryIO, most: int):
        self._file, self._most = file, most
        self.seek, self.tell = file.seek, file.tell
        self._size = file.seek(0, 2)
        file.seek(0)

    def seekable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        remaining = max(self._size - self._file.tell(), 0)
        size = remaining if size is None or size < 0 else min(size, remaining)
        if size > self._most:
            raise UntrustedError(f"a directory of at most {self._most} bytes", str(size))
        return self._file.read(size)
