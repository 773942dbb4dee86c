"""Predictions compared with played episodes (``python -m benchmarks.truth``)."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("mujoco", reason="the built-in tasks need mujoco")

from benchmarks import truth
from sinew.core.statistics import wilson

from sinew_eval.episodes.adapters import make_env
from sinew_eval.episodes.robot import SimulatedRobot
from sinew_eval.episodes.runner import EpisodeSettings
from sinew_eval.episodes.settings import Latency


def test_only_an_environment_that_states_the_age_of_a_frame_has_one() -> None:
    """Otherwise the setting ``camera_delay`` would never count."""
    late = {"camera_delay": truth.CAMERA_S}
    env, adapter = make_env("sinew/Pen-v0", env_options=late)
    assert "age" in SimulatedRobot(env, adapter, 1).observe()
    assert "age" not in SimulatedRobot(truth.Unstated(env), adapter, 1).observe()


def test_a_known_camera_delay_catches_the_pen() -> None:
    """A camera is two frames late, and the robot does not state it. Only the setting makes the commands fit."""
    policy = truth.opened("pen")
    won = [
        sum(truth.play("pen", policy, range(6), conduct, truth.CAMERA_S))
        for delay in (0.0, 0.075)
        for conduct in [EpisodeSettings("2", Latency("33ms"), "aligned", envelope={"camera_delay": delay})]
    ]
    assert won[0] <= 1
    assert won[1] >= 4


@pytest.mark.parametrize("path", sorted(truth.RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_stored_results_are_consistent(path) -> None:
    """Each interval is that of its outcomes, and each file states its command, CPU and load."""
    stored = json.loads(path.read_text())
    assert stored["command"].startswith(f"python -m benchmarks.truth {path.stem} ")
    assert stored["cpu"]
    assert stored["load"]
    for row in stored["rows"]:
        for played in (row[name] for name in ("played", "before", "after") if name in row):
            assert played["outcomes"].count("1") == played["wins"]
            assert len(played["outcomes"]) == played["episodes"] >= 40
            assert played["interval"] == pytest.approx(wilson(played["wins"], played["episodes"]), abs=1e-3)
