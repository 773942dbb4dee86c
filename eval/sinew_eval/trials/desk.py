"""State of one trial, as a person, a file, the robot and the clock determine it, and the episode record of a trial."""

from __future__ import annotations

import os
import stat
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from sinew.core import SinewError, progress
from sinew_client.control.controller import PAUSED
from sinew_client.control.facts import facts_of
from sinew_client.control.listeners.command_listener import CommandListener

from sinew_eval.episodes.robot import SimulatedRobot
from sinew_eval.episodes.runner import Episode, Tally, ages_of, digest_of
from sinew_eval.episodes.sources import chunk_seed

if TYPE_CHECKING:
    from sinew_client.control import Loop

    from sinew_eval.trials.sitting import PendingTrial

SUCCESS, FAILURE, DISCARD = "success", "failure", "discard"
# A trial without a judge is discarded after this many requests in a row without an answer.
LOST = 10
# Number of bytes that are read from `--judge` at once, which is also the longest line.
READ_BYTES = 1 << 16
SET_UP, RUNS, JUDGED, OVER = "waits", "runs", "is judged", "is over"


class VerdictInput:
    """Receives verdicts from any thread. One object serves all trials of a session.

    Args:
        waits: True if a person or a program starts each trial.
        asks: True if a person confirms each verdict. The verdict can be changed until then.
        limit: Control steps after which a trial has failed. None for no limit.
        judge: File or FIFO with verdicts. None if there is none.

    Attributes:
        state: SET_UP, RUNS, JUDGED or OVER.
        verdict: SUCCESS, FAILURE or DISCARD.
        by: Origin of the verdict: "key", "file", "robot", "time" or "loop".
        note: Reason that the judge wrote.
        left: True if the session was stopped.

    Raises:
        SinewError: The file of verdicts does not exist.
    """

    loop: Loop

    state = OVER

    def __init__(self, waits: bool, asks: bool, limit: int | None, judge: Path | None):
        self.waits, self.asks, self.limit, self.left = waits, asks, limit, False
        self._lock = threading.Lock()
        self._file: int | None = None
        self._rest = b""
        if judge is not None:
            try:
                self._file = os.open(judge, os.O_RDONLY | os.O_NONBLOCK)
            except OSError as error:
                raise SinewError(f"--judge {judge}: {error.strerror}") from error
            mode = os.fstat(self._file).st_mode
            if stat.S_ISDIR(mode):
                raise SinewError(f"--judge {judge}: expected a file or a FIFO, got a directory")
            if stat.S_ISREG(mode) and os.lseek(self._file, 0, os.SEEK_END):
                progress.say(
                    f"--judge {judge}: existing lines of this file are ignored; only new lines count"
                )

    def begin(self, loop: Loop) -> None:
        """Attach a prepared trial to the inputs of the judge (keys, file, robot and clock). The trial waits for its
        start, or begins at once.
        """
        self.loop, self.tally = loop, TrialTally()
        if not self.waits:
            # Discard lines that were written too late for the previous trial.
            self._read()
        self.verdict, self.by, self.note, self.seconds, self.state = "", "", "", 0.0, SET_UP
        loop.controller.listeners.append(self.tally.hear)
        CommandListener(self._look).attach(loop)
        if self.waits:
            loop.pause()
        else:
            self.take("go", "")

    def take(self, command: str, by: str) -> bool:
        """Apply an input: go, success, failure, discard REASON, keep, or quit.

        The robot and the clock do not change a verdict that a person gave.

        Args:
            command: The input.
            by: Origin of the input.

        Returns:
            True if the input was valid in this state.
        """
        with self._lock:
            return self._take(command, by)

    def _take(self, command: str, by: str) -> bool:
        word, _, note = command.partition(" ")
        judges = self.state == RUNS or (self.state == JUDGED and by in ("key", "file"))
        if word == "quit":
            self.left = True
            self.loop.stop()
        elif word == "go" and self.state == SET_UP:
            self.state, self.tally.counts, self._since = RUNS, True, time.monotonic()
            self.loop.resume()
        elif word == "keep" and self.state == JUDGED:
            self.state = OVER
            self.loop.stop()
        elif judges and (word in (SUCCESS, FAILURE) or (word == DISCARD and note)):
            if self.state == RUNS:
                self.seconds, self.tally.counts = time.monotonic() - self._since, False
            self.verdict, self.by, self.note = word, by, note
            asks = self.asks and by != "file" and word != DISCARD
            self.state = JUDGED if asks else OVER
            (self.loop.pause if asks else self.loop.stop)()
        else:
            return False
        return True

    def ended(self) -> None:
        """Handle a run that the robot ended: ask the robot for its verdict, or discard the trial."""
        self._ask_robot()
        if self.state == RUNS:
            self.take(f"{DISCARD} the robot ended the run without a verdict", "loop")
        elif self.state == SET_UP:
            self.take("quit", "loop")

    def lost(self, why: str) -> None:
        """Discard the failure of a trial if no person has seen it and the policy did not cause it. ``why`` states the
        reason.
        """
        if self.verdict == FAILURE and self.by in ("robot", "time") and not self.waits:
            self.verdict, self.by, self.note = DISCARD, "loop", why

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)

    def _ask_robot(self) -> None:
        success = facts_of(self.loop.robot).success()
        if self.state == RUNS and success is not None:
            if not isinstance(success, (bool, np.bool_)):
                raise SinewError(f"success of the robot: expected True, False or None, got {success!r}")
            self.take(SUCCESS if success else FAILURE, "robot")

    def _read(self) -> None:
        """Apply the new lines of the file with verdicts."""
        if self._file is not None:
            # No program has written to the FIFO since the last read.
            with suppress(BlockingIOError):
                self._rest += os.read(self._file, READ_BYTES)
            *lines, self._rest = self._rest.split(b"\n")
            # Treat a line that is too long as complete, so that the buffer does not grow.
            if len(self._rest) > READ_BYTES:
                lines, self._rest = [*lines, self._rest], b""
            refused = []
            for line in lines:
                text, state = line.decode("utf-8", "replace").strip(), self.state
                if not self.take(text, "file"):
                    expected = "go" if state == SET_UP else "success, failure or discard REASON"
                    refused.append(f"expected {expected}, because the trial {state}, got {text[:80]!r}")
            # Print only one sentence, because the robot is moving.
            if refused:
                more = f", and {len(refused) - 1} more lines" if refused[1:] else ""
                progress.say(f"--judge: {refused[0]}{more}")

    def _look(self, _command: Any) -> None:
        """After a control step, check for a verdict from the file, the robot or the time limit."""
        self._read()
        self._ask_robot()
        if self.state == RUNS and self.limit is not None and self.tally.steps >= self.limit:
            self.take(FAILURE, "time")
        if not self.waits and self.loop.controller.unanswered >= LOST:
            self.take(f"{DISCARD} {LOST} requests in a row had no answer", "loop")

    def episode(self, turn: PendingTrial, task: str, chunk_size: int, latencies: list[float]) -> Episode:
        """Build the record of the trial.

        Args:
            turn: The trial.
            task: Name of the task on leaderboards.
            chunk_size: Number of actions in a chunk.
            latencies: Milliseconds of each answer.
        """
        report, machine, tally = self.loop.report(), self.loop.robot, self.tally
        actions = machine.actions if isinstance(machine, SimulatedRobot) else None
        return Episode(
            seed=turn.seed,
            task=task,
            success=self.verdict == SUCCESS,
            steps=tally.steps if actions is None else len(actions),
            chunks=len(tally.delays),
            executed=report.executed,
            held=tally.held,
            misses=tally.misses,
            delays=tally.delays,
            latency_ms=latencies,
            chunk_size=chunk_size,
            late_ticks=report.late + report.skipped,
            wall_s=round(self.seconds, 3),
            faults=dict(report.faults["kinds"]),
            reasons={reason: steps for reason, steps in report.held.items() if reason != PAUSED},
            digest="" if actions is None else digest_of(actions),
            clipped=report.clipped_commands,
            ages=ages_of(self.loop),
            trial=turn.name,
            prompt=self.loop.prompt,
            judge=self.by,
            note=self.note,
            counted=self.verdict != DISCARD,
        )


class TrialTally(Tally):
    """Counts events between the start of a trial and its verdict, except during pauses.

    Attributes:
        steps: Control steps of the trial.
        counts: True while the trial runs.
    """

    steps, counts = 0, False

    def hear(self, event: str, values: dict[str, Any]) -> None:
        if event == "command":
            if not self.counts or values["command"].reason == PAUSED:
                return
            self.steps += 1
        super().hear(event, values)


def scene_noise(seed: int, solver_steps: int | None) -> Callable[[], dict[str, Any]]:
    """Return a function with further fields for each request of a trial. The noise is that of an episode with this
    seed.

    Args:
        seed: Seed of the scene.
        solver_steps: Number of solver steps. None for the policy's own number.
    """
    request_numbers = count()
    more = {} if solver_steps is None else {"solver_steps": solver_steps}
    return lambda: {"seed": chunk_seed(0, seed, next(request_numbers)), **more}
