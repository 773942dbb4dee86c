"""Mutated messages for the sockets of a running server, and a robot on every protocol that must get its own answer."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
from collections.abc import Callable, Iterator
from types import SimpleNamespace

from sinew_client import Client, zmtp

from tests.hostile.decoders import mutate, targets
from tests.serve.puppet import GOOD, GREETING, WAIT_S, connect, desk, frame
from tests.serve.test_bounded_work import body, post

EVERY = 50  # number of inputs between two checks of the robots' answers
READY = frame(b"\x05READY\x0bSocket-Type\0\0\0\x03REQ", 4)
SHORT_S = (
    0.02  # seconds to wait for an answer before the next input, because most invalid messages get no answer
)
UPGRADE = (
    b"GET / HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)


def websocket_frame(data: bytes) -> bytes:
    """Return one binary frame of a WebSocket client, with a mask of zeros."""
    size = len(data)
    head = bytes((0x82, 0x80 | size)) if size < 126 else b"\x82\xfe" + struct.pack(">H", size)
    if size >= 1 << 16:
        head = b"\x82\xff" + struct.pack(">Q", size)
    return head + bytes(4) + data


@contextlib.contextmanager
def server() -> Iterator[dict[str, Callable[[random.Random], None]]]:
    """Run a server. Yields name of a protocol -> a function that sends one input.

    The server is in this process, so that its memory is measured.
    """
    good = {name: message for name, (message, _read) in targets().items()}
    with desk(("native", "groot", "web")) as at:
        at.asked = 0

        def stream(wire: str, messages: list[bytes], rng: random.Random) -> None:
            with connect(getattr(at, wire)) as peer:
                with contextlib.suppress(OSError):
                    for message in messages:
                        peer.sendall(message)
                    peer.settimeout(SHORT_S)
                    while peer.recv(1 << 16):
                        pass
                if rng.random() < 0.3:
                    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            if rng.random() < 1 / EVERY:
                answered(at)

        def zeromq(wire: str, rng: random.Random) -> None:
            sent = good["report" if wire == "native" and rng.random() < 0.3 else wire]
            parts = [GREETING + READY, *(zmtp.message([b"", mutate(rng, sent)]) for _ in range(3))]
            stream(wire, [mutate(rng, b"".join(parts))] if rng.random() < 0.3 else parts, rng)

        def web(rng: random.Random) -> None:
            kind = rng.choice(("http", "act", "openpi"))
            data = mutate(rng, good[kind])
            if kind == "openpi":
                sent = [UPGRADE, websocket_frame(data)]
            else:
                path = b"/act" if kind == "act" else b"/v1/actions"
                head = (
                    b"POST "
                    + path
                    + b" HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(data)
                )
                sent = [head, data]
            stream("web", [mutate(rng, b"".join(sent))] if rng.random() < 0.3 else sent, rng)

        yield {
            "native socket": lambda rng: zeromq("native", rng),
            "groot socket": lambda rng: zeromq("groot", rng),
            "web socket": web,
        }
        answered(at)


def answered(at: SimpleNamespace) -> None:
    """Check that a robot on each protocol gets its own answer."""
    at.asked += 1
    with Client(at.native, timeout=WAIT_S) as robot:
        assert (robot.infer({**GOOD, "state": [at.asked, 0]}).actions == at.asked).all()
        assert robot.health()["status"] == "ok"
    status, answer, _headers = post(at.web, body(state=[at.asked, 0]))
    assert (status, f"[{at.asked}.0, {at.asked}.0]".encode() in answer) == (200, True)
