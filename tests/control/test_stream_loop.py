"""The robot's loop of a stream, without a server: another world, stalls, and a robot that sees nothing."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from sinew_client.control import Blind, Pace, StreamLoop
from sinew_client.control.stream import MAX_DELAY, Watching
from sinew_client.faults import Faults
from sinew_client.streams import StreamWindow


class Robot:
    """Sees what it is told to see, and notes what it does."""

    def __init__(self) -> None:
        self.done: list[float | None] = []  # the first number of a row, None for a hold
        self.blind = ""  # why

    def observe(self) -> dict[str, Any]:
        if self.blind:
            raise Blind(self.blind)
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
        self.restarts = self.errors = 0
        self.error, self.faults = "", Faults()

    def send(self, state: Any, time: float, delay: int = 1, images: Any = None, *_: Any, **__: Any) -> bool:
        self.sent.append((time, delay, images is not None))
        return True

    def windows(self) -> list[StreamWindow]:
        found, self.ready = self.ready, []
        return found

    def restart(self) -> None:
        self.restarts += 1


def paced(rate: float, clock: list[float]) -> Pace:
    """Return the pace of a clock that only waiting moves."""
    return Pace(1 / rate, lambda: clock[0], lambda seconds: clock.__setitem__(0, clock[0] + seconds))


def window(step: int, run: int, frame_time: float, value: float, sample_time: float = 0.0) -> StreamWindow:
    return StreamWindow(step, np.full((5, 2), value, np.float32), sample_time, frame_time, run=run)


def test_windows_of_the_last_episode_are_not_executed_in_the_next_one() -> None:
    robot, link = Robot(), Link()
    loop = StreamLoop(Watching(robot, 10.0, lambda: 0.0), link, 10.0, 2, "go", pace=paced(10.0, [0.0]))

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
    assert (loop.reason, link.restarts, loop.held) == ("", 1, {"a new episode": 2})


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
    loop = StreamLoop(
        Watching(robot, 30.0, lambda: clock[0]), link, rate, 2, "go", pace=paced(rate, clock), stale=10.0
    )
    loop.run(int(4 * rate))
    assert max(delay for _, delay, _ in link.sent) <= MAX_DELAY
    assert len(way) < 20
    assert robot.done[-11:-1] == [1.0] * 10  # the very last one is the hold at the end


@pytest.mark.parametrize("fast_state", [False, True])
def test_a_blind_robot_holds_with_the_reason_and_goes_on(fast_state: bool) -> None:
    robot, link, clock = Robot(), Link(), [0.0]
    if fast_state:  # the state is known while the camera is silent
        robot.sense = lambda: np.zeros(2, np.float32)  # type: ignore[attr-defined]
    loop = StreamLoop(Watching(robot, 5.0, lambda: clock[0]), link, 10.0, 2, "go", pace=paced(10.0, clock))
    link.ready = [StreamWindow(0, np.ones((20, 2), np.float32), 0.0, 0.0, run=1)]
    loop.stale = 10.0
    for tick in range(8):
        robot.blind = "camera front is silent" if 2 <= tick < 6 else ""
        loop.tick(loop.pace.next())
    assert robot.done == [1.0, 1.0, None, None, None, None, 1.0, 1.0]
    assert loop.held == {"camera front is silent": 4}
    frames = [round(10 * time) for time, _, frame in link.sent if frame]
    assert frames == [0, 6]  # as soon as there is one again
    assert len(link.sent) == (8 if fast_state else 4)


def test_a_robot_that_is_blind_at_once_ends_no_run() -> None:
    robot, link = Robot(), Link()
    robot.blind = "no camera"
    report = StreamLoop(Watching(robot, 5.0, lambda: 0.0), link, 10.0, 2, pace=paced(10.0, [0.0])).run(3)
    held: Mapping[str, int] = report.held
    assert (held, link.sent) == ({"no camera": 3}, [])
