"""Train an ACT on the blocks task, its goal given as numbers: ``python -m research.policies.act``.

The demonstrations are those of research/policies/blocks.py in larger pictures; stages and budget are as there. The
transformer is ACT's; the features below it are those of a narrow residual network with norms over groups of channels,
learned from scratch. There is no latent: what the expert does follows from the present state, so one answer is right.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import sinew_eval.sim  # noqa: F401 - registers the environments
import torch
from sinew_eval.sim.prompts import COLORS, SIDES
from sinew_eval.training.checkpoint import Statistics
from sinew_eval.training.curve import plot
from sinew_eval.training.loop import Recipe, train
from sinew_eval.training.rollout import Episode, normalised, run_episodes, to_pixels
from sinew_eval.training.shard import Shards
from torch import Tensor, multiprocessing, nn

from benchmarks.handovers import OFFSETS
from research.policies.blocks import VECTORS, auxiliary, statistics
from research.policies.blocks_demos import HOLD, record_shard
from sinew.bundle.schema import Normalization, Processing, VectorPart
from sinew.convert import silent
from sinew.convert.conversion import Conversion
from sinew.convert.options import ConvertOptions, parse_motion
from sinew.convert.tensors import constant, rounded
from sinew.core import CameraSpec, PolicySpec, VectorSpec
from sinew.families.act.model import ACT, ActConfig, ActContext, view_places
from sinew.layers.resnet import ResNetConfig
from sinew.models.solvers import SINGLE
from sinew.steps.image.base import ImageRecipe

NAME, CAMERAS, SIDE, REPLAN, CONTROL_HZ = "act", ("front", "wrist"), 96, 8, 20.0
GOAL = len(COLORS) + len(SIDES)
CONFIG = ActConfig(
    vision=ResNetConfig((1, 1, 1, 1), width=16, group=8),
    hidden_size=128,
    intermediate_size=320,
    num_heads=4,
    encoder_layers=3,
    decoder_layers=2,
    rows=3,
    cols=3,
    chunk_size=32,
    max_state_dim=4 + GOAL,
    max_action_dim=4,
    environment_dim=GOAL,
    pre_norm=True,
)


@dataclass
class ActBatch:
    """pixels [B, V, 3, SIDE, SIDE] in [-1, 1]; state [B, S] and chunk [B, H, A] normalised; known bool [B, H];
    auxiliary [B, X]."""

    pixels: Tensor
    state: Tensor
    chunk: Tensor
    known: Tensor
    auxiliary: Tensor


class ActObjective(nn.Module):
    """The mean distance of the chunk (ACT's), and where everything is, as the encoder's first token says it."""

    def __init__(self, model: ACT, outputs: int, _things: int, _draws: int, weight: float):
        super().__init__()
        self.model, self.weight = model, weight
        size = model.config.hidden_size
        self.auxiliary = nn.Sequential(nn.Linear(size, 128), nn.GELU(), nn.Linear(128, outputs))

    def forward(self, batch: ActBatch, _: torch.Generator) -> tuple[Tensor, dict[str, Tensor]]:
        model, views = self.model, batch.pixels.shape[1]
        places = model.all_places(views)
        x = model.embed(model.embed_images(batch.pixels), batch.state)
        valid = torch.ones(x.shape[:2], dtype=torch.bool)
        x = model.encode(x, places, valid)
        keys, values = zip(*(layer.cross.key_value(x, places) for layer in model.decoder), strict=True)
        chunk = model.regress(ActContext(keys, values, valid))
        known = batch.known[..., None]
        far = ((chunk - batch.chunk).abs() * known).sum() / (known.sum() * chunk.shape[-1]).clamp_min(1)
        where = (self.auxiliary(x[:, 0]) - batch.auxiliary).square().mean()
        return far + self.weight * where, {"distance": far.detach(), "auxiliary": where.detach()}


class ActActor:
    """Observations to action chunks, as the runtime does it, for a batch."""

    def __init__(self, model: ACT, stats: Statistics):
        self.model, self.stats = model, stats
        self.shape = model.noise_shape

    @torch.inference_mode()
    def chunks(self, observations: list[dict[str, Any]], noise: np.ndarray) -> np.ndarray:
        pixels = to_pixels(np.stack([np.stack([o["images"][c] for c in CAMERAS]) for o in observations]))
        state = ready(np.stack([o["state"] for o in observations]), self.stats)
        mask, none = torch.ones(pixels.shape[:2], dtype=torch.bool), torch.zeros(len(pixels), 0)
        context = self.model.read(self.model.embed_images(pixels), mask, none, none, state)
        return (
            self.model.regress(context).numpy() * self.stats["action"]["std"] + self.stats["action"]["mean"]
        )


def ready(state: np.ndarray, stats: Statistics) -> Tensor:
    """state: float32 [B, 4 + GOAL] -> the same with the robot's numbers normalised, as a tensor."""
    own = normalised(state[:, :4], stats["observation.state"])
    return torch.from_numpy(np.concatenate([own, state[:, 4:]], axis=1).astype(np.float32))


class ActTask:
    objective, config = ActObjective, CONFIG
    things, auxiliary_outputs = 0, 16

    def __init__(self, folders: Sequence[Path], stats: Statistics):
        self.shards, self.stats = Shards(list(folders)), stats

    def model(self, folder: Path, seed: int) -> ACT:
        torch.manual_seed(seed)
        model, c = ACT(self.config), self.config
        model.view_places.copy_(view_places(c.rows, c.cols, c.hidden_size))  # type: ignore[operator]
        return model

    def write(self, folder: Path, model: ACT, state: dict[str, Tensor]) -> None:
        write_policy(folder.with_name(f"{NAME}.gguf"), state, self.stats)

    def batch(self, rng: np.random.Generator, rows: int, _second_rows: int) -> ActBatch:
        sample = self.shards.sample(rng, rows, CONFIG.chunk_size, HOLD)
        color, side = sample["color"].astype(int), sample["side"].astype(int)
        goal = np.concatenate([np.eye(len(COLORS))[color], np.eye(len(SIDES))[side]], axis=1)
        where = auxiliary(sample["blocks"], sample["state"], np.stack([color, side], axis=1))
        return ActBatch(
            pixels=to_pixels(sample["images"]),
            state=ready(np.concatenate([sample["state"], goal], axis=1), self.stats),
            chunk=torch.from_numpy(normalised(sample["chunk"], self.stats["action"])),
            known=torch.from_numpy(sample["known"]),
            auxiliary=torch.from_numpy(where),
        )

    def evaluate(self, model: ACT, seeds: Sequence[int]) -> list[Episode]:
        return run_episodes(
            ActActor(model, self.stats), lambda: gymnasium.make("sinew/BlocksGoal-v0"), seeds, REPLAN
        )


def normalization(stats: dict[str, np.ndarray]) -> Normalization:
    return Normalization("mean_std", {name: tuple(float(v) for v in stats[name]) for name in ("mean", "std")})


def write_policy(path: Path, state: dict[str, Tensor], stats: Statistics) -> None:
    """Write the bundle, its weights in bfloat16."""
    own = normalization(stats["observation.state"])
    spec = {
        "cameras": tuple(CameraSpec(name, SIDE, SIDE) for name in CAMERAS),
        "state": VectorSpec(
            4 + GOAL,
            (*VECTORS["state"]["names"], *COLORS, *SIDES),
            (*VECTORS["state"]["units"], *[""] * GOAL),
        ),
        "action": VectorSpec(4, *(tuple(VECTORS["action"][key]) for key in ("names", "units"))),
    }
    processing = {
        "image": ImageRecipe(SIDE, SIDE),
        "state": own,
        "action": normalization(stats["action"]),
        "state_parts": (
            VectorPart("state", 4, own),
            VectorPart("environment", GOAL, Normalization("identity")),
        ),
    }
    write(path, NAME, CONFIG, state, spec, processing, {"motion": parse_motion(OFFSETS)})


def write(
    path: Path,
    name: str,
    config: ActConfig,
    state: dict[str, Tensor],
    spec: dict[str, Any],
    processing: dict[str, Any],
    options: dict[str, Any],
) -> None:
    found = {name: constant(name, value.detach().float().numpy()) for name, value in state.items()}
    conversion = Conversion(
        format="sinew-train",
        config=config,
        spec=PolicySpec(
            architecture="act",
            name=name,
            chunk_size=config.chunk_size,
            noise_dim=0,
            solver_steps=1,
            control_hz=CONTROL_HZ,
            n_action_steps=config.chunk_size,
            solver=SINGLE,
            **spec,
            **silent.SPEC,
        ),
        processing=Processing(
            prompt=silent.PROMPT,
            padded_state_dim=config.max_state_dim,
            padded_action_dim=config.max_action_dim,
            all_cameras=True,
            **processing,
        ),
        tokenizer=silent.TOKENIZER,
        tensors={
            name: source if name == "view_places" else rounded(source)  # a formula's numbers, not learned
            for name, source in found.items()
        },
    )
    conversion.write(path, name, ConvertOptions(control_hz=CONTROL_HZ, **options))


def _run(
    rank: int, folders: list[Path], stats: Statistics, recipe: Recipe, out: Path, start: Path | None
) -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    train(rank, ActTask(folders, stats), recipe, out, start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cpu-seconds", type=float, default=1800)
    parser.add_argument("--episodes", type=int, default=2600)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/act"))
    parser.add_argument("--demos", type=Path, default=None, help="default: OUT/demos")
    parser.add_argument("--start", type=Path, default=None, help="state.pt of an earlier run to go on from")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)

    demos, share = args.demos or args.out / "demos", args.episodes // args.ranks
    folders = [demos / f"shard{r}" for r in range(args.ranks)]
    jobs = [
        multiprocessing.get_context("spawn").Process(target=record_shard, args=(f, r * share, share, SIDE))
        for r, f in enumerate(folders)
        if not (f / "frames.npz").exists()
    ]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
    if any(job.exitcode for job in jobs):
        raise SystemExit("error: the demonstrations were not recorded to the end")

    recipe = Recipe(
        args.cpu_seconds,
        rows=64,
        second_rows=0,
        ranks=args.ranks,
        seed=args.seed,
        learning_rate=args.learning_rate,
    )
    (args.out / ".meet").unlink(missing_ok=True)
    stats = statistics(Shards(folders))
    multiprocessing.spawn(_run, (folders, stats, recipe, args.out, args.start), nprocs=args.ranks)
    plot(args.out / "log.json", args.out / "curve.png")


if __name__ == "__main__":
    main()
