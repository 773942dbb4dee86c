"""Counts the connections of a server: their number, their memory, and the times of their requests.

The reader of a request limits the size of this one request. This module limits the memory of many unfinished requests
together, for every transport. The module only counts, and uses no sockets. Only one thread may use a ledger (the
object that has all counts).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Generic, TypeVar

from sinew.core.rate_limited_log import RateLimitedLog

logger = logging.getLogger(__name__)

# Memory for all unanswered requests together, as a multiple of the largest request.
HELD_REQUESTS = 8
# A stranger is a connection from which the server has not accepted a request yet. All strangers together may use one
# part in STRANGERS_SHARE of the memory.
STRANGERS_SHARE = 4
STRANGER_IDLE_S = 1.0  # seconds of silence after which a full server closes a stranger
IDLE_S = 60.0  # seconds of silence after which a full server closes any other connection
SWEEP_S = 0.5  # seconds between two checks for slow connections


class Account:
    """The memory and the times of one connection.

    Attributes:
        since: The time at which the arriving request (or handshake) began; None between requests.
        arriving: Bytes of the arriving request.
        waiting: Bytes of complete requests that are not answered yet.
        kept_bytes: Bytes that outlive the answers, such as the frames of earlier steps and of streams.
        proven: True once a request of this connection was accepted (and authorised, if the server has a key).
        heard: The time at which the connection last sent bytes.
    """

    __slots__ = ("arriving", "heard", "kept_bytes", "proven", "since", "waiting")

    def __init__(self, now: float):
        self.since: float | None = now
        self.heard = now
        self.arriving = 0
        self.waiting = 0
        self.kept_bytes = 0
        self.proven = False

    @property
    def held_bytes(self) -> int:
        return self.arriving + self.waiting + self.kept_bytes


A = TypeVar("A", bound=Account)  # the transport's own class of accounts


class MemoryLedger(Generic[A]):
    """The memory and the times of all connections of a server, with their limits.

    Args:
        name: The server's name, for messages.
        limit: Largest number of open connections.
        limit_bytes: Largest number of bytes of all connections together: requests without an answer, and bytes that
            are stored between requests. Above this limit, the connection with the most bytes is closed, so that
            connections with ordinary requests continue.
        close: Function that ends a connection. The function must call ``forget``.
        limit_s: Longest time for one request to arrive, seconds.
    """

    def __init__(
        self, name: str, limit: int, limit_bytes: int, close: Callable[[A, str], None], limit_s: float
    ):
        self.name = name
        self.limit = limit
        self.limit_bytes = limit_bytes
        self.limit_s = limit_s
        self.open: set[A] = set()
        self.held_bytes = 0
        self.strangers_held = 0
        self._close = close
        self._quiet = RateLimitedLog(logger)

    def admit(self, account: A, now: float) -> bool:
        """Add a new connection. If the server is full, an idle connection is closed first. Return False if the server
        is full and no connection is idle."""
        if len(self.open) >= self.limit and not self._make_place(now):
            self._quiet.warning(
                "%s: a connection was rejected, because %d are open, which is the limit",
                self.name,
                len(self.open),
            )
            return False
        self.open.add(account)
        return True

    def arrived(self, account: A, size: int, now: float) -> None:
        """Count ``size`` more bytes of the arriving request. The ledger may close connections, also this
        connection.
        """
        if account.since is None:
            account.since = now
        account.heard = now
        account.arriving += size
        self._count(account, size)
        if size > 0:
            self._make_room()

    def whole(self, account: A) -> int:
        """Count the arriving request as complete. Return its number of bytes, for the later call of ``answered``."""
        size, account.arriving, account.since = account.arriving, 0, None
        account.waiting += size
        return size

    def answered(self, account: A, size: int) -> None:
        account.waiting -= size
        self._count(account, -size)

    def keep(self, account: A, size: int) -> None:
        """Count ``size`` bytes that the connection stores from now on. The ledger may close connections, also this
        connection.
        """
        more = size - account.kept_bytes
        self._count(account, more)
        account.kept_bytes = size
        if more > 0:
            self._make_room()

    def prove(self, account: A) -> None:
        """Mark the connection as trusted, because the server has accepted one of its requests. Its memory then has
        the larger limit.
        """
        if not account.proven:
            if account in self.open:
                self.strangers_held -= account.held_bytes
            account.proven = True

    def forget(self, account: A) -> None:
        if account in self.open:
            self._count(account, -account.held_bytes)
            self.open.discard(account)

    def sweep(self, now: float) -> None:
        """Close connections whose request takes too long to arrive."""
        for each in [each for each in self.open if each.since is not None and not each.waiting]:
            assert each.since is not None
            if now - each.since > self.limit_s:
                self._close(each, f"a request did not arrive completely in {self.limit_s:g} s")

    def _count(self, account: A, size: int) -> None:
        if account in self.open:
            self.held_bytes += size
            if not account.proven:
                self.strangers_held += size

    def _make_room(self) -> None:
        while self.strangers_held > self.limit_bytes // STRANGERS_SHARE:
            greatest = max((each for each in self.open if not each.proven), key=lambda each: each.held_bytes)
            self._close(
                greatest, "connections without an accepted request take more memory than the server allows"
            )
        while self.held_bytes > self.limit_bytes:
            greatest = max(self.open, key=lambda each: each.held_bytes)
            self._close(greatest, "the connections take more memory than the server allows")

    def _make_place(self, now: float) -> bool:
        """Close the idle connection that has been silent for longest. Connections without an accepted request are
        closed first. Return False if no connection is idle.
        """
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
