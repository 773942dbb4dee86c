"""Opening a bundle: checked metadata and tensors that live in the file's memory map."""

from __future__ import annotations

import hashlib
import math
import mmap
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gguf import GGMLQuantizationType
from sinew_client.untrusted import UntrustedError, parse_json

from sinew.bundle.gguf_file import GGUFFile, TensorInfo
from sinew.bundle.quant import BY_TYPE, SCALE, WEIGHT
from sinew.bundle.schema import KEY_HEADER, KEY_TENSORS, Manifest
from sinew.core import BundleError

if TYPE_CHECKING:  # imported where tensors are made: the metadata alone must not need torch
    import torch

TORCH_DTYPES = {
    GGMLQuantizationType.F32: "float32",
    GGMLQuantizationType.F16: "float16",
    GGMLQuantizationType.BF16: "bfloat16",
}
BLANK = "0" * 64  # in the place of a header's own hash
BLOCK = 1 << 22  # bytes that are hashed at once


class Bundle:
    """One policy in one file. Opening reads the header alone; weights are paged in when they are used."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.file = GGUFFile(self.path)
        self.infos: dict[str, TensorInfo] = self.file.tensors
        with BundleError.at(self.path, BundleError):
            self.hashes = read_hashes(self.file)
            self.manifest = Manifest.from_metadata(self.file.metadata)

    def verify(self) -> list[str]:
        """Return the names of tensors whose bytes are not those that were written; reads the whole file.

        The header was checked when the bundle was opened. Raises :class:`BundleError` for a bundle that carries no
        hashes.
        """
        if self.hashes is None:
            raise BundleError(f"{self.path}: carries no hashes; bundles written before 2026-11-21 do not")
        view, changed = memoryview(self.file.map), []
        for name, info in self.infos.items():
            digest, end = hashlib.sha256(), info.offset + info.nbytes
            for start in range(info.offset, end, BLOCK):
                digest.update(view[start : min(start + BLOCK, end)])
            if digest.hexdigest() != self.hashes[name]:
                changed.append(name)
        return changed

    @cached_property
    def weights_nbytes(self) -> int:
        """Bytes of all tensors, as stored."""
        return sum(info.nbytes for info in self.infos.values())

    def parameters(self, info: TensorInfo) -> int:
        """Return the number of weights in a tensor: 16 in each element of ternary tensors, 0 for scales."""
        module, _, part = info.name.rpartition(".")
        if module not in self.lowbit:
            return math.prod(info.shape)
        if f".{part}" == SCALE:
            return 0
        return math.prod(info.shape) * (16 if info.type is GGMLQuantizationType.I32 else 1)

    @cached_property
    def lowbit(self) -> dict[str, str]:
        """Modules whose weight is stored in a low-bit format (``sinew.bundle.quant``), and the format's name."""
        found = {}
        for name, info in self.infos.items():
            stored = BY_TYPE.get(info.type)
            if stored is None or not name.endswith(WEIGHT):
                continue
            module = name.removesuffix(WEIGHT)
            scale = self.infos.get(module + SCALE)
            if len(info.shape) != 2:
                raise BundleError(
                    f"{self.path}: tensor {name!r}: expected two dimensions, got {len(info.shape)}"
                )
            if (scale is None) != bool(stored.group):
                wanted = "no" if stored.group else "one"
                raise BundleError(
                    f"{self.path}: tensor {name!r} in {stored.name}: expected {wanted} tensor {module + SCALE!r}"
                )
            if scale is not None and scale.type is not GGMLQuantizationType.F32:
                raise BundleError(
                    f"{self.path}: tensor {module + SCALE!r}: expected F32, got {scale.type.name}"
                )
            found[module] = stored.name
        return found

    def tensor(self, name: str, whole: torch.Tensor | None = None) -> torch.Tensor:
        """Return a zero-copy tensor over the memory map (private: writes never reach the file).

        Weights in a low-bit format are returned as bytes, uint8 [channels, bytes of a row].

        Args:
            name: Name of the tensor.
            whole: A tensor in place of the file's bytes, such as one on the meta device, to compute layouts without
                memory.
        """
        import torch

        info = self.infos[name]
        whole = self._bytes if whole is None else whole
        data = whole[info.offset : info.offset + info.nbytes]
        if name.removesuffix(WEIGHT) in self.lowbit:
            return data.view(info.shape[0], -1) if info.nbytes else data.view(info.shape)
        type_name = TORCH_DTYPES.get(info.type)
        if type_name is None:
            known = ", ".join(kind.name for kind in (*TORCH_DTYPES, *BY_TYPE))
            raise BundleError(
                f"{self.path}: tensor {name!r} is stored as {info.type.name}; this version reads {known}"
            )
        dtype = getattr(torch, type_name)
        if info.nbytes == 0:
            return torch.empty(info.shape, dtype=dtype)
        return data.view(dtype).view(info.shape)

    @cached_property
    def _bytes(self) -> torch.Tensor:
        """The whole file, uint8: all tensors are parts of one storage, so neighbours can be joined."""
        import torch

        return torch.frombuffer(self.file.map, dtype=torch.uint8)

    def release(self, in_use: Iterable[torch.Tensor]) -> int:
        """Let the kernel take back the pages of all weights that no tensor ``in_use`` reads; returns their bytes.

        For weights that were read once, to be converted or rewritten. They stay readable, from the file.
        """
        start, size = self._bytes.data_ptr(), len(self._bytes)
        used = [(t.data_ptr() - start, t.data_ptr() - start + t.nbytes) for t in in_use]
        used = sorted(span for span in used if 0 <= span[0] < size)
        released, position = 0, min((info.offset for info in self.infos.values()), default=size)
        for begin, end in [*used, (size, size)]:
            released += self._release(position, begin)
            position = max(position, end)
        return released

    def copied(self, tensor: torch.Tensor) -> int:
        """Release the pages of a tensor that was copied out of the map, so that memory does not hold both copies.

        Return the number of released bytes; 0 for a tensor outside the map.
        """
        begin = tensor.data_ptr() - self._bytes.data_ptr()
        return self._release(begin, begin + tensor.nbytes) if 0 <= begin < len(self._bytes) else 0

    def _release(self, begin: int, end: int) -> int:
        first, last = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
        if first >= last or not hasattr(mmap, "MADV_DONTNEED"):
            return 0
        self.file.map.madvise(mmap.MADV_DONTNEED, first, last - first)
        return last - first

    def tensors(self, device: torch.device | str = "cpu") -> dict[str, torch.Tensor]:
        """Return all tensors. On the meta device they share one storage with the layout of the file."""
        import torch

        meta = torch.device(device).type == "meta"
        whole = torch.empty(len(self.file.map), dtype=torch.uint8, device="meta") if meta else self._bytes
        return {name: self.tensor(name, whole) for name in self.infos}


# Hashes find accidents: flipped bits, a copy that broke off, a file that was patched by another tool. Whoever can write
# the file can write its hashes too; a signature would be another matter.


def read_hashes(file: GGUFFile) -> dict[str, str] | None:
    """Return name -> SHA-256 of every tensor; None for bundles written before 2026-11-21, which carry none.

    Raises :class:`BundleError` where the header is not the one that was written.
    """
    said, text = file.metadata.get(KEY_HEADER), file.metadata.get(KEY_TENSORS)
    if said is None and text is None:
        return None
    place = file.places.get(KEY_HEADER)
    if said is None or not _is_hash(said) or place is None or not isinstance(text, str):
        raise BundleError(
            f"{KEY_HEADER} and {KEY_TENSORS}: expected both as text, of 64 hexadecimal digits the first"
        )
    if (found := header_hash(memoryview(file.map)[: file.header_bytes], place)) != said:
        raise BundleError(
            f"the header was changed after it was written: {KEY_HEADER} says {said[:16]}..., its bytes give"
            f" {found[:16]}..."
        )
    with BundleError.at(KEY_TENSORS, UntrustedError):
        hashes: Any = parse_json(text)
    if (
        not isinstance(hashes, dict)
        or hashes.keys() != file.tensors.keys()
        or not all(map(_is_hash, hashes.values()))
    ):
        raise BundleError(f"{KEY_TENSORS}: expected one hash for each tensor")
    return hashes


def header_hash(header: Any, place: int) -> str:
    """Return the SHA-256 of a header whose own hash is at ``place`` and counts as zeros."""
    digest = hashlib.sha256(header[:place])
    digest.update(BLANK.encode())
    digest.update(header[place + len(BLANK) :])
    return digest.hexdigest()


def _is_hash(value: object) -> bool:
    return isinstance(value, str) and len(value) == len(BLANK) and set(value) <= set("0123456789abcdef")
