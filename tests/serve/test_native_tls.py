"""The native protocol over TLS, and the rule that no API key travels unencrypted to another machine."""

from __future__ import annotations

import asyncio
import re
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from sinew_client import Client, ClientError, ConnectionLost, tls, zmtp
from sinew_client.addresses import ServerAddress
from sinew_client.aio import AsyncClient
from sinew_client.errors import SinewError
from sinew_client.streams import StreamLink
from sinew_client.tls import ALLOW_VARIABLE, check_key_is_private, is_loopback

from sinew.cli.serve_listen import warn_of_exposure
from sinew.serve.transport.greeting import ready_text
from sinew.serve.transport.listen import Listen
from tests.serve.puppet import GOOD, SPEC, WAIT_S, desk, until

LARGE = {**GOOD, "images": {"front": np.zeros((1000, 1000, 3), np.uint8)}}  # many records of TLS
KEY = "a key of the test"


@pytest.fixture
def trusted(certificate: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Certificate and key of a server that the clients of this process trust."""
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate[0]))
    return certificate


@pytest.fixture
def encrypted(trusted: tuple[Path, Path]) -> Iterator[SimpleNamespace]:
    """A server with TLS and a key, open to other machines."""
    listen = Listen("0.0.0.0", tls_cert=trusted[0], tls_key=trusted[1])
    with desk(listen=listen, api_key=KEY) as at:
        at.port = int(at.native.rpartition(":")[2])
        yield at


def asked(kind: type, address: str, key: str = "") -> Any:
    """Return the answer that a new client of this kind gets."""

    async def ask() -> Any:
        async with AsyncClient(address, timeout=WAIT_S, api_key=key) as robot:
            return await robot.infer(GOOD)

    if kind is AsyncClient:
        return asyncio.run(ask())
    with Client(address, timeout=WAIT_S, api_key=key) as robot:
        return robot.infer(GOOD)


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        *((host, True) for host in ("127.0.0.1", "127.0.0.2", "127.255.0.9", "localhost", "LOCALHOST")),
        *((host, True) for host in ("::1", "[::1]", "::ffff:127.0.0.1", "[::ffff:7f00:2]")),
        *(
            (host, False)
            for host in ("10.0.0.2", "0.0.0.0", "128.0.0.1", "robot", "127.0.0.1.example.org", "")
        ),
        *((host, False) for host in ("::", "fe80::1%lo", "::ffff:10.0.0.2", "localhost.example.org")),
        (None, False),
    ],
)
def test_which_hosts_are_this_machine(host: str | None, loopback: bool) -> None:
    assert is_loopback(host) is loopback


PLAIN = ["tcp://10.0.0.2:5555", "robot:5555", "tcp://[fe80::2]:5555/arm", "tcp://127.0.0.1.example.org:5555"]
PRIVATE = [
    "tcp://127.0.0.1:5555",
    "localhost:5555",
    "tcp://[::1]:5555",
    "ipc:///tmp/sinew",
    "tls://10.0.0.2:5555",
]


@pytest.mark.parametrize("address", PLAIN)
def test_no_client_sends_a_key_in_the_clear(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SINEW_API_KEY", KEY)
    kinds = [Client, AsyncClient, lambda each: StreamLink(each, 10.0, api_key=KEY)]
    several = ["tcp://127.0.0.1:5555" + ("/arm" if "/arm" in address else ""), address]
    for make in kinds:
        for given in (address, several):
            with pytest.raises(ClientError, match="expected encryption for the API key") as told:
                make(given)
            for choice in ("--tls-cert", "tls://", "ssh -N -L 5555:127.0.0.1:5555", f"{ALLOW_VARIABLE}=1"):
                assert choice in str(told.value)
            assert KEY not in str(told.value)
    Client(address, api_key="").close()
    monkeypatch.setenv(ALLOW_VARIABLE, "1")
    Client(address).close()


@pytest.mark.parametrize("address", PRIVATE)
def test_a_key_may_travel_within_this_machine_and_encrypted(address: str) -> None:
    Client(address, api_key=KEY).close()


def test_the_key_of_a_web_client_either() -> None:
    with pytest.raises(SinewError, match=r"https://10\.0\.0\.2:8000.*127\.0\.0\.1:8000"):
        check_key_is_private([ServerAddress.parse("http://10.0.0.2:8000", web=True)], KEY, serves_tls=True)
    private = ("https://10.0.0.2:8000", "http://[::1]:8000")
    check_key_is_private([ServerAddress.parse(each, web=True) for each in private], KEY)


@pytest.mark.parametrize("kind", [Client, AsyncClient])
@pytest.mark.parametrize("observation", [GOOD, LARGE], ids=["small", "large"])
def test_answers_over_tls(encrypted: Any, kind: type, observation: dict) -> None:
    address = f"tls://localhost:{encrypted.port}"

    async def ask() -> Any:
        async with AsyncClient(address, timeout=WAIT_S, api_key=KEY) as robot:
            found = []
            for first in range(0, 20, 2):  # so many requests of a client may wait
                pair = [{**observation, "state": np.full(2, each)} for each in (first, first + 1)]
                found += await asyncio.gather(*map(robot.infer, pair))
            return [chunk.actions[0, 0] for chunk in found]

    assert encrypted.native.startswith("tls://")
    if kind is AsyncClient:
        assert asyncio.run(ask()) == list(range(20))
        return
    with Client(address, timeout=WAIT_S, api_key=KEY) as robot:
        for number in range(5):
            assert robot.infer({**observation, "state": np.full(2, number)}).actions[0, 0] == number
        chunks = robot.infer_all([observation] * 4)
        assert [chunk.actions.shape for chunk in chunks] == [(3, 2)] * 4
    assert encrypted.puppet.computed


def test_many_clients_at_once_over_tls(encrypted: Any) -> None:
    """Replies are sent by other threads than the one that receives, on the same connection."""
    failed: list[Exception] = []

    def drive(number: int) -> None:
        try:
            with Client(f"tls://localhost:{encrypted.port}", timeout=WAIT_S, api_key=KEY) as robot:
                for step in range(10):
                    state = np.full(2, 100 * number + step)
                    assert robot.infer({**LARGE, "state": state}).actions[0, 0] == state[0]
        except Exception as error:  # noqa: BLE001 - for the assertion below
            failed.append(error)

    threads = [threading.Thread(target=drive, args=(number,)) for number in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(WAIT_S)
    assert not failed


@pytest.mark.parametrize("key", ["", "another key"])
def test_a_wrong_key_over_tls(encrypted: Any, key: str) -> None:
    robot = Client(f"tls://127.0.0.1:{encrypted.port}", timeout=WAIT_S, api_key=key)
    with robot, pytest.raises(ClientError, match="API key"):
        robot.infer(GOOD)
    assert not encrypted.puppet.computed


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_a_certificate_that_nobody_trusts(
    encrypted: Any, kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SSL_CERT_FILE")
    address = f"tls://localhost:{encrypted.port}"

    with pytest.raises(ConnectionLost, match=r"expected a trusted certificate.*SSL_CERT_FILE"):
        asked(kind, address, KEY)
    assert not encrypted.puppet.computed


def test_a_certificate_of_another_host(encrypted: Any) -> None:
    """127.0.0.2 is this machine, and the certificate is not for it."""
    with pytest.raises(ConnectionLost, match="expected a trusted certificate"):
        asked(Client, f"tls://127.0.0.2:{encrypted.port}", KEY)


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_a_server_without_tls(trusted: Any, kind: type) -> None:
    with desk() as at, pytest.raises(ConnectionLost, match="expected a server with TLS"):
        asked(kind, at.native.replace("tcp://", "tls://"))


def test_a_stream_over_tls(encrypted: Any) -> None:
    """The puppet makes no streams: the refusal is what has to come, through the same connection."""
    link = StreamLink(f"tls://localhost:{encrypted.port}", 10.0, api_key=KEY, timeout=WAIT_S)
    try:
        assert link.wait_connected(WAIT_S)
        assert link.send(np.zeros(2), 0.0, images=LARGE["images"])
        until(lambda: not link.windows() and link.errors > 0)
        assert link.error
    finally:
        link.close()


def test_plain_clients_of_this_machine(encrypted: Any) -> None:
    """They come through an ssh tunnel, or have no TLS: C++, Rust, vla.cpp."""
    for host in ("127.0.0.1", "127.0.0.2"):
        with Client(f"tcp://{host}:{encrypted.port}", timeout=WAIT_S, api_key=KEY) as robot:
            assert robot.infer(GOOD).actions.shape == (3, 2)


def own_address() -> str:
    """Return an address of this machine that is no loopback one. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this machine has no address but loopback")
        return str(probe.getsockname()[0])


def test_plain_clients_of_other_machines_are_rejected_before_their_key(
    encrypted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ALLOW_VARIABLE, "1")
    with pytest.raises(ConnectionLost, match="requires TLS: use tls://"):
        asked(Client, f"tcp://{own_address()}:{encrypted.port}", KEY)
    assert not encrypted.puppet.computed


def test_bytes_that_are_no_handshake_hold_nobody_up(encrypted: Any) -> None:
    place = ("127.0.0.1", encrypted.port)
    sent = (
        b"\x16",
        b"\x16" + bytes(500),
        b"\x16\x03\x01\xff\xff" + bytes(4000),
        b"GET / HTTP/1.1\r\n\r\n",
        b"",
    )
    strangers = [socket.create_connection(place) for _ in sent]
    try:
        for stranger, data in zip(strangers, sent, strict=True):
            stranger.sendall(data)
        with Client(f"tls://localhost:{encrypted.port}", timeout=WAIT_S, api_key=KEY) as robot:
            assert robot.infer(GOOD).actions.shape == (3, 2)
    finally:
        for stranger in strangers:
            stranger.close()


def test_a_handshake_that_never_ends_is_closed(trusted: tuple[Path, Path]) -> None:
    listen = Listen(tls_cert=trusted[0], tls_key=trusted[1], arrival_s=0.2)
    with desk(listen=listen) as at:
        host, _, port = at.native.rpartition("//")[2].rpartition(":")
        with socket.create_connection((host, int(port)), timeout=WAIT_S) as stranger:
            stranger.sendall(b"\x16\x03\x01")
            assert stranger.recv(100) == b""


def test_a_client_that_leaves_in_the_middle_of_a_record(encrypted: Any) -> None:
    made = socket.create_connection(("127.0.0.1", encrypted.port))
    secured = tls.encrypted(tls.ssl.create_default_context(), made, server_hostname="localhost")
    secured.sendall(zmtp.GREETING)
    secured.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    secured.close()
    with Client(f"tls://localhost:{encrypted.port}", timeout=WAIT_S, api_key=KEY) as robot:
        assert robot.infer(GOOD).actions.shape == (3, 2)


def test_what_the_server_prints(encrypted: Any, caplog: pytest.LogCaptureFixture) -> None:
    about = {"dtype": "float32", "device": "cpu", "engine": "eager", "engine_reason": "the reference"}
    text = ready_text(SPEC, about, list(encrypted.opened.values()), keyed=True)
    assert re.search(r"with Client\(\"tls://[^\"]+\"\)", text)
    assert "SSL_CERT_FILE" in text
    warn_of_exposure("0.0.0.0", list(encrypted.opened.values()), key=True, tls=True)
    assert not caplog.text
    with desk(listen=Listen("0.0.0.0")) as at:
        warn_of_exposure("0.0.0.0", list(at.opened.values()), key=True, tls=False)
    assert "keys travel unencrypted on native; use --tls-cert and --tls-key, or a tunnel" in caplog.text
    assert f"because they would send the key unencrypted; to allow it, set {ALLOW_VARIABLE}=1" in caplog.text
