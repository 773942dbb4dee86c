"""The native wire on a Unix socket: every kind of client, whose name it is, what a killed server leaves."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from sinew_client import Client, ServerError
from sinew_client.aio import AsyncClient

from sinew.core import SinewError
from sinew.serve.transport.listen import AddressError, Listen
from sinew.serve.wires import open_wires, parse
from tests.serve.puppet import GOOD, WAIT_S, desk

LARGE = {**GOOD, "images": {"front": np.zeros((480, 640, 3), np.uint8)}}  # more than a socket's buffer holds


def test_every_kind_of_client(tmp_path: Path) -> None:
    path = tmp_path / "sinew.sock"
    address = f"ipc://{path}"
    (wire,) = open_wires(parse([f"native:{address}"]), Listen())
    assert wire.address == address
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with desk() as there:
        wire.start(there.service)
        for said in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" + bytes(8) + b"\x7f\x03"):  # others, which leave
            with socket.socket(socket.AF_UNIX) as peer:
                peer.connect(str(path))
                peer.sendall(said)
        with Client(address, timeout=WAIT_S) as client:
            assert client.infer(LARGE).actions.shape == (3, 2)
            assert [each.actions.shape for each in client.infer_all([LARGE, GOOD])] == [(3, 2)] * 2
        with Client(f"{address}#arm", timeout=WAIT_S) as client, pytest.raises(ServerError, match="'arm'"):
            client.infer(GOOD)

        async def asked() -> None:
            async with AsyncClient(address, timeout=WAIT_S) as other:
                assert (await other.infer(LARGE)).actions.shape == (3, 2)

        asyncio.run(asked())
        wire.stop()
        assert not path.exists()
        with Client(
            [address, there.native], timeout=WAIT_S, connect_timeout=WAIT_S
        ) as both:  # the next one, at once
            assert both.infer(GOOD).actions.shape == (3, 2)


STRANGER = """
import os, socket, sys
if os.geteuid() == 0:
    os.setuid(65534)
with socket.socket(socket.AF_UNIX) as listening:
    listening.bind(sys.argv[1])
    os.chmod(sys.argv[1], 0o666)
    listening.listen()
    print("listening", flush=True)
    peer, _ = listening.accept()
    heard = b""
    while part := peer.recv(4096):
        heard += part
    print(heard.hex(), flush=True)
"""


def asked(address: str) -> None:
    with Client(address, timeout=WAIT_S, api_key="a-key") as client:
        client.infer(GOOD)


def asked_async(address: str) -> None:
    async def ask() -> None:
        async with AsyncClient(address, timeout=WAIT_S, api_key="a-key") as client:
            await client.infer(GOOD)

    asyncio.run(ask())


def test_a_socket_of_another_user_gets_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever binds a path in /tmp before the server does got the key of every client."""
    if os.geteuid() != 0:  # who cannot make a process of another user is another user
        user = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder).chmod(0o777)
        for ask in (asked, asked_async):
            path = f"{folder}/{ask.__name__}.sock"
            with subprocess.Popen(
                [sys.executable, "-c", STRANGER, path], stdout=subprocess.PIPE, text=True
            ) as stranger:
                assert stranger.stdout is not None
                assert stranger.stdout.readline() == "listening\n"

                with pytest.raises(
                    SinewError, match=r"expected a server of user \d+ or of root, got a server of user"
                ):
                    ask(f"ipc://{path}")
                assert stranger.stdout.readline() == "\n"  # not a byte


def test_whose_the_name_is(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))  # as a server that was killed leaves it
    (wire,) = open_wires({"native": str(path)}, Listen())
    with pytest.raises(AddressError, match=f"cannot listen on ipc://{path}: Address already in use"):
        open_wires({"native": str(path)}, Listen())
    raw: Any = wire
    close = raw._socket.close
    opened: list[Any] = []

    def late() -> None:  # the next server begins in the moment in which this one closes
        close()
        opened.extend(open_wires({"native": str(path)}, Listen()))

    raw._socket = SimpleNamespace(close=late)
    wire.stop()
    assert stat.S_ISSOCK(path.stat().st_mode)
    opened[0].stop()
    path.write_text("a file of somebody's")
    with pytest.raises(AddressError, match="a file that is not a socket has this name"):
        open_wires({"native": str(path)}, Listen())
    with pytest.raises(AddressError, match=r"cannot listen on ipc://.*too long"):
        open_wires({"native": "/tmp/" + "x" * 200}, Listen())
    for name in ("native:ipc://s", "native:ipc://@s", "native:ipc:///s#x", "http:ipc:///s"):
        with pytest.raises(
            SinewError, match=f"--wire {name}: expected (ipc:///PATH without|a port, because only)"
        ):
            parse([name])
