"""Cost of an observation by stage, for an opened bundle, from the same trace as ``sinew perf``."""

from __future__ import annotations

from typing import Any

from sinew.bundle import Bundle

from sinew_perf.program import of_opened
from sinew_perf.trace import STAGES

UNREAD = "not read"


def cost_record(bundle: Bundle) -> dict[str, Any]:
    """Return parameters, stored bytes and FLOPs of each stage.

    A weight belongs to the first stage that reads it. "flops" counts all runs of a stage for one chunk in the eager
    engine. Only matrix products, convolutions and attention count.

    Args:
        bundle: The bundle.

    Returns:
        The costs, ready for JSON.

    Raises:
        SinewError: The bundle contains exported graphs, which have no weights.
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
