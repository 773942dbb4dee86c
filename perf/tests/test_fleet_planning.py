"""Robots per machine: the cost of a batch, and the queue that is played out."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from sinew.cli import main
from sinew.core import SinewError
from sinew.memory import memory_need
from sinew.serve.launch import memory_budget
from tests.covering import some
from tests.engine.test_guidance import BLOCKS

from sinew_perf.estimates import memory_apart
from sinew_perf.fleet import batched, between, most_robots, play, shortfall
from sinew_perf.program import PublishedProgram

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


def test_robots_in_step_wait_for_each_other():
    """Eight robots of 100 ms at 5 Hz in a field test: p99 375 ms in step, 129 ms staggered."""
    settings = {"hertz": 5.0, "deadline_s": 0.2, "max_batch": 1}
    staggered, in_step = (play(8, lambda n: 0.02 * n, **settings, in_step=each) for each in (False, True))
    assert in_step.p99_s == pytest.approx(0.16)  # the last of eight
    assert staggered.p99_s < in_step.p99_s
    most = [
        most_robots(lambda n: 0.02 + 0.01 * (n - 1), hertz=5.0, deadline_s=0.1, max_batch=8, in_step=each)
        for each in (False, True)
    ]
    assert most[0] is not None
    assert most[1] is not None
    assert most[0].robots > most[1].robots


@pytest.mark.parametrize("alone", some([0.0012, 0.0131, 0.114, 0.5, 3.7], 0.0131, 0.114, 3.7))
@pytest.mark.parametrize(("hertz", "deadline"), [(10.0, 0.1), (50.0, 1.0), (1.0, 0.001), (1000.0, 0.0005)])
@pytest.mark.parametrize("overhead", [0.0, 0.002])
def test_the_rate_and_deadline_that_are_named_work(alone, hertz, deadline, overhead):
    settings = {"max_batch": 1, "overhead_s": overhead}
    if most_robots(lambda n: alone * n, hertz=hertz, deadline_s=deadline, **settings) is not None:
        return
    found = shortfall(alone, hertz=hertz, deadline_s=deadline, overhead_s=overhead)
    assert "more than the" in found.text
    assert found.hertz <= hertz
    assert found.deadline_s >= deadline
    works = most_robots(lambda n: alone * n, hertz=found.hertz, deadline_s=found.deadline_s, **settings)
    assert works is not None


def test_the_verb_names_the_reason_of_zero_robots_and_what_works(monkeypatch, capsys):
    from sinew_perf import fleet as model

    monkeypatch.setattr("sinew_perf.machine.fit.load", lambda *_: None)  # no calibration
    monkeypatch.setattr(model, "measured", lambda *_: {1: 0.112, 8: 0.5})
    monkeypatch.setattr("os.getloadavg", lambda: (999.0, 1.0, 1.0))
    command = ["perf", "fleet", "blocks", "--threads", "1", "--measure"]
    assert main([*command, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert [(row["max_batch"], row["requests"]) for row in record["rows"]] == [
        (1, "staggered"), (1, "in step"), (8, "staggered"), (8, "in step"),
    ]  # fmt: skip
    assert {row["robots"] for row in record["rows"]} == {0}
    busy, why = record["notes"]
    assert busy.startswith("measured: load average 999.00 on ")
    assert why.startswith(
        "measured: 0 robots, because one answer takes 114 ms, more than the deadline of 100 ms and"
    )
    flags = re.search(r"`(--hz \S+ --deadline-ms \S+)` works for one robot", why)
    assert flags is not None
    assert main([*command, *flags[1].split()]) == 0
    shown = capsys.readouterr().out
    assert "0 robots" not in shown
    assert "in step" in shown


def test_sizes_between_measured_ones():
    seconds = between({1: 1.0, 4: 2.5})
    assert [seconds(n) for n in (1, 2, 4, 8)] == [1.0, 1.5, 2.5, 5.0]


def test_the_verb_says_what_is_missing(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert main(["perf", "fleet", str(BLOCKS), "--threads", "1"]) == 1
    wanted = f"not calibrated for 1 threads; run `sinew perf calibrate {BLOCKS} --threads 1 --engine plan`"
    assert wanted in " ".join(capsys.readouterr().err.split())


def test_impossible_numbers():
    with pytest.raises(SinewError, match="above 0"):
        play(0, lambda n: 1.0, **SETTINGS)


@pytest.mark.slow
def test_memory_is_that_of_the_engine_that_will_run(rolling_bundle):
    options = {"engine": "eager", "providers": (), "device": "cpu", "dtype": None, "ignore_recipe": False}
    weights, computed = memory_need(str(rolling_bundle), options, None, 8)
    assert 0 < weights < rolling_bundle.stat().st_size
    assert computed > 0
    assert memory_budget(2.0, options) == (2 << 30, "--memory-gib 2")
    assert memory_need(str(rolling_bundle), options, None, 8, apart=True) == (weights, computed)
    with pytest.raises(SinewError, match="memory of this bundle could not be counted"):
        memory_apart(str(rolling_bundle), "no such type", "eager", "cpu")
    budget, why = memory_budget(None, options)
    assert budget is not None
    assert budget > 0
    assert why == "this machine's memory"
