"""Replace norms, attention and activations between the matrix products of a planned model by compiled operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from sinew.engine.cpu.fuse import FusedDecoderLayer, FusedViTLayer, decoder_apart, rounds_attention, vit_apart
from sinew.engine.cpu.kernels.float_kernels import attend, gelu_, silu_times_
from sinew.engine.cpu.kernels.layer_kernels import usable
from sinew.engine.plan.plan import Plan
from sinew.engine.plan.rewrite import RewriteOutcome, Status, become, foreign, left_out, spans
from sinew.layers.decoder import DecoderAttention, DecoderLayer, GatedMLP, KeyValue
from sinew.layers.stores.codes import apart, together
from sinew.layers.vit import ViTAttention, ViTLayer, ViTMLP


class CompiledViTAttention(ViTAttention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads = (-1, self.head_dim)
        q, k, v = (part.unflatten(-1, heads) for part in (q, k, v))
        return attend(q, k, v, None, rounds_attention(self))


class CompiledAttention(DecoderAttention):
    def attend(self, q: Tensor, kv: KeyValue, mask: Tensor, own: KeyValue | None = None) -> Tensor:
        if not usable(q):
            return super().attend(q, kv, mask, own)
        return attend(q, *kv, mask, rounds_attention(self), *(own or (None, None)))


class CompiledViTMLP(ViTMLP):
    def forward(self, x: Tensor) -> Tensor:
        h = self.fc1(x)
        gelu_(h)
        return self.fc2(h)


class SharedViTAttention(ViTAttention):
    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # [B, L, C] -> [B, L, C] each
        q, k, v = together((self.q_proj, self.k_proj, self.v_proj), x)
        return q, k, v


class SharedAttention(DecoderAttention):
    def heads(self, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        parts = together((self.q_proj, self.k_proj, self.v_proj), h)
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in parts)
        return q, k, v


class CompiledMLP(GatedMLP):
    def project(self, x: Tensor) -> tuple[Tensor, Tensor]:  # [B, L, C] -> [B, L, intermediate] each
        return self.gate_proj(x), self.up_proj(x)

    def forward(self, x: Tensor) -> Tensor:
        if not usable(x):
            return super().forward(x)
        gate, up = self.project(x)
        if self.kind == "silu":
            silu_times_(gate, up)
        else:
            gelu_(gate)
            gate.mul_(up)
        return self.output(gate)


class SharedMLP(CompiledMLP):
    def project(self, x: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = together((self.gate_proj, self.up_proj), x)
        return gate, up


def _always(_: Any) -> str | None:
    return None


def _vit_mlp(module: Any) -> str | None:
    return None if module.approximate == "tanh" else "GELU in its exact form"


def _gated(module: Any) -> str | None:
    if not hasattr(module, "gate_proj"):
        return "gate and up are packed"
    return None if module.kind in ("silu", "gelu_tanh") else f"activation {module.kind}"


def _attention_apart(module: Any) -> str | None:
    if not hasattr(module, "q_proj"):
        return "the projections are packed"
    if getattr(module, "is_cross", False):
        return "queries, keys and values read three tensors"
    return apart((module.q_proj, module.k_proj, module.v_proj))


def _gated_apart(module: Any) -> str | None:
    return _gated(module) or apart((module.gate_proj, module.up_proj))


COMPILED: tuple[tuple[str, type[nn.Module], Callable[[Any], str | None], type[nn.Module]], ...] = (
    ("compile", ViTAttention, _always, CompiledViTAttention),
    ("compile", DecoderAttention, _always, CompiledAttention),
    ("compile", ViTMLP, _vit_mlp, CompiledViTMLP),
    ("compile", GatedMLP, _gated, CompiledMLP),
    ("round once in", ViTAttention, _attention_apart, SharedViTAttention),
    ("round once in", DecoderAttention, _attention_apart, SharedAttention),
    ("round once in", GatedMLP, _gated_apart, SharedMLP),
    ("two calls for", DecoderLayer, decoder_apart, FusedDecoderLayer),
    ("two calls for", ViTLayer, vit_apart, FusedViTLayer),
)


def compile_floats(plan: Plan) -> Plan:
    """Return ``plan`` with compiled operators in its model, which is changed in place.

    Layers that read the same input become one call if their weights have one format. The input is then rounded once.
    ``outcomes`` of the returned plan lists the changes for each kind of module.
    """
    # Make a list of the modules first, because the loop changes their classes.
    outcomes, modules = [*plan.outcomes], list(plan.model.named_modules())
    for what, kind, mismatch, into in COMPILED:
        changed, skipped = [], {}
        for name, module in modules:
            if not isinstance(module, kind):
                continue
            if why := foreign(module, kind) or mismatch(module):
                skipped[name] = why
                continue
            become(module, into)
            if isinstance(module, (FusedDecoderLayer, FusedViTLayer)):
                module.fuse()
            changed.append(name)
        reason = "compiled for this CPU" if changed or skipped else "the model has none"
        status: Status = "applied" if changed else "not applicable"
        outcomes.append(
            RewriteOutcome(f"{what} {kind.__name__}", status, reason + left_out(skipped), spans(changed))
        )
    return Plan(plan.model, tuple(outcomes), plan._tables)  # noqa: SLF001 - the same plan
