"""A Qwen language model inside of a checkpoint: its sizes, and the names of its tensors."""

from __future__ import annotations

from sinew.convert.read.record import JsonRecord
from sinew.convert.tensors import Rule
from sinew.convert.widths import decoder, rope_theta
from sinew.core import ConvertError
from sinew.layers.decoder import DecoderConfig


def qwen3(text: JsonRecord, layers: int, width: int) -> DecoderConfig:
    """Return the first ``layers`` of a Qwen3 language model. width: what the checkpoint says its features have."""
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


def language_rules(upstream: str, layers: int) -> tuple[Rule, ...]:
    """Return the rules of a Qwen3 model of which the first ``layers`` are read; the others are dropped."""
    old, new = upstream + r"layers\.(\d+)\.", r"language.layers.\1."
    dropped = "|".join(str(i) for i in range(layers, 4 * layers + 64))
    return (
        Rule(upstream + rf"layers\.({dropped})\..*"),
        Rule(old + r"self_attn\.(.*)", (new + r"attn.\2",)),
        Rule(old + r"input_layernorm\.(.*)", (new + r"input_norm.\2",)),
        Rule(old + r"post_attention_layernorm\.(.*)", (new + r"post_norm.\2",)),
        Rule(old + r"(mlp\..*)", (new + r"\2",)),
        Rule(upstream + r"embed_tokens\.(.*)", (r"language.embed_tokens.\1",)),
    )
