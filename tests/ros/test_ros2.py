"""ROS 2's own command, ``ros2``, as somebody types it, against a node of rclpy that drives arms of another.

It is not on PyPI: SINEW_ROS2 names it where it is not on the path, SINEW_ROS an environment of ``make ros``.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.ros.test_bridge import contract, domain  # noqa: F401 - a fixture
from tests.ros.test_rclpy import ROS, WAIT_S, environment, needs_ros
from tests.serve.puppet import desk, until

ROS2 = os.environ.get("SINEW_ROS2") or shutil.which("ros2")
pytestmark = [
    pytest.mark.slow,
    needs_ros,
    pytest.mark.skipif(ROS2 is None, reason="no ros2 on the path, nor named by SINEW_ROS2"),
]


class Typed:
    """What is typed, in one domain, and what runs beside it."""

    def __init__(self, number: int, stack: contextlib.ExitStack):
        self.env, self._stack = environment(ROS_DOMAIN_ID=str(number)), stack

    def __call__(self, *line: str, status: int = 0) -> str:
        done = subprocess.run(
            [str(ROS2), *line], env=self.env, capture_output=True, text=True, timeout=WAIT_S, check=False
        )
        assert done.returncode == status, (line, done.stdout, done.stderr)
        return done.stdout + done.stderr * bool(status)

    def begun(self, *line: Any) -> subprocess.Popen[str]:
        command = [str(each) for each in line]
        found = subprocess.Popen(command, env=self.env, stdout=subprocess.PIPE, text=True)
        self._stack.callback(found.kill)
        return found


@pytest.fixture
def typed(domain: int) -> Iterator[Typed]:  # noqa: F811
    with contextlib.ExitStack() as stack:
        made = Typed(domain, stack)
        stack.callback(made, "daemon", "stop")
        yield made


def test_a_managed_node_and_its_action(typed: Typed, tmp_path: Path) -> None:
    file = tmp_path / "robot.yaml"
    with desk() as server:
        file.write_text(json.dumps(contract(server.native, goals={"feedback": 20})))
        typed.begun(ROS, "-m", "tests.ros.arms", file)
        node = typed.begun(
            ROS, "-m", "sinew_ros", "run", file, "--action", "--lifecycle", "--transport", "rclpy"
        )
        until(lambda: "/sinew_policy" in typed("node", "list"), "the node")

        kind = "sinew_msgs/action/RunPolicy"
        until(lambda: "/sinew/run_policy" in typed("action", "list"), "the action")
        assert f"/sinew/run_policy [{kind}]" in typed("action", "list", "-t")
        about = typed("action", "info", "/sinew/run_policy")
        assert "Action servers: 1" in about

        go = ("action", "send_goal", "/sinew/run_policy", kind)
        wish = "{prompt: go, time_limit: {sec: 2}, limit_succeeds: true}"
        assert "Goal was rejected" in typed(*go, wish)
        assert typed("lifecycle", "nodes") == "/sinew_policy\n"
        assert typed("lifecycle", "get", "/sinew_policy") == "unconfigured [1]\n"
        for verb, state in (("configure", "inactive [2]"), ("activate", "active [3]")):
            assert typed("lifecycle", "set", "/sinew_policy", verb) == "Transitioning successful\n"
            assert typed("lifecycle", "get", "/sinew_policy") == f"{state}\n"
        assert "Unknown transition requested" in typed(
            "lifecycle", "set", "/sinew_policy", "configure", status=1
        )
        assert "- deactivate [4]" in typed("lifecycle", "list", "/sinew_policy")

        told = typed(*go, wish, "--feedback")
        assert "Goal finished with status: SUCCEEDED" in told
        result = yaml.safe_load(told.partition("Result:\n    ")[2].partition("Goal finished")[0])
        assert (result["outcome"], result["failed_requests"]) == (1, 0)
        assert result["steps"] > result["held"]
        assert "Feedback:" in told
        assert "command:\n- 5.0\n- 5.0" in told.replace("    ", "")

        runs = typed.begun(ROS2, *go, "{prompt: go, time_limit: {sec: 900}}")
        rate = typed.begun(ROS2, "topic", "hz", "/arm", "--window", "50")
        point = yaml.safe_load(
            typed("topic", "echo", "--once", "/arm", "trajectory_msgs/msg/JointTrajectory").split("---")[0]
        )
        assert point["joint_names"] == ["a"]
        status = typed("topic", "echo", "--once", "/sinew/status", "diagnostic_msgs/msg/DiagnosticArray")
        assert "diagnostic_msgs" not in status
        assert "level" in status
        assert rate.stdout is not None
        assert any("average rate:" in line for line in rate.stdout)
        typed("topic", "pub", "--once", "/sinew/success", "std_msgs/msg/Bool", "{data: true}")
        assert "Goal finished with status: SUCCEEDED" in runs.communicate(timeout=WAIT_S)[0]

        service = typed("service", "call", "/sinew_policy/get_state", "lifecycle_msgs/srv/GetState")
        assert "label='active'" in service
        assert typed("lifecycle", "set", "/sinew_policy", "deactivate") == "Transitioning successful\n"
        assert typed("lifecycle", "set", "/sinew_policy", "shutdown") == "Transitioning successful\n"
        report = json.loads(node.communicate(timeout=WAIT_S)[0].splitlines()[-1])
    assert (node.returncode, report["state"], report["goals"]["succeeded"]) == (0, "finalized", 2)


def test_the_service(typed: Typed) -> None:
    with desk() as server:
        typed.begun(ROS, "-m", "sinew_ros", "serve", server.native, "--hz", "20", "--transport", "rclpy")
        name, kind = "/sinew/get_action_chunk", "sinew_msgs/srv/GetActionChunk"
        until(lambda: name in typed("service", "list"), "the service")
        assert typed("service", "type", name) == f"{kind}\n"
        said = typed(
            "service",
            "call",
            name,
            kind,
            "{cameras: [], images: [], state: [0.5, 0.25], prompt: go, seed: 1}",
        )
    assert "error=''" in said
    assert "positions=[0.5, 0.5]" in said
