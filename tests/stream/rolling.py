"""A policy with random weights whose head has a separate time for each action, in the layout that training writes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from sinew_eval.training.checkpoint import Design, write_configs, write_weights
from sinew_eval.training.objective import initialise

from sinew.convert import convert
from sinew.families.smolvla.model import SmolVLA

DESIGN = Design(
    name="rolls", cameras=("front",), image_size=16, state_dim=2, action_dim=1, chunk_size=6, control_hz=100,
    words=("go", "stop"), patch_size=8, pixel_shuffle=2, vision_width=8, vision_ffn=8, vision_layers=1,
    vision_heads=1, width=16, ffn=16, layers=2, heads=1, kv_heads=1, head_dim=8, num_steps=4, rolling=True,
)  # fmt: skip
STATS = {
    "observation.state": {"mean": np.zeros(2, np.float32), "std": np.ones(2, np.float32)},
    "action": {"mean": np.zeros(1, np.float32), "std": np.ones(1, np.float32)},
}


def write_bundle(folder: Path) -> Path:
    """Write a bundle of a rolling policy: camera front, 100 actions per second, windows of 6."""
    model = SmolVLA(write_configs(folder, DESIGN, STATS))
    initialise(model, 0)
    with torch.no_grad():
        model.action_out_proj.weight.mul_(10.0)
    write_weights(folder, model, model.state_dict())
    convert(folder, folder / "rolls.gguf", vlm=folder / "vlm", name="rolls", control_hz=100)
    return folder / "rolls.gguf"
