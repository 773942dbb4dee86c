"""Write a bundle in one pass with constant memory.

The header comes from the ``gguf`` package. Tensor bytes are copied from the source file to their aligned place
without becoming arrays. Source files are hashed during the copy, so the manifest's hashes are known only at the end.
The header is therefore written twice, the second time over the first. It has the same length, because a SHA-256 has a
fixed length. The hashes of the tensors and of the header itself are written in the same way.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

import numpy as np
from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter
from sinew_client.untrusted import open_regular

from sinew.bundle.reader import BLANK, Bundle, header_hash
from sinew.bundle.schema import ALIGNMENT, KEY_HEADER, KEY_TENSORS, Manifest
from sinew.core import BundleError, scratch

MAX_TENSOR_NAME = 63  # ggml keeps names in 64 bytes with a terminator
COPY_BLOCK = 1 << 20  # stays in the cache between the read and the write

Progress = Callable[[int], None]  # called with the number of bytes just written


@dataclass(frozen=True)
class FileSlice:
    """Bytes of a tensor in a source file, in the layout of the bundle."""

    path: Path
    offset: int
    nbytes: int

    def blocks(self) -> Iterable[memoryview]:
        buffer = memoryview(bytearray(min(COPY_BLOCK, self.nbytes) or 1))
        with open_regular(self.path) as file:
            file.seek(self.offset)
            left = self.nbytes
            while left:
                got = file.readinto(buffer[: min(left, len(buffer))])  # type: ignore[attr-defined]
                if not got:
                    raise BundleError(f"{self.path} became shorter while it was read")
                yield buffer[:got]
                left -= got


@dataclass(frozen=True)
class ArraySlice:
    """Tensor bytes that had to be computed, small or made on the spot."""

    array: np.ndarray

    def blocks(self) -> Iterable[memoryview]:
        yield np.ascontiguousarray(self.array).reshape(-1).view(np.uint8).data


class Data(Protocol):
    """Where a tensor's bytes come from."""

    def blocks(self) -> Iterable[memoryview]: ...


@dataclass(frozen=True)
class TensorSource:
    """One tensor to write: its bundle name, row-major shape, storage type and bytes."""

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    nbytes: int
    data: Data

    def sha256(self, progress: Progress | None = None) -> str:
        """Return the SHA-256 of its bytes in hexadecimal digits. progress: called with the bytes just read."""
        digest = hashlib.sha256()
        for block in self.data.blocks():
            digest.update(block)
            if progress:
                progress(len(block))
        return digest.hexdigest()


def write_bundle(
    path: Path,
    manifest: Callable[[], Manifest],
    tensors: Sequence[TensorSource],
    progress: Progress | None = None,
    durable: bool = False,
) -> None:
    """Write ``tensors`` and the manifest to ``path``; the file appears only when it is complete.

    durable: its bytes are on the disk before it takes its name, for a file that replaces the only one there is.
    ``manifest`` is called twice: for the first layout and, after all bytes are copied, for the final text.
    Raises :class:`BundleError` for names that do not fit the format and OSError from the file system.
    """
    for tensor in tensors:
        if len(tensor.name.encode()) > MAX_TENSOR_NAME:
            raise BundleError(f"tensor name {tensor.name!r} is longer than {MAX_TENSOR_NAME} bytes")
    if path.exists() and not path.is_file():
        raise BundleError(f"{path}: expected a regular file or none, got something else")
    path.parent.mkdir(parents=True, exist_ok=True)
    # A new directory of this process, so that no other user can have placed a link in it.
    with scratch.beside(path) as folder:
        partial = folder / "bundle.gguf"
        hashes = {tensor.name: BLANK for tensor in tensors}
        header_bytes = _write_header(partial, manifest(), tensors, hashes)
        with open(partial, "r+b") as out:  # own file: written by this process
            out.seek(header_bytes)
            for tensor in tensors:
                _pad(out)
                digest = hashlib.sha256()
                for block in tensor.data.blocks():
                    out.write(block)
                    digest.update(block)
                    if progress:
                        progress(len(block))
                hashes[tensor.name] = digest.hexdigest()
            _pad(out)
        final = partial.with_name("header.gguf")
        if _write_header(final, manifest(), tensors, hashes) != header_bytes:
            raise AssertionError("the manifest changed its length while the bundle was written")
        header = bytearray(final.read_bytes())  # own file: written by this process
        text = BLANK.encode()
        pair = KEY_HEADER.encode() + struct.pack("<IQ", GGUFValueType.STRING, len(text)) + text
        place = (
            header.index(pair) + len(pair) - len(text)
        )  # place of its own hash, after the key, type and length
        header[place : place + len(BLANK)] = header_hash(header, place).encode()
        with open(partial, "r+b") as out:  # own file: written by this process
            out.write(header)
            if durable:
                out.flush()
                os.fsync(out.fileno())
        os.replace(partial, path)
        if durable:
            _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Put a folder's names on the disk, where the system can (Windows cannot open one)."""
    if hasattr(os, "O_DIRECTORY"):
        opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)


def rewrite(
    bundle: Bundle, manifest: Manifest, out: Path, progress: Progress | None = None, durable: bool = False
) -> None:
    """Write the tensors of ``bundle``, byte for byte and in their order, under the header of ``manifest``."""
    tensors = [
        TensorSource(
            info.name, info.shape, info.type, info.nbytes, FileSlice(bundle.path, info.offset, info.nbytes)
        )
        for info in sorted(bundle.infos.values(), key=lambda info: info.offset)
    ]
    manifest.check()
    write_bundle(out, lambda: manifest, tensors, progress, durable)


def _write_header(
    path: Path, manifest: Manifest, tensors: Sequence[TensorSource], hashes: Mapping[str, str]
) -> int:
    """Write magic, key-value pairs and tensor infos; return their length in bytes."""
    writer = GGUFWriter(path, manifest.architecture)
    writer.add_custom_alignment(ALIGNMENT)
    record = manifest.to_metadata() | {
        KEY_TENSORS: json.dumps(hashes, separators=(",", ":")),
        KEY_HEADER: BLANK,
    }
    for key, value in record.items():
        if isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_string(key, value)
    finish_header(writer, tensors)
    return path.stat().st_size


def finish_header(writer: GGUFWriter, tensors: Iterable[TensorSource]) -> None:
    """Write the key-value pairs that ``writer`` holds and the infos of ``tensors``, and close the file."""
    for tensor in tensors:
        # The dtype argument only matters when raw_dtype is absent.
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), tensor.nbytes, tensor.type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()


def _pad(out: BinaryIO) -> None:
    out.write(bytes(-out.tell() % ALIGNMENT))
