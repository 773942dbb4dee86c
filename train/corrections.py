"""Learn from corrections: ``python -m train.corrections runs/fixes --cpu-seconds 600``, a data set of
``sinew dataset FRAMES runs/fixes --corrections``.

What is shown with it is a camera that somebody has bumped (:class:`Bumped`): the policy of the blocks task, which was
trained with another one, misses; an expert takes over where an episode takes too long (DAgger, Ross, Gordon and Bagnell
2011: the learner acts, the expert says what is right in the states that it leads to), and the policy goes on learning
on what the expert did. Every weight learns; the loss is that of its first training (``train/objective.py``) without the
auxiliary outputs, which no data set has.
"""

from __future__ import annotations

import argparse
import copy
import io
import json
import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sinew.convert import convert
from sinew.eval.adapters import Direct, make_env
from sinew.eval.robot import SimulatedRobot
from sinew.families.smolvla.model import SmolVLA
from sinew.layers.attention import block_mask
from sinew.models.expert import Prefix
from sinew.policy import Policy, load
from train.blocks import DESIGN
from train.blocks_demos import HOLD
from train.checkpoint import Statistics, build_tokenizer, write_configs, write_weights
from train.committed import ASSETS, loss_of, statistics_of
from train.rollout import encode, normalised, to_pixels

log = logging.getLogger("train")
BUMP = 24  # pixels of 64 by which the wrist camera's picture is moved
NAME = "blocks-corrected"


class Bumped(Direct):
    """The blocks task through a wrist camera that looks elsewhere: its picture moved to the right, edge repeated."""

    def observation(self, raw: Any) -> dict[str, Any]:
        """Return the environment's observation with the wrist camera's frame moved."""
        seen = super().observation(raw)
        wrist = np.asarray(seen["images"]["wrist"])
        moved = np.concatenate([np.repeat(wrist[:, :1], BUMP, axis=1), wrist[:, :-BUMP]], axis=1)
        return {**seen, "images": {**seen["images"], "wrist": moved}}


class BumpedRobot(SimulatedRobot):
    """The same as a robot of ``sinew run``."""

    def __init__(self, episodes: int, seed: int = 700_000):
        env, _ = make_env("sinew/Blocks-v0")
        super().__init__(env, Bumped(env), episodes, seed)
        self.hz = self.adapter.control_hz


class Corrections:
    """The frames of a LeRobot data set as Sinew writes them: pictures, states, actions and where episodes end."""

    def __init__(self, folder: Path):
        import pyarrow.parquet
        from PIL import Image

        rows: list[Mapping[str, Any]] = []
        for path in sorted(folder.glob("data/chunk-*/file-*.parquet")):
            rows += pyarrow.parquet.read_table(path).to_pylist()
        tasks = pyarrow.parquet.read_table(folder / "meta" / "tasks.parquet").to_pylist()
        names = {row["task_index"]: row["__index_level_0__"] for row in tasks}

        def picture(cell: Mapping[str, Any]) -> np.ndarray:
            return np.asarray(Image.open(io.BytesIO(cell["bytes"])).convert("RGB"))

        keys = [f"observation.images.{camera}" for camera in DESIGN.cameras]
        self.images = np.stack([np.stack([picture(row[key]) for key in keys]) for row in rows])
        self.state = np.array([row["observation.state"] for row in rows], np.float32)
        self.action = np.array([row["action"] for row in rows], np.float32)
        self.prompts = [names[row["task_index"]] for row in rows]
        self.episode = np.array([row["episode_index"] for row in rows])
        self.episodes = len(set(self.episode.tolist()))

    def __len__(self) -> int:
        return len(self.episode)

    def chunks(self, frames: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Return actions float32 [B, length, A] from ``frames`` on, and which are known, bool [B, length]: those of the
        same episode."""
        index = frames[:, None] + np.arange(length)
        inside = np.minimum(index, len(self) - 1)
        same = (index < len(self)) & (self.episode[inside] == self.episode[frames][:, None])
        return np.where(same[..., None], self.action[inside], HOLD).astype(np.float32), same


def prefix_of(model: SmolVLA, pixels: Tensor, tokens: Tensor, mask: Tensor, state: Tensor) -> Prefix:
    """Return what the head reads, through all of which gradients go."""
    cameras = torch.ones(pixels.shape[:2], dtype=torch.bool)
    x, valid, opens_block = model.embed_prefix(model.embed_images(pixels), cameras, tokens, mask, state)
    _, cache = model.language(x, valid.long().cumsum(dim=1) - 1, block_mask(valid, opens_block))
    return Prefix(kv=model.expert_kv(cache), valid=valid, length=valid.sum(dim=1))


def train(
    policy: Policy, found: Corrections, out: Path, cpu_seconds: float, rows: int, draws: int, rate: float
) -> None:
    """Go on training for ``cpu_seconds`` and write the averaged weights as a bundle into ``out``."""
    torch.set_num_threads(1)
    stats: Statistics = statistics_of(policy)
    design = replace(DESIGN, name=NAME)
    model = SmolVLA(write_configs(out / "checkpoint", design, stats))
    model.load_state_dict(policy.engine.model.state_dict())
    average = copy.deepcopy(model).eval()
    tokenizer = build_tokenizer(design.words)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.01)
    rng, noise = np.random.default_rng(1), torch.Generator().manual_seed(1)
    began, step, losses, history = time.process_time(), 0, [], []
    while (spent := time.process_time() - began) < cpu_seconds:
        frames = rng.integers(len(found), size=rows)
        chunk, known = found.chunks(frames, design.chunk_size)
        tokens, mask = encode(tokenizer, [found.prompts[at] for at in frames])
        state = torch.from_numpy(normalised(found.state[frames], stats["observation.state"]))
        prefix = prefix_of(model, to_pixels(found.images[frames]), tokens, mask, state)
        actions = torch.from_numpy(normalised(chunk, stats["action"]))
        nothing = torch.zeros(known.shape, dtype=torch.bool)
        loss = loss_of(model, prefix, actions, nothing, torch.from_numpy(known), draws, noise)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        progress = spent / cpu_seconds
        optimizer.param_groups[0]["lr"] = rate * min(1.0, (step + 1) / 50, 2 * (1 - progress))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        with torch.no_grad():
            weight = 1 - min(0.99, (1 + step) / (10 + step))
            torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), weight)
        losses.append(float(loss.detach()))
        if step % 50 == 0:
            history.append({"step": step, "cpu_seconds": round(spent, 1), "flow": float(np.mean(losses))})
            losses = []
            log.info("%s", json.dumps(history[-1]))
    write_weights(out / "checkpoint", model, average.state_dict())
    record = {"frames": len(found), "episodes": found.episodes, "steps": step, "history": history}
    (out / "log.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    convert(
        out / "checkpoint",
        out / f"{NAME}.gguf",
        vlm=out / "checkpoint" / "vlm",
        name=NAME,
        control_hz=design.control_hz,
        motion=design.motion,
        vectors=design.vectors,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dataset", type=Path, help="a LeRobot data set of corrections")
    parser.add_argument("--cpu-seconds", type=float, default=600)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--draws", type=int, default=3)
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--start", type=Path, default=ASSETS / "blocks.gguf", help="the bundle to go on from")
    parser.add_argument("--out", type=Path, default=Path("runs/blocks-corrected"))
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    found = Corrections(args.dataset)
    policy = load(args.start, engine="eager")
    train(policy, found, args.out, args.cpu_seconds, args.rows, args.draws, args.learning_rate)


if __name__ == "__main__":
    main()
