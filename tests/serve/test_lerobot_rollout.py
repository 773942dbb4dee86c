"""LeRobot's rollout strategies with a policy of a ``sinew serve`` in a process of its own: what the robot was sent, who
said it, and what LeRobot's own data set holds of it.

``lerobot-rollout`` runs on a terminal, where its keys are pressed when the robot's journal says that it is time.
"""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import shlex
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sinew.records.recorder import read_records
from tests import processes
from tests.journeys.lerobot import documented
from tests.serve.lerobot_releases import CLIENTS, ROOT, lerobot_folder, newest_release, nursery
from tests.serve.test_lerobot_plugin import BLOCKS, SCRIPT, lerobot
from tests.serve.test_server import ServerProcess, serving

ROBOT = Path(__file__).with_name("lerobot_blocks.py")
TASK = "put the red block into the left bin"
PATIENCE_S = 120.0  # for what has to come at all
PAUSE, CORRECT, ESCAPE, RIGHT = b" ", b"\t", b"\x1b", b"\x1b[C"


class Rollout:
    """``lerobot-rollout`` on a terminal of its own, with the gantry as its robot."""

    def __init__(self, release: str, plugin: Path, folder: Path, *flags: object, most: int = 400):
        self.folder, self.journal, self.log = folder, folder / "journal.jsonl", folder / "rollout.log"
        (folder / "robots").mkdir()
        (folder / "robots" / "__init__.py").write_text(
            "from robots.blocks import BlocksLeader\n"
        )  # looked for here
        shutil.copy(ROBOT, folder / "robots" / "blocks.py")
        self.journal.touch()
        robot = ("--robot.type=blocks", "--robot.discover_packages_path=robots", f"--robot.most={most}")
        ours = (
            "--play_sounds=false",
            "--return_to_initial_position=false",
            "--robot.ends=false",
            f"--task={TASK}",
        )
        words = [str(CLIENTS), str(SCRIPT), "lerobot-rollout", "--policy.type=sinew", *robot, *ours]
        paths = (
            folder,
            plugin,
            ROOT,
            ROOT / "eval",
            ROOT / "packages" / "sinew-client" / "src",
            lerobot_folder(release),
        )
        self.keys, terminal = pty.openpty()
        with self.log.open("w") as log:
            self.process = processes.Process(
                [*words, *map(str, flags)],
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(map(str, paths)),
                    "OMP_NUM_THREADS": "1",
                    "HF_HUB_OFFLINE": "1",
                    "HF_LEROBOT_HOME": str(folder / "home"),
                    "ROBOT_JOURNAL": str(self.journal),
                },
                stdin=terminal,
                stdout=log,
                stderr=log,
                nursery=nursery(release),
            )
        os.close(terminal)

    def entries(self, kind: str) -> list[dict[str, Any]]:
        """Return what the journal has so far of the robot's commands, or of its leader's rows."""
        whole = self.journal.read_text().rpartition("\n")[0].splitlines()
        return [entry for entry in map(json.loads, whole) if entry["kind"] == kind]

    def until(self, true: Callable[[], object], what: str) -> None:
        end = time.monotonic() + PATIENCE_S
        while not true():
            assert self.process.poll() is None, f"{what}: the program has ended\n{self.said()[-4000:]}"
            assert time.monotonic() < end, f"{what}: not within {PATIENCE_S:g} s\n{self.said()[-4000:]}"
            time.sleep(0.01)

    def moves(self, count: int, kind: str = "command") -> None:
        """Wait for so many more commands of the robot, or rows of its leader."""
        before = len(self.entries(kind))
        self.until(lambda: len(self.entries(kind)) >= before + count, f"{count} more of {kind}")

    def press(self, key: bytes, told: str = "") -> None:
        """Press a key; wait until the program's log has one more line that says ``told``."""
        before = self.said().count(told)
        os.write(self.keys, key)
        self.until(lambda: not told or self.said().count(told) > before, told)

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def ends(self) -> int:
        return self.process.wait(PATIENCE_S)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self.keys)


@contextlib.contextmanager
def rollout(*arguments: Any, **options: Any) -> Iterator[Rollout]:
    running = Rollout(*arguments, **options)
    try:
        yield running
    finally:
        running.close()


def data_set(folder: Path, **more: object) -> list[str]:
    given = {
        "repo_id": "sinew/rollout_test",
        "root": folder,
        "push_to_hub": "false",
        "num_episodes": 1,
        **more,
    }
    return [f"--dataset.{name}={value}" for name, value in given.items()]


def opened(release: str, plugin: Path, folder: Path) -> dict[str, Any]:
    """Return what LeRobot's own class reads in a data set."""
    done = lerobot(release, plugin, "dataset", folder)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


ENGINES = {
    "sync": (),
    "rtc": ("--inference.type=rtc",),
    "ahead": ("--policy.handover=auto",),
}
(DAGGER,) = (line for line in documented("lerobot-rollout") if "--strategy.type=dagger" in line)
LEADS = ("--strategy.type=dagger", "--teleop.type=blocks_leader")
HOLD = (0.0, 0.0, 0.0)  # of offsets; the gripper stays as it is


class Said:
    """What a server answered, by its own records: where a row of a robot comes from."""

    def __init__(self, folder: Path):
        self.records = [each for each in read_records(folder) if each.actions is not None]
        self.places: dict[bytes, tuple[int, int]] = {}
        for number, record in enumerate(self.records):
            for index, row in enumerate(record.actions):
                self.places[np.float32(row).tobytes()] = (number, index)

    def place(self, row: list[float]) -> tuple[int, int] | None:
        """Return (chunk, row of it); None where no chunk has it."""
        return self.places.get(np.float32(row).tobytes())

    def check_order(self, rows: list[list[float]], held: bool) -> list[tuple[int, int]]:
        """Return the places of rows that follow each other: chunks in their order, and of each the rows in theirs."""
        places = [self.place(row) for row in rows if not (held and tuple(row[:3]) == HOLD)]
        assert None not in places, rows[places.index(None)]
        assert places == sorted(places)
        assert len(set(places)) == len(places)
        return places


@newest_release
@pytest.mark.parametrize(
    "engine",
    [pytest.param("sync", marks=pytest.mark.slow), "rtc", pytest.param("ahead", marks=pytest.mark.slow)],
)
def test_a_person_corrects_the_policy(release: str, plugin: Path, tmp_path: Path, engine: str) -> None:
    """The page's line: the policy, a correction, the policy again. All of it is in the data set, in order, with who it
    was, and after the correction nothing is executed that was computed from before it."""
    typed = [word for word in shlex.split(DAGGER) if word.startswith(("--strategy.", "--inference."))]
    if engine != "rtc":
        typed = [word for word in typed if not word.startswith("--inference.")] + list(ENGINES[engine])
    with (
        serving(
            tmp_path, BLOCKS, "--wire", "native:0", "--threads", 1, "--record", tmp_path / "records"
        ) as server,
        rollout(
            release,
            plugin,
            tmp_path,
            f"--policy.address={server.address}",
            "--teleop.type=blocks_leader",
            "--robot.look_s=0.03",  # in which LeRobot's engine infers from what it was shown before
            *typed,
            *data_set(tmp_path / "data"),
        ) as running,
    ):
        running.moves(12)
        running.press(PAUSE, "autonomous -> paused")
        running.press(CORRECT, "paused -> correcting")
        running.moves(10, "leader")
        running.press(CORRECT, "correcting -> paused")
        running.press(PAUSE, "paused -> autonomous")
        running.moves(20)
        running.press(ESCAPE, "Stop recording")
        assert running.ends() == 0, running.said()[-4000:]
        assert server.stop() == 0  # its records are complete
    found = opened(release, plugin, tmp_path / "data")
    frames = found["frames"]
    assert found["episodes"] == 1
    assert {frame["task"] for frame in frames} == {TASK}
    assert all(frame["shapes"] == [[3, 64, 64]] * 2 for frame in frames)
    # What was recorded is what was sent, and what was seen when it was sent; a film loses some of it.
    commands = running.entries("command")
    for frame, sent in zip(frames, matched(frames, commands), strict=True):
        assert frame["bright"] == pytest.approx(sent["bright"], abs=0.02)
    # Who it was.
    who = [frame["intervention"] for frame in frames]
    first, last = who.index(True), len(who) - 1 - who[::-1].index(True)
    assert all(who[first : last + 1]), "one correction"
    before, after = (rows_of_frames(part) for part in (frames[:first], frames[last + 1 :]))
    leader = [entry["row"] for entry in running.entries("leader")]
    assert (
        rows_of_frames(frames[first : last + 1]) == leader[1:]
    )  # the first was only looked at, to get there
    said = Said(tmp_path / "records")
    held = engine == "ahead"
    assert len(said.check_order(before, held)) >= 8
    resumed = said.check_order(after, held)
    assert len(resumed) >= 8
    # The chunk after the correction: of what the robot saw after it, and of no running one.
    states = [entry["state"] for entry in commands]
    corrected = max(number for number, each in enumerate(commands) if each["row"] in leader)
    chunk = said.records[resumed[0][0]]
    assert np.float32(chunk.observation.state).tolist() in states[corrected + 1 :]
    assert np.float32(chunk.observation.state).tolist() not in states[: corrected + 1]
    assert chunk.observation.previous is None
    if engine == "rtc":
        assert any(record.observation.previous is not None for record in said.records)
        assert {record.observation.rtc for record in said.records} == {None, "no-jacobian"}


def matched(frames: list[dict[str, Any]], commands: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the command of each recorded frame: the same row at the same state, in the same order."""
    left, found = iter(commands), []
    for number, frame in enumerate(frames):
        wanted = (frame["action"], frame["state"])
        command = next((each for each in left if (each["row"], each["state"]) == wanted), None)
        assert command is not None, f"frame {number} of {len(frames)} was not sent"
        found.append(command)
    return found


def rows_of_frames(frames: list[dict[str, Any]]) -> list[list[float]]:
    return [frame["action"] for frame in frames]


@pytest.mark.slow
@newest_release
def test_corrections_alone_are_an_episode_each(release: str, plugin: Path, tmp_path: Path) -> None:
    with (
        serving(tmp_path, BLOCKS, "--wire", "native:0", "--threads", 1) as server,
        rollout(
            release,
            plugin,
            tmp_path,
            f"--policy.address={server.address}",
            *ENGINES["rtc"],
            *LEADS,
            *data_set(tmp_path / "data", num_episodes=2, video="false"),
        ) as running,
    ):
        for number in (1, 2):
            running.moves(8)
            running.press(PAUSE, "autonomous -> paused")
            running.press(CORRECT, "paused -> correcting")
            running.moves(6, "leader")
            running.press(CORRECT, f"Correction {number}/2 saved")
            if number == 1:
                running.press(PAUSE, "paused -> autonomous")
        assert running.ends() == 0, running.said()[-4000:]
    found = opened(release, plugin, tmp_path / "data")
    leader, frames = [entry["row"] for entry in running.entries("leader")], found["frames"]
    assert found["episodes"] == 2
    assert all(frame["intervention"] for frame in frames)
    parts = [[f["action"] for f in frames if f["episode"] == number] for number in (0, 1)]
    assert parts[0] == leader[1 : len(parts[0]) + 1]
    assert parts[1] == leader[-len(parts[1]) :]
    assert len(parts[0]) + len(parts[1]) == len(leader) - 2


@pytest.mark.slow
@newest_release
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("strategy", ["base", "sentry", "highlight", "episodic"])
def test_each_strategy(release: str, plugin: Path, tmp_path: Path, strategy: str, engine: str) -> None:
    """What LeRobot plays without a person: the rows of the server's chunks, in order, and they are what it records."""
    data = tmp_path / "data"
    flags = [] if strategy == "base" else data_set(data, video="false", episode_time_s=600, reset_time_s=600)
    if strategy == "episodic":
        flags = [flag for flag in flags if "num_episodes" not in flag] + ["--dataset.num_episodes=2"]
    with (
        serving(
            tmp_path, BLOCKS, "--wire", "native:0", "--threads", 1, "--record", tmp_path / "records"
        ) as server,
        rollout(
            release,
            plugin,
            tmp_path,
            f"--policy.address={server.address}",
            *ENGINES[engine],
            f"--strategy.type={strategy}",
            *flags,
            most=40 if strategy in ("base", "sentry") else 400,
        ) as running,
    ):
        if strategy == "highlight":
            running.moves(10)
            running.press(b"s", "Flushing ring buffer")
            running.moves(10)
            running.press(b"s", "Episode saved")
            running.press(ESCAPE)
        elif strategy == "episodic":
            running.moves(10)
            running.press(RIGHT, "Reset the environment")
            running.press(RIGHT, "Recording episode 1")
            running.moves(10)
            running.press(RIGHT)
        assert running.ends() == 0, running.said()[-4000:]  # of base and sentry the robot interrupts it
        assert server.stop() == 0
    said, sent = Said(tmp_path / "records"), running.entries("command")
    if strategy == "base":
        assert len(said.check_order([entry["row"] for entry in sent], engine == "ahead")) >= 8
        return
    found = opened(release, plugin, data)
    frames = found["frames"]
    assert found["episodes"] == (2 if strategy == "episodic" else 1)
    assert len(frames) >= 16
    matched(frames, sent)
    for episode in range(found["episodes"]):
        rows = [frame["action"] for frame in frames if frame["episode"] == episode]
        places = said.check_order(rows, engine == "ahead")
        if strategy == "episodic":  # each begins with a chunk of its own
            assert said.records[places[0][0]].observation.previous is None


@pytest.mark.slow
@newest_release
@pytest.mark.parametrize("engine", ["rtc", "ahead"])
def test_a_server_that_comes_back(release: str, plugin: Path, tmp_path: Path, engine: str) -> None:
    """Killed and started again: what was left of the running chunk at most, a hold, and then a chunk of now."""
    port, chunk = processes.free_port(), 32

    def served(number: int) -> ServerProcess:
        wire = ("--wire", f"native:{port}", "--threads", 1)
        return ServerProcess(tmp_path, BLOCKS, *wire, "--record", tmp_path / f"records-{number}")

    first = served(1)
    address = f"--policy.address=tcp://127.0.0.1:{port}"
    base = (
        address,
        f"--policy.timeout={30 if engine == 'ahead' else 5}",
        *ENGINES[engine],
        "--strategy.type=base",
    )
    with contextlib.ExitStack() as stack:
        stack.callback(first.close)
        running = stack.enter_context(rollout(release, plugin, tmp_path, *base, most=100_000))
        running.moves(16)
        first.process.kill()
        killed = len(running.entries("command"))
        if engine == "ahead":  # says so, and sends what stands still
            running.until(lambda: "holds: " in running.said(), "a hold")
            running.moves(40)
        else:  # plays what is left, says that nobody answers, and sends nothing
            sent, told = -1, 0
            while not told or sent != len(running.entries("command")):  # from one error to the next
                sent, told = len(running.entries("command")), running.said().count("RTC inference error")
                running.until(
                    lambda told=told: running.said().count("RTC inference error") > told, "an error"
                )
        held = running.entries("command")
        second = served(2)
        stack.callback(second.close)
        running.until(
            lambda: (
                any(tuple(each["row"][:3]) != HOLD for each in running.entries("command")[len(held) + 40 :])
                if engine == "ahead"
                else len(running.entries("command")) > len(held) + 40
            ),
            "motion again",
        )
        running.process.send_signal(signal.SIGINT)
        assert running.ends() == 0, running.said()[-4000:]
        assert second.stop() == 0
    commands = running.entries("command")
    rest = [each["row"] for each in commands[killed : len(held)] if tuple(each["row"][:3]) != HOLD]
    assert len(rest) <= chunk
    said = Said(tmp_path / "records-2")
    new = [number for number, each in enumerate(commands) if said.place(each["row"]) is not None]
    assert min(new) >= len(held)
    assert {
        said.place(each["row"]) is not None or tuple(each["row"][:3]) == HOLD for each in commands[min(new) :]
    } == {True}
    begun = said.records[said.place(commands[min(new)]["row"])[0]]
    assert said.records[0].observation.previous is None  # nothing of the running chunk is left
    standing = [each["state"] for each in commands[killed if engine == "ahead" else len(held) - 1 :]]
    assert np.float32(begun.observation.state).tolist() in standing


@newest_release
@pytest.mark.parametrize(
    ("engine", "status", "why"),
    [
        ("sync", 1, r"sinew_client\.errors\.(ConnectionLost|RequestTimeout): "),
        pytest.param("ahead", 1, r"RequestTimeout: the robot held for 1 s: ", marks=pytest.mark.slow),
        pytest.param("rtc", 0, r"Fatal error in RTC thread: ", marks=pytest.mark.slow),
    ],
)
def test_a_server_that_is_gone(
    release: str, plugin: Path, tmp_path: Path, engine: str, status: int, why: str
) -> None:
    """The program ends, in order, and says why; LeRobot's rtc engine after ten attempts."""
    with (
        serving(tmp_path, BLOCKS, "--wire", "native:0", "--threads", 1) as server,
        rollout(
            release,
            plugin,
            tmp_path,
            f"--policy.address={server.address}",
            f"--policy.timeout={10 if engine == 'sync' else 1}",  # until it is gone each answer comes in time
            *ENGINES[engine],
            "--strategy.type=sentry",
            *data_set(tmp_path / "data", video="false"),
            most=100_000,
        ) as running,
    ):
        running.moves(16)
        server.process.kill()
        killed = len(running.entries("command"))
        assert running.ends() == status, running.said()[-4000:]
    assert re.search(why, running.said()), running.said()[-4000:]
    after = [each["row"] for each in running.entries("command")[killed:]]
    assert sum(tuple(row[:3]) != HOLD for row in after) <= 32
    frames = opened(release, plugin, tmp_path / "data")["frames"]  # and what it had recorded is there
    assert [frame["action"] for frame in frames] == [each["row"] for each in running.entries("command")]
