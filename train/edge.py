"""Train the edge adapter of the blocks task: ``python -m train.edge --episodes 450 --cpu-seconds 165``.

Stages, each skipped when its output is there: demonstrations, the policy's chunks for some of their frames, training.
With ``--driven N`` half of the time goes to a second one, on N episodes beside them that the first adapter drives under
injected delays (train/edge_demos.py). The packaged adapter was made without.
A draw is a frame that has a chunk and a later frame of its episode: the network sees the late chunk, re-based on the
later state, both frames and how late it is, and learns what the expert does in the later one. All of an episode's
frames in a batch are seen once and paired in every way.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from sinew_client.control.adapter import Adapter
from sinew_client.control.adapter_file import Eye, Form, write
from torch import Tensor, nn

from benchmarks.handovers import OFFSETS
from sinew.policy import load
from train.blocks_demos import HOLD
from train.committed_demos import record_shard
from train.edge_demos import CHUNKS, record_chunks, record_driven
from train.rollout import to_pixels
from train.shard import Shard

log = logging.getLogger("train")
ASSETS = Path(__file__).parents[1] / "sinew" / "assets"
FORM = Form(
    policy="blocks",
    hz=20,
    chunk=32,
    action=4,
    state=4,
    rows=8,
    max_age=240,
    blocks=2,
    cameras=[Eye("front", 64, 64, [4, 1]), Eye("wrist", 64, 64, [4, 1])],
    motion=OFFSETS,
)
WIDTH = 160
CHANNELS = ((16, 8), (24, 3))  # of each convolution, and its kernel
FIRST_EPISODE = 60_000  # other seeds than those of the policies
DRIVEN_EPISODE = 70_000
TOGETHER, FRAMES = 16, 20  # episodes of a batch, and frames of each beside those with chunks
WAITED = 0.5  # share of pairs between which the robot also stood still for a while, as it does before a first chunk
LATER_ROWS = 0.3  # weight of rows after the first


class Output(nn.Linear):
    """The last layer with its norm, under the names of the file."""

    def __init__(self, width: int, numbers: int):
        super().__init__(width, numbers)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


class Network(nn.Module):
    """The network of :class:`sinew_client.control.adapter.Adapter`, with auxiliary outputs that only training reads:
    where the three blocks are from the hand, which one is meant, and which bin."""

    def __init__(self, form: Form, width: int = WIDTH):
        super().__init__()
        self.form = form
        self.camera = nn.ModuleDict()
        for eye in form.cameras:
            layers, channels = nn.ModuleList(), 3
            for stride, (out, kernel) in zip(eye.strides, CHANNELS, strict=True):
                layers.append(nn.Conv2d(channels, out, kernel, stride, padding=(kernel - 1) // 2))
                channels = out
            self.camera[eye.name] = layers
        self.features = 3 * CHANNELS[-1][0] * len(form.cameras)
        self.input = nn.Linear(form.chunk * form.action + 2 * form.state + 1 + 2 * self.features, width)
        self.block = nn.ModuleList(
            nn.ModuleDict({"norm": nn.LayerNorm(width), "linear": nn.Linear(width, width)})
            for _ in range(form.blocks)
        )
        self.output = Output(width, form.rows * form.action)
        self.where = nn.Linear(self.features, 9)
        self.meant = nn.Linear(width, 5)

    def see(self, pixels: Tensor) -> Tensor:
        """pixels [B, V, 3, h, w] in [-1, 1] -> features [B, F]."""
        return torch.cat([self._points(eye.name, pixels[:, i]) for i, eye in enumerate(self.form.cameras)], 1)

    def _points(self, name: str, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.camera[name]):
            x = layer(x.relu() if i else x)
        share = x.flatten(2).softmax(-1).view_as(x)  # [B, C, h, w]
        across = share.sum(2) @ torch.linspace(-1, 1, x.shape[3])
        down = share.sum(3) @ torch.linspace(-1, 1, x.shape[2])
        return torch.cat([across, down, x.relu().mean((2, 3))], 1)

    def forward(
        self, rows: Tensor, states: Tensor, late: Tensor, then: Tensor, now: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return rows [B, R, A], normalised, and the auxiliary [B, 5]; rows [B, H, A], states [B, 2 S], late [B, 1]."""
        x = self.input(torch.cat([rows.flatten(1), states, late, then, now], 1)).relu()
        for block in self.block:
            x = x + block["linear"](block["norm"](x)).relu()
        return self.output(x).view(-1, self.form.rows, self.form.action), self.meant(x)


Statistics = dict[str, tuple[np.ndarray, np.ndarray]]  # mean and standard deviation by name


@dataclass
class Pairs:
    """Indices into the frames of a batch: those that have a chunk, and the later ones that are paired with them."""

    then: np.ndarray
    now: np.ndarray


class Data:
    """Shards with chunks. Statistics are those of the first one."""

    def __init__(self, folders: list[Path]):
        self.shards = [Shard(folder) for folder in folders]
        self.chunks, self.episodes = (
            [],
            [],
        )  # of each shard: frame -> chunk; [first frame, one after the last]
        for folder, shard in zip(folders, self.shards, strict=True):
            with np.load(folder / CHUNKS) as stored:
                self.chunks.append(dict(zip(stored["frames"].tolist(), stored["chunks"], strict=True)))
            starts = np.nonzero(np.diff(shard.episode, prepend=-1))[0]
            self.episodes.append(np.stack([starts, [*starts[1:], len(shard)]], axis=1))
        first = self.shards[0]
        given = {
            name: (first[key].mean(0), first[key].std(0))
            for name, key in (("state", "state"), ("action", "action"))
        }
        targets = np.concatenate(
            [self.rebased(0, np.array([f]), np.array([f]))[0] for f in list(self.chunks[0])[:500]]
        )
        given["rows"] = (targets.mean(0), targets.std(0))
        self.stats: Statistics = {
            name: (m.astype(np.float32), (s + 1e-3).astype(np.float32)) for name, (m, s) in given.items()
        }

    def rebased(self, part: int, then: np.ndarray, now: np.ndarray) -> np.ndarray:
        """Return chunks [P, H, A] of frames ``then``, as :meth:`Adapter.rebased` gives them for the states ``now``."""
        columns, state = list(OFFSETS["action"]), self.shards[part]["state"]
        rows = np.stack([self.chunks[part][frame] for frame in then.tolist()]).astype(np.float32)
        moved = OFFSETS["scale"] * np.cumsum(rows[..., columns], axis=1)
        rows[..., columns] = moved + (state[then] - state[now])[:, None, OFFSETS["state"]]
        return rows

    def draw(self, rng: np.random.Generator) -> tuple[int, np.ndarray, Pairs]:
        """Return a shard, frames of some of its episodes, and which of them are paired."""
        part = int(rng.choice(len(self.shards), p=self.share))
        shard, known = self.shards[part], self.chunks[part]
        frames: list[int] = []
        pairs = Pairs(np.zeros(0, int), np.zeros(0, int))
        for begin, end in self.episodes[part][rng.permutation(len(self.episodes[part]))[:TOGETHER]]:
            asked = [f for f in range(begin, end) if f in known]
            others = [f for f in rng.permutation(np.arange(begin, end))[:FRAMES].tolist() if f not in known]
            own = np.array(asked + others)
            goal = 2 * shard["color"][own] + shard["side"][own]
            then, now = np.nonzero(
                (own[:, None] <= own) & (goal[:, None] == goal) & (np.arange(len(own)) < len(asked))[:, None]
            )
            pairs = Pairs(np.append(pairs.then, then + len(frames)), np.append(pairs.now, now + len(frames)))
            frames += own.tolist()
        return part, np.array(frames), pairs

    @property
    def share(self) -> np.ndarray:
        """Return how often each shard is drawn: as often as it has frames."""
        lengths = np.array([len(shard) for shard in self.shards], float)
        return lengths / lengths.sum()


def loss_of(network: Network, data: Data, rng: np.random.Generator) -> tuple[Tensor, dict[str, float]]:
    """Return the loss of one batch, and its parts."""
    part, frames, pairs = data.draw(rng)
    shard, form = data.shards[part], network.form
    then, now = frames[pairs.then], frames[pairs.now]
    order = np.argsort(frames)
    images = np.empty((len(frames), *shard.images.shape[1:]), np.uint8)
    images[order] = shard.images[frames[order]]
    features = network.see(to_pixels(images))

    def normal(name: str, values: np.ndarray) -> Tensor:
        mean, std = data.stats[name]
        return torch.from_numpy(((values - mean) / std).astype(np.float32))

    waited = np.where(rng.random(len(now)) < WAITED, rng.integers(0, 160, len(now)), 0)
    late = np.minimum(now - then + waited, form.max_age) / form.max_age
    states = torch.cat([normal("state", shard["state"][then]), normal("state", shard["state"][now])], 1)
    rows, meant = network(
        normal("rows", data.rebased(part, then, now)),
        states,
        torch.from_numpy(late.astype(np.float32))[:, None],
        features[pairs.then],
        features[pairs.now],
    )
    wanted, known = shard.chunks(now, form.rows, HOLD)
    weight = torch.from_numpy(known * np.where(np.arange(form.rows) == 0, 1.0, LATER_ROWS)).float()
    error = nn.functional.smooth_l1_loss(rows, normal("action", wanted), reduction="none", beta=0.3).mean(-1)
    acting = (error * weight).sum() / weight.sum()
    blocks = (shard["blocks"].reshape(-1, 3, 3)[frames] - shard["state"][frames, None, :3]).reshape(
        -1, 9
    ) / 0.1
    where = nn.functional.smooth_l1_loss(network.where(features), torch.from_numpy(blocks.astype(np.float32)))
    color, side = (torch.from_numpy(shard[name][then].astype(np.int64)) for name in ("color", "side"))
    which = nn.functional.cross_entropy(meant[:, :3], color) + nn.functional.cross_entropy(meant[:, 3:], side)
    first = float(error[:, 0].detach().mean())
    told = {"first_row": first, "where": float(where.detach()), "which": float(which.detach())}
    return acting + 0.3 * where + 0.05 * which, told


def train(
    data: Data, cpu_seconds: float, out: Path, rate: float, start: dict[str, Tensor] | None
) -> dict[str, Tensor]:
    """Train for so many CPU seconds; write the averaged weights as an adapter; return them."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
    network = Network(FORM)
    if start is not None:
        network.load_state_dict(start)
    average = copy.deepcopy(network)
    optimizer = torch.optim.AdamW(network.parameters(), lr=rate, betas=(0.9, 0.98), weight_decay=0.01)
    rng, history, told = np.random.default_rng(1), [], []
    began, step = time.process_time(), 0
    while (spent := time.process_time() - began) < cpu_seconds:
        progress = spent / cpu_seconds
        optimizer.param_groups[0]["lr"] = rate * min(1.0, (step + 1) / 30, 1.25 * (1 - progress) + 0.01)
        loss, parts = loss_of(network, data, rng)
        loss.backward()
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        with torch.no_grad():
            torch._foreach_lerp_(
                list(average.parameters()),
                list(network.parameters()),
                1 - min(0.99, (1 + step) / (10 + step)),
            )
        told.append(parts)
        if step % 50 == 0:
            means = {name: round(float(np.mean([each[name] for each in told])), 4) for name in parts}
            history.append({"step": step, "cpu_seconds": round(spent, 1), **means})
            told = []
            log.info("%s", json.dumps(history[-1]))
    export(average, data.stats, out)
    record = {
        "cpu_seconds": cpu_seconds,
        "learning_rate": rate,
        "frames": [len(s) for s in data.shards],
        "history": history,
    }
    out.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return average.state_dict()


def export(network: Network, stats: Statistics, out: Path) -> None:
    """Write a network without its auxiliary outputs; reads back, or raises AdapterError."""
    tensors = {
        name: value.numpy()
        for name, value in network.state_dict().items()
        if not name.startswith(("where.", "meant."))
    }
    for name, (mean, std) in stats.items():
        tensors[f"{name}.mean"], tensors[f"{name}.std"] = mean, std
    write(out, network.form, tensors)
    Adapter.read(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cpu-seconds", type=float, default=165, help="of all training")
    parser.add_argument("--episodes", type=int, default=450, help="of demonstrations")
    parser.add_argument("--driven", type=int, default=0, help="episodes that the first adapter drives")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--policy", type=Path, default=ASSETS / "blocks.gguf")
    parser.add_argument("--out", type=Path, default=Path("runs/edge"))
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    demos, driven = args.out / "demos", args.out / "driven"
    first, second = args.out / "first.safetensors", args.out / "blocks-edge.safetensors"
    torch.set_num_threads(1)
    policy = load(str(args.policy), "cpu", engine="plan", threads=1)
    clock = time.process_time

    if not (demos / "frames.npz").exists():
        record_shard(demos, FIRST_EPISODE, args.episodes)
        log.info("demonstrations: %.0f CPU seconds so far", clock())
    if not (demos / CHUNKS).exists():
        record_chunks(demos, policy, tuple(eye.name for eye in FORM.cameras))
        log.info("chunks: %.0f CPU seconds so far", clock())
    if not args.driven:
        if not second.exists():
            train(Data([demos]), args.cpu_seconds, second, args.learning_rate, None)
        return
    weights = args.out / "first.pt"
    if not first.exists():
        torch.save(train(Data([demos]), args.cpu_seconds / 2, first, args.learning_rate, None), weights)
    if not (driven / CHUNKS).exists():
        record_driven(driven, policy, first, DRIVEN_EPISODE, args.driven)
        log.info("driven: %.0f CPU seconds so far", clock())
    if not second.exists():
        start = torch.load(weights, weights_only=True)
        train(Data([demos, driven]), args.cpu_seconds / 2, second, args.learning_rate / 2, start)
    log.info("done: %.0f CPU seconds", clock())


if __name__ == "__main__":
    main()
