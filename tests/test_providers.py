"""What `sinew` does without the distributions that add to it: it says where to get them, and the rest works."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache

import pytest

import sinew
from sinew.core import providers
from tests import processes

# As if a distribution was not installed: no metadata has this name.
WITHOUT = """
import sys
from sinew.core import providers
providers.PACKAGES = {name: (f"{each}-absent", folder) for name, (each, folder) in providers.PACKAGES.items()}
from sinew.cli import main
sys.exit(main(sys.argv[1:]))
"""


@cache
def nursery() -> processes.Nursery:
    """Return the process that forks the commands. It has imported libraries, and no part of Sinew."""
    return processes.Nursery(sys.executable, ("torch", "numpy", "cyclopts", "rich.console"))


def run(*words: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a process that finds the packages itself; the usual ones of tests have found them."""
    command = [sys.executable, "-c", WITHOUT, *words]
    return processes.run(command, env={**os.environ, "COLUMNS": "200"}, nursery=nursery())


def without(*words: str) -> tuple[int, str]:
    done = run(*words)
    return done.returncode, " ".join(f"{done.stdout} {done.stderr}".split())


@pytest.mark.parametrize(
    ("line", "package"),
    [
        ("perf need --rate 10", "sinew-perf"),
        ("perf --help", "sinew-perf"),
        ("perf", "sinew-perf"),
        ("eval blocks --episodes 2", "sinew-eval"),
        ("demo --help", "sinew-eval"),
        ("trials blocks", "sinew-eval"),
        ("leaderboard", "sinew-eval"),
        ("recording dataset records out", "sinew-eval"),
    ],
)
def test_a_verb_of_an_absent_package_says_how_to_get_it(line: str, package: str) -> None:
    status, text = without(*line.split())
    assert status == 2
    verb = "recording dataset" if line.startswith("recording") else line.partition(" ")[0]
    assert f"error: sinew {verb} is in the package {package}: pip install " in text


def test_the_help_lists_verbs_of_absent_packages() -> None:
    status, text = without("--help")
    assert status == 0
    assert "Not installed:" in text


def test_memory_is_that_of_weights_alone_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    from sinew.memory import memory_need

    status, text = without("doctor", "blocks")
    assert status == 0, text
    assert "weights only: the package sinew-perf counts activations" in text
    monkeypatch.setattr(providers, "provider", lambda _: None)
    options = {"engine": "eager", "providers": (), "device": "cpu", "dtype": None, "ignore_recipe": False}
    weights, activations = memory_need("blocks", options, None, 8)
    assert weights > 100_000
    assert activations == 0


def test_a_plan_is_refused_and_a_roofline_is_left_out() -> None:
    status, text = without("inspect", "blocks", "--plan")
    assert status == 1
    assert "sinew inspect --plan is in the package sinew-perf: pip install " in text
    done = run("bench", "blocks", "--runs", "2", "--json")
    assert done.returncode == 0, done.stderr
    assert "is in the package sinew-perf" in json.loads(done.stdout)["roofline"]["reason"]


@pytest.mark.parametrize("robot", ["blocks", "gym:sinew/Pen-v0"])
def test_a_simulated_robot_says_how_to_get_its_package(robot: str) -> None:
    status, text = without("run", "blocks", "--robot", robot, "--episodes", "1")
    assert status == 1
    assert f"error: sinew run --robot {robot} is in the package sinew-eval: pip install " in text


def test_a_proof_is_made_of_random_frames_and_names_the_absent_gate() -> None:
    done = run("validate", "blocks", "--engine", "plan", "--observations", "2", "--json")
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert record["parity"]["source"] == "random frames"
    assert "the gate is in the package sinew-eval: pip install " in record["gate"]["skipped"]
    status, text = without("validate", "blocks", "--gate", "gate.json", "--observations", "1")
    assert status == 1
    assert "sinew validate --gate is in the package sinew-eval: pip install " in text


def test_a_name_of_an_absent_package_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(providers, "entry_points_of", lambda _: None)
    with pytest.raises(
        providers.MissingDistributionError, match=r"sinew\.evaluate is in the package sinew-eval"
    ):
        _ = sinew.evaluate
    assert "evaluate" in dir(sinew)
    assert "evaluate" not in sinew.__all__  # a star import works without the package


def test_gym_needs_an_environment() -> None:
    status, text = without("run", "blocks", "--robot", "gym", "--seconds", "1")
    assert status == 1
    assert "--robot: expected dry, blocks, pen, egg, gym:ENV" in text
