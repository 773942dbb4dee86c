"""Count the effect of each rewrite of the plan on a bundle's model, by comparing the program before and after it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from sinew.bundle import Bundle
from sinew.core import dtype_word, upcast_text
from sinew.engine.backend import BACKENDS, EngineOptions, with_precision
from sinew.engine.clone import on_meta
from sinew.engine.example import Shapes
from sinew.engine.loading import load_model
from sinew.engine.plan.engine import ON_CPU
from sinew.engine.plan.plan import REWRITES, Plan
from sinew.models.base import Model
from sinew.processing import Processor

from sinew_perf.trace import trace

PROMPT = "pick up the cube"


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of one observation.

    Attributes:
        flops: FLOPs.
        bytes: Bytes that the operators move.
        weights: Bytes of the model's weights.
    """

    flops: int = 0
    bytes: int = 0
    weights: int = 0

    def __sub__(self, other: Cost) -> Cost:
        return Cost(self.flops - other.flops, self.bytes - other.bytes, self.weights - other.weights)


def cost(plan: Plan, shapes: Shapes) -> Cost:
    """Return the cost of one observation. The plan must be made from a model on the meta device (:func:`on_meta`),
    which has shapes but no data.
    """
    recorded = trace(plan.model, shapes, plan)
    calls = [(call, recorded.steps if call.stage == "head" else 1) for call in recorded.calls]
    return Cost(
        sum(runs * call.flops for call, runs in calls),
        sum(runs * operand.nbytes for call, runs in calls for operand in call.operands),
        sum(parameter.nbytes for parameter in plan.model.parameters()),
    )


def savings(model: Model, names: Iterable[str], shapes: Shapes) -> tuple[Cost, dict[str, Cost]]:
    """Return the cost without any rewrite, and the saving of each rewrite. The rewrites are applied one after
    another.

    Args:
        model: The model.
        names: Names of the rewrites, in their order.
        shapes: Shapes of a request.
    """
    empty = on_meta(model)
    whole = before = cost(Plan.of(empty, rewrites=()), shapes)
    saved, done = {}, []
    for name in names:
        done.append(name)
        after = cost(Plan.of(empty, rewrites=done), shapes)
        saved[name] = before - after
        before = after
    return whole, saved


def plan_record(bundle: Bundle, dtype: str | None = None) -> dict[str, Any]:
    """Return the plan, ready for JSON. The plan is computed from shapes only, and no weight is read.

    Savings are per observation with all cameras and the prompt ``PROMPT``. Each saving compares the plan with and
    without the rewrite, based on all previous ones. ``mapped`` is the number of bytes of weights that stay mapped from
    the bundle.

    Args:
        bundle: The bundle.
        dtype: Compute type. None for the engine's choice.
    """
    manifest = bundle.manifest
    spec, image = manifest.spec, manifest.processing.image
    word = None if dtype is None else dtype_word(dtype)
    options, reason = with_precision(BACKENDS["plan"], bundle, EngineOptions("cpu"), word)
    chosen, storage = options.dtype, options.storage
    model = load_model(bundle, torch.device("meta"), chosen, half_stays=bool(storage))
    prompt = Processor(manifest).prompter.encode(PROMPT, np.zeros(spec.state.dim, np.float32))
    shapes = Shapes(spec.views, image.height, image.width, len(prompt), spec.solver_steps)
    plan = Plan.of(model)
    eager, saved = savings(model, plan.applied, shapes)
    rows = []
    for outcome in plan.outcomes:
        gain = asdict(saved[outcome.name]) if outcome.name in saved else {}
        rows.append(
            asdict(outcome)
            | {"summary": REWRITES[outcome.name].summary}
            | {f"{k}_saved": n for k, n in gain.items()}
        )
    planned = {
        key: value - sum(asdict(cost)[key] for cost in saved.values()) for key, value in asdict(eager).items()
    }
    return {
        "bundle": str(bundle.path),
        "architecture": manifest.architecture,
        "dtype": upcast_text(storage) if storage else chosen,
        "dtype_reason": reason,
        "shapes": asdict(shapes),
        "eager": asdict(eager) | {"mapped": mapped_bytes(bundle, model)},
        "planned": planned | {"mapped": mapped_bytes(bundle, plan.model)},
        "rewrites": rows,
        "left_out_on_cpu": [name for name in plan.applied if name not in ON_CPU],
    }


def mapped_bytes(bundle: Bundle, model: Any) -> int:
    """Return the bytes of parameters that are mapped from the bundle's file, see :meth:`Bundle.tensors`."""
    size = len(bundle.file.map)
    return sum(p.nbytes for p in model.parameters() if p.untyped_storage().nbytes() == size)
