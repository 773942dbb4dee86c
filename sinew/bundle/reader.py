"""Open a bundle: check its metadata, and give access to tensors in the file's memory map."""

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

# torch is imported where tensors are made, because reading the metadata must not need torch.
if TYPE_CHECKING:
    import torch

TORCH_DTYPES = {
    GGMLQuantizationType.F32: "float32",
    GGMLQuantizationType.F16: "float16",
    GGMLQuantizationType.BF16: "bfloat16",
}
BLANK = "0" * 64  # replaces the header's own hash while the header is hashed
BLOCK = 1 << 22  # the file is hashed in blocks of this many bytes


class Bundle:
    """One policy in one file. Opening the file reads only the header. The system loads weights from the disk
    on first use.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.file = GGUFFile(self.path)
        self.infos: dict[str, TensorInfo] = self.file.tensors
        with BundleError.at(self.path, BundleError):
            self.hashes = read_hashes(self.file)
            self.manifest = Manifest.from_metadata(self.file.metadata)

    def verify(self) -> list[str]:
        """Return the names of tensors whose bytes were changed since they were written. This reads the whole file. The
        header was already checked when the bundle was opened.

        Raises:
            BundleError: The bundle contains no hashes.
        """
        if self.hashes is None:
            raise BundleError(
                f"{self.path}: contains no hashes, because it was written before 2026-11-21; convert it again"
            )
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
        """Return the size of all tensors in the file, in bytes."""
        return sum(info.nbytes for info in self.infos.values())

    def parameters(self, info: TensorInfo) -> int:
        """Return the number of weights in a tensor. An element of a ternary tensor contains 16 weights. A tensor of
        scales contains no weights."""
        module, _, part = info.name.rpartition(".")
        if module not in self.lowbit:
            return math.prod(info.shape)
        if f".{part}" == SCALE:
            return 0
        return math.prod(info.shape) * (16 if info.type is GGMLQuantizationType.I32 else 1)

    @cached_property
    def lowbit(self) -> dict[str, str]:
        """Return a dict: name of each module with a low-bit weight -> format of this weight
        (``sinew.bundle.quant``)."""
        formats = {}
        for name, info in self.infos.items():
            stored = BY_TYPE.get(info.type)
            if stored is None or not name.endswith(WEIGHT):
                continue
            module = name.removesuffix(WEIGHT)
            scale = self.infos.get(module + SCALE)
            if len(info.shape) != 2:
                raise BundleError(
                    f"{self.path}: tensor {name!r}: expected two dimensions, got {len(info.shape)}; convert the"
                    " bundle again"
                )
            if (scale is None) != bool(stored.group):
                count = "no" if stored.group else "one"
                raise BundleError(
                    f"{self.path}: tensor {name!r} in {stored.name}: expected {count} tensor {module + SCALE!r};"
                    " convert the bundle again"
                )
            if scale is not None and scale.type is not GGMLQuantizationType.F32:
                raise BundleError(
                    f"{self.path}: tensor {module + SCALE!r}: expected F32, got {scale.type.name}; convert the"
                    " bundle again"
                )
            formats[module] = stored.name
        return formats

    def tensor(self, name: str, whole: torch.Tensor | None = None) -> torch.Tensor:
        """Return a tensor whose data is in the file's memory map, without a copy. The map is private, so writing never
        changes the file.

        A weight in a low-bit format is returned as bytes, uint8 [channels, bytes of a row].

        Args:
            name: Name of the tensor.
            whole: A tensor to use instead of the file's bytes. A tensor on the meta device gives the layout without
                using memory.
        """
        import torch

        info = self.infos[name]
        whole = self._bytes if whole is None else whole
        data = whole[info.offset : info.offset + info.nbytes]
        if name.removesuffix(WEIGHT) in self.lowbit:
            return data.view(info.shape[0], -1) if info.nbytes else data.view(info.shape)
        type_name = TORCH_DTYPES.get(info.type)
        if type_name is None:
            supported = ", ".join(kind.name for kind in (*TORCH_DTYPES, *BY_TYPE))
            raise BundleError(
                f"{self.path}: tensor {name!r} is stored as {info.type.name}; this version reads {supported}"
            )
        dtype = getattr(torch, type_name)
        if info.nbytes == 0:
            return torch.empty(info.shape, dtype=dtype)
        return data.view(dtype).view(info.shape)

    @cached_property
    def _bytes(self) -> torch.Tensor:
        """Return the whole file as one uint8 tensor.

        All other tensors are views of its memory, so tensors that are neighbours in the file can be joined without a
        copy.
        """
        import torch

        return torch.frombuffer(self.file.map, dtype=torch.uint8)

    def release(self, in_use: Iterable[torch.Tensor]) -> int:
        """Let the operating system reclaim the memory of weights that are no longer in use. Return the number of bytes.

        Call this after weights were read once, to be converted or rewritten. The weights can still be read from the
        file.

        Args:
            in_use: Tensors whose memory must stay.
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
        """Let the operating system reclaim the mapped memory of a tensor that was copied, so that memory does
        not contain both the mapped tensor and its copy.

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
        """Return all tensors by name. On the meta device, all tensors share one storage with the layout of the file."""
        import torch

        meta = torch.device(device).type == "meta"
        whole = torch.empty(len(self.file.map), dtype=torch.uint8, device="meta") if meta else self._bytes
        return {name: self.tensor(name, whole) for name in self.infos}


# The hashes detect accidents: flipped bits, an incomplete copy, or a file that another tool patched. They do not
# protect against an attacker, who can write new hashes too.


def read_hashes(file: GGUFFile) -> dict[str, str] | None:
    """Return a dict: name of each tensor -> its SHA-256; None for bundles that were written before 2026-11-21, which
    have no hashes.

    Raises:
        BundleError: The header was changed after it was written, or a hash is missing.
    """
    stored_hash, text = file.metadata.get(KEY_HEADER), file.metadata.get(KEY_TENSORS)
    if stored_hash is None and text is None:
        return None
    place = file.places.get(KEY_HEADER)
    if stored_hash is None or not _is_hash(stored_hash) or place is None or not isinstance(text, str):
        raise BundleError(
            f"{KEY_HEADER} and {KEY_TENSORS}: expected both as text, of 64 hexadecimal digits the first; convert the"
            " bundle again"
        )
    if (computed := header_hash(memoryview(file.map)[: file.header_bytes], place)) != stored_hash:
        raise BundleError(
            f"the header was changed after it was written: {KEY_HEADER} is {stored_hash[:16]}..., its bytes give"
            f" {computed[:16]}...; copy or convert the bundle again"
        )
    with BundleError.at(KEY_TENSORS, UntrustedError):
        hashes: Any = parse_json(text)
    if (
        not isinstance(hashes, dict)
        or hashes.keys() != file.tensors.keys()
        or not all(map(_is_hash, hashes.values()))
    ):
        raise BundleError(
            f"{KEY_TENSORS}: expected one hash for each tensor; copy or convert the bundle again"
        )
    return hashes


def header_hash(header: Any, place: int) -> str:
    """Return the SHA-256 of a header. The hash in the header itself, at ``place``, is replaced with zeros first."""
    digest = hashlib.sha256(header[:place])
    digest.update(BLANK.encode())
    digest.update(header[place + len(BLANK) :])
    return digest.hexdigest()


def _is_hash(value: object) -> bool:
    return isinstance(value, str) and len(value) == len(BLANK) and set(value) <= set("0123456789abcdef")
