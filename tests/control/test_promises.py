"""What a controller promises, as a state machine: whatever happens in whatever order, these hold."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from sinew_client import ServerError
from sinew_client.control import (
    Command,
    CommandListener,
    Controller,
    Guard,
    Limits,
    Loop,
    NoObservation,
    Pace,
    Player,
    Requester,
    Settings,
    parse_handover,
    parse_rule,
)
from sinew_client.control.requester import LONGEST_WAIT

from tests.control.scenarios import KINDS, play

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
        with pytest.raises(ValueError, match="already has its command"):
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
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
TestPromises = Promises.TestCase


def kept(
    limits: Limits, before: np.ndarray, moved: np.ndarray, row: np.ndarray, changed: np.ndarray | None = None
) -> None:
    """Check a command as the robot sees it: float32, after ``before``, to which it went by ``moved``, a step that
    differed from the one before by ``changed``.

    Range and velocity to the bit. Acceleration to the bit where the robot gets faster; slowing down it may be one step
    of float32 more, where no number in between can be sent. Where a jerk is limited, both but for rounding.
    """
    assert row.dtype == np.float32
    assert row.shape == before.shape
    assert np.isfinite(row).all()
    low, high = (end.astype(np.float32) for end in (limits.low, limits.high))
    assert (np.minimum(low, before) <= row).all()  # led back from where it stood outside
    assert (row <= np.maximum(high, before)).all()
    move = row.astype(np.float64) - before
    assert (np.abs(move) <= limits.velocity * PERIOD).all()
    ulp = np.spacing(np.maximum(np.abs(row), np.abs(before)).max() + 1)
    if np.isfinite(limits.jerk).any() and changed is not None:
        assert (np.abs(move - moved) <= limits.acceleration * PERIOD**2 + 16 * ulp).all()
        assert (np.abs(move - moved - changed) <= limits.jerk * PERIOD**3 + 16 * ulp).all()
        return
    slack = np.where(np.abs(move) < np.abs(moved), np.spacing(np.maximum(np.abs(row), np.abs(before))), 0.0)
    assert (np.abs(move - moved) <= limits.acceleration * PERIOD**2 + slack).all()


class Limited(RuleBasedStateMachine):
    """Whatever is asked for, what goes out keeps every limit; a stop may be abrupt."""

    @initialize(
        span=st.floats(0.1, 10),
        velocity=st.floats(0.001, 50),
        acceleration=st.one_of(st.just(np.inf), st.floats(0.01, 500)),
        start=st.floats(-20, 20),
    )
    def begin(self, span: float, velocity: float, acceleration: float, start: float) -> None:
        given = {"low": -span, "high": span, "velocity": velocity, "acceleration": acceleration}
        self.limits = Limits.parse(given, 1)
        self.guard = Guard(self.limits, PERIOD)
        assert (
            self.guard.check(np.zeros(1)).row is None
        )  # nothing goes out before it is known where the robot is
        self.guard.start(np.array([start]))
        self.position, self.moved = np.float32([start]), np.zeros(1)

    @rule(wanted=st.one_of(st.floats(-100, 100), st.sampled_from([1e30, -1e30, 0.0])))
    def command(self, wanted: float) -> None:
        row = np.float32([wanted])
        verdict = self.guard.check(row)
        assert verdict.row is not None
        kept(self.limits, self.position, self.moved, verdict.row)
        assert bool(verdict.clipped) == (verdict.row[0] != row[0])
        assert verdict.clipped or verdict.row is row
        self.moved = verdict.row.astype(np.float64) - self.position
        self.position = verdict.row

    @rule()
    def hold(self) -> None:
        self.guard.held()
        self.moved = np.zeros(1)


Limited.TestCase.settings = settings(max_examples=60, stateful_step_count=60, deadline=None, derandomize=True)
TestLimited = Limited.TestCase


# ----------------------------------------------------------------------------- a loop, a robot, a hostile server


class Panic(BaseException):
    """What ``except Exception`` does not catch."""


DIM, DEADLINE, STALE = 2, 0.3, 0.25
BAD: dict[str, Callable[[], Any]] = {
    "narrow": lambda: np.zeros((4, 1)),
    "wide": lambda: np.zeros((4, 7)),
    "flat": lambda: np.zeros(4),
    "none": lambda: np.zeros((0, DIM)),
    "endless": lambda: np.zeros((100_000, DIM), np.float32),
    "nan": lambda: np.full((4, DIM), np.nan),
    "huge": lambda: np.full((4, DIM), 1e300),
    "complex": lambda: np.full((4, DIM), 1j),
    "text": lambda: [["a", "b"]],
    "ragged": lambda: [[1, 2], [3]],
    "nothing": lambda: None,
    "error": lambda: RuntimeError("no"),
    "refused": lambda: ServerError("bad_observation", "no"),
    "busy": lambda: ServerError("busy", "no"),
    "panic": Panic,
    "exit": lambda: SystemExit(0),
}
TIMES = {  # of a frame, from the clock: those that may be acted on
    True: [None, 0.0, 0.05, -0.1, -0.2],
    False: [0.2, 1.7e9, -0.3, -3600.0, np.nan, np.inf, -np.inf],
}
BOX = 1.0  # of a workspace, each way
SOURCES: list[dict[str, Any]] = [  # what holds for two cameras and the state
    {},
    {"skew": 0.08},
    {"stale_of": {"wrist": 0.12, "state": 0.1}},
    {"skew": 0.08, "stale_of": {"front": 0.18}},
]
AGES: dict[
    str, list[float | None]
] = {  # of each, in seconds; None: the robot does not say it. Twice what is fresh
    "front": [0.0, 0.05, 0.0, 0.05, 0.2, 0.3, np.nan, None],
    "wrist": [0.0, 0.05, 0.0, 0.05, 0.15, 0.3, -0.3, None],
    "state": [0.0, 0.05, 0.0, 0.05, 0.15, 0.3, np.inf, None],
}


def not_to_be_acted_on(ages: Mapping[str, float | None], bounds: Mapping[str, Any]) -> bool:
    """Say it of what two cameras and the state show, as docs/control.md has it."""
    said = {name: age for name, age in ages.items() if age is not None}
    of, skew = bounds.get("stale_of", {}), bounds.get("skew")
    frames = [said[name] for name in ("front", "wrist") if name in said]
    return (
        any(name not in said for name in (*of, *(("front", "wrist") if skew else ())))
        or any(not -0.1 <= age <= of.get(name, STALE) for name, age in said.items())
        or max(frames, default=0.0) > STALE
        or bool(skew and len(frames) == 2 and abs(frames[0] - frames[1]) > skew)
    )


class Hostile(RuleBasedStateMachine):
    """A robot of two joints that goes where it is told, a server that answers whatever it likes, clocks that jump.

    Everything is checked where the robot sees it. ``true``: seconds that really passed; ``known``: those that the
    clock tells of.
    """

    @initialize(
        handover=st.sampled_from(PLAIN + MIXED),
        replan=st.sampled_from(["1", "4", "full", "queue:0.5"]),
        motion=st.sampled_from(
            [{"kind": "absolute"}, {"kind": "relative", "action": [0, 1], "state": [0, 1]}]
        ),
        velocity=st.sampled_from([0.3, 2.0]),
        acceleration=st.sampled_from([None, 1.0, 40.0]),
        jerk=st.sampled_from([None, None, 20.0, 2000.0]),
        smooth=st.sampled_from(["", "", "lowpass:3", "ema:0.4"]),
        speed=st.sampled_from([1.0, 1.0, 0.5]),
        max_age=st.sampled_from([0.2, 0.5]),
        start=st.tuples(st.floats(-3, 3), st.floats(-3, 3)),
        box=st.sampled_from([(None, None), (BOX, None), (BOX, BOX)]),
        jump=st.sampled_from([None, None, 0.4]),
        sources=st.sampled_from(SOURCES),
    )
    def begin(
        self, handover, replan, motion, velocity, acceleration, jerk, smooth, speed, max_age, start, box, jump, sources
    ) -> None:  # fmt: skip
        limits = {"low": -2, "high": 2, "velocity": velocity, "acceleration": acceleration, "jerk": jerk}
        self.box, self.sources = np.float64([np.inf if end is None else end for end in box]), sources
        low = [None if end is None else -end for end in box]
        limits |= {"jump": jump, "workspace_low": low, "workspace_high": list(box)}
        self.limits = Limits.parse(limits, DIM)
        self.time, self.true, self.lost = 1000.0, 0.0, 0.0  # lost: seconds in which the process did not run
        self.position, self.moved, self.changed = np.float32(start), np.zeros(DIM), np.zeros(DIM)
        self.frame, self.state = 0.0, "good"
        self.ages: dict[str, float | None] | None = dict.fromkeys(
            AGES, 0.0
        )  # None: the robot says one time of all
        self.last_true: float | None = None  # of the last command or hold
        self.last_step = -1
        self.seen_bad = False
        self.exposed: list[float] = []  # when the frame of each request was, as far as is known
        self.good: list[float] = []  # the same of each chunk that was good
        self.executed: set[tuple[int, int]] = set()
        self.sent = self.acted = 0
        self.waiting: SimpleQueue = SimpleQueue()  # of calls: what each is to answer goes there
        self.pending: SimpleQueue | None = None  # of the newest call
        self.hanging: list[SimpleQueue] = []  # of calls that were given up
        options = {"max_age": max_age, "deadline": DEADLINE, "stale": STALE, "filter": smooth, **sources}
        options["speed"] = 1.0 if handover.startswith("rtc") else speed
        chosen = Settings(
            1 / PERIOD, handover, replan, motion=motion, limits=limits, chunk_size=40, **options
        )
        pace = Pace(PERIOD, self.now, self.sleep)
        self.loop = Loop(
            self, lambda: self.call, chosen, DIM, "go", pace, [CommandListener(self.watch)], hold_refused=True
        )  # type: ignore[arg-type]
        self.loop.controller.listeners.append(self.hear)
        self.loop.source.ask = self.ask  # type: ignore[method-assign]

    # -- the robot

    def observe(self) -> dict[str, Any]:
        if self.state == "blind":
            self.seen_bad = True
            raise NoObservation("dark")
        state = np.full(DIM, np.nan) if self.state == "nan" else self.position.copy()
        seen: dict[str, Any] = {"images": dict.fromkeys(("front", "wrist")), "state": state}
        if self.ages is not None:
            said = {name: age for name, age in self.ages.items() if age is not None}
            self.seen_bad = self.state == "nan" or not_to_be_acted_on(self.ages, self.sources)
            self.newest = self.known - max([0.0, *(age for name, age in said.items() if name != "state")])
            return {**seen, "times": {name: self.time - age for name, age in said.items()}}
        alone = not_to_be_acted_on(dict.fromkeys(AGES), self.sources)  # of no source of its own
        self.seen_bad = (
            self.state == "nan" or self.frame in TIMES[False] or np.isnan(self.frame or 0.0) or alone
        )
        self.newest = self.known + min(self.frame or 0.0, 0.0)
        return {**seen, **({} if self.frame is None else {"time": self.time + self.frame})}

    def act(self, row: np.ndarray) -> None:
        assert self.expected is not None
        self.noted()
        kept(self.limits, self.position, self.moved, row, self.changed)
        assert (np.abs(row) <= np.maximum(self.box, np.abs(self.position)) + 1e-6).all()  # never further out
        moved = row.astype(np.float64) - self.position
        self.moved, self.changed = moved, moved - self.moved
        self.position = row
        self.acted += 1

    def hold(self) -> None:
        assert self.expected is None
        self.noted()
        self.stands()

    def stands(self) -> None:
        self.moved, self.changed = np.zeros(DIM), np.zeros(DIM)

    def hear(self, event: str, values: Mapping[str, Any]) -> None:
        if event == "arrived":
            rows = values["actions"]
            assert 1 <= len(rows) <= 40
            assert rows.shape[1] == DIM
            assert np.isfinite(rows).all()
            self.good.append(self.exposed[-1])

    def noted(self) -> None:
        """A command or a hold in every period in which the process ran."""
        self.sent += 1
        if self.last_true is not None:
            assert self.true - self.last_true <= PERIOD + self.lost + 1e-6
        self.last_true, self.lost = self.true, 0.0

    def watch(self, command: Command) -> None:
        assert command.step > self.last_step
        if command.step > self.last_step + 1:
            self.stands()  # it was sent nothing for a while
        self.last_step = command.step
        self.expected = command.row
        if self.seen_bad or self.loop.controller.paused:
            assert command.row is None  # held in the very step in which it is known
        if command.row is None:
            assert command.reason
            return
        assert (command.chunk, command.index) not in self.executed  # nothing twice
        self.executed.add((command.chunk, command.index))
        assert command.chunk < len(self.good)  # of an answer that was good
        age = self.known - self.good[command.chunk]
        assert age <= self.loop.settings.max_age + PERIOD + 1e-6  # type: ignore[operator]

    # -- the server

    def call(self, observation: Mapping[str, Any], limit: float) -> Any:
        answer: SimpleQueue = SimpleQueue()
        self.waiting.put(answer)
        found = answer.get()
        if isinstance(found, BaseException):
            raise found
        return found

    def answer(self, value: Any) -> bool:
        """Answer the request under way, and wait until that is known; False without one."""
        requester = self.loop.source
        if self.pending is None or not requester.busy:
            return False
        self.pending.put(value)
        self.pending = None
        while requester._answer.empty():  # type: ignore[union-attr]
            time.sleep(1e-4)
        return True

    def come_back(self) -> None:
        """Let calls that hang, and that nobody waits for any more, return."""
        if self.pending is not None and not self.loop.source.busy:
            self.hanging.append(self.pending)
            self.pending = None
        for call in self.hanging:
            call.put(None)
        self.hanging.clear()
        while self.loop.source._hanging:
            time.sleep(1e-4)

    # -- clocks

    known = 0.0  # seconds that passed as far as the clock can tell: where it is set back it tells nothing
    looked = float("inf")
    expected: np.ndarray | None = None
    newest = 0.0

    def now(self) -> float:
        self.known += max(0.0, self.time - self.looked)
        self.looked = self.time
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time += seconds
        self.true += seconds

    # -- what may happen

    @rule(count=st.integers(1, 12))
    def ticks(self, count: int) -> None:
        for _ in range(count):
            sent, self.seen_bad = self.sent, False
            self.loop.tick(self.loop.pace.next())
            assert self.sent == sent + 1  # one command or one hold

    def ask(self, observation: Mapping[str, Any], now: float) -> None:
        assert not self.seen_bad  # what may not be acted on is not asked about
        if self.pending is not None:
            self.hanging.append(self.pending)
        Requester.ask(self.loop.source, observation, now)
        self.pending = self.waiting.get(timeout=60)
        self.exposed.append(self.newest)

    @rule(
        rows=st.lists(st.tuples(st.floats(-1e3, 1e3), st.floats(-1e3, 1e3)), min_size=1, max_size=12),
        times=st.sampled_from([1, 3]),
    )
    def good_answer(self, rows: list[tuple[float, float]], times: int) -> None:
        self.until_asked()
        if self.answer(np.array(rows * times, np.float32)):
            self.ticks(2)

    @rule(kind=st.sampled_from(sorted(BAD)))
    def bad_answer(self, kind: str) -> None:
        self.until_asked()
        if self.answer(BAD[kind]()):
            self.ticks(1)
            assert self.expected is None  # held in the step in which it is known
            assert self.loop._command.reason  # type: ignore[union-attr]

    def until_asked(self) -> None:
        for _ in range(12):
            if self.loop.source.busy or self.loop.controller.paused:
                break
            self.ticks(1)

    @rule(
        frame=st.sampled_from(TIMES[True] + TIMES[False]),
        state=st.sampled_from(["good", "good", "nan", "blind"]),
    )
    def look(self, frame: float | None, state: str) -> None:
        self.frame, self.state, self.ages = frame, state, None

    @rule(ages=st.fixed_dictionaries({name: st.sampled_from(ages) for name, ages in AGES.items()}))
    def look_from_each(self, ages: dict[str, float | None]) -> None:
        self.ages, self.state = ages, "good"

    @rule(wrist=st.sampled_from([0.05, 0.15]))
    def frames_apart(self, wrist: float) -> None:
        """Neither of them is old."""
        self.ages, self.state = {"front": 0.0, "wrist": wrist, "state": 0.0}, "good"

    @rule(back=st.sampled_from([0.01, 0.2, 5.0, 900.0]))
    def set_back(self, back: float) -> None:
        self.time -= back

    @rule(seconds=st.sampled_from([0.02, 0.07, 0.4, 30.0]), clock=st.booleans())
    def stop_the_process(self, seconds: float, clock: bool) -> None:
        """Or the machine: then its clock may stand still meanwhile."""
        self.true += seconds
        self.lost += seconds
        self.time += seconds * clock

    @rule(to=st.tuples(st.floats(-3, 3), st.floats(-3, 3)))
    def pause_and_push(self, to: tuple[float, float]) -> None:
        """Somebody moves the robot by hand, which is why it was paused."""
        self.loop.pause()
        self.ticks(1)
        self.position = np.float32(to)
        self.stands()
        self.loop.resume()

    @rule(to=st.tuples(st.floats(-2, 2), st.floats(-2, 2)))
    def another_episode(self, to: tuple[float, float]) -> None:
        self.loop.restart("a new episode", "another")
        self.position = np.float32(to)
        self.stands()

    @rule()
    def all_is_well(self) -> None:
        """Whatever happened before: it asks again, and moves."""
        self.frame, self.state, self.ages = 0.0, "good", dict.fromkeys(AGES, 0.0)
        self.come_back()
        acted = self.acted
        for _ in range(int((2 * DEADLINE + LONGEST_WAIT + 2.0) / PERIOD)):
            self.ticks(1)
            if self.acted > acted:
                return
            self.come_back()
            near = self.position + np.clip(np.float32([0.1, 0.2]) - self.position, -0.3, 0.3)
            relative = self.loop.settings.motion["kind"] == "relative"  # type: ignore[index]
            self.good_answer([tuple(near - self.position * relative)], 30)  # type: ignore[list-item]
            if self.acted > acted:
                return
        raise AssertionError(self.loop.report())

    def teardown(self) -> None:
        if hasattr(self, "loop"):
            self.all_is_well()
            self.loop.source.cancel()
            self.come_back()


Hostile.TestCase.settings = settings(
    max_examples=80,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
TestHostile = Hostile.TestCase


FOUND = {"take-over": (2028, 3500), "assist": (10875,)}  # what campaigns have found


@pytest.mark.parametrize("kind", KINDS)
def test_a_sample_of_whole_loops_keeps_its_promises(kind: str) -> None:
    """``python -m benchmarks.promises`` plays as many as you like."""
    happened: Counter = Counter()
    seeds = [*range(30), *FOUND.get(kind, ())]
    for seed in seeds:
        happened += play(seed, kind)
    assert happened["scenarios"] == len(seeds)
    assert happened["commands"] > 100
    assert happened["holds"] > 100
