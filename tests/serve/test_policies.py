"""Several policies in one server: which one answers, on wires with a place for its name, and who computes when."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgpack
import numpy as np
import pytest
from PIL import Image
from sinew_client import Client, ClientError, ServerError, schema
from sinew_client.addresses import ServerAddress
from sinew_client.aio import AsyncClient
from websockets.sync.client import connect as websocket

from sinew.cli.replay import print_replay
from sinew.cli.serve import named_policies
from sinew.core import ActionChunk, CameraSpec, Observation, SinewError, machine
from sinew.policy import load
from sinew.records.comparison import replay_records
from sinew.records.recorder import Recorder, read_records
from sinew.serve.batching import Batcher
from sinew.serve.device_lock import DeviceLock
from sinew.serve.job import PreparedInputs, ServingJob
from sinew.serve.policies import Deployment
from sinew.serve.replay import Replay
from sinew.serve.request import Outcome, Request
from sinew.serve.scheduler import Scheduler
from sinew.serve.served import ServedPolicy
from sinew.serve.wires import openpi
from sinew.serve.wires.native import NativeCodec
from tests.serve.puppet import FRAME, GOOD, SPEC, WAIT_S, Puppet, desk, enqueue, lone, until


class Second(Puppet):
    """Another camera, and 100 more."""

    spec = replace(SPEC, name="second", cameras=(CameraSpec("wrist", 48, 64),))

    def run(self, observation: Observation, *, cancel: threading.Event | None = None) -> ActionChunk:
        chunk = super().run(observation, cancel=cancel)
        return replace(chunk, actions=chunk.actions + 100)


ITS = {**GOOD, "images": {"wrist": FRAME}}


@contextlib.contextmanager
def two(wires: tuple[str, ...] = ("native",), **options: Any) -> Iterator[SimpleNamespace]:
    """A desk with the second policy as ``b``; both take turns."""
    with desk(wires, **options) as at:
        device_lock = DeviceLock()
        at.scheduler.device_lock = device_lock
        device_lock.join(at.scheduler, at.scheduler._ready.order)
        at.second = Second()
        scheduler = at.other = Scheduler(at.second, supervisor=at.service.supervisor, device_lock=device_lock)
        scheduler.start()
        about = {"policy": Second.spec.to_dict()}
        at.service.policies.put("b", Deployment(scheduler, Second.spec, about, None, 2, 2))
        try:
            yield at
        finally:
            at.puppet.release.set()
            at.second.release.set()
            scheduler.stop()
            assert scheduler.join(WAIT_S)


def test_the_address_of_a_client_names_the_policy():
    with (
        two() as at,
        Client(at.native, timeout=WAIT_S) as first,
        Client(f"{at.native}/b", timeout=WAIT_S) as b,
    ):
        assert first.infer(GOOD).actions[0, 0] == 0
        assert b.infer(ITS).actions[0, 0] == 100
        assert [camera["name"] for camera in b.metadata()["policy"]["cameras"]] == ["wrist"]
        assert first.metadata()["policies"] == ["default", "b"]
        b.reset("arm")
        assert b.health()["policies"]["b"]["served"] == 1
        with Client(f"{at.native}/bee", timeout=WAIT_S) as none, pytest.raises(ServerError) as unknown:
            none.infer(GOOD)
        assert unknown.value.code == "unknown_policy"
        assert "expected one of default, b" in str(unknown.value)
        at.service.policies.take("b").drain()
        with pytest.raises(ServerError, match="expected one of default, got 'b'"):
            b.infer(ITS)
        assert first.infer(GOOD).actions[0, 0] == 0


def test_records_and_numbers_say_which_policy_was_asked(tmp_path, capsys):
    """So that a recording of several is repeated by the one that each request was for, and counted by it."""
    recorder = Recorder(tmp_path)
    with two(recorder=recorder) as at, Client(at.native, timeout=WAIT_S) as client:
        with Client(f"{at.native}/b", timeout=WAIT_S) as b:
            b.infer(ITS)
        client.infer(GOOD)
        until(lambda: recorder.stats()["written"] == 2)
        assert [record.policy for record in read_records(tmp_path)] == ["b", ""]
        about = {"policy": SPEC.to_dict(), "server": {}}
        for name in ("default", "b"):
            at.service.policies.get(name).metadata.update(about)
        found = replay_records(client, read_records(tmp_path), None)
        assert (found["records"], found["error"], found["lost"]) == (2, 0, 0), found["rows"]
        print_replay(
            {**found, "address": "x", "rows": [{**found["rows"][0], "then": "[busy] full", "result": "new"}]}
        )
        assert "[busy] full" in capsys.readouterr().out
        text = at.service.metrics.exposition().decode()
        assert 'sinew_requests_total{outcome="ok",policy="b",wire="native"} 2.0' in text
        assert 'sinew_requests_total{outcome="ok",policy="default",wire="native"} 2.0' in text
    recorder.close()
    with Replay(tmp_path) as replay:
        assert (replay.chunks, replay.left_out) == (2, 2)  # each was recorded once more; b's are left out


def test_addresses_with_and_without_a_policy():
    assert ServerAddress.parse("10.0.0.5:5555") == ServerAddress(
        "tcp://10.0.0.5:5555", "tcp", "10.0.0.5", 5555
    )
    parsed = ServerAddress.parse("tcp://[::1]:5555/b.2")
    assert (parsed.text, parsed.host, parsed.policy) == ("tcp://[::1]:5555", "::1", "b.2")
    with pytest.raises(ClientError, match="all with the same policy"):
        Client(["a:1/b", "a:2"])
    assert AsyncClient("a:1/b").policy == "b"


def test_a_name_in_a_message_is_bounded():
    codec = NativeCodec()
    codec.bind(lone(SPEC, 2, 2))
    fit, long = (schema.PredictRequest(policy=size * "b").SerializeToString() for size in (64, 65))
    assert codec.peek(memoryview(fit)).policy == 64 * "b"
    assert "at most 64 bytes" in str(codec.peek(memoryview(long)).error)


def picture() -> str:
    file = io.BytesIO()
    Image.fromarray(FRAME).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def post(address: str, path: str, record: dict[str, Any]) -> tuple[int, Any]:
    asked = urllib.request.Request(
        address.replace("ws", "http", 1) + path,
        json.dumps(record).encode(),
        {"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(asked, timeout=WAIT_S) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def test_over_http_by_field_or_by_path():
    with two(("web",)) as at:
        record = {"images": {"wrist": picture()}, "state": [1, 0], "prompt": "go"}
        for path, more in (
            ("/v1/actions", {"policy": "b"}),
            ("/v1/policies/b/actions", {}),
            ("/v1/policies/b/actions", {"policy": "b"}),
        ):
            assert post(at.web, path, {**record, **more})[1]["actions"][0][0] == 101
        first = {**record, "images": {"front": picture()}}
        assert post(at.web, "/v1/actions", first)[1]["actions"][0][0] == 1
        status, said = post(at.web, "/v1/policies/b/actions", {**record, "policy": "default"})
        assert (status, said["error"]["message"]) == (
            400,
            "policy: expected b as in the address, got 'default'",
        )
        assert post(at.web, "/v1/actions", {**record, "policy": "c"})[0] == 404
        assert post(at.web, "/v1/actions", {**record, "policy": 3})[0] == 400
        status, said = post(at.web, "/v1/policies/b/act", {"image": None, "instruction": "go"})
        assert (status, said["error"]["code"]) == (400, "bad_observation")
        with urllib.request.urlopen(at.web.replace("ws", "http", 1) + "/v1/policies/b/metadata") as answer:
            assert json.loads(answer.read())["policy"]["name"] == "second"


def test_a_websocket_is_of_the_policy_in_its_path():
    with two(("web",)) as at:
        with websocket(f"{at.web}/v1/policies/b") as peer:
            assert msgpack.unpackb(peer.recv())["image_keys"] == ["images/wrist"]
            peer.send(openpi.pack({"images/wrist": FRAME, "state": np.ones(2), "prompt": "go"}))
            assert openpi.unpack(peer.recv())["actions"][0, 0] == 101
        with websocket(f"{at.web}/anything/else") as peer:
            assert msgpack.unpackb(peer.recv())["image_keys"] == ["images/front"]
        with pytest.raises(Exception, match="404"):
            websocket(f"{at.web}/v1/policies/c")


# ----------------------------------------------------------------------------- who computes when


class Walk(Puppet):
    """Computes when it is let, for a second of the clock ``now``, and notes whose turn it was."""

    def __init__(self, name: str, order: list[str], gate: threading.Semaphore, now: list[float]):
        super().__init__()
        self.name, self.order, self.gate, self.now = name, order, gate, now

    def run(self, observation: Observation, *, cancel: threading.Event | None = None) -> ActionChunk:
        assert self.gate.acquire(timeout=WAIT_S)
        self.now[0] += 1.0
        self.order.append(f"{self.name}{observation.prompt}")
        return ActionChunk(np.zeros((3, 2), np.float32))


def test_a_policy_is_all_that_a_server_asks_of_one():
    asked = {name for name in vars(ServedPolicy) if not name.startswith("_")}
    assert {"prepare", "run", "run_batch", "batch_key", "unbatched", "reset", "problem"} <= asked
    with load("pen") as policy:
        assert asked <= set(dir(policy))


def test_a_policy_that_says_nothing_of_itself_is_served():
    class Plain(ServedPolicy):
        spec = SPEC

        def prepare(self, observation: Observation) -> Observation:
            return observation

        def run(self, prepared: Observation, *, cancel: threading.Event | None = None) -> ActionChunk:
            return ActionChunk(np.zeros((3, 2), np.float32))

    with desk(policy=Plain()) as at, Client(at.native, timeout=WAIT_S) as robot:
        robot.reset()
        assert robot.infer(GOOD).actions.shape == (3, 2)
        assert "policies" not in at.service.health()
        with pytest.raises(SinewError, match="one observation at a time"):
            Batcher(4).calibrate(Plain())
        at.scheduler.drain()


def test_health_has_the_memory_of_the_gpu_that_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = {"name": "H100", "memory": {"limit": 80, "available": 60}, "own": 7, "peak": 9}
    with desk() as at, Client(at.native, timeout=WAIT_S) as robot:
        monkeypatch.setattr(machine, "gpu", lambda: None)
        assert "gpu" not in robot.health()
        monkeypatch.setattr(machine, "gpu", lambda: gpu)
        assert robot.health()["gpu"] == gpu


def put(scheduler: Scheduler, prompt: str, outcomes: list[Outcome], **options: Any) -> Request:
    found = Observation(images={}, state=np.zeros(2), prompt=prompt)
    return enqueue(scheduler, lambda _check: found, outcomes.append, **options)


@contextlib.contextmanager
def walking(*names: str) -> Iterator[SimpleNamespace]:
    """Run schedulers of policies with these names.

    By their clock each inference takes a second. So all turns cost the same, also on a machine that stops one of them.
    """
    order: list[str] = []
    gate, now = threading.Semaphore(0), [100.0]
    device_lock = DeviceLock()
    made = [Scheduler(Walk(name, order, gate, now), device_lock=device_lock) for name in names]
    with pytest.MonkeyPatch.context() as patch:
        clock = SimpleNamespace(**{**vars(time), "perf_counter": lambda: now[0]})
        patch.setattr("sinew.serve.scheduler.time", clock)
        for scheduler in made:
            scheduler.start()
        try:
            yield SimpleNamespace(
                order=order, gate=gate, device_lock=device_lock, schedulers=made, outcomes=[]
            )
        finally:
            for scheduler in made:
                scheduler.stop()
            for _ in range(20):
                gate.release()
            for scheduler in made:
                assert scheduler.join(WAIT_S)


def test_policies_take_turns_and_so_do_robots_inside_them():
    with walking("a", "b") as at:
        a, b = at.schedulers
        put(a, "0", at.outcomes, client="flood")
        until(lambda: a.stats()["running"])
        for number in (1, 2):  # as many as one connection may have
            put(a, str(number), at.outcomes, client="flood")
        put(a, "3", at.outcomes, client="quiet")
        put(b, "4", at.outcomes, client="other")
        last = put(b, "5", at.outcomes, client="other")
        until(
            lambda: (
                len(a._ready.order()) == 3 and len(b._ready.order()) == 1 and len(at.device_lock._line) == 2
            )
        )
        assert at.device_lock.beside(a) == [last]  # each knows what its batch would keep waiting
        assert at.device_lock.beside(b) == a._ready.order()[:1]
        for done in range(1, 7):
            at.gate.release()
            until(lambda done=done: len(at.outcomes) == done)
        assert at.order == ["a0", "b4", "a3", "b5", "a1", "a2"]  # what ran was charged to the flood


def test_a_flood_takes_one_turn_in_three():
    """A flooder with all that it may have waiting, always, beside two robots that ask again when they are answered."""
    with walking("a") as at:
        (a,) = at.schedulers
        put(a, "first", at.outcomes, client="first")
        until(lambda: a.stats()["running"])
        for prompt in ("flood", "flood", "one", "two"):
            put(a, prompt, at.outcomes, client=prompt)
        until(lambda: len(a._ready.order()) == 4)
        for done in range(1, 20):
            at.gate.release()
            until(lambda done=done: len(at.outcomes) == done)
            last = at.order[done - 1].removeprefix("a")
            if last != "first":
                put(a, last, at.outcomes, client=last)
                until(lambda: len(a._ready.order()) + a.stats()["running"] >= 4)
        counts = {name: at.order.count(f"a{name}") for name in ("flood", "one", "two")}
        assert sum(counts.values()) == 18
        assert max(counts.values()) <= 7  # turns are shared by time, of which each takes the same


def test_a_newer_request_of_a_session_has_the_turn_that_the_older_one_waited_for():
    with walking("a", "b") as at:
        a, b = at.schedulers
        put(a, "0", at.outcomes, client="x")
        until(lambda: a.stats()["running"])
        put(b, "1", at.outcomes, client="y", session="arm")
        put(a, "2", at.outcomes, client="z")
        until(lambda: len(at.device_lock._line) == 2)  # b waits for its turn with the older one in its hand
        put(b, "3", at.outcomes, client="y", session="arm")
        until(lambda: len(at.outcomes) == 1 and b._ready.order())
        for _ in range(3):
            at.gate.release()
        until(lambda: len(at.outcomes) == 4)
        assert at.order == ["a0", "b3", "a2"]


def test_who_is_cancelled_while_others_compute_takes_no_turn():
    with walking("a", "b") as at:
        a, b = at.schedulers
        put(a, "0", at.outcomes, client="x")
        until(lambda: a.stats()["running"])
        waiting = put(b, "1", at.outcomes, client="y")
        until(lambda: len(at.device_lock._line) == 2)
        b.cancel(waiting)
        until(lambda: len(at.outcomes) == 1)
        at.gate.release()
        until(lambda: len(at.outcomes) == 2)
        assert at.order == ["a0"]
        put(b, "2", at.outcomes, client="y")
        at.gate.release()
        until(lambda: len(at.outcomes) == 3)
        b.drain()
        assert at.device_lock.beside(a) == []


def test_the_lane_goes_on_when_a_thread_in_it_ends():
    device_lock = DeviceLock()
    with pytest.raises(KeyError), device_lock:
        raise KeyError
    with device_lock:
        other = threading.Thread(target=device_lock.__enter__)
        other.start()
        until(lambda: len(device_lock._line) == 2)
    other.join(WAIT_S)
    assert len(device_lock._line) == 1


def test_a_batch_breaks_no_deadline_of_another_policy():
    made = Batcher(8)
    for size, seconds in {1: 1.0, 2: 1.5, 3: 1.75, 4: 2.0}.items():
        made.costs.learn("kind", size, seconds)

    def job(kind: str, deadline: float | None = None) -> ServingJob:
        return ServingJob(Request("", lambda budget: None), deadline, prepared=PreparedInputs(kind=kind))  # type: ignore[arg-type,return-value]

    line = [job("kind") for _ in range(4)]
    assert len(made.members(line[0], line[1:], 0.0, [job("other")])) == 4
    assert len(made.members(line[0], line[1:], 0.0, [job("other", deadline=2.6)])) == 2
    assert len(made.members(line[0], line[1:], 0.0, [job("kind", deadline=2.1)])) == 1
    assert (
        len(made.members(line[0], line[1:], 0.0, [job("other", deadline=1.5)])) == 4
    )  # which is late either way


def test_several_workers_wait_at_once():
    """For a policy that computes elsewhere."""
    order: list[str] = []
    gate = threading.Semaphore(0)
    scheduler = Scheduler(Walk("a", order, gate, [0.0]), workers=3)
    scheduler.start()
    outcomes: list[Outcome] = []
    for number in range(4):
        put(scheduler, str(number), outcomes, client=number)
    until(lambda: len(scheduler._running) == 3)
    assert scheduler.stats()["waiting"] == 1
    for _ in range(4):
        gate.release()
    until(lambda: len(outcomes) == 4)
    assert scheduler.stats()["served"] == 4
    scheduler.stop()
    assert scheduler.join(WAIT_S)


# ----------------------------------------------------------------------------- flags


def test_flags_name_policies():
    assert named_policies(["b=x.gguf", "c=org/name=1"]) == {"b": "x.gguf", "c": "org/name=1"}
    for text, words in (
        ("b", "expected NAME=SOURCE"),
        ("b=", "expected NAME=SOURCE"),
        ("a/b=x", "expected a name"),
        ("default=x", "is the name of the first policy"),
    ):
        with pytest.raises(SinewError, match=words):
            named_policies([text])
    with pytest.raises(SinewError, match="another policy's name"):
        named_policies(["b=x", "b=y"])
