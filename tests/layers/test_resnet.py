"""Convolutions of pictures."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F

from sinew.layers.resnet import FEW_PIXELS, Conv


@pytest.mark.parametrize("side", [2, 3, 4, 5])
@pytest.mark.parametrize("batch", [1, 3])
def test_few_pixels_give_the_sums_of_the_convolution(side: int, batch: int) -> None:
    channels = 1152
    torch.manual_seed(side)
    conv = Conv(channels, 7, 1)
    x = torch.randn(batch, channels, side, side)
    with torch.no_grad(), patch.object(F, "linear", wraps=F.linear) as product:
        found = conv(x)
        expected = F.conv2d(x.double(), conv.weight.double(), conv.bias.double())
        # A float32 sum of n products is off by at most n rounding errors of the sum of their sizes.
        sizes = F.conv2d(x.double().abs(), conv.weight.double().abs(), conv.bias.double().abs())
    assert product.called == (side * side <= FEW_PIXELS)
    assert found.shape == expected.shape
    assert torch.all((found - expected).abs() <= (channels + 1) * torch.finfo(torch.float32).eps * sizes)


@pytest.mark.parametrize(
    "conv", [Conv(8, 8, 3), Conv(8, 8, 1, 2), Conv(8, 8, 1, groups=2), Conv(8, 8, 1).half()]
)
def test_other_convolutions_are_those_of_torch(conv: Conv) -> None:
    x = torch.randn(2, 8, 4, 4)
    with torch.no_grad(), patch.object(F, "linear") as product:
        conv(x)
    assert not product.called
