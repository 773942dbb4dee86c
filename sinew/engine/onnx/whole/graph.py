"""Write one graph of a whole policy with fixed shapes, for runtimes that accept one file only.

The inputs are camera frames, state, tokens and noise. The output is the actions in the robot's units. The graph joins
the three graphs of an export. It contains the step stage once for each solver step, and one copy of the weights, in the
files of the export.

The processing before and after the three graphs is linear in most bundles. Its matrices are measured with the bundle's
own processing, compared with it on random inputs, and rejected if they are not linear.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from sinew_client.untrusted import read_npy

from sinew.core import SinewError
from sinew.core.extras import MissingPackageError
from sinew.engine.onnx.engine import READ_INPUTS
from sinew.engine.onnx.graphs import STAGES, GraphSet, table_path
from sinew.engine.onnx.providers import CPU, runtime
from sinew.processing import Processor
from sinew.processing.image import prepare_frame

if TYPE_CHECKING:
    from sinew.bundle import Manifest
    from sinew.steps.image.base import ImageRecipe

WHOLE = "policy.onnx"
DOMAIN = "sinew"  # ONNX domain of the stages' functions
NEAR = 1e-4  # largest error of a linear map, relative to the largest value
CHECKED = 4  # number of random inputs that compare a linear map with the bundle's own processing


@dataclass(frozen=True)
class FrameMap:
    """The linear map from a camera's frame to pixels.

    The map is out[k] = scale[k] * (rows @ frame[:, :, channels[k]] @ columns) + offset[k].

    Attributes:
        height: Height of a uint8 frame in pixels.
        width: Width of a uint8 frame in pixels.
        rows: [h, height].
        columns: [width, w].
        channels: Colour of the frame that each output channel reads.
        scale: Factor of each output channel.
        offset: float32 [channels, h, w].
    """

    height: int
    width: int
    rows: np.ndarray
    columns: np.ndarray
    channels: np.ndarray
    scale: np.ndarray
    offset: np.ndarray

    def __call__(self, frame: np.ndarray) -> np.ndarray:
        """Convert a frame, uint8 [height, width, 3], to pixels, float32 [channels, h, w]."""
        planes = self.rows @ frame.astype(np.float32).transpose(2, 0, 1) @ self.columns
        pixels: np.ndarray = self.scale[:, None, None] * planes[self.channels] + self.offset
        return pixels


def frame_map(recipe: ImageRecipe, height: int, width: int) -> FrameMap | None:
    """Return the linear map of a recipe for frames of one size, or None if the recipe rounds or clips."""

    def linear(frame: np.ndarray) -> np.ndarray:
        return prepare_frame(frame, recipe).astype(np.float64) - offset

    black = np.zeros((height, width, 3), np.uint8)
    offset = prepare_frame(black, recipe).astype(np.float64)
    inner = recipe.picture  # size of the camera's picture, which is in the top left corner of a black frame
    centre = inner[0] // 2, inner[1] // 2
    gains = np.empty((offset.shape[0], 3))
    for channel in range(3):
        black[:] = 0
        black[:, :, channel] = 255
        gains[:, channel] = linear(black)[:, *centre]
    channels = np.abs(gains).argmax(axis=1)
    scale = gains[np.arange(len(gains)), channels] / 255
    if not np.all(scale):
        return None
    rows, columns = np.empty((offset.shape[1], height)), np.empty((width, offset.shape[2]))
    colour = int(channels[0])
    for at, (size, probe) in enumerate(((height, rows.T), (width, columns))):
        for line in range(size):
            black[:] = 0
            if at == 0:
                black[line, :, colour] = 255
                probe[line] = linear(black)[0, :, centre[1]]
            else:
                black[:, line, colour] = 255
                probe[line] = linear(black)[0, centre[0]]
    result = FrameMap(
        height,
        width,
        (rows / (255 * scale[0])).astype(np.float32),
        (columns / (255 * scale[0])).astype(np.float32),
        channels,
        scale.astype(np.float32),
        offset.astype(np.float32),
    )
    frames = np.random.default_rng(0).integers(0, 256, (CHECKED, height, width, 3), np.uint8)
    return result if all(_near(result(frame), prepare_frame(frame, recipe)) for frame in frames) else None


def _near(got: np.ndarray, wanted: np.ndarray) -> bool:
    return bool(np.abs(got - wanted).max() <= NEAR * max(1.0, float(np.abs(wanted).max())))


def _cut(linear: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Find the columns of the state that the policy clips to -1 and 1.

    Returns:
        bool [m], True for a clipped column of the values [n, m].
    """
    beyond = np.abs(linear) > 1
    cut: np.ndarray = np.any(beyond, axis=0) & np.all(~beyond | (np.abs(wanted) <= 1), axis=0)
    return cut


def affine(function: Callable[[np.ndarray], np.ndarray], given: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Measure the matrix [n, m] and the offset [m] of a function that is affine around a point.

    Args:
        function: A function of n numbers.
        given: The point, [n].
    """
    offset, matrix = function(given), []
    for at in range(len(given)):
        shifted = given.copy()
        shifted[at] += 1
        matrix.append(function(shifted) - offset)
    rows = np.array(matrix, np.float64).reshape(len(given), -1)
    return rows, offset - given @ rows


def write_whole(manifest: Manifest, folder: Path, prompt: str = "") -> list[str]:
    """Write ``policy.onnx`` into the folder of an export.

    Args:
        manifest: The bundle's manifest.
        folder: The folder of the export.
        prompt: The only instruction of the graph. "" makes the instruction's tokens an input.

    Returns:
        A line of text for each input and output.

    Raises:
        SinewError: The inference has no fixed number of steps, the processing is not linear, or the prompt contains
            more than the instruction.
    """
    try:
        import onnx
        import onnx.inliner
    except ImportError:
        raise MissingPackageError("one graph of the whole policy", "onnx") from None
    graphs, spec = GraphSet.load(folder), manifest.spec
    if graphs.said:
        raise SinewError(
            "one graph: expected a policy with a fixed number of steps, got an autoregressive policy"
        )
    if spec.history > 1:
        raise SinewError(
            f"one graph: expected a policy that reads one observation step, got a history of {spec.history}"
        )
    if graphs.borrows:
        raise SinewError(
            f"{folder}: expected graphs with weights, got graphs that use the bundle's weights; export again"
        )
    processor = Processor(manifest)
    builder = _Builder(onnx, manifest, processor, graphs, folder)
    builder.build(_tokens(processor, prompt))
    flat = onnx.inliner.inline_local_functions(builder.model())  # not all runtimes support local functions
    onnx.save_model(flat, str(folder / WHOLE))
    onnx.checker.check_model(str(folder / WHOLE))
    return builder.described


def open_whole(folder: Path) -> tuple[dict[str, list[int]], Callable[[dict[str, np.ndarray]], np.ndarray]]:
    """Open ``policy.onnx`` on the CPU.

    Returns:
        The shape of each input by name, and a function that computes the actions, [1, H, D], from the inputs.
    """
    session = runtime().InferenceSession(str(folder / WHOLE), providers=[CPU])
    shapes = {node.name: list(node.shape) for node in session.get_inputs()}
    return shapes, lambda given: np.asarray(session.run(None, given)[0])


def _tokens(processor: Processor, prompt: str) -> np.ndarray | None:
    """Return the tokens of the graph's only instruction, int64 [L], or None if the instruction is an input.

    A policy without text has the same tokens for every instruction.

    Raises:
        SinewError: The tokens depend on the state.
    """

    def tokens(text: str, state: float) -> np.ndarray:
        width = processor.state_normalizer.width
        return np.asarray(processor.prompter.encode(text, np.full(width, state, np.float32)), np.int64)

    ids, other = tokens(prompt or "one", -0.5), tokens(prompt or "another one", 0.5)
    if np.array_equal(ids, other):
        return ids
    if prompt:
        raise SinewError(
            "one graph: --prompt: this policy writes the state into its prompt, so the prompt cannot be constant;"
            " omit --prompt"
        )
    return None


class _Builder:
    """Assembles the graph of a whole policy.

    Attributes:
        described: A line of text for each input and output.
    """

    def __init__(self, onnx: Any, manifest: Manifest, processor: Processor, graphs: GraphSet, folder: Path):
        self._onnx, self._spec, self._processor, self._graphs = onnx, manifest.spec, processor, graphs
        self._recipe, self._folder = manifest.processing, folder
        self._nodes: list[Any] = []
        self._stored: list[Any] = []
        self._inputs: list[Any] = []
        self._outputs: list[Any] = []
        self._functions: list[Any] = []
        self._opsets: dict[str, int] = {DOMAIN: 1}
        self._takes: dict[str, tuple[list[str], list[str]]] = {}
        self.described: list[str] = []

    def build(self, tokens: np.ndarray | None) -> None:
        """Assemble the graph.

        Args:
            tokens: The tokens of the only instruction, int64 [L]. None makes them an input.
        """
        for stage in STAGES:
            self._function(stage)
        inputs = self._read_inputs(tokens)
        context = self._call("read", inputs, dict.fromkeys(self._graphs.reads, ""))
        self._finish(self._solve(context))

    def model(self) -> Any:
        helper = self._onnx.helper
        graph = helper.make_graph(self._nodes, "policy", self._inputs, self._outputs, self._stored)
        opsets = [helper.make_opsetid(domain, version) for domain, version in self._opsets.items()]
        return helper.make_model(
            graph, opset_imports=opsets, functions=self._functions, ir_version=10, producer_name="sinew"
        )

    def _function(self, stage: str) -> None:
        """Convert the graph of a stage to an ONNX function. The weights become arguments of the function."""
        onnx, helper = self._onnx, self._onnx.helper
        loaded = onnx.load(str(self._folder / f"{stage}.onnx"), load_external_data=False)
        graph, nodes = loaded.graph, list(loaded.graph.node)
        weights = [each.name for each in graph.initializer]
        for each in graph.initializer:
            stored = onnx.TensorProto()
            stored.CopyFrom(each)
            stored.name = f"{stage}.{each.name}"
            self._stored.append(stored)
        outputs = [each.name for each in graph.output]
        # In ONNX, a node must compute each output of a function. Add a node if an output is a weight.
        for name in set(outputs) & set(weights):
            nodes = [_renamed(onnx, node, name, f"{name}.stored") for node in nodes]
            nodes.append(helper.make_node("Identity", [f"{name}.stored"], [name]))
            weights[weights.index(name)] = f"{name}.stored"
        takes = [each.name for each in graph.input]
        self._takes[stage] = takes, [f"{stage}.{each.name}" for each in graph.initializer]
        self._opsets |= {each.domain: each.version for each in loaded.opset_import}
        self._functions.append(
            helper.make_function(DOMAIN, stage, [*takes, *weights], outputs, nodes, loaded.opset_import)
        )

    def _call(
        self, stage: str, given: dict[str, str], made: dict[str, str], prefix: str = ""
    ) -> dict[str, str]:
        """Add a node that calls the function of a stage.

        Args:
            stage: The stage.
            given: For each input of the function, the name of the value in the graph.
            made: For each output of the function with a fixed name, the name of the value in the graph.
            prefix: Prefix for the names of the other outputs.

        Returns:
            Output of the function -> name of the value.
        """
        takes, weights = self._takes[stage]
        function = next(each for each in self._functions if each.name == stage)
        outputs = {name: made.get(name) or f"{prefix}{name}" for name in function.output}
        arguments = [*(given[name] for name in takes), *weights]
        self._nodes.append(
            self._onnx.helper.make_node(stage, arguments, list(outputs.values()), domain=DOMAIN)
        )
        return outputs

    def _read_inputs(self, prompt: np.ndarray | None) -> dict[str, str]:
        spec = self._spec
        views = [self._frames(at) for at in range(len(spec.cameras))]
        pixels = self._node("Concat", views, axis=0)
        tokens = self._call(
            "vision", {"pixels": self._node("Unsqueeze", [pixels, self._ints(0)])}, {}, "vision."
        )
        if prompt is None:
            shape = 1, spec.max_prompt_tokens
            words = self._input("tokens", "INT64", shape, "the prompt's tokens, then any values")
            mask = self._input("token_mask", "BOOL", shape, "True for tokens of the prompt")
        else:
            words, mask = self._constant(prompt[None]), self._constant(np.ones((1, len(prompt)), bool))
        camera_mask = self._constant(np.ones((1, self._graphs.views), bool))
        values = next(iter(tokens.values())), camera_mask, words, mask, self._state()
        return dict(zip(READ_INPUTS, values, strict=True))

    def _frames(self, camera: int) -> str:
        """Add nodes that compute a camera's pixels from its raw frame. Return the name of the pixels, float32 [1,
        channels, h, w].
        """
        about, recipe = self._spec.cameras[camera], self._recipe.image.of_camera(camera)
        frames = frame_map(recipe, about.height, about.width)
        note = "in the camera's size"
        if frames is None:
            frames = frame_map(recipe, *recipe.picture)
            note = "which you must resize before, because the bundle's resize rounds"
        if frames is None:
            raise SinewError(
                f"one graph: {about.name}: this bundle has image steps that are not linear, which a single graph"
                " cannot contain; export without --whole"
            )
        frame = self._input(about.name, "UINT8", (frames.height, frames.width, 3), f"frames, {note}")
        floats = self._onnx.TensorProto.FLOAT
        planes = self._node("Transpose", [self._node("Cast", [frame], to=floats)], perm=[2, 0, 1])
        if not np.array_equal(frames.rows, np.eye(frames.height)):
            planes = self._node("MatMul", [self._constant(frames.rows), planes])
        if not np.array_equal(frames.columns, np.eye(frames.width)):
            planes = self._node("MatMul", [planes, self._constant(frames.columns)])
        if frames.channels.tolist() != [0, 1, 2]:
            planes = self._node("Gather", [planes, self._constant(frames.channels.astype(np.int64))], axis=0)
        offset = frames.offset
        if np.all(offset == offset[:, :1, :1]):
            offset = offset[:, :1, :1]
        scaled = self._node("Mul", [planes, self._constant(frames.scale[:, None, None])])
        return self._node("Unsqueeze", [self._node("Add", [scaled, self._constant(offset)]), self._ints(0)])

    def _state(self) -> str:
        processor, dim = self._processor, self._spec.state.dim
        middle, drawn = self._states()

        def model_state(state: np.ndarray) -> np.ndarray:
            return processor.model_state(processor.state(state)).astype(np.float64)

        matrix, offset = affine(model_state, middle)
        expected = np.array([model_state(state) for state in drawn])
        linear = np.array(drawn) @ matrix + offset
        cut = _cut(linear, expected)
        if not _near(np.where(cut, linear.clip(-1, 1), linear), expected):
            raise SinewError(
                "one graph: the normalisation of the state is not linear, which a single graph cannot contain; export"
                " without --whole"
            )
        state = self._input("state", "FLOAT", (1, dim), "in the robot's units")
        product = self._node("MatMul", [state, self._constant(matrix.astype(np.float32))])
        return self._bounded(
            self._node("Add", [product, self._constant(offset.astype(np.float32)[None])]), cut
        )

    def _states(self) -> tuple[np.ndarray, list[np.ndarray]]:
        """Return states for a test whether the normalisation is linear.

        Returns:
            The middle of the normalisation statistics, [D], and random states up to three times as far from it as the
            statistics reach, each [D].
        """
        normalizer, dim = self._processor.state_normalizer, self._spec.state.dim
        rows = np.random.default_rng(0).uniform(-0.9, 0.9, (CHECKED, normalizer.width))
        middle, *around = (
            np.asarray(normalizer.unnormalize(row), np.float64)[:dim]
            for row in [np.zeros(normalizer.width), *rows]
        )
        return middle, [
            middle + far * (state - middle) for far, state in zip((1, 1, 2, 3), around, strict=True)
        ]

    def _bounded(self, value: str, cut: np.ndarray) -> str:
        """Add nodes that clip the columns ``cut``, bool [n], of a value to -1 and 1. Return the name of the result."""
        if not np.any(cut):
            return value
        most = np.where(cut, 1.0, np.finfo(np.float32).max).astype(np.float32)
        return self._node("Max", [self._node("Min", [value, self._constant(most)]), self._constant(-most)])

    def _solve(self, context: dict[str, str]) -> str:
        """Add the solver's steps, and return the name of the solution, float32 [1, H, padded]."""
        count = self._graphs.steps[0]
        table = read_npy(table_path(self._folder, count))
        steps, shape = self._spec.solver.steps(count), self._noise_shape(count)
        if self._spec.solver.noise == "zeros":
            noise = self._constant(np.zeros((1, *shape), np.float32))
        else:
            kinds = {
                "normal": "standard normal",
                "uniform": "uniform in [-1, 1]",
                "exponential": "exponential of mean 1, above 0",
            }
            kind = kinds[self._spec.solver.noise]
            noise = self._input("noise", "FLOAT", (1, *shape), kind)
        draws = [noise]
        if len(shape) == 3:
            draws = [self._node("Gather", [noise, self._scalar(draw)], axis=1) for draw in range(shape[0])]
        x = draws[0]
        earlier: list[str] = []
        for number, (step, moment) in enumerate(zip(steps, table, strict=True)):
            inputs = context | {"x": x, "moment": self._constant(moment[None])}
            out = self._call("step", inputs, {}, f"step{number}.")["output"]
            following = self._advanced(step, x, out, draws[step.draw] if step.fresh else "", earlier)
            x, earlier = following, [x, *earlier]
        return x

    def _noise_shape(self, count: int) -> tuple[int, ...]:
        *draws, rows, _ = self._spec.noises(count)
        return (*draws, rows, self._recipe.padded_action_dim)

    def _advanced(self, step: Any, x: str, output: str, noise: str, earlier: list[str]) -> str:
        """Add nodes for one solver step (:meth:`sinew_client.solver.Step.advance`), and return the name of the next
        x.
        """
        parts = [self._times(x, step.keep)] if step.keep else []
        if step.gain or step.estimate is None:
            parts.append(self._times(output, step.gain))
        if (estimate := step.estimate) is not None:
            clean = output
            if estimate.alpha:
                less = self._node("Sub", [x, self._times(output, estimate.sigma)])
                clean = self._times(less, 1 / estimate.alpha)
            if np.isfinite(estimate.clip):
                bounds = [self._float(-estimate.clip), self._float(estimate.clip)]
                clean = self._node("Clip", [clean, *bounds])
            parts.append(self._times(clean, estimate.weight))
        if noise:
            parts.append(self._times(noise, step.fresh))
        parts += [
            self._times(before, weight)
            for weight, before in zip(step.earlier, earlier, strict=False)
            if weight
        ]
        total = parts[0]
        for part in parts[1:]:
            total = self._node("Add", [total, part])
        return total

    def _finish(self, x: str) -> None:
        """Add nodes that convert the solution to the robot's units.

        Each number gets a factor and an offset. For relative actions, a linear term of the state is added.
        """
        processor, spec = self._processor, self._spec
        rows, first = self._noise_shape(self._graphs.steps[0])[-2], self._recipe.first_row
        shape, width = (rows, self._recipe.padded_action_dim), processor.action_normalizer.width
        middle, drawn = self._states()
        zeros = np.zeros(shape, np.float32)

        def finished(chunk: np.ndarray, state: np.ndarray) -> np.ndarray:
            return processor.finish(chunk, processor.state(state)).astype(np.float64)

        base = finished(zeros, middle)
        matrix, cut = np.zeros((shape[1], spec.action.dim)), np.zeros(shape[1], bool)
        for at in range(width):
            near, far = zeros.copy(), zeros.copy()
            near[:, at], far[:, at] = 1, 3
            result = finished(near, middle)
            matrix[at] = (result - base)[0]
            cut[at] = np.array_equal(result, finished(far, middle))
        of_state, _ = affine(lambda state: finished(zeros, state)[0], middle)
        offset = base - middle @ of_state
        for number, state in enumerate(drawn):
            chunk = np.random.default_rng(number).uniform(-3, 3, shape).astype(np.float32)
            linear = np.where(cut, chunk.clip(-1, 1), chunk)[first:][: spec.chunk_size].astype(np.float64)
            if not _near(linear @ matrix + offset + state @ of_state, finished(chunk, state)):
                raise SinewError(
                    "one graph: actions: this bundle has action steps that are not linear, which a single graph"
                    " cannot contain; export without --whole"
                )
        if (first, spec.chunk_size) != (0, rows):
            ends = [self._ints(first), self._ints(first + spec.chunk_size), self._ints(1)]
            x = self._node("Slice", [x, *ends])
        actions = self._node("MatMul", [self._bounded(x, cut), self._constant(matrix.astype(np.float32))])
        if np.any(of_state):
            added = self._node("MatMul", ["state", self._constant(of_state.astype(np.float32))])
            actions = self._node("Add", [actions, self._node("Unsqueeze", [added, self._ints(1)])])
        self._node("Add", [actions, self._constant(offset.astype(np.float32)[None])], made="actions")
        size = 1, spec.chunk_size, spec.action.dim
        self._outputs.append(
            self._onnx.helper.make_tensor_value_info("actions", self._onnx.TensorProto.FLOAT, size)
        )
        self.described.append(f"actions: FLOAT {list(size)}, in the robot's units")

    def _node(self, kind: str, inputs: Sequence[str], made: str = "", **attributes: Any) -> str:
        name = made or f"v{len(self._nodes)}"
        self._nodes.append(self._onnx.helper.make_node(kind, list(inputs), [name], **attributes))
        return name

    def _input(self, name: str, kind: str, shape: tuple[int, ...], note: str) -> str:
        number = getattr(self._onnx.TensorProto, kind)
        self._inputs.append(self._onnx.helper.make_tensor_value_info(name, number, shape))
        self.described.append(f"{name}: {kind} {list(shape)}, {note}")
        return name

    def _constant(self, array: np.ndarray) -> str:
        name = f"c{len(self._stored)}"
        self._stored.append(self._onnx.numpy_helper.from_array(np.ascontiguousarray(array), name))
        return name

    def _ints(self, value: int) -> str:
        return self._constant(np.array([value], np.int64))

    def _scalar(self, value: int) -> str:
        return self._constant(np.array(value, np.int64))

    def _float(self, value: float) -> str:
        return self._constant(np.array(value, np.float32))

    def _times(self, value: str, factor: float) -> str:
        return value if factor == 1.0 else self._node("Mul", [value, self._float(factor)])


def _renamed(onnx: Any, node: Any, old: str, new: str) -> Any:
    copied = onnx.NodeProto()
    copied.CopyFrom(node)
    copied.input[:] = [new if name == old else name for name in node.input]
    return copied
