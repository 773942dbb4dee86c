"""VLA-JEPA without its world model, which inference does not read (LeRobot ``policies/vla_jepa``).

Qwen3-VL reads views and instruction. The prompt ends in learned "embodied action" tokens; their outputs of the last
language layer, before the final norm, are all that the action head reads. The head is GR00T's: a diffusion transformer
whose even blocks read those rows and whose odd blocks read [state | future tokens | noisy actions].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sinew.families.gr00t.head import HeadContext
from sinew.families.gr00t.model import Gr00tQwen, Gr00tQwenConfig


@dataclass(frozen=True, kw_only=True)
class JepaConfig(Gr00tQwenConfig):
    """marker: the id of the embodied action token; markers: how many of them a prompt holds."""

    marker: int
    markers: int
    max_state_dim: int = 0  # policies without a state have no state token


class VLAJepa(Gr00tQwen):
    config_type: ClassVar[type] = JepaConfig
    per_embodiment: ClassVar[tuple[str, ...]] = ()
    float32_modules = ("head",)  # upstream builds the head in float32 whatever the language model's dtype

    def read(
        self, image_tokens: Tensor, camera_mask: Tensor, tokens: Tensor, token_mask: Tensor, state: Tensor
    ) -> HeadContext:
        """Return the context; arguments as in ``Model.read``. ``tokens`` hold a placeholder per image token."""
        is_image, valid = self.seen(image_tokens, camera_mask, tokens, token_mask)
        features = self.features(image_tokens, is_image, tokens, valid)  # [B, L, C]
        index = self.marked(tokens, valid)
        rows = features.gather(1, index[..., None].expand(-1, -1, features.shape[2]))  # [B, markers, C]
        all_rows = torch.ones_like(index, dtype=torch.bool)
        return self.head.context(rows, ~all_rows, all_rows, state)

    def marked(self, tokens: Tensor, valid: Tensor) -> Tensor:
        """Return the positions of the embodied action tokens, int64 [B, markers], in their order."""
        marks = (tokens == self.config.marker) & valid  # [B, L]
        order = torch.arange(1, self.config.markers + 1, device=tokens.device)
        hits = marks[:, None] & (marks.long().cumsum(dim=1)[:, None] == order[:, None])  # [B, markers, L]
        return (hits.long() * torch.arange(tokens.shape[1], device=tokens.device)).sum(dim=-1)
