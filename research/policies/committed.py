"""Train a policy's head to continue rows that are executed already: ``python -m research.policies.committed
--cpu-seconds 600``.

Training-time real-time chunking (Black, Ren, Equi and Levine 2025, arXiv 2512.05964): the first d rows of a chunk are
the actions themselves, at the time of actions, and the loss is that of the others. What reads pictures and words stays
as it is; only the head of ``sinew/assets/blocks.gguf`` goes on learning, which takes a fifth of the time.
``--driven 500`` adds episodes in which the policy that is started from drives late
(:mod:`research.policies.committed_demos`).
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from sinew_eval.training.checkpoint import Statistics, write_configs, write_weights
from sinew_eval.training.objective import repeated
from sinew_eval.training.rollout import normalised, to_pixels
from torch import Tensor, nn

from research.policies.blocks import DESIGN, BlocksTask
from research.policies.blocks_demos import HOLD
from research.policies.committed_demos import continued, record_driven, record_shard
from sinew.convert import convert
from sinew.families.smolvla.model import SmolVLA
from sinew.models.expert import Prefix
from sinew.policy import Policy, load

log = logging.getLogger("train")
ASSETS = Path(__file__).parents[2] / "sinew" / "assets"
# Rows, 0.8 s at 20 Hz: half a chunk. Where a delay is longer, fewer rows than that are new when the chunk arrives.
COMMITTED = 16
ALONE = 0.25  # share of pictures whose chunk continues nothing
FROZEN = ("vision", "connector", "language", "state_proj")
FIRST_EPISODE = 20_000  # other seeds than those of the first training


def statistics_of(policy: Policy) -> Statistics:
    """Return mean and standard deviation of state and actions, as the bundle has them."""
    processing = policy.manifest.processing
    found = {"observation.state": processing.state, "action": processing.action}
    return {
        name: {key: np.array(each.stats[key], np.float32) for key in ("mean", "std")}
        for name, each in found.items()
    }


class Samples:
    """Pictures, instructions and chunks with committed rows, from every shard as many."""

    def __init__(self, folders: Sequence[Path], stats: Statistics):
        self.task, self.stats = BlocksTask(folders, stats), stats
        self._turn = 0

    def draw(self, rng: np.random.Generator, rows: int) -> tuple[tuple[Tensor, ...], Tensor, Tensor, Tensor]:
        """Return the arguments of a prefix, chunks [B, H, A], committed and known rows, bool [B, H]."""
        parts, H = self.task.shards.parts, DESIGN.chunk_size
        shard = parts[self._turn % len(parts)]
        self._turn += 1
        frames = rng.integers(len(shard), size=rows)
        delays = np.where(rng.random(rows) < ALONE, 0, rng.integers(1, COMMITTED + 1, size=rows))
        chunk, delays, known = continued(shard, frames, delays, H, HOLD)
        goals = np.stack([shard[k][frames] for k in ("color", "side", "phrasing")], axis=1).astype(int)
        tokens, mask = self.task.instructions(goals, rng)
        state = torch.from_numpy(normalised(shard["state"][frames], self.stats["observation.state"]))
        given = (to_pixels(shard.images[frames]), tokens, mask, state)
        committed = torch.from_numpy(np.arange(H) < delays[:, None])
        actions = torch.from_numpy(normalised(chunk, self.stats["action"]))
        return given, actions, committed, torch.from_numpy(known)


def prefix_of(model: SmolVLA, pixels: Tensor, tokens: Tensor, mask: Tensor, state: Tensor) -> Prefix:
    """Return what the head reads. What it reads with is trained, what it reads from is not."""
    from sinew.layers.attention import block_mask

    with torch.no_grad():
        image_tokens = model.embed_images(pixels)
        cameras = torch.ones(pixels.shape[:2], dtype=torch.bool)
        x, valid, opens_block = model.embed_prefix(image_tokens, cameras, tokens, mask, state)
        _, cache = model.language(x, valid.long().cumsum(dim=1) - 1, block_mask(valid, opens_block))
    return Prefix(kv=model.expert_kv(cache), valid=valid, length=valid.sum(dim=1))


def loss_of(
    model: SmolVLA,
    prefix: Prefix,
    chunk: Tensor,
    committed: Tensor,
    known: Tensor,
    draws: int,
    noise: torch.Generator,
) -> Tensor:
    """Flow matching (`training.objective`) of the rows that are not committed. Those are actions at time 0."""
    own = repeated(prefix, len(chunk), draws)
    actions, fixed, counted = (x.repeat_interleave(draws, 0) for x in (chunk, committed, known))
    start = torch.randn(actions.shape, generator=noise)
    t = torch.rand(len(actions), 1, generator=noise) ** (1 / 1.5) * 0.999 + 0.001  # Beta(1.5, 1)
    times = t.expand(fixed.shape).masked_fill(fixed, 0.0)  # [B, H]
    x = times[..., None] * start + (1 - times[..., None]) * actions
    error = (model.velocity(x, times, own) - (start - actions)).square() * counted[..., None]
    return error.sum() / (counted.sum() * actions.shape[-1]).clamp_min(1)


def train(
    policy: Policy, samples: Samples, out: Path, cpu_seconds: float, rows: int, draws: int, rate: float
) -> None:
    """Go on training the head for ``cpu_seconds``; write the averaged weights as a checkpoint into ``out``."""
    torch.set_num_threads(1)
    design = replace(DESIGN, name="blocks-rtc")
    model = SmolVLA(write_configs(out / "checkpoint", design, samples.stats))
    model.load_state_dict(policy.engine.model.state_dict())
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.partition(".")[0] not in FROZEN)
    average = copy.deepcopy(model).eval()
    learned = [p for p in model.parameters() if p.requires_grad]
    kept = [p for p in average.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(learned, lr=rate, betas=(0.9, 0.95), weight_decay=0.01, fused=True)
    rng, noise = np.random.default_rng(1), torch.Generator().manual_seed(1)
    began, step, losses, history = time.process_time(), 0, [], []
    while (spent := time.process_time() - began) < cpu_seconds:
        given, chunk, committed, known = samples.draw(rng, rows)
        loss = loss_of(model, prefix_of(model, *given), chunk, committed, known, draws, noise)
        loss.backward()
        nn.utils.clip_grad_norm_(learned, 1.0)
        progress = spent / cpu_seconds
        optimizer.param_groups[0]["lr"] = rate * min(1.0, (step + 1) / 100, 2 * (1 - progress))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        with torch.no_grad():
            torch._foreach_lerp_(kept, learned, 1 - min(0.998, (1 + step) / (10 + step)))
        losses.append(float(loss.detach()))
        if step % 100 == 0:
            history.append({"step": step, "cpu_seconds": round(spent, 1), "flow": float(np.mean(losses))})
            losses = []
            log.info("%s", json.dumps(history[-1]))
    write_weights(out / "checkpoint", model, average.state_dict())
    record = {
        "cpu_seconds": cpu_seconds,
        "rows": rows,
        "draws": draws,
        "learning_rate": rate,
        "history": history,
    }
    (out / "log.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    convert(
        out / "checkpoint",
        out / f"{design.name}.gguf",
        vlm=out / "checkpoint" / "vlm",
        name=design.name,
        control_hz=design.control_hz,
        motion=design.motion,
        vectors=design.vectors,
        settings={"committed_rows": str(COMMITTED)},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cpu-seconds", type=float, default=600)
    parser.add_argument("--episodes", type=int, default=1600)
    parser.add_argument("--driven", type=int, default=0, help="episodes in which the policy drives late")
    parser.add_argument("--rows", type=int, default=48)
    parser.add_argument("--draws", type=int, default=4)
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    parser.add_argument("--start", type=Path, default=ASSETS / "blocks.gguf", help="the bundle to go on from")
    parser.add_argument("--out", type=Path, default=Path("runs/blocks-rtc"))
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    demos = args.out / "demos"
    if not (demos / "frames.npz").exists():
        record_shard(demos, FIRST_EPISODE, args.episodes)
    policy = load(args.start, engine="eager")
    folders = [demos]
    if args.driven:
        folders.append(args.out / "driven")
        if not (folders[-1] / "frames.npz").exists():
            driver = load(args.start, engine="plan", threads=1)
            record_driven(folders[-1], driver, FIRST_EPISODE + args.episodes, args.driven, COMMITTED)
    samples = Samples(folders, statistics_of(policy))
    train(policy, samples, args.out, args.cpu_seconds, args.rows, args.draws, args.learning_rate)


if __name__ == "__main__":
    main()
