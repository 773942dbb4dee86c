"""Convert the matrix products of chosen components to int8, with scales that are computed at run time ("dynamic").

A product of activations with constant weights becomes a product of 8-bit integers. Weights are rounded once, per output
channel, symmetric about zero. Activations are rounded at run time, in one of two ways:

* "int8" gives a tensor of activations one scale. The pattern of operators is that of
  ``onnxruntime.quantization.quantize_dynamic``, which ONNX Runtime fuses. If a token has far larger activations than
  the other tokens, few of the 256 steps are left for the others.
* "int8-rows" gives every row, so every token, its own scale, symmetric about 128. The operators are not fused and take
  longer (research/log/measurements-engines.md compares both).

Sinew does not call ``quantize_dynamic``, because that function does not support components, copies the model through
temporary files and stops at shapes that torch.export leaves open.

On x86 without VNNI, two products are added in 16 bits that saturate. Weights of 7 bits cannot reach saturation.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from sinew.core import SinewError, machine
from sinew.core.extras import MissingPackageError
from sinew.engine.onnx.graphs import COMPONENT, ONE_SCALE, STAGES, GraphSet, table_path

# Fields of the record ``GraphSet`` that do not change when the graphs are quantised.
KEPT = (
    "architecture",
    "views",
    "reads",
    "steps",
    "rewrites",
    "said",
    "speaks",
)
OURS = ("int8", "int8-rows")  # the export converted weights of other low-bit formats to float32


def weight_bits() -> tuple[int, str]:
    """Return the number of bits for int8 weights on this machine, and the reason."""
    flags = machine.cpu_flags()
    if any("vnni" in flag for flag in flags):
        return 8, "VNNI adds products in 32 bits, so 8 bits are exact"
    if "avx2" in flags:
        return 7, "without VNNI, 16-bit sums of 8-bit products can saturate"
    return 8, "this CPU has no instruction that saturates"


def quantize_graphs(source: Path, target: Path, recipe: Mapping[str, str], bits: int) -> GraphSet:
    """Write quantised graphs of an export.

    Args:
        source: The folder of the float32 graphs.
        target: The folder for the new graphs, which may be the same folder.
        recipe: The precision of each component, by the component's name.
        bits: Bits of int8 weights.

    Returns:
        The record of the new graphs.
    """
    try:
        import onnx
    except ImportError:
        raise MissingPackageError("quantisation", "onnx") from None
    graphs = GraphSet.load(source)
    if graphs.recipe:
        raise SinewError(f"{source}: expected graphs in float32, got the recipe {graphs.recipe}")
    target.mkdir(parents=True, exist_ok=True)
    chosen = {component: precision for component, precision in recipe.items() if precision in OURS}
    if "fp8" in recipe.values():
        raise SinewError(
            "recipe: the ONNX engine does not support fp8; use engine cuda, or another precision"
        )
    for stage in STAGES:
        model = onnx.load(str(source / f"{stage}.onnx"))
        names = [f"{stage}.onnx", f"{stage}.onnx.data"]
        if not quantize_products(model, chosen, bits):
            if source != target:
                for name in names:
                    shutil.copyfile(source / name, target / name)
            continue
        if any(node.op_type == "DynamicQuantizeLinear" for node in model.graph.node):
            onnx.helper.set_model_props(model, {ONE_SCALE: "1"})
        save_graph(model, target / names[0])
    if source != target:
        for steps in graphs.steps:
            shutil.copyfile(table_path(source, steps), table_path(target, steps))
    record = GraphSet(
        **{name: getattr(graphs, name) for name in KEPT},
        recipe={part: kind if kind in OURS else "fp32" for part, kind in recipe.items()},
        method=f"dynamic, weights of {bits} bits per channel",
        bits=bits,
    )
    record.save(target)
    return record


def save_graph(model: Any, path: Path) -> None:
    """Write a graph, and its weights in a file next to it."""
    import onnx

    weights = path.with_suffix(".onnx.data")
    weights.unlink(missing_ok=True)  # onnx would append to an existing file
    onnx.save_model(
        model,
        str(path),
        save_as_external_data=True,
        all_tensors_to_one_file=True,
        location=weights.name,
        size_threshold=1024,
    )


def component_of(node: Any) -> str:
    """Return the component that a node of an export belongs to, or "" if its metadata has none."""
    return next((each.value for each in node.metadata_props if each.key == COMPONENT), "")


def quantize_products(model: Any, recipe: Mapping[str, str], bits: int) -> bool:
    """Convert the matrix products with constant weights to int8, in the components of ``recipe``, in place.

    Args:
        model: The ONNX model.
        recipe: The precision ("int8" or "int8-rows") of each component that is quantised.
        bits: Bits of int8 weights.

    Returns:
        True if the graph has such products.
    """
    from onnx import helper, numpy_helper

    graph = model.graph
    constants = {tensor.name: tensor for tensor in graph.initializer}
    readers = Counter(name for node in graph.node for name in node.input)
    added: dict[str, np.ndarray] = {}
    rounded: set[str] = set()  # names of the activations that are rounded already
    nodes: list[Any] = []
    for node in graph.node:
        weight = constants.get(node.input[1]) if node.op_type == "MatMul" else None
        precision = recipe.get(component_of(node))
        if weight is None or len(weight.dims) != 2 or precision is None:
            nodes.append(node)
            continue
        name, activation, out = weight.name, node.input[0], node.output[0]
        if f"{name}.int8" not in added:
            values, scales = round_weights(numpy_helper.to_array(weight), bits)
            zeros = np.zeros(len(scales), np.int8)
            added |= {f"{name}.int8": values, f"{name}.scale": scales, f"{name}.zero": zeros}
        readers[name] -= 1
        # Free each float32 weight at its last use, because two copies of gigabytes may not fit the memory.
        if not readers[name]:
            weight.ClearField("raw_data")
        by_rows = precision == "int8-rows"
        prefix = f"{activation}.rows" if by_rows else activation
        if prefix not in rounded:
            nodes += _round_rows(activation, prefix) if by_rows else _round_tensor(activation, prefix)
            rounded.add(prefix)
        nodes += (_product_of_rows if by_rows else _product)(prefix, name, out)
    if not added:
        return False
    added |= ROWS_CONSTANTS
    if "com.microsoft" not in {opset.domain for opset in model.opset_import}:
        model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    constants.clear()
    replace_nodes(graph, nodes, added)
    return True


def replace_nodes(graph: Any, nodes: list[Any], added: dict[str, np.ndarray]) -> None:
    """Replace all nodes of a graph, in place. Constants that the new nodes do not read are removed.

    Args:
        graph: The ONNX graph.
        nodes: The new nodes.
        added: New constants, by name. The function empties this dict, because a model of gigabytes may not fit the
            memory twice.
    """
    from onnx import numpy_helper

    del graph.node[:]
    graph.node.extend(nodes)
    read = {name for node in nodes for name in node.input} | {value.name for value in graph.output}
    for index in reversed(range(len(graph.initializer))):
        if graph.initializer[index].name not in read:
            del graph.initializer[index]
    for name in [name for name in added if name in read]:
        graph.initializer.append(numpy_helper.from_array(added.pop(name), name))


def _round_tensor(x: str, to: str) -> list[Any]:
    from onnx import helper

    return [helper.make_node("DynamicQuantizeLinear", [x], [f"{to}.uint8", f"{to}.scale", f"{to}.zero"])]


def _product(x: str, weight: str, out: str) -> list[Any]:
    from onnx import TensorProto, helper

    operands = [f"{x}.uint8", f"{weight}.int8", f"{x}.zero", f"{weight}.zero"]
    return [
        helper.make_node("Mul", [f"{x}.scale", f"{weight}.scale"], [f"{out}.scales"]),
        helper.make_node("MatMulInteger", operands, [f"{out}.int32"]),
        helper.make_node("Cast", [f"{out}.int32"], [f"{out}.sum"], to=TensorProto.FLOAT),
        helper.make_node("Mul", [f"{out}.sum", f"{out}.scales"], [out]),
    ]


ROWS_CONSTANTS: dict[str, np.ndarray] = {
    "rows.last": np.array([-1], np.int64),
    "rows.steps": np.array(1 / 127, np.float32),
    "rows.smallest": np.array(1e-30, np.float32),  # prevents a division by zero for a row of zeros
    "rows.one": np.array(1, np.float32),
    "rows.middle": np.array(128, np.uint8),
}


def _round_rows(x: str, to: str) -> list[Any]:
    """Return ONNX nodes that round activations to 8 bits with one scale per row.

    The input is x [..., K]. The results are uint8 [..., K], where 128 means zero, and scales [..., 1].
    """
    from onnx import helper

    return [
        helper.make_node("Abs", [x], [f"{to}.abs"]),
        helper.make_node("ReduceMax", [f"{to}.abs", "rows.last"], [f"{to}.largest"], keepdims=1),
        helper.make_node("Mul", [f"{to}.largest", "rows.steps"], [f"{to}.step"]),
        helper.make_node("Max", [f"{to}.step", "rows.smallest"], [f"{to}.scale"]),
        helper.make_node("Div", [x, f"{to}.scale"], [f"{to}.steps"]),
        helper.make_node("QuantizeLinear", [f"{to}.steps", "rows.one", "rows.middle"], [f"{to}.uint8"]),
    ]


def _product_of_rows(x: str, weight: str, out: str) -> list[Any]:
    """Return ONNX nodes for a product of int8 weights with activations that :func:`_round_rows` has rounded.

    The product's kernel applies the scales of columns. A second node applies the scales of rows.
    """
    from onnx import helper

    operands = [
        f"{x}.uint8",
        f"{weight}.int8",
        "rows.one",
        f"{weight}.scale",
        "rows.middle",
        f"{weight}.zero",
    ]
    return [
        helper.make_node("MatMulIntegerToFloat", operands, [f"{out}.sum"], domain="com.microsoft"),
        helper.make_node("Mul", [f"{out}.sum", f"{x}.scale"], [out]),
    ]


def round_weights(
    weights: np.ndarray, bits: int, least: np.ndarray | float = 0.0
) -> tuple[np.ndarray, np.ndarray]:
    """Round a weight, so that ``weights`` is approximately ``values * scales``.

    Args:
        weights: float32 [K, N].
        bits: Bits of the integers.
        least: The least scale, a number or [N].

    Returns:
        values, int8 [K, N], and scales, float32 [N].
    """
    limit = (1 << (bits - 1)) - 1
    least_scales = np.maximum(np.abs(weights).max(axis=0, initial=0.0) / limit, least)
    scales = np.where(least_scales > 0, least_scales, 1.0).astype(np.float32)
    values = np.clip(np.rint(weights / scales), -limit, limit).astype(np.int8)
    return values, scales
