"""Low-pass filters of actions, whose lag is compensated with the later actions of a chunk.

If a filter lags by L control steps, its input is the action that is due L steps later. So a motion at constant speed
passes unchanged. If a chunk has no later actions, the last action is repeated. The robot then lags behind in these
steps, which are counted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from sinew_client.control.trajectory import Node, Trajectory

MAX_LAG = 64.0  # largest lag that a filter may have, in control steps


@dataclass(frozen=True)
class Filter:
    """A low-pass filter: one or several exponential averages in series, each y <- y + share * (x - y).

    The filter does not overshoot: each output is between the smallest and the largest input.

    Attributes:
        share: Weight of the newest input, above 0 and at most 1.
        stages: Number of averages in series.
        columns: Indices of the values in an action that are filtered. () filters the values that are positions
            (:meth:`~sinew_client.control.motion.Motion.posed`), or all values if the motion is unknown.
        text: The text form of the filter, for the report.

    Raises:
        ValueError: A value is out of its range, or the lag is above 64 control steps.
    """

    share: float
    stages: int
    columns: tuple[int, ...] = ()
    text: str = ""

    def __post_init__(self) -> None:
        if not 0.0 < self.share <= 1.0:
            raise ValueError(f"filter: expected a share above 0 and at most 1, got {self.share:g}")
        if self.lag > MAX_LAG:
            raise ValueError(
                f"filter: expected a delay of at most {MAX_LAG:g} control steps, got {self.lag:.3g}"
            )
        if len(set(self.columns)) < len(self.columns) or min(self.columns, default=0) < 0:
            raise ValueError(
                f"filter: expected different indices of values, from 0 on, got {list(self.columns)}"
            )

    @property
    def lag(self) -> float:
        """Control steps by which the output lags behind an input at constant speed."""
        return self.stages * (1.0 - self.share) / self.share


def parse_filter(text: str, hz: float) -> Filter | None:
    """Parse a filter.

    Args:
        text: ``ema:SHARE`` for one exponential average, or ``lowpass:HZ`` for two exponential averages with the gain
            1 / sqrt(2) at HZ. ``:COLUMNS`` may follow: indices of values, separated by commas. "" means no filter.
        hz: Control steps per second.

    Returns:
        The filter; None for "".

    Raises:
        ValueError: A part of the text is not valid. The message names the part.

    Example:
        >>> parse_filter("ema:0.5", hz=30).lag
        1.0
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
    """Compute the weight of the newest input (share) with which two averages in series have the gain 1 / sqrt(2) at a
    frequency.

    One average has the squared gain (1 - b)^2 / (1 + b^2 - 2 b cos(angle)) with b = 1 - share. This must be
    1 / sqrt(2), because the gains of both averages are multiplied.

    Args:
        angle: The frequency in radians per control step.
    """
    gain = math.sqrt(0.5)
    half = (1.0 - gain * math.cos(angle)) / (1.0 - gain)
    return 1.0 - (half - math.sqrt(half * half - 1.0))


class Smoothing:
    """Applies a filter to the targets of one robot.

    Args:
        design: The filter.
        posed: For each value of a target, True if it is a position, bool [D].

    Attributes:
        missing: Number of control steps in which the later actions were missing that compensate the lag.

    Raises:
        ValueError: A column of the filter is not a value of the target.
    """

    def __init__(self, design: Filter, posed: np.ndarray):
        if max(design.columns, default=0) >= len(posed):
            raise ValueError(
                f"filter: expected indices of values below {len(posed)}, got {', '.join(map(str, design.columns))}"
            )
        mask = np.isin(np.arange(len(posed)), design.columns) if design.columns else posed
        self.design, self.mask = design, mask if mask.any() else np.ones(len(posed), bool)
        self.missing = 0
        self._stages = np.full((design.stages, len(posed)), np.nan)

    def rest(self, target: np.ndarray | None = None) -> None:
        """Restart the filter at ``target``, float [D], the position at which the robot stands now.

        NaN or None restarts at the next action.
        """
        at = np.full(self._stages.shape[1], np.nan) if target is None else np.asarray(target, np.float64)
        self._stages = np.tile(at, (self.design.stages, 1))

    def next(self, node: Node, trajectory: Trajectory) -> np.ndarray:
        """Filter the target of a control step.

        Args:
            node: The action of this step.
            trajectory: The buffer with the later actions.

        Returns:
            The filtered target, float32 [D].
        """
        value = self._ahead(node, trajectory)
        stages = np.where(np.isnan(self._stages), node.row, self._stages)
        for stage in stages:
            stage += self.design.share * (value - stage)
            value = stage
        self._stages = stages
        return np.where(self.mask, value, node.row).astype(np.float32)

    def _ahead(self, node: Node, trajectory: Trajectory) -> np.ndarray:
        """Return the input of the filter for this step. This is the target that is due later, after the lag of the
        filter, float64 [D].
        """
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
