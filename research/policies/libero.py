"""Train a policy on the ten tasks of libero_object: ``python -m research.policies.libero act --cpu-seconds 1100``.

Demonstrations come first, from the simulator's own interpreter (research/policies/libero_demos.py), here 16 episodes
of each task in two shards; then the bundle is played and quantised as any other:

    sinew eval --setup libero
    export PYTHONPATH=.:packages/sinew-client/src
    build/sims/libero/bin/python -m research.policies.libero_demos runs/libero/demos/a libero_object 1000 16 0 1 2 3 4
    build/sims/libero/bin/python -m research.policies.libero_demos runs/libero/demos/b libero_object 1000 16 5 6 7 8 9
    python -m research.policies.libero act --cpu-seconds 1100
    cd runs/libero
    sinew quantize libero-act.gguf --recipe head=int8 --out libero-act-int8.gguf
    sinew eval libero-act.gguf --compare libero-act-int8.gguf --suite libero_object --seed 0 --replan 16 --out pairs

``act`` is the network of research/policies/act.py; research/policies/libero_reference.py has LeRobot's own inference
of it. It reads no
language: each task has a scene of its own, which says what is meant. ``smolvla`` reads the sentence, and leaves a
checkpoint that LeRobot opens (docs/eval-suites.md); the same lines with another OUT and the tasks 1 6 8 made the one
that was measured. Frames are halved as LeRobot resizes them, without a filter, so the simulator has to draw them with
``--env-options '{"size": 192}'``.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from sinew_eval.training.checkpoint import Design, Statistics, build_tokenizer
from sinew_eval.training.loop import Recipe, SmolVLATask, export, train
from sinew_eval.training.objective import Batch, Objective
from sinew_eval.training.rollout import Episode, encode, normalised, to_pixels
from sinew_eval.training.shard import Shards
from torch import Tensor

from research.policies import act
from research.policies.libero_demos import CAMERAS, CHUNK, SIDE
from sinew.core import CameraSpec, VectorSpec
from sinew.families.act.model import ACT
from sinew.families.smolvla.model import SmolVLA
from sinew.steps.image.base import ImageRecipe
from sinew.steps.image.resize import Resize

DRAWN = 256
THINGS = (
    *("alphabet soup", "cream cheese", "salad dressing", "bbq sauce", "ketchup", "tomato sauce", "butter"),
    *("milk", "chocolate pudding", "orange juice"),
)  # in the order of the tasks
SENTENCES = [f"pick up the {thing} and place it in the basket" for thing in THINGS]
AXES, RAD = ("x", "y", "z", "rx", "ry", "rz"), ("rad",) * 3
STATE = VectorSpec(8, (*AXES, "left", "right"), ("m", "m", "m", *RAD, "m", "m"))
ACTION = VectorSpec(7, (*AXES, "gripper"), ("50 mm",) * 3 + ("0.5 rad",) * 3 + ("closed above 0",))
DESIGN = Design(
    name="libero-smolvla",
    cameras=CAMERAS,
    image_size=SIDE,
    patch_size=12,
    state_dim=STATE.dim,
    action_dim=ACTION.dim,
    chunk_size=CHUNK,
    control_hz=act.CONTROL_HZ,
    words=tuple(sorted({word for sentence in SENTENCES for word in sentence.split()})),
    vectors={
        name: {"names": list(of.names), "units": list(of.units)}
        for name, of in (("state", STATE), ("action", ACTION))
    },
)


class LiberoAct(act.ActTask):
    name = "libero-act"
    config = replace(act.CONFIG, chunk_size=CHUNK, max_state_dim=8, max_action_dim=7, environment_dim=0)
    auxiliary_outputs = 3 + 3 + 2 + len(THINGS)

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
        act.write(folder.with_name(f"{self.name}.gguf"), self.name, self.config, state, spec, processing, {})

    def batch(self, rng: np.random.Generator, rows: int, _second_rows: int) -> act.ActBatch:
        sample, pixels, state, chunk, known, told = drawn(self.shards, self.stats, rng, rows)
        which = torch.eye(len(THINGS))[torch.from_numpy(sample["task"]).long()]
        return act.ActBatch(pixels, state, chunk, known, torch.cat([told, which], dim=1))


class LiberoSmolVLA(SmolVLATask):
    design, objective = DESIGN, Objective
    things, auxiliary_outputs = 0, 3 + 3 + 2

    def __init__(self, folders: Sequence[Path], stats: Statistics):
        self.shards, self.stats = Shards(list(folders)), stats
        self.tokens, self.token_mask = encode(build_tokenizer(DESIGN.words), SENTENCES)

    def batch(self, rng: np.random.Generator, rows: int, _second_rows: int) -> Batch:
        sample, pixels, state, chunk, known, told = drawn(self.shards, self.stats, rng, rows)
        task = torch.from_numpy(sample["task"]).long()
        return Batch(pixels, self.tokens[task], self.token_mask[task], state, chunk, known, told)

    def evaluate(self, model: SmolVLA, seeds: Sequence[int]) -> list[Episode]:
        """Play nothing: the simulator is in another interpreter."""
        return []


def drawn(
    shards: Shards, stats: Statistics, rng: np.random.Generator, rows: int
) -> tuple[dict[str, np.ndarray], Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return frames with what a policy learns from each: the fields of :class:`research.policies.act.ActBatch`, the
    auxiliary without the task: where the thing is, from the hand and in the world, and the basket, in units of 0.1
    m."""
    sample = shards.sample(rng, rows)
    where, hand = sample["where"], sample["state"][:, :3]
    told = np.concatenate([(where[:, :3] - hand) / 0.1, where / 0.1], axis=1)
    return (
        sample,
        to_pixels(sample["images"]),
        torch.from_numpy(normalised(sample["state"], stats["observation.state"])),
        torch.from_numpy(normalised(sample["action"], stats["action"])),
        torch.ones(rows, CHUNK, dtype=torch.bool),
        torch.from_numpy(told.astype(np.float32)),
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
    parser.add_argument("policy", choices=("act", "smolvla"))
    parser.add_argument("--cpu-seconds", type=float, default=1100)
    parser.add_argument("--out", type=Path, default=Path("runs/libero"), help="with demos/ in it")
    parser.add_argument("--start", type=Path, default=None, help="state.pt of an earlier run to go on from")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    folders = sorted(found.parent for found in args.out.glob("demos/*/frames.npz"))
    if not folders:
        raise SystemExit(
            "error: expected demonstrations of research/policies/libero_demos.py in OUT/demos, got none"
        )
    smolvla = args.policy == "smolvla"
    rows = 32 if smolvla else 64
    recipe = Recipe(args.cpu_seconds, rows=rows, second_rows=0, ranks=1, evaluations=0)
    (args.out / ".meet").unlink(missing_ok=True)
    stats = statistics(Shards(folders))
    task = (LiberoSmolVLA if smolvla else LiberoAct)(folders, stats)
    train(0, task, recipe, args.out, args.start)
    if smolvla:
        export(args.out, DESIGN)


if __name__ == "__main__":
    main()
