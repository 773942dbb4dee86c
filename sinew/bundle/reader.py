"""Opening a bundle: checked metadata and tensors that live in the file's memory map."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

import torch
from gguf import GGMLQuantizationType

from sinew.bundle.gguf_file import GGUFFile, TensorInfo
from sinew.bundle.schema import Manifest
from sinew.core import BundleError

TORCH_DTYPES = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
    # Quantised types (Q8_0, Q4_0, TQ2_0 ...) get their entry together with the layers that compute on them.
}


class Bundle:
    """One policy in one file. Opening reads the header alone; weights are paged in when they are used."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.file = GGUFFile(self.path)
        try:
            self.manifest = Manifest.from_metadata(self.file.metadata)
        except BundleError as error:
            raise BundleError(f"{self.path}: {error}") from None

    @property
    def infos(self) -> dict[str, TensorInfo]:
        return self.file.tensors

    @cached_property
    def weights_nbytes(self) -> int:
        """Bytes of all tensors, as stored."""
        return sum(info.nbytes for info in self.infos.values())

    def tensor(self, name: str) -> torch.Tensor:
        """Zero-copy tensor over the memory map (private: writes to it never reach the file)."""
        info = self.infos[name]
        dtype = TORCH_DTYPES.get(info.type)
        if dtype is None:
            known = ", ".join(kind.name for kind in TORCH_DTYPES)
            raise BundleError(
                f"{self.path}: tensor {name!r} is stored as {info.type.name}; this version computes on {known}"
            )
        if info.nbytes == 0:
            return torch.empty(info.shape, dtype=dtype)
        count = info.nbytes // dtype.itemsize
        return torch.frombuffer(self.file.map, dtype=dtype, count=count, offset=info.offset).view(info.shape)

    def tensors(self) -> dict[str, torch.Tensor]:
        return {name: self.tensor(name) for name in self.infos}
