"""Wires x what each promises a robot: one table over real sockets. A cell that is empty says why."""

from __future__ import annotations

import contextlib
import socket
import ssl
import sys
import threading
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("websockets.sync.client", reason="the clients of two wires need websockets")
pytest.importorskip("grpc", reason="the lerobot wire needs grpcio")

from benchmarks.wire_clients import CLIENTS, WireClient
from sinew.cli.serve_listen import warn_of_exposure
from sinew.serve.transport.listen import Listen
from sinew.serve.wires import WIRES
from tests import processes
from tests.serve.puppet import FRAME, WAIT_S, desk, until

needs_zenoh = pytest.mark.skipif(find_spec("zenoh") is None, reason="lerobot-remote needs eclipse-zenoh")
each_wire = pytest.mark.parametrize(
    "wire",
    [pytest.param(name, marks=needs_zenoh if name == "lerobot-remote" else ()) for name in sorted(WIRES)],
)


def open_client(wire: str, address: str, key: str = "") -> WireClient:
    more: dict[str, Any] = {
        "lerobot": {"policy": "puppet", "kind": "puppet"},
        "lerobot-remote": {"policy": "puppet"},
        "evo1": {"width": 2},
    }.get(wire, {})
    return CLIENTS[wire](address.replace("ws://", "http://") if wire == "http" else address, key, **more)


@contextlib.contextmanager
def client(wire: str, address: str, key: str = "") -> Iterator[WireClient]:
    opened = open_client(wire, address, key)
    try:
        yield opened
    finally:
        opened.close()


def ask(opened: WireClient, first: float = 0.5, prompt: str = "go", width: int = 2) -> np.ndarray:
    state = np.zeros(width, np.float32)
    state[0] = first
    return opened.ask({"front": FRAME}, state, prompt, 0).actions[:, :2]


def test_each_wire_has_a_client() -> None:
    assert set(CLIENTS) == set(WIRES)


@each_wire
def test_robots_get_their_own_answers(wire: str) -> None:
    answers: dict[int, list[np.ndarray]] = {}

    def drive(number: int) -> None:
        with client(wire, getattr(at, wire)) as robot:
            answers[number] = [ask(robot, number / 8 + step / 256) for step in range(4)]

    with desk((wire,)) as at:
        robots = [threading.Thread(target=drive, args=(number,)) for number in range(4)]
        for robot in robots:
            robot.start()
        for robot in robots:
            robot.join(WAIT_S)
    count = {"vla-eval": 1}.get(wire, 3)  # rows that are executed before the server is asked again
    for number in range(4):
        for step, rows in enumerate(answers[number]):
            np.testing.assert_array_equal(rows, np.full((count, 2), number / 8 + step / 256, np.float32))


def failure(act: Callable[[], Any]) -> str:
    """Return what a client is told."""
    with pytest.raises(Exception) as caught:  # noqa: PT011 - each client has errors of its own
        act()
    error = caught.value
    return f"{error} {getattr(error, 'details', str)()}"


def in_background(act: Callable[[], Any]) -> tuple[threading.Thread, list[str]]:
    """Start what will fail, and return its thread and where the words will be."""
    told: list[str] = []
    thread = threading.Thread(target=lambda: told.append(failure(act)))
    thread.start()
    return thread, told


@each_wire
def test_a_field_that_does_not_fit_is_named_and_the_next_request_is_answered(wire: str) -> None:
    with desk((wire,)) as at:
        with client(wire, getattr(at, wire)) as robot:
            told = failure(lambda: ask(robot, width=3))
        assert "state: expected " in told, told
        assert "Traceback" not in told
        with client(wire, getattr(at, wire)) as robot:
            assert (ask(robot) == 0.5).all()


@each_wire
def test_an_instruction_of_no_words_reaches_the_policy(wire: str) -> None:
    """Whether it is taken is the policy's to say: no wire refuses it, or puts words in its place."""
    with desk((wire,)) as at, client(wire, getattr(at, wire)) as robot:
        assert (ask(robot, prompt="") == 0.5).all()
        assert set(at.puppet.computed) == {""}


@each_wire
def test_a_full_server_says_so(wire: str) -> None:
    with desk((wire,), queue=1) as at, contextlib.ExitStack() as opened:
        robots = [opened.enter_context(client(wire, getattr(at, wire))) for _ in range(3)]
        asking = []
        for number, robot in enumerate(robots[:2]):
            asking.append(threading.Thread(target=ask, args=(robot, 0.5, "wait")))
            asking[-1].start()
            what = "running" if number == 0 else "waiting"
            until(lambda: at.scheduler.stats()[what])  # noqa: B023
        told = failure(lambda: ask(robots[2]))
        assert "busy" in told, told
        at.puppet.release.set()
        for thread in asking:
            thread.join(WAIT_S)


@each_wire
def test_a_missed_deadline_is_told(wire: str) -> None:
    """Of a request that waits; what is being computed is answered, and counted as late."""
    answers: list[np.ndarray] = []

    def insist() -> None:
        """Ask again if a busy machine begins with the inference only after the deadline."""
        for _ in range(20):
            with client(wire, getattr(at, wire)) as robot, contextlib.suppress(Exception):
                answers.append(ask(robot, 0.5, "wait"))
                return

    with desk((wire,), deadline_ms=1000.0) as at, client(wire, getattr(at, wire)) as other:
        running = threading.Thread(target=insist)
        running.start()
        until(lambda: at.scheduler.stats()["running"])
        waiting, told = in_background(lambda: ask(other))
        until(lambda: at.scheduler.stats()["waiting"] or told)
        until(lambda: at.service.tend() or told)  # as the server's process does now and then
        waiting.join(WAIT_S)
        assert "deadline" in told[0], told
        at.puppet.release.set()
        running.join(WAIT_S)
        assert len(answers) == 1
        assert at.puppet.computed == ["wait"]


@each_wire
def test_a_robot_that_is_gone_is_computed_for_no_longer(wire: str) -> None:
    with desk((wire,)) as at:
        robot = processes.Process([sys.executable, "-c", GO_AND_WAIT, wire, getattr(at, wire)])
        until(lambda: at.scheduler.stats()["running"], "its request")
        robot.kill()
        robot.wait()
        until(lambda: not at.scheduler.stats()["running"], "the end of its inference")
        assert at.puppet.computed == []
        with client(wire, getattr(at, wire)) as other:
            assert (ask(other) == 0.5).all()


GO_AND_WAIT = """
import sys
from tests.contract.test_wires import ask, open_client
ask(open_client(*sys.argv[1:]), prompt="wait")
"""


@each_wire
def test_who_waits_is_told_that_the_server_stops(wire: str) -> None:
    with desk((wire,), queue=4) as at, contextlib.ExitStack() as opened:
        robots = [opened.enter_context(client(wire, getattr(at, wire))) for _ in range(2)]
        first, running = in_background(lambda: ask(robots[0], prompt="wait"))
        until(lambda: at.scheduler.stats()["running"])
        second, waiting = in_background(lambda: ask(robots[1]))
        until(lambda: at.scheduler.stats()["waiting"])
        at.service.stopping()
        at.scheduler.stop()
        for thread in (first, second):
            thread.join(WAIT_S)
        assert all("shutting down" in told for told in (*running, *waiting)), (running, waiting)
        assert len(running) == len(waiting) == 1


@each_wire
def test_the_key(wire: str) -> None:
    def answered(key: str) -> np.ndarray:
        with client(wire, getattr(at, wire), key) as robot:
            return ask(robot)

    with desk((wire,), api_key="a key") as at:
        for key in ("", "another"):
            told = failure(lambda: answered(key))  # noqa: B023
            assert "key" in told or "401" in told, told
        assert (answered("a key") == 0.5).all()
        assert at.puppet.computed == ["go"]


@each_wire
def test_bytes_of_another_protocol_hold_nobody_up(wire: str) -> None:
    rng = np.random.default_rng(0)
    sent = (b"GET / HTTP/1.1\r\n\r\n", b"\xff" + bytes(80), rng.bytes(3000), b"{}\n" * 100, b"")
    with desk((wire,)) as at, contextlib.ExitStack() as opened:
        host, _, port = getattr(at, wire).rpartition("//")[2].partition("/")[0].rpartition(":")
        for data in sent:
            stranger = opened.enter_context(socket.create_connection((host, int(port)), timeout=WAIT_S))
            stranger.sendall(data)
        with client(wire, getattr(at, wire)) as robot:
            assert (ask(robot) == 0.5).all()


@each_wire
def test_encryption(wire: str, certificate: tuple[Path, Path], caplog: pytest.LogCaptureFixture) -> None:
    """A wire either speaks TLS, so that a client who does not gets no answer, or the server says that it does not."""
    listen = Listen(tls_cert=certificate[0], tls_key=certificate[1])
    with desk((wire,), listen=listen) as at:
        warn_of_exposure("0.0.0.0", list(at.opened.values()), key=True, tls=True)
        if wire == "groot":  # whose clients use ZeroMQ without encryption
            assert f"unencrypted on {wire}" in caplog.text
            return
        assert "unencrypted" not in caplog.text
        address = getattr(at, wire)
        assert address.partition("://")[0][-1] == "s", address
        host, _, port = address.rpartition("//")[2].partition("/")[0].rpartition(":")
        trusted = ssl.create_default_context(cafile=str(certificate[0]))
        with socket.create_connection((host, int(port)), timeout=WAIT_S) as plain:
            trusted.wrap_socket(plain, server_hostname="localhost").close()
        with socket.create_connection((host, int(port)), timeout=WAIT_S) as plain:
            plain.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            answer = b""
            with contextlib.suppress(ConnectionResetError):
                answer = plain.recv(1000)
            assert b"HTTP" not in answer
        assert at.puppet.computed == []
