"""Choose a precision for each component.

The size of a recipe is the sum of the components' sizes. The square of its error is the sum of the squares of the
components' errors.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from sinew.bundle import Bundle
from sinew.bundle.schema import COMPONENTS
from sinew.core import SinewError
from sinew.engine.cuda.options import check_fp8
from sinew.lowbit.sources import lowbit_sources, plan_formats

# A search tries these precisions. The precision fp32 leaves the stored weights unchanged.
CANDIDATES = ("fp32", "int8", "q8_0", "q4_0")
UNITS = {"": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}

PRECISIONS = ("int8", "int8-rows", "q8_0", "q4_0", "fp8", "fp32")

Recipe = Mapping[str, str]
# The measured error of the chunk, and for each component the shortest time of its stage in milliseconds.
Trial = tuple[float, dict[str, float]]
Measure = Callable[[Bundle, dict[str, str], Path], Trial]


@dataclass(frozen=True)
class Point:
    """One quantisation recipe with its predicted size, error and time.

    Attributes:
        recipe: The precision of each component, by the component's name.
        nbytes: Bytes of all tensors.
        predicted: The error that is predicted from the errors of single components.
        milliseconds: The predicted time of a chunk, which is the sum of the stages' times.
    """

    recipe: Recipe
    nbytes: int
    predicted: float
    milliseconds: float


def parse_recipe(text: str) -> dict[str, str]:
    """Return the precision of each component from text such as ``"vision=int8,language=int8"``.

    Other components are fp32.

    Raises:
        SinewError: The text is invalid.
    """
    named: dict[str, str] = {}
    for part in text.split(","):
        component, _, precision = part.strip().partition("=")
        if component not in COMPONENTS:
            raise SinewError(f"recipe: expected a component of {', '.join(COMPONENTS)}, got {component!r}")
        if precision not in PRECISIONS:
            raise SinewError(f"recipe: {component}: expected {', '.join(PRECISIONS)}, got {precision!r}")
        if precision == "fp8":
            check_fp8([component])
        if component in named:
            raise SinewError(
                f"recipe: {component}: expected one precision, got {named[component]} and {precision}"
            )
        named[component] = precision
    kinds = set(named.values()) - {"fp32"}
    if "fp8" in kinds and len(kinds) > 1:
        others = ", ".join(sorted(kinds - {"fp8"}))
        raise SinewError(
            f"recipe: expected precisions of one engine, got fp8 (cuda) and {others} (cpu, onnx)"
        )
    return dict.fromkeys(COMPONENTS, "fp32") | named


def parse_bytes(text: str) -> int:
    """Return the number of bytes in text such as "1.4GiB", "900 MB" or "123456".

    Raises:
        SinewError: The text is not a size.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].lower() not in UNITS:
        raise SinewError(f"budget: expected a size such as 1.4GiB or 900MB, got {text!r}")
    return int(float(match[1]) * UNITS[match[2].lower()])


def stored_bytes(bundle: Bundle, recipe: Recipe) -> int:
    """Return the bytes of the bundle's tensors with ``recipe``. The function reads and rounds no weights."""
    whole = dict.fromkeys(COMPONENTS, "fp32") | dict(recipe)
    return sum(source.nbytes for source in lowbit_sources(bundle, plan_formats(bundle, whole)))


def all_points(
    bundle: Bundle, alone: Mapping[str, Mapping[str, float]], times: Mapping[tuple[str, str], float]
) -> list[Point]:
    """Return every recipe with its size, predicted error and time.

    Args:
        bundle: The bundle.
        alone: For each component and precision, the error if no other component is rounded.
        times: For each pair (component, precision), the milliseconds of the component's stage.
    """
    base = stored_bytes(bundle, {})
    saved = {
        (component, kind): base - stored_bytes(bundle, {component: kind})
        for component in alone
        for kind in (*alone[component], "fp32")
    }
    points = []
    for kinds in product(*((*alone[component], "fp32") for component in alone)):
        recipe = dict(zip(alone, kinds, strict=True))
        error = math.sqrt(sum(alone[c].get(kind, 0.0) ** 2 for c, kind in recipe.items()))
        taken = sum(times[each] for each in recipe.items())
        points.append(Point(recipe, base - sum(saved[each] for each in recipe.items()), error, taken))
    return points


def pareto(points: list[Point], apart: float = 0.02) -> list[Point]:
    """Return the recipes (points) that no other recipe beats in both size and predicted error, the largest first.

    Args:
        points: The points.
        apart: Of points whose sizes differ by less than this share, only the point with the least error is kept.
    """
    front: list[Point] = []
    for point in sorted(points, key=lambda point: (point.nbytes, point.predicted)):
        if front and point.predicted >= front[-1].predicted:
            continue
        if len(front) > 1 and point.nbytes < front[-1].nbytes * (1 + apart):
            front.pop()
        front.append(point)
    return front[::-1]


def best(points: list[Point], budget: int | None = None, target_ms: float | None = None) -> Point:
    """Return the recipe (point) with the smallest predicted error within the limits of size and time.

    Args:
        points: The points.
        budget: Largest size in bytes, or None.
        target_ms: Longest time in milliseconds, or None.

    Raises:
        SinewError: No point is within the limits.
    """
    small = [point for point in points if budget is None or point.nbytes <= budget]
    if not small:
        least = min(point.nbytes for point in points)
        raise SinewError(f"budget: the smallest recipe needs {least} bytes, got {budget}; raise --budget")
    within = [point for point in small if target_ms is None or point.milliseconds <= target_ms]
    if not within:
        fastest = min(point.milliseconds for point in small)
        raise SinewError(
            f"target: the fastest recipe takes {fastest:.1f} ms on this machine, got {target_ms:g}; raise --target-ms"
        )
    return min(within, key=lambda point: (point.predicted, point.nbytes))
