"""Copy an observation to the GPU: one block of memory on the CPU, one block on the GPU, and the copies between them.

A recorded graph reads the device's block, so neither block may move. The CPU's block is pinned memory, because the
driver would otherwise copy through its own buffer. Each camera's frame is a separate part of the block. It is sent as
soon as it is written, so that one frame is transferred while the next frame is written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed, wait
from functools import cache

import numpy as np
import torch
from torch import Tensor

from sinew.core.machine import cores

ALIGNMENT = 256  # bytes; PyTorch's GPU allocator uses the same alignment
WORTH_A_THREAD = 512 << 10  # bytes; copying a smaller frame is faster than handing it to another thread
# The number excludes the caller's thread. One copying thread already uses a large part of the memory bandwidth.
MOST_THREADS = 3

Field = tuple[tuple[int, ...], torch.dtype]  # shape and dtype


class Staging:
    """Two blocks of memory with the same layout.

    Args:
        fields: Shape and dtype of each field, by the field's name.
        device: The device.

    Attributes:
        host: For each field, a numpy view of the host's block, for writing.
        device: For each field, a tensor in the device's block.
    """

    def __init__(self, fields: Mapping[str, Field], device: torch.device):
        places: dict[str, tuple[int, int]] = {}
        end = 0
        for name, (shape, dtype) in fields.items():
            size = math.prod(shape) * dtype.itemsize
            places[name] = (end, size)
            end += -(-size // ALIGNMENT) * ALIGNMENT
        self._places, on_gpu = places, device.type == "cuda"
        self._host = torch.zeros(end, dtype=torch.uint8, pin_memory=on_gpu)
        self._device = torch.zeros(end, dtype=torch.uint8, device=device)
        self.host: dict[str, np.ndarray] = {}
        self.device: dict[str, Tensor] = {}
        for name, (shape, dtype) in fields.items():
            start, size = places[name]
            self.host[name] = self._host[start : start + size].view(dtype).view(shape).numpy()
            self.device[name] = self._device[start : start + size].view(dtype).view(shape)

    @property
    def nbytes(self) -> int:
        return self._host.numel()

    def write(self, name: str, array: np.ndarray, row: int | None = None) -> None:
        """Write a field, or one row of a field.

        Raises:
            ValueError: The array has another shape. numpy would broadcast it.
        """
        place = self.host[name] if row is None else self.host[name][row]
        if array.shape != place.shape:
            raise ValueError(f"{name}: expected shape {list(place.shape)}, got {list(array.shape)}")
        np.copyto(place, array, casting="same_kind")

    def part(self, name: str, row: int | None = None) -> slice:
        """Return the position of a field, or of one of its rows, in the bytes of both blocks."""
        start, size = self._places[name]
        if row is not None:
            size //= len(self.host[name])
            start += row * size
        return slice(start, start + size)

    def upload(self, part: slice = slice(None)) -> None:
        """Copy the bytes of ``part`` to the device, on the current stream.

        Do not write these bytes again before the stream has finished.
        """
        self._device[part].copy_(self._host[part], non_blocking=True)


def threads_for(nbytes: Sequence[int]) -> int:
    """Return the number of additional threads that copy arrays of these sizes.

    The number does not include the caller's thread. It is 0 if no core is free, or if the arrays are small.
    """
    large = sum(size >= WORTH_A_THREAD for size in nbytes)
    return max(0, min(large, _cores(), MOST_THREADS + 1) - 1)


def as_done(jobs: Sequence[Callable[[], None]], threads: int) -> Iterator[int]:
    """Run jobs on several threads, and yield the number of each job when it is finished.

    The first job runs on this thread. This thread also runs jobs that no other thread has begun, because waking a
    thread takes as long as copying a frame. All jobs have ended when the generator ends, even after an error, because
    they write into the caller's memory.

    Args:
        jobs: The jobs.
        threads: The largest number of other threads.
    """
    if threads < 1:
        for index, job in enumerate(jobs):
            job()
            yield index
        return
    pool = _copiers()
    next_job: int | None = 0
    others = {pool.submit(job): index for index, job in enumerate(jobs) if index}
    try:
        while next_job is not None:
            jobs[next_job]()
            yield next_job
            next_job = next(
                (others.pop(future) for future in reversed(list(others)) if future.cancel()), None
            )
        for future in as_completed(others):
            future.result()
            yield others[future]
    finally:
        wait(others)


@cache
def _cores() -> int:
    """Return the number of processors that copies may use. ``OMP_NUM_THREADS`` does not limit copies, because it
    concerns arithmetic."""
    processors = cores()
    return processors.logical if processors.quota is None else min(processors.logical, int(processors.quota))


@cache
def _copiers() -> ThreadPoolExecutor:
    """Return the threads that copy frames. All engines of a process share them, and they start at the first call."""
    return ThreadPoolExecutor(MOST_THREADS, "frame")
