"""The asynchronous client, which talks to a running server and needs nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sinew_client import Client, ClientError, InvalidObservation, RequestTimeout, ServerError, UnsafeChunk
from sinew_client.aio import AsyncClient

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
                match=r"no answer from tcp://127.0.0.1:\d+ within 3 s: no connection \(Connection refused\)",
            ):
                await policy.infer(OBSERVATION, timeout=3)  # nobody is there, so nothing is queued
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
