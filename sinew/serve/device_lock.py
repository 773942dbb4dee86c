"""A lock with which the schedulers of several policies share one device: they take turns, one inference at a time.

Streams (inference on the newest state, several times per chunk) compute at the same time on their own threads. A
stream shares the time with requests (:class:`BackgroundTask`).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

SHARE = 0.5  # fraction of the time that all streams together may compute while a request computes or waits
THREADS = 256  # largest number of threads for which the duration of the last turn is stored
CREDIT_S = 0.02  # seconds of computing time that the streams may save up

# A function that returns the ready requests of a scheduler, in the order of their turns.
Waiting = Callable[[], Sequence[Any]]


@dataclass(slots=True, eq=False)
class _InLine:
    """A thread that waits for the device or computes on it.

    Attributes:
        thread: The waiting or computing thread.
        since: Time at which the turn (the use of the device) began or continued.
        used: Seconds of the turn before ``since``.
    """

    thread: int = field(default_factory=threading.get_ident)
    since: float = 0.0
    used: float = 0.0


class DeviceLock:
    """A lock that lets threads compute one at a time, in the order of their requests. Use it as a context manager. A
    thread that has the lock must not take it again.

    A scheduler requests the lock once for each inference. So policies take turns, like connections inside a
    scheduler. A long inference lets other threads compute between two of its steps (:meth:`pass_on`).

    Args:
        clock: Returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        # Time since which there has always been a request that computes or waits. None while there are no requests.
        self._since: float | None = None
        self._used = 0.0  # seconds that streams have computed since `_since`
        self.yielding = 0  # number of stream threads that wait for their share of the time
        self._changed = threading.Condition()
        self._line: deque[_InLine] = deque()  # the waiting threads in their order; the first thread computes
        self._usual: dict[int, float] = {}  # thread -> seconds of its last turn
        self._members: dict[object, Waiting] = {}

    def __enter__(self) -> None:
        with self._changed:
            if self._since is None:
                self._since, self._used = self._clock(), 0.0
            self._wait(_InLine())

    def __exit__(self, *_exc_info: object) -> None:
        thread = threading.get_ident()
        with self._changed:
            # This thread has no place in the queue if an exception ended it while other threads computed.
            if self._line and (place := self._line[0]).thread == thread:
                self._line.popleft()
                if len(self._usual) >= THREADS:
                    self._usual.clear()
                self._usual[thread] = place.used + self._clock() - place.since
                self._left()

    def pass_on(self) -> float:
        """Let the waiting threads compute between two steps of this thread's turn.

        The waiting threads compute if this turn has taken at least as long as the last turn of the first waiting
        thread.

        Returns:
            The seconds that the other threads took.
        """
        # Check the length without the lock first, because this method runs between all steps of an inference.
        if len(self._line) < 2:
            return 0.0
        with self._changed:
            place, now = self._line[0], self._clock()
            if len(self._line) < 2 or now - place.since < self._usual.get(self._line[1].thread, 0.0):
                return 0.0
            self._line.popleft()
            place.used += now - place.since
            self._changed.notify_all()
            self._wait(place)
            return place.since - now

    def _wait(self, place: _InLine) -> None:
        """Wait until this thread is the first in the queue for the device. The caller has the lock."""
        self._line.append(place)
        try:
            while self._line[0] is not place:
                self._changed.wait()
        except BaseException:  # an exception from outside ends this thread, and the other threads continue
            self._line.remove(place)
            self._left()
            raise
        place.since = self._clock()

    def _left(self) -> None:
        """Notify the other threads that a thread has left the queue for the device. The caller has the lock.

        If no request computes or waits any more, the computing time of the streams counts from zero again.
        """
        if not self._line:
            self._since = None
        self._changed.notify_all()

    def used(self, begun: float | None) -> float:
        """Count the computing time of a stream, and wait until the stream may continue.

        Without requests, the stream may continue at once. Otherwise the stream waits until requests have had
        their share of the time.

        Args:
            begun: Time since which the stream has computed; None if it has not computed.

        Returns:
            The present time.
        """
        with self._changed:
            now = self._clock()
            if self._since is not None:
                self._used = max(self._used, SHARE * (now - self._since) - CREDIT_S)
                self._used += 0.0 if begun is None else now - max(begun, self._since)
            self.yielding += 1
            while self._since is not None and (remaining := self._used / SHARE - (now - self._since)) > 0:
                self._changed.wait(remaining)
                now = self._clock()
            self.yielding -= 1
            return now

    def join(self, member: object, waiting: Waiting) -> None:
        """Register ``member``, a scheduler, with the function ``waiting`` that returns its waiting requests."""
        with self._changed:
            self._members[member] = waiting

    def leave(self, member: object) -> None:
        """Remove ``member``, because it does not compute any more."""
        with self._changed:
            self._members.pop(member, None)

    def beside(self, member: object) -> list[Any]:
        """Return the first ready request of each scheduler other than ``member``. These requests wait for the end of
        this scheduler's inference.
        """
        with self._changed:
            others = [waiting for each, waiting in self._members.items() if each is not member]
        return [ready[0] for waiting in others if (ready := waiting())]


class BackgroundTask:
    """A thread, such as that of a stream, that computes in short pieces while requests use a device lock.

    Call ``begin`` before the first piece and ``pause`` after each piece. Both methods wait until the streams' share
    of the time allows the next piece. Without a lock, the methods never wait.
    """

    def __init__(self, device_lock: DeviceLock | None) -> None:
        self._device_lock, self._begun = device_lock, 0.0

    def begin(self) -> None:
        if self._device_lock is not None:
            self._begun = self._device_lock.used(None)

    def pause(self) -> None:
        if self._device_lock is not None:
            self._begun = self._device_lock.used(self._begun)
