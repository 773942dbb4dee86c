"""Runs one policy for many clients: a bounded queue and two threads. Knows nothing of sockets.

A job passes through a *decode* thread (bytes to a checked observation) and an *inference* thread. Two,
so that unpacking the next request's JPEGs overlaps the running inference and a bad request is refused
without waiting its turn, and so that the thread of the sockets never does either.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from queue import Empty, SimpleQueue
from typing import Protocol

from sinew.core import ActionChunk, BusyError, CancelledError, Observation, SinewError

logger = logging.getLogger(__name__)


class ShuttingDownError(SinewError):
    """The server is stopping; the request was not computed, or not to its end."""

    code = "shutting_down"

    def __init__(self) -> None:
        super().__init__("the server is shutting down")


class RunnablePolicy(Protocol):
    """What the scheduler asks of a policy."""

    def warm_up(self) -> object: ...
    def check(self, observation: Observation) -> None: ...
    def infer(self, observation: Observation, *, cancel: threading.Event | None = None) -> ActionChunk: ...


class Job:
    """One request on its way. ``on_done`` is called exactly once, on whatever thread ends the job.

    Setting ``cancel`` abandons the job: when its turn comes, or between two stages if it runs.
    """

    __slots__ = ("accepted", "answered", "cancel", "decode", "decode_s", "observation", "on_done")

    def __init__(
        self, decode: Callable[[], Observation], on_done: Callable[[ActionChunk | SinewError], None]
    ):
        self.decode = decode
        self.on_done = on_done
        self.accepted = time.perf_counter()
        self.decode_s = 0.0
        self.observation: Observation | None = None
        self.cancel = threading.Event()
        self.answered = False


class Scheduler:
    """Runs jobs one at a time, first come first served.

    queue_size: jobs that may wait, beside the one that runs; a further one is refused with BusyError.
    """

    def __init__(self, policy: RunnablePolicy, *, queue_size: int = 8):
        if queue_size < 1:
            raise ValueError(f"queue_size: expected at least 1, got {queue_size}")
        self.policy = policy
        self.queue_size = queue_size
        self._received: SimpleQueue[Job | None] = SimpleQueue()
        self._ready: SimpleQueue[Job | None] = SimpleQueue()
        self._lock = threading.Lock()  # guards the counters and the order of submit and stop
        self._waiting = 0
        self._counts = {"served": 0, "failed": 0, "busy": 0}
        self._stopping = False
        self._running: Job | None = None
        self._warm = threading.Event()
        self._warm_up_error: Exception | None = None
        # Daemons: a stage that takes long must not keep the interpreter from exiting.
        self._threads = [
            threading.Thread(target=self._decode_loop, name="sinew-decode", daemon=True),
            threading.Thread(target=self._infer_loop, name="sinew-infer", daemon=True),
        ]

    def start(self) -> None:
        """Start the threads and warm the policy up, on the thread that will run it: thread pools and
        captured graphs belong to a thread. Raises what the warm-up raised."""
        for thread in self._threads:
            thread.start()
        while not self._warm.wait(0.2):  # a timeout, so that signal handlers run meanwhile
            pass
        if self._warm_up_error is not None:
            raise self._warm_up_error

    def submit(
        self, decode: Callable[[], Observation], on_done: Callable[[ActionChunk | SinewError], None]
    ) -> Job:
        """Queue a job. ``on_done`` gets the chunk, with ``timing.queue_ms`` filled in, or an error.

        Raises BusyError or ShuttingDownError, and then does not call ``on_done``.
        """
        job = Job(decode, on_done)
        with self._lock:
            if self._stopping:
                raise ShuttingDownError
            if self._waiting >= self.queue_size:
                self._counts["busy"] += 1
                raise BusyError(f"the queue is full: {self._waiting} requests wait")
            self._waiting += 1
            self._received.put(job)
        return job

    def stats(self) -> dict[str, int | bool]:
        """Counters since the start: waiting, running, served, failed, busy."""
        with self._lock:
            return {"waiting": self._waiting, "running": self._running is not None, **self._counts}

    def stop(self) -> None:
        """Refuse new jobs, fail the waiting ones, cancel the running one. Returns at once; see ``join``."""
        with self._lock:
            if self._stopping:
                return
            self._stopping = True
            running = self._running
        if running is not None:
            running.cancel.set()
        for queue in (self._received, self._ready):
            while (job := _take(queue)) is not None:
                self._abandon(job, ShuttingDownError())
            queue.put(None)

    def join(self, timeout: float) -> bool:
        """Wait for the threads to end after ``stop``; False when a stage is still running then."""
        deadline = time.monotonic() + timeout
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def give_up(self) -> None:
        """After ``stop``: answer the running job without waiting for its stage to end."""
        with self._lock:
            running = self._running
        if running is not None:
            self._finish(running, ShuttingDownError())

    # ------------------------------------------------------------------------- threads

    def _decode_loop(self) -> None:
        while (job := self._received.get()) is not None:
            start = time.perf_counter()
            try:
                self._raise_if_abandoned(job)
                job.observation = job.decode()
                self.policy.check(job.observation)
                job.decode_s = time.perf_counter() - start
                with self._lock:  # or stop() could empty the queue just before this job enters it
                    self._raise_if_abandoned(job)
                    self._ready.put(job)
            except Exception as error:  # noqa: BLE001 - whatever it is, the other clients are served on
                self._abandon(job, error)

    def _infer_loop(self) -> None:
        try:
            self.policy.warm_up()
        except Exception as error:  # noqa: BLE001 - raised again by start()
            self._warm_up_error = error
            return
        finally:
            self._warm.set()
        while (job := self._ready.get()) is not None:
            with self._lock:
                self._waiting -= 1
                self._running = job
            outcome = self._run(job)
            with self._lock:
                self._running = None
                self._counts["failed" if isinstance(outcome, SinewError) else "served"] += 1
            self._finish(job, outcome)

    def _run(self, job: Job) -> ActionChunk | SinewError:
        queue_s = time.perf_counter() - job.accepted - job.decode_s
        try:
            self._raise_if_abandoned(job)
            assert job.observation is not None  # set by the decode thread
            chunk = self.policy.infer(job.observation, cancel=job.cancel)
            return replace(chunk, timing=replace(chunk.timing, queue_ms=queue_s * 1e3))
        except Exception as error:  # noqa: BLE001 - whatever it is, the other clients are served on
            return self._presentable(error)

    def _raise_if_abandoned(self, job: Job) -> None:
        if self._stopping:
            raise ShuttingDownError
        if job.cancel.is_set():
            raise CancelledError("the request was cancelled")

    def _abandon(self, job: Job, error: Exception) -> None:
        with self._lock:
            self._waiting -= 1
            self._counts["failed"] += 1
        self._finish(job, self._presentable(error))

    def _finish(self, job: Job, outcome: ActionChunk | SinewError) -> None:
        with self._lock:
            answered, job.answered = job.answered, True
        if answered:
            return
        try:
            job.on_done(outcome)
        except Exception:  # a wire that cannot answer must not stop the others
            logger.exception("a reply could not be delivered")

    def _presentable(self, error: Exception) -> SinewError:
        """What the client is told. The unexpected goes to the log in full and to the wire in a sentence."""
        if isinstance(error, CancelledError) and self._stopping:
            return ShuttingDownError()
        if isinstance(error, SinewError):
            return error
        logger.error("a request failed unexpectedly", exc_info=error)
        return SinewError(f"internal error ({type(error).__name__}); the server's log has the details")


def _take(queue: SimpleQueue) -> Job | None:
    try:
        return queue.get_nowait()
    except Empty:
        return None
