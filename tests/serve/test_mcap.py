"""`sinew recording mcap`: recordings as MCAP files, read back with the library of their makers."""

from __future__ import annotations

import base64
import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from sinew.cli import main
from sinew.core import VectorSpec
from sinew.core.extras import MissingPackageError, install
from sinew.records.recorder import read_records
from sinew.records.viewers.mcap_file import write_mcap
from tests.serve.test_replay import FRAMES, chunk_of, record

HZ = 20.0
JOINTS = tuple(f"joint{index}" for index in range(6))


@pytest.fixture
def records(tmp_path: Path) -> Path:
    return record(tmp_path / "records", {"arm": 2}, (4, 6), total_ms=3.0)


def read(path: Path) -> dict[str, list[tuple[Any, int, dict[str, Any]]]]:
    """Messages by topic: (schema, time, content)."""
    reader = pytest.importorskip("mcap.reader")
    found: dict[str, list[tuple[Any, int, dict[str, Any]]]] = {}
    with path.open("rb") as file:
        messages = reader.make_reader(file).iter_messages()
        # As they were written: these chunks were recorded within a millisecond, so their rows lie between each other.
        for schema, channel, message in sorted(messages, key=lambda each: each[2].sequence):
            content = schema.name, message.log_time, json.loads(message.data)
            found.setdefault(channel.topic, []).append(content)
    return found


def test_a_recording_is_read_back(records: Path, tmp_path: Path) -> None:
    pytest.importorskip("mcap")
    out = tmp_path / "out.mcap"
    counts = write_mcap(read_records(records), out, hz=HZ, action=VectorSpec(6, JOINTS))
    found = read(out)
    assert counts == {topic: len(messages) for topic, messages in found.items()}
    assert counts == {"/camera/camera1": 4, "/camera/camera2": 4, "/state": 4, "/action": 8, "/request": 4}
    schema, _, picture = found["/camera/camera1"][0]
    assert (schema, picture["format"], picture["frame_id"]) == ("foxglove.CompressedImage", "png", "camera1")
    pixels = np.asarray(Image.open(io.BytesIO(base64.b64decode(picture["data"]))))
    np.testing.assert_array_equal(pixels, FRAMES["camera1"])
    rows = [message["values"] for _, _, message in found["/action"]]
    np.testing.assert_allclose(rows[:4], chunk_of("arm", 0, (4, 6)), rtol=1e-6)
    np.testing.assert_allclose(rows[4:], chunk_of("arm", 1, (4, 6)), rtol=1e-6)
    assert found["/action"][0][2]["names"] == list(JOINTS)
    assert found["/state"][0][2]["names"] == [str(index) for index in range(6)]
    times = [when for _, when, _ in found["/action"][:4]]
    assert np.diff(times).tolist() == [round(1e9 / HZ)] * 3
    request = found["/request"]
    assert [message["error"] for _, _, message in request] == ["", "[internal] refused"] * 2
    assert request[0][2]["prompt"] == "go"
    assert request[0][2]["seed"] == 100
    assert request[0][2]["total_ms"] == 3.0


def test_the_verb(records: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("mcap")
    out = tmp_path / "out.mcap"
    assert main(["recording", "mcap", str(records), str(out), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["messages"]["/action"] == 2  # no rate: the first rows
    assert said["bytes"] == out.stat().st_size
    assert main(["recording", "mcap", str(records), str(out)]) == 1
    assert "out.mcap: File exists" in capsys.readouterr().err.replace("\n", "")
    assert len(read(out)["/request"]) == 4  # as it was
    (records / "00000009.npz").write_bytes(b"no record")
    assert main(["recording", "mcap", str(records), str(tmp_path / "other.mcap")]) == 1
    assert "not a record" in capsys.readouterr().err.replace("\n", "")
    assert not (tmp_path / "other.mcap").exists()


def test_without_the_package(records: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mcap.writer", None)
    with pytest.raises(MissingPackageError, match=re.escape(f"MCAP needs mcap: {install('mcap')}")):
        write_mcap(read_records(records), tmp_path / "out.mcap")
    assert not (tmp_path / "out.mcap").exists()
