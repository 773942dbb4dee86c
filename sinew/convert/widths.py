"""Read the sizes of language models and vision towers from configurations in the format of transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sinew.convert.read.record import JsonRecord
from sinew.core import ConvertError
from sinew.layers.decoder import DecoderConfig
from sinew.layers.vit import ViTConfig

SIZES = {
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
}
DECODER = SIZES | {"norm_eps": "rms_norm_eps"}
TOWER = SIZES | {"image_size": "image_size", "patch_size": "patch_size", "norm_eps": "layer_norm_eps"}


def decoder(text: Mapping[str, Any] | JsonRecord, **own: Any) -> DecoderConfig:
    """Return the sizes of a language model.

    Args:
        text: The language model's configuration.
        **own: Fields that ``text`` lacks or names differently.

    Raises:
        ConvertError: ``text`` is a JsonRecord, and an entry is missing.
        KeyError: ``text`` is a dict, and an entry is missing.
        ValueError: The sizes describe no model.
    """
    heads = text["num_attention_heads"]
    usual = {
        "num_kv_heads": text.get("num_key_value_heads") or heads,
        "head_dim": text.get("head_dim") or text["hidden_size"] // heads,
    }
    return DecoderConfig(**{**_named(text, DECODER, own), **usual, **own})


def tower(vision: Mapping[str, Any] | JsonRecord, **own: Any) -> ViTConfig:
    """Return the sizes of a vision tower. The arguments and the errors are those of :func:`decoder`."""
    return ViTConfig(**{**_named(vision, TOWER, own), **own})


def _named(
    record: Mapping[str, Any] | JsonRecord, names: Mapping[str, str], own: Mapping[str, Any]
) -> dict[str, Any]:
    return {ours: record[theirs] for ours, theirs in names.items() if ours not in own}


def rope_theta(text: JsonRecord) -> float:
    """Return the base (theta) of the rotary position embedding. Newer configurations have it in ``rope_parameters``."""
    theta = text.get("rope_theta") or (text.get("rope_parameters") or {}).get("rope_theta")
    if theta is None:
        raise ConvertError(
            f"{text.path}: {text.name}rope_theta is missing; add it from the original config.json"
        )
    return float(theta)
