"""What ``sinew bench`` says beside its times: the roofline of this machine, and the calibrated prediction.

Both need the machine's measured peaks, which ``sinew perf calibrate`` stores for a processor and a number of
threads. Without them, or for a dtype or device that was not measured, there is a reason instead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from sinew import machine

if TYPE_CHECKING:
    from sinew.policy import Policy

STAGE_NAMES = {"vision": "vision", "language": "prefix", "action": "solver"}  # of a trace -> of a timing


def roofline_record(policy: Policy, threads: int, described: dict[str, Any]) -> dict[str, Any]:
    """Per stage: milliseconds at the measured peaks, and predicted with the band. ``described``: the report's
    ``policy``. ``reason`` says why there is nothing."""
    from sinew.core import SinewError
    from sinew.engine.eager import EagerEngine
    from sinew.engine.plan.cost import Shapes
    from sinew.perf import calibration
    from sinew.perf.program import of_engine

    if policy.device.type != "cpu":
        return {"reason": f"no measured peaks for {policy.device}"}
    if not isinstance(policy.engine, EagerEngine):
        return {"reason": f"{type(policy.engine).__name__} does not run the traced program"}
    try:
        fitted = calibration.load(machine.cpu_model(), threads)
        if fitted is None:
            return {"reason": f"not calibrated for {threads} threads: sinew perf calibrate BUNDLE"}
        image = policy.manifest.processing.image
        shapes = Shapes(
            described["views"],
            image.height,
            image.width,
            described["prompt_tokens"],
            described["solver_steps"],
        )
        program = of_engine(policy.engine, shapes, policy.spec.name)
        fused, unfused = program.components("fused"), program.components("unfused")
        stages = {}
        for ideal, real in zip(fused, unfused, strict=True):
            predicted = fitted.predict(real)
            stages[STAGE_NAMES[ideal.name]] = {
                "roofline": 1e3 * calibration.roofline_seconds(ideal, fitted.speeds),
                "predicted": 1e3 * predicted.seconds,
                "low": 1e3 * predicted.low,
                "high": 1e3 * predicted.high,
            }
    except SinewError as error:
        return {"reason": str(error)}
    return {"band": fitted.band, "stages_ms": stages}


def print_roofline(record: dict[str, Any], stages: dict[str, Any], console: Console) -> None:
    """``stages``: the report's own, for the medians."""
    if "reason" in record:
        console.print(f"roofline: {record['reason']}", highlight=False, soft_wrap=True)
        return
    table = Table(title="against the roofline of this machine's measured peaks, milliseconds")
    table.add_column("stage")
    for name in ("p50", "roofline", "achieved", "predicted", "band"):
        table.add_column(name, justify="right")
    for stage, row in record["stages_ms"].items():
        p50 = stages[stage]["p50"]
        table.add_row(
            stage,
            f"{p50:.2f}",
            f"{row['roofline']:.2f}",
            f"{100 * row['roofline'] / p50:.0f} %",
            f"{row['predicted']:.2f}",
            f"{row['low']:.2f} to {row['high']:.2f}",
        )
    console.print(table)
