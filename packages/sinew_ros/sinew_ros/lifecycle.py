"""A managed node of ROS 2. A manager changes the state of the node by calling services, over any transport with
services.

Source: "Managed nodes" (design.ros2.org). The numbers come from lifecycle_msgs. The transitions, also the
transitions that a node makes by itself, come from rcl_lifecycle's default state machine.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from sinew_client import ClientError

from sinew_ros.bond import Bond
from sinew_ros.bridge import NODE, Bridge
from sinew_ros.driven import hold
from sinew_ros.goals import Goals

logger = logging.getLogger(__name__)

UNCONFIGURED, INACTIVE, ACTIVE, FINALIZED, SHUTTING_DOWN, ERROR = 1, 2, 3, 4, 12, 15
STATES = {
    0: "unknown",
    UNCONFIGURED: "unconfigured",
    INACTIVE: "inactive",
    ACTIVE: "active",
    FINALIZED: "finalized",
    10: "configuring",
    11: "cleaningup",
    SHUTTING_DOWN: "shuttingdown",
    13: "activating",
    14: "deactivating",
    ERROR: "errorprocessing",
}
# Transitions that a manager can request. Key: number. Value: (label, start state, state during the transition).
ASKED = {
    1: ("configure", UNCONFIGURED, 10),
    2: ("cleanup", INACTIVE, 11),
    3: ("activate", INACTIVE, 13),
    4: ("deactivate", ACTIVE, 14),
    5: ("shutdown", UNCONFIGURED, SHUTTING_DOWN),
    6: ("shutdown", INACTIVE, SHUTTING_DOWN),
    7: ("shutdown", ACTIVE, SHUTTING_DOWN),
}
# Ends of transitions. Key: state during the transition. Value: (number of the transition that reports success, state
# after success, state after failure).
FOLLOWS = {
    10: (10, INACTIVE, UNCONFIGURED),
    11: (20, UNCONFIGURED, INACTIVE),
    13: (30, ACTIVE, INACTIVE),
    14: (40, INACTIVE, ACTIVE),
    SHUTTING_DOWN: (50, FINALIZED, FINALIZED),
    ERROR: (60, UNCONFIGURED, FINALIZED),
}
TRANSITIONS = dict(ASKED)
for _state, (_number, _good, _bad) in FOLLOWS.items():
    TRANSITIONS[_number] = ("transition_success", _state, _good)
    TRANSITIONS[_number + 1] = ("transition_failure", _state, _bad)
    TRANSITIONS[_number + 2] = ("transition_error", _state, FINALIZED if _state == ERROR else ERROR)
SERVICE, EVENT = "lifecycle_msgs/srv/", "lifecycle_msgs/msg/TransitionEvent"


class Kept:
    """A transport whose subscriptions and publishers continue when a bridge ends, so that the next bridge can use
    the same ones.
    """

    def __init__(self, transport: Any):
        self._transport = transport
        self._takes: dict[str, list[Callable[[Any], None]]] = {}
        self._asked: dict[str, tuple[str, str]] = {}
        self._publishers: dict[tuple[str, str], Callable[[Mapping[str, Any]], None]] = {}
        self.now = transport.now

    def subscribe(self, topic: str, kind: str, quality: str, callback: Callable[[Any], None]) -> None:
        if self._asked.setdefault(topic, (kind, quality)) != (kind, quality):
            raise ClientError(
                f"{topic}: expected {self._asked[topic][0]} as before, got {kind}; restart the node"
            )
        fresh = topic not in self._takes
        self._takes.setdefault(topic, []).append(callback)
        if fresh:
            self._transport.subscribe(topic, kind, quality, lambda message: self._take(topic, message))

    def publisher(self, topic: str, kind: str) -> Callable[[Mapping[str, Any]], None]:
        if (topic, kind) not in self._publishers:
            self._publishers[topic, kind] = self._transport.publisher(topic, kind)
        return self._publishers[topic, kind]

    def forget(self) -> None:
        """Drop all messages that arrive from now on, until the next bridge subscribes."""
        self._takes = {topic: [] for topic in self._takes}

    def _take(self, topic: str, message: Any) -> None:
        for callback in self._takes[topic]:
            callback(message)


class Managed:
    """Controls a bridge through the services of a managed ROS 2 node.

    ``configure`` creates the bridge and subscribes to its topics. ``activate`` lets the bridge drive the robot.
    ``deactivate`` holds the robot. ``cleanup`` removes the bridge. ``shutdown`` ends the node. If the manager
    uses bonds, an active node deactivates itself when the bond breaks, and the robot holds.

    Args:
        serving: The transport of the services.
        topics: The transport of the bridge.
        make: Creates a paused bridge. If it raises a ClientError, the node stays unconfigured.
        goals: Goals of an action, which drive the robot while the node is active, and are rejected otherwise;
            None without an action.
    """

    def __init__(self, serving: Any, topics: Any, make: Callable[[Any], Bridge], goals: Goals | None = None):
        self._kept, self._make, self._goals = Kept(topics), make, goals
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._ended = threading.Event()
        self.state = UNCONFIGURED
        self.bridge: Bridge | None = None
        self._tell = serving.publisher("~/transition_event", EVENT)
        self._bond: Bond | None = None
        try:
            self._bond = Bond(serving, NODE, self._alone)
        except ImportError as error:
            logger.info(
                "no bond with a lifecycle manager, because the ROS package bond is missing: %s", error
            )
        for name, kind, answer in (
            ("change_state", "ChangeState", lambda request: {"success": self._change(request.transition)}),
            ("get_state", "GetState", lambda _: {"current_state": _state(self.state)}),
            ("get_available_states", "GetAvailableStates", lambda _: {"available_states": [*map(_state, STATES)]}),
            ("get_available_transitions", "GetAvailableTransitions", lambda _: _described(self.available())),
            ("get_transition_graph", "GetAvailableTransitions", lambda _: _described(TRANSITIONS)),
        ):  # fmt: skip
            serving.serve(f"~/{name}", SERVICE + kind, answer)

    def _alone(self, why: str) -> None:
        """Deactivate the node because its manager has disconnected. The manager may return and activate the node again.

        Args:
            why: The reason, for the log.
        """
        if self.state == ACTIVE:
            logger.error("the bond is broken, because the manager %s; the node deactivates itself", why)
            self._change(SimpleNamespace(id=4, label=""))

    def available(self) -> list[int]:
        """Return the numbers of the transitions that are possible in the present state."""
        return [number for number, (_, start, _) in ASKED.items() if start == self.state]

    def wait(self) -> None:
        """Wait for ``shutdown`` or :meth:`stop`, and end the node (state "finalized"). If an error has ended the
        control loop, this error is raised.
        """
        self._ended.wait()
        with self._lock:
            if self.state != FINALIZED:
                self._go(next(each for each in self.available() if ASKED[each][0] == "shutdown"))
                self._leave()
                self._go(50 if self._error is None else 51)
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """End the node, for example because of a signal."""
        self._ended.set()

    def _change(self, transition: Any) -> bool:
        """Make a transition that the manager requests. The request names the transition by a label or, without a label,
        by a number. Return True if the transition succeeded.
        """
        with self._lock:
            possible = self.available()
            matches = [
                each
                for each in possible
                if (ASKED[each][0] == transition.label if transition.label else each == transition.id)
            ]
            if not matches or self._ended.is_set():
                names = ", ".join(f"{ASKED[each][0]} ({each})" for each in possible) or "none"
                state, got = STATES[self.state], transition.label or transition.id
                logger.warning("transition: in the state %s expected one of %s, got %s", state, names, got)
                return False
            self._go(matches[0])
            done = FOLLOWS[self.state][0]
            try:
                getattr(self, f"_{ASKED[matches[0]][0]}")()
            except ClientError as error:
                logger.warning("%s failed: %s", ASKED[matches[0]][0], error)
                self._go(done + 1)
            except Exception as error:  # the manager reads every error from the node's state
                logger.exception("%s", ASKED[matches[0]][0])
                # Keep an error of the loop, because it may be the cause of this error.
                self._error = self._error or error
                self._go(done + 2)
                # Transition 61 reports that error processing has failed, because this node does not repair errors.
                self._go(61)
                self._leave()
                self._ended.set()
            else:
                self._go(done)
                if self.state == FINALIZED:
                    self._ended.set()
                return True
            return False

    def _go(self, number: int) -> None:
        label, _, self.state = TRANSITIONS[number]
        logger.info("%s: %s", label, STATES[self.state])
        try:
            self._tell({"timestamp": time.time_ns(), **_description(number)})
        except Exception:
            logger.exception("a transition could not be published")

    def _configure(self) -> None:
        try:
            self.bridge = self._make(self._kept)
        except BaseException:
            self._kept.forget()
            raise
        self._thread = threading.Thread(target=self._run, args=(self.bridge,))
        self._thread.start()

    def _run(self, bridge: Bridge) -> None:
        try:
            bridge.run()
        except BaseException as error:  # noqa: BLE001 - the thread that waits for the node raises it
            self._error = error
            self._ended.set()

    def _activate(self) -> None:
        assert self.bridge is not None
        if self._goals is None:
            self.bridge.enable(True)
        else:
            self._goals.open(self.bridge)
        if self._bond is not None:
            self._bond.begin()

    def _deactivate(self) -> None:
        assert self.bridge is not None
        self._shut()
        hold(self.bridge, lambda: self._error is not None)

    def _shut(self) -> None:
        if self._bond is not None:
            self._bond.end()
        if self._goals is not None:
            self._goals.shut(f"the node is {STATES[self.state]}")

    def _leave(self) -> None:
        """End the control loop of the bridge. The report of the loop stays available."""
        self._shut()
        if self.bridge is not None and self._thread is not None:
            self.bridge.stop()
            self._thread.join()
            self._thread = None
        self._kept.forget()

    _cleanup = _shutdown = _leave


def _state(number: int) -> dict[str, Any]:
    return {"id": number, "label": STATES[number]}


def _description(number: int) -> dict[str, Any]:
    label, start, goal = TRANSITIONS[number]
    transition = {"id": number, "label": label}
    return {"transition": transition, "start_state": _state(start), "goal_state": _state(goal)}


def _described(numbers: Any) -> dict[str, Any]:
    return {"available_transitions": [_description(number) for number in numbers]}
