"""A run's requests, replayed with other settings: holds, ages and limits against what a controller really does."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sinew_client.control import Journal, Settings
from sinew_client.control.journal import JournalError
from sinew_client.control.what_if import alternatives, play, read_run

DIM, SIZE = 2, 12


def drive(
    path: Path,
    handover: str,
    replan: str,
    latencies: list[int],
    steps: int = 90,
    episode: int = 30,
    **options: Any,
) -> Any:
    """Write the decision log of a run without clocks. Request k is answered after ``latencies[k % len]`` steps."""
    settings = Settings(20.0, handover, replan, chunk_size=SIZE, **options)
    controller = settings.controller(DIM)
    journal = Journal(path, settings, DIM)
    controller.listeners.append(journal.put)
    due, count = -1, 0
    chunk = np.linspace(0.0, 1.0, SIZE * DIM, dtype=np.float32).reshape(SIZE, DIM)
    for step in range(steps):
        if step and step % episode == 0:
            controller.fault(step, "a new episode", moved=True)
        if controller.request is not None and step >= due:
            controller.arrived(step, chunk)
        if controller.wants_chunk(step):
            controller.ask(step, step, np.zeros(DIM, np.float32))
            due, count = step + latencies[count % len(latencies)], count + 1
            if due == step:
                controller.arrived(step, chunk)
        controller.command(step, np.zeros(DIM, np.float32))
    journal.close()
    return controller


@pytest.mark.parametrize("handover", ["freeze", "naive", "aligned", "ensemble"])
@pytest.mark.parametrize("replan", ["1", "5", "full", "queue:0.5"])
@pytest.mark.parametrize("latencies", [[0], [3], [1, 4, 2, 7, 1, 3, 2]])
def test_a_replay_with_the_settings_of_the_run_is_the_run(
    tmp_path: Path, handover: str, replan: str, latencies: list[int]
) -> None:
    controller = drive(tmp_path / "run.jsonl", handover, replan, latencies)
    log = read_run(tmp_path / "run.jsonl")
    again = play(log)
    assert again.held == controller.held == log.held
    assert again.ages == +controller.ages == log.ages
    assert again.requests == log.requests


@pytest.mark.parametrize("other", [("freeze", "2"), ("naive", "6"), ("aligned", "1"), ("aligned", "full")])
def test_a_replay_with_other_settings_is_a_run_with_those_settings(
    tmp_path: Path, other: tuple[str, str]
) -> None:
    drive(tmp_path / "run.jsonl", "freeze", "full", [3])
    truth = drive(tmp_path / "truth.jsonl", *other, [3])
    replayed = play(read_run(tmp_path / "run.jsonl"), *other)
    assert (replayed.held, replayed.ages) == (truth.held, +truth.ages)
    assert 0 < min(replayed.reaction) <= max(replayed.reaction) <= 12 + 2 * 3


def test_a_shorter_interval_reacts_sooner_and_costs_requests(tmp_path: Path) -> None:
    drive(tmp_path / "run.jsonl", "aligned", "full", [2])
    own, *others = alternatives(read_run(tmp_path / "run.jsonl"), ("aligned",))
    assert (own.handover, own.replan) == ("aligned", "full")
    assert [each.replan for each in others] == ["1", "2", "4", "8"]
    reactions = [float(np.mean(each.reaction)) for each in (*others, own)]
    assert reactions == sorted(reactions)
    requests = [each.requests for each in (*others, own)]
    assert requests == sorted(requests, reverse=True)


def test_a_log_states_which_limit_changed_commands_and_by_how_much(tmp_path: Path) -> None:
    limits = {"low": [-9.0, -9.0], "high": [9.0, 0.5], "names": ["x", "y"]}
    controller = drive(tmp_path / "run.jsonl", "freeze", "full", [1], limits=limits)
    ((name, clipped),) = read_run(tmp_path / "run.jsonl").clipped.items()
    assert name == "y.range"
    assert clipped.commands == controller.clipped["y.range"] > 0
    assert clipped.furthest == pytest.approx(1.0)
    assert clipped.largest == pytest.approx(0.5)


def test_a_log_states_skipped_steps_and_late_ones(tmp_path: Path) -> None:
    settings = Settings(20.0, "freeze", "full")
    controller = settings.controller(DIM)
    journal = Journal(tmp_path / "run.jsonl", settings, DIM)
    controller.listeners.append(journal.put)
    for step in (0, 1, 4):
        if controller.wants_chunk(step):
            controller.ask(step, step, None, time=step / 20.0 + 0.012)
            controller.arrived(step, np.zeros((2, DIM), np.float32))
        controller.command(step)
    journal.close()
    log = read_run(tmp_path / "run.jsonl")
    assert log.skipped == 2
    assert log.late_ms == pytest.approx([12.0, 12.0])


def test_failed_requests_are_counted_and_not_replayed(tmp_path: Path) -> None:
    settings = Settings(20.0, "freeze", "full")
    controller = settings.controller(DIM)
    journal = Journal(tmp_path / "run.jsonl", settings, DIM)
    controller.listeners.append(journal.put)
    controller.ask(0, 0)
    controller.failed(1, "no answer within 2 s")
    controller.command(1)
    controller.ask(2, 2)
    controller.arrived(3, np.zeros((2, DIM), np.float32))
    controller.command(3)
    journal.close()
    log = read_run(tmp_path / "run.jsonl")
    assert log.failed == Counter({"no answer within 2 s": 1})
    assert log.latencies == [1]


def test_a_stream_and_an_unanswered_run_have_no_replay(tmp_path: Path) -> None:
    Journal(tmp_path / "stream.jsonl", Settings(20.0, fusion="latest_only"), DIM).close()
    with pytest.raises(JournalError, match="was a stream"):
        read_run(tmp_path / "stream.jsonl")
    Journal(tmp_path / "empty.jsonl", Settings(20.0), DIM).close()
    with pytest.raises(JournalError, match="no answered request"):
        read_run(tmp_path / "empty.jsonl")
