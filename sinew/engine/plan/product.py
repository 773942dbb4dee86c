"""A small product with PyTorch, which :mod:`sinew.engine.measured` times."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from sinew.engine.measured import ROWS, WIDTH
from sinew.layers.stores.half import product as half_product

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def torch_product(dtype: str, storage: str) -> Callable[[], object] | None:
    """Return a function that computes a small product with PyTorch, or None for a mixture of precisions.

    Args:
        dtype: Precision of weights and activations, such as "bf16".
        storage: Half precision of weights that are widened block by block, or "".
    """
    if (storage or dtype) not in DTYPES:
        return None
    weight = torch.full((WIDTH, WIDTH), 0.5, dtype=DTYPES[storage or dtype])
    if storage:
        wide = torch.full((ROWS, WIDTH), 0.5)
        return lambda: half_product(wide, weight)
    x = torch.full((ROWS, WIDTH), 0.5, dtype=DTYPES[dtype])
    return lambda: F.linear(x, weight)
