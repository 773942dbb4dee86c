"""An action server and an action client over services and topics, for transports without actions, such as plain
DDS.

A ROS 2 action consists of three services and two topics below ``NAME/_action/`` (ROS 2 design, "Actions"). The
answers and the states of a goal are the same as in rcl_action's server. tests/ros compares both servers.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from sinew_client import ClientError

from sinew_ros.bridge import COMMAND, LATCHED
from sinew_ros.goals import ACCEPTED, CANCELING, EXECUTING, UNKNOWN
from sinew_ros.messages import time_of

if TYPE_CHECKING:
    from sinew_ros.goals import Goals

KEPT_S = 10  # seconds for which the result of a finished goal stays available, as in rcl_action
# Return codes of action_msgs/srv/CancelGoal.
NONE, REJECTED, UNKNOWN_GOAL, TERMINATED = range(4)
CANCEL_GOAL = "action_msgs/srv/CancelGoal"
Reply = Callable[[Mapping[str, Any]], None]


class _Held:
    """Stores an accepted goal, its status, and the callers that wait for its result."""

    def __init__(self, server: ActionServer, message: Any, stamp: float):
        self.goal, self.id, self.stamp = message.goal, bytes(message.goal_id.uuid), time_of(stamp)
        self.status, self.result = ACCEPTED, None
        self.over = 0.0  # time.monotonic() at the end of the goal
        self.waiting: list[Reply] = []
        self._server = server

    @property
    def info(self) -> dict[str, Any]:
        return {"goal_id": {"uuid": list(self.id)}, "stamp": self.stamp}

    def feedback(self, fields: Mapping[str, Any]) -> None:
        self._server.feedback({"goal_id": {"uuid": list(self.id)}, "feedback": dict(fields)})

    def end(self, status: int, fields: Mapping[str, Any]) -> None:
        self._server.end(self, status, dict(fields))


class ActionServer:
    """The server of one ROS action. The server handles the messages, and an actor decides which goals run.

    Args:
        transport: Transport with the methods ``take``, ``publisher`` and ``now``.
        name: Name of the action, such as ``/sinew/run_policy``.
        kind: Type of the action, such as ``sinew_msgs/action/RunPolicy``.
        actor: Object that accepts, runs and cancels the goals.
    """

    def __init__(self, transport: Any, name: str, kind: str, actor: Goals):
        self._actor, self._now = actor, transport.now
        self._lock = threading.RLock()
        self._goals: dict[bytes, _Held] = {}  # goal id -> goal, oldest first
        below = f"{name}/_action/"
        self.feedback = transport.publisher(f"{below}feedback", f"{kind}_FeedbackMessage")
        self._publish = transport.publisher(f"{below}status", "action_msgs/msg/GoalStatusArray", LATCHED)
        for service, what, take in (
            ("cancel_goal", CANCEL_GOAL, self._cancel),
            ("get_result", f"{kind}_GetResult", self._result),
            ("send_goal", f"{kind}_SendGoal", self._send),
        ):
            transport.take(below + service, what, take)

    def end(self, goal: _Held, status: int, result: dict[str, Any]) -> None:
        """Set the terminal status of a goal, and send its result to all waiting callers.

        Args:
            goal: The goal.
            status: The terminal status (action_msgs/msg/GoalStatus).
            result: Fields of the result message.
        """
        with self._lock:
            goal.status, goal.over = status, time.monotonic()
            goal.result = {"status": status, "result": result}
            waiting, goal.waiting = goal.waiting, []
            self._tell()
        for reply in waiting:
            reply(goal.result)

    def _send(self, call: Any, reply: Reply) -> None:
        with self._lock:
            self._expire()
            goal = _Held(self, call, self._now())
            accepted = goal.id not in self._goals and self._actor.wants(call.goal)
            if accepted:
                self._goals[goal.id] = goal
        reply({"accepted": accepted, "stamp": goal.stamp if accepted else time_of(0.0)})
        if not accepted:
            return
        with self._lock:
            self._tell()
            # A call to cancel may have arrived since the reply. Such a goal stays CANCELING.
            if goal.status == ACCEPTED:
                goal.status = EXECUTING
                self._tell()
        self._actor.begin(goal)

    def _cancel(self, call: Any, reply: Reply) -> None:
        goal_id, stamp = bytes(call.goal_info.goal_id.uuid), call.goal_info.stamp
        before = (int(stamp.sec), int(stamp.nanosec))
        with self._lock:
            self._expire()
            # A call with an id and without a stamp cancels one goal.
            if any(goal_id) and before == (0, 0):
                matches = [self._goals[goal_id]] if goal_id in self._goals else []
                code = NONE if matches else UNKNOWN_GOAL
            else:
                # A call without an id cancels all goals. A call with a stamp cancels all goals up to that time and
                # the goal with the id.
                matches = [
                    each for each in self._goals.values()
                    if each.id == goal_id or before == (0, 0) or tuple(each.stamp.values()) <= before
                ]  # fmt: skip
                code = NONE
            active = [each for each in matches if each.status in (ACCEPTED, EXECUTING)]
            if any(goal_id) and before == (0, 0) and matches and not active:
                code = TERMINATED
            cancelling = [each for each in active if self._actor.cancels(each.id)]
            for each in cancelling:
                each.status = CANCELING
                self._tell()
        reply({"return_code": code, "goals_canceling": [each.info for each in cancelling]})

    def _result(self, call: Any, reply: Reply) -> None:
        with self._lock:
            self._expire()
            goal = self._goals.get(bytes(call.goal_id.uuid))
            if goal is not None and goal.result is None:
                goal.waiting.append(reply)
                return
        reply({"status": UNKNOWN} if goal is None else goal.result)

    def _expire(self) -> None:
        now = time.monotonic()
        for goal in list(self._goals.values()):
            if goal.result is not None and now - goal.over > KEPT_S:
                del self._goals[goal.id]

    def _tell(self) -> None:
        self._publish(
            {
                "status_list": [
                    {"goal_info": goal.info, "status": goal.status} for goal in self._goals.values()
                ]
            }
        )


def ask(
    transport: Any,
    name: str,
    kind: str,
    goal: Mapping[str, Any],
    tell: Callable[[Any], None],
    cancel: threading.Event,
    seconds: float = 10.0,
) -> tuple[int, Any]:
    """Send a goal to an action server, and wait for the result.

    Args:
        transport: Transport with the methods ``subscribe`` and ``call``.
        name: Name of the action.
        kind: Type of the action.
        goal: Fields of the goal.
        tell: Called with each feedback message.
        cancel: Event that cancels the goal when it is set.
        seconds: Seconds to wait for the server.

    Returns:
        The terminal status (action_msgs/msg/GoalStatus) and the result.

    Raises:
        ClientError: No server answers, the server rejects the goal, or the server disconnects.
    """
    below, number = f"{name}/_action/", {"uuid": list(os.urandom(16))}
    ended: list[Any] = []

    def feedback(message: Any) -> None:
        if list(message.goal_id.uuid) == number["uuid"]:
            tell(message.feedback)

    def wait() -> None:
        ended.append(
            transport.call(f"{below}get_result", f"{kind}_GetResult", {"goal_id": number}, float("inf"))
        )

    transport.subscribe(f"{below}feedback", f"{kind}_FeedbackMessage", COMMAND, feedback)
    fields = {"goal_id": number, "goal": dict(goal)}
    answer = transport.call(f"{below}send_goal", f"{kind}_SendGoal", fields, seconds)
    if answer is None:
        raise ClientError(
            f"{name}: no action server answered in {seconds:g} s; check that the node runs with --action"
        )
    if not answer.accepted:
        raise ClientError(f"{name}: the goal was rejected; read the reason in the node's log")
    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(0.05)
        if cancel.is_set():
            cancel.clear()
            transport.call(f"{below}cancel_goal", CANCEL_GOAL, {"goal_info": {"goal_id": number}}, seconds)
    if ended[0] is None:
        raise ClientError(f"{name}: the action server disconnected during the goal; read the node's log")
    return int(ended[0].status), ended[0].result
