"""WebSocket frames byte by byte and hostile; against clients of others in test_web_wires.py."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from sinew.serve.transport.connections import Connection, Connections
from sinew.serve.transport.websocket import MAX_FRAMES, Code, WebSocket, switching

LIMIT = 100_000
TEXT, BINARY, CLOSE, PING, PONG = 1, 2, 8, 9, 10


class Transport(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written, self.closed, self.reading = b"", False, True

    def write(self, data: Any) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    abort = close

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True


def frame(
    opcode: int, body: bytes = b"", last: bool = True, mask: bytes = b"\x01\x02\x03\xff", bits: int = 0
) -> bytes:
    size = len(body)
    if size < 126:
        short = bytes((size | 0x80,))
    else:
        short = b"\xfe" + size.to_bytes(2, "big") if size < 1 << 16 else b"\xff" + size.to_bytes(8, "big")
    head = bytes((last << 7 | bits | opcode,)) + short + mask
    return head + (np.frombuffer(body, np.uint8) ^ np.resize(np.frombuffer(mask, np.uint8), size)).tobytes()


def spoken(talk: Callable[[WebSocket, Transport, Connection], None]) -> tuple[list, bytes, bool]:
    """Return the messages that arrived in ``talk``, what the server wrote, and whether it closed."""

    async def run() -> tuple[list, bytes, bool]:
        everybody = Connections("test", 8, 1 << 20, 10.0)
        connection = everybody.accept(asyncio.Protocol())
        assert isinstance(connection, Connection)
        transport, found = Transport(), []
        connection.connection_made(transport)

        def message(data: memoryview, text: bool) -> None:
            found.append((bytes(data), text))
            connection.answered(connection.whole())

        made = WebSocket(connection, LIMIT, None, message, lambda: None)
        talk(made, transport, connection)
        assert everybody.ledger.held == connection.arriving
        made.connection_lost(None)
        return found, transport.written, transport.closed

    return asyncio.run(run())


def feed(made: WebSocket, data: bytes, pieces: int = 1 << 20) -> None:
    while data:
        room = made.get_buffer(-1)
        part = data[: min(pieces, len(room))]
        assert part, "no room"
        room[: len(part)] = part
        made.buffer_updated(len(part))
        data = data[len(part) :]


def test_messages_arrive_whole_in_any_pieces() -> None:
    rng = random.Random(0)
    sizes = (0, 1, 5, 125, 126, 1000, 65_535, 65_536, 99_999)
    wanted = [(rng.randbytes(size), bool(size & 1)) for size in sizes]
    data = b"".join(frame(TEXT if text else BINARY, body, mask=rng.randbytes(4)) for body, text in wanted)
    for pieces in (61, 1000, 70_000, 1 << 20):
        found, said, closed = spoken(lambda made, *_, pieces=pieces: feed(made, data, pieces))
        assert found == wanted
        assert (said, closed) == (b"", False)


def test_fragments_with_a_ping_in_between() -> None:
    data = frame(BINARY, b"ab", last=False) + frame(PING, b"?") + frame(0, b"", last=False) + frame(0, b"c")
    found, said, _ = spoken(lambda made, *_: feed(made, data))
    assert found == [(b"abc", False)]
    assert said == b"\x8a\x01?"


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"\x82\x01a" + bytes(100), Code.PROTOCOL),  # not masked
        (frame(BINARY, b"a", bits=0x40), Code.PROTOCOL),  # compressed, which nobody agreed on
        (frame(3, b"a"), Code.PROTOCOL),
        (frame(0, b"a"), Code.PROTOCOL),
        (frame(BINARY, b"a", last=False) + frame(BINARY, b"b"), Code.PROTOCOL),
        (frame(PING, b"a", last=False), Code.PROTOCOL),
        (frame(PING, bytes(126)), Code.PROTOCOL),
        (b"\x82\xff" + (1 << 63).to_bytes(8, "big") + bytes(4), Code.TOO_BIG),
        (frame(BINARY, bytes(LIMIT), last=False) + frame(0, b"a"), Code.TOO_BIG),
        (frame(BINARY, b"", last=False) + frame(0, b"", last=False) * MAX_FRAMES, Code.TOO_BIG),
    ],
)
def test_what_is_refused_ends_with_a_code(data: bytes, code: Code) -> None:
    def talk(made: WebSocket, transport: Transport, _connection: Connection) -> None:
        feed(made, data + bytes(1 << 18))  # whatever else comes is received and dropped
        made.send(b"nobody hears this")

    found, said, _ = spoken(talk)
    assert found == []
    assert said[0] == 0x88
    assert said[2:4] == int(code).to_bytes(2, "big")
    assert len(said) == 2 + said[1]


def test_both_sides_say_good_bye() -> None:
    _, said, closed = spoken(lambda made, *_: feed(made, frame(CLOSE, b"\x03\xe8bye") + frame(BINARY, b"a")))
    assert (said, closed) == (b"\x88\x02\x03\xe8", True)

    def talk(made: WebSocket, transport: Transport, _connection: Connection) -> None:
        made.close(Code.INTERNAL, "ü" * 200)
        feed(made, frame(BINARY, b"a" * 1000) + frame(PING, b"?"))
        assert not transport.closed
        feed(made, frame(CLOSE, b"\x03\xf3"))

    found, said, closed = spoken(talk)
    assert (found, closed) == ([], True)
    assert said == b"\x88\x7c\x03\xf3" + ("ü" * 61).encode()


def test_who_does_not_read_is_not_read_from() -> None:
    def talk(made: WebSocket, transport: Transport, _connection: Connection) -> None:
        made.pause_writing()
        assert (made.idle, transport.reading) == (False, False)
        made.resume_writing()
        assert (made.idle, transport.reading) == (True, True)

    spoken(talk)


def test_any_bytes() -> None:
    """Mutations of a good conversation, in random pieces: no exception, and bounded memory."""
    rng = random.Random(0)
    good = (
        frame(BINARY, b"x" * 300) + frame(PING, b"?") + frame(TEXT, b"y", last=False) + frame(0, b"z" * 200)
    )
    for _ in range(150):
        data = bytearray(good * 3)
        for _ in range(rng.randrange(6)):
            data[rng.randrange(len(data))] = rng.randrange(256)

        def talk(made: WebSocket, _transport: Transport, _connection: Connection, data: Any = data) -> None:
            feed(made, bytes(data), rng.choice((7, 100, 1 << 20)))
            assert made._size <= LIMIT

        spoken(talk)


def test_the_answer_of_the_rfc() -> None:
    """Section 1.3's example."""
    assert b"Sec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n" in switching("dGhlIHNhbXBsZSBub25jZQ==")


def test_who_answers_no_ping_is_closed() -> None:
    async def run(answers: bool) -> int:
        everybody = Connections("test", 8, 1 << 20, 10.0)
        connection = everybody.accept(asyncio.Protocol())
        assert isinstance(connection, Connection)
        pings = []

        class Peer(Transport):
            def write(self, data: Any) -> None:
                pings.append(data)
                if answers:
                    feed(made, frame(PONG))

        transport = Peer()
        connection.connection_made(transport)
        made = WebSocket(connection, LIMIT, 0.02, lambda *_: None, lambda: None)
        while not transport.closed and len(pings) < 3:
            await asyncio.sleep(0.001)
        made.connection_lost(None)
        assert set(pings) == {b"\x89\x00"}
        return len(pings)

    assert asyncio.run(run(answers=False)) == 1
    assert asyncio.run(run(answers=True)) == 3
