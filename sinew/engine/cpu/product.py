"""One small matrix product with the compiled kernels. :mod:`sinew.engine.measured` times it to compare engines."""

from __future__ import annotations

from collections.abc import Callable

import torch

from sinew.bundle.quant import FORMATS
from sinew.engine.cpu.kernels.library import extension
from sinew.engine.measured import ROWS, WIDTH
from sinew.layers.stores.lowbit import BF16_PANELS, lay_out, lowbit_linear


def compiled_product(kind: str) -> Callable[[], object]:
    """Return a function that computes one small matrix product with the compiled kernels.

    Args:
        kind: "bf16", or the name of a low-bit format (:data:`sinew.bundle.quant.FORMATS`).
    """
    x = torch.full((ROWS, WIDTH), 0.5)
    if kind == "bf16":
        laid = lay_out(torch.full((WIDTH, WIDTH), 0.5, dtype=torch.bfloat16))
        order = extension().halves or BF16_PANELS
        return lambda: lowbit_linear(x, laid, None, None, order)
    stored = FORMATS[kind]
    weight = torch.zeros(WIDTH, stored.row_bytes(WIDTH), dtype=torch.uint8)
    scale = None if stored.group else torch.ones(WIDTH)
    order = kind
    if kind == "int8" and (integers := extension().integers):
        weight, order = lay_out(weight, integers), integers
    return lambda: lowbit_linear(x, weight, scale, None, order)
