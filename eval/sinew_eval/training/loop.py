"""The training loop: one single-threaded process per core, averaged gradients, and a budget in CPU-seconds.

On a shared machine, only a budget in CPU-seconds is fair. Two processes with one thread are faster than one process
with two threads, because the operations are too small to be split.
"""

from __future__ import annotations

import copy
import json
import logging
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from sinew.convert import convert
from sinew.families.smolvla.model import SmolVLA
from sinew_client.untrusted import read_json
from torch import Tensor, nn

from sinew_eval.training.checkpoint import Design, Statistics, build_tokenizer, write_configs, write_weights
from sinew_eval.training.curve import plot
from sinew_eval.training.half import use_half_products
from sinew_eval.training.objective import initialise
from sinew_eval.training.rollout import Actor, Episode

log = logging.getLogger("train")
# First seed of the validation episodes. Neither training nor the reported evaluation uses these seeds.
VALIDATION_SEED = 900_000


@dataclass(frozen=True)
class Recipe:
    """Settings of a training run. The learning rate warms up, stays constant, and then falls linearly to zero.

    Attributes:
        cpu_seconds: Budget in CPU-seconds of all processes together.
        steps: Budget in training steps. 0 to use ``cpu_seconds``. Runs that are compared use steps.
        rows: Number of observations per process and training step.
        second_rows: Number of these observations that also get a second, counterfactual instruction (one that the
            expert did not follow).
        draws: Number of noise samples for each observation.
        learning_rate: Largest learning rate.
        warm_up_steps: Steps until the learning rate reaches its maximum.
        decay_from: Share of the training budget (0 to 1) after which the learning rate falls.
        weight_decay: Weight decay of matrices.
        ema: Decay of the exponential moving average of the weights.
        clip: Largest norm of the gradient.
        auxiliary_weight: Weight of the auxiliary losses.
        seed: Seed of the weights, batches and noise.
        ranks: Number of processes.
        evaluations: Number of closed-loop evaluations (episodes in the simulator) during training. 0 if the simulator
            runs in another interpreter.
        episodes: Number of episodes for each process and evaluation.
    """

    cpu_seconds: float
    steps: int = 0
    rows: int = 32
    second_rows: int = 16
    draws: int = 3
    learning_rate: float = 1e-3
    warm_up_steps: int = 100
    decay_from: float = 0.5
    weight_decay: float = 0.01
    ema: float = 0.998
    clip: float = 1.0
    auxiliary_weight: float = 1.0
    seed: int = 0
    ranks: int = 2
    evaluations: int = 6
    episodes: int = 12


class Task(Protocol):
    """A task and the policy that learns it, as the training loop uses them.

    Attributes:
        auxiliary_outputs: Number of outputs of the auxiliary head.
        things: Number of objects that the auxiliary head on image tokens finds. 0 for no such head.
        objective: Class of the loss: ``Objective``, or a class with the same constructor.
    """

    auxiliary_outputs: int
    things: int
    objective: type[nn.Module]

    def model(self, folder: Path, seed: int) -> nn.Module:
        """Build the policy at the beginning of the training.

        Args:
            folder: Folder for the files from which the policy is built.
            seed: Seed of the weights.
        """

    def write(self, folder: Path, model: nn.Module, state: dict[str, Tensor]) -> None:
        """Write the checkpoint of a policy.

        Args:
            folder: Folder of the checkpoint.
            model: The policy.
            state: Weights to write instead of the policy's own.
        """

    def batch(self, rng: np.random.Generator, rows: int, second_rows: int) -> Any: ...

    def evaluate(self, model: nn.Module, seeds: Sequence[int]) -> list[Episode]: ...


class SmolVLATask:
    """A task that a small SmolVLA learns.

    Attributes:
        design: Sizes of the policy.
        stats: Statistics of state and action.
    """

    design: Design
    stats: Statistics

    def model(self, folder: Path, seed: int) -> SmolVLA:
        model = SmolVLA(write_configs(folder, self.design, self.stats))
        initialise(model, seed)
        return model

    def write(self, folder: Path, model: SmolVLA, state: dict[str, Tensor]) -> None:
        write_configs(folder, self.design, self.stats)
        write_weights(folder, model, state)

    def actor(self, model: SmolVLA) -> Actor:
        return Actor(model, self.stats, build_tokenizer(self.design.words), self.design.cameras)


def train(rank: int, task: Task, recipe: Recipe, out: Path, start: Path | None = None) -> None:
    """Run one process of a training run.

    Args:
        rank: Number of this process.
        task: The task.
        recipe: Settings of the run.
        out: Folder of the run.
        start: File of a training state to begin with. None for random weights.
    """
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{out.resolve()}/.meet", rank=rank, world_size=recipe.ranks
    )
    model = task.model(out / f".rank{rank}", recipe.seed)
    torch.manual_seed(recipe.seed)
    objective = task.objective(
        model, task.auxiliary_outputs, task.things, recipe.draws, recipe.auxiliary_weight
    )
    if start:
        weights = torch.load(start, weights_only=True)  # own file: named by the person at this machine
        objective.load_state_dict(weights, strict=False)
    # Copy the model before its matrix products change to bfloat16, so that the copy computes in float32.
    average = copy.deepcopy(model).eval()
    log.info("%s", use_half_products(model))
    optimizer = torch.optim.AdamW(_groups(objective, recipe), betas=(0.9, 0.95), fused=True)
    rng = np.random.default_rng([recipe.seed, rank])
    noise = torch.Generator().manual_seed(recipe.seed * 1000 + rank)
    history: list[dict[str, float]] = []
    began, step, spent, evaluated, shown = time.process_time(), 0, 0.0, 0, 0.0
    progress = 0.0  # share of the training budget that has been used
    sums: dict[str, float] = {}

    while progress < 1.0:
        loss, parts = objective(task.batch(rng, recipe.rows, recipe.second_rows), noise)
        loss.backward()
        spent = _average_gradients(objective, time.process_time() - began, recipe.ranks)
        nn.utils.clip_grad_norm_(objective.parameters(), recipe.clip)
        rate = min(1.0, (step + 1) / recipe.warm_up_steps) * min(
            1.0, (1 - progress) / (1 - recipe.decay_from)
        )
        for group in optimizer.param_groups:
            group["lr"] = rate * group["base"]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        progress = step / recipe.steps if recipe.steps else spent / recipe.cpu_seconds
        decay = min(recipe.ema, (1 + step) / (10 + step))
        with torch.no_grad():
            torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), 1 - decay)
        for key, value in parts.items():
            sums[key] = sums.get(key, 0.0) + float(value)
        if step % 50 == 0 or progress >= 1.0:
            taken = step - (step - 1) // 50 * 50
            history.append({"step": step, "cpu_seconds": spent, **{k: v / taken for k, v in sums.items()}})
            sums = {}
        if progress * recipe.evaluations >= evaluated + 1:
            evaluated += 1
            history.append(
                {"step": step, "cpu_seconds": spent, "success": _success(task, average, recipe, rank)}
            )
        if rank == 0 and spent - shown > 60:
            shown = spent
            log.info("%s", json.dumps(history[-1] if history else {"step": step, "cpu_seconds": spent}))
            _save(out, task, model, average, objective, recipe, history, step)
    if rank == 0:
        _save(out, task, model, average, objective, recipe, history, step)
    dist.destroy_process_group()


def export(out: Path, design: Design) -> Path:
    """Convert the checkpoint of a run to a bundle, and draw the learning curve if the run has closed-loop
    evaluations.

    Args:
        out: Folder of the run.
        design: Sizes of the policy.

    Returns:
        Path of the bundle.
    """
    bundle = out / f"{design.name}.gguf"
    convert(
        out / "checkpoint",
        bundle,
        vlm=out / "checkpoint" / "vlm",
        name=design.name,
        control_hz=design.control_hz,
        motion=design.motion,
        vectors=design.vectors,
    )
    if read_json(out / "log.json")["recipe"]["evaluations"]:
        plot(out / "log.json", out / "curve.png")
    return bundle


def _groups(objective: nn.Module, recipe: Recipe) -> list[dict]:
    """Divide the parameters for the optimizer. Only matrices get weight decay. Weights whose outputs the model
    multiplies by sqrt(width) get a smaller learning rate.
    """
    groups: dict[tuple[float, float], list[Tensor]] = {}
    for name, parameter in objective.named_parameters():
        scaled = name.endswith(("embed_tokens.weight", "connector.proj.weight"))
        decay = recipe.weight_decay if parameter.ndim >= 2 and "embedding" not in name else 0.0
        groups.setdefault((0.25 if scaled else 1.0, decay), []).append(parameter)
    return [
        {"params": p, "base": recipe.learning_rate * scale, "lr": 0.0, "weight_decay": decay}
        for (scale, decay), p in groups.items()
    ]


def _average_gradients(objective: nn.Module, cpu_seconds: float, ranks: int) -> float:
    """Average the gradients over all processes, in one message.

    Args:
        objective: Module with the parameters.
        cpu_seconds: CPU-seconds of this process so far.
        ranks: Number of processes.

    Returns:
        CPU-seconds of all processes.
    """
    gradients = [p.grad for p in objective.parameters() if p.grad is not None]
    flat = torch.cat([g.flatten() for g in gradients] + [torch.tensor([cpu_seconds])])
    dist.all_reduce(flat)
    offset = 0
    for g in gradients:
        g.copy_(flat[offset : offset + g.numel()].view_as(g)).div_(ranks)
        offset += g.numel()
    return float(flat[-1])


def _success(task: Task, average: nn.Module, recipe: Recipe, rank: int) -> float:
    """Return the closed-loop success of the averaged weights, over all processes."""
    first = VALIDATION_SEED + rank * recipe.episodes
    episodes = task.evaluate(average, range(first, first + recipe.episodes))
    wins = torch.tensor([float(sum(e.success for e in episodes))])
    dist.all_reduce(wins)
    return float(wins) / (recipe.ranks * recipe.episodes)


def _save(
    out: Path,
    task: Task,
    model: nn.Module,
    average: nn.Module,
    objective: nn.Module,
    recipe: Recipe,
    history: list[dict[str, float]],
    step: int,
) -> None:
    """Write the checkpoint with the averaged weights, the state to continue from, and the log."""
    task.write(out / "checkpoint", model, average.state_dict())
    state = objective.state_dict()
    torch.save(state | {f"model.{k}": v for k, v in average.state_dict().items()}, out / "state.pt")
    record = {"recipe": asdict(recipe), "steps": step, "history": history}
    (out / "log.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
