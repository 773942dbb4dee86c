"""Robots per machine: the cost of a batch, and the queue that is played out."""

from __future__ import annotations

from pathlib import Path

import pytest

from sinew.cli import main
from sinew.core import SinewError
from sinew.perf.fleet import batched, between, most_robots, play
from sinew.perf.policy_memory import counted_apart, memory_need
from sinew.perf.program import PublishedProgram
from sinew.serve.launch import memory_budget
from tests.engine.test_guidance import BLOCKS

SETTINGS = {"hertz": 10.0, "deadline_s": 0.1, "max_batch": 8}


@pytest.mark.skipif(not Path(BLOCKS).exists(), reason="no trained policy")
def test_a_batch_reads_each_weight_once():
    for stage in PublishedProgram.load(BLOCKS, dtypes="fp32").components("unfused"):
        whole = batched(stage, 4)
        for one, four in zip(stage.operators, whole.operators, strict=True):
            assert four.flops == 4 * one.flops
            for a, b in zip(one.tensors, four.tensors, strict=True):
                assert b.elements == a.elements * (1 if a.kind == "weight" else 4)


def test_one_robot_waits_for_its_own_answer_alone():
    found = play(1, lambda n: 0.02 * n, **SETTINGS, overhead_s=0.004)
    assert found.p99_s == pytest.approx(0.024)
    assert (found.in_time, found.mean_batch) == (1.0, 1.0)


def test_no_more_robots_than_the_server_has_seconds():
    """Without a gain by batches, ten requests a second of 10 ms each leave room for ten robots at most."""
    found = most_robots(lambda n: 0.01 * n, **SETTINGS)
    assert found is not None
    assert 8 <= found.robots <= 10
    assert most_robots(lambda n: 0.2 * n, **SETTINGS) is None


def test_batches_serve_more_robots():
    def seconds(n: int) -> float:
        return 0.03 + 0.006 * (n - 1)

    alone = most_robots(seconds, **{**SETTINGS, "max_batch": 1})
    together = most_robots(seconds, **SETTINGS)
    assert alone is not None
    assert together is not None
    # Eight in 72 ms are eleven requests in the time of three.
    assert 2 * alone.robots < together.robots <= 11
    assert together.p99_s <= 0.1
    assert together.mean_batch > 2


def test_sizes_between_measured_ones():
    seconds = between({1: 1.0, 4: 2.5})
    assert [seconds(n) for n in (1, 2, 4, 8)] == [1.0, 1.5, 2.5, 5.0]


def test_the_verb_says_what_is_missing(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert main(["perf", "fleet", str(BLOCKS), "--threads", "1"]) == 1
    wanted = f"not calibrated for 1 threads: sinew perf calibrate {BLOCKS} --threads 1 --engine plan"
    assert wanted in " ".join(capsys.readouterr().err.split())


def test_impossible_numbers():
    with pytest.raises(SinewError, match="above 0"):
        play(0, lambda n: 1.0, **SETTINGS)


def test_memory_is_that_of_the_engine_that_will_run(rolling_bundle):
    options = {"engine": "eager", "providers": (), "device": "cpu", "dtype": None, "ignore_recipe": False}
    weights, computed = memory_need(str(rolling_bundle), options, None, 8)
    assert 0 < weights < rolling_bundle.stat().st_size
    assert computed > 0
    assert memory_budget(2.0, options) == (2 << 30, "--memory-gib 2")
    assert memory_need(str(rolling_bundle), options, None, 8, count=counted_apart) == (weights, computed)
    with pytest.raises(SinewError, match="its memory could not be counted"):
        counted_apart(str(rolling_bundle), "no such type", "eager", "cpu")
    budget, why = memory_budget(None, options)
    assert budget is not None
    assert budget > 0
    assert why == "this machine's memory"
