"""One engine against eager float32, stage by stage, on the same observations and noise."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass, field
from functools import reduce
from typing import Any

import numpy as np

from sinew.core import Observation, upcast_text
from sinew.engine.watch import Trace
from sinew.policy import Policy

STAGES = ("vision", "prefix", "head", "actions")

# Float32 engines have to reach these (the survey of deployment on edge GPUs, section 7): 1 - cosine of each stage, and
# the largest difference of the chunk over the spread.
COSINE, LARGEST = 1e-7, 1e-4

# Largest relative L2 of a stage by the lowest precision in force: what golden tests see (docs/plan.md, docs/engines.md)
# with room for frames that amplify, and far below what a wrong weight does. Indices have no bound: they are equal.
BOUNDS = {
    "fp32": {"vision": 1e-4, "prefix": 1e-4, "head": 1e-3, "actions": 1e-3},
    "fp16": {"vision": 2e-2, "prefix": 2e-2, "head": 5e-2, "actions": 5e-2},
    "bf16": {"vision": 5e-2, "prefix": 5e-2, "head": 1e-1, "actions": 1e-1},
    "int8": {"vision": 2e-1, "prefix": 2e-1, "head": 3e-1, "actions": 3e-1},
}
RANK = ("fp32", "fp16", "bf16", "int8")
LIKE = {"int8-rows": "int8", "fp8": "int8"} | {upcast_text(half): half for half in ("bf16", "fp16")}


@dataclass(frozen=True, slots=True)
class Difference:
    """How far an array is from the reference's: relative L2, 1 - cosine, and the largest absolute difference. All are
    infinite for other shapes, and for numbers that are not finite."""

    relative: float = 0.0
    cosine: float = 0.0
    largest: float = 0.0

    @classmethod
    def of(cls, got: np.ndarray, wanted: np.ndarray) -> Difference:
        if got.shape != wanted.shape or not np.isfinite(got).all():
            return cls(*[float("inf")] * 3)
        a, b = got.astype(np.float64).ravel(), wanted.astype(np.float64).ravel()
        lengths = float(np.linalg.norm(a)), float(np.linalg.norm(b))
        # From the unit vectors' distance: 1 - a * b would lose all digits where they are nearly equal.
        if all(lengths):
            cosine = float(np.linalg.norm(a / lengths[0] - b / lengths[1])) ** 2 / 2
        else:
            cosine = float(lengths[0] != lengths[1])
        largest = float(np.abs(a - b).max(initial=0.0))
        return cls(float(np.linalg.norm(a - b)) / (lengths[1] or 1.0), cosine, largest)

    def worst(self, other: Difference) -> Difference:
        """Return the larger of each."""
        return Difference(*map(max, astuple(self), astuple(other)))


@dataclass
class StageParity:
    """A stage over all observations.

    Attributes:
        bound: of the relative L2.
        strict: float32's bounds hold, too: ``COSINE``, and for the chunk ``LARGEST``.
        differences: one for each observation.
    """

    name: str
    bound: float
    strict: bool = False
    differences: list[Difference] = field(default_factory=list)
    compared: str = ""

    @property
    def worst(self) -> Difference:
        return reduce(Difference.worst, self.differences, Difference())

    @property
    def error(self) -> float:
        """Return the relative L2, the worst of all observations."""
        return self.worst.relative

    @property
    def as_float32(self) -> bool:
        """Return True if the stage is within float32's bounds, whatever its own are."""
        largest = self.worst.largest if self.name == "actions" else 0.0
        return bool(self.differences) and self.worst.cosine <= COSINE and largest <= LARGEST

    @property
    def passed(self) -> bool:
        within = bool(self.differences) and self.error <= self.bound
        return within and (self.as_float32 or not self.strict)

    def to_dict(self) -> dict[str, Any]:
        median = float(np.median([each.relative for each in self.differences])) if self.differences else None
        return {
            "name": self.name,
            "bound": self.bound,
            "compared": self.compared,
            "strict": self.strict,
            "error": self.worst.relative,
            "median": median,
            "one_minus_cosine": self.worst.cosine,
            "largest": self.worst.largest,
            "as_float32": self.as_float32,
            "passed": self.passed,
        }


@dataclass
class Parity:
    """What a comparison found. ``indices``: the tables whose row numbers were compared, with the unequal ones named.
    precision: the lowest in force, whose bounds apply."""

    stages: dict[str, StageParity]
    precision: str = "fp32"
    observations: int = 0
    indices: dict[str, bool] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return not self.faults and all(self.indices.values()) and all(s.passed for s in self.stages.values())

    def to_dict(self) -> dict[str, Any]:
        return {
            "passed": self.passed,
            "observations": self.observations,
            "precision": self.precision,
            "stages": [stage.to_dict() for stage in self.stages.values()],
            "indices": self.indices,
            "faults": self.faults,
        }


def compare(policy: Policy, reference: Policy, observations: Iterable[Observation]) -> Parity:
    """Return how far ``policy`` is from ``reference``, which computes in eager float32."""
    bounds, precision = bounds_of(policy), lowest_precision(policy)
    strict = precision == "fp32"
    found = Parity({name: StageParity(name, bounds[name], strict) for name in STAGES}, precision)
    steps = reference.spec.solver_steps
    for observation in observations:
        found.observations += 1
        noise, _ = reference.processor.noise(observation)
        traces = []
        for each in (reference, policy):
            inputs = each.processor.inputs(observation, pixels=not each.facts.takes_frames)
            traces.append(each.engine.trace(inputs.batched(), noise[None], steps))
        _stages(found, *traces)
        wanted, got = (each.infer(observation).actions for each in (reference, policy))
        spread = spread_of(reference)
        found.stages["actions"].differences.append(Difference.of(got / spread, wanted / spread))
        if not np.isfinite(got).all():
            found.faults.append("actions that are not finite")
    found.stages["actions"].compared = "the chunk in the robot's units, over the spread of the statistics"
    return found


def bounds_of(policy: Policy) -> dict[str, float]:
    """Return the bound of each stage: that of the lowest precision in force anywhere before it."""
    bounds = dict(BOUNDS[lowest_precision(policy)])
    measured = policy.manifest.quantization
    if measured is not None and policy.facts.recipe:  # what `quantize` saw on its own observations, with room
        bounds["actions"] = max(bounds["actions"], 2 * measured.error_max)
    return bounds


def lowest_precision(policy: Policy) -> str:
    """Return the lowest precision in force in a policy, of ``RANK``. Formats of fewer bits count as int8."""
    words = {word for kinds in policy.facts.precision.values() for word in kinds.split("+")}
    ranked = (LIKE.get(word, word) for word in words)
    return max((word if word in RANK else "int8" for word in ranked), key=RANK.index)


def distance(got: np.ndarray, wanted: np.ndarray) -> float:
    """Return the relative L2 distance; infinite for other shapes, or numbers that are not finite."""
    return Difference.of(got, wanted).relative


def _stages(found: Parity, wanted: Trace, got: Trace) -> None:
    found.stages["vision"].differences.append(Difference.of(got.vision, wanted.vision))
    found.stages["vision"].compared = f"image tokens {list(wanted.vision.shape)}"
    worst, names = Difference(), []
    for name, array in wanted.prefix.items():
        other = got.prefix.get(name)
        if other is None or other.shape != array.shape:
            continue  # a rewritten model holds other tensors; what they do shows in the head
        if array.dtype.kind == "f":
            worst = worst.worst(Difference.of(other, array))
        elif not np.array_equal(other, array):
            found.faults.append(f"prefix: {name} holds other {array.dtype} values")
        names.append(name)
    found.stages["prefix"].differences.append(worst)
    found.stages["prefix"].compared = f"{len(names)} of {len(wanted.prefix)} tensors, the others by the head"
    pairs = list(zip(got.head, wanted.head, strict=True)) if len(got.head) == len(wanted.head) else []
    steps = [Difference.of(a, b) for a, b in pairs] or [Difference(*[float("inf")] * 3)]
    found.stages["head"].differences.append(reduce(Difference.worst, steps))
    found.stages["head"].compared = f"the output of each of {len(wanted.head) - 1} steps, and the last x"
    for name, rows in wanted.rows.items():
        if name in got.rows:
            found.indices[name] = found.indices.get(name, True) and _same_rows(got.rows[name], rows)


def _same_rows(got: np.ndarray, wanted: np.ndarray) -> bool:
    """Equal, but for the padding of an engine with buckets, before or after."""
    count = len(wanted)
    return len(got) >= count and any(np.array_equal(part, wanted) for part in (got[:count], got[-count:]))


def spread_of(policy: Policy) -> np.ndarray:
    """[D]: the scale of each action in the statistics, so that metres and degrees count alike."""
    normalizer = policy.processor.action_normalizer
    width = normalizer.width
    low, high = (normalizer.unnormalize(np.full((1, width), v, np.float32))[0] for v in (-1.0, 1.0))
    spread = np.abs(np.asarray(high, np.float64) - np.asarray(low, np.float64))
    if spread.shape != (policy.spec.action.dim,):
        return np.ones(policy.spec.action.dim)
    return np.where(spread > 0, spread, 1.0)


def report(policy: Policy, parity: Parity, source: str) -> Mapping[str, Any]:
    """Return everything about a comparison that can be put into JSON."""
    return {"source": source, **policy.describe(), **parity.to_dict()}
