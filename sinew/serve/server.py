"""The ZeroMQ server: one loop that moves bytes between a ROUTER socket and the scheduler.

The loop sleeps in one poll. Requests wake it through the ROUTER socket; replies (from the scheduler's
threads) and signals wake it through a socket pair, so it neither spins nor needs a time-out.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import signal
import socket
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import zmq

from sinew.core import ActionChunk, RequestError, SinewError
from sinew.serve.scheduler import Scheduler, ShuttingDownError
from sinew.serve.wires.native import Header, Kind, NativeWire

logger = logging.getLogger(__name__)

BURST = 64  # messages taken from the socket before replies are sent again
RECEIVE_QUEUE = 4  # messages that ZeroMQ holds per client; beyond, the client's TCP connection is held back
LINGER_MS = 300  # how long closing may take to hand over the last replies
MAX_ROUTING_ID = 255  # bytes, ZeroMQ's own limit
MAX_ENVELOPE = 8  # frames: one routing id per proxy on the way, and the empty frame

Envelope = list[bytes]


class AddressError(SinewError):
    """The address to listen on is in use or not this machine's."""

    code = "bad_address"


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """host: an address of this machine; the default is reachable from this machine only. port: 0 picks a free one.

    queue_size: requests that may wait beside the running one. max_message_bytes: larger requests are
    refused with an error; from twice that size on, ZeroMQ closes the connection before reading them.
    grace_s: how long stopping waits for the running stage.
    """

    host: str = "127.0.0.1"
    port: int = 5555
    queue_size: int = 8
    max_message_bytes: int = 64 << 20
    grace_s: float = 1.5

    @property
    def is_loopback(self) -> bool:
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"


class Server:
    """Binds when created; answers in :meth:`run`. Requests that arrive between the two wait.

    Not thread-safe, except for :meth:`stop`.
    """

    def __init__(self, config: ServerConfig):
        self.config = config
        self.running = False
        self._stop = False
        self._started = time.monotonic()
        self._outbox: deque[tuple[Envelope, bytes]] = deque()
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._wake_writer.setblocking(False)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.set(zmq.MAXMSGSIZE, 2 * config.max_message_bytes)
        self._socket.set(zmq.RCVHWM, RECEIVE_QUEUE)
        self._socket.set(zmq.LINGER, LINGER_MS)
        self._socket.set(zmq.TCP_KEEPALIVE, 1)
        try:
            host = _numeric(config.host)
            self._socket.set(zmq.IPV6, ":" in host)
            self._socket.bind(f"tcp://{f'[{host}]' if ':' in host else host}:{config.port or '*'}")
        except (zmq.ZMQError, OSError) as error:
            self.close()
            reason = zmq.strerror(error.errno or 0) if isinstance(error, zmq.ZMQError) else error.strerror
            raise AddressError(f"cannot listen on {config.host}:{config.port}: {reason}") from error
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._wake_reader, zmq.POLLIN)
        self.address = self._socket.get_string(zmq.LAST_ENDPOINT)

    def run(self, scheduler: Scheduler, wire: NativeWire, metadata: dict[str, Any]) -> bool:
        """Answer requests until :meth:`stop`; ``scheduler`` must have been started.

        metadata: the answer to METADATA requests. Returns False when the running stage outlasted the
        grace period, so that the scheduler's thread is still busy.
        """
        self._scheduler, self._wire, self._metadata = scheduler, wire, metadata
        self.running = True
        while not self._stop:
            self._step(None)
        logger.info("stopping: cancelling the running request and refusing the others")
        scheduler.stop()
        deadline = time.monotonic() + self.config.grace_s
        while not (finished := scheduler.join(0)) and time.monotonic() < deadline:
            self._step(20)
        if not finished:
            scheduler.give_up()
        self._step(0)
        self.running = False
        return finished

    def stop(self) -> None:
        """Make :meth:`run` return. For any thread, and for signal handlers."""
        self._stop = True
        self._wake()

    def close(self) -> None:
        """Hand over the last replies and free the port."""
        self._socket.close()
        self._context.term()
        self._wake_reader.close()
        self._wake_writer.close()

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """Inside, the first SIGINT or SIGTERM stops :meth:`run` (before it: raises KeyboardInterrupt);
        the second ends the process at once. Main thread only."""

        def on_signal(_number: int, _frame: object) -> None:
            for each in previous:
                signal.signal(each, signal.SIG_DFL)
            if not self.running:
                raise KeyboardInterrupt
            self.stop()

        previous = {each: signal.signal(each, on_signal) for each in (signal.SIGINT, signal.SIGTERM)}
        # The handler above runs when the poll returns; this is what makes it return, whichever thread
        # of the process the signal reaches.
        wakeup = signal.set_wakeup_fd(self._wake_writer.fileno(), warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(wakeup)
            for each, handler in previous.items():
                signal.signal(each, handler)

    # ------------------------------------------------------------------------- the loop

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
        while self._outbox:
            envelope, reply = self._outbox.popleft()
            # A ROUTER drops what it cannot deliver: a client that left costs nothing more.
            self._socket.send_multipart([*envelope, reply], zmq.NOBLOCK)

    def _take(self, frames: list[zmq.Frame]) -> None:
        """Answer one message, or queue it."""
        wire = self._wire
        arrived = time.perf_counter()
        envelope, payload = _open(frames)
        header = Header()
        try:
            if len(payload) != 1:
                raise RequestError(f"expected a single-frame request, got {len(payload)} frames")
            size, limit = len(payload[0].buffer), self.config.max_message_bytes
            if size > limit:
                raise RequestError(f"request: expected at most {limit} bytes, got {size}")
            header = wire.peek(payload[0].buffer)
            if header.error is not None:
                raise header.error
            if header.kind == Kind.INFER:
                self._scheduler.submit(
                    partial(wire.decode, payload[0].buffer), partial(self._reply, envelope, header, arrived)
                )
            elif header.kind == Kind.METADATA:
                self._outbox.append((envelope, wire.encode_metadata(header, self._metadata)))
            elif header.kind == Kind.HEALTH:
                self._outbox.append((envelope, wire.encode_metadata(header, self._health())))
            else:  # RESET: no policy keeps state between requests yet, so there is nothing to forget
                self._outbox.append((envelope, wire.encode_metadata(header, {})))
        except SinewError as error:
            logger.warning("refused a request: %s", _printable(error))
            self._outbox.append((envelope, wire.encode_error(header, error)))
        except Exception:  # whatever it is, the other clients are served on
            logger.exception("a request could not be taken")
            self._outbox.append((envelope, wire.encode_error(header, SinewError("internal error"))))

    def _reply(
        self, envelope: Envelope, header: Header, arrived: float, outcome: ActionChunk | SinewError
    ) -> None:
        """Runs on a thread of the scheduler."""
        if isinstance(outcome, SinewError):
            if not isinstance(outcome, ShuttingDownError):
                logger.warning("request %d failed: %s", header.request_id, _printable(outcome))
            reply = self._wire.encode_error(header, outcome)
        else:
            reply = self._wire.encode_chunk(header, outcome, (time.perf_counter() - arrived) * 1e3)
        self._outbox.append((envelope, reply))
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):  # full: it will wake anyway; closed: too late
            self._wake_writer.send(b"\0")

    def _health(self) -> dict[str, Any]:
        return {
            "status": "stopping" if self._stop else "ok",
            "uptime_s": round(time.monotonic() - self._started, 3),
            **self._scheduler.stats(),
        }


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


def _printable(error: SinewError) -> str:
    """For the log: an error may quote what a client sent, of any length and with line breaks in it."""
    text = str(error)[:300]
    return text if text.isprintable() else repr(text)


def _numeric(host: str) -> str:
    """``host`` as an address: ZeroMQ does not look names up when binding."""
    if host in ("*", ""):
        return "0.0.0.0"  # noqa: S104 - asked for by name
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    found.sort(key=lambda entry: entry[0] != socket.AF_INET)  # clients try 127.0.0.1 for localhost
    return str(found[0][4][0])
