"""Compute what a rewrite saves per observation: the program before and after it, traced on tensors without memory.

FLOPs are those of matrix products, convolutions and attention (two per multiply-add), as
``torch.utils.flop_counter`` counts them. Bytes are what the operators would move if each read its inputs
and wrote its output: no caches, no fusion, one program for all engines. Both follow from shapes alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from sinew.engine.clone import copy_modules
from sinew.engine.example import Inputs, Shapes
from sinew.engine.plan import meta
from sinew.engine.plan.plan import Plan
from sinew.models.base import Model

aten = torch.ops.aten
ROW_READERS = {aten.embedding, aten.index, aten.index_select, aten.gather}  # read the rows they return


@dataclass(frozen=True, slots=True)
class Cost:
    flops: int = 0
    bytes: int = 0
    weights: int = 0  # bytes of the parameters that the model holds

    def __sub__(self, other: Cost) -> Cost:
        return Cost(self.flops - other.flops, self.bytes - other.bytes, self.weights - other.weights)


class _Meter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.flops = self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = meta.run(func, args, kwargs)
        packet = func._overloadpacket  # noqa: SLF001 - the only way from an overload to its operator
        if packet in flop_registry:
            self.flops += flop_registry[packet](*args, **kwargs, out_val=out)
        read = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        storages = {tensor.untyped_storage()._cdata for tensor in read}  # noqa: SLF001 - identity
        is_view = made and all(tensor.untyped_storage()._cdata in storages for tensor in made)  # noqa: SLF001
        if func._schema.is_mutable or not is_view:  # noqa: SLF001
            written = sum(map(_nbytes, made))
            self.bytes += written + (written if packet in ROW_READERS else sum(map(_nbytes, read)))
        return out


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def on_meta(model: Model) -> Model:
    """Return the model's shapes and dtypes without its memory."""
    held = [*model.parameters(), *model.buffers()]
    empty: dict[int, Any] = {
        id(tensor): torch.nn.Parameter(tensor.detach().to("meta"), requires_grad=False) for tensor in held
    }
    return copy_modules(model, empty)


@torch.no_grad()  # not inference_mode: it would hand over composite operators whole
def cost(plan: Plan, shapes: Shapes) -> Cost:
    """Return the cost of one observation, on a plan over a meta model (:func:`on_meta`)."""
    model, inputs = plan.model, Inputs.example(plan.model, shapes)
    noise = torch.empty(1, *model.noise_shape, device=inputs.state.device)
    plan.time_embeddings(shapes.steps)  # a table is made once, not per observation
    once, per_step = _Meter(), _Meter()
    with once:
        context = inputs.read(model)
    with per_step:
        model.run_head(noise, shapes.steps, plan.schedule(shapes.steps), context)
    weights, runs = sum(map(_nbytes, model.parameters())), model.head_runs(shapes.steps)
    return Cost(once.flops + runs * per_step.flops, once.bytes + runs * per_step.bytes, weights)


def savings(model: Model, names: Iterable[str], shapes: Shapes) -> tuple[Cost, dict[str, Cost]]:
    """Return the cost without any rewrite, and what each of ``names`` takes off it, applied one after another."""
    empty = on_meta(model)
    whole = before = cost(Plan.of(empty, rewrites=()), shapes)
    saved, done = {}, []
    for name in names:
        done.append(name)
        after = cost(Plan.of(empty, rewrites=done), shapes)
        saved[name] = before - after
        before = after
    return whole, saved
