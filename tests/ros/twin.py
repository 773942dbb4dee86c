"""A robot with ROS 2 topics, without ROS: the simulated blocks task over DDS, in real time, in its own process.

It publishes two cameras and joint states at the control rate. It follows trajectories as a joint trajectory
controller does. ``python -m tests.ros.twin`` prints the results as JSON.
"""

from __future__ import annotations

import argparse
import io
import json
import time
from typing import Any

import gymnasium
import numpy as np
import sinew_eval.sim  # noqa: F401 - registers the tasks
from PIL import Image
from sinew_ros.dds import Dds
from sinew_ros.messages import header

NAMES = ["x", "y", "z", "grip"]
STEP = 0.02  # metres per unit of the environment's action
STEP_S = 0.05  # seconds of a control step
LARGE = 7  # factor by which --large enlarges the frames


class Follower:
    """The newest trajectory and the time of its arrival."""

    def __init__(self) -> None:
        self.arrivals: list[
            tuple[float, list[list[float]]]
        ] = []  # arrival time and points of each trajectory
        self._points, self._began, self._period = np.zeros((0, 4)), 0.0, STEP_S

    def take(self, message: Any) -> None:
        assert message.joint_names == NAMES
        self._points = np.array([point.positions for point in message.points])
        self._began = time.monotonic()
        self.arrivals.append((time.time(), self._points.tolist()))

    def stop(self) -> None:
        """Drop the trajectory, because a new episode has begun."""
        self._points = self._points[:0]

    def target(self) -> np.ndarray | None:
        """Return the present target position, [4]. After the end of the trajectory, this is its last point."""
        points = self._points
        if not len(points):
            return None
        index = int((time.monotonic() - self._began) / self._period)
        return points[min(index, len(points) - 1)]


def picture(frame: np.ndarray, form: str) -> dict[str, Any]:
    """Return the fields of an image message without its header. frame: uint8 [height, width, 3]."""
    height, width = frame.shape[:2]
    if form == "raw":
        shape = {"height": height, "width": width, "encoding": "rgb8", "is_bigendian": 0, "step": 3 * width}
        return {**shape, "data": frame.tobytes()}
    if form == "large":
        frame = frame.repeat(LARGE, 0).repeat(LARGE, 1)
    file = io.BytesIO()
    Image.fromarray(frame).save(file, "JPEG", quality=95)
    return {"format": "jpeg", "data": file.getvalue()}


GOAL = {"color": "red", "side": "left", "phrasing": 0}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=1000, help="number of frames to send before the end")
    parser.add_argument(
        "--steps",
        type=int,
        default=600,
        help="number of episodes without success after which the program ends",
    )
    parser.add_argument("--seed", type=int, default=5000)
    parser.add_argument(
        "--cameras", choices=("raw", "jpeg", "large"), default="raw", help="large: JPEG of 448 x 448"
    )
    parser.add_argument("--arrivals", action="store_true", help="print the arrival time of each trajectory")
    given = parser.parse_args()
    env = gymnasium.make("sinew/Blocks-v0", disable_env_checker=True).unwrapped
    seen, info = env.reset(seed=given.seed, options=dict(GOAL))
    transport, follower = Dds(), Follower()
    kind = "sensor_msgs/msg/Image" if given.cameras == "raw" else "sensor_msgs/msg/CompressedImage"
    cameras = {name: transport.publisher(f"/{name}", kind) for name in ("front", "wrist")}
    joints = transport.publisher("/joint_states", "sensor_msgs/msg/JointState")
    transport.subscribe("/arm", "trajectory_msgs/msg/JointTrajectory", "command", follower.take)
    sent = steps = successes = 0
    moved: list[float] = []  # distances between two targets of an episode, in millimetres
    before: np.ndarray | None = None
    due = time.monotonic()
    while sent < given.messages or (not successes and steps < given.steps):
        now = header(time.time())
        for name, publish in cameras.items():
            publish({"header": now, **picture(seen["images"][name], given.cameras)})
        position = [float(x) for x in seen["state"]]
        joints({"header": now, "name": NAMES, "position": position, "velocity": [], "effort": []})
        sent += 3
        due += STEP_S
        time.sleep(max(0.0, due - time.monotonic()))
        target = follower.target()
        if target is None:  # without commands, the simulation waits
            continue
        if before is not None:
            moved.append(1e3 * float(np.linalg.norm(target[:3] - before[:3])))
        before = target
        offset = np.clip((target[:3] - seen["state"][:3]) / STEP, -1, 1)
        seen, _, _, _, info = env.step(np.append(offset, target[3]).astype(np.float32))
        steps += 1
        if info["is_success"]:
            successes += 1
            seen, info = env.reset(seed=given.seed + successes, options=dict(GOAL))
            follower.stop()
            before = None
    transport.close()
    found = {"successes": successes, "steps": steps, "sent": sent, "trajectories": len(follower.arrivals)}
    found["moved_mm"] = [round(each, 1) for each in np.percentile(moved or [0.0], (50, 95, 99, 100))]
    if given.arrivals:
        found["arrivals"] = follower.arrivals
    print(json.dumps(found))


if __name__ == "__main__":
    main()
