"""The CUDA engine: a fused model, recorded once per shape of an observation, replayed for each one.

On a CPU (`engine="cuda", device="cpu"`) the same program runs with the kernels' twins and without graphs. That is how
it is tested where there is no GPU; it is slower than the other engines and never chosen by itself.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from sinew.bundle.schema import Processing
from sinew.core import CancelledError, Timing
from sinew.engine.cuda.device import require
from sinew.engine.cuda.frames import fits
from sinew.engine.cuda.fused.fuse import fuse
from sinew.engine.cuda.fused.launches import Kernels
from sinew.engine.cuda.fused.ops import Ops, Plain, Twins
from sinew.engine.cuda.graphs import Calls, Graphs, Kept, Recorder
from sinew.engine.cuda.options import CudaOptions
from sinew.engine.cuda.program import Key, Program
from sinew.engine.cuda.tune.variants import resolve
from sinew.engine.cuda.units import WorldUnits
from sinew.engine.plan import Plan
from sinew.engine.precision import precision_of
from sinew.engine.trace import Trace
from sinew.engine.traced import as_array, named_arrays, recorded_rows
from sinew.processing import ModelInputs
from sinew.processing.normalize import Normalizer


class CudaEngine:
    """Runs a planned model. Not reentrant: one inference at a time.

    ``plan``: made with the rewrites of ``fuse.ON_CUDA``; it is left as it is. ``scales``: of the inputs of FP8
    layers, by module name. ``actions``: un-normalises the chunk on the device; without it, it stays in model units.
    ``recorder``: instead of the one that device and options ask for. ``stages`` may be
    changed between two runs.
    """

    def __init__(
        self,
        plan: Plan,
        device: torch.device,
        *,
        processing: Processing,
        actions: Normalizer | None = None,
        options: CudaOptions | None = None,
        scales: Mapping[str, float] | None = None,
        recorder: Recorder | None = None,
    ):
        options = options or CudaOptions()
        require(device, options)
        options, self.options_reason = resolve(options, device, plan.model)
        self.options = options
        self.device, self.processing, self.stages = device, processing, options.stages
        self.units = None if actions is None else WorldUnits(actions, device)
        on_gpu = device.type == "cuda"
        self.stream = torch.cuda.Stream(device) if on_gpu else None
        self.ops = _ops(device, options)
        scaled = options.scaled_norms and options.kernels
        self.plan = fuse(plan, self.ops, scaled, options.fp8, scales)
        self.model: Any = self.plan.model
        self.recipe = dict.fromkeys(options.fp8, "fp8")
        self.takes_frames = fits(processing.image, self.model)
        if recorder is None:
            recorder = Graphs(self.stream) if self.stream is not None and options.graph else Calls()
        self.recorder = recorder
        self.programs: Kept[Key, Program] = Kept(options.max_graphs, self._program)
        shape, dtype = self.model.noise_shape, torch.float32
        if self.units is not None:
            shape, dtype = (shape[0], self.units.dim), self.units.dtype
        self._chunk = torch.empty(shape, dtype=dtype, pin_memory=on_gpu)
        if on_gpu:
            torch.cuda.synchronize(device)  # weights came on another stream

    @property
    def unnormalizes(self) -> bool:
        """True if :meth:`run` returns world units."""
        return self.units is not None

    @property
    def threads(self) -> int:
        return torch.get_num_threads()

    @property
    def precision(self) -> dict[str, str]:
        """Component -> precision: of its parameters, or fp8 where the linear layers multiply in that."""
        return precision_of(self.model) | self.recipe

    @property
    def weights_nbytes(self) -> int:
        """Bytes of the model's parameters, and of those that are held in FP8."""
        held = [*self.model.parameters(), *self.model.buffers()]
        return sum(tensor.nbytes for tensor in held)

    @torch.inference_mode()
    def run(
        self, inputs: ModelInputs, noise: np.ndarray, steps: int, cancel: threading.Event | None = None
    ) -> tuple[np.ndarray, Timing]:
        """noise: float32 [H, A] -> model output float32 [H, A] in model units, or, with ``actions``, [H, action_dim]
        un-normalised, in the precision of the recipe's convention; with times.

        A whole graph cannot be stopped, and its parts have no times of their own: ``cancel`` is looked at before
        and after it, and ``Timing.step_ms`` has one entry, which is all of it. With ``stages``, both are as the eager
        engine's. The first call with a new key records, which takes much longer.
        """
        with self._on_stream():
            key = Key.of(inputs, self.options.bucket(len(inputs.tokens)), steps)
            program = self.programs[key]
            _stop_if(cancel)
            if self.stages:
                timing = self._by_stages(program, inputs, noise, cancel)
            else:
                timing = self._whole(program, inputs, noise, cancel)
            return self._chunk.numpy().copy(), timing

    @torch.inference_mode()
    def trace(self, inputs: ModelInputs, noise: np.ndarray, steps: int) -> Trace:
        """Run by stages and return what every stage computed; the whole graph's chunk is compared by itself."""
        with self._on_stream(), recorded_rows(self.model) as rows:
            program = self.programs[Key.of(inputs, self.options.bucket(len(inputs.tokens)), steps)]
            found = Trace(np.empty(0), rows=rows)
            self._by_stages(program, inputs, noise, None, found)
            found.head.append(as_array(program.x[0]))
            return found

    def prepare(self, key: Key) -> None:
        """Record what a key needs before an observation asks for it."""
        with torch.inference_mode(), self._on_stream():
            self.programs[key].recorded("chunk")
            self._wait()

    def prepare_like(self, inputs: ModelInputs, steps: int, longest: int) -> None:
        """Record what prompts of up to ``longest`` tokens will need with frames of these sizes, so that no request
        has to wait for it. The shortest prompts first, as many as are kept."""
        for bucket in self.options.buckets(longest)[: self.options.max_graphs]:
            self.prepare(Key.of(inputs, bucket, steps))

    def _whole(
        self, program: Program, inputs: ModelInputs, noise: np.ndarray, cancel: threading.Event | None
    ) -> Timing:
        recorded = program.recorded("chunk")
        start = time.perf_counter()
        program.write(inputs, noise)
        recorded.replay()
        self._chunk.copy_(program.actions, non_blocking=True)
        self._wait()  # once: copies and graph are on one stream
        elapsed = 1e3 * (time.perf_counter() - start)
        _stop_if(cancel)
        return Timing(step_ms=(elapsed,))

    def _by_stages(
        self,
        program: Program,
        inputs: ModelInputs,
        noise: np.ndarray,
        cancel: threading.Event | None,
        trace: Trace | None = None,
    ) -> Timing:
        spans: list[float] = []
        program.write(inputs, noise)
        for name in ("vision", "read", *["step"] * program.key.steps):
            recorded, step = program.recorded(name), len(spans) - 2
            if step == 0:
                program.begin()
            if step >= 0:
                program.moment.copy_(program.moments[step])
            self._wait()
            start = time.perf_counter()
            recorded.replay()
            if step >= 0:
                program.advance(step)
            self._wait()
            spans.append(1e3 * (time.perf_counter() - start))
            if trace is not None and step >= 0:
                trace.head.append(as_array(recorded.result[0]))
            elif trace is not None and name == "read":
                trace.prefix = named_arrays(recorded.result)
            elif trace is not None:
                trace.vision = as_array(recorded.result[0])
            _stop_if(cancel)
        program.finish()
        self._chunk.copy_(program.actions, non_blocking=True)
        self._wait()
        return Timing(vision_ms=spans[0], prefix_ms=spans[1], step_ms=tuple(spans[2:]))

    def _program(self, key: Key) -> Program:
        return Program(key, self.plan, self.ops, self.processing, self.recorder, self.device, self.units)

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        """On the engine's stream; what cuBLAS adds up in parts it adds in float32. Both are part of what is
        recorded."""
        if self.stream is None:
            yield
            return
        flags = torch.backends.cuda.matmul
        before = flags.allow_bf16_reduced_precision_reduction
        flags.allow_bf16_reduced_precision_reduction = False
        try:
            with torch.cuda.stream(self.stream):
                yield
        finally:
            flags.allow_bf16_reduced_precision_reduction = before

    def _wait(self) -> None:
        if self.stream is not None:
            self.stream.synchronize()


def _ops(device: torch.device, options: CudaOptions) -> Ops:
    if not options.kernels:
        return Plain()
    on_gpu = device.type == "cuda"
    return Kernels(device, bool(options.pdl), bool(options.prefetch)) if on_gpu else Twins()


def _stop_if(cancel: threading.Event | None) -> None:
    if cancel is not None and cancel.is_set():
        raise CancelledError("the inference was cancelled")
