"""Simulated arms with ROS 2 topics, over DDS or in a node of rclpy. Their joints follow the commands of controllers.

A joint moves to its target with limited speed, as with ros2_control and Interbotix. Commands are trajectories,
commands for a group or a single motor, and goals of a hand, which are accepted or rejected.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from sinew_ros.contract import ARRAY, GOALS, GROUP, JOINT_STATE, SINGLE, TRAJECTORY, Contract, Output
from sinew_ros.messages import header

PERIOD = 0.01
PIXELS = np.full((48, 64, 3), 70, np.uint8)


class Arms:
    """Arms with the topics of a contract.

    Args:
        start: Start position of each joint of a state, in the order of the contract.
        moves: Topic of commands -> topic of the state whose first joints they move.
        hands: Topic of a command -> the position of the hand's joint, the last one of that state, for this command.
        speed: Speed of every joint per second.
    """

    def __init__(
        self,
        contract: Contract,
        transport: Any,
        start: Sequence[float],
        moves: Mapping[str, str],
        hands: Mapping[str, Callable[[float], float]],
        speed: float = 20.0,
    ):
        self._transport = transport
        self._states = {part.topic: part.joints for part in contract.states}
        keys = [(topic, name) for topic, names in self._states.items() for name in names]
        self.at = dict(zip(keys, start, strict=True))
        self._targets, self._speed, self.accepts = dict(self.at), speed, True
        self._way: Any = None  # the newest trajectory: its joints, its arrival time, its times and positions
        self.commands: dict[str, list[Any]] = {output.topic: [] for output in contract.outputs}
        self._publish = {topic: self._transport.publisher(topic, JOINT_STATE) for topic in self._states}
        self._cameras = [self._transport.publisher(camera.topic, camera.type) for camera in contract.cameras]
        self.enable = self._transport.publisher("/sinew/enable", "std_msgs/msg/Bool")
        for output in contract.outputs:
            take = partial(self._take, output, moves[output.topic], hands.get(output.topic))
            if output.type in GOALS:
                self._serve(output.topic, output.type, take)
            else:
                self._transport.subscribe(output.topic, output.type, "command", take)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._ended.set()
        self._thread.join()
        self._transport.close()

    def _take(self, output: Output, whose: str, hand: Callable[[float], float] | None, message: Any) -> None:
        self.commands[output.topic].append(message)
        names = self._states[whose]
        keys = [(whose, name) for name in (output.joints if set(output.joints) <= set(names) else names)]
        if output.type == TRAJECTORY:
            assert tuple(message.joint_names) == output.joints
            times = [
                0.0,
                *(each.time_from_start.sec + 1e-9 * each.time_from_start.nanosec for each in message.points),
            ]
            places = [[self.at[key] for key in keys], *(each.positions for each in message.points)]
            self._way = (keys, time.monotonic(), np.array(times), np.array(places))
            return
        elif output.type == GROUP:
            assert message.name == output.group
            numbers = message.cmd
        elif output.type == SINGLE:
            assert message.name == output.joints[0]
            numbers = [message.cmd]
        elif output.type == ARRAY:
            numbers = message.data
        else:
            goal = message.goal
            numbers = [goal.width if GOALS[output.type] == "speed" else goal.command.position]
        assert len(numbers) == len(output.joints)
        if hand is not None:
            self._targets[whose, names[-1]] = hand(numbers[0])
        else:
            self._targets.update({key: float(x) for key, x in zip(keys, numbers, strict=False)})

    def _serve(self, name: str, kind: str, take: Callable[[Any], None]) -> None:
        """Serve an action, but only the part that receives goals."""
        from cyclonedds.pub import DataWriter
        from cyclonedds.sub import DataReader
        from sinew_ros import dds_types
        from sinew_ros.dds import _qos

        request, response, _ = dds_types.ACTIONS[kind]
        own, topic = self._transport._participant, f"{name}/_action/send_goal"
        calls = DataReader(own, self._transport._topic(topic + "Request", request, "rq"), qos=_qos("command"))
        replies = DataWriter(
            own, self._transport._topic(topic + "Reply", response, "rr"), qos=_qos("command")
        )

        def goal(call: Any) -> None:
            assert any(call.goal_id.uuid), "a goal needs an id"
            if self.accepts:
                take(call)
            replies.write(response(call.guid, call.seq, self.accepts))

        self._transport._begin(calls, name, goal)

    def _run(self) -> None:
        while not self._ended.wait(PERIOD):
            now = header(time.time())
            if self._way is not None:
                keys, began, times, places = self._way
                passed = time.monotonic() - began
                self._targets.update(
                    {key: np.interp(passed, times, places[:, at]) for at, key in enumerate(keys)}
                )
            for key, target in list(self._targets.items()):
                most = self._speed * PERIOD
                self.at[key] += float(np.clip(target - self.at[key], -most, most))
            for topic, names in self._states.items():
                position = [self.at[topic, name] for name in names]
                self._publish[topic](
                    {"header": now, "name": list(names), "position": position, "velocity": [], "effort": []}
                )
            for publish in self._cameras:
                publish(
                    {"header": now, "height": 48, "width": 64, "encoding": "rgb8", "is_bigendian": 0, "step": 192,
                     "data": PIXELS.tobytes()}
                )  # fmt: skip


def main() -> None:
    """Run the arms of a contract as a node of rclpy, until SIGTERM. Every command is the position of a joint."""
    from sinew_ros.contract import read
    from sinew_ros.node import Rclpy

    contract = read(Path(sys.argv[1]))
    (state,) = contract.states
    ended = threading.Event()
    arms = Arms(
        contract, Rclpy("arms"), [0.5] * len(state.joints), {each.topic: state.topic for each in contract.outputs}, {}
    )  # fmt: skip
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    while not ended.wait(0.1):
        if not any(arms.commands.values()):
            arms.enable({"data": True})
    arms.close()
    commands = {topic: len(found) for topic, found in arms.commands.items()}
    print(json.dumps({"commands": commands, "at": list(arms.at.values())}))


if __name__ == "__main__":
    main()
