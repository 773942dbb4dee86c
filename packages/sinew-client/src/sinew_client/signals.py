"""Signals as in Unix programs: a signal that was ignored at the start of the process stays ignored."""

from __future__ import annotations

import contextlib
import signal
from types import FrameType
from typing import Callable, Iterator, Optional, Sequence

Handler = Callable[[int, Optional[FrameType]], None]


@contextlib.contextmanager
def handled(numbers: Sequence[signal.Signals], handler: Handler) -> Iterator[list[signal.Signals]]:
    """Handle signals with ``handler`` inside the block, and yield the signals that it handles. Main thread only.

    A shell without job control starts ``command &`` with SIGINT ignored, because Ctrl-C belongs to the program in the
    foreground. ``nohup`` ignores SIGHUP, so that the command outlives its terminal. Such signals stay ignored.
    SIGTERM is always handled, because it ends background processes.
    """
    taken = [each for each in numbers if each == signal.SIGTERM or signal.getsignal(each) != signal.SIG_IGN]
    before = {each: signal.signal(each, handler) for each in taken}
    try:
        yield taken
    finally:
        for each, old in before.items():
            signal.signal(each, old)
