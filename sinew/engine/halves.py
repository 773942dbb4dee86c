"""A model in two halves that may run at the same time: a prefix once per frame, and the head as often as wished.

An engine's ``run`` does one after the other for one observation. A stream (:mod:`sinew.stream`) runs them on two
threads, so nothing here has a state: the context that a prefix leaves is whole and never written to again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sinew.core import SinewError
from sinew.engine.eager import EagerEngine
from sinew.engine.example import Inputs
from sinew.processing import ModelInputs
from sinew.solvers import Guidance, solve


def unstreamable(engine: Any) -> str:
    """Return why an engine cannot run its two halves at the same time, "" if it can."""
    if isinstance(engine, EagerEngine) and engine.device.type == "cpu":
        return ""
    name = type(engine).__name__.removesuffix("Engine").lower()
    return f"expected engine eager or plan on a CPU, whose halves share no buffers, got {name} on {engine.device}"


class Halves:
    """The two halves of an engine's model. Every method may be called from any thread; each thread has its own pool.

    Nothing runs in inference mode, because guidance differentiates through what a prefix left.
    """

    def __init__(self, engine: Any):
        if reason := unstreamable(engine):
            raise SinewError(f"stream: {reason}")
        self._engine, self.model, self.device, self.place = engine, engine.model, engine.device, engine.place
        self.rolling = bool(getattr(self.model.config, "rolling", False))
        self.head_reads_state = bool(self.model.head_reads_state)
        self.has_lm_head = bool(self.model.has_lm_head)

    @torch.no_grad()
    def read(self, inputs: ModelInputs) -> Any:
        """Return the context of one observation."""
        batch = Inputs.of(inputs, self.device)
        return self.model.read(self.model.embed_images(batch.pixels), *batch[1:])

    @torch.no_grad()
    def read_text(self, inputs: ModelInputs, text: Sequence[int]) -> tuple[Any, int]:
        """Return the context of one observation, and the likeliest token behind ``text``, from the same pass."""
        batch = Inputs.of(inputs, self.device)
        so_far = torch.tensor(text, dtype=torch.int64, device=self.device)[None]  # [1, N]
        context, logits = self.model.read_text(self.model.embed_images(batch.pixels), *batch[1:], so_far)
        return context, int(logits[0].argmax())

    @torch.no_grad()
    def renew(self, context: Any, state: np.ndarray) -> Any:
        """Return the context with a newer state, float32 [S], where the head reads it; else the same context."""
        return self.model.renew(context, torch.from_numpy(state)[None].to(self.device))

    @torch.no_grad()
    def solve(
        self,
        context: Any,
        noise: np.ndarray,
        steps: int,
        guidance: Guidance | None = None,
        after_step: Callable[[], None] | None = None,
    ) -> np.ndarray:
        """Return a whole solution, float32 [H, A] in model units, from noise [H, A]. after_step: called after each
        evaluation."""
        x = solve(
            lambda x, moment: self.model.act(x, moment, context),
            torch.from_numpy(noise)[None].to(self.device),
            self.model.solver.steps(steps),
            self._engine.moments(steps),
            after_step=after_step,
            guidance=guidance,
        )
        return x[0].float().cpu().numpy()

    @torch.no_grad()
    def evaluate(self, context: Any, x: np.ndarray, times: np.ndarray) -> np.ndarray:
        """Return the head's output, float32 [H, A], for x [H, A] whose rows stand at ``times``, float64 [H]."""
        at: Tensor = torch.from_numpy(np.asarray(times, np.float64))[None].to(self.device)
        output = self.model.act(torch.from_numpy(x)[None].to(self.device), self.model.moment(at), context)
        return output[0].float().cpu().numpy()
