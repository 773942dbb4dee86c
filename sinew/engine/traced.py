"""Convert contexts and indices of a PyTorch model to arrays, for traces."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from sinew.layers.linear import Embedding
from sinew.models.base import Context


def as_array(tensor: Tensor) -> np.ndarray:
    """Return a copy of the tensor on the host. Floats become float32, and other dtypes stay."""
    wide = tensor.detach().float() if tensor.is_floating_point() else tensor.detach()
    return np.array(wide.cpu().numpy())


def named_arrays(context: Context) -> dict[str, np.ndarray]:
    """Return all tensors of a context as arrays, by their paths in the context."""
    leaves, _ = pytree.tree_flatten_with_path(context)
    return {".".join(map(place, path)): as_array(leaf) for path, leaf in leaves if isinstance(leaf, Tensor)}


def place(entry: Any) -> str:
    """Return one element of a path into a context as text: a field's name, an index or a key."""
    for attribute in ("name", "idx", "key"):
        if hasattr(entry, attribute):
            return str(getattr(entry, attribute))
    raise TypeError(
        f"context: expected named tuples, tuples, lists and dicts, got an object of type {type(entry).__name__}"
    )


@contextmanager
def recorded_rows(model: nn.Module, found: dict[str, np.ndarray]) -> Iterator[dict[str, np.ndarray]]:
    """Record the indices with which embedding tables are read inside the ``with`` block.

    Args:
        model: The model.
        found: A dict to which the function adds the indices of each module, int64 [n], by the module's name.
    """

    def note(name: str):  # type: ignore[no-untyped-def]
        def hook(_: nn.Module, arguments: tuple[Tensor, ...]) -> None:
            found[name] = as_array(arguments[0].to(torch.int64)).reshape(-1)

        return hook

    tables = [(name, module) for name, module in model.named_modules() if isinstance(module, Embedding)]
    handles = [module.register_forward_pre_hook(note(name)) for name, module in tables]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
