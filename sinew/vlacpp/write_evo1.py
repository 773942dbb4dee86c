"""Export Evo-1 of the original repository as vla.cpp's file: names, sizes and statistics for :mod:`.write`.

Source: vla.cpp ``scripts/convert_evo1_to_gguf.py``, and the keys that ``src/models/evo1.cpp`` reads (commit b18873d).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from sinew.bundle import Bundle
from sinew.bundle.writer import TensorSource
from sinew.convert.tensors import Rule, apply, computed, constant, fuse, moved, reshape
from sinew.core import ConvertError
from sinew.families.evo1.original import VECTOR
from sinew.steps.prompt.image import Image
from sinew.vlacpp.read_evo1 import STATISTICS
from sinew.vlacpp.write_prismatic import language_rules

ARCHITECTURES = ("evo1",)
PACKED = ()
CONNECTOR_EPS = 1e-5  # the default of torch.nn.LayerNorm
_VIEW, _BLOCK = r"vit.blk.\1.", r"aex.blk.\1."
_TOWER, _HEAD = r"vision\.layers\.(\d+)\.", r"head\.layers\.(\d+)\."


def _table(source: TensorSource) -> TensorSource:  # input shape [rows, C], output shape [1, rows, C]
    return reshape(source, 1, *source.shape)


def _rules(unshuffle: int) -> list[Rule]:
    def ordered(source: TensorSource) -> TensorSource:
        """Reorder the last axis of a weight that reads image tokens.

        In the input, all patches of the first channel come first. In the result, all channels of the first patch come
        first.
        """
        *before, width = source.shape
        squares = (*before, width // unshuffle**2, unshuffle**2)
        return moved(lambda x: x.reshape(squares).swapaxes(-1, -2).reshape(source.shape), source)

    encoder = r"aex.ae.W\1.\2"
    return [
        Rule(r"vision\.patch_embedding\.(.*)", (r"vit.patch_embd.\1",)),
        Rule(_TOWER + r"(norm[12]\..*)", (rf"{_VIEW}\2",)),
        Rule(_TOWER + r"scale([12])\.weight", (rf"{_VIEW}ls\2",)),
        Rule(_TOWER + r"attn\.qkv\.(.*)", (rf"{_VIEW}attn_qkv.\2",)),
        Rule(_TOWER + r"attn\.o_proj\.(.*)", (rf"{_VIEW}attn_proj.\2",)),
        Rule(_TOWER + r"mlp\.(.*)", (rf"{_VIEW}\2",)),
        Rule(r"connector\.norm\.(.*)", (r"mm.ln.\1",), ordered),
        Rule(r"connector\.fc1\.weight", ("mm.fc1.weight",), ordered),
        Rule(r"connector\.(fc1\.bias|fc2\..*)", (r"mm.\1",)),
        *language_rules("vlm"),
        Rule(r"head\.action_encoder\.fc([123])\.(.*)", (encoder,)),
        Rule(r"head\.action_encoder\.position_embedding\.weight", ("aex.ae.pos_enc",), _table),
        Rule(r"head\.time_embedding\.weight", ("aex.time_pos_enc",), _table),
        Rule(_HEAD + r"(norm[12]\..*)", (rf"{_BLOCK}\2",)),
        Rule(_HEAD + r"attn\.qkv\.(.*)", (rf"{_BLOCK}attn_in.\2",)),
        Rule(_HEAD + r"attn\.o_proj\.(.*)", (rf"{_BLOCK}attn_out.\2",)),
        Rule(_HEAD + r"mlp\.fc([12])\.(.*)", (rf"{_BLOCK}ff\2.\3",)),
        Rule(r"head\.norm\.(.*)", (r"aex.norm_out.\1",)),
        Rule(r"head\.pool\.(.*)", (r"aex.seq_pool.\1",)),
        Rule(r"head\.decoder\.(fc[12]\..*)", (r"aex.head.\1",)),
        Rule(r"head\.state_encoder\.(fc[12]\..*)", (r"aex.state_enc.\1",)),
    ]


def renamed(bundle: Bundle, tensors: dict[str, TensorSource]) -> dict[str, TensorSource]:
    """Rename the tensors of a bundle to vla.cpp's names and add the statistics.

    In a bundle, the position embedding of the class token is already added to the class token. The first row of the
    position table is zeros here, so that vla.cpp does not add the embedding again.

    Args:
        bundle: The bundle.
        tensors: Sinew's name -> tensor of the bundle. This function changes the entries of this dict.

    Returns:
        vla.cpp's name -> tensor.

    Raises:
        ConvertError: vla.cpp computes this policy differently.
    """
    manifest = bundle.manifest
    if not manifest.config["rows"]:
        raise ConvertError(
            f"{bundle.path}: config.rows: expected a checkpoint of the original repository, whose head reads masked"
            " rows as vla.cpp's does, got LeRobot's layout; serve the bundle with `sinew serve` instead"
        )
    if manifest.config.get("masked_attend", True):
        raise ConvertError(
            f"{bundle.path}: config.masked_attend: expected False, got True: vla.cpp's engine sets the attention output"
            " of masked rows to zeros (src/models/evo1.cpp); convert the checkpoint with `--set masked_rows=zero`"
        )
    for prefix in ("vision.layers.", "head.layers."):
        fuse(tensors, prefix)
    token, table = tensors.pop("vision.prefix"), tensors.pop("vision.position_embedding.weight")
    upstream = apply(tensors, _rules(manifest.config["unshuffle"]))
    upstream["vit.class_embd"] = _table(token)
    count, width = table.shape
    upstream["vit.pos_embd"] = computed(
        lambda x: np.concatenate([np.zeros((1, width), np.float32), x])[None],
        table,
        shape=(1, count + 1, width),
    )
    for what in ("state", "action"):
        piece = getattr(manifest.processing, what)
        if piece.mode != "min_max":
            raise ConvertError(
                f"{bundle.path}: processing.{what}: expected the mode 'min_max', which vla.cpp's file supports, got"
                f" {piece.mode!r}; serve the bundle with `sinew serve` instead"
            )
        for stat, values in piece.stats.items():
            padded = np.pad(np.asarray(values, np.float32), (0, VECTOR - len(values)))
            upstream[f"{what}_{stat}"] = constant(f"{what}_{stat}", padded)
    assert set(STATISTICS) <= upstream.keys()
    return upstream


def keys(bundle: Bundle) -> dict[str, Any]:
    """Return the metadata of a file, without the prefix of the architecture. A number in a tuple becomes float64."""
    manifest, config = bundle.manifest, bundle.manifest.config
    vision, language = config["vision"], config["language"]
    words = Tokenizer.from_str(manifest.tokenizer)
    ids = {name: words.token_to_id(text) for name, text in (("start", "<img>"), ("end", "</img>"))}
    if missing := [name for name, number in ids.items() if number is None]:
        raise ConvertError(
            f"{bundle.path}: the tokenizer lacks the {missing[0]} token of an image; convert the checkpoint again with"
            " InternVL3's tokenizer"
        )
    return {
        "vit_hidden": vision["hidden_size"],
        "vit_layers": vision["num_layers"],
        "vit_heads": vision["num_heads"],
        "vit_inter": vision["intermediate_size"],
        "image_size": vision["image_size"],
        "patch_size": vision["patch_size"],
        "num_image_token": next(s.count for s in manifest.processing.prompt.steps if isinstance(s, Image)),
        "lm_hidden": language["hidden_size"],
        "lm_layers_used": language["num_layers"],
        "lm_q_heads": language["num_heads"],
        "lm_kv_heads": language["num_kv_heads"],
        "lm_head_dim": language["head_dim"],
        "lm_inter": language["intermediate_size"],
        "vocab_size": config["vocab_size"],
        "embed_dim": config["head_size"],
        "dit_layers": config["head_layers"],
        "dit_heads": config["head_heads"],
        "mlp_head_hidden": config["decoder_size"],
        "horizon": config["chunk_size"],
        "per_action_dim": config["max_action_dim"],
        "state_dim": config["max_state_dim"],
        "action_dim": config["chunk_size"] * config["max_action_dim"],
        "num_inference_timesteps": manifest.spec.solver_steps,
        "real_state_dim": manifest.spec.state.dim,
        "real_action_dim": manifest.spec.action.dim,
        "max_text_length": manifest.spec.max_prompt_tokens,
        "n_images": config["views"],
        "img_context_token_id": config["image_token"],
        "img_start_token_id": ids["start"],
        "img_end_token_id": ids["end"],
        "pad_token_id": config["pad_token"],
        "lm_rope_theta": (language["rope_theta"],),
        "lm_rms_eps": language["norm_eps"],
        "vit_ln_eps": vision["norm_eps"],
        "proj_ln_eps": CONNECTOR_EPS,
        "norm_eps": manifest.processing.action.eps,
    }


def beside(bundle: Bundle, folder: Path) -> dict[str, Any]:
    """Write the files of InternVL's repository that the importer reads.

    Args:
        bundle: The bundle.
        folder: An existing folder for the files.

    Returns:
        The conversion option that names the folder.
    """
    config = bundle.manifest.config
    vision, language = config["vision"], config["language"]
    text = {
        "model_type": "qwen2",
        "hidden_size": language["hidden_size"],
        "intermediate_size": language["intermediate_size"],
        "num_hidden_layers": language["num_layers"],
        "num_attention_heads": language["num_heads"],
        "num_key_value_heads": language["num_kv_heads"],
        "head_dim": language["head_dim"],
        "rms_norm_eps": language["norm_eps"],
        "rope_theta": language["rope_theta"],
        "vocab_size": config["vocab_size"],
    }
    tower = {
        "hidden_size": vision["hidden_size"],
        "intermediate_size": vision["intermediate_size"],
        "num_hidden_layers": vision["num_layers"],
        "num_attention_heads": vision["num_heads"],
        "image_size": vision["image_size"],
        "patch_size": vision["patch_size"],
        "layer_norm_eps": vision["norm_eps"],
    }
    record = {"text_config": text, "vision_config": tower, "downsample_ratio": 1 / config["unshuffle"]}
    (folder / "config.json").write_text(json.dumps(record), encoding="utf-8")
    pad = Tokenizer.from_str(bundle.manifest.tokenizer).id_to_token(config["pad_token"])
    (folder / "tokenizer_config.json").write_text(json.dumps({"pad_token": pad}), encoding="utf-8")
    return {"vlm": folder}
