"""The dashboard: what it keeps, whom it lets in, and the page in a real browser where there is one."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import http.client
import io
import json
import re
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from PIL import Image
from sinew_client import Client

from sinew.bundle import Bundle
from sinew.core import ActionChunk, BusyError, Observation, SinewError, Timing
from sinew.policy import load
from sinew.processing import Processor
from sinew.serve.dashboard import feed as feeds
from sinew.serve.dashboard import news
from sinew.serve.dashboard.feed import BY_HAND, KEPT, VIEWERS, Answer, Feed
from sinew.serve.dashboard.history import RATIO, SPAN_S, SPANS, HourHistory
from sinew.serve.dashboard.news import HealthBroadcast
from sinew.serve.job import ServingJob
from sinew.serve.request import Request
from sinew.serve.robots import Robots
from sinew.serve.transport.greeting import ready_text
from sinew.serve.transport.listen import Listen
from sinew.serve.wires import open_wires, parse
from tests import processes
from tests.hostile.decoders import REPORT
from tests.serve import browser
from tests.serve.puppet import WAIT_S, until
from tests.serve.puppet import desk as puppets
from tests.serve.test_replay import FRAMES, STATE, WITHOUT_TORCH, picture, record
from tests.serve.test_server import CASE, START_S, ServerProcess, serving

ASSETS = Path(__file__).resolve().parents[2] / "sinew" / "assets"
KEY = "a key of the test"
CHUNK = ActionChunk(np.ones((3, 2), np.float32), Timing(total_ms=5.0))


def put(feed: Feed, outcome: ActionChunk | SinewError = CHUNK, frames: Any = FRAMES, **more: Any) -> None:
    seen = Observation(images=frames, state=STATE, prompt="go")
    seconds, deadline_s = more.pop("seconds", 0.02), more.pop("deadline_s", 0.05)
    feed.put("native", "peer", "arm", more.pop("seen", seen), outcome, seconds, deadline_s)


# ----------------------------------------------------------------------------- the feed


def test_nothing_is_kept_while_nobody_looks() -> None:
    feed = Feed()
    put(feed)
    assert (feed.newest, feed.since(0), feed.pictures().files) == (0, [], {})
    with feed.viewer():
        put(feed)
        assert [answer.number for answer in feed.since(0)] == [1]
        assert set(feed.pictures().files) == set(FRAMES)
    assert (feed.since(0), feed.pictures().files) == ([], {})


def test_an_hour_is_counted_whether_somebody_looks_or_not() -> None:
    clock = [1000.0]
    hour = HourHistory(lambda: clock[0])
    for ms in range(1, 101):
        hour.put(float(ms), missed=ms > 98, refused=False)
    hour.put(1.0, missed=False, refused=True)
    clock[0] = 1015.0
    hour.put(7.0, missed=False, refused=False)
    first, second = hour.to_dict()["points"]
    assert (first["time"], first["answers"], first["missed"], first["refused"]) == (1000, 100, 2, 1)
    assert 50 <= first["p50_ms"] <= 50 * RATIO
    assert 95 <= first["p95_ms"] <= 100.0 == first["max_ms"]
    assert (second["time"], second["p50_ms"], second["max_ms"]) == (1010, 7.0, 7.0)
    for _ in range(2 * SPANS):
        clock[0] += SPAN_S
        hour.put(1.0, missed=False, refused=False)
    assert len(hour.to_dict()["points"]) == SPANS
    clock[0] += SPAN_S * SPANS
    assert hour.to_dict()["points"] == []

    feed = Feed()
    put(feed)
    put(feed, BusyError("full"), deadline_s=None)
    feed.put("http", "peer", BY_HAND, None, CHUNK, 1.0, None)
    (point,) = feed.history.to_dict()["points"]
    assert (point["answers"], point["refused"], point["max_ms"]) == (1, 1, 20.0)


def test_what_is_kept_is_bounded() -> None:
    feed = Feed()
    with contextlib.ExitStack() as stack:
        for _ in range(VIEWERS):
            stack.enter_context(feed.viewer())
        with pytest.raises(BusyError), feed.viewer():
            pass
        for _ in range(3 * KEPT):
            put(feed)
        assert [answer.number for answer in feed.since(0)] == list(range(2 * KEPT + 1, 3 * KEPT + 1))
        assert feed.since(3 * KEPT) == []
    assert feed.viewers == 0


def test_an_answer_in_words() -> None:
    feed = Feed()
    with feed.viewer():
        put(feed, deadline_s=0.01)
        put(feed, SinewError("x" * 1000), seen=None)
        answered, refused = (answer.to_dict() for answer in feed.since(0))
    assert (answered["missed"], answered["deadline_ms"], answered["ms"]) == (True, 10.0, 20.0)
    assert (answered["actions"], answered["prompt"], answered["state"]) == ([[1.0, 1.0]] * 3, "go", [0.0] * 6)
    assert (refused["outcome"], len(refused["error"]), refused["state"]) == ("internal", 300, None)


def told(
    feed: Feed, monkeypatch: pytest.MonkeyPatch, busy: bool = False
) -> tuple[HealthBroadcast, list[str]]:
    """News of a server that is busy or not, and the events that it encodes; after one message it makes no other."""
    for name in ("EVENTS_S", "HEALTH_S", "PATIENCE_S"):
        monkeypatch.setattr(news, name, WAIT_S)
    encoded: list[str] = []
    written = news.encoded
    monkeypatch.setattr(news, "encoded", lambda name, record: encoded.append(name) or written(name, record))
    policies = SimpleNamespace(
        stats=lambda: {"waiting": 0, "running": busy}, get=lambda: SimpleNamespace(number=1)
    )
    service = SimpleNamespace(feed=feed, policies=policies, health=dict, robots=Robots())
    return HealthBroadcast(service, feed), encoded  # type: ignore[arg-type]


async def spin() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def test_a_hundred_answers_are_one_message_for_all_viewers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Viewers are woken by the first answer; what comes within the pause after it wakes nobody and encodes nothing,
    and is then told at once: every answer and miss, and of the chunks the newest."""
    feed = Feed()
    said, encoded = told(feed, monkeypatch)

    async def look() -> None:
        said.health()
        with contextlib.ExitStack() as stack:
            outboxes = [stack.enter_context(said.viewer()) for _ in range(3)]
            await spin()  # the task listens
            await asyncio.to_thread(put, feed)
            first = await asyncio.wait_for(asyncio.gather(*(each.get() for each in outboxes)), WAIT_S)
            assert first[0].startswith(b"event: answers\n")
            assert first[0] is first[1] is first[2]
            for _ in range(100):
                await asyncio.to_thread(put, feed, deadline_s=0.01)
            await spin()
            assert not said._listening
            assert encoded == ["health", "answers"]
            number, message, _ = await said._make(1)
        assert number == 101
        (event,) = message.decode().rstrip().split("\n\n")
        answers = json.loads(event.partition("\ndata: ")[2])
        assert [each["missed"] for each in answers] == [True] * 100
        assert [each["number"] for each in answers if "actions" in each] == [101]
        assert encoded == ["health", "answers", "answers"]

    with feed.viewer():
        asyncio.run(look())


def test_messages_wait_for_the_gap_between_two_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    feed = Feed()
    for busy in (True, False):
        said, _ = told(feed, monkeypatch, busy)

        async def look(said: HealthBroadcast = said, busy: bool = busy) -> None:
            said.health()
            with feed.viewer(), feed.bell(lambda: said._ring(asyncio.get_running_loop())):
                put(feed)
                waiting = asyncio.create_task(said._news(feed.newest - 1))
                await spin()
                assert waiting.done() is not busy
                put(feed)  # has just been answered
                await asyncio.wait_for(waiting, WAIT_S)

        asyncio.run(look())


def test_the_dashboard_is_told_after_the_reply() -> None:
    happened: list[str] = []
    seen = Observation(images={}, state=np.zeros(2), prompt="go")
    with (
        puppets(()) as found,
        (feed := Feed()).viewer(),
        feed.bell(lambda: happened.append("shown")),
    ):
        feed.follow(found.service)
        found.service.submit(
            ServingJob(Request("native", lambda _: seen)), lambda _: happened.append("replied")
        )
        until(lambda: "shown" in happened)
    assert happened == ["replied", "shown"]


def test_pictures_are_made_for_all_viewers_and_only_so_often(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    written = feeds.jpeg
    monkeypatch.setattr(feeds, "jpeg", lambda frame: made.append(1) or written(frame))
    monkeypatch.setattr(feeds, "PICTURES_S", WAIT_S)
    feed = Feed()
    with feed.viewer("pictures"):
        for _ in range(5):
            put(feed)
            assert feed.pictures().number == 1
        assert len(made) == len(FRAMES)
        feed._pictures = replace(feed._pictures, until=0.0)  # now it is time
        assert {feed.pictures().number for _ in range(3)} == {5}
        assert len(made) == 2 * len(FRAMES)
        by_hand = Observation(images=FRAMES, state=STATE, prompt="go")
        feed.put("http", "peer", feeds.BY_HAND, by_hand, CHUNK, 0.02, None)
        assert (feed.newest, feed.newest_frames) == (6, 5)  # what a person tried is no robot's camera
        assert [each for each in news.records(feed.since(5)) if "actions" in each] == []


@settings(deadline=None, max_examples=50)
@given(
    arrays.arrays(np.float32, arrays.array_shapes(min_dims=2, max_dims=2, max_side=6)),
    st.text(),
    st.floats(),
)
def test_any_answer_is_json(actions: np.ndarray, text: str, state: float) -> None:
    chunk = ActionChunk(actions, warnings=(text,))
    answer = Answer(1, 0.0, "native", text, text, text, np.array([state]), 1.0, None, False, chunk)
    found = json.loads(json.dumps(answer.to_dict(), allow_nan=False))
    flat = [value for row in found["actions"] for value in row]
    assert [value is None for value in flat] == [not np.isfinite(value) for value in actions.reshape(-1)]


def test_a_deadline_without_an_end_ends_no_viewer() -> None:
    """A robot that sent infinity as its deadline ended all viewers: JSON has no word for it."""
    with puppets(("native", "web"), listen=Listen(dashboard=True)) as at:
        host, _, port = at.web.removeprefix("ws://").rpartition(":")
        connection = http.client.HTTPConnection(host, int(port), timeout=WAIT_S)
        connection.request("GET", "/v1/events")
        said = (record for name, record in events(connection.getresponse()) if name == "answers")
        observation = {
            "images": {"front": np.zeros((48, 64, 3), np.uint8)},
            "state": np.zeros(2),
            "prompt": "go",
        }
        until(lambda: at.opened["web"].page.feed.viewers)
        for deadline, shown in ((float("inf"), None), (1e38, pytest.approx(1e38)), (5e4, 5e4)):
            with Client(at.native, timeout=WAIT_S) as client:
                client.infer({**observation, "deadline_ms": deadline})
            assert next(said)["deadline_ms"] == shown
        # an answer that cannot be written, whatever the reason, is left out
        put(at.opened["web"].page.feed, seen=None, seconds=float("nan"))
        put(at.opened["web"].page.feed, seen=None, seconds=0.001)
        assert next(said)["ms"] == 1.0
        connection.close()


def test_pictures_are_what_the_policy_sees(smolvla_bundle: Callable[[str], Path]) -> None:
    processor = Processor(Bundle(smolvla_bundle(CASE)).manifest)
    recipe = processor.recipe.image
    frame = np.zeros((20, 60, 3), np.uint8)
    frame[:, :, 0] = np.linspace(0, 255, 60, dtype=np.uint8)
    feed = Feed(recipe)
    observation = Observation(images=dict.fromkeys(FRAMES, frame), state=STATE, prompt="go")
    pixels = processor.prepare(observation).inputs.pixels[0]
    mean, std = (np.asarray(v, np.float32)[:, None, None] for v in (recipe.mean, recipe.std))
    expected = ((pixels * std + mean) * 255).transpose(1, 2, 0)
    assert np.abs(feed._seen(frame) - expected).max() <= 0.5 + 1e-3
    with feed.viewer():
        put(feed, frames=dict.fromkeys(FRAMES, frame))
        body = feed.pictures().files["camera1"]
        assert Image.open(io.BytesIO(body)).size == (recipe.width, recipe.height)


def test_the_page_asks_nobody_else() -> None:
    for name in ("page.html", "page.js", "page.css"):
        text = files("sinew.serve.dashboard").joinpath(name).read_text(encoding="utf-8")
        assert not re.search(r"(https?:)?//[a-z]+\.", text), name
        assert "innerHTML" not in text


# ----------------------------------------------------------------------------- the server


class Desk:
    """A replay server with a key: its ports, and what asks it."""

    def __init__(self, directory: Path, bundle: Path, *options: object):
        shape = Bundle(bundle).manifest.spec
        self.shape = shape.chunk_size, shape.action.dim
        self.records = record(directory / "records", {"arm": 3}, self.shape)
        self.ports = {"http": processes.free_port(), "native": processes.free_port()}
        self.key = directory / "key.txt"
        self.key.write_text(KEY)
        wires = [word for wire, port in self.ports.items() for word in ("--wire", f"{wire}:{port}")]
        self.arguments = [bundle, "--replay", self.records, "--replay-latency", "none", *wires]
        self.arguments += ["--api-key-file", self.key, *options]
        self.directory = directory

    @contextlib.contextmanager
    def running(self) -> Iterator[ServerProcess]:
        with serving(self.directory, *self.arguments, command=("-c", WITHOUT_TORCH)) as server:
            yield server

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.ports['http']}/"

    def client(self) -> Client:
        return Client(f"tcp://127.0.0.1:{self.ports['native']}", timeout=START_S, api_key=KEY)

    def get(self, path: str, key: str = KEY, **headers: str) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection("127.0.0.1", self.ports["http"], timeout=START_S)
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(
            "GET", path, headers={**sent, **({"Authorization": f"Bearer {key}"} if key else {})}
        )
        return connection.getresponse()


@pytest.fixture(scope="module")
def desk(smolvla_bundle: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    made = Desk(tmp_path_factory.mktemp("dashboard"), smolvla_bundle(CASE))
    with made.running() as server:
        yield made
        assert server.stop() == 0
        assert "Traceback" not in server.log.read_text()


def events(reply: http.client.HTTPResponse) -> Iterator[tuple[str, Any]]:
    """The events of a reply, one after the other, and answers one by one."""
    for line in reply:
        if line.startswith(b"event: "):
            name = line[7:].strip().decode()
            record = json.loads(next(reply)[6:])
            for each in record if name == "answers" else [record]:
                yield name, each


def ask(client: Client, session: str = "arm") -> np.ndarray:
    return client.infer({"images": FRAMES, "state": STATE, "prompt": "go", "session": session}).actions


def test_the_page_needs_no_key_and_its_data_do(desk: Desk) -> None:
    page = desk.get("/", key="")
    assert page.status == 200
    assert "default-src 'none'" in page.headers["Content-Security-Policy"]
    assert {desk.get(f"/dashboard/{name}", key="").status for name in ("page.js", "page.css")} == {200}
    assert desk.get("/dashboard/feed.py", key="").status == 404
    for path in ("/v1/events", "/v1/frames", "/v1/frames/camera1", "/v1/history", "/openapi.json"):
        assert desk.get(path, key="").status == 401
        assert desk.get(path, key="another").status == 401


@pytest.mark.parametrize("path", ["/v1/events", "/v1/frames", "/v1/frames/camera1", "/v1/try"])
@pytest.mark.parametrize(
    "headers", [{"Host": "evil.example"}, {"Origin": "http://evil.example"}, {"Sec_Fetch_Site": "cross-site"}]
)
def test_other_pages_are_refused(desk: Desk, path: str, headers: dict[str, str]) -> None:
    assert desk.get(path, **headers).status == (
        405 if path == "/v1/try" and "Sec_Fetch_Site" in headers else 403
    )


def test_events_tell_of_answers(desk: Desk) -> None:
    reply = desk.get("/v1/events")
    assert reply.headers["Content-Type"] == "text/event-stream"
    found = events(reply)
    name, about = next(found)
    assert (name, about["server"]["engine"], about["as_seen"]) == ("about", "replay", True)
    with desk.client() as client:
        actions = ask(client)
        answer = next(record for name, record in found if name == "answers")
        np.testing.assert_allclose(np.array(answer["actions"]), actions, rtol=1e-5)
        assert (answer["wire"], answer["session"], answer["prompt"]) == ("native", "arm", "go")
        frame = desk.get("/v1/frames/camera1")
        assert (frame.status, frame.headers["Content-Type"]) == (200, "image/jpeg")
        assert desk.get("/v1/frames/wrist").status == 404
    health = next(record for name, record in found if name == "health")
    assert health["viewers"] == 1
    assert health["host"]["cores"] >= 1
    assert 0 < health["host"]["memory"]["available"] <= health["host"]["memory"]["limit"]
    name, frames = next(events(pictures := desk.get("/v1/frames")))
    assert (name, set(frames["cameras"])) == ("frames", set(FRAMES))
    assert Image.open(io.BytesIO(base64.b64decode(frames["cameras"]["camera1"]))).format == "JPEG"
    reply.close()
    pictures.close()


def test_the_port_describes_itself_and_its_hour(desk: Desk) -> None:
    with desk.client() as client:
        ask(client)
    found = json.loads(desk.get("/v1/history").read())
    assert sum(point["answers"] for point in found["points"]) >= 1
    document = json.loads(desk.get("/openapi.json").read())
    assert document["openapi"] == "3.1.0"
    assert {"/healthz", "/metrics", "/v1/actions", "/v1/metadata", "/v1/try"} <= set(document["paths"])
    assert document["security"] == [{"key": []}]
    schemas = document["components"]["schemas"]
    assert schemas["Observation"]["properties"]["images"]["required"] == list(FRAMES)
    assert schemas["Observation"]["properties"]["state"]["maxItems"] == len(STATE)
    rows = schemas["Chunk"]["properties"]["actions"]
    assert (rows["maxItems"], rows["items"]["maxItems"]) == desk.shape
    for path, methods in document["paths"].items():
        assert desk.get(path).status == (200 if "get" in methods else 405), path


def test_viewers_that_read_nothing_hold_nobody_up(desk: Desk) -> None:
    """Bounded: the ninth is refused. Robots are answered all the same."""
    request = f"GET /v1/events HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {KEY}\r\n\r\n".encode()
    with contextlib.ExitStack() as stack:
        for _ in range(VIEWERS):
            deaf = stack.enter_context(socket.create_connection(("127.0.0.1", desk.ports["http"]), START_S))
            deaf.sendall(request)
            assert deaf.recv(12) == b"HTTP/1.1 200"
        late = desk.get("/v1/events")
        assert late.status == 429
        assert "which is the limit" in json.load(late)["error"]["message"]
        with desk.client() as client:
            for _ in range(50):
                ask(client)


def test_it_can_be_left_out(smolvla_bundle: Callable[[str], Path], tmp_path: Path) -> None:
    made = Desk(tmp_path, smolvla_bundle(CASE), "--dashboard", "off")
    with made.running():
        assert {made.get(path).status for path in ("/", "/v1/events", "/v1/frames/camera1")} == {404}


# ----------------------------------------------------------------------------- the browser


@pytest.mark.parametrize("shown", [True, False])
def test_the_server_says_where_its_page_is(shown: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    wires = open_wires(parse(["native:0", "openpi:0"]), Listen(dashboard=shown))
    try:
        policy = load(ASSETS / "pen.gguf", "cpu")
        text = ready_text(policy.spec, policy.describe(), wires)
        about = policy.describe() | {"engine_reason": "the fastest; another one lacks graphs"}
        assert "the fastest\n" in ready_text(policy.spec, about, wires)
        assert "another one lacks graphs\n" in ready_text(policy.spec, about, wires, verbose=True)
        port = wires[1].address.rpartition(":")[2]
        said = f"  page     http://127.0.0.1:{port}/ shows the requests\n"
        assert (said in text) is shown
        assert ("page" in text) is shown
        assert "no_proxy" not in text
        monkeypatch.setenv(
            "http_proxy", "http://proxy.invalid:3128"
        )  # openpi's client would ask it for 127.0.0.1
        lets = "proxy    no_proxy=127.0.0.1 lets programs on this machine connect directly"
        assert lets in ready_text(policy.spec, policy.describe(), wires)
        monkeypatch.setenv("no_proxy", "127.0.0.1,localhost")
        assert "no_proxy" not in ready_text(policy.spec, policy.describe(), wires)
    finally:
        for wire in wires:
            wire.stop()


@pytest.mark.skipif(browser.find() is None, reason="needs Chromium or Chrome on the path")
def test_the_page_in_a_browser(smolvla_bundle: Callable[[str], Path], tmp_path: Path) -> None:
    """A key is typed, a chunk arrives, a slider moves by the keyboard, a chunk is asked for, the server restarts."""
    pytest.importorskip("websockets.sync.client")
    made = Desk(tmp_path, smolvla_bundle(CASE))
    stop = threading.Event()

    def robot() -> None:
        with made.client() as client:
            while not stop.wait(0.05):
                with contextlib.suppress(Exception):  # the server restarts meanwhile
                    ask(client, "<img src=x onerror=alert(1)>")
                    client.report(replace(REPORT, reason="<img src=x>"))

    driving = threading.Thread(target=robot)
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(made.running())
        page = stack.enter_context(browser.browsing(made.url, tmp_path / "profile"))
        page.wait("!document.getElementById('key-form').hidden && document.activeElement.id === 'key'")
        page.evaluate(f"document.getElementById('key').value = {json.dumps(KEY)}")
        page.press("Enter", 13)
        page.wait("document.getElementById('status').className === 'good'")
        driving.start()
        stack.callback(driving.join)
        stack.callback(stop.set)
        page.wait("document.getElementById('quantiles').textContent.startsWith('p50')")
        page.wait("document.querySelectorAll('#joints figcaption')[5].textContent.includes(' to ')")
        page.wait("document.querySelector('#cameras img').naturalWidth > 1")
        assert "<img src=x" in page.evaluate("document.getElementById('sessions').textContent")
        assert page.evaluate("document.querySelectorAll('#sessions img').length") == 0
        page.wait("document.getElementById('robots').textContent.includes('2 of 3 won')")
        note = page.evaluate("document.getElementById('robots-note').textContent")
        assert note == "Standing still: 1 of 1. robot 1 holds: <img src=x>"
        label = "document.querySelector('#arms canvas').getAttribute('aria-label')"
        page.wait(f"{label}.startsWith('Arm of robot 1: tip at 0.500, 0.000, 0.250 m')")
        page.evaluate("document.querySelector('#arms canvas').id = 'arm'")
        before = page.evaluate("document.getElementById('arm').toDataURL()")
        page.evaluate("document.getElementById('arm').focus()")
        page.press("ArrowRight", 39)
        assert page.evaluate("document.getElementById('arm').toDataURL()") != before
        page.wait("document.getElementById('card').lastElementChild.textContent.includes('GiB in use')")
        assert "REPLAY" in page.evaluate("document.getElementById('card').textContent")
        assert page.evaluate(PAINTED.format(id="latency")) > 0

        page.wait("/^[1-9][0-9]* answers/.test(document.getElementById('hour-note').textContent)")
        assert page.evaluate(PAINTED.format(id="hour")) > 0
        page.evaluate("document.getElementById('pause').focus()")
        page.press("Enter", 13)
        page.wait("document.getElementById('pause').getAttribute('aria-pressed') === 'true'")
        page.press("Enter", 13)
        page.wait("document.getElementById('pause').textContent === 'Pause'")
        page.reload()  # the hour is the server's, and the key stays with the tab
        page.wait("/^[1-9][0-9]* answers/.test(document.getElementById('hour-note').textContent)")
        page.wait("document.querySelectorAll('#try-state input').length > 5")

        page.evaluate("document.getElementById('state-2').focus()")
        before = float(page.evaluate("document.querySelectorAll('#try-state input[type=number]')[2].value"))
        page.press("ArrowRight", 39)
        after = float(page.evaluate("document.querySelectorAll('#try-state input[type=number]')[2].value"))
        assert after > before
        page.evaluate("document.getElementById('try-prompt').value = 'go'")
        page.evaluate(DROPPED.format(data=picture(FRAMES["camera1"])))
        page.wait("document.querySelector('#try-cameras label').textContent === 'camera1: dropped.png'")
        page.evaluate("document.getElementById('try-send').click()")
        page.wait("document.getElementById('try-result').textContent.includes('actions in')")
        assert page.evaluate("document.querySelectorAll('#try-joints canvas').length") == made.shape[1]

        page.size(390, 844)
        page.wait("document.documentElement.scrollWidth === 390")
        assert page.errors == [
            "Failed to load resource: the server responded with a status of 401 (Unauthorized)"
        ]
        assert server.stop() == 0
        page.wait("document.getElementById('status').className === 'bad'")
        stack.enter_context(made.running())
        page.wait("document.getElementById('status').className === 'good'")
        stop.set()
        driving.join()  # while somebody answers: it would wait for the server that ends now


# How many pixels of a canvas are painted.
PAINTED = (
    "(() => {{ const c = document.getElementById('{id}');"
    " const data = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;"
    " return data.filter((v, i) => i % 4 === 3 && v).length }})()"
)
DROPPED = (
    "(() => {{ const data = Uint8Array.from(atob('{data}'), (c) => c.charCodeAt(0));"
    " const moved = new DataTransfer(); moved.items.add(new File([data], 'dropped.png', {{type: 'image/png'}}));"
    " document.querySelector('#try-cameras figure').dispatchEvent(new DragEvent('drop', {{dataTransfer: moved}})) }})()"
)
