"""Observations that a policy sees when it plays, for measuring what a change of engine or precision costs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sinew.checks.validate.observations import random_observations, recorded_observations
from sinew.core import Observation, ObservationError
from sinew.eval.fitting import TASKS
from sinew.policy import Policy

FIRST_SEED = 9000  # episodes that neither training nor the gates have seen
REPLAN = 8
RANDOM = "random frames"


def observations(reference: Policy, records: Path | None = None) -> tuple[str, Iterator[Observation]]:
    """Return where observations come from, and they: of a folder of records; without end of episodes that the reference
    plays, one per chunk it is asked for, where it fits an embedded task; else ``RANDOM``, without end."""
    if records is not None:
        return f"records of {records}", recorded_observations(records, reference)
    return _episodes(reference) or (RANDOM, random_observations(reference))


def _episodes(policy: Policy) -> tuple[str, Iterator[Observation]] | None:
    try:
        from sinew.eval.adapters import make_env
    except ModuleNotFoundError:  # gymnasium and mujoco are an extra
        return None
    for task in TASKS:
        env, adapter = make_env(task, "", None)
        raw, _ = env.reset(seed=FIRST_SEED)
        try:
            policy.check(adapter.observation(raw))
            fits = env.action_space.shape == (policy.spec.action.dim,)
        except ObservationError:
            fits = False
        if fits:
            return f"episodes of {task}", _play(policy, env, adapter)
        env.close()
    return None


def _play(policy: Policy, env: Any, adapter: Any) -> Iterator[Observation]:
    seed = FIRST_SEED
    while True:
        raw, _ = env.reset(seed=seed)
        done, replan = False, 0
        while not done:
            observation = Observation.from_mapping({**adapter.observation(raw), "seed": seed + replan})
            yield observation
            for row in policy.infer(observation).actions[:REPLAN]:
                raw, _, terminated, truncated, _ = env.step(adapter.action(row))
                if done := bool(terminated or truncated):
                    break
            replan += 1
        seed += 1
