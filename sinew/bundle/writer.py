"""Write a bundle in one pass with constant memory.

The header comes from the ``gguf`` package. Tensor bytes are copied from the source file to their aligned position. They
are not loaded as arrays. Source files are hashed during the copy, so the hashes in the manifest are known only at the
end. The header is therefore written twice, the second time over the first. It has the same length, because a SHA-256
has a fixed length. The hashes of the tensors and of the header itself are written in the same way.
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

MAX_TENSOR_NAME = 63  # ggml stores a name in 64 bytes with a terminating zero
COPY_BLOCK = 1 << 20  # a block of this size stays in the processor's cache between reading and writing

Progress = Callable[[int], None]  # receives the number of bytes that were just written


@dataclass(frozen=True)
class FileSlice:
    """The place of a tensor's bytes in a source file. The bytes already have the layout of the bundle."""

    path: Path
    offset: int
    nbytes: int

    def blocks(self) -> Iterable[memoryview]:
        buffer = memoryview(bytearray(min(COPY_BLOCK, self.nbytes) or 1))
        with open_regular(self.path) as file:
            file.seek(self.offset)
            remaining = self.nbytes
            while remaining:
                got = file.readinto(buffer[: min(remaining, len(buffer))])  # type: ignore[attr-defined]
                if not got:
                    raise BundleError(f"{self.path} became shorter while it was read; run the command again")
                yield buffer[:got]
                remaining -= got


@dataclass(frozen=True)
class ArraySlice:
    """The bytes of a tensor whose values are a numpy array in memory, and not in a source file."""

    array: np.ndarray

    def blocks(self) -> Iterable[memoryview]:
        yield np.ascontiguousarray(self.array).reshape(-1).view(np.uint8).data


class Data(Protocol):
    """The source of a tensor's bytes."""

    def blocks(self) -> Iterable[memoryview]: ...


@dataclass(frozen=True)
class TensorSource:
    """One tensor to write.

    Attributes:
        name: Its name in the bundle.
        shape: Its row-major shape.
        type: Its storage type.
        nbytes: Its size in bytes.
        data: The source of its bytes.
    """

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    nbytes: int
    data: Data

    def sha256(self, progress: Progress | None = None) -> str:
        """Return the SHA-256 of the tensor's bytes in hexadecimal digits.

        Args:
            progress: Called with the number of bytes that were just read.
        """
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
    """Write tensors and a manifest to ``path``. The file appears only when it is complete.

    Args:
        path: The file to write.
        manifest: Returns the manifest. It is called twice: for the first layout and, after all bytes are copied, for
            the final text.
        tensors: The tensors, in order.
        progress: Called with the number of bytes that were just written.
        durable: Write all bytes to the disk before the file gets its name. Use it to replace the only copy of a file.

    Raises:
        BundleError: A tensor's name is too long, or ``path`` is not a regular file.
        OSError: The file system reports an error.
    """
    for tensor in tensors:
        if len(tensor.name.encode()) > MAX_TENSOR_NAME:
            raise BundleError(
                f"tensor name {tensor.name!r} is longer than {MAX_TENSOR_NAME} bytes; shorten the name in the family's"
                " converter"
            )
    if path.exists() and not path.is_file():
        raise BundleError(f"{path}: expected a regular file or none, got something else; choose another path")
    path.parent.mkdir(parents=True, exist_ok=True)
    # The folder is new and belongs to this process, so no other user can have put a link into it.
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
        # The header's own hash is at the end of its key-value pair, after the key, the type and the length.
        place = header.index(pair) + len(pair) - len(text)
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
    """Make the system write a folder's list of files to the disk (fsync). This does nothing on Windows, which cannot
    open a folder."""
    if hasattr(os, "O_DIRECTORY"):
        opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)


def rewrite(
    bundle: Bundle, manifest: Manifest, out: Path, progress: Progress | None = None, durable: bool = False
) -> None:
    """Write the tensors of a bundle, byte for byte and in their order, with a new manifest.

    Args:
        bundle: The bundle whose tensors are copied.
        manifest: The new manifest.
        out: The file to write.
        progress: Called with the number of bytes that were just written.
        durable: See :func:`write_bundle`.
    """
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
    """Write magic, key-value pairs and tensor infos. Return their length in bytes."""
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
    """Write the key-value pairs of ``writer`` and the infos of ``tensors``, and close the file."""
    for tensor in tensors:
        # The last argument is raw_dtype. If it is passed, gguf ignores the dtype argument.
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), tensor.nbytes, tensor.type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()


def _pad(out: BinaryIO) -> None:
    out.write(bytes(-out.tell() % ALIGNMENT))
