"""LeRobot's asynchronous inference: the server for its ``RobotClient``, over gRPC.

A client sends ``Ready``, names the policy and its robot's features, and then streams observations while another of
its threads requests actions. The newest observation waits, and older observations are dropped. A chunk is computed when
the client requests it. LeRobot's server has one state for all clients; here each connection has its own state.

The payloads are pickles. The module :mod:`sinew.serve.wires.lerobot.pickle.machine` reads the pickles, never
Python's own ``pickle``. Source: ``lerobot/transport/services.proto`` and
``lerobot/async_inference/policy_server.py`` of LeRobot 0.4.4.
"""

from __future__ import annotations

import asyncio
import logging
import shlex
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from sinew_client.untrusted import UntrustedError, read_bytes

from sinew.core import BusyError, Observation, ObservationError, PolicySpec, RequestError, SinewError
from sinew.core.extras import MissingPackageError
from sinew.core.rate_limited_log import RateLimitedLog
from sinew.serve.access import UnauthorizedError, key_of
from sinew.serve.decode.frames import PixelBudget
from sinew.serve.renewed import ReloadedFile
from sinew.serve.request import DeadlineError, Request, ShuttingDownError, SupersededError
from sinew.serve.service import Service, printable
from sinew.serve.transport.listen import AddressError, Listen, reachable
from sinew.serve.wires import field_names
from sinew.serve.wires.lerobot.agreements import fitting, state_folder
from sinew.serve.wires.lerobot.features import DEFAULT_HZ, Agreement, agree, observation
from sinew.serve.wires.lerobot.messages import SERVICE, actions_message, parse
from sinew.serve.wires.lerobot.sessions import NoPolicyError, RobotSession, Sessions, TooSlowError, Waiting
from sinew.serve.wires.lerobot.types import read_observation, read_policy_config, write_actions

logger = logging.getLogger(__name__)

NAME = "lerobot"
# Largest gRPC message, bytes: the limit of LeRobot's server; clients send pieces of 2 MiB.
MAX_PIECE = 4 << 20
OBSERVATION_WAIT_S = 2.0  # seconds that GetActions waits for an observation, as in LeRobot's server
# Seconds before GetActions is rejected, because the stock client requests actions again at once.
REFUSAL_PAUSE_S = 0.5
# Milliseconds without calls after which a connection is closed, because many such connections would block other
# robots. gRPC opens another connection when the client needs one.
IDLE_MS = 30_000
GRACE_S = 0.3  # seconds for running calls to end when the server stops
STOP_S = 4.0  # seconds for the server and its thread to end


class LeRobotWire:
    """The server of LeRobot's protocol. The constructor claims the port. The server runs on its own event loop and
    thread, and requests wait until :meth:`start`.

    Args:
        listen: The address and the limits.
        memory: File for agreements, so that they outlive this process; None uses a file of the user for this
            port.
    """

    name = NAME
    dashboard = ""

    def __init__(self, listen: Listen, memory: Path | None = None):
        self._memory = memory
        try:
            import grpc
            import grpc.aio
        except ImportError as error:
            raise MissingPackageError(f"--wire {NAME}", "grpc", f" ({error})") from error
        self._grpc = grpc
        self._listen = listen
        self._sessions = Sessions(listen)
        self._failures = RateLimitedLog(logger)
        self._stopping = False
        self._stopped = threading.Event()
        self._service: Service | None = None
        # Reject unusable files before gRPC reads them.
        listen.tls()
        if listen.port:
            # Test the address, because gRPC does not report why it cannot use an address.
            listen.tcp_socket().close()
        self._decoder = ThreadPoolExecutor(2, "sinew-lerobot-decode")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="sinew-lerobot", daemon=True)
        self._thread.start()
        try:
            self._server, port = self._call(self._claim())
        except BaseException:
            self._end_loop()
            raise
        host = listen.numeric_host()
        scheme = "grpc" if listen.tls_cert is None else "grpcs"
        self.address = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"

    def start(self, service: Service) -> None:
        self._service = service
        memory = self._memory
        # Use a file only for a fixed port, because a random port differs after a restart.
        if memory is None and self._listen.port:
            memory = state_folder() / f"lerobot-{self._listen.port}.json"
        self._sessions.agreements.open(memory, service.spec)
        if not self._listen.is_loopback:
            logger.warning(
                "lerobot: use this protocol only if you trust every machine in the network: clients unpickle replies"
                " without restriction, so a machine that answers in place of this server can run code on the robots"
            )
        if service.wants_key:
            logger.warning(
                "lerobot: LeRobot's own client cannot send a key, so the server rejects it;"
                " clients that send the key as gRPC metadata `authorization` are accepted"
            )
        service.supervisor.watch(
            lambda: (
                None
                if self._thread.is_alive() or self._stopping
                else "the thread of the protocol lerobot has ended"
            )
        )
        self._call(self._server.start())

    def stop(self) -> None:
        if self._loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop)
        self._stopped.wait(STOP_S)
        self._end_loop()

    def guide(self, spec: PolicySpec) -> Sequence[str]:
        """Return the stock client's command line. The user replaces the robot's type, port and camera indices."""
        hz = max(1, round(spec.control_hz or DEFAULT_HZ))
        cameras = ", ".join(
            f"{name}: {{type: opencv, index_or_path: {index}, width: {camera.width}, height: {camera.height},"
            f" fps: {hz}}}"
            for index, (camera, name) in enumerate(zip(spec.cameras, _robot_names(spec), strict=True))
        )
        return [
            "python -m lerobot.async_inference.robot_client \\",
            "    --robot.type=so101_follower --robot.port=/dev/ttyACM0 --robot.id=arm \\",
            f"    --robot.cameras={shlex.quote(f'{{{cameras}}}')} \\",
            '    --task="pick up the red cube" \\',
            f"    --server_address={reachable(self.address).partition('//')[2]} \\",
            f"    --policy_type={spec.architecture} --pretrained_name_or_path={shlex.quote(spec.name)} \\",
            f"    --actions_per_chunk={spec.chunk_size} --fps={hz}",
        ]

    async def _claim(self) -> tuple[Any, int]:
        grpc, listen = self._grpc, self._listen
        server = grpc.aio.server(
            maximum_concurrent_rpcs=4 * listen.max_connections,
            options=[
                # Without this option, a second server on the same port would share the port silently.
                (
                    "grpc.so_reuseport",
                    0,
                ),
                ("grpc.max_receive_message_length", MAX_PIECE),
                ("grpc.max_send_message_length", -1),
                ("grpc.max_metadata_size", 8192),
                ("grpc.max_allowed_incoming_connections", listen.max_connections),
                ("grpc.max_connection_idle_ms", IDLE_MS),
                ("grpc.max_concurrent_streams", 16),  # largest number of streams of one connection
                # Allow no compression, so that a message cannot be a decompression bomb.
                (
                    "grpc.compression_enabled_algorithms_bitset",
                    1,
                ),
                ("grpc.server_handshake_timeout_ms", 5_000),
                ("grpc.keepalive_time_ms", 30_000),
                ("grpc.keepalive_timeout_ms", 10_000),
                ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
                ("grpc.http2.max_ping_strikes", 3),
            ],
        )
        one, stream = grpc.unary_unary_rpc_method_handler, grpc.stream_unary_rpc_method_handler
        handlers = {
            "Ready": one(self._handler(self._ready)),
            "SendPolicyInstructions": one(self._handler(self._instructions)),
            "SendObservations": stream(self._handler(self._observations)),
            "GetActions": one(self._handler(self._actions)),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        host = listen.numeric_host()
        address = f"[{host}]:{listen.port}" if ":" in host else f"{host}:{listen.port}"
        try:
            if listen.tls_cert is None:
                return server, server.add_insecure_port(address)
            cert, key = listen.tls_cert, listen.tls_key or listen.tls_cert

            def read() -> Any:
                # Raise an error if the certificate and the key do not belong together.
                listen.tls()
                pair = read_bytes(key), read_bytes(cert)
                return grpc.ssl_server_certificate_configuration([pair])

            newest = ReloadedFile([cert, key], read)  # gRPC calls this at each handshake
            credentials = grpc.dynamic_ssl_server_credentials(newest(), newest)
            return server, server.add_secure_port(address, credentials)
        except (RuntimeError, OSError, UntrustedError) as error:
            raise AddressError(f"cannot listen on {listen.host}:{listen.port}: {error}") from error

    async def _stop(self) -> None:
        self._stopping = True
        self._sessions.wake()
        if self._service is None:
            # Start the server first, because a server that was never started would keep its port.
            await self._server.start()
        await self._server.stop(GRACE_S)
        self._stopped.set()

    def _call(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(_awaited(work), self._loop).result()

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(STOP_S)
        if not self._thread.is_alive():
            self._loop.close()
        self._decoder.shutdown(wait=False, cancel_futures=True)

    def _handler(
        self, method: Callable[[Any, Any, str], Awaitable[bytes]]
    ) -> Callable[[Any, Any], Awaitable[bytes]]:
        """Return a gRPC method that calls ``method``. Failures are counted, and answered with a status and a text."""

        async def handle(request: Any, context: Any) -> bytes:
            client = unquote(context.peer())
            try:
                if self._service is None or self._stopping:
                    raise ShuttingDownError
                self._service.authorize(_key(context))
                return await method(request, context, client)
            except _InferenceFailedError as failure:
                error = failure.error  # the service has already counted this error
            except SinewError as refusal:
                error = refusal
                if self._service is not None:
                    self._service.refused(NAME, client, error)
            except Exception as unexpected:  # noqa: BLE001 - the other robots are served on
                self._failures.error("lerobot: a request failed unexpectedly", unexpected)
                error = SinewError(
                    f"internal error ({type(unexpected).__name__}); the server's log has the details"
                )
            try:
                await context.abort(self._status(error), f"[{error.code}] {printable(error)}")
            except self._grpc.aio.AbortError:
                raise
            except Exception as gone:  # noqa: BLE001 - gRPC has no type for it: the call has already ended
                logger.debug("lerobot: %s disconnected before its error was sent: %s", client, gone)
            raise asyncio.CancelledError

        return handle

    def _status(self, error: SinewError) -> Any:
        """Return gRPC's status for an error. The stock client silently repeats calls after UNAVAILABLE and
        DEADLINE_EXCEEDED, so only a stopping server answers with UNAVAILABLE."""
        codes = self._grpc.StatusCode
        for kinds, code in (
            ((ObservationError, RequestError), codes.INVALID_ARGUMENT),
            ((UnauthorizedError,), codes.UNAUTHENTICATED),
            ((BusyError,), codes.RESOURCE_EXHAUSTED),
            ((ShuttingDownError,), codes.UNAVAILABLE),
            ((NoPolicyError,), codes.FAILED_PRECONDITION),
            ((DeadlineError, SupersededError, TooSlowError), codes.ABORTED),
        ):
            if isinstance(error, kinds):
                return code
        return codes.INTERNAL

    async def _ready(self, request: bytes, _context: Any, client: str) -> bytes:
        """Begin a client's session. Its earlier observations are dropped."""
        parse("Empty", request)
        self._sessions.begin(client)
        self._ready_service.reset(client)
        return b""

    async def _instructions(self, request: bytes, _context: Any, client: str) -> bytes:
        config = read_policy_config(parse("PolicySetup", request).data)
        agreement = agree(config, self._ready_service.spec)
        self._sessions.agree(client, agreement)
        logger.info(
            "lerobot: %s drives %s with cameras %s and %d actions per chunk (the client requested the device %s)",
            *(
                client,
                config.policy_type,
                dict(agreement.images),
                agreement.actions,
                ascii(config.device)[:40],
            ),
        )
        return b""

    async def _observations(self, pieces: AsyncIterator[bytes], _context: Any, client: str) -> bytes:
        session, agreed = self._sessions.find(client)
        data = await self._sessions.receive(pieces)
        arrived = time.perf_counter()
        with self._sessions.held(len(data)):
            budget = PixelBudget(self._ready_service.policies.get().pixels, self._raise_if_stopping)
            decode = self._loop.run_in_executor(self._decoder, _decode, data, agreed, budget)
            timed, seen, agreement = await decode
        self._sessions.recognize(client, session, agreement)
        # The frames may take more memory than the message, because float16 frames are decoded to twice their size.
        decoded = sum(frame.nbytes for frame in seen.images.values())
        if not session.offer(Waiting(timed.timestep, seen, max(len(data), decoded), arrived), timed.must_go):
            logger.debug(
                "lerobot: %s: the actions of timestep %d were computed already", client, timed.timestep
            )
        return b""

    async def _actions(self, request: bytes, context: Any, client: str) -> bytes:
        parse("Empty", request)
        try:
            session, agreed = self._sessions.find(client)
        except NoPolicyError:
            await asyncio.sleep(REFUSAL_PAUSE_S)
            raise
        waiting = await self._next(session)
        if waiting is None:
            # LeRobot's server sends Empty here, which has the same bytes as Actions without data.
            return b""
        inference = Request(
            NAME,
            lambda _budget: waiting.observation,
            client=client,
            session=client,
            deadline_ms=self._deadline_ms(context, waiting.arrived),
            arrived=waiting.arrived,
        )
        chunk = None
        try:
            chunk = await self._ready_service.infer(inference)
        except SinewError as error:
            raise _InferenceFailedError(error) from None
        finally:
            # The inference failed or was cancelled, so allow another observation of this timestep.
            if chunk is None:
                session.predicted.pop(waiting.timestep, None)
        interval_s = 1 / (self._ready_service.spec.control_hz or DEFAULT_HZ)
        # An observation has waited, so there is an agreement.
        agreement = session.agreement or agreed[0]
        rows = chunk.actions[: agreement.actions]
        observed = waiting.observation.time or 0.0
        return actions_message(write_actions(rows, observed, waiting.timestep, interval_s, agreement.helpers))

    @property
    def _ready_service(self) -> Service:
        # _handler() checks that the service exists before it calls a method.
        assert self._service is not None
        return self._service

    def _raise_if_stopping(self) -> None:
        if self._stopping:
            raise ShuttingDownError

    def _deadline_ms(self, context: Any, arrived: float) -> float | None:
        """Return the deadline in milliseconds after the observation's arrival.

        The deadline is the server's limit, or the end of the client's call if it is earlier; None if there is
        neither.
        """
        limit = self._ready_service.deadline_ms
        remaining = context.time_remaining()
        if remaining is None:
            return limit
        call = max(1e3 * (time.perf_counter() - arrived + remaining), 1e-3)
        return call if limit is None else min(call, limit)

    async def _next(self, session: RobotSession) -> Waiting | None:
        """Wait for an observation and return it; None if no observation arrives in :data:`OBSERVATION_WAIT_S`."""
        try:
            async with asyncio.timeout(OBSERVATION_WAIT_S):
                while (waiting := session.take()) is None:
                    if self._stopping:
                        raise ShuttingDownError
                    await session.news.wait()
                return waiting
        except TimeoutError:
            return None


class _InferenceFailedError(Exception):
    """Wraps the error of a failed inference. The service has already counted this error, so it is not counted again."""

    def __init__(self, error: SinewError):
        self.error = error


async def _awaited(work: Any) -> Any:
    return await work


def _decode(
    data: bytes, agreed: tuple[Agreement, ...], budget: PixelBudget
) -> tuple[Any, Observation, Agreement]:
    timed = read_observation(data)
    agreement = agreed[0] if len(agreed) == 1 else fitting(agreed, timed.observation)
    if agreement is None:
        raise NoPolicyError("several robots of this host have different features; start the client again")
    return timed, observation(timed, agreement, budget), agreement


def _key(context: Any) -> str | bytes | None:
    """Return the key in the call's metadata `authorization`. The key may follow the name of a scheme, as in ``Bearer
    KEY``.
    """
    for name, value in context.invocation_metadata() or ():
        if name == "authorization":
            return key_of(value) or value if isinstance(value, str) else value
    return None


def _robot_names(spec: PolicySpec) -> list[str]:
    """Return the camera names that a robot should use, so that the server recognises the policy's cameras."""
    by_bundle = field_names.camera_keys(spec, NAME) if field_names.key_maps(spec, NAME) else {}
    return [by_bundle.get(each.name, each.name).removeprefix("observation.images.") for each in spec.cameras]
