"""The two loops that compute for all streams: one thread computes prefixes (the model's result for a frame), and one
thread runs heads (actions from a prefix).

Each thread has its own pool of compute threads, so on a CPU a head runs at the same time as a prefix. On a GPU, the
engine runs them on two CUDA streams. In both loops, streams take turns by cost: the owner that has used the least time
comes first. The cost of a head run is the number of its actions times the number of its evaluations, and a prefix costs
1. A much cheaper head run may run between two evaluations of another one. No stream is computed more often than its
rate, by this machine's clock. Streams leave a share of the time to requests.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from sinew.core import CancelledError, SinewError
from sinew.core.rate_limited_log import RateLimitedLog
from sinew.stream.session import Session
from sinew.stream.windows import Window

logger = logging.getLogger(__name__)

IDLE_S = 0.5  # longest wait of a loop, seconds
BURST_S = 0.1  # seconds by which samples and frames may be early, because networks deliver them in bursts
# A run may interrupt another run that costs at least this many times as much.
QUICK = 4
READ, RUN = 0, 1  # indices of the slow loop (prefixes) and of the fast loop (head runs)


class WindowListener(Protocol):
    """Interface of an object that receives the windows (groups of waypoints) and the errors of a stream. The threads of
    the two loops call its methods, so the methods must not block.
    """

    def window(self, window: Window) -> None: ...
    def failed(self, error: SinewError) -> None: ...


class Pausable(Protocol):
    """Interface of an object that pauses a computation in favour of requests. A loop calls ``begin`` before the first
    piece of the computation, and ``pause`` after each piece. Both methods wait while requests need the device.
    """

    def begin(self) -> None: ...
    def pause(self) -> None: ...


class _Free:
    """A :class:`Pausable` that never waits, for a process that answers no requests in addition to streams."""

    def begin(self) -> None: ...
    def pause(self) -> None: ...


@dataclass(eq=False)
class _Stream:
    """One stream.

    Attributes:
        session: The session of the stream.
        listener: Receives the windows and the errors.
        owner: The owner of the stream. All streams of one owner share the owner's turns.
        turns: Two objects that make the computations of the slow loop and of the fast loop wait for requests.
        gone: True after the stream was removed.
        due: Times of the next runs.
    """

    session: Session
    listener: WindowListener
    owner: Hashable
    turns: tuple[Pausable, Pausable]
    gone: bool = False
    # Time at which the next run of each loop is due, by the stream's rate.
    due: list[float] = field(default_factory=lambda: [0.0, 0.0])

    def wanted(self, which: int) -> bool:
        return self.session.wants_run if which == RUN else self.session.wants_prefix

    def wait(self, which: int, now: float) -> float:
        """Return the seconds until the stream may have its next turn in the loop ``which`` (READ or RUN)."""
        return self.due[which] - max(BURST_S, self._period(which)) - now

    def take(self, which: int, now: float) -> None:
        """Record that the stream has a turn in the loop ``which`` (READ or RUN) now."""
        self.due[which] = max(self.due[which], now) + self._period(which)

    def _period(self, which: int) -> float:
        # The head runs once for each sample and once for each prefix, so twice in a period.
        return 0.5 / self.session.rate if which == RUN else 1.0 / self.session.rate


class Loops:
    """The two loops (threads) that compute for all streams. The threads start with the first stream. If a computation
    fails, the stream's listener receives the error, and the stream continues with its next frame or sample.

    Args:
        threads: Number of compute threads of the slow loop and of the fast loop.
        start: Starts a thread from a name and a function. A server passes its supervisor, which restarts threads.
        clock: Returns the time in seconds, for the rates of streams.
    """

    def __init__(
        self,
        threads: tuple[int, int] = (1, 1),
        start: Callable[[str, Callable[[], None]], threading.Thread] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._threads, self._start, self._clock = threads, start or _daemon, clock
        self._lock = threading.Condition()  # this lock guards all attributes below
        self._streams: dict[Session, _Stream] = {}
        # One dictionary for each loop. Key: owner. Value: accumulated cost of the owner's runs.
        self._spent: tuple[dict[Hashable, float], dict[Hashable, float]] = (
            {},
            {},
        )
        self._least = [0.0, 0.0]  # for each loop: accumulated cost of the owner that ran last
        # For each loop: the streams that compute now. The last stream has interrupted the streams before it.
        self._busy: tuple[list[_Stream], list[_Stream]] = ([], [])
        # One event for the slow loop and one for the fast loop. New input sets both.
        self._news = (threading.Event(), threading.Event())
        self._running: list[threading.Thread] = []
        self._ended = False
        # The last error whose traceback was logged. The next run may raise the same error, which is
        # not logged again.
        self._last_error = ""
        self._failures = RateLimitedLog(logger)

    def add(
        self,
        session: Session,
        listener: WindowListener,
        owner: Hashable = None,
        turns: Callable[[], Pausable] = _Free,
    ) -> None:
        """Add a stream, so that both loops compute for it.

        Args:
            session: The session.
            listener: Receives the windows and the errors.
            owner: Owner of the stream. Streams of one owner share its turns. None makes the stream its own
                owner.
            turns: Creates the Pausable of one loop.
        """
        with self._lock:
            mine = session if owner is None else owner
            self._streams[session] = _Stream(session, listener, mine, (turns(), turns()))
            if not self._running and not self._ended:
                self._running = [
                    self._start("sinew-prefix", lambda: self._loop(READ)),
                    self._start("sinew-head", lambda: self._loop(RUN)),
                ]

    def remove(self, session: Session) -> None:
        """Remove a stream. A running computation for this stream ends at its next step."""
        with self._lock:
            if (stream := self._streams.pop(session, None)) is None:
                return
            stream.gone = True
            owners = {each.owner for each in self._streams.values()}
            for spent in self._spent:
                if stream.owner not in owners:
                    spent.pop(stream.owner, None)

    def settle(self, sessions: Iterable[Session]) -> None:
        """Wait until no computation for the removed streams is running."""
        gone = set(sessions)
        with self._lock:
            while any(each.session in gone for busy in self._busy for each in busy):
                self._lock.wait()

    def __len__(self) -> int:
        return len(self._streams)

    def wake(self) -> None:
        """Notify both loops that new input has arrived."""
        for event in self._news:
            event.set()

    def stop(self, timeout: float = 5.0) -> None:
        """Let both threads end after their present computation, and wait at most ``timeout`` seconds for them."""
        self._ended = True
        self.wake()
        end = time.monotonic() + timeout
        for thread in self._running:
            thread.join(max(0.0, end - time.monotonic()))

    def _loop(self, which: int) -> None:
        import torch

        # Initialise torch's threads on this thread first. Otherwise, the first matrix product would set this
        # thread's pool to the size that another thread has set last.
        torch.get_num_threads()
        torch.set_num_threads(self._threads[which])  # each thread has its own pool
        news = self._news[which]
        while not self._ended:
            # Clear the event before the check, so that no later event is missed.
            news.clear()
            wait = self._next(which)
            if wait is None:
                self._work(which)
            else:
                news.wait(wait)

    def _next(self, which: int) -> float | None:
        """Choose the stream whose turn is next in a loop, prepare its computation, and return None. If no stream is
        due, return the seconds to wait.
        """
        now, wait = self._clock(), IDLE_S
        with self._lock:
            spent, ready, busy = self._spent[which], list[_Stream](), self._busy[which]
            for stream in self._streams.values():
                if stream.wanted(which) and (not busy or self._between(stream, busy[-1])):
                    wait = min(wait, left := stream.wait(which, now))
                    if left <= 0:
                        ready.append(stream)
            if not ready:
                return wait
            # An owner that was idle must not save up turns, so raise its cost to the cost of the owner that ran last.
            for stream in ready:
                spent[stream.owner] = max(spent.get(stream.owner, 0.0), self._least[which])
            chosen = min(ready, key=lambda each: spent[each.owner])
            if not busy:
                self._least[which] = spent[chosen.owner]
            busy.append(chosen)
            spent[chosen.owner] += chosen.session.run_cost if which == RUN else 1.0
            chosen.take(which, now)
            # Move the stream to the end, so that the streams of one owner also take turns.
            self._streams[chosen.session] = self._streams.pop(chosen.session)
        return None

    def _between(self, stream: _Stream, running: _Stream) -> bool:
        """Return True if a head run of ``stream`` may run between two evaluations of the present computation."""
        spent = self._spent[RUN]
        return QUICK * stream.session.run_cost <= running.session.run_cost and spent.get(
            stream.owner, 0.0
        ) < spent.get(running.owner, 0.0)

    def _work(self, which: int) -> None:
        """Compute a prefix or a head run for the chosen stream. Afterwards, no reference to the stream remains."""
        try:
            self._safely(which)
        finally:
            with self._lock:
                self._busy[which].pop()
                self._lock.notify_all()

    def _safely(self, which: int) -> None:
        stream = self._busy[which][-1]
        turn = stream.turns[which]

        def pause() -> None:
            turn.pause()
            while self._next(RUN) is None:
                self._work(RUN)
                # Count the time from now on, because the time before belongs to another stream.
                turn.begin()
            if stream.gone:
                raise CancelledError("the stream has ended")

        try:
            turn.begin()
            if stream.gone:
                return
            if which == READ:
                if stream.session.read():
                    self._news[RUN].set()
            elif (window := stream.session.run(pause)) is not None:
                stream.listener.window(window)
        except SinewError as error:
            stream.listener.failed(error)
        except Exception as error:  # noqa: BLE001 - whatever it is, the other streams go on
            if (text := f"{type(error).__name__}: {str(error)[:200]}") != self._last_error:
                self._failures.error("a computation of a stream failed", error)
                self._last_error = text
            stream.listener.failed(
                SinewError(f"internal error ({type(error).__name__}); the log has the details")
            )
        finally:
            # Count the time of a failed run too.
            turn.pause()


def _daemon(name: str, run: Callable[[], None]) -> threading.Thread:
    made = threading.Thread(target=run, name=name, daemon=True)
    made.start()
    return made
