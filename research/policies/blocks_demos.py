"""Demonstrations of the blocks task.

The expert is a function of the present state, so an episode may be disturbed at any moment and go on with
right labels: bursts of random motion, shoves of the block, changes of the instruction. Random motion itself
is never a label, and a chunk of actions ends where a disturbance begins.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from sinew_eval.sim.blocks import BlocksEnv
from sinew_eval.sim.blocks_expert import act
from sinew_eval.sim.prompts import COLORS, PHRASINGS, SIDES
from sinew_eval.training.shard import ShardWriter

log = logging.getLogger("train")

FIRST_SEED = 1_000_000  # evaluation uses small seeds
STEPS = 150
HOLD = np.array([0.0, 0.0, 0.0, 1.0], dtype=np.float32)  # normalised as the others


@dataclass(frozen=True)
class Disturbances:
    """Drawn for one episode. Steps at which something happens; noise is the standard deviation of the
    motion that is added to the expert's actions (its labels stay clean)."""

    switches: frozenset[int]
    shoves: frozenset[int]
    bursts: dict[int, int]  # first step -> length
    noise: float

    @classmethod
    def drawn(cls, rng: np.random.Generator) -> Disturbances:
        bursts = rng.choice(3, p=[0.55, 0.3, 0.15])
        return cls(
            switches=frozenset(rng.integers(1, 40, size=rng.choice(3, p=[0.6, 0.3, 0.1])).tolist()),
            shoves=frozenset(rng.integers(1, 26, size=rng.choice(2, p=[0.7, 0.3])).tolist()),
            bursts={int(rng.integers(0, 40)): int(rng.integers(2, 9)) for _ in range(bursts)},
            noise=float(rng.uniform(0.05, 0.35)) if rng.random() < 0.5 else 0.0,
        )


def record_episode(env: BlocksEnv, writer: ShardWriter, seed: int) -> None:
    rng = np.random.default_rng(seed)
    plan = Disturbances.drawn(rng)
    observation, _ = env.reset(seed=seed)
    push: np.ndarray | None = None
    burst_left = 0
    for step in range(STEPS):
        changed = False
        if step in plan.switches:
            env.switch_instruction(*other_goal(env, rng), phrasing=int(rng.integers(len(PHRASINGS))))
            changed = True
        if step in plan.shoves:
            env.shove(rng)
            changed = True
        if step in plan.bursts:
            burst_left, push = plan.bursts[step], rng.uniform(-1, 1, 4)
        if changed or burst_left:
            writer.end_run()
        if burst_left:
            burst_left -= 1
            observation, _, done, _, _ = env.step(push + rng.normal(0, 0.2, 4))
            if done:
                break
            continue
        if changed:
            observation = env.observation()
        action = act(env.world())
        _add(env, writer, seed, observation, action)
        observation, _, done, _, _ = env.step(action + np.append(rng.normal(0, plan.noise, 3), 0.0))
        if done:
            writer.end_run(done=True)
            return
    writer.end_run()


def other_goal(env: BlocksEnv, rng: np.random.Generator) -> tuple[str, str]:
    goals = [(c, s) for c in COLORS for s in SIDES if f"{c}/{s}" != env.task]
    return goals[rng.integers(len(goals))]


def _add(env: BlocksEnv, writer: ShardWriter, seed: int, observation: dict, action: np.ndarray) -> None:
    world = env.world()
    writer.add(
        np.stack([observation["images"][c] for c in env.cameras]),
        seed,
        state=observation["state"],
        action=action,
        blocks=world.blocks.reshape(-1),
        color=float(world.color),
        side=float(world.side),
        phrasing=float(env.phrasing),
    )


def record_shard(folder: Path, first: int, episodes: int, image_size: int = 64) -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    env, writer = BlocksEnv(image_size), ShardWriter(folder)
    for done in range(episodes):
        record_episode(env, writer, FIRST_SEED + first + done)
        if (done + 1) % 100 == 0 or done + 1 == episodes:
            log.info("%s: %d of %d demonstrations", folder.name, done + 1, episodes)
    writer.close()


if __name__ == "__main__":
    import sys

    record_shard(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
