"""Keeps the server's threads alive, and reports problems.

The supervisor restarts a thread that ends with an exception. After ``RESTARTS`` restarts, it reports the thread as
dead. Other problems (an inference that never ends, requests that all fail) are reported by functions that are
registered with ``watch``.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

logger = logging.getLogger(__name__)

STUCK_S = 60.0  # seconds after which a running stage is treated as one that never ends
RESTARTS = 3  # largest number of restarts of a thread within RESTARTS_S; after that, the thread stays dead
RESTARTS_S = 60.0  # seconds


class Supervisor:
    """Restarts threads, and collects the problems of a server.

    Args:
        stuck_s: Seconds for which one request may decode or compute before the server is unhealthy. If the server is
            unhealthy for the same time again, it is ``hopeless``. 0 sets no limit.
    """

    def __init__(self, stuck_s: float = STUCK_S):
        self.stuck_s = stuck_s
        self._lock = threading.Lock()
        self._dead: list[str] = []
        self._checks: list[Callable[[], str | None]] = []
        self._since: float | None = None  # time of the first of the present problems; None without problems

    def thread(self, name: str, run: Callable[[], None]) -> threading.Thread:
        """Start a daemon thread that runs ``run`` to its end. If an exception ends ``run``, it is called again."""
        thread = threading.Thread(target=self._keep, args=(name, run), name=name, daemon=True)
        thread.start()
        return thread

    def watch(self, check: Callable[[], str | None]) -> None:
        """Register the function ``check``, which each call of :meth:`problems` calls. It returns a sentence about a
        problem, or None. It must not block.
        """
        self._checks.append(check)

    def forget(self, check: Callable[[], str | None]) -> None:
        """Remove the function ``check`` that was registered with :meth:`watch`."""
        if check in self._checks:
            self._checks.remove(check)

    def problems(self) -> list[str]:
        """Return the problems that keep this server from answering, one sentence each; [] without problems."""
        with self._lock:
            problems = list(self._dead)
        problems += [problem for check in list(self._checks) if (problem := check()) is not None]
        if not problems:
            self._since = None
        elif self._since is None:
            self._since = time.monotonic()
            logger.error("unhealthy: %s", "; ".join(problems))
        return problems

    def hopeless(self) -> str | None:
        """Return the reason why this process should end, so that its supervisor starts it again; else None."""
        problems = self.problems()
        if self._dead:
            return "; ".join(problems)
        if problems and self.stuck_s and self._since is not None:
            lasted = time.monotonic() - self._since
            if lasted > self.stuck_s:
                return f"{'; '.join(problems)}, for {lasted:.0f} s"
        return None

    def _keep(self, name: str, run: Callable[[], None]) -> None:
        ended: deque[float] = deque()
        while True:
            try:
                run()
            except BaseException:  # catch every error, because no caller could handle the error of a thread
                now = time.monotonic()
                ended.append(now)
                while now - ended[0] > RESTARTS_S:
                    ended.popleft()
                if len(ended) > RESTARTS:
                    logger.critical(
                        "the thread %s has failed %d times and is not started again",
                        name,
                        len(ended),
                        exc_info=True,
                    )
                    with self._lock:
                        self._dead.append(f"the thread {name} has ended")
                    return
                logger.critical("the thread %s has failed and is started again", name, exc_info=True)
            else:
                return
