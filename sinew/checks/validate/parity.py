"""One engine against eager float32, stage by stage, on the same observations and noise."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from sinew.core import Observation, upcast_text
from sinew.engine.watch import Trace
from sinew.policy import Policy

STAGES = ("vision", "prefix", "head", "actions")

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


@dataclass
class StageParity:
    """error: relative L2, the worst of all observations, and the median. at: the observation of the worst."""

    name: str
    bound: float
    errors: list[float] = field(default_factory=list)
    compared: str = ""

    @property
    def error(self) -> float:
        return max(self.errors, default=0.0)

    @property
    def passed(self) -> bool:
        return bool(self.errors) and all(np.isfinite(e) and e <= self.bound for e in self.errors)

    def to_dict(self) -> dict[str, Any]:
        kept = {name: value for name, value in asdict(self).items() if name != "errors"}
        median = float(np.median(self.errors)) if self.errors else None
        return kept | {"error": self.error, "median": median, "passed": self.passed}


@dataclass
class Parity:
    """What a comparison found. ``indices``: the tables whose row numbers were compared, with the unequal ones named."""

    stages: dict[str, StageParity]
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
            "stages": [stage.to_dict() for stage in self.stages.values()],
            "indices": self.indices,
            "faults": self.faults,
        }


def compare(policy: Policy, reference: Policy, observations: Iterable[Observation]) -> Parity:
    """Return how far ``policy`` is from ``reference``, which computes in eager float32."""
    bounds = bounds_of(policy)
    found = Parity({name: StageParity(name, bounds[name]) for name in STAGES})
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
        found.stages["actions"].errors.append(distance(got / spread, wanted / spread))
        if not np.isfinite(got).all():
            found.faults.append("actions that are not finite")
    found.stages["actions"].compared = "the chunk in the robot's units, over the spread of the statistics"
    return found


def bounds_of(policy: Policy) -> dict[str, float]:
    """Return the bound of each stage: that of the lowest precision in force anywhere before it."""
    words = {word for kinds in policy.facts.precision.values() for word in kinds.split("+")}
    lowest = max((LIKE.get(word, word) for word in words), key=lambda w: RANK.index(w) if w in RANK else 3)
    bounds = dict(BOUNDS.get(lowest, BOUNDS["int8"]))
    measured = policy.manifest.quantization
    if measured is not None and policy.facts.recipe:  # what `quantize` saw on its own observations, with room
        bounds["actions"] = max(bounds["actions"], 2 * measured.error_max)
    return bounds


def distance(got: np.ndarray, wanted: np.ndarray) -> float:
    """Return the relative L2 distance; infinite for other shapes, or numbers that are not finite."""
    if got.shape != wanted.shape or not np.isfinite(got).all():
        return float("inf")
    size = float(np.linalg.norm(wanted))
    return float(np.linalg.norm(got - wanted)) / (size or 1.0)


def _stages(found: Parity, wanted: Trace, got: Trace) -> None:
    found.stages["vision"].errors.append(distance(got.vision, wanted.vision))
    found.stages["vision"].compared = f"image tokens {list(wanted.vision.shape)}"
    worst, names = 0.0, []
    for name, array in wanted.prefix.items():
        other = got.prefix.get(name)
        if other is None or other.shape != array.shape:
            continue  # a rewritten model holds other tensors; what they do shows in the head
        if array.dtype.kind == "f":
            worst = max(worst, distance(other, array))
        elif not np.array_equal(other, array):
            found.faults.append(f"prefix: {name} holds other {array.dtype} values")
        names.append(name)
    found.stages["prefix"].errors.append(worst)
    found.stages["prefix"].compared = f"{len(names)} of {len(wanted.prefix)} tensors, the others by the head"
    pairs = list(zip(got.head, wanted.head, strict=True)) if len(got.head) == len(wanted.head) else []
    found.stages["head"].errors.append(max((distance(a, b) for a, b in pairs), default=float("inf")))
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
