"""One trial on a robot: who may begin it and say how it ended, and the episode that it then is."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from itertools import count
from typing import TYPE_CHECKING, Any

from sinew_client.control.controller import PAUSED

from sinew.eval.robot import SimulatedRobot
from sinew.eval.runner import Episode, Tally, digest_of
from sinew.eval.sources import chunk_seed

if TYPE_CHECKING:
    from sinew_client.control import Loop
    from sinew_client.control.requester import Call

    from sinew.eval.trials.sitting import Turn

SUCCESS, FAILURE, DISCARD = "success", "failure", "discard"
SET_UP, RUNS, JUDGED, OVER = "set up", "runs", "judged", "over"


class TrialTally(Tally):
    """Counts what happens between the beginning of a trial and its verdict, pauses left out. steps: of the control."""

    def __init__(self) -> None:
        super().__init__()
        self.steps, self.counts = 0, False

    def hear(self, event: str, values: dict[str, Any]) -> None:
        if event == "command":
            if not self.counts or values["command"].reason == PAUSED:
                return
            self.steps += 1
        super().hear(event, values)


class Desk:
    """How a trial stands: whoever may say so begins it and says how it ended, from any thread.

    waits: somebody says when it begins. confirms: and keeps a verdict, which may be changed until then. limit: control
    steps after which it is a failure. state: SET_UP, RUNS, JUDGED or OVER. verdict, by, note: how it ended, who said
    so, and what was written.
    """

    def __init__(self, loop: Loop, tally: TrialTally, waits: bool, confirms: bool, limit: int | None):
        self.loop, self.tally, self.limit = loop, tally, limit
        self.state, self.verdict, self.by, self.note = SET_UP, "", "", ""
        self.confirms, self.seconds = confirms, 0.0
        self._since = 0.0
        loop.listeners.append(tally.hear)
        loop.watch(self._look)
        if waits:
            loop.pause()

    def go(self) -> bool:
        """Begin."""
        if self.state != SET_UP:
            return False
        self.state, self.tally.counts, self._since = RUNS, True, time.monotonic()
        self.loop.resume()
        return True

    def say(self, verdict: str, by: str, note: str = "") -> bool:
        """Say how it ended, or that this is not known ("", and a person has to); return whether that was due."""
        if self.state not in (RUNS, JUDGED):
            return False
        if self.state == RUNS:
            self.seconds, self.tally.counts = time.monotonic() - self._since, False
        self.verdict, self.by, self.note = verdict, by, note
        if self.confirms and by != "file" and verdict != DISCARD:
            self.state = JUDGED
            self.loop.pause()
        else:
            self.state = OVER
            self.loop.stop()
        return True

    def keep(self) -> bool:
        """Keep the verdict."""
        if self.state != JUDGED or not self.verdict:
            return False
        self.state = OVER
        self.loop.stop()
        return True

    def ask_robot(self) -> None:
        """Let a robot that judges itself say how it ended, where it knows."""
        if self.state == RUNS and (found := getattr(self.loop.robot, "success", None)) is not None:
            self.say(SUCCESS if found else FAILURE, "robot")

    def _look(self, _command: Any) -> None:
        self.ask_robot()
        if self.state == RUNS and self.limit is not None and self.tally.steps >= self.limit:
            self.say(FAILURE, "time")


class SeededCalls:
    """Opens connections whose k-th request has the noise of (scene, k), as that of an evaluation. latencies: of each
    answer, milliseconds. solver_steps: of each request; None: the policy's own."""

    def __init__(self, connect: Callable[[], Call], seed: int, solver_steps: int | None):
        self._connect, self._seed, self._solver_steps = connect, seed, solver_steps
        self._asked = count()
        self.latencies: list[float] = []

    def __call__(self) -> Call:
        return _SeededCall(self, self._connect())

    def answer(self, call: Call, observation: Mapping[str, Any], seconds: float) -> Any:
        more: dict[str, Any] = {"seed": chunk_seed(0, self._seed, next(self._asked))}
        if self._solver_steps is not None:
            more["solver_steps"] = self._solver_steps
        begun = time.perf_counter()
        found = call({**observation, **more}, seconds)
        self.latencies.append(1e3 * (time.perf_counter() - begun))
        return found


class _SeededCall:
    def __init__(self, calls: SeededCalls, call: Call):
        self._calls, self._call = calls, call

    def __call__(self, observation: Mapping[str, Any], seconds: float) -> Any:
        return self._calls.answer(self._call, observation, seconds)

    def close(self) -> None:
        """Close the connection, where there is one."""
        if (close := getattr(self._call, "close", None)) is not None:
            close()


def episode(turn: Turn, task: str, chunk_size: int, desk: Desk, calls: SeededCalls) -> Episode:
    """Return a trial that is over. task: its name on boards."""
    loop, tally, report = desk.loop, desk.tally, desk.loop.report()
    machine = loop.robot
    actions = machine.actions if isinstance(machine, SimulatedRobot) else None
    return Episode(
        seed=turn.seed,
        task=task,
        success=desk.verdict == SUCCESS,
        steps=tally.steps if actions is None else len(actions),
        chunks=len(tally.delays),
        executed=report.executed,
        held=tally.held,
        misses=tally.misses,
        delays=tally.delays,
        latency_ms=[round(value, 3) for value in calls.latencies],
        chunk_size=chunk_size,
        late_ticks=report.late + report.skipped,
        wall_s=round(desk.seconds, 3),
        faults=dict(report.faults["kinds"]),
        reasons={reason: held for reason, held in report.held.items() if reason != PAUSED},
        digest="" if actions is None else digest_of(actions),
        clipped=report.clipped_commands,
        trial=turn.name,
        prompt=loop.prompt,
        judge=desk.by,
        note=desk.note,
        counted=desk.verdict != DISCARD,
    )
