"""``sinew perf calibrate``: measure the machine and a policy's stages, fit the factors, and store them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from sinew.core import SinewError, machine
from sinew.engine.clone import on_meta
from sinew.models.base import Model
from torch import nn

from sinew_perf.machine import fit as calibration
from sinew_perf.machine.fit import Calibration, Sample, work
from sinew_perf.machine.measure import DTYPES, MeasuredSizes, StageTime, measure_speeds, measure_stages
from sinew_perf.machine.measure_engine import measure_engine, requests_of
from sinew_perf.program import PublishedProgram, is_sizes_alone, of_model, preset
from sinew_perf.trace import STAGES

Report = Callable[[str], None]


def calibrate(
    source: str | Path,
    *,
    directory: Path | None = None,
    threads: int | None = None,
    dtype: str = "fp32",
    engine: str = "eager",
    runs: int = 3,
    requests: Sequence[MeasuredSizes] | None = None,
    report: Report | None = None,
) -> tuple[Calibration, Path]:
    """Measure a policy on the CPU, fit the factors of the prediction, and store them.

    Samples of other policies in an earlier calibration of the same processor, threads and engine stay in the fit.

    Args:
        source: A bundle, or a preset with random weights.
        directory: Folder of the calibrations. None for the user's folder.
        threads: Number of compute threads. None for :func:`threads_of`.
        dtype: Compute type.
        engine: Engine. Engines other than eager need a bundle.
        runs: Number of runs of each stage. The median counts.
        requests: Sizes to measure. None for :func:`default_requests`, or for
            :func:`sinew_perf.machine.measure_engine.requests_of` with engines other than eager.
        report: Called with a line of progress.

    Returns:
        The calibration, and the file in which it is stored.

    Raises:
        SinewError: An argument is invalid.
    """
    if runs < 1:
        raise SinewError(f"runs: expected at least 1, got {runs}")
    if dtype not in DTYPES:
        raise SinewError(f"dtype: expected one of {', '.join(DTYPES)}, got {dtype!r}")
    before = torch.get_num_threads()
    say = report or (lambda _: None)
    try:
        torch.set_num_threads(threads or threads_of(source, engine, dtype))
        say(f"measuring the machine with {torch.get_num_threads()} threads")
        speeds = measure_speeds(dict.fromkeys(("fp32", dtype)))
        if engine == "eager":
            model, program = loaded(source, dtype)
            sizes = default_requests(program) if requests is None else requests
            say(f"measuring {program.name}: {len(sizes)} requests of {runs} runs per stage")
            samples = measure_samples(model, program, sizes, runs)
        else:
            samples = engine_samples(source, engine, dtype, speeds.threads, requests, runs, say)
        old = calibration.load(speeds.processor, speeds.threads, directory, engine)
        names = {sample.time.model for sample in samples}
        earlier = [sample for sample in old.samples if sample.time.model not in names] if old else []
        fitted = calibration.fit([*earlier, *samples], speeds, engine)
        return fitted, calibration.save(fitted, directory)
    finally:
        torch.set_num_threads(before)


def threads_of(source: str | Path, engine: str, dtype: str) -> int:
    """Return the default number of threads for a policy, which ``sinew bench`` also uses.

    Args:
        source: A bundle, or a preset.
        engine: The engine.
        dtype: Compute type.

    Returns:
        The engine's own choice for a bundle, or one thread per core for a preset.
    """
    if is_sizes_alone(source):
        return machine.recommended_threads()[0]
    from sinew.policy import load

    policy = load(source, "cpu", dtype, engine)
    # The warm-up determines the number of threads.
    policy.warm_up()
    return policy.threads


def measure_samples(
    model: Model, program: PublishedProgram, requests: Sequence[MeasuredSizes], runs: int
) -> list[Sample]:
    """Measure the stages of a model.

    Args:
        model: The model.
        program: Program of the same model.
        requests: Sizes to measure. Requests that share a stage give one sample for it.
        runs: Number of runs of each stage.
    """
    shapes = program.shapes
    return with_work(
        measure_stages(model, program.name, requests, (shapes.height, shapes.width), runs), program
    )


def engine_samples(
    source: str | Path,
    engine: str,
    dtype: str,
    threads: int,
    requests: Sequence[MeasuredSizes] | None,
    runs: int,
    say: Report,
) -> list[Sample]:
    """Measure the stages of a bundle with an engine other than eager. Their operators come from the planned program.

    Args:
        source: The bundle.
        engine: The engine.
        dtype: Compute type.
        threads: Number of compute threads.
        requests: Sizes to measure. None for the default.
        runs: Number of runs of each stage.
        say: Called with a line of progress.
    """
    from sinew.policy import load

    if is_sizes_alone(source):
        raise SinewError(f"source: expected a bundle for engine {engine}, got the preset {source}")
    # Allow missing cameras, because the number of views differs between the requests.
    policy = load(source, "cpu", dtype, engine, threads=threads, allow_missing_cameras=True)
    sizes = requests_of(policy) if requests is None else requests
    say(f"measuring {policy.spec.name} under {engine}: {len(sizes)} requests of {runs} runs")
    program = PublishedProgram.load(source, dtypes=dtype, engine="plan")
    return with_work(measure_engine(policy, sizes, runs), program)


def with_work(times: Sequence[StageTime], program: PublishedProgram) -> list[Sample]:
    """Combine the measured time of each stage with the operators that ran in the stage."""
    works = {
        request: {
            component.name: work(component) for component in program.at(request.request).components("unfused")
        }
        for request in dict.fromkeys(time.request for time in times)
    }
    return [Sample(time, works[time.request][time.stage]) for time in times]


def default_requests(program: PublishedProgram) -> list[MeasuredSizes]:
    """Return the sizes of the policy's own request and of other requests near it. From their times, the fit can
    separate the factors of the prediction.
    """
    views, chunk, longest = program.shapes.views, program.chunk, program.shapes.tokens
    few = program.fixed.get("cameras", 1)

    def rows(count: int) -> int:
        return program.fixed.get("chunk", count)

    return list(
        dict.fromkeys(
            (
                MeasuredSizes(views, min(16, longest), chunk),
                MeasuredSizes(few, min(8, longest), rows(max(1, chunk // 4))),
                MeasuredSizes(few, longest, rows(2 * chunk)),
                MeasuredSizes(views, longest, rows(4 * chunk)),
            )
        )
    )


def loaded(source: str | Path, dtype: str) -> tuple[Model, PublishedProgram]:
    """Return the model on the CPU (with random weights for a preset), and its program."""
    if is_sizes_alone(source):
        program = preset(str(source)).cast(dtype)
        model = random_weights(on_meta(program.model))
    else:
        from sinew.policy import load

        policy = load(source, "cpu", dtype, "eager")
        model = policy.engine.model
        declared = PublishedProgram.load(source)
        program = of_model(model, declared.shapes, declared.name)
    return model, program


@torch.no_grad()
def random_weights(model: Model) -> Model:
    """Copy a model to the CPU with random weights. Activations stay near 1, so that measured times are realistic."""
    made = model.to_empty(device="cpu")
    for module in made.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.ndim > 1 and not isinstance(module, nn.Embedding):
                # This bound gives the weights a variance of 1 / fan_in.
                bound = (3 * parameter.shape[0] / parameter.numel()) ** 0.5
                parameter.uniform_(-bound, bound)
            elif name == "weight" and parameter.ndim == 1:
                parameter.fill_(1.0)
            else:
                parameter.uniform_(-0.1, 0.1)
    return made.eval().requires_grad_(False)


def disturbed(fitted: Calibration) -> str:
    """Return a warning if other processes used the machine during a calibration. "" if they did not."""
    note = machine.busy(fitted.speeds.load)
    return note and f"{note}; calibrate again when idle"


def errors_by_stage(fitted: Calibration) -> dict[str, float]:
    """Return the largest error of the fitted prediction for each stage."""
    largest = dict.fromkeys(STAGES, 0.0)
    for sample, error in zip(fitted.samples, fitted.errors, strict=True):
        largest[sample.time.stage] = max(largest[sample.time.stage], abs(error))
    return largest
