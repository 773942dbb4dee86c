"""Subtasks and answers over real sockets: every wire, the clients, records, and who says none."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image
from sinew_client import Client, InvalidObservation, ServerError, schema
from sinew_client.aio import AsyncClient
from sinew_client.target import connect
from sinew_eval.sim.experts import Expert, expert_spec
from websockets.sync import client as websockets

from sinew.cli import main
from sinew.convert import convert
from sinew.core import ActionChunk, Observation, ObservationError, Timing, VectorSpec
from sinew.policy import Policy, load
from sinew.processing.safety import Safety
from sinew.records.recorder import read_records
from sinew.serve.contexts import ContextPolicy
from sinew.serve.dashboard.feed import MAX_TEXT, Feed
from sinew.serve.dashboard.news import records
from sinew.serve.decode import array as arrays
from sinew.serve.job import ServingJob
from sinew.serve.wires import http
from tests import processes
from tests.serve.puppet import desk, until
from tests.serve.test_replay import FRAMES, STATE
from tests.serve.test_server import START_S, serving

KEY = "a key of the test"
QUESTION = "what is in the gripper?"
MOST = 5


@pytest.fixture(scope="module")
def bundle(golden: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    home, out = golden / "pi05-2cam", tmp_path_factory.mktemp("words") / "pi05.gguf"
    return convert(
        home / "checkpoint",
        out,
        name="pi05",
        control_hz=30,
        settings={"lm_head": "true"},
        arch=home / "arch.json",
    )


@pytest.fixture(scope="module")
def policy(bundle: Path) -> Policy:
    return load(bundle, engine="eager", threads=1)


@pytest.fixture(scope="module")
def at(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """A server with a key that records: ``at.native``, ``at.web``, ``at.records``."""
    folder = tmp_path_factory.mktemp("served")
    key, records = folder / "key", folder / "records"
    key.write_text(KEY)
    key.chmod(0o600)
    native, web = processes.free_port(), processes.free_port()
    told = ["--wire", f"native:{native}", "--wire", f"openpi:{web}", "--wire", f"http:{web}"]
    options = ["--engine", "eager", "--threads", 1, "--api-key-file", key, "--record", records]
    with serving(folder, bundle, *told, *options) as server:
        yield SimpleNamespace(
            native=f"tcp://127.0.0.1:{native}", web=f"http://127.0.0.1:{web}", records=records, server=server
        )
        assert server.stop() == 0
        assert "Traceback" not in server.log.read_text()


def seen(policy: Any) -> dict[str, Any]:
    rng = np.random.default_rng(3)
    images = {c.name: rng.integers(0, 256, (32, 32, 3), np.uint8) for c in policy.spec.cameras}
    state = np.linspace(-1, 1, policy.spec.state.dim, dtype=np.float32)
    return {"images": images, "state": state, "prompt": "pick up the cube", "seed": 1}


def posted(policy: Any, **more: Any) -> dict[str, Any]:
    def picture(frame: np.ndarray) -> str:
        file = io.BytesIO()
        Image.fromarray(frame).save(file, "PNG")
        return base64.b64encode(file.getvalue()).decode()

    given = seen(policy)
    images = {name: picture(frame) for name, frame in given["images"].items()}
    return {**given, "images": images, "state": given["state"].tolist(), **more}


def post(address: str, body: Any, key: str = KEY, kind: str = http.JSON) -> tuple[int, Any]:
    data = json.dumps(body).encode() if kind == http.JSON else arrays.pack(body)
    headers = {"Content-Type": kind, **({"Authorization": f"Bearer {key}"} if key else {})}
    request = urllib.request.Request(address, data, headers)
    read: Callable[[bytes], Any] = json.loads if kind == http.JSON else arrays.unpack
    try:
        with urllib.request.urlopen(request, timeout=START_S) as reply:
            return reply.status, read(reply.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


@pytest.fixture(scope="module")
def expected(policy: Policy) -> SimpleNamespace:
    """What the policy says and does in this process."""
    given = seen(policy)
    chunk = policy.infer({**given, "subtask": True, "text_tokens": MOST})
    found = SimpleNamespace(
        answer=policy.ask(given, QUESTION, MOST), subtask=chunk.text, actions=chunk.actions
    )
    assert found.answer != found.subtask
    assert all((found.answer, found.subtask))
    assert np.abs(chunk.actions - policy.infer(given).actions).max() > 1e-3
    return found


# ----------------------------------------------------------------------------- the wires


def test_the_clients(at: SimpleNamespace, policy: Policy, expected: SimpleNamespace) -> None:
    given = seen(policy)
    with Client(at.native, timeout=START_S, api_key=KEY) as client:
        assert client.ask(given, QUESTION, MOST) == expected.answer
        assert client.ask(Observation(**given), QUESTION, MOST) == expected.answer
        assert client.subtask(given, MOST) == expected.subtask
        chunk = client.infer({**given, "subtask": True, "text_tokens": MOST})
        assert chunk.text == expected.subtask
        np.testing.assert_array_equal(chunk.actions, expected.actions)
        assert 0 < chunk.timing.text_ms < chunk.timing.total_ms
        silent = client.infer(given)
        assert (silent.text, silent.timing.text_ms) == ("", 0)
        assert client.metadata()["server"]["says"] == ["subtask", "question"]
        with pytest.raises(ServerError, match="question: expected only one of question and subtask"):
            client.infer({**given, "subtask": True, "question": QUESTION})
        with pytest.raises(InvalidObservation, match="text_tokens: expected 1 or more, got 0"):
            client.ask(given, QUESTION, 0)
        with pytest.raises(
            ObservationError, match="question: expected a non-empty text, got an empty string"
        ):
            client.ask(given, " ")

    async def ask() -> tuple[str, str]:
        async with AsyncClient(at.native, timeout=START_S, api_key=KEY) as client:
            return await client.ask(given, QUESTION, MOST), await client.subtask(given, MOST)

    assert asyncio.run(ask()) == (expected.answer, expected.subtask)


@pytest.mark.parametrize("kind", [http.JSON, http.MSGPACK])
@pytest.mark.parametrize("prefix", ["", "/v1/policies/default"])
def test_the_routes(
    at: SimpleNamespace, policy: Policy, expected: SimpleNamespace, kind: str, prefix: str
) -> None:
    given = posted(policy, text_tokens=MOST) if kind == http.JSON else {**seen(policy), "text_tokens": MOST}
    status, reply = post(f"{at.web}{prefix}/vqa", {**given, "question": QUESTION, "session": "s"}, kind=kind)
    assert (status, reply["text"], reply["session"]) == (200, expected.answer, "s")
    assert not {"actions", "seed"} & set(reply)
    status, reply = post(f"{at.web}{prefix}/subtask", given, kind=kind)
    assert (status, reply["text"]) == (200, expected.subtask)
    assert "actions" not in reply
    path = "/v1/actions" if not prefix else f"{prefix}/actions"
    status, reply = post(f"{at.web}{path}", {**given, "subtask": True}, kind=kind)
    assert (status, reply["text"], reply["seed"]) == (200, expected.subtask, 1)
    np.testing.assert_array_equal(np.array(reply["actions"], np.float32), expected.actions)
    assert 0 < reply["timing"]["text_ms"] < reply["timing"]["total_ms"]
    assert "text" not in post(f"{at.web}{path}", {**given, "text_tokens": None}, kind=kind)[1]


def test_openpis_wire(at: SimpleNamespace, policy: Policy, expected: SimpleNamespace) -> None:
    headers = {"Authorization": f"Api-Key {KEY}"}
    with websockets.connect(
        at.web.replace("http", "ws"), compression=None, max_size=None, additional_headers=headers
    ) as socket:
        socket.recv(START_S)

        def ask(**more: Any) -> Any:
            socket.send(arrays.pack({**seen(policy), "text_tokens": MOST, **more}))
            return arrays.unpack(socket.recv(START_S))

        found = ask(subtask=True)
        assert found["text"] == expected.subtask
        np.testing.assert_array_equal(found["actions"], expected.actions)
        assert found["policy_timing"]["text_ms"] > 0
        found = ask(question=QUESTION)
        assert (found["text"], found["actions"].shape) == (expected.answer, (0, 7))
        assert "text" not in ask(text_tokens=None)


@pytest.mark.parametrize(
    ("path", "changes", "field", "why"),
    [
        ("/vqa", {}, "question", "question: expected text, got nothing"),
        ("/vqa", {"question": ""}, "question", "question: expected text, got an empty string"),
        ("/vqa", {"question": 7}, "question", "question: expected text, got int"),
        ("/vqa", {"question": "why " * 300}, "question", "question: expected 1 to "),
        ("/vqa", {"question": "w" * 70_000}, "question", "question: expected at most 65536 characters"),
        ("/vqa", {"question": "why?", "text_tokens": 257}, "text_tokens", "text_tokens: expected an integer from 1"),
        ("/vqa", {"question": "why?", "text_tokens": 2.5}, "text_tokens", "text_tokens: expected an integer, got"),
        ("/vqa", {"question": "why?", "subtask": True}, "question", "question: expected only one of question and"),
        ("/vqa", {"question": "why?", "temperature": 1}, "temperature", "temperature: expected one of the keys"),
        ("/subtask", {"question": "why?"}, "question", "question: expected no question in a request for a subtask"),
        ("/subtask", {"prompt": ""}, "prompt", "prompt: expected an instruction from which a subtask is generated"),
        ("/subtask", {"noise": [[0.0]]}, "noise", "noise: expected no value if only text is requested"),
        ("/v1/actions", {"subtask": "yes"}, "subtask", "subtask: expected true or false, got str"),
        ("/v1/actions", {"text_only": True}, "text_only", "text_only: expected a subtask or a question"),
    ],
)  # fmt: skip
def test_bad_questions(
    at: SimpleNamespace, policy: Policy, path: str, changes: dict[str, Any], field: str, why: str
) -> None:
    status, reply = post(at.web + path, posted(policy, **changes))
    assert (status, reply["error"]["code"], reply["error"]["field"]) == (400, "bad_observation", field)
    assert reply["error"]["message"].startswith(why)


@pytest.mark.parametrize("path", ["/vqa", "/subtask"])
def test_the_routes_want_the_key_and_are_bounded(at: SimpleNamespace, policy: Policy, path: str) -> None:
    body = posted(policy, question=QUESTION)
    for key in ("", "another"):
        status, reply = post(at.web + path, body, key)
        assert (status, reply["error"]["code"]) == (401, "unauthorized")
    assert post(f"{at.web}/v1/policies/other{path}", body)[0] == 404
    assert post(at.web + path, [1])[1]["error"]["code"] == "bad_request"
    status, reply = post(at.web + path, {**body, "deadline_ms": 1e-3})
    assert (status, reply["error"]["code"]) == (504, "deadline")


def test_a_stream_is_no_place_for_questions(at: SimpleNamespace, policy: Policy) -> None:
    with Client(at.native, timeout=START_S, api_key=KEY) as client:
        request = schema.PredictRequest(
            kind=4,
            request_id=5,
            rate=30.0,
            time=0.0,
            raw_state=[0.0] * 7,
            prompt="go",
            question="why?",
            api_key=KEY,
        )
        with pytest.raises(ServerError, match="question: expected no value in a stream"):
            client._drive(client._asking([request.SerializeToString()], 5, START_S))


def test_who_leaves_ends_a_text_between_two_tokens(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls, third, gone = policy.engine.model, list[int](), threading.Event(), threading.Event()
    go_on = model.continue_text

    def continued(said: Any, tokens: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            third.set()
            assert gone.wait(START_S)
        return go_on(said, tokens)

    monkeypatch.setattr(model, "continue_text", continued)
    body = json.dumps(posted(policy, question=QUESTION, text_tokens=256)).encode()
    with desk(("web",), policy=policy) as found:
        abandon = ServingJob.abandon
        monkeypatch.setattr(ServingJob, "abandon", lambda job: (abandon(job), gone.set()))
        host, port = found.web.rpartition("/")[2].rsplit(":", 1)
        with socket.create_connection((host, int(port)), START_S) as leaver:
            head = f"POST /vqa HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n\r\n"
            leaver.sendall(head.encode() + body)
            assert third.wait(START_S)
        until(lambda: not found.scheduler.stats()["running"], "the end of what nobody waits for")
        assert len(calls) == 3
        assert found.scheduler.stats()["failed"] == 1


# ----------------------------------------------------------------------------- what is kept


def test_records_keep_the_words_and_replay_them(
    at: SimpleNamespace, policy: Policy, expected: SimpleNamespace, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
) -> None:  # fmt: skip
    given, number = seen(policy), len(list(at.records.glob("*.npz")))
    with Client(at.native, timeout=START_S, api_key=KEY) as client:
        client.ask(given, QUESTION, MOST)
        client.subtask(given, MOST)
        client.infer({**given, "subtask": True, "text_tokens": MOST})
        client.infer(given)
        while len(list(at.records.glob("*.npz"))) < number + 4:
            client.health()
    paths = sorted(at.records.glob("*.npz"))[-4:]
    for path in paths:
        (tmp_path / path.name).write_bytes(path.read_bytes())
    answer, subtask, both, silent = read_records(tmp_path)
    assert (answer.text, answer.observation.question, answer.actions) == (expected.answer, QUESTION, None)
    assert (subtask.text, subtask.observation.text_only, subtask.actions) == (expected.subtask, True, None)
    assert (both.text, both.observation.subtask, both.observation.acts) == (expected.subtask, True, True)
    np.testing.assert_array_equal(both.actions, expected.actions)
    assert (silent.text, silent.observation.asks) == ("", "")
    assert not {"question", "text"} & set(silent.meta)
    monkeypatch.setenv("SINEW_API_KEY", KEY)
    assert main(["recording", "replay", str(tmp_path), at.native, "--json"]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (told["records"], told["equal"], told["lost"], told["new"]) == (4, 4, 0, 0)
    assert [row["then"] for row in told["rows"]] == ["text", "text", "actions", "actions"]


def test_the_dashboard_is_told_the_last_words() -> None:
    chunk = ActionChunk(np.ones((3, 2), np.float32), Timing(total_ms=5.0, text_ms=2.0), text="t" * 1000)
    feed, looked = Feed(), Observation(images=FRAMES, state=STATE, prompt="go")
    with feed.viewer():
        feed.put("native", "peer", "arm", looked, chunk, 0.02, 0.05)
        feed.put("native", "peer", "arm", looked, ActionChunk(chunk.actions[:0], text="words"), 0.02, 0.05)
        feed.put("native", "peer", "arm", looked, ActionChunk(chunk.actions), 0.02, 0.05)
        feed_answers = feed.since(0)
        both, words, silent = (answer.to_dict() for answer in feed_answers)
    assert (both["text"], both["timing"]["text_ms"]) == ("t" * MAX_TEXT, 2.0)
    assert words["text"] == "words"
    assert "actions" not in words
    assert "text" not in silent
    told = records(feed_answers[:2])
    assert ["actions" in each for each in told] == [
        True,
        False,
    ]  # the chunk is shown, though words came after it
    page = (Path(__file__).parents[2] / "sinew/serve/dashboard/page.js").read_text()
    assert "row.text = answer.text || row.text" in page


# ----------------------------------------------------------------------------- who says none


def test_who_says_no_words_refuses_by_name(
    policy: Policy, pi_bundle: Callable[[str], Path], at: SimpleNamespace
) -> None:
    with Client(at.native, timeout=START_S, api_key=KEY) as client:
        client.infer(seen(policy))  # the first, where this test is
        while not list(at.records.glob("*.npz")) or not any(
            each.actions is not None for each in read_records(at.records)
        ):
            client.health()
    recorded = connect(at.records)
    given = {**seen(policy), "question": QUESTION}
    with pytest.raises(ObservationError, match=r"^question: expected no request for text, .*got a replay"):
        recorded.infer(given)
    expert = Expert(expert_spec("pen", VectorSpec(2)), lambda _env: lambda: np.zeros((1, 2), np.float32))
    expert.start(SimpleNamespace(unwrapped=None))  # type: ignore[arg-type]
    for asked in ({"subtask": True}, Observation({}, np.zeros(0), question="why?")):
        with pytest.raises(ObservationError, match="got an expert"):
            expert.infer(asked)
    assert expert.infer({}).actions.shape == (1, 2)
    with pytest.raises(ObservationError, match="got one that gives contexts"):
        ContextPolicy(lambda: policy, "fp32").prepare(Observation(**given))
    bare = load(pi_bundle("pi05-2cam"), engine="eager", threads=1)
    with desk(("native",), policy=bare) as found, Client(found.native, timeout=START_S) as client:
        for ask in (lambda: client.ask(seen(bare), QUESTION), lambda: client.subtask(seen(bare))):
            with pytest.raises(
                ServerError,
                match=r"sinew convert --set lm_head=true\), got pi05-2cam, which has no language head",
            ):
                ask()


def test_limits_of_actions_leave_words_alone(policy: Policy) -> None:
    safety = Safety(policy.processor, "refuse")
    words = ActionChunk(np.zeros((0, 7), np.float32), text="words")
    assert safety.enforce(words, Observation(**seen(policy))) is words
