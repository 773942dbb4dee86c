"""Several observations in one message: native, openpi and http, computed together, each with its own answer."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import msgpack
import numpy as np
import pytest
from sinew_client import Client, InvalidObservation, ServerError
from sinew_client.addresses import ServerAddress
from sinew_client.aio import AsyncClient
from sinew_client.link import Link
from sinew_client.schema import PredictRequest, PredictResponse

import sinew
from benchmarks.wire_clients import OpenPI, _pack, _unpack
from sinew.cli import main
from sinew.core import ActionChunk, BusyError, CancelledError, Observation
from sinew.serve import fair_queue
from sinew.serve import scheduler as scheduling
from sinew.serve.admission import Admission
from sinew.serve.decode.frames import MIN_BUDGET, PixelBudget
from sinew.serve.deploy import deploy
from sinew.serve.job import RequestGroup, ServingJob
from sinew.serve.limits import ServingLimits
from sinew.serve.policies import Deployment
from sinew.serve.request import Request, ShuttingDownError, bare
from sinew.serve.service import Service
from sinew.serve.transport.listen import Listen
from sinew.serve.wires import open_wires, parse
from tests.serve.puppet import GOOD, SPEC, WAIT_S, Puppet, desk, until


def observation(seed: int, size: int = 1) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    frames = {name: rng.integers(0, 256, (64, 64, 3), np.uint8) for name in ("now", "previous")}
    state = np.full(size, 0.9, np.float32)
    return {"images": frames, "state": state, "prompt": "go", "seed": seed, "solver_steps": 1}


ASKED = [observation(1), observation(2, size=3), observation(3), observation(4)]


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count no client of an earlier test as active: beside one, a message is computed in smaller batches."""
    monkeypatch.setattr(fair_queue, "ACTIVE_S", 0.0)


@pytest.fixture(scope="module")
def served() -> Iterator[SimpleNamespace]:
    """pen with batches of up to three, on a wire of each kind."""
    with sinew.load("sinew/assets/pen.gguf", "cpu", threads=1) as pen:
        deployment = deploy(pen, ServingLimits(max_batch=3))
        service = Service(deployment)
        wires = [
            *open_wires(parse(["native:0", "openpi:0"]), Listen()),
            *open_wires(parse(["http:0"]), Listen()),
        ]
        for wire in wires:
            wire.start(service)
        yield SimpleNamespace(pen=pen, service=service, **{wire.name: wire.address for wire in wires})
        deployment.scheduler.stop()
        assert deployment.scheduler.join(WAIT_S)
        for wire in wires:
            wire.stop()


def test_a_full_queue_gives_the_newest_place_of_who_has_most() -> None:
    """A message of several has one place, and all of it goes; who has a place already gets no second one."""
    queue = Admission(4, 3)

    def ask(client: str, together: RequestGroup | None = None, session: str = "") -> ServingJob:
        return ServingJob(Request("", lambda _budget: None, client, session), together=together)  # type: ignore[arg-type, return-value]

    def enter(*asked: ServingJob) -> None:
        for each in asked:
            assert queue.room(each) == []
            queue.enter(each)

    message = RequestGroup(2)
    pair = [ask("a", message), ask("a", message)]
    first, other = ask("a", session="s"), ask("b", session="s")
    enter(first, *pair, ask("a"), other)
    assert (queue.count, len(list(queue))) == (4, 5)
    with pytest.raises(BusyError, match="3 requests of this client wait, which is the limit"):
        queue.room(ask("a"))
    assert queue.room(ask("a", message)) == []  # which has its place
    for client in ("b", ""):  # nobody in particular has no right to another's place
        with pytest.raises(BusyError, match="the queue is full: 4 requests wait"):
            queue.room(ask(client))
    (newest,) = queue.room(ask("c"))
    assert newest is list(queue)[3]
    assert queue.leave(newest)
    assert not queue.leave(newest)
    enter(ask("c"))
    assert queue.room(ask("d")) == pair  # the whole message
    assert queue.newest.get(first.episode) is first
    assert queue.newest.get(None) is None
    assert [queue.leave(each) for each in (pair[0], first)] == [True, True]
    assert queue.newest.get(first.episode) is None
    assert queue.newest.get(other.episode) is other
    assert queue.count == 3
    assert queue.leave(pair[1])
    assert (queue.count, len(list(queue))) == (2, 2)
    enter(ask("d"), ask("e"))
    with pytest.raises(BusyError, match="the queue is full"):  # where each has one nobody's is taken
        queue.room(ask("f"))


def test_each_is_told_of_in_its_own_session() -> None:
    told: list[str] = []
    with desk() as there, Client(there.native, timeout=WAIT_S) as client:
        there.service.subscribe(lambda job, _outcome, _seconds: told.append(job.session))
        client.infer_all([{**GOOD, "session": name} for name in ("left", "right")])
        until(lambda: len(told) == 2)
    assert sorted(told) == ["left", "right"]


def check(pen: Any, actions: Sequence[Any], batches: Sequence[float], error: str) -> None:
    """Hold what the good ones of ``ASKED`` got to what they get alone: plan states no bits for a batch."""
    assert "state: expected shape [1], got shape [3]" in error
    for given, found in zip((ASKED[0], *ASKED[2:]), actions, strict=True):
        np.testing.assert_allclose(found, pen.infer(given).actions, rtol=0, atol=1e-5)
    assert list(batches) == [3, 3, 3]


def test_native(served: SimpleNamespace) -> None:
    with Client(served.native, timeout=WAIT_S) as client:
        first, wrong, *rest = client.infer_all(ASKED)
        assert isinstance(wrong, ServerError)
        assert wrong.code == "bad_observation"
        good: list[Any] = [first, *rest]
        check(served.pen, [each.actions for each in good], [each.timing.batch for each in good], str(wrong))
        (alone,) = client.infer_all(ASKED[:1])
        assert alone.actions.tolist() == served.pen.infer(ASKED[0]).actions.tolist()
        for asked, text in (
            ([], "observations: expected 1 to 64, got 0"),
            ([GOOD] * 65, "observations: expected 1 to 64, got 65"),
            ([ASKED[0], {"sate": 1}], r"observations\[1\].sate: expected"),
            ([{**GOOD, "deadline_ms": 3}], r"observations\[0\].deadline_ms: expected no deadline"),
        ):
            with pytest.raises(InvalidObservation, match=text):
                client.infer_all(asked)

    async def beside() -> list[Any]:
        async with AsyncClient(served.native, timeout=WAIT_S) as other:
            return await other.infer_all(ASKED)

    answers = asyncio.run(beside())
    assert str(answers.pop(1)) == str(wrong)
    assert [each.actions.tolist() for each in answers] == [each.actions.tolist() for each in good]


@pytest.mark.parametrize("wire", ["openpi", "http"])
def test_web(served: SimpleNamespace, wire: str) -> None:
    body = msgpack.packb({"observations": ASKED}, default=_pack)
    if wire == "openpi":
        client = OpenPI(served.openpi)
        client.socket.send(body)
        reply = client.socket.recv(WAIT_S)
        client.close()
    else:
        reply = post(served.http, body, "application/msgpack")[1]
    answers = msgpack.unpackb(reply, object_hook=_unpack)["answers"]
    error = answers.pop(1)["error"]
    assert (error["code"], error["field"]) == ("bad_observation", "state")
    timing = "server_timing" if wire == "openpi" else "timing"
    batches = [each[timing]["batch"] for each in answers]
    check(served.pen, [each["actions"] for each in answers], batches, error["message"])


def post(address: str, body: bytes, kind: str = "application/json") -> tuple[int, bytes]:
    given = urllib.request.Request(f"{address}/v1/actions", body, {"Content-Type": kind})
    try:
        with urllib.request.urlopen(given, timeout=WAIT_S) as reply:
            return reply.status, reply.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({"observations": {}}, "observations: expected a list of 1 to 64 maps, got dict"),
        ({"observations": [{}], "state": [0]}, "state: move it into the entries of observations"),
        (
            {"observations": [{"observations": []}]},
            "observations[0].observations: not allowed in an observation",
        ),
    ],
)
def test_what_the_web_refuses(served: SimpleNamespace, message: dict[str, Any], text: str) -> None:
    status, reply = post(served.http, json.dumps(message).encode())
    assert status == 400
    assert text in json.loads(reply)["error"]["message"]


def test_what_native_refuses(served: SimpleNamespace) -> None:
    def asked(**fields: Any) -> Any:
        link = Link(ServerAddress.parse(served.native), 1e12)
        reply = link.ask([PredictRequest(request_id=7, **fields).SerializeToString()], 1e12)
        link.close()
        return PredictResponse.FromString(reply)

    for fields, text in (
        ({"observations": [{}] * 65}, "observations: expected at most 64 in a message, got 65"),
        ({"observations": [{}], "prompt": "go"}, "prompt: move it into the entries of observations"),
        ({"observations": [{}], "kind": "RESET"}, "kind 3: move it into the entries of observations"),
    ):
        assert text in asked(**fields).error
    inside: list[dict[str, Any]] = [
        {"policy": "x"},
        {"observations": [{}]},
        {"kind": "HEALTH"},
        {"api_key": "k"},
    ]
    found = asked(observations=inside)
    assert (found.request_id, found.error) == (7, "")
    said = "observations: move kind, policy, api_key and deadline_ms from the entries into the message"
    assert [each.error for each in found.answers] == [said] * 4


def test_eval_asks_a_server_in_messages(
    served: SimpleNamespace, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = served.service.health()
    typed = [
        "eval",
        served.native,
        "--env",
        "sinew/Pen-v0",
        "--episodes",
        "3",
        "--batch",
        "2",
        "--workers",
        "1",
    ]
    assert main([*typed, "--solver-steps", "1", "--json"]) == 0
    assert '"batch": 2' in capsys.readouterr().out
    after = served.service.health()
    assert after["batches"] - before["batches"] < after["served"] - before["served"]
    monkeypatch.setitem(served.service.about()["server"], "max_batch", 1)
    assert main(typed) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert (
        "batch 2: this server computes one observation at a time; restart it with `sinew serve --max-batch auto`"
        in said
    )


class Several(Puppet):
    """A puppet that computes several at once."""

    unbatched = ""
    batches: list[int]

    def batch_key(self, prepared: Any) -> str:
        return "all"

    def dummy_observation(self) -> Any:
        return Observation(GOOD["images"], GOOD["state"], "go")

    def run_batch(self, members: Sequence[Any], *, cancel: Any = None) -> list[Any]:
        self.batches.append(len(members))
        return [self.run(each, cancel=cancel) for each in members]


def together(service: Service, count: int, prompt: str = "go") -> tuple[threading.Event, list[Any]]:
    """Give a service a message of so many; what is set when it ends, and where its outcomes will be."""
    done, found = threading.Event(), list[Any]()

    def made(index: int) -> ServingJob:
        state = np.full(2, index, np.float32)
        return ServingJob(
            Request("native", lambda _budget: Observation(GOOD["images"], state, prompt), "there")
        )

    service.submit_all([made(n) for n in range(count)], lambda outcomes: (found.extend(outcomes), done.set()))
    return done, found


@pytest.fixture
def held() -> Iterator[SimpleNamespace]:
    """A service whose one inference waits for ``release``, behind a queue of two."""
    policy = Several()
    policy.batches = []
    scheduler = scheduling.Scheduler(policy, queue_size=2, max_batch=4)
    scheduler.start()
    service = Service(Deployment(scheduler, SPEC, {}))
    together(service, 1, "hang")
    until(lambda: service.health()["running"])
    policy.batches.clear()
    yield SimpleNamespace(policy=policy, service=service, scheduler=scheduler)
    policy.release.set()
    scheduler.stop()
    assert scheduler.join(WAIT_S)


def test_a_message_has_one_place_and_inferences_of_its_own(held: SimpleNamespace) -> None:
    messages = [together(held.service, count) for count in (9, 3)]
    assert held.service.health()["waiting"] == 2
    done, refused = together(held.service, 2)  # each client may have two messages waiting
    assert done.is_set()
    limit = "2 requests of this client wait, which is the limit; wait for an answer before the next request"
    assert [str(each) for each in refused] == [limit] * 2
    until(lambda: all(each.prepared is not None for each in held.scheduler._admission))
    held.policy.release.set()
    for (done, found), count in zip(messages, (9, 3), strict=True):
        assert done.wait(WAIT_S)
        assert [each.actions[0, 0] for each in found] == list(range(count))
    assert sorted(held.policy.batches) == [3, 4, 4]  # nine as 4, 4 and one alone; three by themselves


def test_what_waits_for_its_message_ends_with_the_server(held: SimpleNamespace) -> None:
    done, found = together(held.service, 5)
    until(lambda: all(each.prepared is not None for each in held.scheduler._admission))
    held.scheduler.stop()
    assert done.wait(WAIT_S)
    assert all(isinstance(each, ShuttingDownError) for each in found)


def test_what_a_request_is_given_and_what_is_filled_in_on_the_way() -> None:
    request = Request("native", lambda _budget: Observation({}, np.zeros(1)))
    assert " ".join(each.name for each in dataclasses.fields(Request)) == (
        "wire decode client session deadline_ms arrived connection owner policy"
    )
    with pytest.raises(dataclasses.FrozenInstanceError):
        request.session = "arm"  # type: ignore[misc]
    made = ServingJob(request)
    filled = {each.name for each in dataclasses.fields(ServingJob) if getattr(made, each.name)}
    assert filled == {"request", "cancel", "waiting"}
    assert (made.observation, made.kind, made.alike, made.session) == (None, None, None, "")
    assert not made.cancel.is_set()
    made.abandon()  # given to nobody
    left: Any = []
    made.home = SimpleNamespace(cancel=left.append)  # type: ignore[assignment]
    made.abandon()
    assert left == [made]


@pytest.mark.parametrize(
    ("fields", "connection", "episode"),
    [
        ({}, None, None),
        ({"client": "robot"}, "robot", None),
        ({"client": "robot", "connection": 7}, 7, None),
        ({"connection": 7, "session": "arm"}, 7, ("native", 7, "arm")),
        ({"client": "robot", "owner": 8, "session": "arm"}, "robot", ("native", 8, "arm")),
        ({"session": "arm"}, None, ("native", None, "arm")),
    ],
)
def test_whose_a_request_is(fields: dict[str, Any], connection: Any, episode: Any) -> None:
    made = Request("native", lambda _budget: Observation({}, np.zeros(1)), **fields)
    assert (made.connection, made.episode) == (connection, episode)


def test_a_request_is_read_within_the_limits_of_what_answers_it() -> None:
    """Those of its adapter; where that is not known, of the policy, which refuses."""
    limits: Any = {said: SimpleNamespace(check=lambda _seen, said=said: [said]) for said in ("base", "left")}
    scheduler: Any = None
    adapters = {"left": limits["left"], "free": None}
    deployed = Deployment(scheduler, SPEC, {}, limits["base"], max_pixels=12, adapters=adapters)
    found: list[Any] = []

    def decode(adapter: str, budget: PixelBudget) -> Observation:
        found.append(budget._left)
        budget.borrowed = found.clear
        return Observation({}, np.zeros(1), adapter=adapter)

    for adapter, deployment, said in (
        ("", deployed, ["base"]),
        ("left", deployed, ["left"]),
        ("right", deployed, ["base"]),
        ("free", deployed, []),
        ("left", None, []),
    ):
        made = ServingJob(Request("native", partial(decode, adapter)), deployment=deployment)
        assert made.read(lambda: None) is made.observation
        assert made.decoded is not None
        assert (made.decoded.warnings, found.pop(), made.decoded.borrowed) == (
            tuple(said),
            12 if deployment else MIN_BUDGET,
            found.clear,
        )


def test_an_error_goes_on_without_what_was_read() -> None:
    assert str(ShuttingDownError()) == "the server is shutting down"
    read = BusyError("full")
    read.__cause__ = read.__context__ = ValueError("bytes")
    with pytest.raises(BusyError) as caught:
        raise read
    found = bare(caught.value)
    assert found is caught.value
    assert (found.__cause__, found.__context__, found.__traceback__) == (None, None, None)


def test_a_message_is_ready_with_its_last_and_in_its_order() -> None:
    first, second, third, left = (
        ServingJob(Request("native", lambda _budget: Observation({}, np.zeros(1)))) for _ in range(4)
    )
    first.accepted, second.accepted, third.accepted = 1.0, 2.0, 3.0
    message = RequestGroup(4)
    assert (message.arrived(third), message.ended(left), message.arrived(first)) == ([], [], [])
    assert (message.ended(left), message.ended(third), message.arrived(left)) == (
        [],
        [],
        [],
    )  # each counts once
    assert message.decoded() == [first, third]
    assert (message.decoded(), message.arrived(second)) == ([], [second])


def members(at: SimpleNamespace, second: threading.Event) -> tuple[ServingJob, list[Any]]:
    """Give a scheduler a message of two; return the first, in no queue until ``second`` is set, and the outcomes."""
    both, told = RequestGroup(2), list[Any]()

    def submit(wait: float) -> ServingJob:
        def decode(_budget: Any) -> Observation:
            second.wait(wait)
            return Observation(GOOD["images"], np.zeros(2), "go")

        return at.scheduler.submit(ServingJob(Request("native", decode, "there"), together=both), told.append)

    first = submit(0.0)
    submit(WAIT_S)
    until(lambda: first.prepared is not None and first not in at.scheduler._decoding)
    return first, told


def test_who_leaves_its_message_keeps_none_of_the_others(held: SimpleNamespace) -> None:
    second = threading.Event()
    first, told = members(held, second)
    held.scheduler.cancel(first)
    held.policy.release.set()
    second.set()
    until(lambda: len(told) == 2)
    assert [type(each) for each in told] == [CancelledError, ActionChunk]


def test_what_is_in_no_queue_is_told_of_the_end_at_once(held: SimpleNamespace) -> None:
    second = threading.Event()
    _, told = members(held, second)
    held.scheduler.stop()
    second.set()
    assert [type(each) for each in told] == [ShuttingDownError] * 2


def test_frames_beyond_the_bound_do_not_wait_for_each_other(
    held: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduling, "AHEAD", GOOD["images"]["front"].nbytes)
    held.policy.release.set()
    done, found = together(held.service, 6)
    assert done.wait(WAIT_S)
    assert [each.actions[0, 0] for each in found] == list(range(6))
