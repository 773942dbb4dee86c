"""Calls to one of several servers: a hung one costs a share of a request's time, and is not asked first again."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import zmq
from sinew_client import Client, RequestTimeout, schema
from sinew_client.control import Servers

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
    with Client([hung, address], timeout=4.0, connect_timeout=60.0) as client:
        np.testing.assert_array_equal(client.infer(OBSERVATION).actions, [[0], [1]])
    assert asked == ["x"]


def test_an_address_given_twice_does_not_hide_the_next(hung: str, answering: tuple[str, list[str]]) -> None:
    with Client([hung, hung, answering[0]], timeout=6.0, connect_timeout=60.0) as client:
        assert client.infer(OBSERVATION).actions.shape == (2, 1)
        assert (client.address, client.place) == (answering[0], 2)


def test_a_new_call_begins_where_the_last_was_answered(hung: str, answering: tuple[str, list[str]]) -> None:
    address, asked = answering
    servers = Servers([hung, address], without=["prompt"])
    first = servers()
    assert first(OBSERVATION, 2.0).shape == (2, 1)
    first.close()
    assert servers.addresses == [address, hung]
    second = servers()
    second(OBSERVATION, 2.0)
    second.close()
    assert servers.addresses == [address, hung]
    assert asked == ["", ""]  # what is not sent


def test_one_address_is_waited_for_until_the_end(hung: str) -> None:
    with Client(hung, timeout=0.3, connect_timeout=0.05) as client, pytest.raises(RequestTimeout):
        client.infer(OBSERVATION)


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

    client = SimpleNamespace(infer=infer, place=1, close=lambda: closed.append(True))
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
