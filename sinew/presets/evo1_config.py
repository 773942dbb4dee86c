"""Evo-1 at full size: InternVL3-1B's published widths, of whose language model 14 layers are kept, and the defaults of
LeRobot's ``configuration_evo1.py`` for the head."""

from __future__ import annotations

from sinew.layers.decoder import DecoderConfig
from sinew.layers.vit import ViTConfig
from sinew.models.evo1 import Evo1Config

VIEWS, STEPS = 3, 32
SIDE, TOKENS = 448, 256  # pixels and image tokens of a view
WORDS = 15  # tokens of an instruction of a dozen words
PROMPT = VIEWS * (TOKENS + 7) + WORDS  # "Image-1: <img>...</img>" and a line break around each view


def evo1_config(action_dim: int = 7) -> Evo1Config:
    """Return the model's configuration; the vocabulary is InternVL3's."""
    vision = ViTConfig(
        hidden_size=1024,
        intermediate_size=4096,
        num_layers=24,
        num_heads=16,
        image_size=SIDE,
        patch_size=14,
        norm_eps=1e-6,
        activation="gelu",
        prefix_tokens=1,
        layer_scale=True,
        final_norm=False,
    )
    language = DecoderConfig(
        hidden_size=896,
        intermediate_size=4864,
        num_layers=14,
        num_heads=14,
        num_kv_heads=2,
        head_dim=64,
        norm_eps=1e-6,
        rope_theta=1e6,
        qkv_bias=True,
    )
    return Evo1Config(
        vision=vision,
        language=language,
        vocab_size=151674,
        chunk_size=50,
        max_state_dim=24,
        max_action_dim=24,
        action_dim=action_dim,
        views=VIEWS,
        image_token=151667,
        unshuffle=2,
        head_layers=8,
        head_heads=8,
        head_size=896,
        decoder_size=1024,
        state_size=1024,
    )
