"""Write a random SmolVLA checkpoint in LeRobot's layout, at full size or at any other size.

So speed, memory and file handling can be measured at full size without a download. The weights are noise that is scaled
to keep activations near one. The policy is not trained, so its actions have no meaning.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.checkpoints.noise import Progress, write_tensors
from benchmarks.checkpoints.plan import Init, TensorPlan
from benchmarks.checkpoints.smolvla_layout import StorageRecipe, Widths, storage
from benchmarks.checkpoints.tokenizer import tokenizer_config, tokenizer_json
from sinew.convert.lerobot.checkpoint import LeRobotCheckpoint
from sinew.convert.names import upstream_name
from sinew.convert.options import ConvertOptions
from sinew.families.smolvla.convert import HEAD, PREFIXES, SCHEMA, TABLE, model_config
from sinew.models import build_on_meta

HUB_NAME = "HuggingFaceTB/SmolVLM2-500M-Video-Instruct"
CAMERA_HEIGHT, CAMERA_WIDTH = 480, 640


@dataclass(frozen=True, slots=True)
class RandomCheckpoint:
    """The files of a random checkpoint.

    Attributes:
        policy: The checkpoint folder.
        vlm: The folder that replaces the repository ``vlm_model_name``.
        parameters: Number of parameters.
        nbytes: Size of model.safetensors in bytes.
    """

    policy: Path
    vlm: Path
    parameters: int
    nbytes: int


def write_checkpoint(
    path: Path | str,
    *,
    dtype: StorageRecipe = "float32",
    cameras: int = 2,
    state_dim: int = 6,
    action_dim: int = 6,
    widths: Widths | None = None,
    progress: Progress | None = None,
) -> RandomCheckpoint:
    """Write ``path/checkpoint`` and ``path/vlm``. The same arguments always give the same bytes.

    Args:
        path: The folder to write to.
        dtype: How the tensors are stored.
        cameras: Number of cameras.
        state_dim: Size of the state.
        action_dim: Size of an action.
        widths: Sizes of the model. None means SmolVLA's sizes.
        progress: Called with the bytes written so far and the total.
    """
    w = widths or Widths()
    for name, value, limit in (
        ("state_dim", state_dim, w.max_state_dim),
        ("action_dim", action_dim, w.max_action_dim),
    ):
        if not 1 <= value <= limit:
            raise ValueError(f"{name}: expected 1 to {limit}, got {value}")
    policy, vlm = Path(path) / "checkpoint", Path(path) / "vlm"
    policy.mkdir(parents=True, exist_ok=True)
    vlm.mkdir(parents=True, exist_ok=True)

    tokenizer = tokenizer_json(w.vocab_size)
    _write_tokenizer(vlm, tokenizer, "PreTrainedTokenizerFast")
    _write_json(vlm / "config.json", vlm_config(w))

    features = _features(cameras, state_dim, action_dim)
    _write_json(policy / "config.json", policy_config(w, dtype, features))
    _write_tokenizer(policy / "tokenizer", tokenizer, "TokenizersBackend")
    _write_processors(policy, w, features, _statistics(state_dim, action_dim))
    plans = tensors(w, dtype)
    nbytes = write_tensors(policy / "model.safetensors", plans, {}, {"format": "pt"}, progress)
    return RandomCheckpoint(policy, vlm, sum(plan.elements for plan in plans), nbytes)


def tensors(w: Widths, recipe: StorageRecipe = "float32") -> list[TensorPlan]:
    """Return the plan of every tensor in ``model.safetensors``, in the order in which the safetensors library stores
    them.

    The tensors are those of Sinew's model under LeRobot's names, and the language head.
    """
    record = policy_config(w, recipe, _features(1, 1, 1))
    checkpoint = LeRobotCheckpoint(Path(), ConvertOptions(), SCHEMA, record)
    model = build_on_meta("smolvla", model_config(checkpoint, vlm_config(w), {}))
    shapes = {upstream_name(name, PREFIXES): tuple(t.shape) for name, t in model.state_dict().items()}
    shapes[HEAD] = shapes[TABLE]
    plans = [TensorPlan(name, shape, _init(name), storage(name, w, recipe)) for name, shape in shapes.items()]
    # The safetensors library writes tensors of the wider dtype first, and then sorts by name.
    return sorted(plans, key=lambda plan: (plan.storage != "F32", plan.name))


def _init(name: str) -> Init:
    module, _, part = name.rpartition(".")
    if part == "bias":
        return "bias"
    if "norm" in module.rpartition(".")[2]:
        return "norm"
    return "embedding" if module.endswith(("embed_tokens", "position_embedding")) else "matrix"


def _features(cameras: int, state_dim: int, action_dim: int) -> dict[str, dict[str, Any]]:
    image = {"type": "VISUAL", "shape": [3, CAMERA_HEIGHT, CAMERA_WIDTH]}
    return {
        **{f"observation.images.camera{i + 1}": image for i in range(cameras)},
        "observation.state": {"type": "STATE", "shape": [state_dim]},
        "action": {"type": "ACTION", "shape": [action_dim]},
    }


def _statistics(state_dim: int, action_dim: int) -> dict[tuple[str, str], np.ndarray]:
    """Return means and standard deviations like those of joint angles in degrees, different for every joint."""
    return {
        ("action", "mean"): np.linspace(-30, 25, action_dim, dtype=np.float32),
        ("action", "std"): np.linspace(12, 31, action_dim, dtype=np.float32),
        ("observation.state", "mean"): np.linspace(-28, 27, state_dim, dtype=np.float32),
        ("observation.state", "std"): np.linspace(11, 29, state_dim, dtype=np.float32),
    }


_NORMALIZATION = {"VISUAL": "IDENTITY", "STATE": "MEAN_STD", "ACTION": "MEAN_STD"}


def policy_config(w: Widths, dtype: StorageRecipe, features: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return ``config.json`` as LeRobot 0.6 writes it, without the training fields that inference does not read."""
    return {
        "type": "smolvla",
        "n_obs_steps": 1,
        "input_features": {key: value for key, value in features.items() if key != "action"},
        "output_features": {"action": features["action"]},
        "device": "cpu",
        "use_amp": False,
        "use_peft": False,
        "chunk_size": w.chunk_size,
        "n_action_steps": w.chunk_size,
        "normalization_mapping": _NORMALIZATION,
        "max_state_dim": w.max_state_dim,
        "max_action_dim": w.max_action_dim,
        "resize_imgs_with_padding": [w.image_size, w.image_size],
        "empty_cameras": 0,
        "adapt_to_pi_aloha": False,
        "use_delta_joint_actions_aloha": False,
        "tokenizer_max_length": w.tokenizer_max_length,
        "num_steps": w.num_steps,
        "use_cache": True,
        "freeze_vision_encoder": True,
        "train_expert_only": True,
        "train_state_proj": True,
        "vlm_model_name": HUB_NAME,
        "load_vlm_weights": dtype == "bf16-vlm",
        "add_image_special_tokens": False,
        "attention_mode": "cross_attn",
        "prefix_length": -1,
        "pad_language_to": "longest",
        "num_expert_layers": w.num_expert_layers,
        "num_vlm_layers": w.num_vlm_layers,
        "self_attn_every_n_layers": w.self_attn_every_n_layers,
        "expert_width_multiplier": w.expert_width_multiplier,
        "min_period": 0.004,
        "max_period": 4.0,
        "rtc_config": None,
        "compile_model": False,
        "compile_mode": "max-autotune",
    }


def vlm_config(w: Widths) -> dict[str, Any]:
    return {
        "model_type": "smolvlm",
        "architectures": ["SmolVLMForConditionalGeneration"],
        "image_token_id": w.image_token_id,
        "pad_token_id": 2,
        "scale_factor": w.scale_factor,
        "tie_word_embeddings": False,
        "use_cache": False,
        "vocab_size": w.vocab_size,
        "torch_dtype": "float32",
        "text_config": {
            "model_type": "llama",
            "head_dim": w.head_dim,
            "hidden_size": w.text_hidden,
            "intermediate_size": w.text_ffn,
            "max_position_embeddings": 8192,
            "num_attention_heads": w.text_heads,
            "num_hidden_layers": w.text_layers,
            "num_key_value_heads": w.text_kv_heads,
            "pad_token_id": 2,
            "rms_norm_eps": 1e-5,
            "rope_theta": 100000,
            "torch_dtype": "bfloat16",
            "vocab_size": w.vocab_size,
        },
        "vision_config": {
            "model_type": "smolvlm_vision",
            "hidden_size": w.vision_hidden,
            "image_size": w.image_size,
            "num_attention_heads": w.vision_heads,
            "patch_size": w.patch_size,
            "tie_word_embeddings": False,
            "intermediate_size": w.vision_ffn,
            "num_hidden_layers": w.vision_layers,
        },
    }


def _write_processors(
    policy: Path, w: Widths, features: dict[str, dict[str, Any]], stats: dict[tuple[str, str], np.ndarray]
) -> None:
    """Write the preprocessor and the postprocessor of LeRobot 0.6, each with a file of statistics."""
    device = {"registry_name": "device_processor", "config": {"device": "cpu", "float_dtype": None}}
    norm = {"eps": 1e-8, "features": features, "norm_map": _NORMALIZATION}
    tokenizer = {
        "max_length": w.tokenizer_max_length,
        "task_key": "task",
        "padding_side": "right",
        "padding": "longest",
        "truncation": True,
        "tokenizer_name": "tokenizer",
    }
    before = "policy_preprocessor_step_5_normalizer_processor.safetensors"
    after = "policy_postprocessor_step_0_unnormalizer_processor.safetensors"
    preprocessor = [
        {"registry_name": "rename_observations_processor", "config": {"rename_map": {}}},
        {"registry_name": "to_batch_processor", "config": {}},
        {"registry_name": "smolvla_new_line_processor", "config": {}},
        {
            "registry_name": "tokenizer_processor",
            "config": tokenizer,
            "artifacts": {"tokenizer_name": "tokenizer"},
        },
        device,
        {"registry_name": "normalizer_processor", "config": norm, "state_file": before},
    ]
    action = {**norm, "features": {"action": features["action"]}}
    postprocessor = [
        {"registry_name": "unnormalizer_processor", "config": action, "state_file": after},
        device,
    ]
    _write_json(policy / "policy_preprocessor.json", {"name": "policy_preprocessor", "steps": preprocessor})
    _write_json(
        policy / "policy_postprocessor.json", {"name": "policy_postprocessor", "steps": postprocessor}
    )
    arrays = {f"{feature}.{kind}": values for (feature, kind), values in stats.items()}
    for name in (before, after):
        write_tensors(policy / name, [], arrays)


def _write_tokenizer(folder: Path, tokenizer: str, tokenizer_class: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
    _write_json(folder / "tokenizer_config.json", tokenizer_config(tokenizer_class))


def _write_json(path: Path, document: dict[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
