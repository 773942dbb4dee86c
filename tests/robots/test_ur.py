"""examples/robots/ur.py: an arm by RTDE, driven by the embedded policy of poses through its kinematics."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sinew_client.arm.kinematics import read_chain
from sinew_client.control import NoObservation, Stopped
from sinew_client.rotations import from_rpy

from sinew.cli import main
from tests.cli.test_run import BLOCKS, HANGS, last_json
from tests.robots.ur_controller import Controller

mujoco = pytest.importorskip("mujoco")
RECIPES = Path(__file__).parents[2] / "examples" / "robots"
DOWN = from_rpy(np.array([np.pi, 0.0, 0.0]))
# The recipe's arm beside the table of blocks, with fingers of 10 cm.
FRAMES = """  <link name="table" /><link name="fingertips" />
  <joint name="stands" type="fixed"><parent link="table" /><child link="base" /><origin xyz="-0.5 0 0" /></joint>
  <joint name="holds" type="fixed"><parent link="tool0" /><child link="fingertips" /><origin xyz="0 0 0.1" /></joint>
</robot>"""


class Table:
    """The blocks on their table, whose hand follows the tip of an arm."""

    def __init__(self, urdf: Path):
        from sinew_eval.sim import blocks_scene as scene
        from sinew_eval.sim.blocks import BlocksEnv

        self.scene, self.env = scene, BlocksEnv()
        self.env.reset(seed=5000)
        self.chain = read_chain(urdf, "fingertips", "table")
        guess = np.array([0.0, -1.2, 1.8, -2.2, -1.57, 0.0])
        self.start = self.chain.inverse(self.env.world().ee, DOWN, guess)
        self.won, self.tilt = False, 0.0
        self.tips: list[np.ndarray] = []

    def moved(self, joints: np.ndarray, high: bool) -> float:
        scene, data = self.scene, self.env._data
        tip = self.chain.forward(joints)
        self.tilt = max(self.tilt, float(np.abs(tip.turn - DOWN).max()))
        self.tips.append(tip.place)
        data.ctrl[:3] = np.clip(tip.place, scene.REACH_LOW, scene.REACH_HIGH)
        data.ctrl[3:] = scene.OPENING_MAX / 2 if high else 0.0
        mujoco.mj_step(self.env._model, data, round(0.008 / scene.TIMESTEP))
        self.won |= self.env._info()["is_success"]
        return 10.0 * self.env.world().opening / scene.OPENING_MAX


@pytest.fixture
def table(tmp_path: Path) -> Table:
    urdf = tmp_path / "beside_the_table.urdf"
    urdf.write_text((RECIPES / "ur5e.urdf").read_text().replace("</robot>", FRAMES))
    return Table(urdf)


@pytest.fixture
def controller(table: Table) -> Iterator[Controller]:
    views: dict[str, Any] = {name: (lambda name=name: table.env.view(name)) for name in ("front", "wrist")}
    found = Controller(table.start, table.moved, views)
    yield found
    found.close()


def line(table: Table, controller: Controller, tmp_path: Path, *more: str) -> list[str]:
    """Return the recipe's line, for this arm."""
    options = {
        "host": "127.0.0.1",
        "ports": controller.ports,
        "cameras": controller.cameras,
        "opening": table.scene.OPENING_MAX,
    }
    frames = {"tip": "fingertips", "base": "table", "velocity": 3.0}
    return [
        "run", str(BLOCKS), "--config", "ur5e.toml", "--robot-options", json.dumps(options), "--set",
        f"kinematics={tmp_path / 'beside_the_table.urdf'}", "--set", f"kinematics_options={json.dumps(frames)}",
        "--set", "stale_of=state=1",
        "--set", "stale=5", "--timeout", "60", "--prompt", table.env.task_description, "--json", *more,
    ]  # fmt: skip


def test_the_recipes_line_drives_the_arm(
    table: Table,
    controller: Controller,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(RECIPES)
    monkeypatch.syspath_prepend(str(RECIPES))
    from ur import Ur

    act, acted = Ur.act, []

    def last(arm: Any, row: np.ndarray) -> None:
        act(arm, row)
        acted.append(row)
        if len(acted) == 40:
            raise Stopped("enough commands, however long they took")

    monkeypatch.setattr(Ur, "act", last)
    assert main(line(table, controller, tmp_path, "--seconds", "600")) == 0
    report = last_json(capsys)
    assert report["executed"] > 0
    assert not report["failed"]
    assert controller.programs == 1
    assert table.tilt < 0.1  # the hand points down, but for joints on the way from one command to the next
    assert np.ptp(table.tips, axis=0).max() > 0.01  # metres
    stops(controller)
    assert controller.stopped == "program"  # in order, and not by its watchdog
    assert set(report["sources"]) == {"state", "front", "wrist", "skew"}
    assert report["sources"]["front"]["p50"] > report["sources"]["wrist"]["p50"]  # which is taken after it
    # A source with a limit that it cannot keep holds the arm, by its name.
    line_of = line(table, controller, tmp_path, "--seconds", "1")
    line_of[line_of.index("stale_of=state=1")] = "stale_of=front=0.000001"
    assert main(line_of) == 3
    report = last_json(capsys)
    assert report["executed"] == 0
    assert any(
        reason.startswith("front: the newest frame is older than 1e-06 s") for reason in report["held"]
    )


@pytest.mark.slow
def test_the_policy_of_poses_succeeds_on_the_arm(
    table: Table,
    controller: Controller,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(RECIPES)
    assert main(line(table, controller, tmp_path, "--seconds", "25")) == 0
    report = last_json(capsys)
    assert table.won, report


def test_what_is_wrong_with_the_arm_holds_it(controller: Controller, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(RECIPES))
    from ur import Ur  # type: ignore[import-not-found]

    arm: Any = Ur("127.0.0.1", controller.cameras, ports=controller.ports)
    seen = until(arm)
    assert seen["state"].shape == (7,)
    assert seen["images"]["front"].shape == (64, 64, 3)
    assert set(seen["times"]) == {"state", "front", "wrist"}
    controller.safety = 3  # a protective stop
    with pytest.raises(NoObservation, match=r"safety mode is 3, expected normal \(1\) or reduced \(2\)"):
        until(arm, again=arm.observe)
    with controller._lock:  # by hand; once it is let go it stays there
        controller.joints = controller.joints + 0.2
    by_hand = controller.joints

    def told() -> bool:
        with pytest.raises(NoObservation):
            arm.observe()
        arm.hold()
        return bool(controller._inputs["input_double_register_24"] == by_hand[0])

    waits(told)
    controller.safety = 1
    until(arm)
    np.testing.assert_allclose(controller.joints, by_hand, atol=1e-12)
    controller._patience = 1.0  # and nothing arrives any more: the controller's own watchdog stops the arm
    stops(controller)
    assert controller.stopped == "watchdog"
    with pytest.raises(NoObservation, match="the program on the arm does not run"):
        until(arm, again=arm.observe)
    arm.close()


def test_a_package_that_is_none_holds_the_arm(
    controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(RECIPES))
    from ur import Ur

    arm: Any = Ur("127.0.0.1", ports=controller.ports)
    until(arm)
    controller.garbled = True
    with pytest.raises(NoObservation, match="RTDE: unpack requires"):
        until(arm, again=arm.observe)
    arm.close()


def stops(controller: Controller) -> None:
    """Wait until the arm's program has ended."""
    waits(lambda: bool(controller.stopped))


def waits(until: Callable[[], bool]) -> None:
    """Wait until something is so, for as long as nothing but a hang takes."""
    deadline = time.monotonic() + HANGS
    while not until():
        assert time.monotonic() < deadline, "nothing happens"
        time.sleep(0.01)


def until(arm: Any, again: Any = None) -> dict[str, Any]:
    """Return the first observation that there is; with ``again``, look until there is none."""
    deadline = time.monotonic() + HANGS
    while time.monotonic() < deadline:
        try:
            seen = arm.observe()
        except NoObservation:
            if again is not None:
                again()
        else:
            if again is None:
                return seen
        arm.hold()
        time.sleep(0.02)
    raise AssertionError("no observation")
