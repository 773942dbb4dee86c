"""Fine-tune the demo policy of the pen by reinforcement, where the robot is slower than it was in training.

    python -m research.policies.reinforce --delay 2 --iterations 30 --out runs/reinforce

The jaws execute a command some slots after it was sent, which no demonstration had, so the policy comes too late.
Episodes are played with a :class:`sinew.RolloutPolicy`; PPO (Schulman et al. 2017, arXiv 1707.06347) trains the action
head on their log-probabilities, with the success of an episode less the mean of its iteration as the advantage of each
of its chunks; the new weights are exchanged, and the bundle that is saved at the end is played without exploration.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from sinew_eval.sim.pen import PenEnv

import sinew
from sinew.core.statistics import wilson

log = logging.getLogger("train")
REPLAN = 6  # slots that are executed of each chunk
DELAYED = "sinew/DelayedPen-v0"


class DelayedPen(gymnasium.Wrapper):
    """The pen with jaws that execute a command ``delay`` slots after it was sent; they stay open before."""

    def __init__(self, delay: int = 2):
        super().__init__(PenEnv())
        self.delay = delay

    def reset(self, **given: Any) -> Any:
        self.sent = deque([np.zeros(1, np.float32)] * self.delay)
        return self.env.reset(**given)

    def step(self, action: np.ndarray) -> Any:
        self.sent.append(action)
        return self.env.step(self.sent.popleft())


gymnasium.register(DELAYED, "research.policies.reinforce:DelayedPen", max_episode_steps=120)


@dataclass(frozen=True)
class Played:
    """An episode: what was drawn in it, and whether the pen was caught."""

    seed: int
    samples: tuple[sinew.RolloutSample, ...]
    success: bool


def play(policy: sinew.RolloutPolicy, delay: int, seeds: Sequence[int], luck: int) -> list[Played]:
    """Play an episode for each seed, all at once. luck: it, the seed and a chunk's number give the chunk's noise."""
    envs = [gymnasium.make(DELAYED, delay=delay) for _ in seeds]
    moments = [env.reset(seed=seed) for env, seed in zip(envs, seeds, strict=True)]
    samples: list[list[sinew.RolloutSample]] = [[] for _ in seeds]
    won: dict[int, bool] = {}
    while len(won) < len(envs):
        live = [i for i in range(len(envs)) if i not in won]
        asked = [
            {
                **moments[i][0],
                "seed": int(np.random.SeedSequence([luck, seeds[i], len(samples[i])]).generate_state(1)[0]),
            }
            for i in live
        ]
        for i, sample in zip(live, policy.sample(asked), strict=True):
            assert not isinstance(sample, Exception), sample
            samples[i].append(sample)
            age = round(moments[i][1]["frame_age"] * PenEnv.control_hz)
            for action in sample.chunk.actions[age : age + REPLAN]:
                observation, _, done, timeout, info = envs[i].step(np.clip(action, 0, 1))
                moments[i] = observation, info
                if done or timeout:
                    won[i] = bool(info["is_success"])
                    break
    return [Played(seed, tuple(samples[i]), won[i]) for i, seed in enumerate(seeds)]


def improve(
    policy: sinew.RolloutPolicy,
    learner: Any,
    optimizer: torch.optim.Optimizer,
    played: Sequence[Played],
    rng: np.random.Generator,
    args: argparse.Namespace,
) -> dict[str, float]:
    """Take PPO's steps over the chunks of an iteration."""
    rewards = np.array([each.success for each in played], np.float32)
    worth = (rewards - rewards.mean()) / (rewards.std() + 1e-3)
    rows = [
        (sample, value) for each, value in zip(played, worth, strict=True) for sample in each.samples if value
    ]
    clipped, divergence, count = 0.0, 0.0, 0
    for _ in range(args.epochs):
        order = rng.permutation(len(rows))
        for start in range(0, len(rows), args.rows):
            some = [rows[i] for i in order[start : start + args.rows]]
            # Of a chunk those rows count that can have been executed (as in pi_RL): two are older than the answer.
            drawn = policy.log_probs([sample for sample, _ in some], learner)[:, :, : REPLAN + 2]
            before = torch.from_numpy(np.stack([sample.log_probs for sample, _ in some]))[:, :, : REPLAN + 2]
            change = (drawn - before).sum(dim=(1, 2, 3))
            ratio, value = change.exp(), torch.tensor([value for _, value in some])
            bounded = ratio.clamp(1 - args.clip, 1 + args.clip)
            loss = -torch.minimum(ratio * value, bounded * value).mean()
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_([p for p in learner.parameters() if p.grad is not None], 1.0)
            optimizer.step()
            clipped += float((ratio != bounded).float().mean())
            divergence += float((ratio - 1 - change).mean().detach())
            count += 1
    return {"clipped": clipped / max(count, 1), "divergence": divergence / max(count, 1)}


def measured(path: str, delay: int, seeds: Sequence[int]) -> dict[str, Any]:
    """Return the success of a bundle without exploration: what :func:`sinew.evaluate` finds."""
    with sinew.load(path, engine="eager") as policy:
        found = sinew.evaluate(
            policy, lambda: gymnasium.make(DELAYED, delay=delay), episodes=seeds, replan=REPLAN, batch=16
        )
    low, high = wilson(found.successes, len(seeds))
    return {"wins": found.successes, "episodes": len(seeds), "interval": [round(low, 3), round(high, 3)]}


def main() -> None:
    logging.basicConfig(format="%(message)s")
    log.setLevel(logging.INFO)
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--policy", default="pen")
    parser.add_argument("--delay", type=int, default=2, help="slots of 1/60 s")
    parser.add_argument("--iterations", type=int, default=30)
    parser.add_argument("--episodes", type=int, default=64, help="of an iteration")
    parser.add_argument("--kind", default="flow-sde")
    parser.add_argument("--level", type=float, default=0.5)
    parser.add_argument("--steps", type=int, default=4, help="of the solver, while it explores")
    parser.add_argument("--rows", type=int, default=64, help="chunks of a step")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--clip", type=float, default=0.2)
    parser.add_argument("--learning-rate", type=float, default=5e-5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--test", type=int, default=200, help="episodes before and after")
    parser.add_argument("--out", type=Path, default=Path("runs/reinforce"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.out.mkdir(parents=True, exist_ok=True)
    exploration = sinew.Exploration(args.kind, args.level)
    policy = sinew.RolloutPolicy(args.policy, exploration, batch=16, solver_steps=args.steps)
    learner = policy.learner()
    trained = [
        p.requires_grad_(learner.component_of(name) == "head") for name, p in learner.named_parameters()
    ]
    optimizer = torch.optim.Adam([p for p in trained if p.requires_grad], lr=args.learning_rate)
    rng = np.random.default_rng(args.seed)
    test = range(700_000, 700_000 + args.test)
    history: list[dict[str, Any]] = [{"before": measured(args.policy, args.delay, test)} if args.test else {}]
    log.info("%s", json.dumps(history[-1]))
    bundle = args.out / "policy.gguf"
    for iteration in range(args.iterations):
        begun = time.process_time()
        seeds = range(800_000 + iteration * args.episodes, 800_000 + (iteration + 1) * args.episodes)
        played = play(policy, args.delay, seeds, args.seed)
        drawn = time.process_time()
        found = improve(policy, learner, optimizer, played, rng, args)
        policy.exchange({n: p for n, p in learner.named_parameters() if p.requires_grad})
        found |= {"iteration": iteration, "success": sum(each.success for each in played) / len(played)}
        found |= {"play_s": round(drawn - begun, 1), "learn_s": round(time.process_time() - drawn, 1)}
        history.append(found)
        log.info("%s", json.dumps(found))
        policy.save(bundle)
    if args.test:
        history.append({"after": measured(str(bundle), args.delay, test)})
        log.info("%s", json.dumps(history[-1]))
    (args.out / "log.json").write_text(json.dumps(history, indent=1) + "\n")


if __name__ == "__main__":
    main()
