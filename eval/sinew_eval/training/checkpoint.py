"""Write a checkpoint in LeRobot's SmolVLA layout, for a policy of a few million parameters.

``write_configs`` writes everything except the weights. The converter then builds the model from these files, so a
trained policy cannot differ from its checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from sinew.convert.read.files import read_json
from sinew.families.smolvla.convert import bundle_name, model_config, open_checkpoint
from sinew.families.smolvla.model import SmolVLA, SmolVLAConfig
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers
from torch import Tensor

PAD, UNKNOWN = "<|im_end|>", "<unk>"
_SPECIAL = (PAD, UNKNOWN, "<fake_token_around_image>", "<global-img>", "<image>", "\n")
LM_HEAD = "model.vlm_with_expert.vlm.lm_head.weight"

# First key: feature ("observation.state" or "action"). Second key: name of the statistic ("mean" or "std").
Statistics = dict[str, dict[str, np.ndarray]]


@dataclass(frozen=True)
class Design:
    """Sizes of one policy. The widths of the action expert follow from those of the language model, as in
    LeRobot.

    Attributes:
        name: Name of the policy and of its bundle.
        cameras: Names of the cameras.
        image_size: Width and height of a frame, in pixels.
        state_dim: Number of values in the state.
        action_dim: Number of values in an action.
        chunk_size: Number of actions in a chunk.
        control_hz: Control steps per second.
        words: Vocabulary of the tokenizer.
        vectors: Names and units of the values, as for `sinew convert --vectors`.
        rolling: True to feed the state to the action head and give each action its own flow time, for streams.
        motion: Reference of the actions, see ``sinew_client.control``.
    """

    name: str
    cameras: tuple[str, ...]
    image_size: int
    state_dim: int
    action_dim: int
    chunk_size: int
    control_hz: float
    words: tuple[str, ...]
    vectors: Mapping[str, Any] = field(default_factory=dict)
    patch_size: int = 8
    pixel_shuffle: int = 2
    vision_width: int = 96
    vision_ffn: int = 256
    vision_layers: int = 3
    vision_heads: int = 4
    width: int = 96
    ffn: int = 256
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    expert_multiplier: float = 0.75
    max_tokens: int = 24
    num_steps: int = 10
    rolling: bool = False
    motion: dict[str, Any] | None = None


def write_configs(folder: Path, design: Design, stats: Statistics) -> SmolVLAConfig:
    """Write all files of a checkpoint except ``model.safetensors``.

    Args:
        folder: Folder of the checkpoint.
        design: Sizes of the policy.
        stats: Statistics of state and action.

    Returns:
        The model's configuration, as the converter reads it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", _policy_config(design))
    write_json(folder / "vlm" / "config.json", _vlm_config(design))
    for place in (folder / "vlm", folder / "tokenizer"):
        place.mkdir(exist_ok=True)
        build_tokenizer(design.words).save(str(place / "tokenizer.json"))
        write_json(place / "tokenizer_config.json", _tokenizer_config())
    # LeRobot opens an image processor in this folder, although the policy does not use it.
    write_json(folder / "vlm" / "preprocessor_config.json", {"image_processor_type": "SmolVLMImageProcessor"})
    write_json(folder / "vlm" / "processor_config.json", {"processor_class": "SmolVLMProcessor"})
    _write_processors(folder, design, stats)
    return model_config(open_checkpoint(folder), read_json(folder / "vlm" / "config.json"), {})


def write_weights(folder: Path, model: SmolVLA, state: dict[str, Tensor]) -> None:
    """Write ``model.safetensors`` in float32 with LeRobot's tensor names.

    Args:
        folder: Folder of the checkpoint.
        model: The model, for the names of its weights.
        state: The weights, by their module path.
    """
    weights = dict(model.state_dict())
    tensors = {upstream_name(name): state[name].detach().float().contiguous() for name in weights}
    for upstream in tensors:
        if bundle_name(upstream) not in weights:
            raise AssertionError(f"{upstream} cannot be converted back to a name of the model")
    # LeRobot's class has an output head over the vocabulary, which a policy never evaluates.
    tensors[LM_HEAD] = torch.zeros_like(state["language.embed_tokens.weight"])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def upstream_name(name: str) -> str:
    """Convert a module path of :class:`SmolVLA` to LeRobot's tensor name. This is the inverse of the converter's
    renaming.
    """
    top, _, rest = name.partition(".")
    rest = rest.replace("attn.", "self_attn.", 1)
    if top == "vision":
        rest = rest.replace("norm1.", "layer_norm1.").replace("norm2.", "layer_norm2.")
        rest = rest.replace("self_attn.o_proj.", "self_attn.out_proj.")
        if rest.startswith("norm."):
            rest = f"post_layernorm.{rest.removeprefix('norm.')}"
        if rest.startswith(("patch_", "position_")):
            rest = f"embeddings.{rest}"
        if rest.startswith("layers."):
            rest = f"encoder.{rest}"
        return f"model.vlm_with_expert.vlm.model.vision_model.{rest}"
    rest = rest.replace("input_norm.", "input_layernorm.").replace("post_norm.", "post_attention_layernorm.")
    if top == "language":
        return f"model.vlm_with_expert.vlm.model.text_model.{rest}"
    if top == "connector":
        return f"model.vlm_with_expert.vlm.model.connector.modality_projection.{rest}"
    if top == "expert":
        return f"model.vlm_with_expert.lm_expert.{rest}"
    return f"model.{name}"


def build_tokenizer(words: tuple[str, ...]) -> Tokenizer:
    """Build a tokenizer with one token per word. Case, digits and punctuation are dropped, and a newline is a token
    of its own.
    """
    vocabulary = {token: index for index, token in enumerate([*_SPECIAL, *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Lowercase(), normalizers.Replace(Regex("[^a-z\n ]+"), " ")]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split("\n", "isolated"), pre_tokenizers.Split(Regex(" +"), "removed")]
    )
    return tokenizer


def vocabulary_size(words: tuple[str, ...]) -> int:
    """Return the number of tokens, rounded up to a multiple of 16."""
    return -(-(len(_SPECIAL) + len(words)) // 16) * 16


def _tokenizer_config() -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": PAD,
        "eos_token": PAD,
        "unk_token": UNKNOWN,
        "extra_special_tokens": {
            "fake_image_token": "<fake_token_around_image>",
            "global_image_token": "<global-img>",
            "image_token": "<image>",
            "end_of_utterance_token": PAD,
        },
    }


def _features(design: Design) -> tuple[dict[str, Any], dict[str, Any]]:
    size = design.image_size
    inputs: dict[str, Any] = {
        f"observation.images.{camera}": {"type": "VISUAL", "shape": [3, size, size]}
        for camera in design.cameras
    }
    inputs["observation.state"] = {"type": "STATE", "shape": [design.state_dim]}
    return inputs, {"action": {"type": "ACTION", "shape": [design.action_dim]}}


_NORMALIZATION = {"VISUAL": "IDENTITY", "STATE": "MEAN_STD", "ACTION": "MEAN_STD"}


def _policy_config(design: Design) -> dict[str, Any]:
    inputs, outputs = _features(design)
    return {
        "type": "smolvla",
        "n_obs_steps": 1,
        "input_features": inputs,
        "output_features": outputs,
        "normalization_mapping": _NORMALIZATION,
        "chunk_size": design.chunk_size,
        "n_action_steps": design.chunk_size,
        "max_state_dim": design.state_dim,
        "max_action_dim": design.action_dim,
        "resize_imgs_with_padding": [design.image_size, design.image_size],
        "empty_cameras": 0,
        "adapt_to_pi_aloha": False,
        "use_delta_joint_actions_aloha": False,
        "tokenizer_max_length": design.max_tokens,
        "num_steps": design.num_steps,
        "use_cache": True,
        "vlm_model_name": "vlm",
        "load_vlm_weights": False,
        "add_image_special_tokens": False,
        "attention_mode": "cross_attn",
        "prefix_length": -1,
        "pad_language_to": "longest",
        "num_expert_layers": -1,
        "num_vlm_layers": design.layers,
        "self_attn_every_n_layers": 2,
        "expert_width_multiplier": design.expert_multiplier,
        "min_period": 0.004,
        "max_period": 4.0,
        "device": "cpu",
        **({"state_in_head": True, "rolling": True} if design.rolling else {}),
    }


def _vlm_config(design: Design) -> dict[str, Any]:
    vocabulary = vocabulary_size(design.words)
    return {
        "model_type": "smolvlm",
        "architectures": ["SmolVLMForConditionalGeneration"],
        "image_token_id": _SPECIAL.index("<image>"),
        "pad_token_id": _SPECIAL.index(PAD),
        "scale_factor": design.pixel_shuffle,
        "tie_word_embeddings": False,
        "vocab_size": vocabulary,
        "torch_dtype": "float32",
        "text_config": {
            "model_type": "llama",
            "head_dim": design.head_dim,
            "hidden_size": design.width,
            "intermediate_size": design.ffn,
            "num_attention_heads": design.heads,
            "num_hidden_layers": design.layers,
            "num_key_value_heads": design.kv_heads,
            "pad_token_id": _SPECIAL.index(PAD),
            "rms_norm_eps": 1e-5,
            "vocab_size": vocabulary,
        },
        "vision_config": {
            "model_type": "smolvlm_vision",
            "hidden_size": design.vision_width,
            "intermediate_size": design.vision_ffn,
            "num_hidden_layers": design.vision_layers,
            "num_attention_heads": design.vision_heads,
            "image_size": design.image_size,
            "patch_size": design.patch_size,
        },
    }


def _write_processors(folder: Path, design: Design, stats: Statistics) -> None:
    inputs, outputs = _features(design)
    norm = {"eps": 1e-8, "features": inputs | outputs, "norm_map": _NORMALIZATION}
    device = {"registry_name": "device_processor", "config": {"device": "cpu", "float_dtype": None}}
    before, after = (
        "policy_preprocessor_step_5_normalizer_processor.safetensors",
        "policy_postprocessor_step_0_unnormalizer_processor.safetensors",
    )
    tokenizer = {
        "max_length": design.max_tokens,
        "task_key": "task",
        "padding_side": "right",
        "padding": "longest",
        "truncation": True,
        "tokenizer_name": "tokenizer",
    }
    pre = [
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
    post = [
        {
            "registry_name": "unnormalizer_processor",
            "config": norm | {"features": outputs},
            "state_file": after,
        },
        device,
    ]
    write_json(folder / "policy_preprocessor.json", {"name": "policy_preprocessor", "steps": pre})
    write_json(folder / "policy_postprocessor.json", {"name": "policy_postprocessor", "steps": post})
    tensors = {
        f"{f}.{s}": torch.tensor(v, dtype=torch.float32) for f, d in stats.items() for s, v in d.items()
    }
    for name in (before, after):
        save_file(tensors, folder / name)


def write_json(path: Path, record: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
