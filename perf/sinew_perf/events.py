"""Simulate the asynchronous and the dual-system case in time: age of actions, underruns, rates.

The simulation has a few lines: one for each half-duplex link, and one for the machine. A line serves one request at a
time. A waiting request is replaced by a newer request in the same direction, as in the server's scheduler. Therefore
ages stay bounded, however slow the machine is. The simulation is deterministic. The formulas in ``scenarios.py`` are
its long-run averages.
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
    """A request of the simulation on its way through network links and the machine.

    Attributes:
        taken: Time of its frame, in seconds.
        left: Remaining parts of its way. Each part is (line, seconds on the line, seconds of delay after the line).
    """

    taken: float
    left: list[tuple[_Line, float, float]]


class _Line:
    """A network link, or the machine. It serves one request at a time, in the order of arrival. If several requests
    wait for the same direction of a link, or for the machine, only the newest request stays.
    """

    def __init__(self) -> None:
        self.busy = False
        self.queue: deque[_Request] = deque()


class _World:
    """The simulated requests on their way through lines (network links and the machine).

    Attributes:
        under_way: Number of requests on their way.
        arrived: (time of arrival, time of the frame) of each answer, in order.
    """

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
    """Results of a simulation.

    Attributes:
        chunk_hz: Answers per second.
        age_p50_s: Median time from a frame to the execution of its action, in seconds.
        age_p95_s: 95th percentile of this time.
        age_max_s: Largest value of this time.
        underruns: Number of control steps without an action, after the first chunk.
        steps: Number of all control steps after the first chunk.
    """

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
    """Simulate a robot that sends a request every ``replan`` control steps and executes the newest chunk.

    A request that still waits for a line is dropped when a newer one arrives.

    Args:
        compute_s: Time of an inference, in seconds.
        size: Bytes of an observation and of a chunk.
        route: Links between robot and machine.
        control_hz: Control steps per second.
        chunk: Number of actions in a chunk.
        replan: Control steps between two requests.
        duration_s: Simulated time, in seconds.
        in_flight: Maximum number of requests on their way. None for no maximum: a request is sent when the first line
            is free.

    Returns:
        The results.

    Raises:
        SinewError: A number is not above 0.
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
    last_request, newest = -replan, None
    underruns = counted = 0
    for step in range(int(duration_s * control_hz)):
        now = step * period
        world.run_until(now)
        while world.arrived:
            at, newest = world.arrived.popleft()
            times.append(at)
        room = in_flight is None or world.under_way < in_flight
        if step - last_request >= replan and room and not first.busy:
            last_request = step
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
    """Results of a simulation of two systems.

    Attributes:
        fast_hz: Runs of System 1 per second.
        slow_hz: Runs of System 2 per second.
        plan_age_max_s: Largest time from a frame for System 2 to the end of the last run of System 1 that used its
            result, in seconds.
    """

    fast_hz: float
    slow_hz: float
    plan_age_max_s: float


def dual_system(
    fast_s: float, slow_s: float, cap_hz: float, duration_s: float = 60.0, network_s: float = 0.0
) -> DualPlayed:
    """Simulate two systems on one machine, where no run is interrupted.

    System 2 runs when it is due and the machine is free, but never twice while System 1 waits. If the machine is too
    slow for both, they alternate.

    Args:
        fast_s: Time of a run of System 1, in seconds.
        slow_s: Time of a run of System 2, in seconds.
        cap_hz: Maximum rate of System 2.
        duration_s: Simulated time, in seconds.
        network_s: Time between a run of System 1 and its next request, in which the machine is free.

    Returns:
        The results.

    Raises:
        SinewError: A number is out of its range.
    """
    if not (fast_s > 0 and slow_s > 0 and cap_hz > 0 and network_s >= 0):
        raise SinewError("fast_s, slow_s and cap_hz must be above 0, and network_s at least 0")
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
    """Return a percentile of sorted values: the smallest value that the given share of the values does not exceed."""
    if not values:
        return 0.0
    return values[min(len(values) - 1, max(0, -(-int(share * 1000) * len(values) // 1000) - 1))]
