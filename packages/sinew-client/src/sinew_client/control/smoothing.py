"""Low-pass filters over rows: how far each lags behind them is stated, and made up for by looking so far ahead.

A filter that lags by L control steps is fed with the row that is due L steps later, which is known because rows come in
chunks; between two rows it is interpolated. A motion at constant speed then goes through unchanged, whatever the
filter. Where the chunk ends before, the last row that is there stands for those behind it: the robot arrives later by
what is missing, which is counted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from sinew_client.control.trajectory import Node, Trajectory

MAX_LAG = 64.0  # control steps


@dataclass(frozen=True)
class Filter:
    """A cascade of ``stages`` equal exponential averages, y + share * (x - y).

    None of them overshoots: what comes out lies between what went in. columns: numbers of a row; empty: those that are
    places (:meth:`~sinew_client.control.motion.Motion.posed`), or all where nothing says which are.
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
        """Return by how many control steps what comes out is behind a motion at constant speed that goes in."""
        return self.stages * (1.0 - self.share) / self.share


def parse_filter(text: str, hz: float) -> Filter | None:
    """Return the filter that a text names at a control rate, None for "".

    ``ema:SHARE``, an exponential average, or ``lowpass:HZ``, two of them whose amplitude at HZ is 1 / sqrt(2); behind
    either ``:COLUMNS``, numbers of a row separated by commas. Raises ValueError that names the part that does not fit.
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
        raise ValueError(f"filter: expected numbers behind {kind}, got {text!r}") from None
    if kind == "ema":
        return Filter(value, 1, chosen, text)
    if not 0.0 < value < hz / 2:
        raise ValueError(f"filter: expected a frequency above 0 and below {hz / 2:g} Hz, got {value:g}")
    return Filter(_share(2.0 * math.pi * value / hz), 2, chosen, text)


def _share(angle: float) -> float:
    """Return the share of an average that two of give 1 / sqrt(2) of an amplitude at ``angle`` per step.

    One has the squared gain (1 - b)^2 / (1 + b^2 - 2 b cos(angle)) with b = 1 - share, which is to be 1 / sqrt(2).
    """
    gain = math.sqrt(0.5)
    half = (1.0 - gain * math.cos(angle)) / (1.0 - gain)
    return 1.0 - (half - math.sqrt(half * half - 1.0))


class Smoothing:
    """A filter at work on the targets of one robot.

    posed: bool [D], which numbers are places. missing: control steps in which rows to look ahead to were not there.
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
        """Begin at a target, float [D], at which the robot stands; NaN or None: at the first row."""
        at = np.full(self._stages.shape[1], np.nan) if target is None else np.asarray(target, np.float64)
        self._stages = np.tile(at, (self.design.stages, 1))

    def next(self, node: Node, trajectory: Trajectory) -> np.ndarray:
        """Return the target of a control step, float32 [D]. node: its row; trajectory: the rows after it."""
        value = self._ahead(node, trajectory)
        stages = np.where(np.isnan(self._stages), node.row, self._stages)
        for stage in stages:
            stage += self.design.share * (value - stage)
            value = stage
        self._stages = stages
        return np.where(self.mask, value, node.row).astype(np.float32)

    def _ahead(self, node: Node, trajectory: Trajectory) -> np.ndarray:
        """Return the row that is due when what goes in now comes out, float64 [D]."""
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
