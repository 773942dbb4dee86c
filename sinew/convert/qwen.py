"""The sizes of a Qwen language model inside of a checkpoint."""

from __future__ import annotations

from sinew.convert.read.record import JsonRecord
from sinew.convert.widths import decoder, rope_theta
from sinew.core import ConvertError
from sinew.layers.decoder import DecoderConfig


def qwen3(text: JsonRecord, layers: int, width: int) -> DecoderConfig:
    """Return the first ``layers`` of a Qwen3 language model. width: Width of the features in the checkpoint."""
    if text["hidden_size"] != width:
        raise ConvertError(
            f"{text.path}: text_config.hidden_size is {text['hidden_size']}, the checkpoint's"
            f" backbone_embedding_dim {width}: --vlm names another model"
        )
    return decoder(
        text,
        num_layers=layers if layers > 0 else text["num_hidden_layers"],
        num_kv_heads=text["num_key_value_heads"],
        rope_theta=rope_theta(text),
        qk_norm=True,
    )
