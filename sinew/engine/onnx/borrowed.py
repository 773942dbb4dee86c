"""Graphs that use the bundle's weights. They are shipped with the built-in policies, which so run without torch and
without a second copy of their numbers.

``borrow`` (with onnx) removes the weights from exported graphs that equal the bundle's tensors. ``shipped`` finds
such graphs by the content of the bundle. ``weights`` gives ONNX Runtime the tensors in the bundle's memory map, or as
float32 if they are stored in bfloat16. The last two need no torch.
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
SMALLEST = 16  # number of values; smaller constants, such as axes and scales, stay in the graph
# A stage may contain this many bytes of constants besides the bundle's weights, such as position tables and masks.
INLINE = 32 << 10


def shipped(bundle: Path) -> Path | None:
    """Return this package's folder of graphs for a bundle with this content; None without one."""
    return next(SHIPPED.glob(f"*-{fingerprint(bundle)[:16]}"), None)


def shipped_folder(bundle: Path) -> Path:
    """Return the folder for the graphs of a built-in policy."""
    return SHIPPED / f"{bundle.stem}-{fingerprint(bundle)[:16]}"


def floats(bundle: Bundle) -> dict[str, np.ndarray]:
    """Return the bundle's tensors in float32 by name: in its memory map, or widened from bfloat16."""
    found = {}
    for name, info in bundle.infos.items():
        if info.type is GGMLQuantizationType.F32:
            array = np.frombuffer(bundle.file.map, "<f4", info.nbytes // 4, info.offset)
        elif info.type is GGMLQuantizationType.BF16:
            halves = np.frombuffer(bundle.file.map, "<u2", info.nbytes // 2, info.offset)
            array = (halves.astype(np.uint32) << 16).view(np.float32)
        else:
            continue
        found[name] = array.reshape(info.shape)
    return found


def weights(bundle: Bundle, graphs: GraphSet, directory: Path) -> dict[str, dict[str, np.ndarray]]:
    """Return the tensors that each stage borrows, by name. Raises :class:`BundleError` for a bundle without them."""
    tensors = floats(bundle)
    if lacking := [name for names in graphs.borrows.values() for name in names if name not in tensors]:
        raise BundleError(
            f"{directory}: borrows {lacking[0]!r} and {len(lacking) - 1} more tensors that {bundle.path} has not in"
            " float32 or bfloat16"
        )
    return {stage: {name: tensors[name] for name in names} for stage, names in graphs.borrows.items()}


def borrow(directory: Path, bundle: Bundle) -> GraphSet:
    """Take the weights out of the graphs of an export without ``fold-norms``, in place; returns the new record.

    A constant that equals a tensor of the bundle, or its transpose, to the bit becomes that tensor by its name. Raises
    :class:`BundleError` where more than rotary tables and masks are left.
    """
    try:
        import onnx
    except ImportError:
        raise MissingPackageError("graphs without weights", "onnx") from None
    tensors = floats(bundle)
    known = {(array.shape, array.tobytes()): (name, False) for name, array in tensors.items()}
    for name, array in tensors.items():
        if array.ndim == 2:
            known.setdefault((array.T.shape, array.T.tobytes()), (name, True))
    borrows = {}
    for stage in STAGES:
        path = directory / f"{stage}.onnx"
        model = onnx.load(str(path))
        borrows[stage] = _borrow(model, known, tensors)
        kept = sum(len(constant.raw_data) for constant in model.graph.initializer)
        if kept > INLINE:
            raise BundleError(
                f"{path}: expected at most {INLINE} bytes of constants besides the bundle's, got {kept}"
            )
        onnx.save_model(model, str(path))
        path.with_suffix(".onnx.data").unlink()
    record = replace(GraphSet.load(directory), borrows=borrows)
    record.save(directory)
    return record


def _borrow(
    model: Any, known: dict[Any, tuple[str, bool]], tensors: dict[str, np.ndarray]
) -> tuple[str, ...]:
    """Replace constants of one graph by tensors of the bundle; returns their names."""
    from onnx import TensorProto, helper, numpy_helper

    graph = model.graph
    users = {name: node for node in graph.node for name in node.input}
    renamed, turned, kept, names = {}, [], [], dict[str, None]()
    for constant in graph.initializer:
        array = numpy_helper.to_array(constant)
        found = known.get((array.shape, array.tobytes())) if array.size >= SMALLEST else None
        if found is None or array.dtype != np.float32:
            kept.append(numpy_helper.from_array(array, constant.name))
            continue
        name, transposed = found
        names[name] = None
        if not transposed:
            renamed[constant.name] = name
            continue
        turn = helper.make_node("Transpose", [name], [constant.name], perm=[1, 0])
        turn.metadata_props.extend(
            each for each in users[constant.name].metadata_props if each.key == COMPONENT
        )
        turned.append(turn)
    nodes = [*turned, *graph.node]
    for node in nodes:
        node.name = ""
        node.input[:] = [renamed.get(name, name) for name in node.input]
    for name in names:
        lent = TensorProto(name=name, dims=tensors[name].shape, data_type=TensorProto.FLOAT)
        lent.data_location = TensorProto.EXTERNAL
        lent.external_data.add(key="location", value="the bundle")
        kept.append(lent)
    for field, values in (("node", nodes), ("initializer", kept), ("value_info", [])):
        values = [type(value).FromString(value.SerializeToString()) for value in values]
        graph.ClearField(field)
        getattr(graph, field).extend(values)
    return tuple(names)
