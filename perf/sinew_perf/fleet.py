"""Predict how many robots one machine serves in time.

By the roofline, a batch of n observations reads each weight once and all other data n times. It computes n times as
much, with the same number of calls. A simulation at a steady rate then counts the robots. The server forms batches by
the same rules as :mod:`sinew.serve.batching`. Robots send their requests at different times (staggered) or at the
same time (in step).
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from sinew.core import SinewError
from sinew.serve.batching import Batcher
from sinew.serve.job import PreparedInputs, ServingJob
from sinew.serve.request import Request

from sinew_perf.operators import Component

MAX_ROBOTS = 1024  # the search tries at most this many robots
PERIODS = 25  # number of control periods that are simulated
WARM = 5  # this many periods pass before the measurement starts
KIND = "one"  # the name of the only kind of request: requests of one kind can share a batch


def batched(component: Component, size: int) -> Component:
    """Return the same stage of a policy for a batch: it computes ``size`` observations at once."""
    operators = tuple(
        replace(
            each,
            flops=each.flops * size,
            tensors=tuple(
                tensor if tensor.kind == "weight" else replace(tensor, elements=tensor.elements * size)
                for tensor in each.tensors
            ),
        )
        for each in component.operators
    )
    return replace(component, operators=operators)


@dataclass(frozen=True, slots=True)
class Served:
    """Result of one simulation.

    Attributes:
        robots: Number of robots.
        in_time: Share of the periods whose answer arrived before the deadline.
        p99_s: 99th percentile of the time from request to answer, in seconds.
        mean_batch: Mean number of observations in a batch.
    """

    robots: int
    in_time: float
    p99_s: float
    mean_batch: float


def play(
    robots: int,
    seconds: Callable[[int], float],
    *,
    hertz: float,
    deadline_s: float,
    max_batch: int,
    overhead_s: float = 0.0,
    in_step: bool = False,
    seed: int = 0,
) -> Served:
    """Simulate robots that share one server.

    A robot without its answer skips its next request. The server rejects a request that it cannot begin before the
    deadline.

    Args:
        robots: Number of robots.
        seconds: Function that returns the time of an inference in seconds, from the size of its batch.
        hertz: Requests per second of each robot.
        deadline_s: Maximum time from request to answer, in seconds.
        max_batch: Largest batch.
        overhead_s: Time of a request outside of the policy, in seconds, half before and half after the inference.
        in_step: True if all robots send their requests at the same time. False for a random time of the period for
            each robot.
        seed: Seed of these random times.

    Returns:
        The result.

    Raises:
        SinewError: A number is out of its range.
    """
    if not (robots >= 1 and hertz > 0 and deadline_s > 0 and max_batch >= 1 and overhead_s >= 0):
        raise SinewError("robots, hertz, deadline and max_batch must be above 0, and overhead at least 0")
    batcher = Batcher(max_batch)
    for size in range(1, max_batch + 1):
        batcher.costs.learn(KIND, size, seconds(size))
    period = 1 / hertz
    phases = np.zeros(robots) if in_step else np.random.default_rng(seed).uniform(0, period, robots)
    ticks = [(float(phase), robot) for robot, phase in enumerate(phases)]
    heapq.heapify(ticks)
    # Each waiting request is (job, time of the robot's request in seconds, number of the robot).
    waiting: deque[tuple[ServingJob, float, int]] = deque()
    # Time at which each robot has its answer, in seconds.
    free_at = [0.0] * robots
    latencies: list[float] = []
    sizes: list[int] = []
    moments = in_time = 0
    clock, end = 0.0, PERIODS * period
    while ticks or waiting:
        while ticks and (not waiting or ticks[0][0] + overhead_s / 2 <= clock):
            tick, robot = heapq.heappop(ticks)
            if tick + period < end:
                heapq.heappush(ticks, (tick + period, robot))
            counts = tick >= WARM * period
            moments += counts
            if free_at[robot] > tick:
                # The robot still waits for its previous answer, so it skips this period.
                continue
            job = ServingJob(Request("", _never), tick + deadline_s, prepared=PreparedInputs(kind=KIND))
            waiting.append((job, tick, robot))
            free_at[robot] = float("inf")
            clock = max(clock, tick + overhead_s / 2) if len(waiting) == 1 else clock
        # The deadline has passed, so the server rejects the request.
        while waiting and clock > waiting[0][1] + deadline_s:
            _, tick, robot = waiting.popleft()
            free_at[robot] = clock
        if not waiting:
            continue
        jobs = [job for job, _, _ in waiting]
        chosen = set(map(id, batcher.members(jobs[0], jobs[1:], clock)))
        clock += seconds(len(chosen))
        sizes.append(len(chosen))
        for _, tick, robot in [each for each in waiting if id(each[0]) in chosen]:
            took = clock + overhead_s / 2 - tick
            free_at[robot] = clock + overhead_s / 2
            if tick >= WARM * period:
                latencies.append(took)
                in_time += took <= deadline_s
        waiting = deque(each for each in waiting if id(each[0]) not in chosen)
    p99 = float(np.percentile(latencies, 99, method="higher")) if latencies else float("inf")
    return Served(robots, in_time / max(1, moments), p99, float(np.mean(sizes)) if sizes else 0.0)


def most_robots(
    seconds: Callable[[int], float],
    *,
    hertz: float,
    deadline_s: float,
    max_batch: int,
    overhead_s: float = 0.0,
    share: float = 0.99,
    in_step: bool = False,
) -> Served | None:
    """Find the largest number of robots that the server answers in time.

    Args:
        seconds: Function that returns the time of an inference in seconds, from the size of its batch.
        hertz: Requests per second of each robot.
        deadline_s: Maximum time from request to answer, in seconds.
        max_batch: Largest batch.
        overhead_s: Time of a request outside of the policy, in seconds.
        share: Required share of answers in time.
        in_step: True if all robots send their requests at the same time.

    Returns:
        The result with this number. None if even one robot is not answered in time.
    """

    def at(robots: int) -> Served:
        return play(
            robots,
            seconds,
            hertz=hertz,
            deadline_s=deadline_s,
            max_batch=max_batch,
            overhead_s=overhead_s,
            in_step=in_step,
        )

    best = at(1)
    if best.in_time < share:
        return None
    low, high = 1, 2
    while high <= MAX_ROBOTS and (result := at(high)).in_time >= share:
        best, low, high = result, high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        if (result := at(middle)).in_time >= share:
            best, low = result, middle
        else:
            high = middle
    return best


@dataclass(frozen=True, slots=True)
class Shortfall:
    """The reason why not even one robot is answered in time.

    Attributes:
        text: The reason.
        hertz: Nearest request rate that works for a single robot, per second.
        deadline_s: Nearest deadline that works for a single robot, in seconds.
    """

    text: str
    hertz: float
    deadline_s: float


def shortfall(alone_s: float, *, hertz: float, deadline_s: float, overhead_s: float = 0.0) -> Shortfall:
    """Explain why one robot is not answered in time.

    Args:
        alone_s: Time of one inference, in seconds.
        hertz: Requests per second of the robot.
        deadline_s: Maximum time from frame to answer, in seconds.
        overhead_s: Time of a request outside of the inference, in seconds.

    Returns:
        The reason, and a rate and a deadline that work.
    """
    took = alone_s + overhead_s
    missed = []
    if took > deadline_s:
        missed.append(f"more than the deadline of {1e3 * deadline_s:.4g} ms")
    if took > 1 / hertz:
        missed.append(f"more than the {1e3 / hertz:.4g} ms between two requests at {hertz:g} Hz")
    text = f"one answer takes {1e3 * took:.4g} ms, {' and '.join(missed) or 'which leaves no reserve'}"
    # Add 5 %, because not all answers take the same time.
    milliseconds = math.ceil(1.05e3 * took)
    rate = 1e3 / milliseconds
    # Round the rate down to two digits.
    step = 10.0 ** (math.floor(math.log10(rate)) - 1)
    rate = float(f"{math.floor(rate / step * (1 + 1e-9)) * step:.12g}")
    return Shortfall(text, min(hertz, rate), max(deadline_s, milliseconds / 1e3))


def between(measured: Mapping[int, float]) -> Callable[[int], float]:
    """Return a function that interpolates the seconds of a batch between measured sizes. Beyond the largest size,
    the time is proportional to the size.
    """
    sizes: Sequence[int] = sorted(measured)

    def seconds(size: int) -> float:
        if size > sizes[-1]:
            return measured[sizes[-1]] * size / sizes[-1]
        return float(np.interp(size, sizes, [measured[each] for each in sizes]))

    return seconds


def _never(*_: object) -> Any:
    raise AssertionError("the simulation of a batcher never computes an answer")


def measured(source: str, threads: int | None, engine: str, sizes: Sequence[int]) -> dict[int, float]:
    """Measure the time of batches of a policy on this machine.

    Args:
        source: The policy.
        threads: Number of compute threads. None for the engine's choice.
        engine: The engine.
        sizes: Sizes of the batches.

    Returns:
        The seconds of an inference, by the size of its batch.

    Raises:
        SinewError: The policy cannot compute several requests in one batch.
    """
    from sinew.policy import load
    from sinew.serve.batching import time_batches

    policy = load(source, engine=engine, threads=threads)
    policy.warm_up()
    if policy.unbatched:
        raise SinewError(policy.unbatched)
    return time_batches(policy, sizes)
