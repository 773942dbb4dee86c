"""What a policy is, wherever it computes: a bundle here, a server, one of several, a recording, two halves in two
places, an expert. :func:`connect` opens any of them.
"""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING, Any, Mapping, Protocol, Sequence, TypeVar

import numpy as np

from sinew_client.errors import CancelledError, ClientError, ClosedError, ObservationError, RequestTimeout
from sinew_client.types import WORDS, ActionChunk, Observation, PolicySpec

if TYPE_CHECKING:
    from sinew_client.episode import ActionQueue

Self = TypeVar("Self", bound="OpenPolicy")


class Policy(Protocol):
    """Observation to actions. A context manager, which closes it."""

    @property
    def spec(self) -> PolicySpec:
        """What it reads and writes. A server is asked for it, once a connection."""

    def infer(
        self, observation: Observation | Mapping[str, Any], *, timeout: float | None = None
    ) -> ActionChunk:
        """Return the actions for one observation.

        timeout: seconds, after which RequestTimeout is raised; its own, or none, if absent. What computes here looks at
        the clock between two stages. Raises ObservationError, or a server's ``bad_observation``, that names a field
        which it cannot take, and ClosedError after :meth:`close`.
        """

    def reset(self, session: str = "") -> None:
        """Say that a new episode begins in ``session``."""

    def close(self) -> None:
        """Let go of what it holds: connections, weights. Once is enough; twice is no error."""

    def __enter__(self) -> Any: ...

    def __exit__(self, *exc_info: Any) -> None: ...


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
        from sinew_client.episode import ActionQueue

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


def is_address(source: Any) -> bool:
    """Return True for the address of a server, ``tcp://host:port``, and for a list of them."""
    if isinstance(source, (list, tuple)):
        return bool(source) and all(map(is_address, source))
    return isinstance(source, str) and "://" in source and not source.startswith("hf://")


def connect(source: str | os.PathLike | Sequence[str], **options: Any) -> Policy:
    """Open the policy that ``source`` names.

    source: address of a server, or several, of which the first that answers is asked (options: those of
    :class:`sinew_client.Client`); else, with the package sinew-vla, what
    :func:`sinew.serve.opening.open_policy` opens in this process: a bundle, a checkpoint, a name of
    the hub, a folder of records, an expert. Raises SinewError.
    """
    if is_address(source):
        from sinew_client.client import Client

        return Client(source, **options)  # type: ignore[arg-type]
    try:
        from sinew.serve.opening import open_policy
    except ImportError as error:
        raise ClientError(
            f"{source}: expected tcp://HOST:PORT; what is no address computes here, which needs the package sinew-vla:"
            f" {error}"
        ) from error
    found: Policy = open_policy(source, **options)
    return found
