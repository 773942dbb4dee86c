"""``sinew quantize --search``: the recipe of the least error within a budget of bytes."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sinew.cli import terminal

if TYPE_CHECKING:
    from sinew.bundle import Bundle
    from sinew.convert.recipes import Point

Measure = Callable[["Bundle", dict[str, str], Path], float]  # error of the chunk under a recipe


def search(opened: Bundle, budget: str, out: Path, measure: Measure) -> tuple[dict[str, str], dict[str, Any]]:
    """Return the recipe, and what was found on the way. Measured: each component alone in each precision, and the
    recipes of the Pareto front; between them, errors are predicted as independent."""
    from sinew.bundle.schema import COMPONENTS
    from sinew.convert.recipes import CANDIDATES, all_points, best, pareto, parse_bytes, stored_bytes

    limit = parse_bytes(budget)
    whole = stored_bytes(opened, {})
    console = terminal.console(markup=False)
    alone: dict[str, dict[str, float]] = {component: {} for component in COMPONENTS}
    with tempfile.TemporaryDirectory(prefix=f"{out.stem}.", dir=out.parent) as folder:
        scratch = Path(folder) / "trial.gguf"
        for component in COMPONENTS:
            for kind in CANDIDATES[1:]:
                if stored_bytes(opened, {component: kind}) >= whole:
                    continue  # nothing of this component is rounded, or rounding saves nothing
                alone[component][kind] = measure(opened, {component: kind}, scratch)
                console.print(f"alone    {component} {kind}: error {alone[component][kind]:.2e}")
        points = all_points(opened, alone)
        chosen = best(points, limit)  # the front is thinned; this may lie between two of its points
        shown = pareto(points)
        front = sorted([*shown, *([] if chosen in shown else [chosen])], key=lambda point: -point.nbytes)
        measured = [(point, _measured(opened, point, measure, scratch)) for point in front]
    for point, error in measured:
        mark = " <- chosen" if point == chosen else ""
        console.print(
            f"point    {_text(point):42} {point.nbytes / 1e6:9.1f} MB  error {error:.2e}, predicted"
            f" {point.predicted:.2e}{mark}",
            soft_wrap=True,
        )
    console.print(
        f"budget   {budget}: {limit / 1e6:.1f} MB; closed-loop success decides: `sinew eval {out} --gate GATE`"
    )
    record = {
        "budget": limit,
        "alone": alone,
        "pareto": [
            {"recipe": dict(p.recipe), "bytes": p.nbytes, "predicted": p.predicted, "error": error}
            for p, error in measured
        ],
    }
    return dict(chosen.recipe), record


def _measured(opened: Bundle, point: Point, measure: Measure, scratch: Path) -> float:
    if set(point.recipe.values()) == {"fp32"}:
        return 0.0
    return float(np.float32(measure(opened, dict(point.recipe), scratch)))


def _text(point: Point) -> str:
    return ",".join(f"{component}={kind}" for component, kind in point.recipe.items())
