"""Low-pass filters of actions, with their lag compensated by looking ahead.

A filter that lags by L control steps gets the action that is due L steps later, interpolated between two actions.
Chunks contain the later actions. So a motion at constant speed passes unchanged. At the end of a chunk, the last action
is repeated. The robot then arrives later by the missing steps, which are counted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from sinew_client.control.trajectory import Node, Trajectory

MAX_LAG = 64.0  # largest lag that a filter may have, in control steps


@dataclass(frozen=True)
class Filter:
    """A cascade of ``stages`` equal exponential averages, y + share * (x - y).

    It does not overshoot: each output lies between the inputs.

    Attributes:
        share: Weight of the newest input, above 0 and at most 1.
        stages: Number of averages.
        columns: Numbers of an action that are filtered. () filters the numbers that are positions
            (:meth:`~sinew_client.control.motion.Motion.posed`), or all numbers if the motion is unknown.
        text: The text form of the filter.
    """

    share: float
    stages: int
    columns: tuple[int, ...] = ()
    text: str = ""

    def __post_init__(self) -> None:
        if not 0.0 < self.share <= 1.0:
            raise ValueError(f"filter: expected a share above 0, at most 1, got {self.share:g}")
        if self.lag > MAX_LAG:
            raise ValueError(
                f"filter: expected a delay of at most {MAX_LAG:g} control steps, got {self.lag:.3g}"
            )
        if len(set(self.columns)) < len(self.columns) or min(self.columns, default=0) < 0:
            raise ValueError(f"filter: expected different columns from 0 on, got {list(self.columns)}")

    @property
    def lag(self) -> float:
        """Control steps by which the output lags behind an input at constant speed."""
        return self.stages * (1.0 - self.share) / self.share


def parse_filter(text: str, hz: float) -> Filter | None:
    """Read a filter.

    Args:
        text: ``ema:SHARE`` (an exponential average) or ``lowpass:HZ`` (two exponential averages, with amplitude
            1 / sqrt(2) at HZ). ``:COLUMNS`` may follow, separated by commas. "" is no filter.
        hz: Control steps per second.

    Returns:
        The filter; None for "".

    Raises:
        ValueError: A part is not valid. The message names it.
    """
    if not text:
        return None
    kind, _, rest = text.partition(":")
    number, colon, columns = rest.partition(":")
    if kind not in ("ema", "lowpass"):
        raise ValueError(f"filter: expected ema:SHARE or lowpass:HZ, got {text!r}")
    try:
        value = float(number)
        chosen = tuple(int(column) for column in columns.split(",")) if colon else ()
    except ValueError:
        raise ValueError(f"filter: expected numbers after {kind}, got {text!r}") from None
    if kind == "ema":
        return Filter(value, 1, chosen, text)
    if not 0.0 < value < hz / 2:
        raise ValueError(f"filter: expected a frequency above 0 and below {hz / 2:g} Hz, got {value:g}")
    return Filter(_share(2.0 * math.pi * value / hz), 2, chosen, text)


def _share(angle: float) -> float:
    """Return the share for which two averages together have the gain 1 / sqrt(2) at ``angle`` per step.

    One average has the squared gain (1 - b)^2 / (1 + b^2 - 2 b cos(angle)) with b = 1 - share. It must be 1 / sqrt(2).
    """
    gain = math.sqrt(0.5)
    half = (1.0 - gain * math.cos(angle)) / (1.0 - gain)
    return 1.0 - (half - math.sqrt(half * half - 1.0))


class Smoothing:
    """Applies a filter to the targets of one robot.

    Args:
        design: The filter.
        posed: bool [D], True for the numbers that are positions.

    Attributes:
        missing: Number of control steps without the later actions that the filter needs.
    """

    def __init__(self, design: Filter, posed: np.ndarray):
        if max(design.columns, default=0) >= len(posed):
            raise ValueError(
                f"filter: expected columns below {len(posed)}, got {', '.join(map(str, design.columns))}"
            )
        mask = np.isin(np.arange(len(posed)), design.columns) if design.columns else posed
        self.design, self.mask = design, mask if mask.any() else np.ones(len(posed), bool)
        self.missing = 0
        self._stages = np.full((design.stages, len(posed)), np.nan)

    def rest(self, target: np.ndarray | None = None) -> None:
        """Restart at the target, float [D], at which the robot stands. NaN or None restarts at the first action."""
        at = np.full(self._stages.shape[1], np.nan) if target is None else np.asarray(target, np.float64)
        self._stages = np.tile(at, (self.design.stages, 1))

    def next(self, node: Node, trajectory: Trajectory) -> np.ndarray:
        """Return the filtered target of a control step, float32 [D].

        Args:
            node: The action of this step.
            trajectory: The actions after it.
        """
        value = self._ahead(node, trajectory)
        stages = np.where(np.isnan(self._stages), node.row, self._stages)
        for stage in stages:
            stage += self.design.share * (value - stage)
            value = stage
        self._stages = stages
        return np.where(self.mask, value, node.row).astype(np.float32)

    def _ahead(self, node: Node, trajectory: Trajectory) -> np.ndarray:
        """Return the input of the filter whose output is due in this step, float64 [D]."""
        first, part = divmod(self.design.lag, 1.0)
        rows = [node.row]
        for ahead in range(1, int(first) + 2):
            after = trajectory.at(node.step + ahead)
            if after is None:
                self.missing += ahead <= first or part > 0.0
                return np.asarray(rows[-1], np.float64)
            rows.append(after.row)
        last, after = np.asarray(rows[-2], np.float64), np.asarray(rows[-1], np.float64)
        return last + part * (after - last)
