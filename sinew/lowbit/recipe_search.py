"""Search the recipe with the least error within a budget of bytes, of time, or both (``sinew quantize --search``)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sinew.core import scratch

if TYPE_CHECKING:
    from sinew.bundle import Bundle
    from sinew.lowbit.recipes import Measure, Point


def search(
    opened: Bundle,
    budget: str,
    target_ms: float | None,
    out: Path,
    measure: Measure,
    tell: Callable[[str], None],
) -> tuple[dict[str, str], dict[str, Any]]:
    """Search the quantisation recipe with the least error.

    The search measures each component alone in each precision, and the recipes of the Pareto front. The error of any
    other recipe is predicted as if errors were independent, and its time is the sum of the stages' times.

    Args:
        opened: The bundle.
        budget: Largest size of all weights, such as 1.4GiB, or "".
        target_ms: Longest time of a chunk in ms, or None.
        out: The new bundle. Trials are written in the same folder.
        measure: Measures a recipe.
        tell: Called with a line of text for each measurement.

    Returns:
        The recipe, and the record of the search.
    """
    from sinew.bundle.schema import COMPONENTS
    from sinew.lowbit.recipes import CANDIDATES, all_points, best, pareto, parse_bytes, stored_bytes

    limit = parse_bytes(budget) if budget else None
    whole = stored_bytes(opened, {})
    alone: dict[str, dict[str, float]] = {component: {} for component in COMPONENTS}
    times: dict[tuple[str, str], float] = {}
    # Skip a precision if it would round no weight of the component, or save no bytes.
    kinds = {
        component: [k for k in CANDIDATES[1:] if stored_bytes(opened, {component: k}) < whole]
        for component in COMPONENTS
    }
    # Raise the error about a budget that is too small now, before the first measurement.
    best(all_points(opened, {c: dict.fromkeys(kinds[c], 0.0) for c in kinds}, defaultdict(float)), limit)
    with scratch.beside(out) as folder:
        trial = folder / "trial.gguf"
        for component in COMPONENTS:
            for kind in kinds[component]:
                alone[component][kind], stages = measure(opened, {component: kind}, trial)
                # Only one component is rounded. The other two compute with the stored weights, so their times are also
                # valid.
                for each, taken in stages.items():
                    key = each, kind if each == component else CANDIDATES[0]
                    times[key] = min(taken, times.get(key, taken))
                tell(
                    f"alone    {component} {kind}: error {alone[component][kind]:.2e}, {times[component, kind]:.1f} ms"
                )
        # If no other component was rounded, the time of this component with its stored weights was not measured yet.
        for component in COMPONENTS:
            durations = [taken for (each, _), taken in times.items() if each == component]
            times.setdefault((component, CANDIDATES[0]), max(durations, default=0.0))
        points = all_points(opened, alone, times)
        # Add the chosen point to the front, because pareto() leaves out points of nearly the same size.
        choice = best(points, limit, target_ms)
        shown = pareto(points)
        front = sorted([*shown, *([] if choice in shown else [choice])], key=lambda point: -point.nbytes)
        measured = [(point, _measured(opened, point, measure, trial)) for point in front]
    for point, (error, took) in measured:
        mark = " <- chosen" if point == choice else ""
        tell(
            f"point    {_text(point):42} {point.nbytes / 1e6:9.1f} MB  error {error:.2e}, predicted"
            f" {point.predicted:.2e}; {took:.1f} ms, predicted {point.milliseconds:.1f}{mark}"
        )
    limits = [f"{limit / 1e6:.1f} MB"] if limit is not None else []
    limits += [f"{target_ms:g} ms on this machine, with its current load"] if target_ms is not None else []
    tell(f"within   {', '.join(limits)}; measure the closed-loop success with `sinew eval {out} --gate GATE`")
    record = {
        "budget": limit,
        "target_ms": target_ms,
        "alone": alone,
        "stages_ms": {f"{component} {kind}": taken for (component, kind), taken in times.items()},
        "pareto": [
            {
                "recipe": dict(p.recipe),
                "bytes": p.nbytes,
                "predicted": p.predicted,
                "error": error,
                "predicted_ms": p.milliseconds,
                "ms": took,
            }
            for p, (error, took) in measured
        ],
    }
    return dict(choice.recipe), record


def _measured(opened: Bundle, point: Point, measure: Measure, scratch: Path) -> tuple[float, float]:
    """Measure the error and the milliseconds of one recipe.

    For an unquantised bundle, the time is the sum of its stages' times.
    """
    if set(point.recipe.values()) == {"fp32"}:
        return 0.0, point.milliseconds
    error, stages = measure(opened, dict(point.recipe), scratch)
    return float(np.float32(error)), sum(stages.values())


def _text(point: Point) -> str:
    return ",".join(f"{component}={kind}" for component, kind in point.recipe.items())
