"""The reference engine: the model's own PyTorch code, stage by stage."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import ClassVar

import numpy as np
import torch

from sinew import machine
from sinew.core import RTC, CancelledError, Timing
from sinew.engine.example import Inputs
from sinew.engine.precision import precision_of
from sinew.engine.threads import settle
from sinew.engine.trace import Trace
from sinew.engine.traced import as_array, named_arrays, recorded_rows
from sinew.models.base import Model
from sinew.processing import ModelInputs
from sinew.solvers import Guidance, solve

_AT_FIRST = torch.get_num_threads()  # PyTorch has one number for the whole process


class EagerEngine:
    """Runs a model. Not reentrant: one inference at a time."""

    guides = RTC  # autograd goes through the head, and a head that can takes a time per row
    takes_batches = True  # run_batch
    _settled: ClassVar[int] = 0  # the number of threads that the last of them settled on

    def __init__(self, model: Model, device: torch.device):
        self.model = model.eval().requires_grad_(False)
        self.device = device
        self.recipe: dict[str, str] = {}  # nothing is quantised
        self._threads = 0

    def place(self, array: np.ndarray) -> torch.Tensor:
        """Return an array on the engine's device."""
        return torch.from_numpy(array).to(self.device)

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
    def precision(self) -> dict[str, str]:
        """Component -> precision of its parameters."""
        return precision_of(self.model)

    @property
    def weights_nbytes(self) -> int:
        """Bytes of the model's parameters in memory (mapped or converted)."""
        return sum(p.nbytes for p in self.model.parameters())

    def run(
        self,
        inputs: ModelInputs,
        noise: np.ndarray,
        steps: int,
        cancel: threading.Event | None = None,
        guidance: Guidance | None = None,
    ) -> tuple[np.ndarray, Timing]:
        """noise: float32 [H, A] -> model output float32 [H, A] in model units, with per-stage times.

        Looks at ``cancel`` after every stage and raises :class:`CancelledError` when it is set. With ``guidance``
        nothing runs in inference mode, because autograd cannot use what was made there.
        """
        x, timing = self._solve(Inputs.of(inputs, self.device), noise[None], steps, cancel, guidance)
        return x[0], timing

    def run_batch(
        self,
        inputs: ModelInputs,
        noise: np.ndarray,
        steps: int,
        cancel: threading.Event | None = None,
        guidance: Guidance | None = None,
    ) -> tuple[np.ndarray, Timing]:
        """Run several observations at once: inputs of :func:`sinew.processing.stack`, noise float32 [B, H, A].

        The times are those of all of them. As :meth:`run` otherwise.
        """
        return self._solve(Inputs.stacked(inputs, self.device), noise, steps, cancel, guidance)

    def _solve(
        self,
        batch: Inputs,
        noise: np.ndarray,
        steps: int,
        cancel: threading.Event | None,
        guidance: Guidance | None,
    ) -> tuple[np.ndarray, Timing]:
        """noise: float32 [B, H, A] -> float32 [B, H, A]."""
        with torch.inference_mode(guidance is None), torch.no_grad():
            clock, model = _StageClock(self.device, cancel), self.model
            image_tokens = model.embed_images(batch.pixels)  # [B, V, N, C]
            vision_ms = clock.lap()
            context = model.read(image_tokens, *batch[1:])
            prefix_ms = clock.lap()
            step_ms: list[float] = []
            x = solve(
                lambda x, moment: model.act(x, moment, context),
                torch.from_numpy(noise).to(self.device),
                model.solver.steps(steps),
                self.moments(steps, guidance),
                lambda: step_ms.append(clock.lap()),
                guidance,
            )
            timing = Timing(
                vision_ms=vision_ms, prefix_ms=prefix_ms, step_ms=tuple(step_ms), batch=len(noise)
            )
            return x.float().cpu().numpy(), timing

    def trace(self, inputs: ModelInputs, noise: np.ndarray, steps: int) -> Trace:
        """Run as :meth:`run` does and return what every stage computed."""
        with torch.inference_mode(), recorded_rows(self.model) as rows:
            batch, model = Inputs.of(inputs, self.device), self.model
            image_tokens = model.embed_images(batch.pixels)
            context = model.read(image_tokens, *batch[1:])
            found = Trace(as_array(image_tokens[0]), named_arrays(context), [], rows)

            def act(x: torch.Tensor, moment: torch.Tensor) -> torch.Tensor:
                output = model.act(x, moment, context)
                found.head.append(as_array(output[0]))
                return output

            x = torch.from_numpy(noise)[None].to(self.device)
            last = solve(act, x, model.solver.steps(steps), self.moments(steps))
            found.head.append(as_array(last[0]))
            return found

    def moments(self, steps: int, guidance: Guidance | None = None) -> Iterable[torch.Tensor]:
        """Return what each step takes from the time, or from the times of its rows."""
        return self.model.moments(steps, getattr(guidance, "committed", None))


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
