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
from sinew.serve.dashboard.feed import KEPT, Answer
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
        self._news = News(service)

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
            seen, told = feed.newest, -HEALTH_S
            loop = asyncio.get_running_loop()
            ended = loop.create_task(self._ended.wait())
            try:
                with contextlib.suppress(ConnectionError, asyncio.TimeoutError):
                    await _send(response, encoded("about", self._about()))
                    while not ended.done():
                        new = feed.since(seen)
                        messages = [self._news.message(answer) for answer in new]
                        seen = new[-1].number if new else seen
                        if (now := loop.time()) >= told + HEALTH_S:
                            told = now
                            messages.append(self._news.health(now))
                        if messages:
                            await _send(response, b"".join(messages))
                            await asyncio.wait({ended}, timeout=EVENTS_S)
                        await self._news.wait(seen, ended, told + HEALTH_S - loop.time())
            finally:
                ended.cancel()
        return response

    def _about(self) -> dict[str, Any]:
        service = self._service
        safety = service.policies.get().safety
        return service.metadata | {
            "state_range": None if safety is None else safety.state_range(),
            "deadline_ms": service.deadline_ms,
            "as_seen": service.feed.image is not None,
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


class News:
    """Tell all viewers of one event loop what is new: awaited without asking again and again, written as JSON once."""

    def __init__(self, service: Service):
        self._service = service
        self._host = Host()
        self._health: tuple[float, bytes] = (float("-inf"), b"")
        self._messages: dict[int, bytes] = {}  # by number of the answer, the newest last
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: set[asyncio.Future[None]] = set()
        self._rung = False

    def message(self, answer: Answer) -> bytes:
        """Return the event of an answer."""
        if answer.number not in self._messages:
            self._messages[answer.number] = encoded("answer", answer.to_dict())
            while len(self._messages) > KEPT:
                del self._messages[next(iter(self._messages))]
        return self._messages[answer.number]

    def health(self, now: float) -> bytes:
        """Return the event of the server's health, not older than the time between two of them."""
        if now >= self._health[0] + HEALTH_S:
            service = self._service
            found = {"memory_bytes": _resident(), "viewers": service.feed.viewers, "host": self._host.look()}
            self._health = now, encoded("health", service.health() | found)
        return self._health[1]

    async def wait(self, seen: int, ended: asyncio.Future[Any], seconds: float) -> None:
        """Return once there is an answer after the one numbered ``seen``, at the end, or after so many seconds."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._service.feed.ring(self._ring)
        future: asyncio.Future[None] = self._loop.create_future()
        self._waiting.add(future)
        try:
            if self._service.feed.newest == seen:  # a later one finds the future and wakes it
                both = {future, ended}
                await asyncio.wait(both, timeout=max(0.0, seconds), return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._waiting.discard(future)

    def _ring(self) -> None:
        """Wake the loop, once for all answers that come before it is awake. Called on the scheduler's threads."""
        if not self._waiting or self._rung or self._loop is None:
            return
        self._rung = True
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        self._rung = False
        for future in self._waiting:
            if not future.done():
                future.set_result(None)


def _resident() -> int:
    found = machine.resident_bytes()
    return found.get("now", found["peak"])


async def _send(response: web.StreamResponse, message: bytes) -> None:
    """Write events. Raises TimeoutError where the reader takes nothing."""
    await asyncio.wait_for(response.write(message), STALLED_S)


def encoded(event: str, record: dict[str, Any]) -> bytes:
    """Return a server-sent event. Raises :class:`SinewError` for a record that JSON cannot carry."""
    try:
        text = json.dumps(record, allow_nan=False, separators=(",", ":"))
    except ValueError as error:  # a record of ours with NaN in it: told, not swallowed
        raise SinewError(f"event {event}: {error}") from None
    return f"event: {event}\ndata: {text}\n\n".encode()
