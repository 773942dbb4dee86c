"""Read the sizes, and convert the tensor names, of Qwen models that are parts of a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence

from sinew.bundle.schema import ImageRecipe
from sinew.convert.names import language_rules
from sinew.convert.read.record import JsonRecord
from sinew.convert.tensors import Rule, renames, reshape
from sinew.convert.widths import decoder, rope_theta
from sinew.core import CameraSpec, ConvertError
from sinew.layers.decoder import DecoderConfig
from sinew.layers.qwen25_vit import Qwen25ViTConfig
from sinew.steps.image.base import ImageStep


def qwen3(text: JsonRecord, layers: int, width: int) -> DecoderConfig:
    """Return the sizes of the first ``layers`` layers of a Qwen3 language model.

    Args:
        text: The language model's configuration.
        layers: Number of layers; 0 or less for all layers.
        width: Width of the features that the checkpoint expects.

    Raises:
        ConvertError: The language model has another width.
    """
    if text["hidden_size"] != width:
        raise ConvertError(
            f"{text.path}: text_config.hidden_size is {text['hidden_size']}, the checkpoint's"
            f" backbone_embedding_dim {width}; --vlm names another model, pass the one that the checkpoint names"
        )
    return decoder(
        text,
        num_layers=layers if layers > 0 else text["num_hidden_layers"],
        num_kv_heads=text["num_key_value_heads"],
        rope_theta=rope_theta(text),
        qk_norm=True,
    )


def qwen25_vision(vision: JsonRecord) -> Qwen25ViTConfig:
    """Return the sizes of Qwen2.5-VL's vision tower.

    Raises:
        ConvertError: An entry is missing or has an unsupported value.
        ValueError: The sizes describe no model.
    """
    vision.expect(hidden_act="silu", in_channels=3, in_chans=3)
    patch, merge, window = vision["patch_size"], vision["spatial_merge_size"], vision["window_size"]
    if window % (patch * merge):
        raise ConvertError(
            f"{vision.path}: {vision.name}window_size: expected whole tokens, a multiple of {patch * merge} pixels,"
            f" got {window}"
        )
    return Qwen25ViTConfig(
        hidden_size=vision["hidden_size"],
        intermediate_size=vision["intermediate_size"],
        num_layers=vision["depth"],
        num_heads=vision["num_heads"],
        patch_size=patch,
        merge=merge,
        temporal_patch=vision["temporal_patch_size"],
        window=window // (patch * merge),
        whole=tuple(vision["fullatt_block_indexes"]),
        output_size=vision["out_hidden_size"],
    )


def qwen25_language(text: JsonRecord) -> DecoderConfig:
    """Return the sizes of Qwen2.5-VL's language model.

    Raises:
        ConvertError: An entry is missing or has an unsupported value.
        ValueError: The sizes describe no model.
    """
    text.expect(hidden_act="silu", use_sliding_window=False)
    return decoder(text, rope_theta=rope_theta(text), qkv_bias=True)


def position_sections(text: JsonRecord) -> tuple[int, int, int]:
    """Return three numbers: how many rotary frequencies encode the time, the row and the column of a token.

    Raises:
        ConvertError: The sections of the rotary embedding are not supported.
    """
    rope = (text.get("rope_scaling") or {}) | (text.get("rope_parameters") or {})
    sections = rope.get("mrope_section")
    if not isinstance(sections, list) or len(sections) != 3:
        raise ConvertError(f"{text.path}: {text.name}mrope_section: expected three numbers, got {sections!r}")
    return sections[0], sections[1], sections[2]


def qwen_pictures(
    steps: tuple[ImageStep, ...], preprocessor: JsonRecord, cameras: Sequence[CameraSpec]
) -> ImageRecipe:
    """Return the image recipe of a policy that reads each camera at the camera's own size.

    Args:
        steps: The steps from a frame to its picture.
        preprocessor: The content of ``preprocessor_config.json``, which has mean and standard deviation.
        cameras: The cameras, with the sizes of their frames.

    Returns:
        A recipe with a size for each camera. The sizes are omitted if all cameras have the same size.
    """
    sizes = []
    for camera in cameras:
        size = camera.height, camera.width
        for step in steps:
            size = step.size(*size)
        sizes.append(size)
    height, width = (max(sides) for sides in zip(*sizes, strict=True))
    mean, std = tuple(preprocessor["image_mean"]), tuple(preprocessor["image_std"])
    return ImageRecipe(height, width, steps, mean, std, sizes=tuple(sizes) if len(set(sizes)) > 1 else ())


def sizes_of_views(image: ImageRecipe, views: int) -> tuple[tuple[int, int], ...]:
    """Return height and width of each view's picture."""
    return tuple(image.sizes or ((image.height, image.width),) * views)


def qwen25_rules(language: str, vision: str) -> tuple[Rule, ...]:
    """Return the rules that rename Qwen2.5-VL's tensors.

    Args:
        language: Pattern of the prefix of the language model's names.
        vision: Pattern of the prefix of the vision tower's names.
    """
    return (
        *language_rules(language),
        Rule(
            vision + r"patch_embed\.proj\.weight",
            ("vision.patch_embedding.weight",),
            lambda source: reshape(source, source.shape[0], -1, *source.shape[3:]),
        ),
        *renames(
            vision + r"blocks\.(\d+)\.",
            r"vision.layers.\1.",
            "attn.qkv=attn.{qkv}_proj attn.proj=attn.o_proj mlp norm1 norm2",
        ),
        *renames(vision + r"merger\.", "vision.merger.", "ln_q=norm mlp.0=fc1 mlp.2=fc2"),
    )
