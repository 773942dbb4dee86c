"""`sinew serve --replay`: recorded chunks on every wire, in order, said to be recorded, and without torch."""

from __future__ import annotations

import base64
import io
import json
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sinew_client import Client, ServerError

from benchmarks.wire_clients import connect
from sinew.bundle import Bundle
from sinew.cli import main
from sinew.core import ActionChunk, CancelledError, Observation, ObservationError, SinewError, Timing
from sinew.records.recorder import Recorder
from sinew.serve.replay import MAX_SESSIONS, Replay
from tests import processes
from tests.serve.test_server import CASE, START_S, ServerProcess

WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None  # its import fails, as where it is not installed
from sinew.cli import main
sys.exit(main(["serve", *sys.argv[1:]]))
"""
WIRES = ("native", "openpi", "http", "groot", "lerobot")
FRAMES = {name: np.full((32, 48, 3), 7, np.uint8) for name in ("camera1", "camera2")}
STATE = np.zeros(6, np.float32)
META = {"recorded": 1.0, "wire": "native", "prompt": "", "session": "a"} | dict.fromkeys(
    ("seed", "solver_steps", "time")
)
SAID = "this is a replay of records: the actions were recorded and not computed"


def chunk_of(session: str, number: int, shape: tuple[int, int]) -> np.ndarray:
    rng = np.random.default_rng([len(session), number])
    return rng.uniform(-1, 1, shape).astype(np.float32)


def record(folder: Path, sessions: dict[str, int], shape: tuple[int, int], total_ms: float = 0.0) -> Path:
    """Records of sessions, one chunk of each in turn, and an error among them."""
    recorder = Recorder(folder)
    for number in range(max(sessions.values())):
        for session, count in sessions.items():
            if number < count:
                observation = Observation(images=FRAMES, state=STATE, prompt="go", session=session)
                chunk = ActionChunk(
                    chunk_of(session, number, shape), Timing(total_ms=total_ms), 100 + number, session
                )
                recorder.put("native", session, observation, chunk)
        recorder.put("native", "arm", Observation(images=FRAMES, state=STATE), SinewError("refused"))
    recorder.close()
    recorder._thread.join()  # as long as it takes the disk
    return folder


def picture(frame: np.ndarray) -> str:
    file = io.BytesIO()
    Image.fromarray(frame).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def ask(replay: Replay, session: str = "") -> ActionChunk:
    return replay.infer(Observation(images=FRAMES, state=STATE, session=session))


# ----------------------------------------------------------------------------- the recording


@pytest.fixture
def replay(tmp_path: Path) -> Replay:
    return Replay(record(tmp_path / "records", {"arm": 3, "other": 2}, (4, 6)))


def test_sessions_get_their_own_chunks_in_order(replay: Replay) -> None:
    for number in (0, 1, 0, 1, 0):
        found = ask(replay, "other")
        np.testing.assert_array_equal(found.actions, chunk_of("other", number, (4, 6)))
        assert (found.seed, found.session, found.warnings[0]) == (100 + number, "other", SAID)
    for session in (
        "arm",
        "unknown",
        "",
    ):  # what was not recorded gets the first session, each from its beginning
        for number in range(3):
            np.testing.assert_array_equal(ask(replay, session).actions, chunk_of("arm", number, (4, 6)))


def test_the_end_and_a_new_episode(replay: Replay) -> None:
    said = [ask(replay, "other").warnings for _ in range(5)]
    assert [len(warnings) for warnings in said] == [1, 1, 2, 1, 2]
    assert said[2][1] == "the recording began again"
    replay.reset("other")
    found = ask(replay, "other")
    np.testing.assert_array_equal(found.actions, chunk_of("other", 0, (4, 6)))
    assert found.warnings == (SAID,)


def test_what_a_recording_says_of_its_policy(replay: Replay) -> None:
    spec = replay.spec
    assert [(c.name, c.height, c.width) for c in spec.cameras] == [("camera1", 32, 48), ("camera2", 32, 48)]
    assert (spec.state.dim, spec.action.dim, spec.chunk_size, spec.name) == (6, 6, 4, "records")
    about = replay.describe()["replay"]
    assert (about["chunks"], about["sessions"], about["left_out"]) == (5, {"arm": 3, "other": 2}, 3)
    assert "5 chunks, sessions 'arm', 'other'" in repr(replay)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"images": {**FRAMES, "camera3": FRAMES["camera1"]}}, "images.camera3"),
        ({"images": {"camera1": FRAMES["camera1"]}}, "images.camera2"),
        ({"images": {**FRAMES, "camera2": np.zeros((3, 4))}}, "images.camera2"),
        ({"state": np.zeros(5)}, "state"),
        ({"state": np.full(6, np.nan)}, "state"),
        ({"state": np.array(["a"] * 6)}, "state"),
    ],
)
def test_observations_are_checked(replay: Replay, change: dict[str, object], field: str) -> None:
    with pytest.raises(ObservationError) as caught:
        replay.infer({"images": FRAMES, "state": STATE, **change})
    assert caught.value.field == field


def test_the_recorded_time_is_waited_and_can_be_cancelled(tmp_path: Path) -> None:
    folder = record(tmp_path / "records", {"arm": 1}, (4, 6), total_ms=3e5)
    slow = Replay(folder)
    cancel = threading.Event()
    cancel.set()
    with pytest.raises(CancelledError):
        slow.run(slow.prepare(Observation(images=FRAMES, state=STATE)), cancel=cancel)
    assert ask(Replay(folder, latency=False)).timing.total_ms == 0.0


def test_places_are_bounded(replay: Replay) -> None:
    for number in range(MAX_SESSIONS + 10):
        ask(replay, f"s{number}")
    assert len(replay._places) == MAX_SESSIONS


def test_files_that_are_no_records(tmp_path: Path) -> None:
    folder = record(tmp_path / "records", {"arm": 1}, (4, 6))
    with pytest.raises(SinewError, match="no records"):
        Replay(tmp_path)
    np.savez(
        folder / "99999999.npz",
        meta=np.array(json.dumps(META)),
        actions=np.ones((2, 6)),
    )
    with pytest.raises(SinewError, match=r"actions: expected \[4, 6\] as in earlier records, got \[2, 6\]"):
        Replay(folder)
    (folder / "99999999.npz").write_bytes(b"PK\x03\x04 not much of an archive")
    with pytest.raises(SinewError, match="not a record"):
        Replay(folder)


# ----------------------------------------------------------------------------- the server


@pytest.fixture(scope="module")
def bundle(smolvla_bundle: Callable[[str], Path]) -> Path:
    return smolvla_bundle(CASE)


@pytest.fixture(scope="module")
def shape(bundle: Path) -> tuple[int, int]:
    spec = Bundle(bundle).manifest.spec
    return spec.chunk_size, spec.action.dim


@pytest.fixture(scope="module")
def server(
    bundle: Path, shape: tuple[int, int], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[ServerProcess, dict[str, int]]]:
    pytest.importorskip("grpc", reason="the lerobot wire needs grpcio")
    directory = tmp_path_factory.mktemp("replay")
    records = record(directory / "records", {"arm": 3, "other": 2}, shape)
    ports = {wire: processes.free_port() for wire in WIRES}
    wires = [word for wire, port in ports.items() for word in ("--wire", f"{wire}:{port}")]
    running = ServerProcess(directory, bundle, "--replay", records, *wires, command=("-c", WITHOUT_TORCH))
    try:
        yield running, ports
        assert running.stop() == 0
        assert "Traceback" not in running.log.read_text()
    finally:
        running.close()


@pytest.mark.parametrize("wire", WIRES)
def test_every_wire_answers(
    server: tuple[ServerProcess, dict[str, int]], shape: tuple[int, int], wire: str
) -> None:
    if wire == "openpi":
        pytest.importorskip("websockets.sync.client")
    scheme = {"openpi": "ws", "lerobot": "grpc", "http": "http"}.get(wire, "tcp")
    client = connect(wire, f"{scheme}://127.0.0.1:{server[1][wire]}")
    if wire == "lerobot":
        client.policy = CASE  # type: ignore[attr-defined]
        # Its sessions are connections, and each one begins at the start.
    expected = [chunk_of("arm", number, shape) for number in range(3)]
    found = [client.ask(FRAMES, STATE, "go", 0).actions for _ in range(2)]
    client.close()
    first = next(number for number in range(3) if np.array_equal(expected[number], found[0]))
    np.testing.assert_array_equal(found[1], expected[(first + 1) % 3])


def test_the_server_says_what_it_is(server: tuple[ServerProcess, dict[str, int]]) -> None:
    with Client(f"tcp://127.0.0.1:{server[1]['native']}", timeout=START_S) as client:
        about = client.metadata()
        assert about["server"]["engine"] == "replay"
        assert about["server"]["replay"]["sessions"] == {"arm": 3, "other": 2}
        observation = {"images": FRAMES, "state": STATE, "prompt": "go", "session": "other"}
        first = client.infer(observation)
        assert SAID in first.warnings
        client.infer(observation)
        client.reset("other")
        np.testing.assert_array_equal(client.infer(observation).actions, first.actions)
        with pytest.raises(ServerError, match=r"images\.wrist"):
            client.infer({**observation, "images": {**FRAMES, "wrist": FRAMES["camera1"]}})
    pictures = {name: picture(frame) for name, frame in FRAMES.items()}
    request = urllib.request.Request(
        f"http://127.0.0.1:{server[1]['http']}/v1/actions",
        json.dumps({"images": pictures, "state": [0] * 6, "prompt": "go"}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=START_S) as reply:
        assert SAID in json.load(reply)["warnings"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "expected a bundle or --replay RECORDS"),
        (("--replay", "."), "no records"),
        (("--replay", ".", "--engine", "eager"), "a replay computes nothing"),
        (("--replay", ".", "--rename", "front=camera1"), "--rename: pass the bundle together with --replay"),
    ],
)
def test_mistakes(
    arguments: tuple[str, ...],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["serve", *arguments]) == 1
    assert words in capsys.readouterr().err
