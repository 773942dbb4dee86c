"""The bridge as a node of rclpy, between a real server and arms that are another node of rclpy."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.ros.test_bridge import contract
from tests.serve.puppet import desk

ROOT = Path(__file__).resolve().parents[2]
ROS = Path(os.environ.get("SINEW_ROS", ROOT / ".venv-ros")) / "bin" / "python"
WAIT_S = 120.0


@pytest.mark.slow
@pytest.mark.skipif(not ROS.exists(), reason="rclpy is not installed in .venv-ros; `make ros` does it")
def test_a_node_of_rclpy_drives_arms_of_another(tmp_path: Path) -> None:
    paths = (ROOT, ROOT / "packages" / "sinew_ros", ROOT / "packages" / "sinew-client" / "src")
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "ROS_DOMAIN_ID": str(os.getpid() % 100),
    }
    env["ROS_AUTOMATIC_DISCOVERY_RANGE"] = "LOCALHOST"
    file = tmp_path / "robot.yaml"
    with desk() as server:
        file.write_text(json.dumps(contract(server.native)))
        arms = subprocess.Popen(
            [ROS, "-m", "tests.ros.arms", file], env=env, stdout=subprocess.PIPE, text=True
        )
        with arms:
            try:
                line = [ROS, "-m", "sinew_ros", "run", file, "--steps", "250"]
                done = subprocess.run(line, env=env, capture_output=True, text=True, timeout=WAIT_S)
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
