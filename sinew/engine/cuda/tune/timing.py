"""How long calls take on a GPU: as one graph, so that neither Python nor the driver is in the number.

Needs torch alone: the first measurements of a GPU session use it too.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from sinew.engine.cuda.graphs import no_collection

Call = Callable[[], Any]
Measure = Callable[[Sequence[Call]], float]  # milliseconds per call, of calls that run one behind the other
LEAST = 20  # calls of a graph, so that the 5 to 8 us of a replay are spread over as many, whatever is timed
SHORT_MS, LEAST_SHORT = (
    0.02,
    200,
)  # calls below 20 us: a replay over 20 of them would be a tenth of a 3 us kernel
REPLAYS = 20
WARM_UPS = 3


def repeated(calls: Sequence[Call], least: int = LEAST) -> list[Call]:
    """Return whole rounds of ``calls``, at least ``least`` in all."""
    return list(calls) * -(-least // len(calls))


def graph_ms(calls: Sequence[Call], replays: int) -> dict[str, float]:
    """Return milliseconds per call when ``calls`` are one graph on the current device: median, smallest and largest of
    the replays. Short calls are recorded more often and timed again."""
    found = _graph_ms(calls, LEAST, replays)
    return found if found["p50"] >= SHORT_MS else _graph_ms(calls, LEAST_SHORT, replays)


def _graph_ms(calls: Sequence[Call], least: int, replays: int) -> dict[str, float]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # which made the inputs
    with torch.cuda.stream(stream):
        for call in calls:  # compiles, and lets libraries choose their kernels
            call()
    stream.synchronize()
    calls = repeated(calls, least)
    graph = torch.cuda.CUDAGraph()
    with (
        no_collection(first=False),
        torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"),
    ):
        for call in calls:
            call()
    times = []
    for _ in range(replays + WARM_UPS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / len(calls))
    times = times[WARM_UPS:]
    return {"p50": statistics.median(times), "min": min(times), "max": max(times)}


def on(device: torch.device) -> Measure:
    """A tuner's measure on ``device``."""

    def measure(calls: Sequence[Call]) -> float:
        with torch.cuda.device(device):
            torch.cuda.synchronize()  # kernels that split their work share a workspace: one stream at a time
            return graph_ms(calls, REPLAYS)["p50"]

    return measure


def wall_ms(call: Call, seconds: float = 2.0, most: int = 300) -> float:
    """Median wall-clock milliseconds of a call that waits for what it started, over ``seconds`` or ``most`` calls."""
    for _ in range(WARM_UPS):
        call()
    times: list[float] = []
    until = time.perf_counter() + seconds
    while len(times) < WARM_UPS or (len(times) < most and time.perf_counter() < until):
        start = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)
