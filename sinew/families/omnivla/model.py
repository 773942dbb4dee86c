"""OmniVLA (Hirose et al. 2025, arXiv 2509.19480): OpenVLA-OFT for navigation.

The two views are those of the robot and of the goal. The state is the goal's pose. The head also reads the number of
the goal (:data:`goals.GOALS`). The sequence is [start of the prompt | robot's view | goal's view | pose | rest of the
prompt | zeros | stop token]. If the goal has no picture or no pose, no token attends to the picture's or pose's tokens,
but these tokens still count as positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sinew.families.omnivla.goals import GOALS, KINDS, POSE
from sinew.families.openvla.model import OFTConfig, OpenVLAOFT, RegressionHead, last_row
from sinew.layers.attention import block_mask
from sinew.layers.linear import Linear

VIEWS = 2  # the robot's view and the goal's view


@dataclass(frozen=True, kw_only=True)
class OmniVLAConfig(OFTConfig):
    """Sizes of OmniVLA.

    ``max_state_dim`` is the size of a pose plus one for the goal's number, an index of :data:`goals.GOALS`.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.max_state_dim, self.max_action_dim, self.action_bins) != (POSE + 1, POSE, 0):
            raise ValueError(
                f"max_state_dim, max_action_dim, action_bins: expected {POSE + 1}, {POSE} and 0, got"
                f" {self.max_state_dim}, {self.max_action_dim} and {self.action_bins}"
            )


class GoalStates(NamedTuple):
    """The hidden states and the goal's number, which the head reads.

    Attributes:
        hidden: [B, H, A * C], final states of the language model, one row per step.
        goal: float32 [B, 1], the goal's number.
    """

    hidden: Tensor
    goal: Tensor


class GoalHead(RegressionHead):
    """OpenVLA-OFT's action head. Its first layer also reads the number of the goal."""

    def __init__(self, input_size: int, hidden_size: int, output_size: int):
        super().__init__(input_size, hidden_size, output_size)
        self.proj_in = Linear(input_size + 1, hidden_size)

    def answer(self, x: Tensor, goal: Tensor) -> Tensor:  # shapes: [B, H, input], [B, 1] -> [B, H, output]
        x = self.norm_in(x)
        x = F.relu(self.proj_in(torch.cat([x, goal.to(x.dtype)[:, None].expand(-1, x.shape[1], -1)], dim=-1)))
        for block in self.blocks:
            x = block(x)
        return self.proj_out(self.norm_out(x))


class OmniVLA(OpenVLAOFT):
    """The model of OmniVLA: OpenVLA-OFT's network, whose head also reads the number of the goal.

    Attributes:
        reads: [goals, kinds], 1 if a goal (row) uses a kind of input (column), else 0.
    """

    config_type = OmniVLAConfig
    config: OmniVLAConfig
    head: GoalHead

    def __init__(self, config: OmniVLAConfig):
        super().__init__(config)
        width = config.language.hidden_size
        self.state_proj.layers[0] = Linear(POSE, width)
        self.head = GoalHead(POSE * width, width, POSE)
        self.register_buffer("reads", torch.zeros(len(GOALS), len(KINDS)))

    @property
    def views(self) -> int:
        return VIEWS

    def whole(
        self, image_tokens: Tensor, camera_mask: Tensor, tokens: Tensor, token_mask: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Build the whole input sequence of the language model.

        Returns:
            The embeddings [B, L, C], the mask of existing tokens, bool [B, L], and the mask of tokens that others may
            attend to, bool [B, L].
        """
        config, B = self.config, tokens.shape[0]
        slots = config.chunk_size * config.max_action_dim
        x, present = self.sequence(
            image_tokens,
            camera_mask,
            tokens,
            token_mask,
            behind_views=[self.state_proj(state[:, :POSE])[:, None]],
            behind_prompt=[
                image_tokens.new_zeros(B, slots, config.language.hidden_size),
                self.stop(config.stop_token, B),
            ],
        )
        table: Tensor = self.reads  # type: ignore[assignment]
        uses = table.index_select(0, (state[:, POSE] + 0.5).long()) > 0.5  # [B, kinds]; the number is whole
        picture, pose = (uses[:, KINDS.index(kind), None] for kind in ("image", "pose"))  # [B, 1] each
        before, patches = config.views_after + image_tokens.shape[2], image_tokens.shape[2]
        behind = x.shape[1] - before - patches - 1
        always = torch.ones_like(picture)
        pieces = ((always, before), (picture, patches), (pose, 1), (always, behind))
        visible = torch.cat([mask.expand(-1, count) for mask, count in pieces], dim=1)
        return x, present, present & visible

    def read(  # type: ignore[override]
        self, image_tokens: Tensor, camera_mask: Tensor, tokens: Tensor, token_mask: Tensor, state: Tensor
    ) -> GoalStates:
        config = self.config
        x, present, visible = self.whole(image_tokens, camera_mask, tokens, token_mask, state)
        positions = present.long().cumsum(dim=1) - 1
        h, _ = self.language(x, positions, block_mask(visible, torch.zeros_like(visible)))
        slots = config.chunk_size * config.max_action_dim
        h = torch.cat([last_row(h, token_mask, slots + 1), h[:, -slots - 1 : -2]], dim=1)  # [B, slots, C]
        shape = (config.chunk_size, config.max_action_dim)
        return GoalStates(self.language.norm(h).unflatten(1, shape).flatten(2), state[:, POSE:])

    def regress(self, context: GoalStates) -> Tensor:  # type: ignore[override]
        return self.head.answer(context.hidden, context.goal).float()
