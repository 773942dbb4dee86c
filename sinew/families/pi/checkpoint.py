"""Write a random pi0 or pi0.5 checkpoint in LeRobot's layout at full size.

Names and shapes come from our own model, built without memory, under upstream's names; the language-model
heads that upstream files carry are added. 4.03 and 4.14 billion numbers, 8 GB in bfloat16.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

import numpy as np

from sinew.convert.names import upstream_name
from sinew.families.pi.convert import DEAD, PREFIXES, VOCABULARY, model_config
from sinew.models import build_on_meta
from sinew.presets.noise import Progress, write_tensors
from sinew.presets.plan import Init, TensorPlan
from sinew.presets.tokenizer import tokenizer_config, tokenizer_json

Architecture = Literal["pi0", "pi05"]
CAMERAS = ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")


def write_pi_checkpoint(
    path: Path | str,
    architecture: Architecture,
    *,
    storage: Literal["F32", "BF16"] = "BF16",
    cameras: int = 2,
    dim: int = 7,
    progress: Progress | None = None,
) -> Path:
    """Write ``path`` (a checkpoint directory) and return it; the same arguments give the same bytes.

    dim: size of state and action.
    """
    out = Path(path)
    (out / "tokenizer").mkdir(parents=True, exist_ok=True)
    (out / "tokenizer" / "tokenizer.json").write_text(tokenizer_json(VOCABULARY), encoding="utf-8")
    _write_json(out / "tokenizer" / "tokenizer_config.json", tokenizer_config("TokenizersBackend"))
    config = policy_config(architecture, cameras, dim)
    _write_json(out / "config.json", config)
    stats = {
        f"{feature}.{kind}": np.linspace(low, high, dim, dtype=np.float32)
        for feature in ("observation.state", "action")
        for kind, low, high in (("mean", -1, 1), ("std", 1, 2), ("q01", -2, -1), ("q99", 1, 2))
    }
    for pipeline, step in (("pre", "normalizer"), ("post", "unnormalizer")):
        name = f"policy_{pipeline}processor"
        file = f"{name}_step_0_{step}_processor.safetensors"
        record = {
            "registry_name": f"{step}_processor",
            "config": {"eps": 1e-8, "norm_map": config["normalization_mapping"]},
            "state_file": file,
        }
        _write_json(out / f"{name}.json", {"name": name, "steps": [record]})
        write_tensors(out / file, [], stats)
    write_tensors(out / "model.safetensors", plans(config, storage), {}, {"format": "pt"}, progress)
    return out


def plans(config: dict, storage: Literal["F32", "BF16"]) -> list[TensorPlan]:
    """Every tensor of ``model.safetensors`` under its upstream name."""
    model = build_on_meta(config["type"], model_config(config["type"], config, {}, "config.json"))
    shapes = {f"model.{upstream_name(n, PREFIXES)}": tuple(t.shape) for n, t in model.state_dict().items()}
    hidden = (model.config.language.hidden_size, model.config.expert.hidden_size)
    for head, size in zip(DEAD, hidden, strict=True):
        shapes[f"model.{head}weight"] = (VOCABULARY, size)
    return [TensorPlan(name, shape, _init(name, shape), storage) for name, shape in shapes.items()]


def _init(name: str, shape: tuple[int, ...]) -> Init:
    if len(shape) > 1:
        return "embedding" if name.endswith("embed_tokens.weight") else "matrix"
    # Gemma stores its norms as offsets from one: noise around zero, as biases are.
    return "norm" if ".vision_tower." in name and name.endswith("norm.weight") else "bias"


def policy_config(architecture: Architecture, cameras: int, dim: int) -> dict:
    mode = "MEAN_STD" if architecture == "pi0" else "QUANTILES"
    return {
        "type": architecture,
        "input_features": {
            **{
                f"observation.images.{name}": {"type": "VISUAL", "shape": [3, 224, 224]}
                for name in CAMERAS[:cameras]
            },
            "observation.state": {"type": "STATE", "shape": [dim]},
        },
        "output_features": {"action": {"type": "ACTION", "shape": [dim]}},
        "normalization_mapping": {"VISUAL": "IDENTITY", "STATE": mode, "ACTION": mode},
        "paligemma_variant": "gemma_2b",
        "action_expert_variant": "gemma_300m",
        "dtype": "bfloat16",
        "chunk_size": 50,
        "n_action_steps": 50,
        "max_state_dim": 32,
        "max_action_dim": 32,
        "num_inference_steps": 10,
        "min_period": 0.004,
        "max_period": 4.0,
        "image_resolution": [224, 224],
        "empty_cameras": 0,
        "tokenizer_max_length": 48 if architecture == "pi0" else 200,
    }


def _write_json(path: Path, document: dict) -> None:
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
