"""Convert, load and run a random OpenVLA-OFT at full size (7.5 B numbers): time and memory of each phase.

``python benchmarks/openvla_full_size.py OUT [--runs N]``; needs 31 GB of disk. The checkpoint is written in upstream's
layout, bfloat16, three shards and the head in .pt files, with the tiny fixture's config, tokenizer and statistics. The
last line is JSON.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from cyclopts import run

from benchmarks.pi_full_size import convert, infer, phase
from sinew.presets.noise import write_tensors
from sinew.presets.smolvla_layout import TensorPlan

FIXTURE = Path(__file__).resolve().parents[1] / "tests" / "fixtures" / "openvla-oft" / "checkpoint"
LAYERS = 32
Shape = tuple[int, ...]


def tower(prefix: str, width: int, hidden: int, depth: int, dino: bool) -> Iterator[tuple[str, Shape]]:
    yield f"{prefix}.patch_embed.proj.weight", (width, 3, 14, 14)
    yield f"{prefix}.patch_embed.proj.bias", (width,)
    yield f"{prefix}.pos_embed", (1, 256, width)
    if dino:
        yield f"{prefix}.cls_token", (1, 1, width)
        yield f"{prefix}.reg_token", (1, 4, width)
    for block in range(depth):
        name = f"{prefix}.blocks.{block}"
        linears = {"attn.qkv": (3 * width, width), "attn.proj": (width, width)}
        linears |= {"mlp.fc1": (hidden, width), "mlp.fc2": (width, hidden)}
        for part, shape in linears.items():
            yield f"{name}.{part}.weight", shape
            yield f"{name}.{part}.bias", shape[:1]
        for part in ("norm1", "norm2"):
            yield f"{name}.{part}.weight", (width,)
            yield f"{name}.{part}.bias", (width,)
        if dino:
            yield f"{name}.ls1.scale_factor", (width,)
            yield f"{name}.ls2.scale_factor", (width,)


def language(width: int, hidden: int, depth: int, vocabulary: int) -> Iterator[tuple[str, Shape]]:
    yield "language_model.model.embed_tokens.weight", (vocabulary, width)
    for layer in range(depth):
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


def projector(vision: int, width: int) -> Iterator[tuple[str, Shape]]:
    for index, shape in enumerate(((4 * vision, vision), (width, 4 * vision), (width, width)), 1):
        yield f"projector.fc{index}.weight", shape
        yield f"projector.fc{index}.bias", shape[:1]


def head(width: int, dim: int) -> dict[str, Shape]:
    parts: dict[str, Shape] = {"layer_norm1": (dim * width,), "layer_norm2": (width,)}
    parts |= {"fc1": (width, dim * width), "fc2": (dim, width)}
    for block in (0, 1):
        parts |= {
            f"mlp_resnet_blocks.{block}.ffn.0": (width,),
            f"mlp_resnet_blocks.{block}.ffn.1": (width, width),
        }
    named = {f"module.model.{name}.weight": shape for name, shape in parts.items()}
    biases = {f"module.model.{name}.bias": shape[:1] for name, shape in parts.items()}
    return named | biases


def plan(name: str, shape: Shape) -> TensorPlan:
    if len(shape) > 1:
        init = "embedding" if "embed_tokens" in name else "matrix"
    else:
        init = "norm" if "norm" in name and name.endswith("weight") else "bias"
    return TensorPlan(name, shape, init, "BF16")


def write_checkpoint(out: Path, layers: int) -> dict:
    """Write the checkpoint directory ``out``."""
    out.mkdir(parents=True, exist_ok=True)
    for name in (
        "tokenizer.json",
        "tokenizer_config.json",
        "preprocessor_config.json",
        "dataset_statistics.json",
    ):
        shutil.copy(FIXTURE / name, out / name)
    config = json.loads((FIXTURE / "config.json").read_text())
    config["text_config"] = {"model_type": "llama", "pad_token_id": 32000, "vocab_size": 32064}
    if layers != LAYERS:
        config["text_config"]["num_hidden_layers"] = layers
    (out / "config.json").write_text(json.dumps(config))
    backbone = "vision_backbone.featurizer", "vision_backbone.fused_featurizer"
    everything = [
        *tower(backbone[0], 1024, 4096, 24, True),
        *tower(backbone[1], 1152, 4304, 27, False),
        *projector(2176, 4096),
        *language(4096, 11008, layers, 32064),
    ]
    shards = [everything[i::3] for i in range(3)]
    where = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05}-of-00003.safetensors"
        write_tensors(out / file, [plan(*entry) for entry in shard], {}, {"format": "pt"})
        where |= {name: file for name, _ in shard}
    (out / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    torch.manual_seed(0)
    state = {
        f"module.fc{i}.{kind}": shape
        for i, columns in ((1, 8), (2, 4096))
        for kind, shape in (("weight", (4096, columns)), ("bias", (4096,)))
    }
    for name, shapes in (("action_head", head(4096, 7)), ("proprio_projector", state)):
        tensors = {key: torch.randn(shape, dtype=torch.bfloat16) * 0.02 for key, shape in shapes.items()}
        torch.save(tensors, out / f"{name}--1_checkpoint.pt")
    return {"bytes": sum(file.stat().st_size for file in out.iterdir())}


def main(out: Path, /, *, dtype: str = "native", runs: int = 1, layers: int = LAYERS) -> None:
    """layers: of the language model, fewer than published for a shorter look. runs: 0 for none."""
    checkpoint, bundle = out / "openvla-oft", out / "openvla-oft.gguf"
    results: dict = {"architecture": "openvla_oft", "layers": layers, "dtype": dtype}
    if not (checkpoint / "proprio_projector--1_checkpoint.pt").exists():
        results["write"] = phase(write_checkpoint, checkpoint, layers)
    if not bundle.exists():
        results["convert"] = phase(convert, checkpoint, bundle)
        results["bundle_bytes"] = bundle.stat().st_size
    if runs:
        results["infer"] = phase(infer, bundle, dtype, runs)
    print(json.dumps(results))


if __name__ == "__main__":
    run(main)
