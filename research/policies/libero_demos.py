"""Demonstrations of LIBERO's scripted expert, from initial states that are drawn and not the recorded ones.

Runs in the simulator's interpreter, which has no torch: ``PYTHONPATH=.:packages/sinew-client/src
build/sims/libero/bin/python -m research.policies.libero_demos OUT BENCHMARK FIRST EPISODES TASK...``, episodes of each
task.

The hand is pushed for a few steps now and then, and the expert, which looks at where it is, brings it back: its own
actions are the labels, what was executed is not. Drawing costs more than all else, so every third step is a frame, with
the actions of all steps.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from sinew_eval.episodes.adapters import Mapped
from sinew_eval.suites import libero, libero_expert
from sinew_eval.training.shard import ShardWriter

from sinew.steps.image.methods import resize

log = logging.getLogger("train")
CAMERAS, SIDE, EVERY = ("image", "image2"), 96, 3
CHUNK = 32
PUSH = np.array([0.7] * 3 + [0.15] * 3)  # the largest, of an action


def record(
    env: libero.Simulator, adapter: Mapped, writer: ShardWriter, task: int, tasks: int, trial: int
) -> bool:
    """Play an episode; write it where it was won. Returns whether it was."""
    rng = np.random.default_rng([task, trial])
    pushes = {
        int(at) + i: push
        for at, steps, push in zip(
            rng.integers(0, 120, size=rng.integers(0, 5)),
            rng.integers(2, 7, size=5),
            rng.uniform(-PUSH, PUSH, (5, 6)),
            strict=False,
        )
        for i in range(steps)
    }
    raw, _ = env.reset(seed=trial * tasks + task)
    expert = env.expert()
    expert.start(env)
    frames: list[tuple[int, np.ndarray, dict[str, Any]]] = []
    actions, won, begin = [], False, int(rng.integers(EVERY))
    for step in range(env.max_steps):
        action = expert.infer({}).actions[0]
        if step % EVERY == begin:
            frames.append((step, *seen(env, adapter, raw)))
        actions.append(action)
        given = action.astype(np.float64)
        if step in pushes and action[:6].any():  # the fingers are not moved while they close or open
            given[:6] += pushes[step]
        raw, _, won, _, _ = env.step(adapter.action(given))
        if won:
            break
    if not won:
        return False
    rest = np.append(np.zeros(6), actions[-1][-1])  # what the expert goes on with
    ahead = np.concatenate([actions, np.tile(rest, (CHUNK, 1))]).astype(np.float32)
    for step, images, values in frames:
        writer.add(images, trial, action=ahead[step : step + CHUNK], task=float(task), **values)
        writer.end_run()
    return True


def seen(env: libero.Simulator, adapter: Mapped, raw: Any) -> tuple[np.ndarray, dict[str, Any]]:
    """Return frames uint8 [2, SIDE, SIDE, 3], as the bundle's own recipe makes them, and what else is kept."""
    observation, below = adapter.observation(raw), env.robosuite
    thing, place = below.parsed_problem["goal_state"][0][1:]
    images = np.stack([resize(observation["images"][name], SIDE, SIDE, "area") for name in CAMERAS])
    points = libero_expert.corners(below.sim, below.obj_body_id[thing])
    where = (points.min(0) + points.max(0)) / 2
    basket = below.sim.data.get_site_xpos(place)[:2]
    return images, {"state": observation["state"], "where": np.concatenate([where, basket])}


def main(out: Path, benchmark: str, first: int, episodes: int, tasks: Sequence[int]) -> None:
    """Write a shard, the episodes of each task after those of the one before."""
    writer = ShardWriter(out)
    names = [f"{benchmark}/{i}" for i in range(10)]
    env = libero.Simulator(names, drawn=True)
    adapter = Mapped(env, libero.MAPPING)
    for task in tasks:
        won = sum(
            record(env, adapter, writer, task, len(names), trial) for trial in range(first, first + episodes)
        )
        log.info("%s: %d of %d kept, %.0f CPU seconds", names[task], won, episodes, time.process_time())
    writer.close()
    env.close()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    os.environ.setdefault("MUJOCO_GL", "egl")
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), [int(t) for t in sys.argv[5:]])
