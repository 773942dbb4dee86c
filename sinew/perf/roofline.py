"""Time from operators: each takes as long as its slower side, and they run one after another.

    T_operator  = max(FLOPs / peak, bytes_memory / bandwidth + bytes_on_chip / bandwidth_on_chip)
    T_component = repeats * sum(count * T_operator)

VLA-Perf (arXiv 2602.18397), equations 2 and 3; that memory and on-chip times add is how its numbers come out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sinew.perf.hardware import Hardware
from sinew.perf.operators import Component, Operator, Residency


@dataclass(frozen=True, slots=True)
class StageTiming:
    """Seconds of a component: all of it, and what computing and moving alone would take."""

    name: str
    seconds: float
    compute_s: float
    memory_s: float
    flops: float
    nbytes: float  # through memory

    @property
    def bound(self) -> str:
        return "compute" if self.compute_s > self.memory_s else "memory"

    @property
    def intensity(self) -> float:
        """FLOP per byte through memory: where the component stands under the roof."""
        return self.flops / self.nbytes


def time_of(operator: Operator, machine: Hardware) -> tuple[float, float]:
    """(computing, moving) seconds of one call."""
    moving = _bytes(operator, Residency.HBM) / machine.bandwidth
    if machine.on_chip_bandwidth is not None:
        moving += _bytes(operator, Residency.ON_CHIP) / machine.on_chip_bandwidth
    return operator.flops / machine.peak_flops(operator.compute_dtype), moving


def _bytes(operator: Operator, where: Residency) -> int:
    return sum(tensor.bytes for tensor in operator.tensors if tensor.residency is where)


def timing(component: Component, machine: Hardware) -> StageTiming:
    total = compute = memory = flops = nbytes = 0.0
    for operator in component.operators:
        computing, moving = time_of(operator, machine)
        total += operator.count * max(computing, moving)
        compute += operator.count * computing
        memory += operator.count * moving
        flops += operator.count * operator.flops
        nbytes += operator.count * _bytes(operator, Residency.HBM)
    n = component.repeats
    return StageTiming(component.name, n * total, n * compute, n * memory, n * flops, n * nbytes)


def seconds(components: Iterable[Component], machine: Hardware) -> float:
    """End to end: one component after the other."""
    return sum(timing(component, machine).seconds for component in components)


def components_record(machine: Hardware, rows: Sequence[StageTiming]) -> dict[str, Any]:
    """Return the milliseconds of each component on a machine and what bounds it, ready for JSON."""
    total = sum(row.seconds for row in rows)
    parts = [
        {
            "component": row.name,
            "ms": 1e3 * row.seconds,
            "bound": row.bound,
            "gflop": row.flops / 1e9,
            "gbyte": row.nbytes / 1e9,
            "tflops": row.flops / row.seconds / 1e12 if row.seconds else 0.0,  # a stage without products
        }
        for row in rows
    ]
    return {
        "machine": machine.name,
        "title": machine.title,
        "ms": 1e3 * total,
        "hz": 1 / total,
        "components": parts,
    }
