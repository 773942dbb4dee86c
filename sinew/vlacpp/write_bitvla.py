"""Export BitVLA as vla.cpp's file: names, sizes, statistics and tiled ternary matrices for :mod:`.write`.

vla.cpp's kernel reads tiles of 16 rows and 128 columns. A number of rows that is not a multiple of 16 is rejected, and
columns are padded. Source: vla.cpp ``scripts/convert_bitvla_to_gguf.py``, and the keys that ``src/models/bitvla.cpp``
reads (commit b18873d).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gguf import GGMLQuantizationType
from tokenizers import Tokenizer

from sinew.bundle import Bundle
from sinew.bundle.quant import unpack_ternary
from sinew.bundle.writer import TensorSource
from sinew.convert.tensors import Rule, Transformed, apply, join, read_elements, reshape
from sinew.core import ConvertError
from sinew.families.openvla.model import HEAD_EPS
from sinew.vlacpp import write_prismatic
from sinew.vlacpp.read_bitvla import COLUMNS, ROWS, TOKENS, tiled
from sinew.vlacpp.write_prismatic import language_keys, statistics, tower_keys

ARCHITECTURES = ("bitvla",)
PACKED = (GGMLQuantizationType.I32,)
_PARTS = r"\.(weight|bias|scale)"
_WORDS, _VIEW = r"language\.layers\.(\d+)\.", r"vision\.towers\.0\.layers\.(\d+)\."
_TO_WORDS, _TO_VIEW = r"lm.blk.\1.", r"vit.blk.\1."
RULES = [
    Rule(
        r"vision\.towers\.0\.patch_embedding\.weight",
        ("vit.patch_embd.weight",),
        lambda source: reshape(source, source.shape[0], -1),
    ),
    Rule(r"vision\.towers\.0\.patch_embedding\.bias", ("vit.patch_embd.bias",)),
    Rule(r"vision\.towers\.0\.position_embedding\.weight", ("vit.pos_embd.weight",)),
    Rule(_VIEW + "norm([12])" + _PARTS, (rf"{_TO_VIEW}ln\2.\3",)),
    Rule(_VIEW + r"attn\.([qkvo])_proj" + _PARTS, (rf"{_TO_VIEW}attn_\2.\3",)),
    Rule(_VIEW + r"mlp\.(fc[12])" + _PARTS, (rf"{_TO_VIEW}\2.\3",)),
    *(Rule(rf"vision\.projector\.layers\.{n}" + _PARTS, (rf"mm.linear_{n + 1}.\1",)) for n in range(2)),
    Rule(_WORDS + r"attn\.o_norm\.weight", (f"{_TO_WORDS}attn_sub_norm.weight",)),
    Rule(_WORDS + r"mlp\.norm\.weight", (f"{_TO_WORDS}ffn_sub_norm.weight",)),
    *write_prismatic.language_rules("lm"),
    *write_prismatic.head_rules("ln", "fc"),
]


def renamed(bundle: Bundle, tensors: dict[str, TensorSource]) -> dict[str, TensorSource]:
    """Rename the tensors of a bundle to vla.cpp's names and tile the ternary matrices.

    The matrices ``gate`` and ``up`` of a layer become one matrix.

    Args:
        bundle: The bundle.
        tensors: Sinew's name -> tensor of the bundle. This function changes the entries of this dict.

    Returns:
        vla.cpp's name -> tensor.

    Raises:
        ConvertError: The vision tower is not ternary, or the number of rows of a matrix is not a multiple of 16.
    """
    config = bundle.manifest.config
    text, vision = config["language"], config["vision"][0]
    if not vision.get("ternary"):
        raise ConvertError(
            f"{bundle.path}: vision: expected a ternary vision tower, which vla.cpp's kernels require; serve the bundle"
            " with `sinew serve` instead"
        )
    for name in bundle.lowbit:
        inner = text if name.startswith("language.") else vision
        second = name.endswith((".down_proj", ".fc2"))
        columns = inner["intermediate_size"] if second else inner["hidden_size"]
        tensors[f"{name}.weight"] = _tiles(tensors[f"{name}.weight"], columns)
    for layer in range(text["num_layers"]):
        base = f"language.layers.{layer}.mlp."
        for end in ("weight", "scale"):
            parts = [tensors.pop(f"{base}{part}_proj.{end}") for part in ("gate", "up")]
            tensors[f"{base}gate_up_proj.{end}"] = join(*parts)
    return apply(tensors, RULES)


def _tiles(source: TensorSource, columns: int) -> TensorSource:
    """Return the bytes of a packed matrix, tile after tile. ``columns`` is the number of columns before packing."""
    count = source.shape[0]
    if count % ROWS:
        raise ConvertError(
            f"{source.name}: expected a multiple of {ROWS} rows, the tile height of vla.cpp's kernel, got {count}"
        )
    nbytes = count * -(-columns // COLUMNS) * COLUMNS // 4
    data = Transformed((source,), lambda raw: tiled(unpack_ternary(raw, columns)), read_elements)
    return TensorSource(source.name, (nbytes,), GGMLQuantizationType.I8, nbytes, data)


def keys(bundle: Bundle) -> dict[str, Any]:
    """Return the metadata of a file, without the prefix of the architecture."""
    manifest, config = bundle.manifest, bundle.manifest.config
    vision, language, image = config["vision"][0], config["language"], manifest.processing.image
    words = Tokenizer.from_str(manifest.tokenizer)
    metadata: dict[str, Any] = {
        **tower_keys("vit", vision),
        "vit.image_size": vision["image_size"],
        "vit.patch_size": vision["patch_size"],
        "vit.n_patches": (vision["image_size"] // vision["patch_size"]) ** 2,
        "vit.ln_eps": vision["norm_eps"],
        **language_keys(language),
        "lm.vocab_size": config["vocab_size"],
        "action.num_actions_chunk": config["chunk_size"],
        "action.action_dim": config["max_action_dim"],
        "action.proprio_dim": config["max_state_dim"],
        "action.ln_eps": HEAD_EPS,
        "quant.vit_weight_bits": 1,
        "quant.vit_act_bits": 8,
        "quant.lm_weight_bits": 1,
        "quant.lm_act_bits": 8,
        "quant.method": "absmean_ternary+per_token_int8",
        "quant.applied_at": "convert",
        "quant.int2_packed": 1,
        "statistics_json": json.dumps({manifest.spec.embodiment or "sinew": statistics(manifest)}),
        "preprocessor_config_json": json.dumps({"image_mean": image.mean, "image_std": image.std}),
    }
    for name, text in (TOKENS | {"action_begin_id": "<action_0>"}).items():
        # If the file lacks an id, vla.cpp uses the id of the published checkpoint.
        if (number := words.token_to_id(text)) is not None:
            metadata[f"tokens.{name}"] = number
    return metadata


def beside(_bundle: Bundle, _folder: Path) -> dict[str, Any]:
    """Return {}: the importer needs no further options, because the file contains everything that it reads."""
    return {}
