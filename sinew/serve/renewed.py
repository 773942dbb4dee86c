"""Keys and certificates that may be replaced while a server runs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from sinew.core import SinewError
from sinew.core.rate_limited_log import RateLimitedLog

logger = logging.getLogger(__name__)
_quiet = RateLimitedLog(logger)

Read = TypeVar("Read")
# One key, "" for no key, or a function that returns the keys of a file.
Keys = str | Callable[[], tuple[str, ...]]


class ReloadedFile(Generic[Read]):
    """Stores the content of files, and reads the files again whenever they change. Thread-safe.

    Args:
        paths: The files.
        read: Function that reads the files. The function raises :class:`SinewError` if the files are not usable,
            for example if the key of a certificate is still missing. After such an error, the old content stays in
            use, the reason is logged, and the next call tries again.
    """

    def __init__(self, paths: Sequence[Path], read: Callable[[], Read]):
        self._paths, self._read = paths, read
        # Read the time stamps before the content, so that a change during the read is detected.
        self._seen = self._stamps()
        self._value = read()

    def __call__(self) -> Read:
        """Return the present content. The files are read again if they have changed."""
        if (stamps := self._stamps()) != self._seen:
            names = ", ".join(map(str, self._paths))
            try:
                self._value = self._read()
            except SinewError as error:
                _quiet.warning(
                    "%s: the files have changed but are not usable; the old content stays: %s", names, error
                )
            else:
                self._seen = stamps
                logger.info("%s: changed, and read again", names)
        return self._value

    def _stamps(self) -> list[tuple[int, int, int] | None]:
        return [_stamp(path) for path in self._paths]


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
