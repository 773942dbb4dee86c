"""The CUDA engine: a fused model that is recorded once per shape of an observation, and replayed for each observation.

On a CPU (`engine="cuda", device="cpu"`) the same program runs with the kernels' references and without graphs. This is
for tests on machines without a GPU. It is slower than the other engines, and Sinew never chooses it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sinew.bundle.schema import Processing
from sinew.core import SinewError
from sinew.engine.backend import either, engines_that
from sinew.engine.cuda.backend import BACKEND
from sinew.engine.cuda.device import describe, require
from sinew.engine.cuda.frames import fits
from sinew.engine.cuda.fused.fuse import fuse
from sinew.engine.cuda.fused.launches import Kernels
from sinew.engine.cuda.fused.ops import Ops, PlainOps, References
from sinew.engine.cuda.graphs import Calls, GraphRecorder, Graphs, Kept
from sinew.engine.cuda.lowbit.choice import NOTHING, LowbitChoice
from sinew.engine.cuda.options import CudaOptions
from sinew.engine.cuda.program import Key, Program
from sinew.engine.cuda.units import RobotUnits
from sinew.engine.eager.engine import precision_of
from sinew.engine.engine import Audited, Engine, Facts
from sinew.engine.plan.plan import Plan
from sinew.engine.traced import as_array, named_arrays, recorded_rows
from sinew.engine.watch import Watch
from sinew.models.base import AutoregressiveModel, Spoken
from sinew.models.solvers import Guidance, solve
from sinew.processing import ModelInputs
from sinew.processing.normalize import Normalizer


class CudaEngine(Engine):
    """Runs a planned model for one observation, or for a batch of observations.

    One CUDA graph contains all stages. Therefore :meth:`solve` computes the whole chunk, and :meth:`read` only passes
    the inputs on.

    Args:
        plan: A plan that was made with the rewrites of ``fuse.ON_CUDA``. It is not changed.
        device: The device.
        processing: The bundle's processing.
        actions: Converts the chunk from model units to the robot's units on the device. With None, the chunk stays in
            model units.
        options: The options.
        scales: For each FP8 layer's name, the scale of its input.
        lowbit: The components whose low-bit weights ``plan`` keeps, with reasons. By default, none.
        recorder: Records the programs. By default, CUDA graphs on a GPU, and calls on a CPU.
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
        lowbit: LowbitChoice = NOTHING,
        recorder: GraphRecorder | None = None,
    ):
        options = options or CudaOptions()
        require(device, options)
        self.options = options
        self.device, self.processing = device, processing
        self.units = (
            None
            if actions is None or isinstance(plan.model, AutoregressiveModel)
            else RobotUnits(actions, device)
        )
        on_gpu = device.type == "cuda"
        self.stream = torch.cuda.Stream(device) if on_gpu else None
        self.ops = _ops(device, options)
        self.plan = fuse(plan, self.ops, options.fp8, scales)
        self.model: Any = self.plan.model
        in_fp8 = dict.fromkeys(options.fp8, "fp8")
        if recorder is None:
            recorder = Calls() if self.stream is None else Graphs(self.stream)
        self.recorder = recorder
        self.programs: Kept[Key, Program] = Kept(options.max_graphs, self._program)
        shape, dtype = self.model.noise_shape, torch.float32
        if self.units is not None:
            shape, dtype = (shape[0], self.units.dim), self.units.dtype
        # For any number of observations that one program computes.
        self._chunks = torch.empty(options.largest_batch, *shape, dtype=dtype, pin_memory=on_gpu)
        if on_gpu:
            torch.cuda.current_stream(device).synchronize()  # wait for the copies of the weights
        tensors = [*self.model.parameters(), *self.model.buffers()]
        self.facts = Facts(
            device=str(device),
            # The precision of FP8 layers is read from the recipe, because their stored weights are floats.
            precision=precision_of(self.model) | in_fp8,
            recipe=lowbit.kept | in_fp8,
            weights_nbytes=sum(tensor.nbytes for tensor in tensors),
            guides=BACKEND.guides,
            takes_frames=fits(processing.image, self.model),
            world_units=self.units is not None,
            one_graph=not isinstance(self.model, AutoregressiveModel),
            chooses_tokens=self.model.chooses_tokens,
            notes=(describe(device), *lowbit.notes.values()),
        )

    @property
    def threads(self) -> int:
        return torch.get_num_threads()

    def read(self, inputs: ModelInputs, watch: Watch | None = None) -> ModelInputs:
        """Return the inputs unchanged, because :meth:`solve` computes all stages."""
        return inputs

    @torch.inference_mode()
    def solve(
        self,
        context: ModelInputs,
        noise: np.ndarray,
        steps: int,
        guidance: Guidance | None = None,
        watch: Watch | None = None,
    ) -> np.ndarray:
        """Compute actions by the replay of a recorded graph.

        A graph has 1, 2, 4 ... observations, up to ``options.largest_batch``. Other batches run in parts, one graph
        after the other.

        A whole graph cannot be stopped, and its stages have no separate times. The watch is checked before and after
        the graph, and gets the time of all stages as one "step". If the watch requires separate stages, the stages run
        one by one. The first call with a new key records a graph, which takes much longer.

        Returns:
            float32 [B, H, A] in model units. With ``actions``, [B, H, action_dim] un-normalised, in the precision of
                the recipe's convention.
        """
        if guidance is not None and getattr(guidance, "jacobian", True):
            expected = f"engine {either(engines_that(guides=('guided',)))}, which has a Jacobian"
            raise SinewError(f"guidance: expected {expected}, got engine cuda")
        watch, parts = watch or Watch(), self.options.parts(len(context.tokens))
        with self._on_stream(), self._rows(watch, self.recorder.calls):
            if len(parts) == 1:
                return self._solve(context, noise, steps, guidance, watch)
            whole: Any = guidance
            guides = [None if whole is None else whole.part(rows) for rows in parts]
            chunks = [
                self._solve(context.part(rows), noise[rows], steps, guide, watch)
                for rows, guide in zip(parts, guides, strict=True)
            ]
            return np.concatenate(chunks)

    def _solve(
        self, inputs: ModelInputs, noise: np.ndarray, steps: int, guidance: Guidance | None, watch: Watch
    ) -> np.ndarray:
        """Compute the actions of as many observations as one program may have."""
        program = self.programs[self._key(inputs, steps)]
        watch.check()
        if program.speaks:
            return self._speak(program, inputs, noise, watch)
        if guidance is not None:
            self._guided(program, inputs, noise, guidance, watch)
        elif watch.apart:
            self._by_stages(program, inputs, noise, watch)
        else:
            self._whole(program, inputs, noise, watch)
        return self._chunks[: program.key.batch].numpy().copy()

    def _key(self, inputs: ModelInputs, steps: int) -> Key:
        return Key.of(inputs, self.options.bucket(inputs.tokens.shape[1]), steps)

    def warm(self, inputs: ModelInputs, steps: int, longest: int) -> None:
        """Record the graphs for frames of these sizes and prompts of up to ``longest`` tokens, the shortest first.

        For each number of observations that a program may have, up to the number in ``inputs``, at most ``max_graphs``
        graphs are recorded. They all stay.
        """
        batches = self.options.batches(len(inputs.tokens))
        self.programs.limit = max(self.programs.limit, self.options.max_graphs * len(batches))
        whole = inputs.part(slice(0, 1))
        views = whole.camera_mask.shape[1]
        each = max(1, views) if self.model.moments is None else self.model.moments[1]
        keys = [
            replace(key, views=count, sizes=key.sizes[:count])
            for bucket in self.options.buckets(longest)
            for key in [Key.of(whole, bucket, steps)]
            # At the start of an episode, the history has fewer observations, so there are fewer views.
            for count in range(views, min(views, each) - 1, -each)
        ]
        for batch in batches:
            for key in keys[: self.options.max_graphs]:
                self.prepare(replace(key, batch=batch))

    def audit(self, inputs: ModelInputs, steps: int) -> list[Audited]:
        from sinew.engine.cuda.audit import audited

        with torch.inference_mode(False):
            return audited(self.programs[self._key(inputs, steps)])

    def prepare(self, key: Key) -> None:
        """Record the graphs for a key before an observation needs them."""
        with torch.inference_mode(), self._on_stream():
            self.programs[key].record()
            self._wait()

    def _whole(self, program: Program, inputs: ModelInputs, noise: np.ndarray, watch: Watch) -> None:
        recorded = program.recorded("chunk")
        watch.begin()
        program.write(inputs, noise)
        recorded.replay()
        program.fetch(self._chunks)
        self._wait()  # one wait is enough: copies and graph run on one stream
        watch.lap("step")

    def _speak(self, program: Program, inputs: ModelInputs, noise: np.ndarray, watch: Watch) -> np.ndarray:
        """Generate chunks, [B, H, A], token by token.

        The CPU reads each token, because it must detect the end token.
        """
        program.record()
        program.write(inputs, noise)
        self._wait()
        watch.begin()
        for name, lap in (("vision", "vision"), ("read", "prefix")):
            program.recorded(name).replay()
            self._wait()
            watch.lap(lap)
        context, first = program.recorded("read").result
        if watch.trace is not None:
            watch.trace.vision = as_array(program.recorded("vision").result[0])
            watch.trace.prefix = named_arrays(context)

        def more(spoken: Spoken) -> Spoken:
            program.recorded("next").replay()
            return spoken  # each replay writes its results to the same memory

        def after_token(token: np.ndarray) -> None:
            if watch.trace is not None:
                watch.trace.head.append(token)
            watch.lap("step")

        words = self.model.action_tokens
        chunks: np.ndarray = words.chunks(
            words.speak(first, more, lambda spoken: as_array(spoken.token), after_token)
        )
        if watch.trace is not None:
            watch.trace.head.append(chunks[0])
        return chunks

    def _by_stages(self, program: Program, inputs: ModelInputs, noise: np.ndarray, watch: Watch) -> None:
        program.write(inputs, noise)
        trace = watch.trace
        with self._rows(watch, not self.recorder.calls) as notes:
            if notes is not None:
                program.read_plainly()
        for index, name in enumerate(("vision", "read", *["step"] * program.key.steps)):
            recorded, step = program.recorded(name), index - 2
            if step == 0:
                program.begin()
            if step >= 0:
                program.time_embedding.copy_(program.time_embeddings[step])
            self._wait()
            watch.begin()
            recorded.replay()
            if step >= 0:
                program.advance(step)
            self._wait()
            if trace is not None and step >= 0:
                trace.head.append(as_array(recorded.result[0]))
            elif trace is not None and name == "read":
                trace.prefix = named_arrays(recorded.result)
            elif trace is not None:
                trace.vision = as_array(recorded.result[0])
            watch.lap({"read": "prefix"}.get(name, name))
        if trace is not None:
            trace.head.append(as_array(program.x[0]))
        program.finish()
        program.fetch(self._chunks)
        self._wait()

    def _guided(
        self, program: Program, inputs: ModelInputs, noise: np.ndarray, guidance: Guidance, watch: Watch
    ) -> None:
        """Replay the graphs of vision, prefix and each solver step separately.

        The guidance changes each step's output.
        """
        program.write(inputs, noise)
        watch.begin()
        for name, lap in (("vision", "vision"), ("read", "prefix")):
            program.recorded(name).replay()
            watch.lap(lap)
        # Record before x is set, because recording runs the step and changes x.
        step = program.recorded("step")

        def act(x: Tensor, time_embedding: Tensor) -> Tensor:
            program.x.copy_(x)
            program.time_embedding.copy_(time_embedding)
            step.replay()
            return step.result.clone()  # type: ignore[no-any-return]

        start = program.staging.device["noise"]
        program.x.copy_(
            solve(act, start, program.steps, program.time_embeddings, lambda: watch.lap("step"), guidance)
        )
        program.finish()
        program.fetch(self._chunks)
        self._wait()

    def place(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.device)

    def _program(self, key: Key) -> Program:
        return Program(key, self.plan, self.ops, self.processing, self.recorder, self.device, self.units)

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        """Use the engine's CUDA stream, and make cuBLAS add partial sums in float32.

        A recording contains both settings.
        """
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

    def _rows(self, watch: Watch, noted: bool) -> AbstractContextManager[dict[str, np.ndarray] | None]:
        """Record in a trace which rows of embedding tables the model reads inside the ``with`` block, if ``noted``
        is True."""
        if watch.trace is None or not noted:
            return nullcontext()
        return recorded_rows(self.model, watch.trace.rows)

    def _wait(self) -> None:
        if self.stream is not None:
            self.stream.synchronize()


def _ops(device: torch.device, options: CudaOptions) -> Ops:
    if not options.kernels:
        return PlainOps()
    on_gpu = device.type == "cuda"
    return Kernels(device) if on_gpu else References()
