"""Signals as Unix programs take them: what a process was started to ignore stays ignored."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator, Sequence
from types import FrameType

Handler = Callable[[int, "FrameType | None"], None]


@contextlib.contextmanager
def handled(numbers: Sequence[signal.Signals], handler: Handler) -> Iterator[list[signal.Signals]]:
    """Give the signals to ``handler`` inside, and yield those that it gets. Main thread only.

    A shell without job control starts ``command &`` with SIGINT ignored, because Ctrl-C is meant for what runs in
    front, and ``nohup`` ignores SIGHUP, because the command is to outlive its terminal. Such a signal stays ignored.
    SIGTERM is always handled: it is how a process in the background is ended.
    """
    taken = [each for each in numbers if each == signal.SIGTERM or signal.getsignal(each) != signal.SIG_IGN]
    before = {each: signal.signal(each, handler) for each in taken}
    try:
        yield taken
    finally:
        for each, old in before.items():
            signal.signal(each, old)
