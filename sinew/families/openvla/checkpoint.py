"""OpenVLA-OFT at full size: its configuration, and a random checkpoint in upstream's layout.

7.5 billion numbers, 15 GB in bfloat16: DINOv2-L/14 and SigLIP-So400m/14 at 224 pixels, Llama 2 7B, the L1 head and the
projector of the state for LIBERO's robot (actions of 7 numbers, states of 8). The files that hold no weights
(tokenizer, preprocessor, statistics, config.json) come from a folder that has them.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from sinew.families.openvla.model import OFTConfig
from sinew.layers.decoder import DecoderConfig
from sinew.layers.vit import ViTConfig
from sinew.models.published import published
from sinew.presets.noise import write_tensors
from sinew.presets.plan import Init, TensorPlan

TOWERS = (  # timm's names of the tensors, of which the last block is read by nobody
    "vision_backbone.featurizer",
    "vision_backbone.fused_featurizer",
)
DEAD_BLOCKS = 1
FILES = ("tokenizer.json", "tokenizer_config.json", "preprocessor_config.json", "dataset_statistics.json")
Shape = tuple[int, ...]


def oft_config(layers: int | None = None) -> OFTConfig:
    """Return the published configuration; ``layers`` of the language model are fewer for a shorter look."""
    config: OFTConfig = published("openvla-oft").config
    if layers is None:
        return config
    return replace(config, language=replace(config.language, num_layers=layers))


def _tower(prefix: str, config: ViTConfig) -> Iterator[tuple[str, Shape]]:
    width, hidden, scaled = config.hidden_size, config.intermediate_size, config.layer_scale
    yield f"{prefix}.patch_embed.proj.weight", (width, 3, config.patch_size, config.patch_size)
    yield f"{prefix}.patch_embed.proj.bias", (width,)
    yield f"{prefix}.pos_embed", (1, config.side**2, width)
    if config.prefix_tokens:
        yield f"{prefix}.cls_token", (1, 1, width)
        yield f"{prefix}.reg_token", (1, config.prefix_tokens - 1, width)
    linears = {"attn.qkv": (3 * width, width), "attn.proj": (width, width)}
    linears |= {"mlp.fc1": (hidden, width), "mlp.fc2": (width, hidden)}
    for block in range(config.num_layers + DEAD_BLOCKS):
        name = f"{prefix}.blocks.{block}"
        for part, shape in linears.items():
            yield f"{name}.{part}.weight", shape
            yield f"{name}.{part}.bias", shape[:1]
        for part in ("norm1", "norm2"):
            yield f"{name}.{part}.weight", (width,)
            yield f"{name}.{part}.bias", (width,)
        for part in ("ls1", "ls2") if scaled else ():
            yield f"{name}.{part}.scale_factor", (width,)


def _language(config: DecoderConfig, vocabulary: int) -> Iterator[tuple[str, Shape]]:
    width, hidden = config.hidden_size, config.intermediate_size
    yield "language_model.model.embed_tokens.weight", (vocabulary, width)
    for layer in range(config.num_layers):
        name = f"language_model.model.layers.{layer}"
        for part in "qkvo":
            yield f"{name}.self_attn.{part}_proj.weight", (width, width)
        yield f"{name}.mlp.gate_proj.weight", (hidden, width)
        yield f"{name}.mlp.up_proj.weight", (hidden, width)
        yield f"{name}.mlp.down_proj.weight", (width, hidden)
        yield f"{name}.input_layernorm.weight", (width,)
        yield f"{name}.post_attention_layernorm.weight", (width,)
    yield "language_model.model.norm.weight", (width,)
    yield "language_model.lm_head.weight", (vocabulary, width)


def _projector(config: OFTConfig) -> Iterator[tuple[str, Shape]]:
    sizes = (
        sum(tower.hidden_size for tower in config.vision),
        *config.projector,
        config.language.hidden_size,
    )
    for index, (columns, rows) in enumerate(pairwise(sizes), 1):
        yield f"projector.fc{index}.weight", (rows, columns)
        yield f"projector.fc{index}.bias", (rows,)


def _head(width: int, dim: int) -> dict[str, Shape]:
    parts: dict[str, Shape] = {"layer_norm1": (dim * width,), "layer_norm2": (width,)}
    parts |= {"fc1": (width, dim * width), "fc2": (dim, width)}
    for block in (0, 1):
        parts |= {
            f"mlp_resnet_blocks.{block}.ffn.0": (width,),
            f"mlp_resnet_blocks.{block}.ffn.1": (width, width),
        }
    named = {f"module.model.{name}.weight": shape for name, shape in parts.items()}
    return named | {f"module.model.{name}.bias": shape[:1] for name, shape in parts.items()}


def tensors(config: OFTConfig) -> Iterator[TensorPlan]:
    """Yield every tensor of the safetensors shards, in bfloat16."""
    for prefix, tower in zip(TOWERS, config.vision, strict=True):
        yield from (_plan(*entry) for entry in _tower(prefix, tower))
    yield from (_plan(*entry) for entry in _projector(config))
    yield from (_plan(*entry) for entry in _language(config.language, config.vocab_size))


def _plan(name: str, shape: Shape) -> TensorPlan:
    init: Init
    if len(shape) > 1:
        init = "embedding" if "embed_tokens" in name else "matrix"
    else:
        init = "norm" if "norm" in name and name.endswith("weight") else "bias"
    return TensorPlan(name, shape, init, "BF16")


def write_openvla_checkpoint(out: Path, files: Path, config: OFTConfig | None = None) -> Path:
    """Write the checkpoint directory ``out`` and return it: three shards, and the head and the projector in .pt files.

    files: a checkpoint directory whose tokenizer, statistics and configuration are taken.
    """
    config = config or oft_config()
    out.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        shutil.copy(files / name, out / name)
    record = json.loads((files / "config.json").read_text())
    text: dict[str, Any] = {"model_type": "llama", "pad_token_id": 32000, "vocab_size": config.vocab_size}
    if config.language != oft_config().language:  # upstream's file leaves Llama 2's own sizes out
        text |= {
            "hidden_size": config.language.hidden_size,
            "intermediate_size": config.language.intermediate_size,
            "num_hidden_layers": config.language.num_layers,
            "num_attention_heads": config.language.num_heads,
        }
    record["text_config"] = text
    (out / "config.json").write_text(json.dumps(record))
    plans = list(tensors(config))
    where: dict[str, str] = {}
    for number in (1, 2, 3):
        shard, file = plans[number - 1 :: 3], f"model-{number:05}-of-00003.safetensors"
        write_tensors(out / file, shard, {}, {"format": "pt"})
        where |= {plan.name: file for plan in shard}
    (out / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    torch.manual_seed(0)
    width = config.language.hidden_size
    state = {
        f"module.fc{i}.{kind}": shape
        for i, columns in ((1, config.max_state_dim), (2, width))
        for kind, shape in (("weight", (width, columns)), ("bias", (width,)))
    }
    head = _head(width, config.max_action_dim)
    for name, shapes in (("action_head", head), ("proprio_projector", state)):
        made = {key: torch.randn(shape, dtype=torch.bfloat16) * 0.02 for key, shape in shapes.items()}
        torch.save(made, out / f"{name}--1_checkpoint.pt")
    return out
