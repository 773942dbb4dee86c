"""``sinew run``: from the command line to a robot's commands, keys, view, journal and its repetition."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import signal
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from sinew_client import ClientError
from sinew_client.control import Loop, Settings, Stopped, repeat
from sinew_client.control.facts import facts_of
from sinew_client.control.robots import Dry, LeRobotArm
from sinew_client.control.run import RunPlan
from sinew_eval.episodes.adapters import make_env
from sinew_eval.episodes.robot import SimulatedRobot

from sinew.cli import main
from sinew.cli.run_connection import check_guidance
from sinew.cli.run_robot import RobotFlags, plan_run
from sinew.cli.run_view import Keys, RunView
from sinew.core import SinewError
from tests import processes

HANGS = 600.0  # seconds after which a program is taken to stand still: a guard, and no bound
BLOCKS = Path(__file__).parents[2] / "sinew" / "assets" / "blocks.gguf"
PLAIN = ("--hz", "20", "--timeout", "60", "--prompt", "put the red block into the left bin")
POLICY: dict[str, Any] = {
    "cameras": [{"name": "front", "height": 4, "width": 6}],
    "state": {"dim": 2},
    "action": {"dim": 2},
}

FOUR: dict[str, Any] = {"state": {"dim": 4}, "action": {"dim": 4}}


def last_json(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    return json.loads(capsys.readouterr().out.strip().splitlines()[-1])


def test_dry_run_from_a_bundle(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    journal, limits = tmp_path / "run.jsonl", tmp_path / "limits.json"
    limits.write_text(json.dumps({"low": -0.2, "high": 0.2, "velocity": 1, "still": 0}))
    options = (
        "--seconds",
        "3",
        "--record",
        str(journal),
        "--limits",
        str(limits),
        "--motion",
        "absolute",
        *PLAIN,
    )
    assert main(["run", str(BLOCKS), *options, "--json"]) == 0
    report = last_json(capsys)
    assert (report["robot"], report["steps"]) == ("dry", 60)
    assert report["settings"]["motion"] == {"kind": "absolute"}
    assert report["executed"] > 0
    assert report["executed"] + sum(report["held"].values()) == 60
    found = repeat(journal)
    assert (found.commands, found.differences) == (60, [])
    assert main(["recording", "replay", str(journal), "--json"]) == 0
    assert last_json(capsys)["differ"] == 0
    sent = [
        json.loads(line)["command"]["row"]
        for line in journal.read_text().splitlines()
        if '"command":' in line
    ]
    rows = np.array([row for row in sent if row is not None])
    assert (np.abs(rows) <= 0.2 + 1e-6).all()
    before = journal.read_bytes()
    assert main(["run", str(BLOCKS), *options]) == 1
    said = f"error: {journal}: the file already exists; choose a new name\n"
    assert said in capsys.readouterr().err
    assert journal.read_bytes() == before


@pytest.mark.usefixtures("dry_ends")
def test_a_state_with_other_numbers_too_says_which_of_them_a_command_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nine numbers of state and four of a command, under a limit of velocity: it once held the robot all the time."""
    limits = tmp_path / "limits.json"
    limits.write_text('{"velocity": 1}')
    line = ("run", "act", "--robot", "dry", "--seconds", "60", "--limits", str(limits), *PLAIN, "--motion")
    assert main([*line, "absolute"]) == 1
    said = capsys.readouterr().err
    assert "error: limits.velocity: the robot's position before its first command is unknown" in said
    columns = re.search(r"\{.*\}", said).group()  # type: ignore[union-attr]
    assert main([*line, columns, "--json"]) == 0
    assert last_json(capsys)["executed"] > 0


def test_what_merges_chunks_of_any_policy_is_named_where_nothing_guides_them() -> None:
    with pytest.raises(
        SinewError, match="^--handover rtc: expected a, got b; aligned, ensemble and aggregate merge"
    ):
        check_guidance("rtc:ramp", FOUR, {"unguided": "expected a, got b"})


@pytest.mark.slow
def test_poses_that_cannot_be_continued_are_refused_before_the_robot_moves(groot_bundle, capsys) -> None:
    """Each request failed, and the robot was held for 35 of 45 steps."""
    line = ["run", str(groot_bundle("groot-n17")), "--robot", "dry", "--prompt", "go", "--seconds", "1"]
    line += ["--hz", "15"]
    assert main([*line, "--handover", "rtc:ramp"]) == 1
    said = capsys.readouterr().err
    assert (
        "error: --handover rtc: expected a policy whose action steps can all be inverted, got a step" in said
    )
    assert "holds" not in said


def test_simulated_robot_plays_episodes(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("mujoco")
    options = ("--robot", "gym:sinew/Blocks-v0", "--episodes", "1", "--hz", "200", "--handover", "freeze")
    assert main(["run", str(BLOCKS), *options, "--replan", "8", "--timeout", "60", "--json"]) == 0
    report = last_json(capsys)
    assert report["episodes"] == 1
    assert report["executed"] > 0


class Reach:
    """An environment of somebody's own, whose observation is not Sinew's."""

    control_hz, max_steps, action_space = 30.0, 5, SimpleNamespace(shape=(2,))

    def __init__(self) -> None:
        self.unwrapped = self

    def reset(self, **_: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        return {"top": np.full((4, 6, 3), 7, np.uint8), "agent_pos": np.array([1.0, 2.0])}, {}


def test_an_environment_of_ones_own_is_driven_through_an_adapter(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("gymnasium")
    mapping, reach = tmp_path / "map.json", f"gym:{__name__}:Reach"
    mapping.write_text(json.dumps({"images": {"front": "top"}, "state": ["agent_pos"], "prompt": "reach"}))
    machine = RobotFlags(reach, adapter=str(mapping)).opener()(
        {"architecture": "act", **POLICY, "action": {"dim": 2, "units": []}}
    )
    seen, facts = machine.observe(), facts_of(machine)
    assert (facts.task(), facts.hz, seen["images"]["front"].mean(), [*seen["state"]]) == (
        "reach",
        30.0,
        7,
        [1, 2],
    )
    assert main(["run", str(BLOCKS), "--robot", "dry", "--set", f"adapter={mapping}"]) == 1
    assert "adapter needs --robot gym:ENV" in capsys.readouterr().err


class Bench:
    """An arm of somebody's own: three methods, and what its joints are called."""

    joints = ("pan", "lift")

    def __init__(self) -> None:
        self._dry = Dry(POLICY)
        self.observe, self.act, self.hold = self._dry.observe, self._dry.act, self._dry.hold


def test_a_robot_names_what_its_policy_does_not_and_what_nothing_bounds_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    limits = tmp_path / "arm.json"
    limits.write_text(json.dumps({"low": -1, "velocity": [1, None]}))
    flags = RobotFlags(robot=f"{__name__}:Bench", hz=20, prompt="go", limits=limits, motion="absolute")

    def plan(policy: dict[str, Any]) -> RunPlan:
        with ExitStack() as stack:
            robot = flags.opened(stack, flags.opener(), policy)
            return plan_run(policy, robot, flags.chosen(policy), flags.prompt)

    made = plan(POLICY).settings.limits
    assert made is not None
    assert made["names"] == ["pan", "lift"]
    assert capsys.readouterr().err.splitlines() == [
        "joints pan, lift: in the robot's order, because the policy does not name its joints",
        "limits: no speed limit for lift; set velocity in --limits FILE",
        "rest: at the end of the run the robot returns slowly to its first pose; --rest hold leaves it where it is",
    ]
    limits.write_text(json.dumps({"velocty": 1}))
    with pytest.raises(ClientError, match="velocty: .* did you mean 'velocity'"):
        plan(POLICY)
    with pytest.raises(ClientError, match="joints: expected 3 names for its state, got 2"):
        plan({**POLICY, "state": {"dim": 3}})


class Broken(Bench):
    """An arm whose bus does not answer. It shows what a policy of blocks sees."""

    joints = None  # type: ignore[assignment]

    def __init__(self) -> None:
        dry = Dry(
            {"cameras": [{"name": name, "height": 8, "width": 8} for name in ("front", "wrist")]} | FOUR
        )
        self.observe, self.hold = dry.observe, dry.hold

    def act(self, row: np.ndarray) -> None:
        raise OSError("no answer from servo 3")


def test_what_a_robot_raises_is_called_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(BLOCKS), "--robot", f"{__name__}:Broken", "--seconds", "600", *PLAIN]) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert re.search(
        r"error: the robot raised OSError: no answer from servo 3 \(act, test_run\.py:\d+; `--debug`", said
    )
    assert "a fault of this program" not in said


@pytest.mark.slow
def test_help_begins_with_the_robot(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    assert main(["run", "--help"]) == 0
    said = capsys.readouterr().out
    assert said.index("--robot ") < said.index("--limits") < said.index("--handover") < said.index("--engine")
    assert len(said.splitlines()) <= 80
    assert len(set(re.findall(r"^│ (--[a-z-]+)", said, re.MULTILINE))) <= 23
    assert "sinew run --settings" in said
    assert 'The page "Late answers"' in " ".join(said.replace("│", " ").split())


class Patient(SimulatedRobot):
    """The hand over the table, in a world that stands still while it holds: its moves do not depend on the clock."""

    def __init__(self, commands: int):
        super().__init__(*make_env("sinew/Blocks-v0"))
        self._left = commands

    def act(self, row: np.ndarray) -> None:
        super().act(row)
        self._left -= 1
        if not self._left:
            raise Stopped("enough")

    def hold(self) -> None:
        pass


@pytest.mark.usefixtures("unhurried")  # a data set wants steps that follow each other
def test_a_run_ends_with_the_motion_of_its_offsets(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("mujoco")
    from sinew_eval.sim.blocks import STEP_SIZE

    journal, frames = tmp_path / "run.jsonl", tmp_path / "frames"
    robot = ("--robot", f"{__name__}:Patient", "--robot-options", '{"commands": 96}')
    robot += ("--record", str(journal), "--frames", str(frames))
    options = ("--handover", "freeze", "--replan", "4", *PLAIN[2:])
    assert main(["run", str(BLOCKS), *robot, *options, "--hz", "20", "--json"]) == 0
    said = capsys.readouterr()
    report = json.loads(said.out.strip().splitlines()[-1])
    motion = report["motion"]["motion"]
    assert (motion["kind"], motion["action"], motion["state"]) == ("offsets", [0, 1, 2], [0, 1, 2])
    assert 0.8 * STEP_SIZE < motion["scale"] < STEP_SIZE  # the hand lags behind what it is told
    advice = f"--motion '{json.dumps(motion)}'"
    assert advice in said.err
    assert main(["recording", "replay", str(journal)]) == 0
    assert advice in capsys.readouterr().out
    assert main(["recording", "replay", str(journal), "tcp://127.0.0.1:1"]) == 1
    assert "address: expected none, because the decision log" in capsys.readouterr().err
    # Wherever a line ends: the folder's name may be longer than one.
    assert f"96stepsin{frames};sinewrecordingdataset{frames}OUTmakes" in re.sub(r"[│\s]", "", said.err)
    pytest.importorskip("pyarrow", reason="the extra `dataset` is not installed")
    assert main(["recording", "dataset", str(frames), str(tmp_path / "set"), "--json"]) == 0
    assert last_json(capsys)["frames"] == 96
    info = json.loads((tmp_path / "set" / "meta" / "info.json").read_text())
    assert info["fps"] == 20
    named = [info["features"][key]["names"] for key in ("observation.state", "action")]  # in each frame
    assert named == [["x", "y", "z", "opening"], ["x", "y", "z", "gripper"]]
    assert main(["recording", "dataset", str(journal), str(tmp_path / "none")]) == 1
    assert f"{journal}: no records (*.npz) in this folder; " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ("--robot", "toaster"),
            "--robot: expected dry, blocks, pen, egg, gym:ENV, module:Class or lerobot:TYPE",
        ),
        (("--robot", "no.such:Arm"), "robot no.such:Arm: no module 'no'; searched "),
        (("--robot", "builtins:list"), "expected the methods observe, act and hold; observe is missing"),
        (("--robot", "lerobot:so101_follower"), "lerobot"),
        (("--handover", "late"), "handover: expected one of freeze"),
        (("--replan", "never"), "expected STEPS"),
        (("--motion", "[]"), "--motion: expected a JSON object"),
        (("--episodes", "3"), "--episodes needs --robot gym:ENV"),
        (("--set", "adapter=a.json", "--set", "kinematics=b.xml"), "adapter needs --robot gym:ENV"),
        (("--limits", "nowhere.json"), "nowhere.json"),
        ((), "--seconds: expected a number where there is no keyboard"),
    ],
)
def test_what_is_wrong_is_named(
    options: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", str(BLOCKS), *PLAIN, *options]) == 1
    assert message in capsys.readouterr().err


def test_an_instruction_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(BLOCKS), "--hz", "20", "--seconds", "1"]) == 1
    assert "--prompt: neither the policy nor the robot has an instruction" in capsys.readouterr().err


def loop_without_server() -> Loop:
    return Loop(
        Dry(POLICY),
        lambda: lambda observation, limit: np.zeros((4, 2)),
        Settings(50.0, "aligned", "1"),
        2,
        "stack",
    )


def test_keys_pause_say_and_stop() -> None:
    loop = loop_without_server()
    keys = Keys(loop)
    loop.pause()
    loop.run(2)
    assert loop.controller.paused
    keys.press(" ")
    loop.run(4)
    assert not loop.controller.paused
    for key in "pabx\x7fc\r":
        keys.press(key)
    loop.run(6)
    assert loop.prompt == "abc"
    for key in "pzz\x1b":
        keys.press(key)
    loop.run(8)
    assert (loop.prompt, keys.typing) == ("abc", None)
    keys.press("q")
    assert loop.run(100).steps == 8


def test_the_view_says_what_happens() -> None:
    loop = loop_without_server()
    view = RunView(loop, Keys(loop))
    loop.pause()
    loop.run(3)
    text = io.StringIO()
    Console(file=text, width=100).print(view.picture())
    assert "step 0: holds: paused" in text.getvalue()  # later holds may take its line
    loop.resume()
    loop.stopped = False
    loop.run(30)
    text = io.StringIO()
    Console(file=text, width=100).print(view.picture())
    for part in ("stack", "goes on", "50 Hz", "+0.000"):
        assert part in text.getvalue()


def test_with_a_keyboard_it_starts_paused_and_q_ends_it(tmp_path: Path) -> None:
    journal = tmp_path / "run.jsonl"
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "sinew", "run", str(BLOCKS), *PLAIN, "--record", str(journal)]
    with processes.Process(command, stdin=theirs, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        try:
            _read_until(ours, b"paused")
            os.write(ours, b" ")
            _read_until(ours, b"moves")
            os.write(ours, b"q")
            seen = _drain(ours, process)
            assert process.wait(60) == 0
        finally:
            process.kill()
    assert b"cadence" in seen
    events = [json.loads(line) for line in journal.read_text().splitlines()]
    assert [event["event"] for event in events[:3]] == ["begin", "pause", "command"]
    assert events[2]["command"]["reason"] == "paused"
    assert any(event["event"] == "command" and event["command"]["row"] is not None for event in events)


@pytest.mark.parametrize("end", ["the keyboard is gone", "SIGTERM", "SIGHUP"])
def test_the_robot_holds_when_nobody_could_stop_it(tmp_path: Path, end: str) -> None:
    journal = tmp_path / "run.jsonl"
    ours, theirs = pty.openpty()
    command = [
        sys.executable,
        "-m",
        "sinew",
        "run",
        str(BLOCKS),
        *PLAIN,
        "--record",
        str(journal),
        "--set",
        "go=true",
    ]
    with (
        (tmp_path / "out").open("wb") as out,
        processes.Process(
            command, stdin=theirs, stdout=theirs, stderr=out, start_new_session=True
        ) as process,
    ):
        os.close(theirs)
        try:
            _read_until(ours, b"moves")
            if end.startswith("SIG"):
                process.send_signal(getattr(signal, end))
                _drain(ours, process)
                assert process.wait(60) == 0
            else:
                os.close(ours)
                assert process.wait(60) in (0, 1)  # its standard output is gone, too
        finally:
            process.kill()
    events = [json.loads(line) for line in journal.read_text().splitlines()]
    assert any(event["event"] == "command" and event["command"]["row"] is not None for event in events)
    if end.startswith("SIG"):
        assert "cadence" in (tmp_path / "out").read_text()


def test_a_run_under_nohup_outlives_its_terminal(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "sinew", "run", str(BLOCKS), *PLAIN, "--set", "go=true"]
    with processes.Process(
        command, stdin=theirs, stdout=theirs, stderr=theirs, ignored=(signal.SIGHUP,)
    ) as process:
        os.close(theirs)
        try:
            _read_until(ours, b"moves")
            process.send_signal(signal.SIGHUP)
            for state in (
                b"paused",
                b"moves",
            ) * 3:  # a run that ends draws its view once more, and not six times
                os.write(ours, b" ")
                _read_until(ours, state)
            os.write(ours, b"q")
            _drain(ours, process)
            assert process.wait(HANGS) == 0
        finally:
            process.kill()


def _drain(terminal: int, process: processes.Process) -> bytes:
    """Return what is drawn until the process ends; a terminal that nobody reads would block it. Closes the terminal."""
    seen, limit, ended = b"", time.monotonic() + HANGS, False
    while not ended:
        assert time.monotonic() < limit, seen[-2000:]
        ended = process.poll() is not None  # before the last look
        while select.select([terminal], [], [], 0.1)[0]:
            try:
                seen += os.read(terminal, 65536)
            except OSError:  # the other end is closed and empty
                ended = True
                break
    os.close(terminal)
    return seen


def _read_until(terminal: int, state: bytes) -> bytes:
    """Read until the panel's row "state" says so: its events say "paused" long after."""
    seen, limit = b"", time.monotonic() + HANGS
    while not re.search(rb"state[^\r\n]*" + state, seen):
        assert time.monotonic() < limit, seen[-2000:]
        if select.select([terminal], [], [], 1.0)[0]:
            seen += os.read(terminal, 65536)
    return seen


class Arm:
    """What LeRobot 0.4 calls a robot, with two joints and a camera."""

    action_features: dict[str, Any] = {"shoulder.pos": float, "elbow.pos": float}  # noqa: RUF012
    observation_features: dict[str, Any] = {**action_features, "top": (4, 6, 3)}  # noqa: RUF012

    def __init__(self) -> None:
        self.sent: list[dict[str, float]] = []

    def get_observation(self) -> dict[str, Any]:
        return {"top": np.full((4, 6, 3), 7, np.uint8), "elbow.pos": 2.0, "shoulder.pos": 1.0}

    def send_action(self, action: dict[str, float]) -> dict[str, float]:
        self.sent.append(action)
        return action


def test_joints_go_by_name_in_the_order_of_the_robot() -> None:
    arm = Arm()
    robot = LeRobotArm(arm, POLICY, {"front": "top"})
    seen = robot.observe()
    assert seen["state"].tolist() == [1, 2]
    assert seen["images"]["front"].shape == (4, 6, 3)
    robot.hold()
    robot.act(np.float32([3, 4]))
    robot.hold()
    moved = {"shoulder.pos": 3.0, "elbow.pos": 4.0}
    assert arm.sent == [{"shoulder.pos": 1.0, "elbow.pos": 2.0}, moved, moved]
    with pytest.raises(
        ClientError, match="the policy requires front; the robot has top. Map it with --rename top=front"
    ):
        LeRobotArm(arm, POLICY)
    with pytest.raises(
        ClientError, match="state has 3 values, but the robot has 2 joints: shoulder.pos, elbow.pos"
    ):
        LeRobotArm(arm, {**POLICY, "state": {"dim": 3}}, {"front": "top"})


def test_the_first_answer_is_waited_for_as_long_as_the_user_says(capsys: pytest.CaptureFixture[str]) -> None:
    server = f"tcp://127.0.0.1:{processes.free_port()}"  # where nobody listens
    assert main(["run", server, "--robot", "gym:sinew/Blocks-v0", "--timeout", "0.2"]) != 0
    assert f"no answer from {server} within 0.2 s" in " ".join(capsys.readouterr().err.split())
    for value in ("0", "-1", "nan"):
        assert main(["run", server, "--robot", "gym:sinew/Blocks-v0", f"--timeout={value}"]) != 0
        assert f"--timeout: expected a number > 0, got {value}" in capsys.readouterr().err
