"""Count the executed lines of Python in a call. Other programs on the machine do not change this number."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


class TooMuchWork(BaseException):
    """A call has executed too many lines. The tested code must not catch this exception."""


def lines_of(call: Callable[[], object], most: int) -> int:
    """Run ``call`` and return the number of executed lines of Python.

    If a decoder walks through millions of hostile values, it fails at once, on a slow machine as on a fast one.

    Args:
        call: The function to run. Its exceptions pass through.
        most: Largest number of lines.

    Raises:
        TooMuchWork: The call has executed more than ``most`` lines.
    """
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        if event == "line":
            count += 1
            if count > most:
                raise TooMuchWork(f"the call executed more than {most} lines of Python")
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count
