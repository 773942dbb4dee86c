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


def view_cells(rows: list[dict[str, Any]]) -> Iterator[str]:
    for rule in dict.fromkeys(row["rule"] for row in rows):
        cells = ["all views" if rule == "all" else f"`{rule}`"]
        for task in truth.RULES:
            own = [row for row in rows if row["task"] == task and row["rule"] == rule]
            cells += [
                cell for row in own for cell in (percent(row["played"]), f"{row['views_per_episode']:.1f}")
            ]
        yield f"| {' | '.join(cells)} |" + " | |" * (5 - len(cells) > 0)


def advice_cells(rows: list[dict[str, Any]]) -> Iterator[str]:
    for row in rows:
        rates = " | ".join(percent(row[name]) for name in ("before", "after"))
        yield f"| {' | '.join(truth.advised_run(row))} | {rates} | {points(row)} |"


def warm_cells(rows: list[dict[str, Any]]) -> Iterator[str]:
    for row in rows:
        first = row["first_of_steady"]
        cells = [first["without"]["cpu_ms"], first["with"]["cpu_ms"], row["with_of_without"]["first_cpu_ms"]]
        text = " | ".join(f"{middle:.2f} ({low:.2f} to {high:.2f})" for middle, low, high in cells)
        yield f"| {row['policy']} | {row['pause_s']:g} s | {text} |"


def choice_cells(rows: list[dict[str, Any]]) -> Iterator[str]:
    for row in rows:
        if "chosen" in row:
            more = row["more_than_chosen"]
            cells = (
                "{:+.3g} ({:.3g} to {:.3g})".format(*more[mode]) if mode in more else "-"
                for mode in truth.MODES
            )
            sure = "yes" if row["sure"] else "no"
            yield f"| {row['failure_cost']:g} | {row['chosen']} | {sure} | {' | '.join(cells)} |"


PAGES: dict[str, tuple[str, Callable[[list[dict[str, Any]]], Iterator[str]]]] = {
    "skip": ("low-bit.md", skip_cells),
    "views": ("engines.md", view_cells),
    "advise": ("recordings.md", advice_cells),
    "warm": ("engines.md", warm_cells),
    "choose": ("perf.md", choice_cells),
}


@pytest.mark.parametrize("name", PAGES)
def test_the_page_states_the_stored_figures(name: str) -> None:
    page, cells = PAGES[name]
    text = (truth.ROOT / "docs" / page).read_text(encoding="utf-8")
    for line in cells(truth.stored(name)):
        assert line in text


def test_the_page_states_the_vision_time_of_a_rule() -> None:
    rows = {(row["task"], row["rule"]): row for row in truth.stored("views")}
    every, whole = rows["blocks", "front:every:4"], rows["blocks", "all"]
    shorter = 1 - every["vision_ms_per_episode"] / whole["vision_ms_per_episode"]
    text = (truth.ROOT / "docs" / "engines.md").read_text(encoding="utf-8")
    assert f"its vision time is {100 * shorter:.0f} % shorter" in text


def test_the_stored_outcomes_support_each_advice() -> None:
    """No advice of a recorded run made the robot worse, and most of it made the robot better."""
    advised = [row for row in truth.stored("advise") if "advised" in row]
    assert all(row["difference"][2] >= 0 for row in advised)
    assert sum(row["difference"][1] > 0 for row in advised) >= len(advised) - 1


def test_every_recorded_run_was_played_and_states_what_it_misses() -> None:
    """Without advice, the command prints that the recording cannot determine the setting that was played instead."""
    rows = truth.stored("advise")
    assert [(row["task"], row["recorded"]) for row in rows] == list(truth.RECORDED)
    names = {"replan": "The replan interval", "handover": "Chunk merging"}
    missed = [row for row in rows if "missed" in row]
    assert len(missed) == 2
    for row in missed:
        played = {name for name, value in row["missed"].items() if row["recorded"][name] != value}
        assert played <= names.keys()
        assert {names[name] for name in played} <= {*row["unknown"]}


def test_a_choice_that_is_sure_costs_least_in_new_episodes() -> None:
    choices = [row for row in truth.stored("choose") if "chosen" in row]
    assert sum(row["sure"] for row in choices) >= 3
    for row in choices:
        if row["sure"]:
            assert min(row["realised"], key=row["realised"].get) == row["chosen"]


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


def test_the_page_states_the_success_in_fp8() -> None:
    (row,) = truth.stored("fp8")
    text = (truth.ROOT / "docs" / "kernels.md").read_text(encoding="utf-8")
    assert (
        f"caught {row['before']['wins']} of 100 pens\nin float32, and {row['after']['wins']} of 100 with"
        in text
    )


def test_the_lever_of_perf_gains_states_the_stored_outcomes() -> None:
    wins = {row["skipped"]: row["played"]["wins"] for row in truth.stored("skip")}
    vision = [wins[f"vision={layer}"] for layer in (1, 2, 0)]
    assert "blocks won {}, {} or {} without one".format(*vision) in gains.SKIPPING
    assert {wins[each] for each in wins if "language" in each} == {0}
    assert "blocks won 0 of 50 episodes" in gains.LANGUAGE_LOSES
