"""Read GGUF v3 files with a bounded parser over a memory map.

The ``gguf`` package writes Sinew's files and supplies the type tables. Its reader trusts the counts in the header, so a
file of 100 bytes can make it allocate terabytes. A robot loads untrusted files, so this parser checks every count
against the bytes of the file before it allocates memory. Every error is a :class:`~sinew.core.BundleError` that names
the key or the tensor.

Layout (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md): magic, version, tensor count,
key-value count; the pairs; the tensor infos; padding; tensor data at aligned offsets. Little-endian.
"""

from __future__ import annotations

import mmap
import os
import struct
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType
from sinew_client.untrusted import open_regular

from sinew.core import BundleError

MAGIC = b"GGUF"
VERSION = 3
DEFAULT_ALIGNMENT = 32
MAX_KEY_VALUES = 1 << 16
MAX_TENSORS = 1 << 20
MAX_NAME_BYTES = 1 << 16  # the GGUF format allows keys of at most this many bytes
MAX_STRING_BYTES = 1 << 28  # the largest strings are tokenizers, with tens of megabytes
MAX_DIMS = 4

_SCALARS = {
    GGUFValueType.UINT8: "<u1",
    GGUFValueType.INT8: "<i1",
    GGUFValueType.UINT16: "<u2",
    GGUFValueType.INT16: "<i2",
    GGUFValueType.UINT32: "<u4",
    GGUFValueType.INT32: "<i4",
    GGUFValueType.FLOAT32: "<f4",
    GGUFValueType.BOOL: "<u1",
    GGUFValueType.UINT64: "<u8",
    GGUFValueType.INT64: "<i8",
    GGUFValueType.FLOAT64: "<f8",
}
_DTYPES = {kind: np.dtype(code) for kind, code in _SCALARS.items()}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor in the file.

    Attributes:
        name: Name of the tensor.
        shape: Shape in row-major (torch) order.
        type: Storage type.
        offset: First byte, from the start of the file.
        nbytes: Size in bytes.
    """

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    offset: int
    nbytes: int


class InUse:
    """Detects changes of a file while its memory map is in use.

    The open file is checked, not the file's name. You may rename, delete or replace the file by renaming another file:
    the mapped bytes stay the same. Writing into the file changes the mapped bytes. Truncating the file makes the next
    read end the process (SIGBUS).
    """

    def __init__(self, path: Path | str, file: BinaryIO):
        self.path = Path(path)
        self._number = os.dup(file.fileno())
        weakref.finalize(self, os.close, self._number)
        status = os.fstat(self._number)
        self._opened = status.st_size, status.st_mtime_ns

    def problem(self) -> str | None:
        """Return an error message if the file was written to or truncated since it was opened; else None.

        This takes one system call (fstat).
        """
        status = os.fstat(self._number)
        size, changed = status.st_size, status.st_mtime_ns
        if size < self._opened[0]:
            what = f"was truncated from {self._opened[0]} to {size} bytes"
        elif size > self._opened[0]:
            what = f"grew from {self._opened[0]} to {size} bytes"
        elif changed != self._opened[1]:
            what = "was written to"
        else:
            return None
        return (
            f"{self.path} {what} while its weights are in use. Start this program again. Next time, write a new file"
            " and rename it over the old file"
        )


def watch(path: Path) -> InUse:
    """Open a file and return an object that detects every change of the file after this call."""
    with open_regular(path) as file:
        return InUse(path, file)


class FilesInUse:
    """Detects changes of the files whose weights are mapped into memory."""

    def __init__(self, files: Iterable[InUse]):
        self._files = tuple(files)

    def problem(self) -> str | None:
        """Return an error message if one of the files was written to or truncated since it was opened; else None."""
        for file in self._files:
            if problem := file.problem():
                return problem
        return None

    def check(self) -> None:
        """Raise :class:`BundleError` if one of the files was written to or truncated since it was opened."""
        if problem := self.problem():
            raise BundleError(problem)


class GGUFFile:
    """A validated, memory-mapped GGUF file.

    The map is private copy-on-write. Tensors over the map need no copy, and writing to such a tensor never changes the
    file.

    Attributes:
        metadata: The key-value pairs: numbers, strings, numpy arrays and lists of strings.
        places: Key of each string value -> byte position in the file where its text begins.
        tensors: Name -> :class:`TensorInfo`.
        header_bytes: Size of the file's part before the tensors.
        in_use: Detects whether the file was changed since it was opened.
    """

    def __init__(self, path: Path):
        self.path = Path(path)
        try:
            with open_regular(self.path) as file:
                self.in_use = InUse(self.path, file)
                self.map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        # mmap raises ValueError for an empty file.
        except ValueError:
            raise BundleError(f"{self.path}: the file is empty; copy or convert it again") from None
        except OSError as error:
            raise BundleError(f"{self.path}: {error.strerror or error}") from None
        self._parse()

    def _parse(self) -> None:
        cursor = _Cursor(self.map, self.path)
        if cursor.take(4, "magic") != MAGIC:
            raise BundleError(
                f"{self.path}: not a GGUF file (it does not start with 'GGUF'); pass a bundle, or convert a checkpoint"
                " with `sinew convert`"
            )
        version = cursor.scalar(GGUFValueType.UINT32, "version")
        if version != VERSION:
            raise BundleError(
                f"{self.path}: GGUF version {version} is not supported (only {VERSION}); write the file again with"
                " current tools"
            )
        tensor_count = cursor.count(MAX_TENSORS, "tensor count")
        pair_count = cursor.count(MAX_KEY_VALUES, "key-value count")

        self.metadata: dict[str, Any] = {}
        self.places: dict[str, int] = {}
        for _ in range(pair_count):
            key = cursor.string("a key", MAX_NAME_BYTES)
            if key in self.metadata:
                cursor.fail(f"key {key!r} occurs twice")
            self.metadata[key] = cursor.value(key)
            if isinstance(self.metadata[key], str):
                self.places[key] = cursor.position - len(self.metadata[key].encode())

        alignment = self.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or not 8 <= alignment <= 1 << 16 or alignment & (alignment - 1):
            cursor.fail(f"general.alignment is {alignment!r}, expected a power of two between 8 and 65536")
        infos = [cursor.tensor_info() for _ in range(tensor_count)]
        self.header_bytes = cursor.position
        data_start = -(-cursor.position // alignment) * alignment
        self.tensors = self._place(infos, data_start, alignment)

    def _place(self, infos: list[TensorInfo], start: int, alignment: int) -> dict[str, TensorInfo]:
        """Check the offsets of the tensors, and convert them from the start of the data to the start of the file."""
        placed: dict[str, TensorInfo] = {}
        end = start
        for info in sorted(infos, key=lambda info: (info.offset, info.nbytes)):
            offset = start + info.offset
            if info.name in placed:
                raise BundleError(f"{self.path}: tensor {info.name!r} occurs twice; the file is damaged")
            if info.offset % alignment:
                raise BundleError(
                    f"{self.path}: tensor {info.name!r} is not aligned to {alignment} bytes; the file is damaged"
                )
            if offset < end:
                raise BundleError(
                    f"{self.path}: tensor {info.name!r} overlaps another tensor; the file is damaged"
                )
            end = offset + info.nbytes
            if end > len(self.map):
                raise BundleError(
                    f"{self.path}: tensor {info.name!r} needs bytes up to {end}, the file has {len(self.map)}"
                    " (is it truncated?); copy or download it again"
                )
            placed[info.name] = TensorInfo(info.name, info.shape, info.type, offset, info.nbytes)
        return placed


class _Cursor:
    """Reads the values of the header one after the other. Every read is checked against the remaining bytes of the
    file."""

    def __init__(self, buffer: mmap.mmap, path: Path):
        self.view = memoryview(buffer)
        self.path = path
        self.position = 0

    def fail(self, message: str) -> NoReturn:
        raise BundleError(f"{self.path}: {message}; copy or download the file again")

    def take(self, size: int, what: str) -> bytes:
        if size > len(self.view) - self.position:
            self.fail(
                f"{what} needs {size} bytes at offset {self.position}, the file ends at {len(self.view)}"
                " (is it truncated?)"
            )
        start, self.position = self.position, self.position + size
        return bytes(self.view[start : self.position])

    def scalar(self, kind: GGUFValueType, what: str) -> Any:
        dtype = _DTYPES[kind]
        number = np.frombuffer(self.take(dtype.itemsize, what), dtype)[0].item()
        return bool(number) if kind is GGUFValueType.BOOL else number

    def count(self, limit: int, what: str) -> int:
        number = struct.unpack("<Q", self.take(8, what))[0]
        if number > limit:
            self.fail(f"{what} is {number}, more than the limit of {limit}")
        return number

    def string(self, what: str, limit: int = MAX_STRING_BYTES) -> str:
        raw = self.take(self.count(limit, f"length of {what}"), what)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            self.fail(f"{what} is not UTF-8")

    def kind(self, what: str) -> GGUFValueType:
        number = self.scalar(GGUFValueType.UINT32, f"type of {what}")
        try:
            return GGUFValueType(number)
        except ValueError:
            self.fail(f"{what} has the unknown value type {number}")

    def value(self, key: str) -> Any:
        kind = self.kind(key)
        if kind is GGUFValueType.STRING:
            return self.string(key)
        if kind is not GGUFValueType.ARRAY:
            return self.scalar(kind, key)
        item = self.kind(f"items of {key}")
        if item is GGUFValueType.ARRAY:
            self.fail(f"{key} is an array of arrays, which no model file needs")
        remaining = len(self.view) - self.position
        # A string needs at least the 8 bytes of its length, so the size of the file limits the count of every type.
        size = 8 if item is GGUFValueType.STRING else _DTYPES[item].itemsize
        count = self.count(remaining // size, f"length of {key}")
        if item is GGUFValueType.STRING:
            return [self.string(f"{key}[{index}]") for index in range(count)]
        array = np.frombuffer(self.take(count * size, key), _DTYPES[item])
        return array.astype(bool) if item is GGUFValueType.BOOL else array

    def tensor_info(self) -> TensorInfo:
        name = self.string("a tensor name", MAX_NAME_BYTES)
        dims = self.scalar(GGUFValueType.UINT32, f"dimensions of tensor {name!r}")
        if dims > MAX_DIMS:
            self.fail(f"tensor {name!r} has {dims} dimensions, at most {MAX_DIMS} are allowed")
        # GGUF lists the fastest-varying dimension first. torch lists that dimension last.
        shape = struct.unpack(f"<{dims}Q", self.take(8 * dims, f"shape of tensor {name!r}"))[::-1]
        number = self.scalar(GGUFValueType.UINT32, f"type of tensor {name!r}")
        try:
            kind = GGMLQuantizationType(number)
        except ValueError:
            self.fail(f"tensor {name!r} has the unknown type {number}")
        offset = struct.unpack("<Q", self.take(8, f"offset of tensor {name!r}"))[0]
        block, block_bytes = GGML_QUANT_SIZES[kind]
        elements = 1
        for size in shape:
            elements *= size  # Python integers cannot overflow
        if shape and shape[-1] % block:
            self.fail(
                f"tensor {name!r}: rows of {shape[-1]} do not divide into {kind.name} blocks of {block}"
            )
        return TensorInfo(name, shape, kind, offset, elements // block * block_bytes)
