"""A scratch folder next to a target, for files that get their names when they are complete.

The folder is removed at the end, also by SIGTERM or SIGHUP. After SIGKILL or a power cut, the next process with the
same target removes it: a lock on the folder tells whether its process still runs.
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

MAX_NAME = 64  # characters of the target's name in the folder's
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))


@contextlib.contextmanager
def beside(target: Path) -> Iterator[Path]:
    """Yield a new folder ``.TARGET.RANDOM.sinew`` in the target's own. Raises OSError where none can be made.

    It may be renamed to the target, or what is in it. A signal that would end the process ends it by ``SystemExit``,
    with 128 and its number, as a shell counts.
    """
    name = target.name[:MAX_NAME]
    sweep(target.parent, re.compile(re.escape(f".{name}.") + r"[0-9a-f]{16}\.sinew"))
    folder = target.parent / f".{name}.{secrets.token_hex(8)}.sinew"
    lock = None
    with ended_by_signals():
        try:  # before it is made: a signal may come between any two lines
            while True:
                folder.mkdir(0o700)  # fails if another user has placed a link with this name
                lock = hold(folder)
                if there(folder, lock):
                    break
                if lock is not None:
                    os.close(lock)  # another process swept it away before it was held
            yield folder
        except OSError as error:
            if error.errno in FULL:  # the error of a write does not name the file
                error.filename = str(target)
            raise
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            if lock is not None:
                os.close(lock)


def sweep(parent: Path, form: re.Pattern[str]) -> None:
    """Remove the files and folders of a folder whose names have a form, and whose process has ended (:func:`hold`).

    Files of other users, links and special files stay.
    """
    try:
        left = [Path(each.path) for each in os.scandir(parent) if form.fullmatch(each.name)]
    except OSError:
        return  # the later write reports the error
    for path in left:
        lock = hold(path, wait=False)
        if lock is not None:
            found = os.fstat(lock)
            if found.st_uid == os.getuid():
                if stat.S_ISDIR(found.st_mode):
                    shutil.rmtree(path, ignore_errors=True)
                elif stat.S_ISREG(found.st_mode):
                    with contextlib.suppress(OSError):
                        path.unlink()
            os.close(lock)


def hold(path: Path, wait: bool = True) -> int | None:
    """Lock a file or folder for this process, and return the descriptor that holds the lock until it is closed.

    Returns None if another process holds it (unless ``wait``), if it is gone, or if locks are not supported (Windows,
    some disks).
    """
    try:
        import fcntl
    except ImportError:
        return None
    try:
        held = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        fcntl.flock(held, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(held)
        return None
    return held


def there(path: Path, held: int | None) -> bool:
    """Return whether a file or folder is still the one that is held; where nothing can be held, whether it is there."""
    try:
        return path.exists() if held is None else os.path.samestat(path.lstat(), os.fstat(held))
    except OSError:
        return False


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Let what is not handled end this process as an exception does, so that it is cleaned up.

    A signal that is ignored, as SIGHUP under ``nohup``, stays so. Others than the main thread hear none.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    taken = [each for each in SIGNALS if signal.getsignal(each) is signal.SIG_DFL]
    before = sys.unraisablehook
    for each in taken:
        signal.signal(each, _end)
    sys.unraisablehook = partial(_again, before)  # a lambda's frame would be one more where it may be lost
    try:
        yield
    finally:
        sys.unraisablehook = before
        for each in taken:
            signal.signal(each, signal.SIG_DFL)


class _Signalled(SystemExit):
    """The end of the process by the signal ``number``, with the exit status that shells expect."""

    def __init__(self, number: int):
        super().__init__(128 + number)
        self.number = number


def _end(number: int, _frame: Any) -> None:
    raise _Signalled(number)


def _again(otherwise: Callable[[Any], object], unraised: Any) -> None:
    """Send a signal once more that came while a finalizer or the callback of a weak reference ran: Python drops what is
    raised there, and the work would go on to its end."""
    end = unraised.exc_value
    if not isinstance(end, _Signalled):
        otherwise(unraised)
        return
    while True:
        try:
            threading.Timer(0.01, os.kill, (os.getpid(), end.number)).start()
            return
        except _Signalled:
            continue  # on a busy machine it comes before the thread's start is over: what is raised here is lost, too
