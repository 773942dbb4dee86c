"""Where the milliseconds of a bundle go on this machine: load, warm-up and steady state timed apart."""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sinew import __version__
from sinew.bench.pauses import after_pauses
from sinew.core import Moment, Observation, PolicySpec, Timing, machine, providers
from sinew.engine.watch import Watch

if TYPE_CHECKING:
    from sinew.policy import Policy

PROMPT = "pick up the red cube and place it in the bowl"
SCHEMA = "sinew.bench/1"
PHASES = 3  # phases before the steady state; progress is reported for each


@dataclass(frozen=True)
class BenchResult:
    """record: what a report shows, ready for JSON, but for statistics. timings, totals: of each run, milliseconds of
    stages and of all. apart: timings of runs in which the stages of one graph were timed one by one."""

    record: dict[str, Any]
    timings: list[Timing]
    totals: list[float]
    apart: list[Timing]


def measure(
    bundle: Path,
    runs: int,
    options: dict[str, Any],
    observe: Callable[[PolicySpec], dict[str, Any]],
    advance: Callable[[str], None] = lambda _: None,
    fit_steps: Sequence[int] = (),
    pauses: Sequence[float] = (),
) -> BenchResult:
    """Load, warm up and run.

    options: of ``sinew.load``. observe: makes the observation that is sent. advance: is called with what comes next, in
    :data:`PHASES` and ``runs`` parts. fit_steps: numbers of solver steps that a line is fitted to, none if empty.
    pauses: seconds without a request after which the first answer is timed, none if empty.
    """
    from sinew.engine.backend import BACKENDS, choose
    from sinew.policy import Policy, open_bundle

    opened = open_bundle(bundle)
    chosen = choose(opened, **options)  # report invalid options before the slow import of torch
    clock = time.perf_counter
    started = clock()
    if "torch" in BACKENDS[chosen.engine].packages:
        # Import torch now, so that the load time does not contain the import.
        import_module("sinew.engine.loading")
    imported = clock()
    import_rss = machine.resident_bytes()
    advance("load")
    policy = Policy(opened, **options)
    loaded = clock()
    load_rss = machine.resident_bytes()
    advance("warm-up")
    observation = observe(policy.spec)
    policy.warm_up()
    policy.infer({**observation, "seed": 0})  # a request with the real frame sizes and prompt length
    warm = clock()

    advance("steady state")
    timings: list[Timing] = []
    totals: list[float] = []
    for run in range(runs):
        begin = clock()
        timings.append(policy.infer({**observation, "seed": run}).timing)
        totals.append((clock() - begin) * 1e3)
        advance("steady state")
    seconds = clock() - warm
    apart = stages_apart(policy, observation, runs)
    fitted = line_over_steps(policy, observation, fit_steps, runs) if fit_steps else None
    steady_ms = float(np.median(totals))
    paused = list(after_pauses(lambda: policy.infer({**observation, "seed": 0}), pauses, steady_ms))

    rate = runs / seconds
    described = describe(policy, observation)
    record = {
        "schema": SCHEMA,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "sinew": __version__,
        "hardware": hardware(),
        "software": software(),
        "policy": described,
        "threads": policy.threads,
        "runs": runs,
        "import_ms": (imported - started) * 1e3,
        "load_ms": (loaded - imported) * 1e3,
        "warm_up_ms": (warm - loaded) * 1e3,
        "chunks_per_second": rate,
        "actions_per_second": rate * policy.spec.chunk_size,
        "memory_bytes": {
            "weights": policy.facts.weights_nbytes,
            "after_import": import_rss,
            "after_load": load_rss,
            "steady": machine.resident_bytes(),
        },
        "samples_ms": {"total": [round(value, 3) for value in totals]},
        "roofline": roofline(policy, described),
        **({} if fitted is None else {"fit": fitted}),
        **({"after_pause": paused} if paused else {}),
    }
    return BenchResult(record, timings, totals, apart)


def roofline(policy: Policy, described: dict[str, Any]) -> dict[str, Any]:
    """Return the milliseconds of each stage at this machine's measured peaks, or a reason why there are none."""
    if (estimates := providers.provider("sinew.estimates")) is None:
        how = providers.how_to_install("sinew-perf")
        return {"reason": f"the roofline is in the package sinew-perf: {how}"}
    record: dict[str, Any] = estimates.roofline(policy, policy.threads, described)
    return record


def make_observation(
    spec: PolicySpec, size: tuple[int, int] | None, prompt: str, solver_steps: int | None
) -> dict[str, Any]:
    """Return noise frames for every camera, the same at all moments; their content does not change the work."""
    rng = np.random.default_rng(0)
    images = {
        camera.name: rng.integers(0, 256, (*(size or (camera.height, camera.width)), 3), dtype=np.uint8)
        for camera in spec.cameras
    }
    state = np.zeros(spec.state.dim, np.float32)
    earlier = [Moment(images, state)] * (spec.history - 1)
    return {
        "images": images,
        "state": state,
        "prompt": prompt,
        "solver_steps": solver_steps,
        **({"earlier": earlier} if earlier else {}),
    }


def stages_apart(policy: Policy, observation: dict[str, Any], runs: int) -> list[Timing]:
    """Return times of each stage for an engine that runs all stages as one graph, else an empty list."""
    if not policy.facts.one_graph:
        return []
    found = []
    for run in range(runs + 1):
        prepared, watch = policy.prepare({**observation, "seed": run}), Watch(apart=True)
        policy.engine.run(prepared.inputs.batched(), prepared.noise[None], prepared.steps, watch=watch)
        found.append(watch.timing())
    return found[1:]  # the first run records the stages, so its time does not count


def line_over_steps(
    policy: Policy, observation: dict[str, Any], counts: Sequence[int], runs: int
) -> dict[str, Any]:
    """Return inference(T) = prefix + T * step in milliseconds, by least squares over the medians of ``runs`` each,
    taken in turns so that a busy machine meets them alike. residual_ms: the largest distance from the line.

    The way in which the authors of vla.cpp tell pi0's phases apart (appendix D).
    """
    times: dict[int, list[float]] = {count: [] for count in counts}
    for count in counts:  # some engines make a program for each number of steps
        policy.infer({**observation, "seed": 0, "solver_steps": count})
    for run in range(runs):
        for count, found in times.items():
            begin = time.perf_counter()
            policy.infer({**observation, "seed": run, "solver_steps": count})
            found.append((time.perf_counter() - begin) * 1e3)
    medians = np.array([float(np.median(found)) for found in times.values()])
    across = np.stack([np.ones(len(counts)), np.array(counts, float)], axis=1)
    (prefix, step), *_ = np.linalg.lstsq(across, medians, rcond=None)
    steps = observation["solver_steps"] or policy.spec.solver_steps
    whole = prefix + steps * step
    return {
        "steps": list(counts),
        "median_ms": [round(float(value), 4) for value in medians],
        "prefix_ms": float(prefix),
        "step_ms": float(step),
        "residual_ms": float(np.abs(across @ np.array([prefix, step]) - medians).max()),
        "prefix_share": float(prefix / whole) if whole > 0 else 0.0,
    }


def hardware() -> dict[str, Any]:
    """Return the hardware, ready for JSON."""
    found = machine.cores()
    return {
        "cpu": machine.cpu_model(),
        "cores": found.physical,
        "logical_processors": found.logical,
        "cgroup_quota": found.quota,
        "memory_bytes": machine.memory()[0],
        "system": f"{platform.system()} {platform.machine()}",
    }


def software() -> dict[str, str]:
    """Return versions of what computed: of these, the packages that this process has imported."""
    modules = {name: sys.modules.get(name) for name in ("torch", "onnxruntime")}
    found = {name: str(module.__version__) for name, module in modules.items() if module is not None}
    return {**found, "python": platform.python_version()}


def describe(policy: Policy, observation: dict[str, Any]) -> dict[str, Any]:
    """Return the subject of a measurement: the policy, its engine, and the sizes of an observation."""
    spec = policy.spec
    return {
        "architecture": spec.architecture,
        "name": spec.name,
        **policy.describe(),
        **policy.facts.details,
        "views": spec.history * len(observation["images"]),
        "frames": {camera: list(frame.shape) for camera, frame in observation["images"].items()},
        "chunk_size": spec.chunk_size,
        "action_dim": spec.action.dim,
        "solver_steps": observation["solver_steps"] or spec.solver_steps,
        "prompt_tokens": int(policy.processor.inputs(Observation.from_mapping(observation)).token_mask.sum()),
    }
