"""The native wire on a Unix socket: every kind of client, whose name it is, what a killed server leaves."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from sinew_client import Client, ConnectionLost, RequestTimeout, ServerError
from sinew_client.aio import AsyncClient
from sinew_client.link import place_of
from sinew_client.protocol import split_address

from sinew.core import SinewError
from sinew.serve.transport.listen import AddressError, Listen
from sinew.serve.wires import open_wires, parse
from tests.serve.puppet import GOOD, WAIT_S, desk

LARGE = {**GOOD, "images": {"front": np.zeros((480, 640, 3), np.uint8)}}  # more than a socket's buffer holds


def test_every_kind_of_client(tmp_path: Path) -> None:
    path = tmp_path / "sinew.sock"
    (wire,) = open_wires(parse([f"native:ipc://{path}"]), Listen())
    assert wire.address == f"ipc://{path}"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with desk() as there:
        wire.start(there.service)
        with Client(wire.address, timeout=WAIT_S) as client:
            assert client.spec.name == "puppet"
            assert client.infer(LARGE).actions.shape == (3, 2)
            assert [each.actions.shape for each in client.infer_all([LARGE, GOOD])] == [(3, 2)] * 2

            async def asked() -> None:
                async with AsyncClient(wire.address, timeout=WAIT_S) as other:
                    assert (await other.infer(LARGE)).actions.shape == (3, 2)

            asyncio.run(asked())
            wire.stop()
            assert not path.exists()
            with pytest.raises((ConnectionLost, RequestTimeout)):
                client.infer(GOOD, timeout=0.3)
        with Client([f"ipc://{path}", there.native], timeout=WAIT_S) as both:  # the next one, at once
            assert both.infer(GOOD).actions.shape == (3, 2)


def test_a_policy_by_name(tmp_path: Path) -> None:
    assert split_address(f"ipc://{tmp_path}/s#arm") == (f"ipc://{tmp_path}/s", "arm")
    assert place_of("ipc:///tmp/s") == ("/tmp/s",)
    (wire,) = open_wires(parse([f"native:ipc://{tmp_path}/s"]), Listen())
    with desk() as there:
        wire.start(there.service)
        with (
            Client(f"{wire.address}#arm", timeout=WAIT_S) as client,
            pytest.raises(ServerError, match="'arm'"),
        ):
            client.infer(GOOD)
        wire.stop()


def test_whose_the_name_is(tmp_path: Path) -> None:
    path = tmp_path / "s"
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(path))
    left.close()  # as a server that was killed leaves it
    (wire,) = open_wires({"native": str(path)}, Listen())
    with pytest.raises(AddressError, match=f"cannot listen on ipc://{path}: Address already in use"):
        open_wires({"native": str(path)}, Listen())
    wire.stop()
    path.write_text("a file of somebody's")
    with pytest.raises(AddressError, match="expected a free name or a socket, got another kind of file"):
        open_wires({"native": str(path)}, Listen())
    assert path.read_text() == "a file of somebody's"
    with pytest.raises(AddressError, match="cannot listen on ipc://.*too long"):
        open_wires({"native": "/tmp/" + "x" * 200}, Listen())


@pytest.mark.parametrize("name", ["native:ipc://s", "native:ipc://@s", "native:ipc:///s#x", "http:ipc:///s"])
def test_names_that_are_none(name: str) -> None:
    with pytest.raises(SinewError, match=f"--wire {name}: expected (ipc:///PATH without a #|a port; a Unix)"):
        parse([name])


def test_what_a_stranger_sends(tmp_path: Path) -> None:
    """Bytes that are no ZeroMQ, half a message, and a peer that dies with it: the others are served."""
    path = tmp_path / "s"
    (wire,) = open_wires({"native": str(path)}, Listen())
    with desk() as there:
        wire.start(there.service)
        for said in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" + bytes(8) + b"\x7f\x03", b""):
            with socket.socket(socket.AF_UNIX) as peer:
                peer.connect(str(path))
                peer.sendall(said)
        with Client(wire.address, timeout=WAIT_S) as client:
            assert client.infer(LARGE).actions.shape == (3, 2)
        wire.stop()


@pytest.mark.slow
def test_the_lines_that_are_typed(tmp_path: Path) -> None:
    path = tmp_path / "sinew.sock"
    serve = [sys.executable, "-m", "sinew", "serve", "sinew/assets/pen.gguf", "--no-prepare"]
    server = subprocess.Popen([*serve, "--wire", f"native:ipc://{path}"], stdout=subprocess.PIPE, text=True)
    stop = threading.Timer(10 * WAIT_S, server.kill)
    stop.start()
    assert server.stdout is not None
    assert server.stdout.readline() == f"ready on ipc://{path}\n"
    client = [sys.executable, "-m", "sinew", "client", f"ipc://{path}", "--requests", "3"]
    asked = subprocess.run(client, capture_output=True, text=True, timeout=10 * WAIT_S)
    assert asked.returncode == 0, asked.stderr
    assert f"at ipc://{path}" in asked.stdout
    os.kill(server.pid, signal.SIGTERM)
    server.communicate()
    stop.cancel()
    assert server.returncode == 0
    assert not path.exists()
    again = subprocess.run([*client, "--timeout", "0.5"], capture_output=True, text=True, timeout=10 * WAIT_S)
    assert again.returncode == 1
    assert f"no answer from ipc://{path} within 0.5 s" in again.stderr
