"""Measure how long a bundle takes on this machine. Load, warm-up and steady state are measured separately."""

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
PHASES = 3  # number of phases before the steady state; each phase reports progress


@dataclass(frozen=True)
class BenchResult:
    """The result of a benchmark.

    Attributes:
        record: The report without statistics, as a JSON-ready dict.
        timings: Milliseconds of the stages for each run.
        totals: Milliseconds of each run.
        apart: Timings of additional runs with separate stages, if the engine normally runs all stages as one graph.
    """

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
    """Load a bundle, warm it up, and measure its inferences.

    Args:
        bundle: The bundle.
        runs: Number of inferences.
        options: Options of ``sinew.load``.
        observe: Makes the observation that is sent.
        advance: Called with the name of the next phase, in total :data:`PHASES` + ``runs`` times.
        fit_steps: Numbers of solver steps to which a line is fitted. Empty for no line.
        pauses: Lengths of pauses in seconds, after which the first answer is timed. Empty for no pauses.
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
    """Return the shortest possible milliseconds of each stage.

    The times follow from this machine's measured peak memory and compute rates. Without the package sinew-perf, the
    result contains the reason why they are missing.
    """
    if (estimates := providers.provider("sinew.estimates")) is None:
        how = providers.how_to_install("sinew-perf")
        return {"reason": f"the roofline is in the package sinew-perf: {how}"}
    record: dict[str, Any] = estimates.roofline(policy, policy.threads, described)
    return record


def make_observation(
    spec: PolicySpec, size: tuple[int, int] | None, prompt: str, solver_steps: int | None
) -> dict[str, Any]:
    """Return an observation with noise frames for every camera. The content of the frames does not change the work.

    Args:
        spec: The policy's interface.
        size: Height and width of the frames. None uses the size in ``spec``.
        prompt: The instruction.
        solver_steps: Number of solver steps. None uses the policy's number.
    """
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
    """Return the times of the single stages for an engine that normally runs all stages as one graph; an empty list
    for any other engine.
    """
    if not policy.facts.one_graph:
        return []
    timings = []
    for run in range(runs + 1):
        prepared, watch = policy.prepare({**observation, "seed": run}), Watch(apart=True)
        policy.engine.run(prepared.inputs.batched(), prepared.noise[None], prepared.steps, watch=watch)
        timings.append(watch.timing())
    return timings[1:]  # the first run records the stages, so its time does not count


def line_over_steps(
    policy: Policy, observation: dict[str, Any], counts: Sequence[int], runs: int
) -> dict[str, Any]:
    """Fit the line inference(T) = prefix + T * step in milliseconds, by least squares over medians.

    The numbers of steps are measured in turn, so that a busy machine affects all of them equally. The authors of
    vla.cpp separate pi0's phases in the same way (appendix D).

    Args:
        policy: The policy.
        observation: The observation.
        counts: Numbers of solver steps T.
        runs: Number of inferences per number of steps.

    Returns:
        The line as a JSON-ready dict. ``residual_ms`` is the largest distance of a median from the line.
    """
    times: dict[int, list[float]] = {count: [] for count in counts}
    for count in counts:  # warm-up: some engines record a program for each number of steps
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
    """Return this machine's hardware as a JSON-ready dict."""
    processors, gpu = machine.cores(), machine.gpu()
    return {
        "cpu": machine.cpu_model(),
        "board": machine.board(),
        "gpu": "" if gpu is None else gpu["name"],
        "cores": processors.physical,
        "logical_processors": processors.logical,
        "cgroup_quota": processors.quota,
        "memory_bytes": machine.memory()[0],
        "system": f"{platform.system()} {platform.machine()}",
    }


def software() -> dict[str, str]:
    """Return the versions of Python and of the packages that computed in this process."""
    modules = {name: sys.modules.get(name) for name in ("torch", "onnxruntime")}
    versions = {name: str(module.__version__) for name, module in modules.items() if module is not None}
    return {**versions, "python": platform.python_version()}


def describe(policy: Policy, observation: dict[str, Any]) -> dict[str, Any]:
    """Return a description of what was measured: the policy, its engine, and the sizes of an observation."""
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
