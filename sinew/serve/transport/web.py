"""HTTP and WebSocket transport: one aiohttp server on its own thread, for protocols over WebSockets and HTTP
routes.

The server always has ``GET /healthz`` and ``GET /metrics``, and a page at / if there is one. The event loop only
moves bytes. The scheduler's decode threads decode observations.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from aiohttp import WSCloseCode, WSMessage, WSMsgType, web
from aiohttp.http_exceptions import HttpProcessingError

from sinew.core import CancelledError, Observation, PolicySpec, RequestError, SinewError
from sinew.core.rate_limited_log import RateLimitedLog
from sinew.serve.access import POLICIES, key_in, refused_page, role_for
from sinew.serve.decode.frames import PixelBudget
from sinew.serve.metrics import CONTENT_TYPE
from sinew.serve.policies import DEFAULT, Deployment
from sinew.serve.service import Service
from sinew.serve.transport.connections import Connection, Connections, connection_of
from sinew.serve.transport.ledger import HELD_REQUESTS
from sinew.serve.transport.listen import Listen
from sinew.serve.transport.routes import (
    JSON,
    MAX_REASON,
    Dialect,
    Guard,
    Handler,
    Page,
    Routes,
    error_answer,
)

logger = logging.getLogger(__name__)

CLOSE_S = 1.0  # seconds within which the last answers are sent
STOP_S = 4.0  # seconds within which the event loop must end
# Errors that mean that no further connection can be opened.
NO_ROOM = (
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOBUFS,
    errno.ENOMEM,
)
PENDING = 2  # largest number of waiting observations of one connection; openpi's clients send one at a time


class WebServer:
    """A web server for one port.

    Args:
        wires: The protocols to serve. At most one of them is a Dialect, whose WebSockets use any path.
        listen: The address and the limits.
        page: Creates the page for browsers from the service and the guard that checks its key; None for no page.
    """

    def __init__(
        self,
        wires: Sequence[Dialect | Routes],
        listen: Listen,
        page: Callable[[Service, Guard], Page] | None = None,
    ):
        self.name = " and ".join(wire.name for wire in wires)
        self._routes = [wire for wire in wires if not isinstance(wire, Dialect)]
        self._dialect = next((wire for wire in wires if isinstance(wire, Dialect)), None)
        self._listen = listen
        self._tls = listen.tls()
        self._socket = listen.tcp_socket()
        host = f"[{listen.host}]" if ":" in listen.host else listen.host or "0.0.0.0"  # noqa: S104 - shown
        scheme = ("wss" if self._tls else "ws") if self._dialect else "https" if self._tls else "http"
        self.address = f"{scheme}://{host}:{self._socket.getsockname()[1]}"
        # The address that a browser opens; "" if there is no page.
        self.dashboard = "" if page is None else self.address.replace("ws", "http", 1) + "/"
        logging.getLogger("aiohttp.server").addFilter(_is_ours)
        self._thread: threading.Thread | None = None
        self._quiet, self._failures = RateLimitedLog(logger), RateLimitedLog(logger)
        self._loop = asyncio.new_event_loop()
        self._ended: asyncio.Event | None = None
        self._open: set[web.WebSocketResponse] = set()
        self._make_page = page
        self.page: Page | None = None  # None until the server has started
        self._front: Handler | None = None  # handler of the page at /; None without a page
        # A thread that decodes observations that are stored without computing a chunk.
        self._decoder = ThreadPoolExecutor(1, thread_name_prefix="sinew-web-decode")

    def start(self, service: Service) -> None:
        self._service = service
        ready = threading.Event()
        self._thread = service.supervisor.thread(
            "sinew-web", lambda: self._loop.run_until_complete(self._run(ready))
        )
        ready.wait()

    def stop(self) -> None:
        if self._thread is not None and self._ended is not None:
            with contextlib.suppress(RuntimeError):  # the event loop has already ended
                self._loop.call_soon_threadsafe(self._ended.set)
            self._thread.join(STOP_S)
            if self._thread.is_alive():
                logger.error("%s: the event loop did not stop in time", self.name)
                return
        self._decoder.shutdown(wait=False, cancel_futures=True)
        self._loop.close()
        self._socket.close()

    def guide(self, spec: PolicySpec) -> list[str]:
        lines = list(self._dialect.guide(spec, self.address)) if self._dialect else []
        for routes in self._routes:
            lines += [""] * bool(lines)
            lines += routes.guide(spec, self.address.replace("ws", "http", 1))
        return lines

    async def _run(self, ready: threading.Event) -> None:
        self._ended = asyncio.Event()
        self._loop.set_exception_handler(self._on_error)
        app = web.Application(middlewares=[self._counted], client_max_size=self._listen.max_message_bytes)
        app.on_response_prepare.append(_anonymous)
        app.router.add_get("/healthz", self._health)
        app.router.add_get("/metrics", self._metrics)
        beside = [self._dialect.beside] if self._dialect and self._dialect.beside else []
        for routes in [*self._routes, *beside]:
            routes.add(self._service, self._guarded, app.router)
        if self._make_page is not None:
            self.page = self._make_page(self._service, self._guarded)
            self._front = self.page.add(app.router, at_root=not self._dialect)
        if self._dialect:
            app.router.add_get("/{path:.*}", self._websocket)
        runner = web.AppRunner(
            app,
            handle_signals=False,
            access_log=None,
            keepalive_timeout=60.0,
            handler_cancellation=True,
            # Do not decompress bodies: frames are compressed already, and a body could be a decompression bomb.
            auto_decompress=False,
        )
        await runner.setup()
        listen = self._listen
        connections = Connections(
            self.name, listen.max_connections, HELD_REQUESTS * listen.max_message_bytes, listen.arrival_s
        )
        self.ledger = connections.ledger
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
        if self.page is not None:
            self.page.end()
        # Let the handlers receive the answers that the end of the scheduler has produced.
        await asyncio.sleep(0)
        for socket in list(self._open):
            with contextlib.suppress(Exception):
                await asyncio.wait_for(socket.close(code=WSCloseCode.GOING_AWAY), CLOSE_S)
        await runner.shutdown()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(runner.cleanup(), CLOSE_S)

    def _on_error(self, loop: asyncio.AbstractEventLoop, about: dict[str, Any]) -> None:
        """Log in one line that a connection could not be accepted.

        By default, asyncio logs a traceback for each place of its queue, once a second, while no file descriptor is
        free.
        """
        error = about.get("exception")
        if isinstance(error, OSError) and error.errno in NO_ROOM:
            self._quiet.warning("%s: a connection could not be accepted: %s", self.name, error)
        else:
            loop.default_exception_handler(about)

    @web.middleware
    async def _counted(
        self, request: web.Request, handler: Callable[..., Awaitable[Any]]
    ) -> web.StreamResponse:
        """Call the handler of a request, and count the request in the account of its connection: when it is complete,
        and when it is answered.
        """
        connection = connection_of(request)
        if not request.can_read_body:
            connection.whole()
        try:
            about = request.method, request.path, request.headers, self._listen
            if (reason := refused_page(*about, keyed=self._service.wants_key)) is not None:
                refusal = web.Response(status=403, text=f"{reason}\n")
                refusal.force_close()
                return refusal
            return await handler(request)
        except web.HTTPMethodNotAllowed as error:
            if request.path.startswith("/v1/") and all(wire.name != "http" for wire in self._routes):
                error.text = (
                    f"{error.text}. To use the routes below /v1, start the server with `--wire http`.\n"
                )
            raise
        finally:
            # Count the request as complete, even if its body was not read.
            connection.whole()
            connection.answered(connection.waiting)

    async def _health(self, _request: web.Request) -> web.Response:
        """Answer with status 503 and the reasons while no request can be answered. The answer states nothing about the
        policy, so it needs no key."""
        if problems := self._service.problems():
            response = web.Response(status=503, text="\n".join(["UNHEALTHY", *problems, ""]))
        else:
            response = web.Response(text="OK\n")
        response.force_close()
        return response

    async def _metrics(self, request: web.Request) -> web.Response:
        try:
            with self._service.reading("http", request.remote or ""):
                self._service.authorize(key_in(request.headers), role_for(request.method, request.path))
        except SinewError as error:
            return web.Response(status=401, text=f"{error}\n")
        response = web.Response(
            body=self._service.metrics.exposition(), headers={"Content-Type": CONTENT_TYPE}
        )
        response.force_close()
        return response

    def _guarded(self, handler: Handler) -> Handler:
        """Return a handler that checks the key, calls ``handler``, and answers errors as JSON."""

        async def answer(request: web.Request) -> web.StreamResponse:
            try:
                with self._service.reading("http", request.remote or ""):
                    self._service.authorize(key_in(request.headers), role_for(request.method, request.path))
                if self._service.wants_key:
                    connection_of(request).prove()
                response = await handler(request)
                connection_of(request).prove()
                return response
            except SinewError as error:
                status, body = error_answer(error)
            except web.HTTPRequestEntityTooLarge:
                too_large = RequestError(f"request: expected at most {self._listen.max_message_bytes} bytes")
                self._service.refused("http", request.remote or "", too_large)
                status, body = 413, error_answer(too_large)[1]
            return web.Response(status=status, body=body, content_type=JSON)

        return answer

    async def _websocket(self, request: web.Request) -> web.StreamResponse:
        if self._front is not None and request.path == "/" and "Upgrade" not in request.headers:
            return await self._front(request)
        assert self._dialect is not None
        service, client, dialect = self._service, request.remote or "", self._dialect
        name = dialect.name
        policy = request.path.removeprefix(f"{POLICIES}/") if request.path.startswith(POLICIES) else DEFAULT
        try:
            with service.reading(name, client):
                service.authorize(key_in(request.headers))
                deployment = service.policies.get(policy)
                if dialect.connect is not None:
                    dialect = dialect.connect(deployment.spec, service.about(policy), dict(request.query))
        except SinewError as error:
            return web.Response(status=error_answer(error)[0], text=f"{error}\n")
        socket = web.WebSocketResponse(
            max_msg_size=self._listen.max_message_bytes,
            compress=False,
            heartbeat=dialect.ping_s,
            timeout=CLOSE_S,
            autoping=False,  # the loop below answers and counts pings
        )
        if not socket.can_prepare(request):
            response = web.Response(
                status=426, text=f"this is a WebSocket of {name}; send GET /healthz to check the server\n"
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
        # The keys may change during the connection, so check the key again for each message.
        admit = partial(service.authorize, key_in(request.headers))
        # A separate task answers, so that reading continues during an inference. Pings are then answered, and a
        # disconnected client is detected.
        worker = asyncio.create_task(
            self._answer(socket, dialect, connection, messages, client, policy, admit)
        )
        try:
            if dialect.greet is not None:
                await socket.send_bytes(dialect.greet(deployment.spec, service.about(policy)))
            async for message in socket:
                if message.type in (WSMsgType.PING, WSMsgType.PONG):
                    connection.control_frame(len(message.data))
                    if message.type == WSMsgType.PING:
                        await socket.pong(message.data)
                elif (message.type == WSMsgType.BINARY) != dialect.binary:
                    expected = "binary frame with a msgpack map" if dialect.binary else "text frame"
                    await self._fail(socket, f"expected a {expected}, got the other kind")
                    break
                elif messages.full() and not dialect.waits:
                    await self._fail(
                        socket,
                        f"at most {PENDING} observations of one connection may wait; wait for each answer",
                    )
                    break
                else:
                    await messages.put((time.perf_counter(), _data(message), connection.whole()))
                # Free the memory of the message now, because the next message may come much later.
                del message
        except (ConnectionError, asyncio.CancelledError):
            logger.debug("a client of %s has disconnected", name)
        finally:
            # Run these lines before any await, because a cancelled task can be cancelled again at each await.
            self._open.discard(socket)
            service.metrics.connection(name, -1)
            worker.cancel()
            await asyncio.wait([worker])
        return socket

    async def _answer(
        self,
        socket: web.WebSocketResponse,
        dialect: Dialect,
        connection: Connection,
        messages: asyncio.Queue[tuple[float, bytes, int]],
        client: str,
        policy: str,
        admit: Callable[[], None],
    ) -> None:
        """Answer the observations of a connection one after the other, until the connection ends.

        Args:
            socket: The WebSocket of the connection.
            dialect: The protocol.
            connection: The account of the connection's memory.
            messages: The received messages: arrival time, bytes, and number of counted bytes.
            client: Address of the peer.
            policy: Name of the policy in the address; "" for the first.
            admit: Checks that the key of the connection is still valid. Raises UnauthorizedError.
        """
        previous_ms: float | None = None
        while True:
            arrived, payload, size = await messages.get()
            try:
                with self._service.reading(dialect.name, client):
                    admit()
                reply = await self._reply(dialect, payload, arrived, previous_ms, client, connection, policy)
                if reply is not None:
                    await (socket.send_str(reply) if isinstance(reply, str) else socket.send_bytes(reply))
                connection.prove()
                previous_ms = 1e3 * (time.perf_counter() - arrived)
            except SinewError as error:
                refusal = dialect.error(error) if dialect.error is not None else None
                if refusal is None:
                    await self._fail(socket, f"{error} [{error.code}]")
                    return
                with contextlib.suppress(ConnectionError):
                    await socket.send_bytes(refusal)
            except ConnectionError:
                return
            except Exception as error:  # noqa: BLE001 - whatever it is, the other clients are served on
                self._failures.error("a request could not be answered", error)
                await self._fail(socket, "internal error; the server's log has the details")
                return
            finally:
                # Free the memory of the message now, because the next message may come much later.
                del payload
                connection.answered(size)
                connection.keep(dialect.kept())

    async def _reply(
        self,
        dialect: Dialect,
        payload: bytes,
        arrived: float,
        previous_ms: float | None,
        client: str,
        connection: Connection,
        policy: str,
    ) -> bytes | str | None:
        service = self._service
        with service.reading(dialect.name, client):
            message = dialect.read(payload)
        if message.endpoint == "answered":
            return message.reply
        if dialect.reset is not None and message.endpoint == "reset":
            service.reset(message.session, policy)
            return dialect.reset()
        deployment = service.policies.get(policy)
        spec = deployment.spec
        if dialect.seen is not None and message.endpoint == "seen":
            with service.reading(dialect.name, client):
                await self._decode(lambda budget: dialect.observation(message, spec, budget), deployment)
            return dialect.seen(message)
        outcomes = await service.outcomes(
            message,
            lambda each, budget: dialect.observation(each, spec, budget),
            wire=dialect.name,
            client=client,
            arrived=arrived,
            connection=connection,
            policy=policy,
        )
        return dialect.answer(message, outcomes, 1e3 * (time.perf_counter() - arrived), previous_ms)

    async def _decode(
        self, observation: Callable[[PixelBudget], Observation], deployment: Deployment
    ) -> None:
        """Decode and check an observation for which no chunk is computed.

        Observations are decoded one at a time, because the frames of several could exceed the server's memory
        limit. Decoding ends when the client disconnects.
        """
        client_left = threading.Event()

        def check() -> None:
            if client_left.is_set():
                raise CancelledError("the client has disconnected")

        def read() -> None:
            seen = observation(PixelBudget(deployment.pixels, check))
            if deployment.safety is not None:
                deployment.safety.check(seen)
            deployment.scheduler.policy.prepare(seen)

        try:
            await self._loop.run_in_executor(self._decoder, read)
        except asyncio.CancelledError:
            client_left.set()
            raise

    async def _fail(self, socket: web.WebSocketResponse, text: str) -> None:
        """Send an error and end the connection.

        openpi's protocol sends a text frame first. A client of another protocol would read this frame as an
        answer, so the error is the reason of the close frame.
        """
        assert self._dialect is not None
        reason = text.encode()[:MAX_REASON].decode(errors="ignore").encode()
        with contextlib.suppress(ConnectionError, RuntimeError):
            if self._dialect.explains:
                await socket.send_str(text)
                reason = b"Internal server error. The reason is in the previous frame."
            await socket.close(code=WSCloseCode.INTERNAL_ERROR, message=reason)


async def _anonymous(_request: web.Request, response: web.StreamResponse) -> None:
    """Replace the value of an answer's header Server, which would state the versions of Python and aiohttp."""
    response.headers["Server"] = "sinew"


def _data(message: WSMessage) -> bytes:
    return message.data if isinstance(message.data, bytes) else message.data.encode()


def _is_ours(record: logging.LogRecord) -> bool:
    """Return False for a log record that aiohttp writes about invalid HTTP. Such records are dropped, because a client
    could fill the log with them.
    """
    return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))


def _protocol(runner: web.AppRunner) -> asyncio.Protocol:
    assert runner.server is not None  # setup() has created the server
    protocol: asyncio.Protocol = runner.server()
    return protocol
