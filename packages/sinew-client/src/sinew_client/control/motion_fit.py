"""What a robot's actions are measured from, found in a recorded run."""

from __future__ import annotations

import json
from collections import deque
from dataclasses import dataclass
from typing import Any, Mapping

import numpy as np

LEAST_SPANS = 20  # between two frames; fewer say nothing
LEAST_EXPLAINED = 0.8  # of how far the state moved, by the commands in between
SAME_SCALE = 0.2  # relative; columns that differ by more are no offsets of one kind
MOST_PULL = 0.25  # towards a position, per move; commands that are positions have nearly 1
KEPT_SPANS = 2000  # the newest
BELIEVED = 0.8  # of the spans, those that fit best: a hand that pushes on the table does not move


@dataclass(frozen=True)
class MotionFit:
    """Actions that are offsets from the pose of their own step.

    motion: the settings that say so (:func:`~sinew_client.control.motion.parse_motion`). explained: the least part,
    0 to 1, of what a number of the state moved by, that the commands explain. spans: how many were looked at.
    """

    motion: dict[str, Any]
    explained: float
    spans: int

    def advice(self) -> str:
        """Return a sentence for whoever let rows go out as they come."""
        return (
            f"these actions are offsets from the present pose ({self.explained:.0%} of {self.spans} moves explained):"
            f" --handover aligned+halt:1.5 --motion '{json.dumps(self.motion)}' follows them as targets and goes on"
        )


class MotionWatch:
    """Notes how far the robot moved between two of its frames, and what it was sent in between.

    ``put`` is a listener of :class:`~sinew_client.control.controller.Controller`; it takes the events of a journal too.
    """

    def __init__(self) -> None:
        self._spans: deque = deque(maxlen=KEPT_SPANS)  # (state [S], its change [S], sum of the commands [D])
        self._state: np.ndarray | None = (
            None  # at the last frame; None: nothing follows from what came before
        )
        self._rows: list[tuple[int, np.ndarray]] = []  # step and row of the commands since then
        self._ends: list[np.ndarray] = []  # lowest and highest number of each column of a single command

    def put(self, event: str, values: Mapping[str, Any]) -> None:
        """Take an event of a controller."""
        if event == "command":
            command = values["command"]
            plain = isinstance(command, Mapping)  # of a journal
            step, row = (command["step"], command["row"]) if plain else (command.step, command.row)
            if row is not None and self._state is not None:
                self._rows.append((step, np.asarray(row, np.float64)))
        elif event == "ask":
            state = values["state"]
            self._frame(values["frame"], None if state is None else np.asarray(state, np.float64))
        elif event in ("fault", "failed", "pause", "resume"):  # the robot may have been moved by others
            self._state, self._rows = None, []

    def fit(self) -> MotionFit | None:
        """Return what :func:`fit_offsets` finds in the newest moves."""
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
    """Return which columns of a command move which number of the state, and by how much for one unit; None where the
    commands are no such offsets, or where too little moved.

    states, changes: [N, S] at a frame, and from it to the next one. sums: [N, D] of the commands sent between the two.
    low, high: [D] of single commands. The scale is the median of the ratios, weighted by the size of the sums.
    """
    if len(sums) < max(LEAST_SPANS, 3 * sums.shape[1]) or not all(
        np.isfinite(each).all() for each in (states, changes, sums)
    ):
        return None
    shape = sums.shape[1], changes.shape[1]
    scales, explained = np.zeros(shape), np.zeros(shape)  # [D, S]
    for column, number in np.ndindex(shape):
        scales[column, number], explained[column, number] = _line(sums[:, column], changes[:, number])
    asked: set[tuple[int, int]] = set()
    while leading := _leading(explained) - asked:  # least squares is dear, and few pairs can be taken
        asked |= leading
        for column, number in leading:
            left = np.square(changes[:, number] - scales[column, number] * sums[:, column])
            if _pull(sums, changes[:, number], states[:, number], _best(left)) >= MOST_PULL:
                explained[column, number] = 0.0  # it depends on where the move began: these are positions
    pairs = [
        (column, number)
        for column, number in sorted(_leading(explained))
        # Two numbers may go up and down together: of the commands, too, this one has to explain it best.
        if explained[:, number].argmax() == column and scales[column, number] > 0
    ]
    if not pairs:
        return None
    columns, numbers = ([pair[side] for pair in pairs] for side in (0, 1))
    found = scales[columns, numbers]
    scale = float(np.median(found))
    if np.abs(found / scale - 1).max() > SAME_SCALE:
        return None
    motion = {"kind": "offsets", "action": columns, "state": numbers, "scale": float(f"{scale:.3g}")}
    motion |= {"low": float(f"{low[columns].min():.3g}"), "high": float(f"{high[columns].max():.3g}")}
    return MotionFit(motion, float(explained[columns, numbers].min()), len(sums))


def _line(given: np.ndarray, moved: np.ndarray) -> tuple[float, float]:
    """Return the slope through zero of ``moved`` over ``given`` [N], and the part of the movement that it explains in
    those spans that it fits best."""
    there = given != 0
    if not there.any() or not np.any(moved):
        return 0.0, 0.0
    ratios, weights = moved[there] / given[there], np.abs(given[there])
    order = np.argsort(ratios)
    reached = np.cumsum(weights[order])
    slope = float(ratios[order][np.searchsorted(reached, reached[-1] / 2)])
    left = np.square(moved - slope * given)
    best = _best(left)
    total = np.square(moved[best]).sum()
    return slope, float(1 - left[best].sum() / total) if total > 0 else 0.0


def _best(left: np.ndarray) -> np.ndarray:
    """Return the places of those spans whose squared error ``left`` [N] is the least."""
    return np.argsort(left)[: round(BELIEVED * len(left))]


def _leading(explained: np.ndarray) -> set[tuple[int, int]]:
    """Return columns, and the number that each explains best, where that is enough; explained: [D, S]."""
    pairs = {(column, int(number)) for column, number in enumerate(explained.argmax(axis=1))}
    return {pair for pair in pairs if explained[pair] >= LEAST_EXPLAINED}


def _pull(sums: np.ndarray, moved: np.ndarray, start: np.ndarray, spans: np.ndarray) -> float:
    """Return the part of its distance from ``start`` [N] that a number moves, beside what ``sums`` [N, D] explain."""
    terms = np.column_stack([start, np.ones_like(start), sums])[spans]
    return float(abs(np.linalg.lstsq(terms, moved[spans], rcond=None)[0][0]))
