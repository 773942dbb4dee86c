"""Decide when to request a chunk, and which action is executed in which control step.

This module uses neither clocks nor sockets.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from sinew_client.control.delay import DelayEstimate
from sinew_client.control.handover import Handover, PlacedChunk
from sinew_client.control.motion import Motion, slowed
from sinew_client.control.replan import ReplanRule, ReplanState, disagreement
from sinew_client.control.trajectory import Node, Trajectory


@dataclass(frozen=True)
class ChunkRequest:
    """A request for a chunk.

    Attributes:
        step: Control step of the request.
        frame: Control step in which the newest frame of the request was exposed.
        state: State of the observation, float [S].
        fields: Fields that the loop adds to the observation. With ``Settings.future`` they include a predicted
            ``state``, which replaces the observed state.
    """

    step: int
    frame: int
    state: np.ndarray | None
    fields: dict[str, Any]


class Player:
    """Turns chunks into one action per control step. It counts time in control steps.

    One request is in progress at a time. The robot stands still before its first chunk, after :meth:`restart`, and
    when its actions have run out. The next chunk then starts at the action of the step in which the robot stopped,
    because the actions after that step were not executed.

    Args:
        handover: The method of chunk merging.
        rule: The rule for the next request.
        motion: The motion, which states what actions are relative to. None for actions without a known motion.
        future: True sends the policy the predicted state at the time when the answer arrives (VLASH, arXiv
            2512.01031).
        committed_rows: Longest action prefix that the policy was trained to continue; 0 for no limit. If the delay is
            longer, the robot executes the prefix and then stands still until the answer arrives. Only trained
            real-time chunking uses this.
        refine: Largest age of a chunk, in control steps, at which an edge adapter's actions replace the chunk's actions
            (:meth:`refined`). 0 without an adapter.
        speed: Speed at which chunks are played, above 0 and at most 1.

    Attributes:
        chunks: Number of merged chunks.
        halts: Number of stops because a chunk expected the robot at another position.
        request: The request in progress; None without one.
        stopping: True if the action prefix will end before the answer can arrive.
        size: Number of actions in the newest chunk.
    """

    def __init__(
        self,
        handover: Handover,
        rule: ReplanRule,
        motion: Motion | None = None,
        future: bool = False,
        committed_rows: int = 0,
        refine: int = 0,
        speed: float = 1.0,
    ):
        self.handover, self.rule, self.future, self.refine = handover, rule, future, refine
        self.speed = speed
        self.committed_rows = committed_rows if handover.as_trained else 0
        self.stopping = False  # True if the action prefix will end before the answer can arrive
        self.motion = motion or Motion()
        self.delay = DelayEstimate()
        self.trajectory = Trajectory()
        self.request: ChunkRequest | None = None  # the request in progress
        self.halted = False  # True if the robot stands still because a chunk expected another position
        self.halts = 0
        self.chunks = 0
        self._asked = 0  # control step of the last request
        self._started = 0  # control step in which the newest chunk was merged
        self._known: list[PlacedChunk] = []  # chunks with remaining actions, newest last
        self.size = 0  # number of actions in the newest chunk
        self._disagreement: float | None = None
        # True while the robot stands still. `_stopped` is the control step in which it stopped.
        self._fresh = True
        self._stopped = 0
        self._again = False  # True if the last request was not answered, so that the next one is due at once

    @property
    def waiting(self) -> bool:
        return self.request is not None

    def wants_chunk(self, step: int) -> bool:
        """Return True if a chunk should be requested now."""
        if self.waiting:
            return False
        remaining = self._left(step)
        if not self._known or remaining <= 0 or self._again:
            return True
        since = step - (self._started if self.handover.stops else self._asked)
        return self.rule.due(ReplanState(since, remaining, self.size, self._disagreement))

    def ask(self, step: int, frame: int, state: np.ndarray | None = None) -> ChunkRequest:
        """Record that a request is sent, and compute its fields.

        Args:
            step: The control step.
            frame: Control step in which the newest frame was exposed.
            state: State of the observation, float [S].

        Returns:
            The request. Its fields are those of the method of chunk merging, such as the running actions for real-time
            chunking.
        """
        fields: dict[str, Any] = {}
        self.stopping = False
        if self._known:
            behind = step - frame
            coming = self.trajectory.rows_from(frame)
            if 0 < self.committed_rows < min(behind + self.delay.steps, len(coming)):
                self.stopping = True
                self.trajectory.cut(frame + self.committed_rows)
                coming = coming[: self.committed_rows]
            # The robot stops after its last action, so the delay is at most the number of coming actions.
            delay = min(behind + self.delay.steps, len(coming))
            if self.future and len(coming) and state is not None:
                fields["state"] = self.motion.roll(state, coming[behind : max(delay, behind)])
            if self.handover.method == "rtc" and len(coming) > behind:
                fields.update(
                    previous=self.motion.rows(coming, state),
                    delay=delay,
                    # The policy guides the first size - horizon actions. The robot executes ``delay`` actions until
                    # the answer arrives, so at least these actions must be guided.
                    horizon=max(0, min(max(self.rule.horizon(self.size), delay), self.size - delay)),
                    **self.handover.continuation,
                )
        self.request, self._asked, self._again = ChunkRequest(step, frame, state, fields), step, False
        return self.request

    def accept(self, actions: np.ndarray, step: int) -> None:
        """Merge the answer to the request in progress with the running actions.

        Args:
            actions: The chunk, float32 [H, D] in robot units.
            step: The control step.
        """
        request = self.request
        assert request is not None, "a chunk without a request"
        self.request = None
        self.delay.add(step - request.step)
        # `passed` is the number of the chunk's first actions that are skipped, because their control step has passed.
        # Steps in which the robot stood still do not count.
        passed = max(0, self._stopped - request.frame) if self._fresh else step - request.frame
        origin = step - passed if self.handover.timed else step
        targets = self.motion.targets(actions, request.state)
        if self.speed < 1.0:
            dim = targets.shape[1]
            start = self.motion.pose(request.state, dim)
            targets = slowed(targets, start, self.speed, self.motion.posed(dim))
        self.chunks += 1
        if self._halts(targets, passed, step):
            self.restart(step)
            return
        placed = PlacedChunk(targets, origin, request.frame, self.chunks - 1)
        running = self.trajectory.rows_from(step)
        old = self._known if self.handover.method == "ensemble" else []
        self._known = [chunk for chunk in old if chunk.origin + len(chunk.rows) > step] + [placed]
        nodes = self.handover.merge(self.trajectory, self._known, step)
        self.trajectory.clear()
        self.trajectory.put(nodes)
        self._disagreement = disagreement(running, self.trajectory.rows_from(step))
        self.size, self._started, self._fresh = len(targets), step, False

    def _halts(self, targets: np.ndarray, passed: int, step: int) -> bool:
        """Check whether a late chunk expects the robot at its present position.

        While the chunk was computed, the robot executed other actions. If the chunk's own actions for these steps lead
        to another position, the rest of the chunk does not fit. After a stop, the next chunk is not checked.

        Args:
            targets: Targets of the chunk, float32 [H, D].
            passed: Number of actions at the beginning of the chunk whose control step has passed.
            step: The control step.

        Returns:
            True if the robot must stop and request again.
        """
        if self.halted or not 0 < passed <= len(targets):
            self.halted = False
            return False
        executed = self.trajectory.rows_from((self._stopped if self._fresh else step) - 1)
        self.halted = (
            len(executed) > 0 and self.motion.apart(targets[passed - 1], executed[0]) > self.handover.halt
        )
        self.halts += self.halted
        return self.halted

    def refines(self, step: int) -> bool:
        """Return True if an edge adapter may refine the newest chunk in this step."""
        if not self._known or (self.handover.stops and self.waiting):
            return False
        return 0 <= self.age(step) <= self.refine

    def refined(self, rows: np.ndarray, step: int, state: np.ndarray | None = None) -> None:
        """Replace the coming actions of the newest chunk by actions of an edge adapter.

        Args:
            rows: The actions for ``step`` and the next steps, float32 [R, D], relative to ``state`` like a chunk.
            step: The control step.
            state: State of the robot in this step, float [S].
        """
        newest = self._known[-1]
        targets = self.motion.targets(rows, state)
        self.trajectory.put(
            Node(step + k, row, newest.frame, newest.number, step + k - newest.origin)
            for k, row in enumerate(targets)
        )

    def age(self, step: int) -> int:
        """Return the age of the newest chunk, in control steps since its observation. There must be a chunk."""
        return step - self._known[-1].frame

    def _left(self, step: int) -> int:
        """Return the number of remaining actions of the newest chunk.

        The actions of an edge adapter do not count, because they are computed again in each control step.
        """
        if self.refine and self._known:
            return self._known[-1].origin + self.size - step
        return self.trajectory.left(step)

    def failed(self) -> None:
        """Record that the request in progress has failed. The next request is due at once."""
        self._again = self.request is not None
        self.request = None

    def restart(self, step: int = 0) -> None:
        """Drop all actions, because they are no longer valid. The robot stands still from ``step`` on."""
        self.trajectory.clear()
        if not self._fresh:
            self._stopped = step
        self._known, self._fresh = [], True

    def take(self, step: int) -> Node | None:
        """Return and commit the action of this control step. None means that there is no action, so the robot holds."""
        if self.handover.stops and self.waiting:
            self.trajectory.clear()
        node = self.trajectory.take(step)
        if node is None:
            self.restart(step)
        return node

    def commanded(self, step: int, row: np.ndarray, state: np.ndarray | None = None) -> None:
        """Record the command that was sent to the robot, after the limits were applied.

        Args:
            step: The control step.
            row: The command, float32 [D].
            state: State of the robot in this step, float [S].
        """
        self.trajectory.commanded(step, self.motion.reached(row, state))
