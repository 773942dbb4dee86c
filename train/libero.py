"""Train an ACT on the ten tasks of libero_object: ``python -m train.libero --cpu-seconds 1100``.

Demonstrations come first, from the simulator's own interpreter (train/libero_demos.py), here 16 episodes of each task
in two shards; then the bundle is played and quantised as any other:

    sinew eval --setup libero
    export PYTHONPATH=.:packages/sinew-client/src
    build/sims/libero/bin/python -m train.libero_demos runs/libero/demos/a libero_object 1000 16 0 1 2 3 4
    build/sims/libero/bin/python -m train.libero_demos runs/libero/demos/b libero_object 1000 16 5 6 7 8 9
    python -m train.libero --cpu-seconds 1100
    cd runs/libero
    sinew quantize libero-act.gguf --recipe head=int8 --out libero-act-int8.gguf
    sinew eval libero-act.gguf --compare libero-act-int8.gguf --suite libero_object --seed 0 --replan 16 --out pairs

The network is that of train/act.py. It reads no language: each task has a scene of its own, which says what is meant.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, multiprocessing

from sinew.bundle.image_recipe import ImageRecipe
from sinew.bundle.schema import Normalization, Processing
from sinew.convert import silent
from sinew.convert.conversion import Conversion
from sinew.convert.options import ConvertOptions
from sinew.convert.tensors import constant, rounded
from sinew.core import CameraSpec, PolicySpec, VectorSpec
from sinew.families.act.model import ACT, view_places
from sinew.solvers import SINGLE
from sinew.steps.image.resize import Resize
from train import act
from train.checkpoint import Statistics
from train.libero_demos import CAMERAS, CHUNK, SIDE
from train.loop import Recipe, train
from train.rollout import Episode, normalised, to_pixels
from train.shard import Shards

NAME, DRAWN, CONTROL_HZ, TASKS = "libero-act", 256, 20.0, 10
STATE = VectorSpec(
    8, ("x", "y", "z", "rx", "ry", "rz", "left", "right"), ("m",) * 3 + ("rad",) * 3 + ("m",) * 2
)
ACTION = VectorSpec(
    7, ("x", "y", "z", "rx", "ry", "rz", "gripper"), ("50 mm",) * 3 + ("0.5 rad",) * 3 + ("closed above 0",)
)
CONFIG = replace(
    act.CONFIG, chunk_size=CHUNK, max_state_dim=STATE.dim, max_action_dim=ACTION.dim, environment_dim=0
)


class LiberoTask:
    objective = act.ActObjective
    things, auxiliary_outputs = 0, 3 + 3 + 2 + TASKS

    def __init__(self, folders: Sequence[Path], stats: Statistics):
        self.shards, self.stats = Shards(list(folders)), stats

    def model(self, folder: Path, seed: int) -> ACT:
        torch.manual_seed(seed)
        model = ACT(CONFIG)
        model.view_places.copy_(view_places(CONFIG.rows, CONFIG.cols, CONFIG.hidden_size))  # type: ignore[operator]
        return model

    def write(self, folder: Path, model: ACT, state: dict[str, Tensor]) -> None:
        write_policy(folder.with_name(f"{NAME}.gguf"), state, self.stats)

    def batch(self, rng: np.random.Generator, rows: int, _second_rows: int) -> act.ActBatch:
        sample = self.shards.sample(rng, rows)
        where, hand = sample["where"], sample["state"][:, :3]
        told = [(where[:, :3] - hand) / 0.1, where / 0.1, np.eye(TASKS)[sample["task"].astype(int)]]
        return act.ActBatch(
            pixels=to_pixels(sample["images"]),
            state=torch.from_numpy(normalised(sample["state"], self.stats["observation.state"])),
            chunk=torch.from_numpy(normalised(sample["action"], self.stats["action"])),
            known=torch.ones(rows, CHUNK, dtype=torch.bool),
            auxiliary=torch.from_numpy(np.concatenate(told, axis=1).astype(np.float32)),
        )

    def evaluate(self, model: ACT, seeds: Sequence[int]) -> list[Episode]:
        raise NotImplementedError("the simulator is in another interpreter: sinew eval")


def statistics(shards: Shards) -> Statistics:
    """Mean and standard deviation over all frames; displacements share one scale, and so do turns."""
    out = {}
    for feature, values in (
        ("observation.state", shards.column("state")),
        ("action", shards.column("action").reshape(-1, ACTION.dim)),
    ):
        std = values.astype(np.float64).std(0)
        for part in (slice(0, 3), slice(3, 6), slice(6, None)):
            std[part] = std[part].max()
        out[feature] = {
            "mean": values.astype(np.float64).mean(0).astype(np.float32),
            "std": std.astype(np.float32),
        }
    return out


def write_policy(path: Path, state: dict[str, Tensor], stats: Statistics) -> None:
    """Write the bundle, its weights in bfloat16."""

    def normalization(feature: str) -> Normalization:
        found = {name: tuple(float(v) for v in stats[feature][name]) for name in ("mean", "std")}
        return Normalization("mean_std", found)

    conversion = Conversion(
        architecture="act",
        format="sinew-train",
        config=CONFIG,
        spec=PolicySpec(
            architecture="act",
            name=NAME,
            cameras=tuple(CameraSpec(name, DRAWN, DRAWN) for name in CAMERAS),
            state=STATE,
            action=ACTION,
            chunk_size=CHUNK,
            noise_dim=0,
            solver_steps=1,
            control_hz=CONTROL_HZ,
            n_action_steps=CHUNK,
            solver=SINGLE,
            **silent.SPEC,
        ),
        processing=Processing(
            image=ImageRecipe(SIDE, SIDE, (Resize(SIDE, SIDE, "area"),)),
            prompt=silent.PROMPT,
            state=normalization("observation.state"),
            action=normalization("action"),
            padded_state_dim=STATE.dim,
            padded_action_dim=ACTION.dim,
            all_cameras=True,
        ),
        tokenizer=silent.TOKENIZER,
        tensors={
            name: rounded(constant(name, value.detach().float().numpy())) for name, value in state.items()
        },
    )
    conversion.write(path, NAME, ConvertOptions(control_hz=CONTROL_HZ))


def _run(
    rank: int, folders: list[Path], stats: Statistics, recipe: Recipe, out: Path, start: Path | None
) -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    train(rank, LiberoTask(folders, stats), recipe, out, start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cpu-seconds", type=float, default=1100)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/libero"))
    parser.add_argument("--demos", type=Path, default=None, help="default: OUT/demos")
    parser.add_argument("--start", type=Path, default=None, help="state.pt of an earlier run to go on from")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    folders = sorted(found.parent for found in (args.demos or args.out / "demos").glob("*/frames.npz"))
    if not folders:
        raise SystemExit("error: expected demonstrations of train/libero_demos.py in --demos, got none")
    recipe = Recipe(
        args.cpu_seconds,
        rows=64,
        second_rows=0,
        ranks=args.ranks,
        seed=args.seed,
        learning_rate=args.learning_rate,
        evaluations=0,
    )
    (args.out / ".meet").unlink(missing_ok=True)
    stats = statistics(Shards(folders))
    multiprocessing.spawn(_run, (folders, stats, recipe, args.out, args.start), nprocs=args.ranks)


if __name__ == "__main__":
    main()
