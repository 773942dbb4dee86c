"""Play closed-loop episodes with a model during training: many environments, one batched inference at a time.

The noise depends only on (seed, number of the chunk), so that two models get the same random numbers. These results
are for the learning curve. Final numbers come from the exported bundle in the runtime.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import gymnasium
import numpy as np
import torch
from sinew.families.smolvla.model import SmolVLA
from sinew.models.solvers import solve
from tokenizers import Tokenizer

from sinew_eval.training.checkpoint import PAD, Statistics


@dataclass(frozen=True)
class Episode:
    seed: int
    task: str
    success: bool
    steps: int


class Actor:
    """Computes action chunks for a batch of observations, with the same processing as the runtime.

    Args:
        model: The model.
        stats: Statistics of state and action.
        tokenizer: The tokenizer.
        cameras: Names of the cameras.
        solver_steps: Number of solver steps.
    """

    def __init__(
        self,
        model: SmolVLA,
        stats: Statistics,
        tokenizer: Tokenizer,
        cameras: Sequence[str],
        solver_steps: int = 10,
    ):
        self.model, self.stats, self.tokenizer, self.cameras = model, stats, tokenizer, cameras
        self.solver_steps = solver_steps
        self.shape = (model.config.chunk_size, model.config.max_action_dim)

    @torch.inference_mode()
    def chunks(self, observations: list[dict[str, Any]], noise: np.ndarray) -> np.ndarray:
        """Compute chunks.

        Args:
            observations: N observations.
            noise: float32 [N, H, A].

        Returns:
            Actions in robot units, float32 [N, H, A].
        """
        pixels = np.stack([np.stack([o["images"][c] for c in self.cameras]) for o in observations])
        tokens, mask = encode(self.tokenizer, [o["prompt"] for o in observations])
        state = normalised(np.stack([o["state"] for o in observations]), self.stats["observation.state"])
        cameras = torch.ones(pixels.shape[:2], dtype=torch.bool)
        image_tokens = self.model.embed_images(to_pixels(pixels))
        model, steps = self.model, self.solver_steps
        context = model.read(image_tokens, cameras, tokens, mask, torch.from_numpy(state))
        evaluations = model.solver.steps(steps), model.time_embeddings(steps)
        x = solve(lambda x, m: model.act(x, m, context), torch.from_numpy(noise), *evaluations)
        return x.numpy() * self.stats["action"]["std"] + self.stats["action"]["mean"]


def to_pixels(images: np.ndarray) -> torch.Tensor:
    """Convert uint8 [B, V, size, size, 3] to float32 [B, V, 3, size, size] in [-1, 1]."""
    return torch.from_numpy(images).permute(0, 1, 4, 2, 3).float().div_(127.5).sub_(1.0)


def encode(tokenizer: Tokenizer, prompts: Sequence[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokenise prompts.

    Args:
        tokenizer: The tokenizer.
        prompts: B prompts.

    Returns:
        Token ids int64 [B, L], padded on the right to the longest prompt, and the mask of real tokens.
    """
    ids = [tokenizer.encode(p + "\n").ids for p in prompts]
    length = max(map(len, ids))
    padding = tokenizer.token_to_id(PAD)
    assert padding is not None
    tokens = torch.full((len(ids), length), padding, dtype=torch.int64)
    for row, values in enumerate(ids):
        tokens[row, : len(values)] = torch.tensor(values)
    return tokens, torch.arange(length) < torch.tensor([len(i) for i in ids])[:, None]


def normalised(values: np.ndarray, stats: dict[str, np.ndarray]) -> np.ndarray:
    return ((values - stats["mean"]) / (stats["std"] + 1e-8)).astype(np.float32)


class Chunks(Protocol):
    """Interface of a policy for :func:`run_episodes`.

    Attributes:
        shape: Shape of a chunk, (H, A).
    """

    shape: tuple[int, int]

    def chunks(self, observations: list[dict[str, Any]], noise: np.ndarray) -> np.ndarray:
        """Compute chunks.

        Args:
            observations: N observations.
            noise: float32 [N, H, A].

        Returns:
            Actions in robot units, float32 [N, H, A].
        """


def run_episodes(
    actor: Chunks,
    make_env: Callable[[], gymnasium.Env],
    seeds: Sequence[int],
    replan: int,
    options: Callable[[int], dict[str, Any] | None] = lambda _: None,
) -> list[Episode]:
    """Play one episode per seed, all at the same time.

    Args:
        actor: The policy.
        make_env: Makes an environment.
        seeds: Seeds of the episodes.
        replan: Number of actions executed per chunk.
        options: Returns the reset options for a seed.

    Returns:
        The episodes, in the order of the seeds.
    """
    envs = [make_env() for _ in seeds]
    moments = [env.reset(seed=s, options=options(s)) for env, s in zip(envs, seeds, strict=True)]
    steps = [0] * len(envs)
    finished: dict[int, Episode] = {}
    replans = 0
    while len(finished) < len(envs):
        live = [i for i in range(len(envs)) if i not in finished]
        noise = [
            np.random.default_rng([seeds[i], replans]).standard_normal(actor.shape, np.float32) for i in live
        ]
        chunks = actor.chunks([moments[i][0] for i in live], np.stack(noise))
        replans += 1
        for i, chunk in zip(live, chunks, strict=True):
            # A chunk begins at the time of its frame, so skip the actions for the time that has passed since the frame.
            world: Any = envs[i].unwrapped
            age = round(moments[i][1].get("frame_age", 0.0) * world.control_hz)
            for action in chunk[age : age + replan]:
                observation, _, done, timeout, info = envs[i].step(
                    np.clip(action, world.action_space.low, world.action_space.high)
                )
                moments[i] = (observation, info)
                steps[i] += 1
                if done or timeout:
                    finished[i] = Episode(seeds[i], info["task"], bool(info["is_success"]), steps[i])
                    break
    return [finished[i] for i in range(len(envs))]
