"""What others add to the web transport: the routes of a wire, and a page at /."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from aiohttp import web

from sinew.core import PolicySpec, RequestError
from sinew.serve.service import Service
from sinew.serve.transport.connections import connection_of

POLICIES = "/v1/policies"  # before the name of a policy, which WebSockets take too
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Guard = Callable[[Handler], Handler]  # puts a handler behind the server's key and answers errors


class Routes(Protocol):
    """A wire of HTTP requests."""

    @property
    def name(self) -> str: ...

    def add(self, service: Service, guarded: Guard, router: web.UrlDispatcher) -> None:
        """Add the routes; called once, before the first request."""

    def guide(self, spec: PolicySpec, address: str) -> Sequence[str]:
        """See Listener. address: with the scheme of HTTP."""


class Page(Protocol):
    """What a browser is shown at /."""

    def add(self, router: web.UrlDispatcher, at_root: bool) -> Handler:
        """Add the routes and return the page's handler. at_root: the page's at / as well; else clients share it."""

    def end(self) -> None:
        """Let all viewers go: the server stops."""


async def read_body(request: web.Request) -> tuple[float, bytearray]:
    """Return when a request was there, by ``time.perf_counter()``, and its body. Raises RequestError where it is
    compressed.

    Not by ``request.read``, which keeps the body for as long as the connection is kept for a next request.
    """
    coding = request.headers.get("Content-Encoding", "identity")
    if coding != "identity":
        raise RequestError(f"Content-Encoding: expected none, got {coding[:40]!r}")
    body, most = bytearray(), request.client_max_size
    async for part in request.content.iter_any():  # a slow one is ended by Connections.watch
        body += part
        if len(body) > most:
            raise web.HTTPRequestEntityTooLarge(most, len(body))
    connection_of(request).whole()
    return time.perf_counter(), body
