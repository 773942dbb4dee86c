"""Compiled float32 kernels for the operations between the matrix products of a layer: attention, GELU and gated SiLU.

Each kernel is an operator with a reference in plain PyTorch, and the two differ only in rounding. The error of
attention is at most 4e-6 of the largest value, and the error of an activation 4e-7 of its input.

If queries, keys and values come from int8 or bfloat16 products, attention may run with ``rounded=True``. On AVX2 and
AVX-512, attention then multiplies 16-bit integers, with an error of at most 4e-3 of the largest value. With AMX, and
on ARM CPUs with ``bfmmla``, attention multiplies bfloat16, with the error of PyTorch's attention in bfloat16. Other ARM
CPUs multiply float32, because their bfloat16 products would need as many instructions.
``tests/engine/cpu/test_float_kernels.py`` compares all kernels with float64.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sinew.layers.attention import attend as attend_masked


def attend_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    _rounded: bool = False,
    own_k: Tensor | None = None,
    own_v: Tensor | None = None,
) -> Tensor:
    """Return the attention of queries over keys and values, [B, Lq, H * D].

    Args:
        q: Queries, [B, Lq, H, D].
        k: Keys, [B, Lk, Hkv, D].
        v: Values, [B, Lk, Hkv, D].
        mask: bool [B, Lq, number of all keys], True for visible keys. None if all keys are visible.
        _rounded: True allows kernels to round queries, keys and values to 16 bits: integers, or bfloat16. This
            reference ignores the argument.
        own_k: More keys after ``k``, or None.
        own_v: More values after ``v``, or None.
    """
    if own_k is not None and own_v is not None:
        k, v = torch.cat([k, own_k], dim=1), torch.cat([v, own_v], dim=1)
    if mask is None:
        mask = torch.ones(q.shape[0], q.shape[1], k.shape[1], dtype=torch.bool, device=q.device)
    return attend_masked(q, k, v, mask)


def gelu_reference(x: Tensor) -> None:
    """Overwrite x with GELU(x), in the tanh form."""
    x.copy_(F.gelu(x, approximate="tanh"))


def silu_times_reference(gate: Tensor, up: Tensor) -> None:
    """Overwrite ``gate`` with silu(gate) * up."""
    gate.copy_(F.silu(gate).mul_(up))


@dataclass(frozen=True)
class FloatKernels:
    """One implementation of each operator of this module: compiled kernels or PyTorch references."""

    attend: Callable[..., Tensor] = attend_reference
    gelu: Callable[[Tensor], None] = gelu_reference
    silu_times: Callable[[Tensor, Tensor], None] = silu_times_reference

    @classmethod
    def compiled(cls, library: Any, kernels: int) -> FloatKernels:
        """Return the kernels of a loaded library (:func:`sinew.engine.cpu.kernels.library.load`)."""
        return cls(
            partial(_attend, library, kernels),
            partial(_gelu, library, kernels),
            partial(_silu_times, library, kernels),
        )


def _attend(
    library: Any,
    kernels: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    rounded: bool = False,
    own_k: Tensor | None = None,
    own_v: Tensor | None = None,
) -> Tensor:
    B, Lq, H, D = q.shape
    before, Hkv = k.shape[1:3]
    # Without a second part of keys, the kernel gets the first part's tensors again, with a length of zero.
    own = (k, v) if own_k is None or own_v is None else (own_k, own_v)
    Lk = before + (0 if own_k is None else own_k.shape[1])
    if mask is not None:
        mask = mask.contiguous()
    fits = (
        all(t.dtype == torch.float32 and _heads_lie_together(t) for t in (q, k, v, *own))
        and (own_k is None) == (own_v is None)
        and k.shape == v.shape == (B, before, Hkv, D)
        and own[0].shape == own[1].shape == (B, own[0].shape[1], Hkv, D)
        and H % Hkv == 0
        and (mask is None or (mask.dtype == torch.bool and mask.shape == (B, Lq, Lk)))
    )
    if not fits:
        shapes = ", ".join(
            f"{t.dtype} {list(t.shape)}" for t in (q, k, v, own_k, own_v, mask) if t is not None
        )
        raise ValueError(
            f"attention: expected float32 q, k, v and a bool mask of matching shapes, got {shapes}"
        )
    out = torch.empty(B, Lq, H * D)
    rows = [stride for t in (q, k, v) for stride in (t.stride(0), t.stride(1))]
    strides = [stride for t in own for stride in (t.stride(0), t.stride(1))]
    sizes = (ctypes.c_int64 * 18)(B, Lq, Lk, H, Hkv, D, *rows, rounded, before, *strides)
    status = library.lowbit_attend(
        *(kernels, q.data_ptr(), k.data_ptr(), v.data_ptr(), own[0].data_ptr(), own[1].data_ptr()),
        *(None if mask is None else mask.data_ptr(), out.data_ptr(), ctypes.addressof(sizes)),
        *(D**-0.5, torch.get_num_threads()),
    )
    if status:
        raise RuntimeError(
            f"attention: the kernel failed with status {status} for q {list(q.shape)} and k {list(k.shape)}"
        )
    return out


def _heads_lie_together(x: Tensor) -> bool:  # [B, L, H, D]
    return x.stride(3) == 1 and x.stride(2) == x.shape[3]


def _gelu(library: Any, kernels: int, x: Tensor) -> None:
    _check_dense(x)
    library.lowbit_gelu(kernels, x.data_ptr(), x.numel(), torch.get_num_threads())


def _silu_times(library: Any, kernels: int, gate: Tensor, up: Tensor) -> None:
    _check_dense(gate, up)
    library.lowbit_silu_times(kernels, gate.data_ptr(), up.data_ptr(), gate.numel(), torch.get_num_threads())


def _check_dense(*tensors: Tensor) -> None:
    first = tensors[0]
    if any(
        t.dtype != torch.float32 or not t.is_contiguous() or t.shape != first.shape or t.device.type != "cpu"
        for t in tensors
    ):
        shapes = ", ".join(f"{t.dtype} {list(t.shape)}" for t in tensors)
        raise ValueError(
            f"activation: expected contiguous float32 tensors of one shape on the CPU, got {shapes}"
        )


REFERENCES = FloatKernels()


def differs(floats: FloatKernels) -> str:
    """Return the name of an operation in which ``floats`` differs from the reference, or ""."""
    random = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(2, rows, heads, 24, generator=random) for rows, heads in ((7, 4), (19, 2), (19, 2))
    )
    mask = torch.rand(2, 7, 19, generator=random) < 0.7
    made: dict[str, dict[str, Tensor]] = {}
    for name, each in (("wanted", REFERENCES), ("made", floats)):
        activated, gated = 4 * q, 4 * q
        each.gelu(activated)
        each.silu_times(gated, q)
        parts = k[:, :12], v[:, :12], mask
        attended = {
            "attention": each.attend(q, k, v, mask),
            "rounded attention": each.attend(q, *parts, True, k[:, 12:], v[:, 12:]),
        }
        made[name] = attended | {"gelu": activated, "silu": gated}
    # The bound of rounded attention holds for kernels that round to the 8 bits of bfloat16.
    bounds = dict.fromkeys(made["made"], 1e-5) | {"rounded attention": 2e-2}
    close = (
        (name, torch.allclose(made["made"][name], made["wanted"][name], rtol=bound, atol=bound))
        for name, bound in bounds.items()
    )
    return next((name for name, same in close if not same), "")


_on_cpu: list[FloatKernels] = [REFERENCES]  # has one entry, the implementation that the operators call


def install(floats: FloatKernels) -> None:
    """Set the kernels that the operators use on CPUs."""
    _on_cpu[:] = [floats]


def _attend_here(*arguments: Any) -> Tensor:
    return _on_cpu[0].attend(*arguments)


def _gelu_here(x: Tensor) -> None:
    _on_cpu[0].gelu(x)


def _silu_times_here(gate: Tensor, up: Tensor) -> None:
    _on_cpu[0].silu_times(gate, up)


def _attend_shape(q: Tensor, *_: Any) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[1], q.shape[2] * q.shape[3])


def _in_place(*_: Any) -> None:
    """Return None as the result of shape inference, because the operator changes its argument and returns no tensor."""


_LIBRARY = torch.library.Library("sinew", "FRAGMENT")
_LIBRARY.define(
    "cpu_attend(Tensor q, Tensor k, Tensor v, Tensor? mask, bool rounded=False, Tensor? own_k=None,"
    " Tensor? own_v=None) -> Tensor"
)
_LIBRARY.define("cpu_gelu_(Tensor(a!) x) -> ()")
_LIBRARY.define("cpu_silu_times_(Tensor(a!) gate, Tensor up) -> ()")
_LIBRARY.impl("cpu_attend", _attend_here, "CPU")
_LIBRARY.impl("cpu_gelu_", _gelu_here, "CPU")
_LIBRARY.impl("cpu_silu_times_", _silu_times_here, "CPU")
torch.library.register_fake("sinew::cpu_attend", _attend_shape, lib=_LIBRARY)
torch.library.register_fake("sinew::cpu_gelu_", _in_place, lib=_LIBRARY)
torch.library.register_fake("sinew::cpu_silu_times_", _in_place, lib=_LIBRARY)

attend = torch.ops.sinew.cpu_attend
gelu_ = torch.ops.sinew.cpu_gelu_
silu_times_ = torch.ops.sinew.cpu_silu_times_
