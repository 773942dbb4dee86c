"""The inverse question: which machine, at which precision, with how many solver steps, reaches a rate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sinew.core import SinewError

from sinew_perf.hardware import Hardware
from sinew_perf.memory import memory_report
from sinew_perf.operators import Component
from sinew_perf.program import PublishedProgram
from sinew_perf.request import AS_THE_POLICY, TracedRequest
from sinew_perf.roofline import timing

# Vision and language in each; the action expert, whose steps add up errors, stays in bf16.
PRECISIONS = {
    "bf16": "bf16",
    "fp8 vision and language": "fp8/fp8/bf16",
    "int4 vision and language": "int4//bf16",
}


@dataclass(frozen=True, slots=True)
class TaskClass:
    """Control steps per second, the fewest and the most, and the latency that a policy which is asked for every step
    may have, milliseconds: the survey's table of latency budgets (tests/requirements.md, row 113)."""

    low_hz: float
    high_hz: float
    latency_ms: float


TASKS = {
    "tabletop": TaskClass(5, 10, 100),
    "manipulation": TaskClass(15, 30, 33),
    "reactive": TaskClass(30, 50, 20),
    "whole-body": TaskClass(100, 500, 5),
    "drone": TaskClass(50, 200, 10),
}


@dataclass(frozen=True, slots=True)
class Budget:
    """What a control rate asks of inference: ``rate`` chunks per second, so ``ms`` for each. why: in words."""

    rate: float
    ms: float
    why: str


def budget(control_hz: float, replan: int, task: str = "") -> Budget:
    """Return the budget of a robot that executes ``replan`` actions of each chunk: replan / control_hz.

    task: of ``TASKS``, in place of control_hz: its fastest rate, and asked for every step its tolerable latency.
    Raises :class:`SinewError` for an unknown one, and for a rate beside it.
    """
    if bool(task) == bool(control_hz):
        raise SinewError("expected either a control rate or a task")
    if replan < 1:
        raise SinewError(f"replan: expected 1 or more, got {replan}")
    if task:
        if task not in TASKS:
            raise SinewError(f"task: expected one of {', '.join(TASKS)}, got {task!r}")
        known = TASKS[task]
        control_hz = known.high_hz
        ms = 1e3 * replan / control_hz if replan > 1 else known.latency_ms
        rates = (
            f"{known.low_hz:g} to {known.high_hz:g} Hz, {known.latency_ms:g} ms for a policy asked each step"
        )
        return Budget(1e3 / ms, ms, f"{task}: {rates}; {replan} actions of each chunk: {ms:,.0f} ms")
    ms = 1e3 * replan / control_hz
    return Budget(1e3 / ms, ms, f"{control_hz:g} Hz, {replan} actions of each chunk: {ms:,.0f} ms")


@dataclass(frozen=True, slots=True)
class Reached:
    """steps: the most solver steps, of those asked for, with which the rate is still reached; hz: with them."""

    machine: str
    title: str
    precision: str
    steps: int
    hz: float


def reach(
    parts: Sequence[Component], machine: Hardware, rate_hz: float, efficiency: float
) -> tuple[int, float] | None:
    """(steps, rate) of any components of which the last is one solver step, repeated. None where no step fits.

    efficiency: the share of the roofline that software reaches.
    """
    *before, action = (timing(part, machine).seconds for part in parts)
    most = parts[-1].repeats
    steps = min(most, int((efficiency / rate_hz - sum(before)) / (action / most) + 1e-9))
    if steps < 1:
        return None
    return steps, efficiency / (sum(before) + action * steps / most)


def needs(
    source: str,
    machines: Mapping[str, Hardware],
    rate_hz: float,
    efficiency: float,
    request: TracedRequest = AS_THE_POLICY,
) -> list[Reached]:
    """Return, by machine and precision, what reaches the rate and fits the memory that the system leaves, the machine
    that is just enough first.

    Machines without a half-precision rate are left out, those without an FP8 rate for FP8, and a narrower precision
    that wins nothing.
    """
    found = []
    for name, narrow in PRECISIONS.items():
        program = PublishedProgram.load(
            source,
            request,
            dtypes={"vision": narrow, "language": narrow, "head": "bf16"},
            engine="plan",
        )
        parts, total = program.components(), memory_report(program, "cuda", whole_tables=True).total
        for machine in machines.values():
            narrowest = narrow.split("/")[0]
            if "bf16" not in machine.peak or (narrowest == "fp8" and narrowest not in machine.peak):
                continue
            if total > machine.free_bytes:
                continue
            reached = reach(parts, machine, rate_hz, efficiency)
            if reached is not None and program.fixed.get("steps") in (None, reached[0]):
                found.append(Reached(machine.name, machine.title, name, *reached))
    wide = {row.machine: row for row in found if row.precision == "bf16"}
    found = [
        row
        for row in found
        if row is (plain := wide.get(row.machine, row))
        or (row.steps, row.hz) > (plain.steps, 1.01 * plain.hz)
    ]
    best: dict[str, float] = {}
    for row in found:
        best[row.machine] = max(row.hz, best.get(row.machine, 0.0))
    return sorted(found, key=lambda row: (best[row.machine], row.title, row.precision))
