"""The robot's loop of a stream, without a server: another world, stalls, and a robot that sees nothing."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sinew_client.control import (
    CommandListener,
    Journal,
    Limits,
    Loop,
    NoObservation,
    Pace,
    Settings,
    SettingsError,
    Stream,
    StreamReport,
    repeat,
)
from sinew_client.control.authority import ALIGNING, HUMAN, POLICY
from sinew_client.control.controller import AHEAD_S
from sinew_client.control.facts import facts_of
from sinew_client.control.loop import elapsed
from sinew_client.control.planner import newest_of
from sinew_client.control.stream import Watching
from sinew_client.control.windows import MAX_DELAY
from sinew_client.faults import Faults
from sinew_client.streams import StreamWindow

from tests.control.test_promises import PERIOD, kept


class Robot:
    """Sees what it is told to see, and notes what it does."""

    def __init__(self) -> None:
        self.done: list[float | None] = []  # the first number of a row, None for a hold
        self.blind = ""  # why; " ": for no reason that it says

    def observe(self) -> dict[str, Any]:
        if self.blind:
            raise NoObservation(self.blind.strip())
        return {"images": {}, "state": np.zeros(2, np.float32)}

    def act(self, row: np.ndarray) -> None:
        self.done.append(float(row[0]))

    def hold(self) -> None:
        self.done.append(None)


class Link:
    """Windows that the test puts there, and what was sent: (time, delay, with a frame)."""

    label = ""

    def __init__(self) -> None:
        self.ready: list[StreamWindow] = []
        self.sent: list[tuple[float, int, bool]] = []
        self.frames: list[float] = []  # when those were exposed that were sent
        self.restarts = self.errors = self.closed = 0
        self.error, self.faults = "", Faults()

    def send(
        self,
        state: Any,
        time: float,
        delay: int = 1,
        images: Any = None,
        frame_time: float | None = None,
        prompt: str = "",
    ) -> bool:
        self.sent.append((time, delay, images is not None))
        if frame_time is not None:
            self.frames.append(frame_time)
        return True

    def windows(self) -> list[StreamWindow]:
        found, self.ready = self.ready, []
        return found

    def restart(self) -> None:
        self.restarts += 1

    def close(self) -> None:
        self.closed += 1


def paced(rate: float, clock: list[float]) -> Pace:
    """Return the pace of a clock that only waiting moves."""
    return Pace(1 / rate, lambda: clock[0], lambda seconds: clock.__setitem__(0, clock[0] + seconds))


def looped(
    robot: Any, link: Any, rate: float, pace: Pace, camera_hz: float, prompt: str = "go", **given: Any
) -> Loop:
    """Return the loop of a robot on a stream whose windows replace each other, by the pace's clock."""
    settings = Settings(rate, **{"fusion": "latest_only", **given})
    return Loop(Watching(robot, camera_hz, pace.now), Stream(link), settings, 2, prompt, pace)


def window(step: int, run: int, frame_time: float, value: float, sample_time: float = 0.0) -> StreamWindow:
    return StreamWindow(step, np.full((5, 2), value, np.float32), sample_time, frame_time, run=run)


def test_a_known_camera_delay_counts_for_the_frames_of_a_stream() -> None:
    """The waypoints of a window belong to the time of its frame, so this time must be that of the exposure."""
    sent = []
    for delay in (0.0, 0.15):
        robot, link = Robot(), Link()
        seen = {"images": {"front": np.zeros((4, 4, 3), np.uint8)}, "state": np.zeros(2, np.float32)}
        robot.observe = lambda seen=seen: dict(seen)  # type: ignore[method-assign, misc]
        loop = looped(robot, link, 10.0, paced(10.0, [0.0]), 10.0, camera_delay=delay, stale=1.0)
        for _ in range(5):
            loop.tick(loop.pace.next())
        sent.append(link.frames)
    assert len(sent[0]) > 2
    assert np.subtract(*sent) == pytest.approx(0.15)


def test_windows_of_the_last_episode_are_not_executed_in_the_next_one() -> None:
    robot, link = Robot(), Link()
    loop = looped(robot, link, 10.0, paced(10.0, [0.0]), 10.0)

    def tick(*windows: StreamWindow) -> None:
        link.ready = list(windows)
        loop.tick(loop.pace.next())

    tick(window(0, 1, -0.1, 1.0))
    tick()
    loop.restart("a new episode")  # from within the second tick, at 0.1 s
    tick()
    tick(window(3, 2, 0.1, 2.0))  # was under way
    assert loop.reason == "a new episode"
    tick(window(4, 1, 0.2, 3.0))  # of another session, which counts its runs anew
    assert robot.done == [1.0, 1.0, None, None, 3.0]
    assert (loop.reason, link.restarts, loop.controller.held) == ("", 1, {"a new episode": 2})


def test_a_robot_goes_on_after_a_long_stall() -> None:
    """A stall of more nodes than a server takes as a delay must not leave an estimate behind that nothing corrects."""
    rate, clock = 480.0, [0.0]
    way: deque[tuple[float, StreamWindow]] = deque()

    class Stalling(Link):
        def send(self, state: Any, time: float, delay: int = 1, *_: Any, **__: Any) -> bool:
            self.sent.append((time, delay, False))
            if delay > MAX_DELAY:  # of a server that refuses it
                return True
            stalled = 0.1 < clock[0] < 3.0
            if not stalled or len(way) < 20:  # a client that does not read gets no more
                step = int(time * rate + 1e-6) + delay
                way.append(
                    (3.0 if stalled else clock[0] + 0.005, window(step, len(self.sent), time, 1.0, time))
                )
            return True

        def windows(self) -> list[StreamWindow]:
            found = []
            while way and way[0][0] <= clock[0]:
                found.append(way.popleft()[1])
            return found

    robot, link = Robot(), Stalling()
    loop = looped(robot, link, rate, paced(rate, clock), 30.0, stale=10.0)
    loop.run(int(4 * rate))
    assert max(delay for _, delay, _ in link.sent) <= MAX_DELAY
    assert len(way) < 20
    assert robot.done[-11:-1] == [1.0] * 10  # the very last one is the hold at the end


@pytest.mark.parametrize("why", ["camera front is silent", " "])
@pytest.mark.parametrize("fast_state", [False, True])
def test_a_blind_robot_holds_with_the_reason_and_goes_on(fast_state: bool, why: str) -> None:
    robot, link, clock = Robot(), Link(), [0.0]
    if fast_state:  # the state is known while the camera is silent
        robot.sense = lambda: np.zeros(2, np.float32)  # type: ignore[attr-defined]
    loop = looped(robot, link, 10.0, paced(10.0, clock), 5.0, stale=10.0)
    link.ready = [StreamWindow(0, np.ones((20, 2), np.float32), 0.0, 0.0, run=1)]
    for tick in range(8):
        robot.blind = why if 2 <= tick < 6 else ""
        loop.tick(loop.pace.next())
    assert robot.done == [1.0, 1.0, None, None, None, None, 1.0, 1.0]
    assert loop.controller.held == {why.strip() or "the robot is blind": 4}
    frames = [round(10 * time) for time, _, frame in link.sent if frame]
    assert frames == [0, 6]  # as soon as there is one again
    assert len(link.sent) == (8 if fast_state else 4)


def of(
    rate: float = 10.0, sense: Callable[[Robot], np.ndarray] | None = None, **given: Any
) -> tuple[Loop, Robot, Link, list[float]]:
    """Return a loop over a stream. sense: the robot's own, which is read when the loop is made."""
    robot, link, clock = Robot(), Link(), [0.0]
    if sense is not None:
        robot.sense = lambda: sense(robot)  # type: ignore[attr-defined]
    return looped(robot, link, rate, paced(rate, clock), rate, **given), robot, link, clock


@pytest.mark.parametrize(
    "bad",
    [
        {"rows": np.ones((5, 1), np.float32)},
        {"rows": np.ones((5, 7), np.float32)},
        {"rows": np.ones((1025, 2), np.float32)},
        {"rows": np.ones(5, np.float32)},
        {"rows": np.full((5, 2), np.nan)},
        {"rows": np.ones((5, 2), complex)},
        {"sample_time": 1e9},
        {"sample_time": 1e308},
        {"sample_time": np.inf},
        {"sample_time": np.nan},
        {"sample_time": -0.1},
        {"frame_time": 1e9},
        {"frame_time": np.nan},
        {"frame_time": -np.inf},
        {"step": 2**62},
    ],
    ids=lambda bad: " ".join(f"{key} {getattr(value, 'shape', value)}" for key, value in bad.items()),
)
@pytest.mark.parametrize("fusion", ["latest_only", "average"])
def test_a_window_that_lies_has_failed(bad: dict[str, Any], fusion: str) -> None:
    """Whatever a server sends: what was planned is executed, then the robot holds with the reason; a good window ends
    it, and ages of frames stay what they are."""
    loop, robot, link, _ = of(fusion=fusion)
    good = {"step": 0, "rows": np.ones((3, 2), np.float32), "sample_time": 0.0, "frame_time": 0.0, "run": 1}
    link.ready = [StreamWindow(**good)]
    loop.run(2)
    link.ready = [StreamWindow(**{**good, "step": 2, "run": 2, **bad})]
    loop.run(5)
    assert robot.done[:2] + robot.done[3:] == [1.0, 1.0, 1.0, None, None, None]
    (reason,) = loop.controller.held
    assert reason.startswith("a window")
    report = StreamReport.of(loop)
    assert (report.errors, report.faults["kinds"], report.windows) == (1, {"bad_chunk": 1}, 1)
    link.ready = [StreamWindow(**{**good, "step": 5, "sample_time": 0.4, "frame_time": 0.4, "run": 1})]
    loop.run(12)
    assert [each for each in robot.done[7:] if each is not None] == [1.0] * 3


def test_a_frame_is_as_old_as_the_first_window_that_knew_it() -> None:
    """A server that counts its runs as it likes makes no node younger."""
    loop, robot, link, _ = of(stale=0.35)
    link.ready = [StreamWindow(0, np.ones((20, 2), np.float32), 0.0, 0.0, run=1)]
    loop.run(3)
    link.ready = [StreamWindow(100, np.ones((5, 2), np.float32), 0.2, 0.2, run=1)]
    loop.run(8)
    assert robot.done[4:-1] == [1.0] + [None] * 4
    assert "the newest frame is too old" in loop.controller.held


def test_a_stream_is_limited_from_where_the_robot_stands() -> None:
    loop, robot, link, _ = of(limits={"velocity": 1.0}, motion={"kind": "absolute"}, stale=9.0)
    link.ready = [StreamWindow(0, np.full((9, 2), 3.0, np.float32), 0.0, 0.0, run=1)]
    loop.run(2)
    np.testing.assert_allclose(robot.done[:2], [0.1, 0.2], atol=1e-6)
    for motion in (None, {"kind": "relative", "action": [0, 1], "state": [0, 1]}):
        with pytest.raises(SettingsError, match="the robot's position before its first command is unknown"):
            of(limits={"velocity": 1.0}, motion=motion)
    with pytest.raises(SettingsError, match="motion.kind"):
        of(motion={"kind": "warp"})


@pytest.mark.parametrize(
    "seen", [{"time": 1.7e9}, {"time": np.nan}, {"age": -5.0}, {"age": np.inf}, {"age": "x"}]
)
def test_a_frame_of_another_clock_holds(seen: dict[str, Any]) -> None:
    loop, robot, link, _ = of()
    link.ready = [StreamWindow(0, np.ones((20, 2), np.float32), 0.0, 0.0, run=1)]
    robot.observe = lambda: {"images": {}, "state": np.zeros(2, np.float32), **seen}  # type: ignore[method-assign]
    loop.run(3)
    report = StreamReport.of(loop)
    assert (report.executed, report.frames) == (0, 0)
    assert all("time is not of this clock" in reason for reason in report.held)


def test_the_clock_may_be_set_back() -> None:
    """Ticks, times of samples and frames go on from where they were."""
    loop, robot, link, clock = of(stale=9.0)
    link.ready = [StreamWindow(0, np.ones((60, 2), np.float32), 0.0, 0.0, run=1)]
    loop.run(10)
    clock[0] += 5000.0
    loop.run(11)
    clock[0] -= 5000.5
    count = len(link.sent)
    loop.run(21)
    sent = [time for time, *_ in link.sent[count:]]
    np.testing.assert_allclose(np.diff(sent), 0.1, atol=1e-6)
    assert all(frame for *_, frame in link.sent[count:])
    assert loop.pace.set_back == 1


TIMES = st.one_of(st.floats(-1, 1), st.sampled_from([1e9, 1e308, -1e308, np.nan, np.inf, -np.inf]))
WINDOWS = st.tuples(
    st.one_of(
        st.integers(-30, 30), st.sampled_from([10**6, -(10**6), 2**62])
    ),  # its first node, from the present one
    st.integers(0, 30),  # rows
    st.sampled_from([2, 2, 2, 2, 1, 7]),  # their width
    TIMES,  # of its sample, from the present
    TIMES,  # of its frame
    st.integers(0, 2),  # run
    st.sampled_from([0.0, 0.0, 0.0, np.nan, 1e300]),  # what its rows have too much
)
EVENTS = st.lists(
    st.one_of(WINDOWS, WINDOWS, st.sampled_from([-900.0, -0.02, 0.07, 30.0])), min_size=1, max_size=30
)


@settings(max_examples=150, derandomize=True, deadline=None)
@given(EVENTS, st.booleans(), st.sampled_from(["latest_only", "average", "ramp:3"]))
def test_whatever_windows_come_and_clocks_do(events: list[Any], limited: bool, fusion: str) -> None:
    """A command or a hold in every tick; nothing beyond the limits, and of no frame that is too old or to come."""
    limits = {"low": -2, "high": 2, "velocity": 1.0, "acceleration": 5.0}
    loop, robot, link, clock = of(
        1 / PERIOD,
        limits=limits if limited else None,
        motion={"kind": "absolute"},
        stale=0.4,
        fusion="latest_only" if not limited else fusion,
        sense=lambda robot: robot.at,  # type: ignore[attr-defined]
    )
    robot.at, robot.moved = np.float32([1, 2.5]), np.zeros(2)  # type: ignore[attr-defined]
    frames: list[float] = []
    done: list[bool] = []

    def act(row: np.ndarray) -> None:
        done.append(True)
        now = elapsed(loop.pace, loop.controller._step, loop.settings.hz)  # type: ignore[arg-type]
        if limited:
            if loop.pace.skipped > skipped:
                robot.moved = np.zeros(2)  # type: ignore[attr-defined]
            kept(Limits.parse(limits, 2), robot.at, robot.moved, row)  # type: ignore[attr-defined]
            robot.moved, robot.at = row.astype(np.float64) - robot.at, row  # type: ignore[attr-defined]
        else:  # each row is the number of its window
            assert row.shape == (2,)
            assert now - 0.4 - 1e-6 <= frames[int(row[0])] <= now + AHEAD_S + 1e-6

    def hold() -> None:
        done.append(False)
        robot.moved = np.zeros(2)  # type: ignore[attr-defined]

    robot.act = loop.robot.act = act  # type: ignore[method-assign]
    robot.hold = loop.robot.hold = hold  # type: ignore[method-assign]
    for event in events:
        skipped = loop.pace.skipped
        if isinstance(event, float):
            clock[0] += event
        else:
            ahead, count, width, sample, frame, run, extra = event
            now = (
                0.0
                if loop.controller._step is None
                else elapsed(loop.pace, loop.controller._step, loop.settings.hz)
            )
            rows = np.full((count, width), float(len(frames))) + extra
            frames.append(now + frame)
            link.ready = [
                StreamWindow((loop.controller._step or 0) + ahead, rows, now + sample, now + frame, run=run)
            ]
        for _ in range(3):
            skipped, count = loop.pace.skipped, len(done)
            loop.tick(loop.pace.next())
            assert len(done) == count + 1
    now = elapsed(loop.pace, loop.controller._step, loop.settings.hz)  # type: ignore[arg-type]
    step = loop.controller._step or 0
    link.ready = [StreamWindow(step, np.full((9, 2), float(len(frames))), now, now, run=9)]
    frames.append(now)
    loop.tick(loop.pace.next())
    assert done[-1]  # whatever came before, a good window ends it


def test_a_robot_that_is_blind_at_once_ends_no_run() -> None:
    robot, link = Robot(), Link()
    robot.blind = "no camera"
    report = looped(robot, link, 10.0, paced(10.0, [0.0]), 5.0, "").run(3)
    held: Mapping[str, int] = report.held
    assert (held, link.sent) == ({"no camera": 3}, [])


def test_a_paused_stream_drops_its_plan_and_goes_on_with_newer_windows() -> None:
    loop, robot, link, _ = of()

    def tick(*windows: StreamWindow) -> None:
        link.ready = list(windows)
        loop.tick(loop.pace.next())

    tick(window(0, 1, 0.0, 1.0))
    loop.pause()
    tick(window(1, 2, 0.0, 2.0))
    tick()
    assert (loop.reason, len(link.sent), link.restarts) == ("paused", 1, 1)
    loop.resume()
    tick(window(3, 3, 0.0, 3.0))  # was under way
    assert loop.reason == "no window yet"
    tick(window(4, 4, 0.3, 4.0, 0.3))
    assert robot.done == [1.0, None, None, None, 4.0]


def test_another_instruction_takes_no_node_away() -> None:
    loop, robot, link, _ = of()
    link.ready = [window(0, 1, 0.0, 1.0)]
    loop.run(2)
    loop.say("stop")
    loop.run(4)
    assert robot.done == [1.0, 1.0, None, 1.0, 1.0, None]  # the holds are those at the end of a run
    assert (loop.prompt, link.restarts) == ("stop", 0)


def test_a_journal_repeats_a_stream(tmp_path: Path) -> None:
    """Windows that overlap, come too late or lie, a silent camera, errors, a pause and another world: to the bit."""
    limits = {"low": -2, "high": 2, "velocity": 20.0, "acceleration": 300.0}
    given = {"limits": limits, "motion": {"kind": "absolute"}, "stale": 0.45, "fusion": "average"}
    loop, robot, link, _ = of(**given)
    journal = Journal(tmp_path / "stream.jsonl", loop.settings, 2)
    loop.controller.listeners.append(journal.put)
    rng = np.random.default_rng(0)
    for number in range(200):
        now = number / 10
        seen = now - 0.1 * rng.integers(0, 4)
        if rng.random() < 0.5:
            rows = rng.normal(size=(int(rng.integers(0, 6)), 1 if rng.random() < 0.1 else 2)).astype(
                np.float32
            )
            link.ready = [StreamWindow(number + int(rng.integers(-2, 3)), rows, max(0.0, seen), seen)]
        if rng.random() < 0.05:
            link.errors, link.error = link.errors + 1, f"error {number} [internal]"
            link.faults.add("internal", link.error)
        robot.blind = "no camera" if rng.random() < 0.1 else ""
        if number in (60, 120):
            loop.pause()
        elif number in (63, 121):
            loop.resume()
        elif number == 150:
            loop.restart("a new episode")
        loop.tick(loop.pace.next())
    journal.close()
    report = StreamReport.of(loop)
    assert set(report.held) > {"no camera", "paused", "out of nodes", "the newest frame is too old"}
    assert report.executed > 60
    assert report.clipped
    assert (report.errors - report.faults["kinds"]["bad_chunk"]) == report.faults["kinds"]["internal"] > 2
    found = repeat(tmp_path / "stream.jsonl")
    assert (found.commands, found.differences) == (200, [])
    assert found.held == sum(report.held.values())


def test_what_a_stream_has_nothing_to_do_with_is_refused() -> None:
    for setting in ({"replan": "4"}, {"substeps": 2}, {"max_age": 1.0}, {"refine": 3}, {"future": True}):
        (name,) = setting
        with pytest.raises(SettingsError, match=f"^{name}: cannot be combined with fusion, got"):
            Settings(10.0, fusion="latest_only", **setting)
    with pytest.raises(SettingsError, match="^fusion: expected one of"):
        of(fusion="mean")
    with pytest.raises(SettingsError, match="^fusion: expected a fusion rule for a stream, got ''"):
        of(fusion="")
    with pytest.raises(SettingsError, match='^fusion: expected "" for requested chunks'):
        Loop(Robot(), lambda: None, Settings(10.0, fusion="average"), 2)  # type: ignore[arg-type, return-value]


def test_a_newer_window_replaces_all_that_comes_after_its_first_node() -> None:
    loop, robot, link, _ = of(stale=9.0)
    link.ready = [StreamWindow(0, np.ones((20, 2), np.float32), 0.0, 0.0)]
    loop.run(2)
    link.ready = [StreamWindow(2, np.full((2, 2), 2.0, np.float32), 0.1, 0.1)]
    loop.run(6)
    assert robot.done == [1.0, 1.0, None, 2.0, 2.0, None, None, None]
    assert loop.reason == "out of nodes"
    assert loop.controller.arrived(6, StreamWindow(6, np.ones((9, 2), np.float32), 0.0, 0.0))  # older news
    loop.run(7)
    assert (loop.reason, loop.report().chunks) == ("out of nodes", 3)


def test_commands_of_a_stream_say_how_old_their_frame_is() -> None:
    loop, robot, link, _ = of(stale=9.0)
    ages = []
    CommandListener(lambda command: ages.append((command.age, command.chunk, command.index))).attach(loop)
    link.ready = [StreamWindow(0, np.ones((20, 2), np.float32), 0.0, 0.0, prefix_age_ms=7.0)]
    loop.run(3)
    link.ready = [StreamWindow(3, np.ones((20, 2), np.float32), 0.2, 0.1, prefix_age_ms=9.0)]
    loop.run(5)
    assert ages == [(0, 1, 0), (1, 1, 1), (2, 1, 2), (2, 2, 0), (3, 2, 1)]
    measured = StreamReport.of(loop).measured
    assert (measured["prefix_age_ms"]["max"], measured["image_age_ms"]["max"]) == (9.0, 300.0)
    assert loop.report().age_ms["max"] == 300.0


def test_a_frame_that_is_ahead_is_not_less_than_no_steps_old() -> None:
    loop, _, link, _ = of(100.0)
    ages: list[int] = []
    CommandListener(lambda command: ages.append(command.age)).attach(loop)
    link.ready = [StreamWindow(0, np.ones((3, 2), np.float32), 0.0, 0.05)]
    loop.run(1)
    assert ages == [0]


def test_a_frame_is_never_newer_than_its_sample() -> None:
    loop, robot, link, _ = of()
    ages = iter((-0.05, 0.25))
    robot.observe = lambda: {"images": {}, "state": np.zeros(2), "age": next(ages)}  # type: ignore[method-assign]
    loop.run(2)
    assert link.frames == pytest.approx([0.0, -0.15])


def test_an_error_is_the_reason_until_a_window_knows_a_newer_frame(caplog: pytest.LogCaptureFixture) -> None:
    loop, robot, link, _ = of()
    for number in range(6):
        if number in (1, 2, 3):
            link.errors, link.error = link.errors + 1, "no head [internal]"
        link.ready = [StreamWindow(number, np.ones((0, 2)), 0.1 * number, 0.4 if number == 5 else 0.0)]
        loop.tick(loop.pace.next())
    assert loop.controller.held == {"out of nodes": 2, "no head [internal]": 4}
    assert [record.message for record in caplog.records].count("no head [internal]") == 1


def test_a_blind_robot_is_not_asked_again_where_it_stands() -> None:
    """Limits want to know it, but not in a step that holds anyway; a step without a sample holds as well."""
    loop, robot, link, _ = of(limits={"velocity": 1.0}, motion={"kind": "absolute"})
    looks = []
    see = robot.observe
    robot.observe = lambda: looks.append(1) or see()  # type: ignore[method-assign, func-returns-value]
    robot.blind = "no camera"
    link.ready = [StreamWindow(0, np.ones((20, 2), np.float32), 0.0, 0.0)]
    loop.run(3)
    assert len(looks) == 3
    assert loop.controller.command(3).reason == "the robot is blind"
    assert loop.controller.arrived(3, StreamWindow(4, np.ones((2, 2)), 0.0, 0.0))


def test_nothing_is_known_before_the_first_sample() -> None:
    loop, robot, link, _ = of()
    assert newest_of(loop) is None
    assert [loop.controller.command(step).reason for step in range(3)] == ["the robot is blind"] * 3
    loop, robot, link, _ = of()
    lies = StreamWindow(0, np.ones((9, 2), np.float32), 5.0, 5.0)
    assert not loop.controller.arrived(0, lies)
    assert (
        loop.controller.faults.first
        == "a window: expected times of its sample and its frame up to the present, 0.100 s, got 5 and 5"
    )
    for beyond in (0, 1):  # the furthest node that a delay reaches, and the next one
        far = StreamWindow(1001 + beyond, np.ones((1, 2), np.float32), 0.0, 0.0)
        assert loop.controller.arrived(0, far) == (not beyond)
    loop, robot, link, _ = of()
    loop.restart("a new episode")  # there is no world before the first
    link.ready = [StreamWindow(0, np.ones((9, 2), np.float32), 0.0, -0.05)]
    loop.run(1)
    assert robot.done[0] == 1.0
    assert [delay for _, delay, _ in link.sent] == [1]
    assert newest_of(loop) is None  # a robot that has no cameras shows nothing
    robot.observe = lambda: {"images": {"front": 1}, "state": np.ones(2)}  # type: ignore[method-assign]
    link.ready = [StreamWindow(1, np.ones((9, 2), np.float32), 0.0, 0.0, said="the egg")]
    loop.run(2)
    assert loop.prompt == "go"
    seen = newest_of(loop)
    assert seen is not None
    assert (seen[0], seen[1]["images"], seen[1]["said"]) == ("go", {"front": 1}, "the egg")
    np.testing.assert_array_equal(seen[1]["state"], [1, 1])


def test_limits_begin_anew_where_the_robot_stands_in_another_world() -> None:
    at = 0.0
    loop, robot, link, _ = of(
        limits={"velocity": 1.0},
        motion={"kind": "absolute"},
        stale=9.0,
        sense=lambda _: np.full(2, at, np.float32),
    )
    link.ready = [StreamWindow(0, np.full((9, 2), 5.0, np.float32), 0.0, 0.0)]
    loop.run(2)
    at = 3.0
    loop.restart("a new episode")
    link.errors, link.error = 1, "busy"
    loop.run(3)
    assert (loop.reason, loop.report().unanswered) == ("busy", 1)
    link.ready = [StreamWindow(3, np.full((9, 2), 5.0, np.float32), 0.2, 0.2)]
    loop.run(5)
    assert loop.report().unanswered == 0
    assert [row for row in robot.done if row is not None] == pytest.approx([0.1, 0.2, 3.1, 3.2])


def test_a_report_counts_what_was_sent_and_what_came() -> None:
    robot, link, clock = Robot(), Link(), [0.0]
    robot.concurrent_hold = False  # type: ignore[attr-defined]
    loop = looped(robot, link, 10.0, paced(10.0, clock), 3.0, stale=9.0)
    assert StreamReport.of(loop).tick_hz == StreamReport.of(loop).window_hz == 0.0
    link.ready = [StreamWindow(0, np.ones((5, 2), np.float32), 0.0, 0.0) for _ in range(2)]
    loop.run(4)
    clock[0] += 0.3  # three periods pass without a tick
    loop.run(9)
    assert link.sent[0][1] == 1  # the least delay
    report = StreamReport.of(loop)
    assert (report.ticks, report.skipped, report.seconds, report.rate) == (9, 2, 1.1, 10.0)
    assert (report.tick_hz, report.window_hz) == (8.18, 1.82)
    assert (report.windows, report.frames, report.delay, report.executed, report.misses) == (2, 4, 1, 4, 5)
    assert report.frames_used == 1  # both windows were made of the same one
    assert [round(10 * time) for time, _, frame in link.sent if frame] == [0, 6, 7, 10]
    assert (report.watchdog, report.errors, report.label) == (False, 0, "")
    assert report.to_dict()["measured"] == report.measured
    assert link.closed == 0
    loop.close()
    assert link.closed == 1
    assert facts_of(loop.robot).concurrent_hold is False
    assert facts_of(Watching(Robot(), 1.0)).concurrent_hold


def test_each_error_between_two_ticks_is_counted() -> None:
    loop, robot, link, _ = of()
    loop.run(1)
    for code, text in (("internal", "one"), ("", "busy"), ("internal", "two"), ("other", "three")):
        link.errors, link.error = link.errors + 1, text
        if code:
            link.faults.add(code, text)
    loop.run(2)
    report = StreamReport.of(loop)
    assert report.faults == {"total": 3, "kinds": {"internal": 2, "other": 1}, "first": "one"}
    assert (report.errors, report.error, loop.reason) == (4, "three", "three")
    link.errors, link.error = link.errors + 1, "busy"
    loop.run(3)
    assert (loop.report().failed_requests, loop.report().unanswered, loop.reason) == (5, 5, "busy")
    assert StreamReport.of(loop).faults == report.faults


def test_an_error_that_comes_while_errors_are_read_is_returned_by_the_next_poll() -> None:
    """The link's own thread may add an error between any two lines of a poll."""

    class Busy(Link):
        """A link with one more error at each look, and with one more kind of error at each step of an iteration."""

        @property
        def errors(self) -> int:
            self.looks += 1
            return self.looks

        @errors.setter
        def errors(self, _count: int) -> None:
            self.looks = 0

    link = Busy()
    source, told = Stream(link), 0
    for _ in range(3):
        while source.poll(0.0) is not None:
            told += 1
        assert told == link.looks

    class Growing(Counter):  # type: ignore[type-arg]
        def items(self) -> Any:
            for number, item in enumerate(super().items()):
                yield item
                self[f"kind {number}"] = 1

    link.faults.counts = Growing(internal=1)
    outcome = source.poll(0.0)
    assert outcome is not None
    assert outcome.kind == "internal"


def test_a_human_who_drives_a_stream_leaves_it_alone_in_another_world() -> None:
    for shadow, driver in ((False, POLICY), (True, ALIGNING)):
        controller = of()[0].controller
        controller.take_over(0, shadow)
        controller.aligned(0)
        controller.fault(0, "silent")
        assert controller.driver == HUMAN
        controller.fault(0, "a new episode", moved=True)
        assert controller.driver == driver


@pytest.mark.parametrize("old", ["the observation", "the state"])
def test_limits_of_a_stream_do_not_begin_where_an_old_state_stood(old: str) -> None:
    """It was moved by hand meanwhile; a stream takes frames of any age, but they do not say where it is."""
    robot, link, clock = Robot(), Link(), [0.0]
    shown = {"time": 0.0}

    def observe() -> dict[str, Any]:
        seen = {"images": {"front": None}, "state": np.zeros(2, np.float32)}
        times = {"time": shown["time"]}
        if old == "the state" and "time" in shown:
            times = {"times": {"front": clock[0], "state": shown["time"]}}
        return {**seen, **times}

    robot.observe = observe  # type: ignore[method-assign]
    limits = {"velocity": 1.0}
    loop = looped(robot, link, 10.0, paced(10.0, clock), 10.0, motion={"kind": "absolute"}, limits=limits)
    loop.pause()
    for _ in range(12):
        loop.tick(loop.pace.next())
    loop.resume()
    for step in range(12, 18):
        link.ready = [window(step, step, clock[0], 1.0, clock[0])]
        loop.tick(loop.pace.next())
    assert robot.done[12:] == [None] * 6
    assert bool(link.sent) == (old == "the observation")  # no sample of an old state leaves
    for step in (18, 19):
        shown["time"] = clock[0] + 0.1
        link.ready = [window(step, step, clock[0], 1.0, clock[0])] * (step == 19)
        loop.tick(loop.pace.next())
    assert robot.done[-1] == pytest.approx(0.1 if old == "the state" else 0.2)  # two commands from 0
