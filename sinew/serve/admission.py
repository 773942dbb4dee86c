"""The list of waiting requests of a scheduler, and the choice of requests to reject if the queue is full.

The scheduler's lock must be held for every call of this module.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence

from sinew.core import BusyError
from sinew.serve.job import RequestGroup, ServingJob


class Admission:
    """Admits requests to a queue with a limited number of places. The requests of one message take one place.

    Args:
        size: Number of places.
        per_client: Largest number of places of one client.

    Attributes:
        count: Number of taken places.
    """

    def __init__(self, size: int, per_client: int):
        self.size, self.per_client = size, per_client
        self.count = 0
        self._waiting: dict[Hashable, list[ServingJob]] = {}  # client -> its waiting requests
        # The waiting request of each session.
        self.newest: dict[Hashable | None, ServingJob] = {}
        # Key: a message with several observations. Value: the number of its waiting requests.
        self._members: Counter[RequestGroup] = Counter()

    def __iter__(self) -> Iterator[ServingJob]:
        return (job for jobs in self._waiting.values() for job in jobs)

    def room(self, job: ServingJob) -> list[ServingJob]:
        """Choose the waiting requests that are rejected so that a new request gets a place in the queue.

        Returns:
            The requests to reject; [] while the queue has free places.

        Raises:
            BusyError: The new request must be rejected.
        """
        if job.together in self._members:
            return []
        client = job.connection
        mine = len(_places(self._waiting[client])) if client in self._waiting else 0
        if client is not None and mine >= self.per_client:
            raise BusyError(
                f"{mine} requests of this client wait, which is the limit; wait for an answer before the next request"
            )
        if self.count < self.size:
            return []
        most = max(map(_places, self._waiting.values()), key=len)
        if client is None or mine or len(most) < 2:
            raise BusyError(f"the queue is full: {self.count} requests wait; try again later")
        return most[-1]

    def enter(self, job: ServingJob) -> None:
        if job.episode is not None:
            self.newest[job.episode] = job
        self._waiting.setdefault(job.connection, []).append(job)
        if job.together is None:
            self.count += 1
        else:
            self.count += job.together not in self._members
            self._members[job.together] += 1

    def leave(self, job: ServingJob) -> bool:
        """Remove a request from the list of waiting requests. Return False if the request was not waiting."""
        if not job.waiting:
            return False
        job.waiting = False
        jobs = self._waiting[job.connection]
        jobs.remove(job)
        if not jobs:
            del self._waiting[job.connection]
        if self.newest.get(job.episode) is job:
            del self.newest[job.episode]
        if job.together is not None:
            self._members[job.together] -= 1
            if self._members[job.together]:
                return True
            del self._members[job.together]
        self.count -= 1
        return True


def _places(jobs: Sequence[ServingJob]) -> list[list[ServingJob]]:
    """Group the waiting requests of one client by their places in the queue. The requests of one message share a place.

    Args:
        jobs: The waiting requests of the client.
    """
    places: dict[object, list[ServingJob]] = {}
    for job in jobs:
        places.setdefault(job.together or job, []).append(job)
    return list(places.values())
