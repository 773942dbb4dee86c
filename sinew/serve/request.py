"""One request on its way through the scheduler, and how it may end without being computed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable
from typing import Any

from sinew.core import ActionChunk, Observation, SinewError


class ShuttingDownError(SinewError):
    """The server is stopping; the request was not computed, or not to its end."""

    code = "shutting_down"

    def __init__(self) -> None:
        super().__init__("the server is shutting down")


class SupersededError(SinewError):
    """A newer observation of the same session arrived while this one waited; it was not computed."""

    code = "superseded"


class DeadlineError(SinewError):
    """The request's deadline passed while it waited; it was not computed."""

    code = "deadline"


def bare(error: SinewError) -> SinewError:
    """Return ``error`` without the frames that it came through. They hold what was read of the request, and whoever
    waits for the error raises it once more, which closes a circle: memory would be free when the collector comes."""
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)


Outcome = ActionChunk | SinewError
Check = Callable[[], None]  # raises an error once nobody wants the result any more


class Job:
    """One request on its way. ``on_done`` is called exactly once, on whatever thread ends the job.

    client: whose it is; clients take turns. accepted: when it was submitted, ``time.perf_counter()`` seconds.
    begun: when decoding or inference began; None while it waits.
    """

    __slots__ = (
        "accepted",
        "answered",
        "begun",
        "cancel",
        "client",
        "deadline",
        "decode",
        "decode_s",
        "home",
        "kind",
        "on_done",
        "prepared",
        "session",
        "size",
        "waiting",
    )

    def __init__(
        self,
        decode: Callable[[Check], Observation],
        on_done: Callable[[Outcome], None],
        session: Hashable | None = None,
        deadline: float | None = None,
        client: Hashable | None = None,
    ):
        self.decode = decode
        self.on_done = on_done
        self.session = session
        self.deadline = deadline
        self.client = client
        self.home: Any = None  # the scheduler that it was given to
        self.accepted = time.perf_counter()
        self.begun: float | None = None
        self.decode_s = 0.0
        self.prepared: Any = None  # what the policy made of the observation
        self.kind: Hashable | None = None  # what those that may be computed with it have in common
        self.size = 0  # bytes of its decoded frames, while it is not answered
        self.cancel = threading.Event()
        self.waiting = True
        self.answered = False
