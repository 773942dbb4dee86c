"""Run operators on the meta device with a cache of result shapes.

For most operators, torch computes the shapes in Python, which takes half a millisecond. A model runs the same layer
thirty times, so the cache uses the result of the last call with equal shapes.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

# Maximum number of cached calls, about a hundred programs. A full cache is emptied.
ENTRIES = 1 << 15
PLAIN = (Tensor, torch.nn.Parameter)

Layout = tuple[torch.Size, tuple[int, ...], torch.dtype]
# A value of None marks a call that must run every time, because its result cannot be cached.
_layouts: dict[Hashable, tuple[Layout, ...] | None] = {}


class _UnknownError(Exception):
    """Raised if the shape and dtype of an operand do not determine the shape of the result."""


def run(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return ``func(*args, **kwargs)`` for an ATen overload, as a dispatch mode receives it.

    New tensors on the meta device have no values, so equal operands give equal results. The operator really runs for
    operands on other devices, for views, for operators that write into their operands, and for results that are not
    new tensors.
    """
    try:
        key = (func, _signature(args), _signature(tuple(kwargs.items())) if kwargs else ())
        layouts = _layouts.get(key, ())
    # An argument that cannot be hashed raises TypeError.
    except (_UnknownError, TypeError):
        return func(*args, **kwargs)
    if layouts:
        made = [
            torch.empty_strided(size, stride, dtype=dtype, device="meta") for size, stride, dtype in layouts
        ]
        return made[0] if len(made) == 1 else tuple(made)
    out = func(*args, **kwargs)
    if layouts is not None:
        if len(_layouts) >= ENTRIES:
            _layouts.clear()
        _layouts[key] = _layout(func, args, kwargs, out)
    return out


def _signature(values: Sequence[Any]) -> tuple[Hashable, ...]:
    """Return the properties of operands that determine the shapes of a result.

    Raises:
        _UnknownError: Other properties matter too.
    """
    found: list[Hashable] = []
    for value in values:
        if isinstance(value, Tensor):
            # A tensor without dimensions may represent a Python number, which has other rules of type promotion.
            if type(value) not in PLAIN or not value.is_meta or not value.dim() or value.is_complex():
                raise _UnknownError
            found.append((value.shape, value.stride(), value.dtype))
        elif isinstance(value, (list, tuple)):
            found.append((type(value), _signature(value)))
        else:
            # Include the type, because True, 1 and 1.0 are equal as keys.
            found.append((type(value), value))
    return tuple(found)


def tensors(values: Iterable[Any]) -> list[Tensor]:
    """Return the tensors among the operands or the results of a call, including those in lists and tuples."""
    properties = []
    for value in values:
        if isinstance(value, Tensor):
            properties.append(value)
        elif isinstance(value, (list, tuple)):
            properties += tensors(value)
    return properties


def _layout(func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> tuple[Layout, ...] | None:
    """Return the layouts (shape, strides and dtype) of a call's results if all of them are new tensors that own their
    memory. Otherwise, return None.
    """
    made = out if type(out) is tuple else (out,)
    if func._schema.is_mutable or not made or torch.is_grad_enabled():  # noqa: SLF001
        return None
    if not all(type(tensor) is Tensor and tensor.is_meta for tensor in made):
        return None
    storages = [tensor.untyped_storage() for tensor in (*made, *tensors(args), *tensors(kwargs.values()))]
    keys = [storage._cdata for storage in storages]  # noqa: SLF001 - the identity of a storage
    layouts = []
    for tensor, storage, key in zip(made, storages, keys, strict=False):
        fresh = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        owns = tensor.storage_offset() == 0 and storage.nbytes() == fresh.untyped_storage().nbytes()
        # The result is a view. Some operators that return a view, such as _unsafe_view, do not declare it.
        if not owns or keys.count(key) > 1:
            return None
        layouts.append((tensor.shape, tensor.stride(), tensor.dtype))
    return tuple(layouts)
