"""What the outputs of a head mean, as data: part of what a policy says of itself.

A step has the form ``x <- keep * x + gain * output`` with numbers that depend on the step alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar

Array = TypeVar("Array")  # a tensor, or an array of an engine without torch


class Step(NamedTuple):
    """One evaluation: at ``time``, then ``keep * x + gain * output``. Python floats, so double precision."""

    time: float
    keep: float
    gain: float

    def advance(self, x: Array, output: Array) -> Array:
        moved: Any = output if self.gain == 1.0 else self.gain * output  # type: ignore[operator]
        if self.keep == 0.0:
            return moved
        kept: Any = x if self.keep == 1.0 else self.keep * x  # type: ignore[operator]
        return kept + moved


@dataclass(frozen=True)
class Solver:
    """How noise becomes actions. Part of a policy's specification, so it travels in bundles.

    kind:   "euler" integrates a velocity from ``start`` to ``end`` in equal steps; "single" takes the output of one
            evaluation as the actions; "table" has its steps written out.
    start, end: the time of noise and of actions: 1 to 0 in openpi and LeRobot, 0 to 1 in GR00T and Evo-1.
    noise:  what x is at the start: "normal" (standard), "uniform" in [-1, 1], or "zeros".
    table:  of "table", rows (time, keep, gain). DDIM without clipping from noise level a_k to a_j (cumulative alphas)
            of a head that predicts the noise: keep = sqrt(a_j / a_k), gain = sqrt(1 - a_j) - keep * sqrt(1 - a_k).
    """

    kind: Literal["euler", "single", "table"] = "euler"
    start: float = 1.0
    end: float = 0.0
    noise: Literal["normal", "uniform", "zeros"] = "normal"
    table: tuple[tuple[float, float, float], ...] = ()

    def __post_init__(self) -> None:
        if self.kind == "euler" and self.start == self.end:
            raise ValueError(f"solver: expected start and end to differ, got {self.start} twice")
        if (self.kind == "table") != bool(self.table):
            raise ValueError(
                f"solver: expected rows of a table with kind table alone, got kind {self.kind!r}"
            )

    @property
    def fixed_steps(self) -> int | None:
        """The only possible number of steps, None where a request may choose."""
        return {"single": 1, "table": len(self.table), "euler": None}[self.kind]

    def steps(self, count: int) -> list[Step]:
        """Return the evaluations of a solution in ``count`` steps. Raises ValueError for an impossible number."""
        if count < 1 or self.fixed_steps not in (None, count):
            raise ValueError(f"solver_steps: expected {self.fixed_steps or '1 or more'}, got {count}")
        if self.kind == "single":
            return [Step(self.start, 0.0, 1.0)]
        if self.kind == "table":
            return [Step(*row) for row in self.table]
        span = self.end - self.start
        # k / n and not k * (1 / n): time buckets of GR00T and Evo-1 are cut from this very quotient.
        return [Step(self.start + k * span / count, 1.0, span / count) for k in range(count)]

    def times(self, count: int) -> list[float]:
        return [step.time for step in self.steps(count)]

    def denoised(self, x: Any, output: Any, time: float) -> Any:
        """Return the actions that one step of Euler from ``time`` to the end would give: the estimate that guidance
        compares with what it wants. Raises ValueError for a table, whose rows do not tell it."""
        if self.kind == "table":
            raise ValueError("solver: a table has no estimate of the denoised actions")
        return output if self.kind == "single" else x + (self.end - time) * output


FLOW = Solver()  # openpi's and LeRobot's convention: t = 1 is noise, t = 0 are actions
SINGLE = Solver("single", noise="zeros")
