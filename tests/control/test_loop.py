"""The loop on a clock that the test moves, the requester on threads, the journal and its repetition."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sinew_client import ClientError
from sinew_client.control import (
    Command,
    CommandListener,
    Earlier,
    Journal,
    Loop,
    NoCommand,
    NoObservation,
    Outcome,
    Pace,
    Requester,
    Settings,
    SettingsError,
    SimulatedPace,
    Stopped,
    repeat,
)
from sinew_client.control.authority import AuthorityChange
from sinew_client.control.journal import JournalError, is_journal
from sinew_client.control.loop import elapsed
from sinew_client.control.planner import newest_of
from sinew_client.control.report import MAX_SOURCES, SourceAges, percentiles
from sinew_client.control.requester import ABANDONED, FIRST_WAIT
from sinew_client.control.safety import RATES, UNPLACED
from sinew_client.control.smoothing import parse_filter
from sinew_client.control.watchdog import Watchdog
from sinew_client.errors import Refused, SinewError
from sinew_client.faults import PERMANENT
from sinew_client.history import History


class Clock:
    """A clock that moves when somebody sleeps, or is told to."""

    def __init__(self) -> None:
        self.time = 100.0

    def now(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time += seconds


class Arm:
    """A robot of one joint that goes where it is told at once. ``slow``: seconds that observing takes."""

    def __init__(self, clock: Clock):
        self.clock, self.position = clock, np.zeros(1, np.float32)
        self.sent: list[tuple[float, float | None]] = []  # when, and what; None is a hold
        self.frame_age, self.slow = 0.0, 0.0

    def observe(self) -> dict[str, Any]:
        self.clock.time += self.slow
        return {"images": {}, "state": self.position.copy(), "time": self.clock.time - self.frame_age}

    def act(self, row: np.ndarray) -> None:
        self.position = np.array(row)
        self.sent.append((self.clock.time, float(row[0])))

    def hold(self) -> None:
        self.sent.append((self.clock.time, None))


class Scripted:
    """A requester that answers after ``delay`` seconds of the test's clock: with ``answer(number)``."""

    def __init__(self, delay: float, answer: Callable[[int], Any]):
        self.delay, self.answer, self.failures, self.requests = delay, answer, 0, []
        self._due: float | None = None

    def ready(self, now: float) -> bool:
        return self._due is None

    def ask(self, observation: Mapping[str, Any], now: float) -> None:
        self.requests.append(dict(observation))
        self._due = now + self.delay

    def poll(self, now: float) -> Outcome | None:
        if self._due is None or now < self._due - 1e-9:
            return None
        self._due = None
        found = self.answer(len(self.requests) - 1)
        return found if isinstance(found, Outcome) else Outcome(found)

    def cancel(self) -> None:
        self._due = None

    def close(self, wait: float = 0.0) -> None:
        self.cancel()


def chunk(number: int) -> np.ndarray:
    return (100.0 * number + np.arange(10, dtype=np.float32))[:, None]


def loop_of(
    delay: float = 0.1, answer: Callable[[int], Any] = chunk, history: History | None = None, **given: Any
) -> tuple[Loop, Arm]:
    clock = Clock()
    arm = Arm(clock)
    settings = Settings(**{"hz": 20.0, "handover": "aligned", "replan": "4", **given})
    pace = Pace(settings.period / settings.substeps, clock.now, clock.sleep)
    loop = Loop(arm, lambda: None, settings, 1, "stack", pace, [] if history is None else [Earlier(history)])  # type: ignore[arg-type, return-value]
    loop.source = Scripted(delay, answer)  # type: ignore[assignment]
    return loop, arm


# ----------------------------------------------------------------------------- pace


def test_ticks_do_not_drift() -> None:
    clock = Clock()
    pace = Pace(0.1, clock.now, clock.sleep)
    assert pace.since(7.0) == 0.0  # there is no first tick yet
    for expected in range(50):
        assert pace.next() == expected
        clock.time += 0.07 if expected % 3 else 0.0
    assert clock.time == pytest.approx(100 + 49 * 0.1 + 0.07, abs=1e-6)
    assert (pace.late, pace.skipped) == (0, 0)
    clock.time += 0.1  # the next one begins 0.07 late: more than half a period
    assert pace.next() == 50
    assert (pace.late, pace.skipped) == (1, 0)
    clock.time += 1.0
    assert pace.next() == 60  # the number tells the time, whole periods are gone
    assert (pace.late, pace.skipped) == (2, 9)
    clock.time = pace.due(61) + 0.045  # less than half a period
    assert pace.next() == 61
    assert (pace.late, pace.skipped) == (2, 9)


def test_just_half_a_period_is_not_late_and_just_a_whole_one_is_skipped() -> None:
    clock = Clock()
    pace = Pace(0.25, clock.now, clock.sleep)
    assert pace.next() == 0
    clock.time = pace.due(1) + 0.125
    assert (pace.next(), pace.late, pace.skipped) == (1, 0, 0)
    clock.time = pace.due(3)
    assert (pace.next(), pace.late, pace.skipped) == (3, 0, 1)


@pytest.mark.parametrize("hz", [10.0, 20.0, 30.0, 50.0, 240.0])
def test_simulated_time_is_that_of_its_ticks(hz: float) -> None:
    pace = SimulatedPace(hz)
    assert (pace.now(), pace.period) == (0.0, 1 / hz)
    for number in range(300):
        assert pace.next() == number
        assert pace.now() == pace.since(pace.now()) == pace.due(number) == number / hz
    assert (pace.ticks, pace.late, pace.skipped, pace.real) == (300, 0, 0, False)


# ----------------------------------------------------------------------------- loop


def test_rows_are_sent_at_their_steps() -> None:
    loop, arm = loop_of()
    report = loop.run(14)
    assert [row for _, row in arm.sent] == [
        None,
        None,
        0,
        1,
        2,
        3,
        102,
        103,
        104,
        105,
        202,
        203,
        204,
        205,
        None,
    ]
    moments = [moment for moment, _ in arm.sent[:-1]]
    np.testing.assert_allclose(np.diff(moments), 0.05, atol=1e-9)
    assert report.held == {"no chunk yet": 2}
    assert (report.steps, report.executed, report.late, report.chunks) == (14, 12, 0, 3)
    assert report.rate_hz == pytest.approx(20, rel=0.01)
    assert report.age_ms["max"] == pytest.approx(5 * 50)


def test_a_loop_begins_with_what_its_settings_say() -> None:
    """By the machine's clock, with a point between for each substep, watched, and with nothing seen or commanded."""
    arm = Arm(Clock())
    settings = Settings(20.0, substeps=4, motion={"kind": "absolute"})
    loop = Loop(arm, lambda: None, settings, 1)  # type: ignore[arg-type, return-value]
    assert (loop.pace.period, loop.pace.real, loop.watchdog.active) == (0.0125, True, True)
    assert (loop.steps, loop.prompt, loop.reason, newest_of(loop)) == (0, "", "", None)
    assert (loop.controller.driver, loop.controller.paused, loop.stopped) == ("policy", False, False)
    assert isinstance(loop.source, Requester)
    for wanted, more, message in (
        (
            {"refine": 2},
            {},
            "refine: expected the adapter's max_age with an edge adapter, and 0 without, got 2",
        ),
        ({"fusion": "average"}, {}, "fusion: expected \"\" for requested chunks, got 'average'"),
    ):
        with pytest.raises(SettingsError, match=message):
            Loop(arm, lambda: None, Settings(20.0, **wanted), 1, **more)  # type: ignore[arg-type, return-value]
    stream = Scripted(0.0, chunk)
    stream.continuous = True  # type: ignore[attr-defined]
    with pytest.raises(SettingsError, match="fusion: expected a fusion rule for a stream, got ''"):
        Loop(arm, stream, Settings(20.0), 1)  # type: ignore[arg-type]


def test_what_a_loop_has_seen_is_told_to_a_planner() -> None:
    loop, arm = loop_of()
    see, frame = arm.observe, np.zeros((2, 2, 3), np.uint8)
    loop.run(1)
    assert newest_of(loop) is None  # no camera has shown anything
    arm.observe = lambda: {**see(), "images": {"front": frame}}  # type: ignore[method-assign]
    loop.run(6)
    seen = newest_of(loop)
    assert seen is not None
    prompt, found = seen
    assert (prompt, found.keys(), found["images"]["front"] is frame) == ("stack", {"images", "state"}, True)


def test_a_first_request_that_no_other_would_fare_better_than_ends_the_run() -> None:
    """It holds where it is told to, and once there was an answer."""
    for kind in PERMANENT:
        loop, arm = loop_of(answer=lambda number, kind=kind: Outcome(reason="no such camera", kind=kind))
        with pytest.raises(Refused, match="^no such camera$"):
            loop.run(9)
        assert all(row is None for _, row in arm.sent)
        loop, arm = loop_of(answer=lambda number, kind=kind: Outcome(reason="no such camera", kind=kind))
        loop._hold_refused = True
        assert loop.run(9).held["no such camera"] > 3
        answers = [chunk(0), Outcome(reason="no such camera", kind=kind)]
        loop, arm = loop_of(answer=lambda number, answers=answers: answers[min(number, 1)])
        assert loop.run(9).held["no such camera"] > 0
    loop, arm = loop_of(answer=lambda number: Outcome(reason="later", kind="overloaded"))
    assert loop.run(9).held["later"] > 3


def test_listeners_hear_in_which_step_the_instruction_and_the_world_change() -> None:
    loop, _ = loop_of()
    heard: list[tuple[str, dict[str, Any]]] = []
    loop.controller.listeners.append(lambda event, values: heard.append((event, values)))
    loop.restart("anew", "pour")
    loop.run(3)
    loop.say("stack")
    loop.say("stack")  # which is no change
    loop.restart("again", "stack")
    loop.run(4)
    said = [(event, values) for event, values in heard if event in ("fault", "prompt", "pause", "resume")]
    assert [
        (event, values.get("step"), values.get("prompt"), values.get("moved")) for event, values in said
    ] == [
        ("fault", 0, None, True),
        ("prompt", 0, "pour", None),
        ("prompt", 3, "stack", None),
        ("fault", 3, None, False),
        ("fault", 3, None, True),
    ]
    assert loop.prompt == "stack"


def test_points_between_begin_anew_where_nothing_says_where_the_robot_is() -> None:
    """After a restart, or a command that it did not take, the first row is sent as it is."""
    for restart in (True, False):
        given = {"delay": 0.0, "substeps": 4, "motion": {"kind": "absolute"}, "replan": "1"}
        loop, arm = loop_of(answer=lambda number: np.full((1, 1), 10.0 * (number + 1)), **given)
        loop.run(2)
        act, refused = arm.act, []

        def refuse(row: np.ndarray, act=act, refused=refused) -> None:
            if not refused:
                refused.append(row)
                raise NoCommand("it is too far")
            act(row)

        if restart:
            loop.restart("anew")
        else:
            arm.act = refuse  # type: ignore[method-assign]
        count = len(arm.sent)
        loop.run(4)
        rest = [15.0, 17.5, 20.0] if restart else [None] * 3  # of the step under way
        assert [row for _, row in arm.sent[count:-1]] == [*rest, *[30.0] * 4, 32.5]


def test_a_command_is_never_said_to_leave_before_it_is_due() -> None:
    loop, arm = loop_of()
    loop.run(3)
    arm.clock.time += 0.01
    assert elapsed(loop.pace, 100, loop.settings.hz) == 5.0
    assert elapsed(loop.pace, 0, loop.settings.hz) == pytest.approx(0.11)


def test_a_chunk_counts_from_its_frame() -> None:
    for age, behind in ((0.0, 0), (0.02, 0), (0.03, 1), (0.1, 2), (-0.08, 0)):
        loop, arm = loop_of()
        arm.frame_age = age
        loop.tick(loop.pace.next())
        request = loop.controller.player.request  # type: ignore[attr-defined]
        assert (request.step, request.frame) == (0, -behind)


def test_skipped_periods_cost_their_rows() -> None:
    loop, arm = loop_of(handover="aligned", replan="full")
    loop.run(4)
    arm.clock.time += 0.15  # the machine slept for three periods
    loop.stopped = False
    loop.run(6)
    assert [row for _, row in arm.sent] == [None, None, 0, 1, None, 4, 5, None]
    assert loop.pace.skipped == 2


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (Outcome(reason="RequestTimeout: no answer"), "RequestTimeout: no answer"),
        (np.full((4, 1), np.nan, np.float32), "a chunk is not finite"),
        (np.zeros((0, 1), np.float32), "a chunk: expected 1 to 1024 actions of 1 numbers, got shape [0, 1]"),
    ],
)
def test_a_bad_answer_holds_in_its_step_and_the_next_good_one_resumes(bad: Any, reason: str) -> None:
    loop, arm = loop_of(answer=lambda number: bad if number == 1 else chunk(number))
    report = loop.run(10)
    # asked at 0, 4 (bad at 6) and 6; the third answer is there at 8
    assert [row for _, row in arm.sent] == [None, None, 0, 1, 2, 3, None, None, 200, 201, None]
    assert report.held == {"no chunk yet": 2, reason: 2}


def test_finish_executes_what_is_at_hand_after_a_failure() -> None:
    loop, arm = loop_of(
        answer=lambda number: Outcome(reason="gone") if number == 1 else chunk(number), finish=True
    )
    loop.run(10)
    assert [row for _, row in arm.sent[:10]] == [None, None, 0, 1, 2, 3, 4, 5, 202, 203]


def test_a_blind_robot_holds_and_goes_on_by_itself() -> None:
    """A camera that falls silent is a reason to hold, not the end of the run."""
    loop, arm = loop_of()
    seen = arm.observe

    def observe() -> dict[str, Any]:
        if 3 <= loop.steps < 10:
            raise NoObservation("front: no message")
        return seen()

    arm.observe = observe  # type: ignore[method-assign]
    report = loop.run(30)
    assert report.held["front: no message"] > 0
    assert arm.sent[-2][1] is not None  # the last one is the hold at the end of the run
    loop.pause()
    loop.tick(31)
    arm.observe = lambda: (_ for _ in ()).throw(NoObservation("front: no message"))  # type: ignore[method-assign]
    loop.resume()
    loop.tick(32)  # where it is, is not known either
    assert not loop.controller.paused


class Camera:
    """Has a frame at every look, written where the last one was, which counts the looks; blind at the steps given."""

    def __init__(self, loop: Loop, arm: Arm, blind: tuple[int, ...] = ()):
        self.frame, self.blind = np.zeros((2, 2, 3), np.uint8), blind
        self._loop, self._observe = loop, arm.observe
        arm.observe = self.observe  # type: ignore[method-assign]

    def observe(self) -> dict[str, Any]:
        if self._loop.steps in self.blind:
            raise NoObservation("front: no message")
        self.frame[:] = self._loop.steps
        return {**self._observe(), "images": {"front": self.frame}}


def seen_by(loop: Loop) -> list[list[int]]:
    """Return the steps of the moments of each request, oldest first."""
    requests = loop.source.requests  # type: ignore[attr-defined]
    return [[int(moment.images["front"][0, 0, 0]) for moment in asked["earlier"]] for asked in requests]


def test_a_policy_of_several_moments_gets_those_of_the_steps_before() -> None:
    """Of control steps and not of requests; an episode's first stands for those before it, and a step that sees nothing
    for none."""
    loop, arm = loop_of(history=History(3))
    Camera(loop, arm)
    loop.run(9)
    assert seen_by(loop) == [[0, 0], [2, 3], [6, 7]]  # asked at 0, 4 and 8
    loop.restart("another episode")
    loop.run(14)
    assert seen_by(loop)[3:] == [[9, 9], [11, 12]]
    loop.pause()
    loop.run(16)
    loop.resume()
    loop.run(17)
    assert seen_by(loop)[5:] == [[16, 16]]

    loop, arm = loop_of(history=History(3))
    Camera(loop, arm, blind=(3,))
    report = loop.run(6)
    assert report.held["front: no message"] > 0
    assert seen_by(loop) == [[0, 0], [2, 2]]  # at 4, as soon as it sees again

    loop, arm = loop_of()
    Camera(loop, arm)
    loop.run(9)
    assert not any("earlier" in asked for asked in loop.source.requests)  # type: ignore[attr-defined]


def test_moments_that_are_steps_apart() -> None:
    """All steps are kept, as a request may come at any. What lies before an episode's first is left out where the
    policy masks it, and the step before stands for one that saw nothing."""
    loop, arm = loop_of(history=History(3, 3, "mask"))
    Camera(loop, arm, blind=(5,))
    loop.run(13)
    assert seen_by(loop) == [[], [1], [0, 3], [4, 7]]  # asked at 0, 4, 6 and 10
    loop.restart("another episode")
    loop.run(18)
    assert seen_by(loop)[4:] == [[], [14]]
    repeated, arm = loop_of(history=History(3, 3))
    Camera(repeated, arm)
    repeated.run(9)
    assert seen_by(repeated) == [[0, 0], [0, 1], [2, 5]]
    pairs, arm = loop_of(history=History(2, 5, "mask"))
    Camera(pairs, arm, blind=(5,))
    pairs.run(13)
    assert seen_by(pairs) == [[], [], [1], [4]]


def test_a_stale_frame_holds() -> None:
    loop, arm = loop_of(stale=0.3)
    CommandListener(lambda command: setattr(arm, "frame_age", 0.4 if 3 <= command.step < 8 else 0.05)).attach(
        loop
    )
    report = loop.run(14)
    assert [row for _, row in arm.sent][:8] == [None, None, 0, 1, None, None, None, None]
    assert report.held["the newest frame is older than 0.3 s"] == 5 + 2  # and until the fresh chunk is there
    assert [row for _, row in arm.sent][-2] is not None


@pytest.mark.parametrize(("delay", "asked"), [(0.0, 0), (0.15, 3)])
def test_a_known_camera_delay_counts_for_frames_without_a_time(delay: float, asked: int) -> None:
    """At 20 Hz. A chunk then belongs to the moment at which its frame was exposed."""
    loop, arm = loop_of(camera_delay=delay)
    front = np.zeros((4, 4, 3), np.uint8)
    arm.observe = lambda: {"images": {"front": front}, "state": np.float32([0])}  # type: ignore[method-assign]
    assert loop.observe(5, arm.clock.time) is not None
    assert loop.observer.age == pytest.approx(delay)
    assert loop.observer.observation["time"] == pytest.approx(arm.clock.time - delay)
    assert round(loop.observer.age * loop.settings.hz) == asked
    arm.observe = lambda: {"images": {"front": front}, "state": np.float32([0]), "age": 0.02}  # type: ignore[method-assign]
    loop.observe(6, arm.clock.time)
    assert loop.observer.age == pytest.approx(0.02)  # what the robot states itself counts


def test_a_state_with_one_number_that_is_none_holds() -> None:
    loop, arm = loop_of()
    seen = np.float32([0, np.nan])
    arm.observe = lambda: {"images": {}, "state": seen, "time": arm.clock.time}  # type: ignore[method-assign]
    report = loop.run(6)
    assert (report.executed, list(report.held), loop.source.requests) == (0, ["the state is not finite"], [])  # type: ignore[attr-defined]


def test_rows_older_than_their_validity_are_not_sent() -> None:
    loop, arm = loop_of(max_age=0.2, replan="full", delay=0.1)
    loop.run(9)
    assert [row for _, row in arm.sent][:9] == [None, None, 0, 1, 2, None, None, None, 100]


def test_pause_instruction_and_resume() -> None:
    loop, arm = loop_of()
    loop.pause()
    loop.run(3)
    assert [row for _, row in arm.sent] == [None] * 4
    assert loop.source.requests == []  # type: ignore[attr-defined]
    loop.resume()
    loop.run(6)
    assert [row for _, row in arm.sent[4:7]] == [None, None, 0]
    loop.say("pour")
    loop.run(9)
    assert [row for _, row in arm.sent[8:]] == [None, None, 100, None]
    assert [request["prompt"] for request in loop.source.requests] == ["stack", "pour"]  # type: ignore[attr-defined]


def test_actuators_faster_than_the_control_rate_get_points_between() -> None:
    loop, arm = loop_of(delay=0.0, substeps=4, motion={"kind": "absolute"}, replan="full")
    loop.run(4)
    sent = [row for _, row in arm.sent]
    # An answer without latency is there in its own step.
    assert sent[:4] == [0, 0, 0, 0]
    assert sent[4:8] == [0.25, 0.5, 0.75, 1]
    np.testing.assert_allclose(np.diff([moment for moment, _ in arm.sent[:-1]]), 0.0125, atol=1e-9)


def test_offsets_follow_targets_where_the_robot_really_is() -> None:
    motion = {"kind": "offsets", "action": [0], "state": [0], "scale": 0.5}
    loop, arm = loop_of(
        answer=lambda number: np.ones((10, 1), np.float32), delay=0.0, motion=motion, replan="full"
    )
    arm.act = lambda row: (
        arm.sent.append((0.0, float(row[0]))) or setattr(arm, "position", arm.position + 0.4 * row)
    )  # type: ignore[method-assign, assignment, func-returns-value]
    loop.run(4)
    np.testing.assert_allclose(
        [row for _, row in arm.sent[:3]], [1.0, 1.2, 1.24], atol=1e-6
    )  # the lag is made up


@pytest.mark.parametrize("motion", [{"kind": "absolute"}, {"kind": "relative", "action": [0], "state": [0]}])
def test_the_first_command_is_limited_from_where_the_robot_stands(motion: dict[str, Any]) -> None:
    """It stands at 0 and is to go to 3 at once, at 1.5 a second. So after a pause, and in a new episode."""
    loop, arm = loop_of(answer=lambda _: np.full((10, 1), 3.0), limits={"velocity": 1.5}, motion=motion)
    loop.run(5)
    sent = [row for _, row in arm.sent if row is not None]
    np.testing.assert_allclose(sent, [0.075, 0.15, 0.225], atol=1e-6)
    for again in (
        lambda: (loop.pause(), loop.run(loop.steps + 1), loop.resume()),
        lambda: loop.restart("anew"),
    ):
        again()
        arm.position, count = np.float32([-2]), len(arm.sent)  # somebody moved it
        loop.run(loop.steps + 6)
        sent = [row for _, row in arm.sent[count:] if row is not None]
        np.testing.assert_allclose(sent, -2 + 0.075 * np.arange(1, 1 + len(sent)), atol=1e-6)
        assert len(sent) >= 2


def test_limits_that_nothing_says_where_to_begin_are_refused_before_the_robot_moves() -> None:
    with pytest.raises(SettingsError, match="the robot's position before its first command is unknown"):
        loop_of(limits={"velocity": 1.5})
    loop, arm = loop_of(limits={"velocity": 1.5, "still": 0}, answer=lambda _: np.full((10, 1), 3.0))
    loop.run(4)
    np.testing.assert_allclose([row for _, row in arm.sent if row is not None], [0.075, 0.15], atol=1e-6)


def test_a_robot_whose_place_its_state_does_not_say_is_not_moved() -> None:
    """Absolute actions of one number, a state of two."""
    loop, arm = loop_of(limits={"velocity": 1.5}, motion={"kind": "absolute"})
    arm.position = np.zeros(2, np.float32)
    report = loop.run(10)
    assert (report.executed, UNPLACED in report.held) == (0, True)
    with pytest.raises(SettingsError, match="has 1 values and the state 2. Set a motion with indices"):
        loop.settings.check_start(1, 2)
    columns = {"kind": "absolute", "action": [0], "state": [1]}
    loop, arm = loop_of(limits={"velocity": 1.5}, motion=columns, answer=lambda _: np.full((10, 1), 3.0))
    loop.settings.check_start(1, 2)
    arm.position = np.float32([7.0, 0.5])
    loop.run(4)
    sent = [row for _, row in arm.sent if row is not None]
    np.testing.assert_allclose(sent[0], [0.575], atol=1e-6)  # from where that number says it is


def test_points_between_begin_where_the_robot_stands() -> None:
    """The first command too is reached at the end of its step, and not at the first of its points."""
    loop, arm = loop_of(
        delay=0.0,
        substeps=4,
        motion={"kind": "absolute"},
        limits={"velocity": 1.0},
        answer=lambda _: np.full((9, 1), 3.0),
    )
    loop.run(3)
    sent = [row for _, row in arm.sent if row is not None]
    np.testing.assert_allclose(sent, 0.0125 * np.arange(1, 1 + len(sent)), atol=1e-6)
    loop.pause()
    loop.run(4)
    arm.position, count = np.float32([-2]), len(arm.sent)  # somebody moved it
    loop.resume()
    loop.run(7)
    sent = [row for _, row in arm.sent[count:] if row is not None]
    np.testing.assert_allclose(sent, -2 + 0.0125 * np.arange(1, 10), atol=1e-6)


def test_a_command_that_the_robot_does_not_take_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    loop, arm = loop_of(replan="full")
    act = arm.act

    def refuse(row: np.ndarray) -> None:
        if row[0] in (1, 101):
            raise NoCommand("it is too far")
        act(row)

    arm.act = refuse  # type: ignore[method-assign]
    report = loop.run(12)
    assert [row for _, row in arm.sent] == [
        None,
        None,
        0,
        None,
        None,
        None,
        100,
        None,
        None,
        None,
        200,
        201,
        None,
    ]
    assert report.held == {"no chunk yet": 2, "it is too far": 6}
    assert [m for m in caplog.messages if "too far" in m] == ["step 3: holds: it is too far"]


def test_a_hold_is_due_two_periods_after_a_command_was_sent() -> None:
    loop, arm = loop_of(delay=0.0)
    loop.watchdog = Watchdog(arm.hold, 0.05, active=False, now=arm.clock.now)
    act = arm.act

    def slow(row: np.ndarray) -> None:
        arm.clock.time += 0.03
        act(row)

    arm.act = slow  # type: ignore[method-assign]
    loop.tick(loop.pace.next())
    assert loop.watchdog._due == arm.clock.time + 0.1


def test_after_skipped_periods_a_robot_starts_from_rest() -> None:
    """It stood at its last command meanwhile: going on at the speed of before would be more than its acceleration."""
    loop, arm = loop_of(
        answer=lambda _: np.full((60, 1), 3.0),
        limits={"acceleration": 1.0},
        motion={"kind": "absolute"},
        replan="full",
    )
    loop.run(8)
    arm.clock.time += 0.5
    loop.stopped = False
    loop.run(10)
    sent = [row for _, row in arm.sent if row is not None]
    push = 1.0 * 0.05**2
    np.testing.assert_allclose(np.diff(sent[5:]), [push, 2 * push], atol=1e-6)


@pytest.mark.parametrize(
    "time", [1.7e9, -5.0, 0.0, np.nan, np.inf, -np.inf, 10**400, "now"], ids=lambda t: str(t)[:9]
)
def test_a_frame_of_another_clock_holds(time: Any) -> None:
    """Unix time where the loop's is meant: its age would be below 0, and no frame would ever be too old."""
    loop, arm = loop_of()
    arm.observe = lambda: {"images": {}, "state": arm.position, "time": time}  # type: ignore[method-assign]
    report = loop.run(6)
    assert (report.executed, report.steps) == (0, 6)
    why = "is older than 0.5 s" if time in (-5.0, 0.0) else "time is not of this clock (time.monotonic)"
    assert all(why in reason for reason in report.held)
    arm.observe = lambda: {"images": {}, "state": arm.position, "time": arm.clock.time + 0.05}  # type: ignore[method-assign]
    assert loop.run(12).executed > 0  # by less than 0.1 s ahead: the two were not read at once


def test_a_look_that_takes_its_time_does_not_make_a_frame_of_the_future() -> None:
    loop, arm = loop_of(stale=5.0)
    loop.run(3)
    arm.slow = 3.0
    loop.run(5)
    arm.slow = 0.0
    assert not any("clock" in reason for reason in loop.run(20).held)


def test_the_clock_may_be_set_back() -> None:
    """As that of a machine that was restored: one that waits for it to come again stands still for an hour."""
    loop, arm = loop_of()
    loop.run(8)
    for back, at in ((3600.0, 20), (99.9, 40)):
        arm.clock.time -= back
        count = len(arm.sent)
        loop.run(at)
        moments = [moment for moment, _ in arm.sent[count:-1]]
        assert np.diff(moments).max() <= 0.05 + 1e-9
        assert [row is not None for _, row in arm.sent[-6:-1]] == [True] * 5
    assert loop.pace.set_back == 2


def test_a_chunk_that_breaks_the_player_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, arm = loop_of()
    accept = loop.controller.player.accept
    broken = [True]

    def breaks(actions: np.ndarray, step: int) -> None:
        accept(actions, step)
        if broken:
            raise RuntimeError("cannot")

    monkeypatch.setattr(loop.controller.player, "accept", breaks)
    report = loop.run(6)
    assert (report.executed, report.steps) == (0, 6)
    assert "a chunk could not be used: RuntimeError: cannot" in report.held
    broken.clear()
    assert loop.run(20).executed > 10


def test_a_robot_may_end_the_run_and_holds_whatever_ends_it() -> None:
    loop, arm = loop_of()

    def over(row: np.ndarray) -> None:
        raise Stopped("done")

    arm.act = over  # type: ignore[method-assign]
    assert loop.run().steps == 3
    assert arm.sent[-1][1] is None
    loop, arm = loop_of()
    arm.observe = lambda: 1 / 0  # type: ignore[method-assign, assignment, return-value]
    with pytest.raises(ZeroDivisionError):
        loop.run()
    assert arm.sent[-1][1] is None


# ----------------------------------------------------------------------------- report


def test_percentiles_are_those_of_the_numbers() -> None:
    assert percentiles(float(number) for number in range(1001)) == {
        "p50": 500.0, "p95": 950.0, "p99": 990.0, "max": 1000.0,
    }  # fmt: skip
    assert percentiles([0.12345]) == dict.fromkeys(("p50", "p95", "p99", "max"), 0.123)
    assert percentiles([]) == {}


def test_ages_of_sources_and_how_far_frames_were_apart() -> None:
    ages = SourceAges()
    ages.add({"front": 0.25, "wrist": 0.5, "state": 0.0}, ["front", "wrist", "side"])
    ages.add({"front": 0.25, "wrist": np.nan}, ["front"])
    found = {name: (row["p50"], row["max"]) for name, row in ages.to_dict().items()}
    assert found == {"front": (250, 250), "wrist": (500, 500), "state": (0, 0), "skew": (250, 250)}
    for number in range(2 * MAX_SOURCES):
        ages.add({f"camera {number}": 0.1, "front": 1.25}, [])
    assert len(ages.to_dict()) == MAX_SOURCES
    assert ages.to_dict()["front"]["p50"] == 1250.0


def test_a_report_counts_and_times_a_run() -> None:
    """Two holds, then rows; half a period late at one tick, three periods skipped."""
    given = {"motion": {"kind": "absolute"}, "limits": {"high": 3.5}, "replan": "full"}
    loop, arm = loop_of(**given, answer=lambda number: chunk(0) if number == 0 else Outcome(reason="lost"))
    assert loop.report().to_dict()["rate_hz"] == 0.0
    loop.run(4)
    arm.clock.time = loop.pace.due(7) + 0.03
    report = loop.run(6)
    assert (report.hz, report.seconds, report.rate_hz) == (20.0, 0.45, pytest.approx(6 / 0.45, abs=1e-3))
    assert (report.steps, report.executed, report.late, report.skipped) == (6, 4, 1, 3)
    assert (report.jitter_ms["p50"], report.jitter_ms["max"]) == (0.0, 30.0)
    assert (report.age_ms["p50"], report.age_ms["max"]) == (250.0, 400.0)
    assert (report.request_ms, report.chunks, report.clipped_commands) == (100.0, 1, 2)
    assert report.to_dict()["held"] == {"no chunk yet": 2}
    ages = {name: [0.1] for name in ("front", "skew")}
    shown = replace(
        report,
        longest_gap_ms=21.0,
        held={"paused": 1, **report.held},
        clipped={"0.range": 2, "0.velocity": 3},
        failed_requests=3,
        faults={"total": 2},
        filter={"filter": "median:3", "delay_ms": 50.0, "missing": 4},
        handed=AuthorityChange(1, 2, 3, 0.5, "jaw").to_dict(),
        sources={name: percentiles(each) for name, each in ages.items()},
    )
    assert shown.rows() == [
        ("control rate", "13.33 Hz of 20 over 0.5 s"),
        ("late ticks", "1 of 6, 3 periods skipped"),
        ("tick lateness", "p50 0  p95 22.5  p99 28.5  max 30 ms"),
        ("longest gap", "21 ms between two commands or holds, no watchdog"),
        ("chunk age", "p50 250  p95 392  p99 398  max 400 ms"),
        ("chunks", "1, 2.22 Hz; 3 requests failed, 2 errors"),
        ("next chunk due", "100 ms after its request, in whole control steps"),
        ("held", "3 of 6 steps"),
        ("", "2 x no chunk yet"),
        ("", "1 x paused"),
        ("clipped", "2 commands"),
        ("", "3 x 0.velocity"),
        ("", "2 x 0.range"),
        ("age of front", "p50 0.1  p95 0.1  p99 0.1  max 0.1 ms"),
        ("frames apart", "p50 0.1  p95 0.1  p99 0.1  max 0.1 ms"),
        ("filter", "median:3: 50 ms delay, not compensated in 4 steps"),
        ("hand-overs", "1 to a human, 2 back, 3 steps by hand; largest step at a hand-over 0.5 (jaw)"),
    ]


def test_limits_of_many_joints_are_a_line_for_each_kind() -> None:
    counts = {f"{side}{at}.{kind}": 10 * at + len(kind) for side in "lr" for at in range(7) for kind in RATES}
    loop, _ = loop_of()
    rows = [text for name, text in replace(loop.report(), clipped=counts).rows() if " x " in text]
    assert rows == [
        "acceleration: 72 x l6, 72 x r6, 62 x l5 and 11 more",
        "velocity: 68 x l6, 68 x r6, 58 x l5 and 11 more",
        "jerk: 64 x l6, 64 x r6, 54 x l5 and 11 more",
        "jump: 64 x l6, 64 x r6, 54 x l5 and 11 more",
    ]


def test_a_report_is_rounded_to_a_thousandth() -> None:
    """Of a period of a seventh of a second, one of which is skipped; steps by hand are executed too."""
    loop, arm = loop_of(delay=0.1, hz=7.0, filter="lowpass:2")
    loop.run(2)
    arm.clock.time = loop.pace.due(3) + 0.01
    loop.run(5)
    loop.watchdog.longest, loop.controller.handed.steps = 0.0123456, 2
    report = loop.report()
    assert (report.seconds, report.rate_hz, report.request_ms) == (0.857, 5.833, 142.857)
    assert report.longest_gap_ms == 12.346
    assert report.filter["delay_ms"] == round(1e3 / 7 * parse_filter("lowpass:2", 7.0).lag, 3)
    assert report.executed == report.steps - sum(report.held.values()) + 2


def test_a_report_of_points_between_is_of_control_steps() -> None:
    """Their rate and ages, whatever is sent between them; a filter's delay in milliseconds."""
    given = {"hz": 30.0, "substeps": 4, "motion": {"kind": "absolute"}, "filter": "lowpass:3"}
    loop, _ = loop_of(delay=0.0, replan="full", **given)
    report = loop.run(7)
    assert report.hz == pytest.approx(30.0)
    assert (report.seconds, report.rate_hz) == (
        0.208,
        33.6,
    )  # 25 of its ticks have begun, the seventh step's first too
    lag = parse_filter("lowpass:3", 30.0).lag
    assert report.filter["delay_ms"] == round(1e3 * lag / 30, 3)
    assert report.age_ms["max"] == pytest.approx(1e3 * 6 / 30, abs=1e-3)


# ----------------------------------------------------------------------------- requester


def until(requester: Requester, now: float) -> Outcome:
    limit = time.monotonic() + 30
    while (outcome := requester.poll(now)) is None:
        assert time.monotonic() < limit
        time.sleep(0.001)
    return outcome


def test_a_call_that_hangs_fails_at_its_deadline_and_the_next_one_gets_a_new_connection() -> None:
    hang, connections = threading.Event(), []

    def connect() -> Any:
        connections.append(len(connections))
        first = len(connections) == 1
        return lambda observation, limit: hang.wait(30) if first else observation["x"]

    requester = Requester(connect, 1.0)
    requester.ask({"x": 1}, 10.0)
    begun = time.monotonic()
    while not connections:  # the thread may be late
        assert time.monotonic() < begun + 30
        time.sleep(0.001)
    assert requester.poll(11.0) is None
    assert not requester.ready(11.0)
    outcome = requester.poll(11.01)
    assert outcome is not None
    assert outcome.reason == "no answer within 1 s"
    assert not requester.ready(11.01)
    assert requester.ready(11.01 + FIRST_WAIT)
    requester.ask({"x": 2}, 12.0)
    assert until(requester, 12.0) == Outcome(2)  # and never the first one's answer
    hang.set()
    requester.ask({"x": 3}, 13.0)
    assert until(requester, 13.0) == Outcome(3)
    assert connections == [0, 1]
    requester.close()


def test_failures_wait_longer_each_time_and_reconnect() -> None:
    connections = []

    def connect() -> Any:
        connections.append(1)
        if len(connections) < 5:
            raise ClientError("refused")
        return lambda observation, limit: limit

    requester, now = Requester(connect, 2.5), 0.0
    for wait in (0.05, 0.1, 0.2, 0.4):
        requester.ask({}, now)
        assert until(requester, now).reason == "ClientError: refused"
        assert not requester.ready(now + wait - 0.001)
        now += wait + 0.001
        assert requester.ready(now)
    requester.ask({}, now)
    assert until(requester, now) == Outcome(2.5)
    assert requester.ready(now)
    assert requester.failures == 4


def test_a_clock_that_was_set_back_takes_the_deadline_along() -> None:
    """Before a request or while it is under way, by hours or by less than a second."""
    hang = threading.Event()
    requester = Requester(lambda: lambda *_: hang.wait(60), 0.5)
    assert requester.poll(100.0) is None
    requester.ask({}, 10.0)
    assert requester.poll(10.25) is None
    assert requester.poll(9.75) is None  # a quarter of a second has passed, of which it knows
    assert requester.poll(10.0) is None
    late = requester.poll(10.25)
    assert late is not None
    assert late.reason == "no answer within 0.5 s"
    assert not requester.ready(5.0)  # nor is the wait for the next attempt longer
    assert requester.ready(5.01 + FIRST_WAIT)
    hang.set()


def test_a_policy_in_this_process_fails_in_its_own_words() -> None:
    """With the kind of its error where it has no text, or else its name."""

    class WornError(SinewError):
        code = "worn_out"

    class FullError(SinewError):
        code = "busy"

    raised = [SinewError("the head is cold"), WornError(""), FullError("")]

    def call(*_: Any) -> None:
        raise raised.pop(0)

    requester, found = Requester(lambda: call, 1.0), []
    for now in (0.0, 10.0, 20.0):
        requester.ask({}, now)
        outcome = until(requester, now)
        found.append((outcome.reason, outcome.kind))
    assert found == [("the head is cold", "internal"), ("worn_out", "worn_out"), ("FullError", "")]


class Panic(BaseException):
    """What ``except Exception`` does not catch."""

    def __str__(self) -> str:
        raise ValueError("no text")


@pytest.mark.parametrize("panic", [Panic, SystemExit, KeyboardInterrupt, GeneratorExit, MemoryError])
@pytest.mark.parametrize("where", ["connect", "call", "close"])
def test_calls_that_panic_are_asked_again(panic: type[BaseException], where: str) -> None:
    calls = []

    class Call:
        def __call__(self, observation: Any, limit: float) -> int:
            calls.append(1)
            if len(calls) <= 2 * ABANDONED:
                raise panic if where == "call" else ClientError("no")
            return 7

        def close(self) -> None:
            if where == "close":
                raise panic

    def connect() -> Call:
        if where == "connect" and len(calls) < 2 * ABANDONED:
            calls.append(1)
            raise panic
        return Call()

    requester, now = Requester(connect, 5.0), 0.0
    for _ in range(2 * ABANDONED):
        requester.ask({}, now)
        assert until(requester, now).reason
        now += 1.0
        assert requester.ready(now)
    if where == "connect":
        calls.append(1)
    requester.ask({}, now)
    assert until(requester, now) == Outcome(7)


def test_calls_that_hang_for_ever_are_forgotten_one_by_one() -> None:
    """More slowly each time, so that threads do not pile up; an answer makes it quick again."""
    hang, hangs = threading.Event(), [True]
    requester, now, begun = Requester(lambda: lambda *_: hang.wait(60) if hangs else 7, 0.1), 0.0, []
    while len(begun) < ABANDONED + 9:
        if requester.ready(now):
            begun.append(now)
            requester.ask({}, now)
            requester.cancel()
        now += 1.0
    assert begun[:ABANDONED] == [0, 1, 2, 3]
    assert begun[ABANDONED:] == [10, 21, 42, 83, 170, 341, 642, 683, 770]  # 600 s at most
    hangs.clear()
    while not requester.ready(now):
        now += 1.0
    requester.ask({}, now)
    assert until(requester, now) == Outcome(7)
    hang.set()


def test_a_clock_that_is_set_back_takes_calls_that_hang_along() -> None:
    hang = threading.Event()
    requester = Requester(lambda: lambda *_: hang.wait(60), 1.0)
    for _ in range(ABANDONED):
        requester.ask({}, 1000.0)
        requester.cancel()
    assert [requester.ready(now) for now in (0.0, 9.9, 10.0)] == [False, False, True]
    hang.set()


def test_a_connection_is_closed_where_it_is_given_up() -> None:
    """After a failure, when a call that was left behind returns, and at the end. Another request gets another one."""
    go, made, closed = threading.Event(), [], []

    class Call:
        def __init__(self) -> None:
            self.number = len(made)
            made.append(self.number)

        def __call__(self, observation: Any, limit: float) -> int:
            if self.number == 0:
                raise ClientError("x" * 401)
            go.wait(60)
            return self.number

        def close(self) -> None:
            closed.append(self.number)

    requester = Requester(Call, 5.0)
    requester.ask({}, 0.0)
    assert until(requester, 0.0).reason == "ClientError: " + "x" * 400
    assert closed == [0]
    requester.ask({}, 1.0)
    with pytest.raises(
        RuntimeError, match="^a request is already in progress; wait for its outcome, or cancel it$"
    ):
        requester.ask({}, 1.0)
    assert requester._worker is not None
    left = requester._worker.thread
    assert left.daemon  # a call that hangs keeps no process alive
    requester.cancel()
    go.set()
    left.join(60)
    assert closed == [0, 1]
    for number in (2, 3):
        requester.ask({}, number)
        assert until(requester, number) == Outcome(number)
        requester.close(60.0)
        assert closed == list(range(number + 1))


def test_without_a_thread_a_request_fails_and_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    requester = Requester(lambda: lambda *_: 7, 1.0)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", lambda _: (_ for _ in ()).throw(RuntimeError("no thread")))
        requester.ask({}, 0.0)
        assert "no thread" in until(requester, 0.0).reason
    requester.ask({}, 1.0)
    assert until(requester, 1.0) == Outcome(7)


@pytest.mark.parametrize("wait", [(2.5,), ()])
def test_the_end_waits_for_a_call_as_long_as_it_says(
    monkeypatch: pytest.MonkeyPatch, wait: tuple[float, ...]
) -> None:
    go, ended = threading.Event(), []
    requester = Requester(lambda: lambda *_: go.wait(60), 1.0)
    requester.ask({}, 0.0)
    assert requester._worker is not None
    thread = requester._worker.thread

    def join(wait: float) -> None:
        ended.append((wait, thread.is_alive()))
        go.set()
        threading.Thread.join(thread, 60)

    monkeypatch.setattr(thread, "join", join)
    requester.close(*wait)
    assert ended == [(*wait, True) if wait else (0.0, True)]
    assert not thread.is_alive()
    assert not requester.busy


def test_a_requester_is_a_source_of_chunks() -> None:
    """With settings of windows it is refused before the robot moves."""
    arm = Arm(Clock())
    requester = Requester(lambda: lambda *_: chunk(0), 1.0)
    assert Loop(arm, requester, Settings(20.0), 1).source is requester
    with pytest.raises(SettingsError, match='^fusion: expected "" for requested chunks'):
        Loop(arm, requester, Settings(20.0, fusion="latest_only"), 1)
    assert not arm.sent


def test_calls_that_never_return_are_not_piled_up() -> None:
    hang = threading.Event()
    requester = Requester(lambda: lambda observation, limit: hang.wait(30), 0.1)
    now = 0.0
    for _ in range(ABANDONED):
        assert requester.ready(now)
        requester.ask({}, now)
        requester.cancel()
    assert not requester.ready(now)
    hang.set()
    limit = time.monotonic() + 30
    while not requester.ready(now):
        assert time.monotonic() < limit
        time.sleep(0.001)


# ----------------------------------------------------------------------------- journal


def test_a_journal_repeats_every_decision(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"

    def answer(number: int) -> Any:
        rows = np.random.default_rng(number).normal(size=(10, 1)).astype(np.float32)
        return {2: Outcome(reason="lost"), 4: rows * np.nan, 6: rows * 1j}.get(number, rows)

    limits = {"low": -0.5, "high": 0.5, "velocity": 5}
    loop, arm = loop_of(
        answer=answer, limits=limits, handover="aggregate", motion={"kind": "absolute"}, max_age=0.3
    )
    journal = Journal(path, loop.settings, 1, robot="arm")
    loop.controller.listeners.append(journal.put)
    loop.run(20)
    loop.pause()
    loop.run(22)
    loop.resume()
    report = loop.run(60)
    journal.close()
    assert report.clipped_commands > 5
    assert len(report.held) >= 4
    assert is_journal(path)
    found = repeat(path)
    assert (found.commands, found.held, found.differences) == (60, 60 - report.executed, [])

    lines = path.read_text().splitlines()
    asked = next(number for number, line in enumerate(lines) if '"ask"' in line)
    begun, ask = lines[:asked], json.loads(lines[asked])
    arrived = {"event": "arrived", "step": 1, "actions": [[0.0]]}
    for event, why in (
        ({**ask, "step": 1 << 53}, ""),
        (
            {**ask, "step": 1 + (1 << 53)},
            f"step: expected a whole number up to {1 << 53}, got {1 + (1 << 53)}",
        ),
        ({**arrived, "actions": [[0.0]] * 8193}, "actions: expected at most 8192 actions, got 8193"),
    ):
        path.write_text("\n".join([*begun, json.dumps(event)]))
        if why:
            with pytest.raises(JournalError, match=f": line {asked + 1}: {why}$"):
                repeat(path)
        else:
            assert repeat(path).commands >= 0
    first, second = (
        next(at for at, line in enumerate(lines) if f'"chunk": 0, "index": {index}' in line)
        for index in (1, 2)
    )
    for at, changed in ((first, {"row": [9.0]}), (second, {"row": None, "reason": "dark"})):
        event = json.loads(lines[at])
        event["command"] = {**event["command"], **changed}
        path.write_text("\n".join([*lines[:at], json.dumps(event), *lines[at + 1 :]]))
        then = json.loads(lines[at])["command"]
        now = f"chunk 0 row {then['index']} {np.array2string(np.float32(then['row']), precision=4)}"
        was = now.replace(now.partition("[")[2], "9.]") if changed["row"] else "hold (dark)"
        assert repeat(path).differences == [f"step {then['step']}: then {was}, now {now}"]
    head = json.loads(lines[0])
    event = json.loads(lines[first])
    row = np.nextafter(np.float32(event["command"]["row"]), np.float32(9))
    event["command"]["row"] = row.tolist()
    changed = [*lines[1:first], json.dumps(event), *lines[first + 1 :]]
    for computed, differ, rounded in (
        (head["computed"], 1, 0),
        ({"hardware": "another"}, 0, 1),
        (None, 0, 1),
    ):
        path.write_text("\n".join([json.dumps({**head, "computed": computed}), *changed]))
        found = repeat(path)
        assert (len(found.differences), found.rounded) == (differ, rounded)
    head["settings"]["handover"] = "naive"
    path.write_text("\n".join([json.dumps(head), *lines[1:]]))
    assert repeat(path).differences


def test_a_journal_says_where_the_robot_moved_abruptly(tmp_path: Path) -> None:
    """Also one whose process was killed in the middle of a line: what it wrote before is repeated."""
    path = tmp_path / "run.jsonl"
    settings = Settings(
        10.0, "freeze", "full", motion={"kind": "absolute"}, limits={"high": 30, "names": ["elbow"]}
    )
    controller = settings.controller(1)
    journal = Journal(path, settings, 1)
    controller.listeners.append(journal.put)

    def chunk(at: int, *rows: float) -> None:
        controller.ask(at, at)
        assert controller.arrived(at, np.float32(rows)[:, None])

    chunk(0, *range(20), 60)  # ten a second, and then beyond the range
    for step in range(21):
        controller.command(step)
    chunk(21, 29, 28, 27)
    for step in (21, 22, 23, 26):
        controller.command(step)
    # Nobody has closed it: the process may be killed.
    while path.read_text().count('"event": "command"') < 25:
        time.sleep(0.01)
    journal.close()
    found = repeat(path)
    assert (found.commands, found.differences, found.torn) == (25, [], False)
    told = [(each["step"], each["joint"], each["change"], each["why"]) for each in found.abrupt]
    assert told == [
        (21, "elbow", -120.0, "chunk 1 begins at its row 0, 0 steps after its frame"),
        (20, "elbow", 100.0, "row 20 of chunk 0; its limits: range"),
        (1, "elbow", 10.0, "row 1 of chunk 0"),
        (26, "elbow", 10.0, "it holds: out of rows"),
    ]
    path.write_bytes(path.read_bytes()[:-9])
    found = repeat(path)
    assert (found.commands, found.differences, found.torn) == (24, [], True)


def test_a_run_that_is_on_the_disk_is_not_written_over(tmp_path: Path) -> None:
    path = tmp_path / "more" / "new" / "run.jsonl"
    Journal(path, Settings(20.0), 1).close()
    kept = path.read_bytes()
    with pytest.raises(JournalError, match="the file already exists; choose a new name$"):
        Journal(path, Settings(20.0), 1)
    assert path.read_bytes() == kept
    with pytest.raises(
        JournalError, match=f"{tmp_path}: Is a directory|the file already exists; choose a new name$"
    ):
        Journal(tmp_path, Settings(20.0), 1)


def test_each_event_of_a_journal_counts(tmp_path: Path) -> None:
    """Without one of them a new controller decides otherwise, and so it does where somebody may have moved the robot
    and the journal does not say so."""
    limits = {"low": -9, "high": 9, "velocity": 9, "acceleration": 60}
    settings = Settings(
        np.float32(20.0), "aligned", motion={"kind": "absolute"}, limits=limits, substeps=np.int64(1)
    )
    controller = settings.controller(1)
    path = tmp_path / "run.jsonl"
    journal = Journal(path, settings, 1)
    controller.listeners.append(journal.put)
    steps = iter(range(100))

    def moves(count: int = 3) -> None:
        step = next(steps)
        controller.ask(step, step, np.zeros(1, np.float32))
        controller.arrived(step, np.arange(1, 11, dtype=np.float32)[:, None])
        for at in (step, *(next(steps) for _ in range(count))):
            controller.command(at, np.zeros(1, np.float32))

    controller.stands(np.zeros(1))
    moves()
    controller.stood()
    moves()
    for moved in (False, True):
        step = next(steps)
        controller.fault(step, "dark", moved)
        controller.command(step)
        moves()
    controller.stands(np.zeros(1))
    moves()
    for position, moved in ((np.full(1, 0.5), True), (None, False), (None, True)):
        controller.pause()
        controller.command(next(steps))
        controller.resume(position, moved)
        controller.command(next(steps))
        moves()
    controller.stands(np.zeros(1))
    moves()
    step = next(steps)
    controller.failed(step, "lost", "busy")
    controller.command(step)
    step = next(steps)
    controller.take_over(step)
    controller.command(step)
    step = next(steps)
    controller.aligned(step)
    controller.led(step, np.full(1, 0.25, np.float32))
    controller.command(step)
    controller.hand_back(step + 1)
    controller.command(next(steps))
    journal.close()
    assert repeat(path).differences == []

    begin, *events = map(json.loads, path.read_text().splitlines())

    def differs(changed: list[dict[str, Any]]) -> bool:
        path.write_text("".join(json.dumps(each) + "\n" for each in (begin, *changed)))
        return bool(repeat(path).differences)

    for at, event in enumerate(events):
        if event["event"] != "command":
            assert differs([*events[:at], *events[at + 1 :]]), event
        if "moved" in event:  # older journals lack it
            usual = event["event"] == "resume"
            old = {name: value for name, value in event.items() if name != "moved"}
            assert differs([*events[:at], old, *events[at + 1 :]]) == (event["moved"] != usual), event


def test_a_journal_that_cannot_go_on_ends_and_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of a value that it has no words for, too; and no process waits for one that nobody has closed."""
    path = tmp_path / "run.jsonl"
    journal = Journal(path, Settings(20.0), 1)
    assert journal._thread.daemon
    journal.put("said", {"by": np.float32(0.5)})
    for value in ({1}, {2}, 3):
        journal.put("said", {"by": value})
    journal.close()
    assert [json.loads(line)["event"] for line in path.read_text().splitlines()] == ["begin", "said"]
    prefix = "the decision log ends here, because the file cannot be written:"
    assert caplog.messages == [f"{prefix} a decision log cannot store a value of type set"]


def test_a_full_disk_ends_a_journal_and_no_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    journal = Journal(tmp_path / "run.jsonl", Settings(20.0), 1)
    journal.put("said", {"by": "x"})
    with journal._file, Path("/dev/full").open("w") as full:  # of Linux, where nothing can be written
        journal._file = full
        for number in range(3):
            journal.put("said", {"by": "x" * 9999 * number})
        journal.close()  # the report of a run would be lost with an error here
    prefix = "the decision log ends here, because the file cannot be written:"
    assert caplog.messages == [f"{prefix} [Errno 28] No space left on device"]


@given(
    st.lists(
        st.one_of(
            st.binary(max_size=30), st.sampled_from([b'{"event":"ask"}', b'{"event":"command"}', b"[]"])
        ),
        max_size=3,
    ),
    st.booleans(),
)
def test_files_that_are_no_journals_are_refused(
    tmp_path_factory: Any, lines: list[bytes], begun: bool
) -> None:
    path = tmp_path_factory.mktemp("journal") / "x"
    Journal(path, Settings(20.0), 1).close()
    begin = path.read_bytes() if begun else b""
    path.write_bytes(begin + b"\n".join(lines))
    try:
        assert repeat(path).commands == 0
    except ClientError as error:
        assert isinstance(error, JournalError)  # noqa: PT017 - either is right, nothing else is


@pytest.mark.parametrize(("deadline", "waits"), [(2.0, 2.0), (60.0, 5.0)])
def test_a_run_ends_when_it_is_told_and_closes_its_source(deadline: float, waits: float) -> None:
    loop, arm = loop_of(deadline=deadline)
    closed: list[float] = []
    loop.source.close = closed.append  # type: ignore[method-assign]
    CommandListener(lambda command: loop.stop() if command.step == 3 else None).attach(loop)
    assert not loop.stopped
    assert loop.run().steps == 4
    assert loop.stopped
    assert [row for _, row in arm.sent] == [None, None, 0, 1, None]
    loop.close()
    assert closed == [waits]


def test_an_answer_to_what_a_blind_robot_had_seen_goes_nowhere() -> None:
    loop, arm = loop_of(delay=0.2, motion={"kind": "offsets", "action": [0], "state": [0]})
    see = arm.observe

    def silent() -> Any:
        raise NoObservation("no camera")

    for step in range(12):
        arm.observe = silent if step == 2 else see  # type: ignore[method-assign]
        loop.tick(loop.pace.next())
    assert [row is None for _, row in arm.sent] == [True] * 7 + [False] * 5  # asked anew in step 3
    assert loop.controller.held == {"no chunk yet": 2, "no camera": 5}
    assert loop.report().faults["total"] == 0


def test_the_instruction_is_the_loops_else_the_robots() -> None:
    loop, arm = loop_of()
    see = arm.observe
    arm.observe = lambda: {**see(), "prompt": "pour"}  # type: ignore[method-assign]
    loop.run(3)
    loop.prompt = ""
    loop.run(14)
    arm.observe = see  # type: ignore[method-assign]
    loop.run(26)
    requests = loop.source.requests  # type: ignore[attr-defined]
    assert [request["prompt"] for request in requests][:5:2] == ["stack", "pour", ""]


@pytest.mark.parametrize("simulated", [False, True])
def test_a_hold_is_said_once_when_it_begins_and_when_it_ends(
    simulated: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """In simulated time it is not: holds are what is studied there."""
    caplog.set_level("INFO")
    loop, arm = loop_of(answer=lambda number: chunk(number) * (np.nan if number == 1 else 1))
    if simulated:
        loop.pace = SimulatedPace(20.0)
    loop.run(16)
    said = [record.getMessage() for record in caplog.records]
    told = [
        "step 0: holds: no chunk yet",
        "step 2: resumed (was holding: no chunk yet)",
        "step 6: holds: a chunk is not finite",
        "step 8: resumed (was holding: a chunk is not finite)",
    ]
    assert said == ([] if simulated else told)


@pytest.mark.parametrize("delay", [0.05, 0.1])
def test_freeze_warns_of_its_first_wait_alone(delay: float, caplog: pytest.LogCaptureFixture) -> None:
    loop, _ = loop_of(delay, handover="freeze", replan="4")
    report = loop.run(40)
    assert report.held["waiting for a chunk"] > 2
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert sum(text.endswith("holds: waiting for a chunk") for text in said) == 1


def test_commands_say_where_they_come_from() -> None:
    loop, _ = loop_of()
    seen: list[Command] = []
    CommandListener(seen.append).attach(loop)
    loop.run(8)
    found = [(c.chunk, c.index, c.age, c.seam) for c in seen[5:8]]
    assert found == [
        (0, 3, 5, False),
        (1, 2, 2, True),
        (1, 3, 3, False),
    ]


@pytest.mark.parametrize("motion", ["absolute", "offsets"])
def test_another_instruction_leaves_limits_where_the_robot_is_not_held(motion: str) -> None:
    """Its answer may be there in the same control step: then the robot goes on, and so do the limits."""
    given: dict[str, Any] = {"kind": motion}
    if motion == "offsets":
        given.update(action=[0], state=[0], scale=0.01)
    limits = {"velocity": 2.0, "acceleration": 4.0}

    def answer(number: int) -> np.ndarray:
        far = 10.0 if number % 2 == 0 else -10.0
        return np.full((40, 1), far, np.float32)

    loop, arm = loop_of(0.0, answer, motion=given, limits=limits, replan="full")
    if motion == "offsets":
        arm.act = lambda row: arm.sent.append((arm.clock.time, float(row[0])))  # type: ignore[method-assign]
    for step in range(60):
        if step % 9 == 8:
            loop.say(f"instruction {step}")
        loop.tick(loop.pace.next())
    assert len(loop.source.requests) > 6  # type: ignore[attr-defined]
    assert not loop.controller.held
    rows = [row for _, row in arm.sent if row is not None]
    if motion == "offsets":  # their velocity counts between two commands
        assert np.abs(np.diff(rows)).max() <= 2.0 / 20 + 1e-6
    else:
        assert np.abs(np.diff(rows, 2)).max() <= 4.0 / 400 + 1e-6
