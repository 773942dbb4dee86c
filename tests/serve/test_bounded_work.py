"""Work that a message can cause is bounded: pictures, pickles, numbers, texts; and what a client sends is refused by
name, not dropped."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import pickle
import socket
import time
import urllib.error
import urllib.request
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image
from prometheus_client.parser import text_string_to_metric_families
from sinew_client import Client, ServerError
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from sinew.core import CameraSpec, ObservationError
from sinew.serve.decode.frames import MAX_SCANS, MIN_BUDGET, PixelBudget, compressed_frame, pixel_limit
from sinew.serve.request import WireMessage
from sinew.serve.transport.listen import Listen
from sinew.serve.wires import http, openpi
from sinew.serve.wires.lerobot.pickle.machine import SafePickleError, load
from tests.serve.puppet import FRAME, GOOD, SPEC, WAIT_S, closed_by_server, desk, until
from tests.serve.puppet import connect as plain


def progressive(scans: int, side: int = 64) -> bytes:
    """A progressive JPEG whose last scan is repeated."""
    buffer = io.BytesIO()
    Image.new("RGB", (side, side)).save(buffer, "JPEG", progressive=True)
    data = buffer.getvalue()
    last = data.rindex(b"\xff\xda")
    return data[:last] + data[last:-2] * scans + data[-2:]


def test_a_jpeg_has_a_number_of_scans():
    """Row 3: 97 bytes of an empty scan cost 15 to 25 ms."""
    assert compressed_frame("f", progressive(1), PixelBudget()).shape == (64, 64, 3)
    with pytest.raises(ObservationError, match=f"at most {MAX_SCANS} scans"):
        compressed_frame("f", progressive(4000), PixelBudget())


def test_pixels_are_bounded_by_the_cameras():
    """Row 10: 65 kB of PNG were a gigabyte whatever the camera was."""
    assert pixel_limit(SPEC) == MIN_BUDGET
    large = replace(SPEC, cameras=(CameraSpec("front", 1080, 1920),))
    assert pixel_limit(large) == 16 * 1080 * 1920
    buffer = io.BytesIO()
    Image.new("RGB", (8000, 8000)).save(buffer, "PNG")
    with pytest.raises(ObservationError, match=f"at most {MIN_BUDGET} pixels"):
        compressed_frame("f", buffer.getvalue(), PixelBudget(pixel_limit(SPEC)))
    with desk() as at, Client(at.native, timeout=WAIT_S) as robot:
        with pytest.raises(ServerError, match="pixels in all frames together"):
            robot.infer({**GOOD, "images": {"front": buffer.getvalue()}})
        assert robot.infer(GOOD).actions.shape == (3, 2)


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_decoding_asks_whether_somebody_waits(kind):
    calls = []

    def check() -> None:
        calls.append(1)
        if len(calls) > 6:
            raise TimeoutError  # any error that is not the picture's own

    buffer = io.BytesIO()
    noise = np.random.default_rng(0).integers(0, 256, (800, 800, 3), dtype=np.uint8)
    Image.fromarray(noise).save(buffer, kind)
    with pytest.raises(ObservationError, match="TimeoutError|do not decode"):
        compressed_frame("f", buffer.getvalue(), PixelBudget(check=check))
    assert len(calls) == 7  # it ended there, in the middle of the file


def test_a_pickle_has_text_as_keys():
    """Row 17: integers that are multiples of 2^61 - 1 have one hash, so a dict of them takes quadratic time."""
    data = pickle.dumps({(1 << 61) - 1: None}, 4)
    with pytest.raises(SafePickleError, match="as keys, got int"):
        load(data, {})


# ----------------------------------------------------------------------------- unknown cameras


@pytest.mark.parametrize("key", ["images/fron", "observation.images.wrist", "wrist"])
def test_unknown_frames_are_refused_by_name(key):
    """A camera that is misspelt was dropped by openpi and http, and the policy saw half of the world."""
    flat = {"images/front": FRAME, key: FRAME, "state": np.zeros(2), "prompt": "go"}
    message = WireMessage(flat)
    with pytest.raises(
        ObservationError, match=f"{key}: expected one of the cameras images/front, got an unknown camera"
    ):
        openpi.observation(message, SPEC)
    with pytest.raises(ObservationError, match="unknown camera"):
        http.observation(WireMessage(flat), SPEC)
    del flat[key]
    assert set(openpi.observation(WireMessage(flat | {"noise": np.zeros((1, 3, 2))}), SPEC).images) == {
        "front"
    }


def test_a_close_name_is_suggested():
    flat = {"images/front": FRAME, "state": np.zeros(2)}
    two = replace(SPEC, cameras=(*SPEC.cameras, CameraSpec("wrist", 48, 64)))
    with pytest.raises(ObservationError, match="did you mean 'images/wrist'"):
        openpi.observation(WireMessage({**flat, "images/wrst": FRAME}), two)


# ----------------------------------------------------------------------------- web


def post(address: str, body: bytes, path: str = "/v1/actions", **headers: str) -> tuple[int, bytes, dict]:
    url = address.replace("ws://", "http://") + path
    sent = urllib.request.Request(url, body or None, {"Content-Type": "application/json", **headers})
    try:
        with urllib.request.urlopen(sent, timeout=WAIT_S) as answer:
            return answer.status, answer.read(), dict(answer.headers)
    except urllib.error.HTTPError as error:
        return error.code, error.read(), dict(error.headers)


def body(**changes) -> bytes:
    picture = {
        "__numpy__": base64.b64encode(FRAME.tobytes()).decode(),
        "dtype": "|u1",
        "shape": list(FRAME.shape),
    }
    return json.dumps({"images": {"front": picture}, "state": [0, 0], "prompt": "go", **changes}).encode()


def test_what_made_a_traceback_is_refused(caplog):
    """Row 22, before and after the key."""
    with desk(("web",), api_key="secret") as at:
        key = {"Authorization": "Bearer secret"}
        assert post(at.web, body(), **key)[0] == 200
        assert (
            post(
                at.web,
                body(),
                Authorization="Bearer \udcff\udcfe".encode("utf-8", "surrogateescape").decode("latin-1"),
            )[0]
            == 401
        )
        for changes in (
            {"session": ["a", "b"]},
            {"session": [1, 2]},
            {"session": {}},
            {"session": "x" * 200},
            {"deadline_ms": "soon"},
        ):
            status, answer, _ = post(at.web, body(**changes), **key)
            assert status == 400, answer
        huge = body(deadline_ms=0).replace(b'"deadline_ms": 0', b'"deadline_ms": 1' + b"0" * 400)
        assert post(at.web, huge, **key)[0] == 400
    assert "Traceback" not in caplog.text


def test_web_pages_do_not_drive_robots():
    """Row 24."""
    with desk(("web",), listen=Listen(origins=("https://desk.example",))) as at:
        own = at.web.removeprefix("ws://")
        assert post(at.web, body())[0] == 200
        assert post(at.web, body(), Origin=f"http://{own}")[0] == 200
        assert post(at.web, body(), Origin="https://desk.example")[0] == 200
        for headers in (
            {"Origin": "https://evil.example"},
            {"Origin": "null"},
            {"Host": "evil.example"},
            {"Host": "evil.example", "Origin": "http://evil.example"},
        ):
            status, answer, _ = post(at.web, body(), **headers)
            assert status == 403, answer
        with pytest.raises(InvalidStatus):
            connect(at.web, origin="https://evil.example")
        with connect(at.web) as robot:
            assert robot.recv(WAIT_S)


def raw(
    address: str, head: str, path: str = "/v1/metadata", method: str = "GET", payload: bytes = b""
) -> int:
    """The status of a request whose headers are exactly these."""
    with plain(address) as peer:
        size = f"Content-Length: {len(payload)}\r\nContent-Type: application/json\r\n" if payload else ""
        peer.sendall(f"{method} {path} HTTP/1.1\r\n{head}{size}\r\n".encode() + payload)
        return int(peer.makefile("rb").readline().split()[1])


SOCKET = "Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {}\r\n"
SOCKET = SOCKET.format(base64.b64encode(bytes(16)).decode())


def test_a_page_whose_name_resolves_to_the_server_is_refused():
    """On all interfaces and without a key, a page that had its name resolved to the robot's address was taken as the
    server's own: its Origin is its Host. Its GET has no Origin at all."""
    with desk(("web",), listen=Listen("0.0.0.0", hosts=("policy.lab",), dashboard=True)) as at:
        at.web = at.web.replace("0.0.0.0", "127.0.0.1")
        port = at.web.rpartition(":")[2]
        evil = f"Host: evil.example:{port}\r\n"
        page = f"{evil}Origin: http://evil.example:{port}\r\n"
        assert raw(at.web, page, "/v1/actions", "POST", body()) == 403
        assert raw(at.web, page + SOCKET, "/") == 403
        for path in (
            "/",
            "/v1/metadata",
            "/v1/events",
            "/v1/frames",
            "/v1/frames/front",
            "/dashboard/page.js",
        ):
            assert raw(at.web, evil, path) == 403, path
        # who is no page: robots by any name, probes, Prometheus
        assert raw(at.web, evil, "/v1/actions", "POST", body()) == 200
        assert raw(at.web, evil + SOCKET, "/") == 101
        assert raw(at.web, evil, "/healthz") == raw(at.web, evil, "/metrics") == 200
        # and the server's own pages, by its addresses and names
        own = socket.gethostname()
        for name in ("127.0.0.1", "192.168.7.9", "[::1]", "localhost", own, own.upper(), "Policy.Lab"):
            here = f"Host: {name}:{port}\r\n"
            assert raw(at.web, here) == raw(at.web, here, "/") == 200, name
            assert (
                raw(at.web, f"{here}Origin: http://{name}:{port}\r\n", "/v1/actions", "POST", body()) == 200
            )
        assert raw(at.web, "Host: policy.lab.evil.example\r\n") == 403
        assert raw(at.web, "Host: [\r\n") == raw(at.web, f"Host: {own}\r\nOrigin: http://[\r\n") == 403


def test_a_key_is_enough_whatever_the_server_is_called():
    listen = Listen("0.0.0.0", origins=("https://desk.example",))
    with desk(("web",), listen=listen, api_key="secret") as at:
        at.web = at.web.replace("0.0.0.0", "127.0.0.1")
        evil, key = "Host: evil.example\r\n", "X-API-Key: secret\r\n"
        assert raw(at.web, evil) == 401
        assert raw(at.web, evil + key) == 200
        assert raw(at.web, f"{evil}Origin: http://evil.example\r\n", "/v1/actions", "POST", body()) == 401
        assert (
            raw(at.web, f"{evil}{key}Origin: https://other.example\r\n", "/v1/actions", "POST", body()) == 403
        )
        assert (
            raw(at.web, f"{evil}{key}Origin: https://desk.example\r\n", "/v1/actions", "POST", body()) == 200
        )


def test_metrics_want_the_key_and_versions_are_not_told():
    """Row 30."""
    with desk(("web",), api_key="secret") as at:
        assert post(at.web, b"", "/healthz")[0] == 200
        assert post(at.web, b"", "/metrics")[0] == 401
        status, text, headers = post(at.web, b"", "/metrics", Authorization="Bearer secret")
        assert (status, b"sinew_requests" in text) == (200, True)
        assert headers["Server"] == "sinew"


def test_websockets_that_close_politely_leave_nothing():
    """Row 11: 500 connections were counted when none was open."""

    def gauge() -> float:
        for family in text_string_to_metric_families(at.service.metrics.exposition().decode()):
            for sample in family.samples:
                if sample.name == "sinew_connections" and sample.labels == {"wire": "openpi"}:
                    return sample.value
        return -1

    with desk(("web",)) as at:
        for _ in range(20):
            with connect(at.web) as robot:
                robot.recv(WAIT_S)
        until(lambda: gauge() == 0, "the gauge to fall to zero")
        until(lambda: not at.opened["web"]._open)


def test_idle_strangers_make_place_for_robots():
    """Row 12: 256 peers that ask for /healthz now and then kept every new robot out."""

    from websockets.sync.client import connect

    from sinew.serve.transport.listen import Listen

    key = {"Authorization": "Api-Key k"}
    with (
        desk(("web",), api_key="k", listen=Listen(max_connections=6)) as at,
        connect(at.web, additional_headers=key) as robot,
        contextlib.ExitStack() as stack,
    ):
        robot.recv(WAIT_S)
        peers = [stack.enter_context(plain(at.web)) for _ in range(5)]
        for peer in peers:
            peer.sendall(b"GET /v1/metadata HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert b"401" in peer.recv(4096)
        time.sleep(1.2)
        with connect(at.web, additional_headers=key) as late:
            assert late.recv(WAIT_S)
        robot.ping().wait(WAIT_S)


def test_health_does_not_keep_a_connection():
    with desk(("web",)) as at, plain(at.web) as peer:
        peer.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert closed_by_server(peer)
