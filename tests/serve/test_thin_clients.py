"""Programs that talk to a running server and need nothing else: the asynchronous client, and `sinew top`."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sinew_client import Client, ClientError, InvalidObservation, RequestTimeout, ServerError, UnsafeChunk
from sinew_client.aio import AsyncClient

from sinew.cli import main
from sinew.cli.terminal import BARS
from sinew.cli.top_view import spark, view
from sinew.core import SinewError
from sinew.serve.dashboard.follow import ServerSeen
from tests import processes
from tests.serve.test_replay import FRAMES, STATE, WITHOUT_TORCH, chunk_of, record
from tests.serve.test_server import serving

KEY = "a key of the test"
WAIT_S = 60.0
OBSERVATION = {"images": FRAMES, "state": STATE, "prompt": "go"}


class Served:
    """A server that answers from a recording, without torch, and can be started again at the same ports."""

    def __init__(self, folder: Path):
        self.folder, self.native, self.web = folder, processes.free_port(), processes.free_port()
        records = record(folder / "records", {"arm": 3, "other": 2}, (4, 6))
        key = folder / "key"
        key.write_text(KEY)
        wires = ("--wire", f"native:{self.native}", "--wire", f"http:{self.web}")
        self.arguments = ("--replay", records, *wires, "--api-key-file", key, "--replay-latency", "none")

    def run(self) -> Any:
        return serving(self.folder, *self.arguments, command=("-c", WITHOUT_TORCH))

    def client(self, **more: Any) -> AsyncClient:
        return AsyncClient(f"tcp://127.0.0.1:{self.native}", timeout=WAIT_S, **{"api_key": KEY, **more})


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    made = Served(tmp_path_factory.mktemp("served"))
    with made.run():
        yield made


def finish(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, 2 * WAIT_S))


# ----------------------------------------------------------------------------- asyncio


def test_coroutines_get_the_answers_that_are_theirs(served: Served) -> None:
    async def ask() -> None:
        async with served.client() as policy:
            about = await policy.metadata()
            assert [camera["name"] for camera in about["policy"]["cameras"]] == ["camera1", "camera2"]
            assert (await policy.health())["status"] == "ok"
            await policy.reset("arm")
            await policy.reset("other")
            for number in (0, 1):  # both under way at once, each session in its own order
                both = await asyncio.gather(
                    *(policy.infer({**OBSERVATION, "session": name}) for name in ("arm", "other"))
                )
                for name, chunk in zip(("arm", "other"), both, strict=True):
                    np.testing.assert_array_equal(chunk.actions, chunk_of(name, number, (4, 6)))
                    assert chunk.round_trip_ms > 0
            assert "0 under way" in repr(policy)
        assert "closed" in repr(policy)
        with pytest.raises(ClientError, match="closed"):
            await policy.health()

    finish(ask())
    with Client(f"tcp://127.0.0.1:{served.native}", timeout=WAIT_S, api_key=KEY) as plain:
        plain.reset("arm")
        same = plain.infer({**OBSERVATION, "session": "arm"})
    np.testing.assert_array_equal(same.actions, chunk_of("arm", 0, (4, 6)))


def test_errors_of_coroutines(served: Served) -> None:
    async def ask() -> None:
        async with served.client(limits=(-1e-6, 1e-6)) as policy:
            with pytest.raises(InvalidObservation, match="unknown key"):
                await policy.infer({**OBSERVATION, "stat": 1})
            with pytest.raises(ServerError, match="camera3") as error:
                await policy.infer({**OBSERVATION, "images": {"camera3": FRAMES["camera1"]}})
            assert error.value.code == "bad_observation"
            with pytest.raises(UnsafeChunk, match="dimension"):
                await policy.infer(OBSERVATION)
        async with served.client(api_key="another") as stranger:
            with pytest.raises(ServerError) as error:
                await stranger.health()
            assert error.value.code == "unauthorized"
            assert KEY not in repr(stranger)
            given_up = asyncio.ensure_future(stranger.health())
            await asyncio.sleep(0)
            given_up.cancel()
            with pytest.raises(asyncio.CancelledError):
                await given_up
            with pytest.raises(ServerError):  # the answer to the one that was given up goes to nobody
                await stranger.health()
        with pytest.raises(ClientError, match="expected tcp://HOST:PORT"):
            AsyncClient("nonsense")

    finish(ask())


def test_a_server_that_comes_back_is_found(tmp_path: Path) -> None:
    at = Served(tmp_path)

    async def ask() -> None:
        async with at.client() as policy:
            with pytest.raises(
                RequestTimeout,
                match=r"no answer from tcp://127.0.0.1:\d+ within 1 s: no connection \(Connection refused\)",
            ):
                await policy.infer(OBSERVATION, timeout=1)  # nobody is there, so nothing is queued
            with at.run() as server:
                await policy.infer(OBSERVATION)
                server.process.kill()
                server.process.wait()
                with pytest.raises(RequestTimeout):
                    await policy.infer(OBSERVATION, timeout=0.2)
            with at.run():
                chunk = await policy.infer(OBSERVATION)
                # The first chunk of a new server: what was asked while it was away did not reach it.
                np.testing.assert_array_equal(chunk.actions, chunk_of("arm", 0, (4, 6)))

    finish(ask())


# ----------------------------------------------------------------------------- sinew top


def asking(served: Served, stop: threading.Event) -> None:
    with Client(f"tcp://127.0.0.1:{served.native}", timeout=WAIT_S, api_key=KEY) as robot:
        while not stop.is_set():
            robot.infer({**OBSERVATION, "session": "arm [bold]"})
            stop.wait(0.02)


@pytest.fixture
def robot(served: Served) -> Iterator[None]:
    """A robot that asks all the time."""
    stop = threading.Event()
    thread = threading.Thread(target=asking, args=(served, stop))
    thread.start()
    yield
    stop.set()
    thread.join()


@pytest.mark.usefixtures("robot")
def test_top_shows_what_a_server_does(
    served: Served, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("SINEW_API_KEY", KEY)
    out = tmp_path / "top.json"
    assert main(["top", f"http://127.0.0.1:{served.web}", "--answers", "5", "--json", str(out)]) == 0
    found = json.loads(out.read_text())
    assert (found["policy"], found["answers"], found["missed"]) == ("records", 5, 0)
    assert found["latency_ms"]["p50"] > 0
    shown = capsys.readouterr().out
    assert shown.count("sinew top") == 1  # not a terminal: one view, the last
    for words in ("records", "engine", "p95", "queue", "arm [bold]", "chunk of 4"):
        assert words in shown
    assert any(bar in shown for bar in BARS)


def test_top_says_why_it_shows_nothing(
    served: Served, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(*words: str) -> str:
        assert main(["top", *words]) == 1
        return capsys.readouterr().err

    monkeypatch.delenv("SINEW_API_KEY", raising=False)
    assert "requires a key; pass --api-key-file, or set SINEW_API_KEY" in said(
        f"http://127.0.0.1:{served.web}"
    )
    assert "expected http://HOST:PORT of the openpi or http protocol" in said("tcp://127.0.0.1:5555")
    assert "expected http://HOST:PORT" in said("http://host:port")
    assert "refused" in said(f"127.0.0.1:{processes.free_port()}", "--seconds", "0.1")
    assert "refused" in said(
        f"127.0.0.1:{processes.free_port()}", "--json"
    )  # one view: it does not wait for a server


def test_top_as_json_ends_after_one_view_of_an_idle_server(
    served: Served, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SINEW_API_KEY", KEY)
    for words in (["--json"], []):  # capsys is no terminal
        assert main(["top", f"http://127.0.0.1:{served.web}", *words]) == 0
        shown = capsys.readouterr().out
        assert "records" in shown
        if words:
            found = json.loads(shown)
            assert (found["answers"], found["latency_ms"]) == (0, None)
            assert found["health"]["status"] == "ok"


@pytest.mark.parametrize(
    "record",
    [
        {},
        {"wire": 1},
        {"wire": "a", "client": "b", "session": "c", "missed": 0, "prompt": "", "outcome": "ok"},
    ],
)
def test_answers_that_are_none(record: dict[str, Any]) -> None:
    seen = ServerSeen("here")
    seen.hear("about", {"policy": {}, "server": {}})
    with pytest.raises(SinewError, match="expected answers of a Sinew server"):
        seen.hear("answers", record, view)


def test_the_engine_that_took_over_is_shown() -> None:
    seen = ServerSeen("here")
    seen.hear(
        "about",
        {"policy": {}, "server": {"engine": "plan", "engine_reason": "it starts at once", "dtype": "fp32"}},
    )
    seen.hear("health", {"engine": "onnx", "engine_reason": "measured on this machine"})
    assert seen.about["server"] == {
        "engine": "onnx",
        "engine_reason": "measured on this machine",
        "dtype": "fp32",
    }
    seen.hear("health", {"status": "ok"})  # of an older server
    assert seen.about["server"]["engine"] == "onnx"


def test_bars() -> None:
    assert spark([0, 1, 2, 3, 4, 5, 6, 7]) == BARS
    assert spark([3, 3]) == BARS[0] * 2
    assert spark([None, 1.0, None, 2.0]) == f" {BARS[0]} {BARS[-1]}"
    assert spark([None, float("nan")]) == "  "
