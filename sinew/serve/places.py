"""Who waits in a scheduler's queue, and who has to go when it is full. Guarded by the scheduler's lock."""

from __future__ import annotations

from collections.abc import Hashable, Iterator

from sinew.core import BusyError
from sinew.serve.request import Job


class Places:
    """size: jobs that may wait. per_client: of one client. ``count``: that do."""

    def __init__(self, size: int, per_client: int):
        self.size, self.per_client = size, per_client
        self.count = 0
        self._waiting: dict[Hashable, list[Job]] = {}  # by client
        self._newest: dict[Hashable, Job] = {}  # the waiting job of each session that has one

    def __iter__(self) -> Iterator[Job]:
        return (job for jobs in self._waiting.values() for job in jobs)

    def newest(self, session: Hashable | None) -> Job | None:
        """Return the waiting job of a session, which a newer one replaces."""
        return None if session is None else self._newest.get(session)

    def room(self, client: Hashable | None) -> Job | None:
        """Return the job that has to go for a new one of this client, None while there is room. Raises BusyError."""
        mine = len(self._waiting.get(client, ()))
        if client is not None and mine >= self.per_client:
            raise BusyError(f"{mine} requests of this client wait, and no client may have more")
        if self.count < self.size:
            return None
        most = max(self._waiting.values(), key=len)
        if client is None or mine or len(most) < 2:
            raise BusyError(f"the queue is full: {self.count} requests wait")
        return most[-1]

    def enter(self, job: Job) -> None:
        """Count a job in."""
        if job.session is not None:
            self._newest[job.session] = job
        self._waiting.setdefault(job.client, []).append(job)
        self.count += 1

    def leave(self, job: Job) -> bool:
        """Count a job out; False if it was not among those that wait."""
        if not job.waiting:
            return False
        job.waiting = False
        self.count -= 1
        jobs = self._waiting[job.client]
        jobs.remove(job)
        if not jobs:
            del self._waiting[job.client]
        if self._newest.get(job.session) is job:
            del self._newest[job.session]
        return True
