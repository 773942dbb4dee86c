"""Sizes of a LeRobot SmolVLA checkpoint, and how its tensors are stored.

The defaults of :class:`Widths` are SmolVLA with SmolVLM2-500M: 500 tensors, 450,046,176 parameters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

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
    scale_factor: int = 4  # factor of the pixel shuffle between vision tower and language model
    expert_width_multiplier: float = 0.75
    num_expert_layers: int = -1  # 0 or less: as many as ``num_vlm_layers``
    self_attn_every_n_layers: int = 2
    chunk_size: int = 50
    max_state_dim: int = 32
    max_action_dim: int = 32
    num_steps: int = 10
    tokenizer_max_length: int = 48

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


def storage(name: str, w: Widths, recipe: StorageRecipe) -> Literal["F32", "BF16"]:
    """Return the type in which a recipe stores the tensor of this name."""
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
