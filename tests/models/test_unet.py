"""Convolutions over rows: one product where that is cheaper, and the same numbers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sinew.families.diffusion import unet


@pytest.mark.parametrize(("kernel", "stride", "padding"), [(5, 1, 2), (3, 2, 1), (1, 1, 0)])
@pytest.mark.parametrize(("batch", "rows"), [(1, 1), (1, 4), (2, 4), (1, 16), (3, 16)])
def test_a_convolution_is_the_same_as_a_product(
    kernel: int, stride: int, padding: int, batch: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    layer, x = unet.Conv1d(12, 20, kernel, stride, padding), torch.randn(batch, 12, rows)
    weight, bias = (tensor.detach().double() for tensor in layer.parameters())
    expected = F.conv1d(x.double(), weight, bias, stride, padding)
    convolved = []
    monkeypatch.setattr(
        nn.Conv1d,
        "forward",
        lambda self, x: convolved.append(self) or self._conv_forward(x, self.weight, self.bias),
    )
    with torch.no_grad():
        for many in (1, unet.MANY_NUMBERS):
            monkeypatch.setattr(unet, "MANY_NUMBERS", many)
            found = layer(x)
            assert found.shape == expected.shape
            assert float((found - expected).abs().max()) < 1e-6
    # With a large weight never, with a small one where there are more than a few rows.
    assert len(convolved) == (batch * expected.shape[2] > unet.FEW_ROWS)


def test_a_recorded_program_has_one_operator() -> None:
    program = torch.export.export(unet.Conv1d(4, 4, 3, padding=1), (torch.randn(1, 4, 4),))
    called = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert [name for name in called if "conv" in name]
    assert not [name for name in called if "unfold" in name or "linear" in name]
