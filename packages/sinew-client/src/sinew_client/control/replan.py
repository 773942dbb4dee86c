"""When to ask for the next chunk: after a number of steps, when the queue runs low, or when chunks disagree."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class ReplanState:
    """The facts that a rule may look at. since: steps since the last request. left: rows that are still to be executed.

    size: rows of a chunk. disagreement: of the newest chunk and what it replaced, see :func:`disagreement`; None
    where they had no step in common.
    """

    since: int
    left: int
    size: int
    disagreement: float | None = None


class ReplanRule:
    """A rule for when to ask. ``horizon`` is the number of rows that are executed between two requests at best."""

    def due(self, state: ReplanState) -> bool:
        raise NotImplementedError

    def horizon(self, size: int) -> int:
        raise NotImplementedError


@dataclass(frozen=True)
class Every(ReplanRule):
    """Ask ``steps`` control steps after the last request; 0 means after a whole chunk."""

    steps: int

    def due(self, state: ReplanState) -> bool:
        return state.since >= self.horizon(state.size)

    def horizon(self, size: int) -> int:
        return min(self.steps or size, size)


@dataclass(frozen=True)
class Queue(ReplanRule):
    """Ask when at most this fraction of a chunk is left to execute (LeRobot's ``chunk_size_threshold``)."""

    fraction: float

    def due(self, state: ReplanState) -> bool:
        return state.left <= self.fraction * state.size

    def horizon(self, size: int) -> int:
        return max(1, size - int(self.fraction * size))


@dataclass(frozen=True)
class Disagreement(ReplanRule):
    """Ask at once after a chunk that contradicted its predecessor, else after ``steps``.

    limit: the root mean square difference over the steps that both have, in the units of :func:`disagreement`.
    """

    limit: float
    steps: int

    def due(self, state: ReplanState) -> bool:
        surprised = state.disagreement is not None and state.disagreement > self.limit
        return surprised or state.since >= min(self.steps or state.size, state.size)

    def horizon(self, size: int) -> int:
        return min(self.steps or size, size)


def disagreement(old: np.ndarray, new: np.ndarray, scale: np.ndarray | None = None) -> float | None:
    """Return the root mean square difference of two stretches [R, D] of the same steps; None where R is 0.

    scale: [D] typical size of each number (such as the standard deviation of the data); 1 where absent.
    """
    count = min(len(old), len(new))
    if count == 0:
        return None
    difference = np.asarray(new[:count], np.float64) - np.asarray(old[:count], np.float64)
    if scale is not None:
        difference = difference / np.where(np.asarray(scale) > 0, scale, 1.0)
    return float(np.sqrt(np.mean(difference**2)))


def parse_rule(text: str) -> ReplanRule:
    """Return the rule that a text names: ``8``, ``full``, ``queue:0.2`` or ``disagreement:LIMIT,STEPS``.

    Raises ValueError that says what was expected.
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
