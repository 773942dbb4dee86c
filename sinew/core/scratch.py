"""A scratch folder next to a target, for files that get their final names when they are complete.

The folder is removed at the end, also after SIGTERM or SIGHUP. After SIGKILL or a power cut, the next process with the
same target removes it. A lock on the folder shows whether the process that created it is still running.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import shutil
import signal
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

MAX_NAME = 64  # the folder's name has at most this many characters of the target's name
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))


@contextlib.contextmanager
def beside(target: Path) -> Iterator[Path]:
    """Yield a new folder ``.TARGET.RANDOM.sinew`` next to the target. You may rename the folder, or a file in it, to
    the target.

    Raises:
        OSError: No folder can be created.
        SystemExit: A signal arrived that would end the process. The status is 128 plus the signal's number, as in
            shells.
    """
    name = target.name[:MAX_NAME]
    sweep(target.parent, re.compile(re.escape(f".{name}.") + r"[0-9a-f]{16}\.sinew"))
    folder = target.parent / f".{name}.{secrets.token_hex(8)}.sinew"
    lock = None
    with ended_by_signals():
        # Enter the try block before the folder exists, because a signal may arrive between any two lines.
        try:
            while True:
                folder.mkdir(0o700)  # fails if another user has created a link with this name
                lock = hold(folder)
                if there(folder, lock):
                    break
                if lock is not None:
                    os.close(lock)  # another process removed the folder before this process had locked it
            yield folder
        except OSError as error:
            # If the disk is full, the error of the write does not contain a file name, so add the target's name.
            if error.errno in FULL:
                error.filename = str(target)
            raise
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            if lock is not None:
                os.close(lock)


def sweep(parent: Path, form: re.Pattern[str]) -> None:
    """Remove files and folders whose names match a pattern, if the process that created them has ended (:func:`hold`).

    Files of other users, links and special files stay.

    Args:
        parent: The folder to clean.
        form: The pattern of the names.
    """
    try:
        leftovers = [Path(each.path) for each in os.scandir(parent) if form.fullmatch(each.name)]
    except OSError:
        # The folder cannot be read. The next write to the folder reports the error.
        return
    for path in leftovers:
        lock = hold(path, wait=False)
        if lock is not None:
            status = os.fstat(lock)
            if status.st_uid == os.getuid():
                if stat.S_ISDIR(status.st_mode):
                    shutil.rmtree(path, ignore_errors=True)
                elif stat.S_ISREG(status.st_mode):
                    with contextlib.suppress(OSError):
                        path.unlink()
            os.close(lock)


def hold(path: Path, wait: bool = True) -> int | None:
    """Lock a file or folder for this process, until the returned descriptor is closed.

    Args:
        path: The file or folder.
        wait: Wait if another process has the lock.

    Returns:
        The descriptor. None if another process has the lock and ``wait`` is False, if the file does not exist, or if
        locks are not supported (Windows, some disks).
    """
    try:
        import fcntl
    except ImportError:
        return None
    try:
        lock = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        return None
    return lock


def there(path: Path, lock: int | None) -> bool:
    """Return True if ``path`` is still the file or folder that was locked. Without a lock, return True if it exists."""
    try:
        return path.exists() if lock is None else os.path.samestat(path.lstat(), os.fstat(lock))
    except OSError:
        return False


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Inside the ``with`` block, a signal that would end the process raises an exception instead, so that ``finally``
    blocks run.

    A signal that is ignored, such as SIGHUP under ``nohup``, stays ignored. In threads other than the main thread, the
    block has no effect.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    changed = [each for each in SIGNALS if signal.getsignal(each) is signal.SIG_DFL]
    before = sys.unraisablehook
    for each in changed:
        signal.signal(each, _end)
    # Use partial, because a lambda adds a stack frame, and a signal that arrives in this frame may be lost.
    sys.unraisablehook = partial(_again, before)
    try:
        yield
    finally:
        sys.unraisablehook = before
        for each in changed:
            signal.signal(each, signal.SIG_DFL)


class _Signalled(SystemExit):
    """The exception after a signal. It ends the process with the exit status that shells expect: 128 plus the
    signal's number."""

    def __init__(self, number: int):
        super().__init__(128 + number)
        self.number = number


def _end(number: int, _frame: Any) -> None:
    raise _Signalled(number)


def _again(otherwise: Callable[[Any], object], unraised: Any) -> None:
    """Send a signal again if Python discarded its exception.

    This happens if the signal arrives while a finalizer or a weak reference's callback is running. Python discards
    exceptions there, so the process would ignore the signal.

    Args:
        otherwise: The previous hook, for all other exceptions.
        unraised: The discarded exception, as for ``sys.unraisablehook``.
    """
    end = unraised.exc_value
    if not isinstance(end, _Signalled):
        otherwise(unraised)
        return
    while True:
        try:
            threading.Timer(0.01, os.kill, (os.getpid(), end.number)).start()
            return
        except _Signalled:
            # Send it again: on a busy machine, the signal may arrive before the thread has started, and is then lost.
            continue
