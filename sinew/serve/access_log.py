"""The access log: one line of JSON per request, in a file or on standard error."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Iterator
from logging.handlers import WatchedFileHandler

from sinew.core import SinewError

logger = logging.getLogger(__name__)

TOLD_S = 60.0  # seconds between two warnings that the access log cannot be written


class _Lossy(logging.Handler):
    """Warns at most once in ``TOLD_S`` seconds that lines could not be written, usually because the disk is full.

    Python's logging would print a traceback for each line.
    """

    losses, warned_at = 0, float("-inf")

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        self.losses += 1
        if (now := time.monotonic()) - self.warned_at >= TOLD_S:
            self.warned_at = now
            logger.warning("--access-log: %d lines could not be written: %s", self.losses, sys.exc_info()[1])


class _AccessFile(_Lossy, WatchedFileHandler):
    """Writes log lines to a file, and opens a new file after logrotate (a tool that renames old logs) has moved the
    present file.
    """

    def emit(self, record: logging.LogRecord) -> None:
        try:
            super().emit(record)
        except OSError:  # the log file cannot be opened
            self.handleError(record)


class _AccessStream(_Lossy, logging.StreamHandler): ...


@contextlib.contextmanager
def access_logging(path: str | None) -> Iterator[None]:
    """Inside the ``with`` block, write the access log to ``path``. "-" means standard error. None means that no log
    is written.

    At the end of the block the logger is restored, because it belongs to the process, which may continue with other
    work.
    """
    access = logging.getLogger("sinew.access")
    before = access.propagate, access.disabled, access.level
    handler: logging.Handler = logging.NullHandler()
    if path is not None:
        with SinewError.at(f"--access-log {path}", OSError):
            handler = _AccessStream() if path == "-" else _AccessFile(path)
    handler.setFormatter(logging.Formatter("%(message)s"))
    access.addHandler(handler)
    access.propagate, access.disabled = False, path is None
    access.setLevel(logging.INFO)
    try:
        yield
    finally:
        access.removeHandler(handler)
        # Ignore an error here: the disk may still be full, and the failed writes were already logged.
        with contextlib.suppress(OSError):
            handler.close()
        access.propagate, access.disabled = before[:2]
        access.setLevel(before[2])
