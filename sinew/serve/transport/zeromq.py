"""ZeroMQ transport: one loop over plain sockets, TCP or Unix, that speaks ZMTP (``zmtp.py``), for any codec.

The loop sleeps in one poll. Requests wake it through their sockets. Replies are sent by the thread that made them, as
far as the socket takes them at once; the loop sends the rest. Everything that a peer can make the server keep has a
bound: connections, bytes (``ledger.py``), frames, replies that it does not read, and work on the loop: whoever sends
what is refused is not read from for a while, longer each time.
"""

from __future__ import annotations

import contextlib
import heapq
import logging
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sinew_client import shared, zmtp
from sinew_client.link import set_options

from sinew.core import PolicySpec, SinewError
from sinew.core.rate_limited_log import RateLimitedLog
from sinew.serve.service import Service
from sinew.serve.transport.exchange import Codec, Exchange, Series
from sinew.serve.transport.ledger import HELD_REQUESTS, SWEEP_S, Account, Ledger
from sinew.serve.transport.listen import Listen

logger = logging.getLogger(__name__)

READS = 16  # of one connection before the others have their turn
MAX_UNSENT = 1 << 20  # bytes of replies that a client does not read; beyond, it is not read from either
LINGER_S = 0.3  # how long closing may take to hand over the last replies
ACCEPTS = 16  # connections taken at once,
ACCEPT_PAUSE_S = 0.02  # and then none for so long
REFUSAL_PAUSE_S = 0.02  # after a refused request nothing is read from its connection; doubled for each
MAX_PAUSE_S = 1.0  # more in a row, up to this


class ZeroMQWire:
    """Binds when created; answers on a thread of its own from :meth:`start` on. Connections that come earlier wait.

    Requests beyond ``listen.max_message_bytes`` are refused with an error; beyond twice that size the connection
    is closed.
    """

    dashboard = ""  # no browser speaks ZeroMQ

    def __init__(self, codec: Codec, listen: Listen):
        self.codec = codec
        self.name = codec.name
        self._limit = listen.max_message_bytes
        self._stop = False
        self._quiet = RateLimitedLog(logger)
        self._path = listen.path
        self._socket = listen.unix_socket() if self._path else listen.tcp_socket()
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._wake_writer.setblocking(False)
        self._ledger = Ledger(
            self.name,
            listen.max_connections,
            HELD_REQUESTS * self._limit,
            self._close_account,
            listen.arrival_s,
        )
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._socket, selectors.EVENT_READ)
        self._selector.register(self._wake_reader, selectors.EVENT_READ)
        self._woken: deque[Peer] = deque()  # what other threads want the loop to look at
        self._paused: list[tuple[float, int, Peer | None]] = []  # until when; None: the listening socket
        self._streams: Any = None  # the codec's, which end without a word from their robots
        self._thread: threading.Thread | None = None
        if self._path:
            self.address = f"ipc://{self._path}"
        else:
            host, port = self._socket.getsockname()[:2]
            self.address = f"tcp://{f'[{host}]' if ':' in host else host}:{port}"

    def start(self, service: Service) -> None:
        self._service = service
        self.codec.bind(service)
        self._streams = self.codec.streams
        self._exchange = Exchange(self.codec, service, self._limit)
        self._thread = service.supervisor.thread(f"sinew-{self.name}", self._loop)

    def stop(self) -> None:
        self._stop = True
        self.wake(None)
        if self._thread is not None:
            self._thread.join()
        if self._streams is not None:
            self._streams.stop()
        for peer in list(self._ledger.open):
            assert isinstance(peer, Peer)
            self.close(peer, "the server stops")
        self._selector.close()
        if self._path:  # before the socket is closed: then the name may be another server's
            Path(self._path).unlink(missing_ok=True)
        for each in (self._socket, self._wake_reader, self._wake_writer):
            each.close()

    def guide(self, spec: PolicySpec) -> Sequence[str]:
        return self.codec.guide(spec, self.address)

    # ------------------------------------------------------------------------- the loop

    def _loop(self) -> None:
        swept = time.monotonic()
        while not self._stop:
            self._step(self._patience())
            if (now := time.monotonic()) - swept > SWEEP_S:
                swept = now
                self._ledger.sweep(now)
            if self._streams:
                self._streams.end_silent()
        end = time.monotonic() + LINGER_S
        while any(isinstance(each, Peer) and each.unsent for each in self._ledger.open):
            if (left := end - time.monotonic()) <= 0:
                break
            self._step(left)

    def _patience(self) -> float | None:
        """Seconds until there is something to do although nobody sends."""
        times = [self._paused[0][0] - time.monotonic()] if self._paused else []
        for each in self._ledger.open:
            if each.since is not None:
                times.append(SWEEP_S)
                break
        if self._streams and (left := self._streams.patience()) is not None:
            times.append(left)
        return max(0.0, min(times)) if times else None

    def _step(self, timeout_s: float | None) -> None:
        """Wait for something to happen, take requests, send what is left of replies."""
        happened = self._selector.select(timeout_s)
        while self._woken:  # first, so that the books are right
            self._watch(self._woken.popleft())
        for key, events in happened:
            if key.fileobj is self._socket:
                self._accept()
            elif key.fileobj is self._wake_reader:
                with contextlib.suppress(BlockingIOError):
                    self._wake_reader.recv(4096)
            else:
                peer: Peer = key.data
                if peer.closed:
                    continue
                if events & selectors.EVENT_WRITE:
                    peer.flush()
                if events & selectors.EVENT_READ:
                    self._read(peer)
                self._watch(peer)
        while self._paused and self._paused[0][0] <= time.monotonic():
            _until, _number, paused = heapq.heappop(self._paused)
            if paused is None:
                self._selector.register(self._socket, selectors.EVENT_READ)
            elif not paused.closed:
                paused.paused = False
                self._handle(paused)  # what stood behind the refused request
                self._watch(paused)

    def _accept(self) -> None:
        for _ in range(ACCEPTS):
            try:
                made, address = self._socket.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:  # no descriptor is free, usually
                self._quiet.warning("%s: a connection could not be taken: %s", self.name, error)
                break
            made.setblocking(False)
            with contextlib.suppress(OSError):
                set_options(made)
            peer = Peer(
                self, made, "ipc" if self._path else address[0], zmtp.Framing(self._limit), time.monotonic()
            )
            if self._path and shared.AVAILABLE:
                peer.shares = self._limit
            if not self._ledger.admit(peer, time.monotonic()):
                peer.end()
                continue
            self._service.metrics.connection(self.name, +1)
            self._handle(peer)  # says hello
            self._watch(peer)
        self._selector.unregister(self._socket)
        self._pause(ACCEPT_PAUSE_S, None)

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
            if count < len(room) and framing.between:
                return  # all there was, as a rule
        if framing.left:  # in the middle of a frame: the ledger hears how much is there
            self._handle(peer)

    def _handle(self, peer: Peer) -> None:
        """Take the messages that are there."""
        framing, ledger, now = peer.framing, self._ledger, time.monotonic()
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
                    self._exchange.take(peer, message, ledger.whole(peer))
                    if framing.between:  # a thread may wait for this one to sleep, so that it can begin
                        return
        except zmtp.ZmtpError as error:
            self.close(peer, str(error))

    def _watch(self, peer: Peer) -> None:
        """Wait for what this connection needs now, and free what other threads have answered."""
        while peer.freed:
            self._ledger.answered(peer, peer.freed.popleft())
        if peer.broken and not peer.closed:
            self.close(peer, "")
        if peer.closed:
            return
        unsent = peer.unsent
        if unsent <= MAX_UNSENT and not peer.paused and peer.framing.pending:
            self._handle(peer)
            unsent = peer.unsent
        if peer.closed:
            return
        wanted = selectors.EVENT_WRITE * bool(unsent)
        if not peer.paused and unsent <= MAX_UNSENT:
            wanted |= selectors.EVENT_READ
        if wanted == peer.watched:
            return
        if not peer.watched:
            self._selector.register(peer.socket, wanted, peer)
        elif not wanted:
            self._selector.unregister(peer.socket)
        else:
            self._selector.modify(peer.socket, wanted, peer)
        peer.watched = wanted

    # ------------------------------------------------------------------------- connections

    def _pause(self, seconds: float, peer: Peer | None) -> None:
        heapq.heappush(self._paused, (time.monotonic() + seconds, id(peer), peer))

    def pause(self, peer: Peer) -> None:
        """Do not read from this connection for a while. On the loop."""
        if not peer.paused and not self._stop:
            peer.paused = True
            peer.refusals += 1
            self._pause(min(REFUSAL_PAUSE_S * 2 ** (peer.refusals - 1), MAX_PAUSE_S), peer)

    def prove(self, peer: Peer) -> None:
        self._ledger.prove(peer)

    def close(self, peer: Peer, reason: str) -> None:
        """End a connection; cancel what its client was waiting for. On the loop."""
        if peer.closed:
            return
        if reason and not self._stop:
            self._quiet.info("%s: the connection of %s was closed: %s", self.name, peer.address, reason)
        if peer.watched:
            self._selector.unregister(peer.socket)
            peer.watched = 0
        self._ledger.forget(peer)
        peer.end()
        self._service.metrics.connection(self.name, -1)
        for series in tuple(peer.requests):
            series.abandon()

    def _close_account(self, account: Account, reason: str) -> None:
        assert isinstance(account, Peer)
        self.close(account, reason)

    def wake(self, peer: Peer | None, at_once: bool = True) -> None:
        """The loop is to look at this connection, at once or when it wakes next. From any thread."""
        if peer is not None:
            self._woken.append(peer)
        if not at_once:
            return
        with contextlib.suppress(BlockingIOError, OSError):  # full: it will wake anyway; closed: too late
            self._wake_writer.send(b"\0")

    def on_loop(self) -> bool:
        return threading.current_thread() is self._thread


class Peer(Account):
    """One connection. ``reply`` and ``send`` may be called from any thread, the rest on the loop.

    unsent: bytes that the socket did not take yet. freed: what answered requests held. broken: sending failed.
    shares: bytes of memory that it may share; 0: none.
    """

    __slots__ = (
        "_lock",
        "_out",
        "_wire",
        "address",
        "broken",
        "closed",
        "framing",
        "freed",
        "paused",
        "refusals",
        "requests",
        "shared",
        "shares",
        "socket",
        "unsent",
        "watched",
    )

    def __init__(self, wire: ZeroMQWire, made: socket.socket, address: str, framing: Any, now: float):
        super().__init__(now)
        self.socket = made
        self.address = address
        self.framing: zmtp.Framing = framing
        self.requests: set[Series] = set()
        self.freed: deque[int] = deque()
        self.closed = self.broken = self.paused = False
        self.shared: shared.ReceivedFrames | None = None
        self.shares = 0
        self.refusals = 0
        self.watched = 0
        self.unsent = 0
        self._wire = wire
        self._lock = threading.Lock()  # around the socket's end that is written to
        self._out: deque[memoryview] = deque()

    def receive(self, room: memoryview) -> int:
        """Receive what is there. Raises OSError."""
        if not self.shares:
            return self.socket.recv_into(room)
        count, found = shared.receive(self.socket, room, self.shares)
        self.shared = found or self.shared
        return count

    def reply(self, frames: Sequence[zmtp.Frame], series: Series | None) -> None:
        """See Asker."""
        if series is not None and series.size:
            self.freed.append(series.size)
        try:
            self.send(zmtp.message(frames))
        except BaseException:  # who gets no reply, or half of one, is told by the end of the connection
            self.broken = True
            self._wire.wake(self)
            raise
        # The loop frees what the message held before it does anything else; only what is left to send wakes it.
        if not self._wire.on_loop():
            self._wire.wake(self, at_once=bool(self.unsent or self.broken))

    def release(self, series: Series) -> None:
        """See Asker."""
        self.freed.append(series.size)

    def prove(self) -> None:
        self.refusals = 0
        if not self.proven:
            self._wire.prove(self)

    def refuse(self, error: SinewError) -> None:
        """See Asker."""
        if self._wire.on_loop():
            self._wire.pause(self)

    def send(self, data: bytes) -> None:
        """Send now what the socket takes; the rest waits."""
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
        """Close the socket."""
        with self._lock:
            self.closed, self.shared = True, None
            self._out.clear()
            self.unsent = 0
            self.socket.close()

    def _write(self) -> None:
        """With the lock held."""
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
            self.broken = True  # the loop closes it
        except BaseException:  # nobody knows any more what was sent, and nothing may be sent twice
            self.broken = True
            raise
