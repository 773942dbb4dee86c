"""One connection to a server, over a plain socket: a request is sent and its reply received, without another thread.

ZeroMQ's library passes every message through its own thread, and copies the message for it. Here the kernel reads the
frames in place, and wakes the waiting thread.
"""

from __future__ import annotations

import collections
import contextlib
import os
import selectors
import socket
import ssl
import struct
import time
from collections.abc import Sequence
from typing import Any

from sinew_client import tls, zmtp
from sinew_client.errors import ClientError, ConnectionLost

MAX_REPLY = 1 << 30  # largest reply in bytes; the context of a large policy has several hundred million bytes
MAX_TURNS = 64  # largest number of buffers that are read between two requests
MAX_PARTS = 512  # largest number of parts in one call of sendmsg; the limit of Linux is 1,024
LONGEST_S = 1e6  # longest wait for a socket, seconds
_CREDENTIALS = struct.Struct("3i")  # the socket option SO_PEERCRED returns process, user and group
# Prefer poll(), because select() does not support file descriptors above 1,023.
_SELECTOR = getattr(selectors, "PollSelector", selectors.SelectSelector)
# These TCP options detect a silent peer after 10 + 3 * 5 = 25 seconds. Some systems do not have all three options.
KEEPALIVE = (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))


def place_of(address: str) -> tuple:
    """Return (host, port), (host, port, "tls") or (path,) for a result of ``split_address``.

    Raises :class:`ClientError` for an invalid host, and for a path on a system without Unix sockets.
    """
    if address.startswith("ipc://"):
        if not hasattr(socket, "AF_UNIX"):
            raise ClientError(f"{address}: expected tcp://HOST:PORT on a system without Unix sockets")
        return (address[len("ipc://") :],)
    scheme, _, rest = address.partition("://")
    host, _, port = rest.rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    try:
        host.encode("idna")
    except UnicodeError as error:
        raise ClientError(f"cannot connect to {address}: {error}") from None
    return (host, int(port), "tls") if scheme == "tls" else (host, int(port))


def has_tls(place: tuple) -> bool:
    """Return True if a place of :func:`place_of` belongs to a ``tls://`` address."""
    return place[2:] == ("tls",)


def unix_place(place: tuple) -> list:
    """Return the place of a Unix socket in the form of ``getaddrinfo``; [] for a host and port."""
    return [(socket.AF_UNIX, socket.SOCK_STREAM, 0, "", place[0])] if len(place) == 1 else []


def unconnected(family: int, kind: int, protocol: int, address: Any) -> socket.socket:
    """Create a socket for an address of ``getaddrinfo``, which is not connected yet.

    A socket to this machine uses the congestion control "reno". With BBR, which some systems use by default, the end of
    a frame may wait for ten milliseconds or more, although there is no network.
    """
    connection = socket.socket(family, kind, protocol)
    local = isinstance(address, tuple) and (address[0].startswith("127.") or address[0] == "::1")
    if local and hasattr(socket, "TCP_CONGESTION"):
        # Ignore errors, because some systems have the option but not the value "reno".
        with contextlib.suppress(OSError):
            # Set the option before connecting. A connection that begins with BBR is paced even after a change.
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")
    return connection


def check_owner(made: socket.socket) -> None:
    """Raise :class:`ConnectionLost` unless a process of this user or of root is at the other end of a Unix socket.

    Otherwise another user could bind the path first and receive the key. Other sockets are not checked, nor are
    sockets of a system that does not report the owner.
    """
    if not hasattr(socket, "AF_UNIX") or made.family != socket.AF_UNIX or not hasattr(socket, "SO_PEERCRED"):
        return
    credentials = made.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _process, user, _group = _CREDENTIALS.unpack(credentials)
    if user not in (os.geteuid(), 0):
        raise ConnectionLost(
            f"ipc://{made.getpeername()}: expected a server of user {os.geteuid()} or of root, got one of user {user};"
            " nothing was sent. Start the server as the user of the robot, in a folder that others cannot write"
        )


def connected(place: tuple, end: float) -> socket.socket:
    """Return a connection to a place, without TLS yet.

    Each address of the host gets its share of the time. The system's resolver has its own time limit.

    Raises:
        OSError: No address can be reached. At ``end``, the error is ``socket.timeout``.
    """
    candidates = unix_place(place) or socket.getaddrinfo(*place[:2], type=socket.SOCK_STREAM)
    error = OSError("the host has no address")
    for index, (family, kind, protocol, _, address) in enumerate(candidates):
        connection = unconnected(family, kind, protocol, address)
        try:
            share = (end - time.monotonic()) / (len(candidates) - index)
            connection.settimeout(max(1e-3, min(LONGEST_S, share)))
            connection.connect(address)
            check_owner(connection)
        except OSError as wrong:
            connection.close()
            error = wrong
        else:
            return connection
    raise error


def secured(made: socket.socket, place: tuple, end: float) -> socket.socket:
    """Return a connection with TLS, after the handshake; the same connection if the place needs no TLS.

    Raises OSError, and :class:`ConnectionLost` for a server without TLS or without a trusted certificate.
    """
    if not has_tls(place):
        return made
    host, port, _ = place
    made.settimeout(max(1e-3, min(LONGEST_S, end - time.monotonic())))
    try:
        return tls.encrypted(ssl.create_default_context(), made, server_hostname=host)
    except ssl.SSLError as error:
        raise ConnectionLost(tls.refusal_of(error, f"tls://{host}:{port}")) from error


def payload_of(message: zmtp.Message, before: int) -> bytes:
    """Return the last frame of a message, which must follow ``before`` empty frames. Raises :class:`ConnectionLost`."""
    *head, payload = message.frames or [b""]
    if message.count != before + 1 or len(message.frames) != message.count or any(head):
        raise ConnectionLost(f"expected a reply of one frame, got {message.count} and {message.size} bytes")
    return bytes(payload)


def set_options(made: socket.socket) -> None:
    """Set TCP options: small packets are sent at once, and a silent peer is detected after 25 seconds."""
    if made.family not in (socket.AF_INET, socket.AF_INET6):
        return
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE:
        if hasattr(socket, name):
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class Link:
    """An open connection to a ROUTER or REP socket. Not thread-safe.

    The constructor connects and completes the handshake.

    Args:
        place: A place of :func:`place_of`.
        end: Time limit, ``time.monotonic()`` seconds.
        kind: The role of this end. b"REQ" has :meth:`ask`, which waits for the reply. b"DEALER" has :meth:`put`,
            :meth:`flush` and :meth:`get`, which never wait.

    Raises:
        OSError: The connection failed, with ``socket.timeout`` at ``end``.
        ConnectionLost: The other end is not a ZeroMQ server.
    """

    def __init__(self, place: tuple, end: float, kind: bytes = b"REQ"):
        # These messages are not sent yet. A part of the first message may be sent already.
        self._unsent: collections.deque = collections.deque()
        self.frames: Any = None  # the memory for frames that client and server share (shared.py)
        self._socket = connected(place, end)
        try:
            self._socket = secured(self._socket, place, end)
            set_options(self._socket)
            self._socket.setblocking(False)
            self._selector = _SELECTOR()
            self._selector.register(self._socket, selectors.EVENT_READ)
            self._awaited = selectors.EVENT_READ
            self._framing = zmtp.Framing(MAX_REPLY, kind)
            self._answer(end)
            while not self._framing.ready:
                if time.monotonic() >= end or not self._receive(end):
                    raise socket.timeout("no handshake in time")
                self._next()
                self._answer(end)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the connection. A forked process closes only its own end."""
        self._socket.close()

    @property
    def stands(self) -> bool:
        """False if the connection has ended, or has received invalid bytes or an unexpected message.

        PINGs do not count, because a server may use them to keep its connections alive. At most 64 buffers are
        checked, so that a peer that sends without end cannot block the client. :meth:`ask` detects later problems.
        """
        try:
            for _ in range(MAX_TURNS):
                if self._next() is not None or self._framing.begun:
                    return False
                if not self._receive(0.0):
                    break
        except (OSError, ConnectionLost):
            return False
        return True

    def ask(self, parts: Sequence[zmtp.Frame], end: float, beside: Sequence = ()) -> bytes | None:
        """Send a request, and return its reply; None at ``end``.

        Args:
            parts: Parts of the request, which are sent one after the other.
            end: Time limit, ``time.monotonic()`` seconds.
            beside: Ancillary data for ``sendmsg`` of a Unix socket, sent with the first bytes.

        Raises:
            OSError: The connection broke.
            ConnectionLost: The reply is not valid.
        """
        # In ZeroMQ, a request of a REQ socket begins with an empty frame.
        opening = zmtp.head(0, more=True) + zmtp.head(sum(map(len, parts)))
        if not self._send([opening, *parts], end, beside):
            return None
        while (message := self._next()) is None:
            self._answer(end)
            if time.monotonic() >= end or not self._receive(end):
                return None
        return payload_of(message, 1)

    @property
    def unsent(self) -> int:
        """Number of messages of :meth:`put` that are not sent completely."""
        return len(self._unsent)

    def put(self, parts: Sequence[zmtp.Frame]) -> None:
        """Send a message as far as the peer accepts it now. :meth:`flush` sends the rest. Raises OSError."""
        self._unsent.append(memoryview(b"".join((zmtp.head(sum(map(len, parts))), *parts))))
        self.flush()

    def flush(self) -> None:
        """Send unsent bytes as far as the peer accepts them now. Raises OSError."""
        while self._unsent:
            try:
                sent = self._socket.send(self._unsent[0])
            except BlockingIOError:
                return
            if sent == len(self._unsent[0]):
                self._unsent.popleft()
            else:
                self._unsent[0] = self._unsent[0][sent:]

    def get(self) -> bytes | None:
        """Return the next message that has arrived; None without one. Raises OSError, ConnectionLost."""
        while (message := self._next()) is None:
            self._unsent.extend(map(memoryview, self._framing.replies))
            self._framing.replies.clear()
            self.flush()
            if not self._receive(0.0):
                return None
        return payload_of(message, 0)

    def wait(self, end: float, writable: bool = False) -> bool:
        """Wait until the socket is readable, or writable, or has failed. Return False at ``end``.

        While one thread waits here, others may call put and get.
        """
        if not writable and self._buffered():
            return True
        with _SELECTOR() as selector:
            selector.register(self._socket, selectors.EVENT_WRITE if writable else selectors.EVENT_READ)
            return bool(selector.select(min(LONGEST_S, max(0.0, end - time.monotonic()))))

    def shut(self) -> None:
        """End the connection, and wake a thread that waits for it. Its descriptor stays open until :meth:`close`."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _next(self) -> zmtp.Message | None:
        try:
            return self._framing.next()
        except zmtp.ZmtpError as error:
            raise ConnectionLost(f"the other end is not a ZeroMQ server: {error}") from error

    def _answer(self, end: float) -> None:
        """Send the replies that ZeroMQ itself requires: greeting, handshake, PONG."""
        while self._framing.replies:
            self._send([self._framing.replies.pop(0)], end)

    def _receive(self, end: float) -> bool:
        """Receive available bytes, or wait for the first bytes. Return False if no bytes arrive until ``end``."""
        while self._buffered() or self._wait(selectors.EVENT_READ, end):
            with contextlib.suppress(BlockingIOError):
                count = self._socket.recv_into(self._framing.room())
                if not count:
                    raise ConnectionResetError("the server has closed the connection")
                self._framing.take(count)
                return True
        return False

    def _buffered(self) -> bool:
        """Return True if TLS has decrypted bytes, which the system's ``select`` does not report."""
        return isinstance(self._socket, tls.TlsSocket) and self._socket.pending() > 0

    def _send(self, parts: Sequence[zmtp.Frame], end: float, beside: Sequence = ()) -> bool:
        """Send all parts. Return False if the peer has not accepted them until ``end``."""
        pending = (
            [memoryview(b"".join(parts))] if len(parts) > MAX_PARTS else [memoryview(each) for each in parts]
        )
        gather = getattr(self._socket, "sendmsg", None)  # TLS sockets and some systems do not have sendmsg
        while pending:
            try:
                sent = gather(pending, beside) if gather else self._socket.send(pending[0])
            except BlockingIOError:
                if not self._wait(selectors.EVENT_WRITE, end):
                    return False
                continue
            beside = ()
            while pending and sent >= len(pending[0]):
                sent -= len(pending.pop(0))
            if sent:
                pending[0] = pending[0][sent:]
        return True

    def _wait(self, event: int, end: float) -> bool:
        """Wait until the socket may be read or written, or has failed. Return False at ``end``."""
        if event != self._awaited:
            self._selector.modify(self._socket, event)
            self._awaited = event
        return bool(self._selector.select(min(LONGEST_S, max(0.0, end - time.monotonic()))))
