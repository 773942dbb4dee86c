"""Several observations in one message: native, openpi and http, computed together, each with its own answer."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import msgpack
import numpy as np
import pytest
from sinew_client import Client, InvalidObservation, ServerError, protocol
from sinew_client.aio import AsyncClient
from sinew_client.link import Link, place_of
from sinew_client.schema import PredictRequest, PredictResponse

import sinew
from benchmarks import wire_clients
from sinew.cli import main
from sinew.core import ActionChunk, Observation
from sinew.serve import scheduler as scheduling
from sinew.serve.deploy import Given, deploy
from sinew.serve.device_lock import DeviceLock
from sinew.serve.policies import Deployment
from sinew.serve.request import Outcome, Request, ShuttingDownError
from sinew.serve.service import Service
from sinew.serve.supervise import Supervisor
from sinew.serve.transport.listen import Listen
from sinew.serve.wires import open_wires, parse
from tests.serve.puppet import GOOD, SPEC, WAIT_S, Puppet, desk, until

PEN = "sinew/assets/pen.gguf"


def observation(seed: int, **changes: Any) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    frames = {name: rng.integers(0, 256, (64, 64, 3), np.uint8) for name in ("now", "previous")}
    state = np.full(1, 0.9, np.float32)
    return {"images": frames, "state": state, "prompt": "go", "seed": seed, "solver_steps": 1, **changes}


@pytest.fixture(scope="module")
def pen() -> Iterator[Any]:
    with sinew.load(PEN, "cpu", threads=1) as found:
        yield found


@pytest.fixture(scope="module")
def served(pen: Any) -> Iterator[SimpleNamespace]:
    """pen with batches of up to three, on a wire of each kind."""
    supervisor = Supervisor()
    deployment = deploy(pen, Given(max_batch=3), supervisor, DeviceLock())
    service = Service(deployment)
    wires = open_wires(parse(["native:0", "openpi:0"]), Listen())
    wires += open_wires(parse(["http:0"]), Listen())
    for wire in wires:
        wire.start(service)
    yield SimpleNamespace(service=service, **{wire.name: wire.address for wire in wires})
    deployment.scheduler.stop()
    assert deployment.scheduler.join(WAIT_S)
    for wire in wires:
        wire.stop()


ASKED = [observation(1), observation(2, state=np.zeros(3, np.float32)), observation(3), observation(4)]


def check(pen: Any, actions: Sequence[Any], batches: Sequence[int], error: str) -> None:
    """Hold what the good ones of ``ASKED`` got to what they get alone. eager and plan state no bits for a batch."""
    assert "state: expected shape [1], got shape [3]" in error
    for given, found in zip((ASKED[0], *ASKED[2:]), actions, strict=True):
        np.testing.assert_allclose(found, pen.infer(given).actions, rtol=0, atol=1e-5)
    assert list(batches) == [3, 3, 3]


def test_native(pen: Any, served: SimpleNamespace) -> None:
    with Client(served.native, timeout=WAIT_S) as client:
        found = client.infer_all(ASKED)
        chunks = [each for each in found if isinstance(each, ActionChunk)]
        assert isinstance(found[1], ServerError)
        assert found[1].code == "bad_observation"
        check(pen, [each.actions for each in chunks], [each.timing.batch for each in chunks], str(found[1]))
        assert [each.seed for each in chunks] == [1, 3, 4]
        (alone,) = client.infer_all(ASKED[:1])
        assert alone.actions.tolist() == pen.infer(ASKED[0]).actions.tolist()

    async def asked() -> list[Any]:
        async with AsyncClient(served.native, timeout=WAIT_S) as other:
            return await other.infer_all(ASKED)

    for each, other in zip(found, asyncio.run(asked()), strict=True):
        assert str(each) == str(other) if isinstance(each, Exception) else each.seed == other.seed


def test_openpi(pen: Any, served: SimpleNamespace) -> None:
    """What openpi's own client sends and takes: a map, with the map of each observation as it would be alone."""
    client = wire_clients.OpenPI(served.openpi)
    client.socket.send(msgpack.packb({"observations": ASKED}, default=wire_clients._pack))
    reply = client.socket.recv(WAIT_S)
    answers = msgpack.unpackb(reply, object_hook=wire_clients._unpack)["answers"]
    good = [each for each in answers if "error" not in each]
    assert answers[1]["error"]["field"] == "state"
    batches = [each["server_timing"]["batch"] for each in good]
    check(pen, [each["actions"] for each in good], batches, answers[1]["error"]["message"])
    client.close()


def post(address: str, body: Any) -> tuple[int, Any]:
    given = urllib.request.Request(
        f"{address}/v1/actions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(given, timeout=WAIT_S) as reply:
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def plain(given: dict[str, Any]) -> dict[str, Any]:
    frames = {
        name: {
            "__numpy__": base64.b64encode(frame.tobytes()).decode(),
            "dtype": "|u1",
            "shape": list(frame.shape),
        }
        for name, frame in given["images"].items()
    }
    return {**given, "images": frames, "state": np.asarray(given["state"]).tolist()}


def test_http(pen: Any, served: SimpleNamespace) -> None:
    status, reply = post(served.http, {"observations": [plain(each) for each in ASKED]})
    assert status == 200
    good = [each for each in reply["answers"] if "error" not in each]
    batches = [each["timing"]["batch"] for each in good]
    check(pen, [each["actions"] for each in good], batches, reply["answers"][1]["error"]["message"])


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({"observations": []}, "observations: expected a list of 1 to 64 maps, got 0"),
        ({"observations": [{}] * 65}, "observations: expected a list of 1 to 64 maps, got 65"),
        ({"observations": {}}, "observations: expected a list of 1 to 64 maps, got dict"),
        ({"observations": [3]}, r"observations\[0\]: expected a map, got int"),
        ({"observations": [{}], "state": [0]}, "state: expected inside of observations, got one beside them"),
        ({"observations": [{"deadline_ms": 3}]}, r"observations\[0\].deadline_ms: expected none inside"),
        ({"observations": [{"observations": []}]}, r"observations\[0\].observations: expected none inside"),
    ],
)
def test_what_the_web_refuses(served: SimpleNamespace, message: dict[str, Any], text: str) -> None:
    status, reply = post(served.http, message)
    assert status == 400
    assert reply["error"]["code"] == "bad_request"
    assert re.search(text, reply["error"]["message"])


def asked_raw(address: str, request: Any) -> Any:
    link = Link(place_of(address), 1e12)
    reply = PredictResponse.FromString(link.ask([request.SerializeToString()], 1e12))
    link.close()
    return reply


@pytest.mark.parametrize(
    ("request_", "text"),
    [
        ({"observations": [{}] * 65}, "observations: expected at most 64 in a message, got 65"),
        ({"observations": [{}], "prompt": "go"}, "prompt: expected inside of observations"),
        ({"observations": [{}], "images": [{}]}, "images: expected inside of observations"),
        ({"observations": [{}], "kind": "RESET"}, "kind 3: expected inside of observations"),
    ],
)
def test_what_native_refuses(served: SimpleNamespace, request_: dict[str, Any], text: str) -> None:
    reply = asked_raw(served.native, PredictRequest(**request_))
    assert text in reply.error
    assert reply.error_code == "bad_request"


def test_what_native_refuses_inside(served: SimpleNamespace) -> None:
    inside: list[dict[str, Any]] = [
        {"policy": "x"},
        {"observations": [{}]},
        {"kind": "HEALTH"},
        {"api_key": "k"},
    ]
    found = asked_raw(served.native, PredictRequest(observations=inside, request_id=7))
    assert (found.request_id, found.error) == (7, "")
    for answer, name in zip(found.answers, ("policy", "observations", "kind", "api_key"), strict=True):
        assert answer.error == f"{name}: expected beside observations, for all of them, got one inside"


def test_what_the_client_refuses(served: SimpleNamespace) -> None:
    with Client(served.native, timeout=WAIT_S) as client:
        for count in (0, protocol.MOST_TOGETHER + 1):
            with pytest.raises(InvalidObservation, match=f"observations: expected 1 to 64, got {count}"):
                client.infer_all([GOOD] * count)
        with pytest.raises(InvalidObservation, match=r"observations\[1\].sate: expected"):
            client.infer_all([ASKED[0], {"sate": 1}])
        with pytest.raises(InvalidObservation, match=r"observations\[0\].deadline_ms: expected none"):
            client.infer_all([{**ASKED[0], "deadline_ms": 3}])


def test_a_server_of_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads a message without an observation, and refuses that."""
    with desk() as there, Client(there.native, timeout=WAIT_S) as client:
        monkeypatch.setattr("sinew.serve.wires.native._OBSERVATIONS", -1)
        monkeypatch.setattr("sinew.serve.wires.native._OF_MESSAGES", set(range(1000)))
        with pytest.raises(ServerError, match="images|state"):
            client.infer_all([GOOD])


def test_eval_asks_a_server_in_messages(served: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    typed = [
        "eval",
        served.native,
        "--episodes",
        "3",
        "--batch",
        "2",
        "--workers",
        "1",
        "--solver-steps",
        "1",
    ]
    assert main([*typed, "--env", "sinew/Pen-v0", "--json"]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert json.dumps(report).count('"batch": 2')
    text = served.service.metrics.exposition().decode()
    assert 'sinew_batch_size_bucket{le="2.0"}' in text
    stats = served.service.health()
    assert stats["batches"] < stats["served"]


def test_eval_refuses_a_server_without_batches(capsys: pytest.CaptureFixture[str], pen: Any) -> None:
    supervisor = Supervisor()
    deployment = deploy(pen, Given(), supervisor, DeviceLock())
    (wire,) = open_wires(parse(["native:0"]), Listen())
    wire.start(Service(deployment))
    try:
        typed = ["eval", wire.address, "--env", "sinew/Pen-v0", "--episodes", "2", "--batch", "2"]
        assert main([*typed, "--workers", "1"]) == 1
        said = " ".join(capsys.readouterr().err.split())
        assert (
            "batch 2: this server computes one observation at a time; `sinew serve --max-batch auto`" in said
        )
    finally:
        deployment.scheduler.stop()
        assert deployment.scheduler.join(WAIT_S)
        wire.stop()


class Several(Puppet):
    """A puppet that computes several at once."""

    unbatched = ""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[int] = []

    def batch_key(self, prepared: Any) -> str:
        return "all"

    def dummy_observation(self) -> Any:
        return SimpleNamespace(**{**GOOD, "session": ""})

    def run(self, observation: Any, *, cancel: Any = None) -> ActionChunk:
        self.batches.append(1)
        return super().run(observation, cancel=cancel)

    def run_batch(self, members: Sequence[Any], *, cancel: Any = None) -> list[Any]:
        self.batches.append(len(members))
        return [Puppet.run(self, each, cancel=cancel) for each in members]


def together(service: Service, count: int, prompts: Sequence[str] = ()) -> tuple[threading.Event, list[Any]]:
    """Give a service a message of so many; what ends with it, and where its outcomes will be."""
    done, found = threading.Event(), list[Any]()

    def on_done(outcomes: list[Outcome]) -> None:
        found.extend(outcomes)
        done.set()

    def made(index: int) -> Request:
        prompt = prompts[index] if prompts else "go"
        seen = Observation(GOOD["images"], np.full(2, index, np.float32), prompt)
        return Request("native", lambda _budget: seen, "there", connection="there")

    service.submit_all([made(index) for index in range(count)], on_done)
    return done, found


@pytest.fixture
def held() -> Iterator[SimpleNamespace]:
    """A service whose one inference waits for ``release``, in front of a queue of two."""
    policy = Several()
    scheduler = scheduling.Scheduler(policy, queue_size=2, max_batch=4)
    scheduler.start()
    service = Service(Deployment(scheduler, SPEC, {}))
    blocked, _ = together(service, 1, ["hang"])
    until(lambda: service.health()["running"])
    policy.batches.clear()
    yield SimpleNamespace(policy=policy, service=service, scheduler=scheduler, blocked=blocked)
    policy.release.set()
    scheduler.stop()
    assert scheduler.join(WAIT_S)


def test_a_message_has_one_place_and_inferences_of_its_own(held: SimpleNamespace) -> None:
    messages = [together(held.service, count) for count in (9, 3)]
    assert held.service.health()["waiting"] == 2
    done, refused = together(held.service, 2)  # each client may have two messages waiting
    assert done.is_set()
    assert [str(each) for each in refused] == [
        "2 requests of this client wait, and no client may have more"
    ] * 2
    until(lambda: all(each.prepared is not None for each in held.scheduler._admission))
    held.policy.release.set()
    for (done, found), count in zip(messages, (9, 3), strict=True):
        assert done.wait(WAIT_S)
        assert [each.actions[0, 0] for each in found] == list(range(count))
    assert sorted(held.policy.batches) == [1, 3, 4, 4]  # nine as 4, 4 and 1; three by themselves


def test_what_waits_for_its_message_ends_with_the_server(held: SimpleNamespace) -> None:
    done, found = together(held.service, 5)
    until(lambda: all(each.prepared is not None for each in held.scheduler._admission))
    held.scheduler.stop()
    assert done.wait(WAIT_S)
    assert all(isinstance(each, ShuttingDownError) for each in found)


def test_frames_beyond_the_bound_do_not_wait_for_each_other(
    held: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduling, "AHEAD", 1)
    held.policy.release.set()
    done, found = together(held.service, 6)
    assert done.wait(WAIT_S)
    assert [each.actions[0, 0] for each in found] == list(range(6))
