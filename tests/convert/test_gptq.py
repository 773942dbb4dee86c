"""Rounding by a layer's inputs, against its definition written out."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from sinew.bundle.quant import quantize
from sinew.layers.linear import Linear
from sinew.lowbit.gptq import DAMPING, GROUP, gptq, pack_q4_0, portions, second_moments

RNG = np.random.default_rng


def widened(rows: np.ndarray) -> np.ndarray:
    return dequantize(rows, GGMLQuantizationType.Q4_0)


def correlated(k: int, count: int) -> np.ndarray:
    rng = RNG(0)
    return rng.standard_normal((count, k)) @ (rng.standard_normal((k, k)) * np.exp(-np.arange(k) / 40)).T


def test_columns_are_rounded_in_turn_and_errors_spread_as_defined() -> None:
    """Optimal brain surgery's own form (Frantar and Alistarh 2022, equation 3): after each column its share is taken
    out of the inverse."""
    k, channels = 160, 24
    inputs, weights = correlated(k, 900), RNG(1).standard_normal((channels, k)).astype(np.float32)
    moments = inputs.T @ inputs
    rows = gptq(weights, torch.from_numpy(moments))
    got, scales = widened(rows), rows.reshape(channels, -1, 18)[:, :, :2].copy().view(np.float16)[:, :, 0]
    inverse = np.linalg.inv(moments + DAMPING * np.mean(np.diagonal(moments)) * np.eye(k))
    left, equal = weights.astype(np.float64), 0
    for j in range(k):
        scale = scales[:, j // GROUP].astype(np.float64)
        equal += np.sum(np.abs(got[:, j] - scale * np.clip(np.rint(left[:, j] / scale), -8, 7)) < 1e-6)
        error = (left[:, j] - got[:, j]) / inverse[j, j]
        left[:, j:] -= error[:, None] * inverse[j, j:]
        inverse -= np.outer(inverse[:, j], inverse[j]) / inverse[j, j]
    assert equal >= 0.999 * weights.size  # of two codes as near, float32 may take the other


def test_a_layer_errs_less_over_its_inputs() -> None:
    inputs, weights = correlated(256, 2000), RNG(1).standard_normal((64, 256)).astype(np.float32)
    plain = widened(quantize(weights, "q4_0")[0])
    made = widened(gptq(weights, torch.from_numpy(inputs.T @ inputs)))
    before, after = (np.linalg.norm(inputs @ (weights - each).T) for each in (plain, made))
    assert after < 0.6 * before
    assert np.linalg.norm(weights - made) > np.linalg.norm(
        weights - plain
    )  # which alone would say the contrary


def test_inputs_that_say_nothing_leave_each_weight_its_nearest_code() -> None:
    weights = RNG(2).standard_normal((32, 96)).astype(np.float32)
    weights[3] = 0
    for moments in (torch.eye(96), torch.zeros(96, 96)):
        found = widened(gptq(weights, moments.double()))
        assert np.all(found[3] == 0)
        assert np.linalg.norm(weights - found) <= np.linalg.norm(
            weights - widened(quantize(weights, "q4_0")[0])
        )


def test_rows_are_those_of_gguf() -> None:
    codes = RNG(3).integers(0, 16, (5, 64), np.uint8)
    scales = RNG(4).standard_normal((5, 2)).astype(np.float16)
    wanted = (codes.reshape(5, 2, 32).astype(np.float32) - 8) * scales.astype(np.float32)[:, :, None]
    assert np.array_equal(widened(pack_q4_0(codes, scales)), wanted.reshape(5, 64))


@pytest.mark.parametrize(
    ("k", "weight", "moment"),
    [(48, 1.0, 1.0), (32, np.nan, 1.0), (32, 1.0, np.inf)],
    ids=["k", "weight", "moment"],
)
def test_what_cannot_be_rounded_is_refused(k: int, weight: float, moment: float) -> None:
    with pytest.raises(ValueError, match="a multiple of 32, got|expected finite weights and moments"):
        gptq(np.full((2, k), weight, np.float32), torch.full((k, k), moment, dtype=torch.float64))


def test_moments_are_of_all_rows_and_of_layers_that_are_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = {name: Linear(4, 3) for name in "abc"}
    given = [torch.randn(2, 5, 4), torch.randn(7, 4)]
    runs = [lambda x=x: layers["b"](layers["a"](x).sum(dim=-1, keepdim=True).expand_as(x)) for x in given]
    found = second_moments(layers, runs)
    rows = torch.cat([x.reshape(-1, 4) for x in given])
    assert set(found) == {"a", "b"}
    torch.testing.assert_close(found["a"], (rows.T @ rows).double(), rtol=1e-5, atol=1e-5)
    monkeypatch.setattr("sinew.lowbit.gptq.MOST_BYTES", 2 * 8 * 16)
    assert [list(some) for some in portions(layers)] == [["a", "b"], ["c"]]
