"""Write a random GR00T N1.7 checkpoint in NVIDIA's layout, at full size or in miniature.

Published widths: a Qwen3-VL of 2 billion numbers of which 16 language layers are kept, 32 blocks of the diffusion
transformer, 32 embodiments; 3.3 billion numbers in all, 6.5 GB in bfloat16, streamed into shards. The language
model's folder (configuration, tokenizer, chat template, image processor) lies in ``vlm/`` beside it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from sinew.presets.noise import write_tensors
from sinew.presets.plan import Init, TensorPlan
from sinew.presets.tokenizer import tokenizer_config, tokenizer_json

TAG, KEYS = "new_embodiment", {"arm": 6, "gripper": 1}
IMAGE = "<|image_pad|>"
TEMPLATE = (
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' }}{%- for part in message.content %}"
    "{%- if part.type == 'image' %}{{- '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{%- else %}{{- part.text }}{%- endif %}{%- endfor %}{{- '<|im_end|>\\n' }}{%- endfor %}"
)


@dataclass(frozen=True)
class GrootWidths:
    """Sizes of everything; the defaults are those of N1.7 as far as papers and code tell them."""

    text: dict[str, int] = field(
        default_factory=lambda: {
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 151936,
        }
    )
    vision: dict[str, Any] = field(
        default_factory=lambda: {
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "depth": 24,
            "num_heads": 16,
            "num_position_embeddings": 2304,
            "deepstack_visual_indexes": [5, 11, 17],
        }
    )
    sections: tuple[int, int, int] = (24, 20, 20)
    layers: int = 16
    blocks: int = 32
    heads: int = 32
    head_dim: int = 48
    hidden: int = 1024
    refine_layers: int = 4
    refine_heads: int = 32
    embodiments: int = 32
    action_dim: int = 132
    horizon: int = 40
    positions: int = 1024
    edge: int = 256


def write_groot_checkpoint(
    path: Path | str,
    widths: GrootWidths | None = None,
    storage: Literal["F32", "BF16"] = "BF16",
    shards: int = 4,
) -> Path:
    """Write ``path`` and ``path/vlm`` and return ``path``; the same arguments give the same bytes."""
    out, w = Path(path), widths or GrootWidths()
    (out / "vlm").mkdir(parents=True, exist_ok=True)
    for name, record in {**nvidia_files(w), **vlm_files(w)}.items():
        (out / name).write_text(json.dumps(record, indent=1), encoding="utf-8")
    (out / "vlm" / "tokenizer.json").write_text(_tokenizer(w.text["vocab_size"]), encoding="utf-8")
    plans = [TensorPlan(name, shape, init, storage) for name, shape, init in tensors(w)]
    index: dict[str, str] = {}
    total = sum(plan.nbytes for plan in plans)
    parts: list[list[TensorPlan]] = [[] for _ in range(shards)]
    done = 0
    for plan in plans:
        parts[min(done * shards // total, shards - 1)].append(plan)
        done += plan.nbytes
    for number, part in enumerate(parts, 1):
        name = f"model-{number:05}-of-{shards:05}.safetensors"
        write_tensors(out / name, part, {}, {"format": "pt"})
        index |= {plan.name: name for plan in part}
    record = {"metadata": {"total_size": total}, "weight_map": index}
    (out / "model.safetensors.index.json").write_text(json.dumps(record), encoding="utf-8")
    return out


def nvidia_files(w: GrootWidths) -> dict[str, dict[str, Any]]:
    """Return the JSON files of the checkpoint by name."""
    moments = {"video": [0], "state": [0], "action": list(range(w.horizon)), "language": [0]}
    keys = {
        "video": ["front", "wrist"],
        "state": list(KEYS),
        "action": list(KEYS),
        "language": ["annotation.task"],
    }
    modalities = {kind: {"delta_indices": moments[kind], "modality_keys": keys[kind]} for kind in moments}
    stats = {
        key: {"min": [-1.0] * n, "max": [1.0] * n, "mean": [0.0] * n, "std": [1.0] * n}
        for key, n in KEYS.items()
    }
    return {
        "config.json": {
            "model_type": "Gr00tN1d7",
            "model_name": "nvidia/Cosmos-Reason2-2B",
            "backbone_embedding_dim": w.text["hidden_size"],
            "select_layer": w.layers,
            "max_state_dim": w.action_dim,
            "max_action_dim": w.action_dim,
            "action_horizon": w.horizon,
            "hidden_size": w.hidden,
            "input_embedding_dim": w.heads * w.head_dim,
            "state_history_length": 1,
            "add_pos_embed": True,
            "use_vlln": True,
            "max_seq_len": w.positions,
            "use_alternate_vl_dit": True,
            "attend_text_every_n_blocks": 2,
            "diffusion_model_cfg": {
                "num_layers": w.blocks,
                "num_attention_heads": w.heads,
                "attention_head_dim": w.head_dim,
                "output_dim": w.hidden,
                "norm_type": "ada_norm",
                "interleave_self_attention": True,
                "positional_embeddings": None,
            },
            "vl_self_attention_cfg": {
                "num_layers": w.refine_layers,
                "num_attention_heads": w.refine_heads,
                "attention_head_dim": w.text["hidden_size"] // w.refine_heads,
            },
            "num_inference_timesteps": 4,
            "num_timestep_buckets": 1000,
            "max_num_embodiments": w.embodiments,
        },
        "processor_config.json": {
            "processor_class": "Gr00tN1d7Processor",
            "processor_kwargs": {
                "modality_configs": {TAG: modalities},
                "image_crop_size": None,
                "image_target_size": None,
                "shortest_image_edge": w.edge,
                "crop_fraction": 0.95,
                "use_albumentations": True,
                "letter_box_transform": False,
                "formalize_language": True,
                "clip_outliers": True,
                "use_relative_action": True,
            },
        },
        "statistics.json": {TAG: {"state": stats, "action": stats, "relative_action": {}}},
        "embodiment_id.json": {TAG: w.embodiments // 3},
    }


def vlm_files(w: GrootWidths) -> dict[str, dict[str, Any]]:
    """Return the JSON files of the language model's folder by name."""
    text = {
        **w.text,
        "num_hidden_layers": w.layers + 12,
        "rms_norm_eps": 1e-6,
        "rope_theta": 5_000_000,
        "rope_scaling": {"mrope_interleaved": True, "mrope_section": list(w.sections)},
    }
    vision = {
        **w.vision,
        "hidden_act": "gelu_pytorch_tanh",
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": w.text["hidden_size"],
    }
    half = [0.5, 0.5, 0.5]
    return {
        "vlm/config.json": {
            "model_type": "qwen3_vl",
            "image_token_id": w.text["vocab_size"] - 1,
            "text_config": text,
            "vision_config": vision,
        },
        "vlm/preprocessor_config.json": {
            "size": {"shortest_edge": w.edge**2, "longest_edge": 16_777_216},
            "image_mean": half,
            "image_std": half,
        },
        "vlm/tokenizer_config.json": {**tokenizer_config("Qwen2Tokenizer"), "chat_template": TEMPLATE},
    }


def _tokenizer(vocab_size: int) -> str:
    """A stand-in whose last token is the image's placeholder."""
    record = json.loads(tokenizer_json(vocab_size))
    record["added_tokens"][-1]["content"] = IMAGE
    return json.dumps(record, ensure_ascii=False)


def tensors(w: GrootWidths) -> Iterator[tuple[str, tuple[int, ...], Init]]:
    """Yield name, shape and kind of every tensor under NVIDIA's names."""
    yield from _vision(w)
    yield from _language(w)
    yield from _head(w)


def _linear(name: str, out: int, size: int) -> Iterator[tuple[str, tuple[int, ...], Init]]:
    yield f"{name}.weight", (out, size), "matrix"
    yield f"{name}.bias", (out,), "bias"


def _norm(name: str, size: int) -> Iterator[tuple[str, tuple[int, ...], Init]]:
    yield f"{name}.weight", (size,), "norm"
    yield f"{name}.bias", (size,), "bias"


def _vision(w: GrootWidths) -> Iterator[tuple[str, tuple[int, ...], Init]]:
    size, inner, out = w.vision["hidden_size"], w.vision["intermediate_size"], w.text["hidden_size"]
    start = "backbone.model.model.visual."
    yield f"{start}patch_embed.proj.weight", (size, 3, 2, 16, 16), "matrix"
    yield f"{start}patch_embed.proj.bias", (size,), "bias"
    yield f"{start}pos_embed.weight", (w.vision["num_position_embeddings"], size), "embedding"
    for index in range(w.vision["depth"]):
        block = f"{start}blocks.{index}."
        yield from _norm(f"{block}norm1", size)
        yield from _linear(f"{block}attn.qkv", 3 * size, size)
        yield from _linear(f"{block}attn.proj", size, size)
        yield from _norm(f"{block}norm2", size)
        yield from _linear(f"{block}mlp.linear_fc1", inner, size)
        yield from _linear(f"{block}mlp.linear_fc2", size, inner)
    taps = [f"deepstack_merger_list.{i}" for i in range(len(w.vision["deepstack_visual_indexes"]))]
    for name in ("merger", *taps):
        yield from _norm(f"{start}{name}.norm", size if name == "merger" else 4 * size)
        yield from _linear(f"{start}{name}.linear_fc1", 4 * size, 4 * size)
        yield from _linear(f"{start}{name}.linear_fc2", out, 4 * size)


def _language(w: GrootWidths) -> Iterator[tuple[str, tuple[int, ...], Init]]:
    t, start = w.text, "backbone.model.model.language_model."
    size, D = t["hidden_size"], t["head_dim"]
    yield f"{start}embed_tokens.weight", (t["vocab_size"], size), "embedding"
    for index in range(w.layers):
        layer = f"{start}layers.{index}."
        heads = {"q": t["num_attention_heads"], "k": t["num_key_value_heads"], "v": t["num_key_value_heads"]}
        for part, count in heads.items():
            yield f"{layer}self_attn.{part}_proj.weight", (count * D, size), "matrix"
        yield f"{layer}self_attn.o_proj.weight", (size, t["num_attention_heads"] * D), "matrix"
        for name in ("self_attn.q_norm", "self_attn.k_norm"):
            yield f"{layer}{name}.weight", (D,), "norm"
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{layer}{name}.weight", (size,), "norm"
        for name in ("gate_proj", "up_proj"):
            yield f"{layer}mlp.{name}.weight", (t["intermediate_size"], size), "matrix"
        yield f"{layer}mlp.down_proj.weight", (size, t["intermediate_size"]), "matrix"
    yield f"{start}norm.weight", (size,), "norm"


def _head(w: GrootWidths) -> Iterator[tuple[str, tuple[int, ...], Init]]:
    D, width, start = w.heads * w.head_dim, w.text["hidden_size"], "action_head."
    yield from _norm(f"{start}vlln", width)
    for index in range(w.refine_layers):
        block = f"{start}vl_self_attention.transformer_blocks.{index}."
        yield from _norm(f"{block}norm1", width)
        yield from _norm(f"{block}norm3", width)
        yield from _block(block, width, width, width)
    yield from _linear(f"{start}model.timestep_encoder.timestep_embedder.linear_1", D, 256)
    yield from _linear(f"{start}model.timestep_encoder.timestep_embedder.linear_2", D, D)
    for index in range(w.blocks):
        block = f"{start}model.transformer_blocks.{index}."
        yield from _linear(f"{block}norm1.linear", 2 * D, D)
        yield from _block(block, D, D, D if index % 2 else width)
    yield from _linear(f"{start}model.proj_out_1", 2 * D, D)
    yield from _linear(f"{start}model.proj_out_2", w.hidden, D)
    yield f"{start}position_embedding.weight", (w.positions, D), "embedding"
    projections = {
        "state_encoder.layer1": (w.action_dim, w.hidden),
        "state_encoder.layer2": (w.hidden, D),
        "action_encoder.W1": (w.action_dim, D),
        "action_encoder.W2": (2 * D, D),
        "action_encoder.W3": (D, D),
        "action_decoder.layer1": (w.hidden, w.hidden),
        "action_decoder.layer2": (w.hidden, w.action_dim),
    }
    for name, (size, out) in projections.items():  # [embodiments, in, out]
        yield f"{start}{name}.W", (w.embodiments, size, out), "matrix"
        yield f"{start}{name}.b", (w.embodiments, out), "bias"


def _block(block: str, size: int, inner: int, context: int) -> Iterator[tuple[str, tuple[int, ...], Init]]:
    yield from _linear(f"{block}attn1.to_q", inner, size)
    yield from _linear(f"{block}attn1.to_k", inner, context)
    yield from _linear(f"{block}attn1.to_v", inner, context)
    yield from _linear(f"{block}attn1.to_out.0", size, inner)
    yield from _linear(f"{block}ff.net.0.proj", 4 * size, size)
    yield from _linear(f"{block}ff.net.2", size, 4 * size)
