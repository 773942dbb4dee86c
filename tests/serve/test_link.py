"""The client's own end of a ZeroMQ connection, against the library's sockets and against peers that are none."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import zmq
from sinew_client import Client, ClientError, ConnectionLost, protocol, schema, zmtp
from sinew_client.addresses import ServerAddress
from sinew_client.aio import AsyncClient
from sinew_client.link import Link, unconnected

from tests.serve.puppet import GREETING, WAIT_S, frame

READY = frame(b"\x05READY\x0bSocket-Type\0\0\0\x06ROUTER", 4)
PING = frame(b"\x04PING\0\x10hello", 4)
ANSWER = schema.PredictResponse(request_id=1, horizon=2, dim=1, actions=[0.5, 1.5]).SerializeToString()
FRAMES = {"a": np.arange(48 * 64 * 3, dtype=np.uint8).reshape(48, 64, 3)}
OBSERVATION = {"images": FRAMES, "state": [0.0], "prompt": "go"}


@contextlib.contextmanager
def peer(talk: Callable[[socket.socket], None]) -> Iterator[str]:
    """The address of somebody who does ``talk`` on the first connection and ends it."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def run() -> None:
            with contextlib.suppress(OSError), listening.accept()[0] as made:
                made.settimeout(WAIT_S)
                talk(made)

        thread = threading.Thread(target=run)
        thread.start()
        yield f"tcp://127.0.0.1:{listening.getsockname()[1]}"
        thread.join(WAIT_S)


def more_of(made: socket.socket) -> bytes:
    """Return what comes next. Raises ConnectionError at its end: who waits for more in a loop would turn forever."""
    if data := made.recv(1 << 16):
        return data
    raise ConnectionError("expected more, got the end of the connection")


def received(made: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size and (data := made.recv(size - len(found))):
        found += data
    return found


@pytest.mark.parametrize("kind", [zmq.ROUTER, zmq.REP])
def test_sockets_of_the_library(kind: int) -> None:
    with zmq.Context() as context, context.socket(kind) as there:
        port = there.bind_to_random_port("tcp://127.0.0.1")
        found: list[list[bytes]] = []

        def serve() -> None:
            for _ in range(3):
                found.append(there.recv_multipart())
                there.send_multipart([*found[-1][:-1], found[-1][-1][::-1]])

        thread = threading.Thread(target=serve)
        thread.start()
        link = Link(ServerAddress.parse(f"127.0.0.1:{port}"), time.monotonic() + WAIT_S)
        for parts in ([b"ab", memoryview(b"c")], [b"x"] * 2000, [bytes(1 << 20)]):
            sent = b"".join(parts)
            assert link.ask(parts, time.monotonic() + WAIT_S) == sent[::-1]
            assert found[-1][-1] == sent
        assert link.stands
        thread.join(WAIT_S)
        link.close()


def test_a_peer_that_reads_slowly_gets_every_byte() -> None:
    wanted = b"".join(protocol.infer_parts(OBSERVATION, 1)) * 20
    found: list[bytes] = []

    def talk(made: socket.socket) -> None:
        made.sendall(GREETING + READY + frame(b"\x04PING\0\x10hello", 4))
        received(made, len(GREETING))
        while sum(map(len, found)) < len(wanted):
            found.append(made.recv(1 << 14))
        made.sendall(zmtp.message([b"", ANSWER]))
        made.recv(1)

    with peer(talk) as address:
        link = Link(ServerAddress.parse(address), time.monotonic() + WAIT_S)
        link._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 12)  # takes a little at a time
        assert link.ask([wanted[:1], wanted[1:]], time.monotonic() + WAIT_S) == ANSWER
        link.close()
    assert b"".join(found).endswith(wanted[-1000:])
    assert frame(b"\x04PONGhello", 4) in b"".join(found)[:1000]


@pytest.mark.parametrize(
    "said",
    [b"HTTP/1.1 400 Bad Request\r\n\r\n" + bytes(64), GREETING + frame(b"", 0, 1 << 40)],
    ids=["http", "no handshake"],
)
def test_what_is_no_server_of_zeromq_is_told_at_once(said: bytes) -> None:
    with (
        peer(lambda made: (made.sendall(said), made.recv(1 << 16))) as address,
        Client(address, timeout=WAIT_S) as robot,
        pytest.raises(ConnectionLost, match="not a Sinew server"),
    ):
        robot.infer(OBSERVATION)


def test_replies_of_any_bytes() -> None:
    """Mutations of a good reply, and bytes at random: a chunk or a ClientError, and never a wait."""
    rng = random.Random(0)
    good = zmtp.message([b"", ANSWER]) + frame(b"\x04PING\0\x10hello", 4)
    for _ in range(150):
        said = bytearray(good)
        for _ in range(rng.randrange(4)):
            said[rng.randrange(len(said))] = rng.randrange(256)
        del said[rng.randrange(len(said)) :: rng.choice((1, 1000))]

        def talk(made: socket.socket, said: bytes = bytes(said)) -> None:
            made.sendall(GREETING + READY)
            made.recv(1 << 16)
            made.sendall(said)

        with peer(talk) as address, Client(address, timeout=0.2) as robot, contextlib.suppress(ClientError):
            assert robot.infer(OBSERVATION).actions.shape == (2, 1)


@pytest.mark.parametrize(
    "address",
    ["ipc://tmp/x", "ipc://@x", "inproc://x", "tcp://host:0", "tcp://host:65536", "tcp://:1", "a:b:c"],
)
def test_addresses_that_are_none(address: str) -> None:
    for kind in (Client, AsyncClient):
        with pytest.raises(
            ClientError, match="expected tcp://HOST:PORT with the port of the native protocol"
        ):
            kind(address)


def test_a_host_that_cannot_be_one() -> None:
    with pytest.raises(ClientError, match=r"cannot connect to tcp://a\.\.b:5555"):
        Client("tcp://a..b:5555")


def test_addresses() -> None:
    parsed = [ServerAddress.parse(text) for text in ("tcp://[::1]:5555", "robot.local:1", "ipc:///run/s#b")]
    assert [(each.host, each.port, each.path) for each in parsed] == [
        ("::1", 5555, ""),
        ("robot.local", 1, ""),
        ("", 0, "/run/s"),
    ]


def test_a_peer_that_never_stops_talking_has_its_time_and_no_more() -> None:
    """PING after PING: the call ends in time, and so does the look before the next one."""
    over = threading.Event()

    def talk(made: socket.socket) -> None:
        made.sendall(GREETING + READY)
        while not over.is_set():
            made.sendall(PING * 100)

    with peer(talk) as address:
        link = Link(ServerAddress.parse(address), time.monotonic() + WAIT_S)
        assert link.ask([b"x"], time.monotonic() + 0.05) is None
        assert link.stands
        over.set()
        link.close()


@pytest.mark.parametrize("room", [16, zmtp.INPUT], ids=["in pieces", "whole"])
@pytest.mark.parametrize(
    ("said", "stands"),
    [
        (b"", True),
        (PING, True),
        (PING * 10_000, True),
        (PING[:5], True),
        (PING + zmtp.message([b"", ANSWER]), False),
        (PING + zmtp.message([b"", ANSWER])[:-1], False),  # its rest would be taken for the next answer
        (zmtp.message([b"", bytes(1 << 18)])[:-1], False),
        (b"HTTP/1.1 408 Request Timeout\r\n\r\n", False),
        (None, False),
    ],
    ids=[
        "silence",
        "PING",
        "many PINGs",
        "part of a PING",
        "a reply",
        "part of a reply",
        "long",
        "HTTP",
        "end",
    ],
)
def test_what_came_since_the_last_reply(said: bytes | None, stands: bool, room: int, monkeypatch) -> None:
    """All of it is there before the look: the answer is the same however fast either side is."""
    come = threading.Event()

    def talk(made: socket.socket) -> None:
        made.sendall(GREETING + READY)
        asked = b""
        while not asked.endswith(b"go"):
            asked += more_of(made)
        made.sendall(zmtp.message([b"", ANSWER]))
        made.recv(1)  # until the reply has been read
        if said is None:
            made.shutdown(socket.SHUT_WR)
        else:
            made.sendall(said)
        come.set()
        made.recv(1 << 16)

    whole = zmtp.Framing.room
    with peer(talk) as address:
        link = Link(ServerAddress.parse(address), time.monotonic() + WAIT_S)
        assert link.ask([b"go"], time.monotonic() + WAIT_S) == ANSWER
        monkeypatch.setattr(zmtp.Framing, "room", lambda self: whole(self)[:room])
        link._socket.send(b"x")
        assert come.wait(WAIT_S)
        assert link.stands == stands
        link.close()


def test_a_reply_that_came_twice_costs_one_call() -> None:
    def talk(made: socket.socket) -> None:
        made.sendall(GREETING + READY)
        asked = b""
        while b"go" not in asked:  # the prompt
            asked += more_of(made)
        made.sendall(zmtp.message([b"", ANSWER]) * 2)
        made.recv(1 << 16)

    with peer(talk) as address, Client(address, timeout=WAIT_S) as robot:
        assert robot.infer(OBSERVATION).actions.shape == (2, 1)
        assert not robot._link.stands  # so that the next call takes another connection


@pytest.mark.skipif(not hasattr(socket, "TCP_CONGESTION"), reason="this system names no congestion control")
@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_frames_to_this_machine_are_not_paced(kind: type) -> None:
    """Some ask BBR of their system, under which the end of a frame waited for ten milliseconds and more."""

    def control(made: socket.socket) -> bytes:
        return made.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0")

    found = []
    plain = socket.socket.connect

    def connect(
        made: socket.socket, address: tuple
    ) -> None:  # from the beginning: what BBR begins stays paced
        found.append(control(made))
        plain(made, address)

    def talk(made: socket.socket) -> None:
        made.sendall(GREETING + READY)
        asked = b""
        while b"go" not in asked:  # the prompt
            asked += more_of(made)
        made.sendall(
            zmtp.message([b"", ANSWER] if kind is Client else [ANSWER])
        )  # as REQ and DEALER expect it
        made.recv(1 << 16)

    with peer(talk) as address, pytest.MonkeyPatch.context() as patched:
        patched.setattr(socket.socket, "connect", connect, raising=False)
        if kind is Client:
            with Client(address, timeout=WAIT_S) as robot:
                robot.infer(OBSERVATION)
        else:

            async def ask() -> None:
                async with AsyncClient(address, timeout=WAIT_S) as robot:
                    await robot.infer(OBSERVATION)

            asyncio.run(ask())
    assert found == [b"reno"]
    with socket.socket() as usual, unconnected(usual.family, usual.type, 0, ("192.0.2.1", 5555)) as far:
        assert control(far) == control(usual)  # elsewhere the system knows better
