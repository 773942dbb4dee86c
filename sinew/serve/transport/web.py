"""HTTP and WebSocket transport: one aiohttp server on a thread of its own, for the wires openpi, evo1 and http.

Always there: ``GET /healthz`` and ``GET /metrics``; the dashboard at / where it is wanted. The event loop only moves
bytes; observations are made on the scheduler's decode thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from aiohttp import WSCloseCode, WSMessage, WSMsgType, web
from aiohttp.http_exceptions import HttpProcessingError

from sinew.core import PolicySpec, RequestError, SinewError
from sinew.serve.dashboard.routes import Dashboard, Handler
from sinew.serve.metrics import CONTENT_TYPE
from sinew.serve.policies import DEFAULT
from sinew.serve.quiet import Quiet
from sinew.serve.service import Inference, Service
from sinew.serve.transport import admin
from sinew.serve.transport.actions import POLICIES, Actions
from sinew.serve.transport.connections import Connection, Connections, connection_of
from sinew.serve.transport.ledger import HELD_REQUESTS
from sinew.serve.transport.listen import Listen
from sinew.serve.transport.origin import refuse_web_pages
from sinew.serve.wires import http
from sinew.serve.wires.sockets import MAX_REASON, SOCKETS

logger = logging.getLogger(__name__)

CLOSE_S = 1.0  # for handing over the last answers
STOP_S = 4.0  # for the event loop to end
NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)  # for another connection
PENDING = 2  # observations of one connection that may wait; openpi's clients have one under way


class WebServer:
    """names: which of the wires openpi, evo1 and http it serves; one of the first two at most."""

    def __init__(self, names: Sequence[str], listen: Listen):
        self.name = " and ".join(names)
        self._names = tuple(names)
        self._kind = next((SOCKETS[name] for name in names if name in SOCKETS), None)
        self._listen = listen
        self._tls = listen.tls()
        self._socket = listen.tcp_socket()
        host = f"[{listen.host}]" if ":" in listen.host else listen.host or "0.0.0.0"  # noqa: S104 - shown
        scheme = ("wss" if self._tls else "ws") if self._kind else "https" if self._tls else "http"
        self.address = f"{scheme}://{host}:{self._socket.getsockname()[1]}"
        # what a browser opens; "" where there is no page
        self.dashboard = self.address.replace("ws", "http", 1) + "/" if listen.dashboard else ""
        logging.getLogger("aiohttp.server").addFilter(_is_ours)
        self._thread: threading.Thread | None = None
        self._quiet = Quiet(logger)
        self._loop = asyncio.new_event_loop()
        self._ended: asyncio.Event | None = None
        self._open: set[web.WebSocketResponse] = set()
        self._page: Handler | None = None  # of the dashboard

    def start(self, service: Service) -> None:
        self._service = service
        ready = threading.Event()
        self._thread = service.supervisor.thread(
            "sinew-web", lambda: self._loop.run_until_complete(self._run(ready))
        )
        ready.wait()

    def stop(self) -> None:
        if self._thread is not None and self._ended is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended by itself
                self._loop.call_soon_threadsafe(self._ended.set)
            self._thread.join(STOP_S)
            if self._thread.is_alive():
                logger.error("%s: the event loop does not end", self.name)
                return
        self._loop.close()
        self._socket.close()

    def guide(self, spec: PolicySpec) -> list[str]:
        lines = self._kind.codec.guide(spec, self.address) if self._kind else []
        if "http" in self._names:
            lines += [""] * bool(lines) + http.guide(spec, self.address.replace("ws", "http", 1))
        return lines

    # ------------------------------------------------------------------------- the server

    async def _run(self, ready: threading.Event) -> None:
        self._ended = asyncio.Event()
        self._loop.set_exception_handler(self._on_error)
        app = web.Application(middlewares=[self._counted], client_max_size=self._listen.max_message_bytes)
        app.on_response_prepare.append(_anonymous)
        app.router.add_get("/healthz", self._health)
        app.router.add_get("/metrics", self._metrics)
        actions = Actions(self._service)
        if "http" in self._names:
            actions.add(self._guarded, app.router)
            admin.add(self._service, self._guarded, app.router)
        shown: Dashboard | None = None
        if self._listen.dashboard:
            shown = Dashboard(self._service, self._guarded, actions.actions)
            self._page = shown.add(app.router, at_root=not self._kind)
        if self._kind:
            app.router.add_get("/{path:.*}", self._websocket)
        runner = web.AppRunner(
            app,
            handle_signals=False,
            access_log=None,
            keepalive_timeout=60.0,
            handler_cancellation=True,
            auto_decompress=False,  # frames are compressed already; anything else would be a bomb
        )
        await runner.setup()
        listen = self._listen
        connections = Connections(
            self.name, listen.max_connections, HELD_REQUESTS * listen.max_message_bytes, listen.arrival_s
        )
        watch = asyncio.create_task(connections.watch())
        server = await self._loop.create_server(
            lambda: connections.accept(_protocol(runner)),
            sock=self._socket,
            ssl=self._tls,
            ssl_handshake_timeout=listen.arrival_s if self._tls else None,
        )
        ready.set()
        await self._ended.wait()
        watch.cancel()
        server.close()
        if shown is not None:
            shown.end()
        await asyncio.sleep(0)  # answers that the scheduler's end produced are on their way to their handlers
        for socket in list(self._open):
            with contextlib.suppress(Exception):
                await asyncio.wait_for(socket.close(code=WSCloseCode.GOING_AWAY), CLOSE_S)
        await runner.shutdown()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(runner.cleanup(), CLOSE_S)

    def _on_error(self, loop: asyncio.AbstractEventLoop, about: dict[str, Any]) -> None:
        """Tell in a line that a connection could not be taken: asyncio writes a traceback for each place of its queue,
        once a second, while no descriptor is free."""
        error = about.get("exception")
        if isinstance(error, OSError) and error.errno in NO_ROOM:
            self._quiet.warning("%s: a connection could not be taken: %s", self.name, error)
        else:
            loop.default_exception_handler(about)

    @web.middleware
    async def _counted(
        self, request: web.Request, handler: Callable[..., Awaitable[Any]]
    ) -> web.StreamResponse:
        """Tells the connection when a request is there and when it is answered."""
        connection = connection_of(request)
        if not request.can_read_body:
            connection.whole()
        try:
            if (refusal := refuse_web_pages(request, self._listen, self._service.wants_key)) is not None:
                return refusal
            return await handler(request)
        finally:
            connection.whole()  # if nobody has read it
            connection.answered(connection.waiting)

    # ------------------------------------------------------------------------- routes

    async def _health(self, _request: web.Request) -> web.Response:
        """503 with the reasons while no request can be answered. Says nothing of the policy, so it needs no key."""
        if problems := self._service.problems():
            response = web.Response(status=503, text="\n".join(["UNHEALTHY", *problems, ""]))
        else:
            response = web.Response(text="OK\n")
        response.force_close()
        return response

    async def _metrics(self, request: web.Request) -> web.Response:
        try:
            with self._service.reading("http", request.remote or ""):
                self._service.authorize(_key(request))
        except SinewError as error:
            return web.Response(status=401, text=f"{error}\n")
        response = web.Response(
            body=self._service.metrics.exposition(), headers={"Content-Type": CONTENT_TYPE}
        )
        response.force_close()
        return response

    def _guarded(
        self, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        """``handler`` behind the key check, with errors as JSON."""

        async def answer(request: web.Request) -> web.StreamResponse:
            try:
                with self._service.reading("http", request.remote or ""):
                    self._service.authorize(_key(request))
                if self._service.wants_key:
                    connection_of(request).prove()
                response = await handler(request)
                connection_of(request).prove()
                return response
            except SinewError as error:
                status, body = http.error_answer(error)
            except web.HTTPRequestEntityTooLarge:
                too_large = RequestError(f"request: expected at most {self._listen.max_message_bytes} bytes")
                self._service.refused("http", request.remote or "", too_large)
                status, body = 413, http.error_answer(too_large)[1]
            return web.Response(status=status, body=body, content_type=http.JSON)

        return answer

    # ------------------------------------------------------------------------- WebSockets

    async def _websocket(self, request: web.Request) -> web.StreamResponse:
        if self._page is not None and request.path == "/" and "Upgrade" not in request.headers:
            return await self._page(request)
        assert self._kind is not None
        service, client, kind = self._service, request.remote or "", self._kind
        name = kind.codec.NAME
        policy = request.path.removeprefix(f"{POLICIES}/") if request.path.startswith(POLICIES) else DEFAULT
        try:
            with service.reading(name, client):
                service.authorize(_key(request))
                standing = service.policies.get(policy)
        except SinewError as error:
            return web.Response(status=http.error_answer(error)[0], text=f"{error}\n")
        socket = web.WebSocketResponse(
            max_msg_size=self._listen.max_message_bytes,
            compress=False,
            heartbeat=kind.ping_s,
            timeout=CLOSE_S,
            autoping=False,  # answered below, where they are counted
        )
        if not socket.can_prepare(request):
            response = web.Response(
                status=426, text=f"this is a WebSocket of {name}; GET /healthz for a sign of life\n"
            )
            response.force_close()
            return response
        await socket.prepare(request)
        self._open.add(socket)
        service.metrics.connection(name, 1)
        connection = connection_of(request)
        if service.wants_key:
            connection.prove()
        connection.answered(connection.waiting)
        messages: asyncio.Queue[tuple[float, bytes, int]] = asyncio.Queue(PENDING)
        # Reading goes on during an inference: pings are answered, and a client that leaves is noticed.
        worker = asyncio.create_task(self._answer(socket, connection, messages, client, policy))
        try:
            if kind.greets:
                await socket.send_bytes(kind.codec.metadata(standing.spec, service.about(policy)))
            async for message in socket:
                if message.type in (WSMsgType.PING, WSMsgType.PONG):
                    connection.control_frame(len(message.data))
                    if message.type == WSMsgType.PING:
                        await socket.pong(message.data)
                elif (message.type == WSMsgType.BINARY) != kind.binary:
                    wanted = "binary frame with a msgpack map" if kind.binary else "text frame"
                    await self._fail(socket, f"expected a {wanted}, got the other kind")
                    break
                elif messages.full():
                    await self._fail(socket, f"at most {PENDING} observations of one connection may wait")
                    break
                else:
                    messages.put_nowait((time.perf_counter(), _data(message), connection.whole()))
                del message  # the next one may be long in coming
        except (ConnectionError, asyncio.CancelledError):
            logger.debug("a client of %s left", name)
        finally:
            # Before anything is awaited: this task may have been cancelled, and is then cancelled again.
            self._open.discard(socket)
            service.metrics.connection(name, -1)
            worker.cancel()
            await asyncio.wait([worker])
        return socket

    async def _answer(
        self,
        socket: web.WebSocketResponse,
        connection: Connection,
        messages: asyncio.Queue[tuple[float, bytes, int]],
        client: str,
        policy: str,
    ) -> None:
        """One observation after the other, until the connection ends."""
        previous_ms: float | None = None
        while True:
            arrived, payload, size = await messages.get()
            try:
                reply = await self._reply(payload, arrived, previous_ms, client, connection, policy)
                await (socket.send_str(reply) if isinstance(reply, str) else socket.send_bytes(reply))
                connection.prove()
                previous_ms = 1e3 * (time.perf_counter() - arrived)
            except SinewError as error:
                await self._fail(socket, f"{error} [{error.code}]")
                return
            except ConnectionError:
                return
            except Exception:  # whatever it is, the other clients are served on
                logger.exception("a request could not be answered")
                await self._fail(socket, "internal error; the server's log has the details")
                return
            finally:
                del payload  # the next one may be long in coming
                connection.answered(size)

    async def _reply(
        self,
        payload: bytes,
        arrived: float,
        previous_ms: float | None,
        client: str,
        connection: Connection,
        policy: str,
    ) -> bytes | str:
        assert self._kind is not None
        service, codec = self._service, self._kind.codec
        with service.reading(codec.NAME, client):
            message = codec.read(payload)
        if message.endpoint == "reset":
            service.reset(message.session, policy)
            done: bytes | str = codec.reset_answer()
            return done
        decode = partial(codec.observation, message, service.policies.get(policy).spec)
        chunk = await service.infer(
            Inference(
                codec.NAME,
                decode,
                client,
                message.session,
                message.deadline_ms,
                arrived,
                connection=connection,
                policy=policy,
            )
        )
        reply: bytes | str = codec.answer(chunk, 1e3 * (time.perf_counter() - arrived), previous_ms)
        return reply

    async def _fail(self, socket: web.WebSocketResponse, text: str) -> None:
        """Say that something is wrong and end the connection: openpi's way is a text frame first, which a client that
        takes each frame for an answer would misread; it finds the words in the reason of the end."""
        assert self._kind is not None
        reason = text.encode()[:MAX_REASON].decode(errors="ignore").encode()
        with contextlib.suppress(ConnectionError, RuntimeError):
            if self._kind.explains:
                await socket.send_str(text)
                reason = b"Internal server error. The reason is in the previous frame."
            await socket.close(code=WSCloseCode.INTERNAL_ERROR, message=reason)


async def _anonymous(_request: web.Request, response: web.StreamResponse) -> None:
    """The versions of Python and aiohttp are nobody's business."""
    response.headers["Server"] = "sinew"


def _data(message: WSMessage) -> bytes:
    return message.data if isinstance(message.data, bytes) else message.data.encode()


def _is_ours(record: logging.LogRecord) -> bool:
    """aiohttp writes a traceback for every message that is no HTTP; whoever sends those could fill the log."""
    return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))


def _key(request: web.Request) -> str:
    scheme, _, key = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() in ("api-key", "bearer"):
        return key.strip()
    return request.headers.get("X-API-Key", "")


def _protocol(runner: web.AppRunner) -> asyncio.Protocol:
    assert runner.server is not None  # after setup
    made: asyncio.Protocol = runner.server()
    return made
