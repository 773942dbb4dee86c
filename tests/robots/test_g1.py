"""examples/robots/g1.py: the arms of a Unitree G1 by LeRobot's bridge, whose double runs here."""

from __future__ import annotations

import json
import os
import subprocess
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sinew_client.control import Limits, NoObservation
from sinew_client.errors import ClientError

from sinew.cli import main
from tests.cli.test_run import HANGS, last_json
from tests.robots.g1_bridge import FRAME, Bridge
from tests.robots.poser import Poser
from tests.serve.lerobot_releases import CLIENTS, lerobot_folder, newest_release
from tests.serve.puppet import desk

RECIPES = Path(__file__).parents[2] / "examples" / "robots"
GOAL = [0.4, 0.3, 0.2, 0.6, -0.1, 0.0, 0.1, 0.4, -0.3, -0.2, 0.6, 0.1, 0.0, -0.1]
LOOSE = ("--set", "stale=30", "--set", "stale_of=state=30")  # of a machine that does other things


@pytest.fixture
def bridge() -> Iterator[Bridge]:
    found = Bridge()
    yield found
    found.close()


@pytest.fixture
def recipe(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(RECIPES)
    monkeypatch.syspath_prepend(str(RECIPES))
    import g1  # type: ignore[import-not-found]

    return g1


def line(address: str, bridge: Bridge) -> list[str]:
    options = json.dumps({"host": "127.0.0.1", "ports": bridge.ports, "camera": True})
    run = ["run", address, "--config", "g1.toml", "--robot-options", options, *LOOSE]
    return [*run, "--prompt", "wave", "--json"]


def test_the_recipe_fits_its_class_and_lerobots_names(recipe: Any) -> None:
    told = tomllib.loads((RECIPES / "g1.toml").read_text())["run"]
    limits = Limits.read(RECIPES / told["limits"], 14)
    assert list(limits.names) == recipe.JOINTS[recipe.ARMS]
    assert len(recipe.JOINTS) == len(set(recipe.JOINTS)) == len(recipe.STIFFNESS) == len(recipe.DAMPING) == 29
    left, right = limits.low.reshape(2, 7), limits.high.reshape(2, 7)
    rolls = [1]  # mirrored at the shoulder's roll
    assert left[0, rolls] == -right[1, rolls]
    assert told["robot"] == "g1:G1"


LEROBOTS = """
import json, sys
import tests.serve.torchvision_operators
from types import SimpleNamespace
from lerobot.robots.unitree_g1.config_unitree_g1 import UnitreeG1Config
from lerobot.robots.unitree_g1.g1_utils import G1_29_JointArmIndex, G1_29_JointIndex
from lerobot.robots.unitree_g1.unitree_sdk2_socket import LowStateMsg, lowcmd_to_dict
state, command = json.loads(sys.argv[1]), json.loads(sys.argv[2])
told = command["data"]
motors = [SimpleNamespace(**motor) for motor in told["motor_cmd"]]
again = lowcmd_to_dict(command["topic"], SimpleNamespace(**{**told, "motor_cmd": motors}))
read, own = LowStateMsg(state["data"]), UnitreeG1Config()
print(json.dumps({
    "joints": [f"{joint.name}.q" for joint in G1_29_JointIndex], "arms": [joint.value for joint in G1_29_JointArmIndex],
    "kp": own.kp, "kd": own.kd, "same": again == command, "q": [motor.q for motor in read.motor_state],
    "machine": read.mode_machine,
}))
"""


@pytest.mark.slow  # LeRobot's import
@newest_release
def test_names_gains_and_messages_are_lerobots(recipe: Any, bridge: Bridge, release: str) -> None:
    """Its own class for the bridge reads the double's state, and writes the commands that ours writes."""
    robot = recipe.G1("127.0.0.1", ports=bridge.ports)
    waits(lambda: bridge.heard or robot.hold())
    robot.close()
    paths = (Path(__file__).parents[2], lerobot_folder(release))
    done = subprocess.run(
        [CLIENTS, "-c", LEROBOTS, bridge.said, json.dumps(bridge.heard)], capture_output=True, text=True, timeout=900,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["joints"] == recipe.JOINTS
    assert found["arms"] == list(range(29))[recipe.ARMS]
    assert (found["kp"], found["kd"]) == (recipe.STIFFNESS, recipe.DAMPING)
    assert found["same"]
    assert found["q"] == [0.1] * 29 + [0.0] * 6
    assert found["machine"] == 5


@pytest.mark.slow  # two seconds of a moving robot
def test_the_recipes_line_moves_the_arms_and_nothing_else(
    recipe: Any, bridge: Bridge, capsys: pytest.CaptureFixture[str]
) -> None:
    policy = Poser(GOAL, recipe.JOINTS[recipe.ARMS], {"head_camera": FRAME.shape[:2]})
    with desk(policy=policy) as server:
        assert main([*line(server.native, bridge), "--seconds", "2"]) == 0
        report = last_json(capsys)
        assert report["executed"] > 20
        assert set(report["sources"]) == {"state", "head_camera"}
        targets = np.array(bridge.targets)[:, recipe.ARMS]
        assert np.abs(targets - GOAL).max(axis=1).min() < 1e-3
        assert report["rest"]["returned"]
        np.testing.assert_allclose(bridge.joints[recipe.ARMS], 0.1, atol=1e-2)  # back in their first pose
        np.testing.assert_array_equal(bridge.joints[:15], 0.1)  # legs and waist, held where they were
        assert not bridge.limp
        way = np.abs(np.diff(bridge.targets, axis=0)).max()
        assert (
            0 < way <= 1.5 / 30
        )  # radians of a control step by the recipe; a target that a newer one replaced is not seen
        np.testing.assert_allclose(np.mean(policy.seen[-1].images["head_camera"]), 90, atol=1)
        # A policy of the whole body is refused: nothing here balances.
        whole = Poser([0.0] * 29, recipe.JOINTS, {"head_camera": FRAME.shape[:2]})
    with desk(policy=whole) as server:
        assert main([*line(server.native, bridge), "--seconds", "1"]) == 1
    assert "14" in (said := capsys.readouterr().err)
    assert "29" in said


def test_what_is_wrong_with_the_bridge_holds_the_robot(recipe: Any, bridge: Bridge) -> None:
    robot = recipe.G1("127.0.0.1", ports=bridge.ports)
    assert robot.observe()["state"].shape == (14,)
    bridge.garbled = True
    waits(lambda: "state: JSONDecodeError" in seen(robot))
    robot.hold()
    bridge.garbled = False
    waits(lambda: not seen(robot))
    waits(lambda: bool(bridge.targets) or robot.hold())
    np.testing.assert_allclose(bridge.targets[0], 0.1)  # where it was
    robot.close()
    with pytest.raises(
        ClientError, match=r"127\.0\.0\.1: expected state of LeRobot's bridge within 0\.1 s, got none"
    ):
        recipe.G1("127.0.0.1", ports=(1, 1, 1), timeout=0.1)


def seen(robot: Any) -> str:
    """Return why there is no observation; "" where there is one."""
    try:
        robot.observe()
    except NoObservation as error:
        return str(error)
    return ""


def waits(until: Callable[[], Any]) -> None:
    deadline = time.monotonic() + HANGS
    while not until():
        assert time.monotonic() < deadline, "nothing happens"
        time.sleep(0.01)
