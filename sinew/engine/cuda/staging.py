"""Staging of an observation: one block of memory on the host, one on the device, one copy between them.

A recorded graph reads the device's block, so neither moves. The host's is pinned, without which the copy would
wait in a buffer of the driver's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

ALIGNMENT = 256  # bytes: what a device's allocator gives, and more than any load wants

Field = tuple[tuple[int, ...], torch.dtype]  # shape and type


class Staging:
    """``host``: numpy views to be written; ``device``: tensors over the same layout."""

    def __init__(self, fields: Mapping[str, Field], device: torch.device):
        places, end = {}, 0
        for name, (shape, dtype) in fields.items():
            size = math.prod(shape) * dtype.itemsize
            places[name] = (end, size)
            end += -(-size // ALIGNMENT) * ALIGNMENT
        on_gpu = device.type == "cuda"
        self._host = torch.zeros(end, dtype=torch.uint8, pin_memory=on_gpu)
        self._device = torch.zeros(end, dtype=torch.uint8, device=device)
        self.host: dict[str, np.ndarray] = {}
        self.device: dict[str, Tensor] = {}
        for name, (shape, dtype) in fields.items():
            start, size = places[name]
            self.host[name] = self._host[start : start + size].view(dtype).view(shape).numpy()
            self.device[name] = self._device[start : start + size].view(dtype).view(shape)

    @property
    def nbytes(self) -> int:
        return self._host.numel()

    def write(self, name: str, array: np.ndarray) -> None:
        """Raises ValueError for an array of another shape; numpy would stretch it."""
        place = self.host[name]
        if array.shape != place.shape:
            raise ValueError(f"{name}: expected shape {list(place.shape)}, got {list(array.shape)}")
        np.copyto(place, array, casting="same_kind")

    def upload(self) -> None:
        """On the current stream. The host's block may be written again once that stream has caught up."""
        self._device.copy_(self._host, non_blocking=True)
