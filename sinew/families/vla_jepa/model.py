"""VLA-JEPA without its world model, which inference does not need (LeRobot ``policies/vla_jepa``).

Qwen3-VL reads views and instruction. The prompt ends with special tokens that are called "embodied action" tokens. The
action head reads only the outputs of the last language layer at these tokens, before the final norm. The head is
GR00T's diffusion transformer. Its even blocks attend to these outputs, and its odd blocks attend to [state | future
tokens | noisy actions]. The solver integrates the head's velocity to an action chunk.
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
    """Sizes of VLA-JEPA.

    Attributes:
        marker: Id of the embodied action token.
        markers: Number of embodied action tokens in a prompt.
        max_state_dim: Size of the state. 0 if the policy has no state token.
    """

    marker: int
    markers: int
    max_state_dim: int = 0


class VLAJepa(Gr00tQwen):
    """VLA-JEPA: Qwen3-VL and GR00T's action head."""

    config_type: ClassVar[type] = JepaConfig
    per_embodiment: ClassVar[tuple[str, ...]] = ()
    # LeRobot creates the head in float32 for every dtype of the language model.
    float32_modules = ("head",)

    def read(
        self, image_tokens: Tensor, camera_mask: Tensor, tokens: Tensor, token_mask: Tensor, state: Tensor
    ) -> HeadContext:
        """Run the language model, and compute the results that the head reads in each solver step. The arguments are
        those of ``Model.read``. ``tokens`` contains a placeholder for each image token.
        """
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
