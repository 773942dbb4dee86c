"""``sinew inspect --plan``: what each rewrite does to one bundle's model, and what it saves."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from sinew.cli import terminal
from sinew.core import upcast_text

if TYPE_CHECKING:
    from sinew.bundle import Bundle

PROMPT = "pick up the cube"


def plan_record(bundle: Bundle, dtype: str | None = None) -> dict[str, Any]:
    """The plan as plain containers. Computed from shapes: no weight is read.

    Savings are per observation of all cameras and the prompt above, each against the plan with the rewrites
    above it in the list. ``mapped`` are the bytes of weights that stay in the bundle's memory map.
    """
    import torch

    from sinew.engine.backend import BACKENDS
    from sinew.engine.choose import choose_precision
    from sinew.engine.example import Shapes
    from sinew.engine.loading import load_model
    from sinew.engine.plan.cost import savings
    from sinew.engine.plan.engine import ON_CPU
    from sinew.engine.plan.plan import REWRITES, Plan
    from sinew.engine.stores import Storage
    from sinew.processing import Processor

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


def show_plan(record: dict[str, Any]) -> None:
    from rich.table import Table

    console, shapes = terminal.console(), record["shapes"]
    table = Table("rewrite", "status", box=None, pad_edge=False)
    for header in ("GFLOP", "MB moved", "MB weights"):
        table.add_column(header, justify="right")
    table.add_column("why, and where", overflow="fold")
    for row in record["rewrites"]:
        numbers = [row.get(f"{key}_saved") for key in ("flops", "bytes", "weights")]
        cells = [
            "" if n is None else f"{-n / unit:+.{digits}f}"
            for n, unit, digits in zip(numbers, (1e9, 1e6, 1e6), (3, 1, 1), strict=True)
        ]
        where = ", ".join(row["where"])
        table.add_row(row["name"], row["status"], *cells, row["reason"] + (f" [{where}]" if where else ""))
    table.add_section()
    for name in ("eager", "planned"):
        total = record[name]
        cells = [
            f"{total['flops'] / 1e9:.3f}",
            f"{total['bytes'] / 1e6:.1f}",
            f"{total['weights'] / 1e6:.1f}",
        ]
        table.add_row(name, "", *cells, f"{total['mapped'] / 1e6:.1f} MB of the weights stay in the file")
    console.print(
        f"{record['architecture']} in {record['dtype']} ({record['dtype_reason']}), per observation:"
        f" {shapes['views']} views of {shapes['height']}x{shapes['width']}, {shapes['tokens']} prompt tokens,"
        f" {shapes['steps']} solver steps",
        highlight=False,
        soft_wrap=True,
    )
    console.print(table)
    left_out = ", ".join(record["left_out_on_cpu"])
    console.print(
        f"Under PyTorch on a CPU, the engine leaves out {left_out or 'none of these'} (docs/plan.md).",
        highlight=False,
        soft_wrap=True,
    )
