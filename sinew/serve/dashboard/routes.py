"""The dashboard's routes: the page, its events, frames, and requests that a person makes by hand."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from importlib.resources import files
from typing import Any

from aiohttp import web

from sinew import machine
from sinew.core import SinewError
from sinew.serve.dashboard.host import Host
from sinew.serve.service import Service

EVENTS_S = 0.05  # between two looks at what is new: at most 20 messages a second
HEALTH_S = 2.0
STALLED_S = 10.0  # a viewer that takes nothing for so long is let go
PAGES = {
    "": ("page.html", "text/html"),
    "page.js": ("page.js", "text/javascript"),
    "page.css": ("page.css", "text/css"),
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; connect-src 'self';"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": POLICY,
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Dashboard:
    """service: whose feed is shown. guarded: puts a handler behind the server's key. actions: answers a request for
    actions. ended: set when the server stops."""

    def __init__(
        self,
        service: Service,
        guarded: Callable[[Handler], Handler],
        actions: Handler,
        ended: asyncio.Event,
    ):
        self._service, self._ended = service, ended
        self._files = {
            name: (files("sinew.serve.dashboard").joinpath(file).read_bytes(), kind)
            for name, (file, kind) in PAGES.items()
        }
        self._guarded, self._actions = guarded, actions

    def add(self, router: web.UrlDispatcher, at_root: bool) -> Handler:
        """Add the routes and return the page's handler. at_root: the page's at / as well; else clients share it."""
        if at_root:
            router.add_get("/", self.page)
        router.add_get("/dashboard/{file}", self.page)
        for path, handler in (("/v1/events", self._events), ("/v1/frames/{camera}", self._frame)):
            router.add_get(path, self._same_site(self._guarded(handler)))
        router.add_post("/v1/try", self._same_site(self._guarded(self._actions)))
        return self.page

    async def page(self, request: web.Request) -> web.Response:
        """Answer with the page or one of its files. They say nothing of the policy, so they need no key."""
        found = self._files.get(request.match_info.get("file", ""))
        if found is None:
            return web.Response(status=404, text="not found\n")
        body, kind = found
        return web.Response(body=body, content_type=kind, charset="utf-8", headers=HEADERS)

    def _same_site(self, handler: Handler) -> Handler:
        """Refuse what a browser says that another site's page asked for: images and the like carry no Origin."""

        async def answer(request: web.Request) -> web.StreamResponse:
            if request.headers.get("Sec-Fetch-Site", "same-origin") not in ("same-origin", "none"):
                return web.Response(status=403, text="requests from other sites' pages are refused\n")
            return await handler(request)

        return answer

    # ------------------------------------------------------------------------- events

    async def _events(self, request: web.Request) -> web.StreamResponse:
        """Server-sent events: ``about`` once, ``answer`` for what is answered from now on, ``health`` now and then."""
        feed = self._service.feed
        with feed.viewer():
            response = web.StreamResponse(headers={**HEADERS, "Content-Type": "text/event-stream"})
            response.headers["Connection"] = "close"
            await response.prepare(request)
            seen, told, host = feed.newest, 0.0, Host()
            loop = asyncio.get_running_loop()
            with contextlib.suppress(ConnectionError, asyncio.TimeoutError):
                await _send(response, "about", self._about())
                while not self._ended.is_set():
                    for answer in (new := feed.since(seen)):
                        await _send(response, "answer", answer.to_dict())
                    seen = new[-1].number if new else seen
                    if loop.time() - told > HEALTH_S:
                        told = loop.time()
                        await _send(response, "health", self._health() | {"host": host.look()})
                    with contextlib.suppress(asyncio.TimeoutError):
                        await asyncio.wait_for(self._ended.wait(), EVENTS_S)
        return response

    def _about(self) -> dict[str, Any]:
        service = self._service
        safety = service.policies.get().safety
        return service.metadata | {
            "state_range": None if safety is None else safety.state_range(),
            "deadline_ms": service.deadline_ms,
            "as_seen": service.feed.image is not None,
        }

    def _health(self) -> dict[str, Any]:
        return self._service.health() | {
            "memory_bytes": _resident(),
            "viewers": self._service.feed.viewers,
        }

    async def _frame(self, request: web.Request) -> web.Response:
        camera = request.match_info["camera"]
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(None, self._service.feed.picture, camera)
        if found is None:
            return web.Response(status=404, text="no frame of this camera yet\n", headers=HEADERS)
        number, body = found
        return web.Response(
            body=body, content_type="image/jpeg", headers={**HEADERS, "X-Answer": str(number)}
        )


def _resident() -> int:
    found = machine.resident_bytes()
    return found.get("now", found["peak"])


async def _send(response: web.StreamResponse, event: str, record: dict[str, Any]) -> None:
    """Write one event. Raises TimeoutError where the reader takes nothing."""
    try:
        text = json.dumps(record, allow_nan=False, separators=(",", ":"))
    except ValueError as error:  # a record of ours with NaN in it: told, not swallowed
        raise SinewError(f"event {event}: {error}") from None
    await asyncio.wait_for(response.write(f"event: {event}\ndata: {text}\n\n".encode()), STALLED_S)
