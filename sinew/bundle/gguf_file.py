"""Reading GGUF v3 files: a bounded parser over a memory map.

The ``gguf`` package writes our files and supplies the type tables, but its reader trusts the counts in
the header (a 100-byte file can ask it for terabytes). A robot loads files from strangers, so here every
count is checked against the bytes that are really there before anything is allocated, and everything
that does not fit is a :class:`~sinew.core.BundleError` that names the key or tensor.

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
MAX_NAME_BYTES = 1 << 16  # the format's own limit for keys
MAX_STRING_BYTES = 1 << 28  # tokenizers reach tens of megabytes
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
    """One tensor in the file. ``shape`` is in row-major (torch) order; ``offset`` from the file's start."""

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    offset: int
    nbytes: int


class InUse:
    """A file that must not change while its memory map is read.

    It is identified by the open file, not by its name. Renaming, deleting, replacing by rename, or touching another
    file with the old name leaves the mapped bytes alone. Writing into it changes the mapped bytes, and truncating it
    makes reading a fault that ends the process.
    """

    def __init__(self, path: Path | str, file: BinaryIO):
        self.path = Path(path)
        self._number = os.dup(file.fileno())
        weakref.finalize(self, os.close, self._number)
        found = os.fstat(self._number)
        self._found = found.st_size, found.st_mtime_ns

    def problem(self) -> str | None:
        """Return a sentence if the file was written to or truncated since it was opened, else None; costs one fstat."""
        found = os.fstat(self._number)
        size, changed = found.st_size, found.st_mtime_ns
        if size < self._found[0]:
            what = f"was truncated from {self._found[0]} to {size} bytes"
        elif size > self._found[0]:
            what = f"grew from {self._found[0]} to {size} bytes"
        elif changed != self._found[1]:
            what = "was written to"
        else:
            return None
        return (
            f"{self.path} {what} while its weights are in use; start again with the file as it is now, and replace"
            " it by renaming another over it"
        )


def watch(path: Path) -> InUse:
    """Return an object that detects changes of a file from now on."""
    with open_regular(path) as file:
        return InUse(path, file)


class FilesInUse:
    """The files whose weights are mapped, which must stay as they are."""

    def __init__(self, files: Iterable[InUse]):
        self._files = tuple(files)

    def problem(self) -> str | None:
        """Return a sentence if one of them was written to or truncated since it was opened, else None."""
        for file in self._files:
            if problem := file.problem():
                return problem
        return None

    def check(self) -> None:
        """Raise :class:`BundleError` if one of them was written to or truncated since it was opened."""
        if problem := self.problem():
            raise BundleError(problem)


class GGUFFile:
    """A validated, memory-mapped GGUF file.

    ``metadata`` holds the key-value pairs (numbers, strings, numpy arrays, lists of strings); ``tensors`` maps
    names to :class:`TensorInfo`, and ``header_bytes`` come before their data. The map is private copy-on-write, so
    tensors built on it are zero-copy and writing to one never reaches the file. ``in_use`` tells whether the file
    was written to since.
    """

    def __init__(self, path: Path):
        self.path = Path(path)
        try:
            with open_regular(self.path) as file:
                self.in_use = InUse(self.path, file)
                self.map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except ValueError:  # mmap of an empty file
            raise BundleError(f"{self.path}: the file is empty") from None
        except OSError as error:
            raise BundleError(f"{self.path}: {error.strerror or error}") from None
        self._parse()

    def _parse(self) -> None:
        cursor = _Cursor(self.map, self.path)
        if cursor.take(4, "magic") != MAGIC:
            raise BundleError(f"{self.path}: not a GGUF file (it does not start with 'GGUF')")
        version = cursor.scalar(GGUFValueType.UINT32, "version")
        if version != VERSION:
            raise BundleError(f"{self.path}: GGUF version {version} is not supported (only {VERSION})")
        tensor_count = cursor.count(MAX_TENSORS, "tensor count")
        pair_count = cursor.count(MAX_KEY_VALUES, "key-value count")

        self.metadata: dict[str, Any] = {}
        self.places: dict[str, int] = {}  # where the text of a string value begins in the file
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
        """Turn offsets relative to the data section into checked offsets from the start of the file."""
        placed: dict[str, TensorInfo] = {}
        end = start
        for info in sorted(infos, key=lambda info: (info.offset, info.nbytes)):
            offset = start + info.offset
            if info.name in placed:
                raise BundleError(f"{self.path}: tensor {info.name!r} occurs twice")
            if info.offset % alignment:
                raise BundleError(f"{self.path}: tensor {info.name!r} is not aligned to {alignment} bytes")
            if offset < end:
                raise BundleError(f"{self.path}: tensor {info.name!r} overlaps another tensor")
            end = offset + info.nbytes
            if end > len(self.map):
                raise BundleError(
                    f"{self.path}: tensor {info.name!r} needs bytes up to {end}, the file has {len(self.map)}"
                    " (is it truncated?)"
                )
            placed[info.name] = TensorInfo(info.name, info.shape, info.type, offset, info.nbytes)
        return placed


class _Cursor:
    """Reads forward through the header; every read is checked against what is left of the file."""

    def __init__(self, buffer: mmap.mmap, path: Path):
        self.view = memoryview(buffer)
        self.path = path
        self.position = 0

    def fail(self, message: str) -> NoReturn:
        raise BundleError(f"{self.path}: {message}")

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
        left = len(self.view) - self.position
        # A string takes at least its 8-byte length, so the count is bounded by the file in every case.
        size = 8 if item is GGUFValueType.STRING else _DTYPES[item].itemsize
        count = self.count(left // size, f"length of {key}")
        if item is GGUFValueType.STRING:
            return [self.string(f"{key}[{index}]") for index in range(count)]
        array = np.frombuffer(self.take(count * size, key), _DTYPES[item])
        return array.astype(bool) if item is GGUFValueType.BOOL else array

    def tensor_info(self) -> TensorInfo:
        name = self.string("a tensor name", MAX_NAME_BYTES)
        dims = self.scalar(GGUFValueType.UINT32, f"dimensions of tensor {name!r}")
        if dims > MAX_DIMS:
            self.fail(f"tensor {name!r} has {dims} dimensions, at most {MAX_DIMS} are allowed")
        # GGUF lists the fastest-moving dimension first; torch lists it last.
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
            elements *= size  # Python integers: no overflow to hide behind
        if shape and shape[-1] % block:
            self.fail(
                f"tensor {name!r}: rows of {shape[-1]} do not divide into {kind.name} blocks of {block}"
            )
        return TensorInfo(name, shape, kind, offset, elements // block * block_bytes)
