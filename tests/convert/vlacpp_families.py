"""Write vla.cpp's layouts of OpenVLA-OFT, VLA-Adapter, GR00T N1.7 and VLA-JEPA, to test the importer.

The files have the same tensors and metadata as those of vla.cpp's own converters (commit b18873d). For this
comparison, which is not part of the repository, the fixed sizes in the converters were set to those of the
checkpoints.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from gguf import GGMLQuantizationType, GGUFWriter
from safetensors.torch import load_file

from tests.convert.vlacpp_file import DECODER

TOWER = {"attn.qkv": "attn_qkv", "attn.proj": "attn_o", "mlp.linear_fc1": "fc1", "mlp.linear_fc2": "fc2"}
TOWER |= {"norm1": "ln1", "norm2": "ln2"}
TIMM = {"attn.qkv": "qkv", "attn.proj": "proj", "mlp.fc1": "fc1", "mlp.fc2": "fc2", "norm1": "ln1"}
TIMM |= {"norm2": "ln2", "ls1.scale_factor": "ls1", "ls2.scale_factor": "ls2"}
BLOCK = {"norm1.linear": "adaln", "attn1.to_q": "attn_q", "attn1.to_k": "attn_k", "attn1.to_v": "attn_v"}
BLOCK |= {"attn1.to_out.0": "attn_o", "ff.net.0.proj": "ff0", "ff.net.2": "ff2", "norm1": "norm1"}
BLOCK |= {"norm3": "norm3"}
QWEN_NORMS = {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}
CODERS = {"state_encoder": "state_enc", "action_encoder": "act_enc", "action_decoder": "act_dec"}


def _write(out: Path, name: str, tensors: dict[str, torch.Tensor], values: dict[str, Any]) -> Path:
    writer = GGUFWriter(out, name)
    writer.add_string(f"{name}.architecture", name)
    for key, value in values.items():
        add = {int: writer.add_uint32, str: writer.add_string, float: writer.add_float32}[type(value)]
        add(f"{name}.{key}", value)
    for key, tensor in tensors.items():
        if tensor.dtype == torch.bfloat16:
            raw = tensor.contiguous().view(torch.uint16).numpy()
            writer.add_tensor(key, raw, raw_shape=list(tensor.shape), raw_dtype=GGMLQuantizationType.BF16)
        else:
            writer.add_tensor(key, tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    files = sorted(folder.glob("model*.safetensors"))
    return {key: tensor for file in files for key, tensor in load_file(file).items()}


def _leaf(rest: str, table: dict[str, str]) -> str:
    """Translate the part of a tensor name below a layer with ``table``. Keeps the ending .weight or .bias."""
    if rest in table:
        return table[rest]
    stem, _, end = rest.rpartition(".")
    return f"{table[stem]}.{end}"


# ----------------------------------------------------------------------------- Prismatic


def write_prismatic(case: Path, out: Path) -> Path:
    """Write the file of a case. ``case`` is the golden folder of OpenVLA-OFT or VLA-Adapter."""
    folder = case / "checkpoint"
    weights = _weights(folder)
    adapter = "action_queries.weight" in weights
    parts = {
        part: torch.load(next(folder.glob(f"{part}--*.pt")), weights_only=True)
        for part in ("action_head", "proprio_projector")
    }
    tensors: dict[str, torch.Tensor] = {}
    depth = {}
    for letter, prefix in (("d", "vision_backbone.featurizer."), ("s", "vision_backbone.fused_featurizer.")):
        ids = [int(m[1]) for key in weights if (m := re.match(re.escape(prefix) + r"blocks\.(\d+)\.", key))]
        depth[letter] = max(ids)  # vla.cpp leaves out the last block
        for key in (key for key in weights if key.startswith(prefix)):
            rest = key.removeprefix(prefix)
            if match := re.fullmatch(r"blocks\.(\d+)\.(.*)", rest):
                if int(match[1]) < depth[letter]:
                    tensors[f"vis.{letter}.blk.{match[1]}.{_leaf(match[2], TIMM)}"] = weights[key]
            elif rest.startswith("patch_embed.proj."):
                tensors[f"vis.{letter}.patch.{rest.rpartition('.')[2]}"] = weights[key]
            elif rest in ("cls_token", "reg_token", "pos_embed"):
                tensors[f"vis.{letter}.{rest[:3]}"] = weights[key]
    for key, tensor in weights.items():
        if match := re.fullmatch(r"language_model\.model\.layers\.(\d+)\.(.*)", key):
            tensors[f"lm.blk.{match[1]}.{_leaf(match[2], DECODER)}"] = tensor
        elif key.startswith("projector."):
            tensors[f"vis.proj.{key.removeprefix('projector.')}"] = tensor
    tensors["token_embd.weight"] = weights["language_model.model.embed_tokens.weight"]
    tensors["lm.output_norm.weight"] = weights["language_model.model.norm.weight"]
    if adapter:
        tensors["action_queries.weight"] = weights["action_queries.weight"]
    head = {key.removeprefix("module."): tensor for key, tensor in parts["action_head"].items()}
    for key, tensor in head.items():
        if "film_gen" in key:
            continue
        name = key.removeprefix("model.").replace("layer_norm", "ln").replace("gating_factor", "gating")
        name = name.replace("mlp_resnet_blocks", "blk")
        norm, linear = ("ffn_ln", "ffn_lin") if adapter else ("ln", "lin")
        tensors["aex.head." + name.replace("ffn.0", norm).replace("ffn.1", linear)] = tensor
    for key, tensor in parts["proprio_projector"].items():
        tensors[f"aex.proprio.{key.removeprefix('module.')}"] = tensor
    text = json.loads((folder / "config.json").read_text())["text_config"]
    heads = text["num_attention_heads"]
    values: dict[str, Any] = {f"vit.{tower}.heads": 16 for tower in ("dino", "sig")}
    values |= {
        "vit.image_size": 224,
        "vit.patch_size": 14,
        "lm.hidden": text["hidden_size"],
        "lm.layers": text["num_hidden_layers"],
        "lm.q_heads": heads,
        "lm.kv_heads": text.get("num_key_value_heads", heads),
        "lm.head_dim": text.get("head_dim") or text["hidden_size"] // heads,
        "lm.inter": text["intermediate_size"],
        "lm.vocab": text["vocab_size"],
        "lm.rope_theta": 1e6 if adapter else 1e4,
        "lm.rms_eps": 1e-6,
        "statistics_json": (folder / "dataset_statistics.json").read_text(),
    }
    tensors = {key: tensor.to(torch.bfloat16) for key, tensor in tensors.items()}
    return _write(out, "vla_adapter" if adapter else "openvla_oft", tensors, values)


# ----------------------------------------------------------------------------- Qwen3-VL


def write_qwen(case: Path, out: Path, marker: int = 0) -> Path:
    """Write the file of a case.

    Args:
        case: Golden folder of GR00T N1.7 or VLA-JEPA.
        out: The file.
        marker: Id of the embodied action token.
    """
    folder, groot = case / "checkpoint", marker == 0
    config, vlm = (json.loads((path / "config.json").read_text()) for path in (folder, case / "vlm"))
    text, vision = vlm["text_config"], vlm["vision_config"]
    root, head = (
        ("backbone.model.model.", "action_head.")
        if groot
        else ("model.qwen.model.model.", "model.action_model.")
    )
    short, dit = ("aex", "aex.dit") if groot else ("ah", "ah")
    tensors: dict[str, torch.Tensor] = {}
    for key, tensor in _weights(folder).items():
        name = _qwen_name(key, root, head, short, dit)
        if name == "vit.patch_embd.weight":
            tensor = tensor.flatten(1)
        if name:
            tensors[name] = tensor
    values: dict[str, Any] = {
        "patch_size": vision["patch_size"],
        "temporal_patch_size": vision["temporal_patch_size"],
        "image_token_index": vlm["image_token_id"],
        "lm_hidden": text["hidden_size"],
        "num_inference_timesteps": config["num_inference_timesteps"],
        "dit_layers": config["diffusion_model_cfg"]["num_layers"] if groot else config["action_num_layers"],
    }
    if not groot:
        values |= {
            "embodied_action_token_id": marker,
            "state_dim": config["state_dim"],
            "action_dim": config["action_dim"],
            "action_horizon": config["chunk_size"],
            "num_future_tokens": config["num_embodied_action_tokens_per_instruction"],
            "num_timestep_buckets": config["action_num_timestep_buckets"],
            "output_dim": config["action_hidden_size"],
            "dit_heads": config["action_num_heads"],
            "dit_head_dim": config["action_attention_head_dim"],
        }
        return _write(out, "vla_jepa", tensors, values)
    transformer, refine = config["diffusion_model_cfg"], config["vl_self_attention_cfg"]
    values |= {
        "lm_layers_used": config["select_layer"],
        "vlsa_layers": refine["num_layers"],
        "vlsa_heads": refine["num_attention_heads"],
        "vlsa_head_dim": refine["attention_head_dim"],
        "dit_heads": transformer["num_attention_heads"],
        "dit_head_dim": transformer["attention_head_dim"],
        "dit_interleave": 1,
        "action_dim": config["max_action_dim"],
        "embodiment_id_mapping": (folder / "embodiment_id.json").read_text(),
        "statistics_json": (folder / "statistics.json").read_text(),
        "processor_config_json": (folder / "processor_config.json").read_text(),
        **{key: config[key] for key in ("backbone_embedding_dim", "attend_text_every_n_blocks")},
        **{key: config[key] for key in ("action_horizon", "max_state_dim", "num_timestep_buckets")},
        "max_seq_len": config["max_seq_len"],
    }
    return _write(out, "gr00t_n1_7", tensors, values)


def _qwen_name(key: str, root: str, head: str, short: str, dit: str) -> str | None:
    """Return vla.cpp's name of an upstream tensor. None if vla.cpp leaves the tensor out."""
    if key.endswith("lm_head.weight"):
        return "token_embd.weight" if short == "ah" else None
    if key.startswith(root + "language_model."):
        rest = key.removeprefix(root + "language_model.")
        if match := re.fullmatch(r"layers\.(\d+)\.(.*)", rest):
            return f"vlm.blk.{match[1]}.{_leaf(match[2], DECODER | QWEN_NORMS)}"
        return {"embed_tokens.weight": "token_embd.weight", "norm.weight": "vlm.output_norm.weight"}[rest]
    if key.startswith(root + "visual."):
        rest = key.removeprefix(root + "visual.").replace("linear_fc", "fc")
        if match := re.fullmatch(r"blocks\.(\d+)\.(.*)", rest):
            table = {name.replace("linear_fc", "fc"): value for name, value in TOWER.items()}
            return f"vit.blk.{match[1]}.{_leaf(match[2], table)}"
        rest = rest.replace("patch_embed.proj", "patch_embd").replace("deepstack_merger_list", "deepstack")
        return "vit.pos_embd" if rest == "pos_embed.weight" else f"vit.{rest}"
    rest = key.removeprefix(head)
    if match := re.fullmatch(r"(model|vl_self_attention)\.transformer_blocks\.(\d+)\.(.*)", rest):
        part = "dit" if match[1] == "model" else "vlsa"
        return f"{short}.{part}.{match[2]}.{_leaf(match[3], BLOCK)}"
    if match := re.fullmatch(r"model\.timestep_encoder\.timestep_embedder\.linear_([12])\.(.*)", rest):
        return f"{dit}.time_emb.l{match[1]}.{match[2]}"
    if match := re.fullmatch(r"model\.proj_out_([12])\.(.*)", rest):
        return f"{dit}.proj_out{match[1]}.{match[2]}"
    if match := re.fullmatch(r"(\w+_(?:en|de)coder)\.(?:layer(\d)|(W\d))\.(.*)", rest):
        return f"{short}.{CODERS[match[1]]}.{match[3] or 'l' + match[2]}.{match[4]}"
    tables = {"position_embedding.weight": "pos_embd", "future_tokens.weight": "future_tokens"}
    if rest == "mask_token":
        return None
    return f"{short}.{tables.get(rest, rest)}"
