"""Shadow mode: another driver commands the robot, and the policy's actions are only compared with the driver's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Mapping

import numpy as np

from sinew_client.control.controller import Command
from sinew_client.control.facts import RobotFacts, facts_of
from sinew_client.control.interfaces import Robot
from sinew_client.control.listeners.listener import LoopListener
from sinew_client.control.motion import Motion, state_of
from sinew_client.control.player import ChunkRequest

KEPT = 100_000  # the comparison covers at most this many control steps


class ShadowListener:
    """A wrapper around a robot that another driver commands. Sinew only observes this robot and never commands it.

    The wrapper is also the leader of a take-over: ``read`` returns the driver's command. This is the ``action`` of the
    robot's observations, float [D]. If observations have no ``action`` and actions are positions, it is the state.

    Args:
        robot: The robot.
        motion: The motion, which states what actions are relative to.
        dim: Number of values in a command (D).
    """

    def __init__(self, robot: Robot, motion: Motion, dim: int):
        self.robot, self._motion, self._dim = robot, motion, dim
        self._did: np.ndarray | None = None

    def facts(self) -> RobotFacts:
        """Return the facts of the wrapped robot, with ``concurrent_hold`` False, because Sinew never holds it."""
        return replace(facts_of(self.robot), concurrent_hold=False)

    def observe(self) -> Mapping[str, Any]:
        self._did = None
        seen = dict(self.robot.observe())
        did = seen.pop("action", None)
        if did is None:
            here = self._motion.position(state_of(seen["state"]), self._dim)
            did = here if np.all(np.isfinite(here)) else None
        self._did = did
        return seen

    def read(self) -> Any:
        """Return the driver's command in the last observation, float [D]; None if it is unknown."""
        return self._did

    def act(self, row: np.ndarray) -> None:
        """Do nothing: another driver commands the robot."""

    def hold(self) -> None:
        """Do nothing: another driver commands the robot."""

    def close(self) -> None:
        """Close the wrapped robot if it has a method ``close``."""
        if (close := facts_of(self.robot).close) is not None:
            close()


class ShadowAgreement(LoopListener):
    """Compares the policy's actions with the driver's commands, in two ways.

    In each control step, it compares the action that the policy would have executed with the driver's command. It also
    compares each action of a chunk with the driver's command in the control step of this action, even if the chunk
    arrived after that step.

    Args:
        names: Names of the values in a command; () numbers them.
    """

    def __init__(self, names: tuple[str, ...] = ()):
        self._names = names
        self._pairs: list[tuple[np.ndarray, np.ndarray]] = []
        self._did: dict[int, np.ndarray] = {}  # the driver's command [D], by control step
        # Each entry is a chunk: the control steps [H] of its actions, and the actions [H, D].
        self._said: list[tuple[np.ndarray, np.ndarray]] = []
        self._rows = 0  # number of actions in all stored chunks
        self.missing = 0  # number of control steps for which the policy had no action

    def attach(self, loop: Any) -> None:
        super().attach(loop)
        guard = loop.controller.guard
        if guard is not None and guard.limits is not None:
            self._names = guard.limits.names

    def answered(self, answer: Any, request: ChunkRequest) -> None:
        rows = self.loop.controller.motion.commands(np.asarray(answer, np.float32), request.state)
        self.said(request.frame, rows, self.loop.settings.speed)

    def command(self, command: Command) -> None:
        if command.row is not None:
            self.add(command.step, command.wanted, command.row)

    def report(self) -> dict[str, Any]:
        return {"agreement": self.to_dict()}

    def said(self, frame: int, rows: np.ndarray, speed: float) -> None:
        """Store a chunk for the comparison of its actions.

        Args:
            frame: Control step in which the chunk's frame was exposed.
            rows: The actions, float32 [H, D]. At speed 1, action k belongs to the k-th step after the frame.
            speed: Speed at which the chunk is played, above 0 and at most 1.
        """
        if self._rows < KEPT:
            self._rows += len(rows)
            self._said.append((frame + np.round((np.arange(len(rows)) + 1) / speed).astype(int) - 1, rows))

    def add(self, step: int, wanted: np.ndarray | None, did: np.ndarray) -> None:
        """Add a control step to the comparison.

        Args:
            step: The control step.
            wanted: The policy's command, float32 [D]; None if it has none.
            did: The driver's command, float32 [D].
        """
        if len(self._did) < KEPT:
            self._did[step] = did
        if wanted is None:
            self.missing += 1
        elif len(self._pairs) < KEPT:
            self._pairs.append((wanted, did))

    def to_dict(self) -> dict[str, Any]:
        """Compute the results of the comparison.

        Returns:
            A dict with these entries:

            * ``steps`` and ``missing``: number of control steps with and without an action of the policy.
            * ``numbers``: for each value of a command, the median, p95 and largest difference, and ``explained``. This
            is the share of the driver's variance that the policy explains: 1 - mean squared difference / variance.
            * ``rows``: for each action of a chunk, the number of comparisons, and the median and p95 difference.
        """
        if not self._pairs:
            return {"steps": 0, "missing": self.missing, "numbers": {}, "rows": {}}
        wanted, did = (np.array(rows, np.float64) for rows in zip(*self._pairs))
        apart, spread = np.abs(wanted - did), did.var(axis=0)
        numbers = {}
        for at in range(did.shape[1]):
            explained = None if spread[at] == 0.0 else 1.0 - float(np.mean(apart[:, at] ** 2) / spread[at])
            numbers[self._names[at] if at < len(self._names) else str(at)] = {
                "p50": float(np.percentile(apart[:, at], 50)),
                "p95": float(np.percentile(apart[:, at], 95)),
                "max": float(apart[:, at].max()),
                "explained": explained,
            }
        return {"steps": len(did), "missing": self.missing, "numbers": numbers, "rows": self._by_row()}

    def _by_row(self) -> dict[str, Any]:
        """Compute the differences between policy and driver for each index of an action in its chunk (``rows`` of
        :meth:`to_dict`).
        """
        differences: dict[int, list[np.ndarray]] = {}
        for steps, rows in self._said:
            for index, step in enumerate(steps):
                if (did := self._did.get(int(step))) is not None:
                    differences.setdefault(index, []).append(np.abs(rows[index].astype(np.float64) - did))
        if not differences:
            return {}
        indices = sorted(differences)
        numbers = {}
        for at in range(len(differences[indices[0]][0])):
            each = [[float(difference[at]) for difference in differences[index]] for index in indices]
            numbers[self._names[at] if at < len(self._names) else str(at)] = {
                name: [float(np.percentile(values, share)) for values in each]
                for name, share in (("p50", 50), ("p95", 95))
            }
        return {"row": indices, "count": [len(differences[index]) for index in indices], "numbers": numbers}
