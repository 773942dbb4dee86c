"""The ZeroMQ protocol ZMTP 3 for one connection, with limits for memory. This module opens no sockets.

The server does not use the ZeroMQ library, because the library limits the size of each frame but not of a whole
message. A peer that sends endless frames could exhaust the memory. In this module, a message has a limited number of
frames and bytes. Frames that a request does not need are counted and dropped when they arrive. The client does not use
the library either, because the library passes every message through a thread of its own.

Protocol: https://rfc.zeromq.org/spec/23 (3.0) and /spec/37 (3.1: PING and PONG), security mechanism NULL.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Union

import numpy as np

from sinew_client.untrusted import shown

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
# Key: a socket type. Value: the socket types that may connect to it.
PEERS = {
    b"ROUTER": (b"REQ", b"DEALER", b"ROUTER"),
    b"REQ": (b"ROUTER", b"REP"),
    b"DEALER": (b"ROUTER",),
}

INPUT = 1 << 14  # size of a connection's input buffer for handshakes, frame headers and small frames, bytes
MAX_COMMAND = 1024  # largest ZMTP command, bytes
# At most this many frames of a message are stored: the ids of proxies, an empty frame and the request.
KEPT_FRAMES = 10
MAX_FRAMES = 1024  # if a message has more frames than this, the connection ends

_MORE, _LONG, _COMMAND = 1, 2, 4
_DROPPED = memoryview(bytearray(1 << 16))  # bytes that are not stored are received into this buffer

Frame = Union[bytes, memoryview]


class ZmtpError(Exception):
    """The peer does not use ZMTP 3, or its message is too large. The connection must be closed."""


class Message:
    """A received message.

    Attributes:
        frames: The stored frames in order. Frames after the first ten, or beyond the limit of bytes, are not stored.
        count: Number of all frames.
        size: Total size of all frames, bytes.
    """

    __slots__ = ("count", "frames", "size")

    def __init__(self, frames: list, count: int, size: int):
        self.frames, self.count, self.size = frames, count, size


class Framing:
    """Parses the received bytes of one connection.

    Receive bytes into :meth:`room`, report their number with :meth:`take`, and call :meth:`next` until it returns None.
    Send the bytes in ``replies``: greeting, handshake and PONG.

    Args:
        limit: Largest stored size of a message, bytes. If a message is twice as large, the connection must be closed.
        kind: Socket type of this side, a key of ``PEERS``.

    Attributes:
        ready: True after the handshake is complete.
        replies: Messages of the protocol itself that must be sent.
        left: Number of bytes of the present frame that have not arrived.
    """

    def __init__(self, limit: int, kind: bytes = b"ROUTER"):
        self.limit = limit
        self.kind = kind
        self.ready = False  # True after the handshake is complete
        self.replies: list[bytes] = [GREETING]
        self._greeted = False
        self._input = memoryview(bytearray(INPUT))
        self._start = self._end = 0  # start and end of the bytes in the input buffer that are not parsed yet
        self._flags = 0
        # This is the number of missing bytes of the present frame. Until they arrive, ``next`` returns None.
        self.left = 0
        self._body: memoryview | None = None  # body of the current frame; None if its bytes are not stored
        self._filled = 0
        self._frames: list[Frame] = []
        # About the present message: the number of stored bytes, the number of frames, and the number of bytes of all
        # frames.
        self._kept = self._count = self._size = 0

    @property
    def arriving(self) -> int:
        """Number of bytes that an incomplete message uses in memory."""
        return self._kept + (self._filled if self._body is not None else 0)

    @property
    def begun(self) -> bool:
        """True if a message has begun to arrive but is not complete. A PING is not a message."""
        return self._count > 0

    @property
    def between(self) -> bool:
        """True if the handshake is complete and no part of the next message has arrived."""
        return self.ready and not self._count and not self.left and self._start == self._end

    @property
    def pending(self) -> bool:
        """True if there are received bytes that :meth:`next` has not parsed yet."""
        return self._start != self._end or bool(self._filled and not self.left)

    def room(self) -> memoryview:
        """Return the buffer into which the next bytes must be received.

        It is never empty after ``next`` returned None.
        """
        if self.left:
            if self._body is None:
                return _DROPPED[: min(self.left, len(_DROPPED))]
            return self._body[self._filled :]
        if self._start == self._end:
            self._start = self._end = 0
        elif self._end == INPUT:
            rest = self._end - self._start
            self._input[:rest] = bytes(self._input[self._start : self._end])
            self._start, self._end = 0, rest
        return self._input[self._end :]

    def take(self, count: int) -> None:
        """Record that ``count`` bytes were received into the buffer of :meth:`room`."""
        if self.left:
            self.left -= count
            self._filled += count
        else:
            self._end += count

    def next(self) -> Message | None:
        """Return the next complete message; None if no message is complete.

        Raises:
            ZmtpError: The peer does not use ZMTP 3, or its message is too large.
        """
        while not self.left:
            if self._filled:  # a frame that arrived in several pieces is now complete
                message = self._end_frame(self._body)
            elif not self._greeted:
                if not self._greet():
                    return None
                continue
            else:
                begun = self._begin_frame()
                if not begun:
                    return None
                if self.left:
                    return None
                message = self._end_frame(self._body)
            if message is not None:
                return message
        return None

    def _greet(self) -> bool:
        have = self._input[self._start : self._end]
        if have[:1] not in (b"", b"\xff") or (len(have) > 9 and not have[9] & 1):
            raise ZmtpError("expected a ZMTP greeting, got other bytes")
        if len(have) > 10 and have[10] < 3:
            raise ZmtpError(f"expected ZMTP 3 (ZeroMQ 4), got ZMTP {have[10]}")
        if len(have) < len(GREETING):
            return False
        mechanism = bytes(have[12:32]).rstrip(b"\0")
        if mechanism != b"NULL":
            raise ZmtpError(f"expected the security mechanism NULL, got {mechanism!r}")
        self._start += len(GREETING)
        self._greeted = True
        kind = b"\x0bSocket-Type" + len(self.kind).to_bytes(4, "big") + self.kind
        self.replies.append(_command(b"READY", kind + b"\x08Identity\0\0\0\0"))
        return True

    def _begin_frame(self) -> bool:
        """Parse the header of a frame, and store the available bytes of its body.

        Return False if the header has not arrived completely.
        """
        have = self._input[self._start : self._end]
        if len(have) < 2:
            return False
        flags, head, size = have[0], 2, have[1]
        if flags & ~7 or (flags & _COMMAND and flags & _MORE):
            raise ZmtpError(f"expected valid flags of a frame, got {flags:#04x}")
        if flags & _LONG:
            if len(have) < 9:
                return False
            head, size = 9, int.from_bytes(have[1:9], "big")
        if flags & _COMMAND:
            if size > MAX_COMMAND:
                raise ZmtpError(f"expected a command of at most {MAX_COMMAND} bytes, got {size} bytes")
            keep = True
        elif not self.ready:
            raise ZmtpError("expected the handshake first, got a message")
        else:
            self._count += 1
            self._size += size
            if self._count > MAX_FRAMES or self._size > 2 * self.limit:
                raise ZmtpError(
                    f"expected a shorter message, got at least {self._count} frames and {self._size} bytes"
                )
            keep = self._count <= KEPT_FRAMES and self._size <= self.limit
        self._flags = flags
        self._start += head
        here = min(size, self._end - self._start)
        part = self._input[self._start : self._start + here]
        self._start += here
        self.left, self._filled = size - here, here
        if not keep:
            self._body = None
        elif here == size:
            self._body = memoryview(bytes(part))
        else:
            # The system allocates the pages of this array only when bytes are written. So a peer that states a large
            # frame and sends no data does not use memory.
            self._body = np.empty(size, np.uint8).data
            self._body[:here] = part
        return True

    def _end_frame(self, body: memoryview | None) -> Message | None:
        self._body, self._filled = None, 0
        if self._flags & _COMMAND:
            assert body is not None
            self._obey(bytes(body))
            return None
        if body is not None:
            self._frames.append(body)
            self._kept += len(body)
        if self._flags & _MORE:
            return None
        message = Message(self._frames, self._count, self._size)
        self._frames = []
        self._kept = self._count = self._size = 0
        return message

    def _obey(self, command: bytes) -> None:
        length = command[0] if command else 0
        name, body = command[1 : 1 + length], command[1 + length :]
        if name == b"READY" and not self.ready:
            kind = _property(body, b"socket-type")
            if kind not in PEERS[self.kind]:
                expected = b" or ".join(PEERS[self.kind][:2]).decode()
                raise ZmtpError(f"expected a socket of type {expected}, got {kind[:20]!r}")
            self.ready = True
        elif name == b"ERROR":  # the body of this command is a text, after one byte that contains its length
            raise ZmtpError(
                f"the peer rejects the connection: {shown(body[1:].decode('ascii', 'replace'), 300)}"
            )
        elif not self.ready:
            raise ZmtpError(f"expected the command READY, got {name[:20]!r}")
        elif name == b"PING" and len(self.replies) < KEPT_FRAMES:
            # A PING has a time to live (2 bytes) and a context of at most 16 bytes, which the PONG returns.
            self.replies.append(_command(b"PONG", body[2:18]))


def message(frames: Sequence[Frame]) -> bytes:
    """Encode a message with these frames."""
    parts: list[Frame] = []
    for index, frame in enumerate(frames):
        parts += [head(len(frame), index < len(frames) - 1), frame]
    return b"".join(parts)


def error(reason: str) -> bytes:
    """Encode the command ERROR, which rejects a handshake. ``reason`` is a text for the user, at most 255 ASCII
    characters.
    """
    text = reason.encode("ascii", "replace")[:255]
    return _command(b"ERROR", bytes((len(text),)) + text)


def head(size: int, more: bool = False) -> bytes:
    """Encode the header of a frame of ``size`` bytes. ``more`` is False for the last frame of a message."""
    return bytes((more, size)) if size < 256 else bytes((more | _LONG,)) + size.to_bytes(8, "big")


def _command(name: bytes, body: bytes) -> bytes:
    content = bytes((len(name),)) + name + body
    return bytes((_COMMAND, len(content))) + content


def _property(body: bytes, wanted: bytes) -> bytes:
    """Find a property in the body of the command READY. Return its value; b"" if there is no such property."""
    at = 0
    while at < len(body):
        name = body[at + 1 : at + 1 + body[at]]
        at += 1 + body[at]
        size = int.from_bytes(body[at : at + 4], "big")
        if len(body) < at + 4 + size:
            raise ZmtpError("expected a complete READY command, got one that is cut off")
        if name.lower() == wanted:
            return body[at + 4 : at + 4 + size]
        at += 4 + size
    return b""
