"""One connection to a server over a plain socket, with the ZeroMQ protocol but without the ZeroMQ library.

The library would pass each message through a thread of its own, and copy it. Here the calling thread sends the frames
without a copy, and waits for the reply itself.
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
from sinew_client.addresses import ServerAddress
from sinew_client.errors import ConnectionLost

MAX_REPLY = 1 << 30  # largest reply in bytes; the context of a large policy has several hundred million bytes
MAX_TURNS = 64  # largest number of buffers that are read between two requests
MAX_PARTS = 512  # largest number of parts in one call of sendmsg; the limit of Linux is 1,024
LONGEST_S = 1e6  # longest wait for a socket, seconds
_CREDENTIALS = struct.Struct("3i")  # the socket option SO_PEERCRED returns process, user and group
# Prefer poll(), because select() does not support file descriptors above 1,023.
_SELECTOR = getattr(selectors, "PollSelector", selectors.SelectSelector)
# These TCP options detect a silent peer after 10 + 3 * 5 = 25 seconds. Some systems do not have all three options.
KEEPALIVE = (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))


def unix_candidates(server: ServerAddress) -> list:
    """Return a Unix socket's path in the form of ``socket.getaddrinfo``; [] if the server has a host and a port."""
    return [(socket.AF_UNIX, socket.SOCK_STREAM, 0, "", server.path)] if server.path else []


def unconnected(family: int, kind: int, protocol: int, address: Any) -> socket.socket:
    """Create a socket that is not connected yet.

    For a connection within this machine, the socket uses the congestion control "reno". With BBR, the default of some
    systems, the end of a camera frame can be delayed by ten milliseconds or more, even without a network.

    Args:
        family: Address family, such as ``socket.AF_INET``.
        kind: Socket type.
        protocol: Protocol number.
        address: The address. All four values are as ``socket.getaddrinfo`` returns them.
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
    """Check that the process at the other end of a Unix socket belongs to this user or to root.

    Otherwise another user could create a socket with this path first, and receive the API key. Other kinds of sockets
    are not checked. On systems that do not report the owner, Unix sockets are not checked either.

    Args:
        made: The connected socket.

    Raises:
        ConnectionLost: The process belongs to another user.
    """
    if not hasattr(socket, "AF_UNIX") or made.family != socket.AF_UNIX or not hasattr(socket, "SO_PEERCRED"):
        return
    credentials = made.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _process, user, _group = _CREDENTIALS.unpack(credentials)
    if user not in (os.geteuid(), 0):
        raise ConnectionLost(
            f"ipc://{made.getpeername()}: expected a server of user {os.geteuid()} or of root, got a server of user"
            f" {user}; nothing was sent. Start the server as the user of the robot, with a socket in a folder that"
            " other users cannot write"
        )


def connected(server: ServerAddress, end: float) -> socket.socket:
    """Connect a socket, without TLS yet.

    If the host has several addresses, each address gets an equal share of the remaining time. Name resolution has its
    own time limit.

    Args:
        server: Address of the server.
        end: Time limit, seconds of ``time.monotonic()``.

    Returns:
        The connected socket.

    Raises:
        OSError: No address can be reached. At ``end``, the error is ``socket.timeout``.
    """
    candidates = unix_candidates(server) or socket.getaddrinfo(
        server.host, server.port, type=socket.SOCK_STREAM
    )
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


def secured(made: socket.socket, server: ServerAddress, end: float) -> socket.socket:
    """Start TLS on a connection if its address requires TLS.

    Args:
        made: The connected socket.
        server: Address of the server.
        end: Time limit, seconds of ``time.monotonic()``.

    Returns:
        A socket with TLS after the handshake, or the same socket if the address does not require TLS.

    Raises:
        OSError: The connection broke, or the handshake took too long.
        ConnectionLost: The server does not support TLS, or its certificate is not trusted.
    """
    if server.scheme != "tls":
        return made
    made.settimeout(max(1e-3, min(LONGEST_S, end - time.monotonic())))
    try:
        return tls.encrypted(ssl.create_default_context(), made, server_hostname=server.host)
    except ssl.SSLError as error:
        raise ConnectionLost(tls.refusal_of(error, server.text)) from error


def payload_of(message: zmtp.Message, before: int) -> bytes:
    """Return the last frame of a message.

    Args:
        message: The message.
        before: Number of empty frames that must precede the last frame.

    Raises:
        ConnectionLost: The message has other frames.
    """
    *head, payload = message.frames or [b""]
    if message.count != before + 1 or len(message.frames) != message.count or any(head):
        raise ConnectionLost(
            f"expected a reply of one frame, got {message.count} frames with {message.size} bytes"
        )
    return bytes(payload)


def set_options(made: socket.socket) -> None:
    """Set the options of a TCP socket: send small packets at once, and detect a silent peer after 25 seconds."""
    if made.family not in (socket.AF_INET, socket.AF_INET6):
        return
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE:
        if hasattr(socket, name):
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class Link:
    """An open ZeroMQ connection to a ROUTER or REP socket. Not thread-safe.

    The constructor connects and completes the handshake.

    Args:
        server: Address of the server.
        end: Time limit, seconds of ``time.monotonic()``.
        kind: Role of this connection. With b"REQ" use :meth:`ask`, which waits for the reply. With b"DEALER" use
            :meth:`put`, :meth:`flush` and :meth:`get`, which never wait.

    Raises:
        OSError: The connection failed, with ``socket.timeout`` at ``end``.
        ConnectionLost: The other end is not a ZeroMQ server.
    """

    def __init__(self, server: ServerAddress, end: float, kind: bytes = b"REQ"):
        # These messages are not sent yet. A part of the first message may be sent already.
        self._unsent: collections.deque = collections.deque()
        self.frames: Any = None  # the memory for frames that client and server share (shared.py)
        self._socket = connected(server, end)
        try:
            self._socket = secured(self._socket, server, end)
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
        """Close the connection. In a forked process, this closes only the child's copy."""
        self._socket.close()

    @property
    def stands(self) -> bool:
        """True if the connection is usable. False if it has ended, or has received invalid or unexpected bytes.

        PING messages are allowed, because servers send them to detect lost connections. At most 64 buffers are read, so
        that an endless sender cannot block the client. :meth:`ask` detects problems in later bytes.
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
        """Send a request, and wait for its reply.

        Args:
            parts: Parts of the request, which are sent one after the other.
            end: Time limit, seconds of ``time.monotonic()``.
            beside: Ancillary data for ``sendmsg`` of a Unix socket, sent with the first bytes.

        Returns:
            The reply; None if it has not arrived at ``end``.

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
        """Number of messages from :meth:`put` that are not sent completely yet."""
        return len(self._unsent)

    def put(self, parts: Sequence[zmtp.Frame]) -> None:
        """Queue a message, and send as much as the peer accepts now. :meth:`flush` sends the rest.

        Raises:
            OSError: The connection broke.
        """
        self._unsent.append(memoryview(b"".join((zmtp.head(sum(map(len, parts))), *parts))))
        self.flush()

    def flush(self) -> None:
        """Send as many queued bytes as the peer accepts now.

        Raises:
            OSError: The connection broke.
        """
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
        """Return the next message that has arrived; None if there is none.

        Raises:
            OSError: The connection broke.
            ConnectionLost: The other end is not a ZeroMQ server, or its message is not valid.
        """
        while (message := self._next()) is None:
            self._unsent.extend(map(memoryview, self._framing.replies))
            self._framing.replies.clear()
            self.flush()
            if not self._receive(0.0):
                return None
        return payload_of(message, 0)

    def wait(self, end: float, writable: bool = False) -> bool:
        """Wait until the socket has data, or has failed. While one thread waits, other threads may call put and get.

        Args:
            end: Time limit, seconds of ``time.monotonic()``.
            writable: True waits until the socket accepts bytes instead.

        Returns:
            False if the time limit has passed.
        """
        if not writable and self._buffered():
            return True
        with _SELECTOR() as selector:
            selector.register(self._socket, selectors.EVENT_WRITE if writable else selectors.EVENT_READ)
            return bool(selector.select(min(LONGEST_S, max(0.0, end - time.monotonic()))))

    def shut(self) -> None:
        """End the connection, and wake a thread that waits for it. The socket stays open until :meth:`close`."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _next(self) -> zmtp.Message | None:
        try:
            return self._framing.next()
        except zmtp.ZmtpError as error:
            raise ConnectionLost(
                f"the program at this address is not a Sinew server: {error}; correct the host or the port"
            ) from error

    def _answer(self, end: float) -> None:
        """Send the messages that the ZeroMQ protocol itself requires: greeting, handshake, PONG."""
        while self._framing.replies:
            self._send([self._framing.replies.pop(0)], end)

    def _receive(self, end: float) -> bool:
        """Receive the available bytes, or wait for the first bytes. Return False if no bytes arrive until ``end``."""
        while self._buffered() or self._wait(selectors.EVENT_READ, end):
            with contextlib.suppress(BlockingIOError):
                count = self._socket.recv_into(self._framing.room())
                if not count:
                    raise ConnectionResetError("the server has closed the connection")
                self._framing.take(count)
                return True
        return False

    def _buffered(self) -> bool:
        """Return True if TLS has decrypted bytes in its buffer, which ``select`` does not report."""
        return isinstance(self._socket, tls.TlsSocket) and self._socket.pending() > 0

    def _send(self, parts: Sequence[zmtp.Frame], end: float, beside: Sequence = ()) -> bool:
        """Send all parts of a message. Return False if the peer has not accepted all bytes until ``end``.

        Args:
            parts: The parts, which are sent one after the other.
            end: Time limit, seconds of ``time.monotonic()``.
            beside: Ancillary data for ``sendmsg``, sent with the first bytes.
        """
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
        """Wait until the socket is readable or writable (``event``), or has failed. Return False at ``end``."""
        if event != self._awaited:
            self._selector.modify(self._socket, event)
            self._awaited = event
        return bool(self._selector.select(min(LONGEST_S, max(0.0, end - time.monotonic()))))
