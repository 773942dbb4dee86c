"""The CUDA engine: a fused model that is recorded once per shape of an observation, and replayed for each observation.

On a CPU (`engine="cuda", device="cpu"`) the same program runs with the kernels' references and without graphs. This is
for tests on machines without a GPU. It is slower than the other engines, and Sinew never chooses it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
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
from sinew.engine.cuda.graphs import RECORDING, GraphRecorder, Kept
from sinew.engine.cuda.lowbit.choice import NOTHING, LowbitChoice
from sinew.engine.cuda.options import CudaOptions
from sinew.engine.cuda.program import ApartHead, ContextPart, HeadProgram, Key, PrefixProgram, Program, copied
from sinew.engine.cuda.streams import FIRST, EngineStream
from sinew.engine.cuda.units import RobotUnits
from sinew.engine.eager.engine import precision_of
from sinew.engine.engine import Audited, Context, Engine, Facts
from sinew.engine.plan.plan import Plan
from sinew.engine.traced import as_array, named_arrays, recorded_rows
from sinew.engine.watch import Watch
from sinew.models.base import AutoregressiveModel, Spoken
from sinew.models.solvers import Guidance, solve
from sinew.processing import ModelInputs
from sinew.processing.normalize import Normalizer


@dataclass(frozen=True, slots=True)
class CudaContext:
    """The context of a batch of observations, in the parts that one program computes."""

    parts: tuple[ContextPart, ...]


class CudaEngine(Engine):
    """Runs a planned model for one observation, or for a batch of observations.

    :meth:`run` replays one CUDA graph with all stages. :meth:`read` and :meth:`solve` run on two CUDA streams, so two
    threads may call them at the same time (:mod:`.streams`). An autoregressive head has only :meth:`run`: :meth:`read`
    passes the inputs on.

    Args:
        plan: A plan that was made with the rewrites of ``fuse.ON_CUDA``. It is not changed.
        device: The device.
        processing: The bundle's processing.
        actions: Converts the chunk from model units to the robot's units on the device. With None, the chunk stays in
            model units.
        options: The options.
        scales: For each FP8 layer's name, the scale of its input.
        lowbit: The components whose low-bit weights ``plan`` keeps, with reasons. By default, none.
        recorder: Records the programs of both streams. By default, CUDA graphs on a GPU, and calls on a CPU.
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
        self.prefix_stream = EngineStream(device, recorder=recorder)
        self.head_stream = EngineStream(device, FIRST, recorder)
        self.ops = _ops(device, options)
        self.plan = fuse(plan, self.ops, options.fp8, scales)
        self.model: Any = self.plan.model
        in_fp8 = dict.fromkeys(options.fp8, "fp8")
        self.programs: Kept[Key, Program] = Kept(options.max_graphs, self._program)
        self.prefixes: Kept[Key, PrefixProgram] = Kept(options.max_graphs, self._prefix)
        self.heads: Kept[Key, ApartHead] = Kept(options.max_graphs, self._head)
        shape, dtype = self.model.noise_shape, torch.float32
        if self.units is not None:
            shape, dtype = (shape[0], self.units.dim), self.units.dtype
        # For any number of observations that one program computes: the actions of the prefix stream, which also runs
        # whole programs, and of the head stream.
        self._chunks, self._apart_chunks = (
            torch.empty(options.largest_batch, *shape, dtype=dtype, pin_memory=on_gpu) for _ in range(2)
        )
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
            head_reads_state=self.model.head_reads_state,
            chooses_tokens=self.model.chooses_tokens,
            notes=(describe(device), *lowbit.notes.values()),
        )

    @property
    def threads(self) -> int:
        return torch.get_num_threads()

    @torch.inference_mode()
    def run(
        self,
        inputs: ModelInputs,
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
        _check(guidance)
        watch, parts, stream = watch or Watch(), self.options.parts(len(inputs.tokens)), self.prefix_stream
        with stream.current(), self._rows(watch, stream.recorder.calls):
            if len(parts) == 1:
                return self._run(inputs, noise, steps, guidance, watch)
            return np.concatenate(
                [
                    self._run(inputs.part(rows), noise[rows], steps, _part(guidance, rows), watch)
                    for rows in parts
                ]
            )

    @torch.inference_mode()
    def read(self, inputs: ModelInputs, watch: Watch | None = None) -> CudaContext | ModelInputs:
        """Compute the context on the prefix stream, and wait for it.

        The watch gets the time of vision and language model as one "prefix", unless it requires separate stages.
        """
        if isinstance(self.model, AutoregressiveModel):
            return inputs
        watch, parts, stream = watch or Watch(), self.options.parts(len(inputs.tokens)), self.prefix_stream
        watch.begin()
        with stream.current(), self._rows(watch, stream.recorder.calls):
            context = CudaContext(
                tuple(self._read(inputs if len(parts) == 1 else inputs.part(rows), watch) for rows in parts)
            )
        # Another thread may submit work now, so wait for the event and not for the stream.
        if (ready := context.parts[-1].ready) is not None:
            ready.synchronize()
        if not watch.apart:
            watch.lap("prefix")
        return context

    @torch.inference_mode()
    def solve(
        self,
        context: CudaContext | ModelInputs,
        noise: np.ndarray,
        steps: int,
        guidance: Guidance | None = None,
        watch: Watch | None = None,
    ) -> np.ndarray:
        """Compute actions from a context on the head stream, and wait for them.

        The watch gets the time of all solver steps as one "step", as in :meth:`run`.

        Returns:
            As in :meth:`run`.
        """
        if isinstance(context, ModelInputs):
            return self.run(context, noise, steps, guidance, watch)
        _check(guidance)
        watch, stream, chunks, first = watch or Watch(), self.head_stream, [], 0
        with stream.current(), self._rows(watch, stream.recorder.calls):
            for part in context.parts:
                rows = slice(first, first := first + part.key.batch)
                guide = guidance if len(context.parts) == 1 else _part(guidance, rows)
                chunks.append(self._solve(part, noise[rows], steps, guide, watch))
        return chunks[0] if len(chunks) == 1 else np.concatenate(chunks)

    @torch.inference_mode()
    def renew(self, context: CudaContext | ModelInputs, state: np.ndarray) -> CudaContext | ModelInputs:
        if isinstance(context, ModelInputs) or not self.facts.head_reads_state:
            return context
        parts, first, stream = [], 0, self.head_stream
        with stream.current():
            for part in context.parts:
                rows = slice(first, first := first + part.key.batch)
                stream.follow(part.ready)
                parts.append(replace(part, tensors=self.model.renew(part.tensors, self.place(state[rows]))))
            stream.wait()
        return CudaContext(tuple(parts))

    def _run(
        self, inputs: ModelInputs, noise: np.ndarray, steps: int, guidance: Guidance | None, watch: Watch
    ) -> np.ndarray:
        """Compute the actions of as many observations as one program may have."""
        program = self.programs[self._key(inputs, steps)]
        watch.check()
        if program.speaks:
            return self._speak(program, inputs, noise, watch)
        if guidance is None and not watch.apart:
            return self._whole(program, inputs, noise, watch)
        program.write(inputs, noise)
        self._stages(program, watch, watch.apart)
        return self._steps(program, None, guidance, watch, self.prefix_stream, self._chunks)

    def _read(self, inputs: ModelInputs, watch: Watch) -> ContextPart:
        """Submit the prefix of as many observations as one program may have."""
        key, stream = self._key(inputs, 0), self.prefix_stream
        if key not in self.prefixes:
            stream.wait()  # the prefix that is removed for a new one may still be computed
        prefix = self.prefixes[key]
        if prefix.uploaded is not None:
            prefix.uploaded.synchronize()
        try:
            prefix.write(inputs)
        finally:
            prefix.uploaded = stream.event()
        self._stages(prefix, watch, watch.apart)
        return ContextPart(key, copied(prefix.recorded("read").result), stream.event())

    def _solve(
        self,
        part: ContextPart,
        noise: np.ndarray,
        steps: int,
        guidance: Guidance | None,
        watch: Watch,
    ) -> np.ndarray:
        stream = self.head_stream
        # The sizes of the frames have no effect on the sizes of the context.
        head = self.heads[replace(part.key, sizes=(), steps=steps)]
        watch.begin()
        stream.follow(part.ready)
        head.load(part.tensors)
        head.write(noise)
        if guidance is not None or watch.apart:
            return self._steps(head, part.tensors, guidance, watch, stream, self._apart_chunks)
        head.recorded("solution").replay()
        return self._fetched(head, watch, stream, self._apart_chunks)

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
        with torch.inference_mode(), self.prefix_stream.current():
            self.programs[key].record()
            self.prefix_stream.wait()

    def _whole(self, program: Program, inputs: ModelInputs, noise: np.ndarray, watch: Watch) -> np.ndarray:
        recorded = program.recorded("chunk")
        watch.begin()
        program.write(inputs, noise)
        recorded.replay()
        return self._fetched(program, watch, self.prefix_stream, self._chunks)

    def _fetched(self, head: HeadProgram, watch: Watch, stream: EngineStream, chunks: Tensor) -> np.ndarray:
        """Copy the actions of a graph that was replayed to the CPU.

        The result is a copy, because ``watch`` may begin another run.
        """
        head.fetch(chunks)
        stream.wait()  # one wait is enough: copies and graph run on one stream
        actions: np.ndarray = chunks[: head.key.batch].numpy().copy()
        watch.lap("step")
        return actions

    def _speak(self, program: Program, inputs: ModelInputs, noise: np.ndarray, watch: Watch) -> np.ndarray:
        """Generate chunks, [B, H, A], token by token.

        The CPU reads each token, because it must detect the end token.
        """
        program.record()
        program.write(inputs, noise)
        self._stages(program, watch, True)
        context, first = program.recorded("read").result

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

    def _stages(self, prefix: PrefixProgram, watch: Watch, apart: bool) -> None:
        """Replay the graphs of vision and language model on the prefix stream.

        Args:
            prefix: The prefix. Its inputs are written.
            watch: Gets the times and results of the stages.
            apart: True waits for each stage, so that its time is known.
        """
        stream, trace = self.prefix_stream, watch.trace
        with self._rows(watch, not stream.recorder.calls) as notes:
            if notes is not None:
                prefix.read_plainly()
        for name, lap in (("vision", "vision"), ("read", "prefix")):
            recorded = prefix.recorded(name)
            if apart:
                stream.wait()
                watch.begin()
            recorded.replay()
            if not apart:
                continue
            stream.wait()
            if trace is not None and name == "vision":
                trace.vision = as_array(recorded.result[0])
            elif trace is not None:
                trace.prefix = named_arrays(recorded.result[0] if prefix.speaks else recorded.result)
            watch.lap(lap)

    def _steps(
        self,
        head: HeadProgram,
        context: Context | None,
        guidance: Guidance | None,
        watch: Watch,
        stream: EngineStream,
        chunks: Tensor,
    ) -> np.ndarray:
        """Replay the graph of each solver step separately, because a guidance changes each step's output, or because
        the watch needs each step.

        Args:
            head: The head. Its noise is written.
            context: The context that the head has to load. None if the head reads it where the prefix has written it.
            guidance: Changes the outputs.
            watch: Gets the times and results of the steps.
            stream: The stream.
            chunks: Memory of the CPU for the actions.
        """
        trace, step = watch.trace, head.recorded("step")

        def act(x: Tensor, time_embedding: Tensor) -> Tensor:
            if isinstance(head, ApartHead):
                head.load(context)  # another solution may have begun between two steps
            head.x.copy_(x)
            head.time_embedding.copy_(time_embedding)
            if watch.apart:
                stream.wait()
                watch.begin()
            step.replay()
            if trace is not None:
                trace.head.append(as_array(step.result[0]))
            return step.result.clone()  # type: ignore[no-any-return]

        def after_step() -> None:
            if watch.apart:
                stream.wait()
            watch.lap("step")

        start = head.noise if context is None else head.noise.clone()
        x = solve(act, start, head.steps, head.time_embeddings, after_step, guidance)
        if trace is not None:
            trace.head.append(as_array(x[0]))
        head.x.copy_(x)
        head.finish()
        head.fetch(chunks)
        stream.wait()
        actions: np.ndarray = chunks[: head.key.batch].numpy().copy()
        return actions

    def place(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.device)

    def _program(self, key: Key) -> Program:
        with self._making(self.prefix_stream) as recorder:
            return Program(key, self.plan, self.ops, self.processing, recorder, self.device, self.units)

    def _prefix(self, key: Key) -> PrefixProgram:
        with self._making(self.prefix_stream) as recorder:
            return PrefixProgram(key, self.plan, self.ops, self.processing, recorder, self.device)

    def _head(self, key: Key) -> ApartHead:
        with self._making(self.head_stream) as recorder:
            return ApartHead(key, self.plan, recorder, self.device, self.units)

    @contextmanager
    def _making(self, stream: EngineStream) -> Iterator[GraphRecorder]:
        """Inside the ``with`` block, this thread makes buffers for the recorder of ``stream``.

        The solver's tables are in the plan, for both streams, so they are complete when the block ends.
        """
        with RECORDING:
            yield stream.recorder
            stream.wait()

    def _rows(self, watch: Watch, noted: bool) -> AbstractContextManager[dict[str, np.ndarray] | None]:
        """Record in a trace which rows of embedding tables the model reads inside the ``with`` block, if ``noted``
        is True."""
        if watch.trace is None or not noted:
            return nullcontext()
        return recorded_rows(self.model, watch.trace.rows)


def _check(guidance: Guidance | None) -> None:
    """Check that this engine supports a guidance.

    Raises:
        SinewError: The guidance needs the Jacobian of the head.
    """
    if guidance is not None and getattr(guidance, "jacobian", True):
        expected = f"engine {either(engines_that(guides=('guided',)))}, which has a Jacobian"
        raise SinewError(f"guidance: expected {expected}, got engine cuda")


def _part(guidance: Any, rows: slice) -> Guidance | None:
    """Return the guidance of a part of a batch."""
    return None if guidance is None else guidance.part(rows)


def _ops(device: torch.device, options: CudaOptions) -> Ops:
    if not options.kernels:
        return PlainOps()
    on_gpu = device.type == "cuda"
    return Kernels(device) if on_gpu else References()
