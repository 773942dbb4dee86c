"""The asynchronous and the dual-system case played out in time: action age, underruns, rates.

A handful of lines (each link, half duplex, and the machine), each serving one thing at a time. What waits for one
is replaced by what is newer and goes the same way, as the server's scheduler does: ages stay bounded however slow
the machine is. Deterministic; the closed formulas of ``scenarios.py`` are its long-run averages.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from sinew.core import SinewError

from sinew_perf.hardware import Network
from sinew_perf.scenarios import Payload


@dataclass(slots=True)
class _Request:
    """taken: when its frame was. left: what is still ahead of it: (line, seconds on it, seconds after it)."""

    taken: float
    left: list[tuple[_Line, float, float]]


class _Line:
    """Something that serves one request at a time, in the order in which they reach it; of those that wait to go
    the same way, only the newest."""

    def __init__(self) -> None:
        self.busy = False
        self.queue: deque[_Request] = deque()


class _World:
    """Requests on their way through lines. ``arrived``: (when, when the frame was taken), in order."""

    def __init__(self) -> None:
        self._events: list[tuple[float, int, _Request, _Line | None]] = []
        self._count = 0
        self.under_way = 0
        self.arrived: deque[tuple[float, float]] = deque()

    def send(self, now: float, request: _Request) -> None:
        self.under_way += 1
        self._reach(now, request)

    def run_until(self, now: float) -> None:
        while self._events and self._events[0][0] <= now + 1e-12:
            at, _, request, line = heapq.heappop(self._events)
            if line is None:
                self._reach(at, request)
                continue
            _, _, after = request.left.pop(0)
            line.busy = False
            if line.queue:
                self._serve(at, line.queue.popleft())
            self._push(at + after, request, None)

    def _reach(self, at: float, request: _Request) -> None:
        if not request.left:
            self.under_way -= 1
            self.arrived.append((at, request.taken))
        elif (line := request.left[0][0]).busy:
            older = [each for each in line.queue if len(each.left) == len(request.left)]
            for each in older:
                line.queue.remove(each)
            self.under_way -= len(older)
            line.queue.append(request)
        else:
            self._serve(at, request)

    def _serve(self, at: float, request: _Request) -> None:
        line, duration, _ = request.left[0]
        line.busy = True
        self._push(at + duration, request, line)

    def _push(self, at: float, request: _Request, line: _Line | None) -> None:
        self._count += 1
        heapq.heappush(self._events, (at, self._count, request, line))


@dataclass(frozen=True, slots=True)
class Played:
    """chunk_hz: answers per second. age: seconds from a frame to the execution of its action, over the executed ones.
    underruns: control steps without an action, after the first chunk; steps: all after it."""

    chunk_hz: float
    age_p50_s: float
    age_p95_s: float
    age_max_s: float
    underruns: int
    steps: int


def asynchronous(
    compute_s: float,
    size: Payload,
    route: Sequence[Network],
    *,
    control_hz: float,
    chunk: int,
    replan: int = 1,
    duration_s: float = 60.0,
    in_flight: int | None = None,
) -> Played:
    """A robot asks every ``replan`` control steps and executes the newest chunk's row of the present.

    in_flight: requests that may be under way, further ones wait for the next control step; None: a frame is taken
    whenever the first line is free. One that still waits further on when a newer one comes is dropped.
    """
    if not (compute_s > 0 and control_hz > 0 and chunk >= 1 and replan >= 1):
        raise SinewError("compute_s, control_hz, chunk and replan must be above 0")
    period = 1 / control_hz
    # A link is half duplex, so one line serves both directions.
    lines, machine = [_Line() for _ in route], _Line()
    there = [(line, link.up_s(size.up), link.base_ms / 1e3) for line, link in zip(lines, route, strict=True)]
    back = [
        (line, link.down_s(size.down), link.base_ms / 1e3) for line, link in zip(lines, route, strict=True)
    ]
    way = [*there, (machine, compute_s, 0.0), *reversed(back)]
    first, world = way[0][0], _World()
    ages: list[float] = []
    times: list[float] = []
    asked, newest = -replan, None
    underruns = counted = 0
    for step in range(int(duration_s * control_hz)):
        now = step * period
        world.run_until(now)
        while world.arrived:
            at, newest = world.arrived.popleft()
            times.append(at)
        room = in_flight is None or world.under_way < in_flight
        if step - asked >= replan and room and not first.busy:
            asked = step
            world.send(now, _Request(now, list(way)))
        if newest is None:
            continue
        counted += 1
        if now - newest < chunk * period - 1e-9:
            ages.append(now - newest)
        else:
            underruns += 1
    ages.sort()
    span = times[-1] - times[0] if len(times) > 1 else 0.0
    return Played(
        chunk_hz=(len(times) - 1) / span if span else 0.0,
        age_p50_s=_at(ages, 0.50),
        age_p95_s=_at(ages, 0.95),
        age_max_s=ages[-1] if ages else 0.0,
        underruns=underruns,
        steps=counted,
    )


@dataclass(frozen=True, slots=True)
class DualPlayed:
    """fast_hz, slow_hz: runs per second. plan_age_max_s: from a frame that System 2 took to the end of the last run
    of System 1 that used its result."""

    fast_hz: float
    slow_hz: float
    plan_age_max_s: float


def dual_system(
    fast_s: float, slow_s: float, cap_hz: float, duration_s: float = 60.0, network_s: float = 0.0
) -> DualPlayed:
    """One machine, neither system interrupted. System 2 runs when its time has come and the machine is free, but never
    twice while System 1 waits: where both cannot be had they alternate.

    network_s: between the end of one run of System 1 and its next request at the machine, which is free meanwhile.
    """
    if not (fast_s > 0 and slow_s > 0 and cap_hz > 0 and network_s >= 0):
        raise SinewError("fast_s, slow_s and cap_hz must be above 0, network_s not below")
    free, due, taken = 0.0, 0.0, None
    fast = slow = 0
    oldest = 0.0
    while free < duration_s:
        request = free + network_s
        while (start := max(due, free)) <= request:
            due, taken = max(due + 1 / cap_hz, start), start
            free = start + slow_s
            slow += 1
        free = max(free, request) + fast_s
        fast += 1
        if taken is not None:
            oldest = max(oldest, free - taken)
    return DualPlayed(fast / free, slow / free, oldest)


def _at(values: Sequence[float], share: float) -> float:
    """The smallest value that ``share`` of them do not exceed."""
    if not values:
        return 0.0
    return values[min(len(values) - 1, max(0, -(-int(share * 1000) * len(values) // 1000) - 1))]
