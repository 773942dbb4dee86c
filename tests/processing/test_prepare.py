"""An observation is prepared once: what a policy checks is what it computes with."""

from __future__ import annotations

import threading
from collections import Counter

import numpy as np
import pytest

from sinew.core import Observation, ObservationError
from sinew.policy import Policy, load
from sinew.processing import processor
from sinew.processing.normalize import Normalizer
from sinew.processing.processor import Processor
from sinew.processing.prompt import Prompter
from tests.golden import Golden

CASE = "smolvla-2cam"


@pytest.fixture(scope="module")
def policy(smolvla_bundle) -> Policy:
    return load(smolvla_bundle(CASE), engine="eager")


@pytest.fixture
def observation(golden) -> Observation:
    return Observation.from_mapping(Golden(golden / CASE).observation())


def test_every_step_runs_once_for_a_request(policy, observation, monkeypatch):
    calls: Counter[str] = Counter()

    def count(owner: object, name: str) -> None:
        original = getattr(owner, name)

        def counted(*args, **kwargs):
            calls[name] += 1
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, counted)

    for owner, name in (
        (processor, "check_frame"),
        (processor, "prepare_frame"),
        (Processor, "state"),
        (Processor, "_noise"),
        (Normalizer, "normalize"),
        (Normalizer, "unnormalize"),
        (Prompter, "encode"),
    ):
        count(owner, name)
    policy.infer(observation)
    views = len(observation.images)
    assert calls == {
        "check_frame": views,
        "prepare_frame": views,
        "state": 1,
        "_noise": 1,
        "normalize": 1,
        "unnormalize": 1,
        "encode": 1,
    }


def test_the_halves_are_the_whole(policy, observation):
    whole = policy.infer(observation)
    prepared = policy.prepare(observation)
    first, second = policy.run(prepared), policy.run(prepared)  # it may be run again
    assert np.array_equal(whole.actions, first.actions)
    assert np.array_equal(first.actions, second.actions)
    assert first.timing.preprocess_ms == prepared.milliseconds > 0
    assert first.timing.total_ms > prepared.milliseconds
    assert (first.session, first.time) == (observation.session, observation.time)


def test_preparing_waits_for_nobody(policy, observation):
    """It needs no lock: another observation may be computed meanwhile."""
    with policy._lock:
        ready: list[object] = []
        thread = threading.Thread(target=lambda: ready.append(policy.prepare(observation)))
        thread.start()
        thread.join(60)
    assert len(ready) == 1


def test_preparing_refuses_what_checking_refuses(policy, observation):
    for name, value in (("state", np.zeros(99)), ("prompt", ""), ("seed", -1), ("solver_steps", 0)):
        bad = {**{f: getattr(observation, f) for f in ("images", "state", "prompt", "seed")}, name: value}
        for half in (policy.prepare, policy.check):
            with pytest.raises(ObservationError) as error:
                half(bad)
            assert error.value.field == name
