"""One device, shared by the schedulers of several policies: they take turns, one inference at a time.

Streams compute at the same time, on their own threads, and share the time with requests (:class:`BackgroundTask`).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

SHARE = 0.5  # share of the time that all streams may compute while a request is inside or waits
THREADS = 256  # whose last turns are remembered
CREDIT_S = 0.02  # seconds of that time that they may save up

Waiting = Callable[
    [], Sequence[Any]
]  # the requests of a scheduler that are ready, in the order of their turns


@dataclass(slots=True, eq=False)
class _InLine:
    """A place in the line. since: when its turn began or went on. used: seconds of its turn before that."""

    thread: int = field(default_factory=threading.get_ident)
    since: float = 0.0
    used: float = 0.0


class DeviceLock:
    """Lets threads in one at a time, in the order in which they asked. A context manager; not reentrant.

    A scheduler asks once for each inference, so that policies take turns, as connections do inside each of them. A long
    inference passes its turn on between two steps (``pass_on``). clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        # Arrival time of the first request inside or waiting; None without any
        self._since: float | None = None
        self._used = 0.0  # seconds of streams since then
        self.yielding = 0  # threads of streams that wait for their share
        self._changed = threading.Condition()
        self._line: deque[_InLine] = deque()  # the member inside comes first
        self._usual: dict[int, float] = {}  # a thread -> the seconds that its last turn took
        self._members: dict[object, Waiting] = {}

    def __enter__(self) -> None:
        with self._changed:
            if self._since is None:
                self._since, self._used = self._clock(), 0.0
            self._wait(_InLine())

    def __exit__(self, *_exc_info: object) -> None:
        thread = threading.get_ident()
        with self._changed:
            # Not there if the thread was ended from outside while others had its turn
            if self._line and (place := self._line[0]).thread == thread:
                self._line.popleft()
                if len(self._usual) >= THREADS:
                    self._usual.clear()
                self._usual[thread] = place.used + self._clock() - place.since
                self._left()

    def pass_on(self) -> float:
        """Between two steps of a turn: let the others that wait have theirs.

        This happens once the turn has taken as long as the last turn of the first of them.

        Returns:
            The seconds that this took.
        """
        if len(self._line) < 2:  # without the lock: this is asked between any two steps
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
        """Stand in the line until it is this place's turn, with the lock held."""
        self._line.append(place)
        try:
            while self._line[0] is not place:
                self._changed.wait()
        except BaseException:  # the thread is ended from outside: the others go on
            self._line.remove(place)
            self._left()
            raise
        place.since = self._clock()

    def _left(self) -> None:
        """Notify the others, with the lock held. The streams' debt is forgotten when no request is inside any more."""
        if not self._line:
            self._since = None
        self._changed.notify_all()

    def used(self, begun: float | None) -> float:
        """Count what a stream has computed since ``begun``, None: nothing, and return when it may go on: at once where
        no request is there, else when requests have had their share of the time."""
        with self._changed:
            now = self._clock()
            if self._since is not None:
                self._used = max(self._used, SHARE * (now - self._since) - CREDIT_S)
                self._used += 0.0 if begun is None else now - max(begun, self._since)
            self.yielding += 1
            while self._since is not None and (left := self._used / SHARE - (now - self._since)) > 0:
                self._changed.wait(left)
                now = self._clock()
            self.yielding -= 1
            return now

    def join(self, member: object, waiting: Waiting) -> None:
        """Register ``member`` with a function that reports its waiting requests."""
        with self._changed:
            self._members[member] = waiting

    def leave(self, member: object) -> None:
        """Forget ``member``, which computes no more."""
        with self._changed:
            self._members.pop(member, None)

    def beside(self, member: object) -> list[Any]:
        """Return the first ready request of each other member: what waits for this member's inference to end."""
        with self._changed:
            others = [waiting for each, waiting in self._members.items() if each is not member]
        return [ready[0] for waiting in others if (ready := waiting())]


class BackgroundTask:
    """A thread that computes in pieces while requests use a device lock.

    Call ``begin`` before the first piece and ``pause`` after each. Both wait for the share of time that streams have.
    Without a lock they never wait.
    """

    def __init__(self, device_lock: DeviceLock | None) -> None:
        self._device_lock, self._begun = device_lock, 0.0

    def begin(self) -> None:
        if self._device_lock is not None:
            self._begun = self._device_lock.used(None)

    def pause(self) -> None:
        if self._device_lock is not None:
            self._begun = self._device_lock.used(self._begun)
