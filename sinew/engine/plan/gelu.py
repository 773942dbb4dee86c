"""Compute the tanh form of GELU with the sigmoid function, which is faster on a CPU.

The formula is 0.5 x (1 + tanh(u)) = x sigmoid(2 u) with u = sqrt(2 / pi) (x + 0.044715 x^3), so the function is the
same. On a CPU, PyTorch's vectorised sigmoid is faster than its tanh. No other operation reads GELU's input, so the
input is overwritten block by block, while a block is in the cache.

This is faster only in float32 on a CPU. GELU stays one operator in these cases:

* on other devices, in a recorded program, and on tensors without memory
* if PyTorch must compute a derivative (real-time chunking with a Jacobian)
* for small tensors with several threads, because each of the six operators per block wakes the threads
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sinew.engine.plan.rewrite import Rewrite, Status, become, foreign, left_out, spans
from sinew.layers.decoder import GatedMLP
from sinew.layers.vit import ViTMLP

LINEAR = 2 * math.sqrt(2 / math.pi)
CUBIC = 0.044715 * LINEAR
BLOCK = 1 << 19  # elements of a block with one thread: 2 MiB, and 2 MiB for a temporary tensor
SHARED_BLOCK = 1 << 21  # elements of a block with several threads; benchmarks/gelu.py measures other sizes


def gelu_(x: Tensor) -> Tensor:
    """Compute GELU of x [..., N] in place. Rows may be strided, as in one half of a packed product."""
    if x.requires_grad or x.dtype != torch.float32 or x.device.type != "cpu" or torch.compiler.is_compiling():
        return F.gelu(x, approximate="tanh")
    alone = torch.get_num_threads() == 1
    if not alone and x.numel() < SHARED_BLOCK:
        return F.gelu(x, approximate="tanh")
    rows = x.view(-1, x.shape[-1])
    for block in rows.split(max(1, (BLOCK if alone else SHARED_BLOCK) // x.shape[-1])):
        gate = block * block
        block.mul_(gate.mul_(CUBIC).add_(LINEAR).mul_(block).sigmoid_())
    return x


class SigmoidMLP(ViTMLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(gelu_(self.fc1(x)))


def _sigmoid_gelu(model: Any) -> tuple[Status, str, tuple[str, ...]]:
    names, skipped = [], {}
    for name, module in list(model.named_modules()):
        if unknown := foreign(module, ViTMLP) or foreign(module, GatedMLP):
            skipped[name] = unknown
            continue
        if isinstance(module, ViTMLP) and module.approximate != "tanh":
            skipped[name] = "GELU in its exact form"
            continue
        if isinstance(module, ViTMLP):
            become(module, SigmoidMLP)
        elif isinstance(module, GatedMLP) and module.kind == "gelu_tanh":
            module.activation = gelu_  # type: ignore[assignment]
        else:
            continue
        names.append(name)
    if not names:
        return "not applicable", "no layer computes GELU in its tanh form" + left_out(skipped), ()
    reason = (
        "the sigmoid form gives the same function and is faster in float32 on a CPU; small tensors and recorded"
        " programs keep one operator"
    )
    return "applied", reason + left_out(skipped), spans(names)


SIGMOID_GELU = Rewrite(
    "sigmoid-gelu", "GELU is computed by a sigmoid, in the memory of its input", _sigmoid_gelu
)
