"""WebSockets (RFC 6455) on asyncio, for messages of megabytes: a frame is received into the memory that it stays in.

aiohttp opens the connection; from its 101 on the bytes come here. Its own reader copies a frame four times, and a task
per connection and one per answer take their turns on the loop; here a message is handed on as soon as its last byte
is there. Everything runs on the server's event loop.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import sys
from collections.abc import Callable
from enum import IntEnum

import numpy as np

from sinew.serve.transport.connections import Connection

INPUT = 1 << 16  # bytes of a connection's input buffer: heads of frames, and what comes with them
MAX_FRAMES = 1024  # of one message
MAX_CONTROL = 125  # bytes of a ping, a pong or a close
MAX_REASON = 123  # bytes of a close frame beside its code
CLOSE_S = 1.0  # for the other side to end the connection too
_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
_CONTINUATION, _TEXT, _BINARY, _CLOSE, _PING, _PONG = 0, 1, 2, 8, 9, 10


class Code(IntEnum):
    """Why a connection ends."""

    OK = 1000
    GOING_AWAY = 1001
    PROTOCOL = 1002
    TOO_BIG = 1009
    INTERNAL = 1011


class _FaultError(Exception):
    """The peer does not speak WebSocket, or says too much."""

    def __init__(self, code: Code, text: str):
        super().__init__(text)
        self.code = code


def switching(key: str) -> bytes:
    """Return the answer that turns an HTTP connection into a WebSocket. key: the request's Sec-WebSocket-Key."""
    accept = base64.b64encode(hashlib.sha1(key.encode() + _GUID, usedforsecurity=False).digest())
    return (
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nServer: sinew\r\n"
        b"Sec-WebSocket-Accept: " + accept + b"\r\n\r\n"
    )


class WebSocket(asyncio.BufferedProtocol):
    """The server's end of one connection; the transport's protocol from the 101 on.

    limit: bytes of a message. ping_s: between pings, which the other side answers; None: no pings.
    on_message: gets each message, and True for a text. on_idle: called when what was sent need not wait any more for
    the other side to read; until then ``idle`` is False. ended: done when the connection is.
    """

    def __init__(
        self,
        connection: Connection,
        limit: int,
        ping_s: float | None,
        on_message: Callable[[memoryview, bool], None],
        on_idle: Callable[[], None],
    ):
        assert connection.transport is not None
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.idle = True
        self._connection, self._transport = connection, connection.transport
        self._limit, self._on_message, self._on_idle = limit, on_message, on_idle
        self._input = memoryview(bytearray(INPUT))
        self._start = self._end = 0  # what of the input is not understood yet
        self._body: np.ndarray | None = None  # of the frame that is arriving
        self._filled = 0
        self._opcode, self._last, self._mask = _TEXT, True, b""
        self._kind: int | None = None  # of the message that is arriving
        self._frames: list[memoryview] = []  # of it
        self._size = 0  # of these
        self._closing = self._deaf = False  # deaf: what comes is received and dropped
        self._heard = self._asked = asyncio.get_running_loop().time()
        self._timer: asyncio.TimerHandle | None = None
        self._ping_s = ping_s
        if ping_s is not None:
            self._timer = asyncio.get_running_loop().call_later(ping_s, self._beat)

    # ------------------------------------------------------------------------- out

    def send(self, data: bytes, text: bool = False) -> None:
        """Send a message, unless the connection is closing."""
        if not self._closing:
            self._write(_TEXT if text else _BINARY, data)

    def close(self, code: Code, reason: str = "") -> None:
        """Say good-bye. The connection ends when the other side does so too, or after ``CLOSE_S``."""
        if self._closing:
            return
        words = reason.encode()[:MAX_REASON].decode(errors="ignore").encode()
        self._write(_CLOSE, int(code).to_bytes(2, "big") + words)
        self._closing = True
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(CLOSE_S, self._transport.abort)

    def _write(self, opcode: int, data: bytes) -> None:
        size = len(data)
        if size < 126:
            head = bytes((0x80 | opcode, size))
        elif size < 1 << 16:
            head = bytes((0x80 | opcode, 126)) + size.to_bytes(2, "big")
        else:
            head = bytes((0x80 | opcode, 127)) + size.to_bytes(8, "big")
        if not self._transport.is_closing():
            self._transport.write(head + data)

    def _beat(self) -> None:
        """Ask for a sign of life where there was none; end the connection if the last question got no answer."""
        assert self._ping_s is not None
        loop = asyncio.get_running_loop()
        if self._asked > self._heard:
            self._transport.abort()
            return
        quiet = loop.time() - self._heard
        if quiet >= self._ping_s:
            self._asked, quiet = loop.time(), self._ping_s / 2
            self._write(_PING, b"")
        self._timer = loop.call_later(self._ping_s - quiet, self._beat)

    # ------------------------------------------------------------------------- asyncio's calls

    def get_buffer(self, _sizehint: int) -> memoryview:
        """Where the next bytes go: into the frame that they belong to, or the input."""
        if self._deaf:
            return self._input
        if self._body is not None:
            return self._body.data[self._filled :]
        if self._start == self._end:
            self._start = self._end = 0
        elif self._end == INPUT:
            rest = self._end - self._start
            self._input[:rest] = bytes(self._input[self._start : self._end])
            self._start, self._end = 0, rest
        return self._input[self._end :]

    def buffer_updated(self, count: int) -> None:
        """So many bytes have come."""
        self._heard = asyncio.get_running_loop().time()
        if self._deaf or not self._connection.arrived(count):
            return
        if self._body is not None:
            self._filled += count
        else:
            self._end += count
        try:
            while self._take_frame():
                pass
        except _FaultError as fault:
            self.close(fault.code, str(fault))
            self._body, self._deaf = None, True

    def eof_received(self) -> None:
        """Let the transport close."""

    def connection_lost(self, error: Exception | None) -> None:
        self._closing = True
        if self._timer is not None:
            self._timer.cancel()
        if not self.ended.done():
            self.ended.set_result(None)
        self._connection.connection_lost(error)

    def pause_writing(self) -> None:
        """Read no more until the other side has read what it was sent."""
        self.idle = False
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        self.idle = True
        self._transport.resume_reading()
        self._on_idle()

    # ------------------------------------------------------------------------- frames

    def _take_frame(self) -> bool:
        """Take the next frame, if all of it is there."""
        if self._body is None and not self._begin():
            return False
        body = self._body
        assert body is not None
        if self._filled < len(body):
            return False
        self._body, self._filled = None, 0
        _unmask(body, self._mask)
        if self._opcode >= _CLOSE:
            self._connection.control_frame(len(body))
            self._obey(body.tobytes())
        else:
            self._frames.append(body.data)
            self._size += len(body)
            if self._last:
                self._deliver()
        return not self._transport.is_closing()

    def _deliver(self) -> None:
        frames, text = self._frames, self._kind == _TEXT
        self._frames, self._kind, self._size = [], None, 0
        if not self._closing:
            whole = frames[0] if len(frames) == 1 else memoryview(b"".join(frames))
            self._on_message(whole.toreadonly(), text)

    def _begin(self) -> bool:
        """Read a frame's head, and what there is of its body; False where not even the head is there."""
        have = self._input[self._start : self._end]
        if len(have) < 2:
            return False
        opcode, last, short = have[0] & 15, bool(have[0] & 0x80), have[1] & 0x7F
        more = {126: 2, 127: 8}.get(short, 0)  # bytes of a longer size
        head = 2 + more + 4
        if have[0] & 0x70:
            raise _FaultError(Code.PROTOCOL, "a frame has reserved bits")
        if not have[1] & 0x80:
            raise _FaultError(Code.PROTOCOL, "a frame of a client is not masked")
        if len(have) < head:
            return False
        size = int.from_bytes(have[2 : 2 + more], "big") if more else short
        self._check(opcode, last, size)
        self._opcode, self._last, self._mask = opcode, last, bytes(have[head - 4 : head])
        self._start += head
        here = min(size, self._end - self._start)
        # Memory that is not written to costs nothing yet: the head alone reserves none.
        self._body = np.empty(size, np.uint8)
        self._body.data[:here] = self._input[self._start : self._start + here]
        self._start += here
        self._filled = here
        return True

    def _check(self, opcode: int, last: bool, size: int) -> None:
        """Raise _FaultError for a frame that may not come now."""
        if opcode in (_CLOSE, _PING, _PONG):
            if size > MAX_CONTROL or not last:
                raise _FaultError(Code.PROTOCOL, f"a control frame has {size} bytes, or parts")
            return
        if opcode not in (_CONTINUATION, _TEXT, _BINARY) or (opcode == _CONTINUATION) != (
            self._kind is not None
        ):
            raise _FaultError(Code.PROTOCOL, f"a frame with opcode {opcode} came where none was expected")
        if opcode != _CONTINUATION:
            self._kind = opcode
        if self._size + size > self._limit or len(self._frames) == MAX_FRAMES:
            raise _FaultError(
                Code.TOO_BIG, f"a message has at most {self._limit} bytes and {MAX_FRAMES} frames"
            )

    def _obey(self, body: bytes) -> None:
        """Do what a control frame wants."""
        if self._opcode == _PING and not self._closing:
            self._write(_PONG, body)
        elif self._opcode == _CLOSE:
            if not self._closing:
                self._closing = True
                self._write(_CLOSE, body[:2] if len(body) > 1 else b"")
            self._transport.close()


def _unmask(body: np.ndarray, mask: bytes) -> None:
    """Undo the client's mask [4 bytes] in place. body: uint8 [n]."""
    whole = len(body) & ~3
    words = body[:whole].view(np.uint32)
    np.bitwise_xor(words, np.uint32(int.from_bytes(mask, sys.byteorder)), out=words)
    for index in range(whole, len(body)):
        body[index] ^= mask[index & 3]
