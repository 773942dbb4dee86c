"""The interfaces of the web transport: a protocol over WebSockets, the routes of a protocol, and a page at /.

This module also creates the answers to failed requests over HTTP.
"""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from aiohttp import web

from sinew.core import Observation, ObservationError, PolicySpec, RequestError, SinewError
from sinew.serve.decode.frames import PixelBudget
from sinew.serve.request import Outcome, WireMessage
from sinew.serve.service import Service
from sinew.serve.transport.connections import connection_of

JSON = "application/json"
PING_S = 20.0  # seconds between two pings; a WebSocket whose client does not answer is closed
MAX_REASON = 123  # longest reason in a close frame, bytes (RFC 6455)
_STATUS = {
    "bad_request": 400,
    "bad_observation": 400,
    "unauthorized": 401,
    "unknown_policy": 404,
    "superseded": 409,
    "busy": 429,
    "cancelled": 499,
    "unhealthy": 503,
    "shutting_down": 503,
    "deadline": 504,
}
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
# A function that wraps a handler: the result checks the server's key, calls the handler, and answers errors.
Guard = Callable[[Handler], Handler]


class Routes(Protocol):
    """Interface of a protocol whose messages are HTTP requests, such as ``POST /v1/actions``."""

    @property
    def name(self) -> str: ...

    def add(self, service: Service, guarded: Guard, router: web.UrlDispatcher) -> None:
        """Add the routes. The transport calls this once, before the first request."""

    def guide(self, spec: PolicySpec, address: str) -> Sequence[str]:
        """Return the lines of an example program for clients. ``address`` is the server's address, and begins with
        ``http``.
        """


@dataclass(frozen=True, slots=True)
class Dialect:
    """A protocol over WebSockets: the functions that read its messages and write its answers.

    Attributes:
        name: Name of the protocol.
        read: Makes a message from the received bytes. This function must be fast, because it runs on the event loop.
        observation: Makes an observation from a message, the policy's specification and a budget of pixels, on the
            decode thread.
        answer: Makes the reply from four arguments: the message, the outcomes (chunks, and errors for several
            observations), the milliseconds since the message arrived, and the milliseconds of the connection's
            previous message (None for the first message).
        guide: Makes a program for clients, as :class:`Listener` does, from the specification and the address.
        greet: Makes the first frame of a connection; None if the client speaks first.
        reset: Makes the answer to a ``reset``, or returns None if the clients expect no answer. None if the protocol
            has no ``reset``.
        binary: True if clients send binary frames, False if they send text.
        explains: True if an error is sent as a text frame before the connection ends.
        ping_s: Seconds between pings, which clients answer; None if clients may be too busy with their robot to
            answer.
        connect: Makes the dialect of one connection, if its messages depend on each other, from the arguments of
            ``greet`` and the query of the connection's address. Raises RequestError for an invalid query.
        error: Makes an error reply, after which the connection continues. Without ``error``, or if ``error`` returns
            None, the connection ends.
        waits: True if the server stops reading from a client that sends too many observations. False if the server
            rejects such observations.
        beside: Further routes of the protocol on the same port.
        seen: Makes the answer to an observation that is only stored. ``observation`` has decoded the observation, and
            no chunk is computed.
        kept: Returns the number of bytes that a connection stores between two messages. The server counts them as
            memory of the connection.
    """

    name: str
    read: Callable[[bytes], WireMessage]
    observation: Callable[[WireMessage, PolicySpec, PixelBudget], Observation]
    answer: Callable[[WireMessage, Sequence[Outcome], float, float | None], bytes | str]
    guide: Callable[[PolicySpec, str], Sequence[str]]
    greet: Callable[[PolicySpec, Mapping[str, Any]], bytes] | None = None
    reset: Callable[[], bytes | None] | None = None
    binary: bool = True
    explains: bool = True
    ping_s: float | None = PING_S
    connect: Callable[[PolicySpec, Mapping[str, Any], Mapping[str, str]], Dialect] | None = None
    error: Callable[[SinewError], bytes | None] | None = None
    waits: bool = False
    beside: Routes | None = None
    seen: Callable[[WireMessage], bytes] | None = None
    kept: Callable[[], int] = int


class Page(Protocol):
    """Interface of the web page that a browser shows at the path /."""

    def add(self, router: web.UrlDispatcher, at_root: bool) -> Handler:
        """Add the routes, and return the handler of the page.

        Args:
            router: The router of the port.
            at_root: True to add a route for / too. With False, clients of a WebSocket use / too, and the caller
                calls the handler for browsers.
        """

    def end(self) -> None:
        """End the connections of all viewers, because the server stops."""


async def read_body(request: web.Request) -> tuple[float, bytearray]:
    """Read the whole body of an HTTP request.

    ``request.read`` is not used, because that method stores the body until the connection ends.

    Returns:
        The time at which the request was complete, on the clock ``time.perf_counter()``, and the body.

    Raises:
        RequestError: The body is compressed.
    """
    coding = request.headers.get("Content-Encoding", "identity")
    if coding != "identity":
        raise RequestError(
            f"Content-Encoding: expected none, got {coding[:40]!r}; send the body uncompressed"
        )
    body, most = bytearray(), request.client_max_size
    async for part in request.content.iter_any():  # Connections.watch ends a slow request
        body += part
        if len(body) > most:
            raise web.HTTPRequestEntityTooLarge(most, len(body))
    connection_of(request).whole()
    return time.perf_counter(), body


def error_entry(error: SinewError) -> dict[str, dict[str, str]]:
    """Return an error for a reply, ready for JSON and msgpack."""
    entry = {"code": error.code, "message": str(error)[:1000]}
    if isinstance(error, ObservationError):
        entry["field"] = error.field[:100]
    return {"error": entry}


def error_answer(error: SinewError) -> tuple[int, bytes]:
    """Return the status and the body of the answer to a failed request."""
    return _STATUS.get(error.code, 500), json.dumps(error_entry(error)).encode()
