"""The delays of a robot: measured on an arm whose delays are known, in simulated time."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sinew_client.control.pace import Pace
from sinew_client.control.safety import Limits

from sinew.checks.delays import DelayTrace, measure
from sinew.checks.wobble import SPREAD, WobblePlan, plan
from sinew.cli import main
from sinew.cli.doctor_delays import settings_of
from sinew.core import CameraSpec, PolicySpec, SinewError, VectorSpec
from tests.robots.delayed_arm import FPS, Clock, DelayedArm

NEAR_S = 0.003  # the largest error, at 30 frames a second
SIGMA = np.array([0.6, 0.4])
SPEC = PolicySpec(
    architecture="none",
    name="arm",
    cameras=(CameraSpec("front", 48, 64),),
    state=VectorSpec(2, ("lift", "turn")),
    action=VectorSpec(2, ("lift", "turn")),
    chunk_size=30,
    noise_dim=2,
    solver_steps=1,
    max_prompt_tokens=16,
    control_hz=30.0,
)


def planned(arm: DelayedArm, settings: dict[str, Any] | None = None, seconds: float = 20.0) -> WobblePlan:
    clock = arm.clock
    return plan(
        SPEC.to_dict(),
        arm,
        settings or {},
        SIGMA,
        seconds,
        lambda period: Pace(period, clock.now, clock.sleep),
    )


def wobbled(arm: DelayedArm, **more: Any) -> DelayTrace:
    made = planned(arm, **more)
    made.run.run()
    return made.trace


@pytest.mark.parametrize(("actuation", "camera"), [(0.0, 0.0), (0.012, 0.067), (0.045, 0.033), (0.1, 0.12)])
@pytest.mark.parametrize("waits", [False, True])
def test_known_delays_are_found(actuation: float, camera: float, waits: bool) -> None:
    arm = DelayedArm(Clock(), actuation, camera, waits)
    found = measure(wobbled(arm))
    for joint in found.joints.values():
        assert joint.seconds == pytest.approx(actuation, abs=NEAR_S)
        assert joint.low <= joint.seconds <= joint.high < joint.low + 0.02
    seen = found.cameras["front"]
    assert seen.transfer.seconds == pytest.approx(camera, abs=NEAR_S)
    assert seen.transfer.low <= seen.transfer.seconds <= seen.transfer.high < seen.transfer.low + 0.02
    assert seen.period == pytest.approx(1 / FPS, abs=NEAR_S)
    assert seen.wait == pytest.approx(0.0 if waits else seen.period / 2, abs=NEAR_S)
    assert seen.clock is None
    assert found.transfer == pytest.approx(camera, abs=NEAR_S)
    assert found.actuation == pytest.approx(actuation, abs=NEAR_S)
    json.dumps(found.to_dict(), allow_nan=False)


@pytest.mark.parametrize("error", [-0.05, 0.0, 0.04])
def test_times_of_another_moment_are_found(error: float) -> None:
    """A driver that states when a frame arrived, and not when it was exposed, states it late."""
    found = measure(wobbled(DelayedArm(Clock(), 0.02, 0.067, clock_error=error)))
    clock = found.cameras["front"].clock
    assert clock is not None
    assert clock.seconds == pytest.approx(error, abs=NEAR_S)


def test_an_arm_that_does_not_follow_has_no_delay() -> None:
    found = measure(wobbled(DelayedArm(Clock(), 0.02, 0.067, follows=False)))
    assert all("did not follow" in each.why for each in found.joints.values())
    assert found.cameras["front"].transfer.why == "no joint moved"
    assert np.isnan(found.actuation)
    assert found.to_dict()["actuation"] is None


def test_the_wobble_is_small_and_slow() -> None:
    arm = DelayedArm(Clock(), 0.02, 0.05)
    limits = {"low": [-1, -0.12], "high": [0.22, 1], "velocity": [None, 0.05]}
    made = planned(arm, {"limits": limits})
    begun = arm.sent[0][1]
    made.run.run()
    rows = np.array([row for _, row in arm.sent])
    assert np.all(made.size <= SPREAD * SIGMA + 1e-9)
    assert made.size[0] == pytest.approx(0.02, rel=0.01)  # up to its limit
    assert np.all(np.abs(rows - begun).max(0) <= made.size + 1e-6)
    assert np.all(np.abs(rows - begun).max(0) > made.size / 2)
    report = made.run.loop.report()
    assert report.clipped_commands == 0
    assert not report.held
    assert np.allclose(rows[-1], begun, atol=1e-3)  # back where it began


def test_nothing_moves_without_room_or_a_pose() -> None:
    arm = DelayedArm(Clock(), 0.02, 0.05)
    with pytest.raises(SinewError, match="expected room to move inside the limits"):
        planned(arm, {"limits": Limits.parse({"low": [0.2, -0.1], "high": [0.2, -0.1]}, 2)})
    with pytest.raises(SinewError, match=r"expected the position of lift, turn .* set `still`"):
        planned(arm, {"motion": {"kind": "as is"}})
    assert len(arm.sent) == 1


MILLIMETRES = """
import numpy as np

class Arm:
    sent = []

    def observe(self):
        frame = np.random.randint(0, 255, (64, 64, 3), np.uint8)
        return {"images": {"front": frame, "wrist": frame}, "state": np.float32([20.0, -30.0, 120.0, 60.0])}

    def act(self, row):
        self.sent.append(row)

    def hold(self):
        pass
"""


def test_a_robot_in_another_unit_is_not_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A motion that is small in millimetres may be large in metres."""
    (tmp_path / "arm_in_millimetres.py").write_text(MILLIMETRES)
    (tmp_path / "limits.toml").write_text("still = [0.0, 0.0, 0.0, 1.0]\n")
    monkeypatch.chdir(tmp_path)
    line = ["doctor", "blocks", "--observe", "arm_in_millimetres:Arm", "--limits", "limits.toml", "--delays"]
    assert main(line) == 1
    assert "--delays: expected a state as in the training data, got: " in capsys.readouterr().err
    import arm_in_millimetres

    assert arm_in_millimetres.Arm.sent == []


def test_nothing_moves_without_statistics() -> None:
    arm = DelayedArm(Clock(), 0.02, 0.05)
    with pytest.raises(SinewError, match="expected statistics of the state in the bundle"):
        plan(SPEC.to_dict(), arm, {}, np.full(2, np.nan), 20.0)
    assert len(arm.sent) == 1


def test_a_simulated_task_is_measured_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    """The line that a user types. A simulation has no other clock than its steps, of 50 ms here."""
    assert main(["doctor", "blocks", "--observe", "blocks", "--delays", "--json"]) == 0
    told = capsys.readouterr()
    found = json.loads(told.out.splitlines()[-1])
    for name in ("x", "y"):
        assert found["joints"][name]["low"] <= 0.05
        assert found["joints"][name]["high"] >= 0.0
        assert found["joints"][name]["high"] - found["joints"][name]["low"] >= 0.05
    assert "the robot moves by at most: x 0.0114" in told.err


def test_a_file_brings_the_delays_to_the_commands_that_use_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Delays of 45 and 67 ms, measured on the arm, reach the control loop and both predictions by one file."""
    measured = measure(wobbled(DelayedArm(Clock(), 0.045, 0.067)))
    file, log = tmp_path / "delays.toml", tmp_path / "run.jsonl"
    file.write_text(settings_of(measured))

    def told(*words: str) -> Any:
        assert main(["--config", str(file), *words]) in (0, 1)  # a prediction may end with 1: too slow
        return capsys.readouterr().out

    stream = json.loads(told("perf", "stream", "pi0", "--hardware", "rtx4090", "--json").splitlines()[-1])
    assert stream["camera_ms"] == pytest.approx(67, abs=1e3 * NEAR_S)
    assert stream["actuation_ms"] == pytest.approx(45, abs=1e3 * NEAR_S)
    scenario = told(
        "perf", "scenario", "pi0", "--device", "agx-orin", "--server", "h200", "--network", "wifi7"
    )
    assert re.search(r"with 6[4-9](\.\d+)? ms of the camera and 4[2-7](\.\d+)? ms of the actuator", scenario)
    told("run", "blocks", "--robot", "blocks", "--episodes", "1", "--seconds", "1", "--record", str(log))
    stated = json.loads(log.read_text().splitlines()[0])
    (delay,) = re.findall(r'"camera_delay": ([\d.]+)', json.dumps(stated))
    # A frame waits for a control step for half a period on average.
    assert float(delay) == pytest.approx(0.067 + 0.5 / FPS, abs=2 * NEAR_S)


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (["doctor", "--delays"], "expected a policy and a robot"),
        (
            ["doctor", "blocks", "--observe", "blocks", "--limits", "x.toml"],
            "pass --delays too, or omit them",
        ),
        (["doctor", "blocks", "--observe", "blocks", "--out", "x.toml"], "pass --delays too, or omit them"),
        (
            ["doctor", "blocks", "--observe", "blocks", "--delays", "--out", "x.gguf"],
            "--out x.gguf: expected a new file that ends in .toml",
        ),
        (["doctor", "blocks", "--observe", ".", "--delays"], "expected a robot, got a folder of records"),
    ],
)
def test_what_cannot_be_measured_is_said(
    line: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(line) == 1
    assert text in capsys.readouterr().err
