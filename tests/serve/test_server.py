"""A real server process over real sockets: answers, refusals, overload, disappearing peers, shutdown."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import zmq
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from sinew_client import Client, ClientError, RequestTimeout, ServerError, protocol, schema

from sinew.core import ActionChunk, BusyError, CancelledError, Observation, SinewError
from sinew.policy import load
from sinew.serve.request import ShuttingDownError
from sinew.serve.scheduler import Scheduler
from sinew.serve.served import ServedPolicy
from tests import processes
from tests.golden import Golden, assert_parity
from tests.serve.puppet import enqueue

CASE = "smolvla-2cam"
START_S = 180.0  # a loaded machine imports torch slowly
FRAME = np.random.default_rng(0).integers(0, 256, (48, 64, 3), dtype=np.uint8)
GOOD = {"images": {"camera1": FRAME, "camera2": FRAME}, "state": np.zeros(6), "prompt": "go", "seed": 1}
SLOW = {**GOOD, "solver_steps": 100}  # a few hundred milliseconds


class ServerProcess:
    """``sinew serve`` in a process of its own, ready when this returns."""

    def __init__(
        self,
        directory: Path,
        *arguments: object,
        command: tuple[str, ...] = ("-m", "sinew", "serve"),
        ignored: tuple[signal.Signals, ...] = (),
    ):
        self.log = directory / f"server-{time.monotonic_ns()}.log"
        with self.log.open("w") as log:
            self.process = processes.Process(
                [sys.executable, *command, *map(str, arguments)],
                stdout=subprocess.PIPE,
                stderr=log,
                ignored=ignored,
            )
        line = self.line = self.process.stdout.readline()
        assert line.startswith("ready on "), f"{line!r} {self.log.read_text()}"
        self.address = line.split()[-1]

    def stop(self, number: int = signal.SIGTERM, timeout: float = START_S) -> int:
        self.process.send_signal(number)
        return self.process.wait(timeout)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.process.stdout.close()


@contextlib.contextmanager
def serving(directory: Path, *arguments: object, **options) -> Iterator[ServerProcess]:
    server = ServerProcess(directory, *arguments, **options)
    try:
        yield server
    finally:
        server.close()


@pytest.fixture(scope="module")
def bundle(smolvla_bundle) -> Path:
    return smolvla_bundle(CASE)


@pytest.fixture(scope="module")
def server(bundle, tmp_path_factory) -> Iterator[ServerProcess]:
    directory = tmp_path_factory.mktemp("server")
    with serving(directory, bundle, "--wire", "native:0", "--threads", 1, "--queue", 4) as running:
        yield running
        assert running.stop() == 0
        assert "Traceback" not in running.log.read_text()


@pytest.fixture
def client(server) -> Iterator[Client]:
    with Client(server.address, timeout=START_S) as connected:
        yield connected


@contextlib.contextmanager
def raw_socket(address: str, kind: int = zmq.REQ) -> Iterator[zmq.Socket]:
    with zmq.Context() as context, context.socket(kind) as raw:
        raw.setsockopt(zmq.LINGER, 0)
        raw.setsockopt(zmq.RCVTIMEO, int(START_S * 1e3))
        raw.connect(address)
        yield raw


# ----------------------------------------------------------------------------- answers


def test_golden_actions_over_the_socket(client, golden):
    g = Golden(golden / CASE)
    chunk = client.infer({**g.observation(), "session": "arm-1", "time": 3.5})
    assert_parity(chunk.actions, g.numpy("actions")[0])
    assert (chunk.seed, chunk.session, chunk.time) == (None, "arm-1", 3.5)
    assert len(chunk.timing.step_ms) == 10
    stages = (
        chunk.timing.preprocess_ms + chunk.timing.vision_ms + chunk.timing.prefix_ms + chunk.timing.head_ms
    )
    assert 0 < stages <= chunk.timing.total_ms <= chunk.timing.server_ms <= chunk.round_trip_ms


def vla_cpp_messages():
    """vla.cpp's two messages, compiled from a description of their own that knows nothing of Sinew's fields."""
    description = {
        "Image": "encoding=1:int32 height=2:uint32 width=3:uint32 data=4:bytes",
        "PredictRequest": "images=1:*Image lang_tokens=2:*int32 state=3:*float noise=4:*float request_id=5:uint64",
        "PredictResponse": (
            "request_id=1:uint64 action_chunk=2:*float chunk_size=3:uint32 action_dim=4:uint32"
            " latency_ms_total=5:float latency_ms_inference=6:float error=7:string"
        ),
    }
    types = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="vla.proto", package="vla", syntax="proto3")
    for name, fields in description.items():
        message = file.message_type.add(name=name)
        for text in fields.split():
            field_name, number, label, kind = re.fullmatch(r"(\w+)=(\d+):(\*?)(\w+)", text).groups()
            field = message.field.add(name=field_name, number=int(number), label=3 if label else 1)
            if kind in description:
                field.type, field.type_name = types.TYPE_MESSAGE, f".vla.{kind}"
            else:
                field.type = getattr(types, f"TYPE_{kind.upper()}")
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return [
        message_factory.GetMessageClass(pool.FindMessageTypeByName(f"vla.{name}")) for name in description
    ]


def test_vla_cpp_client_unmodified(server, golden):
    """The messages of vla.cpp's client for SmolVLA: frames already letterboxed, token ids, padded raw state."""
    g = Golden(golden / CASE)
    image_type, request_type, reply_type = vla_cpp_messages()
    request = request_type(request_id=41, state=np.pad(g.numpy("state_raw"), (0, 26)))
    for camera in g.cameras:
        pixels = (g.numpy(f"pixel_values.{camera}")[0].transpose(1, 2, 0) + 1) / 2  # the client's [0, 1]
        height, width, _ = pixels.shape
        request.images.append(
            image_type(encoding=2, height=height, width=width, data=np.ascontiguousarray(pixels).tobytes())
        )
    request.lang_tokens.extend(g.numpy("lang_tokens")[0].tolist())
    request.noise.extend(g.numpy("noise").ravel().tolist())
    with raw_socket(server.address) as req:
        req.send(request.SerializeToString())
        reply = reply_type.FromString(req.recv())
    assert reply.error == ""
    assert (reply.request_id, reply.chunk_size, reply.action_dim) == (41, 50, 32)
    rows = np.array(reply.action_chunk, np.float32).reshape(50, 32)
    assert_parity(rows[:, :6], g.numpy("actions")[0])
    assert not rows[:, 6:].any()
    assert 0 < reply.latency_ms_inference < reply.latency_ms_total


def test_seed_decides_and_is_reported(client):
    first, again, other = (client.infer({**GOOD, "seed": seed}) for seed in (7, 7, 8))
    np.testing.assert_array_equal(first.actions, again.actions)
    assert np.abs(first.actions - other.actions).max() > 1e-3
    drawn = client.infer({**GOOD, "seed": None})
    np.testing.assert_array_equal(client.infer({**GOOD, "seed": drawn.seed}).actions, drawn.actions)
    assert len(client.infer({**GOOD, "solver_steps": 3}).timing.step_ms) == 3


def test_metadata_health_reset(client):
    policy = client.metadata()["policy"]
    assert [camera["name"] for camera in policy["cameras"]] == ["camera1", "camera2"]
    assert (policy["state"]["dim"], policy["chunk_size"]) == (6, 50)
    before = client.health()["served"]
    client.infer(GOOD)
    health = client.health()
    assert health["status"] == "ok"
    assert health["served"] > before
    client.reset("arm-1")


def test_health_is_answered_during_an_inference(server, client):
    with raw_socket(server.address) as busy:
        busy.send(protocol.encode_infer(SLOW, 1))
        start = time.monotonic()
        while not client.health()["running"]:
            assert time.monotonic() - start < START_S
        busy.recv()


def test_compressed_frames(server):
    with Client(server.address, timeout=START_S, jpeg_quality=90) as jpeg:
        assert jpeg.infer(GOOD).actions.shape == (50, 6)


@pytest.mark.parametrize("delimiter", [True, False])
def test_dealer_with_and_without_delimiter(server, delimiter):
    with raw_socket(server.address, zmq.DEALER) as dealer:
        for request_id in (5, 6):
            dealer.send_multipart([b""] * delimiter + [protocol.encode_infer(GOOD, request_id)])
        for request_id in (5, 6):
            *envelope, reply = dealer.recv_multipart()
            assert envelope == [b""] * delimiter
            assert protocol.decode_reply(reply, request_id).horizon == 50


# ----------------------------------------------------------------------------- refusals


def with_pixels(**changes) -> bytes:
    """A request whose first frame is described otherwise than ``sinew_client`` would."""
    request = schema.PredictRequest.FromString(protocol.encode_infer(GOOD, 9))
    for name, value in changes.items():
        setattr(request.images[0], name, value)
    return request.SerializeToString()


@pytest.mark.parametrize(
    ("payload", "text"),
    [
        (with_pixels(height=47), r"images.camera1: expected 9024 bytes \(47 x 64 x 3 uint8\), got 9216"),
        (with_pixels(encoding=2), r"images.camera1: expected 36864 bytes .* got 9216"),
        (with_pixels(encoding=0, data=b"\xff\xd8\xff not a photograph"), "images.camera1: expected a JPEG"),
        (
            {**GOOD, "images": {**GOOD["images"], "camera2": FRAME + np.float32("nan")}},
            "images.camera2: .* nan",
        ),
        ({**GOOD, "images": {"camera3": FRAME}}, "images.camera3: .*camera1.*unknown"),
        ({**GOOD, "images": {}}, "images: expected at least one"),
        ({**GOOD, "state": [0, 0, np.nan, 0, 0, 0]}, "state: expected finite numbers, got nan at index 2"),
        ({**GOOD, "state": np.zeros(5)}, r"state: expected shape \[6\], got shape \[5\]"),
        ({**GOOD, "prompt": ""}, "prompt: expected an instruction"),
        ({**GOOD, "prompt": "word " * 500}, "prompt: expected .* tokens, got"),
        ({**GOOD, "prompt": "", "tokens": [-1]}, "tokens: expected token ids"),
        ({**GOOD, "noise": np.zeros((50, 31))}, "noise: expected 0 or 1600 values"),
        ({**GOOD, "noise": np.full((50, 32), np.inf)}, "noise: expected finite"),
        ({**GOOD, "solver_steps": 10**9}, "solver_steps: expected"),
    ],
)
def test_bad_input_is_named_and_others_are_served(server, client, payload, text):
    request = payload if isinstance(payload, bytes) else protocol.encode_infer(payload, 9)
    with raw_socket(server.address) as bad:
        bad.send(request)
        reply = bad.recv()
    assert b"Traceback" not in reply
    with pytest.raises(ServerError, match=text) as caught:
        protocol.decode_reply(reply, 9)
    assert caught.value.code == "bad_observation"
    assert client.infer(GOOD).actions.shape == (50, 6)


@pytest.mark.parametrize(
    ("frames", "text"),
    [
        ([b"GET / HTTP/1.1\r\n\r\n"], "parse failed"),
        ([b"\xff" * 1000], "parse failed"),
        ([os.urandom(1 << 20)], "."),
        ([b""], "images: expected at least one"),
        ([b"\x08\x01", b"\x08\x01"], "request: expected a single frame, got 2 frames"),
        ([b"x"] * 300, "request: expected a single frame, got 300 frames"),
        ([bytes((64 << 20) + 1)], "request: expected at most 67108864 bytes, got 67108865"),
        ([b"\x0a\x00" * 100], "images: expected at most 16, got 100"),
        ([b"\x0a\x00" * 1000], "request: expected at most 512 fields"),
    ],
)
def test_garbage_is_answered_with_an_error(server, client, frames, text):
    for kind in (zmq.REQ, zmq.DEALER):
        with raw_socket(server.address, kind) as bad:
            bad.send_multipart(frames)
            with pytest.raises(ServerError, match=text):
                protocol.decode_reply(bad.recv(), 0)
    assert client.infer(GOOD).actions.shape == (50, 6)


def test_bytes_that_are_not_zeromq(server, client):
    host, port = server.address.removeprefix("tcp://").split(":")
    for garbage in (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", os.urandom(4096)):
        with socket.create_connection((host, int(port))) as stranger:
            stranger.sendall(garbage)
    assert client.infer(GOOD).actions.shape == (50, 6)


def test_a_message_beyond_the_hard_cap_closes_that_connection_only(server, client):
    host, port = server.address.removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port)), timeout=START_S) as peer:
        # A ZMTP 3.0 handshake by hand: greeting, READY of a REQ socket, then the head of a 1 GiB frame.
        peer.sendall(b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32))
        ready = b"\x05READY\x0bSocket-Type" + (3).to_bytes(4, "big") + b"REQ"
        peer.sendall(bytes([4, len(ready)]) + ready + b"\x01\x00" + b"\x02" + (1 << 30).to_bytes(8, "big"))
        with contextlib.suppress(ConnectionResetError):
            while peer.recv(4096):  # until the server hangs up
                pass
    assert client.infer(GOOD).actions.shape == (50, 6)


# ----------------------------------------------------------------------------- overload and disappearing peers


def test_a_full_queue_refuses_and_recovers(server, client):
    with contextlib.ExitStack() as stack:
        dealers = [stack.enter_context(raw_socket(server.address, zmq.DEALER)) for _ in range(4)]
        for dealer in dealers:
            for request_id in range(1, 6):
                dealer.send(protocol.encode_infer(SLOW, request_id))
        replies = [dealer.recv() for dealer in dealers for _ in range(5)]
        codes = [schema.PredictResponse.FromString(reply).error_code for reply in replies]
    assert set(codes) == {"", "busy"}
    assert codes.count("") >= 4  # the queue's four, the running one, and what ended meanwhile
    assert client.infer(GOOD).actions.shape == (50, 6)


def test_queue_time_is_reported(server):
    with raw_socket(server.address, zmq.DEALER) as dealer:
        for request_id in (1, 2):
            dealer.send(protocol.encode_infer(SLOW, request_id))
        first, second = (protocol.decode_chunk(protocol.decode_reply(dealer.recv(), n)) for n in (1, 2))
    assert second.timing.queue_ms > first.timing.queue_ms
    assert second.timing.server_ms > second.timing.total_ms + second.timing.queue_ms


def test_clients_that_disappear(server, client):
    for _ in range(4):
        with raw_socket(server.address, zmq.DEALER) as leaver:
            leaver.setsockopt(zmq.LINGER, 1000)  # the request must leave, the socket need not stay
            leaver.send(protocol.encode_infer(SLOW, 1))
    end = time.monotonic() + START_S
    while True:
        try:
            assert client.infer(GOOD).actions.shape == (50, 6)
            return
        except ServerError as error:  # until their places are free again
            assert error.code == "busy"  # noqa: PT017
            assert time.monotonic() < end
            time.sleep(0.02)


def test_many_clients_and_one_shared_between_threads(server, client):
    expected = client.infer(GOOD).actions
    failures = []

    def ask(mine: Client | None) -> None:
        try:
            with contextlib.ExitStack() as stack:
                own = mine or stack.enter_context(Client(server.address, timeout=START_S))
                for _ in range(3):
                    try:
                        np.testing.assert_array_equal(own.infer(GOOD).actions, expected)
                    except ServerError as error:
                        assert error.code == "busy"  # noqa: PT017
        except (AssertionError, ClientError) as error:
            failures.append(error)

    threads = [threading.Thread(target=ask, args=(client if n % 2 else None,)) for n in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_kill_and_restart_under_a_running_client(bundle, tmp_path):
    port = processes.free_port()
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(serving(tmp_path, bundle, "--wire", f"native:{port}", "--threads", 1))
        client = stack.enter_context(Client(first.address, timeout=START_S))
        expected = client.infer(GOOD).actions
        assert first.stop(signal.SIGKILL) == -signal.SIGKILL
        with pytest.raises(RequestTimeout, match="no answer from"):
            client.infer(GOOD, timeout=0.3)
        with pytest.raises(RequestTimeout):
            client.health(timeout=0.1)
        stack.enter_context(serving(tmp_path, bundle, "--wire", f"native:{port}", "--threads", 1))
        np.testing.assert_array_equal(client.infer(GOOD).actions, expected)


# ----------------------------------------------------------------------------- starting and stopping


def test_busy_port_is_told_before_the_model_loads(server, bundle):
    port = server.address.rpartition(":")[2]
    command = [sys.executable, "-X", "importtime", "-m", "sinew", "serve", bundle, "--wire", f"native:{port}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=START_S)
    assert done.returncode == 1
    taken = f"error: cannot listen on 127.0.0.1:{port}: Address already in use"
    message = f"{taken}; to use other ports, pass --wire native:{int(port) + 1}"
    imported = [line for line in done.stderr.splitlines() if line.startswith("import time:")]
    told = [line for line in done.stderr.splitlines() if line not in imported]
    assert told == ["from the environment: --prepare", message]  # conftest.py
    assert not any(line.rpartition("|")[2].strip() == "torch" for line in imported)


def test_missing_bundle_and_foreign_address(bundle, tmp_path):
    for arguments, text in (
        ([tmp_path / "none.gguf", "--wire", "native:0"], "no such file"),
        (
            [bundle, "--host", "192.0.2.1", "--wire", "native"],
            "cannot listen on 192.0.2.1:5555",
        ),
    ):
        command = [sys.executable, "-m", "sinew", "serve", *arguments]
        done = processes.run(command, timeout=START_S)
        assert done.returncode == 1
        assert text in done.stderr
        assert "Traceback" not in done.stderr


def test_the_printed_program_runs(bundle, tmp_path):
    """With the key of its environment, where the server wants one."""
    (tmp_path / "key").write_text("secret")
    wants = ("--api-key-file", tmp_path / "key")
    with serving(tmp_path, bundle, "--wire", "native:0", "--threads", 1, *wants) as server:
        while not server.process.stdout.readline().endswith("example:\n"):
            pass
        assert server.process.stdout.readline() == "\n"
        program = textwrap.dedent("".join(iter(server.process.stdout.readline, "\n")))
        has = {**os.environ, "SINEW_API_KEY": "secret"}
        done = processes.run([sys.executable, "-c", program], timeout=START_S, env=has)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("[[")
        with (
            Client(server.address, api_key="") as without,
            pytest.raises(ServerError, match="requires an API key"),
        ):
            without.metadata()
        assert server.stop(signal.SIGINT) == 0


def test_bench_of_a_server(server, tmp_path):
    out = tmp_path / "out.json"
    command = [
        "-m",
        "sinew",
        "bench",
        server.address,
        "--runs",
        "3",
        "--image-size",
        "48x64",
        "--json",
        out,
    ]
    done = processes.run([sys.executable, *command], timeout=START_S)
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    assert set(result["latency_ms"]["overhead"]) == {"mean", "p50", "p90", "p95", "p99", "max"}
    assert result["frames"] == {"camera1": [48, 64, 3], "camera2": [48, 64, 3]}
    assert "round trip" in done.stdout


def test_bench_without_a_server():
    command = [
        sys.executable,
        "-m",
        "sinew",
        "bench",
        f"tcp://127.0.0.1:{processes.free_port()}",
        "--timeout",
        "0.2",
    ]
    done = processes.run(command, timeout=START_S)
    assert done.returncode == 1
    assert done.stderr.startswith("error: no answer from tcp://127.0.0.1:")
    assert done.stderr.endswith(" within 0.2 s: no connection (Connection refused)\n")


def test_stops_during_an_inference(bundle, tmp_path):
    with (
        serving(tmp_path, bundle, "--wire", "native:0", "--threads", 1) as server,
        raw_socket(server.address, zmq.DEALER) as dealer,
        Client(server.address, timeout=START_S) as client,
    ):
        dealer.send(protocol.encode_infer(SLOW, 1))
        while not client.health()["running"]:
            pass
        for request_id in (2, 3):  # as many as may wait
            dealer.send(protocol.encode_infer(SLOW, request_id))
        while (health := client.health())["running"] and health["waiting"] < 2:
            pass
        assert server.stop() == 0
        codes = [schema.PredictResponse.FromString(dealer.recv()).error_code for _ in range(3)]
        assert codes.count("shutting_down") >= 2  # one may have ended just before
        assert set(codes) <= {"shutting_down", ""}


STUCK = """
import sys, threading, time
import sinew.policy
from sinew.cli import main

class Stuck:
    '''A policy of which one stage never ends.'''
    def __init__(self, policy):
        self.policy = policy
    def __getattr__(self, name):
        return getattr(self.policy, name)
    def run(self, prepared, cancel=None, between=None):
        print("running", flush=True)
        time.sleep(1000)

load = sinew.policy.load
sinew.policy.load = lambda *a, **k: Stuck(load(*a, **k))
sys.exit(main(["serve", *sys.argv[1:]]))
"""


@pytest.mark.parametrize("signals", [1, 2])
def test_stops_during_a_stage_that_does_not_end(bundle, tmp_path, signals):
    with (
        serving(tmp_path, bundle, "--wire", "native:0", command=("-c", STUCK)) as server,
        raw_socket(server.address) as req,
    ):
        req.send(protocol.encode_infer(GOOD, 1))
        while server.process.stdout.readline() != "running\n":
            pass
        server.process.send_signal(signal.SIGTERM)
        if signals == 2:
            while "stopping" not in server.log.read_text():  # two signals at once would be one
                time.sleep(0.01)
            assert server.stop() == -signal.SIGTERM
        else:
            assert server.process.wait(START_S) == 0
            with pytest.raises(ServerError, match="shutting down"):
                protocol.decode_reply(req.recv(), 1)


def test_stops_while_loading(bundle, tmp_path):
    """A signal before the server is ready ends it just as cleanly."""
    command = [sys.executable, "-m", "sinew", "serve", bundle, "--wire", "native:0"]
    with processes.Process(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            while "listening on" not in (line := process.stderr.readline()):
                assert line, "the server ended early"
            process.send_signal(signal.SIGTERM)
            _, errors = process.communicate(timeout=START_S)
        finally:
            process.kill()
        assert process.returncode == 0
        assert "Traceback" not in errors


# ----------------------------------------------------------------------------- the client alone


def test_client_before_server_and_retries(bundle, tmp_path):
    port = processes.free_port()
    with Client(f"tcp://127.0.0.1:{port}", timeout=0.2, retries=1000) as client:
        answers = []
        waiting = threading.Thread(target=lambda: answers.append(client.metadata(timeout=0.5)))
        waiting.start()
        with serving(tmp_path, bundle, "--wire", f"native:{port}", "--threads", 1):
            waiting.join(START_S)
            assert answers
            assert answers[0]["policy"]["architecture"] == "smolvla"


def test_client_misuse():
    with pytest.raises(
        ClientError, match="expected tcp://HOST:PORT with the port of the native protocol .* got 'nonsense'"
    ):
        Client("nonsense")
    client = Client("tcp://127.0.0.1:1")
    client.close()
    client.close()
    with pytest.raises(ClientError, match="closed"):
        client.health()


# ----------------------------------------------------------------------------- the scheduler alone


class Scripted(ServedPolicy):
    """A policy that does what its observation's prompt says: no real one fails or waits on command."""

    def __init__(self):
        self.started = threading.Event()

    def warm_up(self) -> None: ...

    def prepare(self, observation: Observation) -> Observation:
        return observation

    def run(self, observation: Observation, *, cancel: threading.Event | None = None) -> ActionChunk:
        self.started.set()
        if observation.prompt == "fail":
            raise RuntimeError("secret detail")
        if observation.prompt == "wait":
            assert cancel.wait(START_S)
            raise CancelledError("between two stages")
        return ActionChunk(np.zeros((1, 1), np.float32))


def run_jobs(scheduler: Scheduler, *prompts: str) -> list:
    """Submit; returns the outcomes in the order of the prompts, once all are there."""
    outcomes, done = {}, threading.Semaphore(0)

    def on_done(index: int, outcome) -> None:
        outcomes[index] = outcome
        done.release()

    for index, prompt in enumerate(prompts):
        enqueue(
            scheduler,
            lambda _check, prompt=prompt: Observation(images={}, state=np.zeros(1), prompt=prompt),
            lambda outcome, index=index: on_done(index, outcome),
        )
    for _ in prompts:
        assert done.acquire(timeout=START_S)
    return [outcomes[index] for index in range(len(prompts))]


@pytest.fixture
def scheduler() -> Iterator[Scheduler]:
    made = Scheduler(Scripted(), queue_size=3, per_client=8)
    made.start()
    yield made
    made.stop()
    assert made.join(START_S)


def test_an_unexpected_failure_is_told_in_a_sentence(scheduler, caplog):
    failed, fine = run_jobs(scheduler, "fail", "go")
    assert isinstance(failed, SinewError)
    assert failed.code == "internal"
    assert "secret" not in str(failed)
    assert "secret detail" in caplog.text
    assert isinstance(fine, ActionChunk)
    stats = scheduler.stats()
    assert (stats["waiting"], stats["running"], stats["served"], stats["failed"]) == (0, False, 1, 1)


def test_cancelled_jobs(scheduler):
    observation = Observation(images={}, state=np.zeros(1), prompt="wait")
    outcomes, done = [], threading.Semaphore(0)

    def on_done(outcome) -> None:
        outcomes.append(outcome)
        done.release()

    running, waiting = (enqueue(scheduler, lambda _check: observation, on_done) for _ in range(2))
    assert scheduler.policy.started.wait(START_S)
    scheduler.cancel(waiting)
    scheduler.cancel(running)
    for _ in range(2):
        assert done.acquire(timeout=START_S)
    assert [type(outcome) for outcome in outcomes] == [CancelledError, CancelledError]


def test_stop_answers_everyone_once():
    scheduler = Scheduler(Scripted(), queue_size=3, per_client=8)
    scheduler.start()
    outcomes = []
    observation = Observation(images={}, state=np.zeros(1), prompt="wait")
    enqueue(scheduler, lambda _check: observation, outcomes.append)
    assert scheduler.policy.started.wait(START_S)
    for _ in range(3):
        enqueue(scheduler, lambda _check: observation, outcomes.append)
    with pytest.raises(BusyError, match="the queue is full: 3 requests wait"):
        enqueue(scheduler, lambda _check: observation, outcomes.append)
    scheduler.stop()
    scheduler.stop()
    assert scheduler.join(START_S)
    assert [type(outcome) for outcome in outcomes] == [ShuttingDownError] * 4
    with pytest.raises(ShuttingDownError):
        enqueue(scheduler, lambda _check: observation, outcomes.append)


def test_a_warm_up_that_fails_is_raised_by_start(bundle):
    policy = load(bundle)
    policy.warm_up = lambda: (_ for _ in ()).throw(SinewError("out of memory"))
    scheduler = Scheduler(policy)
    with pytest.raises(SinewError, match="out of memory"):
        scheduler.start()
    scheduler.stop()
    assert scheduler.join(START_S)
