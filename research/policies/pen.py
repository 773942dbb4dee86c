"""Train the demo policy of the pen task: ``python -m research.policies.pen --cpu-seconds 200``."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from pathlib import Path

import gymnasium
import numpy as np
import sinew_eval.sim  # noqa: F401 - registers the environments
import torch
from sinew_eval.sim.pen import PROMPT
from sinew_eval.training.checkpoint import Design, Statistics, build_tokenizer
from sinew_eval.training.loop import Recipe, SmolVLATask, export, train
from sinew_eval.training.objective import Batch, Objective
from sinew_eval.training.rollout import Episode, encode, normalised, run_episodes, to_pixels
from sinew_eval.training.shard import Shards
from torch import multiprocessing

from research.policies.pen_demos import SLOTS, record_shard
from sinew.families.smolvla.model import SmolVLA

DESIGN = Design(
    name="pen",
    cameras=("now", "previous"),
    image_size=64,
    state_dim=1,
    action_dim=1,
    chunk_size=SLOTS,
    control_hz=60,
    motion={"kind": "absolute"},
    words=tuple(sorted(PROMPT.split())),
    vectors={
        "state": {"names": ["opening"], "units": ["1 open, 0 closed"]},
        "action": {"names": ["close"], "units": ["closed from 0.5"]},
    },
    vision_width=48,
    vision_ffn=128,
    vision_layers=2,
    vision_heads=2,
    width=64,
    ffn=128,
    layers=2,
    heads=2,
    kv_heads=1,
    expert_multiplier=0.75,
)
REPLAN = 2  # slots: once per frame of a 30 Hz camera


class PenTask(SmolVLATask):
    design = DESIGN
    objective = Objective
    things = 0
    auxiliary_outputs = 3  # height, speed, seconds until the jaws must start

    def __init__(self, folders: Sequence[Path], stats: Statistics):
        self.shards, self.stats = Shards(list(folders)), stats
        self.tokenizer = build_tokenizer(DESIGN.words)

    def batch(self, rng: np.random.Generator, rows: int, second_rows: int) -> Batch:
        del second_rows  # there is one instruction only
        sample = self.shards.sample(rng, rows)
        tokens, mask = encode(self.tokenizer, [PROMPT] * rows)
        return Batch(
            pixels=to_pixels(sample["images"]),
            tokens=tokens,
            token_mask=mask,
            state=torch.from_numpy(normalised(sample["state"], self.stats["observation.state"])),
            chunk=torch.from_numpy(normalised(sample["action"][..., None], self.stats["action"])),
            known=torch.ones(rows, SLOTS, dtype=torch.bool),
            auxiliary=torch.from_numpy(sample["facts"]),
        )

    def evaluate(self, model: SmolVLA, seeds: Sequence[int]) -> list[Episode]:
        return run_episodes(self.actor(model), lambda: gymnasium.make("sinew/Pen-v0"), seeds, REPLAN)


def statistics(shards: Shards) -> Statistics:
    out = {}
    for feature, column in (("observation.state", "state"), ("action", "action")):
        values = shards.column(column).astype(np.float64).reshape(-1, 1)
        out[feature] = {"mean": values.mean(0).astype(np.float32), "std": values.std(0).astype(np.float32)}
    return out


def _run(rank: int, folders: list[Path], stats: Statistics, recipe: Recipe, out: Path) -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    train(rank, PenTask(folders, stats), recipe, out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cpu-seconds", type=float, default=200)
    parser.add_argument("--episodes", type=int, default=500)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/pen"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    folders = [args.out / "demos" / f"shard{r}" for r in range(args.ranks)]
    share = args.episodes // args.ranks
    for rank, folder in enumerate(folders):
        if not (folder / "frames.npz").exists():
            record_shard(folder, rank * share, share)
    recipe = Recipe(
        args.cpu_seconds, ranks=args.ranks, seed=args.seed, second_rows=0, draws=4, ema=0.995, episodes=20
    )
    (args.out / ".meet").unlink(missing_ok=True)
    multiprocessing.spawn(_run, (folders, statistics(Shards(folders)), recipe, args.out), nprocs=args.ranks)
    export(args.out, DESIGN)


if __name__ == "__main__":
    main()
