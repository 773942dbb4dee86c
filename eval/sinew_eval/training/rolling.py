"""Gradual flow matching: each action of a window has its own flow time, and the window may contradict the state.

A stream runs the action head once per control step. Action i of its window has noise level (i + 1) / H before a run
and i / H after it. The first action becomes clean and is executed, and noise is appended at the end (rolling
diffusion, Ruhe et al. 2024, arXiv 2402.09470; "gradual" in section 6.2 of Ma et al. 2025). If a run comes late, m
actions have passed, and action i starts from (i + m) / H.

This alone would not react to new states. An almost clean action reveals its final value, and a network that was
trained only on correct windows trusts the window more than the sensor. Therefore the training windows contain a
*plan* that may be out of date, because it was made before an event: x = t noise + (1 - t) plan. The target is the
action for the newest state. The loss is that of the denoised action, x - t v, which a run returns.

Half of the draws use ordinary flow matching with one time for all actions, so that the same weights can also return
whole chunks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from sinew.families.smolvla.model import SmolVLA
from torch import Tensor, nn

from sinew_eval.training.objective import Batch, repeated

LATE = 6.0  # between two runs of the action head, at most this many actions may have passed


@dataclass
class RollingBatch(Batch):
    """B images with D observation steps each. All values are normalised.

    Attributes:
        states: States, [B, D, S].
        chunks: Target actions, [B, D, H, A].
        plans: Actions from which the windows are made, before the head gets the new state, [B, D, H, A].
    """

    states: Tensor | None = None
    chunks: Tensor | None = None
    plans: Tensor | None = None


class RollingObjective(nn.Module):
    """Sum of both losses. Accepts the arguments of :class:`sinew_eval.training.objective.Objective` and has no
    auxiliary heads.
    """

    def __init__(self, model: SmolVLA, *_others: float):
        super().__init__()
        self.model = model

    def forward(self, batch: RollingBatch, generator: torch.Generator) -> tuple[Tensor, dict[str, Tensor]]:
        assert batch.states is not None
        assert batch.chunks is not None
        assert batch.plans is not None
        B, D = batch.states.shape[:2]
        model = self.model
        cameras = torch.ones(B, batch.pixels.shape[1], dtype=torch.bool)
        read = model.prefix(
            model.embed_images(batch.pixels), cameras, batch.tokens, batch.token_mask, batch.state
        )
        prefix = repeated(read, B, D)._replace(state=model.state_token(batch.states.flatten(0, 1)))
        actions, plans = batch.chunks.flatten(0, 1), batch.plans.flatten(0, 1)  # [B * D, H, A]
        noise = torch.randn(actions.shape, generator=generator)
        # The samples of a batch are in random order, so the first half is a random selection.
        half = len(actions) // 2
        times = torch.cat([self._one_time(half, generator), self._rolling(len(actions) - half, generator)])
        t = times[..., None]  # [B * D, H, 1]
        start = torch.cat([actions[:half], plans[half:]])
        x = t * noise + (1 - t) * start
        velocity = model.velocity(x, times, prefix)
        flow = (velocity[:half] - (noise - actions)[:half]).square().mean()
        denoised = (x - t * velocity)[half:]
        rolling = (denoised - actions[half:]).square().mean()
        return flow + 2.0 * rolling, {"flow": flow.detach(), "rolling": rolling.detach()}

    def _one_time(self, count: int, generator: torch.Generator) -> Tensor:
        """Draw flow times for ``count`` windows, [count, H]. All actions of a window get the same time, from Beta(1.5,
        1) scaled to (0.001, 1), as in LeRobot.
        """
        t = torch.rand(count, 1, generator=generator) ** (1 / 1.5) * 0.999 + 0.001
        return t.expand(count, self.model.config.chunk_size)

    def _rolling(self, count: int, generator: torch.Generator) -> Tensor:
        """Draw the flow times of rolling windows, [count, H]: (i + m) / H with m from 1 to LATE, most often near 1."""
        H = self.model.config.chunk_size
        passed = 1.0 + (LATE - 1.0) * torch.rand(count, 1, generator=generator) ** 3
        return ((torch.arange(H) + passed) / H).clamp(max=1.0)
