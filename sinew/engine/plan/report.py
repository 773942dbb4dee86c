"""What each rewrite does to one bundle's model, and what it saves."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from sinew.bundle import Bundle
from sinew.core import upcast_text
from sinew.engine.backend import BACKENDS
from sinew.engine.choose import choose_precision
from sinew.engine.example import Shapes
from sinew.engine.loading import load_model
from sinew.engine.plan.cost import savings
from sinew.engine.plan.engine import ON_CPU
from sinew.engine.plan.plan import REWRITES, Plan
from sinew.engine.stores import Storage
from sinew.processing import Processor

PROMPT = "pick up the cube"


def plan_record(bundle: Bundle, dtype: str | None = None) -> dict[str, Any]:
    """The plan as plain containers. Computed from shapes: no weight is read.

    Savings are per observation of all cameras and the prompt above, each against the plan with the rewrites
    above it in the list. ``mapped`` are the bytes of weights that stay in the bundle's memory map.
    """
    manifest = bundle.manifest
    spec, image = manifest.spec, manifest.processing.image
    chosen, storage, reason = choose_precision(bundle, dtype, "cpu", BACKENDS["plan"])
    model = load_model(bundle, torch.device("meta"), chosen, Storage(half=bool(storage)))
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
    """Bytes of parameters that lie in the bundle's file, or would: see :meth:`Bundle.tensors`."""
    size = len(bundle.file.map)
    return sum(p.nbytes for p in model.parameters() if p.untyped_storage().nbytes() == size)
