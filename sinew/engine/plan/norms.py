"""The affine part of a norm, folded into the linear layers that read it: W (g * n + b) = (W g) n + W b."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from sinew.engine.plan.prefix_end import KeyValueLayer
from sinew.engine.plan.rewrite import Rewrite, Status, spans
from sinew.layers.connector import PixelShuffleConnector
from sinew.layers.decoder import AdaptiveDecoderLayer, DecoderLayer
from sinew.layers.linear import Linear
from sinew.layers.norm import GemmaRMSNorm, LayerNorm, RMSNorm, rms_normalize
from sinew.layers.vit import ViTLayer
from sinew.models.base import FlowModel

Site = tuple[str, nn.Module, str, list[Linear]]  # name, the norm's parent and attribute, its readers


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


def sites(model: Any) -> Iterator[Site]:
    for name, module in model.named_modules():
        if isinstance(module, ViTLayer):
            attn = module.attn
            yield f"{name}.norm1", module, "norm1", [attn.q_proj, attn.k_proj, attn.v_proj]
            yield f"{name}.norm2", module, "norm2", [module.mlp.fc1]
        elif isinstance(module, DecoderLayer):
            own = module.attn
            readers = [own.q_proj] if own.is_cross else [own.q_proj, own.k_proj, own.v_proj]
            yield f"{name}.input_norm", module, "input_norm", readers
            yield f"{name}.post_norm", module, "post_norm", [module.mlp.gate_proj, module.mlp.up_proj]
        elif isinstance(module, KeyValueLayer):
            yield f"{name}.input_norm", module, "input_norm", [module.attn.k_proj, module.attn.v_proj]
    connector = model.connector
    reader = connector.proj if isinstance(connector, PixelShuffleConnector) else connector
    yield "vision.norm", model.vision, "norm", [reader]
    if isinstance(model.expert.norm, RMSNorm):
        yield "expert.norm", model.expert, "norm", [model.action_out_proj]


def fold(norm: RMSNorm | LayerNorm, readers: list[Linear]) -> nn.Module:
    """Give the norm's affine part to its readers; returns what is left of the norm."""
    unit: nn.Module
    shift: Tensor | None
    if isinstance(norm, LayerNorm):
        scale, shift, unit = norm.weight.float(), norm.bias.float(), UnitLayerNorm(norm)
    else:
        offset = 1.0 if isinstance(norm, GemmaRMSNorm) else 0.0
        scale, shift, unit = offset + norm.weight.float(), None, UnitRMSNorm(norm)
    for reader in readers:
        weight = reader.weight.float()
        repeats = weight.shape[1] // len(scale)  # a pixel shuffle puts several tokens' channels in a row
        if shift is not None:
            bias = weight @ shift.repeat(repeats)
            dtype = reader.weight.dtype
            if reader.bias is not None:
                bias, dtype = bias + reader.bias.float(), reader.bias.dtype
            reader.bias = nn.Parameter(bias.to(dtype), requires_grad=False)
        folded = (weight * scale.repeat(repeats)).to(reader.weight.dtype)
        reader.weight = nn.Parameter(folded, requires_grad=False)
    return unit


def _fold_norms(model: FlowModel) -> tuple[Status, str, tuple[str, ...]]:
    names = []
    for name, parent, attribute, readers in list(sites(model)):
        setattr(parent, attribute, fold(getattr(parent, attribute), readers))
        names.append(name)
    reason = "each norm has linear layers as its only readers"
    if any(isinstance(module, AdaptiveDecoderLayer) for module in model.modules()):
        reason += "; the expert's adaptive norms stay, their scale changes with the solver's time"
    return "applied", reason, spans(names)


FOLD_NORMS = Rewrite("fold-norms", "a norm's affine part goes into the next linear layer", _fold_norms)
