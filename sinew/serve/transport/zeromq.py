"""ZeroMQ transport: one loop that moves bytes between a ROUTER socket and the service, for any codec.

The loop sleeps in one poll. Requests wake it through the ROUTER socket; replies (from the scheduler's
threads) and the end wake it through a socket pair, so it neither spins nor needs a time-out.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import zmq

from sinew.core import ActionChunk, Observation, PolicySpec, RequestError, SinewError
from sinew.serve.scheduler import Job, Outcome
from sinew.serve.service import Inference, Service
from sinew.serve.transport.listen import AddressError, Listen

logger = logging.getLogger(__name__)

MONITOR = "inproc://sinew-connections"  # one per context

BURST = 64  # messages taken from the socket before replies are sent again
RECEIVE_QUEUE = 4  # messages that ZeroMQ holds per client; beyond, the client's TCP connection is held back
LINGER_MS = 300  # how long closing may take to hand over the last replies
MAX_ROUTING_ID = 255  # bytes, ZeroMQ's own limit
MAX_ENVELOPE = 8  # frames: one routing id per proxy on the way, and the empty frame

Envelope = list[bytes]
Payload = memoryview


class Header(Protocol):
    """What a codec's ``peek`` finds out. error: why the request is refused, or None."""

    @property
    def session(self) -> str: ...
    @property
    def deadline_ms(self) -> float | None: ...
    @property
    def error(self) -> SinewError | None: ...


class Codec(Protocol):
    """One protocol of requests and replies, each one frame."""

    name: str

    def bind(self, service: Service) -> None:
        """The policy is loaded; called once, before the first request."""

    def peek(self, payload: Payload) -> Any:
        """Look a request over, cheaply: this runs on the loop. Never raises: a refusal is in the header."""

    def authorize(self, header: Any) -> None:
        """Raises UnauthorizedError."""

    def control(self, header: Any) -> bytes | None:
        """The reply to everything that is not an inference; None for an inference."""

    def decoders(self, header: Any, payload: Payload) -> Sequence[Callable[[], Observation]]:
        """The observations of one request, usually one; each runs on the decode thread."""

    def encode(self, header: Any, chunks: Sequence[ActionChunk], server_ms: float) -> bytes:
        """The reply to an inference, a chunk per decoder. server_ms: from arrival to now."""

    def encode_error(self, header: Any, error: SinewError) -> bytes:
        """The reply to a request that failed; header is None where the message could not be read."""

    def guide(self, spec: PolicySpec, address: str) -> Sequence[str]:
        """See Wire."""


class ZeroMQWire:
    """Binds when created; answers on a thread of its own from :meth:`start` on. Requests that come earlier wait.

    Requests beyond ``listen.max_message_bytes`` are refused with an error; from twice that size on, ZeroMQ
    closes the connection before reading them.
    """

    def __init__(self, codec: Codec, listen: Listen):
        self.codec = codec
        self.name = codec.name
        self._limit = listen.max_message_bytes
        self._stop = False
        self._outbox: deque[tuple[Envelope, bytes]] = deque()
        self._asking: dict[int, set[_Request]] = {}  # file descriptor of a connection -> its requests
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._wake_writer.setblocking(False)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.set(zmq.MAXMSGSIZE, 2 * self._limit)
        self._socket.set(zmq.RCVHWM, RECEIVE_QUEUE)
        self._socket.set(zmq.LINGER, LINGER_MS)
        self._socket.set(zmq.TCP_KEEPALIVE, 1)
        self._socket.monitor(MONITOR, zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self._monitor = self._context.socket(zmq.PAIR)
        self._monitor.set(zmq.RCVHWM, 0)  # ZeroMQ's own thread would wait for room
        self._monitor.connect(MONITOR)
        try:
            host = listen.numeric_host()
            self._socket.set(zmq.IPV6, ":" in host)
            self._socket.bind(f"tcp://{f'[{host}]' if ':' in host else host}:{listen.port or '*'}")
        except (zmq.ZMQError, OSError) as error:
            self._close()
            reason = zmq.strerror(error.errno or 0) if isinstance(error, zmq.ZMQError) else error.strerror
            raise AddressError(f"cannot listen on {listen.host}:{listen.port}: {reason}") from error
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._wake_reader, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        self.address = self._socket.get_string(zmq.LAST_ENDPOINT)
        self._thread: threading.Thread | None = None

    def start(self, service: Service) -> None:
        self._service = service
        self.codec.bind(service)
        self._thread = threading.Thread(target=self._loop, name=f"sinew-{self.name}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop = True
        self._wake()
        if self._thread is not None:
            self._thread.join()
        self._close()

    def guide(self, spec: PolicySpec) -> Sequence[str]:
        return self.codec.guide(spec, self.address)

    # ------------------------------------------------------------------------- the loop

    def _loop(self) -> None:
        while not self._stop:
            self._step(None)
        self._step(0)  # what the scheduler answered before it stopped

    def _close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close()
        self._context.term()
        self._wake_reader.close()
        self._wake_writer.close()

    def _step(self, timeout_ms: int | None) -> None:
        """Wait for something to happen, take requests, send replies."""
        events = dict(self._poller.poll(timeout_ms))
        if self._wake_reader.fileno() in events:
            with contextlib.suppress(BlockingIOError):
                self._wake_reader.recv(4096)
        if self._socket in events:
            for _ in range(BURST):
                try:
                    frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
                except zmq.Again:
                    break
                self._take(frames)
        self._follow_connections()
        while self._outbox:
            envelope, reply = self._outbox.popleft()
            # A ROUTER drops what it cannot deliver: a client that left costs nothing more.
            self._socket.send_multipart([*envelope, reply], zmq.NOBLOCK)

    def _take(self, frames: list[zmq.Frame]) -> None:
        """Answer one message, or queue it."""
        codec = self.codec
        arrived = time.perf_counter()
        envelope, payload = _open(frames)
        connection, client = _peer(frames[0])
        header = None
        try:
            if len(payload) != 1:
                raise RequestError(f"expected a single-frame request, got {len(payload)} frames")
            message = payload[0].buffer
            if len(message) > self._limit:
                raise RequestError(f"request: expected at most {self._limit} bytes, got {len(message)}")
            header = codec.peek(message)
            if header.error is not None:
                raise header.error
            codec.authorize(header)
            reply = codec.control(header)
            if reply is not None:
                self._outbox.append((envelope, reply))
                return
            decoders = codec.decoders(header, message)
        except SinewError as error:
            self._service.refused(self.name, client, error)
            self._outbox.append((envelope, codec.encode_error(header, error)))
            return
        except Exception:  # whatever it is, the other clients are served on
            logger.exception("a request could not be taken")
            self._outbox.append((envelope, codec.encode_error(header, SinewError("internal error"))))
            return
        # Observations of one batch do not replace each other.
        session = header.session if len(decoders) == 1 else ""
        inferences = [
            Inference(self.name, decode, client, session, header.deadline_ms, arrived) for decode in decoders
        ]
        self._follow_connections()  # before this request is there: the number may have been another client's
        request = _Request(self._service, inferences, partial(self._reply, envelope, header, arrived))
        requests = self._asking.setdefault(connection, set())
        requests.add(request)
        request.on_end = partial(requests.discard, request)
        request.ask()

    def _reply(self, envelope: Envelope, header: Any, arrived: float, outcomes: Sequence[Outcome]) -> None:
        """Runs on a thread of the scheduler, or on the loop."""
        chunks = [outcome for outcome in outcomes if isinstance(outcome, ActionChunk)]
        errors = [outcome for outcome in outcomes if isinstance(outcome, SinewError)]
        try:
            if errors:
                reply = self.codec.encode_error(header, errors[0])
            else:
                reply = self.codec.encode(header, chunks, (time.perf_counter() - arrived) * 1e3)
        except Exception:  # a client that gets no reply waits for ever
            logger.exception("a reply could not be written")
            reply = self.codec.encode_error(header, SinewError("internal error"))
        self._outbox.append((envelope, reply))
        self._wake()

    def _follow_connections(self) -> None:
        """Cancel what clients that have left were waiting for.

        A connection is known by its file descriptor, which the system gives to another one later. ZeroMQ tells of
        the end of a connection before it closes it, so a message of the later one comes after that notice.
        """
        while True:
            try:
                event, _address = self._monitor.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            kind, connection = struct.unpack("=HI", event)
            if kind == zmq.EVENT_ACCEPTED:
                self._service.metrics.connection(self.name, +1)
            elif kind == zmq.EVENT_DISCONNECTED:
                self._service.metrics.connection(self.name, -1)
                for request in tuple(self._asking.pop(connection, ())):
                    request.abandon()

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):  # full: it will wake anyway; closed: too late
            self._wake_writer.send(b"\0")


class _Request:
    """The observations of one request, submitted one after the other: a batch takes one place in the queue, other
    clients get their turn in between, and the first failure ends it."""

    def __init__(
        self, service: Service, inferences: list[Inference], reply: Callable[[Sequence[Outcome]], None]
    ):
        self._service = service
        self._left = inferences[::-1]
        self._outcomes: list[Outcome] = []
        self._reply = reply
        self._job: Job | None = None
        self._abandoned = self._ended = False
        self.on_end: Callable[[], None] = _nothing

    def ask(self) -> None:
        try:
            job = self._service.submit(self._left.pop(), self._settle)
        except SinewError as error:  # counted by submit
            self._end(error)
            return
        self._job = None if self._ended else job
        if self._abandoned:
            self._service.cancel(job)

    def abandon(self) -> None:
        self._abandoned = True
        if self._job is not None:
            self._service.cancel(self._job)

    def _settle(self, outcome: Outcome) -> None:
        """Runs on a thread of the scheduler."""
        if self._left and not self._abandoned and not isinstance(outcome, SinewError):
            self._outcomes.append(outcome)
            self.ask()
        else:
            self._end(outcome)

    def _end(self, outcome: Outcome) -> None:
        self._outcomes.append(outcome)
        self.on_end()
        self._reply(self._outcomes)
        # The job knows this object, and with it the frames; a circle would keep them until the collector comes.
        self._ended, self._job, self.on_end = True, None, _nothing


def _nothing() -> None: ...


def _peer(frame: zmq.Frame) -> tuple[int, str]:
    """The connection that a frame came through: its file descriptor, and the address at its other end."""
    try:
        return int(frame.get(zmq.SRCFD)), str(frame.get("Peer-Address"))
    except zmq.ZMQError:  # it has no connection
        return -1, ""


def _open(frames: list[zmq.Frame]) -> tuple[Envelope, list[zmq.Frame]]:
    """Split a ROUTER's message into what routes the reply and the payload frames.

    REQ sockets put an empty frame before the payload, DEALER sockets may leave it out, and a proxy in
    between adds a routing id of its own in front of that empty frame.
    """
    for index in range(1, min(len(frames) - 1, MAX_ENVELOPE)):
        if not frames[index].buffer:
            return [frame.bytes for frame in frames[: index + 1]], frames[index + 1 :]
        if len(frames[index].buffer) > MAX_ROUTING_ID:
            break
    return [frames[0].bytes], frames[1:]
