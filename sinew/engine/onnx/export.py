"""Record the rewritten model (the plan) with ``torch.export``, and write ONNX graphs.

The batch and the prompt's length are dynamic in all graphs, and the number of views in the vision graph. The solver's
loop is not part of a graph. With ten steps in the graph, it had nine thousand nodes and took minutes to export.
"""

from __future__ import annotations

import contextlib
import gc
import io
import logging
import re
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sinew_client.documentation import page
from torch import Tensor, nn
from torch.export import Dim

from sinew.core import SinewError
from sinew.core.extras import MissingPackageError
from sinew.engine.clone import clone_model
from sinew.engine.example import Inputs, Shapes
from sinew.engine.onnx.graphs import COMPONENT, GraphSet, renewed, table_path
from sinew.engine.plan.plan import REWRITES, Plan
from sinew.engine.plan.rewrite import RewriteOutcome, become, foreign, left_out, spans
from sinew.engine.plan.stages import Vision, stages
from sinew.layers.stores.codes import codes_of
from sinew.layers.vit import ViTAttention
from sinew.models.base import AutoregressiveModel, Model

log = logging.getLogger(__name__)
OPSET = 20  # the first operator set with GELU as one operator
# The rewrites that make ONNX Runtime faster. ONNX Runtime copies the parts out of a packed product, which costs more
# than the larger product saves. It already computes GELU by one operator (docs/plan.md has the numbers).
ON_ONNX = tuple(name for name in REWRITES if name not in ("pack-qkv", "pack-gate-up", "sigmoid-gelu"))
# The largest batch that the shape analysis of the export assumes. The finished graph has no such limit.
MOST_BATCHED = 64
PROMPT = 7  # The example's prompt has this number of tokens. No other size of the model may be equal to it.


@torch.no_grad()
def export_graphs(
    plan: Plan,
    directory: Path,
    *,
    architecture: str,
    views: int,
    height: int,
    width: int,
    steps: Sequence[int],
) -> GraphSet:
    """Write ``vision.onnx``, ``read.onnx`` and ``step.onnx`` with their weights, and the tables of time embeddings.

    Args:
        plan: The planned model.
        directory: The folder.
        architecture: Name of the architecture.
        views: Number of views of the largest observation.
        height: Height of the model's input in pixels.
        width: Width of the model's input in pixels.
        steps: Numbers of solver steps for which a table of time embeddings is written.

    Returns:
        The record of the export.
    """
    try:
        import onnx  # noqa: F401 - torch.onnx needs both and says so less clearly
        import onnxscript  # noqa: F401
    except ImportError:
        raise MissingPackageError("the export", "onnxscript") from None
    if ternary := [name for name, module in plan.model.named_modules() if codes_of(module)]:
        raise SinewError(
            f"engine onnx: no ONNX operator computes ternary weights, as in {ternary[0]} and"
            f" {len(ternary) - 1} more layers; use engine eager, plan, cpu or cuda"
        )
    directory.mkdir(parents=True, exist_ok=True)
    model, shapes = plan.model, Shapes(views, height, width, PROMPT, next(iter(steps)))
    vision, read, step, reads, said, grows, batch_axes, unbatched = stages(plan, shapes)
    if unbatched:
        log.info(
            "the graphs compute one observation at a time, because tensor %s has no separate batch axis",
            unbatched,
        )
    # Use two observations, because torch.export treats a dynamic axis of length 1 as a constant.
    count = 1 if unbatched else 2
    example = Inputs.example(model, shapes, batch=count)
    inputs = (vision(example.pixels), *example[1:])
    batch = Dim("batch", min=1, max=MOST_BATCHED)
    several: dict[int, Any] = {} if unbatched else {0: batch}

    any_views: dict[str, Any] = {"pixels": several | _any_views(model, views)}
    recorded = clone_model(model)
    joined = join_attention(recorded)
    log.info("%s: %s, %s", joined.name, joined.status, joined.reason)
    component = model.component_of
    names = ["pixels"], ["image_tokens"]
    _write(Vision(recorded), example[:1], any_views, *names, directory / "vision.onnx", component)
    length = several | {1: Dim("length", min=model.min_tokens, max=1 << 14)}
    input_names = ["image_tokens", *Inputs._fields[1:]]
    axes: dict[str, Any] = dict(zip(input_names, (several, several, length, length, several), strict=True))
    _write(read, inputs, axes, input_names, list(reads), directory / "read.onnx", component)
    prefix = Dim("prefix", min=2, max=1 << 15)
    context = read(*inputs)
    growing = [{g[0]: prefix + g[1] if g[1] else prefix} if g else {} for g in grows]
    tensors = tuple(
        axes | ({axis: batch} if several and axis is not None else {})
        for axes, axis in zip(growing, batch_axes, strict=True)
    )
    if isinstance(model, AutoregressiveModel):
        names = list(reads), [renewed(name) for name in said]
        _write(step, context, {"tensors": tensors}, *names, directory / "step.onnx", component)
    else:
        axes = {"x": several, "time_embedding": None, "tensors": tensors}
        sample = (
            torch.zeros(count, *model.noise_shape),
            plan.time_embeddings(next(iter(steps)))[0],
            *context,
        )
        names = ["x", "moment", *reads], ["output"]
        _write(step, sample, axes, *names, directory / "step.onnx", component)
    write_tables(plan, directory, steps)
    speaks = (model.action_tokens,) if isinstance(model, AutoregressiveModel) else ()
    record = GraphSet(architecture, views, reads, tuple(steps), plan.applied, said=said, speaks=speaks)
    record.save(directory)  # save the record last, because a folder without it is an interrupted export
    return record


def _any_views(model: Model, views: int) -> dict[int, Any]:
    """Return the setting for ``torch.export`` that makes the axis of views dynamic; {} if the number of views is
    fixed.
    """
    if model.moments is not None:
        most, each = model.moments
        moments = Dim("moments", min=1, max=most)
        return {1: each * moments if each > 1 else moments}
    return {1: Dim.DYNAMIC} if views > 1 and model.views is None else {}


@torch.no_grad()
def write_tables(plan: Plan, directory: Path, steps: Sequence[int]) -> None:
    """Write the time embeddings for each number of solver steps, one row per step."""
    for count in steps:
        table = torch.cat(plan.time_embeddings(count)).float().numpy()
        np.save(table_path(directory, count), table, allow_pickle=False)


def _write(
    stage: nn.Module,
    arguments: tuple[Tensor, ...],
    shapes: dict[str, Any],
    inputs: list[str],
    outputs: list[str],
    path: Path,
    component_of: Callable[[str], str],
) -> None:
    quiet = {name: logging.getLogger(name) for name in ("torch.onnx", "onnx_ir", "onnxscript")}
    levels = {name: each.level for name, each in quiet.items()}
    for each in quiet.values():
        each.setLevel(logging.ERROR)
    collecting = gc.isenabled()
    # Switch the garbage collector off, which saves a sixth of the time. The exporter makes millions of objects, and few
    # of them become garbage.
    gc.disable()
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")  # hides the exporter's own deprecation warnings
            program = torch.export.export(
                stage,
                arguments,
                dynamic_shapes=shapes,
                strict=False,
                # Sizes that the shape analysis cannot prove to be equal are checked when the program runs.
                prefer_deferred_runtime_asserts_over_guards=True,
            )
            graph = torch.onnx.export(
                program,
                dynamo=True,
                opset_version=OPSET,
                input_names=inputs,
                output_names=outputs,
                verbose=False,
            )
            assert graph is not None
            constant_targets(graph.model)
            _compute_outputs(graph.model)
            _label(graph.model, path.stem, component_of)
            graph.save(str(path), external_data=True)
    except RuntimeError as error:
        # RuntimeError is also the base class of the errors that torch's tracer raises.
        why = " ".join(str(error).split())[:400]
        raise SinewError(
            f"engine onnx: stage {path.stem}: expected shapes that depend on the sizes of batch, prompt and views only"
            f" (see {page('adding-a-model')}), got {why}"
        ) from error
    finally:
        if collecting:
            gc.enable()
        for name, each in quiet.items():
            each.setLevel(levels[name])


def _compute_outputs(model: Any) -> None:
    """Add a node for each output of a graph that is a stored constant.

    OpenVINO does not open a graph with an output that no node computes.
    """
    from onnxscript import ir

    graph = model.graph
    for at, stored in enumerate(graph.outputs):
        if not stored.is_initializer():
            continue
        name = stored.name
        del graph.initializers[name]
        stored.name = f"{name}.stored"
        graph.register_initializer(stored)
        output = ir.Value(name=name, shape=stored.shape, type=stored.type)
        graph.append(ir.Node("", "Identity", [stored], outputs=[output]))
        graph.outputs[at] = output


def _label(model: Any, stage: str, component_of: Callable[[str], str]) -> None:
    """Store each node's component in its metadata, and remove all other metadata.

    The exporter's stack traces and signatures are most of the file, and they name folders of this machine.
    """
    model.metadata_props.clear()
    model.graph.metadata_props.clear()
    for node in model.graph.all_nodes():
        scope = re.search(r"'model\.(\w+)", node.metadata_props.get("pkg.torch.onnx.name_scopes", ""))
        component = "vision" if stage == "vision" else component_of(scope[1] if scope else "")
        node.metadata_props.clear()
        node.metadata_props[COMPONENT] = component
        for value in node.outputs:
            value.metadata_props.clear()
    for value in (*model.graph.inputs, *model.graph.initializers.values()):
        value.metadata_props.clear()


class OneOperatorAttention(ViTAttention):
    """The attention of the vision tower, which the export records as a single operator of ONNX Runtime.

    The plain form has two products, a softmax over [H, L, L] scores between them, and copies that bring heads to the
    front. The operator reads queries, keys and values as the projections write them, and keeps a tile of scores in the
    cache. The operator supports no mask in this form, and as many key heads as query heads. The decoders' attention is
    therefore not changed.
    """

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # [B, L, C] each -> [B, L, C]
        return torch.onnx.ops.symbolic(
            "com.microsoft::MultiHeadAttention",
            (q, k, v),
            {"num_heads": q.shape[-1] // self.head_dim},
            dtype=q.dtype,
            shape=q.shape,
            version=1,
        )


def join_attention(model: nn.Module) -> RewriteOutcome:
    """Replace every plain attention of the vision tower in ``model`` by a single operator
    (:class:`OneOperatorAttention`), in place.
    """
    names, skipped = [], {}
    for name, module in model.named_modules():
        if unknown := foreign(module, ViTAttention):
            skipped[name] = unknown
        elif isinstance(module, ViTAttention):
            become(module, OneOperatorAttention)
            names.append(name)
    status, reason = (
        ("applied" if names else "not applicable"),
        "attention scores stay in the processor's cache",
    )
    return RewriteOutcome("one-operator-attention", status, reason + left_out(skipped), spans(names))  # type: ignore[arg-type]


def constant_target(
    source: Sequence[int | str | None], target: Sequence[int | str | None]
) -> list[int] | None:
    """Return the constants with which ONNX's Reshape converts the shape ``source`` to the shape ``target``; None if
    constants cannot express it.

    Args:
        source: Sizes of the input. A size is a number, an expression as text, or None if it is unknown. Equal
            expressions have equal sizes.
        target: Sizes of the output, in the same form.
    """
    constants = []
    for place, size in enumerate(target):
        if isinstance(size, int):
            constants.append(size)
        elif size is not None and place < len(source) and source[place] == size:
            constants.append(0)
        else:
            constants.append(-1)
    return None if constants.count(-1) > 1 or 0 in (*source, *target) else constants


def constant_targets(model: Any) -> int:
    """Give each Reshape node of an exported graph a constant target shape, in place, and remove the nodes that
    computed the shapes.

    With two dynamic axes, the batch and the prompt's length, the exporter reads sizes from tensors and assembles the
    shape of nearly every reshape from them. These nodes cost a small policy's step several per cent. ONNX's Reshape
    expresses the same in constants: 0 copies the size of the same axis of the input, and one -1 stands for all
    remaining values.

    Args:
        model: The graph, an ``onnxscript.ir.Model``.

    Returns:
        The number of changed reshapes.
    """
    from onnxscript import ir
    from onnxscript.optimizer import remove_unused_nodes

    graph, values = model.graph, {}
    count = 0
    for node in graph:
        if node.op_type != "Reshape" or node.inputs[1].is_initializer():
            continue
        source, result = node.inputs[0].shape, node.outputs[0].shape
        if source is None or result is None:
            continue
        target = constant_target(_sizes(source), _sizes(result))
        if target is None:
            continue
        key = tuple(target)
        if key not in values:
            name = "reshape." + ".".join(map(str, key))
            value = ir.Value(name=name, const_value=ir.tensor(np.array(key, np.int64), name=name))
            graph.register_initializer(value)
            values[key] = value
        node.replace_input_with(1, values[key])
        node.attributes["allowzero"] = ir.AttrInt64("allowzero", 0)
        count += 1
    remove_unused_nodes(model)
    return count


def _sizes(shape: Any) -> list[int | str | None]:
    return [size if isinstance(size, int) else size.value for size in shape]
