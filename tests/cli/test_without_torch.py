"""A robot's installation has no torch: every verb starts, and what needs torch says so and how to get it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from sinew.cli import VERBS

PEN = Path(__file__).resolve().parents[2] / "sinew" / "assets" / "pen.gguf"
BLOCKED = """
import sys
sys.modules["torch"] = None  # its import fails, as where it is not installed
from sinew.cli import main
sys.exit(main({arguments!r}))
"""


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    code = BLOCKED.format(arguments=list(map(str, arguments)))
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)


def test_every_verb_starts() -> None:
    code = "import sys; sys.modules['torch'] = None; from sinew.cli import main, VERBS\n"
    code += "sys.exit(any([main([verb, '--help']) for verb in VERBS]))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stderr
    for verb in VERBS:
        assert f"sinew {verb}" in found.stdout


def test_a_bundle_is_inspected() -> None:
    found = run("inspect", PEN)
    assert found.returncode == 0, found.stderr
    assert "pen (smolvla)" in found.stdout


@pytest.mark.parametrize(
    "command",
    [
        ("bench", PEN, "--runs", "1"),
        ("bench", PEN, "--runs", "1", "--engine", "plan"),
        ("serve", PEN, "--wire", "http:0"),
        ("validate", PEN, "--engine", "plan"),
        ("export", PEN, "--onnx", "nowhere"),
        ("eval", PEN, "--episodes", "1"),
        ("convert", PEN.parent, "nowhere.gguf"),
    ],
    ids=lambda command: "-".join(map(str, command)).replace(str(PEN.parent), "")[:40],
)
def test_what_needs_torch_says_how_to_get_it(command: tuple[object, ...]) -> None:
    found = run(*command)
    assert found.returncode == 1, found.stdout + found.stderr
    said = " ".join((found.stdout + found.stderr).split())
    assert "Traceback" not in said
    assert "pip install 'sinew-vla[torch]'" in said
    assert "pip install sinew" not in said
