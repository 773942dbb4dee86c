"""Adapters behind a server: who names one gets its answers, whoever else asks, on each wire that has a place for it."""

from __future__ import annotations

import base64
import io
import json
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from PIL import Image
from sinew_client import Client, ClientError, ServerError, UnsafeChunk, protocol, schema
from websockets.sync.client import connect as websocket

import sinew
from benchmarks.wire_clients import _observation, _pack, _unpack
from sinew.core import Observation, ObservationError, SinewError
from sinew.policy import Policy
from sinew.records.recorder import read_records
from sinew.serve.deploy import deploy
from sinew.serve.limits import ServingLimits
from sinew.serve.replay import Replay
from sinew.serve.wires import evo1, http
from sinew.serve.wires.groot import codec as groot
from tests import processes
from tests.adapters import Make
from tests.processes import run
from tests.serve.puppet import until
from tests.serve.test_server import FRAME, GOOD, START_S, serving

CASE = "smolvla-2cam"
NAMES = ("", "arm", "kitchen")
ROUNDS = 6  # of each client


def of(name: str, seed: int) -> dict[str, Any]:
    return {**GOOD, "seed": seed, "adapter": name}


@pytest.fixture(scope="module")
def policy(adapters: Make) -> Policy:
    found = adapters(CASE)
    return sinew.load(found.base, "cpu", adapters=found.files, threads=1)


@pytest.fixture(scope="module")
def wanted(policy: Policy) -> dict[tuple[str, int], np.ndarray]:
    found = {(name, seed): policy.infer(of(name, seed)).actions for name in NAMES for seed in range(4)}
    assert all(
        np.abs(found[one, 0] - found[other, 0]).max() > 0.1
        for one, other in (("", "arm"), ("", "kitchen"), ("arm", "kitchen"))
    )
    return found


class Running:
    """A server with two adapters, on every wire that has a place for their names, that records and logs."""

    def __init__(self, folder: Path, process: Any, ports: dict[str, int]):
        self.folder, self.process = folder, process
        self.native = f"tcp://127.0.0.1:{ports['native']}"
        self.openpi, self.http = (
            f"{scheme}://127.0.0.1:{ports[wire]}" for wire, scheme in (("openpi", "ws"), ("http", "http"))
        )

    def entries(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "access.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def server(adapters: Make, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder, found = tmp_path_factory.mktemp("adapters"), adapters(CASE)
    ports = {wire: processes.free_port() for wire in ("native", "openpi", "http")}
    words = [word for wire, port in ports.items() for word in ("--wire", f"{wire}:{port}")]
    words += [word for name, file in found.files.items() for word in ("--adapter", f"{name}={file}")]
    words += ["--record", folder / "records", "--access-log", folder / "access.jsonl", "--threads", 1]
    with serving(folder, found.base, *words, "--max-batch", 4) as process:
        yield Running(folder, process, ports)
        assert process.stop() == 0
        assert "Traceback" not in process.log.read_text()


# ----------------------------------------------------------------------------- who gets what


def close(found: np.ndarray, expected: np.ndarray) -> bool:
    """Batches add in another order; two adapters are far apart."""
    return bool(np.allclose(found, expected, atol=1e-5 * np.abs(expected).max(), rtol=0))


def test_requests_of_two_clients_never_mix(
    server: Running, wanted: dict[tuple[str, int], np.ndarray]
) -> None:
    """They ask at the same time, and each changes the adapter with every request."""
    wrong: list[str] = []
    answered: list[str] = []
    begin = threading.Barrier(3)

    def ask(offset: int) -> None:
        with Client(server.native, timeout=START_S) as client:
            begin.wait()
            for number in range(offset, offset + 3 * ROUNDS):
                name, seed = NAMES[number % 3], number % 4
                chunk = client.infer(of(name, seed))
                answered.append(chunk.adapter)
                if chunk.adapter != name or not close(chunk.actions, wanted[name, seed]):
                    wrong.append(f"{name} {seed}")

    threads = [threading.Thread(target=ask, args=(offset,)) for offset in range(3)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not wrong
    assert sorted(answered) == sorted(3 * ROUNDS * NAMES)


def test_each_wire_carries_the_name(server: Running, wanted: dict[tuple[str, int], np.ndarray]) -> None:
    found: dict[str, dict[str, Any]] = {}
    state = np.zeros(6, np.float32)
    sent = _observation({"camera1": FRAME, "camera2": FRAME}, state, "go", 1, None)
    with websocket(server.openpi, compression=None, max_size=None) as socket:
        about = msgpack.unpackb(socket.recv(START_S), object_hook=_unpack)
        assert list(about["server"]["adapters"]) == ["arm", "kitchen"]
        for name in NAMES:
            given = sent | ({"adapter": name} if name else {})
            socket.send(msgpack.packb(given, default=_pack))
            reply = msgpack.unpackb(socket.recv(START_S), object_hook=_unpack)
            assert reply.get("adapter", "") == name
            found.setdefault("openpi", {})[name] = reply["actions"]
    for name in NAMES:
        given = sent | ({"adapter": name} if name else {})
        request = urllib.request.Request(
            f"{server.http}/v1/actions",
            msgpack.packb(given, default=_pack),
            {"Content-Type": "application/msgpack"},
        )
        reply = msgpack.unpackb(urllib.request.urlopen(request).read(), object_hook=_unpack)
        found.setdefault("http", {})[name] = reply["actions"]
        assert reply.get("adapter", "") == name
    for wire, answers in found.items():
        for name, actions in answers.items():
            assert close(actions, wanted[name, 1]), (wire, name)


def post(address: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(address, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request)
    found: dict[str, Any] = json.loads(refused.value.read())["error"]
    return found


def picture() -> str:
    file = io.BytesIO()
    Image.fromarray(FRAME).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def test_unknown_names_are_refused_with_the_known_ones(server: Running) -> None:
    words = "adapter: expected one of arm, kitchen, or none for the base, got 'kitchn'"
    with Client(server.native, timeout=START_S) as client:
        with pytest.raises(ServerError, match=words) as refused:
            client.infer(of("kitchn", 1))
        assert refused.value.code == "bad_observation"
        with pytest.raises(ServerError, match="adapter: expected one of arm"):
            client.infer(of("x" * 10_000, 1))
    frames = {"images": {"camera1": picture(), "camera2": picture()}, "state": [0.0] * 6, "prompt": "go"}
    error = post(f"{server.http}/v1/actions", frames | {"adapter": "kitchn"})
    assert (error["field"], error["code"]) == ("adapter", "bad_observation")
    assert words in error["message"]
    error = post(f"{server.http}/v1/actions", frames | {"adapter": 3})
    assert "adapter: expected text" in error["message"]


def test_what_a_server_says_of_its_adapters(server: Running) -> None:
    with Client(server.native, timeout=START_S) as client:
        client.infer(of("arm", 0))
        about, health = client.metadata()["server"], client.health()
    assert {name: each["policy"] for name, each in about["adapters"].items()} == {
        "arm": "arm",
        "kitchen": "kitchen",
    }
    scales = [tuple(each["action"]["scale"]) for each in about["adapters"].values()]
    assert scales[0] != scales[1]  # each has limits of its own statistics
    assert "among the engines that compute adapters (arm, kitchen)" in about["engine_reason"]
    assert health["adapters"] == ["arm", "kitchen"]
    with urllib.request.urlopen(f"{server.http}/v1/metadata") as reply:
        assert json.load(reply)["health"]["adapters"] == ["arm", "kitchen"]
    until(lambda: any(entry.get("adapter") == "arm" for entry in server.entries()))
    with Client(server.native, timeout=START_S) as client:
        client.infer(of("", 0))
    until(lambda: "adapter" not in server.entries()[-1])
    with urllib.request.urlopen(f"{server.http}/metrics") as reply:
        assert 'sinew_adapter_requests_total{adapter="arm"}' in reply.read().decode()
    assert "adapter  kitchen" in "".join(server.process.process.stdout.readline() for _ in range(9))


# ----------------------------------------------------------------------------- records


def test_records_are_replayed_with_their_adapters(
    server: Running, wanted: dict[tuple[str, int], np.ndarray]
) -> None:
    records = server.folder / "records"
    before = len(list(records.glob("*.npz"))) if records.exists() else 0
    with Client(server.native, timeout=START_S) as client:
        for name in NAMES:
            client.infer({**of(name, 2), "session": "one"})
    until(lambda: len(list(records.glob("*.npz"))) >= before + 3)
    newest = list(read_records(records))[-3:]
    assert [each.observation.adapter for each in newest] == list(NAMES)
    kept = server.folder / "kept"
    kept.mkdir()
    for each in newest:
        (kept / each.path.name).write_bytes(each.path.read_bytes())
    ran = run([sys.executable, "-m", "sinew", "recording", "replay", kept, server.native, "--json"])
    assert ran.returncode == 0, ran.stdout + ran.stderr
    result = json.loads(ran.stdout.splitlines()[-1])
    assert (result["records"], result["equal"] + result["within"], result["error"]) == (3, 3, 0)

    replay = Replay(kept, latency=False)
    assert replay.describe()["replay"]["adapters"] == ["arm", "kitchen"]
    for name in ("kitchen", "", "arm", "kitchen"):
        chunk = replay.infer(Observation(**of(name, 2), session="one"))
        assert chunk.adapter == name
        assert close(chunk.actions, wanted[name, 2])
    with pytest.raises(ObservationError, match="adapter: expected one of arm, kitchen, or none"):
        replay.infer(Observation(**of("belly", 2)))


# ----------------------------------------------------------------------------- where there is no place for it


def test_a_server_that_does_not_know_adapters_is_noticed() -> None:
    """Protobuf passes over fields that it does not know: an older server would answer with the base."""
    reply = schema.PredictResponse(horizon=1, dim=1, actions=[0.0])
    with pytest.raises(
        UnsafeChunk, match="adapter: expected an answer from 'arm', got an answer from the base"
    ):
        protocol.accepted(reply, of("arm", 1), 0.0, None, None)
    reply.adapter = "kitchen"
    with pytest.raises(ClientError, match="expected an answer from 'the base', got an answer from 'kitchen'"):
        protocol.accepted(reply, GOOD, 0.0, None, None)
    assert protocol.accepted(reply, of("kitchen", 1), 0.0, None, None).adapter == "kitchen"


def test_other_wires_refuse_the_field(policy: Policy) -> None:
    act = http.read_act(
        json.dumps({"full_image": 1, "state": [0], "instruction": "go", "adapter": "arm"}).encode()
    )
    with pytest.raises(SinewError, match="adapter"):
        http.act_observation(act, policy.spec)
    assert "adapter" not in groot.OPTIONS
    message = {"image": [], "image_mask": [], "state": [], "prompt": "go", "adapter": "arm"}
    with pytest.raises(SinewError, match="adapter"):
        evo1.observation(evo1.read(json.dumps(message).encode()), policy.spec)


def test_a_stream_refuses_the_field(server: Running) -> None:
    import zmq

    request = schema.PredictRequest(
        kind=4, rate=10.0, time=1.0, raw_state=[0.0] * 6, prompt="go", adapter="arm"
    )
    frames = [("camera1", FRAME), ("camera2", FRAME)]
    payload = b"".join(protocol.with_frames(request, frames))
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVTIMEO, int(1e3 * START_S))
        socket.connect(server.native)
        socket.send_multipart([b"", payload])
        reply = schema.PredictResponse.FromString(socket.recv_multipart()[-1])
    assert "adapter: expected none in a stream" in reply.error


def test_flags(adapters: Make, tmp_path: Path) -> None:
    found = adapters(CASE)

    def refusal(*words: object) -> str:
        command = [sys.executable, "-m", "sinew", "serve", *words]
        ran = run(command)
        assert ran.returncode
        return str(ran.stderr)

    arm = found.files["arm"]
    assert "--adapter arm: expected NAME=FILE" in refusal(found.base, "--adapter", "arm")
    twice = ("--adapter", f"a={arm}", "--adapter", f"a={arm}")
    assert "--adapter a=" in refusal(found.base, *twice)
    assert "engine onnx cannot compute adapters" in refusal(found.base, *twice[:2], "--engine", "onnx")
    assert "an adapter of 'checkpoint' and has no base weights" in refusal(arm)
    other = adapters("pi0-2cam").files["arm"]
    assert "this adapter is for the architecture pi0" in refusal(found.base, "--adapter", f"a={other}")


# ----------------------------------------------------------------------------- safety


def test_limits_are_those_of_the_adapters_statistics(policy: Policy) -> None:
    """What is far outside of the base's data may be usual in an adapter's, and the other way round."""
    deployment = deploy(policy, ServingLimits())
    try:
        base, arm = deployment.safety, deployment.adapters["arm"]
        assert base is not arm
        assert base is not None
        assert arm is not None
        assert base.limits() != arm.limits()
        wide = replace(policy.dummy_observation(), state=np.full(6, 1e6, np.float32))
        for name in NAMES:
            with pytest.raises(ObservationError, match="state"):
                (deployment.adapters.get(name) or base).check(wide)
    finally:
        deployment.scheduler.stop()
