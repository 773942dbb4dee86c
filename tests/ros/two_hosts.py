"""Measure ROS 2 topics over DDS between two hosts with loss and delay: lost messages, their order and their ages.

    python -m tests.ros.two_hosts --loss 0.1 --delay 0.05 --messages 200
    python -m tests.ros.two_hosts --loss 0.1 --delay 0.02 --drive --cameras jpeg --quick

The host of the robot sends joint states like a sensor (best effort) and trajectories like commands (reliable), 50 of
each per second. The other host counts them. Each host is a network namespace (``benchmarks.network``) with a process
and a CycloneDDS participant. Discovery uses the same network. The last line of the output is JSON.

With ``--drive``, the host of the robot runs the simulated arm of ``tests.ros.twin`` with its cameras. The other host
runs `sinew serve` with the trained blocks policy and `sinew-ros run --transport dds`. The output then has the
messages of each topic, the ages of the trajectories, the control period, and the blocks in their bins.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.network import Network, Way, network
from tests.ros.twin import NAMES, STEP_S

JOINTS, TRAJECTORY = "sensor_msgs/msg/JointState", "trajectory_msgs/msg/JointTrajectory"
PERIOD, QUIET_S, START_S = 0.02, 3.0, 60.0
ROOT = Path(__file__).resolve().parents[2]
BLOCKS = ROOT / "sinew" / "assets" / "blocks.gguf"
QUICK = ROOT / "packages" / "sinew_ros" / "config" / "cyclonedds.xml"
LINE = (
    '<CycloneDDS><Domain><General><Interfaces><NetworkInterface address="{own}" multicast="false"/></Interfaces>'
    "<AllowMulticast>false</AllowMulticast></General><Discovery><ParticipantIndex>auto</ParticipantIndex>"
    '<Peers><Peer address="{other}"/></Peers></Discovery></Domain></CycloneDDS>'
)


def send(count: int) -> None:
    """Send messages after the other host has enabled the robot, as a driver waits for its controller."""
    from sinew_ros.dds import Dds

    transport, begun = Dds(), threading.Event()
    transport.subscribe("/sinew/enable", "std_msgs/msg/Bool", "command", lambda _: begun.set())
    state, command = transport.publisher("/joint_states", JOINTS), transport.publisher("/arm", TRAJECTORY)
    assert begun.wait(START_S), "the robot was not enabled"
    for index in range(count):
        moment = time.time()
        stamp = {"sec": int(moment), "nanosec": int(moment % 1 * 1e9)}
        header = {"stamp": stamp, "frame_id": str(index)}
        state({"header": header, "name": ["a"], "position": [0.0], "velocity": [], "effort": []})
        command({"header": header, "joint_names": ["a"], "points": []})
        time.sleep(PERIOD)
    time.sleep(QUIET_S)  # DDS requests lost messages again
    transport.close()


def receive() -> None:
    """Enable the robot until the first message arrives. Print the messages after three seconds without a message."""
    from sinew_ros.dds import Dds

    transport = Dds()
    found: dict[str, list[tuple[int, float]]] = {"/joint_states": [], "/arm": []}
    last = [0.0]

    def take(topic: str, message: Any) -> None:
        stamp = message.header.stamp
        found[topic].append((int(message.header.frame_id), time.time() - stamp.sec - 1e-9 * stamp.nanosec))
        last[0] = time.monotonic()

    transport.subscribe("/joint_states", JOINTS, "sensor", lambda message: take("/joint_states", message))
    transport.subscribe("/arm", TRAJECTORY, "command", lambda message: take("/arm", message))
    enable = transport.publisher("/sinew/enable", "std_msgs/msg/Bool")
    end = time.monotonic() + START_S
    while not last[0] and time.monotonic() < end:
        enable({"data": True})
        time.sleep(0.2)
    while time.monotonic() - last[0] < QUIET_S:
        time.sleep(0.1)
    transport.close()
    print(json.dumps(found), flush=True)


def side(between: Network, name: str, *command: object, quick: bool = False) -> subprocess.Popen[str]:
    own, other = between.SERVER, between.ROBOT
    if name == between.robot:
        own, other = other, own
    settings = f"file://{QUICK}," if quick else ""
    environment = os.environ | {
        "CYCLONEDDS_URI": settings + LINE.format(own=own, other=other),
        "PYTHONPATH": os.pathsep.join(["packages/sinew_ros", *sys.path]),
    }
    line = between.inside(name, sys.executable, "-m", *command)
    return subprocess.Popen(line, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def measure(way: Way, count: int, seed: int = 0) -> dict[str, Any]:
    """Return for each topic the number of messages that arrived, whether they were in order, and their ages in ms."""
    with network(way, way, seed) as between:
        robot = side(between, between.robot, "tests.ros.two_hosts", "--send", count)
        other = side(between, between.server, "tests.ros.two_hosts", "--receive")
        try:
            text, errors = other.communicate(timeout=START_S + 10 * count * PERIOD + 2 * QUIET_S)
        finally:
            robot.kill()
            other.kill()
        assert other.returncode == 0, errors + robot.communicate()[1]
        lost = between.carried[2]
    found: dict[str, Any] = {"packets_lost": lost}
    for topic, came in json.loads(text.splitlines()[-1]).items():
        numbers, ages = [number for number, _ in came], sorted(1e3 * age for _, age in came)
        found[topic] = {
            "sent": count,
            "came": len(numbers),
            "in_order": numbers == sorted(set(numbers)),
            "age_ms": {"p50": round(ages[len(ages) // 2], 1), "max": round(ages[-1], 1)} if ages else {},
        }
    return found


def spread(ages: Sequence[float]) -> dict[str, float]:
    """Return p50, p95 and max of ages in milliseconds."""
    found = sorted(ages)
    if not found:
        return {}
    return {
        "p50": round(found[len(found) // 2], 1),
        "p95": round(found[int(0.95 * (len(found) - 1))], 1),
        "max": round(found[-1], 1),
    }


def driven(
    way: Way, folder: Path, cameras: str = "raw",
    steps: int = 400, quick: bool = False, seed: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """Return how a policy drove the simulated arm over the network for ``steps`` control steps.

    Args:
        quick: Use config/cyclonedds.xml on both hosts.
    """
    kind = "sensor_msgs/msg/Image" if cameras == "raw" else "sensor_msgs/msg/CompressedImage"
    contract = {
        "server": "tcp://127.0.0.1:5555",
        "prompt": "put the red block into the left bin",
        "hz": 1 / STEP_S,
        "start": True,
        "control": {
            "handover": "freeze",
            "replan": "8",
            "motion": {
                "kind": "offsets",
                "action": [0, 1, 2],
                "state": [0, 1, 2],
                "scale": 0.02,
                "low": -1,
                "high": 1,
            },
        },
        "cameras": {each: {"topic": f"/{each}", "type": kind, "max_age": 1.0} for each in ("front", "wrist")},
        "state": {"topic": "/joint_states", "joints": NAMES, "max_age": 1.0},
        "action": {"topic": "/arm", "type": TRAJECTORY, "joints": NAMES},
    }
    (folder / "robot.yaml").write_text(json.dumps(contract))
    with network(way, way, seed) as between, contextlib.ExitStack() as running:

        def start(name: str, *command: object) -> subprocess.Popen[str]:
            made = side(between, name, *command, quick=quick)
            running.callback(made.kill)
            return made

        server = start(
            between.server, "sinew", "serve", BLOCKS, "--wire", "native", "--threads", 1, "--engine", "plan"
        )
        assert server.stdout is not None
        for line in server.stdout:
            if line.startswith("ready"):
                break
        bag = folder / "bag"
        node = start(
            between.server, "sinew_ros", "run", folder / "robot.yaml", "--transport", "dds", "--record", bag
        )
        twin = ("tests.ros.twin", "--messages", 3 * steps, "--steps", 0, "--cameras", cameras, "--arrivals")
        robot = start(between.robot, *twin)
        text, errors = robot.communicate(timeout=START_S + 4 * steps * STEP_S)
        assert robot.returncode == 0, errors
        node.terminate()
        said, errors = node.communicate(timeout=START_S)
        assert node.returncode == 0, errors
        lost = between.carried[2]
    outcome, report = json.loads(text.splitlines()[-1]), json.loads(said.splitlines()[-1])
    came = outcome.pop("arrivals")
    published = trajectories(bag)
    ages, at = [], 0
    for moment, points in came:
        while at < len(published) and published[at][1] != points:
            at += 1
        assert at < len(published), "a trajectory arrived that was not sent, or in the wrong order"
        ages.append(1e3 * (moment - published[at][0]))
        at += 1
    control = report["control"]
    return {
        "packets_lost": lost,
        "robot": outcome,
        "topics": {
            name: {
                "sent": outcome["sent"] // 3,
                "came": topic["received"],
                "dropped": sum(topic["dropped"].values()),
                "age_ms": {each: topic["age_ms"].get(each) for each in ("p50", "p95", "max")},
            }
            for name, topic in report["topics"].items()
        },
        "trajectories": {
            "sent": len(published),
            "came": len(came),
            "late": sum(age > 1e3 * STEP_S for age in ages),
            "age_ms": spread(ages),
        },
        "control": {
            name: control[name]
            for name in (
                "rate_hz",
                "steps",
                "executed",
                "late",
                "skipped",
                "jitter_ms",
                "held",
                "age_ms",
                "failed_requests",
            )
        },
    }


def trajectories(bag: Path) -> list[tuple[float, list[list[float]]]]:
    """Return the time and the points of each trajectory in a bag."""
    from rosbags.rosbag2 import Reader
    from sinew_ros.bag import types

    store, found = types(), []
    with Reader(bag) as reader:
        arm = [each for each in reader.connections if each.topic == "/arm"]
        for connection, stamp, data in reader.messages(arm):
            points = store.deserialize_cdr(data, connection.msgtype).points
            found.append((1e-9 * stamp, [each.positions.tolist() for each in points]))
    return found


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--loss", type=float, default=0.1)
    parser.add_argument("--delay", type=float, default=0.05, help="delay of each direction in seconds")
    parser.add_argument("--messages", type=int, default=200)
    parser.add_argument("--send", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--receive", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--drive", action="store_true", help="let a policy drive an arm over the network")
    parser.add_argument(
        "--cameras", choices=("raw", "jpeg", "large"), default="raw", help="large: JPEG of 448 x 448"
    )
    parser.add_argument("--quick", action="store_true", help="use config/cyclonedds.xml on both hosts")
    parser.add_argument(
        "--steps", type=int, default=400, help="number of control steps of the robot, at 20 Hz"
    )
    options = parser.parse_args(given)
    if options.send:
        send(options.send)
    elif options.receive:
        receive()
    elif options.drive:
        way = Way(delay=options.delay, loss=options.loss)
        with tempfile.TemporaryDirectory() as folder:
            found = driven(way, Path(folder), options.cameras, options.steps, options.quick)
        print(json.dumps(found))
    else:
        print(json.dumps(measure(Way(delay=options.delay, loss=options.loss), options.messages)))


if __name__ == "__main__":
    main()
