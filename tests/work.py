"""Counts the work of a call in executed lines of Python, which no other program on the machine changes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


class TooMuchWork(BaseException):
    """Raised inside a call that has used up its lines; no handler of the code under test may swallow it."""


def lines_of(call: Callable[[], object], most: int) -> int:
    """Run ``call`` and return how many lines of Python it executed.

    Raises :class:`TooMuchWork` as soon as there are more than ``most``, so that a decoder which walks through
    millions of hostile values fails at once, on a slow machine as on a fast one. Exceptions of the call pass through.
    """
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        if event == "line":
            count += 1
            if count > most:
                raise TooMuchWork(f"more than {most} lines of Python")
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count
