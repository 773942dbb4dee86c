"""What the connections of one server hold of requests that are not whole yet: how many, how much, since when.

aiohttp bounds one request. A crowd of unfinished ones, each within those bounds, is bounded here. Everything runs on
the server's event loop.
"""

from __future__ import annotations

import asyncio
import logging

logger = logging.getLogger(__name__)

SWEEP_S = 0.5
CONTROL_HEADER = (
    6  # bytes of a client's WebSocket control frame beside its payload: two of header, four of mask
)


class Connections:
    """limit: connections at once; one more is closed at once.

    limit_bytes: received and not yet answered, of all connections together. Beyond it the connection that holds most
    is closed, so that the ones with ordinary requests go on.
    limit_s: from the first byte of a request to its last, and from connecting to the end of the first request.
    """

    def __init__(self, name: str, limit: int, limit_bytes: int, limit_s: float):
        self.name = name
        self.limit = limit
        self.limit_bytes = limit_bytes
        self.limit_s = limit_s
        self.held = 0
        self.open: set[Connection] = set()
        self._loop = asyncio.get_running_loop()
        self._warned = float("-inf")

    def now(self) -> float:
        return self._loop.time()

    def accept(self, inner: asyncio.Protocol) -> asyncio.Protocol:
        """The protocol of a new connection, which hands everything on to ``inner``."""
        if len(self.open) >= self.limit:
            if self.now() - self._warned > 1:  # an attack must not fill the log
                self._warned = self.now()
                logger.warning("%s: a connection was refused: %d are open", self.name, len(self.open))
            return _Refusal()
        connection = Connection(self, inner, self.now())
        self.open.add(connection)
        return connection

    async def watch(self) -> None:
        """Close what has taken too long, for ever."""
        while True:
            await asyncio.sleep(SWEEP_S)
            now = self.now()
            for each in [each for each in self.open if each.since is not None and not each.waiting]:
                assert each.since is not None
                if now - each.since > self.limit_s + (each.transport is None):  # TLS has a timer of its own
                    self.close(each, f"no whole request within {self.limit_s:g} s")

    def hold(self, size: int) -> None:
        self.held += size
        while self.held > self.limit_bytes and self.open:
            greatest = max(self.open, key=lambda each: each.arriving + each.waiting)
            self.close(greatest, "unanswered requests take more memory than the server allows")

    def close(self, connection: Connection, reason: str) -> None:
        logger.info("%s: a connection was closed: %s", self.name, reason)
        self.forget(connection)
        if connection.transport is not None:
            connection.transport.abort()

    def forget(self, connection: Connection) -> None:
        if connection in self.open:
            self.open.discard(connection)
            self.held -= connection.arriving + connection.waiting


class Connection(asyncio.Protocol):
    """since: when the request that is arriving began, event loop seconds; None between requests.

    arriving: bytes of it. waiting: bytes of whole requests that are not answered.
    """

    def __init__(self, all_of_them: Connections, inner: asyncio.Protocol, now: float):
        self._all = all_of_them
        self._inner = inner
        self.since: float | None = now
        self.arriving = 0
        self.waiting = 0
        self.transport: asyncio.Transport | None = None

    @classmethod
    def nobody(cls) -> Connection:
        return cls(Connections("", 0, 0, 0.0), asyncio.Protocol(), 0.0)

    def whole(self) -> int:
        """The request that was arriving is there. Returns its bytes, for ``answered``."""
        size, self.arriving, self.since = self.arriving, 0, None
        self.waiting += size
        return size

    def answered(self, size: int) -> None:
        self.waiting -= size
        if self in self._all.open:
            self._all.held -= size

    def control_frame(self, payload: int) -> None:
        """A WebSocket's ping or pong of that many bytes has come; perhaps in between the parts of a message."""
        size = min(payload + CONTROL_HEADER, self.arriving)
        self.arriving -= size
        if self in self._all.open:
            self._all.held -= size
        if not self.arriving:
            self.since = None

    # ------------------------------------------------------------------------- asyncio's calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._inner.connection_made(transport)

    def connection_lost(self, error: Exception | None) -> None:
        self._all.forget(self)
        self._inner.connection_lost(error)

    def data_received(self, data: bytes) -> None:
        if self not in self._all.open:  # closed by the server; its end has not come through yet
            return
        if self.since is None:
            self.since = self._all.now()
        self.arriving += len(data)
        self._all.hold(len(data))
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
