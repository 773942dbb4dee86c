"""Predictions compared with played episodes (``python -m benchmarks.truth``)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mujoco", reason="the built-in tasks need mujoco")

from benchmarks import keep_warm, truth
from sinew.core.statistics import wilson
from sinew_perf import gains

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
        sum(truth.play("pen", policy, range(6), conduct, {"camera_delay": truth.CAMERA_S}, stated=False))
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
        for played in (row[name] for name in ("played", "before", "after", "measured") if name in row):
            assert played["outcomes"].count("1") == played["wins"]
            assert len(played["outcomes"]) == played["episodes"] >= 40
            assert played["interval"] == pytest.approx(wilson(played["wins"], played["episodes"]), abs=1e-3)


def percent(played: dict[str, Any]) -> str:
    rate, (low, high) = played["wins"] / played["episodes"], played["interval"]
    return f"{100 * rate:.3g} ({100 * low:.0f} to {100 * high:.0f})"


def points(row: dict[str, Any]) -> str:
    middle, low, high = (100 * each for each in row["difference"])
    return f"{middle:+.0f} ({low:.0f} to {high:.0f})"


def skip_cells(rows: list[dict[str, Any]]) -> Iterator[str]:
    for row in rows:
        lost = f" {points(row)} " if row["skipped"] else " "
        yield f"| {row['skipped'] or 'nothing'} | {percent(row['played'])} |{lost}|"


PAGES: dict[str, tuple[str, Callable[[list[dict[str, Any]]], Iterator[str]]]] = {
    "skip": ("low-bit.md", skip_cells),
}


@pytest.mark.parametrize("name", PAGES)
def test_the_page_states_the_stored_figures(name: str) -> None:
    page, cells = PAGES[name]
    text = (truth.ROOT / "docs" / page).read_text(encoding="utf-8")
    for line in cells(truth.stored(name)):
        assert line in text


def test_keeping_a_server_warm_costs_processor_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two servers answer over sockets, in turn, and the other one is stopped meanwhile."""
    monkeypatch.setattr(keep_warm, "POLICIES", ("pen",))
    monkeypatch.setattr(keep_warm, "PAUSES_S", (0.5,))
    (row,) = keep_warm.warm(2)
    assert row["with"]["cpu_s_per_idle_s"] > 5 * row["without"]["cpu_s_per_idle_s"]
    for each in (row["with"], row["without"]):
        assert len(each["first_ms"]) == len(each["steady_cpu_ms"]) == 2
        assert min(each["first_ms"]) > 0


def test_a_policy_in_fp8_catches_the_pen(tmp_path: Path) -> None:
    """The engine for GPUs computes with the references of its kernels, and some products are in e4m3."""
    policy = truth.with_fp8("pen", tmp_path)
    kinds = {type(layer).__name__ for layer in policy.policy.engine.model.modules()}
    assert "Fp8Linear" in kinds
    assert sum(truth.play("pen", policy, range(6), EpisodeSettings("2"))) >= 4


def test_the_lever_of_perf_gains_states_the_stored_outcomes() -> None:
    wins = {row["skipped"]: row["played"]["wins"] for row in truth.stored("skip")}
    vision = [wins[f"vision={layer}"] for layer in (1, 2, 0)]
    assert "blocks won {}, {} or {} without one".format(*vision) in gains.SKIPPING
    assert {wins[each] for each in wins if "language" in each} == {0}
    assert "blocks won 0 of 50 episodes" in gains.LANGUAGE_LOSES
