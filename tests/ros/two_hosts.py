"""ROS 2's topics over DDS between two hosts, with loss and delay between them: what arrives, in which order, how late.

    python -m tests.ros.two_hosts --loss 0.1 --delay 0.05 --messages 200

The robot's host sends joint states as sensors do (best effort) and trajectories as commands (reliable), 50 a second of
each; the other counts them. Two network namespaces (``benchmarks.network``), a process and a CycloneDDS participant in
each; discovery as well goes over the line. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.network import Network, Way, network

JOINTS, TRAJECTORY = "sensor_msgs/msg/JointState", "trajectory_msgs/msg/JointTrajectory"
PERIOD, QUIET_S, START_S = 0.02, 3.0, 60.0
LINE = (
    '<CycloneDDS><Domain><General><Interfaces><NetworkInterface address="{own}" multicast="false"/></Interfaces>'
    "<AllowMulticast>false</AllowMulticast></General><Discovery><ParticipantIndex>auto</ParticipantIndex>"
    '<Peers><Peer address="{other}"/></Peers></Discovery></Domain></CycloneDDS>'
)


def send(count: int) -> None:
    """Send once somebody has enabled it, as a robot's driver waits for its controller."""
    from sinew_ros.dds import Dds

    transport, begun = Dds(), threading.Event()
    transport.subscribe("/sinew/enable", "std_msgs/msg/Bool", "command", lambda _: begun.set())
    state, command = transport.publisher("/joint_states", JOINTS), transport.publisher("/arm", TRAJECTORY)
    assert begun.wait(START_S), "nobody has enabled the robot"
    for index in range(count):
        moment = time.time()
        stamp = {"sec": int(moment), "nanosec": int(moment % 1 * 1e9)}
        header = {"stamp": stamp, "frame_id": str(index)}
        state({"header": header, "name": ["a"], "position": [0.0], "velocity": [], "effort": []})
        command({"header": header, "joint_names": ["a"], "points": []})
        time.sleep(PERIOD)
    time.sleep(QUIET_S)  # what was lost is asked for again
    transport.close()


def receive() -> None:
    """Enable the robot until something comes; print what came once nothing has for three seconds."""
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


def side(between: Network, name: str, *arguments: object) -> subprocess.Popen[str]:
    own, other = between.SERVER, between.ROBOT
    if name == between.robot:
        own, other = other, own
    environment = os.environ | {
        "CYCLONEDDS_URI": LINE.format(own=own, other=other),
        "PYTHONPATH": os.pathsep.join(["packages/sinew_ros", *sys.path]),
    }
    command = between.inside(name, sys.executable, "-m", "tests.ros.two_hosts", *arguments)
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def measure(way: Way, count: int, seed: int = 0) -> dict[str, Any]:
    """Return, of each topic, how many of ``count`` messages came, whether in order, and their ages in ms."""
    with network(way, way, seed) as between:
        robot = side(between, between.robot, "--send", count)
        other = side(between, between.server, "--receive")
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


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--loss", type=float, default=0.1)
    parser.add_argument("--delay", type=float, default=0.05, help="seconds, of each direction")
    parser.add_argument("--messages", type=int, default=200)
    parser.add_argument("--send", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--receive", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(given)
    if options.send:
        send(options.send)
    elif options.receive:
        receive()
    else:
        print(json.dumps(measure(Way(delay=options.delay, loss=options.loss), options.messages)))


if __name__ == "__main__":
    main()
