"""Train the demo policy of the blocks task: ``python -m research.policies.blocks --cpu-seconds 3000``.

Three stages, each skipped when its output is there: demonstrations (about 8 CPU-minutes), training, export of
the checkpoint as a bundle. Everything is seeded; only the number of steps depends on the machine.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from pathlib import Path

import gymnasium
import numpy as np
import sinew_eval.sim  # noqa: F401 - registers the environments
import torch
from sinew_eval.sim.blocks import STEP_SIZE, BlocksEnv
from sinew_eval.sim.blocks_scene import FRONT, WRIST
from sinew_eval.sim.prompts import COLORS, PHRASINGS, SIDES, instruction, vocabulary
from sinew_eval.training.checkpoint import UNKNOWN, Design, Statistics, build_tokenizer
from sinew_eval.training.loop import Recipe, SmolVLATask, export, train
from sinew_eval.training.objective import Batch, Objective
from sinew_eval.training.rollout import Episode, encode, normalised, run_episodes, to_pixels
from sinew_eval.training.shard import Shards
from torch import multiprocessing

from benchmarks.handovers import OFFSETS
from research.policies.blocks_demos import HOLD, record_shard
from sinew.families.smolvla.model import SmolVLA

VECTORS = {
    "state": {"names": ["x", "y", "z", "opening"], "units": ["m"] * 4},
    "action": {
        "names": list(BlocksEnv.action_names),
        "units": [f"{1e3 * STEP_SIZE:g} mm"] * 3 + ["open above 0"],
    },
}
DESIGN = Design(
    name="blocks",
    cameras=("front", "wrist"),
    image_size=64,
    state_dim=4,
    action_dim=4,
    chunk_size=32,
    control_hz=20,
    motion=OFFSETS,
    words=vocabulary(),
    vectors=VECTORS,
)
REPLAN = 8
POSITION_SCALE = np.array([0.1, 0.1, 0.05], dtype=np.float32)  # metres per unit of the auxiliary outputs


class BlocksTask(SmolVLATask):
    design = DESIGN
    objective = Objective
    things = len(COLORS)
    auxiliary_outputs = 16  # named block, named block from the hand, all three blocks, side

    def __init__(self, folders: Sequence[Path], stats: Statistics):
        self.shards, self.stats = Shards(list(folders)), stats
        self.tokenizer = build_tokenizer(DESIGN.words)
        self.hold = HOLD
        meaning = {self.tokenizer.token_to_id(w) for w in (*COLORS, *SIDES, "\n")}
        self.droppable = torch.tensor([i not in meaning for i in range(self.tokenizer.get_vocab_size())])

    def batch(self, rng: np.random.Generator, rows: int, second_rows: int) -> Batch:
        sample = self.shards.sample(rng, rows, DESIGN.chunk_size, self.hold)
        goals = np.stack([sample[k] for k in ("color", "side", "phrasing")], axis=1).astype(int)
        second = np.stack(
            [rng.integers(n, size=second_rows) for n in (len(COLORS), len(SIDES), len(PHRASINGS))], 1
        )
        tokens, mask = self.instructions(np.concatenate([goals, second]), rng)
        both = np.concatenate([np.arange(rows), np.arange(second_rows)])
        return Batch(
            pixels=to_pixels(sample["images"]),
            tokens=tokens,
            token_mask=mask,
            state=torch.from_numpy(normalised(sample["state"], self.stats["observation.state"])),
            chunk=torch.from_numpy(normalised(sample["chunk"], self.stats["action"])),
            known=torch.from_numpy(sample["known"]),
            auxiliary=torch.from_numpy(
                auxiliary(sample["blocks"][both], sample["state"][both], np.concatenate([goals, second]))
            ),
            spots=torch.from_numpy(spots(sample["blocks"], sample["state"])),
        )

    def instructions(self, goals: np.ndarray, rng: np.random.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """goals: int [B, 3], color, side, phrasing. In a third of the rows some words that name neither
        colour nor side become the unknown word, so that the policy does not lean on them."""
        tokens, mask = encode(
            self.tokenizer, [instruction(COLORS[c], SIDES[s], PHRASINGS[p]) for c, s, p in goals]
        )
        drop = (rng.random(tokens.shape) < 0.2) & (rng.random((len(tokens), 1)) < 0.33)
        unknown = self.tokenizer.token_to_id(UNKNOWN)
        return torch.where(torch.from_numpy(drop) & self.droppable[tokens] & mask, unknown, tokens), mask

    def evaluate(self, model: SmolVLA, seeds: Sequence[int]) -> list[Episode]:
        return run_episodes(self.actor(model), lambda: gymnasium.make("sinew/Blocks-v0"), seeds, REPLAN)


def auxiliary(blocks: np.ndarray, state: np.ndarray, goals: np.ndarray) -> np.ndarray:
    """blocks [B, 9], state [B, 4], goals int [B, 3] -> float32 [B, 16]."""
    at = blocks.reshape(-1, 3, 3) / POSITION_SCALE
    named = at[np.arange(len(at)), goals[:, 0]]
    side = goals[:, 1:2] * 2.0 - 1.0
    out = [named, named - state[:, :3] / POSITION_SCALE, at.reshape(-1, 9), side]
    return np.concatenate(out, axis=1).astype(np.float32)


def spots(blocks: np.ndarray, state: np.ndarray) -> np.ndarray:
    """blocks [B, 9], state [B, 4] -> float32 [B, V, N, 3, 3]: per view, image token and block, whether the
    block's middle is in the token's square, and where it is on the table: from the origin in the front view,
    from the hand in the wrist view."""
    at, hand = blocks.reshape(-1, 3, 3).astype(np.float64), state[:, None, :3].astype(np.float64)
    side = DESIGN.image_size // (DESIGN.patch_size * DESIGN.pixel_shuffle)
    out = np.zeros((len(at), 2, side * side, 3, 3), dtype=np.float32)
    for view, (camera, relative) in enumerate(((FRONT, at), (WRIST, at - hand))):
        seen = (relative - camera.position) @ camera.rotation.T  # [B, 3, right down forward]
        uv = seen[..., :2] / (np.maximum(seen[..., 2:], 1e-6) * camera.tan_half)  # in [-1, 1] when in view
        row, thing = np.nonzero((np.abs(uv) < 1).all(-1) & (seen[..., 2] > 0))
        col, line = ((uv[row, thing] + 1) / 2 * side).astype(int).T
        out[row, view, line * side + col, thing, 0] = 1.0
        out[row, view, line * side + col, thing, 1:] = relative[row, thing, :2] / POSITION_SCALE[:2]
    return out


def statistics(shards: Shards) -> Statistics:
    """Mean and standard deviation over all frames; the motion axes share one scale, metres being metres."""
    out = {}
    for feature, column in (("observation.state", "state"), ("action", "action")):
        values = shards.column(column).astype(np.float64)
        out[feature] = {
            "mean": values.mean(0).astype(np.float32),
            "std": values.std(0).astype(np.float32),
        }
    return out


def _run(
    rank: int, folders: list[Path], stats: Statistics, recipe: Recipe, out: Path, start: Path | None
) -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    train(rank, BlocksTask(folders, stats), recipe, out, start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cpu-seconds", type=float, default=3000)
    parser.add_argument("--episodes", type=int, default=3600)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/blocks"))
    parser.add_argument("--demos", type=Path, default=None, help="default: OUT/demos")
    parser.add_argument("--start", type=Path, default=None, help="state.pt of an earlier run to go on from")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)

    demos = args.demos or args.out / "demos"
    folders = [demos / f"shard{r}" for r in range(args.ranks)]
    missing = [(r, f) for r, f in enumerate(folders) if not (f / "frames.npz").exists()]
    share = args.episodes // args.ranks
    jobs = [
        multiprocessing.get_context("spawn").Process(target=record_shard, args=(f, r * share, share))
        for r, f in missing
    ]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
    if any(job.exitcode for job in jobs):
        raise SystemExit("error: the demonstrations were not recorded to the end")

    stats = statistics(Shards(folders))
    recipe = Recipe(args.cpu_seconds, ranks=args.ranks, seed=args.seed, learning_rate=args.learning_rate)
    (args.out / ".meet").unlink(missing_ok=True)
    multiprocessing.spawn(_run, (folders, stats, recipe, args.out, args.start), nprocs=args.ranks)
    export(args.out, DESIGN)


if __name__ == "__main__":
    main()
