"""`sinew rrd`: recordings for Rerun, read back with the library of their makers."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from sinew.cli import main
from sinew.core import MissingPackageError, SinewError, VectorSpec
from sinew.serve.recorder import read_records
from sinew.serve.rrd_file import write_rrd
from tests.serve.test_replay import chunk_of, record

HZ = 20.0
JOINTS = tuple(f"joint{index}" for index in range(6))


@pytest.fixture
def records(tmp_path: Path) -> Path:
    return record(tmp_path / "records", {"arm": 2}, (4, 6), total_ms=3.0)


def test_a_recording_is_read_back(records: Path, tmp_path: Path) -> None:
    reader = pytest.importorskip("rerun.chunk", reason="the extra `rerun` is not installed")
    out = tmp_path / "out.rrd"
    counts = write_rrd(read_records(records), out, hz=HZ, action=VectorSpec(6, JOINTS))
    assert counts["camera/camera1"] == counts["state/0"] == 4
    assert counts["latency_ms"] == counts["error"] == 2
    assert counts["action/joint0"] == 8
    rows: list[float] = []
    for chunk in reader.RrdReader(out).stream().to_chunks():
        if chunk.entity_path == "/action/joint0":
            batch = chunk.to_record_batch()
            rows += [value[0] for value in batch.column("Scalars:scalars").to_pylist()]
            times = sorted(batch.column("wall").cast("int64").to_pylist())
            assert (
                round((times[-1] - times[0]) / 1e6) >= 3 * 1e3 / HZ
            )  # milliseconds from the first row to the last
    expected = np.concatenate([chunk_of("arm", index, (4, 6))[:, 0] for index in range(2)])
    assert sorted(rows) == pytest.approx(sorted(expected.tolist()))


def test_the_verb(records: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rerun", reason="the extra `rerun` is not installed")
    assert main(["rrd", str(records), str(tmp_path / "out.rrd"), "--hz", "20", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["entries"]["prompt"] == 4
    with pytest.raises(SinewError, match="is there already"):
        write_rrd([], tmp_path / "out.rrd")


def test_without_the_package(records: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rerun", None)
    with pytest.raises(MissingPackageError, match=r"sinew-vla\[rerun\]"):
        write_rrd(read_records(records), tmp_path / "out.rrd")
