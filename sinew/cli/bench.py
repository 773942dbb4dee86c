"""``sinew bench``: where the milliseconds of a bundle go on this machine.

Load, warm-up and steady state are timed apart; the last line of standard output is one JSON object.
"""

from __future__ import annotations

import platform
import shlex
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from cyclopts import Parameter, validators
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

from sinew import __version__, machine
from sinew.cli import terminal
from sinew.cli.options import RUNS, Runs
from sinew.core import Moment, Observation, ObservationError, PolicySpec, Timing
from sinew.engine.engine import Watch
from sinew.eval.report.stats import summarize
from sinew.perf.machine.achieved import roofline_record

if TYPE_CHECKING:
    from sinew.policy import Policy

PROMPT = "pick up the red cube and place it in the bowl"
SCHEMA = "sinew.bench/1"
STATISTICS = ("mean", "p50", "p95", "p99", "max")


def bench(
    bundle: Path,
    /,
    *,
    runs: Annotated[int, Parameter(validator=lambda _, n: _at_least_one(n))] = 20,
    load: Runs = RUNS,
    threads: Annotated[int | None, Parameter(validator=validators.Number(gte=1))] = None,
    image_size: str | None = None,
    prompt: str = PROMPT,
    solver_steps: int | None = None,
    fit_steps: str | None = None,
    deadline_ms: float | None = None,
) -> int:
    """Time a bundle, stage by stage.

    Args:
        bundle: a bundle, a folder of `sinew export`, a checkpoint or training run, or a name of the hub.
        runs: inferences in the steady state.
        threads: for compute; chosen from the cores of this process if absent.
        image_size: HEIGHTxWIDTH of every frame; the sizes that the bundle declares if absent.
        prompt: the instruction.
        solver_steps: instead of the bundle's own number.
        fit_steps: numbers of solver steps with commas, as 1,2,5,10: also fits a line to the inference's median over
            them, which tells the prefix from a step where an engine runs both as one.
        deadline_ms: count the inferences that take longer.
    """
    size = parse_size(image_size) if image_size else None
    counts = parse_steps(fit_steps) if fit_steps else ()
    options = load.keywords() | {"threads": threads}
    result = measure(bundle, runs, options, size, prompt, solver_steps, counts)
    if deadline_ms is not None:
        totals = np.array(result["samples_ms"]["total"])
        misses = int((totals > deadline_ms).sum())
        result["deadline"] = {"ms": deadline_ms, "misses": misses, "miss_rate": misses / runs}
    result["command"] = shlex.join(["sinew", *sys.argv[1:]])
    print_report(result)
    terminal.emit(result)
    return 0


def measure(
    bundle: Path,
    runs: int,
    options: dict[str, Any],
    size: tuple[int, int] | None,
    prompt: str,
    solver_steps: int | None,
    fit_steps: Sequence[int] = (),
) -> dict[str, Any]:
    """Load, warm up and run; returns everything that the report and the JSON line show. ``options``: of
    ``sinew.load``. ``fit_steps``: numbers of solver steps that a line is fitted to, none if empty."""
    from sinew.engine.backend import BACKENDS
    from sinew.engine.choose import choose
    from sinew.policy import Policy, open_bundle

    opened = open_bundle(bundle)
    chosen = choose(opened, **options)  # mistakes show before torch is imported
    with terminal.bars(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    ) as progress:
        task = progress.add_task("import", total=runs)
        clock = time.perf_counter
        started = clock()
        if BACKENDS[chosen.engine].needs_torch:
            import_module("sinew.engine.loading")  # torch, whose import is not a part of loading
        imported = clock()
        import_rss = machine.resident_bytes()
        progress.update(task, description="load")
        policy = Policy(opened, **options)
        loaded = clock()
        load_rss = machine.resident_bytes()
        progress.update(task, description="warm-up")
        observation = make_observation(policy.spec, size, prompt, solver_steps)
        policy.warm_up()
        policy.infer({**observation, "seed": 0})  # with the real frame sizes and prompt length
        warm = clock()

        progress.update(task, description="steady state")
        timings: list[Timing] = []
        totals: list[float] = []
        for run in range(runs):
            begin = clock()
            timings.append(policy.infer({**observation, "seed": run}).timing)
            totals.append((clock() - begin) * 1e3)
            progress.advance(task)
        seconds = clock() - warm
        apart = stages_apart(policy, observation, runs)
        fitted = line_over_steps(policy, observation, fit_steps, runs) if fit_steps else None

    rate = runs / seconds
    described = describe(policy, observation)
    return {
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
        "stages_ms": stage_statistics(timings, totals, apart),
        "chunks_per_second": rate,
        "actions_per_second": rate * policy.spec.chunk_size,
        "memory_bytes": {
            "weights": policy.weights_nbytes,
            "after_import": import_rss,
            "after_load": load_rss,
            "steady": machine.resident_bytes(),
        },
        "samples_ms": {"total": [round(value, 3) for value in totals]},
        "roofline": roofline_record(policy, policy.threads, described),
        **({} if fitted is None else {"fit": fitted}),
    }


def make_observation(
    spec: PolicySpec, size: tuple[int, int] | None, prompt: str, solver_steps: int | None
) -> dict[str, Any]:
    """Noise frames for every camera, the same at all moments; their content does not change the work."""
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
    return found[1:]  # the first records them


def line_over_steps(
    policy: Policy, observation: dict[str, Any], counts: Sequence[int], runs: int
) -> dict[str, Any]:
    """Return inference(T) = prefix + T * step in milliseconds, by least squares over the medians of ``runs`` each,
    taken in turns so that a busy machine meets them alike. residual_ms: the largest distance from the line.

    The way in which the authors of vla.cpp tell pi0's phases apart (appendix D).
    """
    times: dict[int, list[float]] = {count: [] for count in counts}
    for count in counts:  # some engines make a program for each number
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


def stage_statistics(
    timings: Sequence[Timing], totals: Sequence[float], apart: Sequence[Timing] = ()
) -> dict[str, Any]:
    """Statistics per stage, in the order in which the stages run; ``steps`` has one entry per solver step.

    apart: of runs in which the stages were timed one by one; ``graph`` then is what they take as one.
    """
    stages: dict[str, Any] = {"preprocess": summarize([t.preprocess_ms for t in timings])}
    if apart:
        stages["graph"] = summarize([t.head_ms for t in timings])
    parts = apart or timings
    stages["vision"] = summarize([t.vision_ms for t in parts])
    stages["prefix"] = summarize([t.prefix_ms for t in parts])
    steps = np.array([t.step_ms for t in parts])  # [runs, steps]
    if steps.size:
        stages["steps"] = [summarize(column) for column in steps.T]
        stages["head"] = summarize(steps.sum(axis=1))
    stages["postprocess"] = summarize([t.postprocess_ms for t in timings])
    stages["total"] = summarize(totals)
    return stages


def hardware() -> dict[str, Any]:
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
    """Versions of what computed: of these, the packages that this process has imported."""
    modules = {name: sys.modules.get(name) for name in ("torch", "onnxruntime")}
    found = {name: str(module.__version__) for name, module in modules.items() if module is not None}
    return {**found, "python": platform.python_version()}


def describe(policy: Policy, observation: dict[str, Any]) -> dict[str, Any]:
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


def print_report(result: dict[str, Any]) -> None:
    policy, stages, memory = result["policy"], result["stages_ms"], result["memory_bytes"]
    console = terminal.console()
    console.print(
        f"{policy['name']} ({policy['architecture']}), engine {policy['engine']}, {policy['dtype']} on"
        f" {policy['device']},"
        f" {result['threads']} threads, {policy['views']} views, {policy['solver_steps']} solver steps,"
        f" {policy['prompt_tokens']} prompt tokens",
        f"engine: {policy['engine_reason']}; device: {policy['device_reason']}; dtype: {policy['dtype_reason']}",
        f"{result['hardware']['cpu']}, {result['hardware']['cores']} cores,"
        f" {', '.join(f'{name} {version}' for name, version in result['software'].items())},"
        f" sinew {result['sinew']}",
        sep="\n",
    )
    title = f"milliseconds over {result['runs']} runs in the steady state"
    table = terminal.table(title, "stage", *(f">{name}" for name in STATISTICS))
    for stage, statistics in stages.items():
        if stage == "steps":
            for step, row in enumerate(statistics, start=1):
                table.add_row(f"  step {step}", *_cells(row), style="dim")
        else:
            bold = "bold" if stage == "total" else None
            table.add_row(stage, *_cells(statistics), style=bold, end_section=stage == "postprocess")
    console.print(table)
    print_roofline(result["roofline"], stages)
    lines = [
        (
            f"import {result['import_ms']:.0f} ms, load {result['load_ms']:.0f} ms,"
            f" warm-up {result['warm_up_ms']:.0f} ms"
        ),
        (
            f"chunk rate {result['chunks_per_second']:.3f} chunks/s;"
            f" action rate {result['actions_per_second']:.1f} actions/s ({policy['chunk_size']} per chunk)"
        ),
        (
            f"peak memory {_mib(memory['steady']['peak'])} (weights {_mib(memory['weights'])},"
            f" before load {_mib(memory['after_import']['peak'])})"
        ),
    ]
    if "fit" in result:
        fit = result["fit"]
        lines.append(
            f"inference(T) = {fit['prefix_ms']:.2f} ms + T * {fit['step_ms']:.3f} ms over T ="
            f" {', '.join(map(str, fit['steps']))}, at most {fit['residual_ms']:.2f} ms beside it;"
            f" {fit['prefix_share']:.0%} are no step"
        )
    if "deadline" in result:
        deadline = result["deadline"]
        lines.append(
            f"deadline {deadline['ms']:g} ms missed in {deadline['misses']} of {result['runs']} runs"
        )
    console.print("\n".join(lines))


def print_roofline(record: dict[str, Any], stages: dict[str, Any]) -> None:
    """``stages``: the report's own, for the medians."""
    console = terminal.console()
    if "reason" in record:
        console.print(f"roofline: {record['reason']}")
        return
    columns = (">p50", ">roofline", ">achieved", ">GFLOP/s", ">of sgemm", ">predicted", ">band")
    title = "against the roofline of this machine's measured peaks, milliseconds"
    table, peak = terminal.table(title, "stage", *columns), record["sgemm_gflops"]
    for stage, row in record["stages_ms"].items():
        p50 = stages[stage]["p50"]
        ideal = row.get("roofline")
        table.add_row(
            stage,
            f"{p50:.2f}",
            "-" if ideal is None else f"{ideal:.2f}",
            "-" if ideal is None else f"{100 * ideal / p50:.0f} %",
            f"{1e3 * row['gflop'] / p50:.1f}",
            f"{100 * 1e3 * row['gflop'] / p50 / peak:.0f} %" if peak else "-",
            f"{row['predicted']:.2f}" if "predicted" in row else "-",
            _band(row) if "low" in row else "-",
        )
    console.print(table)


def _band(row: dict[str, Any]) -> str:
    return (
        f"{row['low']:.2f} to {row['high']:.2f}" if row["high"] is not None else f"{row['low']:.2f} or more"
    )


def _cells(statistics: dict[str, float]) -> list[str]:
    return [f"{statistics[name]:.2f}" for name in STATISTICS]


def _mib(count: int) -> str:
    return f"{count / 2**20:.0f} MiB"


def _at_least_one(number: int) -> None:
    if number < 1:
        raise ValueError("expected at least 1")


def parse_size(text: str) -> tuple[int, int]:
    """``"480x640"`` to (height, width)."""
    height, _, width = text.lower().partition("x")
    if not (height.isdigit() and width.isdigit() and int(height) and int(width)):
        raise ObservationError("--image-size", "HEIGHTxWIDTH, as 480x640", repr(text))
    return int(height), int(width)


def parse_steps(text: str) -> tuple[int, ...]:
    """``"1,2,5"`` to numbers of solver steps, each once. A line needs two."""
    parts = text.split(",")
    if not all(part.strip().isdigit() and 1 <= int(part) <= 1000 for part in parts) or len(set(parts)) < 2:
        raise ObservationError("--fit-steps", "two numbers or more of 1 to 1000, as 1,2,5,10", repr(text))
    return tuple(dict.fromkeys(int(part) for part in parts))
