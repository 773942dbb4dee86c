"""Closed-loop success of a bundle, through the runtime: ``python -m train.evaluate sinew/assets/blocks.gguf``.

A small loop without a server, to see what a training run gave. Latency is simulated in control steps: a
chunk asked for at one step arrives ``--latency`` steps later, while the robot goes on with what it has.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import defaultdict
from typing import Any

import gymnasium
import numpy as np
import torch

import sinew.sim  # noqa: F401 - registers the environments
from sinew.policy import Policy, load


def run_episode(
    policy: Policy,
    env: gymnasium.Env,
    seed: int,
    replan: int,
    latency: int,
    options: dict[str, Any] | None,
    steps: int | None,
) -> dict[str, Any]:
    """One episode. A chunk counts time from its frame: whatever has passed when it is there is skipped."""
    observation, info = env.reset(seed=seed, options=options)
    hold = np.zeros(env.action_space.shape, dtype=np.float32)
    hold[-1] = 1.0 if len(hold) > 1 else 0.0  # gripper open; the pen's jaws open
    chunk, origin, arriving = None, 0, []
    step, done, timeout = 0, False, False
    while not (done or timeout):
        if step % replan == 0:
            noise = np.random.default_rng([seed, step // replan]).standard_normal(
                policy.spec.noise_shape, np.float32
            )
            actions = policy.infer({**observation, "noise": noise, "solver_steps": steps}).actions
            age = round(info.get("frame_age", 0.0) * env.unwrapped.control_hz)
            arriving.append((step + latency, step - age, actions))
        while arriving and arriving[0][0] <= step:
            _, origin, chunk = arriving.pop(0)
        action = hold if chunk is None or step - origin >= len(chunk) else chunk[step - origin]
        action = np.clip(action, env.action_space.low, env.action_space.high)
        observation, _, done, timeout, info = env.step(action)
        step += 1
    return {"seed": seed, "success": bool(info["is_success"]), "steps": step, "task": info["task"]}


def wilson(wins: int, count: int) -> tuple[float, float]:
    """95 % interval of a share (Wilson 1927)."""
    z, p = 1.959964, wins / count
    middle = (p + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(p * (1 - p) / count + z * z / (4 * count * count))
    return max(0.0, middle - half), min(1.0, middle + half)


def summary(episodes: list[dict[str, Any]]) -> dict[str, Any]:
    wins = [e for e in episodes if e["success"]]
    low, high = wilson(len(wins), len(episodes))
    groups: dict[str, list[bool]] = defaultdict(list)
    for e in episodes:
        for part in e["task"].split("/"):
            groups[part].append(e["success"])
    return {
        "episodes": len(episodes),
        "success": len(wins) / len(episodes),
        "interval": [round(low, 3), round(high, 3)],
        "mean_steps": float(np.mean([e["steps"] for e in wins])) if wins else None,
        "by_part": {k: f"{sum(v)}/{len(v)}" for k, v in sorted(groups.items())},
        "failed_seeds": [e["seed"] for e in episodes if not e["success"]],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle")
    parser.add_argument("--env", default="sinew/Blocks-v0")
    parser.add_argument("--episodes", type=int, default=200)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--replan", type=int, default=8)
    parser.add_argument("--latency", type=int, default=0, help="control steps")
    parser.add_argument("--steps", type=int, default=None, help="solver steps")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--options", type=json.loads, default=None, help='reset options, e.g. {"phrasing": 1}'
    )
    parser.add_argument("--env-options", type=json.loads, default={}, help='e.g. {"camera_delay": 0.067}')
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    policy = load(args.bundle)
    env = gymnasium.make(args.env, disable_env_checker=True, **args.env_options)
    seeds = range(args.first_seed, args.first_seed + args.episodes)
    episodes = [
        run_episode(policy, env, seed, args.replan, args.latency, args.options, args.steps) for seed in seeds
    ]
    print(json.dumps({"arguments": vars(args), **summary(episodes)}))  # noqa: T201 - the command's answer


if __name__ == "__main__":
    main()
