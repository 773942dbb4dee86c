"""Measure this machine: products per second, bytes per second, time per operator, and the stages of a model.

A peak is the best of several runs, because other processes can only make it worse. The time of a stage is the median
of its runs. Each measurement contains the load average, because a busy machine gives wrong times. With one thread on
a CPU, the clock is the CPU time of that thread, which leaves out the time in which other processes use the core. With
more threads, it is the wall clock.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from sinew.core import SinewError, machine
from sinew.models.base import Model

from sinew_perf.request import TracedRequest

GEMM_SIZE = 2048
COPY_BYTES = 512 << 20  # size of a copy in bytes, larger than every cache
OVERHEAD_CALLS = 2000
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True)
class Speeds:
    """Measured speeds of a machine.

    Attributes:
        processor: Name of the processor.
        device: "cpu" or "cuda".
        threads: Number of compute threads.
        peak_flops: FLOP/s of a large matrix product, by number format.
        bandwidth: Bytes/s of a copy, reading and writing counted.
        overhead: Seconds of one operator on one element.
        load: Load average over one minute during the measurement.
    """

    processor: str
    device: str
    threads: int
    peak_flops: dict[str, float]
    bandwidth: float
    overhead: float
    load: float


@dataclass(frozen=True, slots=True)
class MeasuredSizes:
    """Sizes of a measured observation.

    Attributes:
        views: Number of camera frames.
        tokens: Prompt tokens.
        chunk: Number of actions in a chunk.
    """

    views: int
    tokens: int
    chunk: int

    @property
    def request(self) -> TracedRequest:
        return TracedRequest(self.views, self.tokens, self.chunk)


@dataclass(frozen=True, slots=True)
class StageTime:
    """The measured time of one stage.

    Attributes:
        model: Name of the policy.
        stage: "vision", "prefix" or "head". The head is one solver step.
        request: Sizes of the measured observation.
        seconds: Median time of ``runs`` runs, in seconds.
        spread: (slowest - fastest) / median.
        runs: Number of runs.
        load: Load average of the machine over one minute.
        clock: "wall" for wall-clock time, or "cpu" for the CPU time of the thread.
    """

    model: str
    stage: str
    request: MeasuredSizes
    seconds: float
    spread: float
    runs: int
    load: float
    clock: str = "wall"


def measure_speeds(dtypes: Iterable[str] = ("fp32",), device: str = "cpu", runs: int = 5) -> Speeds:
    """Measure the machine's peaks with torch's present number of threads. It takes about ten seconds on two cores.

    Args:
        dtypes: Formats whose products are measured.
        device: "cpu" or "cuda".
        runs: Number of runs of each measurement.

    Raises:
        SinewError: A format is unknown.
    """
    unknown = set(dtypes).difference(DTYPES)
    if unknown:
        raise SinewError(f"dtype: expected one of {', '.join(DTYPES)}, got {', '.join(sorted(unknown))}")
    target = torch.device(device)
    with torch.inference_mode():
        peaks = {name: 2 * GEMM_SIZE**3 / _gemm_seconds(DTYPES[name], target, runs) for name in dtypes}
        source = torch.ones(COPY_BYTES // 4, device=target)
        sink = torch.empty_like(source)
        copy = min(_seconds(lambda: sink.copy_(source), target, runs))
        scalar = torch.ones(1, device=target)
        chain = _seconds(lambda: _many(scalar.add, OVERHEAD_CALLS), target, runs)
    return Speeds(
        processor=_processor(target),
        device=target.type,
        threads=torch.get_num_threads(),
        peak_flops=peaks,
        bandwidth=2 * source.nbytes / copy,
        overhead=statistics.median(chain) / OVERHEAD_CALLS,
        load=round(os.getloadavg()[0], 2),
    )


def measure_stages(
    model: Model, name: str, requests: Iterable[MeasuredSizes], size: tuple[int, int], runs: int = 3
) -> list[StageTime]:
    """Measure vision, prefix and one step of the head for each request, with the model's own code as in the eager
    engine.

    One run warms up. Requests that share a stage, for example with the same views, give one measurement for it.

    Args:
        model: The model.
        name: Name of the policy.
        requests: Sizes to measure.
        size: Height and width of a camera frame, in pixels.
        runs: Number of runs of each stage. The median counts.
    """
    device = model.device
    found: list[StageTime] = []
    for request in requests:
        with _chunk(model, request.chunk), torch.inference_mode():
            for stage, run in _stages(model, request, size, device):
                if any(t.stage == stage and _same(stage, t.request, request) for t in found):
                    run()
                    continue
                times = _seconds(run, device, runs)
                median = statistics.median(times)
                spread = (max(times) - min(times)) / median
                load = round(os.getloadavg()[0], 2)
                found.append(
                    StageTime(name, stage, request, median, round(spread, 4), runs, load, clock(device))
                )
    return found


def _same(stage: str, one: MeasuredSizes, other: MeasuredSizes) -> bool:
    """Return True if two requests need the same computation in a stage, so that one measurement is enough."""
    if stage == "vision":
        return one.views == other.views
    if stage == "prefix":
        return (one.views, one.tokens) == (other.views, other.tokens)
    return one == other


def _stages(
    model: Model, request: MeasuredSizes, size: tuple[int, int], device: torch.device
) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield a function for each stage, in the order of the stages. Run each function before requesting the next one."""
    generator = torch.Generator().manual_seed(0)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    pixels = noise(1, request.views, model.channels, *size)
    cameras = torch.ones(1, request.views, dtype=torch.bool, device=device)
    tokens = torch.zeros(1, request.tokens, dtype=torch.int64, device=device)
    state, x = noise(1, model.state_size), noise(1, *model.noise_shape)
    kept: dict[str, Any] = {}

    def keep(key: str, value: object) -> None:
        kept[key] = value

    yield "vision", lambda: keep("image", model.embed_images(pixels))
    image = kept["image"]
    yield "prefix", lambda: keep("context", model.read(image, cameras, tokens, tokens >= 0, state))
    context, steps = kept["context"], model.solver.fixed_steps or 1

    yield "head", lambda: model.run_head(x, steps, model.time_embeddings(steps), context)


@contextmanager
def _chunk(model: Model, chunk: int) -> Iterator[None]:
    config = model.config
    if chunk != getattr(config, "chunk_size", chunk):
        model.config = replace(config, chunk_size=chunk)
    try:
        yield
    finally:
        model.config = config


def _gemm_seconds(dtype: torch.dtype, device: torch.device, runs: int) -> float:
    a, b = (torch.randn(GEMM_SIZE, GEMM_SIZE, device=device).to(dtype) for _ in range(2))
    return min(_seconds(lambda: torch.mm(a, b), device, runs))


def _seconds(call: Callable[[], object], device: torch.device, runs: int) -> list[float]:
    # Run once before the measurement, to allocate pages, fill caches and load kernels.
    call()
    _wait(device)
    now = time.thread_time if clock(device) == "cpu" else time.perf_counter
    times = []
    for _ in range(runs):
        start = now()
        call()
        _wait(device)
        times.append(now() - start)
    return times


def clock(device: torch.device) -> str:
    return "cpu" if device.type == "cpu" and torch.get_num_threads() == 1 else "wall"


def _many(call: Callable[[int], object], count: int) -> None:
    for _ in range(count):
        call(1)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _processor(device: torch.device) -> str:
    return machine.cpu_model() if device.type == "cpu" else torch.cuda.get_device_name(device)
