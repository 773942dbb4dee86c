"""Who may use a port: every listener of the product refuses the same requests, over a real socket.

A listener that is added has a row in ``LISTENERS``, or :func:`test_each_place_that_binds_a_socket_checks_access` fails.
"""

from __future__ import annotations

import ast
import contextlib
import http.client
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from sinew_client import Client, ServerError
from sinew_client.auth import api_key_of, keys_in
from sinew_client.errors import SinewError
from sinew_eval.episodes.settings import Task, Variant
from sinew_eval.farm import files, hosts

from sinew.serve.access import is_loopback, key_of
from sinew.serve.dashboard.feed import Feed
from sinew.serve.dashboard.routes import Dashboard
from sinew.serve.transport.listen import Listen
from sinew.serve.transport.web import WebServer
from sinew.serve.wires.actions import ROUTES, Actions
from sinew.serve.wires.openpi import DIALECT as OPENPI
from tests.serve.puppet import GOOD, WAIT_S, connect, desk

ROOT = Path(__file__).resolve().parents[2]
KEY = "right-key-1234"
EVIL = "http://evil.example"
UPGRADE = {
    "Upgrade": "websocket", "Connection": "Upgrade", "Sec-WebSocket-Version": "13",
    "Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA==",
}  # fmt: skip


# ----------------------------------------------------------------------------- the listeners


@contextlib.contextmanager
def web(keyed: bool) -> Iterator[str]:
    """The wires openpi and http with the dashboard, on one port."""

    def page(service: Any, guarded: Any) -> Dashboard:
        return Dashboard(service, guarded, Actions(service).actions, Feed())

    with desk((), api_key=KEY if keyed else "") as at:
        wire = WebServer([OPENPI, ROUTES], Listen(dashboard=True), page)
        wire.start(at.service)
        try:
            yield wire.address.replace("ws", "http", 1)
        finally:
            wire.stop()


def served(wire: str) -> Callable[[bool], contextlib.AbstractContextManager[str]]:
    @contextlib.contextmanager
    def listener(keyed: bool) -> Iterator[str]:
        with desk((wire,), api_key=KEY if keyed else "") as at:
            yield str(getattr(at, wire)).replace("ws", "http", 1)

    return listener


@contextlib.contextmanager
def farm(keyed: bool) -> Iterator[str]:
    """A run with ``--listen``, which has a key of its own where none is set."""

    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setenv("SINEW_API_KEY", KEY if keyed else "")
        folder = Path(name)
        plan = files.FarmPlan.of(
            Task("sinew/Pen-v0"), [Variant("expert", handover="aligned")], [(0, seed) for seed in range(2)]
        )
        files.EpisodeQueue(folder, "").make()
        plan.write(folder)
        server = hosts.QueueServer(folder, plan, "127.0.0.1:0")
        try:
            yield server.address
        finally:
            server.close()


# Listener, and its requests: method and path. All of them need the key but ``OPEN``.
LISTENERS: dict[str, tuple[Callable[[bool], contextlib.AbstractContextManager[str]], list[tuple[str, str]]]] = {
    "web": (web, [
        ("GET", "/metrics"), ("GET", "/v1/metadata"), ("POST", "/v1/actions"), ("POST", "/act"), ("POST", "/vqa"),
        ("GET", "/v1/policies"), ("PUT", "/v1/policies/default"), ("DELETE", "/v1/policies/default"),
        ("GET", "/v1/events"), ("GET", "/v1/frames"), ("GET", "/v1/frames/front"), ("GET", "/v1/history"),
        ("GET", "/openapi.json"), ("POST", "/v1/try"), ("WS", "/"), ("WS", "/v1/policies/default"),
    ]),
    "vla-eval": (served("vla-eval"), [("GET", "/config"), ("GET", "/metrics"), ("WS", "/")]),
    "evo1": (served("evo1"), [("GET", "/metrics"), ("WS", "/")]),
    "farm": (farm, [
        ("GET", "/plan"), ("GET", "/bundle/0"), ("POST", "/claim"), ("POST", "/beat"), ("POST", "/store/x?worker=w"),
    ]),
}  # fmt: skip
DRAWS_A_KEY = ("farm",)
OPEN = {
    "web": [("GET", "/healthz"), ("GET", "/"), ("GET", "/dashboard/page.js")],
    "vla-eval": [("GET", "/health")],
}


def status(address: str, method: str, path: str, headers: dict[str, str], body: bytes = b"") -> int:
    """Return the status of a request with these headers alone. method: WS asks for a WebSocket."""
    place = urlsplit(address)
    asking = http.client.HTTPConnection(str(place.hostname), place.port, timeout=WAIT_S)
    sent = {"Host": place.netloc, **(UPGRADE if method == "WS" else {}), **headers}
    try:
        verb = "GET" if method == "WS" else method
        asking.putrequest(verb, path, skip_host=True, skip_accept_encoding=True)
        for name, value in {**sent, "Content-Length": str(len(body))}.items():
            asking.putheader(name, value)
        asking.endheaders(body)
        return asking.getresponse().status
    finally:
        asking.close()


FOREIGN = {
    "foreign Host": {"Host": "evil.example"},
    "foreign Host and Origin": {"Host": "evil.example", "Origin": EVIL},
    "foreign Origin": {"Origin": EVIL},
    "Origin null": {"Origin": "null"},
}
KEYLESS = {
    "no key": {},
    "wrong key": {"Authorization": "Bearer wrong"},
    "empty key": {"Authorization": "Bearer ", "X-API-Key": ""},
    "key in a cookie": {"Cookie": f"key={KEY}; SINEW_API_KEY={KEY}; X-API-Key={KEY}"},
    "key as another scheme": {"Authorization": f"Digest {KEY}"},
    "key with more": {"X-API-Key": f"{KEY} "[:-1] + "x"},
}


@pytest.mark.parametrize("name", LISTENERS)
@pytest.mark.parametrize("keyed", [True, False], ids=["keyed", "open"])
def test_every_listener_refuses_foreign_pages(name: str, keyed: bool) -> None:
    """With the key, too: a page may have found it. What needs no key is no page's business on loopback either."""
    listener, requests = LISTENERS[name]
    with listener(keyed) as address:
        for method, path in [*requests, *OPEN.get(name, [])]:
            for what, headers in FOREIGN.items():
                got = status(address, method, path, {**headers, "X-API-Key": KEY})
                assert got == 403, (name, method, path, what, got)


@pytest.mark.parametrize("name", LISTENERS)
def test_every_listener_refuses_requests_without_its_key(name: str) -> None:
    listener, requests = LISTENERS[name]
    with listener(True) as address:
        for method, path in requests:
            for what, headers in KEYLESS.items():
                assert status(address, method, path, headers) == 401, (name, method, path, what)
            asked = f"{path}{'&' if '?' in path else '?'}key={KEY}&api_key={KEY}&X-API-Key={KEY}"
            assert status(address, method, asked, {}, body=KEY.encode()) in (401, 405), (name, method, path)
        method, path = requests[0]
        for headers in ({"X-API-Key": KEY}, {"Authorization": f"Bearer {KEY}"}):
            assert status(address, method, path, headers) == 200, (name, headers)
    if name in DRAWS_A_KEY:
        with listener(False) as address:
            for method, path in requests:
                assert status(address, method, path, {}) == 401, (name, method, path)


@pytest.mark.parametrize("wire", ["native", "groot"])
def test_wires_of_zeromq_refuse_requests_without_their_key_and_browsers(wire: str) -> None:
    """A browser's request is no ZeroMQ: nothing of it is answered."""
    with desk((wire,), api_key=KEY) as at:
        address = getattr(at, wire)
        if wire == "native":
            for key in ("", "wrong", f"{KEY}x"):
                with (
                    Client(address, timeout=WAIT_S, api_key=key) as client,
                    pytest.raises(ServerError) as caught,
                ):
                    client.infer(GOOD)
                assert caught.value.code == "unauthorized"
            with Client(address, timeout=WAIT_S, api_key=KEY) as client:
                client.infer(GOOD)
        with connect(address) as page:
            page.sendall(f"POST / HTTP/1.1\r\nHost: evil.example\r\nOrigin: {EVIL}\r\n\r\n".encode())
            heard = b""
            with contextlib.suppress(OSError):
                while part := page.recv(4096):
                    heard += part
            assert b"HTTP" not in heard
        assert not at.puppet.computed or wire == "native"


def test_the_key_of_a_run_is_drawn_once_and_for_its_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page in the browser read the plan of a run on loopback, and stored an episode that the run counted."""
    monkeypatch.delenv("SINEW_API_KEY", raising=False)
    plan = files.FarmPlan.of(Task("sinew/Pen-v0"), [Variant("expert", handover="aligned")], [(0, 0)])
    files.EpisodeQueue(tmp_path, "").make()
    plan.write(tmp_path)
    first = hosts.QueueServer(tmp_path, plan, "127.0.0.1:0")
    monkeypatch.setattr(hosts, "TOLD_S", 0.0)
    first.close()
    second = hosts.QueueServer(tmp_path, plan, "127.0.0.1:0")  # the same command after a kill
    try:
        assert second.drawn == first.drawn
        assert len(first.drawn) >= 32
        assert (tmp_path / hosts.KEY_FILE).stat().st_mode & 0o077 == 0
        monkeypatch.setenv("SINEW_API_KEY", second.drawn)  # as the line with --join says
        assert hosts.RemoteQueue(second.address, "one", 1.0).take(list(plan.jobs)) == plan.jobs[0]
    finally:
        second.close()


def test_loopback_and_keys_in_headers() -> None:
    for host in ("127.0.0.1", "127.8.0.1", "::1", "[::1]", "localhost", "::1%lo"):
        assert is_loopback(host)
    for host in (None, "", "0.0.0.0", "192.0.2.1", "localhost.evil", "127.0.0.1.evil"):
        assert not is_loopback(host)
    assert key_of("Bearer a") == key_of("api-key a") == key_of("Basic OmE=") == "a"
    assert key_of("Digest a") == key_of("Basic !") == key_of("a") == ""


def test_keys_of_roles_open_what_their_role_needs(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("metrics:mmm\nrobot: rrr\nadmin:aaa\nold:with:colons\n")
    lines = keys_in(file)
    assert api_key_of(file) == "rrr"
    needs = [
        ("GET", "/metrics", "METRICS"), ("POST", "/v1/actions", "ROBOT"), ("GET", "/v1/policies", "ROBOT"),
        ("GET", "/v1/metadata", "ROBOT"), ("PUT", "/v1/policies/default", "ADMIN"),
        ("DELETE", "/v1/policies/b", "ADMIN"), ("POST", "/v1/policies/b/actions", "ROBOT"),
    ]  # fmt: skip
    may = {"mmm": {"METRICS"}, "rrr": {"ROBOT"}, "aaa": {"METRICS", "ROBOT", "ADMIN"}}
    may["old:with:colons"] = may["aaa"]
    with desk(("web", "native"), api_key=lambda: lines) as at:
        address = at.web.replace("ws://", "http://")
        for key, allowed in may.items():
            for method, path, need in needs:
                got = status(address, method, path, {"X-API-Key": key})
                assert (got != 401) is (need in allowed), (key, method, path, got)
            with Client(at.native, timeout=WAIT_S, api_key=key) as client:
                if "ROBOT" in allowed:
                    client.infer(GOOD)
                else:
                    with pytest.raises(ServerError, match="requires a key of the role robot"):
                        client.infer(GOOD)
        for wrong in ("", "robot:rrr", "metrics", "with:colons"):
            assert status(address, "GET", "/metrics", {"X-API-Key": wrong}) == 401
    file.write_text("metrics:\n")
    with pytest.raises(SinewError, match="expected ROLE:KEY, got metrics: without a key"):
        keys_in(file)


# ----------------------------------------------------------------------------- the structure

BINDS = {
    "create_server", "bind", "listen", "start_server", "start_unix_server", "TCPSite", "UnixSite", "SockSite",
    "run_app", "add_insecure_port", "add_secure_port", "HTTPServer", "ThreadingHTTPServer", "TCPServer",
    "ThreadingTCPServer", "tcp_socket", "unix_socket",
}  # fmt: skip
# Zenoh itself checks the key that `_require_key` gives it (tests/serve/test_lerobot_remote_wire.py).
CHECKS = {"refused_page", "check_key", "authorize", "_require_key"}
SOCKETS = "sinew/serve/transport/listen.py"  # makes sockets, and answers nobody
# A port of this machine that is closed again: whether loopback can be listened on (sinew doctor)
PROBES = {"sinew/checks/__init__.py"}
# Calls of the same names that make no socket
NO_SOCKET = (
    "progress.listen", "replicas.bind", "self.codec.bind", "self._listen", "inspect.signature", "serve.deployment",
)  # fmt: skip


def calls(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func)
        elif isinstance(node, ast.ClassDef):
            yield from map(ast.unparse, node.bases)


def test_each_place_that_binds_a_socket_checks_access() -> None:
    packages = ROOT / "packages"
    found = {}
    for path in sorted(
        [
            *(ROOT / "sinew").rglob("*.py"),
            *(ROOT / "eval" / "sinew_eval").rglob("*.py"),
            *packages.glob("*/src/**/*.py"),
            *packages.glob("sinew_ros/**/*.py"),
        ]
    ):
        called = set(calls(path))
        binds = {
            each
            for each in called
            if each.rpartition(".")[2] in BINDS and not any(each.startswith(known) for known in NO_SOCKET)
        }
        if binds:
            found[str(path.relative_to(ROOT))] = binds, {each.rpartition(".")[2] for each in called} & CHECKS
    assert found.pop(SOCKETS)
    for probe in PROBES:
        assert found.pop(probe)[0] == {"socket.create_server"}
    assert not {path for path, (_, checks) in found.items() if not checks}
    assert set(found) == {
        "eval/sinew_eval/farm/hosts.py",
        "sinew/serve/transport/web.py",
        "sinew/serve/transport/zenoh_node.py",
        "sinew/serve/transport/zeromq.py",
        "sinew/serve/wires/lerobot/wire.py",
    }
