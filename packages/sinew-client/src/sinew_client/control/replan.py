"""When to request the next chunk: after a number of steps, when few actions are left, or when chunks disagree."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class ReplanState:
    """The facts that a rule may use.

    Attributes:
        since: Control steps since the last request.
        left: Remaining actions.
        size: Actions in a chunk.
        disagreement: Difference between the newest chunk and the chunk that it replaced (:func:`disagreement`); None
            if they had no step in common.
    """

    since: int
    left: int
    size: int
    disagreement: float | None = None


class ReplanRule:
    """Decides when to request a chunk. ``horizon`` is the number of actions between two requests without delay."""

    def due(self, state: ReplanState) -> bool:
        raise NotImplementedError

    def horizon(self, size: int) -> int:
        raise NotImplementedError


@dataclass(frozen=True)
class Every(ReplanRule):
    """Requests ``steps`` control steps after the last request; 0 means after a whole chunk."""

    steps: int

    def due(self, state: ReplanState) -> bool:
        return state.since >= self.horizon(state.size)

    def horizon(self, size: int) -> int:
        return min(self.steps or size, size)


@dataclass(frozen=True)
class Queue(ReplanRule):
    """Requests when at most this fraction of a chunk remains (LeRobot's ``chunk_size_threshold``)."""

    fraction: float

    def due(self, state: ReplanState) -> bool:
        return state.left <= self.fraction * state.size

    def horizon(self, size: int) -> int:
        return max(1, size - int(self.fraction * size))


@dataclass(frozen=True)
class Disagreement(ReplanRule):
    """Requests at once after a chunk that contradicts the previous chunk, else after ``steps``.

    Attributes:
        limit: Root mean square difference over the common steps, in the units of :func:`disagreement`.
        steps: Control steps between two requests if chunks agree.
    """

    limit: float
    steps: int

    def due(self, state: ReplanState) -> bool:
        surprised = state.disagreement is not None and state.disagreement > self.limit
        return surprised or state.since >= min(self.steps or state.size, state.size)

    def horizon(self, size: int) -> int:
        return min(self.steps or size, size)


def disagreement(old: np.ndarray, new: np.ndarray, scale: np.ndarray | None = None) -> float | None:
    """Return the root mean square difference of two plans [R, D] for the same steps; None if R is 0.

    Args:
        old: The previous plan.
        new: The present plan.
        scale: [D], typical size of each number, such as the standard deviation of the data; None for 1.
    """
    count = min(len(old), len(new))
    if count == 0:
        return None
    difference = np.asarray(new[:count], np.float64) - np.asarray(old[:count], np.float64)
    if scale is not None:
        difference = difference / np.where(np.asarray(scale) > 0, scale, 1.0)
    return float(np.sqrt(np.mean(difference**2)))


def parse_rule(text: str) -> ReplanRule:
    """Read a rule.

    Args:
        text: ``8`` (steps), ``full``, ``queue:0.2`` or ``disagreement:LIMIT,STEPS``.

    Returns:
        The rule.

    Raises:
        ValueError: The text names no rule.
    """
    name, _, rest = text.partition(":")
    try:
        if name == "queue":
            fraction = float(rest or 0.2)
            if 0.0 <= fraction <= 1.0:
                return Queue(fraction)
        elif name == "disagreement":
            limit, _, steps = rest.partition(",")
            if float(limit) >= 0 and int(steps) >= 1:
                return Disagreement(float(limit), int(steps))
        elif not rest:
            steps = 0 if name == "full" else int(name)
            if steps >= 1 or name == "full":
                return Every(steps)
    except ValueError:
        pass
    raise ValueError(f"expected STEPS, full, queue:FRACTION or disagreement:LIMIT,STEPS, got {text!r}")
