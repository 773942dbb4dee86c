"""CogACT (Li et al. 2024, arXiv 2411.19650): a diffusion transformer that denoises an action chunk, conditioned on one
hidden state of a language model.

* The views are inside the prompt, as in OpenVLA. The prompt ends with an end-of-sentence token, whose final hidden
  state is the "cognition".
* The head's sequence is [cognition + time | noisy actions], with learned positions. The head predicts the noise in the
  actions.
* Classifier-free guidance (Ho and Salimans 2022, arXiv 2207.12598): each step runs the head twice, the second time with
  a learned vector in place of the cognition. The result is the second output plus ``guidance_scale`` times the
  difference from the second output to the first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sinew.families.openvla.model import PrismaticConfig, PrismaticVLM, last_row
from sinew.layers.attention import block_mask
from sinew.layers.fold_sites import FoldSite
from sinew.layers.linear import Linear
from sinew.layers.norm import LayerNorm
from sinew.layers.time_embedding import cosines_then_sines
from sinew.layers.vit import BlockConfig, ViTLayer
from sinew.models.solvers import NoiseLevels, Solver

NORM_EPS = 1e-6  # epsilon of the head's norms
TIME_CHANNELS = 256  # channels of the sinusoids at the start of the time embedding
LONGEST_PERIOD = 10_000.0  # longest period of the time embedding, divided by 2 pi
LEVELS = NoiseLevels(100, spacing="even")


@dataclass(frozen=True, kw_only=True)
class CogACTConfig(PrismaticConfig):
    """Sizes of CogACT.

    Attributes:
        head: Sizes of the diffusion transformer.
        guidance_scale: Scale of the guidance, at least 1. With 1 the head runs once per step.
    """

    head: BlockConfig
    guidance_scale: float = 1.5

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1.0 <= self.guidance_scale < math.inf:
            raise ValueError(f"guidance_scale: expected a number of at least 1, got {self.guidance_scale}")


class Cognition(NamedTuple):
    """The results of an observation that each solver step reads.

    Attributes:
        conditions: [B, K, C]. K is 1 without guidance: the hidden state of the prompt's last token ("cognition"). K
            is 2 with guidance: this state, and the learned vector that replaces it.
    """

    conditions: Tensor


class CognitionHead(nn.Module):
    """The diffusion transformer of CogACT, which predicts the noise in the actions of a chunk."""

    layers: Sequence[ViTLayer]

    def __init__(self, config: CogACTConfig):
        super().__init__()
        size, width, dim = config.head.hidden_size, config.language.hidden_size, config.max_action_dim
        block = config.head.block(NORM_EPS, "gelu_tanh")
        self.condition = Linear(width, size)
        self.none = nn.Parameter(torch.zeros(1, width))
        self.time_in = Linear(TIME_CHANNELS, size)
        self.time_out = Linear(size, size)
        self.action_in = Linear(dim, size)
        self.places = nn.Parameter(torch.zeros(1 + config.chunk_size, size))
        self.layers = nn.ModuleList(  # type: ignore[assignment]
            ViTLayer(block) for _ in range(config.head.num_layers)
        )
        self.norm = LayerNorm(size, eps=NORM_EPS)
        self.action_out = Linear(size, dim)

    def fold_sites(self) -> list[FoldSite]:
        return [FoldSite(self, "norm", (self.action_out,))]

    def time(self, level: Tensor) -> Tensor:
        """Return the embedding [B, C] of noise levels [B]."""
        waves = cosines_then_sines(level, TIME_CHANNELS, LONGEST_PERIOD)
        return self.time_out(F.silu(self.time_in(waves)))

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        """Predict the noise in the actions.

        Args:
            x: [B, H, A], noisy actions.
            condition: [B, 1, C], the sum of the projected condition and the time embedding.

        Returns:
            Output, [B, H, A].
        """
        h = torch.cat([condition.to(self.action_in.dtype), self.action_in(x)], dim=1) + self.places
        for layer in self.layers:
            h = layer(h)
        return self.action_out(self.norm(h)[:, 1:])


class CogACT(PrismaticVLM):
    """CogACT: OpenVLA's towers and language model, and a diffusion transformer."""

    config_type = CogACTConfig
    config: CogACTConfig
    float32_modules: ClassVar[tuple[str, ...]] = ("head",)
    solver = Solver("diffusion", levels=LEVELS)

    def __init__(self, config: CogACTConfig):
        super().__init__(config)
        self.head = CognitionHead(config)

    def cognition(
        self, image_tokens: Tensor, camera_mask: Tensor, tokens: Tensor, token_mask: Tensor
    ) -> Tensor:
        """Run the language model over views and prompt. Return the final hidden state of the prompt's last token (the
        "cognition"), [B, 1, C]. The arguments are those of :meth:`read`.
        """
        x, valid = self.sequence(image_tokens, camera_mask, tokens, token_mask)
        positions = valid.long().cumsum(dim=1) - 1
        h, _ = self.language(x, positions, block_mask(valid, torch.ones_like(valid)))
        return self.language.norm(last_row(h, token_mask, 0))

    def read(
        self, image_tokens: Tensor, camera_mask: Tensor, tokens: Tensor, token_mask: Tensor, state: Tensor
    ) -> Cognition:
        condition = self.head.condition(self.cognition(image_tokens, camera_mask, tokens, token_mask))
        if self.config.guidance_scale == 1.0:
            return Cognition(condition)
        none = self.head.condition(self.head.none).expand(condition.shape[0], 1, -1)
        return Cognition(torch.cat([condition, none], dim=1))

    def embed_time(self, t: Tensor) -> Tensor:
        return self.head.time(t)

    def act(self, x: Tensor, time_embedding: Tensor, context: Cognition) -> Tensor:
        conditions = context.conditions + time_embedding.to(context.conditions.dtype)[:, None]  # [B, K, C]
        kinds = conditions.shape[1]
        each = x[:, None].expand(-1, kinds, -1, -1).flatten(0, 1)  # [B * K, H, A]
        noise = self.head(each, conditions.flatten(0, 1)[:, None]).float()
        if kinds == 1:
            return noise
        guided, unguided = noise.unflatten(0, (-1, kinds)).unbind(1)
        return unguided + self.config.guidance_scale * (guided - unguided)
