"""Which row of which chunk is executed at which control step: the three ways to take over a late chunk."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Arrival:
    """A chunk that has arrived. ``frame``: control step at which its newest frame was exposed."""

    actions: np.ndarray  # float32 [H, D]
    requested: int  # control step of the request
    frame: int


class ChunkPlayer:
    """Decides when to ask for a chunk and what to execute meanwhile. Time is counted in control steps.

    aligned: row k of a chunk belongs to the k-th step after its frame, so a chunk that is d steps late loses
        its first d rows. The robot goes on with the old chunk until then. Before its first chunk the robot has
        stood still: that one starts where its frame was taken, or motion would be left out that never happened.
    naive: as aligned, but a chunk starts at row 0 whenever it arrives.
    freeze: the robot executes ``replan`` rows, then asks and holds still until the answer is there; the
        answer starts at row 0.

    One request is under way at a time. aligned and naive ask ``replan`` steps after the last request, or as
    soon as it has been answered if that took longer, or when nothing is left to execute.
    """

    def __init__(self, handover: str, replan: int):
        self.handover, self.replan = handover, replan
        self.waiting = False
        self._requested = 0
        self._actions: np.ndarray | None = None
        self._origin = 0  # aligned, naive: the control step of row 0
        self._cursor = 0  # freeze: rows executed

    def wants_chunk(self, step: int) -> bool:
        if self.waiting:
            return False
        if self._actions is None or self.row(step) is None:
            return True
        if self.handover == "freeze":
            return self._cursor >= self.replan
        return step - self._requested >= self.replan

    def request(self, step: int) -> None:
        self.waiting, self._requested = True, step

    def accept(self, arrival: Arrival, step: int) -> None:
        self.waiting = False
        first = self._actions is None
        self._actions = arrival.actions
        age = arrival.requested - arrival.frame
        late = 0 if first else step - arrival.requested
        self._origin = step - late - age if self.handover == "aligned" else step
        self._cursor = 0

    def row(self, step: int) -> np.ndarray | None:
        """What to execute now, float32 [D]; None: nothing, the robot holds still."""
        if self._actions is None:
            return None
        if self.handover == "freeze":
            index = self._cursor
            if self.waiting:
                return None
        else:
            index = step - self._origin
        return self._actions[index] if index < len(self._actions) else None

    def executed(self) -> None:
        """The row of this step has been executed."""
        self._cursor += 1
