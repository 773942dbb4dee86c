"""Shared code of policies that compute in this process: closing, time limits, and requests for text."""

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
    """Convert an observation to a request for text without actions.

    Args:
        observation: The observation.
        question: The question to answer; None requests the next subtask.
        max_tokens: Largest number of tokens; None for the bundle's own.

    Returns:
        The fields of the request.

    Raises:
        ObservationError: The question is empty.
    """
    if question is not None and not (isinstance(question, str) and question.strip()):
        got = "an empty string" if isinstance(question, str) else type(question).__name__
        raise ObservationError("question", "a non-empty text", got)
    fields = vars(observation) if isinstance(observation, Observation) else observation
    request = {"question": question} if question is not None else {"subtask": True, "text_only": True}
    return {**fields, **request, "text_tokens": max_tokens}


def refuse_words(observation: Observation | Mapping[str, Any], who: str) -> None:
    """Reject an observation that requests text. Policies without a language head call this.

    Args:
        observation: The observation.
        who: The policy, for the message.

    Raises:
        ObservationError: The observation requests text.
    """
    if not isinstance(observation, Observation):
        observation = Observation(
            {}, np.zeros(0), **{key: observation[key] for key in WORDS if key in observation}
        )
    name = observation.asks
    if name:
        raise ObservationError(name, "no request for text, which needs a policy with a language head", who)


class OpenPolicy:
    """Base class of policies that compute in this process.

    After ``close``, the methods raise ClosedError. They also raise it in a forked process, because the threads of the
    parent process do not exist there.
    """

    _closed = False
    _process: int

    def __new__(cls: type[Self], *_: Any, **__: Any) -> Self:
        instance = super().__new__(cls)
        instance._process = os.getpid()
        return instance

    def reset(self, session: str = "") -> None:
        """Begin a new episode. This does nothing, because answers do not depend on earlier requests."""
        self._refuse_closed()

    def episode(self, *, rows: int | None = None, session: str = "") -> ActionQueue:
        """Begin an episode that returns one action per control step.

        Args:
            rows: Number of actions per chunk that are executed; see :class:`sinew_client.ActionQueue`.
            session: Session of the episode.

        Returns:
            The episode.
        """
        return ActionQueue(self, rows=rows, session=session)  # type: ignore[arg-type]

    def close(self) -> None:
        """Release connections and weights. Safe to call twice."""
        if not self._closed:
            self._closed = True
            self._release()

    def _release(self) -> None:
        """Release the resources of a subclass. :meth:`close` calls this method once."""

    def _refuse_closed(self) -> None:
        """Raise :class:`ClosedError` if the policy is closed, or if this process is a fork."""
        if self._closed:
            raise ClosedError("the policy is closed; open it again")
        if self._process != (now := os.getpid()):
            raise ClosedError(
                f"the policy was opened in process {self._process} and cannot be used in the forked process {now}; open"
                " the policy in each process"
            )

    def __enter__(self: Self) -> Self:
        self._refuse_closed()
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self.close()


class Limit(threading.Event):
    """An event that is set after a time limit, or when another event is set. Pass it to an inference to cancel it.

    Use it in a ``with`` block: if the time limit cancels the inference, the block raises RequestTimeout instead of
    CancelledError.

    Args:
        seconds: The time limit; None sets no limit.
        other: Another event that cancels the inference too.

    Example:
        >>> with Limit(2.0) as limit:
        ...     chunk = engine.run(observation, cancel=limit)
    """

    def __init__(self, seconds: float | None, other: threading.Event | None = None):
        super().__init__()
        self._seconds, self._other = seconds, other
        self._end = float("inf") if seconds is None else time.monotonic() + seconds

    @property
    def passed(self) -> bool:
        """True if the time limit has passed."""
        return time.monotonic() >= self._end

    def is_set(self) -> bool:
        return super().is_set() or self.passed or (self._other is not None and self._other.is_set())

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the event is set, at most ``timeout`` seconds. Return True if it is set.

        The event ``other`` is checked only at the beginning and at the end.
        """
        remaining = self._end - time.monotonic()
        longest = min(remaining, threading.TIMEOUT_MAX if timeout is None else timeout)
        return self.is_set() or super().wait(max(0.0, longest)) or self.is_set()

    def __enter__(self) -> Limit:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if isinstance(error, CancelledError) and self.passed:
            raise RequestTimeout(f"no answer within {self._seconds:g} s") from error
