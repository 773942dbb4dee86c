"""Dynamic int8 for the matrix products of chosen components.

A product of activations with constant weights becomes one of 8-bit integers: weights are rounded once, per
output channel, symmetric; activations at run time, with one scale for the tensor (``DynamicQuantizeLinear``).
The pattern is that of ``onnxruntime.quantization.quantize_dynamic``, whose operators ONNX Runtime fuses. It is
written here because that function has no notion of components, copies the model through temporary files and
stops at shapes that torch.export leaves open.

On x86 without VNNI two products are added in 16 bits that saturate: weights of 7 bits there cannot reach them.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from sinew import machine
from sinew.core import SinewError
from sinew.engine.onnx.graphs import COMPONENT, COMPONENTS, STAGES, GraphSet, table_path

PRECISIONS = ("int8", "fp32")


def parse_recipe(text: str) -> dict[str, Any]:
    """``"vision=int8,language=int8"`` -> one precision for every component; fp32 where the text says nothing."""
    recipe = dict.fromkeys(COMPONENTS, "fp32")
    for part in text.split(","):
        component, _, precision = part.strip().partition("=")
        if component not in COMPONENTS:
            raise SinewError(f"recipe: expected a component of {', '.join(COMPONENTS)}, got {component!r}")
        if precision not in PRECISIONS:
            raise SinewError(f"recipe: {component}: expected {' or '.join(PRECISIONS)}, got {precision!r}")
        recipe[component] = precision
    return recipe


def weight_bits() -> tuple[int, str]:
    """Bits for int8 weights on this machine, and why."""
    flags = machine.cpu_flags()
    if any("vnni" in flag for flag in flags):
        return 8, "VNNI adds products in 32 bits"
    if "avx2" in flags:
        return 7, "without VNNI, 16-bit sums of 8-bit products saturate"
    return 8, "no instruction here saturates"


def quantize_graphs(source: Path, target: Path, recipe: Mapping[str, str], bits: int) -> GraphSet:
    """Write the graphs of ``source`` to ``target`` (which may be the same folder), quantised by ``recipe``."""
    try:
        import onnx
    except ImportError:
        raise SinewError("quantisation needs onnx: pip install 'sinew[onnx-export]'") from None
    graphs = GraphSet.load(source)
    if graphs.recipe:
        raise SinewError(f"{source}: expected graphs in float32, got {graphs.recipe}")
    target.mkdir(parents=True, exist_ok=True)
    chosen = {component for component, precision in recipe.items() if precision == "int8"}
    for stage in STAGES:
        model = onnx.load(str(source / f"{stage}.onnx"))
        names = [f"{stage}.onnx", f"{stage}.onnx.data"]
        if not _quantize(model, chosen, bits):
            if source != target:
                for name in names:
                    shutil.copyfile(source / name, target / name)
            continue
        # The writer appends to a file of weights that is there.
        (target / names[1]).unlink(missing_ok=True)
        onnx.save_model(
            model,
            str(target / names[0]),
            save_as_external_data=True,
            all_tensors_to_one_file=True,
            location=names[1],
            size_threshold=1024,
        )
    if source != target:
        for steps in graphs.steps:
            shutil.copyfile(table_path(source, steps), table_path(target, steps))
    record = GraphSet(
        **{name: getattr(graphs, name) for name in ("architecture", "views", "reads", "steps", "rewrites")},
        recipe=dict(recipe),
        method=f"dynamic, weights of {bits} bits per channel",
    )
    record.save(target)
    return record


def _quantize(model: Any, components: set[str], bits: int) -> bool:
    """Replace the constant matrix products of ``components``, in place; whether there were any."""
    from onnx import TensorProto, helper, numpy_helper

    graph = model.graph
    constants = {tensor.name: tensor for tensor in graph.initializer}
    quantized: set[str] = set()  # weights
    rounded: set[str] = set()  # activations that have been quantised
    nodes: list[Any] = []
    for node in graph.node:
        weight = constants.get(node.input[1]) if node.op_type == "MatMul" else None
        label = next((p.value for p in node.metadata_props if p.key == COMPONENT), "")
        if weight is None or len(weight.dims) != 2 or label not in components:
            nodes.append(node)
            continue
        name, activation = weight.name, node.input[0]
        if name not in quantized:
            values, scales = round_weights(numpy_helper.to_array(weight), bits)
            parts = {
                "int8": values,
                "scale": scales,
                "zero": np.zeros(len(scales), np.int8),
            }
            graph.initializer.extend(
                numpy_helper.from_array(array, f"{name}.{part}") for part, array in parts.items()
            )
            quantized.add(name)
        if activation not in rounded:
            parts_of = [f"{activation}.{part}" for part in ("uint8", "scale", "zero")]
            nodes.append(helper.make_node("DynamicQuantizeLinear", [activation], parts_of))
            rounded.add(activation)
        out = node.output[0]
        nodes += [
            helper.make_node("Mul", [f"{activation}.scale", f"{name}.scale"], [f"{out}.scale"]),
            helper.make_node(
                "MatMulInteger",
                [f"{activation}.uint8", f"{name}.int8", f"{activation}.zero", f"{name}.zero"],
                [f"{out}.int32"],
            ),
            helper.make_node("Cast", [f"{out}.int32"], [f"{out}.sum"], to=TensorProto.FLOAT),
            helper.make_node("Mul", [f"{out}.sum", f"{out}.scale"], [out]),
        ]
    del graph.node[:]
    graph.node.extend(nodes)
    read = {name for node in nodes for name in node.input} | {value.name for value in graph.output}
    kept = [tensor for tensor in graph.initializer if tensor.name in read]
    del graph.initializer[:]
    graph.initializer.extend(kept)
    return bool(quantized)


def round_weights(weights: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """float32 [K, N] -> int8 [K, N] and float32 scales [N], with ``weights ~ values * scales``."""
    largest = np.abs(weights).max(axis=0, initial=0.0)
    limit = (1 << (bits - 1)) - 1
    scales = np.where(largest > 0, largest / limit, 1.0).astype(np.float32)
    values = np.clip(np.rint(weights / scales), -limit, limit).astype(np.int8)
    return values, scales
