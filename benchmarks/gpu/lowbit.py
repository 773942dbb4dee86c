"""Give a model low-bit weights on the GPU, for the rungs ``w8`` and ``w4``."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor, nn

from benchmarks.gpu.models import Case, length, side, weightless
from sinew.engine.clone import clone_model
from sinew.engine.cuda.kernels import tiles
from sinew.engine.cuda.kernels.weight_only_linear import GROUP, OFFSET
from sinew.engine.cuda.lowbit.choice import balance, linear_layers, rows_of
from sinew.engine.cuda.lowbit.weights import WeightOnly
from sinew.engine.example import Shapes
from sinew.models.base import Model

FORMATS = {"w8": "int8", "w4": "q4_0"}


def few_rows(case: Case, device: torch.device, tiny: bool) -> tuple[str, ...]:
    """Return the components whose weights would stay low-bit on a device, by the rule of the engine."""
    model = weightless(case.model, case.chunk, tiny)
    size = side(model.config)
    shapes = Shapes(case.views, size, size, length(case, model.config), case.steps)
    rows = rows_of(model, shapes, linear_layers(model))
    most = balance(tiles.capability(device))
    return tuple(part for part, count in rows.items() if 0 < count <= most)


@torch.no_grad()
def low_bit(model: Model, form: str, components: Collection[str]) -> Model:
    """Return a copy of a model whose linear layers have low-bit weights. The copy shares all other parameters.

    Args:
        model: The model.
        form: "int8", or "q4_0" for layers whose rows divide into groups. Other layers then get int8.
        components: The components to change.
    """
    copy = clone_model(model)
    for name in linear_layers(model):
        if model.component_of(name) not in components:
            continue
        layer = copy.get_submodule(name)
        weight: Tensor = model.get_submodule(name).weight
        kind = "int8" if weight.shape[1] % GROUP else form
        codes, scales = rounded(weight, kind)
        layer.store = WeightOnly(kind, weight.shape[1], weight.dtype)
        layer.weight = nn.Parameter(codes, requires_grad=False)
        layer.scale = nn.Parameter(scales, requires_grad=False)
    return copy


def rounded(weight: Tensor, form: str) -> tuple[Tensor, Tensor]:
    """Round a weight, [rows, width]. Returns codes and scales as ``kernels/weight_only_linear.py`` reads them."""
    wide = weight.float()
    if form == "int8":
        scale = wide.abs().amax(1).clamp(min=1e-12) / 127
        return (wide / scale[:, None]).round().to(torch.int8), scale
    groups = wide.view(len(wide), -1, GROUP)
    scale = (groups.abs().amax(2).clamp(min=1e-4) / (OFFSET - 1)).half()
    codes = ((groups / scale.float()[..., None]).round() + OFFSET).clamp(0, 2 * OFFSET - 1).to(torch.uint8)
    low, high = codes.split(GROUP // 2, dim=2)  # byte j has weight j and weight 16 + j of its group
    return (low | high << 4).reshape(len(wide), -1), scale
