"""Export OpenVLA-OFT and VLA-Adapter ("Pro" head) as vla.cpp's files: names, sizes and statistics for :mod:`.write`.

Source: vla.cpp ``scripts/convert_{openvla_oft,vla_adapter}_to_gguf.py``, ``gguf_blocks.py``, and the keys that
``src/models/{openvla_oft,vla_adapter}.cpp`` read (commit b18873d).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sinew.bundle import Bundle
from sinew.bundle.schema import Manifest, Normalization
from sinew.bundle.writer import TensorSource
from sinew.convert.tensors import Rule, apply, fuse, reshape, split
from sinew.core import ConvertError
from sinew.families.openvla import adapter, model

ARCHITECTURES = ("openvla_oft", "vla_adapter")
PACKED = ()  # further tensor types of these families; empty, because they store only float32 and bfloat16
_LINEAR = r"\.(weight|bias)"
_BLOCK = r"aex.head.blk.\1."


def _first(source: TensorSource) -> tuple[TensorSource, TensorSource]:
    """Split the prefix into the class token [1, 1, C] and the registers [1, n, C]."""
    count, width = source.shape
    first, others = split(source, (1, count - 1))
    return reshape(first, 1, 1, width), reshape(others, 1, count - 1, width)


def _tower(index: int, letter: str) -> list[Rule]:
    old, new = rf"vision\.towers\.{index}\.", f"vis.{letter}."
    layer, to = old + r"layers\.(\d+)\.", new + r"blk.\1."
    return [
        Rule(old + "patch_embedding" + _LINEAR, (rf"{new}patch.\1",)),
        Rule(old + "prefix", (f"{new}cls", f"{new}reg"), _first),
        Rule(
            old + r"position_embedding\.weight",
            (f"{new}pos",),
            lambda source: reshape(source, 1, *source.shape),
        ),
        Rule(layer + "norm([12])" + _LINEAR, (rf"{to}ln\2.\3",)),
        Rule(layer + r"scale([12])\.weight", (rf"{to}ls\2",)),
        Rule(layer + r"attn\.qkv" + _LINEAR, (rf"{to}qkv.\2",)),
        Rule(layer + r"attn\.o_proj" + _LINEAR, (rf"{to}proj.\2",)),
        Rule(layer + r"mlp\.(fc[12])" + _LINEAR, (rf"{to}\2.\3",)),
    ]


def language_rules(prefix: str) -> list[Rule]:
    """Return the rules that rename the tensors of a language model. They also support a bundle in which the matrices
    gate and up are one matrix.

    Args:
        prefix: Prefix of the names in vla.cpp.
    """
    old, to = r"language\.layers\.(\d+)\.", rf"{prefix}.blk.\1."
    return [
        Rule(r"language\.embed_tokens\.weight", ("token_embd.weight",)),
        Rule(r"language\.norm\.weight", (f"{prefix}.output_norm.weight",)),
        Rule(old + r"input_norm\.weight", (f"{to}attn_norm.weight",)),
        Rule(old + r"post_norm\.weight", (f"{to}ffn_norm.weight",)),
        Rule(old + r"attn\.([qkvo])_proj\.(weight|bias|scale)", (rf"{to}attn_\2.\3",)),
        Rule(old + r"mlp\.(gate|up|down|gate_up)_proj\.(weight|scale)", (rf"{to}ffn_\2.\3",)),
    ]


def head_rules(norm: str, linear: str) -> list[Rule]:
    """Return the rules that rename the head and the projector of the state.

    Args:
        norm: vla.cpp's name of a block's norm.
        linear: vla.cpp's name of a block's linear layer.
    """
    ends = {"norm_in": "ln1", "proj_in": "fc1", "norm_out": "ln2", "proj_out": "fc2"}
    block = r"head\.blocks\.(\d+)\."
    return [
        *(Rule(rf"state_proj\.layers\.{n}" + _LINEAR, (rf"aex.proprio.fc{n + 1}.\1",)) for n in range(2)),
        *(Rule(rf"head\.{ours}" + _LINEAR, (rf"aex.head.{theirs}.\1",)) for ours, theirs in ends.items()),
        Rule(block + "norm" + _LINEAR, (rf"{_BLOCK}{norm}.\2",)),
        Rule(block + "proj" + _LINEAR, (rf"{_BLOCK}{linear}.\2",)),
    ]


def _rules(adapter: bool) -> list[Rule]:
    norm, linear = ("ffn_ln", "ffn_lin") if adapter else ("ln", "lin")
    block = r"head\.blocks\.(\d+)\."
    return [
        *_tower(0, "d"),
        *_tower(1, "s"),
        *(Rule(rf"vision\.projector\.layers\.{n}" + _LINEAR, (rf"vis.proj.fc{n + 1}.\1",)) for n in range(3)),
        *language_rules("lm"),
        *head_rules(norm, linear),
        Rule(block + "gate", (f"{_BLOCK}gating",)),
        Rule(block + "([kv])_query" + _LINEAR, (rf"{_BLOCK}\2_adapter.\3",)),
        Rule(block + "([kv]_self|[kv]_task|[qo]_proj)" + _LINEAR, (rf"{_BLOCK}\2.\3",)),
        Rule(r"action_queries\.weight", ("action_queries.weight",)),
    ]


def renamed(bundle: Bundle, tensors: dict[str, TensorSource]) -> dict[str, TensorSource]:
    """Rename the tensors of a bundle to vla.cpp's names. A tensor for which vla.cpp has no name keeps its own name.

    Args:
        bundle: The bundle.
        tensors: Sinew's name -> tensor of the bundle. This function changes the entries of this dict.

    Returns:
        vla.cpp's name -> tensor.

    Raises:
        ConvertError: The policy has no state.
    """
    if not bundle.manifest.config["max_state_dim"]:
        raise ConvertError(
            f"{bundle.path}: expected a policy with a state, because vla.cpp's file requires the state's projector;"
            " serve the bundle with `sinew serve` instead"
        )
    fuse(tensors, "vision.towers.")
    return apply(tensors, _rules(bundle.manifest.architecture == "vla_adapter"))


def keys(bundle: Bundle) -> dict[str, Any]:
    """Return the metadata of a file, without the prefix of the architecture."""
    manifest, config = bundle.manifest, bundle.manifest.config
    towers, language = config["vision"], config["language"]
    side, patch = towers[0]["image_size"], towers[0]["patch_size"]
    metadata: dict[str, Any] = {}
    for name, tower in zip(("dino", "sig"), towers, strict=True):
        metadata |= tower_keys(f"vit.{name}", tower)
    metadata |= {
        "vit.image_size": side,
        "vit.patch_size": patch,
        "vit.n_patches": (side // patch) ** 2,
        "vit.ln_eps": towers[0]["norm_eps"],
        "vit.proj_mid": config["projector"][0],
        "vit.vdim": sum(tower["hidden_size"] for tower in towers),
        **language_keys(language),
        "lm.vocab": config["vocab_size"],
        "action.chunk": config["chunk_size"],
        "action.action_dim": config["max_action_dim"],
        "action.proprio_dim": config["max_state_dim"],
        "action.head_blocks": len(
            {name.split(".")[2] for name in bundle.infos if name.startswith("head.blocks.")}
        ),
        "tokens.stop_id": config["stop_token"],
        "statistics_json": json.dumps({manifest.spec.embodiment or "sinew": statistics(manifest)}),
    }
    if manifest.architecture == "openvla_oft":
        return metadata | {
            "vit.num_images": len(manifest.spec.cameras),
            "action.head_hidden": bundle.infos["head.proj_in.weight"].shape[0],
            "action.head_ln_eps": model.HEAD_EPS,
        }
    return metadata | {
        "action.num_tokens": config["num_queries"],
        "action.head_heads": adapter.HEADS,
        "action.head_dim": language["hidden_size"] // adapter.HEADS,
        "action.head_rope_base": adapter.THETA,
        "action.ln_eps": adapter.EPS,
    }


def beside(_bundle: Bundle, _folder: Path) -> dict[str, Any]:
    """Return {}: the importer needs no further options, because the file contains everything that it reads."""
    return {}


def tower_keys(prefix: str, tower: dict[str, Any]) -> dict[str, Any]:
    """Return the metadata that describes a vision tower. BitVLA's exporter uses this function too."""
    return {
        f"{prefix}.hidden": tower["hidden_size"],
        f"{prefix}.layers": tower["num_layers"],
        f"{prefix}.heads": tower["num_heads"],
        f"{prefix}.head_dim": tower["hidden_size"] // tower["num_heads"],
        f"{prefix}.inter": tower["intermediate_size"],
    }


def language_keys(language: dict[str, Any]) -> dict[str, Any]:
    """Return the metadata that describes the language model. BitVLA's exporter uses this function too."""
    return {
        "lm.hidden": language["hidden_size"],
        "lm.layers": language["num_layers"],
        "lm.q_heads": language["num_heads"],
        "lm.kv_heads": language["num_kv_heads"],
        "lm.head_dim": language["head_dim"],
        "lm.inter": language["intermediate_size"],
        "lm.rope_theta": float(language["rope_theta"]),
        "lm.rms_eps": language["norm_eps"],
    }


def statistics(manifest: Manifest) -> dict[str, Any]:
    """Return the statistics of one robot in the format of the file dataset_statistics.json of the training project.

    The actions come first, because vla.cpp expects this order.

    Raises:
        ConvertError: vla.cpp does not support the normalisation mode.
    """
    processing, spec = manifest.processing, manifest.spec
    stats = {}
    for vector, dim, whole, parts in (
        ("action", spec.action.dim, processing.action, processing.action_parts),
        ("proprio", spec.state.dim, processing.state, ()),
    ):
        pieces = [(part.dim, part.normalization) for part in parts] or [(dim, whole)]
        stats[vector] = {
            "q01": [value for size, piece in pieces for value in _bound(vector, piece, "q01", size, -1.0)],
            "q99": [value for size, piece in pieces for value in _bound(vector, piece, "q99", size, 1.0)],
            "mask": [piece.mode != "identity" for size, piece in pieces for _ in range(size)],
        }
    return stats


def _bound(vector: str, piece: Normalization, name: str, size: int, other: float) -> list[float]:
    """Return the lower or the upper bound of each value of a vector.

    Args:
        vector: Name of the vector, for messages.
        piece: Normalisation of the values.
        name: Name of the bound: "q01" or "q99".
        size: Number of values.
        other: The bound of values that are not normalised.
    """
    if piece.mode == "identity":
        return [other] * size
    if piece.mode != "quantiles":
        raise ConvertError(
            f"processing.{vector}: expected the mode 'quantiles', which vla.cpp's file supports, got {piece.mode!r};"
            " serve the bundle with `sinew serve` instead"
        )
    return list(piece.stats[name])
