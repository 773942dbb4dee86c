"""Runs one policy for many clients, with a bounded queue and a few threads. The module uses no sockets.

A request passes through a *decode* thread (bytes to a prepared observation) and the *inference* thread. So decoding
the next frames overlaps the running inference, a bad request is rejected at once, and socket threads never wait. The
inference thread itself decodes a request if the queue is empty.

A robot needs the action for its present observation. So a waiting request is replaced by a newer one of its session,
and a request whose deadline has passed gets an error instead of an inference.

If the policy computes several observations together, requests that fit together share an inference (``batching.py``).

Clients take turns by the measured time of their requests (``fair_queue.py``). A long inference lets shorter inferences
of other clients run between two of its steps, if the policy supports this. One client may have a few waiting requests.
If the queue is full, a client without a waiting request takes the place of the newest request of the client with most
requests (``admission.py``).
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from sinew.core import ActionChunk, BusyError, CancelledError, SinewError, Timing
from sinew.core.rate_limited_log import RateLimitedLog
from sinew.serve.admission import Admission
from sinew.serve.batching import AllCancelled, Batcher, Costs
from sinew.serve.device_lock import DeviceLock
from sinew.serve.fair_queue import FairQueue
from sinew.serve.job import PreparedInputs, ServingJob, release
from sinew.serve.request import DeadlineError, Outcome, ShuttingDownError, SupersededError, bare
from sinew.serve.served import ServedPolicy
from sinew.serve.supervise import Supervisor

logger = logging.getLogger(__name__)

PER_CLIENT = 2  # largest number of waiting requests of one client
DRAIN_S = 0.01  # seconds between two checks whether all requests are answered
FAILURES = 3  # unexpected failures in a row after which the policy is tried with its own observation
DECODERS = 2  # number of decode threads, so that a large picture of one client does not block the others
# A long inference lets a short one run between two of its steps if the long one costs at least this multiple of the
# short one.
QUICK = 2.0
# A turn is charged at most this multiple of its usual cost, because the machine may stall during any turn.
HICCUP = 2.0
AHEAD = 256 << 20  # decoding waits while the decoded frames of unanswered requests have more bytes than this


class _Turn:
    """One inference in progress, which is a turn of one or more clients.

    Attributes:
        jobs: The requests that it computes.
        begun: Start time on the clock ``time.perf_counter()``.
        away: Seconds since the start in which other inferences computed.
        charged: Seconds that were charged so far to the clients of these requests.
    """

    __slots__ = ("away", "begun", "charged", "jobs")

    def __init__(self, jobs: Sequence[ServingJob]):
        self.jobs, self.begun, self.away, self.charged = jobs, time.perf_counter(), 0.0, 0.0

    def seconds(self) -> float:
        return time.perf_counter() - self.begun - self.away


class Scheduler:
    """Runs the requests for one policy, one at a time or a batch at a time.

    Args:
        policy: The policy.
        queue_size: Largest number of waiting requests in addition to the running one. Further requests are rejected
            with BusyError.
        max_batch: Largest number of requests in one inference, if the policy supports batches. None measures the best
            size at the start.
        per_client: Largest number of waiting requests of one client.
        supervisor: Keeps the threads alive, and collects problems.
        device_lock: Lets the schedulers of several policies take turns; None computes at any time.
        workers: Number of simultaneous inferences, for a policy that computes elsewhere and only waits here.
        keep_warm_s: Seconds without a request, after which the policy computes once without a request to stay warm.
            None never does this.
    """

    def __init__(
        self,
        policy: ServedPolicy,
        *,
        queue_size: int = 64,
        per_client: int = PER_CLIENT,
        supervisor: Supervisor | None = None,
        max_batch: int | None = 1,
        device_lock: DeviceLock | None = None,
        workers: int = 1,
        keep_warm_s: float | None = None,
    ):
        for name, number in (("queue_size", queue_size), ("max_batch", max_batch), ("workers", workers)):
            if number is not None and number < 1:
                raise ValueError(f"{name}: expected at least 1, got {number}")
        self.costs = Costs()
        self.batcher = None if max_batch == 1 else Batcher(max_batch, self.costs)
        self.policy = policy
        # Reason why the policy fails even with its own observation; None if it works.
        self._broken: str | None = None
        self._failures = 0  # number of unexpected failures in a row
        self.device_lock, self._workers = device_lock, workers
        # `_arrived` is set when a request has arrived since the last wait.
        self._keep_warm_s, self._arrived = keep_warm_s, threading.Event()
        self.supervisor = supervisor or Supervisor()
        self._quiet = RateLimitedLog(logger)
        self._received: FairQueue[ServingJob] = FairQueue()
        self._ready: FairQueue[ServingJob] = FairQueue(key=lambda job: job.accepted)
        # This lock guards all attributes below, and the order of submit() and stop().
        self._lock = threading.Lock()
        self._room = threading.Condition(self._lock)  # signals that there may be room for more decoded frames
        self._ahead = 0  # bytes of the decoded frames whose requests are not answered yet
        self._admission = Admission(queue_size, per_client)
        self._counts = {"served": 0, "failed": 0, "busy": 0, "superseded": 0, "late": 0, "batches": 0}
        self._stopping = self._draining = False
        self._running: list[ServingJob] = []
        self._decoding: set[ServingJob] = set()
        # The first thread that acquires this lock warms the policy up, and never releases the lock.
        self._warming = threading.Lock()
        self._warm = threading.Event()
        self._warm_up_error: BaseException | None = None
        self._threads: list[threading.Thread] = []
        self.supervisor.watch(self._problem)

    def start(self) -> None:
        """Start the threads, and warm the policy up.

        The warm-up runs on the thread that will run the policy, because thread pools and captured graphs belong to a
        thread. Its errors are raised here. Then all threads are stopped.
        """
        loops = [(f"sinew-decode-{number}", self._decode_loop) for number in range(DECODERS)]
        loops += [
            (f"sinew-infer-{n}" if n else "sinew-infer", self._infer_loop) for n in range(self._workers)
        ]
        for name, loop in loops:
            self._threads.append(self.supervisor.thread(name, loop))
        try:
            # Wait with a timeout, so that signal handlers run during the wait, also on Windows.
            while not self._warm.wait(0.2):
                pass
            if self._warm_up_error is not None:
                raise self._warm_up_error
        except BaseException:
            self.stop()
            self.unwatch()
            raise
        if self.device_lock is not None:
            self.device_lock.join(self, self._ready.order)

    def submit(self, job: ServingJob, on_done: Callable[[Outcome], None]) -> ServingJob:
        """Queue a request and return it.

        A waiting request of the same episode is answered with SupersededError at once, and the new request takes its
        place. A request without a connection has no limit except the queue's.

        Args:
            job: The request.
            on_done: Function that is called once with the chunk, with ``timing.queue_ms``, or with an error. The
                thread that ends the request calls the function.

        Raises:
            BusyError: The queue is full. ``on_done`` is not called.
            ShuttingDownError: The server stops. ``on_done`` is not called.
        """
        job.accepted = time.perf_counter()
        displaced: list[ServingJob] = []
        with self._lock:
            if self._stopping or self._draining:
                raise ShuttingDownError
            older = self._admission.newest.get(job.episode)
            if older is None:
                displaced = self._make_place(job)
            else:
                self._leave(older)
                self._counts["superseded"] += 1
            idle = not self._admission.count and not self._running and job.together is None
            job.home, job.on_done = self, on_done
            self._admission.enter(job)
            # If the scheduler is idle, the inference thread decodes the request itself, which saves
            # a thread switch.
            (self._ready if idle else self._received).put(job.connection, job)
            self._arrived.set()
        if older is not None:
            self._finish(older, SupersededError("a newer observation of this session has arrived"))
        for each in displaced:
            self._finish(
                each,
                BusyError(
                    "the queue is full, and clients with fewer waiting requests come first; try again later"
                ),
            )
        return job

    def cancel(self, job: ServingJob) -> None:
        """End a request because no client waits for it: at once if it waits, between two stages if it runs."""
        job.cancel.set()
        with self._lock:
            waited = self._leave(job)
        if waited:
            self._finish(job, CancelledError("the client has disconnected"))

    def expire(self) -> None:
        """Answer the waiting requests whose deadline has passed with an error, because their turn may never come."""
        now = time.perf_counter()
        with self._lock:
            late = [job for job in self._admission if job.deadline is not None and now > job.deadline]
            for job in late:
                self._leave(job)
            self._counts["late"] += len(late)
            self._counts["failed"] += len(late)
        for job in late:
            self._finish(
                job, DeadlineError("the deadline passed before the request's turn; set a later deadline_ms")
            )

    def stats(self) -> dict[str, int | bool]:
        """Return counters of the requests that this scheduler has handled.

        ``waiting`` and ``running`` are the present requests. ``served``, ``failed``, ``busy``, ``superseded`` and
        ``late`` count requests since the start, and ``batches`` counts inferences.
        """
        with self._lock:
            return {"waiting": self._admission.count, "running": bool(self._running), **self._counts}

    def drain(self) -> None:
        """Reject new requests, and answer the present requests. Return when every request is answered."""
        with self._lock:
            self._draining = True
        while not self._stopping:
            self.expire()
            with self._lock:
                if not (self._admission.count or self._running or self._decoding):
                    break
            time.sleep(DRAIN_S)
        self.stop()
        for thread in self._threads:
            thread.join()
        self.unwatch()

    def unwatch(self) -> None:
        """Remove the problems of this scheduler and its policy from the server's health."""
        if self.device_lock is not None:
            self.device_lock.leave(self)
        for check in (self._problem, self.policy.problem):
            self.supervisor.forget(check)

    def stop(self) -> None:
        """Reject new and waiting requests, and cancel the running request. Return at once; ``join`` waits for the
        end.
        """
        with self._lock:
            if self._stopping:
                return
            self._stopping = True
            self._room.notify_all()
            busy = [*self._decoding, *self._running]
            gathering = [job for job in self._admission if job.together is not None]
        for job in busy:
            job.cancel.set()
        # Some jobs are in no queue, because they wait for the other jobs of their message.
        for job in gathering:
            self._abandon(job, ShuttingDownError())
        for queue, threads in ((self._received, DECODERS), (self._ready, self._workers)):
            for job in queue.drain():
                self._abandon(job, ShuttingDownError())
            queue.end(threads)

    def join(self, timeout: float) -> bool:
        """Wait for the threads to end after ``stop``. Return False if a stage of an inference still runs after
        ``timeout`` seconds.
        """
        deadline = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def give_up(self) -> None:
        """Answer all requests that are still decoded, computed or waiting after ``stop``, without waiting for them."""
        with self._lock:
            busy = [*self._decoding, *self._running, *self._admission]
        for job in busy:
            self._finish(job, ShuttingDownError())

    def _decode_loop(self) -> None:
        while (job := self._received.get()) is not None:
            with self._lock:
                self._room.wait_for(lambda: self._ahead < AHEAD or self._stopping)
                self._decoding.add(job)
            try:
                self._raise_if_abandoned(job)
                self._decode(job)
                with self._lock:
                    self._raise_if_abandoned(job)
                self._decoded(job)
            except BaseException as error:  # noqa: BLE001 - whatever it is, the other clients are served on
                self._abandon(job, error)
            finally:
                with self._lock:
                    self._decoding.discard(job)
                del job

    def _decoded(self, job: ServingJob) -> None:
        """Queue a decoded request for inference, together with the other requests of its message.

        If the memory for decoded frames is full, the decoded requests of the message are queued at once, without the
        others.
        """
        decoded = [job]
        if job.together is not None:
            decoded = job.together.arrived(job)
            if self._ahead >= AHEAD:
                decoded += job.together.decoded()
        release(decoded)

    def ready(self, decoded: list[ServingJob]) -> None:
        """Queue decoded requests of one client for inference."""
        # Without the lock, stop() could empty the queue just before the requests enter it.
        with self._lock:
            if waiting := [each for each in decoded if each.waiting and not self._stopping]:
                self._ready.put(waiting[0].connection, *waiting)

    def _decode(self, job: ServingJob) -> None:
        start = job.begun = time.perf_counter()
        observation = job.read(partial(self._raise_if_abandoned, job))
        size = sum(frame.nbytes for moment in observation.moments for frame in moment.images.values())
        with self._lock:
            if not job.answered:
                job.size, self._ahead = size, self._ahead + size
        inputs = self.policy.prepare(observation)
        seconds = time.perf_counter() - start
        batched = self.batcher is not None and self.batcher.limit > 1
        kind = self.policy.batch_key(inputs) if batched else None
        job.prepared = PreparedInputs(
            inputs, kind, self.policy.cost_key(inputs) if kind is None else kind, seconds
        )

    def _infer_loop(self) -> None:
        self._warm_up()
        if self._warm_up_error is not None:
            return
        while (job := self._next_ready()) is not None:
            with self.device_lock or contextlib.nullcontext():
                # A newer request may have replaced this one while others computed. Then take the next request.
                jobs: list[ServingJob] = []
                while job is not None and not self._begin(job, jobs):
                    job = self._ready.next()
                if job is not None:
                    self._answer(job, jobs)
            job, jobs = None, []  # release the frames before the next wait

    def _next_ready(self) -> ServingJob | None:
        """Wait for the next request. If ``keep_warm_s`` is set, run an inference without a request from time to time
        during the wait, so that the device stays fast.
        """
        while True:
            # Create a new event before the wait. A request that arrives after this line ends the inference that
            # keeps the policy warm.
            arrived = self._arrived = threading.Event()
            try:
                return self._ready.get(self._keep_warm_s)
            except TimeoutError:
                self._compute_for_nobody(arrived)

    def _compute_for_nobody(self, arrived: threading.Event) -> None:
        """Run one inference with grey frames, so that the device's clocks stay high and its caches stay filled.

        The event ``arrived`` ends this inference between two stages.
        """
        try:
            inputs = self.policy.prepare(self.policy.dummy_observation())
            with self.device_lock or contextlib.nullcontext():
                self.policy.run(inputs, cancel=arrived)
        except CancelledError:
            pass
        except Exception as error:  # noqa: BLE001 - the next request shows whether the policy works
            self._quiet.error("the policy failed in a run that keeps it warm", error)

    def _warm_up(self) -> None:
        """Warm the policy up on the first thread that calls this. The other threads wait for it."""
        if not self._warming.acquire(blocking=False):
            self._warm.wait()
            return
        try:
            self.policy.warm_up()
            if self.batcher is not None:
                self.batcher.calibrate(self.policy)
        except BaseException as error:  # noqa: BLE001 - raised again by start()
            self._warm_up_error = error
        finally:
            self._warm.set()

    def _answer(self, first: ServingJob, jobs: list[ServingJob]) -> None:
        """Compute a request that has begun, together with the requests that join it, and answer all of them.

        ``jobs`` are the requests of this inference. The method adds the joining requests to ``jobs``.
        """
        outcomes: list[Outcome] = []
        try:
            outcomes = self._run(first, jobs)
        finally:
            # Answer all requests of the inference, even if an exception ends this thread.
            with self._lock:
                outcomes = outcomes or [SinewError("internal error") for _ in jobs]
                self._running = [job for job in self._running if job not in jobs]
                self._counts["batches"] += 1
                for outcome in outcomes:
                    self._counts["failed" if isinstance(outcome, SinewError) else "served"] += 1
                    self._counts["late"] += isinstance(outcome, DeadlineError)
            for each, outcome in zip(jobs, outcomes, strict=True):
                self._finish(each, outcome)

    def _begin(self, job: ServingJob, jobs: list[ServingJob]) -> bool:
        """Move a request from the waiting to the running requests, and add it to ``jobs``. Return False if the request
        was not waiting.
        """
        with self._lock:
            waits = self._admission.leave(job)  # False if it was superseded, cancelled or rejected by stop()
            if waits:
                jobs.append(job)
                self._running.append(job)
                job.begun = time.perf_counter()
        return waits

    def _run(self, first: ServingJob, jobs: list[ServingJob]) -> list[Outcome]:
        """Compute a request together with waiting requests that may share its inference. The method adds these
        waiting requests to ``jobs``.

        Returns:
            The outcome of each request in ``jobs``.
        """
        try:
            self._raise_if_abandoned(first)
            if first.prepared is None:
                self._decode(first)
                self._raise_if_abandoned(first)
        except BaseException as error:  # noqa: BLE001 - whatever it is, the other clients are served on
            return [self._presentable(error)]
        if self.batcher is not None and first.kind is not None:
            beside = [] if self.device_lock is None else self.device_lock.beside(self)
            now = time.perf_counter()
            crowded = first.together is not None and not self._ready.alone(first.connection)
            for job in self.batcher.members(first, self._ready.order(), now, beside, crowded)[1:]:
                if self._begin(job, jobs):
                    self._ready.remove(job.connection, job)
                    self._ready.took(job.connection)
        return self._compute(jobs)

    def _compute(self, jobs: Sequence[ServingJob]) -> list[Outcome]:
        """Compute requests that may be in one batch. Return the outcome of each request. A chunk also gets
        ``timing.queue_ms``, the milliseconds that its request has waited.
        """
        turn, alike, count = _Turn(jobs), jobs[0].alike, len(jobs)
        begun = turn.begun
        around = {"between": partial(self._between, turn)} if self.policy.pauses else {}
        try:
            if count > 1:
                outcomes = self._compute_batch(jobs, around)
            else:
                outcomes = [self._compute_one(jobs[0], around)]
        finally:
            seconds, usual = turn.seconds(), self.costs.seconds(alike, count)
            self._charge(turn, seconds if usual is None else min(seconds, HICCUP * usual))
        if all(isinstance(each, ActionChunk) for each in outcomes):
            self.costs.learn(alike, count, seconds)
        for index, (job, outcome) in enumerate(zip(jobs, outcomes, strict=True)):
            # Create the chunk directly, because dataclasses.replace is slower.
            if isinstance(outcome, ActionChunk):
                decode_s = 0.0 if job.prepared is None else job.prepared.seconds
                queue_ms = 1e3 * (begun - job.accepted - decode_s)
                timing = Timing(**(vars(outcome.timing) | {"queue_ms": queue_ms}))
                outcomes[index] = ActionChunk(**(vars(outcome) | {"timing": timing}))
        return outcomes

    def _charge(self, turn: _Turn, seconds: float) -> None:
        """Charge the clients of an inference in equal parts, so that the total of the inference is ``seconds``."""
        part = (seconds - turn.charged) / len(turn.jobs)
        turn.charged = seconds
        for job in turn.jobs:
            self._ready.charge(job.connection, part)

    def _between(self, turn: _Turn) -> None:
        """Let other requests compute between two steps of a running inference.

        First, the method computes waiting requests that are much cheaper than this inference, and whose clients have
        used less time. After these requests, the other policies of this device have their turn.
        """
        now = time.perf_counter()
        # Restart the time limit of the jobs, because the turn may take long if others compute in between.
        for job in turn.jobs:
            job.begun = now
        if self._ready.waits and not self._stopping:
            own = turn.seconds()
            self._charge(turn, own)
            usual = self.costs.seconds(turn.jobs[0].alike, len(turn.jobs))
            most = own if usual is None else max(own, usual) / QUICK
            owners = {job.connection for job in turn.jobs}
            light = partial(self._costs_at_most, most)
            while (first := self._ready.next_behind(owners, light)) is not None:
                jobs: list[ServingJob] = []
                if self._begin(first, jobs):
                    self._answer(first, jobs)
            turn.away += time.perf_counter() - now
        if self.device_lock is not None:
            turn.away += self.device_lock.pass_on()

    def _costs_at_most(self, seconds: float, job: ServingJob) -> bool:
        """Return True if a request is decoded and its inference is known to take at most ``seconds``."""
        usual = None if job.prepared is None else self.costs.seconds(job.alike, 1)
        return usual is not None and usual <= seconds

    def _compute_batch(self, jobs: Sequence[ServingJob], around: Mapping[str, Any]) -> list[Outcome]:
        """Compute several requests together.

        After an unexpected failure, each request is computed alone, so that only the request that causes it fails.

        Args:
            jobs: The requests of the batch.
            around: Further arguments of the policy's ``run_batch``.
        """
        outcomes: list[Outcome]
        try:
            outcomes = self.policy.run_batch(
                [_inputs(job) for job in jobs], cancel=AllCancelled(jobs), **around
            )
        except SinewError as error:
            return [self._presentable(error) for _ in jobs]
        except BaseException as error:  # noqa: BLE001 - each request is computed alone, and fails alone
            self._quiet.error("a batch failed, and its requests are computed one by one", error)
            return [self._compute_one(job, around) for job in jobs]
        self._failures, self._broken = 0, None
        left = CancelledError("the request was cancelled")
        return [
            self._presentable(left) if job.cancel.is_set() else each
            for job, each in zip(jobs, outcomes, strict=True)
        ]

    def _compute_one(self, job: ServingJob, around: Mapping[str, Any]) -> Outcome:
        """Compute a request, and count unexpected failures.

        A few failures in a row may come from one client. So the scheduler then tries the policy with the policy's own
        observation. If this fails too, the server reports that it is unhealthy.

        Args:
            job: The request.
            around: Further arguments of the policy's ``run``.
        """
        try:
            self._raise_if_abandoned(job)
            chunk = self.policy.run(_inputs(job), cancel=job.cancel, **around)
        except BaseException as error:  # noqa: BLE001 - whatever it is, the other clients are served on
            if not isinstance(error, SinewError):
                self._failures += 1
            if self._failures >= FAILURES:
                self._failures = 0
                try:
                    self.policy.warm_up()
                    self._broken = None
                except BaseException as still:  # noqa: BLE001 - told by health
                    self._broken = (
                        f"the policy fails ({type(still).__name__}); the server's log has the details"
                    )
            return self._presentable(error)
        self._failures, self._broken = 0, None
        return chunk

    def _raise_if_abandoned(self, job: ServingJob) -> None:
        if self._stopping:
            raise ShuttingDownError
        if job.cancel.is_set():
            raise CancelledError("the request was cancelled")
        if job.deadline is not None and (late := time.perf_counter() - job.deadline) > 0:
            raise DeadlineError(
                f"the deadline passed {1e3 * late:.1f} ms before the request's turn; set a later deadline_ms"
            )

    def _make_place(self, new: ServingJob) -> list[ServingJob]:
        """Remove and return the requests that must make room for a new request. The caller has the lock.

        Raises:
            BusyError: The new request must be rejected.
        """
        try:
            going = self._admission.room(new)
        except BusyError:
            self._counts["busy"] += 1
            raise
        for job in going:
            self._counts["busy"] += 1
            self._leave(job)
        return going

    def _leave(self, job: ServingJob) -> bool:
        """Remove a request from the waiting requests. Return False if it was not waiting. The caller has the lock."""
        if not self._admission.leave(job):
            return False
        # Remove the request from its queue too, so that it uses no memory until its turn, which may never come.
        _ = self._received.remove(job.connection, job) or self._ready.remove(job.connection, job)
        return True

    def _abandon(self, job: ServingJob, error: BaseException) -> None:
        outcome = self._presentable(error)
        with self._lock:
            left = self._leave(job)
            self._counts["failed"] += left
            self._counts["late"] += left and isinstance(outcome, DeadlineError)
        self._finish(job, outcome)

    def _finish(self, job: ServingJob, outcome: Outcome) -> None:
        with self._lock:
            answered, job.answered = job.answered, True
            if self._ahead >= AHEAD:
                self._room.notify_all()
            self._ahead, job.size = self._ahead - job.size, 0
        if job.together is not None:
            release(job.together.ended(job))
        # Remove the callback from the job before the call. An outcome's traceback may refer to the job, and the
        # reference cycle would keep the job's frames in memory.
        on_done, job.on_done = job.on_done, None
        if answered or on_done is None:
            return
        try:
            on_done(outcome)
        except BaseException as error:  # noqa: BLE001 - a wire that cannot answer must not stop the others
            self._quiet.error("a reply could not be delivered", error)

    def _presentable(self, error: BaseException) -> SinewError:
        """Return the error that is sent to the client. An unexpected error is logged with its traceback, and the client
        receives only one sentence.
        """
        if isinstance(error, CancelledError) and self._stopping:
            return ShuttingDownError()
        if isinstance(error, SinewError):
            return bare(error)
        self._quiet.error("a request failed unexpectedly", error)
        return SinewError(f"internal error ({type(error).__name__}); the server's log has the details")

    def _problem(self) -> str | None:
        """Return a sentence with the reason why no request can be answered; None if requests can be answered."""
        return self.stuck() or self._broken

    def stuck(self) -> str | None:
        """Return a sentence if a request decodes or computes for so long that it may never end, else None."""
        now, limit = time.perf_counter(), self.supervisor.stuck_s
        with self._lock:
            running, decoding = list(self._running), list(self._decoding)
        for what, jobs in (("computed", running), ("decoded", decoding)):
            for job in jobs:
                begun = job.begun
                if limit and begun is not None and now - begun > limit:
                    return f"a request is being {what} for {now - begun:.0f} s"
        return None


def _inputs(job: ServingJob) -> Any:
    """Return the inputs that the policy has prepared for a job."""
    assert job.prepared is not None
    return job.prepared.inputs
