"""Measure the stages of a loaded policy with its own engine.

:mod:`sinew_perf.machine.measure` calls the parts of a model and may change its shapes. An engine has fixed sizes: its
chunk and its solver steps stay. An engine that records programs (ONNX Runtime, CUDA graphs) masks a missing camera
and does not leave it out. Therefore only the vision stage is measured with different views, and the other two stages
with different prompts.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from sinew.core import Moment, Observation, SinewError, Timing

from sinew_perf.machine.measure import MeasuredSizes, StageTime


def requests_of(policy: Any) -> list[MeasuredSizes]:
    """Return the sizes to measure: each number of views with a short prompt, then longer prompts with all views."""
    spec = policy.spec
    views, longest, chunk = spec.views, spec.max_prompt_tokens, spec.noise_shape[0]
    lengths = sorted(
        {min(longest, tokens) for tokens in (8, longest // 4, longest // 2, longest) if tokens > 0}
    )
    fewest = views if policy.manifest.processing.all_cameras else 1
    few = [MeasuredSizes(count, lengths[0], chunk) for count in range(fewest, views)]
    return few + [MeasuredSizes(views, length, chunk) for length in lengths]


def measure_engine(policy: Any, requests: Iterable[MeasuredSizes], runs: int = 3) -> list[StageTime]:
    """Measure vision, prefix and one step of the head by the wall clock. One run warms up.

    Args:
        policy: The open policy.
        requests: Sizes to measure.
        runs: Number of runs of each request. The median counts.

    Raises:
        SinewError: The policy does not accept a request, or the engine does not measure its stages.
    """
    if runs < 1:
        raise SinewError(f"runs: expected at least 1, got {runs}")
    everything = policy.spec.views
    found: list[StageTime] = []
    for request in requests:
        if request.chunk != (rows := policy.spec.noise_shape[0]):
            raise SinewError(f"chunk: expected {rows}, got {request.chunk}")
        observation = observe(policy, request)
        policy.infer(observation)
        timings = [policy.infer(observation).timing for _ in range(runs)]
        load = round(os.getloadavg()[0], 2)
        for stage, times in seconds_by_stage(timings).items():
            measured_before = any(t.stage == "vision" and t.request.views == request.views for t in found)
            if measured_before if stage == "vision" else request.views != everything:
                continue
            median = statistics.median(times)
            spread = round((max(times) - min(times)) / median, 4)
            found.append(StageTime(policy.spec.name, stage, request, median, spread, runs, load))
    return found


def observe(policy: Any, request: MeasuredSizes) -> Observation:
    """Build an observation with random frames of the first cameras, the same frames in all observation steps, and
    token ids.

    Args:
        policy: The open policy.
        request: Sizes of the observation.

    Raises:
        SinewError: The number of views does not fit the policy.
    """
    spec, rng = policy.spec, np.random.default_rng(0)
    if not 1 <= request.views <= spec.views or request.views % spec.history:
        each = (
            f", with the same cameras in each of {spec.history} observation steps" if spec.history > 1 else ""
        )
        raise SinewError(f"views: expected 1 to {spec.views}{each}, got {request.views}")
    frames = {
        camera.name: rng.integers(0, 256, (camera.height, camera.width, 3), dtype=np.uint8)
        for camera in spec.cameras[: request.views // spec.history]
    }
    ids = np.arange(request.tokens) % policy.manifest.processing.prompt.vocab_size
    state = np.zeros(spec.state.dim, np.float32)
    earlier = (Moment(frames, state),) * (spec.history - 1)
    return Observation(images=frames, state=state, tokens=ids, seed=0, earlier=earlier)


def seconds_by_stage(timings: Sequence[Timing]) -> dict[str, list[float]]:
    """Return the seconds of each run, by stage. For the head, this is the time of one solver step: the median over the
    steps of the run.
    """
    if not all(timing.step_ms and timing.vision_ms and timing.prefix_ms for timing in timings):
        raise SinewError(
            "this engine runs all stages as one program and cannot time each stage; choose another engine"
        )
    return {
        "vision": [1e-3 * timing.vision_ms for timing in timings],
        "prefix": [1e-3 * timing.prefix_ms for timing in timings],
        "head": [1e-3 * statistics.median(timing.step_ms) for timing in timings],
    }
