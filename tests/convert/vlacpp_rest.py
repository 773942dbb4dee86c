"""Write vla.cpp's layouts of GR00T N1.5 and N1.6, Evo-1 and BitVLA, to test the importer.

The rules are those of vla.cpp's own converters (commit b18873d), with the sizes of the checkpoints.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.convert.vlacpp_families import BLOCK, CODERS, QWEN_NORMS, _leaf, _weights, _write
from tests.convert.vlacpp_file import DECODER, VISION

EMBODIMENTS = {"new_embodiment": 31, "oxe_droid": 17, "agibot_genie1": 26, "gr1": 24}
CONNECTOR = {"0": "ln", "1": "fc1", "3": "fc2"}


def _read(path: Path) -> Any:
    return json.loads(path.read_text())


# ----------------------------------------------------------------------------- GR00T


def write_eagle(case: Path, out: Path, folder: str = "checkpoint") -> Path:
    """Write the file of a case. ``case`` is the golden folder of GR00T N1.5 (in NVIDIA's layout its folder "base") or
    N1.6."""
    first = case.name == "groot-n15"
    config, eagle = (
        _read(case / ("base" if first else folder) / "config.json"),
        _read(case / "eagle" / "config.json"),
    )
    head = config["action_head_cfg"] if first else config
    root = "backbone.eagle_model." if first else "backbone.model."
    tensors: dict[str, torch.Tensor] = {}
    for key, tensor in _weights(case / folder).items():
        if name := _eagle_name(key.removeprefix("_groot_model."), root):
            tensors[name] = tensor
    transformer, refine = head["diffusion_model_cfg"], head.get("vl_self_attention_cfg", {})
    values: dict[str, Any] = {
        "image_token_index": eagle["image_token_index"],
        "lm_layers_used": config["backbone_cfg"]["select_layer"] if first else config["select_layer"],
        "dit_layers": transformer["num_layers"],
        "dit_heads": transformer["num_attention_heads"],
        "dit_head_dim": transformer["attention_head_dim"],
        "dit_interleave": 1,
        "action_dim": head["max_action_dim"],
        **{
            key: head[key]
            for key in ("backbone_embedding_dim", "action_horizon", "max_state_dim", "max_seq_len")
        },
        **{key: head[key] for key in ("num_inference_timesteps", "num_timestep_buckets")},
    }
    if not first:
        values |= {
            "attend_text_every_n_blocks": head["attend_text_every_n_blocks"],
            "embodiment_id_mapping": (case / folder / "embodiment_id.json").read_text().strip(),
            "statistics_json": (case / folder / "statistics.json").read_text(),
            "processor_config_json": (case / folder / "processor_config.json").read_text(),
        }
        return _write(out, "gr00t_n1_6", tensors, values)
    metadata = case / folder / "experiment_cfg" / "metadata.json"
    values |= {
        "vlsa_layers": refine["num_layers"],
        "vlsa_heads": refine["num_attention_heads"],
        "vlsa_head_dim": refine["attention_head_dim"],
        "num_target_vision_tokens": head["num_target_vision_tokens"],
        "embodiment_tag_mapping": json.dumps(EMBODIMENTS),
        "metadata_json": metadata.read_text() if metadata.exists() else "{}",
    }
    return _write(out, "gr00t_n1_5", tensors, values)


def _eagle_name(key: str, root: str) -> str | None:
    tower, words = f"{root}vision_model.vision_model.", f"{root}language_model.model."
    if key.startswith(tower):
        rest = key.removeprefix(tower)
        if match := re.fullmatch(r"encoder\.layers\.(\d+)\.(.*)", rest):
            return f"vit.blk.{match[1]}.{_leaf(match[2], VISION)}"
        single = {"embeddings.position_embedding.weight": "vit.pos_embd"}
        rest = rest.replace("embeddings.patch_embedding", "vit.patch_embd").replace(
            "post_layernorm", "vit.post_ln"
        )
        return single.get(rest) or (rest if rest.startswith("vit.") else None)
    if key.startswith(f"{root}language_model."):
        if match := re.fullmatch(re.escape(words) + r"layers\.(\d+)\.(.*)", key):
            return f"vlm.blk.{match[1]}.{_leaf(match[2], DECODER | QWEN_NORMS)}"
        return "vlm.output_norm.weight" if key == f"{words}norm.weight" else "token_embd.weight"
    if match := re.fullmatch(re.escape(root) + r"mlp1\.(\d)\.(.*)", key):
        return f"mm.{'fc' if 'eagle_model' in root else CONNECTOR[match[1]]}.{match[2]}"
    rest = key.removeprefix("action_head.")
    if match := re.fullmatch(r"(model|vl_self_attention)\.transformer_blocks\.(\d+)\.(.*)", rest):
        part = "dit" if match[1] == "model" else "vlsa"
        return f"aex.{part}.{match[2]}.{_leaf(match[3], BLOCK)}"
    if match := re.fullmatch(r"model\.timestep_encoder\.timestep_embedder\.linear_([12])\.(.*)", rest):
        return f"aex.dit.time_emb.l{match[1]}.{match[2]}"
    if match := re.fullmatch(r"model\.proj_out_([12])\.(.*)", rest):
        return f"aex.dit.proj_out{match[1]}.{match[2]}"
    if match := re.fullmatch(r"(\w+_(?:en|de)coder)\.(?:layer(\d)|(W\d))\.(.*)", rest):
        return f"aex.{CODERS[match[1]]}.{match[3] or 'l' + match[2]}.{match[4]}"
    tables = {"position_embedding.weight": "pos_embd", "future_tokens.weight": "future_tokens"}
    return None if rest == "mask_token" else f"aex.{tables.get(rest, rest)}"


# ----------------------------------------------------------------------------- Evo-1


def write_evo1(case: Path, out: Path, arm: str) -> Path:
    """Write the file of a case.

    Args:
        case: Golden folder in the layout of Evo-1's original repository.
        out: The file.
        arm: The robot whose statistics the file gets.
    """
    folder = case / "checkpoint"
    config = _read(folder / "config.json")
    module = torch.load(folder / "mp_rank_00_model_states.pt", weights_only=True)["module"]
    names = [(key, _evo1_name(key)) for key in module]
    tensors = {name: module[key] for key, name in names if name}
    stats: Any = _read(folder / "norm_stats.json")
    for part in arm.split("/"):
        stats = stats[part]
    for what, feature in (("state", "observation.state"), ("action", "action")):
        for kind in ("min", "max"):
            padded = np.zeros(24, np.float32)
            padded[: len(stats[feature][kind])] = stats[feature][kind]
            tensors[f"{what}_{kind}"] = torch.from_numpy(padded)
    layers = {int(match[1]) for name in tensors if (match := re.match(r"vlm\.blk\.(\d+)\.", name))}
    values = {
        "image_size": config["image_size"],
        "lm_layers_used": len(layers),
        "embed_dim": config["embed_dim"],
        "dit_layers": config["num_layers"],
        "dit_heads": config["num_heads"],
        "mlp_head_hidden": config["hidden_dim"],
        "real_state_dim": len(stats["observation.state"]["min"]),
        "real_action_dim": len(stats["action"]["min"]),
        "max_text_length": 1024,
        "n_images": 3,
        **{key: config[key] for key in ("horizon", "per_action_dim", "state_dim", "num_inference_timesteps")},
    }
    return _write(out, "evo1", tensors, values)


def _evo1_name(key: str) -> str | None:
    if match := re.fullmatch(r"embedder\.model\.vision_model\.encoder\.layers\.(\d+)\.(.*)", key):
        rest = match[2].replace("attn.", "attn_").replace("mlp.", "")
        return f"vit.blk.{match[1]}.{rest}"
    if match := re.fullmatch(r"embedder\.model\.vision_model\.embeddings\.(\w+)(.*)", key):
        tables = {
            "patch_embedding": "patch_embd",
            "class_embedding": "class_embd",
            "position_embedding": "pos_embd",
        }
        return f"vit.{tables[match[1]]}{match[2]}"
    if match := re.fullmatch(r"embedder\.model\.mlp1\.(\d)\.(.*)", key):
        return f"mm.{CONNECTOR[match[1]]}.{match[2]}"
    words = "embedder.model.language_model.model."
    if match := re.fullmatch(re.escape(words) + r"layers\.(\d+)\.(.*)", key):
        return f"vlm.blk.{match[1]}.{_leaf(match[2], DECODER)}"
    single = {
        f"{words}embed_tokens.weight": "token_embd.weight",
        f"{words}norm.weight": "vlm.output_norm.weight",
    }
    if key in single or not key.startswith("action_head."):
        return single.get(key)
    rest = key.removeprefix("action_head.").replace(".linear.", ".")
    if match := re.fullmatch(r"transformer_blocks\.(\d+)\.(.*)", rest):
        part = match[2].replace("attn.in_proj_", "attn_in.").replace("attn.out_proj", "attn_out")
        return f"aex.blk.{match[1]}.{part.replace('ff.0', 'ff1').replace('ff.2', 'ff2')}"
    for old, new in (
        ("action_encoder.pos_encoding.pe", "ae.pos_enc"),
        ("action_encoder", "ae"),
        ("time_pos_enc.pe", "time_pos_enc"),
        ("seq_pool_proj", "seq_pool"),
        ("mlp_head", "head"),
        ("state_encoder", "state_enc"),
    ):
        rest = rest.replace(old, new)
    return f"aex.{rest}"


# ----------------------------------------------------------------------------- BitVLA


def tiled(values: np.ndarray) -> np.ndarray:
    """Pack values of -1, 0 and 1 in the byte order of ``pack_ladder_int2``, in tiles of 16 rows and 128 columns."""
    channels, k = values.shape
    out = []
    for row0 in range(0, channels, 16):
        for column0 in range(0, k, 128):
            for column1 in range(column0, column0 + 128, 32):
                for row1 in (row0, row0 + 8):
                    for column2 in (column1, column1 + 16):
                        for row in range(row1, row1 + 8):
                            for byte in range(4):
                                four = values[row, column2 + byte : column2 + 16 : 4].astype(np.int64) + 2
                                out.append(int(four @ (1, 4, 16, 64)))
    return np.array(out, np.uint8).view(np.int8)


def _bits(base: str, *weights: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return one matrix, or several that form one matrix, as bytes with a scale for each."""
    found, scales = [], []
    for weight in weights:
        mean = weight.float().abs().double().mean().clamp_(min=1e-5).float()
        found.append((weight.float() * (1 / mean)).round().clamp(-1, 1))
        scales.append(mean)
    values = torch.cat(found).numpy()
    padded = np.zeros((values.shape[0], -(-values.shape[1] // 128) * 128))
    padded[:, : values.shape[1]] = values
    return {f"{base}.weight": torch.from_numpy(tiled(padded)), f"{base}.scale": torch.stack(scales)}


def write_bitvla(folder: Path, out: Path) -> Path:
    """Write the file of a checkpoint in ``folder``, whose sizes must divide into tiles."""
    weights, config = _weights(folder), _read(folder / "config.json")
    text, vision = config["text_config"], config["vision_config"]
    head, state = (
        {key.removeprefix("module."): tensor for key, tensor in torch.load(file, weights_only=True).items()}
        for file in (next(folder.glob("action_head*")), next(folder.glob("proprio_projector*")))
    )
    tower, words = "vision_tower.vision_model.", "language_model.model."
    tensors = {
        "vit.patch_embd.weight": weights[f"{tower}embeddings.patch_embedding.weight"].flatten(1),
        "vit.patch_embd.bias": weights[f"{tower}embeddings.patch_embedding.bias"],
        "vit.pos_embd.weight": weights[f"{tower}embeddings.position_embedding.weight"],
        "token_embd.weight": weights[f"{words}embed_tokens.weight"],
        "lm.output_norm.weight": weights[f"{words}norm.weight"],
    }
    for layer in range(vision["num_hidden_layers"]):
        old, new = f"{tower}encoder.layers.{layer}.", f"vit.blk.{layer}."
        for norm in "12":
            for end in ("weight", "bias"):
                tensors[f"{new}ln{norm}.{end}"] = weights[f"{old}layer_norm{norm}.{end}"]
        for theirs, ours in VISION.items():
            if "norm" not in theirs:
                tensors |= _bits(new + ours, weights[f"{old}{theirs}.weight"])
                tensors[f"{new}{ours}.bias"] = weights[f"{old}{theirs}.bias"]
    for layer in range(text["num_hidden_layers"]):
        old, new = f"{words}layers.{layer}.", f"lm.blk.{layer}."
        for part in "qkvo":
            tensors |= _bits(f"{new}attn_{part}", weights[f"{old}self_attn.{part}_proj.weight"])
        both = [weights[f"{old}mlp.{part}_proj.weight"] for part in ("gate", "up")]
        tensors |= _bits(f"{new}ffn_gate_up", *both)
        tensors |= _bits(f"{new}ffn_down", weights[f"{old}mlp.down_proj.weight"])
        tensors[f"{new}attn_norm.weight"] = weights[f"{old}input_layernorm.weight"]
        tensors[f"{new}ffn_norm.weight"] = weights[f"{old}post_attention_layernorm.weight"]
        tensors[f"{new}attn_sub_norm.weight"] = weights[f"{old}self_attn.attn_sub_norm.weight"]
        tensors[f"{new}ffn_sub_norm.weight"] = weights[f"{old}mlp.ffn_sub_norm.weight"]
    for key, tensor in weights.items():
        if key.startswith("multi_modal_projector."):
            tensors[key.replace("multi_modal_projector", "mm")] = tensor
    for key, tensor in state.items():
        tensors[f"aex.proprio.{key}"] = tensor
    for key, tensor in head.items():
        name = key.removeprefix("model.").replace("layer_norm", "ln").replace("mlp_resnet_blocks", "blk")
        tensors["aex.head." + name.replace("ffn.0", "ln").replace("ffn.1", "fc")] = tensor
    heads = text["num_attention_heads"]
    tokens = {token["content"]: token["id"] for token in _read(folder / "tokenizer.json")["added_tokens"]}
    values = {
        "vit.hidden": vision["hidden_size"],
        "vit.inter": vision["intermediate_size"],
        "vit.layers": vision["num_hidden_layers"],
        "vit.heads": vision["num_attention_heads"],
        "vit.image_size": vision["image_size"],
        "vit.patch_size": vision["patch_size"],
        "vit.ln_eps": 1e-6,
        "lm.hidden": text["hidden_size"],
        "lm.inter": text["intermediate_size"],
        "lm.layers": text["num_hidden_layers"],
        "lm.q_heads": heads,
        "lm.kv_heads": text["num_key_value_heads"],
        "lm.head_dim": text["hidden_size"] // heads,
        "lm.rms_eps": 1e-5,
        "lm.rope_theta": 5e5,
        "quant.vit_weight_bits": 1,
        "quant.vit_act_bits": 8,
        "quant.lm_weight_bits": 1,
        "quant.lm_act_bits": 8,
        "quant.int2_packed": 1,
        "tokens.image_id": tokens["<|image_pad|>"],
        "tokens.proprio_id": tokens["<proprio_pad>"],
        "tokens.stop_id": tokens["<|end_of_text|>"],
        "statistics_json": (folder / "dataset_statistics.json").read_text(),
        "preprocessor_config_json": (folder / "preprocessor_config.json").read_text(),
    }
    return _write(out, "bitvla", tensors, values)
