"""Faults of servers, networks, replies and clocks: a hold in the step in which they are known, and a way back.

Everything is counted in steps of the loop's own schedule; no assertion is about how long something took.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sinew_client import Client
from sinew_client.control import Command, Loop, Outcome, Settings
from sinew_client.control.authority import RETURNING
from sinew_client.control.robots import Dry

from tests import processes
from tests.control.puppet import Proxy, Puppet
from tests.control.test_loop import Scripted, loop_of

POLICY: dict[str, Any] = {
    "cameras": [{"name": "front", "height": 64, "width": 64}, {"name": "wrist", "height": 64, "width": 64}],
    "state": {"dim": 4},
    "action": {"dim": 4},
}
BLOCKS = Path(__file__).parents[2] / "sinew" / "assets" / "blocks.gguf"
PROMPT = "put the red block into the left bin"
SEQUENCES = int(os.environ.get("SINEW_FAULT_SEQUENCES", "60"))


class Witness:
    """Hears what a controller is told and does, and checks the promises at every command."""

    def __init__(self, max_age: int | None):
        self.max_age = max_age
        self.commands: list[Command] = []
        self.executed: set[tuple[int, int]] = set()
        self.trouble = ""  # a fault of which the controller knows, and that no chunk has ended
        self.faults = 0

    def hear(self, event: str, values: dict[str, Any]) -> None:
        if event in ("failed", "fault"):
            self.trouble, self.faults = values["reason"], self.faults + 1
        elif event == "pause":
            self.trouble = "paused"
        elif event == "arrived":
            good = np.isfinite(values["actions"]).all()
            self.trouble, self.faults = (
                ("", self.faults) if good else ("a chunk is not finite", self.faults + 1)
            )
        elif event == "command":
            self.check(values["command"])

    def check(self, command: Command) -> None:
        assert not self.commands or command.step > self.commands[-1].step  # one command per period
        if command.by == RETURNING:  # of no chunk, and answers do not matter
            assert command.row is None or np.isfinite(command.row).all()
            self.commands.append(command)
            return
        if self.trouble:
            assert command.row is None  # held within the period in which it is known
        if command.row is None:
            assert command.reason
        else:
            assert np.isfinite(command.row).all()
            assert self.max_age is None or 0 <= command.age <= self.max_age  # none older than its validity
            assert (command.chunk, command.index) not in self.executed  # none twice
            self.executed.add((command.chunk, command.index))
        self.commands.append(command)

    @property
    def moving(self) -> bool:
        return bool(self.commands) and self.commands[-1].row is not None


class Run:
    """A loop against a server, on a thread of its own, and a test that waits for what it sees."""

    def __init__(self, port: int, **given: Any):
        settings = Settings(
            **{"hz": 50.0, "handover": "aligned", "replan": "6", "deadline": 0.5, "max_age": 0.6, **given}
        )

        def connect() -> Any:
            client = Client(f"tcp://127.0.0.1:{port}")

            def call(observation: Any, limit: float) -> np.ndarray:
                return client.infer(observation, timeout=limit).actions

            call.close = client.close  # type: ignore[attr-defined]
            return call

        self.loop = Loop(Dry(POLICY), connect, settings, 4, PROMPT)
        assert settings.max_age is not None
        self.witness = Witness(int(settings.max_age * settings.hz))
        self.loop.controller.listeners.append(self.witness.hear)
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        try:
            self.loop.run()
        except BaseException as error:  # noqa: BLE001 - handed to the test
            self.failure = error

    def until(self, seen: Callable[[], bool]) -> None:
        limit = time.monotonic() + 120
        while not seen():
            assert self.failure is None, self.failure
            assert time.monotonic() < limit, self.loop.report().rows()
            time.sleep(0.005)

    def moves(self, more: int = 20) -> None:
        """Wait until so many further rows have been executed."""
        goal = len(self.witness.executed) + more
        self.until(lambda: len(self.witness.executed) >= goal)

    def holds(self, why: str = "") -> None:
        self.until(lambda: not self.witness.moving and why in self.witness.commands[-1].reason)

    def __enter__(self) -> Run:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self.loop.stop()
        self._thread.join()
        self.loop.close()
        assert self.failure is None, self.failure


# ----------------------------------------------------------------------------- a real server


@contextmanager
def server(port: int, log: Path) -> Iterator[processes.Process]:
    command = [sys.executable, "-m", "sinew", "serve", str(BLOCKS), "--wire", f"native:{port}"]
    with log.open("a") as errors:
        process = processes.Process(command, stdout=subprocess.PIPE, stderr=errors)
        try:
            assert process.stdout is not None
            while not (line := process.stdout.readline()).startswith("ready on"):
                assert line or process.poll() is None, log.read_text()[-2000:]
            yield process
        finally:
            process.kill()
            process.wait()


def test_a_server_that_is_killed_stopped_and_started_again(tmp_path: Path) -> None:
    if not BLOCKS.exists():
        pytest.skip("no trained policy")
    port, log = processes.free_port(), tmp_path / "server.log"
    with Run(port, hz=20.0, deadline=2.0, max_age=1.5) as run:
        with server(port, log) as first:
            run.moves()
            first.send_signal(signal.SIGSTOP)
            run.holds()
            first.send_signal(signal.SIGCONT)
            run.moves()
            first.kill()
            first.wait()
        # A request fails after the end of the server, so no answer is on its way. A hold alone does not say that.
        faults = run.witness.faults
        run.until(lambda: run.witness.faults > faults)
        run.holds("Timeout" if run.loop.settings.finish else "")
        count, steps = len(run.witness.executed), len(run.witness.commands)
        run.until(lambda: len(run.witness.commands) > steps + 20)
        assert len(run.witness.executed) == count
        with server(port, log):
            run.moves()


# ----------------------------------------------------------------------------- networks and replies


def test_a_half_open_connection() -> None:
    with Puppet(dim=4) as puppet, Proxy(puppet.port) as proxy, Run(proxy.port) as run:
        run.moves()
        faults = run.witness.faults
        proxy.frozen = True
        run.until(lambda: run.witness.faults > faults)
        run.holds()
        proxy.frozen = False  # the old connection stays dead; a new one works
        run.moves()
        proxy.cut()
        run.moves()
        assert run.witness.faults >= 1


def test_segments_that_are_lost_and_sent_again() -> None:
    with Puppet(dim=4) as puppet, Proxy(puppet.port, seed=1) as proxy, Run(proxy.port) as run:
        run.moves()
        proxy.loss, proxy.stall = 0.3, 0.01  # a message has a dozen segments: some are late in each
        run.moves(60)
        proxy.stall = 1.0  # beyond the deadline
        run.holds()
        proxy.loss = 0.0
        run.moves()


def test_a_server_that_says_nothing_and_one_that_says_nan() -> None:
    with Puppet(dim=4) as puppet, Run(puppet.port) as run:
        run.moves()
        puppet.silent = True
        run.holds("no answer within")
        puppet.silent = False
        run.moves()
        puppet.nan = True
        run.holds("not finite")
        puppet.nan = False
        run.moves()
        assert run.witness.faults >= 2


def test_the_wall_clock_may_jump(monkeypatch: pytest.MonkeyPatch) -> None:
    with Puppet(dim=4) as puppet, Run(puppet.port, deadline=60.0, max_age=60.0) as run:
        run.moves()
        real = time.time
        faults, skipped = run.witness.faults, run.loop.pace.skipped
        for jump in (3600.0, -86400.0):
            monkeypatch.setattr(time, "time", lambda jump=jump: real() + jump)
            run.moves(40)
    steps = [command.step for command in run.witness.commands]
    assert run.witness.faults == faults
    assert steps[-1] - steps[0] + 1 - len(steps) == run.loop.pace.skipped >= skipped


def test_a_controller_that_was_stopped_itself_executes_nothing_stale(tmp_path: Path) -> None:
    """SIGSTOP of the robot's own process: afterwards the rows of the past are gone, not rushed through."""
    with Puppet(dim=4) as puppet:
        code = (
            "import sys, json; sys.path.insert(0, sys.argv[2])\n"
            "from tests.control.test_loop_faults import Run\n"
            "with Run(int(sys.argv[1])) as run:\n"
            "    run.moves(); print('moves', flush=True); sys.stdin.readline()\n"
            "    run.moves(); print(json.dumps([run.loop.pace.skipped,"
            " [c.step for c in run.witness.commands]]), flush=True)\n"
        )
        root = str(Path(__file__).parents[2])
        command = [sys.executable, "-c", code, str(puppet.port), root]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with processes.Process(command, cwd=root, **pipes) as process:
            try:
                assert process.stdout.readline().strip() == "moves"
                process.send_signal(signal.SIGSTOP)
                time.sleep(1.0)  # 50 periods
                process.send_signal(signal.SIGCONT)
                process.stdin.write("\n")
                process.stdin.flush()
                skipped, steps = eval(process.stdout.readline())
                assert process.wait(60) == 0  # the witness saw nothing stale, twice, or too late
            finally:
                process.kill()
        assert skipped >= 30
        assert max(np.diff(steps)) >= 30


# ----------------------------------------------------------------------------- sequences


@pytest.mark.parametrize("seed", range(SEQUENCES))
def test_random_sequences_of_faults(seed: int) -> None:
    """Slow, lost, refused, wrong and NaN answers, stale frames, stolen time, pauses, new instructions."""
    rng = random.Random(seed)
    faulty = True

    def answer(number: int) -> Any:
        requester.delay = rng.choice([0.0, 0.02, 0.1, 0.3]) if faulty else 0.05
        kind = rng.random() if faulty else 1.0
        if kind < 0.15:
            return Outcome(reason=rng.choice(["no answer within 1 s", "ServerError: busy", "ConnectionLost"]))
        rows = (100.0 * number + np.arange(rng.choice([1, 4, 10, 30]) if faulty else 20, dtype=np.float32))[
            :, None
        ]
        if kind < 0.25:
            rows[-1] = rng.choice([np.nan, np.inf])
        return rows

    methods = ["freeze", "naive", "aligned", "rtc", "ensemble", "aggregate", "aggregate:conservative"]
    loop, arm = loop_of(
        handover=rng.choice(methods),
        replan=rng.choice(["1", "4", "full", "queue:0.3"]),
        max_age=rng.choice([0.2, 0.5, 3.0]),
    )
    requester = loop.source = Scripted(0.05, answer)  # type: ignore[assignment]
    witness = Witness(int((loop.settings.max_age or 0) * loop.settings.hz))
    loop.controller.listeners.append(witness.hear)
    for _ in range(12):
        event = rng.random()
        arm.frame_age = rng.choice([0.0, 0.1, 0.7]) if event < 0.4 else 0.0
        arm.slow = rng.choice([0.0, 0.08]) if event > 0.7 else 0.0
        if 0.3 < event < 0.5:
            (loop.resume if loop.controller.paused else loop.pause)()
        elif 0.5 < event < 0.6:
            loop.say(f"instruction {event}")
        elif 0.6 < event < 0.7:
            arm.clock.time += rng.choice([0.03, 0.4, 5.0])  # the process did not run
        loop.run(loop.steps + rng.randint(1, 15))
    faulty, arm.frame_age, arm.slow, requester.delay = False, 0.0, 0.0, 0.05
    loop.resume()
    loop.run(loop.steps + 30)
    # Whatever happened, it goes on by itself: within the second that an old answer may need, and then steadily.
    assert sum(command.row is not None for command in witness.commands[-10:]) >= 5
    assert len(witness.commands) == loop.steps
