"""An object for one kernel launch.

Code can run it, time it, or compile it for a GPU that this machine does not have.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sinew.engine.cuda.kernels.lang import MissingTriton, interpreted, triton

TYPES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int32: "i32",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "i1",
    torch.float8_e4m3fn: "fp8e4nv",
}
INTERPRETED = {"UPCAST": True}
# Triton uses wide copies for a pointer divisible by this many bytes, and for a count divisible by this number.
ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class Tile:
    """One configuration of a kernel. Each kernel defines the meaning of m, n and k.

    Attributes:
        m: Rows of a program's block.
        n: Columns of a program's block.
        k: Depth of a program's block.
        split: Number of programs that share one output block.
        warps: Number of warps.
        stages: Number of pipeline stages.
    """

    m: int = 1
    n: int = 64
    k: int = 64
    split: int = 1
    warps: int = 4
    stages: int = 3


@dataclass(frozen=True, slots=True)
class Launch:
    """A launch of a kernel.

    Attributes:
        kernel: The kernel.
        grid: Number of programs per axis.
        arguments: All parameters of the kernel by name, with its compile-time constants.
        tile: The configuration.
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    tile: Tile

    def __call__(self) -> None:
        """Launch on the current stream. The launch allocates no memory.

        The first launch of a kind compiles the kernel, so run it once before a graph is recorded.
        """
        if triton is None:
            raise MissingTriton
        arguments = dict(self.arguments)
        if interpreted(self.kernel):
            arguments |= {name: on for name, on in INTERPRETED.items() if name in arguments}
        self.kernel[self.grid](**arguments, **self.options())

    def options(self) -> dict[str, Any]:
        # Set the option for fused multiply-adds explicitly, because its default changes in Triton 3.10.
        return {
            "num_warps": self.tile.warps,
            "num_stages": self.tile.stages,
            "enable_fp_fusion": True,
        }

    def compile(self, capability: int) -> Any:
        """Compile the kernel, with or without a GPU. The tensors may be on the meta device.

        Args:
            capability: Compute capability times 10 (80, 89 or 90).

        Returns:
            Triton's compiled kernel, with ``asm`` and ``metadata``.
        """
        return self.specialised().compile(capability)

    def specialised(self) -> Specialised:
        """Return the properties of the arguments on which the compiled code depends, as Triton finds them at a launch.

        The properties are the dtypes, which pointers and integers are divisible by 16, and which integers are 1.
        """
        constants = {p.name for p in self.kernel.params if p.is_constexpr}
        signature: dict[str, str] = {}
        values: dict[tuple[int], Any] = {}
        aligned: dict[tuple[int], bool] = {}
        for index, name in enumerate(self.kernel.arg_names):
            value = self.arguments[name]
            if name in constants or value is None or (_is_int(value) and value == 1):
                signature[name], values[(index,)] = "constexpr", value
            elif isinstance(value, Tensor):
                signature[name] = "*" + TYPES[value.dtype]
                aligned[(index,)] = value.storage_offset() * value.element_size() % ALIGNMENT == 0
            elif _is_int(value):
                signature[name] = "i32"
                aligned[(index,)] = value % ALIGNMENT == 0
            else:
                signature[name] = "fp32"
        return Specialised(self.kernel, signature, values, aligned, self.options())


@dataclass(frozen=True, slots=True)
class Specialised:
    """A launch without its tensors, for compilation. Triton stores the result on disk, where a launch finds it.

    Attributes:
        kernel: The kernel.
        signature: For each parameter, Triton's name of its type.
        values: The constant of each constant parameter, by the parameter's position.
        aligned: True for each parameter that is divisible by 16, by the parameter's position.
        options: Options of the compiler.
    """

    kernel: Any
    signature: dict[str, str]
    values: dict[tuple[int], Any]  # constants, by position of the parameter
    aligned: dict[tuple[int], bool]
    options: dict[str, Any]

    def key(self) -> str:
        """Return a key that is equal for launches with the same machine code."""
        return repr((self.kernel.__name__, self.signature, self.values, self.aligned, self.options))

    def compile(self, capability: int) -> Any:
        if triton is None:
            raise MissingTriton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        attributes = {at: [["tt.divisibility", ALIGNMENT]] if yes else [] for at, yes in self.aligned.items()}
        source = ASTSource(self.kernel, self.signature, constexprs=self.values, attrs=attributes)
        return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=self.options)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
