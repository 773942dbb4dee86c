"""The recipes of LeRobot's own drivers: each moves servos on a serial port by its line of `sinew run`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from sinew_client.control import Limits

from tests.robots.poser import Poser
from tests.serve.lerobot_releases import CLIENTS, each_release, lerobot_folder
from tests.serve.puppet import desk

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "examples" / "robots"
NAMES = ("shoulder_pan", "shoulder_lift", "elbow_flex", "wrist_flex", "wrist_roll", "gripper")
JOINTS = [f"{name}.pos" for name in NAMES]
GOAL = [10, -20, 30, 5, 0, 60]
# `sinew`, where PyPI's torchvision stands beside a CPU's torch; the recipe's line follows.
PROGRAM = (
    "import sys, tests.serve.torchvision_operators; from sinew.cli import main; sys.exit(main(sys.argv[1:]))"
)
ARMS = {  # recipe -> maker of its servos, the package of its bus, sides
    "so101": ("feetech", "scservo_sdk", [""]),
    "koch": ("dynamixel", "dynamixel_sdk", [""]),
    "so101_pair": ("feetech", "scservo_sdk", ["left_", "right_"]),
    "koch_pair": ("dynamixel", "dynamixel_sdk", ["left_", "right_"]),
}


def options_of(recipe: str, ports: list[str], home: Path) -> dict[str, Any]:
    """Return what the recipe's head has in --robot-options."""
    arms = [{"port": port, "use_degrees": True} for port in ports]
    own = {"calibration_dir": str(home)}
    if recipe == "koch_pair":
        return {side: {"id": side, **own, **arm} for side, arm in zip(("left", "right"), arms, strict=True)}
    if recipe == "so101_pair":
        return {"id": "arm", **own, "left_arm_config": arms[0], "right_arm_config": arms[1]}
    return {"id": "arm", **own, **arms[0]}


@pytest.mark.parametrize("recipe", ARMS)
def test_a_recipes_limits_name_the_drivers_joints(recipe: str) -> None:
    told = tomllib.loads((RECIPES / f"{recipe}.toml").read_text())["run"]
    names = [side + joint for side in ARMS[recipe][2] for joint in JOINTS]
    limits = Limits.read(RECIPES / told["limits"], len(names))
    assert list(limits.names) == names
    assert limits.velocity.max() <= 200
    assert told["robot"].startswith("lerobot:")


@pytest.mark.slow  # the driver gives a servo milliseconds to answer, by its own clock: no test for a busy machine
@each_release
@pytest.mark.parametrize("recipe", ARMS)
def test_the_recipes_line_moves_servos_within_its_limits(recipe: str, release: str, tmp_path: Path) -> None:
    maker, package, sides = ARMS[recipe]
    if subprocess.run([CLIENTS, "-c", f"import {package}"], capture_output=True).returncode:
        pytest.skip(f"{package} is not installed beside LeRobot; `make clients` does it")
    whole = {"drive_mode": 0, "homing_offset": 0, "range_min": 0, "range_max": 4095}
    calibration = {joint[:-4]: {"id": at + 1, **whole} for at, joint in enumerate(JOINTS)}
    for name in ("arm", "arm_left", "arm_right", "left", "right"):
        (tmp_path / f"{name}.json").write_text(json.dumps(calibration))
    paths = (ROOT, ROOT / "packages" / "sinew-client" / "src", lerobot_folder(release))
    bus = subprocess.Popen(
        [sys.executable, "-m", "tests.robots.servo_bus", maker, str(len(sides)), tmp_path / "goals.json"],
        cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    policy = Poser(GOAL * len(sides), [side + joint for side in sides for joint in JOINTS])
    with bus, desk(policy=policy) as server:
        assert bus.stdout is not None
        ports = [bus.stdout.readline().strip() for _ in sides]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "HF_HUB_OFFLINE": "1"}

        def sinew(home: Path, *more: str) -> subprocess.CompletedProcess[str]:
            options = json.dumps(options_of(recipe, ports, home))
            line = ["run", server.native, "--config", f"{recipe}.toml", "--robot-options", options, *more]
            return subprocess.run(
                [CLIENTS, "-c", PROGRAM, *line, "--prompt", "go"], env=env, cwd=RECIPES, capture_output=True,
                text=True, timeout=900, stdin=subprocess.DEVNULL,
            )  # fmt: skip

        done = sinew(tmp_path, "--set", "stale=60", "--seconds", "2", "--json")
        asked = sinew(tmp_path / "none")  # no calibration, and nobody who could be asked to move the arm
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["executed"] > 20
    assert policy.seen[-1].state == pytest.approx(policy.goal, abs=0.1)  # a servo counts 0.088 degrees
    for goals in json.loads((tmp_path / "goals.json").read_text()):
        steps = [abs(b - a) for a, b in zip(goals["3"], goals["3"][1:], strict=False)]
        assert 40 < max(steps) <= 120 / 30 * 4095 / 360 + 1  # the recipe's degrees per second
    assert asked.returncode == 1
    assert asked.stderr.splitlines()[-1].startswith("error: lerobot:")
    assert "Traceback" not in asked.stderr
