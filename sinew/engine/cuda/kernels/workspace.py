"""Memory for the partial sums of programs that share an output block."""

from __future__ import annotations

import torch
from torch import Tensor

# Numbers of floats and output blocks that are enough for every launch of a published model.
PARTS, BLOCKS = (
    1 << 23,
    1 << 12,
)
# The workspace of one CUDA stream: twice the size that the published models need in float32, whose tiles are small.
# This is 64 MiB.
STREAM_PARTS, STREAM_BLOCKS = 2 * PARTS, 2 * BLOCKS
STREAM_NBYTES = STREAM_PARTS * torch.float32.itemsize + STREAM_BLOCKS * torch.int32.itemsize


class Workspace:
    """Partial sums and counters per output block, for kernels that split their depth or their keys.

    The owner of the stream allocates the workspace once. ``arrivals`` are zero between launches, because the last
    program of a block resets its counter. Launches that may run at the same time need one workspace each. Launches of
    one stream share it.

    Args:
        floats: Number of floats for partial sums.
        blocks: Number of output blocks.
        device: The device.
    """

    def __init__(self, floats: int, blocks: int, device: torch.device | str):
        self.parts: Tensor = torch.empty(floats, dtype=torch.float32, device=device)
        self.arrivals: Tensor = torch.zeros(blocks, dtype=torch.int32, device=device)

    def require(self, floats: int, blocks: int) -> None:
        """Check that a launch fits the workspace.

        Raises:
            ValueError: The launch needs more memory.
        """
        for what, needed, tensor in (("floats", floats, self.parts), ("blocks", blocks, self.arrivals)):
            if needed > tensor.numel():
                raise ValueError(f"workspace: expected at least {needed} {what}, got {tensor.numel()}")
