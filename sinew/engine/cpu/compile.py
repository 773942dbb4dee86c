"""A planned model with compiled operators between its products: which modules are given which class."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from sinew.engine.cpu.between import attend, gelu_, silu_times_
from sinew.engine.plan import Outcome, Plan
from sinew.engine.plan.rewrite import Status, become, foreign, left_out, spans
from sinew.layers.decoder import DecoderAttention, GatedMLP, KeyValue
from sinew.layers.vit import ViTAttention, ViTMLP


class CompiledViTAttention(ViTAttention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads = (-1, self.head_dim)
        return attend(q.unflatten(-1, heads), k.unflatten(-1, heads), v.unflatten(-1, heads), None)


class CompiledAttention(DecoderAttention):
    def attend(self, q: Tensor, kv: KeyValue, mask: Tensor, own: KeyValue | None = None) -> Tensor:
        if own is not None:
            kv = torch.cat([kv[0], own[0]], dim=1), torch.cat([kv[1], own[1]], dim=1)
        return attend(q, *kv, mask)


class CompiledViTMLP(ViTMLP):
    def forward(self, x: Tensor) -> Tensor:
        h = self.fc1(x)
        gelu_(h)
        return self.fc2(h)


class CompiledMLP(GatedMLP):
    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_proj(x), self.up_proj(x)
        if self.kind == "silu":
            silu_times_(gate, up)
        else:
            gelu_(gate)
            gate.mul_(up)
        return self.output(gate)


def _always(_: Any) -> str | None:
    return None


def _vit_mlp(module: Any) -> str | None:
    return None if module.approximate == "tanh" else "GELU in its exact form"


def _gated(module: Any) -> str | None:
    if not hasattr(module, "gate_proj"):
        return "gate and up are packed"
    return None if module.kind in ("silu", "gelu_tanh") else f"activation {module.kind}"


COMPILED: tuple[tuple[type[nn.Module], Callable[[Any], str | None], type[nn.Module]], ...] = (
    (ViTAttention, _always, CompiledViTAttention),
    (DecoderAttention, _always, CompiledAttention),
    (ViTMLP, _vit_mlp, CompiledViTMLP),
    (GatedMLP, _gated, CompiledMLP),
)


def compile_between(plan: Plan) -> Plan:
    """Return ``plan`` with compiled operators in its model, which is changed in place, and what became of each kind."""
    outcomes = [*plan.outcomes]
    for kind, misfit, into in COMPILED:
        done, left = [], {}
        for name, module in list(plan.model.named_modules()):
            if not isinstance(module, kind):
                continue
            if why := foreign(module, kind) or misfit(module):
                left[name] = why
                continue
            become(module, into)
            done.append(name)
        reason = "compiled for this CPU" if done or left else "the model has none"
        status: Status = "applied" if done else "not applicable"
        outcomes.append(Outcome(f"compile {kind.__name__}", status, reason + left_out(left), spans(done)))
    return Plan(plan.model, tuple(outcomes), plan._tables)  # noqa: SLF001 - the same plan
