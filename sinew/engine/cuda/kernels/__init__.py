"""Triton kernels of the CUDA engine, each beside the PyTorch reference that defines it. ``docs/kernels.md`` lists them.

Weights are [out, in] as PyTorch's linear layers hold them, so a bundle's tensors are read where they are. Rows
of activations may be strided. Sums are float32, whatever the dtype. A launch allocates nothing when it is given
``out``, reads nothing on the host, and can be captured in a CUDA graph once it has run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sinew.engine.cuda.kernels import (
    activate,
    fp8_product,
    fp8_quantize,
    gated_mlp,
    norm_linear,
    packed_attention,
    preprocess,
    qkv_rope,
    rope,
    row_norm,
    splitk_linear,
)
from sinew.engine.cuda.kernels.launch import Launch, Tile
from sinew.engine.cuda.kernels.workspace import Workspace

__all__ = ["KERNELS", "Kernel", "Launch", "Tile", "Workspace"]


@dataclass(frozen=True, slots=True)
class Kernel:
    """``launch`` runs ``kernel`` on tensors, ``reference`` computes the same in PyTorch, ``prepare`` gives the launch
    as a value. ``benchmarks.gpu.shapes`` has the problems that the models put to it. ``capability``: the
    first compute capability (times ten) that has its instructions."""

    kernel: Any
    launch: Callable[..., Any]
    reference: Callable[..., Any]
    prepare: Callable[..., Launch]
    uses_tensor_cores: bool = True
    capability: int = 80


KERNELS: dict[str, Kernel] = {
    "norm_linear": Kernel(
        norm_linear.norm_linear_kernel, norm_linear.norm_linear, norm_linear.reference, norm_linear.prepare
    ),
    "gated_mlp": Kernel(
        gated_mlp.gated_mlp_kernel, gated_mlp.gated_mlp, gated_mlp.reference, gated_mlp.prepare
    ),
    "qkv_rope": Kernel(qkv_rope.qkv_rope_kernel, qkv_rope.qkv_rope, qkv_rope.reference, qkv_rope.prepare),
    "splitk_linear": Kernel(
        splitk_linear.splitk_linear_kernel,
        splitk_linear.splitk_linear,
        splitk_linear.reference,
        splitk_linear.prepare,
    ),
    "packed_attention": Kernel(
        packed_attention.packed_attention_kernel,
        packed_attention.packed_attention,
        packed_attention.reference,
        packed_attention.prepare,
    ),
    # Capability 80 holds for these two unless they write e4m3, which their ``prepare`` checks.
    "row_norm": Kernel(
        row_norm.row_norm_kernel, row_norm.row_norm, row_norm.reference, row_norm.prepare, False
    ),
    "activate": Kernel(
        activate.activate_kernel, activate.activate, activate.reference, activate.prepare, False
    ),
    "rope": Kernel(rope.rope_kernel, rope.rope, rope.reference, rope.prepare, False),
    "preprocess": Kernel(
        preprocess.preprocess_kernel, preprocess.preprocess, preprocess.reference, preprocess.prepare, False
    ),
    "fp8_quantize": Kernel(
        fp8_quantize.fp8_quantize_kernel,
        fp8_quantize.fp8_quantize,
        fp8_quantize.reference,
        fp8_quantize.prepare,
        False,
        89,
    ),
    "fp8_product": Kernel(
        fp8_product.fp8_product_kernel,
        fp8_product.fp8_product,
        fp8_product.reference,
        fp8_product.prepare,
        capability=89,
    ),
}
