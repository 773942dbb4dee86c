"""Keeps the server's threads alive, and reports problems.

A thread that ends by an exception is started again. If that does not help, it is reported. Other problems (a stage
that never ends, requests that all fail) are reported by functions that are registered with ``watch``.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

logger = logging.getLogger(__name__)

STUCK_S = 60.0  # a stage that runs for longer is taken for one that never ends
RESTARTS = 3  # restarts of one thread,
RESTARTS_S = 60.0  # in this time; then it stays dead


class Supervisor:
    """stuck_s: how long one request may decode or compute before the server calls itself unhealthy; after twice that
    time of being unhealthy, it is ``hopeless``. 0: never."""

    def __init__(self, stuck_s: float = STUCK_S):
        self.stuck_s = stuck_s
        self._lock = threading.Lock()
        self._dead: list[str] = []
        self._checks: list[Callable[[], str | None]] = []
        self._since: float | None = None  # when the first of the present problems was seen

    def thread(self, name: str, run: Callable[[], None]) -> threading.Thread:
        """Start a daemon thread that runs ``run`` to its end, again if an exception of any kind ends it."""
        made = threading.Thread(target=self._keep, args=(name, run), name=name, daemon=True)
        made.start()
        return made

    def watch(self, check: Callable[[], str | None]) -> None:
        """Ask ``check`` with each ``problems``: a sentence if something is wrong, or None. It must not block."""
        self._checks.append(check)

    def forget(self, check: Callable[[], str | None]) -> None:
        """Ask ``check`` no more."""
        if check in self._checks:
            self._checks.remove(check)

    def problems(self) -> list[str]:
        """What keeps this server from answering, a sentence each; empty while all is well."""
        with self._lock:
            found = list(self._dead)
        found += [problem for check in list(self._checks) if (problem := check()) is not None]
        if not found:
            self._since = None
        elif self._since is None:
            self._since = time.monotonic()
            logger.error("unhealthy: %s", "; ".join(found))
        return found

    def hopeless(self) -> str | None:
        """Return why this process should end, so that its supervisor starts it again; None if it should not."""
        found = self.problems()
        if self._dead:
            return "; ".join(found)
        if found and self.stuck_s and self._since is not None:
            lasted = time.monotonic() - self._since
            if lasted > self.stuck_s:
                return f"{'; '.join(found)}, for {lasted:.0f} s"
        return None

    def _keep(self, name: str, run: Callable[[], None]) -> None:
        ended: deque[float] = deque()
        while True:
            try:
                run()
            except BaseException:  # no caller could handle the error of a thread
                now = time.monotonic()
                ended.append(now)
                while now - ended[0] > RESTARTS_S:
                    ended.popleft()
                if len(ended) > RESTARTS:
                    logger.critical(
                        "the thread %s ended %d times and stays dead", name, len(ended), exc_info=True
                    )
                    with self._lock:
                        self._dead.append(f"the thread {name} has ended")
                    return
                logger.critical("the thread %s ended and is started again", name, exc_info=True)
            else:
                return
