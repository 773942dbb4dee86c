"""Costs of an observation, stage by stage, for ``sinew inspect``: from the trace that ``sinew perf`` reads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sinew.cli import terminal
from sinew.cli.inspect import parameters_of

if TYPE_CHECKING:
    from sinew.bundle import Bundle

UNREAD = "not read"


def cost_record(bundle: Bundle) -> dict[str, Any]:
    """Return parameters, stored bytes and FLOPs of each stage. Raises :class:`SinewError` for exported graphs.

    A weight belongs to the stage that reads it first. "flops" are those of all runs of a stage for one chunk, of the
    eager engine; only products, convolutions and attention count.
    """
    from sinew.perf.program import of_opened
    from sinew.perf.trace import STAGES

    program = of_opened(bundle)
    found, shapes = program.trace, program.shapes
    first = {name: calls[0].stage for name, calls in found.readers().items()}
    stages = {
        name: {"parameters": 0, "bytes": 0, "runs": found.steps if name == "head" else 1, "flops": 0}
        for name in STAGES
    }
    for info in bundle.infos.values():
        empty = {"parameters": 0, "bytes": 0, "runs": 0, "flops": 0}
        stage = stages.setdefault(first.get(info.name, UNREAD), empty)
        stage["parameters"] += parameters_of(bundle, info)
        stage["bytes"] += info.nbytes
    for name in STAGES:
        stages[name]["flops"] = found.flops(name) * stages[name]["runs"]
    return {
        "views": shapes.views,
        "prompt_tokens": shapes.tokens,
        "solver_steps": shapes.steps,
        "stages": stages,
        "flops": sum(stage["flops"] for stage in stages.values()),
    }


def show_cost(record: dict[str, Any]) -> None:
    """Print the table of :func:`cost_record`."""
    from rich.table import Table

    console = terminal.console(markup=False)
    table = Table("stage", "parameters", "MB", "runs", "GFLOP a chunk", box=None, pad_edge=False)
    for name, stage in record["stages"].items():
        megabytes, flops = f"{stage['bytes'] / 1e6:.1f}", f"{stage['flops'] / 1e9:.3f}"
        table.add_row(name, f"{stage['parameters']:,}", megabytes, str(stage["runs"]), flops)
    table.add_row("total", "", "", "", f"{record['flops'] / 1e9:.3f}")
    console.print(table)
    console.print(
        f"of {record['views']} views, {record['prompt_tokens']} tokens of prompt and {record['solver_steps']} solver"
        " steps on the eager engine, as `sinew perf` counts them",
        soft_wrap=True,
    )
