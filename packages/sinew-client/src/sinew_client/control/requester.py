"""Send requests to a policy from a separate thread, one at a time, so that the control loop never waits."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Callable, Mapping

from sinew_client.errors import ClientError, SinewError
from sinew_client.faults import kind_of

logger = logging.getLogger(__name__)

# After a failure, the next request waits this many seconds. Each further wait is twice as long, up to the longest.
FIRST_WAIT, LONGEST_WAIT = 0.05, 0.5
ABANDONED = 4  # if this many calls hang beyond their deadline, new requests wait
FIRST_PATIENCE, LONGEST_PATIENCE = 10.0, 600.0  # seconds until the oldest hanging call no longer counts
LONGEST_REASON = 400  # longest reason of a failure, characters

# A call gets an observation and a time limit in seconds, and returns actions.
Call = Callable[[Mapping[str, Any], float], Any]


@dataclass(frozen=True)
class Outcome:
    """The result of a request: a value, or the reason of a failure.

    Attributes:
        value: The answer, such as the actions of a chunk.
        reason: Why the request failed; "" after a success.
        kind: Kind of the error; "" after a success, or if the failure is part of normal operation, such as a late
            answer (:func:`~sinew_client.faults.kind_of`).
    """

    value: Any = None
    reason: str = ""
    kind: str = ""


class Requester:
    """Sends one request at a time from its own thread. Its methods never wait.

    After a failure, it opens a new connection, with a growing pause between the attempts. If a call does not return by
    its deadline, the request has failed. The call stays on its abandoned thread, and new requests use a new thread.
    With four abandoned calls, new requests wait. The oldest call then stops counting after 10 s, the next one after
    20 s, and so on. So there is always a next request, but never many threads.

    All times are seconds of one monotonic clock that the caller reads. If that clock is set back, the stored times
    move with it.

    Args:
        connect: Function that opens a connection. It returns a function (observation, time limit) that returns the
            actions. It runs on the request thread, and again after every failure. If the returned function has an
            attribute ``close``, this is called when the connection is dropped.
        deadline: Seconds until a request has failed. It is also the time limit of the call.

    Attributes:
        failures: Number of failed requests.
    """

    continuous = False  # each observation gets exactly one answer

    def __init__(self, connect: Callable[[], Call], deadline: float):
        self._connect, self.deadline = connect, deadline
        self._worker: _Worker | None = None
        self._answer: SimpleQueue | None = None
        self._sent = 0.0
        self._wait, self._not_before = FIRST_WAIT, float("-inf")
        # For each worker with a hanging call, the time at which the call was abandoned (seconds of the caller's clock).
        self._hanging: dict[_Worker, float] = {}
        self._patience, self._lock = FIRST_PATIENCE, threading.Lock()
        self._now = float("-inf")  # the last time that the caller passed, seconds
        self.failures = 0

    @property
    def busy(self) -> bool:
        return self._answer is not None

    def ready(self, now: float) -> bool:
        """Return True if a request may be sent now: no request is in progress, and no pause after a failure."""
        self._look(now)
        return not self.busy and now >= self._not_before and self._free(now)

    def ask(self, observation: Mapping[str, Any], now: float) -> None:
        """Send a request.

        Args:
            observation: The observation.
            now: Present time, seconds.

        Raises:
            RuntimeError: A request is in progress.
        """
        if self.busy:
            raise RuntimeError("a request is already in progress; wait for its outcome, or cancel it")
        self._look(now)
        self._answer, self._sent = SimpleQueue(), now
        try:
            if self._worker is None:
                self._worker = _Worker(self._connect, self._left)
            self._worker.put(observation, self.deadline, self._answer)
        except (RuntimeError, MemoryError) as error:  # the operating system cannot start a thread
            self._answer.put(_failed(error))

    def poll(self, now: float) -> Outcome | None:
        """Return the outcome of the request, once.

        None means that the request is in progress, or that there is none.
        """
        self._look(now)
        if self._answer is None:
            return None
        if not self._answer.empty():
            outcome = self._answer.get()
            self._answer = None
        elif now - self._sent > self.deadline:
            outcome = Outcome(reason=f"no answer within {self.deadline:g} s")
            self._abandon()
        else:
            return None
        if outcome.reason:
            self.failures += 1
            self._not_before = now + self._wait
            self._wait = min(2 * self._wait, LONGEST_WAIT)
        else:
            self._wait, self._patience = FIRST_WAIT, FIRST_PATIENCE
        return outcome

    def cancel(self) -> None:
        """Abandon the request in progress, and drop its answer."""
        if self._answer is not None:
            self._abandon()

    def close(self, wait: float = 0.0) -> None:
        """End the request thread after its present call. Wait for the call at most ``wait`` seconds."""
        self._answer = None
        if self._worker is not None:
            self._worker.end()
            self._worker.thread.join(wait)
            self._worker = None

    def _abandon(self) -> None:
        """Abandon the thread with its hanging call. The next request opens a new connection on a new thread."""
        self._answer = None
        if self._worker is None:  # the operating system could not start a thread
            return
        with self._lock:
            self._hanging[self._worker] = self._now
        self._worker.end()
        self._worker = None

    def _left(self, worker: _Worker) -> None:
        with self._lock:
            self._hanging.pop(worker, None)

    def _free(self, now: float) -> bool:
        """Return True if the number of hanging calls allows a new request.

        A call that hangs for too long stops counting.
        """
        with self._lock:
            if len(self._hanging) < ABANDONED:
                return True
            first = min(self._hanging, key=lambda worker: self._hanging[worker])
            if now - self._hanging[first] < self._patience:
                return False
            del self._hanging[first]
        logger.warning("request hung for more than %g s; abandoning its connection", self._patience)
        self._patience = min(2 * self._patience, LONGEST_PATIENCE)
        return True

    def _look(self, now: float) -> None:
        """Store the present time. If the clock was set back, move the stored times with it."""
        back, self._now = self._now - now, now
        if back > 0:
            self._sent, self._not_before = self._sent - back, self._not_before - back
            with self._lock:
                self._hanging = {worker: at - back for worker, at in self._hanging.items()}


class _Worker:
    """A thread with one connection. It reconnects after a failure. After :meth:`end`, it ends when its call returns."""

    def __init__(self, connect: Callable[[], Call], on_end: Callable[[_Worker], None]):
        self._connect, self._left = connect, on_end
        self._jobs: SimpleQueue = SimpleQueue()
        self.thread = threading.Thread(target=self._run, name="sinew-request", daemon=True)
        self.thread.start()

    def put(self, observation: Mapping[str, Any], deadline: float, answer: SimpleQueue) -> None:
        self._jobs.put((observation, deadline, answer))

    def end(self) -> None:
        self._jobs.put(None)

    def _run(self) -> None:
        call: Call | None = None
        try:
            while True:
                job = self._jobs.get()
                if job is None:
                    break
                observation, deadline, answer = job
                try:
                    call = call or self._connect()
                    outcome = Outcome(call(observation, deadline))
                except BaseException as error:  # noqa: BLE001 - after any error of the call, the robot holds
                    outcome = _failed(error)
                if outcome.reason:
                    _close(call)
                    call = None
                answer.put(outcome)
            _close(call)
        finally:
            self._left(self)


def _failed(error: BaseException) -> Outcome:
    """Convert an exception of a request to an outcome. Log unexpected exceptions with their traceback."""
    kind = kind_of(error)
    try:
        text = str(error)[:LONGEST_REASON]
    except Exception:  # noqa: BLE001 - the error's own method __str__ may raise anything
        text = "(its text cannot be made)"
    reason = f"{type(error).__name__}: {text}"
    if isinstance(error, ClientError):
        return Outcome(reason=reason, kind=kind)
    if isinstance(error, SinewError):  # a policy in this process raised the error
        return Outcome(reason=text or kind or type(error).__name__, kind=kind)
    logger.error("the request failed", exc_info=error)
    return Outcome(reason=f"internal error: {reason}", kind=kind)


def _close(call: Call | None) -> None:
    close = getattr(call, "close", None)
    if close is not None:
        try:
            close()
        except BaseException:
            logger.debug("closing a connection failed", exc_info=True)
