"""Time of operators by the roofline. Each operator takes as long as its slower side, and operators run one after
another.

    T_operator  = max(FLOPs / peak, bytes_memory / bandwidth + bytes_on_chip / bandwidth_on_chip)
    T_component = repeats * sum(count * T_operator)

Source: VLA-Perf (arXiv 2602.18397), equations 2 and 3. The sum of memory and on-chip times reproduces its numbers.
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
        """Return the FLOP per byte through memory, which is the component's place under the roofline."""
        return self.flops / self.nbytes


def time_of(operator: Operator, machine: Hardware) -> tuple[float, float]:
    """Return the seconds of computing and the seconds of moving data, for one call of an operator."""
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
    """Equal matrix products of a component.

    Attributes:
        stage: Name of the component.
        name: Name of the operator.
        times: Number of products for one observation.
        shape: Rows x depth x columns, as in :class:`sinew_perf.operators.Operator`.
        flops: FLOPs of one product.
        nbytes: Bytes through memory of one product.
        dtype: Format of the arithmetic.
    """

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
        """Return the time of all equal products, one after another, in seconds."""
        return self.times * max(self.flops / machine.peak_flops(self.dtype), self._moving(machine))

    def _moving(self, machine: Hardware) -> float:
        return self.nbytes / machine.bandwidth


def products(component: Component) -> list[MatrixProduct]:
    """Return the matrix products of a component in the order in which they first run. Equal products are combined."""
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
    """Return the end-to-end time of components that run one after the other, in seconds."""
    return sum(timing(component, machine).seconds for component in components)


def components_record(
    machine: Hardware, rows: Sequence[StageTiming], launches: int, sync_us: float
) -> dict[str, Any]:
    """Return the milliseconds of each component on a machine and the side that limits it, ready for JSON.

    Args:
        machine: The machine.
        rows: Times of the components.
        launches: Number of matrix products.
        sync_us: Microseconds from the end of one product to the start of the next.
    """
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
