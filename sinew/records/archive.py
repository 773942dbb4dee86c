"""Arrays of a recorded ``.npz`` file, which may come from elsewhere.

What its directory says of sizes is compared with bounds before memory is taken, and what an array's header says with
the bytes that are there (:mod:`sinew.records.npy`): a file of 2 MB can say that it unpacks to gigabytes.
"""

from __future__ import annotations

import os
import struct
import zipfile
import zlib
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
from sinew_client.given import open_regular

from sinew.core import ObservationError, SinewError
from sinew.records.npy import load_npy

MAX_ARRAYS = 128  # of one file: sixteen moments of six cameras, and what stands beside them
MAX_BYTES = 256 << 20  # of all arrays of one file
STEP = 1 << 18  # bytes that are read or unpacked at once; the directory of 64 arrays is far smaller
DENSEST = 1032  # bytes that deflate makes of one, at most
METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # LZMA takes as much memory as the file says

# RuntimeError: encrypted; NotImplementedError, one of its kinds: versions of zip that Python does not read.
NOT_READ = (
    *(OSError, ValueError, KeyError, TypeError, EOFError, RuntimeError, OverflowError, MemoryError),
    *(zipfile.BadZipFile, zlib.error, struct.error),
)


class Archive:
    """The arrays of a file by name, each read when it is asked for.

    Raises :class:`SinewError` for a file that is none, or whose arrays are too many or too large.
    """

    def __init__(self, path: Path):
        self.path = path
        with SinewError.at(path, OSError):
            self._file = open_regular(path)
        try:
            stepwise: Any = _Stepwise(self._file)
            self._zip = zipfile.ZipFile(stepwise)
            self._size = os.fstat(self._file.fileno()).st_size
            self._infos = self._checked()
        except NOT_READ as error:
            self._file.close()
            raise self._no(error) from error
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
        """Return the names of the arrays, in the order of the file."""
        return list(self._infos)

    def read(self, name: str) -> np.ndarray:
        """Return one array of numbers, truth values or text. Raises :class:`SinewError`."""
        if name not in self._infos:
            raise SinewError(f"{self.path}: not a record ({name}: expected an array, got nothing)")
        info = self._infos[name]
        try:
            data = memoryview(bytearray(info.file_size))
            member: Any
            with self._zip.open(info) as member:
                at = 0
                while at < len(data):
                    got = member.readinto(data[at : at + STEP])
                    if not got:
                        raise EOFError(f"{name} ends after {at} of {len(data)} bytes")
                    at += got
            return load_npy(name, data)
        except ObservationError as error:
            raise SinewError(f"{self.path}: not a record ({error!s:.300})") from None
        except NOT_READ as error:
            raise self._no(error) from error

    def _checked(self) -> dict[str, zipfile.ZipInfo]:
        """Return the entries by the names of their arrays, all of which may be read. Raises ValueError."""
        infos = [info for info in self._zip.infolist() if info.filename.endswith(".npy")]
        if len(infos) > MAX_ARRAYS:
            raise ValueError(f"expected at most {MAX_ARRAYS} arrays, got {len(infos)}")
        found: dict[str, zipfile.ZipInfo] = {}
        for info in infos:
            name = info.filename.removesuffix(".npy")
            if name in found:
                raise ValueError(f"{name!r:.80}: expected once, got twice")
            if info.compress_type not in METHODS:
                raise ValueError(
                    f"{name!r:.80}: expected stored or deflated, got method {info.compress_type}"
                )
            if info.file_size > DENSEST * info.compress_size + STEP:
                raise ValueError(f"{name!r:.80}: {info.compress_size} bytes cannot become {info.file_size}")
            found[name] = info
        if sum(info.compress_size for info in infos) > self._size:
            raise ValueError(f"expected arrays of at most {self._size} bytes as they are packed")
        total = sum(info.file_size for info in infos)
        if total > MAX_BYTES:
            raise ValueError(f"expected at most {MAX_BYTES} bytes of arrays, got {total}")
        return found

    def _no(self, error: BaseException) -> SinewError:
        kind = "" if type(error) is ValueError else f"{type(error).__name__}: "
        return SinewError(f"{self.path}: not a record ({kind}{error!s:.200})")


class _Stepwise:
    """A file of which little is read at once, so that the directory's size is no matter of what the file says."""

    def __init__(self, file: BinaryIO):
        self._file = file
        self.seek, self.tell = file.seek, file.tell
        self._size = file.seek(0, 2)
        file.seek(0)

    def seekable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        left = max(self._size - self._file.tell(), 0)
        size = left if size is None or size < 0 else min(size, left)
        if size > STEP:
            raise zipfile.BadZipFile(f"expected a directory of at most {STEP} bytes, got {size}")
        return self._file.read(size)
