"""Setting `frames_as` of `sinew run`, between two hosts whose address changes and whose line is slow."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import networks
from benchmarks.network import why_not
from sinew.cli import main
from tests.serve.test_replay import WITHOUT_TORCH, record
from tests.serve.test_server import serving

BLOCKS = Path(__file__).parents[2] / "sinew" / "assets" / "blocks.gguf"


def test_how_frames_travelled_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = record(tmp_path / "records", {"arm": 3}, (20, 6))
    arguments = ("--replay", records, "--wire", "native:0", "--replay-latency", "none")
    with serving(tmp_path, *arguments, command=("-c", WITHOUT_TORCH)) as server:
        line = ["run", server.address, "--robot", "dry", "--hz", "20", "--seconds", "0.5", "--prompt", "go"]
        for given, said in (((), "raw: "), (("--set", "frames_as=80"), "JPEG 80: chosen by the user")):
            assert main([*line, *given, "--json"]) in (0, 3)
            captured = capsys.readouterr()
            told = json.loads(captured.out.splitlines()[-1])["frames"]
            assert told.startswith(said)
            assert told in captured.err
        assert main([*line, "--set", "frames_as=png"]) == 1
        wrong = "frames_as: expected raw, auto or a JPEG quality from 1 to 95, got 'png'"
        assert wrong in capsys.readouterr().err
    assert main(["run", str(BLOCKS), "--robot", "dry", "--set", "frames_as=auto"]) == 1
    assert "frames_as: expected a server, to which frames are sent" in capsys.readouterr().err


@pytest.mark.slow
def test_a_robot_roams_and_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    if reason := why_not():
        pytest.skip(f"two hosts need a network of their own: {reason}")
    assert networks.main(["--only", "roaming", "--episodes", "3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["roamed"] > 0
    assert found["failed_requests"] > 0  # those that were under way at the time
    assert found["unanswered"] == 0  # and at the end it is connected
    assert found["faults"]["total"] == 0
    assert found["chunks"] > found["roamed"]
