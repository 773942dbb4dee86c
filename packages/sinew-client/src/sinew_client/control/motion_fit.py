"""Find the reference of a robot's actions in a recorded run."""

from __future__ import annotations

import json
from collections import deque
from dataclasses import dataclass
from typing import Any, Mapping

import numpy as np

# In this module, a move is the robot's change of state between two frames.
LEAST_SPANS = 20  # a fit needs at least this many moves
LEAST_EXPLAINED = 0.8  # the commands must explain at least this fraction of the state's movement
# The scales of all columns may differ by this fraction, because all delta actions of a robot have the same scale.
SAME_SCALE = 0.2
# With delta actions, a move does not depend on its start. If the state moves towards a fixed position by more than this
# fraction of the distance, the commands are positions. Real positions give a fraction near 1.
MOST_PULL = 0.25
KEPT_SPANS = 2000  # the newest moves are stored, at most this many
# A fit uses this fraction of the moves, those with the smallest errors, because a blocked arm does not follow commands.
BELIEVED = 0.8


@dataclass(frozen=True)
class MotionFit:
    """The result of fitting a recorded run's actions as delta actions.

    Attributes:
        motion: The fitted motion (:func:`~sinew_client.control.motion.parse_motion`).
        explained: Smallest share, 0 to 1, of a number's movement that the commands explain.
        spans: Number of moves that were used.
    """

    motion: dict[str, Any]
    explained: float
    spans: int

    def advice(self) -> str:
        """Return a sentence with the options that use this motion."""
        return (
            f"these actions are delta actions from the present pose (they explain {self.explained:.0%} of {self.spans}"
            " moves). To let the robot continue during a request, use --handover aligned+halt:1.5"
            f" --motion '{json.dumps(self.motion)}'"
        )


class MotionWatch:
    """Records the robot's movement between two frames, and the commands in between.

    ``put`` is a listener of :class:`~sinew_client.control.controller.Controller`. It accepts the events of a decision
    log too.
    """

    def __init__(self) -> None:
        # Each move is (state [S] before it, change of the state [S], sum of its commands [D]).
        self._spans: deque = deque(maxlen=KEPT_SPANS)
        # This is the state at the last frame. None means that a person may have moved the robot since then.
        self._state: np.ndarray | None = None
        self._rows: list[
            tuple[int, np.ndarray]
        ] = []  # control step and numbers of each command since the last frame
        self._ends: list[
            np.ndarray
        ] = []  # two arrays [D]: the smallest and the largest number of each column so far

    def put(self, event: str, values: Mapping[str, Any]) -> None:
        """Take an event of a controller."""
        if event == "command":
            command = values["command"]
            # Commands are mappings in a decision log, and objects in a running loop.
            plain = isinstance(command, Mapping)
            step, row = (command["step"], command["row"]) if plain else (command.step, command.row)
            if row is not None and self._state is not None:
                self._rows.append((step, np.asarray(row, np.float64)))
        elif event == "ask":
            state = values["state"]
            self._frame(values["frame"], None if state is None else np.asarray(state, np.float64))
        # After these events, forget the last state, because a person may have moved the robot.
        elif event in ("fault", "failed", "pause", "resume"):
            self._state, self._rows = None, []

    def fit(self) -> MotionFit | None:
        """Fit the newest moves (:func:`fit_offsets`)."""
        if not self._spans:
            return None
        return fit_offsets(*map(np.array, zip(*self._spans)), *self._ends)

    def _frame(self, frame: int, state: np.ndarray | None) -> None:
        before = [row for step, row in self._rows if step < frame]
        if self._state is not None and state is not None and before:
            self._spans.append((self._state, state - self._state, np.sum(before, axis=0)))
            self._ends = [end([*self._ends, *before], axis=0) for end in (np.min, np.max)]
        self._state, self._rows = state, [each for each in self._rows if each[0] >= frame]


def fit_offsets(
    states: np.ndarray, changes: np.ndarray, sums: np.ndarray, low: np.ndarray, high: np.ndarray
) -> MotionFit | None:
    """Find the columns of a command that move numbers of the state, and the scale of each.

    The scale is the median of the ratios, weighted by the size of the sums.

    Args:
        states: [N, S], state at each frame.
        changes: [N, S], change of the state from each frame to the next frame.
        sums: [N, D], sum of the commands between the two frames.
        low: [D], smallest single commands.
        high: [D], largest single commands.

    Returns:
        The fit; None if the commands are not delta actions, or if the robot moved too little.
    """
    if len(sums) < max(LEAST_SPANS, 3 * sums.shape[1]) or not all(
        np.isfinite(each).all() for each in (states, changes, sums)
    ):
        return None
    shape = sums.shape[1], changes.shape[1]
    scales, explained = np.zeros(shape), np.zeros(shape)  # [D, S]
    for column, number in np.ndindex(shape):
        scales[column, number], explained[column, number] = _line(sums[:, column], changes[:, number])
    visited: set[tuple[int, int]] = set()
    # Least squares is slow, so test only pairs with a good fit. A rejected pair lets the next best pair lead.
    while leading := _leading(explained) - visited:
        visited |= leading
        for column, number in leading:
            residuals = np.square(changes[:, number] - scales[column, number] * sums[:, column])
            if _pull(sums, changes[:, number], states[:, number], _best(residuals)) >= MOST_PULL:
                # The moves depend on their start, so the commands are positions and not delta actions.
                explained[column, number] = 0.0
    pairs = [
        (column, number)
        for column, number in sorted(_leading(explained))
        # Two numbers of the state may move together, so this column must also explain the number best.
        if explained[:, number].argmax() == column and scales[column, number] > 0
    ]
    if not pairs:
        return None
    columns, numbers = ([pair[side] for pair in pairs] for side in (0, 1))
    slopes = scales[columns, numbers]
    scale = float(np.median(slopes))
    if np.abs(slopes / scale - 1).max() > SAME_SCALE:
        return None
    motion = {"kind": "offsets", "action": columns, "state": numbers, "scale": float(f"{scale:.3g}")}
    motion |= {"low": float(f"{low[columns].min():.3g}"), "high": float(f"{high[columns].max():.3g}")}
    return MotionFit(motion, float(explained[columns, numbers].min()), len(sums))


def _line(commands: np.ndarray, moved: np.ndarray) -> tuple[float, float]:
    """Fit a line through zero to ``moved`` over ``commands`` [N].

    Returns:
        The slope, and the share of the movement that it explains in the spans with the smallest errors.
    """
    there = commands != 0
    if not there.any() or not np.any(moved):
        return 0.0, 0.0
    ratios, weights = moved[there] / commands[there], np.abs(commands[there])
    order = np.argsort(ratios)
    reached = np.cumsum(weights[order])
    slope = float(ratios[order][np.searchsorted(reached, reached[-1] / 2)])
    residuals = np.square(moved - slope * commands)
    best = _best(residuals)
    total = np.square(moved[best]).sum()
    return slope, float(1 - residuals[best].sum() / total) if total > 0 else 0.0


def _best(errors: np.ndarray) -> np.ndarray:
    """Return the indices of the spans with the smallest squared errors. ``errors`` is [N]."""
    return np.argsort(errors)[: round(BELIEVED * len(errors))]


def _leading(explained: np.ndarray) -> set[tuple[int, int]]:
    """Return (column, number that the column explains best) for columns with a good fit. ``explained`` is [D, S]."""
    pairs = {(column, int(number)) for column, number in enumerate(explained.argmax(axis=1))}
    return {pair for pair in pairs if explained[pair] >= LEAST_EXPLAINED}


def _pull(sums: np.ndarray, moved: np.ndarray, start: np.ndarray, spans: np.ndarray) -> float:
    """Return the pull of a number towards a fixed position, as a share of its distance from ``start`` [N].

    The share is fitted together with the effect of ``sums`` [N, D]. It distinguishes targets from delta actions.
    """
    terms = np.column_stack([start, np.ones_like(start), sums])[spans]
    return float(abs(np.linalg.lstsq(terms, moved[spans], rcond=None)[0][0]))
