"""Convolutions over rows: one product where that is cheaper, and the same numbers. Low-bit weights too."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sinew.bundle.quant import FORMATS, quantize
from sinew.layers import linear
from sinew.layers.stores.codes import codes
from sinew.layers.stores.lowbit import dequantize, quantize_rows


@pytest.mark.parametrize(("kernel", "stride", "padding"), [(5, 1, 2), (3, 2, 1), (1, 1, 0)])
@pytest.mark.parametrize(("batch", "rows"), [(1, 1), (1, 4), (2, 4), (1, 16), (3, 16)])
def test_a_convolution_is_the_same_as_a_product(
    kernel: int, stride: int, padding: int, batch: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    layer, x = linear.Conv1d(12, 20, kernel, stride, padding), torch.randn(batch, 12, rows)
    weight, bias = (tensor.detach().double() for tensor in layer.parameters())
    expected = F.conv1d(x.double(), weight, bias, stride, padding)
    convolved = []
    monkeypatch.setattr(
        nn.Conv1d,
        "forward",
        lambda self, x: convolved.append(self) or self._conv_forward(x, self.weight, self.bias),
    )
    with torch.no_grad():
        for many in (1, linear.MANY_NUMBERS):
            monkeypatch.setattr(linear, "MANY_NUMBERS", many)
            found = layer(x)
            assert found.shape == expected.shape
            assert float((found - expected).abs().max()) < 1e-6
    # With a large weight never, with a small one where there are more than a few rows.
    assert len(convolved) == (batch * expected.shape[2] > linear.FEW_ROWS)


def test_a_recorded_program_has_one_operator() -> None:
    program = torch.export.export(linear.Conv1d(4, 4, 3, padding=1), (torch.randn(1, 4, 4),))
    called = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert [name for name in called if "conv" in name]
    assert not [name for name in called if "unfold" in name or "linear" in name]


@pytest.mark.parametrize("name", ["int8", "q8_0", "q4_0"])
@pytest.mark.parametrize(("kernel", "stride", "padding"), [(5, 1, 2), (3, 2, 1), (1, 1, 0)])
def test_a_low_bit_convolution_is_that_of_its_rounded_weight_and_windows(
    name: str, kernel: int, stride: int, padding: int
) -> None:
    """Each window is rounded to int8 on its own, so that its result does not depend on the other windows."""
    torch.manual_seed(0)
    layer, x = linear.Conv1d(32, 20, kernel, stride, padding), torch.randn(2, 32, 16)
    plain, width = layer.weight.detach().flatten(1), linear.width_of(layer)
    assert width == 32 * kernel
    rows, scales = quantize(plain.numpy(), name)
    linear.hold(layer, codes(name, width, 0 if FORMATS[name].group else 20))
    stored = torch.from_numpy(rows).view(torch.uint8)
    scale = None if FORMATS[name].group else torch.from_numpy(scales)
    layer.weight = nn.Parameter(stored, requires_grad=False)
    layer.scale = None if scale is None else nn.Parameter(scale, requires_grad=False)
    weight = dequantize(stored, scale, name, width).double()

    padded = F.pad(x, (padding, padding))
    count = (padded.shape[2] - kernel) // stride + 1
    windows = torch.stack([padded[:, :, i * stride : i * stride + kernel] for i in range(count)], 1).flatten(
        2
    )
    whole, steps = quantize_rows(windows.flatten(0, 1), 1e-30)
    expected = (whole.double() / steps.double()) @ weight.T + layer.bias.detach().double()
    with torch.no_grad():
        found = layer(x)
    assert found.shape == (2, 20, count)
    assert torch.allclose(found.transpose(1, 2).flatten(0, 1).double(), expected, rtol=0, atol=1e-5)
    exact = F.conv1d(
        x.double(), plain.double().view(20, 32, kernel), layer.bias.detach().double(), stride, padding
    )
    error = float((found - exact).norm() / exact.norm())
    assert 0 < error < (0.2 if name == "q4_0" else 0.02)
