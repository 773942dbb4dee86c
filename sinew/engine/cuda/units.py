"""The chunk's last step on the device: from model units to the robot's own."""

from __future__ import annotations

import torch
from torch import Tensor

from sinew.processing.normalize import Normalizer


class RobotUnits:
    """``actions * scale + offset`` of the first ``dim`` columns, in the precision of the recipe's convention: float32
    for LeRobot's, float64 for openpi's, whose transforms are numpy's."""

    def __init__(self, normalizer: Normalizer, device: torch.device):
        self.dim = normalizer.dim
        self.dtype = torch.float64 if normalizer.openpi else torch.float32
        self.scale, self.offset = (
            torch.from_numpy(values).to(device, self.dtype) for values in normalizer.affine()
        )

    def write(self, x: Tensor, out: Tensor) -> None:
        """x: float32 [H, padded_action_dim] -> out: [H, dim]. Two launches."""
        torch.addcmul(self.offset, x[:, : self.dim].to(self.dtype), self.scale, out=out)
