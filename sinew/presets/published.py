"""The families that have no random checkpoint of their own in this package, at their published widths.

GR00T N1.5 and N1.6, VLA-JEPA and BitVLA: vla.cpp's converters (commit b18873d), which fix these sizes; OpenVLA and
VLA-Adapter: the timm models and language models that their configurations name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from sinew.layers.decoder import DecoderConfig
from sinew.layers.dit import DiTConfig
from sinew.layers.qwen_vit import QwenViTConfig
from sinew.layers.vit import ViTConfig
from sinew.models.adapter import AdapterConfig
from sinew.models.gr00t import Gr00tEagleConfig
from sinew.models.gr00t_head import HeadConfig
from sinew.models.jepa import JepaConfig
from sinew.models.openvla import OFTConfig, OpenVLAConfig
from sinew.presets.openvla_checkpoint import oft_config


class Published(NamedTuple):
    """architecture: of ``sinew.models``. views, side, tokens, steps: of a usual request; tokens with an instruction of
    a dozen words."""

    architecture: str
    config: Any
    views: int
    side: int
    tokens: int
    steps: int


WORDS = 15
# SigLIP so400m of 27 layers, and Qwen3 1.7B, whose first layers are read.
SIGLIP = ViTConfig(1152, 4304, 27, 16, image_size=224, patch_size=14, norm_eps=1e-6)


def _qwen3(layers: int, theta: float = 1e6) -> DecoderConfig:
    return DecoderConfig(2048, 6144, layers, 16, 8, 128, norm_eps=1e-6, rope_theta=theta, qk_norm=True)


def _head(layers: int, **options: Any) -> HeadConfig:
    cross = tuple(index % 2 == 0 for index in range(layers))
    dit = DiTConfig(layers, 32, 48, output_size=1024, context_size=2048, is_cross=cross)
    return HeadConfig(dit, hidden_size=1024, buckets=1000, positions=1024, **options)


def _n15() -> Published:
    refine = {"refine_layers": 4, "refine_heads": 32, "refine_head_dim": 64}
    config = Gr00tEagleConfig(
        language=_qwen3(12),
        head=_head(16, **refine, future_tokens=32),
        vocab_size=151680,
        chunk_size=16,
        max_state_dim=64,
        max_action_dim=32,
        image_token=151669,
        rows=16,
        cols=16,
        vision=SIGLIP,
        unshuffle=1,
    )
    return Published("gr00t_n1_5", config, 2, 224, 2 * (256 + 6) + 25 + WORDS, 4)


def _n16() -> Published:
    config = Gr00tEagleConfig(
        language=_qwen3(16),
        head=_head(32, text_every=2),
        vocab_size=151680,
        chunk_size=50,
        max_state_dim=128,
        max_action_dim=128,
        image_token=151669,
        rows=9,
        cols=9,
        vision=SIGLIP,
        unshuffle=2,
    )
    return Published("gr00t_n1_6", config, 2, 252, 2 * (81 + 6) + 20 + WORDS, 4)


def _jepa() -> Published:
    blocks = ViTConfig(1024, 4096, 24, 16, image_size=48 * 16, patch_size=16, norm_eps=1e-6)
    dit = DiTConfig(16, 12, 64, output_size=1024, context_size=2048, is_cross=(True, False) * 8)
    config = JepaConfig(
        language=_qwen3(28, theta=5e6),
        head=HeadConfig(dit, 1024, buckets=1000, positions=1024, future_tokens=32, norm_features=False),
        vocab_size=151936,
        chunk_size=7,
        max_state_dim=8,
        max_action_dim=7,
        image_token=151655,
        rows=8,
        cols=8,
        vision=QwenViTConfig(blocks, output_size=2048, merge=2, temporal_patch=2, taps=(5, 11, 17)),
        position_sections=(24, 20, 20),
        marker=151697,
        markers=32,
    )
    return Published("vla_jepa", config, 2, 256, 2 * (64 + 2) + 24 + 32 + 25 + WORDS, 4)


def _openvla() -> Published:
    oft = oft_config()
    config = OpenVLAConfig(
        vision=oft.vision,
        projector=oft.projector,
        language=oft.language,
        vocab_size=oft.vocab_size,
        chunk_size=1,
        max_action_dim=7,
    )
    return Published("openvla", config, 1, 224, 12 + WORDS, 1)


def _adapter() -> Published:
    oft = oft_config()
    config = AdapterConfig(
        vision=oft.vision,
        projector=(oft.projector[0], 896),
        language=DecoderConfig(896, 4864, 24, 14, 2, 64, norm_eps=1e-6, rope_theta=1e6, qkv_bias=True),
        vocab_size=151936,
        chunk_size=8,
        max_action_dim=7,
        max_state_dim=8,
    )
    return Published("vla_adapter", config, 2, 224, 35 + WORDS, 1)


def _bitvla() -> Published:
    tower = ViTConfig(
        1152, 4304, 26, 16, image_size=224, patch_size=14, norm_eps=1e-6, final_norm=False, ternary=True
    )
    language = DecoderConfig(
        2560,
        6912,
        30,
        20,
        5,
        128,
        norm_eps=1e-5,
        rope_theta=5e5,
        activation="relu2",
        sub_norms=True,
        ternary=True,
    )
    config = OFTConfig(
        vision=(tower,),
        projector=(2560,),
        language=language,
        vocab_size=128264,
        chunk_size=8,
        max_action_dim=7,
        max_state_dim=8,
        views_after=36,
        stop_token=128001,
    )
    return Published("bitvla", config, 2, 224, 55 + WORDS, 1)


PUBLISHED: dict[str, Callable[[], Published]] = {
    "gr00t-n1.5": _n15,
    "gr00t-n1.6": _n16,
    "openvla": _openvla,
    "vla-adapter": _adapter,
    "bitvla": _bitvla,
    "vla-jepa": _jepa,
}
