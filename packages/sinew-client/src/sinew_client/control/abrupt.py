"""Find the most abrupt changes between a robot's commands, with the reason for each change."""

from __future__ import annotations

import heapq
from typing import Any, Sequence

import numpy as np

from sinew_client.control.authority import POLICY
from sinew_client.control.controller import Command

KEPT = 5  # for each number of a command, the report lists at most this many abrupt changes


class AbruptMoves:
    """Finds the most abrupt changes of the commands during a run. The memory that this needs does not grow with the
    run's length.

    Args:
        hz: Control steps per second.
        dim: Number of values in a command (D).
        targets: True if commands are positions. The changes of their speed are then reported. False reports the changes
            of the commands themselves.
        names: Names of the values in a command; () numbers them.
    """

    def __init__(self, hz: float, dim: int, targets: bool, names: Sequence[str] = ()):
        self.hz, self.targets = hz, targets
        self.names = tuple(names) or tuple(map(str, range(dim)))
        self._last: Command | None = None  # the last command that was not a hold
        self._pace = np.zeros(dim)
        self._before = ""  # the reason why the robot held just before this command; "" if it did not hold
        self._squares, self._count = np.zeros(dim), 0
        self._largest: list[list[tuple[float, int, float, str, tuple[str, ...]]]] = [[] for _ in range(dim)]

    def stood(self) -> None:
        """Record that the watchdog held the robot, so that its speed is 0 before the next command."""
        self._before = "the watchdog's hold"
        self._pace = np.zeros_like(self._pace)

    def add(self, command: Command) -> None:
        """Record the command of a control step."""
        last, pace, before = self._last, np.zeros_like(self._pace), self._before
        if command.row is None:
            why = f"it holds: {command.reason}"
            self._before = command.reason
        else:
            row = np.asarray(command.row, np.float64)
            steps = 1 if last is None else max(1, command.step - last.step)
            if not self.targets:
                pace = row
            elif last is not None:
                pace = (row - last.row) * self.hz / (1 if before else steps)
            why = _why(command, before, 0 if before else steps - 1)
            self._last, self._before = command, ""
        change, self._pace = pace - self._pace, pace
        self._squares += change**2
        self._count += 1
        for joint, size in enumerate(np.abs(change)):
            heap = self._largest[joint]
            if size > 0 and (len(heap) < KEPT or size > heap[0][0]):
                push = heapq.heappush if len(heap) < KEPT else heapq.heappushpop
                push(heap, (float(size), command.step, float(change[joint]), why, command.clipped))

    def worst(self) -> list[dict[str, Any]]:
        """Return the control steps with the most abrupt changes, worst first.

        Returns:
            At most five dicts with ``step``, ``seconds``, ``joint``, ``change`` (robot units, per second if commands
            are positions), ``times`` (multiple of the joint's root mean square change), and ``why`` (the reason).
        """
        usual = np.sqrt(self._squares / max(1, self._count))
        steps: dict[int, dict[str, Any]] = {}
        for joint, heap in enumerate(self._largest):
            name = self.names[joint]
            for size, step, change, why, clipped in heap:
                times = size / usual[joint]
                if step not in steps or times > steps[step]["times"]:
                    entry = {"step": step, "seconds": round(step / self.hz, 3), "joint": name}
                    hit = [limit.rpartition(".")[2] for limit in clipped if limit.rpartition(".")[0] == name]
                    why += f"; its limits: {', '.join(hit)}" if hit else ""
                    steps[step] = {**entry, "change": change, "times": float(times), "why": why}
        return sorted(steps.values(), key=lambda each: -each["times"])[:KEPT]


def _why(command: Command, before: str, missed: int) -> str:
    if command.by != POLICY:
        origin = "a human drives"
    elif command.seam:
        origin = (
            f"chunk {command.chunk} begins at its row {command.index}, {command.age} steps after its frame"
        )
    else:
        origin = f"row {command.index} of chunk {command.chunk}"
    parts = [f"resumed (was holding: {before})" if before else "", origin]
    parts += [f"skipped periods before it: {missed}"] if missed else []
    return "; ".join(filter(None, parts))
