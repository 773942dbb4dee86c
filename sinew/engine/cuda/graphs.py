"""Record a function once and run it many times: as a CUDA graph on a GPU, or by a normal call on a CPU.

A cache of limited size stores one set of recordings per key.
"""

from __future__ import annotations

import gc
import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

NVTX = hasattr(torch._C, "_nvtx")  # noqa: SLF001 - False for builds without CUDA or without NVTX
# Number of runs before a recording. The first run compiles kernels and allocates memory. The second run does neither.
WARM_UPS = 2
# One thread records at a time. A recording begins with a wait for the whole device, which CUDA forbids while another
# thread records. And a table that a model makes at its first use is complete before another thread can find it.
RECORDING = threading.RLock()


class StageRange:
    """Marks a stage with its name for profilers.

    The mark is an NVTX range, which Nsight Systems shows. While PyTorch's profiler records, it is also a range of that
    profiler. Such a range costs microseconds.
    """

    def __init__(self, name: str):
        self.name = name
        self._profiled: Any = None

    def __enter__(self) -> None:
        if NVTX:
            torch.cuda.nvtx.range_push(self.name)
        if torch.autograd.profiler._is_profiler_enabled:  # noqa: SLF001 - PyTorch's own callers read this flag
            self._profiled = torch.profiler.record_function(self.name)
            self._profiled.__enter__()

    def __exit__(self, *error: object) -> None:
        if self._profiled is not None:
            self._profiled.__exit__(*error)
        if NVTX:
            torch.cuda.nvtx.range_pop()

    @classmethod
    def around(cls, name: str, call: Callable[[], None]) -> Callable[[], None]:
        """Return a function that calls ``call`` inside a range with this name."""

        def shown() -> None:
            with cls(name):
                call()

        return shown


@dataclass
class RecordedGraph:
    """A recorded program.

    Attributes:
        replay: Runs the program again.
        result: The program's result. Its tensors contain the values of the last :meth:`replay`.
    """

    replay: Callable[[], None]
    result: Any


class GraphRecorder(ABC):
    """Records programs. A program is a sequence of kernels that can be launched again, such as a CUDA graph.

    Attributes:
        calls: True if a replay calls the model's modules again, so that their hooks also run.
    """

    calls = True

    @abstractmethod
    def record(self, program: Callable[[], Any], apart: bool = False) -> RecordedGraph:
        """Return ``program`` as a recording. The method may run the program. Replay the recording before you read its
        result.

        Args:
            program: The program.
            apart: True if the result must survive replays of other programs, because another recording reads it.
        """


class Calls(GraphRecorder):
    """A recorder without graphs, for CPUs and for benchmarks of single launches: each replay calls the function
    again."""

    def record(self, program: Callable[[], Any], apart: bool = False) -> RecordedGraph:
        recorded = RecordedGraph(lambda: None, None)

        def replay() -> None:
            recorded.result = program()

        recorded.replay = replay
        return recorded


class Graphs(GraphRecorder):
    """CUDA graphs, recorded on ``stream``. Replays must be on the same stream.

    Whole programs share their intermediate memory, which no other stream's recorder uses. No two of them run at the
    same time, none reads values that another program left, and the caller provides the memory for the results.
    Recordings whose results are read by other recordings get their own memory pool, so that no other program overwrites
    the results.
    """

    calls = False

    def __init__(self, stream: torch.cuda.Stream):
        self.stream = stream
        # PyTorch frees a memory pool when no graph uses the pool. This graph is stored so that the shared pool stays.
        self._first = torch.cuda.CUDAGraph()
        with RECORDING, torch.cuda.graph(self._first, stream=stream, capture_error_mode="thread_local"):
            self._kept = torch.zeros(1, device=stream.device)
        self.shared = self._first.pool()

    def record(self, program: Callable[[], Any], apart: bool = False) -> RecordedGraph:
        with RECORDING:
            # Run the program on the recording's stream first, because cuBLAS allocates a workspace for each stream.
            for _ in range(WARM_UPS):
                program()
            self.stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            pool = None if apart else self.shared
            # With this mode, other threads may allocate memory on the device or pin memory during the recording.
            mode = "thread_local"
            with (
                no_collection(),
                torch.cuda.graph(graph, pool=pool, stream=self.stream, capture_error_mode=mode),
            ):
                result = program()
            return RecordedGraph(graph.replay, result)


@contextmanager
def no_collection() -> Iterator[None]:
    """Run Python's garbage collector once, then switch it off inside the ``with`` block.

    During a recording, the collector could free another engine's graphs or pinned memory on this thread.
    """
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Kept(Generic[K, V]):
    """A cache of at most ``limit`` values. When it is full, it removes the least recently used value.

    Args:
        limit: The largest number of values.
        make: Makes the value for a new key.
    """

    def __init__(self, limit: int, make: Callable[[K], V]):
        self.limit, self.make = limit, make
        self._values: OrderedDict[K, V] = OrderedDict()

    def __getitem__(self, key: K) -> V:
        if key in self._values:
            self._values.move_to_end(key)
            return self._values[key]
        while len(self._values) >= self.limit:
            self._values.popitem(last=False)
        value = self._values[key] = self.make(key)
        return value

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: K) -> bool:
        return key in self._values

    def keys(self) -> tuple[K, ...]:
        """Return the keys, the least recently used first."""
        return tuple(self._values)
