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
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from sinew.bundle.image_recipe import ImageRecipe
from sinew.core import CameraSpec, VectorSpec
from sinew.families.act.model import ACT
from sinew.steps.image.resize import Resize
from train import act
from train.checkpoint import Statistics
from train.libero_demos import CAMERAS, CHUNK, SIDE
from train.loop import Recipe, train
from train.rollout import normalised, to_pixels
from train.shard import Shards

NAME, DRAWN, TASKS = "libero-act", 256, 10
AXES, RAD = ("x", "y", "z", "rx", "ry", "rz"), ("rad",) * 3
STATE = VectorSpec(8, (*AXES, "left", "right"), ("m", "m", "m", *RAD, "m", "m"))
ACTION = VectorSpec(7, (*AXES, "gripper"), ("50 mm",) * 3 + ("0.5 rad",) * 3 + ("closed above 0",))


class LiberoTask(act.ActTask):
    config = replace(act.CONFIG, chunk_size=CHUNK, max_state_dim=8, max_action_dim=7, environment_dim=0)
    auxiliary_outputs = 3 + 3 + 2 + TASKS

    def write(self, folder: Path, model: ACT, state: dict[str, Tensor]) -> None:
        spec = {
            "cameras": tuple(CameraSpec(name, DRAWN, DRAWN) for name in CAMERAS),
            "state": STATE,
            "action": ACTION,
        }
        processing = {
            "image": ImageRecipe(SIDE, SIDE, (Resize(SIDE, SIDE, "area"),)),
            "state": act.normalization(self.stats["observation.state"]),
            "action": act.normalization(self.stats["action"]),
        }
        act.write(folder.with_name(f"{NAME}.gguf"), NAME, self.config, state, spec, processing, {})

    def batch(self, rng: np.random.Generator, rows: int, _second_rows: int) -> act.ActBatch:
        sample = self.shards.sample(rng, rows)
        where, hand = sample["where"], sample["state"][:, :3]
        told = [(where[:, :3] - hand) / 0.1, where / 0.1, np.eye(TASKS)[sample["task"].astype(int)]]
        return act.ActBatch(
            to_pixels(sample["images"]),
            torch.from_numpy(normalised(sample["state"], self.stats["observation.state"])),
            torch.from_numpy(normalised(sample["action"], self.stats["action"])),
            torch.ones(rows, CHUNK, dtype=torch.bool),
            torch.from_numpy(np.concatenate(told, axis=1).astype(np.float32)),
        )


def statistics(shards: Shards) -> Statistics:
    """Mean and standard deviation over all frames; displacements share one scale, and so do turns."""
    out = {}
    for feature, column in (("observation.state", "state"), ("action", "action")):
        values = shards.column(column).astype(np.float64)
        values = values.reshape(-1, values.shape[-1])
        std = values.std(0)
        for part in (slice(0, 3), slice(3, 6), slice(6, None)):
            std[part] = std[part].max()
        out[feature] = {"mean": values.mean(0).astype(np.float32), "std": std.astype(np.float32)}
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cpu-seconds", type=float, default=1100)
    parser.add_argument("--out", type=Path, default=Path("runs/libero"), help="with demos/ in it")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    folders = sorted(found.parent for found in args.out.glob("demos/*/frames.npz"))
    if not folders:
        raise SystemExit("error: expected demonstrations of train/libero_demos.py in OUT/demos, got none")
    recipe = Recipe(args.cpu_seconds, rows=64, second_rows=0, ranks=1, evaluations=0)
    (args.out / ".meet").unlink(missing_ok=True)
    train(0, LiberoTask(folders, statistics(Shards(folders))), recipe, args.out)


if __name__ == "__main__":
    main()
