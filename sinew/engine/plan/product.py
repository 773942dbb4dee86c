"""One small matrix product with PyTorch. :mod:`sinew.engine.measured` times it to compare engines."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from sinew.engine.measured import ROWS, WIDTH
from sinew.layers.stores.half import product as half_product

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def torch_product(dtype: str, storage: str) -> Callable[[], object] | None:
    """Return a function that computes one small matrix product with PyTorch; None if the precisions are mixed.

    Args:
        dtype: Precision of weights and activations, such as "bf16".
        storage: The half precision of weights that are converted to float32 block by block, or "".
    """
    if (storage or dtype) not in DTYPES:
        return None
    weight = torch.full((WIDTH, WIDTH), 0.5, dtype=DTYPES[storage or dtype])
    if storage:
        wide = torch.full((ROWS, WIDTH), 0.5)
        return lambda: half_product(wide, weight)
    x = torch.full((ROWS, WIDTH), 0.5, dtype=DTYPES[dtype])
    return lambda: F.linear(x, weight)
