"""Reshapes whose target is a constant, where the exporter computes it.

With two axes left open, the batch and the prompt's length, the exporter reads sizes off tensors and puts the shape of
nearly every reshape together from them: nodes that cost a small policy's step several per cent. ONNX's reshape can say
the same in constants: 0 copies the size of the input's axis at that place, and one -1 is what remains.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


def constant_target(
    source: Sequence[int | str | None], target: Sequence[int | str | None]
) -> list[int] | None:
    """Return what ONNX's reshape takes for ``source -> target``, None if constants cannot say it.

    Sizes are numbers, or expressions as text that are equal where the sizes are; None is a size that nobody knows.
    """
    found = []
    for place, size in enumerate(target):
        if isinstance(size, int):
            found.append(size)
        elif size is not None and place < len(source) and source[place] == size:
            found.append(0)
        else:
            found.append(-1)
    return None if found.count(-1) > 1 or 0 in (*source, *target) else found


def constant_targets(model: Any) -> int:
    """Give the reshapes of an exported graph (``onnxscript.ir.Model``) constant targets, in place, and drop what only
    computed them. Returns their number."""
    from onnxscript import ir
    from onnxscript.optimizer import remove_unused_nodes

    graph, made = model.graph, {}
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
        if key not in made:
            name = "reshape." + ".".join(map(str, key))
            value = ir.Value(name=name, const_value=ir.tensor(np.array(key, np.int64), name=name))
            graph.register_initializer(value)
            made[key] = value
        node.replace_input_with(1, made[key])
        node.attributes["allowzero"] = ir.AttrInt64("allowzero", 0)
        count += 1
    remove_unused_nodes(model)
    return count


def _sizes(shape: Any) -> list[int | str | None]:
    return [size if isinstance(size, int) else size.value for size in shape]
