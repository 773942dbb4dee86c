"""Memory in which programs that share an output block meet."""

from __future__ import annotations

import torch
from torch import Tensor

# Numbers of floats and output blocks that are enough for every launch of a published model.
PARTS, BLOCKS = (
    1 << 23,
    1 << 12,
)


class Workspace:
    """Partial sums and counters per output block, for kernels that split their depth or their keys.

    The owner of the stream allocates it once. ``arrivals`` are zero between launches: the last program of a block
    resets its own. Launches that may run at the same time need one workspace each; launches of one stream share it.
    """

    def __init__(self, floats: int, blocks: int, device: torch.device | str):
        self.parts: Tensor = torch.empty(floats, dtype=torch.float32, device=device)
        self.arrivals: Tensor = torch.zeros(blocks, dtype=torch.int32, device=device)

    def require(self, floats: int, blocks: int) -> None:
        """Raise ValueError where a launch needs more than was allocated."""
        for what, needed, tensor in (("floats", floats, self.parts), ("blocks", blocks, self.arrivals)):
            if needed > tensor.numel():
                raise ValueError(f"workspace: expected at least {needed} {what}, got {tensor.numel()}")
