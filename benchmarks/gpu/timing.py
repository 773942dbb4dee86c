"""How long calls take on a GPU: as one graph, so that neither Python nor the driver is in the number."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

from sinew.engine.cuda.graphs import no_collection

Call = Callable[[], Any]
LEAST = 20  # calls of a graph, so that the 5 to 8 us of a replay are spread over as many, whatever is timed
SHORT_MS, LEAST_SHORT = (
    0.02,
    200,
)  # calls below 20 us: a replay over 20 of them would be a tenth of a 3 us kernel
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
