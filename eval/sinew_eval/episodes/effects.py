"""Measure how much the actions of a policy change if one of its inputs (instruction, camera or state) changes."""

from __future__ import annotations

from sinew.checks.effects import OBSERVATIONS, Effects, measure
from sinew.core import Observation, SinewError

from sinew_eval.episodes.player import EpisodePlayer
from sinew_eval.episodes.policies import InProcess
from sinew_eval.episodes.settings import Task, Variant

OBSERVATION_INTERVAL = 8  # the observation is measured once in this many control steps


def effects_of(task: Task, variant: Variant, seed: int) -> Effects:
    """Measure how much each input of a policy changes its actions, on the first observations of an episode.

    Args:
        task: The task.
        variant: The policy. It must be a bundle that is loaded in this process.
        seed: Seed of the episode.

    Returns:
        The effects of the instruction, each camera and the state.

    Raises:
        SinewError: The policy runs on a server.
    """
    player = EpisodePlayer(task)
    try:
        policy = player.ready(variant)
        if not isinstance(policy, InProcess):
            raise SinewError(
                f"--effects: expected a bundle, got {variant.target}; run this command on the machine with the bundle"
            )
        env, adapter = player.env, player.adapter
        found: list[Observation] = []
        raw, _ = env.reset(seed=seed, options=task.reset_options)
        while len(found) < OBSERVATIONS:
            observation = Observation.from_mapping({**adapter.observation(raw), "seed": len(found)})
            found.append(observation)
            for row in policy.policy.infer(observation).actions[:OBSERVATION_INTERVAL]:
                raw, _, terminated, truncated, _ = env.step(adapter.action(row))
                if terminated or truncated:
                    return measure(policy.policy, found)
        return measure(policy.policy, found)
    finally:
        player.close()
