"""Round weights so that weights which are rounded later compensate the errors of earlier weights.

The error of a layer over inputs x is tr((W - Q) H (W - Q)^T), where H is the sum of x x^T. Columns are rounded in turn.
The error of each column is spread over the later columns so that the layer's error grows least, by a Cholesky factor of
the inverse of H (GPTQ: Frantar et al. 2023, arXiv 2210.17323, algorithm 1). The scale of a group is chosen when its
first column is reached. The function tries a few scales, and takes the scale with the smallest error of the group,
weighted by H.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sinew.layers.linear import Conv1d, width_of

# The format q4_0: number of weights that share a scale, the largest code, and the code for 0.
GROUP, LARGEST, OFFSET = 32, 15, 8
BLOCK = 128  # columns of a block; one product adds the errors of a block to all later columns
DAMPING = 0.01  # this share of the mean of H's diagonal is added to the diagonal
# Each candidate is a factor of the scale that covers a group's largest weight.
FACTORS = tuple(np.linspace(0.7, 1.05, 15))
MOST_BYTES = 2 << 30  # largest size of all second moments in memory at the same time
WIDEST = (
    8192  # largest input size of a layer; for wider layers, H takes gigabytes and its factor takes minutes
)


def second_moments(
    layers: Mapping[str, nn.Module], runs: Iterable[Callable[[], object]]
) -> dict[str, Tensor]:
    """Return for each layer the sum of x x^T over all input rows x, float64 [k, k].

    Layers that did not run are missing.

    Args:
        layers: The layers by name.
        runs: Each call computes the model for one observation.
    """
    moments: dict[str, Tensor] = {}

    def add(name: str, layer: nn.Module, given: Any) -> None:
        inputs = layer.windows(given[0]) if isinstance(layer, Conv1d) else given[0]
        rows = inputs.detach().reshape(-1, inputs.shape[-1]).float()
        product = (rows.T @ rows).double()
        moments[name] = moments[name] + product if name in moments else product

    with ExitStack() as stack, torch.no_grad():
        for name, layer in layers.items():
            stack.callback(layer.register_forward_pre_hook(partial(add, name)).remove)
        for run in runs:
            run()
    return moments


def portions(layers: Mapping[str, nn.Module]) -> Iterator[dict[str, nn.Module]]:
    """Split ``layers`` into parts, in order, so that the second moments of each part take at most ``MOST_BYTES`` of
    memory.
    """
    some: dict[str, nn.Module] = {}
    nbytes = 0
    for name, layer in layers.items():
        size = 8 * (width_of(layer) or 0) ** 2
        if some and nbytes + size > MOST_BYTES:
            yield some
            some, nbytes = {}, 0
        some[name] = layer
        nbytes += size
    if some:
        yield some


def gptq(weights: np.ndarray, moments: Tensor) -> np.ndarray:
    """Round a weight matrix to the format q4_0 so that the error is small for inputs with these second moments.

    Args:
        weights: float32 [channels, k].
        moments: The sum of x x^T over the inputs x, float64 [k, k].

    Returns:
        Rows in the format q4_0, uint8 [channels, k / 32 * 18].

    Raises:
        ValueError: k does not divide into groups of 32, or a weight or moment is not finite.
    """
    remaining = torch.from_numpy(np.ascontiguousarray(weights, np.float32)).clone()
    channels, k = remaining.shape
    if k % GROUP:
        raise ValueError(f"expected rows whose length is a multiple of {GROUP}, got {k}")
    if not (torch.isfinite(remaining).all() and torch.isfinite(moments).all()):
        raise ValueError("expected finite weights and moments, got NaN or infinity")
    factor = _factor(moments)
    codes = torch.empty(channels, k, dtype=torch.uint8)
    scales = torch.empty(channels, k // GROUP)
    for start in range(0, k, BLOCK):
        end = min(start + BLOCK, k)
        errors = torch.zeros(channels, end - start)
        for j in range(start, end):
            if j % GROUP == 0:
                scale = _scale(remaining[:, j : j + GROUP], factor.diagonal()[j : j + GROUP])
                scales[:, j // GROUP] = scale
                inverse = torch.where(scale == 0, 0.0, 1.0 / scale)
            code = (remaining[:, j] * inverse + OFFSET).round().clamp(0, LARGEST)
            codes[:, j] = code.to(torch.uint8)
            error = (remaining[:, j] - (code - OFFSET) * scale) / factor[j, j]
            remaining[:, j + 1 : end] -= error[:, None] * factor[j, j + 1 : end]
            errors[:, j - start] = error
        remaining[:, end:] -= errors @ factor[start:end, end:]
    return pack_q4_0(codes.numpy(), scales.numpy().astype(np.float16))


def pack_q4_0(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Return rows in the format q4_0, uint8 [channels, k / 32 * 18].

    A group has its scale and then 16 bytes. Byte i has the code i in its low half and the code 16 + i in its high half.

    Args:
        codes: uint8 [channels, k].
        scales: float16 [channels, k / 32].
    """
    channels, k = codes.shape
    halves = codes.reshape(channels, k // GROUP, 2, GROUP // 2)
    packed = halves[:, :, 0] | halves[:, :, 1] << 4
    rows = np.concatenate([scales[:, :, None].view(np.uint8), packed], axis=2)
    return rows.reshape(channels, -1)


def _factor(moments: Tensor) -> Tensor:
    """Return the upper Cholesky factor of the inverse of the moments, float32 [k, k]. A damping is added to the
    moments before the inversion.
    """
    damped = moments.clone()
    diagonal = damped.diagonal()
    diagonal += DAMPING * float(diagonal.mean()) or 1.0
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    return torch.linalg.cholesky(inverse, upper=True).float()


def _scale(group: Tensor, factor: Tensor) -> Tensor:
    """Return the scale of a group for each row, float32 [channels] that float16 can represent.

    Args:
        group: Weights of the group, [channels, 32].
        factor: Diagonal of the Cholesky factor for the group, [32].
    """
    at = group.abs().argmax(dim=1, keepdim=True)
    whole = group.gather(1, at)[:, 0] / -OFFSET  # as in q4_0, the largest weight gets the code 0
    best, least = torch.zeros_like(whole), torch.full_like(whole, torch.inf)
    for share in FACTORS:
        scale = (whole * share).half().float()
        inverse = torch.where(scale == 0, 0.0, 1.0 / scale)[:, None]
        rounded = ((group * inverse + OFFSET).round().clamp(0, LARGEST) - OFFSET) * scale[:, None]
        error = ((group - rounded) / factor).square().sum(dim=1)
        better = error < least
        best, least = torch.where(better, scale, best), torch.where(better, error, least)
    return best
