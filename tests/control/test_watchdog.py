"""A command or a hold in every period, also while the robot's own methods block: gaps as the robot sees them."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from sinew_client.control import Loop, Settings, Stream
from sinew_client.control.robots import LeRobotArm
from sinew_client.control.stream import Watching
from sinew_client.control.watchdog import LEAST_S, PERIODS, Watchdog

from tests.control.test_stream_loop import Link

WAIT_S = 60.0


class Arm:
    """Notes when it was sent what, and by whom; blocks where ``blocks`` says so, until it is woken."""

    def __init__(self, hold: Callable[[], None] = lambda: None) -> None:
        self.sent: list[tuple[float, str, str]] = []
        self.blocks, self.blocked, self.wake = "", threading.Event(), threading.Event()
        self._hold = hold

    def _wait(self, where: str) -> None:
        if self.blocks == where:
            self.blocks = ""
            self.blocked.set()
            assert self.wake.wait(WAIT_S)

    def _note(self, what: str) -> None:
        self.sent.append((time.monotonic(), what, threading.current_thread().name))

    def observe(self) -> dict[str, Any]:
        self._wait("observe")
        return {"images": {}, "state": np.zeros(1, np.float32)}

    def act(self, row: np.ndarray) -> None:
        self._note("act")
        self._wait("act")

    def hold(self) -> None:
        self._note("hold")
        self._hold()

    def watched(self) -> int:
        return sum(name == "sinew-watchdog" for _, _, name in self.sent)

    def gaps(self) -> np.ndarray:
        return np.diff([moment for moment, *_ in self.sent])


def until(seen: Callable[[], bool]) -> None:
    limit = time.monotonic() + WAIT_S
    while not seen():
        assert time.monotonic() < limit
        time.sleep(0.002)


def watching() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == "sinew-watchdog"]


def chunk_loop(arm: Arm, **given: Any) -> Loop:
    settings = Settings(**{"hz": 25.0, "handover": "aligned", "replan": "4", "stale": 60.0, **given})
    return Loop(arm, lambda: lambda *_: np.zeros((30, 1), np.float32), settings, 1)


def stream_loop(arm: Arm, watchdog: bool = True) -> Loop:
    settings = Settings(25.0, fusion="latest_only", watchdog=watchdog)
    return Loop(Watching(arm, 25.0), Stream(Link()), settings, 1)


class Running:
    """A loop on a thread of its own."""

    def __init__(self, loop: Any, arm: Arm):
        self.loop, self.arm = loop, arm
        self._thread = threading.Thread(target=loop.run, daemon=True)

    def __enter__(self) -> Running:
        self._thread.start()
        until(lambda: len(self.arm.sent) > 3)
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self.arm.wake.set()
        self.loop.stop()
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()
        self.loop.close()


@pytest.mark.parametrize(
    ("kind", "where"), [(chunk_loop, "observe"), (chunk_loop, "act"), (stream_loop, "observe")]
)
def test_a_robot_that_blocks_is_held_meanwhile(kind: Callable[[Arm], Any], where: str) -> None:
    arm = Arm()
    with Running(kind(arm), arm) as run:
        arm.blocks = where
        assert arm.blocked.wait(WAIT_S)
        begun = len(arm.sent)
        until(lambda: len(arm.sent) >= begun + 5)  # for as long as it is late
        meanwhile = {name for _, _, name in arm.sent[begun:]}
        count = len(arm.sent)
        arm.wake.set()
        until(lambda: len(arm.sent) > count + 5)
    assert meanwhile == {"sinew-watchdog"}
    assert {name for _, what, name in arm.sent if what == "act"} <= {run._thread.name}
    report = run.loop.report()
    assert (report.watchdog, report.watchdog_holds) == (True, arm.watched())
    assert report.longest_gap_ms >= 1e3 * PERIODS / 25.0


@pytest.mark.parametrize("kind", [chunk_loop, stream_loop])
@pytest.mark.parametrize("who", ["robot", "setting"])
def test_a_robot_or_a_setting_opts_out_by_name(kind: Callable[..., Any], who: str) -> None:
    arm = Arm()
    if who == "robot":
        arm.concurrent_hold = False  # type: ignore[attr-defined]
    with Running(kind(arm, watchdog=False) if who == "setting" else kind(arm), arm) as run:
        arm.blocks = "observe"
        assert arm.blocked.wait(WAIT_S)
        count = len(arm.sent)
        time.sleep(4 * PERIODS / 25.0)  # nothing can be waited for where nothing is to happen
        assert len(arm.sent) == count
        arm.wake.set()
        until(lambda: len(arm.sent) > count)
    report = run.loop.report()
    assert (report.watchdog, report.watchdog_holds, arm.watched()) == (False, 0, 0)
    assert report.longest_gap_ms >= 4e3 * PERIODS / 25.0
    assert LeRobotArm.concurrent_hold is False


def test_a_command_waits_for_a_hold_under_way_and_none_lands_after_it() -> None:
    """By a clock that the test moves, so that no second hold falls due before the command."""
    now, order = [0.0], []  # type: ignore[var-annotated]
    begun, go = threading.Event(), threading.Event()

    def hold() -> None:
        order.append("hold begins")
        begun.set()
        assert go.wait(WAIT_S)
        order.append("hold ends")

    with Watchdog(hold, 0.02, now=lambda: now[0]) as watchdog:
        now[0] += PERIODS * 0.02
        assert begun.wait(WAIT_S)

        def command() -> None:
            order.append("wants to command")
            held.append(watchdog.claim())
            order.append("command")

        held: list[bool] = []
        thread = threading.Thread(target=command)
        thread.start()
        until(lambda: "wants to command" in order)
        assert "command" not in order
        go.set()
        thread.join(WAIT_S)
    assert order == ["hold begins", "wants to command", "hold ends", "command"]
    assert held == [True]
    assert not watchdog.claim()


def test_no_hold_is_decided_on_while_the_robot_is_claimed(caplog: pytest.LogCaptureFixture) -> None:
    """By a clock that the test moves: a hold falls due two periods after the last command, and then once a period. The
    first is said."""
    now, held = [0.0], Counter()  # type: ignore[var-annotated]
    with Watchdog(lambda: held.update(["hold"]), 0.02, now=lambda: now[0]) as watchdog:
        for _ in range(50):
            now[0] += PERIODS * 0.02 - 1e-6
            assert not watchdog.claim()
            watchdog.sent()
        assert not held
        now[0] += PERIODS * 0.02
        until(lambda: held["hold"] == 1)
        assert caplog.messages == ["no command for 0.04 s: the watchdog holds the robot"]
        now[0] += 0.02
        until(lambda: held["hold"] == 2)
        assert watchdog.claim()
        assert not watchdog.claim()
    assert watchdog.holds == 2
    assert len(caplog.messages) == 1
    assert watchdog.longest == pytest.approx(PERIODS * 0.02)
    idle = Watchdog(lambda: None, 1e-3)
    assert (idle.limit, idle.longest) == (LEAST_S, 0.0)


@pytest.mark.parametrize(
    ("does", "held"), [("", [0.2, 0.3, 0.4]), ("claim", [0.4, 0.5, 0.6]), ("sent", [0.4, 0.5, 0.6])]
)
def test_a_hold_is_due_two_periods_after_what_came_last(does: str, held: list[float]) -> None:
    """By a clock that its waits move, the first of which a command comes in."""
    now, holds, waits = [0.0], [], []  # type: ignore[var-annotated]
    watchdog = Watchdog(lambda: holds.append(now[0]), 0.1, active=False, now=lambda: now[0])

    class Ended(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            assert timeout is not None
            now[0] += timeout
            if does and not waits:
                getattr(watchdog, does)()
            waits.append(timeout)
            return now[0] > held[-1] + 0.01

    with watchdog:
        watchdog._ended = Ended()
        watchdog._run()
    assert holds == pytest.approx(held)
    assert max(waits) <= watchdog.limit == pytest.approx(0.2)


def test_a_watchdog_may_watch_again_and_leaves_nothing_behind() -> None:
    now, held = [0.0], Counter()  # type: ignore[var-annotated]
    watchdog = Watchdog(lambda: held.update(["hold"]), 0.02, now=lambda: now[0])
    for again in (1, 2):
        with watchdog:
            watchdog.claim()
            now[0] += PERIODS * 0.02
            until(lambda again=again: held["hold"] == again)
        until(lambda: not watching())
        assert watchdog.longest == pytest.approx(PERIODS * 0.02)  # nothing was late in between
        now[0] += 100.0


def test_a_hold_that_fails_is_tried_again_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    tried: list[int] = []
    message = "the watchdog could not hold the robot"

    def hold() -> None:
        tried.append(caplog.messages.count(message))
        raise SystemExit("the bus is in use")

    before = watching()
    with Watchdog(hold, 0.005) as watchdog:
        until(lambda: len(tried) >= 3)
        # One that never returns keeps no process alive.
        assert [each.daemon for each in watching() if each not in before] == [True]
    until(lambda: watchdog.failures == len(tried))
    assert tried[:3] == [0, 1, 1]  # at once, and never again


def test_after_a_watchdogs_hold_a_robot_starts_from_rest() -> None:
    """No limit of acceleration takes the speed of before for granted.

    At 5 Hz, so that a busy machine is seldom late by two periods before the robot is to be held.
    """
    hz = 5.0
    arm, rows, push = Arm(), [], 1.0 / hz**2
    arm.act = lambda row: (rows.append(float(row[0])), Arm.act(arm, row))  # type: ignore[method-assign, assignment]
    given = {"limits": {"acceleration": 1.0, "still": None}, "motion": {"kind": "absolute"}, "replan": "20"}
    loop = chunk_loop(arm, hz=hz, **given)
    heard: list[tuple[str, int]] = []
    loop.controller.listeners.append(lambda event, _: heard.append((event, len(rows))))
    loop.source._connect = lambda: lambda *_: np.full((500, 1), 100.0, np.float32)
    with Running(loop, arm):
        until(lambda: len(rows) > 5 and rows[-1] - rows[-2] > 2 * push)
        arm.blocks = "act"
        assert arm.blocked.wait(WAIT_S)
        before, count = arm.watched(), len(rows)
        until(lambda: arm.watched() > before)
        arm.wake.set()
        until(lambda: len(rows) > count + 1)
    assert "stood" in [event for event, _ in heard]
    assert rows[count] - rows[count - 1] <= push * (1 + 1e-5)
