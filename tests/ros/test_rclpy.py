"""The bridge as a node of rclpy, between a real server and arms that are another node of rclpy."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from sinew_client import ClientError
from sinew_ros.dds import Dds

from tests.ros.acting import over_services
from tests.ros.test_bridge import contract, domain  # noqa: F401 - a fixture
from tests.serve.puppet import desk, until

ROOT = Path(__file__).resolve().parents[2]
ROS = Path(os.environ.get("SINEW_ROS", ROOT / ".venv-ros")) / "bin" / "python"
WAIT_S = 120.0


needs_ros = pytest.mark.skipif(
    not ROS.exists(), reason="rclpy is not installed in .venv-ros; `make ros` does it"
)


def environment(**more: str) -> dict[str, str]:
    paths = (ROOT, ROOT / "packages" / "sinew_ros", ROOT / "packages" / "sinew-client" / "src")
    own = {"PYTHONPATH": os.pathsep.join(map(str, paths)), "ROS_AUTOMATIC_DISCOVERY_RANGE": "LOCALHOST"}
    return {**os.environ, "ROS_DOMAIN_ID": str(os.getpid() % 100), **own, **more}


@pytest.mark.slow
@needs_ros
@pytest.mark.parametrize("transport", ["rclpy", "dds"])
def test_arms_of_rclpy_are_driven_over_either_transport(
    transport: str,
    domain: int,  # noqa: F811
    tmp_path: Path,
) -> None:
    """Over plain DDS between two makers: CycloneDDS here, Fast DDS there with config/fastdds.xml."""
    settings = ROOT / "packages" / "sinew_ros" / "config" / "fastdds.xml"
    env = environment(ROS_DOMAIN_ID=str(domain))
    file = tmp_path / "robot.yaml"
    with desk() as server:
        file.write_text(json.dumps(contract(server.native)))
        arms = subprocess.Popen(
            [ROS, "-m", "tests.ros.arms", file], stdout=subprocess.PIPE, text=True,
            env=env | ({"FASTDDS_DEFAULT_PROFILES_FILE": str(settings)} if transport == "dds" else {}),
        )  # fmt: skip
        with arms:
            try:
                line = ["-m", "sinew_ros", "run", file, "--steps", "250", "--transport", transport]
                own = ROS if transport == "rclpy" else sys.executable
                done = subprocess.run([own, *line], env=env, capture_output=True, text=True, timeout=WAIT_S)
            finally:
                arms.terminate()
            told = json.loads(arms.communicate(timeout=WAIT_S)[0])
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["control"]["executed"] > 50
    assert report["topics"]["front"]["used"] > 0
    assert report["topics"]["front"]["dropped"] == {}
    # what was published came, but for the first before the other node was found
    for topic, count in told["commands"].items():
        assert 0 < count <= report["published"][topic]
    assert told["at"] == pytest.approx([0.5, -0.5], abs=1e-6)  # the puppet's 5 in tenths, and less 10
    assert arms.returncode == 0


SERVER = """
import sys, time
import rclpy
from rcl_interfaces.srv import GetParameters
rclpy.init()
node = rclpy.create_node("hand")
node.create_service(GetParameters, sys.argv[1], lambda request, response: response)
sys.stdin.read()
"""


@pytest.mark.slow
@needs_ros
def test_a_goal_is_not_sent_to_a_server_that_would_read_another(domain: int) -> None:  # noqa: F811
    """Fast DDS has the caller of a service beside the message, CycloneDDS in it: a width would be some other number."""
    hand = subprocess.Popen(
        [ROS, "-c", SERVER, "/franka_gripper/move/_action/send_goal"], env=environment(ROS_DOMAIN_ID=str(domain)),
        stdin=subprocess.PIPE, text=True,
    )  # fmt: skip
    with hand, contextlib.closing(Dds(domain)) as transport:
        send = transport.publisher("/franka_gripper/move", "franka_msgs/action/Move")
        said = ""

        def refused() -> bool:
            nonlocal said
            try:
                send({"width": 0.04, "speed": 0.1})
            except ClientError as error:
                said = str(error)
            return bool(said)

        until(refused, "the server is found")
        hand.communicate()
    assert said.startswith(
        "/franka_gripper/move: expected an action server of rmw_cyclonedds, got one of another DDS"
    )
    assert "vendor 010f" in said


MANAGER = """
import json
import rclpy
from lifecycle_msgs.srv import ChangeState, GetAvailableStates, GetAvailableTransitions, GetState
from rclpy.executors import SingleThreadedExecutor
from rclpy.lifecycle import LifecycleNode
rclpy.init()
own, manager = LifecycleNode("own"), rclpy.create_node("manager")
executor = SingleThreadedExecutor()
for node in (own, manager):
    executor.add_node(node)

def ask(name, kind, service, **asked):
    client, request = manager.create_client(kind, f"/{name}/{service}"), kind.Request()
    assert client.wait_for_service(60)
    for field, value in asked.items():
        setattr(request.transition, field, value)
    future = client.call_async(request)
    executor.spin_until_future_complete(future, 60)
    return future.result()

def told(name):
    yield sorted(map(str, ask(name, GetAvailableStates, "get_available_states").available_states))
    yield sorted(map(str, ask(name, GetAvailableTransitions, "get_transition_graph").available_transitions))
    for asked in ({"id": 3}, {"id": 1}, {"id": 1}, {"id": 3}, {"label": "deactivate"}, {"id": 2}, {"label": "x"},
                  {"label": "configure", "id": 3}, {"label": "shutdown"}):
        changed = ask(name, ChangeState, "change_state", **asked).success
        if asked.get("label") == "shutdown":  # after which a node of ours is no more
            yield changed
            continue
        available = ask(name, GetAvailableTransitions, "get_available_transitions").available_transitions
        yield changed, str(ask(name, GetState, "get_state").current_state), sorted(map(str, available))

print(json.dumps([list(told("sinew_policy")), list(told("own"))]))
"""


@pytest.mark.slow
@needs_ros
def test_a_managed_node_is_as_one_of_rclpy(domain: int, tmp_path: Path) -> None:  # noqa: F811
    """The same states, transitions and answers as of rclpy's own LifecycleNode, whatever a manager asks."""
    env = environment(ROS_DOMAIN_ID=str(domain))
    file = tmp_path / "robot.yaml"
    with desk() as server:
        file.write_text(json.dumps(contract(server.native)))
        line = [ROS, "-m", "sinew_ros", "run", file, "--lifecycle", "--transport", "rclpy"]
        with subprocess.Popen(line, env=env, stdout=subprocess.PIPE, text=True) as node:
            try:
                done = subprocess.run(
                    [ROS, "-c", MANAGER], env=env, capture_output=True, text=True, timeout=WAIT_S
                )
                assert done.returncode == 0, done.stderr
                report = json.loads(node.communicate(timeout=WAIT_S)[0].splitlines()[-1])
            finally:
                node.kill()
    ours, theirs = json.loads(done.stdout.splitlines()[-1])
    assert [len(each) for each in ours[:2]] == [11, 25]
    assert ours == theirs
    assert (node.returncode, report["state"]) == (0, "finalized")


@pytest.mark.slow
@needs_ros
def test_goals_of_rclpys_clients(domain: int, tmp_path: Path) -> None:  # noqa: F811
    """Two clients of rclpy's ActionClient, one that is killed, arms of rclpy, and the program as a node of rclpy."""
    env = environment(ROS_DOMAIN_ID=str(domain))
    file = tmp_path / "robot.yaml"
    with desk() as server, contextlib.ExitStack() as stack:
        file.write_text(json.dumps(contract(server.native, goals={"feedback": 20})))

        def begun(*line: Any) -> subprocess.Popen[str]:
            found = subprocess.Popen([ROS, "-m", *line], env=env, stdout=subprocess.PIPE, text=True)
            stack.callback(found.kill)
            return found

        arms = begun("tests.ros.arms", file)
        node = begun("sinew_ros", "run", file, "--action", "--transport", "rclpy")
        client = begun("tests.ros.acting", "asked")
        assert client.stdout is not None
        assert client.stdout.readline() == "runs\n"
        node.terminate()
        said = json.loads(client.communicate(timeout=WAIT_S)[0])
        report = json.loads(node.communicate(timeout=WAIT_S)[0].splitlines()[-1])
        arms.terminate()
        arms.communicate(timeout=WAIT_S)
    assert said == {
        "command": [5.0, 5.0],
        "accepted": [True, False],
        "cancelled": [0, 1, 5, 2],
        "succeeded": [4, 1, True],
        "time limit": [6, 3],
        "exit of the killed": 7,
        "after the killed": 6,
        "the node's end": [6, 6],
    }
    ended = {"cancelled": 1, "succeeded": 1, "time limit": 2, "ended": 1, "refused": 1}
    assert (node.returncode, report["goals"]) == (0, ended)


@pytest.mark.slow
@needs_ros
def test_an_action_over_plain_dds_answers_as_rclpys_server(domain: int) -> None:  # noqa: F811
    """The same acceptance, codes, results and states, whatever is asked in whatever state."""
    line = [ROS, "-m", "tests.ros.acting"]
    env = environment(ROS_DOMAIN_ID=str(domain))
    done = subprocess.run(line, env=env, capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == list(over_services())
