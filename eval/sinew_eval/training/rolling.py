"""Gradual flow matching: a time of its own for each row of a window, and states that contradict what is in it.

A stream runs the head once per control step. Row i of its window stands at noise level (i + 1) / H before a run and
i / H after it: the first row becomes clean and is executed, noise is appended at the end (rolling diffusion, Ruhe
et al. 2024, arXiv 2402.09470; "gradual" in section 6.2 of Ma et al. 2025). Where a run comes late, m rows have
passed, and row i goes from (i + m) / H.

That alone would not react. A row that is nearly clean gives away what it is going to be, and a network that was
trained on windows which always told the truth believes them rather than the sensor. So windows are made of a *plan*
that may be out of date (what was known before the event), x = t noise + (1 - t) plan, and what is asked for is the
action that the newest state calls for. The error is that of the denoised action, x - t v, which is what a run hands
out.

Half of the draws are ordinary flow matching with one time for all rows, so that the same weights answer with whole
chunks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from sinew.families.smolvla.model import SmolVLA
from torch import Tensor, nn

from sinew_eval.training.objective import Batch, repeated

LATE = 6.0  # largest number of actions that may have passed between two runs


@dataclass
class RollingBatch(Batch):
    """B pictures with D moments each: ``states`` [B, D, S], ``chunks`` and ``plans`` [B, D, H, A], all normalised.

    plans: what the window was made of before its head saw the state.
    """

    states: Tensor | None = None
    chunks: Tensor | None = None
    plans: Tensor | None = None


class RollingObjective(nn.Module):
    """The mean of the two losses; takes the arguments of :class:`sinew_eval.training.objective.Objective`, and has no
    other heads."""

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
        """[count, H]: Beta(1.5, 1), scaled to (0.001, 1), as upstream."""
        t = torch.rand(count, 1, generator=generator) ** (1 / 1.5) * 0.999 + 0.001
        return t.expand(count, self.model.config.chunk_size)

    def _rolling(self, count: int, generator: torch.Generator) -> Tensor:
        """[count, H]: (i + m) / H with m from 1 to LATE, most often near 1."""
        H = self.model.config.chunk_size
        passed = 1.0 + (LATE - 1.0) * torch.rand(count, 1, generator=generator) ** 3
        return ((torch.arange(H) + passed) / H).clamp(max=1.0)
