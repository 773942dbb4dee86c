"""Demonstrations for committed rows: what the robot executed beside what the expert would have done.

A chunk that arrives late continues rows that were executed already, whatever they were, so every frame is stored with
both: the executed action (with its noise, of a burst of random motion, or of a late policy that drives) and the
expert's label, which is right in any state because the expert is a function of it. ``scene`` counts what no action
tells: shoves and changed instructions.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
from sinew_client.control import Settings
from sinew_eval.sim.blocks import BlocksEnv
from sinew_eval.sim.blocks_expert import act
from sinew_eval.sim.prompts import PHRASINGS
from sinew_eval.training.shard import Shard, ShardWriter

from benchmarks.side_by_side import SideBySide
from research.policies.blocks_demos import FIRST_SEED, STEPS, Disturbances, other_goal
from sinew.policy import Policy

REPLAN = 8
TAKEOVER = (6, 80)  # control steps that a policy drives before the expert does
SHOVE = 0.5  # share of the episodes that a policy drives in which the block jumps
ASTRAY = 0.35  # an action this far from the label is another one: what follows is not the label's consequence


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
        images, values = _frame(env, observation, label, executed, scene)
        writer.add(images, seed, **values)
        if bursting:
            writer.end_run()  # the label says one step, and another one was made
        observation, _, done, _, _ = env.step(executed)
        if done:
            writer.end_run(done=True)
            return
    writer.end_run()


def _frame(
    env: BlocksEnv, observation: dict[str, Any], label: np.ndarray, executed: np.ndarray, scene: int
) -> tuple[np.ndarray, dict[str, Any]]:
    """Return the pictures uint8 [cameras, size, size, 3] and everything else of one frame."""
    world = env.world()
    return np.stack([observation["images"][c] for c in env.cameras]), {
        "state": observation["state"],
        "action": label,
        "executed": executed,
        "blocks": world.blocks.reshape(-1),
        "color": float(world.color),
        "side": float(world.side),
        "phrasing": float(env.phrasing),
        "scene": float(scene),
    }


def record_shard(folder: Path, first: int, episodes: int) -> None:
    """Write the demonstrations of ``episodes`` seeds. Training for a new head takes other seeds than the old one's."""
    env, writer = BlocksEnv(), ShardWriter(folder)
    for seed in range(FIRST_SEED + first, FIRST_SEED + first + episodes):
        record_episode(env, writer, seed)
    writer.close()


# ----------------------------------------------------------------------------- a policy drives


def record_driven(folder: Path, policy: Policy, first: int, episodes: int, delays: int) -> None:
    """Write episodes in which ``policy`` drives 0 to ``delays`` control steps late, until the expert takes over.

    So the rows that a chunk continues are such as this policy commits to, in the states that they lead to, also after
    the block has jumped while a chunk was under way (DAgger, Ross, Gordon and Bagnell 2011: the learner acts, the
    expert labels).
    """
    writer, beside, lock = ShardWriter(folder), SideBySide(policy), threading.Lock()

    def episode(seed: int) -> None:
        frames, done = driven_episode(beside, seed, delays)
        with lock:  # the frames of an episode lie beside each other
            for images, values, ends in frames:
                writer.add(images, seed, **values)
                if ends:
                    writer.end_run()
            writer.end_run(done)

    beside.play(episode, range(FIRST_SEED + first, FIRST_SEED + first + episodes))
    writer.close()


def driven_episode(
    policy: SideBySide, seed: int, delays: int
) -> tuple[list[tuple[np.ndarray, dict[str, Any], bool]], bool]:
    """Return the frames of one episode from the first command on, with what ends a run, and if the task was done."""
    rng, env = np.random.default_rng(seed), BlocksEnv()
    delay, takeover = int(rng.integers(delays + 1)), int(rng.integers(*TAKEOVER))
    shove = int(rng.integers(1, 40)) if rng.random() < SHOVE else -1
    settings = Settings(env.control_hz, "rtc", str(REPLAN), committed_rows=policy.committed_rows)
    controller = settings.controller(4)
    observation, _ = env.reset(seed=seed)
    last, scene, begun, due = np.zeros(4), 0, 0, -1
    answer = np.zeros((0, 4), np.float32)
    frames: list[tuple[np.ndarray, dict[str, Any], bool]] = []
    for step in range(STEPS + delay):
        if begun and begun == shove:
            env.shove(rng)
            observation, scene = env.observation(), scene + 1
            if frames:
                frames[-1] = (*frames[-1][:2], True)
        executed = label = act(env.world())
        if begun < takeover:
            for _ in range(2):  # an answer that arrives frees the policy for a question
                if controller.player.waiting and step >= due:
                    controller.arrived(step, answer)
                if controller.wants_chunk(step):
                    request, due = controller.ask(step, step, observation["state"]), step + delay
                    answer, _ = policy.infer({**observation, **request.fields}, seed=1000 * seed + step)
            row = controller.command(step).row
            executed = np.array([0.0, 0.0, 0.0, last[3] or 1.0]) if row is None else np.clip(row, -1, 1)
            begun += begun > 0 or row is not None
        else:
            begun += 1
        if begun:
            images, values = _frame(env, observation, label, executed, scene)
            astray = bool(np.abs(executed - label)[:3].max() > ASTRAY or executed[3] * label[3] < 0)
            frames.append((images, values, astray))
        last = executed
        observation, _, done, _, _ = env.step(executed)
        if done:
            return frames, True
    return frames, False


# ----------------------------------------------------------------------------- chunks


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
