"""Goals of the action ``RunPolicy`` drive the robot of a bridge, one at a time. Between two goals the robot holds.

This module does not depend on rclpy or DDS. A transport (``act``) provides the services and topics of the
action. It calls :meth:`Goals.wants` for a new goal, :meth:`Goals.begin` with the accepted :class:`Goal`, and
:meth:`Goals.cancels` to cancel a goal.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any, Protocol

from sinew_client.control import Command

from sinew_ros.contract import GoalSettings
from sinew_ros.driven import DrivenRobot, hold
from sinew_ros.messages import time_of

logger = logging.getLogger(__name__)

INACTIVE = "the node is not active"
NAME, KIND = "/sinew/run_policy", "sinew_msgs/action/RunPolicy"
# Status values of action_msgs/msg/GoalStatus.
UNKNOWN, ACCEPTED, EXECUTING, CANCELING, SUCCEEDED, CANCELED, ABORTED = range(7)
# Outcomes of a goal in RunPolicy.action, each with its text and the status of the goal afterwards.
SUCCESS, CANCEL, TIME_LIMIT, HOLD_LIMIT, PREEMPTED, ENDED = range(1, 7)
OUTCOMES = {
    SUCCESS: ("succeeded", SUCCEEDED),
    CANCEL: ("cancelled", CANCELED),
    TIME_LIMIT: ("time limit", ABORTED),
    HOLD_LIMIT: ("hold limit", ABORTED),
    PREEMPTED: ("pre-empted", ABORTED),
    ENDED: ("ended", ABORTED),
}


class Goal(Protocol):
    """Interface of an accepted goal, which the transport passes to :class:`Goals`.

    Attributes:
        goal: The message of the goal.
        id: Id of the goal, 16 bytes.
    """

    goal: Any
    id: bytes

    def feedback(self, fields: Mapping[str, Any]) -> None:
        """Publish the fields of a feedback message. This may be called from any thread."""

    def end(self, status: int, fields: Mapping[str, Any]) -> None:
        """End the goal: set its final status, and send the fields of the result. This method is called once, from any
        thread.
        """


class Run:
    """The state and the counters of one goal. The loop's thread counts (:meth:`saw`), and any thread may end the
    goal.

    Args:
        goal: The goal.
        settings: Limits for goals that do not set their own.
        failed: Number of failed requests before this goal.
    """

    def __init__(self, goal: Goal, settings: GoalSettings, failed: int):
        self.goal, self.settings = goal, settings
        self.time_limit = _seconds(goal.goal.time_limit) or settings.time_limit
        self.hold_limit = _seconds(goal.goal.hold_limit) or settings.hold_limit
        # `over` is set when the goal has ended, and `still` when the robot holds afterwards.
        self.over, self.still = threading.Event(), threading.Event()
        self.outcome, self.message = 0, ""
        # Number of requests that had failed before this goal began, and the control period in seconds.
        self._failed, self._period = failed, 0.0
        self._lock = threading.Lock()
        self._steps = self._held = self._chunks = 0
        self._chunk = -1
        self._command: list[float] = []
        self._age_ms = 0.0
        self._reason = ""
        self.begin(0.0)

    def begin(self, period: float) -> None:
        """Start to count the time. ``period`` is the length of a control step in seconds."""
        self._period, self._began = period, time.monotonic()
        self._moved = self._began

    def end(self, outcome: int, message: str = "") -> bool:
        """End the goal if it has not ended yet.

        Args:
            outcome: Outcome of the goal in the result of RunPolicy.
            message: Text of the result.

        Returns:
            True if this call ended the goal.
        """
        with self._lock:
            if self.over.is_set():
                return False
            self.outcome, self.message = outcome, message
            self._elapsed = time.monotonic() - self._began
            self.over.set()
            return True

    def saw(self, command: Command) -> None:
        """Count one control step of the loop for this goal."""
        with self._lock:
            if self.over.is_set():
                return
            self._steps, self._reason = self._steps + 1, command.reason
            if command.row is None:
                self._held += 1
                return
            self._moved = time.monotonic()
            self._command, self._age_ms = command.row.tolist(), 1e3 * self._period * command.age
            self._chunks += command.chunk != self._chunk
            self._chunk = command.chunk

    def left(self) -> float:
        """Return the seconds until a limit is reached. If a limit is reached now, end the goal."""
        now = time.monotonic()
        whole, hold = self._began + self.time_limit - now, self._moved + self.hold_limit - now
        if whole <= 0 and self.goal.goal.limit_succeeds:
            self.end(SUCCESS, f"the goal ran for {self.time_limit:g} s")
        elif whole <= 0:
            self.end(TIME_LIMIT, f"after {self.time_limit:g} s; {self._reason or 'the robot moved'}")
        elif hold <= 0:
            self.end(
                HOLD_LIMIT,
                f"held for {self.hold_limit:g} s: {self._reason or 'the control loop has stopped'}",
            )
        return max(0.0, min(whole, hold))

    def feedback(self) -> dict[str, Any]:
        """Return the fields of a feedback message."""
        with self._lock:
            return {
                "elapsed": time_of(time.monotonic() - self._began),
                "steps": self._steps,
                "held": self._held,
                "message": self._reason,
                "age_ms": self._age_ms,
                "command": self._command,
            }

    def result(self, failed: int) -> dict[str, Any]:
        """Return the fields of the result of an ended goal. ``failed`` is the number of all failed requests so far."""
        return {
            "outcome": self.outcome,
            "message": self.message,
            "elapsed": time_of(self._elapsed),
            "steps": self._steps,
            "held": self._held,
            "chunks": self._chunks,
            "failed_requests": failed - self._failed,
        }


class Goals:
    """Runs goals on the open bridge, one at a time.

    Without an open bridge, goals are rejected. A goal is also rejected while another one runs, unless the contract
    sets ``goals.preempt``. With ``goals.preempt``, the new goal replaces the running goal, and the robot does not
    stop in between.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._bridge: DrivenRobot | None = None
        self._run: Run | None = None
        self._thread: threading.Thread | None = None
        self.count: Counter = Counter()  # outcome, or "refused" -> number of goals

    def open(self, bridge: DrivenRobot) -> None:
        """Accept goals for a bridge from now on. While no goal runs, the robot of the bridge holds its position."""
        with self._lock:
            self._bridge = bridge

    def shut(self, why: str) -> None:
        """Reject new goals, and end the running goal for the reason ``why``. Return when the robot holds."""
        with self._lock:
            self._bridge, run = None, self._run
        if run is not None:
            run.end(ENDED, why)
            run.still.wait()

    def close(self) -> None:
        """Wait up to 2 s until the result of the last goal was sent."""
        if self._thread is not None:
            self._thread.join(2.0)

    def wants(self, goal: Any) -> bool:
        """Return True if a goal may run. The reason for a rejection is logged, because an action server cannot send
        it.
        """
        with self._lock:
            why = self._refusal(goal)
            if why:
                self.count["refused"] += 1
                logger.warning("a goal was rejected: %s", why)
            return not why

    def _refusal(self, goal: Any) -> str:
        if self._bridge is None:
            return INACTIVE
        if self._run is not None and not self._bridge.contract.goals.preempt:
            return "another goal is running, and goals.preempt is false"
        for name in ("time_limit", "hold_limit"):
            if _seconds(getattr(goal, name)) < 0:
                return f"{name}: expected 0 s or more, got {_seconds(getattr(goal, name)):g}"
        if not (goal.prompt or self._bridge.prompt):
            return "prompt: expected an instruction, because neither the contract nor the policy has one"
        return ""

    def begin(self, goal: Goal) -> None:
        """Run an accepted goal. The accepted goal replaces the running goal if there is one."""
        with self._lock:
            bridge, before = self._bridge, self._thread
            run = Run(goal, GoalSettings() if bridge is None else bridge.contract.goals, _failed(bridge))
            if self._run is not None:
                self._run.end(PREEMPTED, "a newer goal replaced this goal")
            self._run = run
            self._thread = threading.Thread(target=self._drive, args=(run, bridge, before), daemon=True)
        # shut() was called after the goal had been accepted.
        if bridge is None:
            run.end(ENDED, INACTIVE)
        self._thread.start()

    def cancels(self, number: bytes) -> bool:
        """Cancel the goal with the id ``number``. The robot then holds its position. Return True if the goal was still
        running.
        """
        with self._lock:
            run = self._run
            return (
                run is not None and run.goal.id == number and run.end(CANCEL, "a client cancelled the goal")
            )

    def succeed(self) -> None:
        """End the running goal as a success. A goal for which no command was sent yet is not ended, because the success
        message may belong to the previous goal.
        """
        with self._lock:
            if self._run is not None and self._run.feedback()["command"]:
                self._run.end(SUCCESS, "the success topic reported a success")

    def saw(self, command: Command, paused: bool) -> None:
        """Count one control step of the loop for the running goal. Steps of a paused loop are not counted.

        Args:
            command: The command of the step.
            paused: True if the loop is paused.
        """
        if (run := self._run) is not None and not paused:
            run.saw(command)

    def _drive(self, run: Run, bridge: DrivenRobot | None, before: threading.Thread | None) -> None:
        if before is not None:
            # Wait for the end of the previous goal, so that only one goal commands the robot.
            before.join()
        try:
            if bridge is not None and not run.over.is_set():
                run.begin(bridge.contract.settings.period)
                bridge.loop.say(run.goal.goal.prompt or bridge.prompt)
                bridge.enable(True)
                self._watch(run)
        except Exception as error:
            logger.exception("a goal failed")
            run.end(ENDED, f"{type(error).__name__}: {error}")
        finally:
            self._end(run, bridge)

    def _watch(self, run: Run) -> None:
        """Send feedback messages of a running goal until the goal ends."""
        every = 1.0 / run.settings.feedback
        due = time.monotonic() + every
        while not run.over.wait(min(run.left(), max(0.0, due - time.monotonic()))):
            if time.monotonic() >= due:
                due = time.monotonic() + every
                run.goal.feedback(run.feedback())

    def _end(self, run: Run, bridge: DrivenRobot | None) -> None:
        try:
            if bridge is not None and run.outcome != PREEMPTED:
                hold(bridge)
        except RuntimeError as error:
            logger.error("the robot does not hold after a goal: %s", error)
            run.message += f"; {error}"
        finally:
            with self._lock:
                if self._run is run:
                    self._run = None
            run.still.set()
            name, status = OUTCOMES[run.outcome]
            self.count[name] += 1
            logger.info("a goal ended: %s: %s", name, run.message)
            run.goal.end(status, run.result(_failed(bridge)))


def _seconds(duration: Any) -> float:
    return int(duration.sec) + 1e-9 * int(duration.nanosec)


def _failed(bridge: DrivenRobot | None) -> int:
    return 0 if bridge is None else bridge.loop.source.failures
