"""Handle signals as Unix programs do: a signal that was ignored at the start of the process stays ignored."""

from __future__ import annotations

import contextlib
import signal
from types import FrameType
from typing import Callable, Iterator, Optional, Sequence

Handler = Callable[[int, Optional[FrameType]], None]


@contextlib.contextmanager
def handled(numbers: Sequence[signal.Signals], handler: Handler) -> Iterator[list[signal.Signals]]:
    """Handle signals with a function inside a ``with`` block. Use it in the main thread only.

    Signals that the parent process ignores stay ignored. A shell without job control starts ``command &`` with SIGINT
    ignored, because Ctrl-C belongs to the program in the foreground. ``nohup`` ignores SIGHUP, so that the command
    continues after its terminal is closed. SIGTERM is always handled, because it ends background processes.

    Args:
        numbers: The signals.
        handler: Function that Python calls for a signal.

    Yields:
        The signals that ``handler`` handles.
    """
    taken = [each for each in numbers if each == signal.SIGTERM or signal.getsignal(each) != signal.SIG_IGN]
    before = {each: signal.signal(each, handler) for each in taken}
    try:
        yield taken
    finally:
        for each, old in before.items():
            signal.signal(each, old)
