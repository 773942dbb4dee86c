"""Options of the CUDA engine. Each rung of the benchmark's ladder is a setting of them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from sinew.bundle.schema import COMPONENTS
from sinew.core import SinewError


@dataclass(frozen=True)
class CudaOptions:
    """graph: record the program once per key and replay it; False runs the same program call by call.
    kernels: Triton's; False: torch's own operations alone, with ``scaled_dot_product_attention``.
    fp8: components whose linear layers multiply in e4m3: of vision, language, head.
    scaled_norms: a norm that the solver's time modulates (pi0.5) goes into the products that read it; False
        gives it a pass of its own.
    stages: replay vision, prefix and each solver step apart, and time them.
    prompt_buckets: lengths to which prompts are padded, masked. A longer prompt gets a multiple of the last.
    max_graphs: keys (views and frame sizes, prompt bucket, solver steps) that are kept; the one that was not used
        for the longest time goes.
    """

    graph: bool = True
    kernels: bool = True
    fp8: tuple[str, ...] = ()
    scaled_norms: bool = True
    stages: bool = False
    prompt_buckets: tuple[int, ...] = (16, 32, 48, 64, 96, 128, 160, 200, 256)
    max_graphs: int = 8

    def __post_init__(self) -> None:
        if unknown := [name for name in self.fp8 if name not in COMPONENTS]:
            raise SinewError(f"fp8: expected some of {', '.join(COMPONENTS)}, got {', '.join(unknown)}")
        buckets = self.prompt_buckets
        if not buckets or buckets[0] < 1 or any(a >= b for a, b in pairwise(buckets)):
            raise SinewError(f"prompt_buckets: expected lengths that grow, from 1 up, got {list(buckets)}")
        if self.max_graphs < 1:
            raise SinewError(f"max_graphs: expected 1 or more, got {self.max_graphs}")

    def bucket(self, length: int) -> int:
        """The padded length of a prompt of ``length`` tokens; without a prompt nothing is padded."""
        if not length:
            return 0
        last = self.prompt_buckets[-1]
        return next((b for b in self.prompt_buckets if b >= length), -(-length // last) * last)

    def buckets(self, longest: int) -> list[int]:
        """All padded lengths of prompts of up to ``longest`` tokens."""
        return sorted(
            {self.bucket(length) for length in (*self.prompt_buckets, longest) if length <= longest}
        )
