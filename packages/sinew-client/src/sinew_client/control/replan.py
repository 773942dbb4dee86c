"""Rules for the next request: after some steps, when few actions remain, or when two chunks disagree."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class ReplanState:
    """The facts from which a rule decides whether to request the next chunk now.

    Attributes:
        since: Number of control steps since the last request.
        left: Number of remaining actions.
        size: Number of actions in a chunk.
        disagreement: Difference between the newest chunk and the chunk that it replaced (:func:`disagreement`); None
            if they have no control step in common.
    """

    since: int
    left: int
    size: int
    disagreement: float | None = None


class ReplanRule:
    """Base class of the rules that decide when to request the next chunk."""

    def due(self, state: ReplanState) -> bool:
        """Return True if the next chunk should be requested now."""
        raise NotImplementedError

    def horizon(self, size: int) -> int:
        """Return the number of actions that are executed between two requests, for chunks of ``size`` actions."""
        raise NotImplementedError


@dataclass(frozen=True)
class Every(ReplanRule):
    """Requests the next chunk ``steps`` control steps after the last request; 0 means after a whole chunk."""

    steps: int

    def due(self, state: ReplanState) -> bool:
        return state.since >= self.horizon(state.size)

    def horizon(self, size: int) -> int:
        return min(self.steps or size, size)


@dataclass(frozen=True)
class Queue(ReplanRule):
    """Requests the next chunk when at most ``fraction`` of the chunk remains (LeRobot's ``chunk_size_threshold``)."""

    fraction: float

    def due(self, state: ReplanState) -> bool:
        return state.left <= self.fraction * state.size

    def horizon(self, size: int) -> int:
        return max(1, size - int(self.fraction * size))


@dataclass(frozen=True)
class Disagreement(ReplanRule):
    """Requests the next chunk at once if the newest chunk contradicts the previous one, else after ``steps``.

    Attributes:
        limit: Chunks contradict each other if their difference (:func:`disagreement`) is above this limit.
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
    """Compute the root mean square difference between two plans for the same control steps.

    Args:
        old: The previous plan, [R, D].
        new: The present plan, [R', D].
        scale: Typical size of each value, [D], such as the standard deviation of the training data; None for 1.

    Returns:
        The difference over the common steps; None if there are no common steps.
    """
    count = min(len(old), len(new))
    if count == 0:
        return None
    difference = np.asarray(new[:count], np.float64) - np.asarray(old[:count], np.float64)
    if scale is not None:
        difference = difference / np.where(np.asarray(scale) > 0, scale, 1.0)
    return float(np.sqrt(np.mean(difference**2)))


def parse_rule(text: str) -> ReplanRule:
    """Parse a rule for the next request.

    Args:
        text: A number of control steps such as ``8``, ``full`` for a whole chunk, ``queue:0.2`` for the remaining
            fraction of a chunk, or ``disagreement:LIMIT,STEPS``.

    Returns:
        The rule.

    Raises:
        ValueError: The text is not a rule.

    Example:
        >>> parse_rule("queue:0.75").horizon(32)
        8
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
