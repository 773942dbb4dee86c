"""Learn from corrections: ``python -m research.policies.corrections fixes/``.

What is shown with it is a camera that somebody has bumped (``sinew/BlocksBumped-v0``): the packaged ACT misses, an
expert takes over where an episode takes too long (DAgger, Ross, Gordon and Bagnell 2011), and all weights go on
learning on what the expert did. The loop, in a clone::

    E=research.policies.corrections:sinew/BlocksBumped-v0
    sinew run act --robot gym:$E --episodes 100 --handover freeze --replan 8 --takeover expert \\
        --set takeover_options='{"after": 60}' --frames frames/
    sinew recording dataset frames/ fixes/ --corrections --hz 20 --bundle act
    python -m research.policies.corrections fixes/
    python -m research.policies.corrections fixes/ --old-share 1 --out runs/control
    sinew eval runs/corrected/act.gguf --compare runs/control/act.gguf --compare act --env $E --replan 8 \\
        --episodes 100 --seed 20000

The control goes on for as many steps on the demonstrations of before, and sees no correction.
"""

from __future__ import annotations

import argparse
import io
import logging
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pyarrow.parquet
import torch
from PIL import Image
from sinew_eval.sim.blocks import BlocksEnv
from sinew_eval.training.checkpoint import Statistics
from sinew_eval.training.loop import Recipe, train
from sinew_eval.training.rollout import normalised, to_pixels
from torch import Tensor

from research.policies.act import CAMERAS, CONFIG, SIDE, ActBatch, ActTask, ready
from research.policies.blocks_demos import HOLD, record_shard
from sinew.families.act.model import ACT
from sinew.policy import Policy, load

ENV, BUMP = "sinew/BlocksBumped-v0", 8  # pixels of 96


class Bumped(BlocksEnv):
    """The blocks task through a front camera that looks elsewhere: its picture moved to the right, edge repeated."""

    def __init__(self, **options: Any):
        super().__init__(goal_in_state=True, image_size=SIDE, **options)

    def view(self, camera: str, size: int | None = None) -> np.ndarray:
        """Return a frame, uint8 [size, size, 3]."""
        seen = super().view(camera, size)
        if camera != "front":
            return seen
        return np.concatenate([np.repeat(seen[:, :1], BUMP, axis=1), seen[:, :-BUMP]], axis=1)


gymnasium.register(ENV, entry_point=Bumped, max_episode_steps=120)


class Corrections:
    """The frames of a LeRobot data set that ``sinew recording dataset`` wrote."""

    def __init__(self, folder: Path):
        rows: list[dict[str, Any]] = []
        for path in sorted(folder.glob("data/chunk-*/file-*.parquet")):
            rows += pyarrow.parquet.read_table(path).to_pylist()
        pictures = [[row[f"observation.images.{camera}"]["bytes"] for camera in CAMERAS] for row in rows]
        self.images = np.stack(
            [np.stack([np.array(Image.open(io.BytesIO(b))) for b in each]) for each in pictures]
        )
        self.state = np.array([row["observation.state"] for row in rows], np.float32)
        self.action = np.array([row["action"] for row in rows], np.float32)
        self.episode = np.array([row["episode_index"] for row in rows])

    def chunks(self, frames: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return actions float32 [B, H, A] from ``frames`` on, and bool [B, H]: known are those of one episode."""
        index = frames[:, None] + np.arange(CONFIG.chunk_size)
        inside = np.minimum(index, len(self.action) - 1)
        known = (index < len(self.action)) & (self.episode[inside] == self.episode[frames][:, None])
        return np.where(known[..., None], self.action[inside], HOLD).astype(np.float32), known


class CorrectedTask(ActTask):
    """Corrections beside demonstrations of before, from the weights of a bundle on. No data set says where blocks are,
    so auxiliary outputs weigh nothing."""

    def __init__(self, policy: Policy, corrections: Corrections, folders: list[Path], old_share: float):
        vectors = policy.bundle.manifest.processing
        own = {"observation.state": vectors.state_parts[0].normalization, "action": vectors.action}
        stats: Statistics = {
            key: {name: np.float32(value.stats[name]) for name in ("mean", "std")}
            for key, value in own.items()
        }
        super().__init__(folders, stats)
        self.policy, self.corrections, self.old_share = policy, corrections, old_share

    def model(self, folder: Path, seed: int) -> ACT:
        model = super().model(folder, seed)
        model.load_state_dict(
            {name: value.float() for name, value in self.policy.engine.model.state_dict().items()}
        )
        return model

    def batch(self, rng: np.random.Generator, rows: int, second_rows: int) -> ActBatch:
        old, found = super().batch(rng, round(self.old_share * rows), second_rows), self.corrections
        frames = rng.integers(len(found.action), size=rows - len(old.state))
        if not len(frames):
            return old
        chunk, known = found.chunks(frames)

        def both(before: Tensor, now: Tensor) -> Tensor:
            return torch.cat([before, now])

        return ActBatch(
            both(old.pixels, to_pixels(found.images[frames])),
            both(old.state, ready(found.state[frames], self.stats)),
            both(old.chunk, torch.from_numpy(normalised(chunk, self.stats["action"]))),
            both(old.known, torch.from_numpy(known)),
            both(old.auxiliary, torch.zeros(len(frames), self.auxiliary_outputs)),
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("dataset", type=Path, help="a LeRobot data set of corrections")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument(
        "--old-share", type=float, default=0.5, help="of a batch, of demonstrations of before"
    )
    parser.add_argument("--demos", type=int, default=200, help="demonstrations of before")
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--start", default="act", help="the bundle to go on from")
    parser.add_argument("--out", type=Path, default=Path("runs/corrected"))
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    args.out.mkdir(parents=True, exist_ok=True)
    demos = args.out / "demos"
    if not (demos / "frames.npz").exists():
        record_shard(demos, 0, args.demos, SIDE)
    (args.out / ".meet").unlink(missing_ok=True)
    task = CorrectedTask(load(args.start, engine="eager"), Corrections(args.dataset), [demos], args.old_share)
    recipe = Recipe(
        0.0,
        args.steps,
        rows=64,
        second_rows=0,
        learning_rate=args.learning_rate,
        auxiliary_weight=0.0,
        ranks=1,
        evaluations=0,
    )
    train(0, task, recipe, args.out)


if __name__ == "__main__":
    main()
