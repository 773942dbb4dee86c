"""A robot's installation has no torch: every verb starts, and what needs torch says so and how to get it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sinew.cli.verbs import commands
from sinew.core.extras import install

PEN = Path(__file__).resolve().parents[2] / "sinew" / "assets" / "pen.gguf"
# Commands in processes that are forked from one that has the verbs, and no torch.
BLOCKED = """
import contextlib, io, json, os, sys, tempfile
sys.modules["torch"] = None  # its import fails, as where it is not installed
from sinew.cli import main
helps, commands = map(json.loads, sys.argv[1:])
found = []
for arguments in helps:  # none leaves anything behind, and what they import is there for the others
    with contextlib.redirect_stdout(io.StringIO()) as said:
        found.append([main(arguments), said.getvalue(), ""])
for arguments in commands:
    streams = [tempfile.TemporaryFile() for _ in range(2)]
    if (child := os.fork()) == 0:
        for number, stream in enumerate(streams, 1):
            os.dup2(stream.fileno(), number)
        sys.exit(main(arguments))
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    for stream in streams:
        stream.seek(0)
    found.append([code, *(stream.read().decode() for stream in streams)])
print(json.dumps(found))
"""
OTHER = "a bundle that is not embedded"  # the fixture copies it
COMMANDS = (
    ("bench", OTHER, "--runs", "1"),
    ("bench", PEN, "--runs", "1", "--engine", "plan"),
    ("serve", OTHER, "--wire", "http:0"),
    ("validate", PEN, "--engine", "plan"),
    ("export", PEN, "--onnx", "nowhere"),
    ("eval", PEN, "--engine", "plan", "--episodes", "1"),
    ("convert", PEN.parent, "nowhere.gguf"),
)
INSPECT = ("inspect", PEN)
DOCTOR = ("doctor",)
PLAYED = (
    ("bench", PEN, "--runs", "1", "--json"),
    # In this process, which has no torch, not in others.
    ("eval", PEN, "--env", "sinew/Pen-v0", "--replan", "2", "--episodes", "2", "--workers", "1", "--json"),
)
HELP = tuple((*words, "--help") for words, _ in commands())


@pytest.fixture(scope="module")
def runs(smolvla_bundle, tmp_path_factory) -> dict[tuple[object, ...], tuple[int, str, str]]:
    """Exit code, standard output and standard error of every command."""
    # In a folder of its own: other tests export graphs beside the shared bundle, and with them `serve` needs no torch.
    bundle = shutil.copy(smolvla_bundle("smolvla-2cam"), tmp_path_factory.mktemp("bundle"))
    groups = (*HELP, INSPECT), (DOCTOR, *COMMANDS, *PLAYED)
    places = {OTHER: str(bundle)}
    words = (
        json.dumps([[places.get(str(word), str(word)) for word in command] for command in group])
        for group in groups
    )
    found = subprocess.run(
        [sys.executable, "-c", BLOCKED, *words], capture_output=True, text=True, timeout=850
    )
    assert found.returncode == 0, found.stderr
    return dict(zip((*groups[0], *groups[1]), map(tuple, json.loads(found.stdout)), strict=True))


@pytest.mark.parametrize("command", HELP, ids=lambda command: "-".join(command[:-1]))
def test_every_verb_starts(runs, command: tuple[object, ...]) -> None:
    code, out, err = runs[command]
    assert code == 0, err
    assert f"Usage: sinew {' '.join(command[:-1])}" in out


def test_a_bundle_is_inspected(runs) -> None:
    code, out, err = runs[INSPECT]
    assert code == 0, err
    assert "pen (smolvla)" in out


def test_doctor_finds_nothing_wrong_with_the_onnx_role(runs) -> None:
    code, out, _ = runs[DOCTOR]
    assert code == 0, out
    assert out.count("skipped: no torch, which the onnx engine does not need") == 7, out
    assert ", 0 failed, " in out


@pytest.mark.parametrize(
    "command", COMMANDS, ids=lambda command: "-".join(map(str, command)).replace(str(PEN.parent), "")[:40]
)
def test_what_needs_torch_says_how_to_get_it(runs, command: tuple[object, ...]) -> None:
    code, *streams = runs[command]
    assert code == 1, streams
    said = " ".join("".join(streams).split())
    assert "Traceback" not in said
    assert install("torch") in said
    assert "pip install sinew" not in said


@pytest.mark.parametrize("command", PLAYED, ids=lambda command: command[0])
def test_an_embedded_policy_plays(runs, command: tuple[object, ...]) -> None:
    """Through ONNX Runtime, by the graphs that come with the package, and that is said."""
    code, out, err = runs[command]
    assert code == 0, err
    assert '"engine": "onnx"' in out
    if command[0] == "eval":
        (variant,) = json.loads(out)["variants"]
        assert variant["success"] == 1.0
