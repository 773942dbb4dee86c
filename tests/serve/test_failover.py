"""A client with several addresses: which of them answers, and what is not sent around."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from sinew_client import Client, ClientError, ConnectionLost, RequestTimeout, ServerError
from sinew_client.control.requester import Requester

from tests import processes
from tests.serve.puppet import GOOD, WAIT_S, desk, until


def nobody() -> str:
    return f"127.0.0.1:{processes.free_port()}"


def test_the_next_address_where_nobody_listens():
    with desk() as second:
        with Client(
            [nobody(), second.native.removeprefix("tcp://")], timeout=WAIT_S, connect_timeout=WAIT_S
        ) as client:
            assert client.infer(GOOD).actions.shape == (3, 2)
            assert client.address == second.native
            client.infer(GOOD)
        assert second.puppet.computed == ["go", "go"]


def test_a_server_that_stops_during_the_request():
    with desk() as second:
        with desk() as first:
            client = Client([first.native, second.native], timeout=WAIT_S, connect_timeout=WAIT_S)
            client.infer(GOOD)
            found: list = []
            held = threading.Thread(target=lambda: found.append(client.infer({**GOOD, "prompt": "wait"})))
            second.puppet.release.set()
            held.start()
            until(lambda: first.scheduler.stats()["running"])
            first.scheduler.stop()  # the request ends between two stages
            held.join(WAIT_S)
        assert found[0].actions.shape == (3, 2)
        assert (first.puppet.computed, second.puppet.computed) == (["go"], ["wait"])
        assert client.address == second.native
        client.close()


def test_back_to_the_first_when_the_second_ends():
    with desk() as first:
        with desk() as second:
            client = Client([nobody(), second.native, first.native], timeout=WAIT_S, connect_timeout=WAIT_S)
            client.infer(GOOD)
            assert client.address == second.native
        client.infer(GOOD)
        assert client.address == first.native
        client.close()


def test_nobody_at_all():
    with Client([nobody(), nobody()], timeout=WAIT_S, connect_timeout=WAIT_S) as client:
        with pytest.raises(ConnectionLost, match="no server answers at tcp://127.0.0.1:"):
            client.infer(GOOD)
        with pytest.raises(RequestTimeout, match=" or tcp://"):
            client.infer(GOOD, timeout=0.0)
    with pytest.raises(ClientError, match="one or more"):
        Client([])


def test_what_is_wrong_with_a_request_is_wrong_everywhere():
    with (
        desk() as first,
        desk() as second,
        Client([first.native, second.native], timeout=WAIT_S, connect_timeout=WAIT_S) as client,
    ):
        with pytest.raises(ServerError, match="internal"):
            client.infer({**GOOD, "prompt": "fail"})
        assert client.address == first.native
        assert not second.puppet.computed


def test_a_robot_goes_on_with_the_other_server():
    """The control loop's requester: it opens its connection anew after a failure, and holds in between."""
    with desk() as second:
        with desk() as first:
            addresses = [first.native, second.native]

            def connect():
                client = Client(addresses, timeout=WAIT_S, connect_timeout=WAIT_S)
                return lambda observation, limit: client.infer(observation, timeout=limit).actions

            requester = Requester(connect, deadline=WAIT_S)
            requester.ask(GOOD, 0.0)
            assert np.isfinite(until(lambda: requester.poll(0.0)).value).all()
        requester.ask(GOOD, 1.0)
        assert np.isfinite(until(lambda: requester.poll(1.0)).value).all()
        assert (requester.failures, second.puppet.computed) == (0, ["go"])
        requester.close(WAIT_S)
