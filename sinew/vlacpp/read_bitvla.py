"""Read vla.cpp's files of BitVLA as checkpoints of :mod:`sinew.families.bitvla.convert`.

The file's ternary matrices are tiled for one GPU kernel: 16 rows by 128 columns at a time, four codes in a byte. Each
code is copied into the bundle's rows with its own scale, so no weight is quantised again. The file contains neither a
tokenizer nor camera names. Source: vla.cpp ``scripts/convert_bitvla_to_gguf.py`` (``pack_ladder_int2``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType

from sinew.bundle.quant import FORMATS, pack_ternary
from sinew.bundle.writer import TensorSource
from sinew.convert.conversion import Conversion
from sinew.convert.options import ConvertOptions
from sinew.convert.read.record import JsonRecord
from sinew.convert.tensors import Rule, Transformed, apply, read_elements, reshape, rows
from sinew.convert.tokenizer_files import load_tokenizer
from sinew.core import ConvertError
from sinew.families.bitvla import convert as bitvla
from sinew.vlacpp.file import FORMAT, VlacppFile
from sinew.vlacpp.read_prismatic import HEAD_RULES, VlacppCheckpoint

ARCHITECTURES = ("bitvla",)
NAMES = ("vla.cpp GGUF of bitvla",)
OPTIONS = ("tokenizer", "stats_key", "cameras")
SETTINGS = bitvla.SETTINGS
ROWS, COLUMNS = 16, 128  # size of a tile of a ternary matrix
TOWER, LANGUAGE = "vision_tower.vision_model.", "language_model.model."
TOKENS = {"image_id": bitvla.VIEWS, "proprio_id": bitvla.STATE_TOKEN, "stop_id": bitvla.STOP}


def untiled(data: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """Unpack a tiled matrix.

    Byte b of 4 bytes contains the columns b, 4 + b, 8 + b and 12 + b of 16, each plus two, lowest bits first. These
    groups of 4 bytes are ordered by loops, the outermost loop first: over 16 rows, 128 columns, 32 columns, 8 rows, 16
    columns, and one row. Columns are padded to a multiple of 128.

    Args:
        data: The bytes of the matrix.
        shape: Its shape.

    Returns:
        Weights -1, 0 and 1, int8 ``shape``.

    Raises:
        ConvertError: A code is invalid.
    """
    channels, k = shape
    padded = -(-k // COLUMNS) * COLUMNS
    tiles = data.view(np.uint8).reshape(channels // ROWS, padded // COLUMNS, 4, 2, 2, 8, 4, 1)
    codes = tiles >> (2 * np.arange(4, dtype=np.uint8)) & 3
    values = codes.transpose(0, 3, 5, 1, 2, 4, 7, 6).reshape(channels, padded)[:, :k].astype(np.int8) - 2
    if values.min(initial=0) < -1:
        raise ConvertError(
            "a ternary matrix of the file has the invalid code 0; write the file again with vla.cpp"
        )
    return values


def tiled(values: np.ndarray) -> np.ndarray:
    """Pack weights -1, 0 and 1 [channels, k] into tiles, int8: the inverse of :func:`untiled`."""
    channels, k = values.shape
    padded = np.full((channels, -(-k // COLUMNS) * COLUMNS), 2, np.uint8)
    padded[:, :k] = values + 2
    codes = padded.reshape(channels // ROWS, 2, 8, -1, 4, 2, 4, 4).transpose(0, 3, 4, 1, 5, 2, 7, 6)
    return (codes << (2 * np.arange(4, dtype=np.uint8))).sum(-1, dtype=np.uint8).reshape(-1).view(np.int8)


def ternary(
    name: str, shape: tuple[int, int], part: slice = slice(None)
) -> Callable[[TensorSource], TensorSource]:
    """Return the transform from a tiled matrix of ``shape`` to the bundle's rows. Only the rows in ``part`` are
    used."""

    def transform(source: TensorSource) -> TensorSource:
        channels, k = shape
        stored = channels * -(-k // COLUMNS) * COLUMNS // 4
        if channels % ROWS or source.type is not GGMLQuantizationType.I8 or source.shape != (stored,):
            raise ConvertError(
                f"{name}: expected {stored} bytes of {channels} x {k} ternary weights, got {list(source.shape)}"
                f" {source.type.name}"
            )
        count = len(range(*part.indices(channels)))
        data = Transformed((source,), lambda raw: pack_ternary(untiled(raw, shape)[part]), read_elements)
        size = FORMATS["ternary"].stored_shape(count, k)
        return TensorSource(source.name, size, GGMLQuantizationType.I32, 4 * size[0] * size[1], data)

    return transform


class VlacppBitnet(VlacppCheckpoint):
    """A vla.cpp file that the importer of BitVLA reads like the checkpoint folder of BitVLA's own project. Its matrices
    are packed rows with scales."""

    chunk = "action.num_actions_chunk"

    def __init__(self, file: VlacppFile, options: ConvertOptions):
        n = file.integer
        text = {
            "hidden_size": n("lm.hidden"),
            "intermediate_size": n("lm.inter"),
            "num_hidden_layers": n("lm.layers"),
            "num_attention_heads": n("lm.q_heads"),
            "num_key_value_heads": n("lm.kv_heads"),
            "rms_norm_eps": file.number("lm.rms_eps"),
            "rope_theta": file.number("lm.rope_theta"),
        }
        vision = {
            "hidden_size": n("vit.hidden"),
            "intermediate_size": n("vit.inter"),
            "num_hidden_layers": n("vit.layers"),
            "num_attention_heads": n("vit.heads"),
            "image_size": n("vit.image_size"),
            "patch_size": n("vit.patch_size"),
            "layer_norm_eps": file.number("vit.ln_eps"),
            "vit_weight_bits": n("quant.vit_weight_bits"),
            "vit_act_bits": n("quant.vit_act_bits"),
        }
        for name, value in (("quant.int2_packed", 1), ("quant.lm_weight_bits", 1), ("quant.lm_act_bits", 8)):
            if n(name) != value:
                raise ConvertError(
                    f"{file.path}: bitvla.{name}: expected {value}, got {n(name)}; convert the original checkpoint"
                    " instead"
                )
        record = {
            "text_config": text,
            "vision_config": vision,
            "vision_feature_layer": -1,  # the file contains only the blocks that are used, so the last one is read
            "norm_stats": file.record("statistics_json"),
            "pad_token_id": 0,
        }
        self.config = JsonRecord(file.path, record)
        self._image = JsonRecord(file.path, file.record("preprocessor_config_json"))
        self.ids = {name: n(f"tokens.{name}") for name in TOKENS}
        super().__init__(file, options, apply(file.tensors, rules(text, vision, n("lm.head_dim"))))

    def preprocessor(self) -> JsonRecord:
        return self._image


def rules(text: dict[str, Any], vision: dict[str, Any], head_dim: int) -> list[Rule]:
    """Return the rules that rename a file's tensors to upstream's names.

    Args:
        text: Sizes of the language model.
        vision: Sizes of the vision tower.
        head_dim: Size of an attention head of the language model.
    """
    width, inner, side = text["hidden_size"], text["intermediate_size"], vision["patch_size"]
    heads, keys = (text[f"num_{kind}_heads"] * head_dim for kind in ("attention", "key_value"))
    layer = rf"{LANGUAGE}layers.\1."
    matrices = [
        Rule(r"token_embd\.weight", (f"{LANGUAGE}embed_tokens.weight",)),
        Rule(r"lm\.output_norm\.weight", (f"{LANGUAGE}norm.weight",)),
        Rule(r"lm\.blk\.(\d+)\.attn_norm\.weight", (f"{layer}input_layernorm.weight",)),
        Rule(r"lm\.blk\.(\d+)\.ffn_norm\.weight", (f"{layer}post_attention_layernorm.weight",)),
        Rule(r"lm\.blk\.(\d+)\.attn_sub_norm\.weight", (f"{layer}self_attn.attn_sub_norm.weight",)),
        Rule(r"lm\.blk\.(\d+)\.ffn_sub_norm\.weight", (f"{layer}mlp.ffn_sub_norm.weight",)),
        Rule(r"mm\.(linear_[12]\..*)", (r"multi_modal_projector.\1",)),
        *HEAD_RULES,
        Rule(
            r"vit\.patch_embd\.weight",
            (f"{TOWER}embeddings.patch_embedding.weight",),
            lambda source: reshape(source, -1, 3, side, side),
        ),
        Rule(r"vit\.patch_embd\.bias", (f"{TOWER}embeddings.patch_embedding.bias",)),
        Rule(r"vit\.pos_embd\.weight", (f"{TOWER}embeddings.position_embedding.weight",)),
        Rule(r"vit\.blk\.(\d+)\.ln([12])\.(.*)", (rf"{TOWER}encoder.layers.\1.layer_norm\2.\3",)),
    ]
    sizes = {
        "attn_q": (heads, width),
        "attn_k": (keys, width),
        "attn_v": (keys, width),
        "attn_o": (width, heads),
    }
    for part, shape in (sizes | {"ffn_down": (width, inner)}).items():
        to = f"{layer}mlp.down_proj." if part == "ffn_down" else f"{layer}self_attn.{part[-1]}_proj."
        matrices += _matrix(rf"lm\.blk\.(\d+)\.{part}\.", (to,), shape)
    both = tuple(f"{layer}mlp.{part}_proj." for part in ("gate", "up"))
    matrices += _matrix(r"lm\.blk\.(\d+)\.ffn_gate_up\.", both, (2 * inner, width))
    size, hidden = vision["hidden_size"], vision["intermediate_size"]
    block = rf"{TOWER}encoder.layers.\1."
    shapes = {
        "fc1": (hidden, size),
        "fc2": (size, hidden),
        **dict.fromkeys(("q", "k", "v", "o"), (size, size)),
    }
    for part, shape in shapes.items():
        own = part if part.startswith("fc") else f"attn_{part}"
        to = f"{block}mlp.{part}." if part.startswith("fc") else f"{block}self_attn.{part}_proj."
        to = to.replace(".o_proj.", ".out_proj.")
        matrices += _matrix(rf"vit\.blk\.(\d+)\.{own}\.", (to,), shape)
        matrices.append(Rule(rf"vit\.blk\.(\d+)\.{own}\.bias", (f"{to}bias",)))
    return matrices


def _matrix(own: str, to: tuple[str, ...], shape: tuple[int, int]) -> list[Rule]:
    """Return the rules of a matrix and its scales.

    Args:
        own: Pattern of the prefix of vla.cpp's names.
        to: Prefixes of the new names. If there are several, the matrix is split into parts of equal size, one per
            prefix.
        shape: Shape of the matrix.
    """
    count, channels = len(to), shape[0] // len(to)

    def weights(source: TensorSource) -> tuple[TensorSource, ...]:
        parts = (slice(i * channels, (i + 1) * channels) for i in range(count))
        return tuple(ternary(source.name, shape, part)(source) for part in parts)

    def scales(source: TensorSource) -> tuple[TensorSource, ...]:
        return tuple(rows(source, i, i + 1) for i in range(count))

    return [
        Rule(f"{own}weight", tuple(f"{name}weight" for name in to), weights),
        Rule(f"{own}scale", tuple(f"{name}scale" for name in to), scales),
    ]


def read(file: VlacppFile, options: ConvertOptions) -> Conversion:
    """Read all of a file except the weights.

    Raises:
        ConvertError: The file is not supported, or an option is missing.
    """
    checkpoint = VlacppBitnet(file, options)
    assert options.tokenizer is not None
    tokenizer = load_tokenizer([options.tokenizer], "see --tokenizer")
    for name, text in TOKENS.items():
        if (got := tokenizer.token_id(text)) != checkpoint.ids[name]:
            raise ConvertError(
                f"{file.path}: tokens.{name}: expected {checkpoint.ids[name]}, got {got} for {text} from --tokenizer;"
                " it is another model's, pass the tokenizer of this model"
            )
    conversion = bitvla.assemble(checkpoint, lambda tensors, _: tensors, FORMAT)
    return replace(
        conversion,
        notes=(*conversion.notes, "prompt: upstream's prompt, because vla.cpp leaves it to its client"),
    )
