"""The wires openpi and http: real server processes, PyPI's own client, hostile bytes, slow peers."""

from __future__ import annotations

import base64
import contextlib
import gc
import io
import json
import os
import signal
import socket
import sys
import textwrap
import threading
import time
import urllib.error
import urllib.request
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from prometheus_client.parser import text_string_to_metric_families

from sinew.cli import main
from sinew.convert import convert
from sinew.core import Observation, ObservationError
from sinew.policy import load
from sinew.serve.decode import array as arrays
from sinew.serve.wires import http, openpi
from tests import processes
from tests.convert.openpi_layout import write_checkpoint
from tests.serve.puppet import GOOD, desk, until
from tests.serve.test_server import START_S, ServerProcess

websockets = pytest.importorskip("websockets.sync.client", reason="the client side needs websockets")

CONFIG = "pi0_libero"
BLOCKS = Path(__file__).resolve().parents[2] / "sinew" / "assets" / "blocks.gguf"
FRAME = np.random.default_rng(0).integers(0, 256, (48, 64, 3), dtype=np.uint8)
WRIST = np.random.default_rng(1).integers(0, 256, (48, 64, 3), dtype=np.uint8)
STATE = np.linspace(-0.4, 0.4, 8)
OBSERVED = {
    "observation/image": FRAME,
    "observation/wrist_image": WRIST,
    "observation/state": STATE,
    "prompt": "pick up the cube",
}


@pytest.fixture(scope="module")
def bundle(golden, tmp_path_factory) -> Path:
    """pi0 for openpi's LIBERO robot, golden weights."""
    directory = tmp_path_factory.mktemp("openpi")
    path, arch, _ = write_checkpoint(golden, directory, CONFIG)
    return convert(path, directory / "policy.gguf", arch=arch, openpi_config=CONFIG)


@pytest.fixture(scope="module")
def policy(bundle):
    return load(bundle)


@pytest.fixture(scope="module")
def server(bundle, tmp_path_factory) -> Iterator[ServerProcess]:
    port = processes.free_port()
    wires = ("--wire", f"openpi:{port}", "--wire", f"http:{port}")
    running = ServerProcess(tmp_path_factory.mktemp("web"), bundle, *wires, "--threads", 1)
    running.http = running.address.replace("ws", "http")
    try:
        yield running
        assert running.stop() == 0
        assert "Traceback" not in running.log.read_text()
    finally:
        running.close()


def expected(policy, seed: int, **changes) -> np.ndarray:
    given = {
        "images": {"base_0_rgb": FRAME, "left_wrist_0_rgb": WRIST},
        "state": STATE,
        "prompt": "pick up the cube",
        "seed": seed,
    }
    return policy.infer(Observation(**(given | changes))).actions


@contextlib.contextmanager
def connected(address: str, **options) -> Iterator:
    """A WebSocket that has read the server's metadata, as ``connected.metadata``."""
    with websockets.connect(address, compression=None, max_size=None, **options) as connection:
        connection.metadata = arrays.unpack(connection.recv(START_S))
        yield connection


def ask(connection, message: dict) -> dict:
    connection.send(arrays.pack(message))
    reply = connection.recv(START_S)
    assert isinstance(reply, bytes), reply
    return arrays.unpack(reply)


def get(address: str) -> tuple[int, bytes]:
    with urllib.request.urlopen(address, timeout=START_S) as reply:
        return reply.status, reply.read()


def post(address: str, body: bytes | dict, kind: str = http.JSON, **headers: str) -> tuple[int, bytes]:
    data = json.dumps(body).encode() if isinstance(body, dict) else body
    request = urllib.request.Request(address, data, {"Content-Type": kind, **headers})
    try:
        with urllib.request.urlopen(request, timeout=START_S) as reply:
            return reply.status, reply.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


# ----------------------------------------------------------------------------- openpi


def test_openpis_own_client(server, policy):
    """openpi-client 0.1.2 from PyPI, unmodified: actions are the policy's to the bit."""
    client = pytest.importorskip(
        "openpi_client.websocket_client_policy", reason="make env installs openpi-client"
    )
    remote = client.WebsocketClientPolicy(server.address, port=None)
    assert remote.get_server_metadata()["action_horizon"] == policy.spec.chunk_size
    for seed in (1, 2):
        reply = remote.infer({**OBSERVED, "seed": seed})
        np.testing.assert_array_equal(reply["actions"], expected(policy, seed))
    assert reply["policy_timing"]["infer_ms"] > 0
    assert reply["server_timing"]["prev_total_ms"] > 0
    assert all(type(value) is float for value in reply["server_timing"].values())
    remote.reset()
    with pytest.raises(RuntimeError, match="observation/state: expected numbers"):
        remote.infer({"observation/image": FRAME, "prompt": "go"})


@pytest.mark.parametrize("config", ["pi0_aloha_sim", "pi0_droid", "pi05_droid"])
def test_openpis_own_client_on_other_robots(golden, tmp_path, config):
    """The keys and layouts of the observations that openpi's robots send: ALOHA's frames have channels first."""
    client = pytest.importorskip("openpi_client.websocket_client_policy", reason="make env installs it")
    path, arch, _ = write_checkpoint(golden, tmp_path, config)
    bundle = convert(path, tmp_path / "policy.gguf", arch=arch, openpi_config=config)
    policy = load(bundle)
    rng = np.random.default_rng(2)
    frames = {each.name: rng.integers(0, 256, (48, 64, 3), dtype=np.uint8) for each in policy.spec.cameras}
    state = rng.uniform(0.1, 0.6, policy.spec.state.dim)
    if "aloha" in config:
        first = {name: frame.transpose(2, 0, 1) for name, frame in frames.items()}
        cameras = dict(zip(("cam_high", "cam_left_wrist", "cam_right_wrist"), first.values(), strict=False))
        sent = {"images": cameras | {"cam_low": first["base_0_rgb"]}, "state": state}
    else:
        sent = {
            "observation/exterior_image_1_left": frames["base_0_rgb"],
            "observation/wrist_image_left": frames["left_wrist_0_rgb"],
            "observation/joint_position": state[:7],
            "observation/gripper_position": np.array(state[7]),
        }
    want = policy.infer(Observation(images=frames, state=state, prompt="transfer the cube", seed=5)).actions
    answered_alike(client, bundle, tmp_path, {**sent, "prompt": "transfer the cube", "seed": 5}, want)


def test_openpis_own_client_on_a_bundle_without_a_key_map(tmp_path):
    """The demo's policy, asked by the names that its own specification has."""
    client = pytest.importorskip("openpi_client.websocket_client_policy", reason="make env installs it")
    policy = load(BLOCKS)
    rng = np.random.default_rng(3)
    observed = {
        "images": {
            each.name: rng.integers(0, 256, (each.height, each.width, 3), dtype=np.uint8)
            for each in policy.spec.cameras
        },
        "state": rng.uniform(-0.5, 0.5, policy.spec.state.dim),
        "prompt": "push the red block",
        "seed": 5,
    }
    answered_alike(client, BLOCKS, tmp_path, observed, policy.infer(Observation(**observed)).actions)


def answered_alike(client, bundle: Path, directory: Path, message: dict, want: np.ndarray) -> None:
    """A server of its own gives openpi's client these actions, to the bit."""
    running = ServerProcess(directory, bundle, "--wire", "openpi:0", "--threads", 1)
    try:
        host, _, port = running.address.removeprefix("ws://").partition(":")
        remote = client.WebsocketClientPolicy(host, int(port))
        for _ in range(3):
            np.testing.assert_array_equal(remote.infer(message)["actions"], want)
        assert running.stop() == 0
    finally:
        running.close()


@pytest.mark.parametrize(
    "changes",
    [
        {"observation/image": FRAME.astype(np.float32) / 255},
        {"observation/image": FRAME[None]},
        {"prompt": b"pick up the cube"},
        {"prompt": np.array("pick up the cube").item()},
        {"session_id": "arm", "endpoint": "infer"},
    ],
    ids=["float", "batch", "bytes", "text", "dialect"],
)
def test_tolerated_forms(server, policy, changes):
    with connected(server.address) as connection:
        reply = ask(connection, {**OBSERVED, "seed": 3, **changes})
    frame = FRAME
    if "observation/image" in changes and changes["observation/image"].dtype == np.float32:
        frame = (255 * changes["observation/image"]).astype(np.uint8)
    want = expected(policy, 3, images={"base_0_rgb": frame, "left_wrist_0_rgb": WRIST})
    np.testing.assert_array_equal(reply["actions"], want)


def test_state_travels_in_double_precision(policy):
    """pi0.5 writes the state into the prompt in bins: rounding it first could choose the neighbour's."""
    message = openpi.read(arrays.pack(OBSERVED))
    state = openpi.observation(message, policy.spec).state
    assert state.dtype == np.float64
    np.testing.assert_array_equal(state, STATE)


def test_a_message_is_freed_without_the_collector(policy):
    """A circle of references kept each message, up to 64 MiB, until the collector came."""
    payload = np.frombuffer(arrays.pack(OBSERVED), np.uint8).copy()
    gone = weakref.ref(payload)
    gc.disable()
    try:
        assert openpi.observation(openpi.read(payload.data), policy.spec).images
        del payload
        assert gone() is None
    finally:
        gc.enable()


def test_any_path_and_the_dialect(server):
    with connected(server.address + "/v1/realtime/robot/openpi") as connection:
        metadata = connection.metadata
        assert metadata["action_horizon"] == 50
        assert metadata["needs_wrist_camera"] is True
        assert metadata["image_keys"] == ["observation/image", "observation/wrist_image"]
        assert ask(connection, {"endpoint": "reset", "session_id": "a"}) == {"status": "reset successful"}
        vllm = {"nd": True, "type": "|u1", "kind": b"", "shape": FRAME.shape, "data": FRAME.tobytes()}
        assert ask(connection, {**OBSERVED, "observation/image": vllm})["actions"].shape == (50, 7)


@pytest.mark.parametrize(
    ("payload", "text"),
    [
        (b"\xc1", "MessagePack: expected a plain MessagePack type, got type 0xc1"),
        (arrays.pack([1, 2]), "expected a map"),
        (arrays.pack({**OBSERVED, "observation/state": STATE[:3]}), r"state: expected shape \[8\]"),
        (arrays.pack({**OBSERVED, "endpoint": "kill"}), "endpoint: expected infer or reset"),
        (arrays.pack({**OBSERVED, "deadline_ms": -1.0}), "deadline_ms: expected a number above 0"),
        (arrays.pack({"prompt": "go"}), "images: expected a frame under one of the keys observation/image"),
        (arrays.pack({**OBSERVED, "observation/state": STATE * np.nan}), "state: expected finite"),
    ],
)
def test_errors_are_a_text_frame_and_code_1011(server, policy, payload, text):
    with connected(server.address) as connection:
        connection.send(payload)
        said = connection.recv(START_S)
        assert isinstance(said, str)
        assert "Traceback" not in said
        with pytest.raises(ObservationError, match=text):
            raise ObservationError("openpi", said, "")
        with pytest.raises(Exception, match="1011"):
            connection.recv(START_S)
    with connected(server.address) as connection:
        np.testing.assert_array_equal(
            ask(connection, {**OBSERVED, "seed": 1})["actions"], expected(policy, 1)
        )


WAITS = {**GOOD, "prompt": "wait"}  # a request that the puppet works on until it is cancelled or released


def test_pings_are_answered_during_an_inference():
    with desk(("openpi",)) as at, connected(at.openpi, ping_interval=None) as connection:
        connection.send(arrays.pack(WAITS))
        until(lambda: at.service.health()["running"])
        assert connection.ping().wait(START_S)
        at.puppet.release.set()
        arrays.unpack(connection.recv(START_S))
        assert at.puppet.computed == ["wait"]


def test_a_client_that_leaves_frees_its_turn():
    """Its waiting and running requests are cancelled: the next client does not wait for them."""
    with desk(("openpi",)) as at:
        leavers = [websockets.connect(at.openpi, compression=None) for _ in range(4)]
        for leaver in leavers:
            leaver.recv(START_S)
            leaver.send(arrays.pack(WAITS))
        until(lambda: at.service.health()["running"] and at.service.health()["waiting"] == 3)
        for leaver in leavers:
            leaver.socket.shutdown(socket.SHUT_RDWR)
        with connected(at.openpi) as connection:
            ask(connection, GOOD)
        assert at.puppet.computed == ["go"]


# ----------------------------------------------------------------------------- http


def png(frame: np.ndarray) -> str:
    file = io.BytesIO()
    Image.fromarray(frame).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def plain(**changes) -> dict:
    given = {
        "observation/image": png(FRAME),
        "observation/wrist_image": arrays.to_json_numpy(WRIST),
        "observation/state": STATE.tolist(),
        "prompt": "pick up the cube",
        "seed": 4,
    }
    return given | changes


def by_camera(message: dict) -> dict:
    """The bundle has a key map for openpi only: the http wire asks by the policy's own names."""
    names = {"observation/image": "base_0_rgb", "observation/wrist_image": "left_wrist_0_rgb"}
    images = {camera: message[key] for key, camera in names.items() if key in message}
    rest = {key: value for key, value in message.items() if key not in names}
    return rest | {"images": images}


@pytest.mark.proves(wire="http", family="pi0")
def test_actions_in_json_and_msgpack(server, policy):
    status, body = post(server.http + "/v1/actions", by_camera(plain(session="s", time=2.5)))
    reply = json.loads(body)
    assert status == 200
    np.testing.assert_array_equal(np.array(reply["actions"], np.float32), expected(policy, 4))
    assert (reply["seed"], reply["session"], reply["time"]) == (4, "s", 2.5)
    assert len(reply["timing"]["step_ms"]) == 10
    packed = arrays.pack(by_camera({**OBSERVED, "seed": 4}))
    status, body = post(server.http + "/v1/actions", packed, http.MSGPACK)
    assert status == 200
    np.testing.assert_array_equal(arrays.unpack(body)["actions"], expected(policy, 4))
    status, body = get(server.http + "/v1/metadata")
    assert json.loads(body)["policy"]["chunk_size"] == 50


@pytest.mark.parametrize(
    ("body", "status", "code", "text"),
    [
        (b"{", 400, "bad_request", "not valid JSON"),
        (b"[1]", 400, "bad_request", "request: expected an object"),
        (b"[" * 100_000, 400, "bad_request", "JSON"),
        (by_camera(plain(prompt=3)), 400, "bad_observation", "prompt: expected text"),
        (by_camera(plain(**{"observation/image": "?" * 100})), 400, "bad_observation", "base64"),
        (by_camera(plain(**{"observation/image": "A" * 100})), 400, "bad_observation", "JPEG or PNG"),
        (by_camera(plain(seed="x")), 400, "bad_observation", "seed: expected an integer"),
        (by_camera(plain(noise=[[0.0]])), 400, "bad_observation", "noise"),
        (by_camera(plain(deadline_ms=0.0)), 400, "bad_request", "deadline_ms"),
        (by_camera(plain(deadline_ms=1e-3)), 504, "deadline", "deadline passed"),
    ],
)
def test_http_errors_have_a_status_and_a_reason(server, body, status, code, text):
    got, answer = post(server.http + "/v1/actions", body)
    error = json.loads(answer)["error"]
    assert (got, error["code"]) == (status, code)
    assert text in error["message"]


def test_too_large_a_body_is_refused(server):
    status, body = post(server.http + "/v1/actions", b" " * ((64 << 20) + 1))
    assert (status, json.loads(body)["error"]["code"]) == (413, "bad_request")


def test_openvla_oft(server, policy):
    """The payload of OpenVLA-OFT's client, plain and encoded, and OpenVLA's single action."""
    payload = {
        "full_image": arrays.to_json_numpy(FRAME),
        "wrist_image": arrays.to_json_numpy(WRIST),
        "state": arrays.to_json_numpy(STATE),
        "instruction": "pick up the cube",
    }
    status, body = post(server.http + "/act", payload)
    assert status == 200
    rows = [arrays.from_json_numpy(row) for row in json.loads(body)]
    assert np.shape(rows) == (50, 7)
    status, body = post(server.http + "/act", {"encoded": json.dumps(payload)})
    assert len(json.loads(json.loads(body))) == 50
    single = {"image": payload["full_image"], "instruction": "go", "unnorm_key": policy.spec.embodiment}
    status, body = post(server.http + "/act", single)
    assert arrays.from_json_numpy(json.loads(body)).shape == (7,)
    assert post(server.http + "/act", {**single, "unnorm_key": "x"})[0] == 400
    assert post(server.http + "/act", {"instruction": "go"})[0] == 400


def test_health_and_metrics(server):
    assert get(server.http + "/healthz") == (200, b"OK\n")
    post(server.http + "/v1/actions", by_camera(plain()))
    _, text = get(server.http + "/metrics")
    samples = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }
    assert samples["sinew_requests_total", "default", "http", "ok"] >= 1
    assert samples["sinew_request_seconds_count", "http"] >= 1
    assert samples["sinew_stage_seconds_count", "head"] >= 1
    assert samples["sinew_queue_depth",] == 0


# ----------------------------------------------------------------------------- keys, TLS, what is printed


def test_keys_and_tls(bundle, certificate, tmp_path, capsys):
    import ssl

    from websockets.exceptions import InvalidHandshake, InvalidStatus

    cert, key = certificate
    secret = tmp_path / "key.txt"
    secret.write_text("open sesame\n")
    options = ("--tls-cert", cert, "--tls-key", key, "--api-key-file", secret, "--threads", 1)
    running = ServerProcess(tmp_path, bundle, "--wire", "openpi:0", *options)
    try:
        assert running.address.startswith("wss://")
        trust = ssl.create_default_context(cafile=cert)
        with pytest.raises(InvalidStatus, match="401"):
            websockets.connect(running.address, ssl=trust)
        header = {"Authorization": "Api-Key open sesame"}
        with connected(running.address, ssl=trust, additional_headers=header) as connection:
            assert ask(connection, OBSERVED)["actions"].shape == (50, 7)
        with pytest.raises((OSError, EOFError, InvalidHandshake)):
            websockets.connect(running.address.replace("wss", "ws"), open_timeout=START_S)
        address = running.address.replace("wss", "tls")
        assert main(["bench", address, "--api-key-file", str(secret), "--timeout", "60"]) == 1
        said = " ".join(capsys.readouterr().err.split())
        assert "expected a trusted certificate, got self-signed" in said
        assert "to trust your own certificate, set SSL_CERT_FILE=CERT.pem in the environment" in said
        assert running.stop() == 0
    finally:
        running.close()


def test_the_printed_programs_run(bundle, tmp_path):
    pytest.importorskip("openpi_client", reason="make env installs openpi-client")
    port = processes.free_port()
    (tmp_path / "key").write_text("secret")
    wants = ("--api-key-file", tmp_path / "key")
    running = ServerProcess(tmp_path, bundle, "--wire", f"openpi:{port}", "--wire", f"http:{port}", *wants)
    try:
        while not running.process.stdout.readline().endswith("example:\n"):
            pass
        assert running.process.stdout.readline() == "\n"
        program = textwrap.dedent("".join(iter(running.process.stdout.readline, "\n")))
        has = {**os.environ, "SINEW_API_KEY": "secret"}
        done = processes.run([sys.executable, "-c", program], timeout=START_S, env=has)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("[[") == 2
        assert running.stop(signal.SIGINT) == 0
    finally:
        running.close()


# ----------------------------------------------------------------------------- hostile peers


def test_slow_peers_do_not_hold_up_others(bundle, policy, tmp_path):
    """Half a header, half a body, half a frame, for as long as the server lets them: others are answered."""
    running = ServerProcess(tmp_path, bundle, "--wire", "http:0", "--threads", 1, "--arrival-s", 6)
    host, port = running.address.removeprefix("http://").split(":")
    try:
        slow = [socket.create_connection((host, int(port))) for _ in range(60)]
        for index, peer in enumerate(slow):
            head = b"POST /v1/actions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n"
            peer.sendall(head if index % 2 else head + b"\r\n{")
        for seed in range(5):
            status, body = post(running.address + "/v1/actions", by_camera(plain(seed=seed)))
            assert status == 200
            np.testing.assert_array_equal(
                np.array(json.loads(body)["actions"], np.float32), expected(policy, seed)
            )
        for peer in slow:  # and none of them keeps its connection
            peer.settimeout(START_S)
            with contextlib.suppress(ConnectionError):
                while peer.recv(4096):
                    pass
        assert running.stop() == 0
    finally:
        running.close()


def test_crowds_are_turned_away(server, policy):
    """More connections than the server takes: the ones it has go on, and room that is freed can be used."""
    host, port = server.address.removeprefix("ws://").split(":")
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(connected(server.address))
        ask(first, OBSERVED)  # a full server closes connections of which it never took a request
        crowd = []
        for _ in range(300):
            with contextlib.suppress(OSError):
                crowd.append(stack.enter_context(socket.create_connection((host, int(port)), timeout=5)))
        np.testing.assert_array_equal(ask(first, {**OBSERVED, "seed": 1})["actions"], expected(policy, 1))
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError, EOFError), connected(server.address) as again:
            assert ask(again, OBSERVED)["actions"].shape == (50, 7)
            return
    pytest.fail("no connection after the crowd had left")


def test_many_clients_at_once_get_their_own_answers(server, policy):
    wanted = {seed: expected(policy, seed) for seed in range(6)}
    failures = []

    def robot(seed: int) -> None:
        try:
            with connected(server.address) as connection:
                for _ in range(4):
                    reply = ask(connection, {**OBSERVED, "seed": seed, "session_id": f"robot-{seed}"})
                    np.testing.assert_array_equal(reply["actions"], wanted[seed])
        except BaseException as error:  # noqa: BLE001 - told below
            failures.append(error)

    robots = [threading.Thread(target=robot, args=(seed,)) for seed in wanted]
    for thread in robots:
        thread.start()
    for thread in robots:
        thread.join()
    assert not failures


def test_a_port_without_http_names_the_wire_that_loads_policies():
    with desk(("openpi",)) as at:
        address = at.openpi.replace("ws", "http", 1)
        asked = urllib.request.Request(f"{address}/v1/policies/default", data=b"{}", method="PUT")
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(asked, timeout=START_S)
        said = refused.value.read().decode()
    assert refused.value.code == 405
    assert (
        said == "405: Method Not Allowed. To use the routes below /v1, start the server with `--wire http`.\n"
    )
