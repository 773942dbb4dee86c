"""Chooses the requests that are computed together, from the measured cost of a batch and the requests' deadlines.

A batch delays its first member and ends earlier for its last member, compared with single inferences in a row.
So two criteria compare the batch sizes. A size is excluded if a request misses a deadline that it would meet
with single inferences. Among the other sizes, the one with the smallest total waiting time of all requests is
used. No request waits for others to arrive. Clipper (Crankshaw et al. 2017) increases its batches until a
latency limit is exceeded. Clockwork (Gujarati et al. 2020) plans with measured times per size, as this module
does.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from sinew.core import SinewError, machine
from sinew.serve.job import ServingJob
from sinew.serve.served import ServedPolicy

LARGEST = 16  # largest batch that "auto" tries
# Smallest ratio of the best batch's throughput to the throughput of single requests. With a smaller ratio, "auto"
# computes no batches.
GAIN = 1.1
GROWTH = 1.05  # "auto" doubles the batch size while the throughput grows by at least this factor
TRIALS = 3  # number of measurements of each size, before serving begins
LONGEST_S = 2.0  # seconds; "auto" tries no larger batch after a batch that takes longer
OLD_S = 60.0  # seconds after which a measured cost is outdated and is measured again
# While other clients are active, a batch costs at most this multiple of one observation. A robot may wait for such a
# batch (1.25) and then for its own inference (1). The sum, 2.25, is close to the factor 2 of SECURITY.md.
CROWDED = 1.25
# Largest number of batch kinds whose costs are stored. It is limited because clients choose a part of the kind, the
# number of solver steps.
MAX_KEYS = 512
MIX = 0.2  # weight of the newest measurement in the running mean


@dataclass(slots=True)
class _Cost:
    mean: float  # seconds
    deviation: float
    at: float  # time.monotonic() of the newest measurement


class Costs:
    """The measured seconds of earlier batches, for each kind and size of a batch. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kinds: OrderedDict[Hashable, dict[int, _Cost]] = OrderedDict()

    def learn(self, kind: Hashable, size: int, seconds: float) -> None:
        """Update the cost of a kind of batch with a measurement.

        Args:
            kind: Kind of the batch. Batches of one kind and one size take about the same time.
            size: Number of observations in the batch.
            seconds: The measured time.
        """
        with self._lock:
            self._learn(kind, size, seconds)

    def _learn(self, kind: Hashable, size: int, seconds: float) -> None:
        sizes = self._kinds.setdefault(kind, {})
        self._kinds.move_to_end(kind)
        while len(self._kinds) > MAX_KEYS:
            self._kinds.popitem(last=False)
        cost = sizes.get(size)
        if cost is None:
            sizes[size] = _Cost(seconds, 0.0, time.monotonic())
            return
        error = seconds - cost.mean
        cost.mean += MIX * error
        cost.deviation += MIX * (abs(error) - cost.deviation)
        cost.at = time.monotonic()

    def measured(self, kind: Hashable, size: int) -> bool:
        """Return True if batches of this kind and size were measured in the last ``OLD_S`` seconds.

        Args:
            kind: Kind of the batch, as in :meth:`learn`.
            size: Number of observations in the batch.
        """
        cost = self._kinds.get(kind, {}).get(size)
        return cost is not None and time.monotonic() - cost.at < OLD_S

    def seconds(self, kind: Hashable, size: int) -> float | None:
        """Return the mean time of a batch; None if no batch of its kind was measured.

        Sizes between two measured sizes are interpolated. A batch larger than all measured sizes is assumed to cost as
        much per member as the largest, which is close to the upper bound. A smaller batch is assumed to cost as much
        as the smallest.
        """
        return self._estimate(kind, size, 0.0)

    def surely(self, kind: Hashable, size: int) -> float | None:
        """Return a time that a batch seldom exceeds: the mean of the measured times plus twice their deviation.
        Deadlines are checked with this time.

        Args:
            kind: Kind of the batch.
            size: Number of observations in the batch.

        Returns:
            Seconds; None if no batch of this kind was measured.
        """
        return self._estimate(kind, size, 2.0)

    def _estimate(self, kind: Hashable, size: int, spread: float) -> float | None:
        with self._lock:
            if not (sizes := self._kinds.get(kind)):
                return None
            times = {n: cost.mean + spread * cost.deviation for n, cost in sizes.items()}
        low = max((n for n in times if n <= size), default=None)
        high = min((n for n in times if n >= size), default=None)
        if low is None:
            return times[high] if high is not None else None
        if high is None:
            return times[low] * size / low
        if low == high:
            return times[low]
        return times[low] + (times[high] - times[low]) * (size - low) / (high - low)


def time_batches(policy: ServedPolicy, sizes: Sequence[int]) -> dict[int, float]:
    """Measure the time of batches whose members are all the policy's artificial observation (``dummy_observation``).

    Args:
        policy: The policy.
        sizes: The batch sizes.

    Returns:
        Size -> shortest of a few measured times, seconds.
    """
    prepared = policy.prepare(policy.dummy_observation())
    best = {}
    for size in sizes:
        times: list[float] = []
        # Run one trial more, because the first trial also allocates memory.
        for _ in range(1 + TRIALS):
            start = time.perf_counter()
            policy.run_batch([prepared] * size)
            times.append(time.perf_counter() - start)
            if times[-1] > LONGEST_S:
                break
        best[size] = min(times)
    return best


class Batcher:
    """Decides how many and which requests are computed together in a batch.

    Args:
        limit: Largest number of members of a batch; None measures the best limit (``auto``).
        costs: The measured costs.
    """

    def __init__(self, limit: int | None, costs: Costs | None = None):
        self.limit = limit or LARGEST
        self._auto = limit is None
        self.reason = "asked for"
        self.busy = ""  # other programs that used the machine while batches were timed
        self.costs = costs or Costs()

    def calibrate(self, policy: ServedPolicy) -> None:
        """Measure the time of batches with 1, 2, 4 ... members, to find the best largest size, and prepare the policy
        for batches of up to this size. All members are the policy's artificial observation. Call this on the thread
        that will run the policy.

        Raises:
            SinewError: A batch size was requested, but the policy computes one observation at a time.
        """
        if policy.unbatched:
            if not self._auto:
                raise SinewError(f"--max-batch {self.limit}: {policy.unbatched}")
            self.limit, self.reason = 1, policy.unbatched
            return
        self.busy = machine.busy()
        kind = policy.batch_key(policy.prepare(policy.dummy_observation()))
        times, best, size = time_batches(policy, [1]), 1, 2
        while size <= self.limit and times[best] <= LONGEST_S:
            times |= time_batches(policy, [size])
            if size / times[size] < GROWTH * best / times[best]:
                break
            best, size = size, 2 * size
        for size, seconds in times.items():
            self.costs.learn(kind, size, seconds)
        pays = best if best / times[best] >= GAIN / times[1] else 1
        if self._auto:
            self.limit = pays
        self.reason = self._sentence(times, pays)
        if self.limit > 1:
            policy.warm_batches(self.limit)

    def _sentence(self, seconds_by_size: dict[int, float], pays: int) -> str:
        """Return a sentence with the measured times of the batch sizes and the resulting gain of throughput."""
        times = ", ".join(f"{size}: {1e3 * seconds:.1f} ms" for size, seconds in seconds_by_size.items())
        gain = pays / seconds_by_size[pays] * seconds_by_size[1]
        words = (
            f"{gain:.2f} times the throughput at {pays}"
            if pays > 1
            else "a batch is no faster than its members one by one"
        )
        note = f" ({self.busy}; restart on an idle machine, or pass --max-batch NUMBER)" if self.busy else ""
        return f"measured {times}; {words}{note}"

    def describe(self) -> dict[str, Any]:
        """Return the largest batch size and the reason for this size, ready for JSON."""
        return {"max_batch": self.limit, "max_batch_reason": self.reason}

    def members(
        self,
        first: ServingJob,
        waiting: Sequence[ServingJob],
        now: float,
        beside: Sequence[ServingJob] = (),
        crowded: bool = False,
    ) -> list[ServingJob]:
        """Choose the requests to compute together: ``first``, then others in the order of their turns.

        If ``first`` belongs to a message with several observations, only observations of this message are computed
        with it.

        Args:
            first: The request whose turn it is.
            waiting: Other ready requests, in the order of their turns.
            now: The present time.
            beside: Requests of other policies, whose turn comes after this inference. Each of these requests is
                assumed to cost as much as ``first``, and its deadline counts.
            crowded: True if other clients are active. A batch then costs at most ``CROWDED`` times as much as one
                member.
        """
        kind = first.kind
        if first.together is not None and kind is not None:
            own = [each for each in waiting if each.together is first.together and each.kind == kind]
            fit = [first, *(each for each in own if not _hopeless(each, now))][: self.limit]
            return fit[: self._most_beside_others(kind, len(fit))] if crowded else fit
        alone = self.costs.surely(kind, 1)
        if kind is None or alone is None:
            return [first]
        line = [first, *waiting]
        fit = [
            each for each in line if each.kind == kind and each.together is None and not _hopeless(each, now)
        ][: self.limit]
        best, least = [first], self._sum(line, [first])
        for size in range(2, len(fit) + 1):
            chosen = fit[:size]
            if self._breaks([first, *beside, *waiting], chosen, now):
                continue
            # Choose a batch without a recent cost, because computing the batch measures its cost.
            if not self.costs.measured(kind, size):
                return chosen
            waited = self._sum(line, chosen)
            if waited <= least:
                best, least = chosen, waited
        return best

    def _most_beside_others(self, kind: Hashable, count: int) -> int:
        """Return the number of observations that are computed together while other clients are active, out of ``count``
        observations of one message.

        The size doubles while a batch costs little more than one observation. A size without a recent cost is tried
        once.
        """
        alone, most = self.costs.seconds(kind, 1), 1
        while alone is not None and most < count:
            size = min(2 * most, count)
            if not self.costs.measured(kind, size):
                return size
            if (self.costs.seconds(kind, size) or 0.0) > CROWDED * alone:
                break
            most = size
        return most

    def _alone(self, job: ServingJob, first: ServingJob) -> float:
        """Return the seconds that a request takes if it is computed without other requests; 0 if no cost is known.

        Args:
            job: The request.
            first: Request whose kind is used if the kind of ``job`` was not measured yet.
        """
        return self.costs.surely(job.kind, 1) or self.costs.surely(first.kind, 1) or 0.0

    def _breaks(self, line: Sequence[ServingJob], chosen: Sequence[ServingJob], now: float) -> bool:
        """Return True if the batch makes a request miss its deadline.

        Args:
            line: The ready requests, in the order of their turns.
            chosen: The requests of the batch.
            now: The present time.

        Returns:
            True if at least one request would miss its deadline with the batch, but would meet it if all
            requests are computed one after another.
        """
        together = self.costs.surely(line[0].kind, len(chosen)) or 0.0
        alone = 0.0  # seconds until the end of each request, if all requests are computed one after another
        behind = together  # seconds until the end of each request that is computed after the batch
        members = set(map(id, chosen))
        for job in line:
            own = self._alone(job, line[0])
            alone += own
            end = together if id(job) in members else behind + own
            behind = behind if id(job) in members else end
            if job.deadline is not None and now + alone <= job.deadline < now + end:
                return True
        return False

    def _sum(self, line: Sequence[ServingJob], chosen: Sequence[ServingJob]) -> float:
        """Return the sum of the waiting times of all requests in ``line``, if the requests in ``chosen`` are computed
        first, together in one batch.
        """
        kind = line[0].kind
        end = self.costs.seconds(kind, len(chosen)) or 0.0
        waited = end * len(chosen)
        members = set(map(id, chosen))
        for job in line:
            if id(job) not in members:
                end += self.costs.seconds(job.kind, 1) or self.costs.seconds(kind, 1) or 0.0
                waited += end
        return waited


def _hopeless(job: ServingJob, now: float) -> bool:
    """Return True if the request will certainly get an error when its turn comes, for example because its deadline has
    passed.
    """
    return job.cancel.is_set() or (job.deadline is not None and now > job.deadline)


class AllCancelled(threading.Event):
    """An event that counts as set when every request of a batch is cancelled. While it is not set, at least one client
    waits for the batch.
    """

    def __init__(self, jobs: Sequence[ServingJob]):
        super().__init__()
        self._requests = jobs

    def is_set(self) -> bool:
        return all(job.cancel.is_set() for job in self._requests)
