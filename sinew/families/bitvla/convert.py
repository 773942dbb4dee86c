"""Convert BitVLA checkpoints (Wang et al. 2025, arXiv 2506.07530) to bundles.

BitVLA has the token sequence and the head of OpenVLA-OFT. Its language model is BitNet b1.58, and the linear layers of
its SigLIP tower may be ternary too. The checkpoint contains the bfloat16 weights of the training ("master weights"),
from which the ternary weights are computed. The bundle contains the weights that inference uses: packed codes of two
bits and one scale per matrix. Source: ustcwhy/BitVLA and its fork of transformers.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType
from tokenizers import Tokenizer

from sinew.bundle.quant import FORMATS, quantize
from sinew.bundle.writer import TensorSource
from sinew.convert import widths
from sinew.convert.conversion import Conversion
from sinew.convert.names import rename
from sinew.convert.options import ConvertOptions
from sinew.convert.read.files import directory_config, named
from sinew.convert.tensors import Transformed, apply, computed, read_array
from sinew.convert.tokenizer_files import TokenizerFiles, find_tokenizer
from sinew.core import ConvertError
from sinew.families.openvla import convert as openvla
from sinew.families.openvla.convert import QUESTION, HeadPart
from sinew.families.openvla.model import OFTConfig
from sinew.families.openvla.prismatic import BLOCKS, ENDS, STATE, PrismaticCheckpoint
from sinew.layers.decoder import DecoderConfig
from sinew.layers.vit import ViTConfig
from sinew.steps.image.base import ImageRecipe
from sinew.steps.prompt.drop import Drop
from sinew.steps.prompt.template import sentence

NAMES = ("bitvla",)
# Fields of config.json that Sinew does not read. Their numbers follow from the tensors or the tokenizer, or only other
# variants of the policy need them.
UNREAD_FIELDS = (
    "image_seq_length image_token_index n_action_bins norm_stats pad_token_id vocab_size ignore_index"
)
SUPPORTED_VALUES = {"multimodal_projector_bias": True}
OPTIONS = openvla.OPTIONS
SETTINGS = {name: setting for name, setting in openvla.SETTINGS.items() if name != "decoding"}
# Default values of BitNet b1.58 2B for fields that a checkpoint's configuration does not contain.
TEXT = {
    "hidden_size": 2560,
    "intermediate_size": 6912,
    "num_hidden_layers": 30,
    "num_attention_heads": 20,
    "num_key_value_heads": 5,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
}
VISION = {"vit_weight_bits": 32, "vit_act_bits": 32, "layer_norm_eps": 1e-6}
PREFIXES = (
    ("vision_tower.vision_model.", "vision.towers.0."),
    ("language_model.model.", "language."),
    ("multi_modal_projector.linear_1.", "vision.projector.layers.0."),
    ("multi_modal_projector.linear_2.", "vision.projector.layers.1."),
)
SUB_NORMS = ((".attn.attn_sub_norm.", ".attn.o_norm."), (".mlp.ffn_sub_norm.", ".mlp.norm."))
SYSTEM = (
    "System: A chat between a curious human and an artificial intelligence assistant. The assistant gives helpful,"
    " detailed, and polite answers to the human's questions.<|eot_id|>User: "
)
VIEWS, STATE_TOKEN, STOP = "<|image_pad|>", "<proprio_pad>", "<|end_of_text|>"
BIT_LINEAR = r"language\..*\.(attn|mlp)\.[a-z]+_proj\.weight"
BIT_VISION = r"vision\.towers\.0\..*\.(attn\.[qkvo]_proj|mlp\.fc[12])\.weight"


def recognises(path: Path) -> bool:
    """Return True for a directory whose language model is BitNet, with any model_type."""
    config = directory_config(path)
    text = config.get("text_config")
    kind = text.get("model_type") if isinstance(text, dict) else None
    return config.get("model_type") in ("bitvla", "openvla") and kind == "BitNet"


def read(path: Path, options: ConvertOptions) -> Conversion:
    """Read a checkpoint directory. The weights are read later, when the bundle is written.

    Raises:
        ConvertError: The checkpoint is not a supported BitVLA.
    """
    return assemble(PrismaticCheckpoint(path, options), ternary)


def assemble(
    checkpoint: PrismaticCheckpoint,
    pack: Callable[[dict[str, TensorSource], bool], dict[str, TensorSource]],
    form: str = "bitvla",
) -> Conversion:
    """Collect everything that a bundle needs from an opened checkpoint.

    Args:
        checkpoint: The opened checkpoint.
        pack: Function that packs the master weights, like :func:`ternary`.
        form: Name of the checkpoint's layout. The bundle records it as its origin.

    Raises:
        ConvertError: The checkpoint is not supported.
    """
    path, options = checkpoint.path, checkpoint.options
    action, state = checkpoint.part("action_head"), checkpoint.part("proprio_projector")
    if not action or not state:
        raise ConvertError(
            f"{path}: action_head--*_checkpoint.pt and proprio_projector--*_checkpoint.pt must be next to the"
            " weights. Copy these files of the checkpoint to the folder"
        )
    action_dim, state_dim = openvla.sizes(checkpoint, action, state)
    robot = openvla.robot_of(path, options, action_dim, state_dim, True)
    tokenizer = find_tokenizer(options, path, whose="the checkpoint's")
    tower, dead = vision(checkpoint)
    language = decoder(checkpoint)
    marks = tokenizer.token_id(VIEWS), tokenizer.token_id(STATE_TOKEN)
    try:
        config = OFTConfig(
            vision=(tower,),
            projector=(language.hidden_size,),
            language=language,
            vocab_size=checkpoint.tensors["language_model.model.embed_tokens.weight"].shape[0],
            chunk_size=robot.chunk,
            max_action_dim=action_dim,
            max_state_dim=state_dim,
            views_after=views_after(tokenizer),
            stop_token=tokenizer.token_id(STOP),
        )
    except KeyError as error:
        raise ConvertError(
            f"{path}: the tensor {error} is missing in the checkpoint. Use a complete checkpoint"
        ) from None
    except ValueError as error:
        raise ConvertError(f"{path / 'config.json'}: {error}") from None
    template = f"{SYSTEM}{VIEWS}{STATE_TOKEN}{QUESTION}<|eot_id|>Assistant: "
    head = HeadPart("bitvla", config, [], dead, (*sentence(template), Drop(marks)))
    weights = {bundle_name(name): source for name, source in checkpoint.tensors.items()}
    weights |= apply(action | state, [*ENDS, *BLOCKS, *STATE])
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else checkpoint.config["pad_token_id"]
    return Conversion(
        format=form,
        config=config,
        spec=openvla.spec(checkpoint, head, robot),
        processing=openvla.processing(checkpoint, head, robot, pad, image_recipe(checkpoint, tower)),
        tokenizer=tokenizer.text,
        tensors=pack(weights, tower.ternary),
        dead=dead,
        sources=[*dict.fromkeys(checkpoint.files), tokenizer.path],
        notes=(
            *openvla.notes(checkpoint, robot),
            *checkpoint.config.leftover(UNREAD_FIELDS, SUPPORTED_VALUES),
        ),
    )


def bundle_name(name: str) -> str:
    """Return the module path in :class:`sinew.families.openvla.model.OpenVLAOFT` for a checkpoint's name of a
    tensor.
    """
    name = rename(name, PREFIXES)
    for old, new in SUB_NORMS:
        name = name.replace(old, new)
    return name


def views_after(tokenizer: TokenizerFiles) -> int:
    """Return the number of prompt tokens that come before the camera views. These tokens are a system text, which is
    the same in every prompt.
    """
    ids = Tokenizer.from_str(tokenizer.text).encode(SYSTEM + VIEWS).ids
    return ids.index(tokenizer.token_id(VIEWS))


def vision(checkpoint: PrismaticCheckpoint) -> tuple[ViTConfig, tuple[str, ...]]:
    """Return the sizes of the tower up to the layer whose output is used, and the prefixes of the names of tensors
    that inference does not use."""
    config = checkpoint.config.part("vision_config").filled(VISION)
    where = config.path
    bits = config["vit_weight_bits"], config["vit_act_bits"]
    if bits not in ((1, 8), (32, 32)):
        raise ConvertError(
            f"{where}: vit_weight_bits, vit_act_bits: expected 1 and 8, or 32 and 32, got {bits[0]} and {bits[1]}"
        )
    checkpoint.config.expect(vision_feature_select_strategy="full", projector_hidden_act="gelu")
    total = config["num_hidden_layers"]
    depth = (
        total + 1 + checkpoint.config["vision_feature_layer"]
        # Index in the list [embeddings, output of block 1, output of block 2, ...].
    )
    if not 0 < depth <= total:
        raise ConvertError(
            f"{where}: vision_feature_layer: expected a number from -{total} to -1, got {depth - total - 1}"
        )
    with named(f"{where}: vision_config"):
        tower_config = widths.tower(config, num_layers=depth, final_norm=False, ternary=bits[0] == 1)
    unread = tuple(f"vision.towers.0.layers.{index}." for index in range(depth, total))
    return tower_config, ("vision.towers.0.head.", "vision.towers.0.norm.", *unread)


def decoder(checkpoint: PrismaticCheckpoint) -> DecoderConfig:
    """Return the sizes of the language model.

    The activation is a squared ReLU, as in the code of the training project, although ``hidden_act`` in the
    configuration is silu.
    """
    text = checkpoint.config.part("text_config").filled(TEXT)
    with named(f"{text.path}: text_config"):
        return widths.decoder(
            text,
            head_dim=text["hidden_size"] // text["num_attention_heads"],
            rope_theta=text["rope_theta"],
            activation="relu2",
            sub_norms=True,
            ternary=True,
        )


def image_recipe(checkpoint: PrismaticCheckpoint, tower: ViTConfig) -> ImageRecipe:
    record = checkpoint.preprocessor()
    side = tower.image_size
    with named(f"{record.path}: image_mean, image_std"):
        mean, std = (tuple(float(x) for x in record[name]) for name in ("image_mean", "image_std"))
    steps = openvla.image_steps(side, side, checkpoint.options)
    return ImageRecipe(side, side, mean=mean, std=std, steps=steps)


def ternary(tensors: dict[str, TensorSource], with_vision: bool) -> dict[str, TensorSource]:
    """Return the tensors with packed codes and a scale in place of each ternary master weight.

    Args:
        tensors: The tensors under Sinew's names.
        with_vision: True if the vision tower is ternary too.
    """
    out: dict[str, TensorSource] = {}
    pattern = re.compile(f"{BIT_LINEAR}|{BIT_VISION}" if with_vision else BIT_LINEAR)
    for name, source in tensors.items():
        if pattern.fullmatch(name) is None or len(source.shape) != 2:
            out[name] = source
            continue
        shape = FORMATS["ternary"].stored_shape(*source.shape)
        data = Transformed((source,), packed, read_array)
        nbytes = 4 * shape[0] * shape[1]
        out[name] = TensorSource(source.name, shape, GGMLQuantizationType.I32, nbytes, data)
        out[f"{name.removesuffix('weight')}scale"] = computed(scale, source, shape=(1,))
    return out


def packed(weights: np.ndarray) -> np.ndarray:
    return quantize(weights, "ternary")[0]


def scale(weights: np.ndarray) -> np.ndarray:
    scales = quantize(weights, "ternary")[1]
    assert scales is not None
    return scales
