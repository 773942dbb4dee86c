"""Statistics that a file may have and that no training data set gives: one sentence for each kind.

They make every action wrong without an error. The same sentences are printed when a checkpoint is converted, when its
bundle is loaded, and by `sinew doctor`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np

from sinew.bundle.schema import PAIRS, Normalization, Processing, normalizations
from sinew.core import PolicySpec

MAX_UNITS = 1e9  # largest plausible state or action; encoder counts and micrometres stay below
# A value whose range magnifies it a thousandfold turns a sensor's noise of 0.001 (rad, m) into one model unit, half of
# the width of all training data.
MAGNIFIED = 1000.0
# A range of a thousandth of where it lies, or of what the other values span, is the noise of a joint that stood still:
# encoders of robots have 4,096 steps a turn, of which such a range holds four.
SMALL = 1e-3
FEWEST = 4  # smallest number of values for which one range is compared with the median range of the others
SAME = 0.1  # part of a range by which two ranges may differ and still be of the same numbers
OUTSIDE = 0.1  # part of a range that zero may lie outside of it, as quantiles cut extremes off
ROUNDING = 1e-3  # part of a range by which float32 and rounded files may break an inequality


def notes(spec: PolicySpec, processing: Processing) -> list[str]:
    """Return a sentence for each normalisation whose statistics cannot be meant, or do not vary."""
    found: list[str] = []
    for where, recipe, what in normalizations(processing):
        names = getattr(spec, what).names
        found += _upside_down(where, recipe)
        found += _constant(where, recipe, what)
        found += _narrow(where, recipe, what, names if len(names) == _size(recipe) else ())
        found += _enormous(where, recipe, what)
    actions = [recipe for _where, recipe, what in normalizations(processing) if what == "action"]
    sizes = [_size(recipe) * max(recipe.rows, 1) for recipe in actions]
    if sum(sizes) and all(len(flat(recipe)) == size for recipe, size in zip(actions, sizes, strict=True)):
        found.append("processing.action: no value varied in training, so every chunk is the same")
    return [*found, *_of_another_motion(spec, processing)]


def impossible(stats: Mapping[str, Any]) -> list[str]:
    """Return the contradictions in a feature's statistics, including those that this policy does not read."""
    values = {name: np.ravel(np.asarray(each, np.float64)) for name, each in stats.items()}
    low, high = values.get("min"), values.get("max")
    if low is None or high is None or low.shape != high.shape:
        return []
    found = [f"max is below min for value {_listed(low > high)}"] if (low > high).any() else []
    room = ROUNDING * np.maximum(high - low, np.maximum(abs(low), abs(high)))
    for name in ("mean", "q01", "q10", "q50", "q90", "q99"):
        each = values.get(name)
        if each is not None and each.shape == low.shape:
            odd = (each < low - room) | (each > high + room)
            found += [f"{name} is outside of min to max for value {_listed(odd)}"] if odd.any() else []
    std = values.get("std")
    if std is not None and std.shape == low.shape:  # no deviation exceeds half of a range (Popoviciu)
        odd = std > (high - low) / 2 + room
        found += [f"std is above half of max - min for value {_listed(odd)}"] if odd.any() else []
    return found


def flat(recipe: Normalization) -> list[int]:
    """Return the values that did not vary in training."""
    if recipe.mode == "mean_std":
        return [i for i, value in enumerate(recipe.stats.get("std", ())) if value == 0]
    low, high = _ends(recipe)
    return [i for i, (a, b) in enumerate(zip(low, high, strict=False)) if a == b]


def _listed(odd: np.ndarray) -> str:
    return ", ".join(map(str, np.flatnonzero(odd)[:16]))


def _size(recipe: Normalization) -> int:
    return max(map(len, recipe.stats.values()), default=0) // max(recipe.rows, 1)


def _ends(recipe: Normalization) -> tuple[Sequence[float], Sequence[float]]:
    """Return the ends of the ranges that become -1 and 1, or empty sequences."""
    if recipe.mode == "mean_std":
        pairs = list(zip(recipe.stats.get("mean", ()), recipe.stats.get("std", ()), strict=False))
        return [mean - std for mean, std in pairs], [mean + std for mean, std in pairs]
    low, high = (recipe.stats.get(name, ()) for name in PAIRS.get(recipe.mode, ("", "")))
    return low, high


def _spans(recipe: Normalization) -> list[float]:
    """Return the width of each range; of a deviation twice that, which is exact where the sum of mean and deviation is
    rounded."""
    if recipe.mode == "mean_std":
        return [2 * std for std in recipe.stats.get("std", ())]
    return [b - a for a, b in zip(*_ends(recipe), strict=False)]


def _upside_down(where: str, recipe: Normalization) -> Iterator[str]:
    if recipe.mode != "mean_std" and (turned := sum(span < 0 for span in _spans(recipe))):
        yield f"{where}: {turned} ranges are upside down, which turns these values around"


def _constant(where: str, recipe: Normalization, what: str) -> Iterator[str]:
    if still := flat(recipe):
        effect = "is magnified wherever it differs from training"
        if what == "action" or recipe.zero_where_flat:  # which reads zero there
            effect = "is always the same"
        yield f"{where}: value {', '.join(map(str, still))} did not vary in training and {effect}"


def _narrow(where: str, recipe: Normalization, what: str, names: Sequence[str]) -> Iterator[str]:
    """Statistics of each step are left out: the first steps of relative actions hardly move."""
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
            yield f"{hardly}: the policy moves it by no more than that. If it should move, give other statistics"
        else:
            yield (
                f"{hardly}, which magnifies it {2 / span:,.0f} times: a state that differs by a tenth of a unit is"
                f" {0.2 / span:,.0f} model units away. If the robot moves it, give statistics of data in which it moves"
            )


def _enormous(where: str, recipe: Normalization, what: str) -> Iterator[str]:
    largest = max((abs(value) for values in recipe.stats.values() for value in values), default=0.0)
    if recipe.mode != "identity" and largest > MAX_UNITS:
        effect = "limits of actions follow from them" if what == "action" else "every state is alike to them"
        yield f"{where}: statistics up to {largest:g}, expected at most {MAX_UNITS:g}; {effect}"


def _of_another_motion(spec: PolicySpec, processing: Processing) -> Iterator[str]:
    """Yield an error if the statistics of the actions do not fit their motion.

    Relative actions are differences to the state, so their range contains zero and differs from the state's. At least
    half of the values must contradict this: a single value may belong to a task that moves in one direction.
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
                else f"{off} of {len(compared)} ranges do not hold zero"
            )
            yield (
                f"processing.action: actions are relative to the state, and {why}, so these look like statistics of"
                " absolute actions: compute them over relative actions, as the run's training did, and give them with"
                " --stats FILE"
            )
    elif spec.motion is not None and spec.motion.kind == "absolute" and not pairs:
        both = [(action[d], state[d]) for d in action if action[d] and state.get(d)]
        apart = sum(a[1] < s[0] or s[1] < a[0] for a, s in both)
        if both and 2 * apart > len(both):
            yield (
                f"processing.action: actions are absolute, and {apart} of {len(both)} ranges do not meet that of the"
                " state, so these look like statistics of relative actions"
            )


def _vector(processing: Processing, what: str) -> dict[int, tuple[float, float]]:
    """Return the range of each value of "state" or "action" with known ends.

    A standard deviation counts twice, because nearly all values lie within two of them.
    """
    parts = getattr(processing, f"{what}_parts") or ()
    recipes = [(part.normalization, part.dim) for part in parts] or [(getattr(processing, what), 0)]
    found, start = {}, 0
    for recipe, dim in recipes:
        low, high = _ends(recipe)
        count = len(low) // max(recipe.rows, 1)
        for i in range(count):
            a, b = min(low[i::count]), max(high[i::count])
            room = (b - a) / 2 if recipe.mode == "mean_std" else 0.0
            if b > a:
                found[start + i] = (a - room, b + room)
        start += dim or count
    return found


def _without_zero(low: float, high: float) -> bool:
    room = OUTSIDE * (high - low)
    return low > room or high < -room


def _alike(one: tuple[float, float], other: tuple[float, float]) -> bool:
    room = SAME * max(one[1] - one[0], other[1] - other[0])
    return abs(one[0] - other[0]) <= room and abs(one[1] - other[1]) <= room
