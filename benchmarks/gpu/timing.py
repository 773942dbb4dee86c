"""Time calls on a GPU as one CUDA graph, so that the time contains neither Python nor the driver."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from sinew.engine.cuda.graphs import no_collection

Call = Callable[[], Any]
LEAST = 20  # calls in a graph, so that the 5 to 8 us of a replay are divided among at least this many calls
SHORT_MS, LEAST_SHORT = (
    0.02,
    200,
)  # for calls below 20 us, because a replay with 20 calls would add a tenth to a kernel of 3 us
WARM_UPS = 3


def repeated(calls: Sequence[Call], least: int = LEAST) -> list[Call]:
    """Return ``calls`` repeated in whole rounds, with at least ``least`` calls."""
    return list(calls) * -(-least // len(calls))


def call_ms(calls: Sequence[Call], replays: int, device: torch.device) -> dict[str, float]:
    """Return the milliseconds of one call as :func:`graph_ms` does. Without a GPU, run the calls one after the other,
    which only shows that they run."""
    if device.type == "cuda":
        return graph_ms(calls, replays)
    start = time.perf_counter()
    for call in calls:
        call()
    each = 1e3 * (time.perf_counter() - start) / len(calls)
    return {"p50": each, "min": each, "max": each}


def graph_ms(calls: Sequence[Call], replays: int) -> dict[str, float]:
    """Run ``calls`` as one graph on the current device. Returns the median, smallest and largest milliseconds of one
    call.

    If the calls are short, the function records more of them and times again.
    """
    found = _graph_ms(calls, LEAST, replays)
    return found if found["p50"] >= SHORT_MS else _graph_ms(calls, LEAST_SHORT, replays)


def _graph_ms(calls: Sequence[Call], least: int, replays: int) -> dict[str, float]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # the current stream has made the inputs
    with torch.cuda.stream(stream):
        for call in calls:  # compile the kernels, and let libraries choose their kernels
            call()
    stream.synchronize()
    calls = repeated(calls, least)
    graph = torch.cuda.CUDAGraph()
    with no_collection(), torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
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
