"""Recordings for Rerun, of records and of what a server or an evaluation does, read back with its makers' library."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sinew.cli import main
from sinew.core import ActionChunk, Observation, SinewError, Timing, VectorSpec
from sinew.core.extras import MissingPackageError, install
from sinew.records.recorder import Record, read_records
from sinew.records.viewers.rerun_log import target_of
from sinew.records.viewers.rerun_records import MAX_SESSIONS, OTHERS, RerunRecorder, write_rrd
from tests.serve.puppet import until
from tests.serve.test_replay import FRAMES, STATE, chunk_of, record

HZ = 20.0
JOINTS = tuple(f"joint{index}" for index in range(6))
CHUNK = ActionChunk(np.zeros((4, 6), np.float32), Timing(total_ms=3.0), 1)


@pytest.fixture
def records(tmp_path: Path) -> Path:
    return record(tmp_path / "records", {"arm": 2}, (4, 6), total_ms=3.0)


@pytest.fixture
def rerun() -> None:
    pytest.importorskip("rerun", reason="the extra `rerun` is not installed")


def apart(records: Path, seconds: float) -> list[Record]:
    """Return records as if one had come every so many seconds."""
    found = list(read_records(records))
    return [replace(r, meta={**r.meta, "recorded": 1e9 + seconds * n}) for n, r in enumerate(found)]


def scalars(out: Path, entity: str, timeline: str = "wall") -> list[tuple[float, float]]:
    """Return (seconds, value) of an entity in a recording, by time."""
    reader = pytest.importorskip("rerun.chunk")
    rows: list[tuple[float, float]] = []
    for chunk in reader.RrdReader(out).stream().to_chunks():
        if chunk.entity_path == entity:
            batch = chunk.to_record_batch()
            values = [value[0] for value in batch.column("Scalars:scalars").to_pylist()]
            times = batch.column(timeline).cast("int64").to_pylist()
            rows += zip([1e-9 * time for time in times], values, strict=True)
    return sorted(rows)


@pytest.mark.usefixtures("rerun")
@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("images/camera1", np.zeros(5, np.uint8), "or floats in [0, 1], got uint8 [5]"),
        ("images/camera1", np.zeros((4, 6, 4), np.uint8), "or floats in [0, 1], got uint8 [4, 6, 4]"),
        ("images/camera1", np.full((4, 6, 3), np.nan, np.float32), "got float32 from nan to nan"),
        ("images/a\x1b", np.zeros((4, 6, 3), np.uint8), "expected printable names of cameras"),
        ("state", np.array(["a"]), "state: expected numbers [D], got <U1 [1]"),
        ("actions", np.zeros(3), "actions: expected numbers [H, D], got float64 [3]"),
        ("recorded", "noon", "recorded: expected seconds, got noon"),
        ("recorded", 1e308, "recorded: expected seconds, got 1e+308"),
        ("total_ms", [1], "total_ms: expected seconds, got [1]"),
        ("prompt", "\ud800", ""),
    ],
)
def test_records_from_elsewhere(
    records: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, value: Any, said: str
) -> None:
    for path in records.glob("*.npz"):
        with np.load(path) as file:
            arrays = dict(file)
        meta = json.loads(str(arrays.pop("meta")))
        (arrays if isinstance(value, np.ndarray) else meta)[name] = value
        np.savez(path, **arrays, meta=np.array(json.dumps(meta)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert main(["recording", "rrd", str(records), str(tmp_path / "out.rrd")]) == bool(said)
    told = " ".join(capsys.readouterr().err.split())
    assert said in told
    assert "fault of this program" not in told
    assert [each.name for each in tmp_path.iterdir() if each != records] == ([] if said else ["out.rrd"])


@pytest.mark.usefixtures("rerun")
def test_a_recording_is_read_back(records: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.rrd"
    # Answer, error, answer, error; 0.05 s apart, so that two rows of the first chunk were due before the second came.
    counts = write_rrd(apart(records, 0.05), out, hz=HZ, action=VectorSpec(6, JOINTS))
    assert counts["camera/camera1"] == counts["state/0"] == 4
    assert counts["latency_ms"] == counts["error"] == 2
    assert counts["action/joint0"] == 2 + 4
    found = scalars(out, "/action/joint0")
    first, second = (chunk_of("arm", index, (4, 6))[:, 0] for index in range(2))
    assert [value for _, value in found] == pytest.approx([*first[:2], *second])
    assert np.diff([time for time, _ in found]) == pytest.approx(1 / HZ, abs=1e-6)


@pytest.mark.usefixtures("rerun")
def test_the_verb(records: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recording", "rrd", str(records), str(tmp_path / "out.rrd"), "--hz", "20", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["entries"]["prompt"] == 4
    with pytest.raises(SinewError, match="the file already exists"):
        write_rrd([], tmp_path / "out.rrd")
    with pytest.raises(SinewError, match="No such file or directory"):
        write_rrd([], tmp_path / "nowhere" / "out.rrd")


@pytest.mark.usefixtures("rerun")
def test_robots_are_told_apart(tmp_path: Path) -> None:
    recorder = RerunRecorder(tmp_path / "out.rrd")
    for number in range(MAX_SESSIONS + 2):
        recorder.put("native", f"robot{number}", Observation(images=FRAMES, state=STATE), CHUNK)
        until(lambda number=number: recorder.stats()["written"] == number + 1)  # type: ignore[misc]
    recorder.close()
    found = {name.rpartition("/")[0] for name in recorder.log.counts if name.endswith("latency_ms")}
    assert len(found) == MAX_SESSIONS + 1
    assert {"", "session/robot1", f"session/{OTHERS}"} <= found


@pytest.mark.usefixtures("rerun")
def test_an_evaluation_is_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("mujoco")
    out = tmp_path / "out.rrd"
    line = ["eval", "expert", "--env", "sinew/Pen-v0", "--episodes", "2", "--rerun", str(out)]
    assert main([*line, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    entry = report["variants"][0]
    assert [value for _, value in scalars(out, "/success", "time")][-1] == entry["success"]
    steps, answers = (scalars(out, f"/{kind}/0", "time") for kind in ("action", "answer"))
    assert len(answers) == entry["chunks"]
    assert np.diff([time for time, _ in steps]) == pytest.approx(1 / report["control_hz"], abs=1e-6)
    for flags, said in (
        (["--workers", "2"], "expected one worker"),
        (["--realtime"], "would slow down the loop"),
        (["--stream", "10:5"], "would slow down the loop"),
    ):
        assert main([*line[:-1], str(tmp_path / "other.rrd"), *flags]) == 1
        assert said in " ".join(capsys.readouterr().err.split())


@contextmanager
def viewer(port: int, out: Path) -> Iterator[None]:
    """Run Rerun's own viewer without a window: it writes what it is sent, and is killed at the end."""
    import rerun_cli

    program = Path(rerun_cli.__file__).parent / "rerun"
    process = subprocess.Popen(
        [program, "--port", str(port), "--bind", "127.0.0.1", "--save", out],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )

    def answers() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    try:
        until(answers)
        yield
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow  # starts a program of 300 MB twice
@pytest.mark.usefixtures("rerun")
def test_a_viewer_may_come_and_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sinew.records.background_writer.RETRY_S", 0.0)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = target_of(f"rerun+http://127.0.0.1:{port}/proxy")
    with pytest.raises(SinewError, match=f"no viewer answers at 127.0.0.1:{port}"):
        RerunRecorder(address)
    with viewer(port, tmp_path / "first.rrd"):
        recorder = RerunRecorder(address)
        recorder.put("native", "", Observation(images=FRAMES, state=STATE), CHUNK)
        until(lambda: recorder.stats()["written"] == 1)
        until(lambda: (tmp_path / "first.rrd").stat().st_size > 1000)

    def put(what: str) -> bool:
        recorder.put("native", "", Observation(images=FRAMES, state=STATE), CHUNK)
        before = recorder.stats()[what]
        until(lambda: sum(recorder.stats()[k] for k in ("written", "failed")) >= asked[0])
        asked[0] += 1
        return recorder.stats()[what] > before

    asked = [2]
    until(lambda: put("failed"))  # a loss is noticed with the next records
    with viewer(port, tmp_path / "second.rrd"):
        until(lambda: put("written"))
        until(lambda: (tmp_path / "second.rrd").stat().st_size > 1000)
        recorder.close()
    assert recorder.stats()["alive"] is False


@pytest.mark.usefixtures("rerun")
@pytest.mark.parametrize(
    "text",
    ["out.mcap", "viewer", "http://127.0.0.1:9876/proxy", "rerun+http://127.0.0.1/proxy", "rerun+http://h:x/proxy",
     "rerun+http://127.0.0.1:9876"],
)  # fmt: skip
def test_what_is_no_target(text: str) -> None:
    with pytest.raises(SinewError, match=r"expected a file NAME.rrd, or the address of a running viewer"):
        target_of(text)


def test_without_the_package(records: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rerun", None)
    with pytest.raises(MissingPackageError, match=re.escape(install("rerun"))):
        write_rrd(read_records(records), tmp_path / "out.rrd")


@pytest.mark.parametrize("verb", ["serve", "eval"])
def test_verbs_say_what_is_missing_before_anything_is_loaded(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "rerun", None)
    assert main([verb, str(tmp_path / "nothing.gguf"), "--rerun", str(tmp_path / "out.rrd")]) == 1
    assert install("rerun") in " ".join(capsys.readouterr().err.split())
