"""The program that the CUDA engine records for one observation, or for a batch of observations.

Its inputs and its chunk have fixed memory addresses. A :class:`Program` computes all stages on one CUDA stream. If two
streams share the work (:mod:`.streams`), a :class:`PrefixProgram` computes vision and language model on the first
stream, and an :class:`ApartHead` computes the action head on the second stream. The three own their memory: none writes
a tensor that another one reads.

While the program runs, the CPU reads no value, and no constant is copied from the CPU's memory. The program depends
only on the key (the sizes of an observation). Tables of the solver's times and of the resize are made when the program
is made.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from sinew.bundle.schema import Processing
from sinew.engine.cuda.frames import Patches, Size
from sinew.engine.cuda.fused.ops import Ops
from sinew.engine.cuda.graphs import GraphRecorder, RecordedGraph, StageRange
from sinew.engine.cuda.staging import Field, Staging, as_done, threads_for
from sinew.engine.cuda.units import RobotUnits
from sinew.engine.example import Inputs
from sinew.engine.plan.plan import Plan
from sinew.models.base import AutoregressiveModel, Context
from sinew.models.solvers import solve
from sinew.processing import ModelInputs

# key: a recording; value: its name in profiles, if the name differs
SHOWN = {"read": "prefix", "next": "step", "solution": "head"}
WHOLE = ("chunk", "solution")  # recordings whose results are in memory of their own program


@dataclass(frozen=True, slots=True)
class ContextPart:
    """The context of as many observations as one program has.

    Attributes:
        key: The key of the prefix.
        tensors: The model's context, in memory that nobody writes again.
        ready: Occurs when ``tensors`` are complete. None on a CPU.
    """

    key: Key
    tensors: Context
    ready: torch.cuda.Event | None


@dataclass(frozen=True, slots=True)
class Key:
    """The key of a recorded program: all sizes on which the program depends.

    Attributes:
        views: Number of views.
        sizes: Height and width of each view's raw frame. Empty if the input is pixels.
        tokens: Length of the prompt with padding, in tokens.
        steps: Number of solver steps. 0 for a prefix, which has no solver.
        batch: Number of observations. The other sizes are those of one observation.
    """

    views: int
    sizes: tuple[Size, ...]
    tokens: int
    steps: int
    batch: int = 1

    @classmethod
    def of(cls, inputs: ModelInputs, tokens: int, steps: int) -> Key:
        batch = len(inputs.tokens)
        sizes = tuple(frame.shape[:2] for frame in inputs.frames[: len(inputs.frames) // batch])
        return cls(len(sizes) or inputs.pixels.shape[1], sizes, tokens, steps, batch)


class Recordings:
    """The recordings of methods of one object. They are made at first use.

    Args:
        recorder: Records the methods.
    """

    def __init__(self, recorder: GraphRecorder):
        self.recorder = recorder
        self._recorded: dict[str, RecordedGraph] = {}

    def recorded(self, name: str) -> RecordedGraph:
        """Return the recording of a method.

        Args:
            name: "chunk" is the whole program, and "solution" is the whole solver on a context. "vision", "read" and
                "step" ("next" for an autoregressive head) are stages, and each stage reads the result of the previous
                stage.
        """
        if name not in self._recorded:
            recording = self.recorder.record(getattr(self, name), apart=name not in WHOLE)
            recording.replay = StageRange.around(SHOWN.get(name, name), recording.replay)
            self._recorded[name] = recording
        return self._recorded[name]


class PrefixProgram(Recordings):
    """The input buffers of one key, and the recordings of vision and language model.

    Args:
        key: The key.
        plan: The fused plan.
        ops: The operations.
        processing: The bundle's processing.
        recorder: Records the programs.
        device: The device.
        noises: Shape of an observation's noise if a solver reads it from the input buffers, or None.
    """

    def __init__(
        self,
        key: Key,
        plan: Plan,
        ops: Ops,
        processing: Processing,
        recorder: GraphRecorder,
        device: torch.device,
        noises: tuple[int, ...] | None = None,
    ):
        Recordings.__init__(self, recorder)  # a Program has two such parts
        self.key, self.ops = key, ops
        self.model = model = cast(Any, plan.model)
        self.speaks = isinstance(model, AutoregressiveModel)
        self.prompt = processing.prompt
        image, batch = processing.image, key.batch
        fields: dict[str, Field] = {
            "camera_mask": ((batch, key.views), torch.bool),
            "tokens": ((batch, key.tokens), torch.int64),
            "token_mask": ((batch, key.tokens), torch.bool),
            "state": ((batch, self.model.state_size), torch.float32),
        }
        if noises is not None:
            fields["noise"] = ((batch, *noises), torch.float32)
        self.patches: Patches | None = None
        if key.sizes:
            weight: Tensor = model.vision.patch_weight
            patch = model.vision.config.patch_size
            # The views of all observations are one list. Views of one size are then one launch.
            sizes = key.sizes * batch
            self.patches = Patches(sizes, image, patch, weight.shape[1], weight.dtype, device)
            fields |= {f"frames.{i}": (run.shape, torch.uint8) for i, run in enumerate(self.patches.runs)}
        else:
            shape = batch, key.views, self.model.channels, image.height, image.width
            fields["pixels"] = (shape, torch.float32)
        self.staging = Staging(fields, device)
        # Occurs when the input memory of the CPU may be written again. None if each observation waits for its end.
        self.uploaded: torch.cuda.Event | None = None
        # For each view of each observation: the name of its field in the staging memory, and its row in that field.
        self.places = [] if self.patches is None else self.patches.places
        first = self.staging.part("frames.0" if self.patches else "pixels").start
        self.small = slice(0, first)  # all bytes except frames and pixels

    def write(self, inputs: ModelInputs, noise: np.ndarray | None = None) -> None:
        """Write the observations to host memory and copy them to the device, on the current stream.

        The small fields are copied first, and each frame as soon as it is written.

        Args:
            inputs: The observations, with a batch axis.
            noise: float32, as the field "noise", with a batch axis. None without this field.
        """
        with StageRange("copies"):
            self._write(inputs, noise)

    def _write(self, inputs: ModelInputs, noise: np.ndarray | None) -> None:
        put, upload = self.staging.write, self.staging.upload
        if self.patches is None:
            self._write_small(inputs, noise)
            put("pixels", inputs.pixels)
            upload()
            return
        parts = [self.small, *(self.staging.part(*place) for place in self.places)]
        views = zip(self.places, inputs.frames, strict=True)
        # This thread writes the small fields first. This takes as long as the other threads need to wake up.
        jobs = [partial(self._write_small, inputs, noise)]
        jobs += [partial(put, name, frame, row) for (name, row), frame in views]
        for done in as_done(jobs, threads_for([frame.nbytes for frame in inputs.frames])):
            upload(parts[done])

    def _write_small(self, inputs: ModelInputs, noise: np.ndarray | None) -> None:
        put = self.staging.write
        spare = self.key.tokens - inputs.tokens.shape[1]
        sides = (0, 0), ((spare, 0) if self.prompt.padding_side == "left" else (0, spare))
        put("tokens", np.pad(inputs.tokens, sides, constant_values=self.prompt.pad_token_id))
        put("token_mask", np.pad(inputs.token_mask, sides))
        put("camera_mask", inputs.camera_mask)
        put("state", inputs.state)
        if noise is not None:
            put("noise", noise)

    # CUDA graphs record the methods below. Each method writes to memory with fixed addresses, or returns tensors with
    # fixed addresses.

    def vision(self) -> Tensor:
        """Compute the image tokens, [B, V, tokens, C], of the frames or pixels in the input memory."""
        tensors = self.staging.device
        if self.patches is None:
            return self.model.embed_images(tensors["pixels"])
        frames = [tensors[f"frames.{i}"] for i in range(len(self.patches.runs))]
        rows, grid = self.patches.write(frames, self.ops), self.patches.grid
        tokens = self.model.connect(self.model.vision.encode_patches(rows, *grid), *grid)
        return tokens.unflatten(0, (self.key.batch, self.key.views))

    def read(self) -> Context:
        """Return the context."""
        return self._read(self.recorded("vision").result)

    def read_plainly(self) -> None:
        """Compute the context without a recording, so that hooks of the model's modules run."""
        self._read(self.vision())

    def _read(self, image_tokens: Tensor) -> Context:
        tensors = self.staging.device
        return self.model.read(image_tokens, *(tensors[name] for name in Inputs._fields[1:]))


class HeadProgram(Recordings):
    """The buffers of one key's solver, and the recordings of the action head.

    Args:
        key: The key.
        plan: The fused plan.
        recorder: Records the programs.
        device: The device.
        units: Converts :attr:`actions` to the robot's units. With None, they stay in model units.
    """

    noise: Tensor  # float32 [B, ...], with which the solver starts

    def __init__(
        self, key: Key, plan: Plan, recorder: GraphRecorder, device: torch.device, units: RobotUnits | None
    ):
        Recordings.__init__(self, recorder)  # a Program has two such parts
        self.key = key
        self.model = cast(Any, plan.model)
        self.time_embeddings = plan.time_embeddings(key.steps)
        self.steps = self.model.solver.steps(key.steps)
        draws = self.model.solver.draws(key.steps)
        self.noises = (*((draws,) if draws > 1 else ()), *self.model.noise_shape)
        # The buffer contains the noise before the solver steps, and the actions after the solver steps.
        self.x = torch.zeros(key.batch, *self.model.noise_shape, dtype=torch.float32, device=device)
        self.time_embedding = torch.zeros_like(self.time_embeddings[0])
        self.units, self.actions = units, self.x  # the tensor that the host reads back
        if units is not None:
            self.actions = torch.zeros(*self.x.shape[:2], units.dim, dtype=units.dtype, device=device)

    @property
    def context(self) -> Context:
        """The context at a fixed address, which :meth:`step` reads."""
        raise NotImplementedError

    def fetch(self, chunks: Tensor) -> None:
        """Start the copy of the actions to the first rows of ``chunks``, in the CPU's memory.

        The copy is complete when the current CUDA stream has finished.
        """
        with StageRange("copies"):
            chunks[: self.key.batch].copy_(self.actions, non_blocking=True)

    def step(self) -> Tensor:
        """Compute the head's output for ``x`` and ``time_embedding``."""
        return self.model.act(self.x, self.time_embedding, self.context)

    def finish(self) -> None:
        """Convert ``x`` to ``actions``, after the last step."""
        if self.units is not None:
            self.units.write(self.x, self.actions)

    def _solve(self, context: Context) -> None:
        act = lambda x, time_embedding: self.model.act(x, time_embedding, context)  # noqa: E731
        self.x.copy_(solve(act, self.noise, self.steps, self.time_embeddings))
        self.finish()


class ApartHead(HeadProgram):
    """The action head alone, for a CUDA stream of its own. It copies a context into its own memory before it reads it.

    Args:
        key: The key.
        plan: The fused plan.
        recorder: Records the programs.
        device: The device.
        units: Converts :attr:`actions` to the robot's units. With None, they stay in model units.
    """

    def __init__(
        self, key: Key, plan: Plan, recorder: GraphRecorder, device: torch.device, units: RobotUnits | None
    ):
        super().__init__(key, plan, recorder, device, units)
        self.staging = Staging({"noise": ((key.batch, *self.noises), torch.float32)}, device)
        self.noise = self.staging.device["noise"]
        self._context: Context = None  # the memory of the context, which the first one allocates
        # For each tensor of the context: the tensor from which its values were copied, which may be freed since then.
        self._sources: list[weakref.ref[Tensor] | None] = []

    @property
    def context(self) -> Context:
        return self._context

    def load(self, context: Context) -> None:
        """Copy a context into this head's memory, on the current stream.

        A tensor that was copied before is not copied again, because no method changes the tensors of a context. With
        a newer state, only the tensors of the state are therefore copied.
        """
        leaves = tensors_of(context)
        if self._context is None:
            self._context = tree_map_only(Tensor, torch.zeros_like, context)
            self._sources = [None] * len(leaves)
        sources = zip(leaves, self._sources, strict=True)
        new = [
            number for number, (leaf, source) in enumerate(sources) if source is None or source() is not leaf
        ]
        for number in new:
            self._sources[number] = None  # if a copy fails, the tensor does not count as copied
        own = tensors_of(self._context)
        copy_all([own[number] for number in new], [leaves[number] for number in new])
        for number in new:
            self._sources[number] = weakref.ref(leaves[number])

    def write(self, noise: np.ndarray) -> None:
        """Copy the noise to the device, on the current stream."""
        with StageRange("copies"):
            self.staging.write("noise", noise)
            self.staging.upload()

    def solution(self) -> None:
        """Run the whole solver on the context."""
        self._solve(self._context)


class Program(PrefixProgram, HeadProgram):
    """Buffers with fixed addresses for one key, and the recordings of all stages.

    Recordings are made at first use.

    Args:
        key: The key.
        plan: The fused plan.
        ops: The operations.
        processing: The bundle's processing.
        recorder: Records the programs.
        device: The device.
        units: Converts :attr:`actions` to the robot's units. With None, they stay in model units.
    """

    def __init__(
        self,
        key: Key,
        plan: Plan,
        ops: Ops,
        processing: Processing,
        recorder: GraphRecorder,
        device: torch.device,
        units: RobotUnits | None = None,
    ):
        """The parameter ``units`` converts :attr:`actions` to the robot's units.

        With None, they stay in model units.
        """
        HeadProgram.__init__(self, key, plan, recorder, device, units)
        PrefixProgram.__init__(self, key, plan, ops, processing, recorder, device, self.noises)
        self.noise = self.staging.device["noise"]

    @property
    def context(self) -> Context:
        return self.recorded("read").result

    def record(self) -> None:
        """Record every graph that an observation needs if its stages do not run separately.

        A recording also runs the program.
        """
        for name in ("vision", "read", "next") if self.speaks else ("chunk",):
            self.recorded(name)

    def read(self) -> Context:
        """Return the context. For an autoregressive head, also return the state after the first token, which
        :meth:`next` changes."""
        context = super().read()
        return (context, self.model.first(context)) if self.speaks else context

    def next(self) -> None:
        """Generate one more token of the chunk, for an autoregressive head."""
        context, spoken = self.recorded("read").result
        following = self.model.next(spoken, context)
        for old, new in zip(tree_leaves(spoken), tree_leaves(following), strict=True):
            old.copy_(new)

    def chunk(self) -> None:
        self._solve(self._read(self.vision()))

    def every_stage(self) -> None:
        """Run every recorded graph once: the whole chunk, or the first two tokens of an autoregressive head."""
        self.first_step() if self.speaks else self.chunk()

    def first_step(self) -> None:
        """Run vision, the prefix and one step or token."""
        context = self._read(self.vision())
        if self.speaks:
            self.model.next(self.model.first(context), context)
        else:
            self.model.act(self.x, self.time_embedding, context)


def tensors_of(context: Context) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(context) if isinstance(leaf, Tensor)]


def copied(context: Context) -> Context:
    """Return a context with the same values in new memory, which no recording writes."""
    made = tree_map_only(Tensor, torch.empty_like, context)
    copy_all(tensors_of(made), tensors_of(context))
    return made


def copy_all(to: list[Tensor], source: list[Tensor]) -> None:
    """Copy tensors, with one launch for tensors of one dtype where PyTorch supports this."""
    for dtype in dict.fromkeys(tensor.dtype for tensor in source):
        pairs = [pair for pair in zip(to, source, strict=True) if pair[1].dtype == dtype]
        torch._foreach_copy_([new for new, _ in pairs], [old for _, old in pairs])
