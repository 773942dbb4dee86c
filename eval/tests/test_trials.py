"""``sinew trials``: the line that a person types, each trial kept, and what the leaderboard says of a sitting."""

from __future__ import annotations

import itertools
import json
import math
import os
import pty
import select
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("gymnasium", reason="trials need the sim extra")
pytest.importorskip("mujoco", reason="the pen needs the sim extra")

from sinew.bundle import Bundle
from sinew.cli import main
from sinew.core import SinewError
from sinew_client.control import Command, Outcome
from sinew_client.control.robots import Dry
from tests.control.test_loop import loop_of

from sinew_eval.episodes import episode_log
from sinew_eval.episodes.adapters import make_env
from sinew_eval.episodes.robot import SimulatedRobot
from sinew_eval.episodes.runner import Episode
from sinew_eval.episodes.settings import Task, Variant
from sinew_eval.evidence import page
from sinew_eval.report import stats
from sinew_eval.trials.desk import JUDGED, OVER, PAUSED, RUNS, TrialTally, VerdictInput
from sinew_eval.trials.sitting import TrialSession
from tests import processes

PEN = Path(__file__).resolve().parents[2] / "sinew" / "assets" / "pen.gguf"
HANGS = 300.0  # seconds after which a program is taken to stand still: a guard, and no bound
PLAIN = ("--handover", "freeze", "--replan", "8")
BENCH = (PEN, "--compare", "replan=4", "--robot", f"{__name__}:Bench", "--replan", "8", "--hz", "60")
DRY = ("--robot", "dry", "--prompt", "catch it", "--hz", "50", "--seconds", "60")


class Patient(SimulatedRobot):
    """The pen, in a world that stands still while it holds: its moves do not depend on the clock."""

    def __init__(self) -> None:
        super().__init__(*make_env("sinew/Pen-v0"))

    def hold(self) -> None:
        pass


class Bench(Dry):
    """A robot of somebody's own, which sets its scenes up and judges itself: its third trial is lost."""

    task, success = "catch the pen", None

    def __init__(self) -> None:
        super().__init__(Bundle(PEN).manifest.spec.to_dict())
        self._trials = 0

    def set_up(self, seed: int) -> None:
        self._trials, self._acted, self.success = self._trials + 1, 0, None

    def act(self, row: np.ndarray) -> None:
        super().act(row)
        self._acted += 1
        self.success = self._trials != 3 if self._acted == 8 else None


def typed(*words: object) -> int:
    return main(["trials", *map(str, words)])


def lines(out: Path) -> list[dict[str, Any]]:
    """Return what the log of a sitting says of trials that ended."""
    if not (out / "episodes.jsonl").exists():
        return []
    found = [
        json.loads(line) for line in (out / "episodes.jsonl").read_text().splitlines() if line[-1:] == "}"
    ]
    return [each for each in found if "key" in each]


@pytest.fixture(scope="module")
def spoiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same policy with closed eyes."""
    data, path = bytearray(PEN.read_bytes()), tmp_path_factory.mktemp("spoiled") / "spoiled.gguf"
    for name in ("vision.norm.weight", "vision.norm.bias"):
        info = Bundle(PEN).infos[name]
        data[info.offset : info.offset + info.nbytes] = bytes(info.nbytes)
    path.write_bytes(data)
    return path


@pytest.fixture(scope="module")
def sitting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sitting")
    kept = ("--record", folder / "journals", "--out", folder / "out")
    assert typed(*BENCH, *kept, "--scenes", 2, "--order", 1) == 0
    return folder


# ----------------------------------------------------------------------------- unattended


@pytest.mark.slow  # eighteen episodes: 4 CPU s
def test_a_robot_that_judges_itself_gives_the_outcomes_of_the_evaluation(
    spoiled: Path, tmp_path: Path
) -> None:
    """Of the same seeds, to the bit of every command."""
    robot = ("--robot", f"{__name__}:Patient", "--scenes", 6, "--out", tmp_path / "trials")
    assert typed(PEN, "--compare", spoiled, *robot, *PLAIN, "--frames", tmp_path / "frames") == 0
    run = (
        "--env",
        "sinew/Pen-v0",
        *PLAIN,
        "--episodes",
        "6",
        "--workers",
        "1",
        "--out",
        str(tmp_path / "eval"),
    )
    assert main(["eval", str(PEN), "--compare", str(spoiled), *run]) == 0
    here, there = (json.loads((tmp_path / name / "report.json").read_text()) for name in ("trials", "eval"))
    same = ("seed", "task", "success", "steps", "digest")
    for ours, theirs in zip(here["outcomes"], there["outcomes"], strict=True):
        assert [{name: each[name] for name in same} for each in ours] == theirs
    wins = [entry["wins"] for entry in here["variants"]]
    assert wins == [entry["wins"] for entry in there["variants"]]
    assert wins[0] > wins[1]
    assert here["comparisons"][0]["p_value"] == there["comparisons"][0]["p_value"]
    scenes = (tmp_path / "trials" / "report.html").read_text().split("<h2>Scene ")[1:]
    assert [scene.count("<figure>") for scene in scenes] == [2] * 6
    assert scenes[0].index("pen.gguf") < scenes[0].index("spoiled.gguf")
    board = tmp_path / "board.html"
    assert main(["leaderboard", str(tmp_path / "trials"), "--out", str(board)]) == 0
    assert [scene.count("<figure>") for scene in board.read_text().split("<h2>Scene ")[1:]] == [2] * 6
    assert not page.FILMS.search(scenes[0].replace("<figcaption>", "<figcaption><script>"))


def test_each_trial_is_a_line_with_what_a_paper_asks(sitting: Path) -> None:
    found = lines(sitting / "out")
    assert [each["trial"] for each in found] == [f"{number:03}" for number in range(1, 5)]
    assert sorted((each["seed"], each["key"]) for each in found) == sorted(
        itertools.product((5000, 5001), {each["key"] for each in found})
    )
    for each in found:
        assert (each["judge"], each["counted"]) == ("robot", True)
        assert each["prompt"]
        assert len(each["latency_ms"]) >= each["chunks"] > 0
        assert (sitting / "journals" / f"{each['trial']}.jsonl").stat().st_size > 0
    plan = json.loads((sitting / "out" / "sitting.json").read_text())
    assert {each["key"] for each in found} == set(plan["policies"])
    assert plan["format"] == 1  # sittings of before go on
    assert json.loads((sitting / "out" / "report.json").read_text())["plan"]["kept"] is True


def test_the_leaderboard_reads_it_and_the_page_shows_the_scenes_in_pairs(
    sitting: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    board = sitting / "board.html"
    assert main(["leaderboard", str(sitting / "out"), "--out", str(board), "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out.strip().splitlines()[-1])["boards"]
    (pair,) = found["pairs"]
    assert (pair["pairs"], pair["only_first"], pair["only_second"]) == (2, 1, 0)
    assert pair["more_pairs"] == stats.pairs_needed(2, 1, 0) - 2
    assert all(len(wins) == 2 for wins in found["trials"].values())
    assert "Fixed before the first trial: 2 scenes; 2 were played. The plan was kept." in board.read_text()
    assert "trials, scene by scene" in board.read_text()
    shown = (sitting / "out" / "report.html").read_text()
    assert json.loads(page.record_in(shown) or "")["plan"]["kept"] is True
    assert "sinew eval --repeat" not in shown
    shutil.copytree(sitting / "out", sitting / "again")
    assert main(["leaderboard", str(sitting / "out"), str(sitting / "again"), "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out.strip().splitlines()[-1])["boards"]
    assert len(found["pairs"]) == 2  # of each sitting: a scene of another one is another scene
    assert main(["eval", "--repeat", str(sitting / "out" / "report.html")]) == 1
    assert "got trials on a robot" in capsys.readouterr().err


def test_a_plan_is_not_changed_on_the_way(sitting: Path, capsys: pytest.CaptureFixture[str]) -> None:
    robot = (*BENCH, "--out", sitting / "out")
    for flags, said in (
        (("--scenes", 4), "with scenes 2, got 4"),
        (("--scenes", 2, "--order", 2), "with order 1, got 2"),
        (("--scenes", 2, "--seconds", 9), "with seconds None, got 9.0"),
    ):
        assert typed(*robot, *flags) == 1
        assert said in " ".join(capsys.readouterr().err.split())
    before = (sitting / "out" / "episodes.jsonl").read_bytes()
    assert typed(*robot, "--scenes", 2) == 0  # which is done
    assert (sitting / "out" / "episodes.jsonl").read_bytes() == before


@pytest.mark.slow  # a process of its own, killed twice: 3 CPU s
def test_a_kill_loses_no_trial_and_counts_none_twice(spoiled: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = ("trials", PEN, "--compare", spoiled, "--robot", "pen", "--scenes", 4, "--out", out, "--hz", "60")
    for count in (2, 5):
        command = [sys.executable, "-m", "sinew", *map(str, words)]
        with processes.Process(command, stdin=-3, stdout=-3, stderr=-3) as process:  # subprocess.DEVNULL
            until(lambda count=count: len(lines(out)) >= count and begun(out) > len(lines(out)))
            process.send_signal(signal.SIGKILL)
            assert process.wait(60) == -signal.SIGKILL
        kept = lines(out)
    assert main([*map(str, words)]) == 0
    found = lines(out)
    assert found[: len(kept)] == kept
    assert len({(each["seed"], each["key"]) for each in found}) == len(found) == 8
    plan = json.loads((out / "report.json").read_text())["plan"]
    assert len(plan["interrupted"]) >= 1
    assert plan["kept"]


def begun(out: Path) -> int:
    return (out / "episodes.jsonl").read_text().count('{"begun"')


@pytest.mark.slow
def test_a_policy_that_does_not_answer_has_not_failed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody sees it: the trial is discarded, the sitting ends, and the same command goes on."""
    words = (PEN, *BENCH[3:-1], "1000", "--scenes", 1, "--out", tmp_path)
    assert typed(*words, "--timeout", "0.0001") == 3  # over at the next step, before any inference
    (found,) = lines(tmp_path)
    assert (found["counted"], found["judge"]) == (False, "loop")
    assert found["note"] == "10 requests in a row had no answer"
    assert "1 of 1 trials remain; run the same command to continue" in " ".join(
        capsys.readouterr().err.split()
    )
    assert typed(*words) == 0
    assert [each["counted"] for each in lines(tmp_path)] == [False, True]
    assert json.loads((tmp_path / "report.json").read_text())["plan"]["discarded"][0]["trial"] == "001"


def until(there: Callable[[], bool]) -> None:
    limit = time.monotonic() + HANGS
    while not there():
        assert time.monotonic() < limit
        time.sleep(0.01)


# ----------------------------------------------------------------------------- a person, and another program


class Person:
    """Types at a terminal, and waits for what it shows."""

    def __init__(self, *words: object):
        self._end, theirs = pty.openpty()
        command = [sys.executable, "-m", "sinew", "trials", *map(str, words)]
        self.process = processes.Process(command, stdin=theirs, stdout=theirs, stderr=theirs)
        self.told = [b""]
        os.close(theirs)

    def press(self, keys: bytes, shown: bytes) -> None:
        os.write(self._end, keys)
        self.told.append(b"")
        limit = time.monotonic() + HANGS
        while shown not in self.told[-1]:
            assert time.monotonic() < limit, self.told[-1][-2000:]
            if select.select([self._end], [], [], 1.0)[0]:
                self.told[-1] += os.read(self._end, 65536)


PRESSED = (
    (b"", b"waits"), (b" ", b"runs"), (b"s", b"is judged success (key)"), (b"f", b"is judged failure (key)"),
    (b"\r", b"waits"), (b" ", b"runs"), (b"d", b"discarded, because"), (b"the cup fell\r", b"waits"),
    (b" ", b"runs"), (b"s", b"is judged success (key)"), (b"\r", b"waits"), (b"q", b"2 of 4 trials remain"),
)  # fmt: skip


def test_a_person_begins_judges_discards_and_is_told_no_names(tmp_path: Path) -> None:
    """Two policies; a verdict is changed before it is kept, a trial comes again, and q ends the sitting."""
    out = tmp_path / "out"
    person = Person(PEN, "--compare", "replan=3", *DRY, "--scenes", 2, "--out", out)
    with person.process as process:
        try:
            for keys, shown in PRESSED:
                person.press(keys, shown)
            assert process.wait(60) == 0
        finally:
            process.kill()
    assert b"replan" not in b"".join(person.told[:-1])
    for part in (
        b"1 of 4: set scene 1 up",
        b"2 of 4: set scene 1 up again, same as before",
        b"3 of 4: set scene 2 up",
    ):
        assert part in b"".join(person.told)
    found = [(each["trial"], each["success"], each["counted"], each["note"]) for each in lines(out)]
    assert found == [
        ("001", False, True, ""),
        ("002", False, False, "the cup fell"),
        ("002-2", True, True, ""),
    ]
    plan = json.loads((out / "report.json").read_text())["plan"]
    assert (plan["kept"], plan["played"]) == (False, 1)
    assert plan["discarded"][0]["note"] == "the cup fell"
    assert "NOT kept" in plan["said"]


@pytest.mark.slow
def test_a_person_keeps_what_the_robot_says(tmp_path: Path) -> None:
    person = Person(PEN, "--robot", "pen", "--scenes", 1, "--out", tmp_path)
    with person.process as process:
        try:
            for keys, shown in ((b"", b"waits"), (b" ", b"(robot)"), (b"\r", b"The plan was kept.")):
                person.press(keys, shown)
            assert process.wait(60) == 0
        finally:
            process.kill()
    assert [(each["judge"], each["counted"]) for each in lines(tmp_path)] == [("robot", True)]


@pytest.mark.slow
def test_another_program_judges(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said, out = tmp_path / "said", tmp_path / "out"
    log = out / "episodes.jsonl"
    said.write_text("success\n")  # of before, which is not read

    def judge() -> None:
        for count, (begun, verdict) in enumerate(
            (("001", "success"), ("002", "discard gripper\nfailure\nnoise"))
        ):
            until(lambda name=f'"{begun}"': log.exists() and name in log.read_text())
            with said.open("a") as file:
                file.write("go\n")
            journal = journals / f"{begun}.jsonl"
            until(lambda journal=journal: journal.exists() and resumed(journal))
            with said.open("a") as file:
                file.write(f"{verdict}\n" + "quit\n" * count)

    def resumed(journal: Path) -> bool:
        return '"event": "resume"' in journal.read_text()

    journals = tmp_path / "journals"
    other = threading.Thread(target=judge)
    other.start()
    assert typed(PEN, *DRY, "--scenes", 2, "--judge", said, "--out", out, "--record", journals) == 0
    other.join()
    found = [(each["trial"], each["success"], each["counted"], each["judge"]) for each in lines(out)]
    assert found == [("001", True, True, "file"), ("002", False, False, "file")]
    shown = " ".join(capsys.readouterr().err.split())
    assert "because the trial is over, got 'failure', and 1 more lines" in shown
    assert f"--judge {said}: existing lines of this file are ignored" in shown
    assert "1 of 2 trials remain; run the same command to continue" in shown


@pytest.mark.parametrize(("flag", "value", "other"), [("--scenes", "2", "--out"), ("--out", "x", "--scenes")])
def test_scenes_and_a_folder_are_required(
    flag: str, value: str, other: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert typed(PEN, *DRY, flag, value) == 2
    assert f"{other} is required" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--scenes", 2, "--out", "x"), "got a standard input that is not a terminal"),
        (("--scenes", 2, "--out", "x", "--judge", "nowhere"), "--judge nowhere: No such file"),
        (("--scenes", 2, "--out", "x", "--judge", "."), "expected a file or a FIFO, got a directory"),
        (("--scenes", 2, "--out", "x", "--takeover", "expert"), "--takeover: not supported in trials"),
        (
            ("--scenes", 2, "--out", "x", "--compare", "latency=3"),
            "settings of replan, handover, solver_steps",
        ),
        (("--scenes", 2, "--out", "x", "--compare", "blocks"), "of the first policy"),
    ],
)
def test_what_is_wrong_is_named(
    flags: tuple[Any, ...], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert typed(PEN, *DRY, *flags) == 1
    assert said in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "x" / "sitting.json").exists()


class Unhomed(Bench):
    def set_up(self, seed: int) -> None:
        raise ValueError("the arm is not homed")


class Seedless(Bench):
    def set_up(self) -> None:  # type: ignore[override] # as somebody may write it
        pass


class Unsure(Bench):
    def set_up(self, seed: int) -> None:
        self.success = "no"  # which Python takes for true

    def act(self, row: np.ndarray) -> None:
        Dry.act(self, row)


class Told(Bench):
    """It is told to end while a person lays the scene out."""

    def set_up(self, seed: int) -> None:
        signal.raise_signal(signal.SIGTERM)
        raise AssertionError("it went on")

    def close(self) -> None:
        Path("closed").touch()


def test_a_signal_while_a_scene_is_set_up_closes_the_robot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=str(128 + signal.SIGTERM)):
        typed(PEN, "--robot", f"{__name__}:Told", "--hz", "60", "--scenes", 1, "--out", "out")
    assert Path("closed").exists()
    assert not lines(Path("out"))
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


class Slow(Bench):
    """A verdict of its first trial comes while it sets the second up."""

    def set_up(self, seed: int) -> None:
        super().set_up(seed)
        if self._trials == 2:
            Path("said").write_text("failure\n")


def test_a_verdict_that_comes_too_late_is_not_the_next_trials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("said").touch()
    words = (PEN, "--robot", f"{__name__}:Slow", "--hz", "60", "--scenes", 2, "--out", "out")
    assert typed(*words, "--judge", "said", "--set", "go=true") == 0
    assert [(each["judge"], each["success"]) for each in lines(Path("out"))] == [("robot", True)] * 2
    assert "because the trial is over, got 'failure'" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("robot", "said"),
    [
        (Unhomed, "the robot raised ValueError: the arm is not homed (set_up, test_trials.py:"),
        (
            Seedless,
            "robot: expected a method set_up(seed), which prepares a scene: too many positional arguments",
        ),
        (Unsure, "success of the robot: expected True, False or None, got 'no'"),
    ],
)
def test_a_fault_of_the_robot_is_no_verdict(
    robot: type, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (PEN, "--robot", f"{__name__}:{robot.__name__}", "--hz", "60", "--scenes", 1, "--out", tmp_path)
    assert typed(*words) == 1
    assert said in " ".join(capsys.readouterr().err.split())
    assert not lines(tmp_path)


# ----------------------------------------------------------------------------- order and statistics


def planned(out: Path, order: int, scenes: int = 12, **more: Any) -> TrialSession:
    variants = [Variant("expert"), Variant("expert", replan=1)]
    return TrialSession(out, Task("sinew/Pen-v0"), variants, scenes, 5000, order, **more)


def ended(sitting: TrialSession, success: bool, **more: Any) -> None:
    turn = sitting.due()
    assert turn is not None
    sitting.begin(turn)
    counts = (1, 1, 0, 0, [], [])
    sitting.end(turn, Episode(turn.seed, "", success, 9, *counts, trial=turn.name, **more))


def order_of(sitting: TrialSession) -> list[tuple[int, int]]:
    found = []
    while (turn := sitting.due()) is not None:
        found.append((turn.scene, turn.variant))
        ended(sitting, turn.variant == 0)
    return found


def test_the_order_is_drawn_anew_for_each_scene_and_differs_by_its_number(tmp_path: Path) -> None:
    orders = [order_of(planned(tmp_path / str(number), order)) for number, order in enumerate((1, 1, 2))]
    assert orders[0] == orders[1] != orders[2]
    for order in orders:
        assert sorted(order) == list(itertools.product(range(1, 13), (0, 1)))
        assert {order[2 * scene][1] for scene in range(12)} == {0, 1}  # neither is always the first
    drawn = {planned(tmp_path / f"drawn{number}", None).order for number in range(3)}  # type: ignore[arg-type]
    assert len(drawn) == 3


def test_a_scene_that_was_set_up_before_is_set_up_as_it_was(tmp_path: Path) -> None:
    sitting = planned(tmp_path, 1, 2)
    turn = sitting.due()
    assert turn is not None
    sitting.begin(turn)  # and killed
    again = [turn.again]
    while (turn := sitting.due()) is not None:
        again.append(turn.again)
        ended(sitting, True)
    assert again == [False, True, True, False, True]


def test_a_sitting_that_goes_on_knows_what_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sitting, synced = planned(tmp_path, 7, 2), []
    monkeypatch.setattr(os, "fsync", synced.append)
    ended(sitting, False, counted=False, note="it fell")
    turn = sitting.due()
    assert turn is not None
    sitting.begin(turn)  # and killed
    assert len(synced) == 3  # each line is on the disk before anything goes on
    again = planned(tmp_path, None, 2)  # type: ignore[arg-type] # in the order that was drawn
    plan = again.plan(["a", "b"])
    lost = {"trial": "001", "seed": 5000, "label": "ab"[turn.variant], "note": "it fell"}
    assert (plan["discarded"], plan["interrupted"], plan["p_anytime"]) == ([lost], ["001-2"], None)
    assert again.take("001-3") == "trial 001-3 of 7"


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("episodes.jsonl", "", "this folder contains a run of `sinew eval`; choose a new folder$"),
        ("sitting.json", "{", r"sitting\.json: expected the plan of a session, got expected JSON"),
        ("sitting.json", '{"format": 1, "scenes": [2]}', r"with scenes \[2\], got 12;"),
        (
            "sitting.json",
            '{"format": 1, "scenes": 12, "seed": 5000, "sequential": false, "policies": ["{} #1"]}',
            "with adapter of policy 1 None, got '';",
        ),
    ],
)
def test_a_folder_of_something_else_is_left_alone(name: str, text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(SinewError, match=said):
        planned(tmp_path, 1)
    assert [each.name for each in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text() == text


def test_more_than_999_trials_are_told_apart(tmp_path: Path) -> None:
    sitting = planned(tmp_path, 1, 501)
    sitting.episodes = [
        (policy, Episode(5000 + scene, "", True, 9, 1, 1, 0, 0, [], []))
        for scene in range(500)
        for policy in (0, 1)
    ]
    turn = sitting.due()
    assert turn is not None
    sitting.begin(turn)
    again = planned(tmp_path, 1, 501)
    assert again._begun == {1001: ["1001"]}


def test_a_policy_that_was_changed_is_no_policy_of_the_plan(tmp_path: Path) -> None:
    before = planned(tmp_path, 1)
    with pytest.raises(SinewError, match="with replan of policy 2 1, got 2;"):
        TrialSession(tmp_path, before.task, [before.variants[0], Variant("expert", replan=2)], 12, 5000, 1)
    with pytest.raises(SinewError, match="with policies 2, got 1;"):
        TrialSession(tmp_path, before.task, before.variants[:1], 12, 5000, 1)


def test_a_line_that_the_disk_does_not_take_is_an_error_that_names_it() -> None:
    with (
        Path("/dev/full").open("ab", buffering=0) as full,
        pytest.raises(OSError, match="No space.*/dev/full"),
    ):
        episode_log.append(full, b"{}\n")
    here, there = os.pipe()
    os.set_blocking(there, False)
    with os.fdopen(there, "wb", buffering=0) as pipe, pytest.raises(OSError, match="No space"):
        episode_log.append(pipe, bytes(1 << 20))  # of which it takes a part
    os.close(here)


def test_a_sequential_sitting_ends_where_the_difference_is_shown(tmp_path: Path) -> None:
    sitting = planned(tmp_path / "of" / "one", 1, 20, sequential=True)
    assert len(order_of(sitting)) == 16  # eight pairs that all say the same: 9 / 2^8 = 0.035
    assert stats.anytime_p([True] * 7) > 0.05 > stats.anytime_p([True] * 8) == 9 / 2**8
    assert planned(tmp_path / "of" / "one", 1, 20, sequential=True).due() is None
    plan = sitting.plan(["a", "b"])
    assert "p = 0.0352" in plan["said"]
    assert plan["p_anytime"] == 0.035156
    assert [sum(each.success for each in one) for one in sitting.results()] == [8, 0]
    with pytest.raises(SinewError, match="--sequential: expected two policies to compare, got 1"):
        TrialSession(tmp_path / "x", Task("sinew/Pen-v0"), [Variant("expert")], 3, 0, 1, sequential=True)


def deceived(shown: Callable[[int, int], bool], pairs: int) -> float:
    """Return the chance that a fair coin ever shows a difference to somebody who looks after each disputed pair."""
    left, found = {0: 1.0}, 0.0
    for count in range(1, pairs + 1):
        steps = [(won + one, chance / 2) for won, chance in left.items() for one in (0, 1)]
        found += sum(chance for won, chance in steps if shown(count, won))
        left = {won: sum(c for w, c in steps if w == won) for won, _ in steps if not shown(count, won)}
    return found


def test_looking_after_every_pair_deceives_at_most_one_time_of_twenty() -> None:
    """Exactly, of all runs of 40 disputed pairs; a look at McNemar's p after each deceives three times as often."""
    assert deceived(lambda n, k: (n + 1) * math.comb(n, k) / 2**n <= 0.05, 40) == pytest.approx(
        0.0215, abs=5e-5
    )
    assert deceived(lambda n, k: stats.binomial_p(k, n - k) <= 0.05, 40) == pytest.approx(0.1535, abs=5e-5)
    for coin in itertools.product((False, True), repeat=8):  # what the first of these is told
        least = min((n + 1) * math.comb(n, sum(coin[:n])) / 2**n for n in range(9))
        assert stats.anytime_p(coin) == least
    assert stats.anytime_p([]) == 1.0
    assert stats.anytime_p([True] * 3000) == 0  # below the least number


def test_what_happens_while_a_trial_is_paused_is_not_counted() -> None:
    """Nor before it begins: steps, holds and answers are those of the trial."""
    tally = TrialTally()

    def steps(*reasons: str) -> int:
        for reason in reasons:
            row = None if reason else np.zeros(1)
            tally.hear("command", {"command": Command(0, row, reason=reason)})
        return tally.steps

    assert steps("", "late") == 0
    tally.counts = True
    assert steps("", PAUSED, "late", PAUSED, "") == 3
    tally.hear("ask", {"step": 5})
    tally.hear("arrived", {"step": 7})
    assert (steps("late", PAUSED), tally.held, tally.delays) == (4, 1, [2])


# ----------------------------------------------------------------------------- one trial, word by word


def laid(
    waits: bool, asks: bool, limit: int | None = None, judge: Path | None = None, **given: Any
) -> VerdictInput:
    """A trial on a loop whose clock the test moves; not begun."""
    desk = VerdictInput(waits, asks, limit, judge)
    desk.begin(loop_of(**given)[0])
    return desk


def ticked(desk: VerdictInput) -> None:
    """Tick until the trial is over."""
    for _ in range(200):
        if desk.state == OVER:
            return
        desk.loop.tick(desk.loop.pace.next())
    raise AssertionError("it goes on")


def test_a_trial_goes_from_word_to_word() -> None:
    """Nobody judges before it begins; a person's verdict may be changed by a person, until it is kept."""
    desk = laid(waits=True, asks=True)
    desk.loop.tick(desk.loop.pace.next())
    assert desk.loop.controller.paused
    assert desk.seconds == 0.0

    def said(*words: tuple[str, str]) -> list[bool]:
        return [desk.take(word, by) for word, by in words]

    assert said(("success", "key"), ("keep", "key"), ("dance", "key"), ("go", "key")) == [False] * 3 + [True]
    assert (desk.state, desk.tally.counts, desk.verdict) == (RUNS, True, "")
    desk.loop.tick(desk.loop.pace.next())
    assert not desk.loop.controller.paused
    assert said(("go", "key"), ("keep", "key"), ("discard", "key"), ("discard ", "key")) == [False] * 4
    assert said(("failure", "time")) == [True]
    assert (desk.state, desk.verdict, desk.by, desk.tally.counts) == (JUDGED, "failure", "time", False)
    assert said(("success", "robot"), ("failure", "time"), ("success", "key")) == [False, False, True]
    assert (desk.state, desk.verdict, desk.by, desk.loop.stopped) == (JUDGED, "success", "key", False)
    assert said(("keep", "key")) == [True]
    assert (desk.state, desk.loop.stopped, desk.left) == (OVER, True, False)
    assert said(("failure", "key"), ("keep", "key"), ("go", "key"), ("quit", "key")) == [False] * 3 + [True]
    assert (desk.verdict, desk.left) == ("success", True)


@pytest.mark.parametrize(
    ("word", "by", "asks", "state"),
    [
        ("success", "key", True, JUDGED),
        ("success", "key", False, OVER),
        ("success", "file", True, OVER),
        ("discard it fell", "key", True, OVER),
    ],
)
def test_a_verdict_of_a_file_and_a_discarded_trial_are_not_asked_about(
    word: str, by: str, asks: bool, state: str
) -> None:
    desk = laid(waits=False, asks=asks)
    assert desk.take(word, by)
    assert (desk.state, desk.loop.stopped) == (state, state == OVER)
    assert (desk.verdict, desk.note) == (word.partition(" ")[0], word.partition(" ")[2])


def test_a_trial_that_nobody_sees_ends_by_its_steps_its_robot_or_its_answers() -> None:
    desk = laid(waits=False, asks=False, limit=7)
    ticked(desk)
    assert 0.0 <= desk.seconds < desk._since  # of its own, and not since when
    assert (desk.verdict, desk.by, desk.tally.steps) == ("failure", "time", 7)
    desk.lost("the server has gone")
    assert (desk.verdict, desk.by, desk.note) == ("discard", "loop", "the server has gone")
    for success in (True, np.bool_(False)):
        desk = laid(waits=False, asks=False)
        desk.loop.robot.success = success  # type: ignore[attr-defined]
        ticked(desk)
        assert (desk.verdict, desk.by) == ("success" if success else "failure", "robot")
        desk.lost("the server has gone")
        assert desk.verdict == ("success" if success else "discard")
    desk = laid(waits=False, asks=False, answer=lambda _: Outcome(reason="no server"))
    ticked(desk)
    assert (desk.verdict, desk.by) == ("discard", "loop")
    assert desk.note == "10 requests in a row had no answer"
    assert desk.loop.controller.unanswered == 10


def test_a_run_that_the_robot_ends_is_no_verdict() -> None:
    desk = laid(waits=False, asks=False)
    desk.ended()
    assert (desk.verdict, desk.by) == ("discard", "loop")
    assert desk.note == "the robot ended the run without a verdict"
    desk = laid(waits=True, asks=True)
    desk.ended()
    assert (desk.verdict, desk.left, desk.loop.stopped) == ("", True, True)
    desk = laid(waits=False, asks=False)
    desk.loop.robot.success = True  # type: ignore[attr-defined]
    desk.ended()
    assert (desk.verdict, desk.by, desk.left) == ("success", "robot", False)


def test_a_file_is_read_by_lines_and_what_is_not_due_is_said_in_one_sentence(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    said = tmp_path / "said"
    said.write_text("success\n")  # of before
    desk = laid(waits=True, asks=True, judge=said)
    assert "existing lines of this file are ignored" in caplog.text
    told = []
    with said.open("ab", buffering=0) as file:
        for written in (
            b"g",
            b"oo" + 90 * b"x" + b"\nfailure\n",
            b"go\nfail",
            b"\n",
            70_000 * b"y",
            b"",
            b"success\n",
        ):
            file.write(written)
            caplog.clear()
            desk._read()
            told.append("".join(caplog.messages))
    desk.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(desk._file)
    judged = "expected success, failure or discard REASON, because the trial runs, got"
    assert [each.removeprefix("--judge: ") for each in told] == [
        "",
        f"expected go, because the trial waits, got 'goo{77 * 'x'}', and 1 more lines",
        "",
        f"{judged} 'fail'",
        "",
        f"{judged} '{80 * 'y'}'",
        "",
    ]
    assert (desk.verdict, desk.by, desk.state) == ("success", "file", OVER)


def test_a_pipe_is_read_after_each_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """To which nobody has written when the trial begins."""
    os.mkfifo(tmp_path / "said")
    desk = laid(waits=False, asks=True, judge=tmp_path / "said")
    assert not caplog.text
    (tmp_path / "said").write_text("success\n")
    ticked(desk)
    assert (desk.verdict, desk.by) == ("success", "file")
    desk.close()
