"""What the connections of one server hold: how many there are, how much memory, since when.

One request is bounded by its reader. A crowd of unfinished ones, each within those bounds, is bounded here, for every
transport that sees its connections. It is accounting alone: no sockets, and one thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Generic, TypeVar

from sinew.core.rate_limited_log import RateLimitedLog

logger = logging.getLogger(__name__)

HELD_REQUESTS = 8  # memory of all unanswered requests, in requests of the largest size
STRANGERS_SHARE = 4  # a part of that for those that never sent a request that was taken: one in so many
# A full server closes connections that are silent for so long and have never sent a valid request
STRANGER_IDLE_S = 1.0
IDLE_S = 60.0  # then those that have sent one and are silent for this long
SWEEP_S = 0.5  # seconds between two checks for slow connections


class Account:
    """What one connection holds.

    since: when the request (or handshake) that is arriving began; None between requests.
    arriving: bytes of it. waiting: bytes of whole requests that are not answered. kept: bytes that outlive the answers,
        such as the frames of earlier steps and of streams.
    proven: a request of it has been taken (authorised, where the server has a key). heard: when it last sent.
    """

    __slots__ = ("arriving", "heard", "kept", "proven", "since", "waiting")

    def __init__(self, now: float):
        self.since: float | None = now
        self.heard = now
        self.arriving = 0
        self.waiting = 0
        self.kept = 0
        self.proven = False

    @property
    def held(self) -> int:
        return self.arriving + self.waiting + self.kept


A = TypeVar("A", bound=Account)  # as a transport has them


class MemoryLedger(Generic[A]):
    """limit: connections at once. limit_bytes: received and not yet answered, and kept between requests, of all of them
    together; beyond it the connection that holds most is closed, so that the ones with ordinary requests go on.
    limit_s: for one request to arrive.

    close: ends a connection; it must call ``forget``.
    """

    def __init__(
        self, name: str, limit: int, limit_bytes: int, close: Callable[[A, str], None], limit_s: float
    ):
        self.name = name
        self.limit = limit
        self.limit_bytes = limit_bytes
        self.limit_s = limit_s
        self.open: set[A] = set()
        self.held = 0
        self.strangers_held = 0
        self._close = close
        self._quiet = RateLimitedLog(logger)

    def admit(self, account: A, now: float) -> bool:
        """Count a new connection in, in place of an idle one if the server is full. False: there is no place."""
        if len(self.open) >= self.limit and not self._make_place(now):
            self._quiet.warning("%s: a connection was refused: %d are open", self.name, len(self.open))
            return False
        self.open.add(account)
        return True

    def arrived(self, account: A, size: int, now: float) -> None:
        """So many bytes of a request are there. May close connections, also this one."""
        if account.since is None:
            account.since = now
        account.heard = now
        account.arriving += size
        self._count(account, size)
        if size > 0:
            self._make_room()

    def whole(self, account: A) -> int:
        """The request that was arriving is there. Returns its bytes, for ``answered``."""
        size, account.arriving, account.since = account.arriving, 0, None
        account.waiting += size
        return size

    def answered(self, account: A, size: int) -> None:
        account.waiting -= size
        self._count(account, -size)

    def keep(self, account: A, size: int) -> None:
        """The connection keeps so many bytes from now on. May close connections, also this one."""
        more = size - account.kept
        self._count(account, more)
        account.kept = size
        if more > 0:
            self._make_room()

    def prove(self, account: A) -> None:
        """A request of this connection was taken."""
        if not account.proven:
            if account in self.open:
                self.strangers_held -= account.held
            account.proven = True

    def forget(self, account: A) -> None:
        if account in self.open:
            self._count(account, -account.held)
            self.open.discard(account)

    def sweep(self, now: float) -> None:
        """Close what has taken too long."""
        for each in [each for each in self.open if each.since is not None and not each.waiting]:
            assert each.since is not None
            if now - each.since > self.limit_s:
                self._close(each, f"no whole request within {self.limit_s:g} s")

    # ------------------------------------------------------------------------- parts

    def _count(self, account: A, size: int) -> None:
        if account in self.open:
            self.held += size
            if not account.proven:
                self.strangers_held += size

    def _make_room(self) -> None:
        while self.strangers_held > self.limit_bytes // STRANGERS_SHARE:
            greatest = max((each for each in self.open if not each.proven), key=lambda each: each.held)
            self._close(
                greatest, "connections without an accepted request take more memory than the server allows"
            )
        while self.held > self.limit_bytes:
            greatest = max(self.open, key=lambda each: each.held)
            self._close(greatest, "the connections take more memory than the server allows")

    def _make_place(self, now: float) -> bool:
        """Close the connection that has been silent for longest, strangers first."""
        for proven, idle_s in ((False, STRANGER_IDLE_S), (True, IDLE_S)):
            idle = [
                each
                for each in self.open
                if each.proven == proven and not each.waiting and now - each.heard > idle_s
            ]
            if idle:
                self._close(min(idle, key=lambda each: each.heard), "it was idle, and the server is full")
                return True
        return False
