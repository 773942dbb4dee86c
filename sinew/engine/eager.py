"""The reference engine: the model's own PyTorch code, stage by stage."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import ClassVar

import numpy as np
import torch

from sinew import machine
from sinew.core import CancelledError, Timing
from sinew.engine.threads import settle
from sinew.models.base import FlowModel, Prefix
from sinew.processing import ModelInputs
from sinew.solvers import Velocity, euler

Field = tuple[Velocity, list[torch.Tensor] | None]

_AT_FIRST = torch.get_num_threads()  # PyTorch has one number for the whole process


class EagerEngine:
    """Runs a flow-matching model. Not reentrant: one inference at a time."""

    _settled: ClassVar[int] = 0  # the number of threads that the last of them settled on

    def __init__(self, model: FlowModel, device: torch.device):
        self.model = model.eval().requires_grad_(False)
        self.device = device
        self.recipe: dict[str, str] = {}  # nothing is quantised
        self._threads = 0

    @property
    def threads(self) -> int:
        return self._threads or torch.get_num_threads()  # which each thread of a process is told for itself

    def settle_threads(self, infer: Callable[[], object]) -> str:
        """Choose the number of threads by trying; returns the reason."""
        if self.device.type != "cpu":
            return "the device computes"
        now = torch.get_num_threads()
        # What an earlier policy settled on is no wish of the user's.
        many = min(_AT_FIRST if now == EagerEngine._settled else now, machine.recommended_threads()[0])
        self._threads, reason = settle(infer, torch.set_num_threads, many)
        EagerEngine._settled = self._threads
        return reason

    @property
    def weights_nbytes(self) -> int:
        """Bytes of the model's parameters in memory (mapped or converted)."""
        return sum(p.nbytes for p in self.model.parameters())

    @torch.inference_mode()
    def run(
        self, inputs: ModelInputs, noise: np.ndarray, steps: int, cancel: threading.Event | None = None
    ) -> tuple[np.ndarray, Timing]:
        """noise: float32 [H, A] -> model output float32 [H, A] in model units, with per-stage times.

        Looks at ``cancel`` after every stage and raises :class:`CancelledError` when it is set.
        """
        clock = _StageClock(self.device, cancel)
        tensors = (inputs.pixels, inputs.camera_mask, inputs.tokens, inputs.token_mask, inputs.state)
        pixels, camera_mask, tokens, token_mask, state = (self._batch(array) for array in tensors)
        image_tokens = self.model.embed_images(pixels)  # [1, V, N, C]
        vision_ms = clock.lap()
        prefix = self.model.prefix(image_tokens, camera_mask, tokens, token_mask, state)
        prefix_ms = clock.lap()
        step_ms: list[float] = []
        velocity, moments = self.field(prefix, steps)
        x = euler(velocity, self._batch(noise), steps, lambda: step_ms.append(clock.lap()), moments)
        timing = Timing(vision_ms=vision_ms, prefix_ms=prefix_ms, step_ms=tuple(step_ms))
        return x[0].float().cpu().numpy(), timing

    def field(self, prefix: Prefix, steps: int) -> Field:
        """The velocity that the solver follows, and what it takes in place of the times, if anything."""
        return (lambda x, t: self.model.velocity(x, t, prefix)), None

    def _batch(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array)[None].to(self.device)


class _StageClock:
    def __init__(self, device: torch.device, cancel: threading.Event | None):
        self.device, self.cancel = device, cancel
        self.start = time.perf_counter()

    def lap(self) -> float:
        """Milliseconds since the last lap, after the device has caught up."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = time.perf_counter()
        elapsed, self.start = 1e3 * (now - self.start), now
        if self.cancel is not None and self.cancel.is_set():
            raise CancelledError("the inference was cancelled")
        return elapsed
