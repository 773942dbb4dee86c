"""Tensor parallelism: divide the products of each layer over equal devices, and count the data that they exchange.

A layer is divided as in Megatron-LM (Shoeybi et al. 2019, arXiv 1909.08053, section 3): products into the attention
heads and into the wide layer by columns, products out of them by rows. After each of the latter, the devices add up
their partial sums. A ring of n devices sends 2 (n - 1) / n of these bytes over each link, in 2 (n - 1) turns
(Patarasuk and Yuan 2009).

All other operators run on every device. Activations and the prefix's keys and values count completely on each device,
so the prediction is not too optimistic. `sinew perf scenario` covers stages on different machines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sinew.core import SinewError

from sinew_perf.hardware import Hardware
from sinew_perf.operators import BITS, Component, Operator
from sinew_perf.roofline import StageTiming, timing

COLUMNS = frozenset(
    {"qkv_proj", "q_proj", "kv_proj", "k_proj", "v_proj", "gate_up_proj", "gate_proj", "up_proj", "fc1"}
)
ROWS = frozenset({"o_proj", "down_proj", "fc2"})
HEADS = frozenset({"attention", "logits", "attend"})


def cut(component: Component, devices: int) -> Component:
    """Return one device's share of a component.

    Args:
        component: The component.
        devices: Number of devices.

    Raises:
        SinewError: No layer can be divided, or a width is not a multiple of ``devices``.
    """
    operators = tuple(_cut(each, devices) for each in component.operators)
    if operators == component.operators:
        raise SinewError(
            f"--parallel {devices}: {component.name} has no layers that can be divided; omit --parallel"
        )
    return replace(component, operators=operators)


def _cut(operator: Operator, devices: int) -> Operator:
    kind = operator.name.rpartition(".")[2]
    if kind not in COLUMNS | ROWS | HEADS:
        return operator
    if operator.shape:
        _, depth, columns = map(int, operator.shape.split("x"))
        if (width := columns if kind in COLUMNS else depth) % devices:
            raise SinewError(
                f"--parallel: expected a divisor of {width}, {operator.name}'s width, got {devices}"
            )
    tensors = tuple(
        replace(each, elements=each.elements // devices) if each.kind == "weight" else each
        for each in operator.tensors
    )
    return replace(operator, flops=operator.flops // devices, tensors=tensors)


def exchange(components: Sequence[Component], devices: int, link: float, turn_s: float) -> StageTiming:
    """Return the time to add up the devices' results for one observation.

    Args:
        components: The components.
        devices: Number of devices.
        link: Bytes/s from one device to the next.
        turn_s: Additional seconds of each turn, in which every device sends once to the next device.
    """
    nbytes = turns = 0.0
    for component in components:
        for each in component.operators:
            if each.name.rpartition(".")[2] in ROWS:
                rows, _, columns = map(int, each.shape.split("x"))
                times = component.repeats * each.count
                nbytes += times * rows * columns * BITS[each.compute_dtype] / 8 * 2 * (devices - 1) / devices
                turns += times * 2 * (devices - 1)
    taken = nbytes / link + turns * turn_s
    return StageTiming("links", taken, 0.0, taken, 0.0, nbytes)


def timings(
    components: Sequence[Component], machine: Hardware, devices: int, link: float, turn_s: float
) -> list[StageTiming]:
    """Return the times of the components on several devices, and of the links between them.

    Args:
        components: The components.
        machine: One device.
        devices: Number of devices.
        link: Bytes/s from one device to the next.
        turn_s: Additional seconds of each turn, in which every device sends once to the next device.
    """
    return [
        *(timing(cut(each, devices), machine) for each in components),
        exchange(components, devices, link, turn_s),
    ]
