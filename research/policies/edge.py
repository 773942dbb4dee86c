"""Train the edge adapter of a task: ``python -m research.policies.edge --task blocks --episodes 450 --cpu-seconds
165``.

Stages, each skipped when its output is there: demonstrations, the policy's chunks for some of their frames, training.
With ``--driven N`` half of the time goes to a second one, on N episodes beside them that the first adapter drives under
injected delays (research/policies/edge_demos.py); for blocks alone. The packaged adapters were made without.
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
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from sinew_client.control.adapter import Adapter
from sinew_client.control.adapter_file import CameraEncoder, Form, write
from sinew_eval.sim.pen import CONTROL_HZ, PROMPT
from sinew_eval.training.rollout import to_pixels
from sinew_eval.training.shard import Shard
from torch import Tensor, nn

from benchmarks.handovers import OFFSETS
from research.policies.blocks_demos import HOLD
from research.policies.committed_demos import record_shard
from research.policies.edge_demos import CHUNKS, record_chunks, record_driven, record_pen, said
from research.policies.pen_demos import SLOTS
from sinew.policy import load

log = logging.getLogger("train")
ASSETS = Path(__file__).parents[2] / "sinew" / "assets"


@dataclass(frozen=True)
class Task:
    """What differs between tasks. form: of the adapter, whose policy is the packaged one of that name.

    width: of the network. channels: of each convolution, with its kernel. record: writes demonstrations (folder, first
    seed, episodes). prompt: instruction of a frame. things: of the auxiliary output that only training reads, where
    they are in so many numbers, and how to read them [B, things] of a shard's frames [B]. goals: number of choices of
    each field of a shard that the chunk has to tell; frames are paired within one goal. waited: share of pairs between
    which the robot also stood still for a while, as it does before a first chunk. hold: what the expert does after the
    end, [A]. driven: records what an adapter meets when it drives, where that is known.
    """

    form: Form
    width: int
    channels: tuple[tuple[int, int], ...]
    record: Callable[[Path, int, int], None]
    prompt: Callable[[Shard, int], str]
    things: int
    where: Callable[[Shard, np.ndarray], np.ndarray]
    hold: np.ndarray
    goals: Mapping[str, int] = field(default_factory=dict)
    waited: float = 0.0
    driven: Callable[..., None] | None = None


def from_hand(shard: Shard, frames: np.ndarray) -> np.ndarray:
    """Return where the three blocks are from the hand, in tenths of a metre: [B, 9]."""
    blocks = shard["blocks"].reshape(-1, 3, 3)[frames] - shard["state"][frames, None, :3]
    return blocks.reshape(-1, 9) / 0.1


def eyes(*names: str) -> list[CameraEncoder]:
    """Return cameras with frames of 64 x 64 pixels, of which a first convolution makes 16 x 16."""
    return [CameraEncoder(name, 64, 64, [4, 1]) for name in names]


TASKS = {
    "blocks": Task(
        Form("blocks", 20, 32, 4, 4, 8, 240, 2, eyes("front", "wrist"), OFFSETS),
        width=160,
        channels=((16, 8), (24, 3)),
        record=record_shard,
        prompt=said,
        things=9,
        where=from_hand,
        hold=HOLD,
        goals={"color": 3, "side": 2},
        waited=0.5,
        driven=record_driven,
    ),
    "pen": Task(  # one row: the jaws are told in every slot, and the world does not wait
        Form("pen", CONTROL_HZ, SLOTS, 1, 1, 1, 120, 2, eyes("now", "previous"), {"kind": "absolute"}),
        width=64,
        channels=((8, 8), (16, 3)),
        record=record_pen,
        prompt=lambda *_: PROMPT,
        things=3,
        where=lambda shard, frames: shard["facts"][frames],
        hold=np.ones(1, np.float32),
    ),
}
FIRST_EPISODE = 60_000  # other seeds than those of the policies
DRIVEN_EPISODE = 70_000
TOGETHER, FRAMES = 16, 20  # episodes of a batch, and frames of each beside those with chunks
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
    where things are, and which goal is meant."""

    def __init__(self, task: Task):
        super().__init__()
        self.form = form = task.form
        width = task.width
        self.camera = nn.ModuleDict()
        for eye in form.cameras:
            layers, channels = nn.ModuleList(), 3
            for stride, (out, kernel) in zip(eye.strides, task.channels, strict=True):
                layers.append(nn.Conv2d(channels, out, kernel, stride, padding=(kernel - 1) // 2))
                channels = out
            self.camera[eye.name] = layers
        self.features = 3 * task.channels[-1][0] * len(form.cameras)
        self.input = nn.Linear(form.chunk * form.action + 2 * form.state + 1 + 2 * self.features, width)
        self.block = nn.ModuleList(
            nn.ModuleDict({"norm": nn.LayerNorm(width), "linear": nn.Linear(width, width)})
            for _ in range(form.blocks)
        )
        self.output = Output(width, form.rows * form.action)
        self.where = nn.Linear(self.features, task.things)
        self.meant = nn.ModuleDict({name: nn.Linear(width, count) for name, count in task.goals.items()})

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
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return rows [B, R, A], normalised, and goals [B, choices]; rows [B, H, A], states [B, 2 S], late [B, 1]."""
        x = self.input(torch.cat([rows.flatten(1), states, late, then, now], 1)).relu()
        for block in self.block:
            x = x + block["linear"](block["norm"](x)).relu()
        rows = self.output(x).view(-1, self.form.rows, self.form.action)
        return rows, {name: layer(x) for name, layer in self.meant.items()}


Statistics = dict[str, tuple[np.ndarray, np.ndarray]]  # mean and standard deviation by name


@dataclass
class Pairs:
    """Indices into the frames of a batch: those that have a chunk, and the later ones that are paired with them."""

    then: np.ndarray
    now: np.ndarray


class Data:
    """Shards with chunks. Statistics are those of the first one."""

    def __init__(self, task: Task, folders: list[Path]):
        self.task = task
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
        rows = np.stack([self.chunks[part][frame] for frame in then.tolist()]).astype(np.float32)
        motion, state = self.task.form.motion, self.shards[part]["state"]
        if motion["kind"] == "offsets":
            columns = list(motion["action"])
            moved = motion["scale"] * np.cumsum(rows[..., columns], axis=1)
            rows[..., columns] = moved + (state[then] - state[now])[:, None, motion["state"]]
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
            paired = (own[:, None] <= own) & (np.arange(len(own)) < len(asked))[:, None]
            for goal in self.task.goals:
                paired &= shard[goal][own, None] == shard[goal][own]
            then, now = np.nonzero(paired)
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
    shard, form, task = data.shards[part], network.form, data.task
    then, now = frames[pairs.then], frames[pairs.now]
    order = np.argsort(frames)
    images = np.empty((len(frames), *shard.images.shape[1:]), np.uint8)
    images[order] = shard.images[frames[order]]
    features = network.see(to_pixels(images))

    def normal(name: str, values: np.ndarray) -> Tensor:
        mean, std = data.stats[name]
        return torch.from_numpy(((values - mean) / std).astype(np.float32))

    waited = np.where(rng.random(len(now)) < task.waited, rng.integers(0, 160, len(now)), 0)
    late = np.minimum(now - then + waited, form.max_age) / form.max_age
    states = torch.cat([normal("state", shard["state"][then]), normal("state", shard["state"][now])], 1)
    rows, meant = network(
        normal("rows", data.rebased(part, then, now)),
        states,
        torch.from_numpy(late.astype(np.float32))[:, None],
        features[pairs.then],
        features[pairs.now],
    )
    wanted, known = shard.chunks(now, form.rows, task.hold)
    weight = torch.from_numpy(known * np.where(np.arange(form.rows) == 0, 1.0, LATER_ROWS)).float()
    error = nn.functional.smooth_l1_loss(rows, normal("action", wanted), reduction="none", beta=0.3).mean(-1)
    acting = (error * weight).sum() / weight.sum()
    things = torch.from_numpy(task.where(shard, frames).astype(np.float32))
    where = nn.functional.smooth_l1_loss(network.where(features), things)
    which = torch.zeros(())
    for name, choice in meant.items():
        which = which + nn.functional.cross_entropy(
            choice, torch.from_numpy(shard[name][then].astype(np.int64))
        )
    first = float(error[:, 0].detach().mean())
    told = {"first_row": first, "where": float(where.detach()), "which": float(which.detach())}
    return acting + 0.3 * where + 0.05 * which, told


def train(
    data: Data, cpu_seconds: float, out: Path, rate: float, start: dict[str, Tensor] | None
) -> dict[str, Tensor]:
    """Train for so many CPU seconds; write the averaged weights as an adapter; return them."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
    network = Network(data.task)
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
    parser.add_argument("--task", default="blocks", choices=TASKS)
    parser.add_argument("--cpu-seconds", type=float, default=165, help="of all training")
    parser.add_argument("--episodes", type=int, default=450, help="of demonstrations")
    parser.add_argument("--driven", type=int, default=0, help="episodes that the first adapter drives")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--policy", type=Path, help="else the packaged one of the task")
    parser.add_argument("--out", type=Path, help="else runs/edge/TASK")
    args = parser.parse_args()
    task = TASKS[args.task]
    if args.driven and task.driven is None:
        parser.error(f"--driven: expected blocks, got {args.task}")
    args.out = args.out or Path("runs/edge") / args.task
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    demos, driven = args.out / "demos", args.out / "driven"
    first, second = args.out / "first.safetensors", args.out / f"{args.task}-edge.safetensors"
    torch.set_num_threads(1)
    policy = load(str(args.policy or ASSETS / f"{args.task}.gguf"), "cpu", engine="plan", threads=1)
    clock = time.process_time

    if not (demos / "frames.npz").exists():
        task.record(demos, FIRST_EPISODE, args.episodes)
        log.info("demonstrations: %.0f CPU seconds so far", clock())
    if not (demos / CHUNKS).exists():
        record_chunks(demos, policy, tuple(eye.name for eye in task.form.cameras), task.prompt)
        log.info("chunks: %.0f CPU seconds so far", clock())
    if task.driven is None or not args.driven:
        if not second.exists():
            train(Data(task, [demos]), args.cpu_seconds, second, args.learning_rate, None)
        return
    weights = args.out / "first.pt"
    if not first.exists():
        torch.save(train(Data(task, [demos]), args.cpu_seconds / 2, first, args.learning_rate, None), weights)
    if not (driven / CHUNKS).exists():
        task.driven(driven, policy, first, DRIVEN_EPISODE, args.driven)
        log.info("driven: %.0f CPU seconds so far", clock())
    if not second.exists():
        start = torch.load(weights, weights_only=True)
        train(Data(task, [demos, driven]), args.cpu_seconds / 2, second, args.learning_rate / 2, start)
    log.info("done: %.0f CPU seconds", clock())


if __name__ == "__main__":
    main()
