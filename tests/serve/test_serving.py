"""What all wires share: sessions, deadlines, clients that leave, keys, metrics, the access log, records and replay.

Most of it runs a real policy behind real sockets in this process, where the test can hold an inference back.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import numpy as np
import pytest
import zmq
from prometheus_client.parser import text_string_to_metric_families
from sinew_client import Client, ServerError, protocol, schema

from sinew.core import ActionChunk, Observation
from sinew.policy import Policy, load
from sinew.processing import Prepared
from sinew.serve.metrics import MAX_SESSIONS, Metrics
from sinew.serve.policies import Deployment
from sinew.serve.request import Request
from sinew.serve.scheduler import Scheduler
from sinew.serve.served import ServedPolicy
from sinew.serve.service import Service
from sinew.serve.transport.listen import Listen
from sinew.serve.transport.zeromq import ZeroMQWire
from sinew.serve.wires.groot.codec import GrootCodec
from sinew.serve.wires.native import NativeCodec
from tests.serve.groot_client import PolicyClient
from tests.serve.puppet import until
from tests.serve.test_server import CASE, FRAME, GOOD, START_S, raw_socket


class Gate(ServedPolicy):
    """A real policy whose inferences wait for ``open``."""

    def __init__(self, policy: Policy):
        self.policy = policy
        self.open = threading.Event()
        self.open.set()
        self.computed: list[str] = []  # prompts

    def warm_up(self) -> None: ...

    def prepare(self, observation: Observation) -> tuple[str, Prepared]:
        return observation.prompt, self.policy.prepare(observation)

    def run(self, prepared: tuple[str, Prepared], *, cancel: threading.Event | None = None) -> ActionChunk:
        prompt, own = prepared
        while not self.open.wait(0.002) and not cancel.is_set():
            pass
        chunk = self.policy.run(own, cancel=cancel)  # raises CancelledError between two stages
        self.computed.append(prompt)
        return chunk


@pytest.fixture(scope="module")
def policy(smolvla_bundle) -> Policy:
    return load(smolvla_bundle(CASE))


@contextlib.contextmanager
def desk(policy: Policy, **options) -> Iterator[SimpleNamespace]:
    gate = Gate(policy)
    scheduler = Scheduler(gate, queue_size=4, per_client=4)
    scheduler.start()
    about = {"policy": policy.spec.to_dict()}
    dims = policy.padded_state_dim, policy.padded_action_dim
    service = Service(Deployment(scheduler, policy.spec, about, None, *dims), **options)
    wires = [ZeroMQWire(codec, Listen()) for codec in (NativeCodec(), GrootCodec())]
    for wire in wires:
        wire.start(service)
    native, groot = (wire.address for wire in wires)
    try:
        yield SimpleNamespace(gate=gate, service=service, native=native, groot=groot, scheduler=scheduler)
    finally:
        gate.open.set()
        scheduler.stop()
        assert scheduler.join(START_S)
        for wire in wires:
            wire.stop()


@pytest.fixture
def served(policy) -> Iterator[SimpleNamespace]:
    with desk(policy) as made:
        yield made


@pytest.fixture
def later(monkeypatch) -> Callable[[float], None]:
    """Have the servers see so many seconds pass at once."""

    def go_on(seconds: float) -> None:
        clock = SimpleNamespace(**vars(time))
        clock.perf_counter = lambda: time.perf_counter() + seconds
        for module in ("scheduler", "service"):
            monkeypatch.setattr(f"sinew.serve.{module}.time", clock)

    return go_on


def ask(sock: zmq.Socket, number: int, **changes) -> None:
    sock.send(protocol.encode_infer({**GOOD, "prompt": f"request {number}", **changes}, number))


def answers(sock: zmq.Socket, count: int) -> dict[int, str]:
    """Request id -> error code, empty for actions; in the order of arrival."""
    found = {}
    for _ in range(count):
        reply = schema.PredictResponse.FromString(sock.recv())
        found[reply.request_id] = reply.error_code
        assert bool(reply.actions) == (not reply.error_code)
    return found


@contextlib.contextmanager
def held(served: SimpleNamespace) -> Iterator[zmq.Socket]:
    """Inside, a request (number 99, of another client) is being computed and does not end."""
    served.gate.open.clear()
    with raw_socket(served.native, zmq.DEALER) as other:
        ask(other, 99)
        until(lambda: served.service.health()["running"])
        yield other


# ----------------------------------------------------------------------------- sessions


def test_the_newest_observation_of_a_session_wins(served):
    with held(served) as other, raw_socket(served.native, zmq.DEALER) as robot:
        for number in (1, 2, 3):
            ask(robot, number, session="arm")
        ask(robot, 4, session="other arm")
        ask(robot, 5)
        assert answers(robot, 2) == {1: "superseded", 2: "superseded"}  # at once, not when their turn comes
        until(lambda: len(served.scheduler._ready.order()) == 3)  # two threads decode: one may be late
        served.gate.open.set()
        assert answers(robot, 3) == {3: "", 4: "", 5: ""}
        assert answers(other, 1) == {99: ""}
    assert served.gate.computed == ["request 99", "request 3", "request 4", "request 5"]
    assert served.service.health()["superseded"] == 2


def test_a_newer_observation_finds_a_place_in_a_full_queue(served):
    with held(served), raw_socket(served.native, zmq.DEALER) as robot:
        for number in (1, 2, 3, 4):
            ask(robot, number, session="arm" if number == 2 else "")
        ask(robot, 5)
        assert answers(robot, 1) == {5: "busy"}
        ask(robot, 6, session="arm")
        assert answers(robot, 1) == {2: "superseded"}
        served.gate.open.set()
        assert answers(robot, 4) == {1: "", 3: "", 4: "", 6: ""}


def test_sessions_of_two_wires_are_two(served):
    frames = {"camera1": FRAME[None, None], "camera2": FRAME[None, None]}
    observation = {
        "video": frames,
        "state": {"state": np.zeros((1, 1, 6), np.float32)},
        "language": {"task": [["groot"]]},
    }
    groot = PolicyClient(*served.groot.removeprefix("tcp://").split(":"))
    replies = []
    with held(served), raw_socket(served.native, zmq.DEALER) as robot:
        ask(robot, 1, session="arm")
        until(lambda: served.service.health()["waiting"] == 1)
        asking = threading.Thread(
            target=lambda: replies.append(groot.get_action(observation, {"session": "arm"}))
        )
        asking.start()
        until(lambda: served.service.health()["waiting"] == 2)
        served.gate.open.set()
        assert answers(robot, 1) == {1: ""}
        asking.join(START_S)
    assert replies[0][0]["actions"].shape == (1, 50, 6)
    groot.close()


# ----------------------------------------------------------------------------- deadlines


def test_late_requests_are_refused_and_not_computed(served, later):
    with held(served), raw_socket(served.native, zmq.DEALER) as robot:
        ask(robot, 1, deadline_ms=1e5)
        ask(robot, 2, deadline_ms=1e7)
        until(lambda: served.service.health()["waiting"] == 2)
        later(1e3)
        served.gate.open.set()
        assert answers(robot, 2) == {1: "deadline", 2: ""}
    assert served.gate.computed == ["request 99", "request 2"]
    assert served.service.health()["late"] == 1
    with Client(served.native, timeout=START_S) as client:
        for wrong in (0.0, -1.0, float("nan")):
            with pytest.raises(ServerError, match="deadline_ms: expected a number above 0"):
                client.infer({**GOOD, "deadline_ms": wrong})


def test_a_deadline_for_requests_that_bring_none(policy, later):
    with (
        desk(policy, deadline_ms=1e5) as served,
        held(served) as other,
        raw_socket(served.native, zmq.DEALER) as robot,
    ):
        ask(robot, 1)
        ask(robot, 2, deadline_ms=1e7)
        until(lambda: served.service.health()["waiting"] == 2)
        later(1e3)
        served.gate.open.set()
        assert answers(robot, 2) == {1: "deadline", 2: ""}
        assert answers(other, 1) == {99: ""}  # it had begun in time


def test_deadline_on_the_groot_wire(served, later):
    groot = PolicyClient(*served.groot.removeprefix("tcp://").split(":"))
    observation = {
        "video": {"camera1": FRAME[None, None], "camera2": FRAME[None, None]},
        "state": {"state": np.zeros((1, 1, 6), np.float32)},
        "language": {"task": [["groot"]]},
    }
    failures = []

    def expect_refusal() -> None:
        try:
            groot.get_action(observation, {"deadline_ms": 1e5})
        except RuntimeError as error:
            failures.append(str(error))

    with held(served):
        asking = threading.Thread(target=expect_refusal)
        asking.start()
        until(lambda: served.service.health()["waiting"] == 1)
        later(1e3)
        served.gate.open.set()
        asking.join(START_S)
    assert failures
    assert "deadline: the deadline passed" in failures[0]
    groot.close()


# ----------------------------------------------------------------------------- clients that leave


def test_what_a_client_waited_for_is_cancelled_when_it_leaves(served):
    with held(served), raw_socket(served.native, zmq.DEALER) as stays:
        with raw_socket(served.native, zmq.DEALER) as leaves:
            ask(leaves, 1)
            ask(leaves, 2)
            until(lambda: served.service.health()["waiting"] == 2)
            ask(stays, 3)
            until(lambda: served.service.health()["waiting"] == 3)
        until(lambda: served.service.health()["waiting"] == 1)  # while the inference before them still runs
        served.gate.open.set()
        assert answers(stays, 1) == {3: ""}
    assert served.gate.computed == ["request 99", "request 3"]
    assert outcomes(served.service)["native", "cancelled"] == 2


def test_a_running_inference_ends_when_its_client_leaves(served):
    with held(served) as other:
        other.close(linger=0)
        until(lambda: not served.service.health()["running"])  # the gate is closed: it was cancelled
    assert served.gate.computed == []
    served.gate.open.set()
    with Client(served.native, timeout=START_S) as client:
        assert client.infer(GOOD).actions.shape == (50, 6)


def test_a_connection_that_takes_the_place_of_another_is_not_cancelled(served):
    """The system gives a closed connection's number to the next one, which is how the server knows them."""
    for number in range(1, 30):
        with raw_socket(served.native, zmq.DEALER) as leaves:
            leaves.setsockopt(zmq.LINGER, 1000)
            ask(leaves, number, solver_steps=1)
        with raw_socket(served.native, zmq.DEALER) as comes:
            ask(comes, number, solver_steps=1)
            assert answers(comes, 1) == {number: ""}


def test_a_batch_ends_with_its_client(served):
    with held(served):
        groot = PolicyClient(*served.groot.removeprefix("tcp://").split(":"))
        frames = np.zeros((9, 1, 8, 8, 3), np.uint8)
        observation = {
            "video": {"camera1": frames, "camera2": frames},
            "state": {"state": np.zeros((9, 1, 6), np.float32)},
            "language": {"task": [["batch"]]},
        }
        request = {"endpoint": "get_action", "data": {"observation": observation}}
        import msgpack

        groot.socket.send(msgpack.packb(request, default=groot.encode))
        until(lambda: served.service.health()["waiting"] == 1)
        groot.close()
        until(lambda: served.service.health()["waiting"] == 0)
        served.gate.open.set()
        until(lambda: not served.service.health()["running"])
    assert served.gate.computed == ["request 99"]


def test_nothing_is_kept_of_a_request(served):
    """Frames are megabytes: they must go with the answer, and not when the garbage collector comes round."""

    def alive() -> int:
        return sum(type(each) is Request for each in gc.get_objects())

    gc.collect()
    gc.disable()
    try:
        with Client(served.native, timeout=START_S) as client:
            for number in range(20):
                client.infer({**GOOD, "solver_steps": 1, "session": f"arm-{number % 3}"})
            with pytest.raises(ServerError):
                client.infer({**GOOD, "state": np.zeros(5)})
        assert alive() <= 3  # what the threads had last in hand
    finally:
        gc.enable()


@pytest.mark.parametrize("method", ["peek", "control", "decoders", "encode"])
def test_a_fault_in_a_codec_is_answered_and_the_others_are_served(served, monkeypatch, caplog, method):
    def broken(*args: object) -> None:
        raise RuntimeError("secret detail")

    with Client(served.native, timeout=START_S) as client:
        with monkeypatch.context() as patched:
            patched.setattr(NativeCodec, method, broken)
            with pytest.raises(ServerError, match="internal error") as caught:
                client.infer(GOOD)
            assert caught.value.code == "internal"
            assert "secret" not in str(caught.value)
        assert "secret detail" in caplog.text
        assert client.infer(GOOD).actions.shape == (50, 6)


# ----------------------------------------------------------------------------- keys


def test_api_keys(policy):
    with desk(policy, api_key="secret") as served:
        host, port = served.groot.removeprefix("tcp://").split(":")
        with Client(served.native, timeout=START_S, api_key="secret") as client:
            assert client.infer(GOOD).actions.shape == (50, 6)
            assert client.health()["status"] == "ok"
        good = PolicyClient(host, port, api_token="secret")
        assert good.ping()["status"] == "ok"
        good.close()
        for key in ("", "wrong", "secret2"):
            with Client(served.native, timeout=START_S, api_key=key) as client:
                for call in (lambda: client.infer(GOOD), client.health, client.metadata, client.reset):
                    with pytest.raises(ServerError) as caught:
                        call()
                    assert caught.value.code == "unauthorized"
            bad = PolicyClient(host, port, api_token=key)
            with pytest.raises(RuntimeError, match="unauthorized"):
                bad.ping()
            bad.close()
        assert served.gate.computed == ["go"]
        assert outcomes(served.service)["native", "unauthorized"] == 12


# ----------------------------------------------------------------------------- metrics


def samples(service: Service) -> dict[tuple, float]:
    found = {}
    for family in text_string_to_metric_families(service.metrics.exposition().decode()):
        assert family.documentation
        for sample in family.samples:
            found[sample.name, *sorted(sample.labels.values())] = sample.value
    return found


def outcomes(service: Service) -> dict[tuple[str, str], float]:
    found = {}
    for family in text_string_to_metric_families(service.metrics.exposition().decode()):
        for sample in family.samples:
            if sample.name == "sinew_requests_total":
                found[sample.labels["wire"], sample.labels["outcome"]] = sample.value
    return found


def test_metrics(served, later):
    with Client(served.native, timeout=START_S) as client:
        chunks = [client.infer({**GOOD, "session": f"arm-{n % 2}"}) for n in range(3)]
        for wrong in ({**GOOD, "state": np.zeros(5)}, {**GOOD, "images": {}}):
            with pytest.raises(ServerError):
                client.infer(wrong)
        with held(served) as other:
            found = samples(served.service)
            assert (found["sinew_running",], found["sinew_queue_depth",]) == (1, 0)
            # A connection of the test before may still be on its way out.
            until(lambda: samples(served.service)["sinew_connections", "native"] == 2)
            with raw_socket(served.native, zmq.DEALER) as robot:
                ask(robot, 1, deadline_ms=1e5)
                until(lambda: samples(served.service)["sinew_queue_depth",] == 1)
                later(1e3)
                served.gate.open.set()
                answers(robot, 1)
            answers(other, 1)  # of a client that has left, it would be cancelled
    # An outcome is counted when its reply has left, which a client may see earlier.
    expected = {("native", "ok"): 4, ("native", "bad_observation"): 2, ("native", "deadline"): 1}
    until(lambda: outcomes(served.service) == expected)
    until(lambda: samples(served.service)["sinew_connections", "native"] == 0)
    found = samples(served.service)
    assert found["sinew_deadline_misses_total", "native"] == 1
    assert found["sinew_sessions",] == 2
    assert found["sinew_request_seconds_count", "native"] == 4
    assert found["sinew_request_seconds_bucket", "+Inf", "native"] == 4
    for stage in ("queue", "preprocess", "vision", "prefix", "text", "head", "postprocess"):
        assert found["sinew_stage_seconds_count", stage] == 4
    head = sum(chunk.timing.head_ms for chunk in chunks) / 1e3
    assert head < found["sinew_stage_seconds_sum", "head"] < found["sinew_request_seconds_sum", "native"]


def test_names_of_sessions_do_not_fill_the_memory():
    metrics = Metrics(lambda: {"waiting": 0, "running": False})
    for number in range(MAX_SESSIONS + 100):
        metrics.session(("native", number))
    assert metrics.sessions == MAX_SESSIONS


# ----------------------------------------------------------------------------- the access log

SECRET = {"prompt": "fetch the SECRET bottle", "state": np.full(6, 0.123456), "seed": 424242}


def test_the_access_log_says_who_and_how_long_and_nothing_else(served, caplog):
    with caplog.at_level(logging.INFO, "sinew.access"), Client(served.native, timeout=START_S) as client:
        client.infer({**GOOD, **SECRET, "session": "arm\n1"})
        with pytest.raises(ServerError):
            client.infer({**GOOD, **SECRET, "images": {"SECRET camera": FRAME}})
        with raw_socket(served.native) as garbage:
            garbage.send(b"SECRET" * 10)
            garbage.recv()
    lines = [record.getMessage() for record in caplog.records if record.name == "sinew.access"]
    entries = [json.loads(line) for line in lines]
    assert [entry["outcome"] for entry in entries] == ["ok", "bad_observation", "bad_request"]
    known = {"time", "wire", "client", "session", "outcome", "ms", "queue_ms", "infer_ms", "deadline_missed"}
    for line, entry in zip(lines, entries, strict=True):
        assert "\n" not in line
        assert set(entry) <= known
        assert (entry["wire"], entry["client"]) == ("native", "127.0.0.1")
        for content in ("SECRET", "123456", "424242", "camera"):
            assert content not in line
    assert entries[0]["session"] == "arm\n1"
    assert 0 < entries[0]["infer_ms"] < entries[0]["ms"]
