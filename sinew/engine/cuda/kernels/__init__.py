"""Triton kernels of the CUDA engine, each with the PyTorch reference that defines it. ``docs/kernels.md`` lists them.

Weights are [out, in] as in PyTorch's linear layers, so a bundle's tensors are read in place. Rows of activations may be
strided. Sums are float32 for every dtype. A launch with the argument ``out`` allocates no memory, and the CPU reads no
value from the GPU. After its first run, such a launch can be recorded in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from sinew.engine.cuda.kernels import (
    activate,
    fp8_quantize,
    gated_mlp,
    norm_linear,
    packed_attention,
    preprocess,
    qkv_rope,
    rope,
    row_norm,
    splitk_linear,
    weight_only_linear,
)
from sinew.engine.cuda.kernels.launch import Launch, Tile
from sinew.engine.cuda.kernels.workspace import Workspace

__all__ = ["KERNELS", "Kernel", "Launch", "Tile", "Workspace"]


@dataclass(frozen=True, slots=True)
class Kernel:
    """A Triton kernel and the functions that belong to it.

    ``python -m benchmarks.gpu --only 'tiles pi0.5'`` lists the matrix sizes of a model.

    Attributes:
        kernel: The Triton kernel.
        launch: Runs the kernel on tensors.
        reference: Computes the same in PyTorch.
        prepare: Returns the launch as a value.
        uses_tensor_cores: True if the kernel multiplies on tensor cores.
        capability: The lowest compute capability, times 10, of a GPU that has the kernel's instructions.
    """

    kernel: Any
    launch: Callable[..., Any]
    reference: Callable[..., Any]
    prepare: Callable[..., Launch]
    uses_tensor_cores: bool = True
    capability: int = 80

    @classmethod
    def of(cls, module: ModuleType, **facts: Any) -> Kernel:
        """Return the kernel of a module. Kernel and module have the same name."""
        name = module.__name__.rpartition(".")[2]
        members = (getattr(module, each) for each in (f"{name}_kernel", name, "reference", "prepare"))
        return cls(*members, **facts)


KERNELS: dict[str, Kernel] = {
    "norm_linear": Kernel.of(norm_linear),
    "gated_mlp": Kernel.of(gated_mlp),
    "qkv_rope": Kernel.of(qkv_rope),
    "splitk_linear": Kernel.of(splitk_linear),
    "packed_attention": Kernel.of(packed_attention),
    "weight_only_linear": Kernel.of(weight_only_linear),
    # The next two kernels need capability 89 if they write e4m3. Their ``prepare`` checks that.
    "row_norm": Kernel.of(row_norm, uses_tensor_cores=False),
    "activate": Kernel.of(activate, uses_tensor_cores=False),
    "rope": Kernel.of(rope, uses_tensor_cores=False),
    "preprocess": Kernel.of(preprocess, uses_tensor_cores=False),
    "fp8_quantize": Kernel.of(fp8_quantize, uses_tensor_cores=False, capability=89),
}
