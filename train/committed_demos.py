"""Demonstrations for committed rows: what the robot executed beside what the expert would have done.

A chunk that arrives late continues rows that were executed already, whatever they were, so every frame is stored with
both: the executed action (with its noise, or of a burst of random motion) and the expert's label, which is right in any
state because the expert is a function of it. ``scene`` counts what no action tells: shoves and changed instructions.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from sinew.sim.blocks import BlocksEnv
from sinew.sim.blocks_expert import act
from sinew.sim.prompts import PHRASINGS
from train.blocks_demos import FIRST_SEED, STEPS, Disturbances, other_goal
from train.shard import Shard, ShardWriter


def record_episode(env: BlocksEnv, writer: ShardWriter, seed: int) -> None:
    rng = np.random.default_rng(seed)
    plan = Disturbances.drawn(rng)
    observation, _ = env.reset(seed=seed)
    push, burst_left, scene = np.zeros(4), 0, 0
    for step in range(STEPS):
        if step in plan.switches:
            env.switch_instruction(*other_goal(env, rng), phrasing=int(rng.integers(len(PHRASINGS))))
        if step in plan.shoves:
            env.shove(rng)
        if step in plan.switches or step in plan.shoves:
            scene += 1
            writer.end_run()
            observation = env.observation()
        if step in plan.bursts:
            burst_left, push = plan.bursts[step], rng.uniform(-1, 1, 4)
        label = act(env.world())
        executed = label + np.append(rng.normal(0, plan.noise, 3), 0.0)
        if bursting := burst_left > 0:
            burst_left -= 1
            executed = push + rng.normal(0, 0.2, 4)
        executed = np.clip(executed, -1.0, 1.0)
        world = env.world()
        writer.add(
            np.stack([observation["images"][c] for c in env.cameras]),
            seed,
            state=observation["state"],
            action=label,
            executed=executed,
            color=float(world.color),
            side=float(world.side),
            phrasing=float(env.phrasing),
            scene=float(scene),
        )
        if bursting:
            writer.end_run()  # the label says one step, and another one was made
        observation, _, done, _, _ = env.step(executed)
        if done:
            writer.end_run(done=True)
            return
    writer.end_run()


def record_shard(folder: Path, first: int, episodes: int) -> None:
    """Write the demonstrations of ``episodes`` seeds. Training for a new head takes other seeds than the old one's."""
    env, writer = BlocksEnv(), ShardWriter(folder)
    for seed in range(FIRST_SEED + first, FIRST_SEED + first + episodes):
        record_episode(env, writer, seed)
    writer.close()


def continued(
    shard: Shard, frames: np.ndarray, delays: np.ndarray, length: int, hold: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return chunks float32 [B, length, A] whose first rows were executed, the number of those rows, int [B], and where
    the rest is known, bool [B, length].

    A delay over which the scene changed, or the episode ended, becomes 0.
    """
    delays = np.minimum(delays, len(shard) - 1 - frames)
    ends = frames + delays
    same = (shard["scene"][ends] == shard["scene"][frames]) & (shard.episode[ends] == shard.episode[frames])
    delays = np.where(same, delays, 0)
    starts = frames + delays
    rest, known = shard.chunks(starts, length, hold)  # from the first row that is not committed
    rows = np.arange(length)
    executed = shard["executed"][np.minimum(frames[:, None] + rows, len(shard) - 1)]
    late = np.clip(rows - delays[:, None], 0, None)  # row of ``rest``
    own = np.arange(len(frames))[:, None]
    committed = rows < delays[:, None]
    chunk = np.where(committed[..., None], executed, rest[own, late])
    return chunk.astype(np.float32), delays, ~committed & known[own, late]
