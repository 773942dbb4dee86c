"""``sinew run --takeover``, with ``--frames`` and the setting ``shadow``: to a data set of corrections."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sinew_client.arm.leaders import LeRobotLeader, open_leader
from sinew_client.control import LeaderError, Stopped
from sinew_client.control.listeners.shadow import ShadowAgreement
from sinew_client.control.smoothing import parse_filter
from sinew_eval.episodes.robot import SimulatedRobot

from sinew.cli import main
from sinew.records.recorder import read_records
from tests import processes
from tests.cli.test_run import BLOCKS, PLAIN, last_json
from tests.serve.lerobot_releases import CLIENTS, ROOT, lerobot_folder, newest_release, nursery
from tests.serve.test_lerobot_plugin import lerobot

SIMULATED = ("--robot", "blocks", "--hz", "100", "--handover", "freeze", "--replan", "8", "--timeout", "60")


class Follower:
    """Two joints that go where they are told; ``after`` looks somebody else has moved them."""

    motion = {"kind": "absolute"}  # noqa: RUF012 - as a driver states it

    def __init__(self) -> None:
        self.state = np.zeros(4, np.float32)
        self.commands = self.holds = 0

    def observe(self) -> dict[str, Any]:
        frame = np.zeros((64, 64, 3), np.uint8)
        images = {"front": frame, "wrist": frame}
        return {"images": images, "state": self.state.copy(), "time": time.monotonic()}

    def act(self, row: np.ndarray) -> None:
        self.commands += 1
        self.state = row

    def hold(self) -> None:
        self.holds += 1


class Watched(Follower):
    """Somebody else drives it; it must never be commanded."""

    looks = 0

    def observe(self) -> dict[str, Any]:
        Watched.looks += 1
        did = np.float32([np.sin(Watched.looks), 0.1, 0.2, 1.0])
        return {**super().observe(), "action": did}

    def act(self, row: np.ndarray) -> None:
        raise AssertionError("commanded")

    hold = act  # type: ignore[assignment]


class Button:
    """A leader whose button is pressed from its third look on; it stands where the robot began."""

    def __init__(self, elsewhere: float = 0.0):
        self.wanted, self.reads = False, 0
        self.elsewhere = elsewhere

    @property
    def wanted(self) -> bool:
        self._looks += 1
        return self._looks > 10

    @wanted.setter
    def wanted(self, _value: bool) -> None:
        self._looks = 0

    def read(self) -> Any:
        self.reads += 1
        return [0.0, self.elsewhere, 0.0, 1.0]


@newest_release
@pytest.mark.usefixtures("unhurried")
def test_an_expert_corrects_and_lerobot_reads_what_it_did(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, release: str
) -> None:
    """Frames of a run are marked by who drove; those of the expert become a data set, which LeRobot opens; the whole
    run becomes one with LeRobot's own mark."""
    pytest.importorskip("mujoco")
    pytest.importorskip("pyarrow", reason="the extra `dataset` is not installed")
    frames = tmp_path / "frames"
    lead = ("--takeover", "expert", "--set", 'takeover_options={"after": 12}', "--frames", str(frames))
    journal = ("--record", str(tmp_path / "run.jsonl"))
    monkeypatch.setattr(SimulatedRobot, "hold", lambda _: None)  # the twelve steps are of the policy
    flags = ("--robot", "blocks", "--hz", "20", *SIMULATED[4:])
    assert main(["run", str(BLOCKS), *flags, "--episodes", "2", *lead, *journal, "--json"]) == 0
    report = last_json(capsys)
    assert report["handed"]["to_human"] == 2
    assert report["handed"]["steps"] > 20
    records = list(read_records(frames))
    by = [record.by for record in records]
    assert by.count("human") == report["handed"]["steps"]
    assert len(by) == report["executed"]
    assert set(by) == {"human", "policy"}
    lines = map(json.loads, (tmp_path / "run.jsonl").read_text().splitlines())
    commands = [line["command"] for line in lines if line["event"] == "command"]
    sent = [command for command in commands if command["row"] is not None]
    for record, command in zip(records, sent, strict=True):
        assert record.by == command["by"]
        assert record.actions is not None
        np.testing.assert_array_equal(record.actions, np.float32([command["row"]]))
    assert main(["recording", "replay", str(tmp_path / "run.jsonl"), "--json"]) == 0
    assert last_json(capsys)["differ"] == 0

    made = ("--hz", "20", "--bundle", str(BLOCKS))
    assert (
        main(["recording", "dataset", str(frames), str(tmp_path / "fixes"), "--corrections", *made, "--json"])
        == 0
    )
    counts = last_json(capsys)
    assert counts["episodes"] >= 2  # a period that was skipped ends one
    assert 20 < counts["frames"] <= by.count("human")
    assert main(["recording", "dataset", str(frames), str(tmp_path / "all"), *made]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "; a pause, a hold, another instruction or an error begins a new episode" in said
    known = {
        np.float32([*record.observation.state, *np.ravel(record.actions)]).tobytes(): record for record in records
    }  # fmt: skip
    for name, whose in (("fixes", {"human"}), ("all", {"human", "policy"})):
        done = lerobot(release, tmp_path, "dataset", tmp_path / name)
        assert done.returncode == 0, done.stderr[-3000:]
        found = json.loads(done.stdout.splitlines()[-1])
        assert found["fps"] == 20
        if name == "all":
            assert {frame["intervention"] for frame in found["frames"]} == {True, False}
        assert len(found["frames"]) > 20
        for frame in found["frames"]:
            record = known[np.float32(frame["state"] + frame["action"]).tobytes()]
            assert record.by in whose
            assert frame["intervention"] == (record.by == "human")
            assert frame["task"] == record.observation.prompt


@pytest.mark.slow
def test_a_policy_learns_from_corrections(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The lines of research/policies/corrections.py, with so little of everything that nothing is learned."""
    corrections = pytest.importorskip("research.policies.corrections")
    env, frames, fixes, out = (
        f"research.policies.corrections:{corrections.ENV}",
        *(tmp_path / name for name in "abc"),
    )
    run = ("run", "act", "--robot", f"gym:{env}", "--episodes", "2", "--handover", "freeze", "--replan", "8",
           "--takeover", "expert", "--set", 'takeover_options={"after": 20}', "--frames", str(frames))  # fmt: skip
    assert main([*run, "--json"]) == 0
    assert last_json(capsys)["handed"]["to_human"] == 2
    options = ("--corrections", "--hz", "20", "--bundle", "act")
    assert main(["recording", "dataset", str(frames), str(fixes), *options]) == 0
    found = corrections.Corrections(fixes)
    chunk, known = found.chunks(np.array([0, len(found.action) - 1]))
    np.testing.assert_array_equal(chunk[0][known[0]], found.action[: known[0].sum()])
    assert (known[0].sum() > 1, known[1].sum()) == (True, 1)
    line = [
        sys.executable,
        "-m",
        "research.policies.corrections",
        fixes,
        "--steps",
        "2",
        "--demos",
        "2",
        "--out",
        out,
    ]
    subprocess.run(line, check=True, cwd=ROOT)
    assert main(["eval", str(out / "act.gguf"), "--env", env, "--replan", "8", "--episodes", "1"]) == 0


def test_a_class_takes_over_within_limits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By a button of its own; the step at the hand-over is what the limits allow."""
    limits = tmp_path / "limits.json"
    limits.write_text(json.dumps({"low": -3, "high": 3, "velocity": 2.0, "jerk": 4000}))
    robot = ("--robot", f"{__name__}:Follower", "--motion", '{"kind": "absolute"}', "--limits", str(limits))
    lead = ("--takeover", f"{__name__}:Button", "--set", "align=2.5")
    assert (
        main(
            ["run", str(BLOCKS), *PLAIN, *robot, *lead, "--seconds", "2", "--set", "watchdog=false", "--json"]
        )
        == 0
    )
    said = capsys.readouterr()
    handed = json.loads(said.out.strip().splitlines()[-1])["handed"]
    assert handed["to_human"] == 1
    assert handed["steps"] > 10
    assert handed["largest"] <= 2.0 / 20
    assert "bound the step at each hand-over" in said.err


def test_a_leader_that_is_elsewhere_is_waited_for(capsys: pytest.CaptureFixture[str]) -> None:
    robot = ("--robot", f"{__name__}:Follower", "--motion", '{"kind": "absolute"}')
    lead = (
        "--takeover",
        f"{__name__}:Button",
        "--set",
        'takeover_options={"elsewhere": 50}',
        "--set",
        "align=0.5",
    )
    status = main(["run", str(BLOCKS), *PLAIN, *robot, *lead, "--seconds", "1", "--json"])
    assert status in (0, 3)  # a chunk may have come before he was asked for, or none
    said = capsys.readouterr()
    report = json.loads(said.out.strip().splitlines()[-1])
    assert report["held"]["taking over: the leader moves to the robot's position"] >= 8
    assert report["handed"] == {}
    assert "no limit bounds the step of" in said.err


def test_a_shadow_commands_nothing_and_says_how_well_it_agrees(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until forty steps were compared, however many of a busy machine's have no row of the policy."""
    add = ShadowAgreement.add

    def until_forty(self: ShadowAgreement, *given: Any) -> None:
        add(self, *given)
        if len(self._pairs) == 40:
            raise Stopped("enough")

    monkeypatch.setattr(ShadowAgreement, "add", until_forty)
    robot = ("--robot", f"{__name__}:Watched", "--motion", '{"kind": "absolute"}', "--set", "stale=60")
    more = ("--set", "shadow=true", "--set", "align=99", "--seconds", "600", "--json")
    assert main(["run", str(BLOCKS), *PLAIN, *robot, *more]) == 0
    report = last_json(capsys)
    found = report["agreement"]
    assert found["steps"] == 40
    assert found["missing"] == report["steps"] - 40
    assert len(found["numbers"]) == 4
    assert len(found["rows"]["numbers"]) == 4
    assert set(found["rows"]["row"]) <= set(
        range(32)
    )  # rows of this policy's chunks; a busy machine skips steps
    assert found["rows"]["count"][0] >= found["rows"]["count"][-1] > 0


@pytest.mark.usefixtures("dry_ends")
def test_what_the_rows_go_through_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    motion = ("--motion", '{"kind": "absolute"}', "--set", "filter=lowpass:3", "--set", "speed=0.5")
    assert main(["run", str(BLOCKS), *PLAIN, *motion, "--seconds", "600", "--json"]) == 0
    report = last_json(capsys)
    assert report["settings"]["speed"] == 0.5
    assert report["filter"]["filter"] == "lowpass:3"
    hz = report["settings"]["hz"]
    lag = parse_filter("lowpass:3", hz).lag
    assert report["filter"]["delay_ms"] == pytest.approx(1e3 * lag / hz, abs=1e-3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--takeover", "pedal"), "--takeover: expected lerobot:TYPE, expert or module:Class, got 'pedal'"),
        (("--takeover", "expert"), "--takeover expert: expected a simulated robot"),
        (("--takeover", "no.such:Arm"), "--takeover no.such:Arm: no module 'no'"),
        (("--takeover", "lerobot:so101_leader"), "--takeover lerobot"),
        (("--set", "takeover_options={}"), "takeover_options needs --takeover"),
        (("--takeover", "expert", "--set", "takeover_key=q"), "takeover_key: expected one character"),
        (("--set", "align=1"), "align needs --takeover or shadow"),
        (("--set", "shadow=true", "--robot", "blocks"), "shadow needs --takeover"),
        (
            ("--takeover", "expert", "--robot", "blocks", "--set", 'takeover_options={"after": 0}'),
            "after: expected a whole number of steps",
        ),
        (("--takeover", "expert", "--robot", "blocks", "--set", 'takeover_options={"soon": 1}'), "soon"),
        (("--set", "filter=box:1"), "filter: expected ema:SHARE or lowpass:HZ"),
        (("--set", "stale_of=wrist"), "stale_of wrist: expected CAMERA=SECONDS"),
        (("--set", "speed=0.5", "--motion", '{"kind": "as is"}'), "speed: expected motion"),
        (("--takeover", "expert", "--robot", "blocks", "--motion", '{"kind": "as is"}'), "expected a motion (absolute"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(
    options: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", str(BLOCKS), *PLAIN, "--seconds", "1", *options]) == 1
    assert message in capsys.readouterr().err


# ----------------------------------------------------------------------------- LeRobot's teleoperators


class Teleoperator:
    """What a LeRobot teleoperator has: joints in another order than the robot's."""

    def __init__(self, feedback: bool = True, names: tuple[str, ...] = ("b.pos", "a.pos")):
        self.action_features = dict.fromkeys(names, float)
        self.feedback_features = self.action_features if feedback else {}
        self.at = dict.fromkeys(names, 10.0)
        self.torque: list[bool] = []
        self.connected = True

    def get_action(self) -> dict[str, float]:
        return dict(self.at)

    def send_feedback(self, feedback: dict[str, float]) -> None:
        assert self.torque[-1]
        self.at = dict(feedback)

    def enable_torque(self) -> None:
        self.torque.append(True)

    def disable_torque(self) -> None:
        self.torque.append(False)

    def disconnect(self) -> None:
        self.connected = False


def test_a_teleoperator_is_brought_to_the_robot_and_set_free() -> None:
    """By name, a tenth of the way in each control step; then its motors are off."""
    device = Teleoperator()
    leader = LeRobotLeader(device, ["a.pos", "b.pos"])
    device.at = {"b.pos": 10.0, "a.pos": 0.0}
    assert leader.read() == [0.0, 10.0]
    leader.align(np.array([np.nan, -10.0]))  # a place that is not known is where it is
    assert leader.read() == [0.0, 8.0]
    for _ in range(60):
        leader.align(np.array([5.0, -5.0]))
    np.testing.assert_allclose(leader.read(), [5.0, -5.0], atol=0.05)
    assert device.torque == [True]
    leader.free()
    leader.align(np.array([5.0, -5.0]))  # by motors that are on again
    leader.close()
    assert device.torque[1:] == [False, True, False]
    assert not device.connected
    assert not hasattr(LeRobotLeader(Teleoperator(feedback=False), ["a.pos", "b.pos"]), "align")


@pytest.mark.parametrize("hz", [10.0, 30.0, 500.0])
def test_a_teleoperator_is_brought_to_the_robot_no_faster_than_a_hand_allows(hz: float) -> None:
    device = Teleoperator()
    leader = LeRobotLeader(device, ["a.pos", "b.pos"], hz)
    device.at = {"a.pos": 0.0, "b.pos": 0.0}
    for _ in range(int(10 * hz)):
        before = np.array(leader.read())
        leader.align(np.array([90.0, -150.0]))
        assert np.abs(np.array(leader.read()) - before).max() <= 60.0 / hz + 1e-9
    np.testing.assert_allclose(leader.read(), [90.0, -150.0], atol=0.5)
    device.at = {"a.pos": np.nan, "b.pos": 0.0}
    leader.align(np.array([90.0, -150.0]))  # from nowhere it is sent nowhere
    assert np.isnan(leader.read()[0])


@pytest.mark.parametrize("names", [["a.pos", "c.pos"], ["a.pos", "b.pos", "c.pos"], ["a.pos"]])
def test_a_teleoperator_of_another_robot_is_refused(names: list[str]) -> None:
    """Of other joints, of fewer and of more."""
    wanted = f"expected a leader with the joints {', '.join(names)}, got b.pos, a.pos"
    with pytest.raises(LeaderError, match=wanted):
        LeRobotLeader(Teleoperator(), names)


def test_what_is_no_leader_is_refused_by_name() -> None:
    for named, options, message in (
        ("sys:path", {}, "--takeover sys:path: expected a class, got list"),
        ("builtins:int", {"soon": 1}, "--takeover builtins:int: TypeError: "),
        (
            "builtins:list",
            {},
            "--takeover builtins:list: expected a class with a method `read`; add this method",
        ),
    ):
        with pytest.raises(LeaderError) as error:
            open_leader(named, options)
        assert str(error.value).startswith(message)


@newest_release
def test_types_of_lerobot_are_found_where_they_are_registered(release: str) -> None:
    """Two arms share a module that is called after neither."""
    code = (
        "import lerobot.robots as r, lerobot.teleoperators as t\n"
        "from sinew_client.control.robots import lerobot_choice\n"
        "print(lerobot_choice(t, t.TeleoperatorConfig, 'so101_leader').__name__)\n"
        "print(lerobot_choice(r, r.RobotConfig, 'so101_follower').__name__)\n"
        "try:\n    lerobot_choice(t, t.TeleoperatorConfig, 'toaster')\n"
        "except (KeyError, ImportError) as e:\n    print(e)\n"
        "from types import SimpleNamespace\n"
        "from sinew_client.arm.leaders import open_lerobot_leader\n"
        "arm = SimpleNamespace(action_features={'a': float}, feedback_features={}, get_action=lambda: {'a': 4})\n"
        "arm.connect = lambda: print('connected')\n"
        "t.make_teleoperator_from_config = lambda config: print(config.port) or arm\n"
        "print(open_lerobot_leader('so101_leader', {'port': 'a port'}, ['a']).read())\n"
        "from sinew_client.control.robots import lerobot_config\n"
        "made = lerobot_choice(r, r.RobotConfig, 'so101_follower')\n"
        "cameras = {'front': {'type': 'opencv', 'index_or_path': 0, 'width': 640, 'height': 480, 'fps': 30}}\n"
        "cameras['wrist'] = {**cameras['front'], 'type': 'nothing'}\n"
        "try:\n    lerobot_config(made, {'port': 'a port', 'cameras': cameras})\n"
        "except ValueError as e:\n    print(e)\n"
        "del cameras['wrist']\n"
        "print(lerobot_config(made, {'port': 'a port', 'cameras': cameras}).cameras['front'].type)\n"
    )
    paths = (lerobot_folder(release), ROOT / "packages" / "sinew-client" / "src")
    done = processes.run(
        [CLIENTS, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "HF_HUB_OFFLINE": "1"},
        nursery=nursery(release),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    *_, leader, follower, said = (lines := done.stdout.splitlines())[:-5]
    assert lines[-5:-2] == ["a port", "connected", "[4.0]"]
    assert re.match(r"cameras\.wrist\.type: expected one of .*opencv.*, got 'nothing'", lines[-2])
    assert lines[-1] == "opencv"
    assert (leader, follower) == ("SOLeaderTeleopConfig", "SOFollowerRobotConfig")
    assert "toaster" in said  # beside the modules whose drivers are not here
