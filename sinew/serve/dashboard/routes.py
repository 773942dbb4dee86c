"""The dashboard's routes: the page, its events, frames and history, the port's description, and requests that a person
makes on the page."""

from __future__ import annotations

import asyncio
import contextlib
from importlib.resources import files
from typing import Any

from aiohttp import web

from sinew.serve.dashboard.documents import rendered
from sinew.serve.dashboard.feed import Feed
from sinew.serve.dashboard.news import Broadcast, HealthBroadcast, Pictures, encoded
from sinew.serve.dashboard.openapi import describe
from sinew.serve.service import Service
from sinew.serve.transport.routes import Guard, Handler

STALLED_S = 10.0  # seconds after which the connection of a viewer that reads nothing is closed
PAGES = {
    "": ("page.html", "text/html"),
    "page.js": ("page.js", "text/javascript"),
    "page.css": ("page.css", "text/css"),
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self';"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": POLICY,
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class Dashboard:
    """The dashboard of one port: its page, its routes and its viewers.

    Args:
        service: The service that is shown.
        guarded: Creates a handler that checks the server's key.
        actions: Answers a request for actions.
        feed: Stores the answers of the service. The pages of several ports share one feed.
    """

    def __init__(self, service: Service, guarded: Guard, actions: Handler, feed: Feed):
        self._service = service
        here = files("sinew.serve.dashboard")
        self._files = {
            name: (here.joinpath(file).read_bytes(), kind)  # own file: in an installed package
            for name, (file, kind) in PAGES.items()
        }
        self._guarded, self._actions = guarded, actions
        feed.follow(service)
        self.feed = feed
        self._paths: list[str] = []
        self._news, self._frames = HealthBroadcast(service, feed), Pictures(service, feed)

    def add(self, router: web.UrlDispatcher, at_root: bool) -> Handler:
        """Add the routes, and return the handler of the page.

        Args:
            router: The router of the port.
            at_root: True to show the page at / too. With False, the caller decides between browsers and
                WebSocket clients at /.
        """
        if at_root:
            router.add_get("/", self.page)
        router.add_get("/dashboard/{file}", self.page)
        router.add_get("/docs/{page}", self._document)
        for path, handler in (
            ("/v1/events", self._events),
            ("/v1/frames", self._pictures),
            ("/v1/frames/{camera}", self._frame),
            ("/v1/history", self._history),
            ("/openapi.json", self._openapi),
        ):
            router.add_get(path, self._same_site(self._guarded(handler)))
        router.add_post("/v1/try", self._same_site(self._guarded(self._actions)))
        self._paths = [each.canonical for each in router.resources()]
        return self.page

    def end(self) -> None:
        """End the events of all viewers, because the server stops."""
        for news in (self._news, self._frames):
            news.end()

    async def page(self, request: web.Request) -> web.Response:
        """Answer with the page or one of its files. These files contain no information about the policy, so a
        browser needs no key for them.
        """
        entry = self._files.get(request.match_info.get("file", ""))
        if entry is None:
            return web.Response(status=404, text="not found\n")
        body, kind = entry
        return web.Response(body=body, content_type=kind, charset="utf-8", headers=HEADERS)

    async def _document(self, request: web.Request) -> web.Response:
        """Answer with a page of the documents, which need no key either."""
        page = await asyncio.to_thread(rendered, request.match_info["page"])
        if page is None:
            return web.Response(
                status=404, text="this installation has no such page; docs/ in the source has all pages\n"
            )
        return web.Response(text=page, content_type="text/html", headers=HEADERS)

    def _same_site(self, handler: Handler) -> Handler:
        """Return a handler that rejects requests from pages of other sites.

        The browser marks such requests. The header Origin is not enough, because requests for images do not have
        it.
        """

        async def answer(request: web.Request) -> web.StreamResponse:
            if request.headers.get("Sec-Fetch-Site", "same-origin") not in ("same-origin", "none"):
                return web.Response(status=403, text="requests from other sites' pages are rejected\n")
            return await handler(request)

        return answer

    async def _events(self, request: web.Request) -> web.StreamResponse:
        """Send server-sent events: ``about`` once, ``answers`` after new answers, ``health`` every two seconds."""
        with self.feed.viewer():
            first = encoded("about", self._about()) + self._news.health()
            return await self._stream(request, self._news, first)

    async def _pictures(self, request: web.Request) -> web.StreamResponse:
        """Send server-sent events ``frames``: every camera as JPEG, at most ten times a second."""
        with self.feed.viewer("pictures"):
            # The first message is an empty comment, so that the headers are sent now.
            return await self._stream(request, self._frames, b":\n\n")

    async def _stream(self, request: web.Request, news: Broadcast, first: bytes) -> web.StreamResponse:
        """Send messages until the server ends, the viewer leaves, or the viewer reads nothing for too long.

        Args:
            request: The viewer's request.
            news: The messages.
            first: Bytes that are sent first.
        """
        response = web.StreamResponse(headers={**HEADERS, "Content-Type": "text/event-stream"})
        response.headers["Connection"] = "close"
        with news.viewer() as outbox, contextlib.suppress(ConnectionError, TimeoutError):
            await response.prepare(request)
            message = first
            while not outbox.ended:
                await _send(response, message)
                message = await outbox.get()
        return response

    def _about(self) -> dict[str, Any]:
        service = self._service
        safety = service.policies.get().safety
        return service.about() | {
            "state_range": None if safety is None else safety.state_range(),
            "deadline_ms": service.deadline_ms,
            "as_seen": self.feed.image is not None,
        }

    async def _history(self, _request: web.Request) -> web.Response:
        """Answer with the counts and latencies of the last hour."""
        return web.json_response(self.feed.history.to_dict(), headers=HEADERS)

    async def _openapi(self, _request: web.Request) -> web.Response:
        """Answer with the description of this port's routes for programs, with the present policy."""
        service = self._service
        document = describe(service.policies.get().spec, self._paths, service.wants_key)
        return web.json_response(document, headers=HEADERS)

    async def _frame(self, request: web.Request) -> web.Response:
        camera = request.match_info["camera"]
        loop = asyncio.get_running_loop()
        pictures = await loop.run_in_executor(None, self.feed.pictures)
        if camera not in pictures.files:
            return web.Response(status=404, text="no frame of this camera yet\n", headers=HEADERS)
        headers = {**HEADERS, "X-Answer": str(pictures.number)}
        return web.Response(body=pictures.files[camera], content_type="image/jpeg", headers=headers)


async def _send(response: web.StreamResponse, message: bytes) -> None:
    """Write events to the connection of a viewer.

    Raises:
        TimeoutError: The viewer did not read the events in time.
    """
    async with asyncio.timeout(STALLED_S):
        await response.write(message)
