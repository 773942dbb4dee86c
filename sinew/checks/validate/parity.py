"""Compare an engine with the reference engine (eager, in float32) on the same observations and noise. The output of
each stage (part of the model) is compared.
"""

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

# Bounds that float32 engines must meet (section 7 of the survey of deployment on edge GPUs). COSINE is for 1 - cosine
# of each stage, and LARGEST is for the largest difference of the chunk, divided by the spread of the actions.
COSINE, LARGEST = 1e-7, 1e-4

# Key: lowest precision in use. Value: largest allowed relative L2 error of each stage. The bounds are the errors of the
# golden tests (docs/plan.md, docs/engines.md) with room for frames that amplify errors. A wrong weight causes a far
# larger error. Indices must be equal, so they have no bound.
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
    """The difference between an array and the reference's array. All numbers are infinite if the shapes differ or a
    number is not finite.

    Attributes:
        relative: Relative L2 error.
        cosine: 1 - cosine of the angle between both arrays.
        largest: Largest absolute difference.
    """

    relative: float = 0.0
    cosine: float = 0.0
    largest: float = 0.0

    @classmethod
    def of(cls, got: np.ndarray, reference: np.ndarray) -> Difference:
        if got.shape != reference.shape or not np.isfinite(got).all():
            return cls(*[float("inf")] * 3)
        a, b = got.astype(np.float64).ravel(), reference.astype(np.float64).ravel()
        lengths = float(np.linalg.norm(a)), float(np.linalg.norm(b))
        # Compute 1 - cosine from the distance of the unit vectors. 1 - a * b would lose all digits for nearly equal
        # arrays.
        if all(lengths):
            cosine = float(np.linalg.norm(a / lengths[0] - b / lengths[1])) ** 2 / 2
        else:
            cosine = float(lengths[0] != lengths[1])
        largest = float(np.abs(a - b).max(initial=0.0))
        return cls(float(np.linalg.norm(a - b)) / (lengths[1] or 1.0), cosine, largest)

    def worst(self, other: Difference) -> Difference:
        """Combine this difference with another one: each attribute of the result is the larger of the two values."""
        return Difference(*map(max, astuple(self), astuple(other)))


@dataclass
class StageParity:
    """The comparison of one stage (part of the model) over all observations.

    Attributes:
        name: Name of the stage.
        bound: Largest allowed relative L2 error.
        strict: Also require float32's bounds: ``COSINE``, and ``LARGEST`` for the chunk.
        differences: One difference for each observation.
        compared: Description of the arrays that were compared.
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
        """Return the largest relative L2 error of all observations."""
        return self.worst.relative

    @property
    def as_float32(self) -> bool:
        """Return True if the stage meets the bounds for float32. A policy of lower precision has larger bounds."""
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
    """The result of comparing an engine with the reference engine.

    Attributes:
        stages: Name -> comparison of the stage (part of the model).
        precision: The lowest precision in use. Its bounds apply.
        observations: Number of observations.
        indices: Name of an index table -> True if its row numbers were equal.
        faults: Sentences about errors that no bound covers.
    """

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
    """Compare the results of a policy, stage by stage, with those of a reference policy.

    Args:
        policy: The policy.
        reference: The same policy in eager float32.
        observations: The observations to compare.
    """
    bounds, precision = bounds_of(policy), lowest_precision(policy)
    strict = precision == "fp32"
    parity = Parity({name: StageParity(name, bounds[name], strict) for name in STAGES}, precision)
    steps = reference.spec.solver_steps
    for observation in observations:
        parity.observations += 1
        noise, _ = reference.processor.noise(observation)
        traces = []
        for each in (reference, policy):
            inputs = each.processor.inputs(observation, pixels=not each.facts.takes_frames)
            traces.append(each.engine.trace(inputs.batched(), noise[None], steps))
        _stages(parity, *traces)
        expected, got = (each.infer(observation).actions for each in (reference, policy))
        spread = spread_of(reference)
        parity.stages["actions"].differences.append(Difference.of(got / spread, expected / spread))
        if not np.isfinite(got).all():
            parity.faults.append("actions that are not finite")
    parity.stages["actions"].compared = "the chunk in robot units, over the spread of the statistics"
    return parity


def bounds_of(policy: Policy) -> dict[str, float]:
    """Return the largest allowed error of each stage (part of the model). It depends on the lowest precision in the
    policy.
    """
    bounds = dict(BOUNDS[lowest_precision(policy)])
    measured = policy.manifest.quantization
    # `sinew quantize` measured a larger error on its own observations, so allow twice that error.
    if measured is not None and policy.facts.recipe:
        bounds["actions"] = max(bounds["actions"], 2 * measured.error_max)
    return bounds


def lowest_precision(policy: Policy) -> str:
    """Return the lowest precision in a policy, one of ``RANK``. Formats with fewer bits count as int8."""
    words = {word for kinds in policy.facts.precision.values() for word in kinds.split("+")}
    ranked = (LIKE.get(word, word) for word in words)
    return max((word if word in RANK else "int8" for word in ranked), key=RANK.index)


def distance(got: np.ndarray, reference: np.ndarray) -> float:
    """Return the relative L2 error of ``got`` against ``reference``; infinite if the shapes differ or a number is not
    finite.
    """
    return Difference.of(got, reference).relative


def _stages(parity: Parity, reference: Trace, got: Trace) -> None:
    parity.stages["vision"].differences.append(Difference.of(got.vision, reference.vision))
    parity.stages["vision"].compared = f"image tokens {list(reference.vision.shape)}"
    worst, names = Difference(), []
    for name, array in reference.prefix.items():
        other = got.prefix.get(name)
        if other is None or other.shape != array.shape:
            continue  # a rewritten model has other tensors in the prefix; the head's output shows any error
        if array.dtype.kind == "f":
            worst = worst.worst(Difference.of(other, array))
        elif not np.array_equal(other, array):
            parity.faults.append(f"prefix: {name} has other {array.dtype} values")
        names.append(name)
    parity.stages["prefix"].differences.append(worst)
    parity.stages[
        "prefix"
    ].compared = (
        f"{len(names)} of {len(reference.prefix)} tensors; an error in the others shows in the head's output"
    )
    pairs = list(zip(got.head, reference.head, strict=True)) if len(got.head) == len(reference.head) else []
    steps = [Difference.of(a, b) for a, b in pairs] or [Difference(*[float("inf")] * 3)]
    parity.stages["head"].differences.append(reduce(Difference.worst, steps))
    parity.stages["head"].compared = f"the output of each of {len(reference.head) - 1} steps, and the last x"
    for name, rows in reference.rows.items():
        if name in got.rows:
            parity.indices[name] = parity.indices.get(name, True) and _same_rows(got.rows[name], rows)


def _same_rows(got: np.ndarray, reference: np.ndarray) -> bool:
    """Return True if two lists of row numbers are equal. Padding at either end does not count, because an engine with
    fixed input sizes (buckets) adds it.
    """
    count = len(reference)
    return len(got) >= count and any(np.array_equal(part, reference) for part in (got[:count], got[-count:]))


def spread_of(policy: Policy) -> np.ndarray:
    """Return the scale of each action in the statistics, [D]. Dividing by it makes metres and degrees comparable."""
    normalizer = policy.processor.action_normalizer
    width = normalizer.width
    low, high = (normalizer.unnormalize(np.full((1, width), v, np.float32))[0] for v in (-1.0, 1.0))
    spread = np.abs(np.asarray(high, np.float64) - np.asarray(low, np.float64))
    if spread.shape != (policy.spec.action.dim,):
        return np.ones(policy.spec.action.dim)
    return np.where(spread > 0, spread, 1.0)


def report(policy: Policy, parity: Parity, source: str) -> Mapping[str, Any]:
    """Return a comparison and facts about the compared policy as a JSON-ready dict.

    Args:
        policy: The policy that was compared with the reference.
        parity: The comparison.
        source: Origin of the observations.
    """
    return {"source": source, **policy.describe(), **parity.to_dict()}
