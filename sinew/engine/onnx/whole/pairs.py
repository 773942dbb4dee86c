"""Static 8-bit graphs for the compilers of NPUs: a pair of nodes, QuantizeLinear and DequantizeLinear, rounds the
inputs and outputs of each product.

Such a compiler computes a product between two pairs in integers, with the scales of the pairs. Weights are rounded
per output channel. The input and the output of a product have one scale each, from the largest magnitude in runs over
observations. All scales are symmetric about zero, because TensorRT supports no other zero point. Products of two
activations, norms, softmax and activation functions stay in floats.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from sinew.core import SinewError, scratch
from sinew.core.extras import MissingPackageError
from sinew.engine.onnx.engine import OnnxEngine
from sinew.engine.onnx.graphs import STAGES, GraphSet, table_path
from sinew.engine.onnx.quantize import component_of, replace_nodes, round_weights, save_graph
from sinew.models.solvers import Solver
from sinew.processing import ModelInputs

PRODUCTS = ("MatMul", "Gemm", "Conv")
PAIR = ("QuantizeLinear", "DequantizeLinear")
LARGEST = ".largest"  # suffix of the name of an output: the largest magnitude in a tensor
PRODUCT = ".product"  # suffix of the name of a product's output before the pair
# Operators that move numbers and compute none, so they lose no precision.
MOVES = {
    "Cast", "Concat", "Constant", "Expand", "Gather", "Identity", "Pad", "Reshape", "Shape", "Slice", "Split",
    "Squeeze", "Transpose", "Unsqueeze",
}  # fmt: skip


@dataclass
class Pairs:
    """The numbers of nodes with and without pairs (QuantizeLinear and DequantizeLinear) in an export.

    Attributes:
        products: For each component, the number of matrix products between pairs.
        left: For each operator, the number of nodes that still compute with floats.
    """

    products: Counter[str] = field(default_factory=Counter)
    left: Counter[str] = field(default_factory=Counter)


class WatchedEngine(OnnxEngine):
    """An ONNX engine whose graphs also output the largest magnitudes of their activations.

    Attributes:
        largest: The largest magnitude of each tensor so far, by the tensor's name.
    """

    def __init__(self, directory: Path, solver: Solver):
        super().__init__(directory, solver=solver)
        self.largest: dict[str, float] = {}

    def _watched(self, stage: str, given: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Run a stage, update the largest magnitudes, and return the outputs by name."""
        session = self.sessions[stage]
        inputs = {node.name: np.ascontiguousarray(given[node.name]) for node in session.get_inputs()}
        outputs = dict(
            zip((node.name for node in session.get_outputs()), session.run(None, inputs), strict=True)
        )
        for name in [name for name in outputs if name.endswith(LARGEST)]:
            tensor, value = f"{stage}:{name.removesuffix(LARGEST)}", float(outputs.pop(name))
            self.largest[tensor] = max(self.largest.get(tensor, 0.0), value)
        return outputs

    def _encode(self, pixels: np.ndarray) -> np.ndarray:
        return next(iter(self._watched("vision", {"pixels": pixels}).values()))

    def _read(self, given: dict[str, np.ndarray]) -> list[Any]:
        outputs = self._watched("read", given)
        return [self._value(outputs[name]) for name in self.graphs.reads]

    def _act(self, reads: Sequence[Any], x: np.ndarray, time_embedding: np.ndarray) -> Any:
        context = {name: value.numpy() for name, value in zip(self.graphs.reads, reads, strict=True)}

        def act(x: np.ndarray, time_embedding: np.ndarray) -> np.ndarray:
            return self._watched("step", {**context, "x": x, "moment": time_embedding})["output"]

        return act


def write_pairs(
    folder: Path,
    recipe: Mapping[str, str],
    bits: int,
    solver: Solver,
    runs: Iterable[tuple[ModelInputs, np.ndarray]],
) -> Pairs:
    """Put pairs of QuantizeLinear and DequantizeLinear around the matrix products of an export's graphs, in place.

    Only products with constant weights in components with the precision int8 get pairs.

    Args:
        folder: The folder of the export.
        recipe: The precision of each component, by the component's name.
        bits: Bits of the weights.
        solver: The policy's solver.
        runs: Inputs and noise of the observations that calibrate the scales of activations.

    Raises:
        SinewError: The policy is autoregressive, the graphs are quantised already or have no weights, or a component
            has no products.
    """
    try:
        import onnx
    except ImportError:
        raise MissingPackageError("quantisation", "onnx") from None
    graphs = GraphSet.load(folder)
    if graphs.said:
        raise SinewError(
            "--qdq: expected a policy with a fixed number of steps, got an autoregressive policy"
        )
    if graphs.recipe or graphs.borrows:
        got = graphs.recipe or "graphs that use the bundle's weights"
        raise SinewError(f"{folder}: expected graphs in float32 with weights, got {got}")
    largest, count = _magnitudes(folder, graphs, recipe, solver, runs)
    counts = Pairs()
    for stage in STAGES:
        model = onnx.load(str(folder / f"{stage}.onnx"))
        products = _products(model.graph, recipe)
        scales = {name: scale_of(largest[f"{stage}:{name}"]) for name in _activations(products)}
        _put_pairs(model.graph, products, scales, bits)
        save_graph(model, folder / f"{stage}.onnx")
        counts.products.update(map(component_of, products))
        counts.left.update(
            node.op_type
            for node in model.graph.node
            if node.op_type not in MOVES | {*PAIR} and not node.output[0].endswith(PRODUCT)
        )
    components = {part for part, kind in recipe.items() if kind == "int8"}
    if empty := components - counts.products.keys():
        raise SinewError(
            f"--qdq: {', '.join(sorted(empty))}: this component has no products with constant weights;"
            " keep it in fp32"
        )
    method = f"static pairs, weights of {bits} bits per channel, scales over {count} observations"
    replace(graphs, recipe=dict(recipe), method=method, bits=bits).save(folder)
    return counts


def scale_of(largest: float) -> float:
    """Return the int8 scale of a tensor with this largest magnitude."""
    return largest / 127 or 1.0


def _products(graph: Any, recipe: Mapping[str, str]) -> list[Any]:
    """Return the nodes that get pairs: products with constant weights in int8 components."""
    axes = {tensor.name: len(tensor.dims) for tensor in graph.initializer}
    return [
        node
        for node in graph.node
        if node.op_type in PRODUCTS and recipe.get(component_of(node)) == "int8"
        # The weight must be a matrix, or for a Conv node an array with more axes.
        if node.input[1] in axes and (axes[node.input[1]] == 2) == (node.op_type != "Conv")
    ]


def _activations(products: Iterable[Any]) -> dict[str, None]:
    """Return the names of the inputs and outputs of products, each name once."""
    return dict.fromkeys(name for node in products for name in (node.input[0], node.output[0]))


def _magnitudes(
    folder: Path,
    graphs: GraphSet,
    recipe: Mapping[str, str],
    solver: Solver,
    runs: Iterable[tuple[ModelInputs, np.ndarray]],
) -> tuple[dict[str, float], int]:
    """Run the graphs over observations to measure the largest magnitude of each tensor.

    Returns:
        "stage:tensor" -> largest magnitude, and the number of runs.
    """
    import onnx

    helper, count = onnx.helper, 0
    with scratch.beside(folder) as watched:
        for stage in STAGES:
            model = onnx.load(str(folder / f"{stage}.onnx"))
            graph = model.graph
            for name in _activations(_products(graph, recipe)):
                size, most = f"{name}.magnitude", f"{name}{LARGEST}"
                graph.node.append(helper.make_node("Abs", [name], [size]))
                graph.node.append(helper.make_node("ReduceMax", [size], [most], keepdims=0))
                graph.output.append(helper.make_tensor_value_info(most, onnx.TensorProto.FLOAT, ()))
            save_graph(model, watched / f"{stage}.onnx")
        for steps in graphs.steps:
            shutil.copyfile(table_path(folder, steps), table_path(watched, steps))
        graphs.save(watched)
        engine = WatchedEngine(watched, solver)
        for inputs, noise in runs:
            engine.run(inputs.batched(), noise[None], graphs.steps[0])
            count += 1
    return engine.largest, count


def _put_pairs(graph: Any, products: Sequence[Any], scales: Mapping[str, float], bits: int) -> None:
    """Put pairs of QuantizeLinear and DequantizeLinear around products of a graph, in place.

    Args:
        graph: The ONNX graph.
        products: The nodes that get pairs.
        scales: The scale of each activation, by the activation's name.
        bits: Bits of the weights.
    """
    from onnx import helper, numpy_helper

    constants = {tensor.name: tensor for tensor in graph.initializer}
    added: dict[str, np.ndarray] = {"zero.int8": np.zeros((), np.int8)}
    chosen = {node.output[0] for node in products}
    paired: dict[str, str] = {}  # key: name of a tensor; value: name of its copy after the pair
    nodes: list[Any] = []

    def pair(name: str, made: str, scale: float) -> None:
        added[f"{name}.scale"] = np.array(scale, np.float32)
        parameters = [f"{name}.scale", "zero.int8"]
        nodes.append(helper.make_node(PAIR[0], [name, *parameters], [f"{name}.int8"]))
        nodes.append(helper.make_node(PAIR[1], [f"{name}.int8", *parameters], [made]))

    def stored(name: str, values: np.ndarray, scale: np.ndarray, axis: int) -> str:
        added[name], added[f"{name}.scale"] = values, scale
        added[f"{name}.zeros"] = np.zeros(len(scale), values.dtype)
        inputs = [name, f"{name}.scale", f"{name}.zeros"]
        nodes.append(helper.make_node(PAIR[1], inputs, [f"{name}.wide"], axis=axis))
        return f"{name}.wide"

    for node in list(graph.node):
        if node.output[0] not in chosen:
            nodes.append(node)
            continue
        activation, weight, out = node.input[0], node.input[1], node.output[0]
        step = scales[activation]
        if activation not in paired:
            pair(activation, f"{activation}.paired", step)
            paired[activation] = f"{activation}.paired"
        values = numpy_helper.to_array(constants[weight])
        turned = any(each.name == "transB" and each.i for each in node.attribute)
        axis = 0 if node.op_type == "Conv" or turned else 1  # axis of the weight that has the output channels
        rows = values.reshape(len(values), -1) if axis == 0 else values.T  # [channels, K]
        bias = node.input[2] if len(node.input) > 2 and node.input[2] in constants else ""
        offset = numpy_helper.to_array(constants[bias]).reshape(-1) if bias else np.zeros(1, np.float32)
        # A bias is stored as an integer in units of the sum's scale. No scale may be so small that this integer exceeds
        # 32 bits.
        codes, weight_scales = round_weights(rows.T, bits, np.abs(offset) / (step * 2**30))
        shaped = codes.T.reshape(values.shape) if axis == 0 else codes
        node.input[0] = paired[activation]
        node.input[1] = stored(f"{out}.weight", np.ascontiguousarray(shaped), weight_scales, axis)
        if bias:
            sums = np.broadcast_to(
                np.rint(offset / (step * weight_scales.astype(np.float64))), weight_scales.shape
            )
            node.input[2] = stored(
                f"{out}.bias", sums.astype(np.int32), (step * weight_scales).astype(np.float32), 0
            )
        node.output[0] = f"{out}{PRODUCT}"
        nodes.append(node)
        pair(node.output[0], out, scales[out])
        paired[out] = out
    constants.clear()
    replace_nodes(graph, nodes, added)
