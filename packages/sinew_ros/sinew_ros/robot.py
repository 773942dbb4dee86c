"""A robot with ROS topics. It has the methods that the control loop requires, and reads the newest message of each
topic.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
from sinew_client.control.report import percentiles

from sinew_ros import messages
from sinew_ros.contract import COMPRESSED, Contract
from sinew_ros.newest import Newest

Publish = Callable[[Mapping[str, Any]], None]


class TopicRobot:
    """Observes the newest message of each topic of a contract, and publishes commands.

    State and actions are the values of the joints on the topics. If the policy outputs poses, EndEffector
    converts each pose to joint values in its own step, so a trajectory has one point.

    Args:
        contract: The contract.
        publish: One function for each output of the contract.
        clock: Returns the ROS time in seconds, for the stamps of messages.
    """

    def __init__(self, contract: Contract, publish: list[Publish], clock: Callable[[], float] = time.time):
        stamped = contract.stamps == "header"
        self.contract, self._publish, self._clock = contract, publish, clock
        self.cameras = {
            camera.name: Newest(camera.name, *_reading(camera.type), camera.max_age, stamped, camera.topic)
            for camera in contract.cameras
        }
        self.states = [
            Newest(
                part.name,
                read := partial(messages.joints, names=part.joints, field=part.field),
                read,
                part.max_age,
                stamped,
                part.topic,
            )
            for part in contract.states
        ]
        self.published: Counter = Counter()  # topic -> number of published messages
        self.paused = False  # True while the loop is paused; the bridge sets it
        self.joints = [joint for output in contract.outputs for joint in output.joints]
        self._columns = _columns(contract)
        # Key: topic. Value: (newest values, values of the last goal that was sent).
        self._goals: dict[str, tuple[Any, Any]] = {}
        self._last: np.ndarray | None = None  # the last command, float32 [D]
        self._held = False

    def camera(self, name: str, message: Any) -> None:
        self.cameras[name].put(message, time.monotonic(), self._clock())

    def state(self, index: int, message: Any) -> None:
        self.states[index].put(message, time.monotonic(), self._clock())

    def observe(self) -> dict[str, Any]:
        """Return the newest frames and the state, in the policy's order and units.

        Raises:
            NoObservation: A message has not arrived yet, or is too old.
        """
        now = time.monotonic()
        images, taken = {}, []
        for name, source in self.cameras.items():
            images[name], when = source.take(now)
            taken.append(when)
        parts = []
        for part, source in zip(self.contract.states, self.states):
            values, _ = source.take(now)
            parts.append(part.scale * values + part.offset)
        return {"images": images, "state": np.concatenate(parts).astype(np.float32), "time": max(taken)}

    def act(self, row: np.ndarray) -> None:
        """Publish one command on the topics that receive one command per control step."""
        self._last, self._held = row, False
        self._send(row)
        if self.contract.kinematics is not None:
            self.follow(row[None])

    def hold(self) -> None:
        """Repeat the last position, or send zero velocity, on the topics that receive one command per control step.

        Nothing is published before the first command. During a pause one hold is published, because something
        else may move the robot afterwards.
        """
        if self._last is None or (self.paused and self._held):
            return
        self._held = True
        self._send(self._still(self._last))

    def follow(self, rows: np.ndarray) -> None:
        """Publish actions [n, D] on the topics that receive trajectories. The first action is reached after one
        period.
        """
        for output, columns, publish in zip(self.contract.outputs, self._columns, self._publish):
            if messages.is_trajectory(output):
                publish(messages.trajectory(output, rows[:, columns], self.contract.settings.period))
                self.published[output.topic] += 1

    def _still(self, row: np.ndarray) -> np.ndarray:
        motion = self.contract.settings.parse_motion()
        if motion.holds == "zero" and self.contract.kinematics is None:
            row = np.array(row)
            row[list(motion.action)] = 0.0
        return row

    def _send(self, row: np.ndarray) -> None:
        for output, columns, publish in zip(self.contract.outputs, self._columns, self._publish):
            if messages.is_trajectory(output):
                continue
            part = row[columns]
            before, sent = self._goals.get(output.topic, (None, None))
            if messages.differs(output, part, before, sent):
                publish(messages.command(output, part, self._clock()))
                self.published[output.topic] += 1
                sent = part
            self._goals[output.topic] = (part, sent)

    def report(self) -> dict[str, Any]:
        """Return for every topic the received, used, replaced and dropped messages, their ages in ms, and their
        rate in Hz.
        """
        sources = {**self.cameras, **{part.name: part for part in self.states}}
        return {
            "topics": {
                name: {
                    "received": source.received,
                    "used": source.used,
                    "replaced": source.replaced,
                    "dropped": dict(source.dropped),
                    "hz": round(source.rate(), 2),
                    "age_ms": percentiles(1e3 * age for age in list(source.ages)),
                }
                for name, source in sources.items()
            },
            "published": dict(self.published),
        }


def _reading(kind: str) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """Return two functions for the messages of a camera: one converts a message to a frame, and one checks a message on
    arrival.

    Args:
        kind: Type of the messages, such as ``sensor_msgs/msg/Image``.
    """
    if kind == COMPRESSED:
        return messages.compressed, messages.compressed
    return messages.picture, messages.check_picture


def _columns(contract: Contract) -> list[slice]:
    found, at = [], 0
    for output in contract.outputs:
        found.append(slice(at, at + len(output.joints)))
        at += len(output.joints)
    return found
