"""Demonstrations of the pen task: one example per camera frame.

The label is what somebody could know at the moment of the frame: nothing while the pen hangs, the closing
time once it falls. Every fourth episode closes at a random moment, so that the pictures also show jaws that
are closed or half closed, with the label still that of the pen.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from sinew_eval.sim.pen import CONTROL_HZ, PEN_LENGTH, PenEnv, act, expert_chunk
from sinew_eval.training.shard import ShardWriter

FIRST_SEED = 1_000_000
SLOTS = 24
HANGING_SHARE = 0.35  # of the frames before release that are kept: all of them look alike


def record_shard(folder: Path, first: int, episodes: int, camera_fps: int = 60) -> None:
    """Frames of a 60 Hz camera, each paired with the one two slots before: what a 30 Hz camera sees, at
    every phase against the control slots."""
    writer = ShardWriter(folder)
    for seed in range(FIRST_SEED + first, FIRST_SEED + first + episodes):
        rng = np.random.default_rng(seed)
        env = PenEnv(camera_fps=camera_fps)
        for _ in played(env, seed, rng):
            hanging = env.time <= env.drop.release
            if not hanging or rng.random() < HANGING_SHARE:
                _add(env, writer, seed)
    writer.close()


def played(env: PenEnv, seed: int, rng: np.random.Generator) -> Iterator[dict[str, Any]]:
    """Yield the observation of every slot of an episode, before the slot is acted in."""
    observation, _ = env.reset(seed=seed)
    shift = rng.uniform(-0.15, 0.1) if rng.random() < 0.25 else 0.0
    done = False
    while not done:
        yield observation
        if shift:
            action = np.array([float(env.time >= env.drop.best_command + shift)], dtype=np.float32)
        else:
            action = act(env)
        observation, _, done, _, _ = env.step(action)


def facts(env: PenEnv) -> np.ndarray:
    """Return the pen's height, its speed and the time until the jaws must start, float32 [3], each of order 1."""
    now, before = env.time, max(0.0, env.time - 2 / CONTROL_HZ)
    middle = env.drop.bottom(now) + PEN_LENGTH / 2
    speed = (env.drop.bottom(before) - env.drop.bottom(now)) * CONTROL_HZ / 2
    left = min(env.drop.best_command - now, 0.4) if now > env.drop.release else 0.4
    return np.array([middle / 0.2, speed / 2.0, left / 0.2], np.float32)


def _add(env: PenEnv, writer: ShardWriter, seed: int) -> None:
    now, before = env.time, max(0.0, env.time - 2 / CONTROL_HZ)
    images, chunk = np.stack([env.view(now), env.view(before)]), expert_chunk(env.drop, now, SLOTS)
    writer.add(images, seed, state=np.array([env.opening]), action=chunk, facts=facts(env))
    writer.end_run()
