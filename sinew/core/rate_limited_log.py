"""Lines that a client can cause as often as it likes, written to the log so that it does not fill."""

from __future__ import annotations

import logging
import threading
import time

BURST = 5  # lines that are written at once
MOST = 100  # sentences that are told once each; what comes then is not told
PERIOD_S = 10.0  # in which that many are written; the rest is counted


class RateLimitedLog:
    """A logger that writes at most ``BURST`` lines in ``PERIOD_S``, and then how many it left out. Thread-safe."""

    def __init__(self, logger: logging.Logger):
        self._logger = logger
        self._lock = threading.Lock()
        self._since = float("-inf")
        self._written = 0
        self._left_out = 0

    def warning(self, text: str, *values: object) -> None:
        """``logging.Logger.warning``, or nothing."""
        self._log(logging.WARNING, None, text, *values)

    def info(self, text: str, *values: object) -> None:
        """``logging.Logger.info``, or nothing."""
        self._log(logging.INFO, None, text, *values)

    def error(self, text: str, cause: BaseException) -> None:
        """``logging.Logger.error`` with the traceback of ``cause``, or nothing."""
        self._log(logging.ERROR, cause, text)

    def _log(self, level: int, cause: BaseException | None, text: str, *values: object) -> None:
        now = time.monotonic()
        left_out = 0
        with self._lock:
            if now - self._since > PERIOD_S:
                self._since, self._written = now, 0
                left_out, self._left_out = self._left_out, 0
            self._written += 1
            if self._written > BURST:
                self._left_out += 1
                return
        if left_out:
            self._logger.warning("%d more of such lines were left out", left_out)
        self._logger.log(level, text, *values, exc_info=cause)


class LogOnce:
    """A logger that writes each sentence once, of at most ``MOST``. Thread-safe."""

    def __init__(self, logger: logging.Logger):
        self._logger = logger
        self._lock = threading.Lock()
        self._told: set[str] = set()

    def warning(self, text: str) -> None:
        """``logging.Logger.warning``, or nothing."""
        with self._lock:
            if text in self._told or len(self._told) >= MOST:
                return
            self._told.add(text)
        self._logger.warning("%s", text)
