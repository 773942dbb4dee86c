"""Measure the work of the host in a chunk by time stamps, in the same loop as the latency.

The profiler of section ``timeline`` also shows the host, but it makes the calls of the CUDA runtime slower.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

from benchmarks.gpu.models import Sample

PARTS = ("prepare", "copy", "launch", "wait", "rest")


def host_row(rung: Any, samples: list[Sample], calls: int) -> dict[str, float]:
    """Return the median microseconds of each part of a chunk on the host.

    The parts follow each other, so their sum is the whole call:

    * ``prepare_us``: from the call to the first copy.
    * ``copy_us``: writing the observation to pinned memory, and starting its copies.
    * ``launch_us``: launching the graph.
    * ``wait_us``: starting the copy of the actions, and waiting for the device.
    * ``rest_us``: from the end of the wait to the answer.

    Args:
        rung: A rung with engine cuda, which has already computed these samples.
        samples: The observations, which are used in rotation.
        calls: Number of calls.
    """
    rows = []
    with stamped(rung.engine) as stamps:
        for index in range(calls):
            stamps.clear()
            begun = time.perf_counter_ns()
            rung.run(samples[index % len(samples)])
            ended = time.perf_counter_ns()
            marks = [begun, *stamps, ended]
            if len(marks) != len(PARTS) + 1:
                raise RuntimeError(f"expected {len(PARTS) - 1} time stamps in a call, got {len(stamps)}")
            rows.append([1e-3 * (after - before) for before, after in pairwise(marks)])
    columns = zip(PARTS, zip(*rows, strict=True), strict=True)
    return {f"{part}_us": statistics.median(column) for part, column in columns}


@contextmanager
def stamped(engine: Any) -> Iterator[list[int]]:
    """Within the context, each chunk of the engine's last program appends four times in nanoseconds to a list: before
    and after the observation is written, after the launch, and after the wait."""
    stamps: list[int] = []
    program = engine.programs[engine.programs.keys()[-1]]
    recorded = program.recorded("chunk")
    # object, name of its method, whether a stamp is taken before the call, whether after the call
    places = (
        (program, "write", True, True),
        (recorded, "replay", False, True),
        (engine.prefix_stream, "wait", False, True),
    )
    before = [(each, name, each.__dict__.get(name), getattr(each, name)) for each, name, *_ in places]

    def noted(call: Callable[..., Any], first: bool, last: bool) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            if first:
                stamps.append(time.perf_counter_ns())
            result = call(*arguments)
            if last:
                stamps.append(time.perf_counter_ns())
            return result

        return timed

    for (each, name, _, call), (*_, first, last) in zip(before, places, strict=True):
        setattr(each, name, noted(call, first, last))
    try:
        yield stamps
    finally:
        for each, name, own, _ in before:
            if own is None:
                delattr(each, name)  # the method of the class is visible again
            else:
                setattr(each, name, own)
