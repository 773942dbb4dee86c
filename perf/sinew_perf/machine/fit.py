"""Convert a roofline to milliseconds with a few factors of this machine, which are fitted to measured stages.

    T(stage) = sum over operators of
        max(FLOPs / (e_k * peak), bytes / (e_m * bandwidth)) + p * weights / bandwidth + c * overhead

``k`` is the kind of product: "linear" (it reads a weight) or "attention". ``p`` is for the packing of a linear
layer's matrix: CPU libraries copy it into panels before they multiply, however few rows follow. ``peak``,
``bandwidth`` and ``overhead`` are measured (:mod:`sinew_perf.machine.measure`). The five factors are fitted to the
stages of one or several policies at several shapes, which are more than the factors. The error band is the largest
error of a stage that was left out of the fit (leave one out).

The factors determine which side of the maximum an operator is on. With fixed sides, the model is linear in the
inverse factors. Therefore the fit alternates: choose the sides, solve non-negative least squares on relative errors,
repeat.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from typing import Literal

import numpy as np
from sinew.core import SinewError, machine
from sinew.core.fields import from_builtins
from sinew_client.untrusted import UntrustedError, read_json

from sinew_perf.machine.measure import Speeds, StageTime
from sinew_perf.operators import Component, Operator

SCHEMA = "sinew.calibration/2"
KINDS = ("linear", "attention")
FACTORS = (*KINDS, "memory", "packing", "overhead")
# These factors multiply a time. The other factors are efficiencies, which divide it.
MULTIPLIERS = ("packing", "overhead")
# Start of the fit. PRIOR_WEIGHT (in squared relative errors) pulls a factor towards this value if the samples
# do not determine it.
PRIOR = {"linear": 0.8, "attention": 0.6, "memory": 1.0, "packing": 2.0, "overhead": 2.0}
PRIOR_WEIGHT = 1e-4
# The factors of the fastest possible machine. Its matrix products reach at most the measured peak. It may read bytes
# faster than a copy through memory, because they can be in caches.
FASTEST = {"linear": 1.0, "attention": 1.0, "memory": 8.0, "packing": 0.0, "overhead": 0.0}
MAX_ROUNDS = 50
MAX_FILE = 1 << 22  # largest file of a calibration, in bytes


@dataclass(frozen=True, slots=True)
class Work:
    """Equal operators of one component of a policy.

    Attributes:
        kind: One of ``KINDS``, or "" for operators that only move bytes.
        dtype: Format of the arithmetic.
        flops: FLOPs of one operator.
        nbytes: Bytes that one operator moves.
        weights: Bytes of weights among ``nbytes``.
        count: Number of operators.
    """

    kind: str
    dtype: str
    flops: int
    nbytes: int
    weights: int
    count: int


@dataclass(frozen=True, slots=True)
class Sample:
    """A measured stage.

    Attributes:
        time: The measurement.
        work: The operators that ran in it.
    """

    time: StageTime
    work: tuple[Work, ...]


@dataclass(frozen=True, slots=True)
class Prediction:
    """A predicted time with the error band of its calibration, in seconds.

    Attributes:
        seconds: The prediction.
        low: Lower end of the band.
        high: Upper end of the band. None if the band is so wide that there is no upper end.
    """

    seconds: float
    low: float
    high: float | None


@dataclass(frozen=True)
class Calibration:
    """The fitted speeds of a machine.

    Attributes:
        speeds: The speeds that were measured before the fit.
        factors: For each name in ``FACTORS``, the factor by which the fitted speed differs from the measured speed.
        samples: The measured stages that were fitted.
        errors: Error of each sample in the fit over all samples, predicted / measured - 1.
        band: The largest error of a sample that was left out of the fit.
        engine: The engine that computed the samples.
    """

    speeds: Speeds
    factors: dict[str, float]
    samples: tuple[Sample, ...]
    errors: tuple[float, ...]
    band: float
    engine: str = "eager"

    def predict(self, component: Component) -> Prediction:
        """Predict the time of a stage with all its repeats.

        Args:
            component: The stage. Its memory traffic must be that of unfused operators, as in the samples.
        """
        seconds = component.repeats * seconds_of(work(component), self.speeds, self.factors)
        # Errors are predicted / measured - 1, so a measured time is between predicted / (1 + band) and
        # predicted / (1 - band).
        high = seconds / (1 - self.band) if self.band < 1 else None
        return Prediction(seconds, seconds / (1 + self.band), high)


def work(component: Component) -> tuple[Work, ...]:
    """Return the operators of one repeat of a component. Equal operators are combined."""
    counts: Counter[tuple[str, str, int, int, int]] = Counter()
    for operator in component.operators:
        nbytes = int(sum(tensor.bytes for tensor in operator.tensors))
        weights = int(sum(tensor.bytes for tensor in operator.tensors if tensor.kind == "weight"))
        counts[kind(operator), operator.compute_dtype, operator.flops, nbytes, weights] += operator.count
    return tuple(Work(*key, count) for key, count in counts.items())


def kind(operator: Operator) -> str:
    if not operator.flops:
        return ""
    return "linear" if any(tensor.kind == "weight" for tensor in operator.tensors) else "attention"


def seconds_of(rows: Iterable[Work], speeds: Speeds, factors: Mapping[str, float]) -> float:
    return float(_features(rows, speeds, factors) @ _inverses(factors))


def roofline_seconds(component: Component, speeds: Speeds) -> float:
    """Return the seconds of a stage with all its repeats if the machine works at its measured peaks, without fitted
    factors and without overhead. It is a lower bound of the real time.
    """
    ideal = dict.fromkeys(FACTORS, 1.0) | dict.fromkeys(MULTIPLIERS, 0.0)
    return component.repeats * seconds_of(work(component), speeds, ideal)


def _features(rows: Iterable[Work], speeds: Speeds, factors: Mapping[str, float]) -> np.ndarray:
    """Return the seconds that each factor scales, [len(FACTORS)]. For each operator, only the slower of its two times
    counts, the time of computing or the time of memory traffic, at the measured peaks. These times are summed over all
    operators.

    Args:
        rows: The operators.
        speeds: Measured speeds of the machine.
        factors: The present factors, which determine the slower time of each operator.
    """
    sums = dict.fromkeys(FACTORS, 0.0)
    for row in rows:
        moved = row.nbytes / speeds.bandwidth
        computed = row.flops / _peak(speeds, row.dtype) if row.kind else 0.0
        if row.kind and computed / factors[row.kind] >= moved / factors["memory"]:
            sums[row.kind] += row.count * computed
        else:
            sums["memory"] += row.count * moved
        if row.kind == "linear":
            sums["packing"] += row.count * row.weights / speeds.bandwidth
        sums["overhead"] += row.count * speeds.overhead
    return np.array([sums[name] for name in FACTORS])


def _inverses(factors: Mapping[str, float]) -> np.ndarray:
    return np.array([factors[name] if name in MULTIPLIERS else 1 / factors[name] for name in FACTORS])


def _peak(speeds: Speeds, dtype: str) -> float:
    if dtype not in speeds.peak_flops:
        raise SinewError(
            f"dtype {dtype}: expected a measured one ({', '.join(speeds.peak_flops)}); calibrate with this dtype"
        )
    return speeds.peak_flops[dtype]


def fit(samples: Sequence[Sample], speeds: Speeds, engine: str = "eager") -> Calibration:
    """Fit the factors to all samples. The error band comes from fits that leave out one sample each.

    Args:
        samples: The measured stages, more than factors.
        speeds: Measured speeds of the machine.
        engine: Engine of the samples.

    Returns:
        The calibration.

    Raises:
        SinewError: There are too few samples.
    """
    if len(samples) <= len(FACTORS):
        raise SinewError(
            f"samples: expected more than {len(FACTORS)}, the number of factors, got {len(samples)}. A policy with"
            " fixed"
            " sizes gives one sample per stage; calibrate another policy first, because its samples stay in the fit"
        )
    factors = fit_factors(samples, speeds)
    errors = tuple(error(sample, speeds, factors) for sample in samples)
    left_out = (
        error(sample, speeds, fit_factors([s for s in samples if s is not sample], speeds))
        for sample in samples
    )
    return Calibration(speeds, factors, tuple(samples), errors, max(map(abs, left_out)), engine)


def error(sample: Sample, speeds: Speeds, factors: Mapping[str, float]) -> float:
    """Return the relative error of the prediction for a sample: predicted time / measured time - 1."""
    return seconds_of(sample.work, speeds, factors) / sample.time.seconds - 1


def fit_factors(samples: Sequence[Sample], speeds: Speeds) -> dict[str, float]:
    measured = np.array([sample.time.seconds for sample in samples])
    floor = _inverses(FASTEST)
    pull = PRIOR_WEIGHT**0.5 * np.diag(1 / _inverses(PRIOR))
    best, best_loss = dict(PRIOR), np.inf
    factors = dict(PRIOR)
    for _ in range(MAX_ROUNDS):
        rows = np.array([_features(sample.work, speeds, factors) for sample in samples]) / measured[:, None]
        target = np.concatenate([np.ones(len(samples)), np.full(len(FACTORS), PRIOR_WEIGHT**0.5)])
        table = np.vstack([rows, pull])
        inverses = floor + _non_negative(table, target - table @ floor)
        factors = {
            name: float(value if name in MULTIPLIERS else 1 / value)
            for name, value in zip(FACTORS, inverses, strict=True)
        }
        loss = sum(error(sample, speeds, factors) ** 2 for sample in samples)
        if loss >= best_loss * (1 - 1e-9):
            break
        best, best_loss = factors, loss
    return best


def _non_negative(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Find x >= 0 with the smallest |a x - b|. Solve least squares for every subset of the unknowns, and return the
    best solution without negative numbers.
    """
    size = a.shape[1]
    best, best_loss = np.zeros(size), float(b @ b)
    for count in range(1, size + 1):
        for chosen in combinations(range(size), count):
            solution = np.linalg.lstsq(a[:, chosen], b, rcond=None)[0]
            loss = float(((a[:, chosen] @ solution - b) ** 2).sum())
            if (solution >= 0).all() and loss < best_loss:
                best, best_loss = np.zeros(size), loss
                best[list(chosen)] = solution
    return best


def folder() -> Path:
    """Return the folder of calibrations: ``$XDG_CONFIG_HOME/sinew/calibration``, by default under ``~/.config``."""
    base = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(base) / "sinew" / "calibration"


def path_of(processor: str, threads: int | str, directory: Path | None = None, engine: str = "eager") -> Path:
    slug = re.sub(r"[^a-z0-9]+", "-", processor.lower()).strip("-")
    suffix = "" if engine == "eager" else f"-{engine}"
    return (directory or folder()) / f"{slug}-{threads}-threads{suffix}.json"


def save(calibration: Calibration, directory: Path | None = None) -> Path:
    path = path_of(calibration.speeds.processor, calibration.speeds.threads, directory, calibration.engine)
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {"schema": SCHEMA, **asdict(calibration)}
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)
    return path


def load(
    processor: str, threads: int, directory: Path | None = None, engine: str = "eager"
) -> Calibration | None:
    """Load the stored calibration of a processor, number of threads and engine.

    Args:
        processor: Name of the processor.
        threads: Number of compute threads.
        directory: Folder of the calibrations. None for the user's folder.
        engine: The engine.

    Returns:
        The calibration. None if there is none.

    Raises:
        SinewError: The file is not a calibration.
    """
    path = path_of(processor, threads, directory, engine)
    try:
        record = read_json(path, MAX_FILE)
    except FileNotFoundError:
        return None
    except (OSError, UntrustedError) as problem:
        raise SinewError(f"{path}: {problem}; calibrate again") from None
    if not isinstance(record, dict) or record.pop("schema", None) != SCHEMA:
        raise SinewError(f"{path}: expected a calibration of schema {SCHEMA}; calibrate again")
    return from_builtins(record, Calibration, str(path))


def calibrated(
    source: str, threads: int, engine: str = "eager", directory: Path | None = None
) -> Calibration:
    """Return the stored calibration of this machine.

    Raises:
        SinewError: There is no calibration. The message states the command that creates it.
    """
    calibration = load(machine.cpu_model(), threads, directory, engine)
    if calibration is None:
        option = "" if engine == "eager" else f" --engine {engine}"
        raise SinewError(
            f"not calibrated for {threads} threads; run `sinew perf calibrate {source} --threads {threads}{option}`"
        )
    return calibration


def threads_of(requested: int | None, engine: str = "eager", directory: Path | None = None) -> int:
    """Return the number of threads whose calibration is used.

    Args:
        requested: Threads that the user requested. None for the default.
        engine: Engine of the calibration.
        directory: Folder of the calibrations. None for the user's folder.

    Returns:
        ``requested``, or the threads of the newest calibration of this processor and engine, or the number of cores of
        this process.
    """
    if requested:
        return requested
    form = path_of(machine.cpu_model(), "*", directory, engine)
    before, after = form.name.split("*")
    stored = {
        path.name.removeprefix(before).removesuffix(after): path for path in form.parent.glob(form.name)
    }
    ages = {int(count): path.stat().st_mtime_ns for count, path in stored.items() if count.isdigit()}
    return max(ages, key=ages.__getitem__) if ages else machine.recommended_threads()[0]


def program_of(engine: str) -> Literal["eager", "plan"]:
    """Return the program that an engine runs: "eager" for engine eager, and "plan" for all others."""
    return "eager" if engine == "eager" else "plan"
