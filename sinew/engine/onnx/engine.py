"""Run exported graphs with ONNX Runtime. This module needs onnxruntime and numpy, but no torch.

An export has three graphs (stages): vision, read (the language model) and step (the action head). The read stage
returns keys and values of the prompt and views, masks and rotary tables. These tensors stay in ONNX Runtime's own
memory and are passed to the step stage without a copy, once per observation. A step copies the noisy actions in and
the head's output out, a few kilobytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from sinew_client.untrusted import UntrustedError, read_npy

from sinew.bundle.schema import COMPONENTS
from sinew.core import BundleError, ObservationError, SinewError, machine
from sinew.engine.capability import Capability, Refusal
from sinew.engine.engine import Engine, Facts
from sinew.engine.onnx.backend import BACKEND
from sinew.engine.onnx.borrowed import weights
from sinew.engine.onnx.graphs import CONTEXT, NEWEST, ONE_SCALE, PROMPT, STAGES, GraphSet, renewed, table_path
from sinew.engine.onnx.providers import (
    CPU,
    assigned,
    assigned_text,
    check_assigned,
    choose,
    loaded,
    open_axis,
    open_session,
    runtime,
    session_options,
)
from sinew.engine.reuse import Reuse
from sinew.engine.watch import Trace, Watch
from sinew.models.solvers import Guidance, Solver, drawn, solve
from sinew.processing import ModelInputs
from sinew.steps.action_tokens.base import ActionTokens

if TYPE_CHECKING:
    from sinew.bundle import Bundle

READ_INPUTS = ("image_tokens", "camera_mask", "tokens", "token_mask", "state")


class OnnxEngine(Engine):
    """An engine that runs the three graphs of an export (vision, read and step).

    Args:
        directory: The folder of the export.
        providers: ONNX Runtime execution providers in order of preference, by ONNX Runtime's names or short names.
            The installed onnxruntime must offer and load every provider.
        threads: Number of threads that compute. None chooses the number for this machine.
        solver: The policy's solver, which the graphs do not contain. There is no default, because a wrong solver
            gives plausible numbers of the wrong sign (GR00T integrates from 0 to 1, openpi from 1 to 0).
        bundle: The bundle with the weights, for graphs without weights.
    """

    def __init__(
        self,
        directory: Path | str,
        providers: Sequence[str] = (),
        threads: int | None = None,
        *,
        solver: Solver,
        bundle: Bundle | None = None,
    ):
        ort = runtime()
        requested, self.provider_reason = choose(providers)
        self._wanted = requested
        self.directory, self.solver = Path(directory), solver
        self.graphs = GraphSet.load(self.directory)
        self.graphs.check(self.directory)
        self._threads = machine.recommended_threads()[0] if threads is None else threads
        if self.graphs.borrows and bundle is None:
            raise BundleError(
                f"{self.directory}: these graphs have no weights; pass the bundle that they were exported from"
            )
        self._borrowed = (
            weights(bundle, self.graphs, self.directory) if bundle and self.graphs.borrows else {}
        )
        options = [
            session_options(self._threads, self._borrowed.get(stage, {}), requested) for stage in STAGES
        ]
        # Each session prepares the layout of its weights when it opens, so the sessions open in parallel.
        with ThreadPoolExecutor(min(self._threads, len(STAGES))) as pool:
            files = [self.directory / f"{stage}.onnx" for stage in STAGES]
            opened = pool.map(lambda file, given: open_session(ort, file, given, requested), files, options)
            self.sessions = dict(zip(STAGES, opened, strict=True))
        self.providers = loaded(self.sessions["step"], requested)
        self.assigned = assigned(self.sessions)
        check_assigned(self.assigned, requested)
        self.tables = {steps: _table(table_path(self.directory, steps), steps) for steps in self.graphs.steps}
        self._check_names()
        # A mark in the metadata of a graph states that all observations of a batch share one scale, so they would
        # change each other's results. Therefore a stage runs once per observation if this stage or a later stage has
        # the mark.
        marked = [ONE_SCALE in self.sessions[stage].get_modelmeta().custom_metadata_map for stage in STAGES]
        self.by_member = {stage for index, stage in enumerate(STAGES) if any(marked[index:])}
        self._axes = self._batch_axes()
        self._views_read = self._fixed_views()
        self._value = ort.OrtValue.ortvalue_from_numpy
        self.facts = self._facts()

    def _check_names(self) -> None:
        """Check the names of the graphs' inputs and outputs.

        Raises:
            BundleError: The names do not fit one another, or the record of the export.
        """
        reads = set(self.graphs.reads)
        for stage, takes, gives in (
            ("vision", {"pixels"}, set()),
            ("read", set(READ_INPUTS), reads),
            ("step", reads, {renewed(name) for name in self.graphs.said})
            if self.graphs.said
            else ("step", {"x", "moment", *reads}, {"output"}),
        ):
            session = self.sessions[stage]
            unknown = {node.name for node in session.get_inputs()} - takes
            lacking = gives - {node.name for node in session.get_outputs()}
            if unknown or lacking or not session.get_outputs():
                raise BundleError(
                    f"{self.directory / stage}.onnx: expected inputs among {', '.join(sorted(takes))} and"
                    f" outputs {', '.join(sorted(gives)) or 'of any name'}; unknown inputs are"
                    f" {sorted(unknown)}, missing outputs {sorted(lacking)}; export again"[:1000]
                )
        shapes = {node.name: node.shape for node in (*session.get_inputs(), *session.get_outputs())}
        if "x" in shapes and shapes["x"][1:] != shapes["output"][1:]:
            raise BundleError(
                f"{self.directory / 'step'}.onnx: expected an output of x's shape {shapes['x']}, got {shapes['output']}"
            )

    def _unbatched(self) -> Refusal | None:
        """Return the reason why these graphs accept only one observation at a time, or None."""
        axes = {"vision": ("pixels",), "read": READ_INPUTS, "step": ("x", NEWEST)}
        for stage, names in axes.items():
            for node in self.sessions[stage].get_inputs():
                if node.name in names and not open_axis(node):
                    return Refusal(
                        "graphs with a batch axis",
                        f"{self.directory / stage}.onnx, whose input {node.name} has the fixed shape {node.shape}:"
                        " remove the folder and export the bundle again",
                    )
        if "step" in self.by_member:
            got = "int8, with one scale for the activations of a whole batch"
            return Refusal("a head in fp32 or int8-rows", got)
        return None

    def _refusals(self) -> dict[Capability, Refusal]:
        """Return the capabilities that these graphs lack, with the reasons."""
        refusals: dict[Capability, Refusal] = {}
        if unbatched := self._unbatched():
            refusals |= dict.fromkeys((Capability.BATCH, Capability.TWO_PROMPTS), unbatched)
        elif "read" in self.by_member:
            expected = "a prefix that reads prompts of two lengths at once, as in fp32 or int8-rows"
            refusals[Capability.TWO_PROMPTS] = Refusal(expected, "int8")
        if self._wanted[0] != CPU:
            refusals[Capability.REUSE] = Refusal("a CPU", self._wanted[0])
        return refusals

    def _batch_axes(self) -> list[int | None]:
        """Return the batch axis of each tensor of the context; None if observations share the tensor."""
        read = self.sessions["read"]
        # Names of the batch axis in the graph.
        names = {node.shape[0] for node in read.get_inputs() if open_axis(node)}
        shapes = {node.name: node.shape for node in read.get_outputs()}
        return [
            next((axis for axis, size in enumerate(shapes[name]) if size in names), None)
            for name in self.graphs.reads
        ]

    @property
    def threads(self) -> int:
        return self._threads

    def _facts(self) -> Facts:
        recipe = {name: kind for name, kind in self.graphs.recipe.items() if kind != "fp32"}
        if self._borrowed:
            nbytes = sum({n: a.nbytes for lent in self._borrowed.values() for n, a in lent.items()}.values())
        else:
            files = [self.directory / f"{stage}.onnx.data" for stage in STAGES]
            nbytes = sum(file.stat().st_size for file in files if file.exists())
        return Facts(
            device="cpu"
            if self._wanted[0] == CPU
            else self._wanted[0].removesuffix("ExecutionProvider").lower(),
            precision=dict.fromkeys(COMPONENTS, "fp32") | recipe,
            recipe=recipe,
            # This number does not include the copies of weights that ONNX Runtime makes for its kernels.
            weights_nbytes=nbytes,
            guides=BACKEND.guides,
            refusals=self._refusals(),
            # If all tokens of the prefix share one scale, padding tokens would change the rounding of the other tokens.
            exact_lengths="read" in self.by_member,
            providers=tuple(self.providers),
            assigned=assigned_text(self.assigned),
            files=tuple(file for file in sorted(self.directory.iterdir()) if file.is_file()),
            notes=(
                f"{', '.join(self.providers)} ({self.provider_reason})",
                assigned_text(self.assigned),
                f"graphs from {self.directory}",
                *([self.graphs.method] if recipe else []),
            ),
        )

    def start_reuse(self, inputs: ModelInputs) -> str:
        def join(parts: list[np.ndarray]) -> np.ndarray:
            return np.concatenate(parts, 1)

        views = self.sessions["vision"].get_inputs()[0].shape[1]
        alike = not isinstance(views, int)  # False if the graph encodes a fixed number of views in one call
        self.reuse = Reuse(self._encode, join, np.array_equal, lambda: self._threads, alike=alike)
        return self.reuse.try_views(inputs.pixels.shape)

    def _encode(self, pixels: np.ndarray) -> np.ndarray:
        """Return the image tokens [B, V, N, C] of pixels."""
        vision = self.sessions["vision"]
        parts = [vision.run(None, {"pixels": pixels[rows]})[0] for rows in self._calls("vision", len(pixels))]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def read(self, inputs: ModelInputs, watch: Watch | None = None) -> list[Any]:
        """Run the vision and read stages. Return the tensors that ``graphs.reads`` names, in ONNX Runtime's memory."""
        watch, count = watch or Watch(), len(inputs.tokens)
        # A trace (the stored results of all stages) must contain computed values, so no cached result is used.
        reuse = self.reuse if watch.trace is None else None
        if reuse is not None and (stored := reuse.context(inputs, watch)) is not None:
            return list(stored)
        image_tokens = self._encode(inputs.pixels) if reuse is None else reuse.tokens(inputs.pixels, watch)
        if (prompts := count // len(inputs.pixels)) > 1:  # several prompts read the same views
            image_tokens = np.concatenate([image_tokens] * prompts)
        watch.lap("vision")
        image_tokens, camera_mask = self._all_views(image_tokens, inputs.camera_mask)
        arrays = dict(
            zip(
                READ_INPUTS,
                (image_tokens, camera_mask, inputs.tokens, inputs.token_mask, inputs.state),
                strict=True,
            )
        )
        reads = [
            self._read({name: array[rows] for name, array in arrays.items()})
            for rows in self._calls("read", count)
        ]
        context = self._joined(reads)
        if watch.trace is not None:
            watch.trace.vision = image_tokens[0]
            own = PROMPT if self.graphs.said else CONTEXT
            watch.trace.prefix = {
                name.removeprefix(own): value.numpy().copy()
                for name, value in zip(self.graphs.reads, context, strict=True)
                if name.startswith(own)
            }
        watch.lap("prefix")
        if reuse is not None:
            reuse.keep(inputs, context)
        return context

    def solve(
        self,
        context: list[Any],
        noise: np.ndarray,
        steps: int,
        guidance: Guidance | None = None,
        watch: Watch | None = None,
    ) -> np.ndarray:
        """Compute actions as :meth:`Engine.solve` does. The guidance must need no Jacobian and no denoising time per
        action.
        """
        watch, table = watch or Watch(), self._table(steps)
        for words in self.graphs.speaks:
            return self._speak(context, words, watch)
        begun = drawn(noise, 0)
        # ``rows`` contains, for each row that the head computes, the index of its row of x. A guidance can need several
        # head outputs per row of x.
        rows = getattr(guidance, "rows", None)
        act = self._act(context, begun if rows is None else begun[rows], table[:1])
        if watch.trace is not None:
            act = _noted(act, watch.trace)
        time_embeddings = np.split(table, len(table))
        x = solve(act, noise, self.solver.steps(steps), time_embeddings, lambda: watch.lap("step"), guidance)
        if watch.trace is not None:
            watch.trace.head.append(x[0].copy())
        return x

    def _speak(self, context: list[Any], words: ActionTokens, watch: Watch) -> np.ndarray:
        """Generate action tokens and return the actions, float32 [B, H, A]. The step stage runs once for each token."""
        session = self.sessions["step"]
        used = {node.name for node in session.get_inputs()}
        binding, values = session.io_binding(), dict(zip(self.graphs.reads, context, strict=True))
        for name in used.difference(self.graphs.said):
            binding.bind_ortvalue_input(name, values[name])

        def more(spoken: dict[str, Any]) -> dict[str, Any]:
            for name in used.intersection(spoken):
                binding.bind_ortvalue_input(name, spoken[name])
            # ONNX Runtime must write each token's tensors to new memory, because the step reads the tensors of the
            # previous token.
            binding.clear_binding_outputs()
            for name in self.graphs.said:
                binding.bind_output(renewed(name))
            session.run_with_iobinding(binding)
            return dict(zip(self.graphs.said, binding.get_outputs(), strict=True))

        def after_token(token: np.ndarray) -> None:
            if watch.trace is not None:
                watch.trace.head.append(token[:1].copy())
            watch.lap("step")

        first = {name: values[name] for name in self.graphs.said}
        tokens = words.speak(first, more, lambda spoken: spoken[NEWEST].numpy().copy(), after_token)
        chunks = words.chunks(tokens)
        if watch.trace is not None:
            watch.trace.head.append(chunks[0])
        return chunks

    def run(
        self,
        inputs: ModelInputs,
        noise: np.ndarray,
        steps: int,
        guidance: Guidance | None = None,
        watch: Watch | None = None,
    ) -> np.ndarray:
        self._table(steps)  # raises the error about a missing table before the first stage runs
        return super().run(inputs, noise, steps, guidance, watch)

    def _table(self, steps: int) -> np.ndarray:
        """Return the time embeddings for a number of solver steps, [steps, ...]."""
        table = self.tables.get(steps)
        if table is None:
            ready = ", ".join(map(str, self.graphs.steps))
            raise ObservationError(
                "solver_steps", f"one of the exported numbers of steps {ready}", str(steps)
            )
        return table

    def _calls(self, stage: str, count: int) -> list[slice]:
        """Split a batch of ``count`` observations into calls of a stage: one call for all observations, or one call
        per observation.
        """
        if stage in self.by_member:
            return [slice(row, row + 1) for row in range(count)]
        return [slice(0, count)]

    def _read(self, given: dict[str, np.ndarray]) -> list[Any]:
        """Run the read stage (the language model), and return its outputs in ONNX Runtime's memory."""
        read = self.sessions["read"]
        binding, used = read.io_binding(), {node.name for node in read.get_inputs()}
        for name, array in given.items():
            if name in used:
                binding.bind_cpu_input(name, np.ascontiguousarray(array))
        for name in self.graphs.reads:
            binding.bind_output(name)
        read.run_with_iobinding(binding)
        return list(binding.get_outputs())

    def _joined(self, reads: list[list[Any]]) -> list[Any]:
        """Join the outputs of several calls of the read stage to the outputs for one batch."""
        if len(reads) == 1:
            return reads[0]
        return [
            values[0] if axis is None else self._value(np.concatenate([v.numpy() for v in values], axis))
            for axis, values in zip(self._axes, zip(*reads, strict=True), strict=True)
        ]

    def _fixed_views(self) -> int:
        """Return the fixed number of views in the read stage's input, or 0 if the number may vary."""
        shapes = {node.name: node.shape for node in self.sessions["read"].get_inputs()}
        sizes = shapes.get("image_tokens", ())[1:2]
        return sizes[0] if sizes and isinstance(sizes[0], int) else 0

    def _all_views(self, image_tokens: np.ndarray, camera_mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Append views of zeros until there are as many views as the graph requires. Their mask is False.

        Args:
            image_tokens: [B, V, N, C].
            camera_mask: bool [B, V].

        Returns:
            Both arrays with the graph's number of views.
        """
        missing = self.graphs.views - camera_mask.shape[1]
        if missing < 0:
            raise SinewError(f"views: expected at most {self.graphs.views}, got {camera_mask.shape[1]}")
        if missing:
            # No view is added if the image tokens of one observation step are used for all steps.
            spare = max(0, self._views_read - image_tokens.shape[1])
            image_tokens = np.pad(image_tokens, ((0, 0), (0, spare), (0, 0), (0, 0)))
            camera_mask = np.pad(camera_mask, ((0, 0), (0, missing)))
        return image_tokens, camera_mask

    def _act(self, reads: Sequence[Any], x: np.ndarray, time_embedding: np.ndarray) -> Any:
        """Prepare the step stage: bind the inputs that stay the same in all solver steps. Return a function that runs
        one step.
        """
        session = self.sessions["step"]
        binding = session.io_binding()
        used = {node.name for node in session.get_inputs()}
        for name, value in zip(self.graphs.reads, reads, strict=True):
            if name in used:
                binding.bind_ortvalue_input(name, value)
        # An OrtValue on the CPU shares the memory of its array. The three arrays belong to this method and are filled
        # before each step.
        x_in, time_in, out = np.array(x), np.array(time_embedding), np.empty_like(x)
        for name, array in (("x", x_in), ("moment", time_in)):
            if name in used:
                binding.bind_ortvalue_input(name, self._value(array))
        binding.bind_ortvalue_output("output", self._value(out))

        def act(x: np.ndarray, time_embedding: np.ndarray) -> np.ndarray:
            np.copyto(x_in, x)
            np.copyto(time_in, time_embedding)
            session.run_with_iobinding(binding)
            return out

        return act


def _table(path: Path, steps: int) -> np.ndarray:
    """Return the time embeddings for a number of solver steps, [steps, ...].

    Raises:
        BundleError: The file is missing or damaged.
    """
    try:
        table = read_npy(path)
    except (OSError, UntrustedError) as error:
        raise BundleError(
            f"{path}: expected the table of an export, got {error!r:.300}; export again"
        ) from None
    if table.dtype != np.float32 or table.shape[:1] != (steps,):
        raise BundleError(
            f"{path}: expected float32 of shape [{steps}, ...], got {table.dtype} {list(table.shape)}; export"
            " again"
        )
    return table


def _noted(act: Any, trace: Trace) -> Any:
    def noted(x: np.ndarray, time_embedding: np.ndarray) -> np.ndarray:
        output = act(x, time_embedding)
        trace.head.append(output[0].copy())
        return output

    return noted
