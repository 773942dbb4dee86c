"""What an observation costs, stage by stage, of an opened bundle: from the trace that ``sinew perf`` reads."""

from __future__ import annotations

from typing import Any

from sinew.bundle import Bundle

from sinew_perf.program import of_opened
from sinew_perf.trace import STAGES

UNREAD = "not read"


def cost_record(bundle: Bundle) -> dict[str, Any]:
    """Return parameters, stored bytes and FLOPs of each stage. Raises :class:`SinewError` for exported graphs.

    A weight belongs to the stage that reads it first. "flops" are those of all runs of a stage for one chunk, of the
    eager engine; only products, convolutions and attention count.
    """
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
        stage["parameters"] += bundle.parameters(info)
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
