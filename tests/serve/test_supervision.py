"""What may not end a server, or hide that it has ended: failing policies, dying threads, hanging stages; and whose turn
it is when many ask."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import selectors
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import msgpack
import numpy as np
import pytest
import zmq
from sinew_client import Client, ConnectionLost, ServerError, protocol, schema
from websockets.sync.client import connect as websocket

from sinew.core import ActionChunk, BusyError, Observation, SinewError
from sinew.core.rate_limited_log import BURST, PERIOD_S, RateLimitedLog
from sinew.serve import scheduler as scheduling
from sinew.serve.decode.array import pack
from sinew.serve.job import RequestGroup, ServingJob
from sinew.serve.request import DeadlineError, Request, ShuttingDownError
from sinew.serve.scheduler import Scheduler
from sinew.serve.supervise import RESTARTS, Supervisor
from sinew.serve.transport import zeromq
from tests.serve.groot_client import decode_npy, encode_npy
from tests.serve.puppet import FRAME, GOOD, WAIT_S, Puppet, desk, enqueue, request, until
from tests.serve.test_bounded_work import body, post
from tests.serve.test_server import raw_socket


@contextlib.contextmanager
def client(at, **options):
    with Client(at.native, timeout=WAIT_S, **options) as made:
        yield made


@pytest.mark.parametrize("prompt", ["fail", "panic", "exit", "memory"])
def test_no_exception_ends_the_inference_thread(prompt):
    """Row 2: a PanicException is a BaseException; one request of a kilobyte ended all wires."""
    with desk() as at, client(at) as robot:
        for _ in range(5):
            with pytest.raises(ServerError, match="internal error") as caught:
                robot.infer({**GOOD, "prompt": prompt})
            assert "secret" not in str(caught.value)
            assert robot.infer(GOOD).actions.shape == (3, 2)
        assert robot.health()["status"] == "ok"


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, MemoryError])
def test_no_exception_ends_the_decode_threads(kind):
    def decode(_check):
        raise kind

    with desk() as at:
        outcomes: list = []
        enqueue(
            at.scheduler,
            lambda _check: Observation(images={}, state=np.zeros(2), prompt="hang"),
            outcomes.append,
        )
        until(lambda: at.scheduler.stats()["running"])
        for _ in range(5):
            enqueue(at.scheduler, decode, outcomes.append)
        until(lambda: len(outcomes) == 5)
        at.puppet.release.set()
        with client(at) as robot:
            assert robot.infer(GOOD).actions.shape == (3, 2)


def test_text_that_is_no_text_is_refused_before_a_tokenizer_sees_it():
    """Row 2's own way in: numpy text with code points above U+10FFFF."""
    from tests.serve.groot_client import PolicyClient

    with desk(("groot",)) as at:
        robot = PolicyClient("127.0.0.1", int(at.groot.rpartition(":")[2]))
        observation = {
            "video": {"front": np.zeros((1, 1, 48, 64, 3), np.uint8)},
            "state": {"state": np.zeros((1, 1, 2), np.float32)},
            "language": {"annotation.human.task_description": np.array(["go!"], "<U3")},
        }
        text = observation["language"]["annotation.human.task_description"]
        with contextlib.suppress(Exception):
            robot.get_action(observation)
        for point in (0x110000, 0x7FFFFFFF, 0xD800):
            text.view("<u4")[1] = point
            with pytest.raises(Exception, match="Unicode|characters"):
                robot.get_action(observation)


def test_a_thread_that_is_killed_comes_back():
    """An exception from outside, as a debugger or a signal may raise it in the middle of the loop.

    It may cost one request, or one connection, and whoever waited is told so; every answer is right.
    """
    numbers = itertools.count(1)

    def ask(robot: Client) -> None:
        number = float(next(numbers))
        actions = robot.infer({**GOOD, "state": np.full(2, number)}).actions
        np.testing.assert_array_equal(actions, np.full((3, 2), number))

    others = threading.enumerate()  # of servers that an earlier test left behind
    with desk() as at, client(at) as robot:
        ask(robot)
        for name in ("sinew-infer", "sinew-decode-0", "sinew-native"):
            (thread,) = (each for each in threading.enumerate() if each.name == name and each not in others)
            raised = ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit)
            )
            assert raised == 1
            lost = 0
            for _ in range(3):  # the first wakes the thread
                try:
                    ask(robot)
                except (ServerError, ConnectionLost):  # not a timeout, not another request's answer
                    lost += 1
            assert lost <= 1
            ask(robot)
            assert thread.is_alive()
        assert robot.health()["status"] == "ok"


class Cut:
    """A connection's socket whose ``send`` passes on the first ``count`` bytes and is then interrupted, once; what
    happens ``between`` the two is what other threads may do in that time."""

    def __init__(self, peer, count: int | None, between: Callable[[], None]):
        self._peer, self._socket, self._count, self._between = peer, peer.socket, count, between

    def __getattr__(self, name: str):
        return getattr(self._socket, name)

    def send(self, data) -> int:
        self._peer.socket = self._socket
        self._socket.send(data[: self._count])
        self._between()
        raise SystemExit


@pytest.mark.parametrize("count", [None, 5], ids=["whole", "in part"])
def test_a_reply_whose_sending_was_interrupted_is_not_sent_again(count):
    """The loop may have begun to wait until it can send the rest, at the time when nobody knows what was sent."""
    with desk() as at, raw_socket(at.native, zmq.DEALER) as robot:
        robot.send(request(1))
        assert schema.PredictResponse.FromString(robot.recv()).request_id == 1
        (peer,) = at.opened["native"].ledger.open

        def watched() -> None:
            at.opened["native"].wake(peer)
            until(lambda: peer.watched & selectors.EVENT_WRITE)

        peer.socket = Cut(peer, count, watched)
        robot.send(request(2))
        until(lambda: peer.closed)  # although the client sends nothing more
        wanted = [2] if count is None else []
        got = [schema.PredictResponse.FromString(robot.recv()).request_id for _ in wanted]
        assert got == wanted
        assert not robot.poll(200)


def test_a_thread_that_dies_again_and_again_is_hopeless():
    supervisor = Supervisor()
    runs = []

    def run() -> None:
        runs.append(1)
        raise SystemExit

    supervisor.thread("sinew-test", run).join(WAIT_S)
    assert len(runs) == RESTARTS + 1
    assert supervisor.problems() == ["the thread sinew-test has ended"]
    assert "sinew-test" in (supervisor.hopeless() or "")


def status(address: str) -> int:
    url = address.replace("ws://", "http://") + "/healthz"
    try:
        with urllib.request.urlopen(url, timeout=WAIT_S) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


def test_health_is_a_sign_of_life():
    """Row 16: a stage that hangs, a policy that always fails: health said ok."""
    with desk(("native", "web")) as at, client(at) as robot:
        assert (robot.health()["status"], status(at.web)) == ("ok", 200)
        at.service.supervisor.stuck_s = 0.3
        with raw_socket(at.native, zmq.DEALER) as other:
            other.send(request(1, "hang"))
            until(lambda: robot.health()["status"] == "unhealthy")
            assert status(at.web) == 503
            assert "computed for" in robot.health()["problems"][0]
            with pytest.raises(ServerError, match="computed for") as caught:
                robot.infer(GOOD)
            assert caught.value.code == "unhealthy"
            until(at.service.supervisor.hopeless)
            at.service.supervisor.stuck_s = WAIT_S
            at.puppet.release.set()
            until(lambda: robot.health()["status"] == "ok")
            assert robot.infer(GOOD).actions.shape == (3, 2)
            assert at.service.supervisor.hopeless() is None


def test_a_policy_that_always_fails_is_unhealthy_and_a_client_that_always_fails_is_not():
    with desk(("native", "web")) as at, client(at) as robot:
        for _ in range(10):
            with pytest.raises(ServerError):
                robot.infer({**GOOD, "prompt": "memory"})
        assert robot.health()["status"] == "ok"  # the policy was tried, and works
        assert at.puppet.warm_ups > 1
        at.puppet.sick = MemoryError("no memory")
        for _ in range(3):
            with pytest.raises(ServerError):
                robot.infer(GOOD)
        assert robot.health()["status"] == "unhealthy"
        assert status(at.web) == 503
        at.puppet.sick = None
        assert robot.infer(GOOD).actions.shape == (3, 2)
        assert robot.health()["status"] == "ok"


def test_waiting_requests_are_answered_at_their_deadline_while_a_stage_hangs():
    with desk() as at, raw_socket(at.native, zmq.DEALER) as other:
        other.send(request(1, "hang"))
        until(lambda: at.service.health()["running"])
        other.send(request(2, deadline_ms=1))
        until(lambda: at.service.health()["waiting"] or at.service.health()["late"])
        until(lambda: at.service.tend() or at.service.health()["late"])
        reply = schema.PredictResponse.FromString(other.recv())
        assert (reply.request_id, reply.error_code) == (2, "deadline")


def test_decoding_ends_when_nobody_waits(monkeypatch):
    """Row 3: neither leaving nor a deadline ended the decoding of a picture."""
    begun, ended = threading.Event(), []

    def decode(budget):
        begun.set()
        try:
            while True:
                budget.check()
                time.sleep(0.001)
        except SinewError as error:
            ended.append(error.code)
            raise

    with desk() as at:
        outcomes: list = []
        job = enqueue(at.scheduler, decode, outcomes.append)
        assert begun.wait(WAIT_S)
        at.scheduler.cancel(job)
        until(lambda: ended == ["cancelled"])
        begun.clear()
        enqueue(at.scheduler, decode, outcomes.append, deadline=time.perf_counter() + 1e3)
        assert begun.wait(WAIT_S)
        later = SimpleNamespace(**{**vars(time), "perf_counter": lambda: time.perf_counter() + 1e4})
        monkeypatch.setattr("sinew.serve.scheduler.time", later)
        until(lambda: ended == ["cancelled", "deadline"])
        until(lambda: len(outcomes) == 2)
        assert isinstance(outcomes[1], DeadlineError)


# ----------------------------------------------------------------------------- whose turn it is


def test_one_client_may_have_two_requests_waiting():
    """Row 7: one connection filled the queue, and all others got busy."""
    with desk() as at, raw_socket(at.native, zmq.DEALER) as rude, client(at) as robot:
        rude.send(request(1, "wait"))
        until(lambda: at.service.health()["running"])
        for number in range(2, 40):
            rude.send(request(number))
        until(lambda: at.service.health()["busy"] >= 5)
        assert at.service.health()["waiting"] == 2
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(robot.infer, GOOD)
            until(lambda: at.service.health()["waiting"] == 3)
            at.puppet.release.set()
            assert answer.result(WAIT_S).actions.shape == (3, 2)


def test_five_robots_beside_a_flood_lose_nothing():
    """Row 7 in numbers: 5 of 151 answers were left beside one rude client."""
    stop = threading.Event()

    def flood(address: str) -> None:
        with raw_socket(address, zmq.DEALER) as rude:
            number = 0
            while not stop.is_set():
                number += 1
                rude.send(request(number), zmq.NOBLOCK)
                while rude.poll(0):
                    rude.recv()
                time.sleep(0.0005)

    def drive(address: str, state: float) -> int:
        with Client(address, timeout=WAIT_S) as robot:
            for _ in range(20):
                assert robot.infer({**GOOD, "state": [state, 0]}).actions[0, 0] == state
        return 20

    with desk() as at, ThreadPoolExecutor(6) as pool:
        rude = pool.submit(flood, at.native)
        answers = [pool.submit(drive, at.native, float(state)) for state in range(5)]
        assert [each.result(WAIT_S) for each in answers] == [20] * 5
        stop.set()
        rude.result(WAIT_S)


def test_what_decoding_takes_is_not_waited(monkeypatch: pytest.MonkeyPatch):
    """By a clock that decoding alone moves."""
    now, outcomes = [100.0], []
    clock = SimpleNamespace(perf_counter=lambda: now[0], monotonic=time.monotonic)
    monkeypatch.setattr("sinew.serve.scheduler.time", clock)

    def read(_check: object) -> Observation:
        now[0] += 5.0
        return Observation(images={}, state=np.zeros(2), prompt="go")

    scheduler = Scheduler(Puppet())
    scheduler.start()
    try:
        enqueue(scheduler, read, outcomes.append)
        until(lambda: outcomes)
        assert outcomes[0].timing.queue_ms == 0.0
    finally:
        scheduler.stop()
        assert scheduler.join(WAIT_S)


def test_a_full_queue_has_a_place_for_who_has_none():
    policy = Puppet()
    scheduler = Scheduler(policy, queue_size=4)
    scheduler.start()
    outcomes: dict[str, object] = {}

    def ask(name: str, who: str, prompt: str = "go") -> None:
        observation = Observation(images={}, state=np.zeros(2), prompt=prompt)
        enqueue(
            scheduler,
            lambda _check: observation,
            lambda outcome: outcomes.update({name: outcome}),
            client=who,
        )

    try:
        ask("running", "x", "wait")
        until(lambda: scheduler.stats()["running"])
        for name in ("a1", "a2", "b1", "b2"):
            ask(name, name[0])
        with pytest.raises(BusyError, match="of this client"):
            ask("a3", "a")
        ask("c1", "c")
        displaced = [name for name, outcome in outcomes.items() if isinstance(outcome, BusyError)]
        assert displaced == ["a2"]
        ask("d1", "d")
        with pytest.raises(BusyError, match="queue is full"):
            ask("e1", "e")
        policy.release.set()
        until(lambda: len(outcomes) == 7)
        assert sum(isinstance(outcome, ActionChunk) for outcome in outcomes.values()) == 5
        assert scheduler.stats()["busy"] == 4  # two were refused, two had to go
    finally:
        scheduler.stop()
        assert scheduler.join(WAIT_S)


def test_a_session_belongs_to_its_connection():
    """Row 19: the same name from another client replaced a robot's waiting request."""
    with desk() as at, raw_socket(at.native, zmq.DEALER) as robot, raw_socket(at.native, zmq.DEALER) as thief:
        robot.send(request(1, "wait", session="arm"))
        until(lambda: at.service.health()["running"])
        robot.send(request(2, session="arm"))
        until(lambda: at.service.health()["waiting"] == 1)
        thief.send(request(3, session="arm"))
        until(lambda: at.service.health()["waiting"] == 2)
        robot.send(request(4, session="arm"))  # its own newer one
        until(lambda: at.service.health()["superseded"] == 1)
        at.puppet.release.set()
        codes = {}
        for _ in range(3):
            reply = schema.PredictResponse.FromString(robot.recv())
            codes[reply.request_id] = reply.error_code
        assert codes == {1: "", 2: "superseded", 4: ""}
        assert protocol.decode_reply(thief.recv(), 3).horizon == 3


def test_names_of_sessions_are_short():
    """Row 9: 1,500 refused requests with long names held 1.5 GiB."""
    with desk() as at, client(at) as robot:
        for size in (129, 100_000):
            with pytest.raises(ServerError, match="session: expected at most 128 characters"):
                robot.infer({**GOOD, "session": "x" * size})
            with pytest.raises(ServerError, match="session: expected at most 128 characters"):
                robot.reset("x" * size)
        assert at.service.metrics.sessions == 0
        assert robot.infer({**GOOD, "session": "x" * 128}).session == "x" * 128
        assert at.service.metrics.sessions == 1


def on_native(at: SimpleNamespace, prompt: str) -> list[str]:
    with client(at) as robot:
        return list(robot.infer({**GOOD, "prompt": prompt}).warnings)


def on_http(at: SimpleNamespace, prompt: str) -> list[str]:
    status, answer, _headers = post(at.web, body(prompt=prompt))
    assert status == 200
    return json.loads(answer)["warnings"]


def on_openpi(at: SimpleNamespace, prompt: str) -> list[str]:
    with websocket(at.web) as robot:
        robot.recv(WAIT_S)
        robot.send(pack({**GOOD, "prompt": prompt}))
        return msgpack.unpackb(robot.recv(WAIT_S)).get("warnings", [])


def on_groot(at: SimpleNamespace, prompt: str) -> list[str]:
    observation = {
        "video": {"front": FRAME[None, None]},
        "state": {"state": np.zeros((1, 1, 2), np.float32)},
        "language": {"annotation.human.task_description": [[prompt]]},
    }
    request = {"endpoint": "get_action", "data": {"observation": observation}}
    with raw_socket(at.groot, zmq.REQ) as robot:
        robot.send(msgpack.packb(request, default=encode_npy))
        assert robot.poll(1e3 * WAIT_S)
        _actions, about = msgpack.unpackb(robot.recv(), object_hook=decode_npy)
        return about.get("warnings", [])


@pytest.mark.parametrize("ask", [on_native, on_http, on_openpi, on_groot])
def test_warnings_travel(ask):
    """What a chunk was computed without, and strange states, are told on every wire that has a place for it."""
    with desk(("native", "groot", "web")) as at:
        assert ask(at, "dark") == ["it is dark"]
        assert ask(at, "go") == []


def test_an_attack_does_not_fill_the_log(caplog):
    """Row 23: garbage without a key wrote 1.3 MB a second."""
    import logging

    quiet = RateLimitedLog(logging.getLogger("test.quiet"))
    for number in range(1000):
        quiet.warning("attack %d", number)
    assert len(caplog.records) == BURST
    with desk(api_key="secret") as at, raw_socket(at.native, zmq.DEALER) as stranger:
        caplog.clear()
        began = time.monotonic()
        for _ in range(12):
            stranger.send(b"garbage")
        for _ in range(12):
            stranger.recv()
        periods = 1 + (time.monotonic() - began) // PERIOD_S  # one, unless the machine stands still
        assert 0 < sum("a request failed" in record.message for record in caplog.records) <= BURST * periods


def test_a_policy_that_does_not_warm_up_leaves_nothing_behind():
    """Neither threads nor a say in the server's health."""
    puppet, supervisor = Puppet(), Supervisor()
    puppet.sick = MemoryError("no room")
    scheduler = Scheduler(puppet, supervisor=supervisor)
    with pytest.raises(MemoryError, match="no room"):
        scheduler.start()
    assert scheduler.join(WAIT_S)
    assert supervisor._checks == []


# ----------------------------------------------------------------------------- a scheduler without sockets


@pytest.mark.parametrize("name", ["queue_size", "max_batch", "workers"])
def test_a_scheduler_of_nothing_is_refused_by_name(name: str):
    with pytest.raises(ValueError, match=f"^{name}: expected at least 1, got 0$"):
        Scheduler(Puppet(), **{name: 0})


class Noting(Puppet):
    """A puppet that says when an inference has begun."""

    def __init__(self) -> None:
        super().__init__()
        self.entered = threading.Event()

    def run(self, observation, *, cancel=None):
        self.entered.set()
        return super().run(observation, cancel=cancel)


class Asking:
    """A scheduler of a puppet, and what its clients were told, in its order."""

    def __init__(self, **options):
        self.puppet, self.told = Noting(), []
        self.scheduler = Scheduler(self.puppet, **options)
        self.scheduler.start()

    def ask(self, prompt: str, client: str = "robot", read=lambda: None, **options):
        def decode(_check):
            read()
            return Observation(images={"front": FRAME}, state=np.zeros(2), prompt=prompt)

        return enqueue(self.scheduler, decode, self.told.append, client=client, **options)

    def hold(self):
        """Begin an inference behind which others wait."""
        self.ask("hang", "holder")
        until(self.puppet.entered.is_set)

    def ready(self, count: int) -> None:
        until(lambda: len(self.scheduler._ready.order()) == count)


@pytest.fixture
def asking():
    made = []

    def make(**options) -> Asking:
        made.append(Asking(**options))
        return made[-1]

    yield make
    for each in made:
        each.puppet.release.set()
        each.scheduler.stop()
        assert each.scheduler.join(WAIT_S)


def test_three_failures_in_a_row_try_the_policy_itself(asking):
    """An answer between them begins the count anew."""
    fresh = asking()
    for count, tried in enumerate((1, 1, 2), 1):
        fresh.ask("fail")
        until(lambda count=count: len(fresh.told) == count)
        assert fresh.puppet.warm_ups == tried
    at = asking()
    said = ("fail", "fail", "go", "fail", "fail", "fail", "fail", "fail", "fail")
    for count, (prompt, tried) in enumerate(zip(said, (1, 1, 1, 1, 1, 2, 2, 2, 3), strict=True), 1):
        at.ask(prompt)
        until(lambda count=count: len(at.told) == count)
        assert at.puppet.warm_ups == tried
    counts = {"waiting": 0, "running": False, "served": 1, "failed": 8, "busy": 0, "superseded": 0, "late": 0}
    assert at.scheduler.stats() == {**counts, "batches": 9}


def test_frames_count_until_they_are_answered(asking):
    at = asking()
    at.hold()
    assert at.scheduler._ahead == FRAME.nbytes
    second = at.ask("go")
    at.ready(1)
    assert at.scheduler._ahead == 2 * FRAME.nbytes
    at.scheduler.cancel(second)
    assert at.scheduler._ahead == FRAME.nbytes
    go = threading.Event()
    third = at.ask("go", read=lambda: go.wait(WAIT_S))
    until(lambda: third.begun is not None)
    at.scheduler.cancel(third)  # before its frames are there
    go.set()
    until(lambda: not at.scheduler._decoding)
    assert at.scheduler._ahead == FRAME.nbytes
    at.puppet.release.set()
    until(lambda: len(at.told) == 3)
    assert at.scheduler._ahead == 0


def test_what_does_not_end_is_answered_and_left(asking):
    at = asking()
    at.hold()
    at.ask("go")
    at.ready(1)
    at.scheduler.stop()
    assert [type(each) for each in at.told] == [ShuttingDownError]
    with pytest.raises(ShuttingDownError):
        at.ask("late")
    assert not at.scheduler.join(0.0)
    for _ in range(2):  # once
        at.scheduler.give_up()
        assert [type(each) for each in at.told] == [ShuttingDownError] * 2
    at.puppet.release.set()
    assert at.scheduler.join(WAIT_S)
    assert len(at.told) == 2
    assert at.scheduler._ahead == 0


def test_health_says_which_stage_hangs_and_for_how_long(asking, monkeypatch: pytest.MonkeyPatch):
    """By a clock that the test moves; a limit of 0 is none."""
    now, go = [100.0], threading.Event()
    monkeypatch.setattr(
        "sinew.serve.scheduler.time", SimpleNamespace(perf_counter=lambda: now[0], monotonic=time.monotonic)
    )
    at = asking(supervisor=Supervisor(10.0))
    at.hold()
    second = at.ask("go", read=lambda: go.wait(WAIT_S))
    until(lambda: second.begun is not None)
    now[0] += 10.0
    assert at.scheduler.stuck() is None
    now[0] += 5.0
    assert at.scheduler.stuck() == "a request is being computed for 15 s"
    at.puppet.release.set()
    until(lambda: len(at.told) == 1)
    assert at.scheduler.stuck() == "a request is being decoded for 15 s"
    at.scheduler.supervisor.stuck_s = 0.0
    assert at.scheduler.stuck() is None
    go.set()
    until(lambda: len(at.told) == 2)
    assert [each.timing.queue_ms for each in at.told] == [0.0, 0.0]


def test_what_is_waited_is_told_in_milliseconds(asking, monkeypatch: pytest.MonkeyPatch):
    now = [100.0]
    monkeypatch.setattr(
        "sinew.serve.scheduler.time", SimpleNamespace(perf_counter=lambda: now[0], monotonic=time.monotonic)
    )

    def read() -> None:
        now[0] += 5.0

    at = asking()
    at.hold()
    second = at.ask("go", read=read)
    at.ready(1)
    now[0] += 2.0
    at.puppet.release.set()
    until(lambda: len(at.told) == 2)
    assert second.begun == now[0]  # decoding and waiting are not what it hangs in
    assert [each.timing.queue_ms for each in at.told] == [0.0, 2000.0]


def test_frames_beyond_the_bound_are_not_decoded_before_others_are_answered(
    asking, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(scheduling, "AHEAD", FRAME.nbytes)
    at, told = asking(), []
    at.hold()
    at.ask("go", read=lambda: told.append(len(at.told)))
    until(lambda: at.scheduler._room._waiters)  # the thread that would decode it
    assert not told
    at.puppet.release.set()
    until(lambda: len(at.told) == 2)


def given(
    scheduler: Scheduler,
    told: list,
    together: RequestGroup | None = None,
    deadline: float | None = None,
    **options,
):
    seen = Observation(images={}, state=np.zeros(2), prompt="go")
    return scheduler.submit(
        ServingJob(Request("", lambda _budget: seen, **options), deadline, together), told.append
    )


def test_only_what_finds_nothing_to_wait_for_is_decoded_where_it_is_computed():
    """By itself: the requests of one message are decoded side by side."""
    scheduler, told = Scheduler(Puppet()), []
    given(scheduler, told, client="a", together=RequestGroup(1))
    assert (len(scheduler._received.order()), len(scheduler._ready.order())) == (1, 0)
    scheduler = Scheduler(Puppet())
    for place in range(2):
        given(scheduler, told, client="a")
        assert (len(scheduler._received.order()), len(scheduler._ready.order())) == (place, 1)
    scheduler = Scheduler(Puppet())
    scheduler._begin(given(scheduler, told, client="a"), [])
    assert scheduler.stats()["running"]
    given(scheduler, told, client="b")
    assert [each.connection for each in scheduler._received.order()] == ["b"]


def test_a_deadline_holds_to_its_moment(monkeypatch: pytest.MonkeyPatch):
    now, told = [90.0], []
    monkeypatch.setattr("sinew.serve.scheduler.time", SimpleNamespace(perf_counter=lambda: now[0]))
    scheduler = Scheduler(Puppet())
    job = given(scheduler, told, client="a", deadline=100.0)
    for now[0] in (99.5, 100.0):
        scheduler._raise_if_abandoned(job)
        scheduler.expire()
    now[0] = 100.5
    with pytest.raises(
        DeadlineError,
        match=r"^the deadline passed 500.0 ms before the request's turn; set a later deadline_ms$",
    ):
        scheduler._raise_if_abandoned(job)
    assert not told
    scheduler.expire()
    assert [type(each) for each in told] == [DeadlineError]
    assert scheduler.stats() == {
        **dict.fromkeys(("waiting", "served", "busy", "superseded", "batches"), 0),
        "running": False,
        "late": 1,
        "failed": 1,
    }
    scheduler.stop()
    with pytest.raises(ShuttingDownError):
        scheduler._raise_if_abandoned(job)


def test_threads_are_waited_for_no_longer_than_was_said(monkeypatch: pytest.MonkeyPatch):
    now, waits, alive = [100.0], [], [False, True]
    clock = SimpleNamespace(monotonic=lambda: now[0], perf_counter=time.perf_counter)
    monkeypatch.setattr("sinew.serve.scheduler.time", clock)

    def join(seconds: float) -> None:
        waits.append(seconds)
        now[0] += 4.0

    scheduler = Scheduler(Puppet())
    scheduler._threads = [SimpleNamespace(join=join, is_alive=lambda at=at: alive[at % 2]) for at in range(3)]
    assert scheduler.join(5.0) is False
    assert waits == [5.0, 1.0, 0.0]
    alive[1] = False
    assert scheduler.join(5.0) is True
    ended: list[int] = []
    scheduler._threads = [SimpleNamespace(join=lambda at=at: ended.append(at)) for at in range(3)]
    scheduler.drain()
    assert ended == [0, 1, 2]


def test_a_message_is_not_waited_for_where_no_more_frames_fit(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(scheduling, "AHEAD", 100)
    for ahead, ready in ((99, 0), (100, 1)):
        scheduler = Scheduler(Puppet())
        first = given(scheduler, [], client="a", together=RequestGroup(2))
        scheduler._ahead = ahead
        scheduler._decoded(first)
        assert len(scheduler._ready.order()) == ready


# ----------------------------------------------------------------------------- one connection of the native protocol


def test_refused_requests_of_one_connection_do_not_end_the_server(monkeypatch, caplog):
    """The pause after a refused request was doubled without an end: the 1,025th one was no float, and the error ended
    the thread of all connections. It took 17 minutes, so the pauses are shorter here."""
    monkeypatch.setattr(zeromq, "MAX_PAUSE_S", 1e-4)
    with desk() as at, client(at) as robot, raw_socket(at.native) as attacker:
        for _ in range(1100):
            attacker.send(b"\x0f")
            assert b"unsupported wire type 7" in attacker.recv()
        assert robot.infer(GOOD).actions.shape == (3, 2)
    assert "is started again" not in caplog.text


def test_an_unexpected_error_ends_one_connection_alone(monkeypatch, caplog):
    """Whatever a later change of the code forgets: the thread of all connections goes on."""
    refuse = zeromq.ZeroMQWire._refuse
    with desk() as at, client(at) as robot, raw_socket(at.native) as attacker:
        monkeypatch.setattr(zeromq.ZeroMQWire, "_refuse", lambda wire, peer: 1 / 0)
        attacker.send(b"\x0f")
        assert until(lambda: "a connection failed" in caplog.text)
        monkeypatch.setattr(zeromq.ZeroMQWire, "_refuse", refuse)
        assert robot.infer(GOOD).actions.shape == (3, 2)
        assert robot.health()["status"] == "ok"
    assert "is started again" not in caplog.text
