"""Find the machines, precisions and numbers of solver steps that reach a rate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sinew.core import SinewError

from sinew_perf.hardware import Hardware, Kind
from sinew_perf.memory import Device, memory_report
from sinew_perf.operators import Component
from sinew_perf.program import PublishedProgram
from sinew_perf.request import AS_THE_POLICY, TracedRequest
from sinew_perf.roofline import seconds, timing
from sinew_perf.shares import UsedShare, others, used


@dataclass(frozen=True, slots=True)
class _Precision:
    """Number formats of a policy.

    Attributes:
        title: Name in tables.
        name: Format of vision and language, as in ``data/shares.toml``.
        narrow: Format of vision and language, together with the formats of their activations and cache.
        head: Format of the action head. It stays a float, because the head adds up the errors of its steps.
    """

    title: str
    name: str
    narrow: str
    head: str

    def runs_on(self, machine: Hardware) -> bool:
        """Return True if the machine's data contain a computing rate for these formats. A GPU widens 4-bit weights to
        bf16.
        """
        rate = "bf16" if self.name == "int4" else self.name
        return self.head in machine.peak and rate in machine.peak


# Key: a kind of machine. Value: its number formats. The first one is the baseline that the others must beat.
PRECISIONS: dict[Kind, tuple[_Precision, ...]] = {
    "gpu": (
        _Precision("bf16", "bf16", "bf16", "bf16"),
        _Precision("fp8 vision and language", "fp8", "fp8/fp8/bf16", "bf16"),
        _Precision("int4 vision and language", "int4", "int4//bf16", "bf16"),
    ),
    "cpu": (
        _Precision("fp32", "fp32", "fp32", "fp32"),
        _Precision("bf16", "bf16", "bf16", "bf16"),
        _Precision("int8 vision and language", "int8", "int8/int8", "fp32"),
    ),
    "npu": (),
}


@dataclass(frozen=True, slots=True)
class TaskClass:
    """Usual rates and latency of a class of tasks, from a survey (tests/requirements.md, row 113).

    Attributes:
        low_hz: Smallest usual control rate.
        high_hz: Largest usual control rate.
        latency_ms: Tolerable latency of a policy that is called in every control step, in milliseconds.
    """

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
    """The time that a control rate leaves for an inference.

    Attributes:
        rate: Required chunks per second.
        ms: Available milliseconds per chunk.
        why: How this follows from the control rate, as a text.
    """

    rate: float
    ms: float
    why: str


def budget(control_hz: float, replan: int, task: str = "") -> Budget:
    """Return the time that a robot leaves for an inference: replan / control_hz.

    Args:
        control_hz: Control steps per second. 0 if ``task`` is given.
        replan: Number of actions executed per chunk.
        task: Key of ``TASKS``, which then determines the rate: its largest control rate, and its tolerable latency if
            ``replan`` is 1.

    Raises:
        SinewError: The task is unknown, or neither or both of task and rate are given.
    """
    if bool(task) == bool(control_hz):
        raise SinewError("expected either a control rate or a task; pass one of them")
    if replan < 1:
        raise SinewError(f"replan: expected 1 or more, got {replan}")
    if task:
        if task not in TASKS:
            raise SinewError(f"task: expected one of {', '.join(TASKS)}, got {task!r}")
        task_class = TASKS[task]
        control_hz = task_class.high_hz
        ms = 1e3 * replan / control_hz if replan > 1 else task_class.latency_ms
        rates = (
            f"{task_class.low_hz:g} to {task_class.high_hz:g} Hz, {task_class.latency_ms:g} ms for one request in each"
            " step"
        )
        return Budget(1e3 / ms, ms, f"{task}: {rates}; {replan} actions of each chunk: {ms:,.0f} ms")
    ms = 1e3 * replan / control_hz
    return Budget(1e3 / ms, ms, f"{control_hz:g} Hz, {replan} actions of each chunk: {ms:,.0f} ms")


@dataclass(frozen=True, slots=True)
class MachineResult:
    """A machine and precision that reach the rate.

    Attributes:
        machine: Name of the machine.
        title: Name of the machine for people.
        precision: Name of the precision.
        steps: Largest number of solver steps, up to the requested one, with which the rate is reached.
        hz: Chunks per second with this number of solver steps.
        others_hz: Chunks per second if the software reaches the same share of the roofline as engines of other
            projects.
        share: Share of the roofline that ``hz`` assumes.
    """

    machine: str
    title: str
    precision: str
    steps: int
    hz: float
    others_hz: float
    share: UsedShare


def reach(
    parts: Sequence[Component], machine: Hardware, rate_hz: float, efficiency: float
) -> tuple[int, float] | None:
    """Find the largest number of solver steps with which a machine reaches a rate.

    Args:
        parts: Components of a policy. The last one is one solver step, repeated.
        machine: The machine.
        rate_hz: Required chunks per second.
        efficiency: Share of the roofline that software reaches.

    Returns:
        The number of steps, and the rate with them. None if not even one step is fast enough.
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
    efficiency: float | None = None,
    request: TracedRequest = AS_THE_POLICY,
) -> list[MachineResult]:
    """Find the machines that reach a rate and have enough free memory.

    A machine without a rate for a precision is left out. A smaller precision is left out if it gains nothing.

    Args:
        source: Policy, as in :meth:`PublishedProgram.load`.
        machines: The machines by name.
        rate_hz: Required chunks per second.
        efficiency: Share of the roofline that the software reaches. None for the share that Sinew's engines reached
            (:func:`sinew_perf.shares.used`).
        request: Sizes of the request.

    Returns:
        A row for each machine and precision. The slowest machine comes first.
    """
    rows: list[MachineResult] = []
    for kind, precisions in PRECISIONS.items():
        ours = [machine for machine in machines.values() if machine.kind == kind]
        for precision in precisions if ours else ():
            rows += _with(source, ours, precision, rate_hz, efficiency, request)
    widest = {precisions[0].title for precisions in PRECISIONS.values() if precisions}
    wide = {row.machine: row for row in rows if row.precision in widest}
    rows = [
        row
        for row in rows
        if row is (plain := wide.get(row.machine, row))
        or (row.steps, row.hz) > (plain.steps, 1.01 * plain.hz)
    ]
    best: dict[str, float] = {}
    for row in rows:
        best[row.machine] = max(row.hz, best.get(row.machine, 0.0))
    return sorted(rows, key=lambda row: (best[row.machine], row.title, row.precision))


def _with(
    source: str,
    machines: Sequence[Hardware],
    precision: _Precision,
    rate_hz: float,
    efficiency: float | None,
    request: TracedRequest,
) -> list[MachineResult]:
    """Return the rows of :func:`needs` for machines of one kind and for one precision. The arguments are those of
    :func:`needs`.
    """
    machines = [machine for machine in machines if precision.runs_on(machine)]
    if not machines:
        return []
    dtypes = {"vision": precision.narrow, "language": precision.narrow, "head": precision.head}
    program = PublishedProgram.load(source, request, dtypes=dtypes, engine="plan")
    parts = program.components()
    device: Device = "cpu" if machines[0].kind == "cpu" else "cuda"
    total = memory_report(program, device, whole_tables=device == "cuda").total
    rows = []
    for machine in machines:
        if total > machine.free_bytes:
            continue
        share = used(program.family, precision.name, machine, seconds(parts, machine), efficiency)
        result = reach(parts, machine, rate_hz, share.share)
        if result is not None and program.fixed.get("steps") in (None, result[0]):
            steps, hz = result
            by_others = hz * others().share / share.share
            rows.append(
                MachineResult(machine.name, machine.title, precision.title, steps, hz, by_others, share)
            )
    return rows
