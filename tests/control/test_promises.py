"""What a controller promises, as a state machine: whatever happens in whatever order, these hold."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from sinew_client.control import Command, Controller, Guard, Limits, Player, parse_handover, parse_rule

PERIOD = 0.05
PLAIN = ("freeze", "naive", "aligned", "aligned+halt:500", "rtc", "rtc:trained")
MIXED = ("ensemble", "aggregate:average", "aggregate:conservative", "aggregate")


class Promises(RuleBasedStateMachine):
    """Row r of chunk c is 1000 c + r, so that every command says where it comes from."""

    @initialize(
        handover=st.sampled_from(PLAIN + MIXED),
        rule=st.sampled_from(["1", "3", "full", "queue:0.5", "disagreement:0.1,4"]),
        max_age=st.sampled_from([None, 2, 6]),
        finish=st.booleans(),
        committed_rows=st.sampled_from([0, 1, 4]),
    )
    def begin(self, handover: str, rule: str, max_age: int | None, finish: bool, committed_rows: int) -> None:
        self.handover, self.max_age, self.finish = handover, max_age, finish
        player = Player(parse_handover(handover), parse_rule(rule), committed_rows=committed_rows)
        self.controller = Controller(player, Guard(None, PERIOD), max_age, finish)
        self.step = 0
        self.frames: dict[int, int] = {}
        self.executed: set[tuple[int, int]] = set()
        self.must_hold = ""  # the reason that the next command has to give
        self.may_run = False  # a good chunk has come since the last fault
        self.last: Command | None = None

    @precondition(lambda self: self.controller.wants_chunk(self.step))
    @rule(age=st.integers(0, 3))
    def ask(self, age: int) -> None:
        request = self.controller.ask(self.step, self.step - age, np.zeros(1, np.float32))
        assert not self.controller.wants_chunk(self.step)  # one under way
        if not self.handover.startswith("rtc") or not self.may_run:
            assert "previous" not in request.fields
        if "previous" in request.fields:
            most = self.controller.player.committed_rows
            assert not most or request.fields["delay"] <= most
            assert request.fields["delay"] >= age
            assert request.fields["horizon"] >= max(1, request.fields["delay"])
            assert np.isfinite(request.fields["previous"]).all()

    @precondition(lambda self: self.controller.player.waiting)
    @rule(size=st.integers(1, 12))
    def answer(self, size: int) -> None:
        number = self.controller.player.chunks
        request = self.controller.player.request
        assert request is not None
        self.frames[number] = request.frame
        rows = 1000.0 * number + np.arange(size, dtype=np.float32)
        self.controller.arrived(self.step, rows[:, None])
        self.must_hold, self.may_run = "", True

    @precondition(lambda self: self.controller.player.waiting)
    @rule(bad=st.sampled_from([np.nan, np.inf, -np.inf]), size=st.integers(1, 4))
    def bad_answer(self, bad: float, size: int) -> None:
        rows = np.zeros((size, 1), np.float32)
        rows[-1] = bad
        self.controller.arrived(self.step, rows)
        self.must_hold, self.may_run = "a chunk is not finite", False

    @precondition(lambda self: self.controller.player.waiting)
    @rule()
    def fail(self) -> None:
        self.controller.failed(self.step, "no answer")
        if not self.finish:
            self.must_hold, self.may_run = "no answer", False

    @rule()
    def fault(self) -> None:
        self.controller.fault(self.step, "stale")
        self.must_hold, self.may_run = "stale", False

    @rule()
    def pause_or_resume(self) -> None:
        if self.controller.paused:
            self.controller.resume()
            self.must_hold = "no chunk yet"
        else:
            self.controller.pause()
            self.must_hold = ""
        self.may_run = False

    @rule(skipped=st.integers(0, 3))
    def tick(self, skipped: int) -> None:
        self.step += skipped
        command = self.controller.command(self.step)
        with pytest.raises(ValueError, match="committed"):
            self.controller.command(self.step)  # never two commands in one period
        assert command.step == self.step
        expected = "paused" if self.controller.paused else self.must_hold
        if expected or not self.may_run:
            assert command.row is None
            assert not expected or command.reason == expected
        if command.row is not None:
            self._executes(command)
        else:
            assert command.reason
            if "older than" in command.reason:
                self.may_run = False
                self.must_hold = command.reason
        self.last = command
        self.step += 1

    @rule(count=st.integers(2, 9))
    def ticks(self, count: int) -> None:
        for _ in range(count):
            self.tick(0)

    def _executes(self, command: Command) -> None:
        assert command.age == command.step - self.frames[command.chunk]
        assert self.max_age is None or command.age <= self.max_age  # none older than its validity
        assert command.chunk == self.controller.player.chunks - 1
        assert (command.chunk, command.index) not in self.executed  # none twice
        self.executed.add((command.chunk, command.index))
        assert 0 <= command.index <= command.age or self.handover in ("naive", "freeze")
        if self.handover in PLAIN:
            assert command.row is not None
            assert command.row[0] == 1000 * command.chunk + command.index

    @invariant()
    def one_request_under_way(self) -> None:
        if hasattr(self, "controller") and self.controller.player.waiting:
            assert not self.controller.wants_chunk(self.step)


Promises.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestPromises = Promises.TestCase


class Limited(RuleBasedStateMachine):
    """Whatever is asked for, what goes out keeps every limit; a stop may be abrupt."""

    @initialize(
        span=st.floats(0.1, 10),
        velocity=st.floats(0.1, 50),
        acceleration=st.one_of(st.just(np.inf), st.floats(0.5, 500)),
    )
    def begin(self, span: float, velocity: float, acceleration: float) -> None:
        given = {"low": -span, "high": span, "velocity": velocity, "acceleration": acceleration}
        self.limits = Limits.parse(given, 1)
        self.guard = Guard(self.limits, PERIOD)
        self.guard.start(np.zeros(1))
        self.position = self.moved = 0.0

    @rule(wanted=st.one_of(st.floats(-100, 100), st.sampled_from([1e30, -1e30, 0.0])))
    def command(self, wanted: float) -> None:
        verdict = self.guard.check(np.array([wanted], np.float64))
        assert verdict.row is not None
        sent = float(self.guard._last[0])  # before rounding to float32
        move, slack = sent - self.position, 1e-9 * (1 + abs(sent))
        most = float(np.float32(self.limits.high[0]))
        assert -most <= float(verdict.row[0]) <= most
        assert -most <= sent <= most
        assert abs(move) <= self.limits.velocity[0] * PERIOD + slack
        assert abs(move - self.moved) <= self.limits.acceleration[0] * PERIOD**2 + slack
        assert bool(verdict.clipped) == (float(verdict.row[0]) != wanted) or abs(sent - wanted) < 1e-6
        self.position, self.moved = sent, move

    @rule()
    def hold(self) -> None:
        self.guard.held()
        self.moved = 0.0


Limited.TestCase.settings = settings(max_examples=25, stateful_step_count=60, deadline=None)
TestLimited = Limited.TestCase
