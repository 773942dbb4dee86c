"""A fleet without Ray: its configuration, what a replica answers, and a gateway whose replicas die."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as Waited
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml
from sinew_client import Client, ServerError

from sinew.core import ActionChunk, CancelledError, Observation, ObservationError, SinewError
from sinew.serve.fleet import cluster
from sinew.serve.fleet.config import parse, read
from sinew.serve.fleet.remote import TRIES, RemotePolicy
from sinew.serve.fleet.replica import About, ErrorRecord, Replica
from sinew.serve.fleet.scaling import INFERENCE, TARGET, by_queue_age, replicas_wanted
from sinew.serve.policies import Deployment, Policies
from sinew.serve.scheduler import Scheduler
from sinew.serve.service import Service
from sinew.serve.supervise import Supervisor
from sinew.serve.transport.listen import Listen
from sinew.serve.transport.zeromq import ZeroMQWire
from sinew.serve.wires.native import NativeCodec
from tests.hostile.decoders import REPORT
from tests.serve.puppet import GOOD, SPEC, WAIT_S, until

ONE = {"policies": {"default": {"source": "a.gguf"}}}


class ReplicaLostError(Exception):
    """As Ray's errors of an actor that has gone."""


class Call:
    """A call of a replica, on a thread."""

    def __init__(self, future: Future[Any]):
        self._future = future
        self.cancelled = False

    def result(self, *, timeout_s: float | None = None) -> Any:
        try:
            return self._future.result(timeout_s)
        except Waited:
            raise TimeoutError from None

    def cancel(self) -> None:
        self.cancelled = True


def remote(answers: Callable[[Observation], Any], pool: ThreadPoolExecutor) -> RemotePolicy:
    about = About(SPEC, {"server": {"engine": "puppet"}, "policy": SPEC.to_dict()}, 2, 2)
    return RemotePolicy(about, lambda each: Call(pool.submit(answers, each)), (ReplicaLostError,), "default")


def echo(observation: Observation) -> ActionChunk:
    return ActionChunk(np.full((3, 2), np.asarray(observation.state)[0], np.float32), seed=0)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as made:
        yield made


def test_a_configuration_names_what_is_wrong(tmp_path):
    found = parse({"policies": {**ONE["policies"], "b": {"source": "b", "replicas": {"min": 2, "max": 5}}}})
    assert (found.policies["default"].most, found.policies["b"].most, found.address) == (2, 5, None)
    for change, words in (
        ({"policies": {}}, "expected a policy with the name default"),
        ({"policies": {"default": {}}}, "source"),
        ({"policies": {"default": {"source": "a", "cpu": 2}}}, "cpu"),
        ({"policies": {"default": {"source": "a", "replicas": 0}}}, "replicas"),
        (
            {"policies": {"default": {"source": "a", "replicas": {"min": 3, "max": 2}}}},
            "expected min of at most 2",
        ),
        ({"policies": {**ONE["policies"], "a/b": {"source": "a"}}}, "expected a name"),
        ({"policies": {"default": {"source": "a", "max_batch": "big"}}}, "max_batch"),
        ({"policies": {"default": {"source": "a", "cpus": float("inf")}}}, "cpus"),
        ({"policies": {"default": {"source": "a", "drain_s": float("nan")}}}, "drain_s"),
        ({"policies": {"default": {"source": "a", "replicas": 10**8}}}, "replicas"),
        ({"policies": {"default": {"source": "a\0b"}}}, "policies.default.source: expected printable text"),
        ({"policies": {"default": {"source": "a", "device": "\ud800"}}}, "device: expected printable text"),
        ([], "object"),
        (None, "object"),
    ):
        with pytest.raises(SinewError, match=words):
            parse(change)
    file = tmp_path / "fleet.yaml"
    file.write_text(yaml.safe_dump(ONE))
    assert read(file) == parse(ONE)
    for text in ("a: [", "[" * 3000, "a: 2020-99-01", f"a: {'9' * 5000}"):
        file.write_text(text)
        with pytest.raises(SinewError, match="not YAML"):
            read(file)
    file.write_text("#" * (1 << 20) + "\n")
    with pytest.raises(SinewError, match="at most 262144 bytes"):
        read(file)
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(SinewError, match="expected a regular file"):
        read(tmp_path / "fifo")
    with pytest.raises(SinewError, match="No such file"):
        read(tmp_path / "none.yaml")


def test_what_a_cluster_refuses_is_the_configurations(monkeypatch):
    """The errors are Ray's own for no cluster, and for a replica that does not start (2.60)."""

    def fails(error: Exception) -> Callable[..., None]:
        def call(*_: object, **__: object) -> None:
            raise error

        return call

    ray = SimpleNamespace(init=fails(ConnectionError("Could not find any running Ray instance.")))
    serve = SimpleNamespace(run=fails(RuntimeError("Deploying application sinew-default failed")))
    monkeypatch.setattr(cluster, "libraries", lambda alone=False: (ray, serve))
    monkeypatch.setattr(cluster, "application", lambda config: config)
    fleet = cluster.Fleet(parse({"address": "auto", **ONE}), Supervisor(0))
    with pytest.raises(SinewError, match="address: no Ray cluster answers at 'auto'"):
        fleet.start()
    ray.init = lambda **_: None
    serve.start = lambda **_: None
    with pytest.raises(SinewError, match=r"policies\.default: no replica started with a\.gguf"):
        fleet.start()


def test_replicas_are_wanted_by_the_wait_that_they_prevent():
    assert replicas_wanted(8, [100.0], [100.0]) == pytest.approx(
        4
    )  # each has two: one waits while one is computed
    assert replicas_wanted(8, [100.0, 100.0], [300.0, 300.0]) == pytest.approx(2)
    assert replicas_wanted(0, [100.0], [50.0]) == 0
    assert replicas_wanted(8, [], [50.0]) is None
    assert replicas_wanted(8, [0.0], [50.0]) is None  # nothing was answered yet
    context = SimpleNamespace(
        total_num_requests=6.0,
        target_num_replicas=2,
        aggregated_metrics={INFERENCE: {"a": 50.0, "b": 50.0}, TARGET: {"a": 50.0, "b": 50.0}},
    )
    assert by_queue_age(context) == (3.0, {})
    context.aggregated_metrics = None
    assert by_queue_age(context) == (2, {})


def test_errors_come_back_as_what_they_were():
    field = ObservationError("state", "8 numbers", "3")
    back = ErrorRecord.of(field).error()
    assert isinstance(back, ObservationError)
    assert (back.field, str(back)) == ("state", str(field))
    error = SinewError("why")
    error.code = "unsafe_action"
    back = ErrorRecord.of(error).error()
    assert (back.code, str(back)) == ("unsafe_action", "why")


def test_a_replica_answers_and_refuses(rolling_bundle: Path):
    replica = Replica({"source": str(rolling_bundle), "engine": "eager", "threads": 1, "ongoing": 2})
    about = asyncio.run(replica.about())
    camera = about.spec.cameras[0]
    frame = np.zeros((camera.height, camera.width, 3), np.uint8)
    good = Observation(images={camera.name: frame}, state=np.zeros(about.spec.state.dim), prompt="go", seed=1)

    async def both() -> list[Any]:
        bad = Observation(images={camera.name: frame}, state=np.zeros(99), prompt="go")
        return list(await asyncio.gather(replica.infer(good), replica.infer(bad), replica.infer(good)))

    first, refused, second = asyncio.run(both())
    np.testing.assert_array_equal(first.actions, second.actions)
    assert (refused.code, refused.field) == ("bad_observation", "state")
    stats = replica.record_autoscaling_stats()
    assert stats[INFERENCE] > 0
    assert stats[TARGET] == 0
    replica.check_health()
    replica._service.supervisor.watch(lambda: "it is broken")
    with pytest.raises(RuntimeError, match="it is broken"):
        replica.check_health()
    replica._service.scheduler.stop()
    assert replica._service.scheduler.join(WAIT_S)


def test_a_request_whose_replica_dies_is_sent_to_another(pool):
    deaths = [ReplicaLostError("killed"), ReplicaLostError("killed")]

    def answer(observation: Observation) -> Any:
        if deaths:
            raise deaths.pop()
        return echo(observation)

    policy = remote(answer, pool)
    observation = Observation(images={}, state=np.array([7.0, 0.0]), prompt="go")
    assert policy.run(observation).actions[0, 0] == 7
    assert policy.state() == {"replicas": 1, "retried": 2}
    deaths += [ReplicaLostError("killed")] * 9
    with pytest.raises(
        SinewError, match=f"{TRIES} attempts on replicas failed; the last error was: ReplicaLostError: killed"
    ):
        policy.run(observation)
    policy.replicas = 0
    assert policy.problem() == "the policy default has no running replica"


def test_what_is_wrong_with_a_request_is_wrong_on_every_replica(pool):
    answers: list[Any] = [
        ErrorRecord("bad_observation", "state: no", "state", "a", "b"),
        ErrorRecord("busy", "full"),
    ]
    policy = remote(lambda _observation: answers.pop(0) if answers else echo(_observation), pool)
    observation = Observation(images={}, state=np.zeros(2), prompt="go")
    with pytest.raises(ObservationError, match="state"):
        policy.run(observation)
    assert policy.run(observation).actions[0, 0] == 0  # after the replica that was full
    assert policy.state()["retried"] == 1


@pytest.mark.parametrize("actions", [np.zeros((3, 7)), np.zeros((4, 2)), np.zeros(6), None])
def test_a_replica_of_another_form_answers_no_robot(pool, actions):
    """Attached to replicas that others change, a gateway handed on rows of another width."""
    policy = remote(lambda _: ActionChunk(actions, seed=0) if actions is not None else b"chunk", pool)
    with pytest.raises(
        SinewError, match=r"a replica of default answers with the shape .* instead of \(3, 2\)"
    ) as error:
        policy.run(Observation(images={}, state=np.zeros(2)))
    assert error.value.code == "unhealthy"


def test_a_request_that_nobody_waits_for_is_given_up(pool):
    gate = threading.Event()
    policy = remote(lambda observation: echo(observation) if gate.wait(WAIT_S) else None, pool)
    cancel = threading.Event()
    cancel.set()
    with pytest.raises(CancelledError):
        policy.run(Observation(images={}, state=np.zeros(2), prompt="go"), cancel=cancel)
    gate.set()


@contextlib.contextmanager
def gateway(policy: RemotePolicy, workers: int) -> Iterator[SimpleNamespace]:
    supervisor = Supervisor(0)
    scheduler = Scheduler(policy, supervisor=supervisor, workers=workers)
    supervisor.watch(policy.problem)
    scheduler.start()
    service = Service(Deployment(scheduler, SPEC, policy.about.metadata, None, 2, 2, state=policy.state))
    wire = ZeroMQWire(NativeCodec(), Listen())
    wire.start(service)
    try:
        yield SimpleNamespace(service=service, scheduler=scheduler, address=wire.address)
    finally:
        scheduler.stop()
        assert scheduler.join(WAIT_S)
        wire.stop()


def test_robots_of_a_gateway_get_their_own_answers_while_replicas_die(pool):
    # Every robot loses the same requests on each run: some once, and one as often as a request may be lost. If every
    # seventh call died, whoever sent it, a slow machine could give one request all the deaths.
    times = {0: 1, 7: 1, 14: 1, 21: 1, 5: TRIES - 1}
    left = {(robot, step): lost for robot in range(1, 6) for step, lost in times.items()}
    lock = threading.Lock()

    def answer(observation: Observation) -> Any:
        robot, step = (int(value) for value in observation.state)
        with lock:
            left[robot, step] = left.get((robot, step), 0) - 1
            dies = left[robot, step] >= 0
        if dies:
            raise ReplicaLostError("killed")
        return echo(observation)

    with gateway(remote(answer, pool), workers=4) as at:

        def robot(number: int) -> None:
            with Client(at.address, timeout=WAIT_S) as client:
                for step in range(25):
                    found = client.infer({**GOOD, "state": np.array([number, step], np.float32)})
                    assert found.actions[0, 0] == number

        with ThreadPoolExecutor(5) as robots:
            for each in [robots.submit(robot, number) for number in range(1, 6)]:
                each.result(WAIT_S)
        with Client(at.address, timeout=WAIT_S) as client:
            health = client.health()
            told = health["policies"]["default"]
            assert (told["served"], told["failed"]) == (125, 0)
            client.report(REPORT)
            assert [row["name"] for row in at.service.robots.rows()] == ["dry"]
            assert told["retried"] == 5 * sum(times.values())
            assert health["status"] == "ok"
            at.scheduler.policy.replicas = 0
            assert client.health()["status"] == "unhealthy"
            at.scheduler.policy.replicas = 2


def test_a_stream_is_refused_by_name(pool):
    from sinew_client.streams import StreamLink

    with gateway(remote(echo, pool), workers=1) as at:
        link = StreamLink(at.address, 50.0)

        def refused() -> bool:
            link.send(np.zeros(2), 0.0, images={"front": GOOD["images"]["front"]}, prompt="go")
            link.windows()
            return bool(link.error)

        until(refused)
        assert "a policy that computes in this process, got engine puppet" in link.error
        link.close()


def test_an_update_keeps_the_scheduler(pool):
    scheduler: Any = SimpleNamespace(stats=dict)
    policies = Policies(Deployment(scheduler, SPEC, {"old": 1}, state=remote(echo, pool).state))
    assert policies.put("default", replace(policies.get(), metadata={"new": 1})) is None
    assert policies.get().metadata == {"new": 1}
    assert policies.schedulers == (scheduler,)
    assert policies.several  # replicas have something to say


def test_errors_of_a_gateway_reach_the_robot(pool):
    refusal = ErrorRecord("bad_observation", "state: expected 8 numbers, got 2", "state", "8 numbers", "2")
    with gateway(remote(lambda _observation: refusal, pool), workers=1) as at, Client(at.address) as client:
        with pytest.raises(ServerError, match="state: expected 8 numbers, got 2") as refused:
            client.infer(GOOD)
        assert refused.value.code == "bad_observation"
