"""The program that the CUDA engine records for one observation, or for a batch of observations.

Its inputs and its chunk have fixed memory addresses.

While the program runs, the CPU reads no value, and no constant is copied from the CPU's memory. The program depends
only on the key (the sizes of an observation). Tables of the solver's times and of the resize are made when the program
is made.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from sinew.bundle.schema import Processing
from sinew.engine.cuda.frames import Patches, Size
from sinew.engine.cuda.fused.ops import Ops
from sinew.engine.cuda.graphs import GraphRecorder, RecordedGraph, StageRange
from sinew.engine.cuda.staging import Field, Staging, as_done, threads_for
from sinew.engine.cuda.units import RobotUnits
from sinew.engine.example import Inputs
from sinew.engine.plan.plan import Plan
from sinew.models.base import AutoregressiveModel, Context
from sinew.models.solvers import MOST_EARLIER, drawn, solve
from sinew.processing import ModelInputs

SHOWN = {"read": "prefix", "next": "step"}  # key: a stage; value: its name in profiles, if the name differs


@dataclass(frozen=True, slots=True)
class Key:
    """The key of a recorded program: all sizes on which the program depends.

    Attributes:
        views: Number of views.
        sizes: Height and width of each view's raw frame. Empty if the input is pixels.
        tokens: Length of the prompt with padding, in tokens.
        steps: Number of solver steps.
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


class Program:
    """Buffers with fixed addresses for one key, and the recordings that use these buffers.

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
        self.key, self.ops, self.recorder = key, ops, recorder
        self.model = model = cast(Any, plan.model)
        self.prompt = processing.prompt
        self.time_embeddings = plan.time_embeddings(key.steps)
        self.steps = self.model.solver.steps(key.steps)
        draws = self.model.solver.draws(key.steps)
        self.noises = (*((draws,) if draws > 1 else ()), *self.model.noise_shape)
        image, batch = processing.image, key.batch
        fields: dict[str, Field] = {
            "camera_mask": ((batch, key.views), torch.bool),
            "tokens": ((batch, key.tokens), torch.int64),
            "token_mask": ((batch, key.tokens), torch.bool),
            "state": ((batch, self.model.state_size), torch.float32),
            "noise": ((batch, *self.noises), torch.float32),
        }
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
        # For each view of each observation: the name of its field in the staging memory, and its row in that field.
        self.places = [] if self.patches is None else self.patches.places
        first = self.staging.part("frames.0" if self.patches else "pixels").start
        self.small = slice(0, first)  # all bytes except frames and pixels
        # The buffer contains the noise before the solver steps, and the actions after the solver steps.
        self.x = torch.zeros(batch, *self.model.noise_shape, dtype=torch.float32, device=device)
        self.earlier: list[
            Tensor
        ] = []  # the values of x before earlier steps, the newest first, for steps that run separately
        self.time_embedding = torch.zeros_like(self.time_embeddings[0])
        self.units, self.actions = units, self.x  # the tensor that the host reads back
        if units is not None:
            self.actions = torch.zeros(*self.x.shape[:2], units.dim, dtype=units.dtype, device=device)
        self.speaks = isinstance(model, AutoregressiveModel)
        self._recorded: dict[str, RecordedGraph] = {}

    def write(self, inputs: ModelInputs, noise: np.ndarray) -> None:
        """Write the observations to host memory and copy them to the device, on the current stream.

        The small fields are copied first, and each frame as soon as it is written.

        Args:
            inputs: The observations, with a batch axis.
            noise: float32, as the field "noise", with a batch axis.
        """
        with StageRange("copies"):
            self._write(inputs, noise)

    def fetch(self, chunks: Tensor) -> None:
        """Start the copy of the actions to the first rows of ``chunks``, in the CPU's memory.

        The copy is complete when the current CUDA stream has finished.
        """
        with StageRange("copies"):
            chunks[: self.key.batch].copy_(self.actions, non_blocking=True)

    def _write(self, inputs: ModelInputs, noise: np.ndarray) -> None:
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

    def _write_small(self, inputs: ModelInputs, noise: np.ndarray) -> None:
        put = self.staging.write
        spare = self.key.tokens - inputs.tokens.shape[1]
        sides = (0, 0), ((spare, 0) if self.prompt.padding_side == "left" else (0, spare))
        put("tokens", np.pad(inputs.tokens, sides, constant_values=self.prompt.pad_token_id))
        put("token_mask", np.pad(inputs.token_mask, sides))
        put("camera_mask", inputs.camera_mask)
        put("state", inputs.state)
        put("noise", noise)

    def recorded(self, name: str) -> RecordedGraph:
        """Return the recording of a part of the program.

        Args:
            name: "chunk" is the whole program. "vision", "read" and "step" ("next" for an autoregressive head) are its
                stages, and each stage reads the result of the previous stage.
        """
        if name not in self._recorded:
            recording = self.recorder.record(getattr(self, name), apart=name != "chunk")
            recording.replay = StageRange.around(SHOWN.get(name, name), recording.replay)
            self._recorded[name] = recording
        return self._recorded[name]

    def record(self) -> None:
        """Record every graph that an observation needs if its stages do not run separately.

        A recording also runs the program.
        """
        for name in ("vision", "read", "next") if self.speaks else ("chunk",):
            self.recorded(name)

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
        """Return the context. For an autoregressive head, also return the state after the first token, which
        :meth:`next` changes."""
        context = self._read(self.recorded("vision").result)
        return (context, self.model.first(context)) if self.speaks else context

    def read_plainly(self) -> None:
        """Compute the context without a recording, so that hooks of the model's modules run."""
        self._read(self.vision())

    def next(self) -> None:
        """Generate one more token of the chunk, for an autoregressive head."""
        context, spoken = self.recorded("read").result
        following = self.model.next(spoken, context)
        for old, new in zip(tree_leaves(spoken), tree_leaves(following), strict=True):
            old.copy_(new)

    def step(self) -> Tensor:
        """Compute the head's output for ``x`` and ``time_embedding``. :meth:`advance` then uses this output."""
        return self.model.act(self.x, self.time_embedding, self.recorded("read").result)

    def advance(self, step: int) -> None:
        """Update ``x`` with the output of the step that was just replayed."""
        noise = self.staging.device["noise"]
        before = self.x.clone() if any(each.earlier for each in self.steps) else None
        self.x.copy_(self.steps[step].advance(self.x, self.recorded("step").result, noise, self.earlier))
        if before is not None:
            self.earlier = [before, *self.earlier[: MOST_EARLIER - 1]]

    def chunk(self) -> None:
        context = self._read(self.vision())
        noise = self.staging.device["noise"]
        act = lambda x, time_embedding: self.model.act(x, time_embedding, context)  # noqa: E731
        self.x.copy_(solve(act, noise, self.steps, self.time_embeddings))
        self.finish()

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

    def begin(self) -> None:
        """Set ``x`` to the solver's start, before solver steps that run separately. Replay "read" before this call."""
        self.recorded("step")  # record before x is set, because recording runs the step and changes x
        self.x.copy_(drawn(self.staging.device["noise"], 0))
        self.earlier = []

    def finish(self) -> None:
        """Convert ``x`` to ``actions``, after the last step."""
        if self.units is not None:
            self.units.write(self.x, self.actions)

    def _read(self, image_tokens: Tensor) -> Context:
        tensors = self.staging.device
        return self.model.read(image_tokens, *(tensors[name] for name in Inputs._fields[1:]))
