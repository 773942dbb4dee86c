"""Sizes of a random SmolVLA checkpoint in LeRobot's layout, and the dtype of each tensor.

The defaults of :class:`Widths` are those of SmolVLA with SmolVLM2-500M: 500 tensors, 450,046,176 parameters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# How the tensors are stored. "float32" stores all tensors in float32. "native" is a LeRobot model without pretrained
# VLM weights: the language model and the expert are bfloat16, and vision, connector and lm_head are float32. "bf16-vlm"
# is a LeRobot model with pretrained VLM weights, as in published checkpoints: vision, connector and lm_head are
# bfloat16 too. In all three, the projections of states and actions and the key and value projections of cross layers
# are float32.
StorageRecipe = Literal["float32", "native", "bf16-vlm"]


@dataclass(frozen=True, slots=True)
class Widths:
    """Sizes that define the shapes of the tensors, with the names in the configurations.

    Attributes:
        text_layers: Layers in the VLM's configuration. The policy uses the first ``num_vlm_layers``.
        scale_factor: Factor of the pixel shuffle between vision tower and language model.
        num_expert_layers: Layers of the expert. 0 or less means ``num_vlm_layers``.
    """

    text_hidden: int = 960
    text_ffn: int = 2560
    text_heads: int = 15
    text_kv_heads: int = 5
    head_dim: int = 64
    text_layers: int = 32
    num_vlm_layers: int = 16
    vocab_size: int = 49280
    vision_hidden: int = 768
    vision_ffn: int = 3072
    vision_heads: int = 12
    vision_layers: int = 12
    image_size: int = 512
    patch_size: int = 16
    scale_factor: int = 4
    expert_width_multiplier: float = 0.75
    num_expert_layers: int = -1
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
    """Return the dtype in which a storage recipe stores a tensor."""
    if recipe == "float32" or not name.startswith("model.vlm_with_expert."):
        return "F32"
    if ".lm_expert." in name:
        cross = name.endswith(("k_proj.weight", "v_proj.weight")) and _is_cross(int(name.split(".")[4]), w)
        return "F32" if cross else "BF16"
    if ".text_model." in name or recipe == "bf16-vlm":
        return "BF16"
    return "F32"


def _is_cross(layer: int, w: Widths) -> bool:
    """Return True if LeRobot replaces k_proj and v_proj of this layer by projections of the prefix's keys and
    values.
    """
    return w.self_attn_every_n_layers <= 0 or layer % w.self_attn_every_n_layers != 0
