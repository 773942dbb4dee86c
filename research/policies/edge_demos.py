"""What an edge adapter learns from: frames with the expert's action, and the policy's chunks for some of them.

The first part are demonstrations with disturbances: of research/policies/committed_demos.py, and of the pen in every
slot, as a camera sees it. The second part, of blocks alone, is what happens when an adapter drives (DAgger, Ross et
al. 2011): episodes of the runtime's own controller under injected delays, with what the expert would have done at
every step. A late chunk is paired with a later frame of its episode when it is drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from sinew_eval.episodes.adapters import make_env
from sinew_eval.episodes.runner import EpisodeSettings, run_episode
from sinew_eval.episodes.settings import Latency
from sinew_eval.sim import pen
from sinew_eval.sim.blocks_expert import act
from sinew_eval.sim.prompts import COLORS, PHRASINGS, SIDES, instruction
from sinew_eval.training.shard import Shard, ShardWriter

from benchmarks.handovers import draw_when_asked
from benchmarks.side_by_side import SideBySide
from research.policies.blocks_demos import FIRST_SEED
from research.policies.pen_demos import facts, played
from sinew.policy import Policy

ASKED = 8  # frames of an episode that get a chunk, its first one among them
BATCH = 32
CHUNKS = "chunks.npz"
DELAYS = (4, 10, 20, 40, 100)  # control steps, of the episodes that an adapter drives
LIMIT = 150  # control steps of such an episode after its first chunk


class _Asking:
    """A policy of the evaluator that remembers its last answer."""

    def __init__(self, policy: SideBySide):
        self._policy, self.motion, self.served = policy, policy.motion, policy.served
        self.chunk_size, self.committed_rows = policy.chunk_size, policy.committed_rows
        self.last = np.zeros(0, np.float32)

    def start(self, env: Any) -> None:
        """Do nothing: policies have no memory between chunks."""

    def infer(self, observation: Mapping[str, Any], seed: int) -> tuple[np.ndarray, float]:
        self.last, took = self._policy.infer(observation, seed)
        return self.last, took

    def close(self) -> None:
        """Do nothing: there is nothing to close."""


def record_pen(folder: Path, first: int, episodes: int) -> None:
    """Write what the camera of the environment has seen by every slot, and what the expert does in it.

    Each is a run of its own: some episodes are played wrong, and then what follows is not the label's consequence.
    """
    writer, env = ShardWriter(folder), pen.PenEnv()
    for seed in range(FIRST_SEED + first, FIRST_SEED + first + episodes):
        for seen in played(env, seed, np.random.default_rng(seed)):
            images = np.stack([seen["images"][name] for name in env.cameras])
            writer.add(images, seed, state=seen["state"], action=pen.act(env), facts=facts(env))
            writer.end_run()
    writer.close()


def said(shard: Shard, frame: int) -> str:
    """Return the instruction of a frame of the blocks."""
    color, side, phrasing = (int(shard[name][frame]) for name in ("color", "side", "phrasing"))
    return instruction(COLORS[color], SIDES[side], PHRASINGS[phrasing])


def record_chunks(
    folder: Path, policy: Policy, cameras: tuple[str, ...], prompt: Callable[[Shard, int], str]
) -> None:
    """Ask the policy about some frames of each episode; write which ("frames" [N]) and "chunks" float32 [N, H, A]."""
    shard, rng = Shard(folder), np.random.default_rng(0)
    frames: list[int] = []
    for episode in np.unique(shard.episode):
        own = np.nonzero(shard.episode == episode)[0]
        others = rng.permutation(own[1:])[: ASKED - 1]
        frames += [int(own[0]), *sorted(others.tolist())]
    together, found = SideBySide(policy), []
    for begin in range(0, len(frames), BATCH):
        asked = []
        for i in frames[begin : begin + BATCH]:
            images = dict(zip(cameras, np.array(shard.images[i]), strict=True))
            observation = {
                "images": images,
                "state": shard["state"][i],
                "prompt": prompt(shard, i),
                "seed": i,
            }
            asked.append(policy.prepare(observation))
        found += together.batch(asked)
    np.savez(folder / CHUNKS, frames=np.array(frames), chunks=np.stack(found).astype(np.float32))


def record_driven(
    folder: Path, policy: Policy, adapter: Path, first: int, episodes: int, width: int = 25
) -> None:
    """Write what an adapter meets when it drives, in the same form, with the chunks that it was given."""
    together, found = SideBySide(policy), {}

    def play(seed: int) -> None:
        rng = np.random.default_rng(seed)
        delay, shoved = int(rng.choice(DELAYS)), bool(rng.random() < 0.4)
        options = {"max_episode_steps": LIMIT + delay}
        env, adapter_of_env = make_env(
            "sinew/BlocksShove-v0" if shoved else "sinew/Blocks-v0", env_options=options
        )
        draw_when_asked(env)
        base: Any = env.unwrapped
        steps: list[dict[str, Any]] = []
        asking = _Asking(together)

        def watch(_: int, observation: dict[str, Any], asks: bool) -> None:
            world = base.world()
            facts = {
                "state": np.array(observation["state"]),
                "blocks": world.blocks.reshape(-1),
                "color": float(world.color),
                "side": float(world.side),
                "phrasing": float(base.phrasing),
            }
            if steps and not asks and all(np.array_equal(steps[-1][name], facts[name]) for name in facts):
                return  # it stands still and waits
            images = np.stack([np.asarray(observation["images"][name]) for name in base.cameras])
            asked = {"chunk": asking.last} if asks else {}
            steps.append({"images": images, "action": act(world), **facts, **asked})

        conduct = EpisodeSettings(8, Latency(str(delay)), "aligned", edge_adapter=str(adapter))
        run_episode(env, adapter_of_env, asking, conduct, seed, watch)
        found[seed] = steps

    together.play(play, range(FIRST_SEED + first, FIRST_SEED + first + episodes), width)
    writer, frames, chunks = ShardWriter(folder), [], []
    for seed, steps in sorted(found.items()):
        for values in steps:
            if (chunk := values.pop("chunk", None)) is not None:
                frames.append(len(writer.episode))
                chunks.append(chunk)
            writer.add(values.pop("images"), seed, **values, scene=0.0)
            writer.end_run()  # the next label is of where the adapter went, not of where this one leads
    writer.close()
    np.savez(folder / CHUNKS, frames=np.array(frames), chunks=np.stack(chunks).astype(np.float32))
