"""Options of the CUDA engine.

A benchmark compares several settings of these options, from no optimisation to all optimisations.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from sinew.bundle.schema import COMPONENTS
from sinew.core import SinewError

# Parts of a model that can multiply in FP8: the language model, or only its MLPs.
FP8_PARTS = ("language", "language.mlp")
# The other components, each with the reason why it stays in its own precision.
NOT_FP8 = {
    "vision": "an H200 took 2.25 ms for vision in FP8 and 2.05 ms in bf16 (2026-11-27)",
    "head": "its layers would need more launches than in bf16, and no measurement shows a gain",
}


def check_fp8(parts: Iterable[str]) -> None:
    """Check that parts of a model can multiply in FP8.

    Raises:
        SinewError: A part is unknown, or it is slower in FP8.
    """
    for part in parts:
        if part in NOT_FP8:
            raise SinewError(
                f"fp8: {part}: FP8 is for the language model only: {NOT_FP8[part]}; use the recipe language=fp8"
            )
        if part not in FP8_PARTS:
            raise SinewError(f"fp8: expected {' or '.join(FP8_PARTS)}, got {part}")


@dataclass(frozen=True)
class CudaOptions:
    """Options of the CUDA engine.

    Attributes:
        kernels: True uses Triton kernels. False uses only PyTorch's own operations, with
            ``scaled_dot_product_attention``.
        fp8: Parts of the model (:data:`FP8_PARTS`) whose linear layers multiply in FP8 (e4m3). With "language.mlp", the
            attention of the language model keeps its precision.
        lowbit: Components whose low-bit weights stay low-bit in GPU memory. None lets ``lowbit/choice.py`` choose them.
            Components without low-bit weights have no effect.
        prompt_buckets: Lengths to which prompts are padded, with a mask. A longer prompt gets a multiple of the last
            length.
        max_graphs: Number of keys (views and frame sizes, prompt bucket, solver steps) whose graphs are kept. The least
            recently used key is removed first.
        largest_batch: The largest number of observations in one program, a power of two. Vision and language of a large
            model are limited by arithmetic with one observation already, so a larger program mostly adds latency.
    """

    kernels: bool = True
    fp8: tuple[str, ...] = ()
    lowbit: tuple[str, ...] | None = None
    prompt_buckets: tuple[int, ...] = (16, 32, 48, 64, 96, 128, 160, 200, 256)
    max_graphs: int = 8
    largest_batch: int = 8

    def __post_init__(self) -> None:
        check_fp8(self.fp8)
        if unknown := [name for name in self.lowbit or () if name not in COMPONENTS]:
            raise SinewError(
                f"lowbit: expected components from {', '.join(COMPONENTS)}, got {', '.join(unknown)}"
            )
        buckets = self.prompt_buckets
        if not buckets or buckets[0] < 1 or any(a >= b for a, b in pairwise(buckets)):
            raise SinewError(f"prompt_buckets: expected rising lengths of 1 or more, got {list(buckets)}")
        if self.max_graphs < 1:
            raise SinewError(f"max_graphs: expected 1 or more, got {self.max_graphs}")
        if self.largest_batch < 1 or self.largest_batch & (self.largest_batch - 1):
            raise SinewError(f"largest_batch: expected a power of two, got {self.largest_batch}")

    def batches(self, most: int) -> list[int]:
        """Return the numbers of observations that a program may have, up to ``most``: 1, 2, 4 ..."""
        return [1 << power for power in range(min(most, self.largest_batch).bit_length())]

    def parts(self, count: int) -> list[slice]:
        """Return the observations of each program that computes a part of a batch, the largest part first.

        No program is padded, because vision and language would compute views and prompts that nobody sent.
        """
        parts, first = [], 0
        while first < count:
            size = self.batches(count - first)[-1]
            parts.append(slice(first, first + size))
            first += size
        return parts

    def bucket(self, length: int) -> int:
        """Return the padded length of a prompt of ``length`` tokens. An empty prompt is not padded."""
        if not length:
            return 0
        last = self.prompt_buckets[-1]
        return next((b for b in self.prompt_buckets if b >= length), -(-length // last) * last)

    def buckets(self, longest: int) -> list[int]:
        """Return all padded lengths for prompts of up to ``longest`` tokens."""
        return sorted(
            {self.bucket(length) for length in (*self.prompt_buckets, longest) if length <= longest}
        )
