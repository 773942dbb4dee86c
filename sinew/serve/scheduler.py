"""Runs one policy for many clients: a bounded queue and two threads. Knows nothing of sockets.

A job passes through a *decode* thread (bytes to a checked observation) and an *inference* thread. Two,
so that unpacking the next request's JPEGs overlaps the running inference and a bad request is refused
without waiting its turn, and so that the threads of the sockets never do either. A job that finds
nothing to wait for is decoded by the inference thread itself.

A robot wants the action for what it sees now. So a waiting job is replaced by a newer one of its session,
and a job whose deadline has passed when its turn comes is answered with an error instead of computed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Hashable
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


class SupersededError(SinewError):
    """A newer observation of the same session arrived while this one waited; it was not computed."""

    code = "superseded"


class DeadlineError(SinewError):
    """The request's deadline passed while it waited; it was not computed."""

    code = "deadline"


class RunnablePolicy(Protocol):
    """What the scheduler asks of a policy."""

    def warm_up(self) -> object: ...
    def check(self, observation: Observation) -> None: ...
    def infer(self, observation: Observation, *, cancel: threading.Event | None = None) -> ActionChunk: ...


Outcome = ActionChunk | SinewError


class Job:
    """One request on its way. ``on_done`` is called exactly once, on whatever thread ends the job.

    accepted: when it was submitted, ``time.perf_counter()`` seconds.
    """

    __slots__ = (
        "accepted",
        "answered",
        "cancel",
        "deadline",
        "decode",
        "decode_s",
        "observation",
        "on_done",
        "session",
        "waiting",
    )

    def __init__(
        self,
        decode: Callable[[], Observation],
        on_done: Callable[[Outcome], None],
        session: Hashable | None = None,
        deadline: float | None = None,
    ):
        self.decode = decode
        self.on_done = on_done
        self.session = session
        self.deadline = deadline
        self.accepted = time.perf_counter()
        self.decode_s = 0.0
        self.observation: Observation | None = None
        self.cancel = threading.Event()
        self.waiting = True
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
        self._lock = threading.Lock()  # guards everything below, and the order of submit and stop
        self._waiting = 0
        self._newest: dict[Hashable, Job] = {}  # the waiting job of each session that has one
        self._counts = {"served": 0, "failed": 0, "busy": 0, "superseded": 0, "late": 0}
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
        self,
        decode: Callable[[], Observation],
        on_done: Callable[[Outcome], None],
        *,
        session: Hashable | None = None,
        deadline: float | None = None,
    ) -> Job:
        """Queue a job. ``on_done`` gets the chunk, with ``timing.queue_ms`` filled in, or an error.

        session: a job of the same session that still waits is answered with SupersededError now, and this
        one takes its place in the count. deadline: ``time.perf_counter()`` seconds.

        Raises BusyError or ShuttingDownError, and then does not call ``on_done``.
        """
        job = Job(decode, on_done, session, deadline)
        with self._lock:
            if self._stopping:
                raise ShuttingDownError
            older = self._newest.get(session) if session is not None else None
            if older is None and self._waiting >= self.queue_size:
                self._counts["busy"] += 1
                raise BusyError(f"the queue is full: {self._waiting} requests wait")
            if older is not None:
                self._leave(older)
                self._counts["superseded"] += 1
            if session is not None:
                self._newest[session] = job
            idle = not self._waiting and self._running is None
            self._waiting += 1
            # One change of threads less when nothing could overlap; the inference thread decodes it then.
            (self._ready if idle else self._received).put(job)
        if older is not None:
            self._finish(older, SupersededError("a newer observation of this session has arrived"))
        return job

    def cancel(self, job: Job) -> None:
        """Nobody waits for this job any more: end it now if it waits, between two stages if it runs."""
        job.cancel.set()
        with self._lock:
            waited = self._leave(job)
        if waited:
            self._finish(job, CancelledError("the client left"))

    def stats(self) -> dict[str, int | bool]:
        """Now: waiting, running. Since the start: served, failed, busy, superseded, late."""
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
            if job.answered:
                continue
            try:
                self._raise_if_abandoned(job)
                self._decode(job)
                with self._lock:  # or stop() could empty the queue just before this job enters it
                    self._raise_if_abandoned(job)
                    self._ready.put(job)
            except Exception as error:  # noqa: BLE001 - whatever it is, the other clients are served on
                self._abandon(job, error)

    def _decode(self, job: Job) -> Observation:
        start = time.perf_counter()
        job.observation = job.decode()
        self.policy.check(job.observation)
        job.decode_s = time.perf_counter() - start
        return job.observation

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
                if not self._leave(job):
                    continue  # superseded, cancelled or failed by stop()
                self._running = job
            outcome = self._run(job)
            with self._lock:
                self._running = None
                self._counts["failed" if isinstance(outcome, SinewError) else "served"] += 1
                self._counts["late"] += isinstance(outcome, DeadlineError)
            self._finish(job, outcome)

    def _run(self, job: Job) -> Outcome:
        try:
            self._raise_if_abandoned(job)
            observation = job.observation or self._decode(job)
            now = time.perf_counter()
            queue_s = now - job.accepted - job.decode_s
            if job.deadline is not None and now > job.deadline:
                late = 1e3 * (now - job.deadline)
                raise DeadlineError(f"the deadline passed {late:.1f} ms before the request's turn came")
            chunk = self.policy.infer(observation, cancel=job.cancel)
            return replace(chunk, timing=replace(chunk.timing, queue_ms=queue_s * 1e3))
        except Exception as error:  # noqa: BLE001 - whatever it is, the other clients are served on
            return self._presentable(error)

    def _raise_if_abandoned(self, job: Job) -> None:
        if self._stopping:
            raise ShuttingDownError
        if job.cancel.is_set():
            raise CancelledError("the request was cancelled")

    def _leave(self, job: Job) -> bool:
        """Count a job out of the waiting ones; False if it was not among them. With the lock held."""
        if not job.waiting:
            return False
        job.waiting = False
        self._waiting -= 1
        if self._newest.get(job.session) is job:
            del self._newest[job.session]
        return True

    def _abandon(self, job: Job, error: Exception) -> None:
        with self._lock:
            self._counts["failed"] += self._leave(job)
        self._finish(job, self._presentable(error))

    def _finish(self, job: Job, outcome: Outcome) -> None:
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
