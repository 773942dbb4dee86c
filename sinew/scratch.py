"""A folder beside a target, for what takes its name when it is complete; nothing of it stays behind.

It is removed at the end, also of one by SIGTERM or SIGHUP. What a process left that nothing could warn (SIGKILL, a
power cut) is removed by the next one with the same target: a lock on the folder says whether its process lives.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MAX_NAME = 64  # characters of the target's name in the folder's
SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))


@contextlib.contextmanager
def beside(target: Path) -> Iterator[Path]:
    """Yield a new folder ``.TARGET.RANDOM.sinew`` in the target's own. Raises OSError where none can be made.

    It may be renamed to the target, or what is in it. A signal that would end the process ends it by ``SystemExit``,
    with 128 and its number, as a shell counts.
    """
    name = target.name[:MAX_NAME]
    _sweep(target.parent, name)
    folder = target.parent / f".{name}.{secrets.token_hex(8)}.sinew"
    lock = None
    with ended_by_signals():
        try:  # before it is made: a signal may come between any two lines
            while True:
                folder.mkdir(0o700)  # a name that nobody can have planted a link under
                lock = _lock(folder, wait=True)
                if lock is None or _same(folder, lock):
                    break
                os.close(lock)  # another process swept it away before it was locked
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            if lock is not None:
                os.close(lock)


def _sweep(parent: Path, name: str) -> None:
    """Remove what processes that are gone have left of a target."""
    form = re.compile(re.escape(f".{name}.") + r"[0-9a-f]{16}\.sinew")
    try:
        left = [each for each in os.scandir(parent) if form.fullmatch(each.name)]
    except OSError:
        return  # whoever makes a folder there says why it cannot
    for each in left:
        lock = _lock(Path(each.path))
        if lock is not None:
            if os.fstat(lock).st_uid == os.getuid():
                shutil.rmtree(each.path, ignore_errors=True)
            os.close(lock)


def _lock(folder: Path, wait: bool = False) -> int | None:
    """Return a descriptor that holds a folder; None if another process does, or nothing can (Windows, some disks)."""
    try:
        import fcntl
    except ImportError:
        return None
    try:
        held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(held, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(held)
        return None
    return held


def _same(folder: Path, held: int) -> bool:
    try:
        return os.path.samestat(folder.lstat(), os.fstat(held))
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
    for each in taken:
        signal.signal(each, _end)
    try:
        yield
    finally:
        for each in taken:
            signal.signal(each, signal.SIG_DFL)


def _end(number: int, _frame: Any) -> None:
    raise SystemExit(128 + number)
