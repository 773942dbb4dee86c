"""Observations that a policy sees when it plays, to measure what another engine or precision costs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sinew.core import Observation, ObservationError
from sinew.eval.fitting import TASKS
from sinew.policy import Policy

FIRST_SEED = 9000  # episodes that neither training nor the gates have seen
REPLAN = 8


def episodes(policy: Policy) -> tuple[str, Iterator[Observation]] | None:
    """Return the embedded task that a policy fits, and the observations of its episodes without end, one for each chunk
    that the policy is asked for. None where it fits no task, or where no task is installed."""
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
