"""Runs one policy for many clients, with a bounded queue and a few threads. It knows no sockets.

A request passes through a *decode* thread (bytes to a prepared observation) and the *inference* thread. So decoding
the next frames overlaps the running inference, a bad request is rejected at once, and socket threads never wait. The
inference thread itself decodes a request if the queue is empty.

A robot needs the action for its present observation. So a waiting request is replaced by a newer one of its session,
and a request whose deadline has passed gets an error instead of an inference.

If the policy computes several observations together, requests that fit together share an inference (``batching.py``).

Clients take turns by the measured time of their requests (``fair_queue.py``). A long inference lets shorter ones of
other clients run between two of its steps, if the policy supports it. One client may have a few waiting requests. If
the queue is full, a client without any takes the place of the newest request of the client with most
(``admission.py``).
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

PER_CLIENT = 2  # requests of one client that may wait
DRAIN_S = 0.01  # between two looks at what is left
FAILURES = 3  # unexpected failures in a row after which the policy itself is tried
DECODERS = 2  # threads: a large picture of one client does not keep the others from being decoded
QUICK = 2.0  # so many times as dear is an inference that a cheaper one comes between
HICCUP = 2.0  # times its usual cost: most that a turn is charged, as a machine may stall in anybody's turn
AHEAD = 256 << 20  # bytes of frames that are decoded and not answered; beyond, decoding waits for answers


class _Turn:
    """One inference under way.

    Attributes:
        jobs: that it computes. begun: by ``time.perf_counter``. away: seconds in which others computed since.
        charged: seconds that its owners were charged so far.
    """

    __slots__ = ("away", "begun", "charged", "jobs")

    def __init__(self, jobs: Sequence[ServingJob]):
        self.jobs, self.begun, self.away, self.charged = jobs, time.perf_counter(), 0.0, 0.0

    def seconds(self) -> float:
        return time.perf_counter() - self.begun - self.away


class Scheduler:
    """Runs requests one at a time, or a batch at a time.

    Args:
        policy: The policy.
        queue_size: Waiting requests in addition to the running one; more are rejected with BusyError.
        max_batch: Most requests of one inference, if the policy supports it; None measures the best size at the
            start.
        per_client: Most waiting requests of one client.
        supervisor: Keeps the threads alive, and collects problems.
        device_lock: Lets the schedulers of several policies take turns; None computes at any time.
        workers: Inferences at once, for a policy that computes elsewhere and only waits here.
        keep_warm_s: Seconds without a request after which the policy computes once for nobody; None never does.
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
        self._broken: str | None = None  # why the policy cannot infer even what it is warmed up with
        self._failures = 0  # unforeseen ones in a row
        self.device_lock, self._workers = device_lock, workers
        self._keep_warm_s, self._arrived = (
            keep_warm_s,
            threading.Event(),
        )  # a request did, since the last wait
        self.supervisor = supervisor or Supervisor()
        self._quiet = RateLimitedLog(logger)
        self._received: FairQueue[ServingJob] = FairQueue()
        self._ready: FairQueue[ServingJob] = FairQueue(key=lambda job: job.accepted)
        self._lock = threading.Lock()  # guards everything below, and the order of submit and stop
        self._room = threading.Condition(self._lock)  # there may be room for more decoded frames
        self._ahead = 0  # bytes of them
        self._admission = Admission(queue_size, per_client)
        self._counts = {"served": 0, "failed": 0, "busy": 0, "superseded": 0, "late": 0, "batches": 0}
        self._stopping = self._draining = False
        self._running: list[ServingJob] = []
        self._decoding: set[ServingJob] = set()
        self._warming = threading.Lock()  # taken by the thread that does it, for good
        self._warm = threading.Event()
        self._warm_up_error: BaseException | None = None
        self._threads: list[threading.Thread] = []
        self.supervisor.watch(self._problem)

    def start(self) -> None:
        """Start the threads and warm the policy up, on the thread that will run it: thread pools and
        captured graphs belong to a thread. Raises what the warm-up raised, and then leaves nothing behind."""
        loops = [(f"sinew-decode-{number}", self._decode_loop) for number in range(DECODERS)]
        loops += [
            (f"sinew-infer-{n}" if n else "sinew-infer", self._infer_loop) for n in range(self._workers)
        ]
        for name, loop in loops:
            self._threads.append(self.supervisor.thread(name, loop))
        try:
            # With a timeout, so that signal handlers run meanwhile, on Windows too.
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

        A waiting request of the same episode is answered with SupersededError now, and this one takes its place in
        the count. A request without a connection has no limit except the queue's.

        Args:
            job: The request.
            on_done: Called once with the chunk, with ``timing.queue_ms``, or with an error, on the thread that ends
                the request.

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
            # One change of threads less when nothing could overlap; the inference thread decodes it then.
            (self._ready if idle else self._received).put(job.connection, job)
            self._arrived.set()
        if older is not None:
            self._finish(older, SupersededError("a newer observation of this session has arrived"))
        for each in displaced:
            self._finish(each, BusyError("the queue is full, and others waited with less in it"))
        return job

    def cancel(self, job: ServingJob) -> None:
        """Nobody waits for this request any more: end it now if it waits, between two stages if it runs."""
        job.cancel.set()
        with self._lock:
            waited = self._leave(job)
        if waited:
            self._finish(job, CancelledError("the client left"))

    def expire(self) -> None:
        """Answer the waiting requests whose deadline has passed: their turn may never come."""
        now = time.perf_counter()
        with self._lock:
            late = [job for job in self._admission if job.deadline is not None and now > job.deadline]
            for job in late:
                self._leave(job)
            self._counts["late"] += len(late)
            self._counts["failed"] += len(late)
        for job in late:
            self._finish(job, DeadlineError("the deadline passed before the request's turn came"))

    def stats(self) -> dict[str, int | bool]:
        """Now: waiting, running. Since the start: served, failed, busy, superseded, late, and batches: inferences."""
        with self._lock:
            return {"waiting": self._admission.count, "running": bool(self._running), **self._counts}

    def drain(self) -> None:
        """Refuse new requests, answer those that are here, and end. Returns when that is done."""
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
        """Refuse new requests, fail the waiting ones, cancel the running one. Returns at once; see ``join``."""
        with self._lock:
            if self._stopping:
                return
            self._stopping = True
            self._room.notify_all()
            busy = [*self._decoding, *self._running]
            gathering = [job for job in self._admission if job.together is not None]
        for job in busy:
            job.cancel.set()
        for job in gathering:  # some are in no queue: they wait for the others of their message
            self._abandon(job, ShuttingDownError())
        for queue, threads in ((self._received, DECODERS), (self._ready, self._workers)):
            for job in queue.drain():
                self._abandon(job, ShuttingDownError())
            queue.end(threads)

    def join(self, timeout: float) -> bool:
        """Wait for the threads to end after ``stop``; False when a stage is still running then."""
        deadline = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def give_up(self) -> None:
        """After ``stop``: answer what is still decoded or computed, or waits for that, without waiting for its end."""
        with self._lock:
            busy = [*self._decoding, *self._running, *self._admission]
        for job in busy:
            self._finish(job, ShuttingDownError())

    # ------------------------------------------------------------------------- threads

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
        """Let a decoded request have its turn, with the others of its message for which there is room."""
        decoded = [job]
        if job.together is not None:
            decoded = job.together.arrived(job)
            if self._ahead >= AHEAD:
                decoded += job.together.decoded()
        release(decoded)

    def ready(self, decoded: list[ServingJob]) -> None:
        """Let decoded requests of one client, which were submitted here, have their turns."""
        with self._lock:  # or stop() could empty the queue just before they enter it
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
                # What was first may have been replaced while others computed; its successor has its turn.
                jobs: list[ServingJob] = []
                while job is not None and not self._begin(job, jobs):
                    job = self._ready.next()
                if job is not None:
                    self._answer(job, jobs)
            job, jobs = None, []  # keeps no frames until the next one comes

    def _next_ready(self) -> ServingJob | None:
        """Wait for the next request, and keep the policy warm meanwhile if that was requested."""
        while True:
            arrived = self._arrived = (
                threading.Event()
            )  # before the wait: a request that comes after it ends the run
            try:
                return self._ready.get(self._keep_warm_s)
            except TimeoutError:
                self._compute_for_nobody(arrived)

    def _compute_for_nobody(self, arrived: threading.Event) -> None:
        """Run one inference of grey frames, which keeps clocks and caches warm. arrived: ends it between two stages."""
        try:
            inputs = self.policy.prepare(self.policy.dummy_observation())
            with self.device_lock or contextlib.nullcontext():
                self.policy.run(inputs, cancel=arrived)
        except CancelledError:
            pass
        except Exception as error:  # noqa: BLE001 - the next request shows whether the policy works
            self._quiet.error("the policy failed while it was kept warm", error)

    def _warm_up(self) -> None:
        """Warm the policy up on the first thread that comes here; the others wait for it."""
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
        """Compute a request that has begun and what joins it. jobs: those that have, which grow."""
        outcomes: list[Outcome] = []
        try:
            outcomes = self._run(first, jobs)
        finally:  # all started requests are answered, even if this thread is ended
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
        """Take a request from the waiting ones to the running ones, and to ``jobs``; False if it waits no more."""
        with self._lock:
            waits = self._admission.leave(job)  # or superseded, cancelled, failed by stop()
            if waits:
                jobs.append(job)
                self._running.append(job)
                job.begun = time.perf_counter()
        return waits

    def _run(self, first: ServingJob, jobs: list[ServingJob]) -> list[Outcome]:
        """Compute a request and what waits and may share its inference, which joins ``jobs``: their outcomes."""
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
        """Return the outcome of each request, with ``timing.queue_ms`` in chunks. Those of a batch are of one kind."""
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
            if isinstance(
                outcome, ActionChunk
            ):  # dataclasses.replace looks at each field, which takes longer
                decode_s = 0.0 if job.prepared is None else job.prepared.seconds
                queue_ms = 1e3 * (begun - job.accepted - decode_s)
                timing = Timing(**(vars(outcome.timing) | {"queue_ms": queue_ms}))
                outcomes[index] = ActionChunk(**(vars(outcome) | {"timing": timing}))
        return outcomes

    def _charge(self, turn: _Turn, seconds: float) -> None:
        """Charge the owners of a turn in equal parts, ``seconds`` in all."""
        part = (seconds - turn.charged) / len(turn.jobs)
        turn.charged = seconds
        for job in turn.jobs:
            self._ready.charge(job.connection, part)

    def _between(self, turn: _Turn) -> None:
        """Between two steps of a turn: compute what waits, costs a fraction of it and is of clients that have used
        less. Then let the other policies of this device have their turn."""
        now = time.perf_counter()
        for job in turn.jobs:  # a sign of life: it may take long, as others come between
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
        """Return whether a request is decoded and known to cost so much at most."""
        usual = None if job.prepared is None else self.costs.seconds(job.alike, 1)
        return usual is not None and usual <= seconds

    def _compute_batch(self, jobs: Sequence[ServingJob], around: Mapping[str, Any]) -> list[Outcome]:
        """Compute several requests together. After an unexpected failure each is computed alone, so that only its
        cause fails.
        """
        outcomes: list[Outcome]
        try:
            outcomes = self.policy.run_batch(
                [_inputs(job) for job in jobs], cancel=AllCancelled(jobs), **around
            )
        except SinewError as error:
            return [self._presentable(error) for _ in jobs]
        except BaseException as error:  # noqa: BLE001 - each request is computed alone, and fails alone
            self._quiet.error("a batch failed and is computed one by one", error)
            return [self._compute_one(job, around) for job in jobs]
        self._failures, self._broken = 0, None
        left = CancelledError("the request was cancelled")
        return [
            self._presentable(left) if job.cancel.is_set() else each
            for job, each in zip(jobs, outcomes, strict=True)
        ]

    def _compute_one(self, job: ServingJob, around: Mapping[str, Any]) -> Outcome:
        """Compute a request, and count unexpected failures.

        A few in a row may come from one client. So the policy is then tried with its own observation, and the result
        becomes the server's health.
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
            raise DeadlineError(f"the deadline passed {1e3 * late:.1f} ms before the request's turn came")

    # ------------------------------------------------------------------------- places in the queue

    def _make_place(self, new: ServingJob) -> list[ServingJob]:
        """With the lock held. Returns the requests that have to go for a new one. Raises BusyError."""
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
        """Count a request out of the waiting ones; False if it was not among them. With the lock held."""
        if not self._admission.leave(job):
            return False
        # What has left keeps no memory: its turn may come late, or never.
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
        # An outcome's traceback may know the job: a circle would keep its frames.
        on_done, job.on_done = job.on_done, None
        if answered or on_done is None:
            return
        try:
            on_done(outcome)
        except BaseException as error:  # noqa: BLE001 - a wire that cannot answer must not stop the others
            self._quiet.error("a reply could not be delivered", error)

    def _presentable(self, error: BaseException) -> SinewError:
        """Return the error for the client. An unexpected one is logged in full and sent as one sentence."""
        if isinstance(error, CancelledError) and self._stopping:
            return ShuttingDownError()
        if isinstance(error, SinewError):
            return bare(error)
        self._quiet.error("a request failed unexpectedly", error)
        return SinewError(f"internal error ({type(error).__name__}); the server's log has the details")

    # ------------------------------------------------------------------------- signs of life

    def _problem(self) -> str | None:
        """A sentence if no request can be answered."""
        return self.stuck() or self._broken

    def stuck(self) -> str | None:
        """A sentence if a request decodes or computes for so long that it may never end."""
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
    """Return the policy's inputs."""
    assert job.prepared is not None
    return job.prepared.inputs
