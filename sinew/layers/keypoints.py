"""Image features of Diffusion Policy and VQ-BeT: positions of keypoints in the last feature map of a ResNet.

The encoder computes the keypoints by spatial softmax (Finn et al. 2016) and mixes them with one linear layer.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sinew.layers.linear import Linear
from sinew.layers.resnet import ResNet, ResNetConfig


class Keypoints(nn.Module):
    """Computes the expected position of each of ``count`` features in a feature map (spatial softmax, Finn et
    al. 2016).

    Attributes:
        places: [rows * cols, 2], x and y of each position of the map, from -1 to 1.
    """

    def __init__(self, channels: int, count: int, rows: int, cols: int):
        super().__init__()
        self.maps = Linear(channels, count)
        self.register_buffer("places", torch.zeros(rows * cols, 2))

    def forward(self, features: Tensor) -> Tensor:  # [B, C, rows, cols] -> [B, count, 2]
        maps = self.maps(features.flatten(2).transpose(1, 2)).transpose(1, 2)  # [B, count, rows * cols]
        return maps.float().softmax(dim=-1) @ self.places.float()  # type: ignore[operator]


class KeypointEncoder(nn.Module):
    """A ResNet, its keypoints, and a linear layer that mixes the keypoints of a view.

    Args:
        vision: Sizes of the ResNet.
        keypoints: Number of keypoints.
        rows: Rows of the ResNet's last feature map.
        cols: Columns of the ResNet's last feature map.
    """

    def __init__(self, vision: ResNetConfig, keypoints: int, rows: int, cols: int):
        super().__init__()
        self.tower = ResNet(vision)
        self.keypoints = Keypoints(vision.out_channels, keypoints, rows, cols)
        self.out = Linear(2 * keypoints, 2 * keypoints)

    def forward(self, pixels: Tensor) -> Tensor:  # [B, 3, h, w] -> [B, 2 * keypoints]
        return F.relu(self.out(self.keypoints(self.tower(pixels)).flatten(1)))
