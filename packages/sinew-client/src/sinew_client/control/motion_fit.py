"""Find out from a recorded run whether a robot's actions are delta actions, and of which values of the state."""

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
    """The result of a fit that found that the actions of a recorded run are delta actions.

    Attributes:
        motion: The fitted motion, in the form that :func:`~sinew_client.control.motion.parse_motion` reads.
        explained: Fraction of the state's movement that the commands explain, 0 to 1, for the value that they explain
            worst.
        spans: Number of moves between two observations that were used for the fit.
    """

    motion: dict[str, Any]
    explained: float
    spans: int

    def advice(self) -> str:
        """Return a sentence for the user with the options of `sinew run` that use this motion."""
        return (
            f"these actions are delta actions from the present pose (they explain {self.explained:.0%} of {self.spans}"
            " moves). To let the robot continue during a request, use --handover aligned+halt:1.5"
            f" --motion '{json.dumps(self.motion)}'"
        )


class MotionWatch:
    """Collects the data for a fit: the robot's movement between two observations, and the commands in between.

    Pass :meth:`put` to the listeners of a :class:`~sinew_client.control.controller.Controller`, or call it with the
    events of a decision log.
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
        """Process an event of a controller. ``values`` are the values of the event by name."""
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
        """Fit the newest moves of the robot (:func:`fit_offsets`). The result None means that the commands are not
        delta actions.
        """
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
    """Find the values of a command that are delta actions of values of the state, and their scale.

    For each pair, the scale is the median of the ratios change / sum, weighted by the size of the sums.

    Args:
        states: State at each observation, [N, S].
        changes: Change of the state until the next observation, [N, S].
        sums: Sum of the commands between the two observations, [N, D].
        low: Smallest value of each column in a single command, [D].
        high: Largest value of each column in a single command, [D].

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
    # Least squares is slow, so test only the pairs with the best fit. If a pair is rejected, the next round tests the
    # pair with the next best fit.
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
        # Two numbers of the state may move together, so also require that this column explains the number better than
        # any other column does.
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
    motion.update(low=float(f"{low[columns].min():.3g}"), high=float(f"{high[columns].max():.3g}"))
    return MotionFit(motion, float(explained[columns, numbers].min()), len(sums))


def _line(commands: np.ndarray, moved: np.ndarray) -> tuple[float, float]:
    """Fit a line through zero: moved = slope * commands.

    Args:
        commands: Sums of one value of the commands, [N].
        moved: Changes of one value of the state, [N].

    Returns:
        The slope, and the fraction of the movement that it explains, 0 to 1, for the moves with the smallest errors.
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
    """Return the indices of the 80 % of the moves with the smallest squared errors. ``errors`` is [N]."""
    return np.argsort(errors)[: round(BELIEVED * len(errors))]


def _leading(explained: np.ndarray) -> set[tuple[int, int]]:
    """Return index pairs (value of a command, value of the state that it explains best), only for good fits.
    ``explained`` [D, S] is the fraction of the movement that each pair explains.
    """
    pairs = {(column, int(number)) for column, number in enumerate(explained.argmax(axis=1))}
    return {pair for pair in pairs if explained[pair] >= LEAST_EXPLAINED}


def _pull(sums: np.ndarray, moved: np.ndarray, start: np.ndarray, spans: np.ndarray) -> float:
    """Estimate how far a value of the state moves towards a fixed position, as a fraction of its distance.

    The fraction is near 1 if commands are targets, and near 0 if they are delta actions. Least squares fits it together
    with the effect of the commands.

    Args:
        sums: Sums of the commands, [N, D].
        moved: Changes of the value, [N].
        start: The value before each change, [N].
        spans: Indices of the moves to use.

    Returns:
        The fraction, 0 or more.
    """
    terms = np.column_stack([start, np.ones_like(start), sums])[spans]
    return float(abs(np.linalg.lstsq(terms, moved[spans], rcond=None)[0][0]))
