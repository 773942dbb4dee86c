"""``sinew bench --ladder``: every engine in a process of its own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from sinew.cli import main, options  # noqa: F401 - whose choices are made of the engines when it is imported
from sinew.engine import backend


def test_every_engine_has_a_row_or_a_reason(
    exported: Callable[[Path], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(backend, "ORDER", ("cpu", "onnx"))  # whose process imports no torch
    line = ["bench", str(exported(tmp_path)), "--ladder", "--runs", "2", "--threads", "1", "--json"]
    assert main(line) == 0
    cpu, onnx = json.loads(capsys.readouterr().out.splitlines()[-1])["engines"]
    assert (cpu["engine"], onnx["engine"]) == ("cpu", "onnx")
    assert "sinew quantize" in cpu["reason"]
    assert 0 < onnx["p50_ms"] <= onnx["max_ms"]
    assert onnx["peak_bytes"] > 1 << 24
    assert onnx["ready_s"] > 0
    assert "error" not in onnx  # nothing here computes the reference
    monkeypatch.setattr(backend, "ORDER", ("cpu",))
    assert main(line[:-1]) == 1
    assert "cpu: engine cpu needs low-bit weights" in capsys.readouterr().out


@pytest.mark.slow  # a process with torch for each
def test_engines_are_held_against_eager(
    smolvla_bundle: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(["bench", str(smolvla_bundle("smolvla-2cam")), "--ladder", "--runs", "1", "--threads", "1"]) == 0
    )
    said = capsys.readouterr().out
    assert all(word in said for word in ("eager", "plan", "onnx", "of eager", "0.0e+00", "quantize"))


@pytest.mark.parametrize("more", [["--engine", "plan"], ["--fit-steps", "1,2"], ["--deadline-ms", "5"]])
def test_what_is_of_one_engine_is_refused_by_name(
    more: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "pen", "--ladder", *more]) == 1
    assert f"{more[0]}: cannot be combined with --ladder" in capsys.readouterr().err
