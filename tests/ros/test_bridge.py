"""The bridge between real DDS messages and a real server: sensor messages in, trajectories and commands out."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sinew_client import ClientError
from sinew_client.control.controller import STARTING
from sinew_ros.bridge import Bridge
from sinew_ros.contract import ContractError, parse
from sinew_ros.messages import header

from tests.serve.puppet import desk, until

IMAGE, JOINTS = "sensor_msgs/msg/Image", "sensor_msgs/msg/JointState"
TRAJECTORY, ARRAY = "trajectory_msgs/msg/JointTrajectory", "std_msgs/msg/Float64MultiArray"
LOOPBACK = """<CycloneDDS><Domain><General><Interfaces><NetworkInterface name="lo" multicast="false"/></Interfaces>
<AllowMulticast>false</AllowMulticast></General><Discovery><ParticipantIndex>auto</ParticipantIndex>
<Peers><Peer address="127.0.0.1"/></Peers></Discovery></Domain></CycloneDDS>"""
ROOT = Path(__file__).resolve().parents[2]
FRAME = np.random.default_rng(0).integers(0, 256, (48, 64, 3), np.uint8)


@pytest.fixture
def domain(monkeypatch: pytest.MonkeyPatch) -> int:
    """A DDS domain of this process on the loopback interface."""
    pytest.importorskip("cyclonedds", reason="the extra `ros` is not installed")
    monkeypatch.setenv("CYCLONEDDS_URI", LOOPBACK)
    number = 100 + os.getpid() % 100
    monkeypatch.setenv("ROS_DOMAIN_ID", str(number))
    return number


def contract(server: str, **changes: Any) -> dict[str, Any]:
    """A contract for the puppet of tests/serve, whose every action is the first number of the state."""
    return {
        "server": server,
        "prompt": "go",
        "hz": 50,
        "control": {"replan": "queue:0.5", "deadline": 30.0},
        "cameras": {"front": {"topic": "/front", "type": IMAGE, "max_age": 20.0}},
        "state": {"topic": "/joint_states", "joints": ["a", "b"], "scale": 10.0, "max_age": 20.0},
        "action": [
            {"topic": "/arm", "type": TRAJECTORY, "joints": ["a"], "scale": 10.0},
            {"topic": "/gripper", "type": ARRAY, "joints": ["b"], "scale": 10.0, "offset": 10.0},
        ],
        **changes,
    }


class Robot:
    """The other side of the topics: it sends what sensors send, and keeps what controllers would get."""

    def __init__(self, domain: int):
        from sinew_ros.dds import Dds

        self.transport = Dds(domain)
        self.sent = 0
        self._front = self.transport.publisher("/front", IMAGE)
        self._joints = self.transport.publisher("/joint_states", JOINTS)
        self.enable = self.transport.publisher("/sinew/enable", "std_msgs/msg/Bool")
        self.prompt = self.transport.publisher("/sinew/prompt", "std_msgs/msg/String")
        self.arm: list[Any] = []
        self.gripper: list[Any] = []
        self.status: list[Any] = []
        for topic, kind, found in (
            ("/arm", TRAJECTORY, self.arm),
            ("/gripper", ARRAY, self.gripper),
            ("/sinew/status", "diagnostic_msgs/msg/DiagnosticArray", self.status),
        ):
            self.transport.subscribe(topic, kind, "command", found.append)

    def send(self, a: float = 0.5, **changes: Any) -> None:
        now = header(time.time())
        self._front(
            {"header": now, "height": 48, "width": 64, "encoding": "rgb8", "is_bigendian": 0, "step": 192,
             "data": FRAME.tobytes(), **changes}
        )  # fmt: skip
        self._joints({"header": now, "name": ["b", "a"], "position": [0.0, a], "velocity": [], "effort": []})
        self.sent += 1


@contextlib.contextmanager
def running(bridge: Bridge) -> Iterator[None]:
    thread = threading.Thread(target=bridge.run)
    thread.start()
    try:
        yield
    finally:
        bridge.stop()
        thread.join(30)
        assert not thread.is_alive()


@contextlib.contextmanager
def sending(robot: Robot, **changes: Any) -> Iterator[None]:
    ended = threading.Event()

    def run() -> None:
        while not ended.wait(0.005):
            robot.send(**changes)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def test_messages_in_trajectories_out(domain: int) -> None:
    from sinew_ros.dds import Dds

    with desk() as server, contextlib.ExitStack() as stack:
        robot, transport = Robot(domain), Dds(domain)
        stack.callback(robot.transport.close)
        stack.callback(transport.close)
        bridge = Bridge(parse(contract(server.native)), transport)
        stack.enter_context(running(bridge))
        front = bridge.robot.cameras["front"]
        with sending(robot):
            until(lambda: front.received > 3, "messages")
            assert not robot.arm  # it waits for somebody to enable it
            assert not robot.gripper
            until(lambda: robot.enable({"data": True}) or robot.arm, "a trajectory")
            until(lambda: robot.gripper, "a command")
            until(
                lambda: robot.prompt({"data": "higher"}) or "higher" in server.puppet.computed, "the prompt"
            )
        with sending(robot, encoding="16UC1"):
            until(lambda: front.dropped, "a message that is dropped")
        robot.enable({"data": False})
        until(lambda: bridge.loop.controller.paused, "a pause")
        until(lambda: robot.status, "a status")
        # The pause ends the trajectory where it was.
        until(lambda: len(robot.arm[-1].points) == 1, "the end of the trajectory")
    points = robot.arm[0].points
    assert robot.arm[0].joint_names == ["a"]
    assert [point.positions[0] for point in points] == pytest.approx([0.5] * len(points), abs=1e-6)
    assert [point.time_from_start.nanosec for point in points] == [
        20_000_000 * (k + 1) for k in range(len(points))
    ]
    assert robot.gripper[0].data[0] == pytest.approx(-0.5, abs=1e-6)  # (5 - 10) / 10
    report = bridge.report()
    for topic in report["topics"].values():
        waiting = topic["received"] - topic["used"] - topic["replaced"] - sum(topic["dropped"].values())
        assert waiting in (0, 1)
        assert topic["used"] > 0
    assert report["topics"]["front"]["received"] <= robot.sent
    assert list(report["topics"]["front"]["dropped"]) == [
        "encoding '16UC1': expected rgb8, bgr8, rgba8, bgra8, mono8"
    ]
    assert report["topics"]["front"]["age_ms"]["max"] >= 0
    assert report["published"]["/arm"] >= len(robot.arm) > 0
    assert report["control"]["executed"] > 0
    assert len(robot.arm[-1].points) == 1


def test_a_robot_without_messages_holds_and_says_why(domain: int) -> None:
    from sinew_ros.dds import Dds

    with desk() as server, contextlib.ExitStack() as stack:
        transport = Dds(domain)
        stack.callback(transport.close)
        bridge = Bridge(parse(contract(server.native, start=True)), transport)
        with running(bridge):
            until(lambda: bridge.loop.steps > 3)
            for on in (False, True, False):  # quicker than the loop: the last word counts
                bridge.enable(on)
            steps = bridge.loop.steps
            until(lambda: bridge.loop.steps > steps + 3)
            assert bridge.loop.controller.paused
            bridge.enable(True)
            until(lambda: not bridge.loop.controller.paused)
        assert set(bridge.loop.report().held) <= {"front: no message on /front yet", STARTING, "paused"}
        status = bridge.status()["status"][0]
        assert (status["level"], status["message"]) == (2, "holds: front: no message on /front yet")


def test_a_contract_of_another_robot_is_refused(domain: int) -> None:
    from sinew_ros.dds import Dds

    wrong = {"wrist": {"topic": "/wrist", "type": IMAGE}}
    said = "cameras: expected the policy's cameras front, got wrist"
    with (
        desk() as server,
        contextlib.closing(Dds(domain)) as transport,
        pytest.raises(ContractError, match=said),
    ):
        Bridge(parse(contract(server.native, cameras=wrong)), transport)


def test_trajectories_keep_the_limits(domain: int) -> None:
    """What is planned is what the guard would let pass, step by step."""
    from sinew_client.control import Settings
    from sinew_ros.bridge import planned

    controller = Settings(hz=10, limits={"velocity": 1.0}).controller(1)
    controller.guard.start(np.zeros(1, np.float32))
    controller.ask(0, 0)
    controller.arrived(0, np.full((5, 1), 10.0, np.float32))
    command = controller.command(0)
    rows = planned(controller, command)
    np.testing.assert_allclose(rows[:, 0], [0.1, 0.2, 0.3, 0.4, 0.5], atol=1e-6)
    np.testing.assert_array_equal(controller.command(1).row, rows[1])  # looking ahead has changed nothing


def test_without_an_installed_ros_the_node_says_so() -> None:
    from sinew_ros.node import Rclpy

    with pytest.raises(ClientError, match="source an installation of ROS 2 first, or use --transport dds"):
        Rclpy()


# ----------------------------------------------------------------------------- the whole, between processes


@pytest.mark.slow
def test_a_policy_moves_a_robot_of_topics(domain: int, tmp_path: Path) -> None:
    """The trained blocks policy behind `sinew serve`, the bridge as its own program, the simulated robot as a third
    process: more than 1,000 messages in, trajectories out, the block in its bin."""
    from tests.serve.test_server import serving

    blocks = ROOT / "sinew" / "assets" / "blocks.gguf"
    paths = (ROOT, ROOT / "packages" / "sinew_ros", ROOT / "packages" / "sinew-client" / "src")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1"}
    with serving(tmp_path, blocks, "--wire", "native:0", "--threads", 1, "--engine", "plan") as server:
        names = ["x", "y", "z", "grip"]
        offsets = {
            "kind": "offsets",
            "action": [0, 1, 2],
            "state": [0, 1, 2],
            "scale": 0.02,
            "low": -1,
            "high": 1,
        }
        text = contract(
            server.address, start=True, hz=20, prompt="put the red block into the left bin",
            control={"handover": "freeze", "replan": "8", "motion": offsets},
            cameras={name: {"topic": f"/{name}", "type": IMAGE, "max_age": 1.0} for name in ("front", "wrist")},
            state={"topic": "/joint_states", "joints": names, "max_age": 1.0},
            action={"topic": "/arm", "type": TRAJECTORY, "joints": names},
        )  # fmt: skip
        (tmp_path / "robot.yaml").write_text(json.dumps(text))
        program = [sys.executable, "-m", "sinew_ros", "run", tmp_path / "robot.yaml", "--transport", "dds"]
        bridge = subprocess.Popen(program, env=environment, stdout=subprocess.PIPE, text=True)
        try:
            twin = [sys.executable, "-m", "tests.ros.twin"]
            seen = subprocess.run(
                twin, env=environment, capture_output=True, text=True, timeout=900, cwd=ROOT
            )
            assert seen.returncode == 0, seen.stderr
        finally:
            bridge.terminate()
            said, _ = bridge.communicate(timeout=30)
    outcome, report = json.loads(seen.stdout), json.loads(said)
    print(json.dumps({"twin": outcome, "bridge": report}, indent=1))
    assert outcome["successes"] > 0, (outcome, report)
    topics = report["topics"]
    assert outcome["sent"] >= 1000
    assert outcome["trajectories"] > 0
    assert sum(topic["received"] for topic in topics.values()) <= outcome["sent"]
    for topic in topics.values():
        waiting = topic["received"] - topic["used"] - topic["replaced"] - sum(topic["dropped"].values())
        assert waiting in (0, 1)
