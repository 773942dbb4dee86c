"""Count the FLOPs of operators that multiply matrices: 2*M*N*K for a product of M x K and K x N numbers, from the
shapes of the operands. All other operators count zero.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

from torch import Tensor

# Computes the FLOPs of an operator from its arguments and its result.
Count = Callable[[Any, Any], int]


def _mm(a: Tensor, b: Tensor) -> int:  # [M, K] @ [K, N]
    return 2 * a.shape[0] * a.shape[1] * b.shape[1]


def _bmm(a: Tensor, b: Tensor) -> int:  # [B, M, K] @ [B, K, N]
    return 2 * prod(a.shape) * b.shape[2]


def _attention(q: Tensor, k: Tensor, v: Tensor) -> int:  # [B, H, S, D], [B, H, N, D], [B, H, N, E]
    return 2 * prod(q.shape[:-1]) * k.shape[-2] * (q.shape[-1] + v.shape[-1])


def _convolution(args: Any, out: Tensor) -> int:
    """Count the FLOPs of a convolution.

    With weights [O, I / groups, *kernel], each number of the result [B, O, *] is a sum of products. In a transposed
    convolution with weights [I, O / groups, *kernel], each number of the input [B, I, *] contributes to many sums of
    the result.
    """
    x, weight, transposed = args[0], args[1], args[6]
    return 2 * (x if transposed else out).numel() * prod(weight.shape[1:])


FUSED_ATTENTION = (
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)

# These operators round their inputs to 8 bits and multiply integers.
LOW_BIT = ("lowbit_linear", "lowbit_linears")

# Key: name of an ATen operator or of a Sinew operator. Value: the function that counts its FLOPs.
PRODUCTS: dict[str, Count] = {
    "mm": lambda args, _: _mm(args[0], args[1]),
    "addmm": lambda args, _: _mm(args[1], args[2]),
    "bmm": lambda args, _: _bmm(args[0], args[1]),
    "baddbmm": lambda args, _: _bmm(args[1], args[2]),
    # The input [M, K] is multiplied by low-bit weights with N output channels.
    "lowbit_linear": lambda args, _: 2 * args[0].numel() * args[1].shape[0],
    "lowbit_linears": lambda args, _: sum(2 * args[0].numel() * weight.shape[0] for weight in args[1]),
    "mv": lambda args, _: 2 * args[0].numel(),
    "convolution": _convolution,
    **dict.fromkeys(FUSED_ATTENTION, lambda args, _: _attention(*args[:3])),
}
