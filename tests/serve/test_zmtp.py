"""ZMTP as the server speaks it: against the library's own sockets elsewhere, here byte by byte and hostile."""

from __future__ import annotations

import contextlib
import random
import time

import numpy as np
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st
from sinew_client import Client, protocol, schema, zmtp

from sinew.serve.transport.ledger import Account, MemoryLedger
from sinew.serve.transport.listen import Listen
from sinew.serve.transport.zeromq import MAX_PAUSE_S, REFUSAL_PAUSE_S, Peer
from tests.serve.puppet import (
    GOOD,
    GREETING,
    WAIT_S,
    closed_by_server,
    connect,
    desk,
    frame,
    request,
    resident,
    shake,
    until,
)

READY = frame(b"\x05READY\x0bSocket-Type\0\0\0\x03REQ", 4)


def feed(framing: zmtp.Framing, data: bytes, pieces: int = 1 << 14) -> list[zmtp.Message]:
    found = []
    while data:
        room = framing.room()
        part = data[: min(pieces, len(room))]
        room[: len(part)] = part
        framing.take(len(part))
        data = data[len(part) :]
        while (message := framing.next()) is not None:
            found.append(message)
    return found


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.lists(st.binary(max_size=700), min_size=1, max_size=6), max_size=5),
    st.integers(1, 3000),
)
def test_messages_arrive_whole_in_any_pieces(messages, pieces):
    framing = zmtp.Framing(1 << 20)
    data = GREETING + READY + b"".join(map(zmtp.message, messages))
    found = feed(framing, data, pieces)
    assert [[bytes(each) for each in message.frames] for message in found] == messages
    assert framing.between
    assert framing.arriving == 0


def test_a_message_has_a_number_of_frames_and_of_bytes():
    framing = zmtp.Framing(1000)
    (message,) = feed(framing, GREETING + READY + zmtp.message([b"", b"x" * 1500]))
    assert (message.count, message.size, message.frames) == (2, 1500, [b""])
    (message,) = feed(framing, zmtp.message([b"x"] * 300))
    assert (message.count, len(message.frames)) == (300, zmtp.KEPT_FRAMES)
    with pytest.raises(zmtp.ZmtpError, match="frames"):
        feed(framing, frame(b"", 1) * (zmtp.MAX_FRAMES + 1))
    framing = zmtp.Framing(1000)
    with pytest.raises(zmtp.ZmtpError, match="bytes"):
        feed(framing, GREETING + READY + frame(b"", 0, 1 << 40))


def test_the_head_of_a_frame_reserves_no_memory():
    before = resident()
    made = []
    for _ in range(20):
        framing = zmtp.Framing(64 << 20)
        feed(framing, GREETING + READY + frame(b"x" * 100, 0, 64 << 20))
        assert framing.arriving <= zmtp.INPUT
        made.append(framing)
    assert resident() - before < 64 << 20


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n" + bytes(64),
        b"\xff" + bytes(8) + b"\x7e" + bytes(60),
        GREETING[:10] + b"\x01" + bytes(60),  # ZMTP 2 of ZeroMQ 3
        GREETING[:12] + b"CURVE".ljust(52, b"\0"),
        GREETING + frame(b"hello"),
        GREETING + frame(b"\x05READY\x0bSocket-Type\0\0\0\x03PUB", 4),
        GREETING + frame(b"\x05READY\x0bSocket-Type\xff\xff\xff\xffREQ", 4),
        GREETING + frame(b"\x05READY", 4),
        GREETING + frame(b"\x04PING", 4),
        GREETING + READY + frame(b"x" * 2000, 4),
        GREETING + READY + frame(b"", 0x80),
        GREETING + READY + frame(b"\x05ERROR", 4),
    ],
)
def test_what_is_not_zmtp_3_ends(data):
    with pytest.raises(zmtp.ZmtpError):
        feed(zmtp.Framing(1 << 20), data)


def test_a_ping_is_answered():
    framing = zmtp.Framing(1 << 20)
    feed(framing, GREETING + READY)
    framing.replies.clear()
    feed(framing, frame(b"\x04PING\0\x10hello", 4))
    assert framing.replies == [frame(b"\x04PONGhello", 4)]
    feed(framing, frame(b"\x04PING\0\x10", 4) * 100)
    assert len(framing.replies) <= zmtp.KEPT_FRAMES


def test_arbitrary_bytes():
    """Mutations of a good connection, in random pieces: nothing but ZmtpError, and bounded memory."""
    rng = random.Random(0)
    good = (
        GREETING
        + READY
        + zmtp.message([b"", b"x" * 400])
        + frame(b"\x04PING\0\x10hello", 4)
        + zmtp.message([b"y"] * 5)
    )
    ends = 0
    for _ in range(20_000):
        data = bytearray(good)
        for _ in range(rng.randrange(1, 6)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        framing = zmtp.Framing(1000)
        try:
            feed(framing, bytes(data), rng.randrange(1, 600))
        except zmtp.ZmtpError:
            ends += 1
        assert framing.arriving <= 1000 + zmtp.MAX_COMMAND
    assert 0 < ends < 20_000


# ----------------------------------------------------------------------------- the ledger


def ledger(limit: int = 4, limit_bytes: int = 1000) -> tuple[MemoryLedger, list]:
    closed: list = []

    def close(account: Account, reason: str) -> None:
        made.forget(account)
        closed.append((account, reason))

    made = MemoryLedger("test", limit, limit_bytes, close, 10.0)
    return made, closed


def test_strangers_hold_a_part_of_the_memory():
    books, closed = ledger()
    robot, stranger, other = Account(0), Account(0), Account(0)
    for each in (robot, stranger, other):
        assert books.admit(each, 0)
    books.prove(robot)
    books.arrived(robot, 700, 0)
    books.arrived(stranger, 150, 0)
    assert not closed
    books.arrived(other, 140, 0)
    assert [account for account, _ in closed] == [stranger]
    books.arrived(robot, 400, 0)
    assert [account for account, _ in closed] == [stranger, robot]
    assert (books.held_bytes, books.strangers_held) == (140, 140)


def test_a_full_server_closes_idle_strangers_first():
    books, closed = ledger()
    accounts = [Account(0) for _ in range(4)]
    for each in accounts:
        assert books.admit(each, 0)
    books.prove(accounts[0])
    assert not books.admit(Account(0.5), 0.5)  # nobody was silent for long
    books.arrived(accounts[1], 10, 1.9)
    assert books.admit(Account(2.0), 2.0)
    assert closed[0][0] in accounts[2:]
    assert accounts[0] in books.open
    books.answered(accounts[0], 0)
    late = [Account(100.0) for _ in range(4)]
    assert [books.admit(each, 100.0) for each in late] == [True] * 4
    assert accounts[0] not in books.open


def test_who_takes_too_long_is_closed():
    books, closed = ledger()
    slow, idle = Account(0), Account(0)
    for each in (slow, idle):
        books.admit(each, 0)
    idle.since = None
    books.arrived(slow, 10, 1.0)
    books.sweep(9.0)
    assert not closed
    books.sweep(11.0)
    assert [account for account, _ in closed] == [slow]
    assert books.held_bytes == 0


# ----------------------------------------------------------------------------- over sockets


def test_nothing_is_received_where_nothing_can_be(monkeypatch):
    """A call of the kernel after a whole request, which gives the interpreter away before the loop sleeps."""
    found, plain = [], Peer.receive

    def receive(peer, room):
        between = peer.framing.between
        try:
            return plain(peer, room)
        except BlockingIOError:
            found.append(between)
            raise

    monkeypatch.setattr(Peer, "receive", receive)
    frames = {name: np.zeros((240, 320, 3), np.uint8) for name in GOOD["images"]}
    asked = protocol.encode_infer({**GOOD, "images": frames, "prompt": "wait"}, 7)
    with desk() as at, shake(at.native) as peer, Client(at.native, timeout=WAIT_S) as other:
        peer.sendall(zmtp.message([b"", asked]))
        until(lambda: at.service.health()["running"])
        other.health()  # so the loop is done with the request, and nothing has come since
        at.puppet.release.set()
        assert peer.recv(4096)
    assert True not in found  # in the middle of a frame it is what happens


def test_a_message_without_end_holds_nothing():
    """Row 1: parts without end were kept for ever, before the key."""
    with desk(api_key="secret") as at, shake(at.native) as peer:
        before = resident()
        part = frame(b"x" * (1 << 20), 1)
        with contextlib.suppress(ConnectionError):
            for _ in range(400):
                peer.sendall(part)
        assert closed_by_server(peer)
        assert resident() - before < 200 << 20
        with Client(at.native, timeout=WAIT_S, api_key="secret") as robot:
            assert robot.infer(GOOD).actions.shape == (3, 2)


def test_millions_of_empty_parts_end_a_connection():
    with desk() as at, shake(at.native) as peer:
        with contextlib.suppress(ConnectionError):
            for _ in range(100):
                peer.sendall(frame(b"", 1) * 10_000)
        assert closed_by_server(peer)


def test_unfinished_frames_of_many_peers(monkeypatch):
    """Row 1: twelve peers with an unfinished frame each held 767 MiB without a key."""
    with (
        desk(api_key="secret", listen=Listen(max_message_bytes=8 << 20)) as at,
        contextlib.ExitStack() as stack,
    ):
        peers = [stack.enter_context(shake(at.native)) for _ in range(12)]
        for peer in peers:
            with contextlib.suppress(ConnectionError):
                peer.sendall(frame(b"x" * (7 << 20), 0, 8 << 20))
        books = at.opened["native"].ledger
        until(
            lambda: len(books.open) <= 3 and books.held_bytes <= books.limit_bytes // 4,
            "the greatest to be closed, and what they held to be free",
        )


def test_a_slow_request_is_closed():
    with desk() as at, shake(at.native) as peer, shake(at.native) as idle:
        books = at.opened["native"].ledger
        usual, books.limit_s = (
            books.limit_s,
            0.2,
        )  # none of which is for the handshakes, nor for a whole request
        with connect(at.native) as silent:
            peer.sendall(frame(b"x" * 100, 0, 5000))
            assert closed_by_server(peer)
            assert closed_by_server(silent)
        time.sleep(1.0)  # between requests a client may take its time
        books.limit_s = usual
        idle.sendall(zmtp.message([b"", request(7)]))
        assert idle.recv(4096)


def test_connections_have_a_limit_and_idle_strangers_make_place():
    """Row 13, and 12 on this wire."""
    with desk(listen=Listen(max_connections=8), api_key="k") as at, contextlib.ExitStack() as stack:
        for _ in range(8):
            stack.enter_context(shake(at.native))
        time.sleep(1.2)  # the strangers are idle then
        with Client(at.native, timeout=WAIT_S, api_key="k") as robot:
            assert robot.health()["status"] == "ok"
            for _ in range(30):
                stack.enter_context(connect(at.native))
            assert len(at.opened["native"].ledger.open) <= 8
            assert robot.health()["status"] == "ok"  # never closed for a stranger


def test_a_client_with_an_identity_that_reconnects_gets_its_own_answer():
    """Row 18: replies went to names, so that the next connection got the answer to the one before."""
    with desk() as at:
        for number in range(30):
            first = shake(at.native, identity=b"arm")
            first.sendall(zmtp.message([request(2 * number + 1, "wait")]))
            until(lambda: at.service.health()["running"])
            first.close()
            with shake(at.native, identity=b"arm") as second:
                second.sendall(zmtp.message([request(2 * number + 2, state=number)]))
                answer = second.recv(1 << 16)
                reply = protocol.decode_reply(answer[9:] if answer[0] & 2 else answer[2:], 2 * number + 2)
                assert protocol.decode_chunk(reply).actions[0, 0] == number


def test_a_client_that_reads_nothing_is_not_read_from():
    """Replies that nobody reads were kept without bound."""
    with desk() as at, shake(at.native) as greedy:
        wire = at.opened["native"]
        ask = zmtp.message([schema.PredictRequest(kind=1, request_id=1).SerializeToString()]) * 100
        greedy.settimeout(0.5)
        sent = 0
        try:
            while sent < 512 << 20:
                sent += greedy.send(ask)
        except TimeoutError:
            pass
        (peer,) = wire.ledger.open
        assert peer.unsent <= (1 << 20) + (1 << 16)
        assert sent < 512 << 20
        with Client(at.native, timeout=WAIT_S) as robot:
            assert robot.health()["status"] == "ok"


def test_a_sender_of_refused_requests_is_slowed_down():
    """Rows 8 and 23: parsing for strangers took the wire's only loop."""
    with desk(api_key="secret") as at, shake(at.native) as stranger:
        wire = at.opened["native"]
        for _ in range(50):
            stranger.sendall(zmtp.message([b"", b"\x08\x01" * 200]))
        (peer,) = wire.ledger.open
        until(lambda: peer.next_pause >= 8 * REFUSAL_PAUSE_S)  # after three refusals
        assert peer.paused or peer.next_pause < MAX_PAUSE_S
        with Client(at.native, timeout=WAIT_S, api_key="secret") as robot:
            assert robot.health()["status"] == "ok"


def test_sockets_of_the_library_that_leave_no_trace():
    with desk() as at, zmq.Context() as context:
        for kind in (zmq.REQ, zmq.DEALER):
            for _ in range(20):
                with context.socket(kind) as made:
                    made.linger = 0
                    made.connect(at.native)
                    made.send(request(1))
                    assert made.poll(WAIT_S * 1e3)
        books = at.opened["native"].ledger
        until(lambda: not books.open)
        assert (books.held_bytes, books.strangers_held) == (0, 0)
