"""Write vla.cpp's GGUF layout of SmolVLA from its published schema, to test the importer."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from safetensors.torch import load_file

DECODER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_o",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
VISION = {
    "layer_norm1": "ln1",
    "layer_norm2": "ln2",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.out_proj": "attn_o",
    "mlp.fc1": "fc1",
    "mlp.fc2": "fc2",
}
SINGLE = {
    "vlm.model.text_model.embed_tokens.weight": "token_embd.weight",
    "vlm.model.text_model.norm.weight": "vlm.output_norm.weight",
    "lm_expert.norm.weight": "aex.output_norm.weight",
    "vlm.model.vision_model.embeddings.patch_embedding.weight": "vit.patch_embd.weight",
    "vlm.model.vision_model.embeddings.patch_embedding.bias": "vit.patch_embd.bias",
    "vlm.model.vision_model.embeddings.position_embedding.weight": "vit.pos_embd",
    "vlm.model.vision_model.post_layernorm.weight": "vit.post_ln.weight",
    "vlm.model.vision_model.post_layernorm.bias": "vit.post_ln.bias",
    "vlm.model.connector.modality_projection.proj.weight": "mm.fc.weight",
}
LAYERS = (
    (r"vlm\.model\.text_model\.layers\.(\d+)\.(.+)\.weight", "vlm.blk.{}.{}.weight", DECODER),
    (r"lm_expert\.layers\.(\d+)\.(.+)\.weight", "aex.blk.{}.{}.weight", DECODER),
    (r"vlm\.model\.vision_model\.encoder\.layers\.(\d+)\.(.+)\.weight", "vit.blk.{}.{}.weight", VISION),
    (r"vlm\.model\.vision_model\.encoder\.layers\.(\d+)\.(.+)\.bias", "vit.blk.{}.{}.bias", VISION),
)


def vlacpp_name(upstream: str) -> str | None:
    name = upstream.removeprefix("model.").removeprefix("vlm_with_expert.")
    if name == "vlm.lm_head.weight":
        return None
    for pattern, template, table in LAYERS:
        if match := re.fullmatch(pattern, name):
            return template.format(match[1], table[match[2]])
    return SINGLE.get(name, name)


def write_vlacpp(case: Path, out: Path) -> Path:
    """Write the file of a case. ``case`` is the golden folder of SmolVLA."""
    config = json.loads((case / "checkpoint" / "config.json").read_text())
    vlm = json.loads((case / "vlm" / "config.json").read_text())
    text, vision = vlm["text_config"], vlm["vision_config"]
    weights = load_file(case / "checkpoint" / "model.safetensors")
    stats = load_file(
        next((case / "checkpoint").glob("policy_preprocessor_step_*_normalizer_processor.safetensors"))
    )
    writer = GGUFWriter(out, "smolvla")
    writer.add_string("smolvla.architecture", "smolvla")
    expert = weights["model.vlm_with_expert.lm_expert.layers.0.mlp.gate_proj.weight"].shape
    integers = {
        "hidden": text["hidden_size"],
        "intermediate": text["intermediate_size"],
        "n_q_heads": text["num_attention_heads"],
        "n_kv_heads": text["num_key_value_heads"],
        "head_dim": text["head_dim"],
        "n_layers": config["num_vlm_layers"],
        "vocab_size": text["vocab_size"],
        "expert_h": expert[1],
        "expert_inter": expert[0],
        "chunk_size": config["chunk_size"],
        "num_steps": config["num_steps"],
        "max_state_dim": config["max_state_dim"],
        "max_action_dim": config["max_action_dim"],
        "real_state_dim": config["input_features"]["observation.state"]["shape"][0],
        "real_action_dim": config["output_features"]["action"]["shape"][0],
        "self_attn_every_n_layers": config["self_attn_every_n_layers"],
        "tokenizer_max_length": config["tokenizer_max_length"],
        "vit_hidden": vision["hidden_size"],
        "vit_layers": vision["num_hidden_layers"],
        "vit_heads": vision["num_attention_heads"],
        "vit_inter": vision["intermediate_size"],
        "image_size": vision["image_size"],
        "patch_size": vision["patch_size"],
        "vit_pixel_shuffle": vlm["scale_factor"],
        "n_img_tokens": (vision["image_size"] // vision["patch_size"] // vlm["scale_factor"]) ** 2,
    }
    for key, value in integers.items():
        writer.add_uint32(f"smolvla.{key}", value)
    for key in ("min_period", "max_period", "expert_width_multiplier"):
        writer.add_float64(f"smolvla.{key}", config[key])
    writer.add_float32("smolvla.norm_eps", 1e-8)
    writer.add_float32("smolvla.vit_ln_eps", 1e-6)

    for upstream, tensor in weights.items():
        name = vlacpp_name(upstream)
        if name is None:
            continue
        small = name.startswith("vit.") and (tensor.ndim == 1 or "patch" in name or "pos" in name)
        if tensor.dtype == torch.bfloat16 and not small:
            raw = tensor.contiguous().view(torch.uint16).numpy()
            writer.add_tensor(name, raw, raw_shape=list(tensor.shape), raw_dtype=GGMLQuantizationType.BF16)
        else:
            writer.add_tensor(name, tensor.float().numpy())
    for what, feature in (("state", "observation.state"), ("action", "action")):
        for stat in ("mean", "std"):
            writer.add_tensor(f"{what}_{stat}", stats[f"{feature}.{stat}"].numpy().astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


PI_VISION = "paligemma.model.vision_tower.vision_model."
PI_SINGLE = {
    "paligemma.lm_head.weight": "token_embd.weight",
    "paligemma.model.language_model.norm.weight": "vlm.output_norm.weight",
    "gemma_expert.model.norm.weight": "aex.output_norm.weight",
    "gemma_expert.model.norm.dense.weight": "aex.output_norm.weight",
    "gemma_expert.model.norm.dense.bias": "aex.output_norm.bias",
    f"{PI_VISION}embeddings.patch_embedding.weight": "vit.patch_embd.weight",
    f"{PI_VISION}embeddings.patch_embedding.bias": "vit.patch_embd.bias",
    f"{PI_VISION}embeddings.position_embedding.weight": "vit.pos_embd",
    f"{PI_VISION}post_layernorm.weight": "vit.post_ln.weight",
    f"{PI_VISION}post_layernorm.bias": "vit.post_ln.bias",
    "paligemma.model.multi_modal_projector.linear.weight": "mm.proj.weight",
    "paligemma.model.multi_modal_projector.linear.bias": "mm.proj.bias",
}
PI_LAYERS = (
    (r"paligemma\.model\.language_model\.layers\.(\d+)\.(.+)\.(weight)", "vlm", DECODER),
    (r"gemma_expert\.model\.layers\.(\d+)\.(.+?)(?:\.dense)?\.(weight|bias)", "aex", DECODER),
    (
        r"paligemma\.model\.vision_tower\.vision_model\.encoder\.layers\.(\d+)\.(.+)\.(weight|bias)",
        "vit",
        VISION,
    ),
)


def write_vlacpp_pi(case: Path, out: Path) -> Path:
    """Write the file of a case. ``case`` is the golden folder of pi0 or pi0.5. The token table comes from the
    language head."""
    config = json.loads((case / "checkpoint" / "config.json").read_text())
    arch = json.loads((case / "arch.json").read_text())
    weights = load_file(case / "checkpoint" / "model.safetensors")
    head = "model.paligemma_with_expert.paligemma.lm_head.weight"
    weights[head] = weights.pop(
        "model.paligemma_with_expert.paligemma.model.language_model.embed_tokens.weight"
    )
    stats = load_file(
        next((case / "checkpoint").glob("policy_preprocessor_step_*_normalizer_processor.safetensors"))
    )
    name = config["type"]
    writer = GGUFWriter(out, name)
    language, expert, vision = arch["language"], arch["expert"], arch["vision"]
    integers = {
        "hidden": language["hidden_size"],
        "intermediate": language["intermediate_size"],
        "n_q_heads": language["num_attention_heads"],
        "n_kv_heads": language["num_key_value_heads"],
        "head_dim": language["head_dim"],
        "n_layers": language["num_hidden_layers"],
        "vocab_size": language["vocab_size"],
        "expert_h": expert["hidden_size"],
        "expert_inter": expert["intermediate_size"],
        "chunk_size": config["chunk_size"],
        "num_steps": config["num_inference_steps"],
        "max_state_dim": config["max_state_dim"],
        "max_action_dim": config["max_action_dim"],
        "real_state_dim": config["input_features"]["observation.state"]["shape"][0],
        "real_action_dim": config["output_features"]["action"]["shape"][0],
        "tokenizer_max_length": config["tokenizer_max_length"],
        "vit_hidden": vision["hidden_size"],
        "vit_layers": vision["num_hidden_layers"],
        "vit_heads": vision["num_attention_heads"],
        "image_size": vision["image_size"],
        "patch_size": vision["patch_size"],
    }
    for key, value in integers.items():
        writer.add_uint32(f"{name}.{key}", value)
    for key, value in (("min_period", 4e-3), ("max_period", 4.0), ("rope_theta", 1e4)):
        writer.add_float64(f"{name}.{key}", value)
    for key, value in (("rms_norm_eps", 1e-6), ("norm_eps", 1e-8), ("vit_ln_eps", 1e-6)):
        writer.add_float32(f"{name}.{key}", value)
    for upstream, tensor in weights.items():
        short = upstream.removeprefix("model.").removeprefix("paligemma_with_expert.")
        if short == "gemma_expert.lm_head.weight":
            continue
        target = PI_SINGLE.get(short, short)
        for pattern, part, table in PI_LAYERS:
            if match := re.fullmatch(pattern, short):
                target = f"{part}.blk.{match[1]}.{table[match[2]]}.{match[3]}"
        writer.add_tensor(target, tensor.numpy())
    for what, feature in (("state", "observation.state"), ("action", "action")):
        for stat in ("mean", "std", "q01", "q99") if name == "pi05" else ("mean", "std"):
            writer.add_tensor(f"{what}_{stat}", stats[f"{feature}.{stat}"].numpy().astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out
