"""Names, shapes and storage types of every tensor in a LeRobot SmolVLA checkpoint.

The defaults of :class:`Widths` are SmolVLA with SmolVLM2-500M: 500 tensors, 450,046,176 parameters.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from sinew.presets.plan import Init, TensorPlan

# "float32": everything F32.
# "native":  what LeRobot builds without pretrained VLM weights: the language model and the expert in
#            bfloat16; vision, connector and lm_head in float32.
# "bf16-vlm": what it builds with them, as published checkpoints are: those in bfloat16 too.
# The projections at both ends and the cross-attention k/v projections are float32 in all three.
StorageRecipe = Literal["float32", "native", "bf16-vlm"]


@dataclass(frozen=True, slots=True)
class Widths:
    """Hyper-parameters that fix tensor shapes, by the names of the configs that they end up in."""

    text_hidden: int = 960
    text_ffn: int = 2560
    text_heads: int = 15
    text_kv_heads: int = 5
    head_dim: int = 64
    text_layers: int = 32  # in the VLM's config; the policy keeps the first ``num_vlm_layers``
    num_vlm_layers: int = 16
    vocab_size: int = 49280
    vision_hidden: int = 768
    vision_ffn: int = 3072
    vision_heads: int = 12
    vision_layers: int = 12
    image_size: int = 512
    patch_size: int = 16
    scale_factor: int = 4  # of the pixel shuffle between vision tower and language model
    expert_width_multiplier: float = 0.75
    num_expert_layers: int = -1  # 0 or less: as many as ``num_vlm_layers``
    self_attn_every_n_layers: int = 2
    chunk_size: int = 50
    max_state_dim: int = 32
    max_action_dim: int = 32
    num_steps: int = 10
    tokenizer_max_length: int = 48

    @property
    def expert_hidden(self) -> int:
        return int(self.text_hidden * self.expert_width_multiplier)

    @property
    def expert_ffn(self) -> int:
        # LeRobot's get_intermediate_size: two thirds, times four, rounded up to a multiple of 256.
        return -(-int(4 * int(2 * self.expert_hidden / 3)) // 256) * 256

    @property
    def expert_layers(self) -> int:
        return self.num_expert_layers if self.num_expert_layers > 0 else self.num_vlm_layers

    @property
    def image_token_id(self) -> int:
        return self.vocab_size - 90  # 49190 in SmolVLM2's vocabulary of 49280


TINY = Widths(
    text_hidden=96,
    text_ffn=256,
    text_heads=3,
    text_kv_heads=1,
    head_dim=32,
    text_layers=6,
    num_vlm_layers=4,
    vocab_size=512,
    vision_hidden=48,
    vision_ffn=96,
    vision_heads=3,
    vision_layers=2,
    image_size=128,
)


def tensors(w: Widths, recipe: StorageRecipe = "float32") -> list[TensorPlan]:
    """Every tensor of ``model.safetensors``, in the order in which safetensors stores them."""
    plans = [
        TensorPlan(name, shape, init, _storage(name, w, recipe))
        for name, shape, init in [*_heads(w), *_vision(w), *_language(w), *_expert(w)]
    ]
    # The wider type first, then by name: what the safetensors library writes.
    return sorted(plans, key=lambda plan: (plan.storage != "F32", plan.name))


def _storage(name: str, w: Widths, recipe: StorageRecipe) -> Literal["F32", "BF16"]:
    if recipe == "float32" or not name.startswith("model.vlm_with_expert."):
        return "F32"
    if ".lm_expert." in name:
        cross = name.endswith(("k_proj.weight", "v_proj.weight")) and _is_cross(int(name.split(".")[4]), w)
        return "F32" if cross else "BF16"
    if ".text_model." in name or recipe == "bf16-vlm":
        return "BF16"
    return "F32"


def _is_cross(layer: int, w: Widths) -> bool:
    """True where LeRobot replaces k_proj and v_proj by projections of the cached prefix K/V."""
    return w.self_attn_every_n_layers <= 0 or layer % w.self_attn_every_n_layers != 0


Rows = Iterator[tuple[str, tuple[int, ...], Init]]


def _linear(name: str, out_features: int, in_features: int, bias: bool = True) -> Rows:
    yield f"{name}.weight", (out_features, in_features), "matrix"
    if bias:
        yield f"{name}.bias", (out_features,), "bias"


def _heads(w: Widths) -> Rows:
    expert = w.expert_hidden
    yield from _linear("model.state_proj", w.text_hidden, w.max_state_dim)
    yield from _linear("model.action_in_proj", expert, w.max_action_dim)
    yield from _linear("model.action_out_proj", w.max_action_dim, expert)
    yield from _linear("model.action_time_mlp_in", expert, 2 * expert)
    yield from _linear("model.action_time_mlp_out", expert, expert)


def _vision(w: Widths) -> Rows:
    hidden, root = w.vision_hidden, "model.vlm_with_expert.vlm.model"
    vision = f"{root}.vision_model"
    yield f"{vision}.embeddings.patch_embedding.weight", (hidden, 3, w.patch_size, w.patch_size), "matrix"
    yield f"{vision}.embeddings.patch_embedding.bias", (hidden,), "bias"
    patches = (w.image_size // w.patch_size) ** 2
    yield f"{vision}.embeddings.position_embedding.weight", (patches, hidden), "embedding"
    for i in range(w.vision_layers):
        layer = f"{vision}.encoder.layers.{i}"
        for norm in ("layer_norm1", "layer_norm2"):
            yield f"{layer}.{norm}.weight", (hidden,), "norm"
            yield f"{layer}.{norm}.bias", (hidden,), "bias"
        for projection in ("q_proj", "k_proj", "v_proj", "out_proj"):
            yield from _linear(f"{layer}.self_attn.{projection}", hidden, hidden)
        yield from _linear(f"{layer}.mlp.fc1", w.vision_ffn, hidden)
        yield from _linear(f"{layer}.mlp.fc2", hidden, w.vision_ffn)
    yield f"{vision}.post_layernorm.weight", (hidden,), "norm"
    yield f"{vision}.post_layernorm.bias", (hidden,), "bias"
    shuffled = hidden * w.scale_factor**2
    yield from _linear(f"{root}.connector.modality_projection.proj", w.text_hidden, shuffled, bias=False)


def _language(w: Widths) -> Rows:
    text = "model.vlm_with_expert.vlm.model.text_model"
    yield f"{text}.embed_tokens.weight", (w.vocab_size, w.text_hidden), "embedding"
    for i in range(w.num_vlm_layers):
        yield from _decoder_layer(f"{text}.layers.{i}", w, w.text_hidden, w.text_ffn, w.text_hidden)
    yield f"{text}.norm.weight", (w.text_hidden,), "norm"
    yield "model.vlm_with_expert.vlm.lm_head.weight", (w.vocab_size, w.text_hidden), "matrix"


def _expert(w: Widths) -> Rows:
    expert = "model.vlm_with_expert.lm_expert"
    kv_width = w.text_kv_heads * w.head_dim
    for i in range(w.expert_layers):
        kv_input = kv_width if _is_cross(i, w) else w.expert_hidden
        yield from _decoder_layer(f"{expert}.layers.{i}", w, w.expert_hidden, w.expert_ffn, kv_input)
    yield f"{expert}.norm.weight", (w.expert_hidden,), "norm"


def _decoder_layer(layer: str, w: Widths, hidden: int, ffn: int, kv_input: int) -> Rows:
    """A Llama block; ``kv_input`` is the width that k_proj and v_proj read."""
    q_width, kv_width = w.text_heads * w.head_dim, w.text_kv_heads * w.head_dim
    yield f"{layer}.input_layernorm.weight", (hidden,), "norm"
    yield f"{layer}.post_attention_layernorm.weight", (hidden,), "norm"
    yield from _linear(f"{layer}.self_attn.q_proj", q_width, hidden, bias=False)
    yield from _linear(f"{layer}.self_attn.k_proj", kv_width, kv_input, bias=False)
    yield from _linear(f"{layer}.self_attn.v_proj", kv_width, kv_input, bias=False)
    yield from _linear(f"{layer}.self_attn.o_proj", hidden, q_width, bias=False)
    yield from _linear(f"{layer}.mlp.gate_proj", ffn, hidden, bias=False)
    yield from _linear(f"{layer}.mlp.up_proj", ffn, hidden, bias=False)
    yield from _linear(f"{layer}.mlp.down_proj", hidden, ffn, bias=False)
