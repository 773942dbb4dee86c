"""examples/robots/so101.toml: LeRobot's own driver of an SO-101, over its own bus, against servos on a port."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.serve.lerobot_releases import CLIENTS, each_release, lerobot_folder

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "examples" / "robots"
CODE = """
import json, sys, tomllib
import numpy as np
import torch
from pathlib import Path
operators = torch.library.Library("torchvision", "FRAGMENT")  # PyPI's torchvision, as in tests/serve/lerobot_robot.py
if not hasattr(torch.ops.torchvision, "nms"):
    operators.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    operators.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
from sinew_client.control import Limits, Loop, Settings
from sinew_client.control.robots import open_lerobot

recipe = tomllib.loads(Path(sys.argv[1], "so101.toml").read_text())["run"]
limits = Limits.read(Path(sys.argv[1], recipe["limits"]), 6)
policy = {"cameras": [], **dict.fromkeys(("state", "action"), {"dim": 6, "names": list(limits.names)})}
arm = open_lerobot(recipe["robot"].partition(":")[2], json.loads(sys.argv[2]), policy)
goal = np.tile(np.float32([10, -20, 30, 5, 0, 60]), (30, 1))
settings = Settings(recipe["hz"], "aligned", "full", motion=arm.motion, limits=limits.to_dict(), stale=60)
report = Loop(arm, lambda: lambda observation, seconds: goal, settings, 6, "go").run(40)
print(json.dumps({"executed": report.executed, "state": arm.observe()["state"].tolist(), "unit": arm.joint_unit}))
arm.close()
"""


@pytest.mark.slow  # the driver gives a servo milliseconds to answer, by its own clock: no test for a busy machine
@each_release
def test_the_recipe_moves_six_servos_within_its_limits(release: str, tmp_path: Path) -> None:
    if subprocess.run([CLIENTS, "-c", "import scservo_sdk"]).returncode:
        pytest.skip("feetech-servo-sdk is not installed beside LeRobot; `make clients` does it")
    joints = ("shoulder_pan", "shoulder_lift", "elbow_flex", "wrist_flex", "wrist_roll", "gripper")
    whole = {"drive_mode": 0, "homing_offset": 0, "range_min": 0, "range_max": 4095}
    calibration = {name: {"id": at + 1, **whole} for at, name in enumerate(joints)}
    (tmp_path / "arm.json").write_text(json.dumps(calibration))
    paths = (lerobot_folder(release), ROOT / "packages" / "sinew-client" / "src")
    bus = subprocess.Popen(
        [sys.executable, "-m", "tests.robots.feetech_bus", tmp_path / "goals.json"],
        cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    with bus:
        assert bus.stdout is not None
        options = {"port": bus.stdout.readline().strip(), "id": "arm", "calibration_dir": str(tmp_path)}
        done = subprocess.run(
            [CLIENTS, "-c", CODE, RECIPES, json.dumps({**options, "use_degrees": True})],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "HF_HUB_OFFLINE": "1"},
            capture_output=True, text=True, timeout=280,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["executed"] > 20
    assert found["unit"] == "deg"
    assert found["state"] == pytest.approx([10, -20, 30, 5, 0, 60], abs=0.1)  # a servo counts 0.088 degrees
    goals = json.loads((tmp_path / "goals.json").read_text())
    steps = [abs(b - a) for a, b in zip(goals["3"], goals["3"][1:], strict=False)]
    assert 40 < max(steps) <= 120 / 30 * 4095 / 360 + 1  # the recipe's degrees per second
