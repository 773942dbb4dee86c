"""Read the configuration of a noise scheduler (of the library diffusers) in LeRobot's checkpoints, and return
Sinew's solver."""

from __future__ import annotations

from typing import Any

from sinew.convert.lerobot.checkpoint import LeRobotCheckpoint
from sinew.models.solvers import NoiseLevels, Solver

# LeRobot's default values, which are the same in all of its versions.
NOISE_LEVELS: dict[str, Any] = {
    "noise_scheduler_type": "DDPM",
    "num_train_timesteps": 100,
    "beta_schedule": "squaredcos_cap_v2",
    "beta_start": 0.0001,
    "beta_end": 0.02,
    "prediction_type": "epsilon",
    "clip_sample": True,
    "clip_sample_range": 1.0,
    "num_inference_steps": None,
}


def noise_levels(checkpoint: LeRobotCheckpoint) -> dict[str, Any]:
    """Return the fields ``solver`` and ``solver_steps`` of the specification of a diffusion policy.

    Args:
        checkpoint: A checkpoint whose schema has the keys of ``NOISE_LEVELS``.

    Raises:
        ConvertError: A value is not supported.
    """
    levels = {
        "betas": checkpoint.one_of("beta_schedule", "squaredcos_cap_v2", "linear"),
        "predicts": checkpoint.one_of("prediction_type", "epsilon", "sample"),
        "fresh": checkpoint.one_of("noise_scheduler_type", "DDPM", "DDIM") == "DDPM",
        "first_beta": checkpoint.number("beta_start"),
        "last_beta": checkpoint.number("beta_end"),
        "clip": checkpoint.number("clip_sample_range") if checkpoint["clip_sample"] else 0.0,
    }
    count, steps = checkpoint.size("num_train_timesteps"), checkpoint["num_inference_steps"]
    with checkpoint.named():
        solver = Solver("diffusion", levels=NoiseLevels(count, **levels))
    solver_steps = count if steps is None else checkpoint.size("num_inference_steps", high=count)
    return {"solver": solver, "solver_steps": solver_steps}
