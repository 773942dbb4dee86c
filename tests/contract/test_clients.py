"""What a client promises over its link, of every kind that there is: blocking, for coroutines, of streams.

A cell is a kind and a behaviour, tried through real sockets; what a kind cannot have says why.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import zmq
from sinew_client import Client, ClientError, ConnectionLost, RequestTimeout, ServerError, schema
from sinew_client.aio import AsyncClient
from sinew_client.streams import StreamLink

from tests import processes

WAIT_S = 30.0
SOON_S = 0.3  # a time-out that is meant to pass
# This time limit is meant to pass as well, but it is long enough for one attempt to connect on a busy machine.
REFUSED_S = 2.0
KEY = "a key of the test"
OBSERVATION = {"images": {"front": np.zeros((4, 6, 3), np.uint8)}, "state": [0.5], "prompt": "go"}


class Server:
    """Answers every request with its own number. does: "answer", "keep" silent, or a code to refuse with."""

    def __init__(self, number: float = 1.0, does: str = "answer", port: int = 0):
        self.number, self.does, self.asked, self.keys = number, does, 0, set()
        self._context, self._end = zmq.Context(), threading.Event()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        # A port that the system assigns could be taken by another process before a server comes back to it.
        self.port = port or processes.free_port()
        self.address = f"tcp://127.0.0.1:{self.port}"
        self._socket.bind(self.address)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._end.is_set():
            if not self._socket.poll(5):
                continue
            *head, body = self._socket.recv_multipart()
            request = schema.PredictRequest.FromString(body)
            if request.kind == schema.PredictRequest.Kind.Value("STREAM_END"):
                continue
            self.keys.add(request.api_key)
            self.asked += 1
            if self.does != "keep":
                self._socket.send_multipart([*head, self._answer(request)])
        self._socket.close(0)
        self._context.term()

    def _answer(self, request: Any) -> bytes:
        reply = schema.PredictResponse(request_id=request.request_id, horizon=1, dim=1)
        reply.actions.append(self.number)
        if self.does != "answer":
            reply.error_code, reply.error = self.does, "the server says so"
        elif request.rate:
            reply.window.step, reply.window.sample_time = 0, request.time
        return reply.SerializeToString()

    def close(self) -> None:
        self._end.set()
        self._thread.join()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self.close()


def nobody() -> str:
    return f"tcp://127.0.0.1:{processes.free_port()}"


def until(what: Callable[[], Any]) -> Any:
    end = time.monotonic() + WAIT_S
    while not (found := what()):
        assert time.monotonic() < end
        time.sleep(0.001)
    return found


# ----------------------------------------------------------------------------- kinds


class Blocking:
    """sinew_client.Client."""

    without: dict[str, str] = {}  # noqa: RUF012 - behaviour -> why this kind cannot have it

    def __init__(self, *addresses: str, **settings: Any):
        self.client = Client(list(addresses), **{"timeout": WAIT_S, "api_key": KEY, **settings})

    def ask(self, **given: float) -> float:
        """Return the number of the server that answers."""
        return float(self.client.infer(OBSERVATION, **given).actions[0, 0])

    @property
    def address(self) -> str:
        return self.client.address

    def close(self) -> None:
        self.client.close()

    def finish(self) -> None:
        self.close()


class OfCoroutines(Blocking):
    """sinew_client.aio.AsyncClient."""

    def __init__(self, *addresses: str, **settings: Any):
        self.client: Any = AsyncClient(list(addresses), **{"timeout": WAIT_S, "api_key": KEY, **settings})
        self.loop = asyncio.new_event_loop()

    def ask(self, **given: float) -> float:
        return float(self.loop.run_until_complete(self.client.infer(OBSERVATION, **given)).actions[0, 0])

    def close(self) -> None:
        self.loop.run_until_complete(self.client.close())

    def finish(self) -> None:
        self.close()
        self.loop.close()


class OfStreams(Blocking):
    """sinew_client.streams.StreamLink: a sample that is not answered is followed by the next."""

    without = {  # noqa: RUF012
        "deadline": "a sample is answered or not, and nothing waits for it; what a robot does then is its loop's",
        "retries": "a sample is not sent twice: the next one is newer",
    }

    def __init__(self, *addresses: str, **settings: Any):
        self.client: Any = StreamLink(list(addresses), 50.0, "", KEY, **settings)
        self.now = 0.0

    def ask(self, **_given: float) -> float:
        before, end = self.client.faults.total, time.monotonic() + WAIT_S
        self.client.error = ""
        self.now += 1.0
        while time.monotonic() < end:
            self.client.send([0.5], self.now, images=OBSERVATION["images"])
            if not self.client.wait_connected(0.02):
                if "not a Sinew server" in self.client.error:
                    raise ConnectionLost(self.client.error)
                if self.client._closed:
                    raise ClientError("the client is closed")
            self.client.wait_window(0.02)
            for window in self.client.windows():
                if window.sample_time == self.now:  # a slow server may answer two samples of one call
                    return float(window.rows[0, 0])
            if self.client.faults.total > before:
                raise ServerError(next(iter(self.client.faults.counts)), self.client.error)
        raise RequestTimeout("no window")


KINDS = [Blocking, OfCoroutines, OfStreams]
pytestmark = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)


@pytest.fixture
def made(kind: type[Blocking], request: pytest.FixtureRequest) -> Iterator[Callable[..., Blocking]]:
    """Make clients of a kind; skip a behaviour that it cannot have."""
    behaviour = request.node.function.__name__.removeprefix("test_")
    if why := kind.without.get(behaviour):
        pytest.skip(why)
    with contextlib.ExitStack() as stack:

        def make(*addresses: str, **settings: Any) -> Blocking:
            found = kind(*addresses, **settings)
            stack.callback(found.finish)
            return found

        yield make


Make = Callable[..., Blocking]


# ----------------------------------------------------------------------------- behaviours


def test_answer(made: Make) -> None:
    with Server(7.0) as server:
        client = made(server.address)
        assert [client.ask(), client.ask()] == [7.0, 7.0]
        assert server.keys == {KEY}
        assert KEY not in repr(client.client)


def test_wrong_key_is_told_and_asked_nowhere_else(made: Make) -> None:
    with Server(does="unauthorized") as server, Server() as other:
        client = made(server.address, other.address)
        with pytest.raises(ServerError, match="unauthorized"):
            client.ask()
        assert not other.asked


def test_next_address_where_nobody_listens(made: Make) -> None:
    with Server(2.0) as second:
        client = made(nobody(), second.address)
        assert client.ask() == 2.0
        assert client.address == second.address


def test_next_address_where_the_connection_breaks(made: Make) -> None:
    first = Server(1.0)
    with Server(2.0) as second:
        client = made(first.address, second.address)
        assert client.ask() == 1.0
        first.does = "keep"
        ending = threading.Thread(target=lambda: (until(lambda: first.asked >= 2), first.close()))
        ending.start()
        assert client.ask() == 2.0
        ending.join()


def test_next_address_where_the_server_leaves(made: Make) -> None:
    with Server(1.0, "shutting_down") as first, Server(2.0) as second:
        client = made(first.address, second.address)
        assert client.ask() == 2.0
        assert client.address == second.address


def test_next_address_where_nothing_comes(made: Make) -> None:
    with Server(does="keep") as first, Server(2.0) as second:
        client = made(first.address, second.address, timeout=5 * SOON_S)
        with contextlib.suppress(RequestTimeout):
            client.ask()
        assert client.ask(timeout=WAIT_S) == 2.0


def test_around_to_the_first(made: Make) -> None:
    with Server(1.0) as first:
        with Server(2.0) as second:
            client = made(nobody(), second.address, first.address)
            assert client.ask() == 2.0
        assert client.ask() == 1.0


def test_server_that_comes_back(made: Make) -> None:
    with Server(1.0) as server:
        client = made(server.address)
        assert client.ask() == 1.0
    with Server(2.0, port=server.port):
        assert client.ask() == 2.0


def test_deadline(made: Make) -> None:
    with Server() as server:
        client = made(server.address)
        assert client.ask() == 1.0  # connected, which a time-out would say it is not
        server.does = "keep"
        with pytest.raises(RequestTimeout, match=r"no answer from tcp://127.0.0.1:\d+ within [\d.]+ s$"):
            client.ask(timeout=SOON_S)
        server.does = "answer"  # and what was late answers nothing else
        assert client.ask() == 1.0
    client = made(nobody(), timeout=REFUSED_S)
    with pytest.raises(RequestTimeout, match=r"within 2 s: no connection \(Connection refused\)"):
        client.ask()


def test_a_last_attempt_without_time_keeps_the_reason(kind: type[Blocking]) -> None:
    """The time limit may end the last attempt of a request to connect, although the server refuses connections."""
    if kind is OfStreams:
        pytest.skip("a stream tries until it is closed")
    asker = kind(nobody())
    asker.client._connecting(ConnectionRefusedError(111, "refused"))
    asker.client._connecting(TimeoutError("timed out"))
    assert asker.client._unreached == "Connection refused"
    with contextlib.suppress(RequestTimeout):
        asker.ask(timeout=0.0)
    assert asker.client._unreached == ""  # the next request has not tried to connect yet
    asker.finish()


def test_retries(made: Make) -> None:
    server = Server(does="keep")
    client = made(server.address, retries=1)
    done: list[Server] = []

    def replace() -> None:
        until(lambda: server.asked)
        server.close()
        done.append(Server(3.0, port=server.port))

    ending = threading.Thread(target=replace)
    ending.start()
    assert client.ask() == 3.0
    ending.join()
    done[0].close()


def test_no_server_of_zeromq_is_told(made: Make) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        end = threading.Event()

        def answer() -> None:
            while not end.is_set():
                with contextlib.suppress(OSError), listening.accept()[0] as found:
                    found.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" + bytes(64))
                    found.settimeout(WAIT_S)
                    found.recv(1 << 16)

        listening.settimeout(0.05)
        thread = threading.Thread(target=answer)
        thread.start()
        try:
            client = made(f"tcp://127.0.0.1:{listening.getsockname()[1]}")
            with pytest.raises(ConnectionLost, match="not a Sinew server"):
                client.ask()
        finally:
            end.set()
            thread.join()


def test_closed(made: Make) -> None:
    with Server() as server:
        client = made(server.address)
        client.ask()
        client.close()
        client.close()
        with pytest.raises(ClientError, match="closed"):
            client.ask()


def test_bad_address(kind: type[Blocking]) -> None:
    with pytest.raises(ClientError, match="expected tcp://HOST:PORT with the port of the native protocol"):
        kind("ipc://tmp/x")
    with pytest.raises(ClientError, match="one or more addresses, all with the same policy"):
        kind("a:1/x", "a:1/y")


def test_without_the_library_of_zeromq(kind: type[Blocking]) -> None:
    code = (
        "import sys; sys.modules.update(dict.fromkeys(('zmq', 'msgpack', 'torch')));"
        "import sinew_client.aio, sinew_client.streams, sinew_client.control; sinew_client.Client"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=WAIT_S)


def test_one_late_answer_harms_no_other(kind: type[Blocking]) -> None:
    """Of coroutines alone: several requests are under way, and one of them runs out of time."""
    if kind is not OfCoroutines:
        pytest.skip("one request at a time")

    async def ask() -> None:
        with Server(does="keep") as server:
            async with AsyncClient(server.address, timeout=WAIT_S) as client:
                patient = asyncio.ensure_future(client.infer(OBSERVATION))
                with pytest.raises(RequestTimeout):
                    await client.infer(OBSERVATION, timeout=SOON_S)
                assert not patient.done()
                until(lambda: server.asked == 2)  # on a busy machine it may have read neither by now
                server.does = "answer"
                assert (await client.infer(OBSERVATION)).actions[0, 0] == 1.0
                assert not patient.done()  # it was not asked again: its server may still be computing it
                patient.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await patient
                given_up = asyncio.ensure_future(client.infer(OBSERVATION))
                await asyncio.sleep(0)
                given_up.cancel()
                assert (await client.infer(OBSERVATION)).actions[0, 0] == 1.0
                asked = await asyncio.gather(*(client.infer(OBSERVATION) for _ in range(20)))
                assert len(asked) == 20
                assert len(client._links) == 1

    asyncio.run(ask())


def test_an_idle_stream_takes_no_time_and_ends(kind: type[Blocking]) -> None:
    """Of streams alone: their thread sleeps while there is nothing to do, and ends with them."""
    if kind is not OfStreams:
        pytest.skip("no thread of its own")
    with Server() as server:
        client = OfStreams(server.address)
        assert client.ask() == 1.0
        thread = client.client._thread
        turns: list[str] = []
        client.client._changed.notify_all = lambda: turns.append("woken")  # type: ignore[method-assign]
        for _ in range(10):
            assert client.ask() == 1.0
        assert not turns  # what the connection takes at once needs nobody else
        del client.client._changed.notify_all
        client.close()
        thread.join(WAIT_S)
        assert not thread.is_alive()


def test_what_a_stream_cannot_send_at_once_is_sent_whole(kind: type[Blocking]) -> None:
    """Of streams alone: a frame larger than what the system buffers, to a server that reads late."""
    if kind is not OfStreams:
        pytest.skip("no thread of its own")
    frame = np.arange(3000 * 3000 * 3, dtype=np.uint32).astype(np.uint8).reshape(3000, 3000, 3)
    found: list[bytes] = []
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        # The server's side stores one message that the test has not read, so later samples wait on any machine.
        router.setsockopt(zmq.RCVHWM, 1)
        port = router.bind_to_random_port("tcp://127.0.0.1")
        link = StreamLink(f"127.0.0.1:{port}", 50.0)
        assert link.wait_connected(WAIT_S)
        for number in range(20):  # some wait, and those that come then are dropped
            link.send([float(number)], float(number), images={"front": frame})
        assert link.dropped > 0
        router.setsockopt(zmq.RCVTIMEO, int(WAIT_S * 1e3))
        while len(found) < link.sent:
            found.append(router.recv_multipart()[1])
        link.close()
        requests = [schema.PredictRequest.FromString(each) for each in found]
        numbers = [request.raw_state[0] for request in requests]
        assert numbers == sorted(set(numbers))  # which ones had room is the system's
        assert link.sent + link.dropped == 20
        assert all(request.images[0].data == frame.tobytes() for request in requests)
