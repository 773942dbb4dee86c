"""Calls to one of several servers: a hung one costs a share of a request's time, and is not asked first again."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import zmq
from sinew_client import Client, ClientError, ConnectionLost, RequestTimeout, UnsafeChunk, schema
from sinew_client.control import Servers
from sinew_client.control.servers import PolicyCall
from sinew_client.faults import kind_of
from sinew_client.streams import StreamLink
from sinew_client.types import CameraSpec, MotionSpec, VectorSpec

from sinew.serve.policies import DEFAULT, Deployment
from sinew.serve.scheduler import Scheduler
from sinew.serve.transport.listen import Listen
from tests.processes import free_port
from tests.serve.puppet import GOOD, SPEC, WAIT_S, Puppet, desk, until

OBSERVATION = {"images": {}, "state": np.zeros(1, np.float32), "prompt": "x"}


@pytest.fixture
def hung() -> Iterator[str]:
    """An address where the kernel accepts, and nobody answers."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"tcp://127.0.0.1:{listening.getsockname()[1]}"


@pytest.fixture
def answering() -> Iterator[tuple[str, list[str]]]:
    """A server that answers at once, and the prompts that it was asked."""
    asked: list[str] = []
    with zmq.Context() as context, context.socket(zmq.REP) as rep:
        address = f"tcp://127.0.0.1:{rep.bind_to_random_port('tcp://127.0.0.1')}"
        ended = threading.Event()

        def serve() -> None:
            while not ended.is_set():
                if not rep.poll(20):
                    continue
                request = schema.PredictRequest.FromString(rep.recv())
                if request.kind == 0:  # an observation, and no question about the policy
                    asked.append(request.prompt)
                reply = schema.PredictResponse(request_id=request.request_id, horizon=2, dim=1)
                reply.actions.extend([0.0, 1.0])
                rep.send(reply.SerializeToString())

        thread = threading.Thread(target=serve)
        thread.start()
        yield address, asked
        ended.set()
        thread.join()


def test_a_short_deadline_leaves_time_for_the_other_server(
    hung: str, answering: tuple[str, list[str]]
) -> None:
    """Shorter than the time that a connection may take."""
    address, asked = answering
    # Half of the time is for the server that answers, on a busy machine too.
    with Client([hung, address], timeout=8.0, connect_timeout=60.0) as client:
        np.testing.assert_array_equal(client.infer(OBSERVATION).actions, [[0], [1]])
    assert asked == ["x"]


def test_an_address_given_twice_does_not_hide_the_next(hung: str, answering: tuple[str, list[str]]) -> None:
    with Client([hung, hung, answering[0]], timeout=12.0, connect_timeout=60.0) as client:
        assert client.infer(OBSERVATION).actions.shape == (2, 1)
        assert (client.address, client.place) == (answering[0], 2)


def test_a_new_call_begins_where_the_last_was_answered(hung: str, answering: tuple[str, list[str]]) -> None:
    address, asked = answering
    servers = Servers([hung, address], without=["prompt"])
    first = servers()
    assert first(OBSERVATION, 8.0).shape == (2, 1)
    first.close()
    assert servers.addresses == [address, hung]
    second = servers()
    second(OBSERVATION, WAIT_S)
    second.close()
    assert servers.addresses == [address, hung]
    assert asked == ["", ""]  # what is not sent


def test_one_address_is_waited_for_until_the_end(hung: str) -> None:
    with Client(hung, timeout=0.3, connect_timeout=0.05) as client, pytest.raises(RequestTimeout):
        client.infer(OBSERVATION)


def test_a_call_to_a_policy_returns_its_rows_within_its_time() -> None:
    closed: list[bool] = []
    policy: Any = SimpleNamespace(close=lambda: closed.append(True))
    policy.infer = lambda observation, timeout: SimpleNamespace(actions=(observation, timeout))
    call = PolicyCall(policy)
    assert call(OBSERVATION, 0.5) == (OBSERVATION, 0.5)
    call.close()
    assert closed == [True]


def test_what_a_call_notes_of_its_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Milliseconds on the network, all of them where nothing came, and who answered."""
    took: list[float] = []
    closed: list[bool] = []
    answers: Any = iter([(30.0, 10.0), (5.0, 10.0), RequestTimeout("late")])

    def infer(observation: Any, timeout: float) -> Any:
        found = next(answers)
        if isinstance(found, Exception):
            raise found
        timing = SimpleNamespace(server_ms=found[1])
        return SimpleNamespace(actions=timeout, round_trip_ms=found[0], timing=timing)

    client = SimpleNamespace(infer=infer, place=1, close=lambda: closed.append(True), spec=SPEC)
    monkeypatch.setattr(Servers, "client", lambda _: client)
    frames: Any = SimpleNamespace(quality=90, took=took.append)
    servers = Servers(["tcp://a:1", "tcp://b:1"], frames=frames)
    assert servers.present == "tcp://a:1"
    call = servers()
    assert call(OBSERVATION, 2.0) == 2.0
    assert (servers.present, client.jpeg_quality) == ("tcp://b:1", 90)
    call(OBSERVATION, 2.0)
    with pytest.raises(RequestTimeout, match="late"):
        call(OBSERVATION, 0.25)
    assert took == [20.0, 0.0, 250.0]
    servers.present = "tcp://a:1"
    call.close()
    assert (servers.addresses, servers.present) == (["tcp://b:1", "tcp://a:1"], "tcp://b:1")
    assert closed == [True]


def other(**changes: Any) -> Any:
    """Return a puppet whose policy differs, as its metadata says it."""
    puppet = Puppet()
    puppet.spec = replace(puppet.spec, **changes)
    return puppet


NAMED = {
    "action": VectorSpec(2, ("a", "b"), ("rad", "rad")),
    "motion": MotionSpec("absolute"),
    "control_hz": 20.0,
}


OTHERS = pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"action": VectorSpec(2, ("b", "a"), ("rad", "rad"))}, "action.names: expected a, b, got b, a"),
        ({"action": VectorSpec(2, ("a", "b"), ("deg", "deg"))}, "action.units: expected rad, rad, got deg, deg"),
        ({"state": VectorSpec(2, ("b", "a"))}, "state.names: expected a, b, got b, a"),
        ({"motion": MotionSpec("offsets", (0, 1), (0, 1))}, "motion: expected {'kind': 'absolute'"),
        ({"control_hz": 10.0}, "control_hz: expected 20, got 10"),
        ({"cameras": (CameraSpec("wrist", 48, 64),)}, "cameras: expected front, got wrist"),
        ({"chunk_size": 2, "name": "a newer one", "action": VectorSpec(2)}, ""),
    ],
)  # fmt: skip


@OTHERS
@pytest.mark.parametrize("way", ["began anew", "the next address"])
def test_rows_of_another_policy_than_the_robot_was_fitted_to_are_not_executed(
    changes: dict[str, Any], said: str, way: str
) -> None:
    """A server that comes back with another bundle, or another of the list; what is the same, or unstated, goes on."""
    seen = {**GOOD, "state": np.float32([0.5, 0.5])}
    ports = [free_port()] * 2 if way == "began anew" else [free_port(), free_port()]
    opened: Any = None

    def asked() -> np.ndarray:
        """Ask over the connection that stands, or a new one where it has broken, as a requester does."""
        nonlocal opened
        while True:
            opened = opened or servers()
            try:
                return opened(seen, WAIT_S)
            except ClientError as error:
                opened.close()
                opened = None
                if not isinstance(error, ConnectionLost):
                    raise

    with desk(policy=other(**NAMED), listen=Listen(port=ports[0])) as first:
        with Client(first.native, timeout=WAIT_S) as client:
            servers = Servers(
                [f"tcp://127.0.0.1:{port}" for port in dict.fromkeys(ports)],
                policy=client.metadata()["policy"] if way == "the next address" else None,  # the first's
            )
        assert asked().shape == (3, 2)
    with desk(policy=other(**{**NAMED, **changes}), listen=Listen(port=ports[1])):
        if not said:
            assert asked().shape == (3, 2)
        for _ in range(2 * bool(said)):
            with pytest.raises(UnsafeChunk, match=re.escape(said)) as caught:
                asked()
            assert (
                kind_of(caught.value) == "UnsafeChunk"
            )  # a mistake of somebody's, and no loss of a connection
    with desk(policy=other(**NAMED), listen=Listen(port=ports[1])):  # the right one is back
        assert asked().shape == (3, 2)
        opened.close()


def replaced(at: Any, **changes: Any) -> Deployment:
    """Put another policy in the place of a desk's first, as a hot-swap does; return it."""
    puppet = other(**{**NAMED, **changes})
    scheduler = Scheduler(puppet, supervisor=at.service.supervisor)
    scheduler.start()
    found = Deployment(scheduler, puppet.spec, {"policy": puppet.spec.to_dict(), "server": {}})
    at.service.policies.put(DEFAULT, found)
    return found


@OTHERS
@pytest.mark.parametrize("way", ["tcp", "ipc", "shared memory"])
def test_rows_of_a_policy_that_was_replaced_under_a_connection_are_not_executed(
    changes: dict[str, Any], said: str, way: str, tmp_path: Path
) -> None:
    """A signature of the defect: degrees read as radians until the connection broke."""
    frame = np.zeros((400, 600, 3) if way == "shared memory" else (48, 64, 3), np.uint8)
    seen = {**GOOD, "images": {"front": frame}, "state": np.float32([0.5, 0.5])}
    listen = None if way == "tcp" else Listen(path=str(tmp_path / "socket"))
    with desk(policy=other(**NAMED), listen=listen or Listen()) as at:
        call = Servers(at.native)()
        assert call(seen, WAIT_S).shape == (3, 2)
        assert call.policy.frames.startswith("shared" if way == "shared memory" else "in the message")
        for _ in range(2):
            second = replaced(at, **changes)
            if said:
                with pytest.raises(UnsafeChunk, match=re.escape(said)):
                    call(seen, WAIT_S)
            else:
                assert call(seen, WAIT_S).shape == (3, 2)
            third = replaced(at)
            assert call(seen, WAIT_S).shape == (3, 2)
            for each in (second, third):
                each.scheduler.stop()
        call.close()


def test_a_policy_that_was_replaced_before_it_is_described_is_not_taken_for_the_next() -> None:
    """Two exchanges in a row: rows of the one between them are of nobody who was asked."""
    with desk(policy=other(**NAMED)) as at:
        call = Servers(at.native)()
        call({**GOOD, "state": np.float32([0.5, 0.5])}, WAIT_S)
        opened = [replaced(at, control_hz=10.0)]
        call.policy.infer({**GOOD, "state": np.float32([0.5, 0.5])})
        opened.append(replaced(at))
        with pytest.raises(
            UnsafeChunk, match="has replaced the policy that computed this answer; send the request again"
        ):
            call._servers.fitted.check(call.policy)
        call({**GOOD, "state": np.float32([0.5, 0.5])}, WAIT_S)
        call.close()
        for each in opened:
            each.scheduler.stop()


def test_a_server_without_numbers_of_its_policies_is_served() -> None:
    """An older one: what it has is asked for once a connection."""
    with desk(policy=other(**NAMED)) as at:
        object.__setattr__(at.service.policies.get(), "number", 0)
        call = Servers(at.native)()
        for _ in range(3):
            assert call({**GOOD, "state": np.float32([0.5, 0.5])}, WAIT_S).shape == (3, 2)
        assert (call.policy.deployment, call.policy.exchanged) == (0, False)
        call.close()


def test_a_stream_sends_nothing_to_another_policy_than_the_robot_was_fitted_to() -> None:
    """It says why, and takes the next address, where the right one is."""
    swapped = {**NAMED, "action": VectorSpec(2, ("b", "a"), ("rad", "rad"))}
    with desk(policy=other(**NAMED)) as right, desk(policy=other(**swapped)) as wrong:
        with Client(right.native, timeout=WAIT_S) as client:
            policy = client.metadata()["policy"]
        alone = StreamLink(wrong.native, 20.0, policy=policy)
        until(lambda: alone.errors, "the refusal")
        assert (
            "another policy than at the start of this run: action.names: expected a, b, got b, a"
            in alone.error
        )
        assert not alone.send([0.0, 0.0], 0.0)
        alone.close()
        alone._thread.join(WAIT_S)  # until then it may try again, and count
        assert alone.faults.counts["UnsafeChunk"] == alone.errors
        both = StreamLink([wrong.native, right.native], 20.0, policy=policy)
        assert both.wait_connected(WAIT_S)
        assert both.address == right.native
        assert both.send([0.0, 0.0], 0.0)
        both.close()


def test_an_error_of_a_stream_is_counted_after_its_text_and_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A robot's loop reads them in its own thread as soon as the count has changed."""
    known: list[tuple[int, str]] = []
    link = StreamLink("tcp://127.0.0.1:1", 20.0)
    link.close()
    link._thread.join(WAIT_S)
    link.errors, link.error = 0, ""
    monkeypatch.setattr(link.faults, "add", lambda *_: known.append((link.errors, link.error)))
    link._note(ClientError("no head"))
    assert known == [(0, "no head")]
    assert link.errors == 1
