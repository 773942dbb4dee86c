"""Train the policy of the egg task, which streams: ``python -m research.policies.egg --cpu-seconds 100``."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from pathlib import Path

import gymnasium
import numpy as np
import sinew_eval.sim  # noqa: F401 - registers the environments
import torch
from sinew_eval.sim.egg import CRUSH, NOISE, OPEN, PROMPT, STIFFNESS, TOUCH, WIDTH, look, picture
from sinew_eval.training.checkpoint import Design, Statistics, build_tokenizer
from sinew_eval.training.loop import Recipe, SmolVLATask, export, train
from sinew_eval.training.rolling import RollingBatch, RollingObjective
from sinew_eval.training.rollout import Episode, encode, normalised, run_episodes, to_pixels
from torch import multiprocessing

from sinew.families.smolvla.model import SmolVLA

ROWS = 16  # of a window, 67 ms
DESIGN = Design(
    name="egg",
    cameras=("front",),
    image_size=64,
    state_dim=2,
    action_dim=1,
    chunk_size=ROWS,
    control_hz=240,
    words=tuple(sorted(PROMPT.split())),
    vectors={
        "state": {"names": ["opening", "force"], "units": ["80 mm", "10 N"]},
        "action": {"names": ["speed"], "units": ["0.2 m/s"]},
    },
    patch_size=16,
    vision_width=32,
    vision_ffn=64,
    vision_layers=1,
    vision_heads=2,
    width=64,
    ffn=128,
    layers=2,
    heads=2,
    kv_heads=1,
    expert_multiplier=0.75,
    rolling=True,
)
STATS: Statistics = {
    "observation.state": {
        "mean": np.array([0.6, 0.1], np.float32),
        "std": np.array([0.2, 0.2], np.float32),
    },
    "action": {"mean": np.array([0.5], np.float32), "std": np.array([0.5], np.float32)},
}


class EggTask(SmolVLATask):
    """Moments of the task, drawn directly: a picture, then several states that go with it.

    What an action should be follows from what was seen and what is felt (``sinew_eval.sim.egg.expert_action``), so no
    episode has to be played for it.
    """

    design = DESIGN
    objective = RollingObjective
    stats = STATS
    things = auxiliary_outputs = 0

    def __init__(self, moments: int):
        self.moments = moments
        self.tokenizer = build_tokenizer(DESIGN.words)

    def batch(self, rng: np.random.Generator, rows: int, second_rows: int) -> RollingBatch:
        del second_rows  # there is one instruction only
        shape = (rows, self.moments)
        there = rng.random(rows) < 0.75
        images = np.stack([picture(bool(egg), look(rng), DESIGN.image_size)[None] for egg in there])
        states = np.stack([drawn_states(rng, bool(egg), self.moments) for egg in there])  # [B, D, 2]
        closes = there[:, None] & (CRUSH * states[..., 1] < TOUCH)
        chunks = np.broadcast_to(closes[..., None], (*shape, ROWS)).astype(np.float32)
        plans = out_of_date(rng, chunks)
        tokens, mask = encode(self.tokenizer, [PROMPT] * rows)
        state = torch.from_numpy(normalised(states, self.stats["observation.state"]))
        ready = [
            torch.from_numpy(normalised(each[..., None], self.stats["action"])) for each in (chunks, plans)
        ]
        return RollingBatch(
            pixels=to_pixels(images),
            tokens=tokens,
            token_mask=mask,
            state=state[:, 0],
            chunk=ready[0][:, 0],
            known=torch.ones(rows, ROWS, dtype=torch.bool),
            auxiliary=torch.zeros(rows, 0),
            states=state,
            chunks=ready[0],
            plans=ready[1],
        )

    def evaluate(self, model: SmolVLA, seeds: Sequence[int]) -> list[Episode]:
        """Play with a new chunk at every other step, which no machine computes in time: what the weights know."""
        return run_episodes(
            self.actor(model), lambda: gymnasium.make("sinew/Egg-v0", max_episode_steps=360), seeds, 2
        )


def drawn_states(rng: np.random.Generator, there: bool, count: int) -> np.ndarray:
    """Return float32 [count, 2], opening and force: nothing touched yet, just touched, or held.

    Without an egg in the picture the jaws may stand anywhere, and a few touch one that the camera has not seen yet.
    """
    width = rng.uniform(*WIDTH, count)
    deep = np.where(
        rng.random(count) < 0.6, rng.uniform(0.0, 2.5, count), rng.uniform(0.0, CRUSH / STIFFNESS, count)
    )
    touched = rng.random(count) < (0.5 if there else 0.1)
    free = np.where(rng.random(count) < (0.1 if there else 0.7), OPEN, rng.uniform(WIDTH[0], OPEN, count))
    opening = np.where(touched, width - deep, free)
    force = np.where(touched, STIFFNESS * deep, 0.0) + rng.normal(0.0, NOISE, count)
    return np.stack([opening / OPEN, force / CRUSH], axis=-1).astype(np.float32)


def out_of_date(rng: np.random.Generator, chunks: np.ndarray) -> np.ndarray:
    """Return what windows were made of, [B, D, H]: half of them the truth, the others its opposite, or in between."""
    old = rng.random(chunks.shape[:2]) < 0.5
    share = np.where(rng.random(chunks.shape[:2]) < 0.6, 1.0, rng.random(chunks.shape[:2])) * old
    return (chunks + share[..., None] * (1.0 - 2.0 * chunks)).astype(np.float32)


def _run(rank: int, moments: int, recipe: Recipe, out: Path) -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    train(rank, EggTask(moments), recipe, out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cpu-seconds", type=float, default=100)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/egg"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    recipe = Recipe(
        args.cpu_seconds, rows=12, ranks=args.ranks, seed=args.seed, second_rows=0, ema=0.995, evaluations=1, episodes=4
    )  # fmt: skip
    (args.out / ".meet").unlink(missing_ok=True)
    multiprocessing.spawn(_run, (8, recipe, args.out), nprocs=args.ranks)
    export(args.out, DESIGN)


if __name__ == "__main__":
    main()
