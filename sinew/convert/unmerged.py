"""Write a LoRA adapter as a file without the weights of its base. The file contains only the adapter's changes, in
the names and the layout of the base's bundle.

A family's reader renames, splits and joins weights for the bundle. It also transforms the weights that an adapter
changed (``adapter.py``). If such a transform T only moves rows, then

    T(W + scale * B A) = T(W) + T(scale * B) A,

which is the same product with moved rows of B. If the base joins queries, keys and values into one weight, the
factors of the three parts are placed side by side. To check that T only moves rows, both sides are computed and
compared.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from sinew.bundle.adapter import LORA_A, LORA_B, weights_hash
from sinew.bundle.quant import WEIGHT
from sinew.bundle.schema import AdapterBase
from sinew.bundle.writer import Progress, TensorSource
from sinew.convert.adapter import Changed
from sinew.convert.read.elements import BF16, ELEMENTS
from sinew.convert.tensors import Transformed, constant, read_array, read_elements
from sinew.core import ConvertError

AS_ONE = "merge it into its base instead: omit --no-merge"


class Unmerged(NamedTuple):
    """The result of :func:`unmerge`.

    Attributes:
        tensors: The tensors of the adapter's file.
        base: The identity of the base that the adapter was trained on.
    """

    tensors: dict[str, TensorSource]
    base: AdapterBase


def unmerge(
    tensors: Mapping[str, TensorSource], name: str, tokenizer: str, progress: Progress | None = None
) -> Unmerged:
    """Separate the changes of an adapter from the tensors of a conversion. Return them with the identity of the
    adapter's base. The whole base is read to compute its hash.

    Args:
        tensors: The conversion's tensors.
        name: Name of the base, for messages about the adapter's file.
        tokenizer: The tokenizer.
        progress: Called with the number of bytes that were just read.

    Raises:
        ConvertError: The adapter changes no weight, or a change cannot be separated from the base.
    """
    changes: dict[str, TensorSource] = {}
    for each, source in tensors.items():
        leaves = list({id(leaf): leaf for leaf in _changes(source)}.values())
        if not leaves:
            continue
        if all(leaf.factors is None for leaf in leaves):
            changes[each] = source
            continue
        if not each.endswith(WEIGHT) or any(leaf.factors is None for leaf in leaves):
            raise ConvertError(
                f"{source.name}: the adapter replaces a whole part of {each}, so it cannot be stored separately;"
                f" {AS_ONE}"
            )
        down, up = _factors(each, source, leaves)
        module = each.removesuffix(WEIGHT)
        changes[module + LORA_A], changes[module + LORA_B] = (
            constant(module + LORA_A, down),
            constant(module + LORA_B, up),
        )
    if not changes:
        raise ConvertError("--no-merge: expected an adapter with --base, got a whole model; omit --no-merge")
    hashes = {each: _unchanged(source).sha256(progress) for each, source in tensors.items()}
    return Unmerged(
        changes, AdapterBase(name, weights_hash(hashes), hashlib.sha256(tokenizer.encode()).hexdigest())
    )


def _changes(source: TensorSource) -> Iterator[Changed]:
    if isinstance(source.data, Changed):
        yield source.data
    elif isinstance(source.data, Transformed):
        for each in source.data.inputs:
            yield from _changes(each)


def _factors(name: str, source: TensorSource, leaves: list[Changed]) -> tuple[np.ndarray, np.ndarray]:
    """Return A [r, inputs] and B [outputs, r] of all changes of one weight. B is multiplied by the scale."""
    downs, ups = [], []
    for leaf in leaves:
        assert leaf.factors is not None
        down, up = read_array(leaf.factors[0]), np.float32(leaf.factors[2]) * read_array(leaf.factors[1])
        try:
            moved, whole = _moved(source, leaf, up, down.shape[0]), _moved(source, leaf, up @ down, None)
        except (ValueError, IndexError):
            moved, whole = np.empty(()), np.empty(())
        if moved.shape != (source.shape[0], len(down)) or whole.shape != source.shape:
            raise ConvertError(
                f"{source.name}: the conversion to {name} does more than move rows, so the adapter cannot be stored"
                f" separately; {AS_ONE}"
            )
        largest = float(np.abs(whole).max(initial=0.0))
        if not np.allclose(moved @ down, whole, rtol=0, atol=1e-5 * largest):
            raise ConvertError(
                f"{source.name}: the conversion to {name} changes the weight's values, so the adapter cannot be stored"
                f" separately; {AS_ONE}"
            )
        downs.append(down)
        ups.append(moved)
    return np.concatenate(downs), np.concatenate(ups, axis=1)


def _moved(source: TensorSource, leaf: Changed, values: np.ndarray, width: int | None) -> np.ndarray:
    """Apply the conversion's transforms with ``values`` in place of one changed weight, and with zeros for all other
    weights.

    Args:
        source: The tensor of the bundle.
        leaf: The changed weight.
        values: The array that is used in place of the changed weight.
        width: Number of columns of ``values`` if it differs from that of the weight; None if it is the same.
    """
    if source.data is leaf:
        if source.shape != leaf.base.shape:
            raise ValueError(f"expected shape {list(leaf.base.shape)}, got {list(source.shape)}")
        return values
    if isinstance(source.data, Transformed):
        # This transform rounds a merged weight to bfloat16 (`rounded` in tensors.py). Factors are not rounded.
        if source.type is BF16 and source.data.read is read_array:
            return _moved(source.data.inputs[0], leaf, values, width)
        parts = (_moved(each, leaf, values, width) for each in source.data.inputs)
        return np.asarray(source.data.transform(*parts))
    return np.zeros(source.shape if width is None else (source.shape[0], width), np.float32)


def _unchanged(source: TensorSource) -> TensorSource:
    """Return the tensor with the values of the base, as if there were no adapter."""
    data = source.data
    if isinstance(data, Changed):
        kind = data.base.type
        return replace(source, type=kind, nbytes=data.base.nbytes, data=data.base.data)
    if not isinstance(data, Transformed):
        return source
    inputs = tuple(map(_unchanged, data.inputs))
    if all(new is old for new, old in zip(inputs, data.inputs, strict=True)):
        return source
    kind = inputs[0].type if data.read is read_elements else source.type
    nbytes = math.prod(source.shape) * ELEMENTS[kind].itemsize
    return replace(source, type=kind, nbytes=nbytes, data=replace(data, inputs=inputs))
