"""Find statistics in a bundle that cannot be right, and describe each problem in a sentence.

Such statistics make every action wrong without an error. The same sentences are printed when a checkpoint is converted,
when its bundle is loaded, and by `sinew doctor`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np

from sinew.bundle.schema import PAIRS, Normalization, Processing, normalizations
from sinew.core import PolicySpec

MAX_UNITS = 1e9  # largest plausible state or action; encoder counts and micrometres are smaller
# If a range magnifies a value a thousand times, a sensor's noise of 0.001 (rad, m) becomes one model unit. One model
# unit is half of the width of all training data.
MAGNIFIED = 1000.0
# A range is suspicious if it is below this share of its distance from zero, or of the width of the other values'
# ranges. It is then the noise of a joint that did not move: encoders of robots have 4,096 steps per turn, so such a
# range has four steps.
SMALL = 1e-3
# If a vector has fewer values than this, the width of a range is not compared with the median width of the other
# ranges.
FEWEST = 4
SAME = 0.1  # two ranges are alike if their ends differ by at most this share of the range
OUTSIDE = 0.1  # zero may be outside of a range by this share of it, because quantiles cut off extremes
ROUNDING = 1e-3  # rounding to float32 or in a text file may break an inequality by this share of a range


def notes(spec: PolicySpec, processing: Processing) -> list[str]:
    """Return a sentence for each problem in the statistics of a policy's state and action."""
    sentences: list[str] = []
    for where, recipe, what in normalizations(processing):
        names = getattr(spec, what).names
        sentences += _upside_down(where, recipe)
        sentences += _constant(where, recipe, what)
        sentences += _narrow(where, recipe, what, names if len(names) == _size(recipe) else ())
        sentences += _enormous(where, recipe, what)
    actions = [recipe for _where, recipe, what in normalizations(processing) if what == "action"]
    sizes = [_size(recipe) * max(recipe.rows, 1) for recipe in actions]
    if sum(sizes) and all(len(flat(recipe)) == size for recipe, size in zip(actions, sizes, strict=True)):
        sentences.append("processing.action: no value varied in training, so every chunk is the same")
    return [*sentences, *_of_another_motion(spec, processing)]


def impossible(stats: Mapping[str, Any]) -> list[str]:
    """Return the contradictions in the statistics of a state or action, such as a mean above the maximum.

    Args:
        stats: Name of a statistic -> values, also statistics that the policy does not read.
    """
    values = {name: np.ravel(np.asarray(each, np.float64)) for name, each in stats.items()}
    low, high = values.get("min"), values.get("max")
    if low is None or high is None or low.shape != high.shape:
        return []
    faults = [f"max is below min for value {_listed(low > high)}"] if (low > high).any() else []
    room = ROUNDING * np.maximum(high - low, np.maximum(abs(low), abs(high)))
    for name in ("mean", "q01", "q10", "q50", "q90", "q99"):
        each = values.get(name)
        if each is not None and each.shape == low.shape:
            odd = (each < low - room) | (each > high + room)
            faults += [f"{name} is outside of min to max for value {_listed(odd)}"] if odd.any() else []
    std = values.get("std")
    # A standard deviation is at most half of the range (Popoviciu's inequality).
    if std is not None and std.shape == low.shape:
        odd = std > (high - low) / 2 + room
        faults += [f"std is above half of max - min for value {_listed(odd)}"] if odd.any() else []
    return faults


def flat(recipe: Normalization) -> list[int]:
    """Return the indices of the values that did not vary in training."""
    if recipe.mode == "mean_std":
        return [i for i, value in enumerate(recipe.stats.get("std", ())) if value == 0]
    low, high = _ends(recipe)
    return [i for i, (a, b) in enumerate(zip(low, high, strict=False)) if a == b]


def _listed(odd: np.ndarray) -> str:
    return ", ".join(map(str, np.flatnonzero(odd)[:16]))


def _size(recipe: Normalization) -> int:
    return max(map(len, recipe.stats.values()), default=0) // max(recipe.rows, 1)


def _ends(recipe: Normalization) -> tuple[Sequence[float], Sequence[float]]:
    """Return the values that the normalisation maps to -1, and the values that it maps to 1; empty sequences
    if the normalisation has no such values.
    """
    if recipe.mode == "mean_std":
        pairs = list(zip(recipe.stats.get("mean", ()), recipe.stats.get("std", ()), strict=False))
        return [mean - std for mean, std in pairs], [mean + std for mean, std in pairs]
    low, high = (recipe.stats.get(name, ()) for name in PAIRS.get(recipe.mode, ("", "")))
    return low, high


def _spans(recipe: Normalization) -> list[float]:
    """Return the width of the range that each value of a vector had in training.

    For mean_std, the width is twice the standard deviation. It is not computed from the ends, because mean + std may
    be rounded.
    """
    if recipe.mode == "mean_std":
        return [2 * std for std in recipe.stats.get("std", ())]
    return [b - a for a, b in zip(*_ends(recipe), strict=False)]


def _upside_down(where: str, recipe: Normalization) -> Iterator[str]:
    if recipe.mode != "mean_std" and (turned := sum(span < 0 for span in _spans(recipe))):
        yield f"{where}: {turned} ranges have low above high, which inverts these values; compute the statistics again"


def _constant(where: str, recipe: Normalization, what: str) -> Iterator[str]:
    if still := flat(recipe):
        effect = "is magnified wherever it differs from training"
        # A constant action, or a state that is read as zero, never changes.
        if what == "action" or recipe.zero_where_flat:
            effect = "is always the same"
        yield f"{where}: value {', '.join(map(str, still))} did not vary in training and {effect}"


def _narrow(where: str, recipe: Normalization, what: str, names: Sequence[str]) -> Iterator[str]:
    """Yield a sentence for each value whose range is suspiciously small.

    Statistics of each step of a chunk are skipped, because the first steps of relative actions hardly move.
    """
    if recipe.rows:
        return
    spans, (low, high) = _spans(recipe), _ends(recipe)
    for i, (span, a, b) in enumerate(zip(spans, low, high, strict=False)):
        if span <= 0 or i in recipe.snap:
            continue
        others = [each for k, each in enumerate(spans) if k != i and each > 0]
        usual = median(others) if len(spans) >= FEWEST and len(others) > 1 else 0.0
        if span > 2 / MAGNIFIED and span > SMALL * max(abs(a), abs(b), usual):
            continue
        name = f"value {i} ({names[i]})" if names else f"value {i}"
        spread = "std" if recipe.mode == "mean_std" else " to ".join(PAIRS[recipe.mode])
        shown = span / 2 if recipe.mode == "mean_std" else span
        hardly = f"{where}: {name} hardly varied in training ({spread} spans {shown:.3g})"
        if what == "action":
            yield f"{hardly}: the policy moves it by no more than that. If it should move, pass other statistics"
        else:
            yield (
                f"{hardly}, which magnifies it {2 / span:,.0f} times: a state that differs by a tenth of a unit is"
                f" {0.2 / span:,.0f} model units away. If the robot moves it, pass statistics of data in which it moves"
            )


def _enormous(where: str, recipe: Normalization, what: str) -> Iterator[str]:
    largest = max((abs(value) for values in recipe.stats.values() for value in values), default=0.0)
    if recipe.mode != "identity" and largest > MAX_UNITS:
        effect = (
            "limits of actions follow from them"
            if what == "action"
            else "all states look the same to the policy"
        )
        yield f"{where}: statistics up to {largest:g}, expected at most {MAX_UNITS:g}; {effect}"


def _of_another_motion(spec: PolicySpec, processing: Processing) -> Iterator[str]:
    """Yield an error if relative actions seem to have the statistics of absolute actions, or the reverse.

    Relative actions are differences from the state, so their range contains zero and differs from the state's range. At
    least half of the values must contradict this, because a task may move a single value in one direction only.
    """
    action, state = _vector(processing, "action"), _vector(processing, "state")
    pairs = {
        d: r
        for step in processing.action_steps
        if step.reads
        for d, r in zip(step.dims, step.reads, strict=False)
    }
    compared = [(action[d], state[r]) for d, r in pairs.items() if action.get(d) and state.get(r)]
    if compared:
        off = sum(_without_zero(*a) for a, _ in compared)
        same = sum(_alike(a, s) for a, s in compared)
        if 2 * max(off, same) >= len(compared):
            why = (
                f"{same} of {len(compared)} ranges are those of the state"
                if same >= off
                else f"{off} of {len(compared)} ranges do not contain zero"
            )
            yield (
                f"processing.action: actions are relative to the state, and {why}, so these look like statistics of"
                " absolute actions: compute statistics of relative actions, as the training did, and pass them with"
                " --stats FILE"
            )
    elif spec.motion is not None and spec.motion.kind == "absolute" and not pairs:
        both = [(action[d], state[d]) for d in action if action[d] and state.get(d)]
        apart = sum(a[1] < s[0] or s[1] < a[0] for a, s in both)
        if both and 2 * apart > len(both):
            yield (
                f"processing.action: actions are absolute, and {apart} of {len(both)} ranges do not overlap the range"
                " of the state, so these look like statistics of relative actions"
            )


def _vector(processing: Processing, what: str) -> dict[int, tuple[float, float]]:
    """Return a dict: index of a value in the vector -> its range. Values without a known range are omitted.

    The range of a mean and a standard deviation is two deviations wide on each side, because nearly all values are in
    it.

    Args:
        processing: The processing of a policy.
        what: "state" or "action".
    """
    parts = getattr(processing, f"{what}_parts") or ()
    recipes = [(part.normalization, part.dim) for part in parts] or [(getattr(processing, what), 0)]
    spans, start = {}, 0
    for recipe, dim in recipes:
        low, high = _ends(recipe)
        count = len(low) // max(recipe.rows, 1)
        for i in range(count):
            a, b = min(low[i::count]), max(high[i::count])
            room = (b - a) / 2 if recipe.mode == "mean_std" else 0.0
            if b > a:
                spans[start + i] = (a - room, b + room)
        start += dim or count
    return spans


def _without_zero(low: float, high: float) -> bool:
    room = OUTSIDE * (high - low)
    return low > room or high < -room


def _alike(one: tuple[float, float], other: tuple[float, float]) -> bool:
    room = SAME * max(one[1] - one[0], other[1] - other[0])
    return abs(one[0] - other[0]) <= room and abs(one[1] - other[1]) <= room
