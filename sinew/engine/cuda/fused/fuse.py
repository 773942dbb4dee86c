"""Make a planned model use fused kernels: give each module its fused class.

The file also lists the rewrites that must run before.

The models' own code contains no kernels. A module is fused if the plan prepared the inputs of its kernel: packed
projections, norms without weights, and one precision. Otherwise the module stays unchanged, and the plan's outcome
contains the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from sinew.core import SinewError
from sinew.engine.clone import clone_model
from sinew.engine.cuda.fp8.linear import Fp8Linear
from sinew.engine.cuda.fp8.scales import linears, use_fp8
from sinew.engine.cuda.fused.ends import (
    FusedActionTime,
    FusedDecode,
    PatchTower,
    TabulatedModulation,
    folds_away,
    give_patches,
)
from sinew.engine.cuda.fused.layers import FusedAdaptiveLayer, FusedAttention, FusedKeyValueLayer, FusedLayer
from sinew.engine.cuda.fused.ops import Ops
from sinew.engine.cuda.fused.rows import CONSTANT
from sinew.engine.cuda.fused.step import WholeStep
from sinew.engine.cuda.fused.vision import RowwiseTower, RowwiseViTLayer
from sinew.engine.cuda.lowbit.weights import WeightOnly
from sinew.engine.plan.norms import UnitLayerNorm
from sinew.engine.plan.packing import PackedAttention, PackedKeyValue, PackedMLP, PackedViTAttention
from sinew.engine.plan.plan import REWRITES, Plan
from sinew.engine.plan.prefix_end import KeyValueLayer
from sinew.engine.plan.rewrite import (
    RewriteOutcome,
    become,
    exactly,
    foreign,
    left_out,
    loaded_class,
    spans,
)
from sinew.engine.plan.time_tables import SplitActionTime
from sinew.layers.decoder import AdaptiveDecoderLayer, DecoderAttention, DecoderLayer, GatedMLP
from sinew.layers.linear import Linear, not_linear
from sinew.layers.norm import AdaRMSNorm
from sinew.layers.vit import LayerScale, VisionTransformer, ViTAttention, ViTLayer, ViTMLP
from sinew.models.base import AutoregressiveModel
from sinew.models.expert import ExpertModel

# Engine cuda uses all rewrites that save launches or bytes, except the rewrites below. pi0's state token would need
# another pass over all weights of the expert (0.55 GB) with `constant-kv`. Without that rewrite, the state and 63
# actions fill the 64 rows of a tile.
LEFT_OUT = {
    "constant-kv": "the state's pass would stream the expert's weights for one row",
    "sigmoid-gelu": "it is for float32 on a CPU; the gated kernel has the activation in its epilogue",
}
ON_CUDA = tuple(name for name in REWRITES if name not in LEFT_OUT)


@dataclass(frozen=True)
class KernelFusion:
    """The replacement of one kind of module.

    Attributes:
        kind: The class of the modules.
        fits: Returns the reason why a module cannot be fused, or None.
        into: The fused class.
    """

    kind: type[nn.Module]
    fits: Callable[[Any], str | None]
    into: type[nn.Module]


def _attention(attn: Any) -> str | None:
    D = attn.head_dim
    return f"head size {D}" if D < 16 or D & (D - 1) else None


def _layer(layer: Any) -> str | None:
    attn = layer.attn
    if unknown := foreign(attn, DecoderAttention) or foreign(layer.mlp, GatedMLP):
        return unknown
    if attn.q_norm is not None or attn.o_norm is not None:
        return "norms of heads, or before a projection"
    if layer.mlp.kind not in ("silu", "gelu_tanh"):
        return f"activation {layer.mlp.kind}"
    if not (attn.is_cross or isinstance(attn, PackedAttention)) or not isinstance(layer.mlp, PackedMLP):
        return "not packed"
    read = [attn.q_proj if attn.is_cross else attn.qkv_proj, attn.o_proj]
    if why := _weights(*read, layer.mlp.gate_up_proj, layer.mlp.down_proj):
        return why
    norms = (layer.input_norm, layer.post_norm)
    if not all(isinstance(norm, AdaRMSNorm) or _norm_fits(layer, norm) for norm in norms):
        return "norms not folded"
    named = layer.named_modules()
    own = {m.dtype for name, m in named if isinstance(m, Linear) and not name.endswith(".dense")}
    return _attention(attn) or ("mixed precision" if len(own) > 1 else None)


def _weights(*layers: nn.Module) -> str | None:
    """Return the reason why kernels cannot use the stored weights of these layers, or None if kernels can use them."""
    return next(filter(None, (not_linear(layer) for layer in layers if not low_bit(layer))), None)


def low_bit(module: nn.Module) -> bool:
    """Return True if a linear layer of ``module`` has a low-bit weight, which the kernel of this weight multiplies."""
    return any(isinstance(getattr(each, "store", None), WeightOnly) for each in module.modules())


def _in_fp8(module: nn.Module) -> bool:
    return any(isinstance(each, Fp8Linear) for each in module.modules())


def _norm_fits(layer: nn.Module, norm: nn.Module) -> bool:
    """Return True if the kernels of ``layer`` can compute a norm: without a weight, or before low-bit weights."""
    return folds_away(norm) or (low_bit(layer) and type(norm) in CONSTANT)


def _last(layer: Any) -> str | None:
    if not isinstance(layer.attn, PackedKeyValue):
        return "not packed"
    if layer.attn.k_norm is not None:
        return "norms of heads"
    return None if _norm_fits(layer, layer.input_norm) else "norm not folded"


def _vision(layer: Any) -> str | None:
    if unknown := foreign(layer.attn, ViTAttention) or foreign(layer.mlp, ViTMLP):
        return unknown
    if layer.mlp.approximate != "tanh" or isinstance(layer.scale1, LayerScale):
        return "GELU in its exact form, or LayerScale"
    norms = [
        isinstance(norm, UnitLayerNorm) or _norm_fits(layer, norm) for norm in (layer.norm1, layer.norm2)
    ]
    if not all(norms) or not isinstance(layer.attn, PackedViTAttention):
        return "not packed, or norms not folded"
    return _weights(layer.attn.qkv_proj, layer.attn.o_proj, layer.mlp.fc1, layer.mlp.fc2)


FUSIONS = (
    KernelFusion(DecoderAttention, _attention, FusedAttention),
    KernelFusion(KeyValueLayer, _last, FusedKeyValueLayer),
    KernelFusion(AdaptiveDecoderLayer, _layer, FusedAdaptiveLayer),
    KernelFusion(DecoderLayer, _layer, FusedLayer),
)


# Classes of layers that read the vectors of TabulatedModulation, and classes that need no such vectors.
WITH_VECTORS = (FusedLayer, FusedAdaptiveLayer)


@torch.no_grad()
def fuse(
    plan: Plan,
    ops: Ops,
    fp8: tuple[str, ...] = (),
    scales: Mapping[str, float] | None = None,
) -> Plan:
    """Return a plan whose model uses kernels. The model is a copy that shares its parameters with ``plan``, which is
    not changed.

    Args:
        plan: The plan.
        ops: The operations.
        fp8: Parts of the model whose linear layers become e4m3 (see ``CudaOptions.fp8``).
        scales: For each FP8 layer's name, the scale of its input. A layer without a scale stays in its precision.
    """
    model: Any = clone_model(plan.model)
    outcomes = [*plan.outcomes]
    if fp8:
        outcomes.append(_to_fp8(model, fp8, scales or {}))
    outcomes += [_apply(fusion, model, ops) for fusion in FUSIONS]
    outcomes.append(_towers(model, ops))
    outcomes.append(_ends(model, ops))
    outcomes.append(_step(model, ops))
    return Plan(model.eval().requires_grad_(False), tuple(outcomes))


def _apply(fusion: KernelFusion, model: Any, ops: Ops) -> RewriteOutcome:
    fused_names, skipped = [], {}
    for name, module in list(model.named_modules()):
        if not isinstance(module, fusion.kind):
            continue
        if unknown := foreign(module, fusion.kind):
            skipped[name] = unknown
            continue
        by_library = (_in_fp8(module) or low_bit(module)) and hasattr(fusion.into, "fused_rows")
        if why := "no row-wise kernels" if by_library and ops.rows is None else fusion.fits(module):
            skipped[name] = why
            continue
        become(module, fusion.into)
        fused: Any = module
        fused.ops = ops
        if by_library:
            fused.fused_rows = 0
        fused_names.append(name)
    name = f"fuse {fusion.kind.__name__}"
    if not fused_names and not skipped:
        return RewriteOutcome(name, "not applicable", "the model has none")
    reason = f"{fusion.into.__name__ if fused_names else 'left as planned,'} over {type(ops).__name__}"
    return RewriteOutcome(
        name, "applied" if fused_names else "not applicable", reason + left_out(skipped), spans(fused_names)
    )


def _towers(model: Any, ops: Ops) -> RewriteOutcome:
    """Fuse the vision towers.

    A tower is fused as a whole if all of its layers fit. Otherwise only its patch embedding becomes a product over rows
    of patches.
    """
    fused_names, skipped = [], {}
    for name, tower in list(model.named_modules()):
        if unknown := foreign(tower, VisionTransformer) or foreign(tower, ViTLayer):
            skipped[name] = unknown
        if not exactly(tower, VisionTransformer):
            continue
        whys = (foreign(layer, ViTLayer) or _vision(layer) for layer in tower.layers)
        why = "no row-wise kernels" if ops.rows is None else next(filter(None, whys), None)
        if tower.config.prefix_tokens or not tower.config.final_norm:
            why = "tokens before the patches, or no final norm"
        become(tower, PatchTower if why else RowwiseTower)
        give_patches(tower)
        if why:
            skipped[name] = why
            continue
        for layer in tower.layers:
            become(layer, RowwiseViTLayer)
            layer.rows = ops.rows
        tower.rows = ops.rows
        fused_names.append(name)
    if not fused_names and not skipped:
        return RewriteOutcome("fuse ViTLayer", "not applicable", "the model has none")
    reason = f"{RowwiseViTLayer.__name__ if fused_names else 'left as planned,'} over {type(ops).__name__}"
    where = tuple(f"{name}.layers" for name in fused_names)
    return RewriteOutcome(
        "fuse ViTLayer", "applied" if fused_names else "not applicable", reason + left_out(skipped), where
    )


def _ends(model: Any, ops: Ops) -> RewriteOutcome:
    name = "fuse action projections"
    if getattr(type(model), "decode_actions", None) is not ExpertModel.decode_actions:
        return RewriteOutcome(name, "not applicable", "the model has no expert that is known here")
    adaptive = isinstance(model.expert.norm, AdaRMSNorm)
    fused = all(isinstance(layer, WITH_VECTORS) for layer in model.expert.layers)
    if not fused or not (adaptive or folds_away(model.expert.norm)):
        return RewriteOutcome(name, "not applicable", "the head's layers are not fused")
    ends = [module for part, module in model.named_children() if part.startswith("action_")]
    if why := next(filter(None, map(not_linear, ends)), None):
        return RewriteOutcome(name, "not applicable", why)
    become(model, TabulatedModulation if adaptive else FusedDecode)
    model.ops = ops
    if adaptive:
        # The table contains products of the weights and the shifts, which low-bit weights do not have. PyTorch's own
        # operations compute each norm separately.
        model.scaled = ops.rows is not None and not low_bit(model.expert)
    elif isinstance(model, SplitActionTime):
        become(model, FusedActionTime)
    return RewriteOutcome(name, "applied", f"both ends of a step over {type(ops).__name__}", ("expert.norm",))


def _step(model: Any, ops: Ops) -> RewriteOutcome:
    """Let the first suitable operation of ``ops.steps`` compute each step of the head."""
    name, family = "fuse head step", loaded_class(model).__name__
    if isinstance(model, AutoregressiveModel):
        return RewriteOutcome(name, "not applicable", f"{family} generates tokens and has no solver steps")
    whys = []
    for kind in ops.steps:
        why = kind.why_not(model)
        if why is None:
            model.head_step = kind(model)
            become(model, WholeStep)
            return RewriteOutcome(name, "applied", f"{kind.name} computes a whole step of {family}", ("act",))
        whys.append(f"not {kind.name} ({why})")
    known = whys or [f"{type(ops).__name__} has no operation for a whole step"]
    reason = f"the layers of {family} compute each step; {', '.join(known)}"
    return RewriteOutcome(name, "not applicable", reason)


def _to_fp8(model: Any, fp8: tuple[str, ...], scales: Mapping[str, float]) -> RewriteOutcome:
    layers = linears(model, fp8)
    if empty := [part for part in fp8 if not linears(model, (part,))]:
        raise SinewError(
            f"fp8: {empty[0]}: this model has no linear layers there that can be e4m3; remove {empty[0]} from the"
            " recipe"
        )
    stay = use_fp8(model, layers, scales)
    reason = "e4m3, a scale per channel of a weight and a calibrated scale per input"
    reason += left_out(dict.fromkeys(stay, "did not run in the calibration"))
    return RewriteOutcome("fp8", "applied", reason, spans([name for name in layers if name not in stay]))
