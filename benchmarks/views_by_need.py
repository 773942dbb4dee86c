"""Success against vision time if a camera's view is computed only when it is needed.

python -m benchmarks.views_by_need [BUNDLE] [--env sinew/Blocks-v0] [--episodes 50] [--replan 4] [--rules RULE ...]

A rule names a camera, and when its newest frame is used (:class:`sinew_client.control.listeners.views.ViewRule`). The
rule "all" always uses all newest frames. Otherwise the request contains the older frame again, whose features the
policy has stored (``sinew.load(reuse=True)``), so that its vision tower does not run. All rules play the same episodes
with the same noise. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import numpy as np
from sinew_client.control.listeners.views import ViewRule

from sinew.core.statistics import wilson

RULES = (
    "all", "front:every:2", "front:every:4", "front:never", "wrist:every:2", "wrist:every:4", "wrist:never",
    "front:change:4", "wrist:change:8", "wrist:change:16",
)  # fmt: skip


def play(
    policy: Any, env: Any, rule: ViewRule, seed: int, replan: int
) -> tuple[bool, list[tuple[int, float]]]:
    """Play an episode. Return whether it succeeded, and the computed views and vision milliseconds of each request."""
    observation, info = env.reset(seed=seed)
    if rule is not None:
        rule.reset()
    requests: list[tuple[int, float]] = []
    ends = False
    while not ends:
        frames = dict(observation["images"])
        if rule is not None:
            frames[rule.camera] = rule.frame(frames[rule.camera])
        chunk = policy.infer({**observation, "images": frames, "seed": 1000 * seed + len(requests)})
        requests.append((len(frames) - chunk.timing.reused_views, chunk.timing.vision_ms))
        for action in chunk.actions[:replan]:
            observation, _, done, timeout, info = env.step(
                action.clip(env.action_space.low, env.action_space.high)
            )
            ends = bool(done or timeout or info["is_success"])
            if ends:
                break
    return bool(info["is_success"]), requests


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("bundle", nargs="?", default="blocks")
    parser.add_argument("--env", default="sinew/Blocks-v0")
    parser.add_argument("--episodes", type=int, default=50)
    parser.add_argument("--first-seed", type=int, default=40_000)
    parser.add_argument("--replan", type=int, default=4)
    parser.add_argument("--rules", nargs="+", default=list(RULES))
    arguments = parser.parse_args()
    import gymnasium
    import sinew_eval.sim  # noqa: F401 - registers the tasks

    from sinew.policy import load

    policy = load(arguments.bundle, reuse=True, threads=1)
    policy.warm_up()
    rows = []
    for text in arguments.rules:
        env, rule = gymnasium.make(arguments.env), None if text == "all" else ViewRule(text)
        wins, views, total, lasting = [], 0, 0, []
        for seed in range(arguments.first_seed, arguments.first_seed + arguments.episodes):
            success, requests = play(policy, env, rule, seed, arguments.replan)
            wins.append(success)
            views, total = views + sum(count for count, _ in requests), total + len(requests)
            lasting += [ms for _, ms in requests]
        low, high = wilson(sum(wins), len(wins))
        row = {
            "rule": text,
            "wins": sum(wins),
            "episodes": len(wins),
            "interval": [round(low, 3), round(high, 3)],
            "requests": total,
            "views_per_request": round(views / total, 2),
            "vision_ms": round(float(np.median(lasting)), 2),
            "vision_ms_mean": round(float(np.mean(lasting)), 2),
            "failed": [seed for seed, won in enumerate(wins, arguments.first_seed) if not won],
        }
        rows.append(row)
        print({name: value for name, value in row.items() if name != "failed"}, flush=True)
    print(
        json.dumps(
            {"bundle": arguments.bundle, "env": arguments.env, "replan": arguments.replan, "rows": rows}
        )
    )


if __name__ == "__main__":
    main()
