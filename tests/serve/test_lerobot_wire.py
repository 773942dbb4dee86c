"""LeRobot's gRPC wire: a real server process, its protocol by hand, and LeRobot's own client where it is installed."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import re
import shlex
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import psutil
import pytest

import sinew
from sinew.core import CameraSpec, KeyMap, ObservationError, PolicySpec, SinewError, VectorSpec
from sinew.core.extras import install
from sinew.core.rate_limited_log import LogOnce
from sinew.records.recorder import read_records
from sinew.serve.policies import Deployment
from sinew.serve.scheduler import Scheduler
from sinew.serve.service import Service
from sinew.serve.transport.listen import AddressError, Listen
from sinew.serve.wires.lerobot import features as lerobot_features
from sinew.serve.wires.lerobot import sessions as lerobot_sessions
from sinew.serve.wires.lerobot import wire as lerobot_wire
from sinew.serve.wires.lerobot.features import agree, observation
from sinew.serve.wires.lerobot.messages import SERVICE, messages
from sinew.serve.wires.lerobot.types import RemotePolicyConfig as Config
from sinew.serve.wires.lerobot.types import TimedObservation as Timed
from sinew.serve.wires.lerobot.wire import LeRobotWire
from tests import processes
from tests.serve.lerobot_releases import CLIENTS, each_release, lerobot_folder, nursery
from tests.serve.puppet import until
from tests.serve.test_safe_pickle import (
    ATTACKS,
    HELPERS,
    RemotePolicyConfig,
    TimedObservation,
    as_lerobot,
    modules,
    unframed,
)
from tests.serve.test_server import CASE, START_S, serving

PIECE = 2 << 20  # what the stock client sends at once
JOINTS = tuple(f"joint{index}.pos" for index in range(6))
BEGIN, MIDDLE, END = 1, 2, 3
CODE = grpc.StatusCode


def features(*cameras: str, joints: tuple[str, ...] = JOINTS) -> dict:
    """As ``hw_to_dataset_features`` of LeRobot makes them."""
    frames = {
        f"observation.images.{camera}": {
            "dtype": "image",
            "shape": (48, 64, 3),
            "names": ["height", "width", "channels"],
        }
        for camera in cameras
    }
    state = {"dtype": "float32", "shape": (len(joints),), "names": list(joints)}
    return {"observation.state": state, **frames}


class Robot:
    """The protocol of upstream's RobotClient on a connection of its own, step by step."""

    def __init__(self, address: str, metadata: tuple = (), **credentials: Any):
        self.target = address.partition("//")[2]
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", 4 << 20)]
        if credentials:
            self.channel = grpc.secure_channel(self.target, **credentials, options=options)
        else:
            self.channel = grpc.insecure_channel(self.target, options)
        self.metadata = metadata
        self.timestep = 0

    def __enter__(self) -> Robot:
        return self

    def __exit__(self, *_: object) -> None:
        self.channel.close()

    def call(self, method: str, request: bytes = b"", timeout: float = START_S) -> bytes:
        stub = self.channel.unary_unary(f"/{SERVICE}/{method}")
        return stub(request, timeout=timeout, metadata=self.metadata, wait_for_ready=True)

    def hello(self, cameras: tuple = ("camera1", "camera2"), **changes: Any) -> Robot:
        wanted = {
            "policy_type": "smolvla",
            "pretrained_name_or_path": CASE,
            "lerobot_features": features(*cameras),
            "actions_per_chunk": 50,
        }
        self.call("Ready")
        self.setup(as_lerobot(RemotePolicyConfig(**{**wanted, **changes})))
        return self

    def setup(self, data: bytes) -> None:
        self.call("SendPolicyInstructions", messages()["PolicySetup"](data=data).SerializeToString())

    def send(self, data: bytes, piece: int = PIECE) -> None:
        pieces = [data[at : at + piece] for at in range(0, len(data), piece)]
        states = [BEGIN, *[MIDDLE] * (len(pieces) - 2), END] if len(pieces) > 1 else [END]
        self.stream(list(zip(states, pieces, strict=True)))

    def stream(self, pieces: list[tuple[int, bytes]], **options: Any) -> None:
        message = messages()["Observation"]
        stub = self.channel.stream_unary(f"/{SERVICE}/SendObservations")
        encoded = [message(transfer_state=state, data=data).SerializeToString() for state, data in pieces]
        stub(iter(encoded), timeout=START_S, metadata=self.metadata, **options)

    def observe(self, seed: int = 0, piece: int = PIECE, must_go: bool = False, **changes: Any) -> dict:
        raw = {**raw_observation(seed), **changes}
        moment = TimedObservation(1000.0 + self.timestep, self.timestep, raw, must_go)
        self.send(as_lerobot(moment), piece)
        return raw

    def actions(self) -> list:
        """The reply, by Python's pickle, as the stock client reads it."""
        data = messages()["Actions"].FromString(self.call("GetActions")).data
        with pytest.MonkeyPatch.context() as patch:
            for name, module in modules(HELPERS).items():
                patch.setitem(sys.modules, name, module)
            return pickle.loads(data) if data else []


def raw_observation(seed: int = 0, cameras: tuple = ("camera1", "camera2")) -> dict:
    rng = np.random.default_rng(seed)
    frames = {camera: rng.integers(0, 256, (48, 64, 3), dtype=np.uint8) for camera in cameras}
    return {
        **dict(zip(JOINTS, rng.uniform(-1, 1, 6).tolist(), strict=True)),
        **frames,
        "task": f"task {seed}",
    }


def rows(actions: list) -> np.ndarray:
    return np.stack([each.action.numpy() for each in actions])


@contextlib.contextmanager
def refused(code: grpc.StatusCode, text: str) -> Iterator[None]:
    with pytest.raises(grpc.RpcError) as caught:
        yield
    assert (caught.value.code(), re.search(text, caught.value.details()) is not None) == (code, True), (
        caught.value.details()
    )
    assert "Traceback" not in caught.value.details()


@pytest.fixture(scope="module")
def bundle(smolvla_bundle) -> Path:
    return smolvla_bundle(CASE)


@pytest.fixture(scope="module")
def server(bundle, tmp_path_factory) -> Iterator[Any]:
    directory = tmp_path_factory.mktemp("lerobot")
    arguments = ("--wire", "lerobot:0", "--threads", 1, "--record", directory / "records")
    with serving(directory, bundle, *arguments) as running:
        running.bundle, running.records = bundle, directory / "records"
        yield running
        assert running.stop() == 0
        assert "Traceback" not in running.log.read_text()


@pytest.fixture
def robot(server) -> Iterator[Robot]:
    with Robot(server.address) as connected:
        yield connected


@pytest.fixture(scope="module")
def policy(bundle) -> Any:
    return sinew.load(bundle)


def record_of(server: Any, raw: dict) -> Any:
    """The server's record of this observation; the recorder writes on a thread of its own."""
    state = np.array([raw[joint] for joint in JOINTS], np.float32)
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        with contextlib.suppress(SinewError):
            for record in read_records(server.records):
                if record.actions is not None and np.array_equal(record.observation.state, state):
                    return record
        time.sleep(0.05)
    raise AssertionError("no record of this observation")


# ------------------------------------------------------------------------- the protocol


def test_a_chunk_is_what_the_policy_infers(server, robot, policy):
    robot.hello(actions_per_chunk=20)
    robot.timestep = 7
    raw = robot.observe(seed=1)
    actions = robot.actions()
    assert [each.timestep for each in actions] == list(range(7, 27))
    assert [each.timestamp for each in actions] == [1007.0 + index * (1 / 30) for index in range(20)]
    record = record_of(server, raw)
    assert (record.wire, record.observation.prompt, record.observation.time) == ("lerobot", "task 1", 1007.0)
    for camera in ("camera1", "camera2"):
        np.testing.assert_array_equal(record.observation.images[camera], raw[camera])
    assert record.observation.images["camera1"].shape == (48, 64, 3)  # as it came, not resized
    expected = policy.infer(record.observation).actions
    np.testing.assert_array_equal(rows(actions), expected[:20])


@pytest.mark.parametrize("piece", [1 << 30, 12_000, 9_000, 100])
def test_observations_in_pieces(robot, piece):
    robot.hello()
    robot.observe(piece=piece)
    assert rows(robot.actions()).shape == (50, 6)


def test_begin_clears_what_came_before(robot):
    robot.hello()
    data = as_lerobot(TimedObservation(1.0, 0, raw_observation(), True))
    robot.stream([(BEGIN, b"rubbish"), (MIDDLE, b"more"), (BEGIN, data[:100]), (END, data[100:])])
    assert len(robot.actions()) == 50


def test_without_an_observation_the_answer_is_empty(robot):
    robot.hello()
    start = time.monotonic()
    assert robot.actions() == []
    assert time.monotonic() - start > 1.5


def test_the_newest_observation_wins_and_predicted_ones_are_dropped(server, robot):
    robot.hello()
    robot.observe(seed=2)
    newest = robot.observe(seed=3)
    first = robot.actions()
    np.testing.assert_array_equal(rows(first), record_of(server, newest).actions)
    robot.observe(seed=4)  # of a timestep that has its actions
    assert robot.actions() == []
    robot.observe(seed=4, must_go=True)
    assert len(robot.actions()) == 50
    robot.timestep = 9
    robot.observe(seed=4)
    assert robot.actions()[0].timestep == 9
    robot.call("Ready")  # flushes; the policy stays agreed
    robot.observe(seed=4)
    assert len(robot.actions()) == 50


def test_a_failed_inference_does_not_use_its_timestep_up(robot):
    """The stock client would wait for ever: it has said must_go, and says so again only after actions came."""
    robot.hello()
    robot.observe(**{JOINTS[0]: float("nan")}, must_go=True)
    with refused(CODE.INVALID_ARGUMENT, r"\[bad_observation\] state: expected finite numbers, got nan"):
        robot.actions()
    robot.observe()
    assert len(robot.actions()) == 50


def test_several_clients_do_not_meet(server, bundle):
    """Each has its own cameras' names, timesteps and chunk length, and gets the answers to its own observations."""
    failures: list[BaseException] = []

    def drive(index: int) -> None:
        names = ("camera1", "camera2") if index % 2 else ("left", "right")
        renames = {
            f"observation.images.{name}": f"observation.images.camera{n + 1}" for n, name in enumerate(names)
        }
        try:
            with Robot(server.address) as mine:
                mine.hello(names, rename_map=renames, actions_per_chunk=10 + index)
                for step in range(5):
                    mine.timestep = 1000 * index + step
                    raw = mine.observe(
                        100 * (index + 1) + step, **raw_observation(100 * (index + 1) + step, names)
                    )
                    actions = mine.actions()
                    assert [each.timestep for each in actions] == list(
                        range(mine.timestep, mine.timestep + 10 + index)
                    )
                    record = record_of(server, raw)
                    np.testing.assert_array_equal(rows(actions), record.actions[: 10 + index])
                    np.testing.assert_array_equal(record.observation.images["camera1"], raw[names[0]])
        except BaseException as error:  # noqa: BLE001 - told below
            failures.append(error)

    threads = [threading.Thread(target=drive, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_a_connection_that_breaks_is_taken_up_again(server):
    """gRPC reconnects below the client, which introduces itself once only."""
    with serving(server.records.parent, server.bundle, "--wire", "lerobot:0", "--threads", 1) as own:
        with Robot(own.address) as first:
            first.hello()
            first.observe()
            assert len(first.actions()) == 50
        with Robot(own.address) as again:  # another connection, no handshake
            again.observe()
            assert len(again.actions()) == 50
        with Robot(own.address) as other:
            other.hello(actions_per_chunk=5)
        with Robot(own.address) as again:  # what it means is the same; the newest wish for its length counts
            again.observe()
            assert len(again.actions()) == 5
        with Robot(own.address) as other:
            names = [f"observation.images.camera{number}" for number in (1, 2)]
            other.hello(rename_map=dict(zip(names, names[::-1], strict=True)))
        with (
            Robot(own.address) as stranger,
            refused(CODE.FAILED_PRECONDITION, "no_policy.*start the client again"),
        ):
            stranger.observe()
    with (
        serving(server.records.parent, server.bundle, "--wire", "lerobot:0", "--threads", 1) as own,
        Robot(own.address) as stranger,
    ):
        start = time.monotonic()
        with refused(CODE.FAILED_PRECONDITION, "SendPolicyInstructions"):
            stranger.actions()
        assert time.monotonic() - start > 0.4  # the stock client would ask again at once


def test_a_client_goes_on_after_a_restart(server, tmp_path, monkeypatch):
    """The stock client introduces itself once; after a restart of the server it was refused until its end."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    port = processes.free_port()
    arguments = (server.bundle, "--wire", f"lerobot:{port}", "--threads", 1)
    with serving(tmp_path, *arguments) as first, Robot(first.address) as robot:
        robot.hello()
        robot.observe()
        assert len(robot.actions()) == 50
        assert first.stop(signal.SIGKILL) == -signal.SIGKILL
        with serving(tmp_path, *arguments):
            end = time.monotonic() + START_S
            while True:
                try:
                    robot.observe()
                    break
                except grpc.RpcError as error:  # while gRPC finds the server again
                    assert error.code() == CODE.UNAVAILABLE  # noqa: PT017
                    assert time.monotonic() < end
                    time.sleep(0.1)
            assert len(robot.actions()) == 50


# ------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"policy_type": "act"}, "policy_type: expected 'smolvla' .*smolvla-2cam.*, got 'act'"),
        (
            {"pretrained_name_or_path": "user/other"},
            "pretrained_name_or_path: .*'smolvla-2cam'.* got 'user/other'",
        ),
        ({"actions_per_chunk": 0}, "actions_per_chunk: expected a number above 0, got 0"),
        ({"actions_per_chunk": "50"}, "RemotePolicyConfig.actions_per_chunk: expected int, got str"),
        ({"lerobot_features": {"x" * 300: {}}}, "expected text of at most 256 bytes as keys"),
        (
            {"lerobot_features": {"observation.state": {}}},
            "the names of 6 numbers, got no names, or names that are not short text",
        ),
        ({"lerobot_features": {}}, "lerobot_features.observation.state: expected the names of 6"),
        ({"lerobot_features": features("camera1", joints=JOINTS[:5])}, "expected 6 names, got 5 .joint0.pos"),
        ({"cameras": ("front", "wrist")}, "cameras camera1, camera2 .*rename_map.*got cameras front, wrist"),
        ({"cameras": ("camera1", "wrist")}, "expected cameras camera1, camera2 .*got cameras camera1, wrist"),
        ({"cameras": ()}, "expected cameras camera1, camera2 .*, got cameras none"),
    ],
)
def test_a_client_that_wants_something_else_is_told(robot, changes, text):
    with refused(CODE.INVALID_ARGUMENT, text):
        robot.hello(**changes)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"camera1": "front.jpg"}, r"camera1: expected an array \[height, width, 3\], got str"),
        ({"camera1": np.zeros((48, 64), np.uint8)}, "camera1: expected .height, width, 3.*got shape"),
        ({"camera1": np.zeros((48, 64, 4), np.uint8)}, "camera1: expected three colour channels"),
        (
            {"camera1": np.zeros((48, 64, 3), np.int32)},
            "camera1: expected uint8 or float pixels, got dtype int32",
        ),
        ({JOINTS[2]: "left"}, "joint2.pos: expected a number, got str"),
        ({JOINTS[2]: np.zeros(2)}, "joint2.pos: expected a number, got ndarray"),
        ({JOINTS[2]: [[1.0]]}, "joint2.pos: expected a number, got list"),
        ({"task": 5}, "task: expected text, got int"),
    ],
)
def test_a_bad_observation_is_named(robot, changes, text):
    robot.hello()
    with refused(CODE.INVALID_ARGUMENT, text):
        robot.observe(**changes)
    robot.observe()
    assert len(robot.actions()) == 50


def test_a_missing_value_is_named(robot):
    robot.hello()
    raw = raw_observation()
    del raw[JOINTS[4]]
    with refused(
        CODE.INVALID_ARGUMENT,
        "joint4.pos: expected a value, because the client announced this feature, got nothing",
    ):
        robot.send(as_lerobot(TimedObservation(1.0, 0, raw)))


@pytest.mark.parametrize(
    ("pieces", "text"),
    [
        ([(MIDDLE, b"x")], "expected BEGIN before MIDDLE"),
        ([(0, b"x")], "expected BEGIN, MIDDLE or END, got 0"),
        ([(9, b"x")], "expected BEGIN, MIDDLE or END, got 9"),
        ([(BEGIN, b"x"), (MIDDLE, b"x")], "expected END, but the stream ended before it"),
        ([], "expected END"),
        ([(END, b"")], "expected protocol 2 to 5"),
        ([(BEGIN, b"x"), *[(MIDDLE, b"")] * 2000], "in 1024 pieces, got more"),
        ([(BEGIN, bytes(PIECE)), *[(MIDDLE, bytes(PIECE))] * 32], "expected at most 67108864 bytes"),
    ],
)
def test_streams_that_are_no_observation(robot, pieces, text):
    robot.hello()
    with refused(CODE.INVALID_ARGUMENT, text):
        robot.stream(pieces)


def test_bytes_that_are_no_message(robot):
    robot.hello()
    with refused(CODE.INVALID_ARGUMENT, "expected a message transport.PolicySetup, got 100 other bytes"):
        robot.call("SendPolicyInstructions", b"\xff" * 100)
    with refused(CODE.INVALID_ARGUMENT, "expected a message transport.Empty"):
        robot.call("GetActions", b"\xff" * 100)
    with refused(CODE.UNIMPLEMENTED, ""):
        robot.call("Kill")


@pytest.mark.parametrize("case", ATTACKS)
def test_attacks_through_both_doors(server, robot, case):
    """The server's folder is this process's: a command that ran would leave its file there."""
    payload = unframed(ATTACKS[case][0])
    with refused(CODE.INVALID_ARGUMENT, "pickle: "):
        robot.setup(payload)
    robot.hello()
    with refused(CODE.INVALID_ARGUMENT, "pickle: |expected protocol"):
        robot.send(payload or b"\x80")
    assert not Path("written-by-a-pickle").exists()
    robot.call("Ready")
    assert server.process.poll() is None


def test_compressed_messages_are_refused(server, robot):
    """One megabyte would unpack to a gigabyte."""
    robot.hello()
    memory = psutil.Process(server.process.pid).memory_info
    before = memory().rss
    with refused(CODE.UNIMPLEMENTED, "ompress"):
        robot.stream([(BEGIN, bytes(PIECE))] * 20, compression=grpc.Compression.Gzip)
    assert memory().rss - before < 64 << 20


def test_a_message_beyond_the_limit(robot):
    robot.hello()
    with refused(CODE.RESOURCE_EXHAUSTED, "larger than max"):
        robot.stream([(END, bytes(5 << 20))])
    robot.observe()
    assert len(robot.actions()) == 50


def test_slow_senders_and_strangers_do_not_keep_others_waiting(server, robot):
    """Twenty streams that never end, twenty connections that say nothing or rubbish; the robot is served."""
    host, port = robot.target.rsplit(":", 1)
    release = threading.Event()

    def drip() -> Iterator[bytes]:
        yield messages()["Observation"](transfer_state=BEGIN, data=b"x").SerializeToString()
        release.wait(START_S)

    with contextlib.ExitStack() as stack:
        for index in range(20):
            stranger = stack.enter_context(socket.create_connection((host, int(port))))
            stranger.sendall([b"", b"GET / HTTP/1.1\r\n\r\n", os.urandom(2000)][index % 3])
            slow = stack.enter_context(Robot(server.address)).hello()
            slow.channel.stream_unary(f"/{SERVICE}/SendObservations").future(drip())
        robot.hello()
        for step in range(10):
            robot.timestep = step
            robot.observe()
            assert len(robot.actions()) == 50
        release.set()


def test_a_client_that_leaves_cancels_its_request(server, robot):
    with Robot(server.address) as leaver:
        leaver.hello()
        leaver.channel.unary_unary(f"/{SERVICE}/GetActions").future(b"")
        leaver.observe()
    robot.hello()
    robot.observe()
    assert len(robot.actions()) == 50


# ------------------------------------------------------------------------- keys, encryption, starting and stopping


def test_keys(bundle, tmp_path, monkeypatch):
    monkeypatch.setenv("SINEW_API_KEY", "secret")
    with serving(tmp_path, bundle, "--wire", "lerobot:0", "--threads", 1) as own:
        assert "LeRobot's own client cannot send a key" in own.log.read_text()
        for metadata in ((), (("authorization", "Bearer wrong"),)):
            with (
                Robot(own.address, metadata) as stranger,
                refused(CODE.UNAUTHENTICATED, "requires an API key"),
            ):
                stranger.hello()
        for value in ("secret", "Bearer secret", "Api-Key secret"):
            with Robot(own.address, (("authorization", value),)) as known:
                known.hello().observe()
                assert len(known.actions()) == 50


def test_tls(bundle, tmp_path, certificate):
    cert, key = certificate
    arguments = ("--wire", "lerobot:0", "--threads", 1, "--tls-cert", cert, "--tls-key", key)
    with serving(tmp_path, bundle, *arguments) as own:
        assert own.address.startswith("grpcs://")
        trusted = grpc.ssl_channel_credentials(cert.read_bytes())
        with Robot(own.address, credentials=trusted) as safe:
            safe.hello().observe()
            assert len(safe.actions()) == 50
        with Robot(own.address) as plain, pytest.raises(grpc.RpcError):
            plain.call("Ready", timeout=2)
    (broken := tmp_path / "broken.pem").write_text("no certificate")
    with pytest.raises(SinewError, match="TLS: "):
        LeRobotWire(Listen(tls_cert=broken, tls_key=key))


def test_a_warning_beyond_loopback(bundle, tmp_path):
    with serving(tmp_path, bundle, "--wire", "lerobot:0", "--host", "0.0.0.0", "--threads", 1) as own:
        assert "use this protocol only if you trust every machine" in own.log.read_text()


def test_the_port_is_claimed_at_once_and_freed():
    first = LeRobotWire(Listen())
    port = int(first.address.rpartition(":")[2])
    with pytest.raises(AddressError, match=f"cannot listen on 127.0.0.1:{port}: Address already in use"):
        LeRobotWire(Listen(port=port))
    first.stop()  # never started
    first.stop()
    again = LeRobotWire(Listen(port=port))
    again.stop()
    with pytest.raises(AddressError, match=r"cannot listen on 192\.0\.2\.1:8080"):
        LeRobotWire(Listen(host="192.0.2.1", port=8080))


class InProcess:
    """A wire over a real policy in this process, for what needs its insides."""

    def __init__(self, policy: Any, deadline_ms: float | None = None, **limits: Any):
        self.wire = LeRobotWire(Listen(**limits))
        self.scheduler = Scheduler(policy)
        self.service = Service(Deployment(self.scheduler, policy.spec, {}), deadline_ms=deadline_ms)

    def start(self) -> None:
        self.scheduler.start()
        self.wire.start(self.service)

    def stop(self) -> None:
        self.scheduler.stop()
        self.scheduler.join(START_S)
        self.wire.stop()


@contextlib.contextmanager
def in_process(policy: Any, **options: Any) -> Iterator[InProcess]:
    made = InProcess(policy, **options)
    try:
        yield made
    finally:
        made.stop()


def test_requests_that_come_early_wait(policy):
    with in_process(policy) as own, Robot(own.wire.address) as early:
        found: list = []
        asking = threading.Thread(target=lambda: found.append(early.hello()))
        asking.start()
        time.sleep(1)
        assert not found
        own.start()
        asking.join(START_S)
        assert found


def waits_for_an_observation(own: InProcess) -> threading.Event:
    """Return an event that is set as soon as a call of GetActions waits for an observation."""
    come, following = threading.Event(), own.wire._next

    async def noted(session: Any) -> Any:
        come.set()
        return await following(session)

    own.wire._next = noted  # type: ignore[method-assign]
    return come


def test_get_actions_waits_for_the_observation(policy, monkeypatch):
    monkeypatch.setattr(lerobot_wire, "OBSERVATION_WAIT_S", START_S)
    with in_process(policy) as own, Robot(own.wire.address) as robot:
        own.start()
        robot.hello()
        found: list = []
        come = waits_for_an_observation(own)
        asking = threading.Thread(target=lambda: found.extend(robot.actions()))
        asking.start()
        assert come.wait(START_S)
        assert not found
        robot.observe()
        asking.join(START_S)
        assert len(found) == 50


def test_stopping_answers_those_who_wait(policy):
    with in_process(policy) as own, Robot(own.wire.address) as waiting:
        own.start()
        waiting.hello()
        outcome: list = []

        def ask() -> None:
            try:
                outcome.append(waiting.actions())
            except grpc.RpcError as error:
                outcome.append((error.code(), error.details()))

        come = waits_for_an_observation(own)
        asking = threading.Thread(target=ask)
        asking.start()
        assert come.wait(START_S)
        own.stop()
        asking.join(START_S)
        assert outcome == [(CODE.UNAVAILABLE, "[shutting_down] the server is shutting down")]


def test_a_missed_deadline_is_told(policy):
    """Not as DEADLINE_EXCEEDED, which the stock client would repeat without a word."""
    with in_process(policy, deadline_ms=50) as own, Robot(own.wire.address) as late:
        own.start()
        late.hello()
        late.observe()
        time.sleep(0.2)
        with refused(CODE.ABORTED, r"\[deadline\] the deadline passed"):
            late.actions()


def test_an_observation_must_arrive_in_time(policy, monkeypatch):
    monkeypatch.setattr(lerobot_sessions, "RECEIVE_S", 0.3)
    with in_process(policy) as own, Robot(own.wire.address) as slow:
        own.start()
        slow.hello()
        stub = slow.channel.stream_unary(f"/{SERVICE}/SendObservations")
        hold = threading.Event()

        def drip() -> Iterator[bytes]:
            yield messages()["Observation"](transfer_state=BEGIN, data=b"x").SerializeToString()
            hold.wait(START_S)

        with refused(CODE.ABORTED, r"\[too_slow\] an observation took longer than 0.3 s"):
            stub(drip(), timeout=START_S)
        hold.set()


def test_memory_of_waiting_and_arriving_observations_is_bounded(policy):
    size = 64 << 10  # an observation here is about 19 kB
    with in_process(policy, max_message_bytes=size) as own, contextlib.ExitStack() as stack:
        own.start()
        robots = [stack.enter_context(Robot(own.wire.address)).hello() for _ in range(20)]
        for seed, robot in enumerate(robots):
            robot.observe(seed)
        answered = [len(robot.actions()) for robot in (robots[0], robots[-1])]
        assert answered == [0, 50]  # the oldest made room
        with refused(CODE.INVALID_ARGUMENT, f"observation: expected at most {size} bytes"):
            robots[0].send(bytes(size + 1))
        hold = threading.Event()

        def drip() -> Iterator[bytes]:
            yield messages()["Observation"](transfer_state=BEGIN, data=bytes(size)).SerializeToString()
            hold.wait(START_S)

        pending = [
            robot.channel.stream_unary(f"/{SERVICE}/SendObservations").future(drip()) for robot in robots
        ]
        refused_here = len(robots) - lerobot_sessions.HELD
        until(lambda: sum(each.done() for each in pending) >= refused_here)
        ended = [each.code() for each in pending if each.done()]
        hold.set()
        assert ended == [CODE.RESOURCE_EXHAUSTED] * refused_here


def test_the_oldest_connections_are_forgotten(policy):
    with in_process(policy, max_connections=3) as own:
        own.start()
        for _ in range(6):
            with Robot(own.wire.address) as robot:
                robot.hello()
        assert len(own.wire._sessions._sessions) == 3
        with Robot(own.wire.address) as robot:
            robot.observe()  # taken up again, as one whose connection broke
            assert len(robot.actions()) == 50


def http2(address: str) -> socket.socket:
    """A connection that speaks HTTP/2 and calls nothing."""
    host, port = address.partition("//")[2].split(":")
    made = socket.create_connection((host, int(port)), START_S)
    made.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0)))
    return made


def ended(peer: socket.socket) -> bool:
    """Read until the server hangs up; a failure if it does not."""
    try:
        while peer.recv(1 << 12):
            pass
    except ConnectionError:
        pass
    return True


def test_connections_have_a_limit_and_idle_ones_end(policy, monkeypatch):
    """Rows 12 and 13 on this wire: a crowd without calls may neither use up descriptors nor keep robots out."""
    monkeypatch.setattr("sinew.serve.wires.lerobot.wire.IDLE_MS", 1000)
    with in_process(policy, max_connections=4) as own, contextlib.ExitStack() as stack:
        own.start()
        with Robot(own.wire.address) as robot:
            robot.hello()
            crowd = [stack.enter_context(http2(own.wire.address)) for _ in range(12)]
            for robot.timestep in range(3):
                robot.observe()
                assert len(robot.actions()) == 50
            assert all(map(ended, crowd))  # nine at once, three when they had called nothing for a while
            with Robot(own.wire.address) as late:
                late.call("Ready")


def test_messages_have_a_limit(policy):
    """Row 1 on this wire: of one message, of a stream of messages, and of what is said beside them."""
    with in_process(policy, max_message_bytes=1 << 20) as own:
        own.start()
        with Robot(own.wire.address) as robot:
            robot.hello()
            with refused(CODE.RESOURCE_EXHAUSTED, "larger than max"):
                robot.setup(bytes(5 << 20))
            with refused(CODE.INVALID_ARGUMENT, "observation: expected at most 1048576 bytes"):
                robot.send(bytes(3 << 20))
            with refused(CODE.INVALID_ARGUMENT, "observation: expected at most"):
                robot.stream([(BEGIN, b""), *[(MIDDLE, b"")] * 5000])
            stub = robot.channel.unary_unary(f"/{SERVICE}/Ready")
            with pytest.raises(grpc.RpcError):
                stub(b"", timeout=START_S, metadata=(("x", "y" * 100_000),))
            robot.observe()
            assert len(robot.actions()) == 50


# ------------------------------------------------------------------------- keys and the agreement


def spec(*cameras: str, names: tuple[str, ...] = (), keys: tuple[KeyMap, ...] = ()) -> PolicySpec:
    return PolicySpec(
        architecture="smolvla",
        name="model",
        cameras=tuple(CameraSpec(camera, 48, 64) for camera in cameras),
        state=VectorSpec(6, names),
        action=VectorSpec(6),
        chunk_size=50,
        noise_dim=32,
        solver_steps=10,
        max_prompt_tokens=48,
        keys=keys,
    )


def config(*cameras: str, joints: tuple[str, ...] = JOINTS, **changes: Any) -> Config:
    wanted = {
        "policy_type": "smolvla",
        "pretrained_name_or_path": "someone/model",
        "lerobot_features": features(*cameras, joints=joints),
        "actions_per_chunk": 80,
    }
    return Config(**{**wanted, **changes})


def test_state_in_the_order_of_the_features():
    turned = JOINTS[::-1]
    agreement = agree(config("top", joints=turned), spec("top"))
    assert (agreement.state, agreement.images, agreement.actions) == (turned, (("top", "top"),), 50)
    raw = {**raw_observation(cameras=("top",)), "side": "not read"}
    made = observation(Timed(4.5, 0, raw), agreement)
    np.testing.assert_array_equal(made.state, np.array([raw[joint] for joint in turned], np.float32))
    assert (made.prompt, made.time, list(made.images)) == ("task 0", 4.5, ["top"])
    with pytest.raises(ObservationError, match="expected the order joint0.pos, .* got joint5.pos"):
        agree(config("top", joints=turned), spec("top", names=JOINTS))
    assert agree(config("top"), spec("top", names=JOINTS)).state == JOINTS


def test_what_the_policy_does_not_read_is_told_once(caplog, monkeypatch):
    """The protocol has no place for a warning, and robots send what they have."""
    monkeypatch.setattr(lerobot_features, "_once", LogOnce(lerobot_features.logger))
    agreement = agree(config("top"), spec("top"))
    raw = {**raw_observation(cameras=("top",)), "stat": 1.0}
    for _ in range(2):
        observation(Timed(4.5, 0, raw), agreement)
    assert caplog.messages == ["lerobot: the policy does not read 'stat'"]


def test_the_bundles_key_map_and_rename_map():
    keys = KeyMap(
        "lerobot", {"observation.images.front": "base", "wrist": "hand"}, ("observation.state",), "task"
    )
    agreement = agree(config("front", "wrist"), spec("base", "hand", keys=(keys,)))
    assert agreement.images == (("front", "base"), ("wrist", "hand"))
    rename = {"observation.images.a": "observation.images.hand"}
    assert agree(config("a", rename_map=rename), spec("hand")).images == (("a", "hand"),)
    assert agree(config("a", "b", rename_map=rename), spec("hand")).images == (("a", "hand"),)
    chosen = KeyMap("lerobot", {"top": "top"}, tuple(reversed(JOINTS)), "language")
    agreement = agree(config("top", joints=(*JOINTS, "torque")), spec("top", keys=(chosen,)))
    assert agreement.state == JOINTS[::-1]
    raw = {**raw_observation(cameras=("top",)), "language": "go"}
    assert observation(Timed(0.0, 0, raw), agreement).prompt == "go"
    with pytest.raises(ObservationError, match="cameras front, wrist .*got cameras x, y"):
        agree(config("x", "y"), spec("base", "hand", keys=(keys,)))
    twice = config("a", "b", rename_map=dict.fromkeys(["observation.images.a"], "observation.images.b"))
    with pytest.raises(ObservationError, match="rename_map: expected one feature for each name"):
        agree(twice, spec("b"))


SLOTS = tuple(CameraSpec(name, 48, 64, slot) for name, slot in (("front", "camera1"), ("wrist", "camera2")))


@pytest.mark.parametrize(
    ("cameras", "rename", "images"),
    [
        (("front", "wrist"), {}, {"front": "front", "wrist": "wrist"}),
        # The run's own rename_map, which LeRobot's server needs from its client
        (("front", "wrist"), {"front": "camera1", "wrist": "camera2"}, {"front": "front", "wrist": "wrist"}),
        (("front", "wrist"), {"front": "camera1"}, {"front": "front", "wrist": "wrist"}),  # half of it
        (("camera1", "camera2"), {}, {"camera1": "front", "camera2": "wrist"}),  # called as the slots
        (("top", "hand"), {"top": "camera1", "hand": "camera2"}, {"top": "front", "hand": "wrist"}),
        (("front", "camera2"), {}, {"front": "front", "camera2": "wrist"}),
        (("front", "wrist", "default"), {}, {"front": "front", "wrist": "wrist"}),  # a further camera
        (("camera1", "front", "wrist"), {}, {"front": "front", "wrist": "wrist"}),
        (("extra", "camera1", "side", "camera2"), {}, {"camera1": "front", "camera2": "wrist"}),
    ],
)
def test_what_clients_of_its_own_project_call_the_cameras(cameras, rename, images):
    table = {f"observation.images.{old}": f"observation.images.{new}" for old, new in rename.items()}
    found = agree(config(*cameras, rename_map=table), replace(spec("a"), cameras=SLOTS))
    assert dict(found.images) == images


def test_a_slot_that_is_another_cameras_name():
    """The client's rename_map speaks of slots; a robot's own name is what the bundle calls it."""
    crossed = tuple(CameraSpec(name, 48, 64, slot) for name, slot in (("b", "a"), ("a", "b")))
    both = replace(spec("x"), cameras=crossed)
    assert dict(agree(config("a", "b"), both).images) == {"a": "a", "b": "b"}
    table = {
        f"observation.images.{old}": f"observation.images.{new}" for old, new in (("x", "a"), ("y", "b"))
    }
    assert dict(agree(config("x", "y", rename_map=table), both).images) == {"x": "b", "y": "a"}


@pytest.mark.parametrize(
    ("cameras", "told"),
    [
        (
            ("front", "default"),
            r"'observation.images.default': 'observation.images.wrist'.*got cameras front, def",
        ),
        (("default",), r"'observation.images.default': 'observation.images.front'.*got cameras default"),
        (("camera1", "camera1_copy"), r"'observation.images.camera1_copy': 'observation.images.wrist'"),
    ],
)
def test_a_hint_makes_no_two_cameras_of_one_name(cameras, told):
    with pytest.raises(ObservationError, match=told):
        agree(config(*cameras), replace(spec("a"), cameras=SLOTS))


def test_a_missing_grpcio_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "grpc", None)
    with pytest.raises(SinewError, match=re.escape(install("grpc"))):
        LeRobotWire(Listen())


# ------------------------------------------------------------------------- LeRobot's own client


def printed_command(server: Any) -> list[str]:
    """The command that the server printed for this wire."""
    lines: list[str] = []
    while not (lines and "--actions_per_chunk" in lines[-1]):
        lines.append(server.process.stdout.readline())
    start = next(index for index, line in enumerate(lines) if "robot_client" in line)
    return shlex.split("".join(lines[start:]).replace("\\\n", " "))


def run_client(
    command: list[str], directory: Path, steps: int, release: str, **environment: str
) -> SimpleNamespace:
    """LeRobot's command in an interpreter of its own, with a robot that needs no hardware."""
    assert command[:3] == ["python", "-m", "lerobot.async_inference.robot_client"]
    flags = ["--robot.type=without_hardware" if "--robot.type=" in flag else flag for flag in command[3:]]
    log = directory / "robot.json"
    settings = {"ROBOT_LOG": str(log), "ROBOT_STEPS": str(steps), "OMP_NUM_THREADS": "1"}
    done = processes.run(
        [CLIENTS, Path(__file__).with_name("lerobot_robot.py"), *flags],
        cwd=directory,  # it makes a folder of logs
        env={**os.environ, **settings, "PYTHONPATH": str(lerobot_folder(release)), **environment},
        nursery=nursery(release),
    )
    # The robot writes the log at its end. Without one, a test fails on `executed` and shows what the client printed.
    content = json.loads(log.read_text()) if log.exists() else {"executed": []}
    return SimpleNamespace(output=done.stdout + done.stderr, code=done.returncode, **content)


@each_release
def test_the_real_robot_client_executes_what_the_policy_infers(bundle, tmp_path, policy, release):
    """The printed command, with another robot type. What is executed are rows of the chunks of the server's record, in
    their order and without a gap; each chunk of the record is what the policy infers from the recorded observation and
    seed. A chunk may begin with steps that the client took from the one before while it filed the new one: it looks at
    what it has executed before it exchanges its queue."""
    records = tmp_path / "records"
    with serving(tmp_path, bundle, "--wire", "lerobot:0", "--threads", 1, "--record", records) as own:
        command = [*printed_command(own), "--aggregate_fn_name=latest_only"]
        client = run_client(command, tmp_path, 120, release)
        assert own.stop() == 0
        assert "Traceback" not in own.log.read_text()
    assert len(client.executed) == 120, client.output[-2000:]
    assert client.lerobot == release
    assert "Error sending" not in client.output
    assert (
        client.output.count("Error receiving") <= 1
    )  # of the call that the client itself gave up at its end
    executed = {tuple(np.float32(seen["joints"]).tolist()): seen["executed"] for seen in client.seen}
    chunks = []  # after how many actions, and the rows
    *recorded, last_record = read_records(records)
    if last_record.error:  # of that call, where the policy had begun
        assert last_record.error == "[cancelled] the inference was cancelled"
    else:
        recorded.append(last_record)
    for record in recorded:
        assert not record.error
        assert record.observation.prompt == "pick up the red cube"
        assert {name: frame.shape for name, frame in record.observation.images.items()} == {
            "camera1": (480, 640, 3),
            "camera2": (480, 640, 3),
        }
        np.testing.assert_array_equal(policy.infer(record.observation).actions, record.actions)
        chunks.append((executed[tuple(record.observation.state.tolist())], record.actions))
    assert len(chunks) >= 3
    steps, before = [-1], (-1, -1)  # of the actions so far, with one before the first; its chunk and row
    for action in client.executed:
        row = np.array(action, np.float32)
        same = [
            (number, k)
            for number, (_, rows) in enumerate(chunks)
            for k in np.flatnonzero((rows == row).all(1))
        ]
        assert len(same) == 1, len(steps)
        number, k = same[0]
        seen = steps[chunks[number][0]]
        step = max(seen, 0) + k  # as the client numbers them
        assert (number, k) == (before[0], before[1] + 1) or number > before[0], len(steps)
        assert seen < step <= steps[-1] + 1, len(steps)
        before = number, k
        steps.append(step)


@pytest.mark.slow
@each_release
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_real_robot_client_goes_on_after_a_restart(bundle, tmp_path, number, release):
    """Row 15: it was refused until its end. The client is not told of the restart, and executes what both servers
    inferred."""
    port, halves = processes.free_port(), (tmp_path / "first", tmp_path / "second")
    arguments = (bundle, "--wire", f"lerobot:{port}", "--threads", 1, "--record")
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(1) as pool:
        stack.enter_context(pytest.MonkeyPatch.context()).setenv("XDG_STATE_HOME", str(tmp_path / "state"))
        with serving(tmp_path, *arguments, halves[0]) as first:
            command = [*printed_command(first), "--aggregate_fn_name=latest_only"]
            asking = pool.submit(run_client, command, tmp_path, 200, release)
            while len(list(halves[0].glob("*.npz"))) < 2:
                assert not asking.done(), asking.result().output[-2000:]
                time.sleep(0.01)
            first.stop(number, timeout=START_S)
        with serving(tmp_path, *arguments, halves[1]) as second:
            client = asking.result(timeout=2 * START_S)
            assert second.stop(timeout=START_S) == 0
    assert len(client.executed) == 200, client.output[-2000:]
    answered = [each for half in halves for each in read_records(half) if not each.error]
    inferred = {tuple(row) for each in answered for row in each.actions.tolist()}
    assert {tuple(row) for row in np.float32(client.executed).tolist()} <= inferred
    assert list(halves[1].glob("*.npz"))  # it came back, and did not live on what it had


@pytest.mark.slow  # LeRobot's client takes its time
@each_release
@pytest.mark.parametrize(
    ("change", "text"),
    [
        (("--policy_type=smolvla", "--policy_type=act"), "policy_type: expected 'smolvla'"),
        (("camera1:", "front:"), "expected cameras camera1, camera2"),
    ],
)
def test_the_real_robot_client_is_told_why_not(server, tmp_path, change, text, command_of_server, release):
    command = [flag.replace(*change) for flag in command_of_server]
    client = run_client(command, tmp_path, 1, release)
    assert "Failed to connect to policy server" in client.output
    assert text in client.output
    assert not client.executed


@pytest.fixture(scope="module")
def command_of_server(server) -> list[str]:
    return printed_command(server)
