"""Convert a chunk on the device from model units to the robot's units."""

from __future__ import annotations

import torch
from torch import Tensor

from sinew.processing.normalize import Normalizer


class RobotUnits:
    """Computes ``actions * scale + offset`` of the first ``dim`` columns.

    The precision follows the training project: float32 for LeRobot, and float64 for openpi, which un-normalises with
    numpy.
    """

    def __init__(self, normalizer: Normalizer, device: torch.device):
        self.dim = normalizer.dim
        self.dtype = torch.float64 if normalizer.openpi else torch.float32
        self.scale, self.offset = (
            torch.from_numpy(values).to(device, self.dtype) for values in normalizer.affine()
        )

    def write(self, x: Tensor, out: Tensor) -> None:
        """Convert x, float32 [B, H, padded_action_dim], and write the result to ``out``, [B, H, dim]. This takes two
        launches."""
        torch.addcmul(self.offset, x[..., : self.dim].to(self.dtype), self.scale, out=out)
