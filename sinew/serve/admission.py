"""Who waits in a scheduler's queue, and who has to go when it is full. Guarded by the scheduler's lock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence

from sinew.core import BusyError
from sinew.serve.request import Request, Together


class Admission:
    """size: places of those that wait. per_client: of one client. ``count``: that are taken. The requests of one
    message have one place."""

    def __init__(self, size: int, per_client: int):
        self.size, self.per_client = size, per_client
        self.count = 0
        self._waiting: dict[Hashable, list[Request]] = {}  # by client
        self.newest: dict[Hashable | None, Request] = {}  # the waiting request of each session
        self._members: Counter[Together] = Counter()  # that wait, of each message of several

    def __iter__(self) -> Iterator[Request]:
        return (request for requests in self._waiting.values() for request in requests)

    def room(self, request: Request) -> list[Request]:
        """Return the requests that go for a new one, none while there is room. Raises BusyError."""
        if request.together in self._members:
            return []
        client = request.connection
        mine = len(_places(self._waiting[client])) if client in self._waiting else 0
        if client is not None and mine >= self.per_client:
            raise BusyError(f"{mine} requests of this client wait, and no client may have more")
        if self.count < self.size:
            return []
        most = max(map(_places, self._waiting.values()), key=len)
        if client is None or mine or len(most) < 2:
            raise BusyError(f"the queue is full: {self.count} requests wait")
        return most[-1]

    def enter(self, request: Request) -> None:
        if request.episode is not None:
            self.newest[request.episode] = request
        self._waiting.setdefault(request.connection, []).append(request)
        if request.together is None:
            self.count += 1
        else:
            self.count += request.together not in self._members
            self._members[request.together] += 1

    def leave(self, request: Request) -> bool:
        """Count a request out; False if it was not among those that wait."""
        if not request.waiting:
            return False
        request.waiting = False
        requests = self._waiting[request.connection]
        requests.remove(request)
        if not requests:
            del self._waiting[request.connection]
        if self.newest.get(request.episode) is request:
            del self.newest[request.episode]
        if request.together is not None:
            self._members[request.together] -= 1
            if self._members[request.together]:
                return True
            del self._members[request.together]
        self.count -= 1
        return True


def _places(requests: Sequence[Request]) -> list[list[Request]]:
    """Return a client's waiting requests by the places that they take, in their order."""
    found: dict[object, list[Request]] = {}
    for request in requests:
        found.setdefault(request.together or request, []).append(request)
    return list(found.values())
