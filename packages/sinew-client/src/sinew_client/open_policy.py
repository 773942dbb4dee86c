"""What policies that compute in this process share: how they close, time out, and reject requests for words."""

from __future__ import annotations

import os
import threading
import time
from typing import Any, Mapping, TypeVar

import numpy as np

from sinew_client.episode import ActionQueue
from sinew_client.errors import CancelledError, ClosedError, ObservationError, RequestTimeout
from sinew_client.types import WORDS, Observation

Self = TypeVar("Self", bound="OpenPolicy")


def asking(
    observation: Observation | Mapping[str, Any], question: str | None, max_tokens: int | None
) -> Mapping[str, Any]:
    """Return an observation that asks for words alone: the answer to a question, or, of None, a subtask.

    Raises ObservationError for a question that is none.
    """
    if question is not None and not (isinstance(question, str) and question.strip()):
        got = "an empty string" if isinstance(question, str) else type(question).__name__
        raise ObservationError("question", "a text", got)
    given = vars(observation) if isinstance(observation, Observation) else observation
    asked = {"question": question} if question is not None else {"subtask": True, "text_only": True}
    return {**given, **asked, "text_tokens": max_tokens}


def refuse_words(observation: Observation | Mapping[str, Any], who: str) -> None:
    """Raise ObservationError where an observation asks for words of what says none. who: what that is."""
    if not isinstance(observation, Observation):
        observation = Observation(
            {}, np.zeros(0), **{key: observation[key] for key in WORDS if key in observation}
        )
    name = observation.asks
    if name:
        raise ObservationError(name, "nothing, as only a policy with its language head says words", who)


class OpenPolicy:
    """Holds what policies that compute here have in common: they are closed once, and refuse by name from then on; so
    they do in a process that was forked from theirs, where their threads are not."""

    _closed = False
    _process: int

    def __new__(cls: type[Self], *_: Any, **__: Any) -> Self:
        made = super().__new__(cls)
        made._process = os.getpid()
        return made

    def reset(self, session: str = "") -> None:
        """Do nothing: no answer depends on those before it."""
        self._refuse_closed()

    def episode(self, *, rows: int | None = None, session: str = "") -> ActionQueue:
        """Return an episode that hands out one action a control step (:class:`sinew_client.ActionQueue`)."""
        return ActionQueue(self, rows=rows, session=session)  # type: ignore[arg-type]

    def close(self) -> None:
        """Let go of what it holds."""
        if not self._closed:
            self._closed = True
            self._release()

    def _release(self) -> None:
        """Let go, once."""

    def _refuse_closed(self) -> None:
        """Raise :class:`ClosedError` after :meth:`close`."""
        if self._closed:
            raise ClosedError("the policy is closed")
        if self._process != (now := os.getpid()):
            raise ClosedError(
                f"the policy was opened in process {self._process}, whose threads are not in its fork {now}: open one"
                " here, or begin processes by spawn, not fork"
            )

    def __enter__(self: Self) -> Self:
        self._refuse_closed()
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self.close()


class Limit(threading.Event):
    """Cancels what goes on for too long: is set by itself after so many seconds, if any, or once ``other`` is.

    As a context it turns the CancelledError of what it ended into RequestTimeout.
    """

    def __init__(self, seconds: float | None, other: threading.Event | None = None):
        super().__init__()
        self._seconds, self._other = seconds, other
        self._end = float("inf") if seconds is None else time.monotonic() + seconds

    @property
    def passed(self) -> bool:
        return time.monotonic() >= self._end

    def is_set(self) -> bool:
        return super().is_set() or self.passed or (self._other is not None and self._other.is_set())

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is set; False where it is not after ``timeout`` seconds. ``other`` is looked at in the end."""
        left = self._end - time.monotonic()
        longest = min(left, threading.TIMEOUT_MAX if timeout is None else timeout)
        return self.is_set() or super().wait(max(0.0, longest)) or self.is_set()

    def __enter__(self) -> Limit:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if isinstance(error, CancelledError) and self.passed:
            raise RequestTimeout(f"no answer within {self._seconds:g} s") from error
