"""A server that computes while nobody asks, and the first answer after a pause."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import numpy as np
import pytest

from sinew.bench.pauses import ROUNDS, after_pauses, parse_pauses
from sinew.cli import main
from sinew.core import ActionChunk, Observation, SinewError
from sinew.serve.scheduler import Scheduler
from tests.serve.puppet import FRAME, WAIT_S, Puppet, enqueue, until

PEN = Path(__file__).resolve().parents[2] / "sinew" / "assets" / "pen.gguf"


class Warm(Puppet):
    """Notes its inferences of grey frames, which wait until they are cancelled if ``slow``."""

    def __init__(self, slow: bool = False) -> None:
        super().__init__()
        self.slow, self.begun = slow, threading.Event()

    def dummy_observation(self) -> Observation:
        return Observation({"front": FRAME}, np.zeros(2, np.float32), prompt="wait" if self.slow else "grey")

    def run(self, observation: Observation, *, cancel: threading.Event | None = None) -> ActionChunk:
        if observation.prompt == "wait":
            self.begun.set()
        return super().run(observation, cancel=cancel)


def scheduled(policy: Puppet, keep_warm_s: float | None) -> Scheduler:
    scheduler = Scheduler(policy, keep_warm_s=keep_warm_s)
    scheduler.start()
    return scheduler


def hello(_budget: object) -> Observation:
    return Observation({"front": FRAME}, np.zeros(2, np.float32), prompt="hello")


def stopped(scheduler: Scheduler) -> None:
    scheduler.stop()
    assert scheduler.join(WAIT_S)


def test_a_silent_server_computes_again_and_again() -> None:
    policy = Warm()
    scheduler = scheduled(policy, 0.01)
    until(lambda: policy.computed.count("grey") >= 3)
    outcomes: list[object] = []
    enqueue(scheduler, hello, outcomes.append)
    until(lambda: outcomes)
    assert isinstance(outcomes[0], ActionChunk)
    assert scheduler.stats()["served"] == 1  # for a client
    before = policy.computed.count("grey")
    until(lambda: policy.computed.count("grey") > before)
    stopped(scheduler)


def test_a_request_ends_what_is_computed_for_nobody() -> None:
    policy = Warm(slow=True)  # it would wait for ever
    scheduler = scheduled(policy, 0.01)
    until(lambda: scheduler.policy is policy and policy.warm_ups)
    outcomes: list[object] = []
    threading.Event().wait(
        0.1
    )  # the inference of grey frames has begun, or will not: either way the next is answered
    enqueue(scheduler, hello, outcomes.append)
    until(lambda: outcomes)
    assert isinstance(outcomes[0], ActionChunk)
    stopped(scheduler)


def test_a_policy_that_fails_then_is_served_on(caplog: pytest.LogCaptureFixture) -> None:
    policy = Warm()
    scheduler = scheduled(policy, 0.01)
    policy.sick = RuntimeError("secret detail")
    until(lambda: "the policy failed in a run that keeps it warm" in caplog.text)
    policy.sick = None
    outcomes: list[object] = []
    enqueue(scheduler, hello, outcomes.append)
    until(lambda: outcomes)
    assert isinstance(outcomes[0], ActionChunk)
    stopped(scheduler)


def test_by_default_a_silent_server_is_silent() -> None:
    policy = Warm()
    scheduler = scheduled(policy, None)
    threading.Event().wait(0.1)
    assert policy.computed == []
    stopped(scheduler)


def test_pauses_are_timed_from_an_answer() -> None:
    calls = []
    rows = list(after_pauses(lambda: calls.append(1), (0.0, 0.01), 2.0))
    assert [row["pause_s"] for row in rows] == [0.0, 0.01]
    assert len(calls) == 2 * 2 * ROUNDS
    for row in rows:
        assert len(row["samples_ms"]) == ROUNDS
        assert row["of_steady"] == pytest.approx(row["p50_ms"] / 2.0)
        assert row["p50_ms"] <= row["max_ms"]


@pytest.mark.parametrize("text", ["", "a", "1,0", "-1", "1,1", "nan", "4000"])
def test_pauses_that_are_none(text: str) -> None:
    with pytest.raises(SinewError, match=r"--idle: expected seconds from 0 to 3600 in rising order"):
        parse_pauses(text)


def test_the_verb_reports_pauses(capsys, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    assert (
        main(["bench", str(PEN), "--runs", "2", "--threads", "1", "--idle", "0,0.05", "--json", str(out)])
        == 0
    )
    assert "first answer after a pause" in " ".join(capsys.readouterr().out.split())
    rows = json.loads(out.read_text())["after_pause"]
    assert [row["pause_s"] for row in rows] == [0.0, 0.05]
    assert all(row["p50_ms"] > 0 for row in rows)
