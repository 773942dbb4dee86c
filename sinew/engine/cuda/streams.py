"""The two CUDA streams of an engine, and the order between them.

Most work runs on one stream: a whole program computes all stages of an observation. A robot that streams needs its
action head while the next prefix is computed, so ``CudaEngine.read`` runs vision and language model on the *prefix
stream*, and ``CudaEngine.solve`` runs the head on the *head stream*.

**Memory.** Each stream has its own recorder with its own memory pool, its own kernel workspace (``launches.py``), its
own workspace of cuBLAS (PyTorch allocates one for each stream), its own input buffers and its own memory for results.
Both streams read the weights and the tables of the solver, and nobody writes those after the first use.

**Order.** A context is the only thing that passes from one stream to the other:

1. The prefix stream copies the context out of the memory of the recording, into new memory. Later prefixes write the
   memory of the recording again, but never the copy.
2. The prefix stream then records the event ``ready``, and ``read`` waits for it. So a caller never gets a context that
   is incomplete, and a stream session uses the former prefix whole until then.
3. The head stream waits for ``ready``, copies the context into the memory of the head, and runs the head there. So the
   head reads nothing that the prefix stream writes.
4. ``solve`` waits for the head stream before it returns. So nobody frees a context that the head stream still reads.
   An exception leaves :meth:`EngineStream.current` after the stream's work has ended. So an engine whose calls have all
   returned computes nothing, and a hot-swap may free it.

The head stream has the higher priority, because a head is short and its robot waits for it. Neither stream ever waits
for work that was not submitted: ``ready`` exists only if the whole prefix was submitted. Therefore an error of one
stream cannot block the other.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress

import torch

from sinew.engine.cuda.graphs import Calls, GraphRecorder, Graphs

FIRST = -1  # priority of the head stream; CUDA starts the blocks of a smaller number first


class EngineStream:
    """A CUDA stream of an engine, with the recorder that belongs to it. On a CPU, only one thread at a time.

    Args:
        device: The device.
        priority: The priority. 0 is the lowest.
        recorder: Records the programs. By default, CUDA graphs on a GPU, and calls on a CPU.
    """

    def __init__(self, device: torch.device, priority: int = 0, recorder: GraphRecorder | None = None):
        self.stream = torch.cuda.Stream(device, priority=priority) if device.type == "cuda" else None
        self._recorder = recorder
        # A thread that holds it may start another run between two steps, so it is reentrant.
        self._lock = threading.RLock()

    @property
    def recorder(self) -> GraphRecorder:
        if self._recorder is None:
            self._recorder = Calls() if self.stream is None else Graphs(self.stream)
        return self._recorder

    @contextmanager
    def current(self) -> Iterator[None]:
        """Inside the ``with`` block, PyTorch uses this stream, no other thread does, and cuBLAS adds partial sums in
        float32. A recording contains these settings.

        An exception leaves the block after the stream's work has ended, because the caller may then free its memory.
        """
        with self._lock, nullcontext() if self.stream is None else self._chosen():
            try:
                yield
            except BaseException:
                with suppress(RuntimeError):  # a device that has failed reports its error again
                    self.wait()
                raise

    @contextmanager
    def _chosen(self) -> Iterator[None]:
        with FLOAT_SUMS, torch.cuda.stream(self.stream):
            yield

    def wait(self) -> None:
        """Wait until all work of this stream has ended."""
        if self.stream is not None:
            self.stream.synchronize()

    def event(self) -> torch.cuda.Event | None:
        """Return an event that occurs when the work that was submitted so far has ended. None on a CPU."""
        return None if self.stream is None else self.stream.record_event()

    def follow(self, event: torch.cuda.Event | None) -> None:
        """Let the work that is submitted from now on begin after ``event``. The CPU does not wait."""
        if self.stream is not None and event is not None:
            self.stream.wait_event(event)


class _FloatSums:
    """Makes cuBLAS add partial sums in float32 while any thread is inside a ``with`` block.

    PyTorch has one setting for all threads, so the last thread that leaves restores it.
    """

    def __init__(self) -> None:
        self._lock, self._inside, self._before = threading.Lock(), 0, True

    def __enter__(self) -> None:
        flags = torch.backends.cuda.matmul
        with self._lock:
            if not self._inside:
                self._before = flags.allow_bf16_reduced_precision_reduction
                flags.allow_bf16_reduced_precision_reduction = False
            self._inside += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = self._before


FLOAT_SUMS = _FloatSums()
