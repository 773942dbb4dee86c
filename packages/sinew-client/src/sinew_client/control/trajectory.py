"""A buffer of actions by control step. It distinguishes committed actions from actions that can still change.

Step k is due k periods after the first tick. For requested chunks, a step is a control step. For a stream, a step is a
waypoint, and waypoints have a higher rate than the policy's actions (docs/stream.md).
"""

from __future__ import annotations

from typing import Iterable, NamedTuple, Sequence

import numpy as np

from sinew_client.control.blend import Fusion

# This many commands of past steps stay readable, because a request with an old frame also sends the actions since it.
HISTORY = 64


class Node(NamedTuple):
    """One action in the buffer, with its control step.

    Attributes:
        step: Control step of the action.
        row: The target, float32 [D].
        frame: Control step in which the newest frame of the action's chunk was exposed.
        chunk: Number of the chunk, from 0.
        index: Index of the action in the chunk.
    """

    step: int
    row: np.ndarray
    frame: int
    chunk: int
    index: int


class Trajectory:
    """A buffer of actions by control step. :meth:`take` commits an action. Only uncommitted actions can change.

    One thread may read (``take``, ``at``, ``left``, ``rows_from``, ``commanded``) while another thread writes (``put``,
    ``clear``, ``cut``). No lock is necessary, because entries are immutable, and each call reads or writes one entry at
    a time. If an action is committed while a writer replaces it, its committed value stays.

    Args:
        history: Number of past commands that stay readable.
    """

    def __init__(self, history: int = HISTORY) -> None:
        self._history = history  # number of past commands that stay readable
        self._nodes: dict[int, Node] = {}
        self._commanded: dict[int, np.ndarray] = {}
        self._next = 0  # the first control step whose action is not committed

    def put(self, nodes: Iterable[Node]) -> None:
        """Store actions. Actions whose step is already committed are ignored."""
        for node in nodes:
            if node.step >= self._next:
                self._nodes[node.step] = node
                # The reader thread may have committed the step after the check above. The reader would then never
                # remove the new entry, so remove it here.
                if node.step < self._next:
                    self._nodes.pop(node.step, None)

    def fused(self, nodes: Sequence[Node], fusion: Fusion) -> list[Node]:
        """Mix new actions with the stored actions for the same steps, by the rule ``fusion``. Return the mixed actions,
        and store nothing.
        """
        if not nodes:
            return []
        first = max(self._next, nodes[0].step)
        merged = []
        for node in nodes:
            old = self._nodes.get(node.step)
            row = node.row if old is None else fusion(old.row, node.row, node.step - first)
            merged.append(node if row is node.row else node._replace(row=row))
        return merged

    @property
    def next(self) -> int:
        """The first control step whose action is not committed."""
        return self._next

    def clear(self) -> None:
        """Remove all uncommitted actions."""
        self._nodes.clear()

    def cut(self, step: int) -> None:
        """Remove the actions of ``step`` and of all later steps."""
        for at in list(self._nodes):
            if at >= step:
                self._nodes.pop(at, None)

    def at(self, step: int) -> Node | None:
        """Return the action of ``step`` without committing it; None if there is no action."""
        return self._nodes.get(step)

    def take(self, step: int) -> Node | None:
        """Commit ``step`` and all earlier steps. Return the action of ``step``; None if there is no action.

        Raises:
            ValueError: The step is already committed. An action is never executed twice.
        """
        if step < self._next:
            raise ValueError(f"step {step} already has its command; the next step is {self._next}")
        # Commit the step before reading its action, so that no writer can change the action afterwards.
        self._next = step + 1
        node = self._nodes.get(step)
        for old in list(self._nodes):
            if old <= step:
                self._nodes.pop(old, None)
        return node

    def commanded(self, step: int, row: np.ndarray) -> None:
        """Store the command that was sent in ``step``, float32 [D], after the limits were applied."""
        self._commanded[step] = row
        # Delete the commands that are too old: usually one, or several if control steps were skipped.
        while (oldest := next(iter(self._commanded))) <= step - self._history:
            del self._commanded[oldest]

    def left(self, step: int) -> int:
        """Return the number of successive actions from ``step`` on, until the first step without an action."""
        count = 0
        while step + count in self._nodes:
            count += 1
        return count

    def __len__(self) -> int:
        """Return the number of uncommitted actions."""
        return len(self._nodes)

    def rows_from(self, step: int) -> np.ndarray:
        """Return the past commands since ``step``, followed by the coming actions, float32 [R, D].

        For a committed step, the result has the command that was sent, and not the planned action. The result ends at
        the first step without a command and without an action.
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
