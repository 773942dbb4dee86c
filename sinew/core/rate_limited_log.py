"""Loggers for messages that a client can cause any number of times. These loggers limit the size of the log."""

from __future__ import annotations

import logging
import threading
import time

BURST = 5  # the logger writes at most this many lines in each period
MOST = 100  # `LogOnce` writes at most this many different sentences
PERIOD_S = 10.0  # length of a period in seconds; further lines in it are only counted


class RateLimitedLog:
    """A logger that writes at most ``BURST`` lines in ``PERIOD_S``, and then the number of omitted lines.
    Thread-safe."""

    def __init__(self, logger: logging.Logger):
        self._logger = logger
        self._lock = threading.Lock()
        self._since = float("-inf")
        self._written = 0
        self._omitted = 0

    def warning(self, text: str, *values: object) -> None:
        """Log a warning, unless the limit is reached."""
        self._log(logging.WARNING, None, text, *values)

    def info(self, text: str, *values: object) -> None:
        """Log information, unless the limit is reached."""
        self._log(logging.INFO, None, text, *values)

    def error(self, text: str, cause: BaseException) -> None:
        """Log an error with the traceback of ``cause``, unless the limit is reached."""
        self._log(logging.ERROR, cause, text)

    def _log(self, level: int, cause: BaseException | None, text: str, *values: object) -> None:
        now = time.monotonic()
        omitted = 0
        with self._lock:
            if now - self._since > PERIOD_S:
                self._since, self._written = now, 0
                omitted, self._omitted = self._omitted, 0
            self._written += 1
            if self._written > BURST:
                self._omitted += 1
                return
        if omitted:
            self._logger.warning("%d more lines of this kind were omitted", omitted)
        self._logger.log(level, text, *values, exc_info=cause)


class LogOnce:
    """A logger that writes each sentence only once, and at most ``MOST`` sentences. Thread-safe."""

    def __init__(self, logger: logging.Logger):
        self._logger = logger
        self._lock = threading.Lock()
        self._sentences: set[str] = set()

    def warning(self, text: str) -> None:
        """Log a warning, unless it was logged before or the limit is reached."""
        with self._lock:
            if text in self._sentences or len(self._sentences) >= MOST:
                return
            self._sentences.add(text)
        self._logger.warning("%s", text)
