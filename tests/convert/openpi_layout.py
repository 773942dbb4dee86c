"""Write golden weights in openpi's PyTorch layout, for one of its training configurations."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
from safetensors.torch import load_file, save_file

from sinew.families.pi.openpi.embodiments import OPENPI_CONFIGS

DIM = 32


def statistics(rng: np.random.Generator) -> dict:
    """Return random statistics of the padded width, as in openpi's published files."""
    low = rng.uniform(-1, -0.5, DIM)
    return {
        "mean": rng.normal(0, 0.1, DIM).tolist(),
        "std": rng.uniform(0.2, 0.6, DIM).tolist(),
        "q01": low.tolist(),
        "q99": (low + rng.uniform(1.5, 2.5, DIM)).tolist(),
    }


def write_checkpoint(golden: Path, directory: Path, name: str) -> tuple[Path, Path, dict]:
    """Write the checkpoint. Returns the checkpoint, the architecture file and the statistics."""
    source = golden / ("pi05-2cam" if OPENPI_CONFIGS[name].pi05 else "pi0-2cam")
    path = directory / name
    (path / "assets" / "robot").mkdir(parents=True)
    weights = load_file(source / "checkpoint" / "model.safetensors")
    save_file({k.removeprefix("model."): v for k, v in weights.items()}, path / "model.safetensors")
    rng = np.random.default_rng(0)
    stats = {"state": statistics(rng), "actions": statistics(rng)}
    (path / "assets" / "robot" / "norm_stats.json").write_text(json.dumps({"norm_stats": stats}))
    config = {
        "action_dim": DIM,
        "action_horizon": OPENPI_CONFIGS[name].chunk_size,
        "paligemma_variant": "gemma_2b",
        "action_expert_variant": "gemma_300m",
        "precision": "float32",
    }
    (path / "config.json").write_text(json.dumps(config))
    shutil.copytree(source / "checkpoint" / "tokenizer", path / "tokenizer", copy_function=shutil.copyfile)
    arch = json.loads((source / "arch.json").read_text())
    (directory / "arch.json").write_text(json.dumps(arch))
    return path, directory / "arch.json", stats
