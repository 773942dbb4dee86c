"""A robot of ROS 2 topics without ROS: the simulated blocks task behind DDS, in real time, in a process of its own.

It publishes two cameras and joint states at the control rate and follows the trajectories that it is sent, as a joint
trajectory controller does. ``python -m tests.ros.twin`` prints what happened as JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import gymnasium
import numpy as np
from sinew_ros.dds import Dds
from sinew_ros.messages import header

import sinew.sim  # noqa: F401 - registers the tasks

NAMES = ["x", "y", "z", "grip"]
STEP = 0.02  # metres per unit of the environment's action


class Follower:
    """The newest trajectory and when it came."""

    def __init__(self) -> None:
        self.count, self._points, self._began, self._period = 0, np.zeros((0, 4)), 0.0, 0.05

    def take(self, message: Any) -> None:
        assert message.joint_names == NAMES
        self._points = np.array([point.positions for point in message.points])
        self._began = time.monotonic()
        self.count += 1

    def stop(self) -> None:
        """Forget the trajectory: the world is another one."""
        self._points = self._points[:0]

    def target(self) -> np.ndarray | None:
        """Return where to be now, [4]; the last point when the trajectory has ended."""
        points = self._points
        if not len(points):
            return None
        index = int((time.monotonic() - self._began) / self._period)
        return points[min(index, len(points) - 1)]


GOAL = {"color": "red", "side": "left", "phrasing": 0}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=1000, help="to send, whatever happens")
    parser.add_argument(
        "--steps", type=int, default=600, help="after which it gives up before the first success"
    )
    parser.add_argument("--seed", type=int, default=5000)
    given = parser.parse_args()
    env = gymnasium.make("sinew/Blocks-v0", disable_env_checker=True).unwrapped
    seen, info = env.reset(seed=given.seed, options=dict(GOAL))
    transport, follower = Dds(), Follower()
    cameras = {name: transport.publisher(f"/{name}", "sensor_msgs/msg/Image") for name in ("front", "wrist")}
    joints = transport.publisher("/joint_states", "sensor_msgs/msg/JointState")
    transport.subscribe("/arm", "trajectory_msgs/msg/JointTrajectory", "command", follower.take)
    sent = steps = successes = 0
    due = time.monotonic()
    while sent < given.messages or (not successes and steps < given.steps):
        now = header(time.time())
        for name, publish in cameras.items():
            frame = seen["images"][name]
            height, width = frame.shape[:2]
            publish(
                {"header": now, "height": height, "width": width, "encoding": "rgb8", "is_bigendian": 0,
                 "step": 3 * width, "data": frame.tobytes()}
            )  # fmt: skip
        position = [float(x) for x in seen["state"]]
        joints({"header": now, "name": NAMES, "position": position, "velocity": [], "effort": []})
        sent += 3
        due += 0.05
        time.sleep(max(0.0, due - time.monotonic()))
        target = follower.target()
        if target is None:  # nobody commands yet: the world waits
            continue
        offset = np.clip((target[:3] - seen["state"][:3]) / STEP, -1, 1)
        seen, _, _, _, info = env.step(np.append(offset, target[3]).astype(np.float32))
        steps += 1
        if info["is_success"]:
            successes += 1
            seen, info = env.reset(seed=given.seed + successes, options=dict(GOAL))
            follower.stop()
    transport.close()
    found = {"successes": successes, "steps": steps, "sent": sent, "trajectories": follower.count}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
