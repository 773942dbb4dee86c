"""Actions with timestamps: which action belongs to which control step, and which actions can still change.

Step k is due k periods after the clock's start. A controller has control steps. A stream has waypoints, which are the
same at its own, higher rate (docs/stream.md).
"""

from __future__ import annotations

from typing import Iterable, NamedTuple, Sequence

import numpy as np

from sinew_client.control.blend import Fusion

HISTORY = 64  # committed rows that stay readable: an old frame's chunk begins among them


class Node(NamedTuple):
    """One action of the trajectory (a waypoint).

    Attributes:
        step: Control step of the action.
        row: float32 [D].
        frame: Control step of the newest frame of its chunk.
        chunk: Number of that chunk, from 0.
        index: Index of the action in the chunk.
    """

    step: int
    row: np.ndarray
    frame: int
    chunk: int
    index: int


class Trajectory:
    """A buffer of actions by control step. Taking an action commits it. Only uncommitted actions can change.

    One thread may read (``take``, ``at``, ``left``, ``rows_from``, ``commanded``) while another one writes (``put``,
    ``clear``, ``cut``). Neither waits: entries are immutable, and each call reads or writes one reference at a time.
    An action that is committed between a writer's look and its write keeps its committed value.
    """

    def __init__(self, history: int = HISTORY) -> None:
        self._history = history  # committed rows that stay readable
        self._nodes: dict[int, Node] = {}
        self._commanded: dict[int, np.ndarray] = {}
        self._next = 0  # the first step that is not committed

    def put(self, nodes: Iterable[Node]) -> None:
        """Write rows. Rows of steps that are already committed are left out."""
        for node in nodes:
            if node.step >= self._next:
                self._nodes[node.step] = node
                if (
                    node.step < self._next
                ):  # the step was committed meanwhile, so no reader will remove this entry
                    self._nodes.pop(node.step, None)

    def fused(self, nodes: Sequence[Node], fusion: Fusion) -> list[Node]:
        """Return nodes whose rows are fused with those that are here for the same steps."""
        if not nodes:
            return []
        first = max(self._next, nodes[0].step)
        found = []
        for node in nodes:
            old = self._nodes.get(node.step)
            row = node.row if old is None else fusion(old.row, node.row, node.step - first)
            found.append(node if row is node.row else node._replace(row=row))
        return found

    @property
    def next(self) -> int:
        """Return the first step that is not committed."""
        return self._next

    def clear(self) -> None:
        """Drop every uncommitted row."""
        self._nodes.clear()

    def cut(self, step: int) -> None:
        """Drop the rows of ``step`` and of everything after it."""
        for at in list(self._nodes):
            if at >= step:
                self._nodes.pop(at, None)

    def at(self, step: int) -> Node | None:
        """Return the row of ``step`` without committing it, or None."""
        return self._nodes.get(step)

    def take(self, step: int) -> Node | None:
        """Commit ``step`` and all steps before it. Return its action, or None without one.

        Raises ValueError for a committed step: an action is never executed twice.
        """
        if step < self._next:
            raise ValueError(f"step {step} has been committed, the next one is {self._next}")
        self._next = step + 1  # first, so that nothing changes between the look and the commit
        node = self._nodes.get(step)
        for old in list(self._nodes):
            if old <= step:
                self._nodes.pop(old, None)
        return node

    def commanded(self, step: int, row: np.ndarray) -> None:
        """Record the command that was sent in ``step``: the action after the limits, or the hold."""
        self._commanded[step] = row
        # One, or more after steps that were left out.
        while (oldest := next(iter(self._commanded))) <= step - self._history:
            del self._commanded[oldest]

    def left(self, step: int) -> int:
        """Return how many rows follow without a gap, that of ``step`` included."""
        count = 0
        while step + count in self._nodes:
            count += 1
        return count

    def __len__(self) -> int:
        """Return how many rows are not committed."""
        return len(self._nodes)

    def rows_from(self, step: int) -> np.ndarray:
        """Return the commands since ``step`` and the actions after them, float32 [R, D].

        It ends at the first step without either. Committed steps count with their command, not with their plan.
        """
        rows = []
        while True:
            at = step + len(rows)
            node = self._nodes.get(at)
            row = self._commanded.get(at) if at < self._next else None if node is None else node.row
            if row is None:
                break
            rows.append(row)
        return np.stack(rows).astype(np.float32) if rows else np.zeros((0, 0), np.float32)
