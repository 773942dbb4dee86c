"""Time from operators: each takes as long as its slower side, and they run one after another.

    T_operator  = max(FLOPs / peak, bytes_memory / bandwidth + bytes_on_chip / bandwidth_on_chip)
    T_component = repeats * sum(count * T_operator)

VLA-Perf (arXiv 2602.18397), equations 2 and 3; that memory and on-chip times add is how its numbers come out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sinew_perf.hardware import Hardware
from sinew_perf.operators import Component, Operator, Residency


@dataclass(frozen=True, slots=True)
class StageTiming:
    """Time of a component by the roofline.

    Attributes:
        name: Name of the component.
        seconds: Total time in seconds. Each operator takes as long as its slower side.
        compute_s: Time of the arithmetic alone, in seconds.
        memory_s: Time of the memory traffic alone, in seconds.
        flops: Floating-point operations.
        nbytes: Bytes that go through memory.
    """

    name: str
    seconds: float
    compute_s: float
    memory_s: float
    flops: float
    nbytes: float

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


@dataclass(frozen=True, slots=True)
class MatrixProduct:
    """A matrix product of a component, with equal ones: ``times`` for one observation, FLOP and bytes through memory of
    each. ``shape``: as of :class:`sinew_perf.operators.Operator`."""

    stage: str
    name: str
    times: int
    shape: str
    flops: int
    nbytes: int
    dtype: str

    def bound(self, machine: Hardware) -> str:
        return "compute" if self.flops / machine.peak_flops(self.dtype) > self._moving(machine) else "memory"

    def seconds(self, machine: Hardware) -> float:
        """All of them, one after another."""
        return self.times * max(self.flops / machine.peak_flops(self.dtype), self._moving(machine))

    def _moving(self, machine: Hardware) -> float:
        return self.nbytes / machine.bandwidth


def products(component: Component) -> list[MatrixProduct]:
    """Return the matrix products of a component, equal ones together, in the order in which they first run."""
    found: dict[tuple[str, str, int, int, str], int] = {}
    for each in component.operators:
        if each.flops:
            nbytes = _bytes(each, Residency.HBM) // each.kernels
            key = (each.name, each.shape, each.flops // each.kernels, nbytes, each.compute_dtype)
            found[key] = found.get(key, 0) + component.repeats * each.count * each.kernels
    return [
        MatrixProduct(component.name, name, times, shape, flops, nbytes, dtype)
        for (name, shape, flops, nbytes, dtype), times in found.items()
    ]


def seconds(components: Iterable[Component], machine: Hardware) -> float:
    """End to end: one component after the other."""
    return sum(timing(component, machine).seconds for component in components)


def components_record(
    machine: Hardware, rows: Sequence[StageTiming], launches: int, sync_us: float
) -> dict[str, Any]:
    """Return the milliseconds of each component on a machine and what bounds it, ready for JSON. launches: products, of
    which each adds ``sync_us`` microseconds."""
    computed = sum(row.seconds for row in rows)
    total = computed + launches * sync_us / 1e6
    parts = [
        {
            "component": row.name,
            "ms": 1e3 * row.seconds,
            "share": row.seconds / computed if computed else 0.0,
            "bound": row.bound,
            "intensity": row.intensity if row.nbytes else 0.0,
            "gflop": row.flops / 1e9,
            "gbyte": row.nbytes / 1e9,
            # A stage without products takes no time.
            "tflops": row.flops / row.seconds / 1e12 if row.seconds else 0.0,
        }
        for row in rows
    ]
    return {
        "machine": machine.name,
        "title": machine.title,
        "ms": 1e3 * total,
        "hz": 1 / total,
        "products": launches,
        "sync_ms": 1e3 * (total - computed),
        "components": parts,
    }
