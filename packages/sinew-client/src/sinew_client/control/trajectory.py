"""Timestamped rows: which action belongs to which control step, and which of them can no longer change.

A step is a timestamp: step k is due k periods after the clock's start. A controller has control steps; a stream has
nodes at its fast rate (docs/stream.md), which are the same thing at another rate.
"""

from __future__ import annotations

from typing import Iterable, NamedTuple, Sequence

import numpy as np

from sinew_client.control.blend import Fusion

HISTORY = 64  # committed rows that stay readable: an old frame's chunk begins among them


class Node(NamedTuple):
    """One row of the trajectory.

    step: control step that it belongs to. row: float32 [D]. frame: control step of the newest frame that its chunk
    knows. chunk: number of that chunk, counted from 0. index: row number within the chunk.
    """

    step: int
    row: np.ndarray
    frame: int
    chunk: int
    index: int


class Trajectory:
    """A buffer of rows by control step. A row is committed when it is taken; only uncommitted rows can change.

    One thread may read (``take``, ``at``, ``left``, ``rows_from``, ``commanded``) while another one writes (``put``,
    ``clear``, ``cut``). Neither ever waits: nodes are whole and immutable, and each call reads or writes one reference
    at a time. What is committed between a writer's look and its writing is gone for the writer, not for the reader.
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
                ):  # it was committed meanwhile: nobody will take this one away any more
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
        """Commit ``step`` and everything before it; return its row, or None where there is none.

        Raises ValueError for a step that has been committed: a row is never executed twice.
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
        """Note what was really sent in ``step``: the row after the limits, or what held the robot."""
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
        """Return float32 [R, D]: what was commanded from ``step`` on, then the rows that are still to come.

        Ends at the first step without either. Committed steps count as they were commanded, not as planned.
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
