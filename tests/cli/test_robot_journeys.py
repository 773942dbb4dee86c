"""The verbs that move a robot, as a user runs them: what came of it, what was said, and the status they ended with."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from sinew_client import ClientError, RequestTimeout
from sinew_client.control import Loop, Settings, Stopped
from sinew_client.control.facts import facts_of
from sinew_client.control.robots import Dry
from sinew_client.faults import Faults, kind_of
from sinew_eval.episodes.adapters import make_env
from sinew_eval.episodes.robot import SimulatedRobot
from sinew_eval.foreign.server import serving

from sinew.cli import main
from sinew.cli.run_robot import episodes_text
from sinew.cli.run_view import Keys, RunView
from sinew.cli.status import EXIT_FAULTS, problems
from sinew.core import ObservationError
from sinew.engine import guidance
from sinew.policy import Policy
from sinew.serve.request import SupersededError
from sinew.stream import Session
from tests import processes
from tests.covering import some

ROOT = Path(__file__).resolve().parents[2]
BLOCKS = ROOT / "sinew" / "assets" / "blocks.gguf"
GYM = ("--robot", "gym:sinew/Blocks-v0")
DRY = ("--robot", "dry", "--prompt", "put the red block into the left bin", "--hz", "20")


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, dict[str, Any], str]]:
    """Runs a verb: ``said(*words)`` returns its status, its JSON and what it printed beside."""

    def run(*words: str) -> tuple[int, dict[str, Any], str]:
        status = main([*words, "--json"])
        out, err = capsys.readouterr()
        return status, json.loads(out) if out else {}, " ".join(err.split())

    return run


def events(journal: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in journal.read_text().splitlines()]


# ----------------------------------------------------------------------------- instructions and successes


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The world waits while the robot holds, so that success does not depend on how fast this machine answers."""
    monkeypatch.setattr(SimulatedRobot, "hold", lambda _: None)


@pytest.mark.usefixtures("patient")
def test_every_episode_gets_its_own_instruction_and_succeeds(said: Any, tmp_path: Path) -> None:
    journal = tmp_path / "run.jsonl"
    own = ("--handover", "freeze", "--replan", "8", "--timeout", "60", "--record", str(journal))
    status, report, text = said("run", "blocks", *GYM, "--episodes", "6", "--hz", "200", *own)
    assert status == 0
    assert report["episodes"] == 6
    assert report["successes"] >= 5
    assert f"{report['successes']} of 6 succeeded" in text
    env, adapter = make_env("sinew/Blocks-v0")
    tasks = [adapter.observation(env.reset(seed=5000 + k)[0])["prompt"] for k in range(6)]
    env.close()
    assert len(set(tasks)) > 2
    asked: list[str] = []  # the instruction of each episode's first request
    prompt, fresh = "", True
    for event in events(journal):
        prompt = event.get("prompt", prompt)
        fresh |= event["event"] == "fault" and event["reason"] == "a new episode"
        if event["event"] == "ask" and fresh:
            asked.append(prompt)
            fresh = False
    assert asked == tasks
    assert main(["recording", "replay", str(journal)]) == 0


@pytest.mark.slow
def test_a_prompt_that_was_given_is_that_of_all_episodes(said: Any, tmp_path: Path) -> None:
    journal = tmp_path / "run.jsonl"
    given = "put the green cube into the right bin"
    more = ("--prompt", given, "--record", str(journal), "--timeout", "60")
    status, report, text = said("run", "blocks", *GYM, "--episodes", "3", "--hz", "400", *more)
    assert (status, report["prompt"], report["episodes"]) == (0, given, 3)
    assert f"prompt: '{given}' replaces the environment's own instruction" in text
    assert {event["prompt"] for event in events(journal) if "prompt" in event} == {given}


def test_a_stream_follows_the_episodes_and_counts_them(said: Any) -> None:
    status, report, text = said("run", "egg", "--stream", "--robot", "gym:sinew/Egg-v0", "--episodes", "2")
    assert (status, report["errors"], report["episodes"]) == (0, 0, 2)
    assert report["windows"] > 10
    assert f"{report['successes']} of 2 succeeded" in text


@pytest.mark.slow
def test_a_new_instruction_of_an_episode_is_streamed(said: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    compute = Session.compute

    def noted(session: Session) -> Any:
        made = compute(session)
        if made is not None and (not read or read[-1] != session.prompt):
            read.append(session.prompt)
        return made

    monkeypatch.setattr(Session, "compute", noted)
    said("run", "blocks", "--stream", *GYM, "--episodes", "2", "--hz", "200", "--set", "rtc=none")
    env, adapter = make_env("sinew/Blocks-v0")
    tasks = [adapter.observation(env.reset(seed=5000 + k)[0])["prompt"] for k in range(2)]
    env.close()
    assert read == tasks


def test_the_view_counts_episodes_while_it_runs() -> None:
    class Played(Dry):
        finished, successes, episodes, on_episode, task = 4, 3, None, None, "the environment's"

    policy = {"cameras": [], "state": {"dim": 2}, "action": {"dim": 2}}
    loop = Loop(Played(policy), lambda: lambda *_: np.zeros((4, 2)), Settings(50.0, replan="1"), 2, "mine")
    from rich.console import Console

    console = Console(width=100, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(RunView(loop, Keys(loop)).picture())
    text = console.export_text()
    assert "3 of 4 succeeded, 75 %" in text
    assert "the environment's" in text
    assert episodes_text(facts_of(Dry(policy))) == ""


# ----------------------------------------------------------------------------- streams with every guidance


class Forty(Dry):
    """Ends the run after forty commands, more than one chunk of the blocks policy has."""

    def __init__(self) -> None:
        front = [{"name": name, "height": 96, "width": 96} for name in ("front", "wrist")]
        super().__init__({"cameras": front, "state": {"dim": 4}, "action": {"dim": 4}})

    def act(self, row: np.ndarray) -> None:
        super().act(row)
        if self.commands == 40:
            raise Stopped("enough")


FORTY = (
    "--robot",
    f"{__name__}:Forty",
    "--prompt",
    "put the red block into the left bin",
    "--set",
    "stale=30",
)


@pytest.mark.parametrize(
    "guidance_of",
    some(
        [[], *(["--set", f"rtc={kind}"] for kind in ("guided", "no-jacobian", "ramp"))], []
    ),  # guided: below
)
def test_windows_continue_under_every_guidance(said: Any, guidance_of: list[str]) -> None:
    status, report, _ = said("run", "blocks", "--stream", *FORTY, "--seconds", "600", *guidance_of)
    assert (status, report["errors"], report["failed"]) == (0, 0, [])
    assert report["executed"] == 40
    assert report["windows"] > 1
    assert (f"({guidance_of[1].removeprefix('rtc=')})" if guidance_of else "no guidance") in report["label"]


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_windows_continue_under_guidance_over_a_socket(said: Any, tmp_path: Path) -> None:
    with serving(BLOCKS, tmp_path / "serve.log", "--engine", "plan") as address:
        status, report, _ = said(
            "run", address, "--stream", *FORTY, "--seconds", "600", "--set", "rtc=guided"
        )
    assert (status, report["errors"], report["executed"]) == (0, 0, 40)
    assert report["windows"] > 1


@pytest.mark.parametrize("kind", some(["guided", "no-jacobian", "ramp"], "ramp"))
def test_streams_are_evaluated_with_guidance(said: Any, kind: str) -> None:
    more = ("--env", "sinew/Pen-v0", "--episodes", "1", "--workers", "1")
    status, report, _ = said("eval", "pen", "--stream", f"16.5:10.8:{kind}", *more)
    assert status == 0
    assert report["variants"][0]["chunks"] > 2


def test_noise_without_the_axis_of_the_batch_is_refused() -> None:
    wanted = type("Wanted", (), {"kind": "ramp", "beta": 5.0, "target": np.zeros((4, 2), np.float32)})()
    with pytest.raises(
        ValueError,
        match=r"noise: expected shape \[1, 4, 2\], which is one \[H, A\] for each request, got \[4, 2\]",
    ):
        guidance.guide([wanted], None, np.zeros((4, 2), np.float32), np.asarray)  # type: ignore[list-item, arg-type]


# ----------------------------------------------------------------------------- what failed, and the status


class Waiting(Forty):
    """Ends the run when it has been held, after it moved, with two windows known to have failed: the first of them has
    been counted then, whatever else this machine does. The watchdog holds on a thread of its own."""

    failures: ClassVar[list[int]] = []
    held = 0

    def act(self, row: np.ndarray) -> None:
        Dry.act(self, row)

    def hold(self) -> None:
        super().hold()
        own = threading.current_thread() is threading.main_thread()
        self.held += own and self.commands > 0 and len(self.failures) > 1

    def observe(self) -> dict[str, Any]:
        if self.held > 1:
            raise Stopped("windows failed")
        return super().observe()


def test_a_stream_whose_windows_fail_says_so(said: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Waiting, "failures", [])

    def broken(*_: Any) -> None:
        Waiting.failures.append(1)
        raise TypeError("not subscriptable")

    monkeypatch.setattr(guidance, "guide", broken)  # of the second window on, as it was
    more = ("--robot", f"{__name__}:Waiting", *DRY[2:], "--set", "stale=30", "--seconds", "120")
    status, report, text = said("run", "blocks", "--stream", *more, "--set", "rtc=guided")
    assert status == EXIT_FAULTS
    assert list(report["faults"]["kinds"]) == ["internal"]
    # errors are counted by the thread that computes, also after the robot's last look at them
    assert 0 < report["faults"]["kinds"]["internal"] <= report["errors"] <= len(Waiting.failures)
    assert report["executed"] > 0
    assert any(reason.startswith("internal error (TypeError)") for reason in report["held"])
    assert "failed: " in text
    assert "the first: internal error (TypeError)" in text


def test_a_run_whose_requests_fail_says_so(said: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    infer, calls = Policy.infer, []

    def sometimes(policy: Policy, *more: Any) -> Any:
        calls.append(1)
        if len(calls) % 2 == 0:
            raise TypeError("not subscriptable")
        return infer(policy, *more)

    monkeypatch.setattr(Policy, "infer", sometimes)
    status, report, text = said(
        "run", "blocks", *FORTY, "--replan", "4", "--timeout", "60", "--seconds", "600"
    )
    assert status == EXIT_FAULTS
    assert report["faults"]["kinds"] == {"TypeError": report["failed_requests"]}
    assert report["executed"] > 0
    assert "internal error: TypeError: not subscriptable" in report["held"]
    assert "the first: internal error: TypeError: not subscriptable" in text


def test_a_robot_that_was_held_all_the_time_is_no_success(said: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    status, report, text = said("run", "blocks", *DRY, "--set", "max_age=0.000001", "--seconds", "2")
    assert (status, report["executed"], report["faults"]["total"]) == (EXIT_FAULTS, 0, 0)
    assert "the robot was held all the time and never got a command" in text
    monkeypatch.setattr(Session, "run", lambda _session, _pause: None)
    status, report, text = said("run", "blocks", "--stream", *DRY, "--seconds", "2")
    assert (status, report["executed"], report["errors"]) == (EXIT_FAULTS, 0, 0)
    assert "never got a command: no window yet" in text


def test_answers_that_come_late_are_normal_life() -> None:
    """Missed deadlines, for which the robot held and went on, are counted and are no error; at the end they are."""
    answers: list[Any] = [1, RequestTimeout("late"), 1, SupersededError("newer"), RequestTimeout("late"), 1]

    def call(_observation: Any, _seconds: float) -> np.ndarray:
        found = answers.pop(0) if answers else 1
        if isinstance(found, Exception):
            raise found
        return np.zeros((4, 2), np.float32)

    policy = {"cameras": [], "state": {"dim": 2}, "action": {"dim": 2}}
    loop = Loop(Dry(policy), lambda: call, Settings(50.0, replan="1", deadline=60.0), 2, "go")
    report = loop.run(60)
    loop.close()
    assert report.failed_requests == 3
    assert problems(report.faults, report.executed, report.held, False, report.unanswered) == []
    assert problems(report.faults, 5, {}, False, 1) == []
    assert problems(report.faults, 5, {}, False, 2) == ["the last 2 requests had no answer"]


def test_who_ended_or_paused_a_run_is_not_told_that_it_never_moved() -> None:
    none = Faults().to_dict()
    assert problems(none, 0, {"paused": 9}, False) == []
    assert problems(none, 0, {"no chunk yet": 9}, True) == []
    assert problems(none, 0, {"no chunk yet": 9, "paused": 1}, False) != []
    assert problems(none, 1, {"no chunk yet": 9}, False) == []


def test_errors_are_told_from_what_is_late() -> None:
    assert kind_of(RequestTimeout("")) == kind_of(SupersededError("")) == ""
    assert kind_of(ObservationError("images", "a", "b")) == "bad_observation"
    assert kind_of(ValueError("")) == "ValueError"
    faults = Faults()
    for each in ("internal", "internal", "UnsafeChunk"):
        faults.add(each, f"it was {each}")
    assert str(faults) == "2 x internal, 1 x UnsafeChunk; the first: it was internal"


def test_chunks_that_nothing_could_execute_end_an_evaluation(
    said: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sinew_eval.episodes.policies import InProcess

    infer = InProcess.infer

    def broken(policy: InProcess, observation: Any, seed: int) -> tuple[np.ndarray, float]:
        actions, took = infer(policy, observation, seed)
        return actions * np.nan, took

    monkeypatch.setattr(InProcess, "infer", broken)
    status, report, text = said("eval", "pen", "--episodes", "1", "--workers", "1")
    assert status == EXIT_FAULTS
    assert "answers could not be executed: bad_chunk" in text
    assert report["failed"]


# ----------------------------------------------------------------------------- somebody's own robot

MINE = """
import time
import numpy as np
from sinew_client.control import Stopped

class Camera:
    def read(self): return np.zeros((96, 96, 3), np.uint8)

class Bus:
    last = np.zeros(4, np.float32)
    def positions(self): return self.last.copy()
    def write(self, row): self.last = np.asarray(row, np.float32)

camera, bus = Camera(), Bus()
"""


def documented_class() -> str:
    """Return the class of docs/control.md, which shows what a robot is."""
    found = re.search(
        r"^class Arm:\n.*?(?=^\S)", (ROOT / "docs" / "control.md").read_text(), re.DOTALL | re.MULTILINE
    )
    assert found is not None
    return found[0]


def sinew(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder as the installed program does: without the folder on the path (-P)."""
    paths = [str(ROOT), str(ROOT / "packages" / "sinew-client" / "src")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-P", "-m", "sinew", *words]
    return processes.run(command, cwd=folder, env=environment, timeout=300, forking=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's folder: the robot of the documentation, with his camera and bus, and one with both cameras."""
    made = tmp_path_factory.mktemp("mine")
    both = """

class Both(Arm):
    def observe(self):
        return {"images": {"top": camera.read(), "wrist": camera.read()}, "state": bus.positions()}

    acts = 0
    def act(self, row):
        super().act(row)
        self.acts += 1
        if self.acts == 40: raise Stopped("enough commands, however long they took")


def plan(instruction, observation):
    return None
"""
    (made / "my_robot.py").write_text(MINE + documented_class() + both)
    return made


def test_a_robot_of_the_current_folder_moves(folder: Path) -> None:
    more = ("--prompt", "put the red block into the left bin", "--hz", "20", "--timeout", "60")
    done = sinew(
        folder,
        "run",
        "blocks",
        "--robot",
        "my_robot:Both",
        "--rename",
        "top=front",
        "--seconds",
        "600",
        *more,
        "--json",
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["executed"] == 40
    assert report["failed_requests"] == 0


@pytest.mark.parametrize("by", [(), ("--stream",)], ids=["chunks", "stream"])
def test_a_robot_with_other_cameras_is_refused_before_it_moves(folder: Path, by: tuple[str, ...]) -> None:
    more = ("--prompt", "go", "--hz", "20", "--seconds", "20")
    done = sinew(folder, "run", "blocks", *by, "--robot", "my_robot:Both", *more)
    assert done.returncode == 1
    error = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(error) == 1
    assert "images.top: expected one of the cameras ['front', 'wrist']" in error[0]
    assert error[0].endswith("the robot top, wrist; say which is which: --rename top=front")
    assert "Traceback" not in done.stderr
    assert "(rename" not in done.stderr


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ("run", "nowhere.gguf", "--robot", "your_robot:Arm"),
            "robot your_robot:Arm: no module 'your_robot'",
        ),
        (("run", "nowhere.gguf", "--robot", "my_robot:Leg"), "my_robot.py has no 'Leg'"),
        (
            ("run", "nowhere.gguf", "--stream", "--set", "planner=your_plan:plan"),
            "planner your_plan:plan: no module 'your_plan'",
        ),
        (("eval", "expert", "--env", "your_env:Arm-v0"), "env your_env:Arm-v0: no module 'your_env'"),
        (
            ("eval", "blocks", "--adapter", "your_adapter:Arm"),
            "adapter your_adapter:Arm: no module 'your_adapter'",
        ),
    ],
)
def test_a_module_that_is_not_there_is_said_at_once(folder: Path, words: tuple[str, ...], says: str) -> None:
    """Before anything is loaded: where the bundle is missing too, it is the module that is said."""
    done = sinew(folder, *words)
    assert done.returncode == 1
    error = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(error) == 1
    assert says in error[0]
    assert "has no" in says or f"searched {folder}, PYTHONPATH and the installed packages" in error[0]


def test_environments_and_planners_of_the_current_folder_are_found(folder: Path) -> None:
    (folder / "my_env.py").write_text(
        "from sinew_eval.sim.pen import PenEnv\n\nclass Mine(PenEnv):\n    max_steps = 120\n"
    )
    (folder / "my_adapter.py").write_text(
        "from sinew_eval.episodes.adapters import Direct\n\nclass Mine(Direct): ...\n"
    )
    done = sinew(
        folder,
        "eval",
        "pen",
        "--env",
        "my_env:Mine",
        "--adapter",
        "my_adapter:Mine",
        "--episodes",
        "1",
    )
    assert done.returncode == 0, done.stderr
    more = (
        "--robot",
        "my_robot:Both",
        "--rename",
        "top=front",
        "--prompt",
        "go",
        "--seconds",
        "600",
        "--set",
        "stale=30",
        "--set",
        "planner=my_robot:plan",
    )
    done = sinew(folder, "run", "blocks", "--stream", *more, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["planner"]["failed"] == 0


# ----------------------------------------------------------------------------- the package's own policies


def test_policies_of_the_package_go_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from sinew.convert.sources import embedded, resolve

    monkeypatch.chdir(tmp_path)
    assert {"act", "blocks", "blocks-rtc", "egg", "pen"} == set(embedded())
    assert resolve("pen") == ROOT / "sinew" / "assets" / "pen.gguf"
    assert main(["inspect", "blocks"]) == 0
    assert main(["inspect", "blokcs"]) == 1
    assert "did you mean 'blocks'?" in capsys.readouterr().err
    (tmp_path / "pen").write_bytes(b"mine")
    assert resolve("pen") == Path("pen")


def test_a_robot_names_a_camera_that_it_has_not() -> None:
    from sinew_client.control.robots import Renamed

    robot = Renamed(Forty(), {"front": "top"})
    with pytest.raises(
        ClientError, match=r"--rename: expected a camera of the robot \(front, wrist\), got top"
    ):
        robot.observe()
