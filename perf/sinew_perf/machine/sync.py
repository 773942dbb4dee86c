"""Measure the gap between two kernels: the time of a chain of small sums, minus the time of the same sums in one
call.

This is the experiment of "Running VLAs at Real-time Speed" (arXiv 2510.26742), section 5.2 and table 3: A + B of 256
x 1024 numbers, as often as a policy has matrix products. Separate launches include the time of Python and of torch's
dispatcher. A CUDA graph includes neither. The baseline adds the same numbers in one call. The paper's software
barrier is a separate kernel (``python -m benchmarks.gpu``, section gaps).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from sinew.core import SinewError
from torch import Tensor

SHAPE = (256, 1024)
ROUNDS = 7  # each round measures all settings once, so that a busy machine affects all settings equally
BASELINE = "one call"


@dataclass(frozen=True, slots=True)
class SyncSetting:
    """Result of one setting.

    Attributes:
        name: Name of the setting.
        ms: Median time of all rounds for the whole chain, in milliseconds.
        us_each: Microseconds per sum in addition to the baseline, at least 0.
    """

    name: str
    ms: float
    us_each: float


def measure(count: int, device: str, threads: int | None = None) -> list[SyncSetting]:
    """Measure a chain of sums in each setting.

    Args:
        count: Number of sums.
        device: "cpu" or "cuda".
        threads: Number of compute threads of a CPU. None for torch's own number.

    Raises:
        SinewError: The device is missing, or a chain has a wrong result.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise SinewError(
            f"device: expected cpu, because torch {torch.__version__} finds no CUDA device, got cuda"
        )
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        with torch.inference_mode():
            return _measured(count, torch.device(device))
    finally:
        torch.set_num_threads(before)


def _measured(count: int, device: torch.device) -> list[SyncSetting]:
    start = torch.zeros(SHAPE, device=device)
    one = torch.ones(SHAPE, device=device)
    total = torch.empty(SHAPE, device=device)

    def chain() -> None:
        torch.add(start, one, out=total)
        for _ in range(count - 1):
            torch.add(total, one, out=total)

    def once() -> None:
        torch.sum(one.expand(count, *SHAPE), 0, out=total)

    ways: dict[str, Callable[[], None]] = {"one by one": chain}
    if device.type == "cuda":
        ways["CUDA graph"] = _graph(chain)
    ways[BASELINE] = once
    for name, way in ways.items():
        _check(name, way, total, count)
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, way in ways.items():
            times[name].append(_seconds(way, device))
    medians = {name: statistics.median(each) for name, each in times.items()}
    least = medians[BASELINE]
    return [
        SyncSetting(name, 1e3 * each, 1e6 * max(0.0, each - least) / count) for name, each in medians.items()
    ]


def _check(name: str, way: Callable[[], None], total: Tensor, count: int) -> None:
    """Run a setting once as a warm-up, and check its result.

    Args:
        name: Name of the setting, for the error message.
        way: Function that computes the sums.
        total: The tensor that contains the result.
        count: Number of sums.
    """
    total.zero_()
    way()
    if not bool((total == count).all()):
        raise SinewError(f"sync, {name}: expected sums of {count}, got {total.min()} to {total.max()}")


def _graph(chain: Callable[[], None]) -> Callable[[], None]:
    chain()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain()
    return graph.replay


def _seconds(way: Callable[[], None], device: torch.device) -> float:
    begun = time.perf_counter()
    way()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begun
