"""Which waiting requests are computed at once: by what a batch costs here, and by when each of them is wanted.

A batch of n ends later than its first member alone would have, and sooner than its last. Sizes are compared by two
questions about everything that waits: does a deadline break that would have held with one request after another (then
the size is out), and how long do all of them wait together (the size with the smallest sum is taken). No request waits
for others to arrive. Clipper (Crankshaw et al. 2017) grows its batches until a latency bound breaks, and Clockwork
(Gujarati et al. 2020) plans by measured times per size, as here.
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
GAIN = 1.1  # "auto" wants so many times the throughput, or leaves it off
GROWTH = 1.05  # and so much of each doubling
TRIALS = 3  # measurements of each size, before serving begins
LONGEST_S = 2.0  # a size that takes longer is not tried further
OLD_S = 60.0  # a cost that was not measured for so long is measured again when it may be
# Beside other clients, a batch of one message costs at most so many times as much as one of its observations. A robot
# waits for such a batch and then for its own inference. The sum, 2.25, is near the 2 times of SECURITY.md.
CROWDED = 1.25
MAX_KEYS = 512  # kinds of batches whose costs are remembered: numbers of steps come from clients
MIX = 0.2  # weight of the newest measurement


@dataclass(slots=True)
class _Cost:
    mean: float  # seconds
    deviation: float
    at: float  # time.monotonic() of the newest measurement


class Costs:
    """Seconds of a batch by its kind and size, learnt from what was run. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kinds: OrderedDict[Hashable, dict[int, _Cost]] = OrderedDict()

    def learn(self, kind: Hashable, size: int, seconds: float) -> None:
        """Mix a measurement into what is known of this kind and size."""
        with self._lock:
            self._learn(kind, size, seconds)

    def _learn(self, kind: Hashable, size: int, seconds: float) -> None:
        sizes = self._kinds.setdefault(kind, {})
        self._kinds.move_to_end(kind)
        while len(self._kinds) > MAX_KEYS:
            self._kinds.popitem(last=False)
        known = sizes.get(size)
        if known is None:
            sizes[size] = _Cost(seconds, 0.0, time.monotonic())
            return
        error = seconds - known.mean
        known.mean += MIX * error
        known.deviation += MIX * (abs(error) - known.deviation)
        known.at = time.monotonic()

    def measured(self, kind: Hashable, size: int) -> bool:
        """Return whether this size was measured, and not long ago."""
        known = self._kinds.get(kind, {}).get(size)
        return known is not None and time.monotonic() - known.at < OLD_S

    def seconds(self, kind: Hashable, size: int) -> float | None:
        """Return the mean time of a batch; None if nothing of its kind was measured.

        Sizes between measured ones are interpolated. A larger batch costs its members one by one, which is close to
        the upper bound. A smaller one costs at most as much as the larger one.
        """
        return self._estimate(kind, size, 0.0)

    def surely(self, kind: Hashable, size: int) -> float | None:
        """Return a time that is seldom exceeded, for what concerns deadlines: the mean and twice its deviation."""
        return self._estimate(kind, size, 2.0)

    def _estimate(self, kind: Hashable, size: int, spread: float) -> float | None:
        with self._lock:
            if not (sizes := self._kinds.get(kind)):
                return None
            known = {n: cost.mean + spread * cost.deviation for n, cost in sizes.items()}
        low = max((n for n in known if n <= size), default=None)
        high = min((n for n in known if n >= size), default=None)
        if low is None:
            return known[high] if high is not None else None
        if high is None:
            return known[low] * size / low
        if low == high:
            return known[low]
        return known[low] + (known[high] - known[low]) * (size - low) / (high - low)


def time_batches(policy: ServedPolicy, sizes: Sequence[int]) -> dict[int, float]:
    """Return the seconds of batches of the policy's own observation, the best of a few trials of each size."""
    prepared = policy.prepare(policy.dummy_observation())
    found = {}
    for size in sizes:
        times: list[float] = []
        for _ in range(1 + TRIALS):  # the first of them allocates
            start = time.perf_counter()
            policy.run_batch([prepared] * size)
            times.append(time.perf_counter() - start)
            if times[-1] > LONGEST_S:
                break
        found[size] = min(times)
    return found


class Batcher:
    """Decides sizes and members. limit: most members of a batch; None measures what pays (``auto``)."""

    def __init__(self, limit: int | None, costs: Costs | None = None):
        self.limit = limit or LARGEST
        self._auto = limit is None
        self.reason = "asked for"
        self.busy = ""  # what else computed while batches were timed
        self.costs = costs or Costs()

    def calibrate(self, policy: ServedPolicy) -> None:
        """Measure batches of 1, 2, 4 ... of the policy's own observation, on the thread that will run them.

        Raises :class:`SinewError` for a policy that computes one observation at a time, where batches were asked for.
        """
        if policy.unbatched:
            if not self._auto:
                raise SinewError(f"--max-batch {self.limit}: {policy.unbatched}")
            self.limit, self.reason = 1, policy.unbatched
            return
        self.busy = machine.busy()
        kind = policy.batch_key(policy.prepare(policy.dummy_observation()))
        found, best, size = time_batches(policy, [1]), 1, 2
        while size <= self.limit and found[best] <= LONGEST_S:
            found |= time_batches(policy, [size])
            if size / found[size] < GROWTH * best / found[best]:
                break
            best, size = size, 2 * size
        for size, seconds in found.items():
            self.costs.learn(kind, size, seconds)
        pays = best if best / found[best] >= GAIN / found[1] else 1
        if self._auto:
            self.limit = pays
        self.reason = self._sentence(found, pays)

    def _sentence(self, found: dict[int, float], pays: int) -> str:
        """Return the measurement in words."""
        times = ", ".join(f"{size}: {1e3 * seconds:.1f} ms" for size, seconds in found.items())
        gain = pays / found[pays] * found[1]
        words = (
            f"{gain:.2f} times the throughput at {pays}"
            if pays > 1
            else "a batch is no faster than its members one by one"
        )
        note = f" ({self.busy}; restart when idle, or name a number)" if self.busy else ""
        return f"measured {times}; {words}{note}"

    def describe(self) -> dict[str, Any]:
        """Return the largest batch and why, ready for JSON."""
        return {"max_batch": self.limit, "max_batch_reason": self.reason}

    def members(
        self,
        first: ServingJob,
        waiting: Sequence[ServingJob],
        now: float,
        beside: Sequence[ServingJob] = (),
        crowded: bool = False,
    ) -> list[ServingJob]:
        """Return the requests to compute together, with ``first`` before the others in the order of their turns.

        Of one message, all observations that fit are computed together, without other requests.

        Args:
            first: The request whose turn it is.
            waiting: Other ready requests, in the order of their turns.
            now: The present time.
            beside: Requests of other policies, whose turn comes after this inference. They are assumed to cost as
                much as ``first``, and their deadlines count.
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
            if not self.costs.measured(kind, size):  # what it costs is found out by doing it
                return chosen
            waited = self._sum(line, chosen)
            if waited <= least:
                best, least = chosen, waited
        return best

    def _most_beside_others(self, kind: Hashable, count: int) -> int:
        """Return how many of ``count`` observations of one message are computed together beside other clients.

        Sizes double while they cost little more than one observation. A size without a recent cost is tried once.
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
        """Return the seconds of a request by itself, as far as its kind is known."""
        return self.costs.surely(job.kind, 1) or self.costs.surely(first.kind, 1) or 0.0

    def _breaks(self, line: Sequence[ServingJob], chosen: Sequence[ServingJob], now: float) -> bool:
        """Return whether a deadline breaks with the batch that holds with one request after another."""
        together = self.costs.surely(line[0].kind, len(chosen)) or 0.0
        alone = 0.0  # when each would end, one after another
        behind = together  # and when what is not in the batch would
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
        """Return the total waiting time of all requests of ``line`` if ``chosen`` are computed together, first."""
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
    """Return whether the request is answered with an error when its turn comes."""
    return job.cancel.is_set() or (job.deadline is not None and now > job.deadline)


class AllCancelled(threading.Event):
    """An event that is set when every member of a batch is cancelled. Before that, at least one client waits."""

    def __init__(self, jobs: Sequence[ServingJob]):
        super().__init__()
        self._requests = jobs

    def is_set(self) -> bool:
        return all(job.cancel.is_set() for job in self._requests)
