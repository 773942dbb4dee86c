"""The two loops of any number of streams: one thread that computes prefixes and one that runs heads.

Each has a pool of compute threads of its own, so that on a CPU a head runs beside a prefix. Streams take turns in both.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol

from sinew.core import SinewError
from sinew.stream.session import Session
from sinew.stream.windows import Window

logger = logging.getLogger(__name__)

IDLE_S = 0.5  # between two looks although nobody has called


class Listener(Protocol):
    """Who gets what a stream makes. Both are called on the loops' threads and must not block."""

    def window(self, window: Window) -> None: ...
    def failed(self, error: SinewError) -> None: ...


class Loops:
    """threads: for compute, of the slow and of the fast loop. start: makes a thread of a name and a function; those
    of a server are kept alive by its supervisor.

    Threads start with the first stream. A stream that fails is told so, and goes on with its next frame or sample.
    """

    def __init__(
        self,
        threads: tuple[int, int] = (1, 1),
        start: Callable[[str, Callable[[], None]], threading.Thread] | None = None,
    ):
        self._threads, self._start = threads, start or _daemon
        self._lock = threading.Lock()
        self._streams: dict[
            Session, Listener
        ] = {}  # a new one at each change: the loops iterate over what they got
        self._news = (threading.Event(), threading.Event())  # for the slow and the fast loop
        self._running: list[threading.Thread] = []
        self._ended = False
        self._told = ""  # the last error whose traceback is in the log: the next run may well raise it again

    def add(self, session: Session, listener: Listener) -> None:
        with self._lock:
            self._streams = {**self._streams, session: listener}
            if not self._running and not self._ended:
                self._running = [
                    self._start("sinew-prefix", lambda: self._loop(0, self._read)),
                    self._start("sinew-head", lambda: self._loop(1, self._run)),
                ]

    def remove(self, session: Session) -> None:
        with self._lock:
            self._streams = {each: to for each, to in self._streams.items() if each is not session}

    def __len__(self) -> int:
        return len(self._streams)

    def wake(self) -> None:
        """Tell the loops that something has arrived."""
        for event in self._news:
            event.set()

    def stop(self, timeout: float = 5.0) -> None:
        """End both threads after what they are computing."""
        self._ended = True
        self.wake()
        end = time.monotonic() + timeout
        for thread in self._running:
            thread.join(max(0.0, end - time.monotonic()))

    def _loop(self, which: int, work: Callable[[Session, Listener], bool]) -> None:
        import torch

        torch.set_num_threads(self._threads[which])  # of this thread's own pool
        news = self._news[which]
        while not self._ended:
            news.clear()  # before the look, so that nothing that comes after it is missed
            streams = self._streams
            worked = [self._safely(work, session, listener) for session, listener in streams.items()]
            if not any(worked):
                news.wait(IDLE_S)

    def _read(self, session: Session, _listener: Listener) -> bool:
        found = session.read()
        if found:
            self._news[1].set()
        return found

    def _run(self, session: Session, listener: Listener) -> bool:
        window = session.run()
        if window is not None:
            listener.window(window)
        return window is not None

    def _safely(
        self, work: Callable[[Session, Listener], bool], session: Session, listener: Listener
    ) -> bool:
        try:
            return work(session, listener)
        except SinewError as error:
            listener.failed(error)
        except Exception as error:  # whatever it is, the other streams go on
            if (text := f"{type(error).__name__}: {error}") != self._told:
                logger.exception("a stream failed")
                self._told = text
            listener.failed(SinewError(f"internal error ({type(error).__name__}); the log has the details"))
        return True


def _daemon(name: str, run: Callable[[], None]) -> threading.Thread:
    made = threading.Thread(target=run, name=name, daemon=True)
    made.start()
    return made
