"""ONNX graphs without weights: ONNX Runtime reads the weights from a bundle.

Sinew contains such graphs for its built-in policies. A built-in policy therefore runs without torch, and without a
second copy of its weights.

* ``borrow`` (with onnx) removes the weights that are equal to tensors of the bundle from exported graphs.
* ``shipped`` finds the graphs that come with Sinew, by the content of the bundle.
* ``weights`` gives ONNX Runtime the tensors in the bundle's memory map, or float32 copies of bfloat16 tensors.

``shipped`` and ``weights`` need no torch.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from gguf import GGMLQuantizationType

from sinew.core import BundleError
from sinew.core.extras import MissingPackageError
from sinew.engine.onnx.cache import fingerprint
from sinew.engine.onnx.graphs import COMPONENT, STAGES, GraphSet

if TYPE_CHECKING:
    from sinew.bundle import Bundle

SHIPPED = Path(__file__).resolve().parents[2] / "assets" / "graphs"
SMALLEST = 16  # constants with fewer values, such as axes and scales, stay in the graph
# A stage may contain this many bytes of constants besides the bundle's weights, such as position tables and masks.
INLINE = 32 << 10


def shipped(bundle: Path) -> Path | None:
    """Return the folder of the graphs that come with Sinew for a bundle with this content; None if Sinew has none."""
    return next(SHIPPED.glob(f"*-{fingerprint(bundle)[:16]}"), None)


def shipped_folder(bundle: Path) -> Path:
    """Return the folder in which Sinew stores the graphs of a built-in policy."""
    return SHIPPED / f"{bundle.stem}-{fingerprint(bundle)[:16]}"


def floats(bundle: Bundle) -> dict[str, np.ndarray]:
    """Return the bundle's tensors as float32 arrays by name: views of the memory map, or copies of bfloat16."""
    arrays = {}
    for name, info in bundle.infos.items():
        if info.type is GGMLQuantizationType.F32:
            array = np.frombuffer(bundle.file.map, "<f4", info.nbytes // 4, info.offset)
        elif info.type is GGMLQuantizationType.BF16:
            halves = np.frombuffer(bundle.file.map, "<u2", info.nbytes // 2, info.offset)
            array = (halves.astype(np.uint32) << 16).view(np.float32)
        else:
            continue
        arrays[name] = array.reshape(info.shape)
    return arrays


def weights(bundle: Bundle, graphs: GraphSet, directory: Path) -> dict[str, dict[str, np.ndarray]]:
    """Return the bundle's tensors that each graph reads, as a dict: stage ("vision", "read", "step") -> name ->
    tensor.

    Raises:
        BundleError: The bundle lacks a tensor.
    """
    tensors = floats(bundle)
    if lacking := [name for names in graphs.borrows.values() for name in names if name not in tensors]:
        raise BundleError(
            f"{directory}: expected a bundle with the tensor {lacking[0]!r} and {len(lacking) - 1} others in float32 or"
            f" bfloat16, which {bundle.path} lacks; use the bundle that the graphs were exported from"
        )
    return {stage: {name: tensors[name] for name in names} for stage, names in graphs.borrows.items()}


def borrow(directory: Path, bundle: Bundle) -> GraphSet:
    """Remove the bundle's weights from the graphs of an export, in place. The export must be made without
    ``fold-norms``.

    A constant whose bits equal a tensor of the bundle, or its transpose, is replaced by the tensor's name.

    Args:
        directory: The folder of the export.
        bundle: The bundle.

    Returns:
        The new record of the export.

    Raises:
        BundleError: Constants other than rotary tables and masks are left.
    """
    try:
        import onnx
    except ImportError:
        raise MissingPackageError("graphs without weights", "onnx") from None
    tensors = floats(bundle)
    tensor_of = {(array.shape, array.tobytes()): (name, False) for name, array in tensors.items()}
    for name, array in tensors.items():
        if array.ndim == 2:
            tensor_of.setdefault((array.T.shape, array.T.tobytes()), (name, True))
    borrows = {}
    for stage in STAGES:
        path = directory / f"{stage}.onnx"
        model = onnx.load(str(path))
        borrows[stage] = _borrow(model, tensor_of, tensors)
        nbytes = sum(len(constant.raw_data) for constant in model.graph.initializer)
        if nbytes > INLINE:
            raise BundleError(
                f"{path}: expected at most {INLINE} bytes of constants besides the bundle's weights, got {nbytes}"
            )
        onnx.save_model(model, str(path))
        path.with_suffix(".onnx.data").unlink()
    record = replace(GraphSet.load(directory), borrows=borrows)
    record.save(directory)
    return record


def _borrow(
    model: Any, known: dict[Any, tuple[str, bool]], tensors: dict[str, np.ndarray]
) -> tuple[str, ...]:
    """Replace constants of one graph by the names of equal tensors of the bundle.

    Args:
        model: The ONNX model.
        known: Maps an array's shape and bytes to the name of a tensor, and to True if the array is the tensor's
            transpose.
        tensors: The bundle's tensors by name.

    Returns:
        The names of the tensors that the graph now borrows.
    """
    from onnx import TensorProto, helper, numpy_helper

    graph = model.graph
    users = {name: node for node in graph.node for name in node.input}
    renamed, transposes, initializers, names = {}, [], [], dict[str, None]()
    for constant in graph.initializer:
        array = numpy_helper.to_array(constant)
        match = known.get((array.shape, array.tobytes())) if array.size >= SMALLEST else None
        if match is None or array.dtype != np.float32:
            initializers.append(numpy_helper.from_array(array, constant.name))
            continue
        name, transposed = match
        names[name] = None
        if not transposed:
            renamed[constant.name] = name
            continue
        turn = helper.make_node("Transpose", [name], [constant.name], perm=[1, 0])
        turn.metadata_props.extend(
            each for each in users[constant.name].metadata_props if each.key == COMPONENT
        )
        transposes.append(turn)
    nodes = [*transposes, *graph.node]
    for node in nodes:
        node.name = ""
        node.input[:] = [renamed.get(name, name) for name in node.input]
    for name in names:
        proto = TensorProto(name=name, dims=tensors[name].shape, data_type=TensorProto.FLOAT)
        proto.data_location = TensorProto.EXTERNAL
        proto.external_data.add(key="location", value="the bundle")
        initializers.append(proto)
    for field, values in (("node", nodes), ("initializer", initializers), ("value_info", [])):
        values = [type(value).FromString(value.SerializeToString()) for value in values]
        graph.ClearField(field)
        getattr(graph, field).extend(values)
    return tuple(names)
