"""Multiply the weight and bias of a norm into the linear layers that read its output ("fold"): W (g * n + b) = (W g)
n + W b.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch.nn.functional as F
from torch import Tensor, nn

from sinew.engine.plan.rewrite import Rewrite, Status, loaded_class, verdict
from sinew.layers.fold_sites import FoldSite
from sinew.layers.linear import Linear, not_linear
from sinew.layers.norm import AdaRMSNorm, GemmaRMSNorm, LayerNorm, RMSNorm, rms_normalize
from sinew.models.base import Model


class UnitRMSNorm(nn.Module):
    def __init__(self, norm: RMSNorm):
        super().__init__()
        self.eps, self.dtype = norm.eps, norm.dtype

    def forward(self, x: Tensor) -> Tensor:
        return rms_normalize(x, self.eps).to(x.dtype)


class UnitLayerNorm(nn.Module):
    def __init__(self, norm: LayerNorm):
        super().__init__()
        self.shape, self.eps, self.dtype = norm.normalized_shape, norm.eps, norm.weight.dtype

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x.to(self.dtype), self.shape, eps=self.eps)


def sites(model: nn.Module) -> Iterator[tuple[str, FoldSite]]:
    """Yield each fold site of the model (a norm, and the layers that read its output) with its name."""
    names = {id(module): name for name, module in model.named_modules()}
    for module in model.modules():
        if "fold_sites" in vars(loaded_class(module)):
            for site in module.fold_sites():  # type: ignore[operator]
                yield f"{names[id(site.owner)]}.{site.norm}".lstrip("."), site


def linears(site: FoldSite) -> list[Linear] | str:
    """Return the linear layers that read the norm's output, or the reason as text why the norm cannot be folded into
    them.
    """
    norm, layers = getattr(site.owner, site.norm), []
    if type(norm) not in (RMSNorm, GemmaRMSNorm, LayerNorm):
        return f"{type(norm).__name__} is not a norm with constant weights"
    for reader in site.readers:
        if "inputs" in vars(loaded_class(reader)):
            layers += reader.inputs()  # type: ignore[operator]
        elif isinstance(reader, nn.Linear):
            layers.append(reader)
        else:
            return f"{loaded_class(reader).__name__} does not declare which layers read its input"
    for layer in layers:
        if why := not_linear(layer):
            return why
    return layers


def fold(norm: RMSNorm | LayerNorm, readers: list[Linear]) -> nn.Module:
    """Multiply the norm's weight and bias into the linear layers ``readers``. Return a norm without weight and bias."""
    unit: nn.Module
    shift: Tensor | None
    if isinstance(norm, LayerNorm):
        scale, shift, unit = norm.weight.float(), norm.bias.float(), UnitLayerNorm(norm)
    else:
        offset = 1.0 if isinstance(norm, GemmaRMSNorm) else 0.0
        scale, shift, unit = offset + norm.weight.float(), None, UnitRMSNorm(norm)
    for reader in readers:
        weight = reader.weight.float()
        repeats = weight.shape[1] // len(scale)  # after a pixel shuffle, an input has several tokens
        if shift is not None:
            bias = weight @ shift.repeat(repeats)
            dtype = reader.weight.dtype
            if reader.bias is not None:
                bias, dtype = bias + reader.bias.float(), reader.bias.dtype
            reader.bias = nn.Parameter(bias.to(dtype), requires_grad=False)
        folded = (weight * scale.repeat(repeats)).to(reader.weight.dtype)
        reader.weight = nn.Parameter(folded, requires_grad=False)
    return unit


def _fold_norms(model: Model) -> tuple[Status, str, tuple[str, ...]]:
    names, skipped = [], {}
    for name, site in list(sites(model)):
        readers = linears(site)
        if isinstance(readers, str):
            skipped[name] = readers
            continue
        setattr(site.owner, site.norm, fold(getattr(site.owner, site.norm), readers))
        names.append(name)
    reason = "each norm has linear layers as its only readers"
    if any(isinstance(module, AdaRMSNorm) for module in model.modules()):
        reason += "; adaptive norms are left out, because their scale changes with the solver's time"
    return verdict(names, skipped, reason, "no block declares which linear layers read its norm")


FOLD_NORMS = Rewrite(
    "fold-norms", "the weight and bias of a norm are multiplied into the next linear layer", _fold_norms
)
