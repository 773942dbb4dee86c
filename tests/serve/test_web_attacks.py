"""The web server under attack: bombs and unfinished requests. A robot on the same server is answered throughout."""

from __future__ import annotations

import base64
import contextlib
import gzip
import io
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sinew.core import Observation
from sinew.policy import load
from sinew.serve.decode import array as arrays
from sinew.serve.wires import http
from tests import processes
from tests.serve.test_server import START_S, ServerProcess
from tests.serve.test_web_wires import ask, connected, get, png, post

ConnectionClosed = pytest.importorskip("websockets.exceptions", reason="the client side").ConnectionClosed

BUNDLE = Path(__file__).resolve().parents[2] / "sinew" / "assets" / "pen.gguf"
LIMIT = 64 << 20  # bytes of a message
LARGE = 60 << 20
ARRIVAL_S = 5  # of a request, the largest here on a busy machine


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[ServerProcess]:
    port = processes.free_port()
    wires = ("--wire", f"openpi:{port}", "--wire", f"http:{port}", "--arrival-s", ARRIVAL_S)
    running = ServerProcess(tmp_path_factory.mktemp("attacks"), BUNDLE, *wires, "--threads", 1)
    running.http = running.address.replace("ws", "http")
    try:
        yield running
        assert running.stop() == 0
        assert "Traceback" not in running.log.read_text()
    finally:
        running.close()


def resident_mib(running: ServerProcess) -> float:
    for line in Path(f"/proc/{running.process.pid}/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) / 1024
    raise AssertionError("no VmHWM")


@pytest.fixture(scope="module")
def observed() -> tuple[dict, np.ndarray]:
    """An observation, and the policy's own answer to it."""
    policy = load(BUNDLE)
    rng = np.random.default_rng(0)
    images = {each.name: rng.integers(0, 256, (96, 96, 3), dtype=np.uint8) for each in policy.spec.cameras}
    message = {
        "images": images,
        "state": rng.uniform(-1, 1, policy.spec.state.dim),
        "prompt": "swing it up",
        "seed": 1,
    }
    return message, policy.infer(Observation(**message)).actions


@contextlib.contextmanager
def robot(server, observed) -> Iterator[None]:
    """Asks again and again while the block runs; every answer must be right."""
    message, want = observed
    answers = 0
    failures: list[BaseException] = []
    ended = threading.Event()

    def run() -> None:
        nonlocal answers
        try:
            with connected(server.address) as connection:
                while not (ended.is_set() and answers):  # at least once, however short the block
                    np.testing.assert_array_equal(ask(connection, message)["actions"], want)
                    answers += 1
                    ended.wait(0.02)
        except BaseException as error:  # noqa: BLE001 - told below
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
    assert not failures
    assert answers


def many(item: bytes) -> bytes:
    """A msgpack map that holds ``item`` as often as fits into a large message."""
    inner = b"\xdc\xff\xff" + item * 65535
    count = LARGE // len(inner)
    return b"\x81\xa1a\xdc" + count.to_bytes(2, "big") + inner * count


@pytest.mark.parametrize(
    "item", [b"\x80", b"\x90", b"\xc0", b"\x81\xa1a\x80"], ids=["map", "list", "nil", "deep"]
)
def test_openpi_allocation_bombs(server, observed, item):
    """One byte of a message can ask for a hundred of objects; values are counted before they are made."""
    payload = many(item)
    with robot(server, observed), connected(server.address) as attacker:
        attacker.send(payload)
        assert "expected at most 16384 values" in attacker.recv(START_S)


@pytest.mark.parametrize("item", [b"{},", b"[1],", b"1.5,"], ids=["objects", "lists", "numbers"])
@pytest.mark.parametrize("route", ["/v1/actions", "/act"])
def test_http_allocation_bombs(server, observed, route, item):
    body = b'{"a":[' + item * (LARGE // len(item)) + b"1]}"
    with robot(server, observed):
        status, answer = post(server.http + route, body)
    assert status == 400
    assert "at most 16384 values" in json.loads(answer)["error"]["message"]


def test_decompression_bombs(server, observed):
    """Compressed bodies are not taken; pictures are measured before they are decoded."""
    bomb = gzip.compress(b" " * (256 << 20), 1)
    file = io.BytesIO()
    Image.new("1", (8192, 8192)).save(file, "PNG")
    pictures = dict.fromkeys(("now", "previous"), base64.b64encode(file.getvalue()).decode())
    with robot(server, observed):
        status, answer = post(server.http + "/v1/actions", bomb, http.JSON, **{"Content-Encoding": "gzip"})
        assert (status, json.loads(answer)["error"]["code"]) == (400, "bad_request")
        status, answer = post(server.http + "/v1/actions", {"images": pictures, "state": [0.0] * 8})
        assert "pixels in all frames together" in json.loads(answer)["error"]["message"]
        # Who is still sending when the server closes may get a reset instead of what the server said.
        ended = "1009|no close frame received"
        with pytest.raises(ConnectionClosed, match=ended), connected(server.address) as attacker:
            ask_with(attacker, b"\0" * (LIMIT + 1))


def ask_with(connection, payload: bytes) -> object:
    connection.send(payload)
    return connection.recv(START_S)


def half_a_frame(address: str, size: int) -> socket.socket:
    """A WebSocket on which a frame of LARGE bytes was announced and ``size`` of them sent."""
    host, port = address.removeprefix("ws://").split(":")
    made = socket.create_connection((host, int(port)), timeout=START_S)
    made.sendall(
        b"GET / HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
    )
    assert b" 101 " in made.recv(4096)
    with contextlib.suppress(OSError):
        made.sendall(b"\x82\xff" + LARGE.to_bytes(8, "big") + b"\0\0\0\0" + b"\0" * size)
    return made


def ends_within(peer: socket.socket, seconds: float) -> bool:
    """Whether the server closes the connection in time."""
    peer.settimeout(seconds)
    try:
        while peer.recv(1 << 16):
            pass
    except TimeoutError:
        return False
    except ConnectionError:
        pass
    return True


def test_unfinished_frames_hold_neither_memory_nor_connections(server, observed):
    """Twenty halves of 40 MiB: the server keeps at most its budget of 512 MiB and the robot, and ends the rest."""
    before = resident_mib(server)
    with robot(server, observed), contextlib.ExitStack() as stack:
        halves = [stack.enter_context(half_a_frame(server.address, 40 << 20)) for _ in range(20)]
        assert all(ends_within(each, START_S) for each in halves)
    assert resident_mib(server) - before < 700


def test_a_frame_that_trickles_is_ended(server, observed):
    """A byte now and then, with pings in between, keeps aiohttp's own timers quiet; not the server's."""
    with robot(server, observed), half_a_frame(server.address, 100) as peer, contextlib.suppress(OSError):
        while True:  # until the server ends it
            peer.sendall(b"\0")
            time.sleep(0.2)


def test_the_second_request_of_a_connection_may_not_trickle_either(server):
    host, port = server.http.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=START_S) as peer:
        peer.sendall(b"GET /v1/metadata HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b"200 OK" in peer.recv(4096)
        with contextlib.suppress(OSError):
            while True:  # until the server ends it
                peer.sendall(b"G")
                time.sleep(0.2)


def test_what_is_not_http_leaves_one_line_at_most(server, observed):
    """aiohttp would write a traceback for each: an attack must not fill the log."""
    host, port = server.http.removeprefix("http://").split(":")
    before = len(server.log.read_text().splitlines())
    with robot(server, observed):
        for data in (b"\x16\x03\x01" * 100, b"G" * 10_000, b"GET / HTTP/9\r\nA\r\n\r\n", b"\r\n" * 500) * 5:
            with socket.create_connection((host, int(port)), timeout=START_S) as peer:
                peer.sendall(data)
                peer.shutdown(socket.SHUT_WR)
                assert ends_within(peer, START_S)
    assert len(server.log.read_text().splitlines()) - before <= 20


def test_pings_do_not_end_an_idle_connection(server, observed):
    """A robot that waits longer than a request may take is no attacker, whatever pings it sends."""
    message, want = observed
    with connected(server.address, ping_interval=0.5) as connection:
        ask(connection, message)
        time.sleep(ARRIVAL_S + 1.5)
        np.testing.assert_array_equal(ask(connection, message)["actions"], want)


def test_a_flood_on_one_connection_ends_that_connection(server, observed):
    message, _ = observed
    payload = arrays.pack({**message, "solver_steps": 100})
    with robot(server, observed), connected(server.address) as attacker:
        said = None
        with contextlib.suppress(ConnectionClosed):  # it may be over before all is sent
            for _ in range(20):
                attacker.send(payload)
        with contextlib.suppress(ConnectionClosed):
            while not isinstance(said, str):
                said = attacker.recv(START_S)
        assert isinstance(said, str)
        assert "may wait" in said


def test_what_was_held_is_given_back(server, observed):
    """After all of the above the server answers as before, on both wires."""
    message, want = observed
    assert get(server.http + "/healthz") == (200, b"OK\n")
    images = {name: png(frame) for name, frame in message["images"].items()}
    state = message["state"].tolist()
    for _ in range(5):
        status, body = post(server.http + "/v1/actions", {**message, "images": images, "state": state})
        assert status == 200
        np.testing.assert_array_equal(np.array(json.loads(body)["actions"], np.float32), want)
