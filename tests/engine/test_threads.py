"""The number of threads that a policy settles on."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sinew import load
from sinew.core import machine
from sinew.engine.eager import engine as threads

BUNDLE = Path(__file__).resolve().parents[2] / "sinew" / "assets" / "pen.gguf"


@pytest.fixture(autouse=True)
def unchanged():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


class Timed:
    """An inference that takes ``alone`` seconds of the test's clock with one thread, and ``shared`` with more."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, alone: float, shared: float):
        self.alone, self.shared, self.set, self.now = alone, shared, 0, 100.0
        self.runs: list[int] = []
        monkeypatch.setattr(threads, "time", SimpleNamespace(perf_counter=lambda: self.now))

    def set_threads(self, count: int) -> None:
        self.set = count

    def __call__(self) -> None:
        self.runs.append(self.set)
        self.now += self.alone if self.set == 1 else self.shared


@pytest.mark.parametrize(("alone", "shared", "chosen"), [(0.002, 0.02, 1), (0.02, 0.002, 4)])
def test_the_faster_one_stays(alone, shared, chosen, monkeypatch):
    run = Timed(monkeypatch, alone, shared)
    assert threads.tune_threads(run, run.set_threads, 4)[0] == run.set == chosen
    assert run.runs == [4] * threads.TRIES + [1] * threads.TRIES


def test_a_slow_inference_is_tried_once(monkeypatch):
    monkeypatch.setattr(threads, "TOO_LONG_S", 0.005)
    run = Timed(monkeypatch, 0.001, 0.01)
    count, reason = threads.tune_threads(run, run.set_threads, 4)
    assert (count, run.set, run.runs) == (4, 4, [4])
    assert "one per core" in reason


def test_one_core_needs_no_trial(monkeypatch):
    run = Timed(monkeypatch, 1, 1)
    assert threads.tune_threads(run, run.set_threads, 1)[0] == 1
    assert not run.runs


def test_warm_up_settles_what_was_left_open():
    many = min(2, machine.recommended_threads()[0])
    torch.set_num_threads(many)
    policy = load(BUNDLE)
    policy.warm_up()
    assert policy.threads in {1, many}
    assert torch.get_num_threads() == policy.threads
    assert many == 1 or "measured" in policy.threads_reason


def test_what_was_asked_for_stays():
    policy = load(BUNDLE, threads=2)
    first = policy.warm_up().actions
    assert (policy.threads, policy.threads_reason) == (2, "asked for")
    np.testing.assert_array_equal(policy.warm_up().actions, first)
