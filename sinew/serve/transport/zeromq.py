"""ZeroMQ transport for every protocol with a codec (an object that reads and writes the protocol's messages). One
loop serves plain TCP or Unix sockets, and implements ZeroMQ's protocol ZMTP (``zmtp.py``).

The loop sleeps in one poll. Requests wake it through their sockets. The thread that makes a reply sends as much of it
as the socket accepts at once. The loop sends the rest. Everything that a peer can make the server store is bounded:
connections, bytes (``ledger.py``), frames, unread replies, and work on the loop. The loop pauses reading from a peer
whose request was rejected, longer each time.

A codec's requests are single frames. The codec checks them on the loop, decodes them on the scheduler's threads, and
writes the replies.
"""

from __future__ import annotations

import contextlib
import heapq
import logging
import selectors
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from sinew_client import shared, tls, zmtp
from sinew_client.link import set_options

from sinew.core import BusyError, Observation, PolicySpec, RequestError, SinewError
from sinew.core.rate_limited_log import RateLimitedLog
from sinew.serve.access import is_loopback
from sinew.serve.decode.frames import PixelBudget
from sinew.serve.job import ServingJob
from sinew.serve.request import Outcome, Request
from sinew.serve.service import Service
from sinew.serve.transport.ledger import HELD_REQUESTS, SWEEP_S, Account, MemoryLedger
from sinew.serve.transport.listen import Listen

logger = logging.getLogger(__name__)

READS = 16  # largest number of reads from one connection before the loop serves the others
MAX_UNSENT = 1 << 20  # bytes of unread replies above which the loop does not read from the client
LINGER_S = 0.3  # seconds for sending the last replies when the server stops
ACCEPTS = 16  # largest number of connections that are accepted at once
ACCEPT_PAUSE_S = 0.02  # seconds without accepting after ACCEPTS connections
# After a rejected request, the loop pauses reading from its connection, for this many seconds. The pause
# doubles with each further rejected request in a row, up to MAX_PAUSE_S.
REFUSAL_PAUSE_S = 0.02
MAX_PAUSE_S = 1.0
MAX_ROUTING_ID = 255  # longest routing id in bytes, ZeroMQ's own limit
# Largest number of frames of an envelope: one routing id per proxy between client and server, and the empty frame.
MAX_ENVELOPE = 8

Envelope = list[zmtp.Frame]


class Codec(Protocol):
    """Interface of a protocol over ZeroMQ. Each request and each reply of the protocol is one frame."""

    name: str
    encrypts: bool  # True if the protocol's clients can use TLS
    # The object that receives the messages of ``stream_kinds``, which have no replies (wires/streams.py). None
    # before the first such message.
    streams: Any
    stream_kinds: Collection[Any]

    def bind(self, service: Service) -> None:
        """Set the service whose policies answer the codec's requests. The server calls this once, before the first
        request.
        """

    def peek(self, payload: memoryview) -> Any:
        """Return the header of a request: ``session``, ``policy`` (the name of the requested policy),
        ``deadline_ms``, and ``error`` (the reason to reject the request, or None). The method runs on the loop, so
        it must be fast and must not raise.
        """

    def open_streams(self) -> Any:
        """Create the object ``streams`` when the first message of a stream arrives, and return it."""

    def authorize(self, header: Any) -> None:
        """Check the key of a request.

        Raises:
            UnauthorizedError: The server requires a key, and the request has no key or a wrong one.
        """

    def control(self, header: Any, peer: Peer | None = None) -> bytes | None:
        """Return the reply to a request that needs no inference, such as a health check. Return None for a request that
        needs an inference.

        Args:
            header: Header of the request.
            peer: The connection of the request.
        """

    def decoders(
        self, header: Any, payload: memoryview, frames: shared.ReceivedFrames | None = None
    ) -> Sequence[Callable[[PixelBudget], Observation]]:
        """Return a decoder for each observation of a request, usually one. The decoders run on the decode threads.

        Args:
            header: Header of the request.
            payload: The request.
            frames: Shared memory that may contain the frames of the request; None without shared memory.
        """

    def encode(self, header: Any, outcomes: Sequence[Outcome], server_ms: float) -> bytes:
        """Return the reply to an inference.

        Args:
            header: Header of the request.
            outcomes: One outcome per decoder.
            server_ms: Milliseconds since the request arrived.
        """

    def encode_error(self, header: Any, error: SinewError) -> bytes:
        """Return the reply to a request that failed. ``header`` is None if the message could not be read."""

    def guide(self, spec: PolicySpec, address: str) -> Sequence[str]:
        """Return the lines of an example program for clients."""


class ZeroMQWire:
    """A server for a ZeroMQ protocol. The constructor binds the socket. After :meth:`start`, an own thread answers
    requests. Earlier connections wait.

    With a certificate and a codec that encrypts, clients use TLS. Plain connections from this machine are
    accepted too, so that an ssh tunnel works for clients without TLS. Plain connections from other machines are
    rejected before they send a key.

    A request larger than ``listen.max_message_bytes`` is rejected with an error. The connection of a request
    larger than twice this size is closed.

    Args:
        codec: The protocol.
        listen: The address and the limits.
    """

    dashboard = ""  # browsers do not support ZeroMQ

    def __init__(self, codec: Codec, listen: Listen):
        self.codec = codec
        self.name = codec.name
        self._limit = listen.max_message_bytes
        self._stop = False
        self._quiet, self._failures = RateLimitedLog(logger), RateLimitedLog(logger)
        self._path = listen.path
        self._tls = listen.tls() if codec.encrypts and not self._path else None
        self._socket = listen.unix_socket() if self._path else listen.tcp_socket()
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._wake_writer.setblocking(False)
        self.ledger = MemoryLedger(
            self.name, listen.max_connections, HELD_REQUESTS * self._limit, self.close, listen.arrival_s
        )
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._socket, selectors.EVENT_READ)
        self._selector.register(self._wake_reader, selectors.EVENT_READ)
        self._woken: deque[Peer] = deque()  # connections that the loop must check; other threads add them
        # Heap of (end of the pause, number, paused connection). The listening socket has None in place
        # of a connection.
        self._paused: list[tuple[float, int, Peer | None]] = []
        self._thread: threading.Thread | None = None
        if self._path:
            self.address = f"ipc://{self._path}"
        else:
            host, port = self._socket.getsockname()[:2]
            scheme = "tls" if self._tls else "tcp"
            self.address = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"

    def start(self, service: Service) -> None:
        self._service = service
        self.codec.bind(service)
        self._thread = service.supervisor.thread(f"sinew-{self.name}", self._loop)

    def stop(self) -> None:
        self._stop = True
        self.wake(None)
        if self._thread is not None:
            self._thread.join()
        if self.codec.streams is not None:
            self.codec.streams.stop()
        for peer in list(self.ledger.open):
            self.close(peer, "the server stops")
        self._selector.close()
        if self._path:
            # Remove the file before the socket is closed. Later, another server may use the same path.
            Path(self._path).unlink(missing_ok=True)
        for each in (self._socket, self._wake_reader, self._wake_writer):
            each.close()

    def guide(self, spec: PolicySpec) -> Sequence[str]:
        return self.codec.guide(spec, self.address)

    def _loop(self) -> None:
        swept = time.monotonic()
        while not self._stop:
            self._step(self._patience())
            if (now := time.monotonic()) - swept > SWEEP_S:
                swept = now
                self.ledger.sweep(now)
            if (streams := self.codec.streams) is not None and streams.robots:
                streams.end_silent()
        end = time.monotonic() + LINGER_S
        while any(each.unsent for each in self.ledger.open):
            if (remaining := end - time.monotonic()) <= 0:
                break
            self._step(remaining)

    def _patience(self) -> float | None:
        """Return the seconds until the loop has work even if no message arrives, for example the end of a pause."""
        times = [self._paused[0][0] - time.monotonic()] if self._paused else []
        for each in self.ledger.open:
            if each.since is not None:
                times.append(SWEEP_S)
                break
        if (streams := self.codec.streams) is not None and streams.robots:
            times.append(streams.patience())
        return max(0.0, min(times)) if times else None

    def _step(self, timeout_s: float | None) -> None:
        """Run one step of the loop: wait for an event, read requests, and send the remaining bytes of replies.

        Args:
            timeout_s: Longest wait in seconds; None for no limit.
        """
        happened = self._selector.select(timeout_s)
        # Check these connections first, so that the accounts are up to date.
        for _ in range(len(self._woken)):
            self._watch(self._woken.popleft())
        for key, events in happened:
            if key.fileobj is self._socket:
                self._accept()
            elif key.fileobj is self._wake_reader:
                with contextlib.suppress(BlockingIOError):
                    self._wake_reader.recv(4096)
            else:
                with self._only(key.data):
                    self._serve(key.data, events)
        while self._paused and self._paused[0][0] <= time.monotonic():
            _until, _number, paused = heapq.heappop(self._paused)
            if paused is None:
                self._selector.register(self._socket, selectors.EVENT_READ)
            elif not paused.closed:
                with self._only(paused):
                    paused.paused = False
                    # Handle the messages that came after the rejected request.
                    self._handle(paused)
                    self._watch(paused)

    def _serve(self, peer: Peer, events: int) -> None:
        """Write the remaining replies of a connection and read its requests, as far as the socket is ready.

        Args:
            peer: The connection.
            events: Events of ``selectors`` for the connection's socket.
        """
        if peer.closed or (peer.opening and not self._opened(peer)):
            return
        if events & selectors.EVENT_WRITE:
            peer.flush()
        if events & selectors.EVENT_READ:
            self._read(peer)
        self._watch(peer)

    @contextlib.contextmanager
    def _only(self, peer: Peer) -> Iterator[None]:
        """Handle an unexpected error in the ``with`` block by closing only this connection. Without this, an error on
        the loop's thread would end all connections.
        """
        try:
            yield
        except Exception as error:  # noqa: BLE001 - whatever it is, the other clients are served on
            self._failures.error("a connection failed", error)
            self.close(peer, "internal error")

    def _accept(self) -> None:
        for _ in range(ACCEPTS):
            try:
                connection, address = self._socket.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:  # usually, no file descriptor is free
                self._quiet.warning("%s: a connection could not be accepted: %s", self.name, error)
                break
            connection.setblocking(False)
            with contextlib.suppress(OSError):
                set_options(connection)
            peer = Peer(
                self,
                connection,
                "ipc" if self._path else address[0],
                zmtp.Framing(self._limit),
                time.monotonic(),
            )
            if self._path and shared.AVAILABLE:
                peer.shares = self._limit
            if not self.ledger.admit(peer, time.monotonic()):
                peer.end()
                continue
            self._service.metrics.connection(self.name, +1)
            if self._tls is not None:
                peer.opening = selectors.EVENT_READ
            else:
                self._handle(peer)  # this call sends the greeting of ZMTP
            self._watch(peer)
        self._selector.unregister(self._socket)
        self._pause(ACCEPT_PAUSE_S, None)

    def _opened(self, peer: Peer) -> bool:
        """Continue the handshake of a connection to a port with TLS. Return True if messages may come."""
        assert self._tls is not None
        try:
            if not isinstance(peer.socket, tls.TlsSocket):
                first = peer.socket.recv(1, socket.MSG_PEEK)
                if first != tls.FIRST_BYTE:
                    if not first:
                        self.close(peer, "")
                    elif is_loopback(peer.address):
                        peer.opening = 0
                        self._handle(peer)  # this call sends the greeting of ZMTP
                    else:
                        # Read the received bytes, because the system would discard the error message if
                        # bytes were unread.
                        peer.socket.recv(zmtp.INPUT)
                        peer.send(
                            zmtp.GREETING + zmtp.error("this port requires TLS: use tls:// in the address")
                        )
                        self.close(peer, "it does not use TLS")
                    return not peer.closed
                self._selector.unregister(peer.socket)
                peer.watched = 0
                peer.socket = tls.encrypted(
                    self._tls, peer.socket, server_side=True, do_handshake_on_connect=False
                )
            peer.socket.do_handshake()
        except ssl.SSLWantReadError:
            peer.opening = selectors.EVENT_READ
        except ssl.SSLWantWriteError:
            peer.opening = selectors.EVENT_WRITE
        except BlockingIOError:
            pass
        except OSError as error:
            self.close(peer, f"TLS: {getattr(error, 'reason', '') or error}")
        else:
            peer.opening = 0
            self._handle(peer)  # this call sends the greeting of ZMTP
        self._watch(peer)
        return not peer.closed and not peer.opening

    def _read(self, peer: Peer) -> None:
        framing = peer.framing
        for _ in range(READS):
            room = framing.room()
            try:
                count = peer.receive(room)
            except BlockingIOError:
                break
            except OSError:
                count = 0
            if not count:
                self.close(peer, "")
                return
            framing.take(count)
            if framing.left:
                continue
            self._handle(peer)
            if peer.closed or peer.paused or peer.unsent > MAX_UNSENT:
                return
            if framing.between:
                # Usually the socket has no further bytes. Return now, because other threads may wait until
                # this thread sleeps.
                return
        # The received bytes end inside a frame. Count them in the ledger.
        if framing.left:
            self._handle(peer)

    def _handle(self, peer: Peer) -> None:
        """Process the messages that have arrived on this connection."""
        framing, ledger, now = peer.framing, self.ledger, time.monotonic()
        try:
            while not (peer.closed or peer.paused or peer.unsent > MAX_UNSENT):
                message = framing.next()
                while framing.replies:
                    peer.send(framing.replies.pop(0))
                size = framing.arriving if message is None else sum(map(len, message.frames))
                ledger.arrived(peer, size - peer.arriving, now)
                if message is None:
                    if framing.between:
                        peer.since = None
                    return
                if not peer.closed:
                    self._take(peer, message, ledger.whole(peer))
                    if framing.between:
                        return
        except zmtp.ZmtpError as error:
            self.close(peer, str(error))

    def _watch(self, peer: Peer) -> None:
        """Wait for the events that this connection needs now, and free the memory of requests that other threads have
        answered."""
        while peer.freed:
            self.ledger.answered(peer, peer.freed.popleft())
        if (kept_bytes := sum(list(peer.keeps.values()))) != peer.kept_bytes:
            self.ledger.keep(peer, kept_bytes)
        if peer.broken and not peer.closed:
            self.close(peer, "")
        if peer.closed:
            return
        unsent = peer.unsent
        if unsent <= MAX_UNSENT and not peer.paused and peer.framing.pending:
            self._handle(peer)
            unsent = peer.unsent
        if not peer.closed and not peer.paused and unsent <= MAX_UNSENT and peer.buffered:
            self._read(peer)
            unsent = peer.unsent
            if peer.buffered:
                # Continue with this connection after the other connections.
                self.wake(peer)
        if peer.closed:
            return
        events = selectors.EVENT_WRITE * bool(unsent)
        if not peer.paused and unsent <= MAX_UNSENT:
            events |= selectors.EVENT_READ
        events = peer.opening or events
        if events == peer.watched:
            return
        if not peer.watched:
            self._selector.register(peer.socket, events, peer)
        elif not events:
            self._selector.unregister(peer.socket)
        else:
            self._selector.modify(peer.socket, events, peer)
        peer.watched = events

    def _take(self, peer: Peer, message: zmtp.Message, size: int) -> None:
        """Answer one message, or submit its inference. ``size`` is the number of its bytes in the connection's
        account.
        """
        codec, service, arrived = self.codec, self._service, time.perf_counter()
        header, (envelope, payload) = None, _open(message)
        count = message.count - len(envelope)
        try:
            if message.size > self._limit:
                raise RequestError(
                    f"request: expected at most {self._limit} bytes, got {message.size}; send smaller frames"
                )
            if count != 1:
                raise RequestError(f"request: expected a single frame, got {count} frames")
            content = memoryview(payload[0])
            header = codec.peek(content)
            if header.error is not None:
                raise header.error
            if service.wants_key:
                codec.authorize(header)
                peer.prove()
            if (reply := codec.control(header, peer)) is not None:
                peer.reply([*envelope, reply], size)
                return
            if codec.stream_kinds and header.kind in codec.stream_kinds:
                (codec.streams or codec.open_streams()).take(peer, envelope, header, content)
                peer.prove()
                peer.freed.append(size)
                return
            decoders = codec.decoders(header, content, peer.shared)
        except Exception as error:  # noqa: BLE001 - whatever it is, the other clients are served on
            reported = error if isinstance(error, SinewError) else SinewError("internal error")
            if reported is error:
                service.refused(self.name, peer.address, reported)
                self._refuse(peer)
            else:
                self._failures.error("a request could not be processed", error)
            peer.reply([*envelope, codec.encode_error(header, reported)], size)
            return
        peer.prove()
        # Observations of one batch must not replace each other, so they get no session.
        session = header.session if len(decoders) == 1 else ""
        about = session, header.deadline_ms, arrived, peer, None, header.policy
        jobs = [ServingJob(Request(self.name, decode, peer.address, *about)) for decode in decoders]
        peer.under_way.update(jobs)
        service.submit_all(jobs, partial(self._reply, peer, envelope, header, arrived, size, jobs))

    def _reply(
        self,
        peer: Peer,
        envelope: Envelope,
        header: Any,
        arrived: float,
        size: int,
        jobs: Sequence[ServingJob],
        outcomes: Sequence[Outcome],
    ) -> None:
        """Send the reply to an inference. The method runs on a thread of the scheduler, or on the loop.

        Args:
            peer: The connection of the request.
            envelope: Routing frames for the reply.
            header: Header of the request.
            arrived: Time at which the request arrived.
            size: Number of the request's bytes in the account of the connection.
            jobs: One job for each observation of the request.
            outcomes: The outcome of each job.
        """
        peer.under_way.difference_update(jobs)
        try:
            if self.on_loop() and any(isinstance(each, BusyError) for each in outcomes):
                self._refuse(peer)
            reply = self.codec.encode(header, outcomes, (time.perf_counter() - arrived) * 1e3)
        except Exception as error:  # noqa: BLE001 - a client that gets no reply waits for ever
            self._failures.error("a reply could not be written", error)
            reply = self.codec.encode_error(header, SinewError("internal error"))
        peer.reply([*envelope, reply], size)

    def _pause(self, seconds: float, peer: Peer | None) -> None:
        heapq.heappush(self._paused, (time.monotonic() + seconds, id(peer), peer))

    def _refuse(self, peer: Peer) -> None:
        """Pause reading from this connection, because one of its requests was rejected. Call this method only on the
        loop's thread.
        """
        if not peer.paused and not self._stop:
            peer.paused = True
            self._pause(peer.next_pause, peer)
            peer.next_pause = min(2 * peer.next_pause, MAX_PAUSE_S)

    def close(self, peer: Peer, reason: str) -> None:
        """End a connection, and cancel the requests of its client. Call this method only on the loop's thread."""
        if peer.closed:
            return
        if reason and not self._stop:
            self._quiet.info("%s: the connection of %s was closed: %s", self.name, peer.address, reason)
        if peer.watched:
            self._selector.unregister(peer.socket)
            peer.watched = 0
        self.ledger.forget(peer)
        peer.end()
        self._service.metrics.connection(self.name, -1)
        for each in tuple(peer.under_way):
            each.abandon()

    def wake(self, peer: Peer | None, at_once: bool = True) -> None:
        """Wake the loop, so that it checks a connection. Any thread may call this method.

        Args:
            peer: The connection; None only wakes the loop.
            at_once: True to wake the loop now. With False, the loop checks the connection when it wakes next.
        """
        if peer is not None:
            self._woken.append(peer)
        if not at_once:
            return
        # A full pipe wakes the loop anyway. A closed pipe means that the loop has ended.
        with contextlib.suppress(BlockingIOError, OSError):
            self._wake_writer.send(b"\0")

    def on_loop(self) -> bool:
        return threading.current_thread() is self._thread


class Peer(Account):
    """One connection. ``reply`` and ``send`` may be called from any thread, the other methods on the loop.

    Attributes:
        under_way: Unanswered jobs and open streams. The server abandons these jobs and streams when the connection
            closes.
        freed: Bytes of answered requests, which the loop has to free.
        keeps: Stream -> bytes that the stream stores between messages.
        broken: True if sending failed.
        shares: Largest number of bytes of shared memory for the peer; 0 without shared memory.
        opening: The event of ``selectors`` that a handshake of TLS waits for; 0 once messages may come.
        unsent: Bytes that the socket has not accepted yet.
    """

    def __init__(self, wire: ZeroMQWire, made: socket.socket, address: str, framing: Any, now: float):
        super().__init__(now)
        self.socket = made
        self.address = address
        self.framing: zmtp.Framing = framing
        self.under_way: set[Any] = set()
        self.freed: deque[int] = deque()
        self.keeps: dict[Any, int] = {}
        self.closed = self.broken = self.paused = False
        self.shared: shared.ReceivedFrames | None = None
        self.shares = 0
        self.next_pause = REFUSAL_PAUSE_S
        self.watched = 0
        self.opening = 0
        self.unsent = 0
        self._wire = wire
        self._lock = threading.Lock()  # a thread that writes to the socket holds this lock
        self._out: deque[memoryview] = deque()

    @property
    def buffered(self) -> bool:
        """True if TLS has decrypted bytes that were not received yet. The selector does not report such bytes."""
        return isinstance(self.socket, tls.TlsSocket) and not self.closed and self.socket.pending() > 0

    def receive(self, room: memoryview) -> int:
        """Receive the bytes that have arrived into ``room``, and return their number.

        Raises:
            OSError: The connection has failed, or no bytes have arrived.
        """
        if not self.shares:
            return self.socket.recv_into(room)
        count, frames = shared.receive(self.socket, room, self.shares)
        self.shared = frames or self.shared
        return count

    def reply(self, frames: Sequence[zmtp.Frame], size: int = 0) -> None:
        """Send one message. Call this from any thread. ``size`` is the number of bytes of the answered request,
        which are free now.
        """
        if size:
            self.freed.append(size)
        try:
            self.send(zmtp.message(frames))
        except BaseException:
            # The client got no reply, or only a part of a reply, so end its connection.
            self.broken = True
            self._wire.wake(self)
            raise
        # The loop frees the request's bytes before any other work, so wake it at once only for unsent bytes
        # or an error.
        if not self._wire.on_loop():
            self._wire.wake(self, at_once=bool(self.unsent or self.broken))

    def release(self, keeper: Any) -> None:
        """Free the bytes that the stream ``keeper`` has stored, because the stream has ended. Any thread may call this
        method.
        """
        if self.keeps.pop(keeper, None) is not None and not self._wire.on_loop():
            self._wire.wake(self, at_once=False)

    def prove(self) -> None:
        """Mark the connection as trusted, because the server has accepted one of its requests. Its memory then has
        the larger limit.
        """
        self.next_pause = REFUSAL_PAUSE_S
        if not self.proven:
            self._wire.ledger.prove(self)

    def send(self, data: bytes) -> None:
        """Send the bytes that the socket accepts now. The loop sends the rest later."""
        with self._lock:
            if not self.closed and not self.broken:
                self._out.append(memoryview(data))
                self.unsent += len(data)
                if len(self._out) == 1:
                    self._write()

    def flush(self) -> None:
        with self._lock:
            if not self.closed and not self.broken:
                self._write()

    def end(self) -> None:
        with self._lock:
            self.closed, self.shared = True, None
            self._out.clear()
            self.unsent = 0
            self.socket.close()

    def _write(self) -> None:
        """Write to the socket. The caller must have locked ``_lock``."""
        try:
            while self._out:
                first = self._out[0]
                sent = self.socket.send(first)
                self.unsent -= sent
                if sent < len(first):
                    self._out[0] = first[sent:]
                    return
                self._out.popleft()
        except BlockingIOError:
            return
        except OSError:
            self.broken = True  # the loop closes the connection
        except BaseException:
            # The number of sent bytes is unknown, and no byte may be sent twice.
            self.broken = True
            raise


def _open(message: zmtp.Message) -> tuple[Envelope, list[zmtp.Frame]]:
    """Split a message into the envelope, which routes the reply, and the payload frames.

    REQ sockets put an empty frame before the payload, DEALER sockets may omit it, and a proxy between client and server
    adds its own routing id before that empty frame.
    """
    frames = message.frames
    for index, frame in enumerate(frames[: MAX_ENVELOPE - 1]):
        if index == message.count - 1 or len(frame) > MAX_ROUTING_ID:
            break
        if not frame:
            return frames[: index + 1], frames[index + 1 :]
    return [], frames
