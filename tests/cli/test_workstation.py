"""A shared workstation: a home of somebody else, little memory, a full disk. Lines that a user types, and their end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sinew.cli import main

ASSETS = Path(__file__).resolve().parents[2] / "sinew" / "assets"
PEN = ASSETS / "pen.gguf"


def limited(limit: str, *words: str | Path) -> tuple[int, str]:
    """Type a line of ``sinew`` under a limit of the shell's; return its status and what it said."""
    line = [f'ulimit {limit}; exec "$@"', "-", sys.executable, "-m", "sinew", *map(str, words)]
    env = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(["bash", "-c", *line], capture_output=True, text=True, env=env)
    return done.returncode, " ".join(done.stderr.split())


def test_a_verdict_is_said_where_the_cache_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Minutes of episodes were played, and then lost to `Permission denied` with status 1."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert main(["validate", str(PEN), "--observations", "1", "--episodes", "0"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "passes over 1 observation" in said
    assert "not stored for `--engine auto`: " in said


def test_too_little_memory_is_not_called_a_fault_of_the_program() -> None:
    status, said = limited("-v 400000", "validate", PEN, "--episodes", "0")
    assert status == 1
    assert "error: this process needs more memory than it is allowed (ulimit -v, a cgroup): libtorch" in said


def test_a_full_disk_is_said_with_the_file(golden: Path, tmp_path: Path) -> None:
    """The quota of a user, here the largest file that he may write (1,024 bytes a block)."""
    status, said = limited("-f 100", "convert", golden / "act-env" / "checkpoint", tmp_path / "out.gguf")
    assert (status, f"error: {tmp_path / 'out.gguf'}: File too large" in said) == (1, True), said
    assert list(tmp_path.iterdir()) == []
