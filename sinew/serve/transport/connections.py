"""The connections of an asyncio server. Each asyncio protocol object is wrapped in a :class:`Connection`, which
counts the memory that its connection uses (``ledger.py``).

aiohttp limits the size of one request. This module limits the memory of many unfinished requests together. It runs on
the server's event loop.
"""

from __future__ import annotations

import asyncio
import logging

from aiohttp import web

from sinew.core.rate_limited_log import RateLimitedLog
from sinew.serve.transport.ledger import SWEEP_S, Account, MemoryLedger

logger = logging.getLogger(__name__)

# Bytes of a client's WebSocket control frame before its payload: two bytes of header and a mask of four bytes.
CONTROL_HEADER = 6


class Connections:
    """All connections of one server. :class:`MemoryLedger` describes the limits."""

    def __init__(self, name: str, limit: int, limit_bytes: int, limit_s: float):
        self.ledger = MemoryLedger(name, limit, limit_bytes, self.close, limit_s)
        self._loop = asyncio.get_running_loop()
        self._quiet = RateLimitedLog(logger)

    def now(self) -> float:
        return self._loop.time()

    def accept(self, inner: asyncio.Protocol) -> asyncio.Protocol:
        """Return the protocol of a new connection, which passes all calls on to ``inner``."""
        connection = Connection(self, inner, self.now())
        return connection if self.ledger.admit(connection, self.now()) else _Refusal()

    async def watch(self) -> None:
        """Run an endless loop that closes connections whose requests take too long to arrive."""
        while True:
            await asyncio.sleep(SWEEP_S)
            self.ledger.sweep(self.now())

    def close(self, connection: Connection, reason: str) -> None:
        self._quiet.info("%s: a connection was closed: %s", self.ledger.name, reason)
        self.ledger.forget(connection)
        if connection.transport is not None:
            connection.transport.abort()


class Connection(Account, asyncio.Protocol):
    """One connection of a client. Its request handlers call the methods that count its memory."""

    def __init__(self, all_of_them: Connections | None, inner: asyncio.Protocol, now: float):
        super().__init__(now)
        self._all = all_of_them
        self._inner = inner
        self.transport: asyncio.Transport | None = None

    @classmethod
    def nobody(cls) -> Connection:
        return cls(None, asyncio.Protocol(), 0.0)

    def whole(self) -> int:
        """Count the arriving request as complete. Return its number of bytes, for the later call of ``answered``."""
        return 0 if self._all is None else self._all.ledger.whole(self)

    def answered(self, size: int) -> None:
        if self._all is not None:
            self._all.ledger.answered(self, size)

    def keep(self, size: int) -> None:
        """Count the bytes of this connection that stay in memory after its requests are answered."""
        if self._all is not None:
            self._all.ledger.keep(self, size)

    def prove(self) -> None:
        """Mark the connection as trusted, because the server has accepted one of its requests. Its memory then has
        the larger limit.
        """
        if self._all is not None:
            self._all.ledger.prove(self)

    def control_frame(self, payload: int) -> None:
        """Subtract a WebSocket's ping or pong from the bytes of the arriving request. A ping may come between the parts
        of a message.

        Args:
            payload: Number of bytes in the ping or pong.
        """
        if self._all is None:
            return
        size = min(payload + CONTROL_HEADER, self.arriving)
        self._all.ledger.arrived(self, -size, self._all.now())
        if not self.arriving:
            self.since = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._inner.connection_made(transport)

    def connection_lost(self, error: Exception | None) -> None:
        assert self._all is not None
        self._all.ledger.forget(self)
        self._inner.connection_lost(error)

    def data_received(self, data: bytes) -> None:
        assert self._all is not None
        if self not in self._all.ledger.open:
            # The server has closed this connection, and asyncio has not reported its end yet.
            return
        self._all.ledger.arrived(self, len(data), self._all.now())
        self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self._inner.eof_received()

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()


class _Refusal(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()


def connection_of(request: web.Request) -> Connection:
    """Return the connection of a request. If the client has disconnected, return a connection that is not counted."""
    protocol = None if request.transport is None else request.transport.get_protocol()
    return protocol if isinstance(protocol, Connection) else Connection.nobody()
