"""One request as a wire has read it, and how it may end without being computed."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from sinew.core import ActionChunk, Observation, SinewError
from sinew.serve.decode.frames import PixelBudget


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
    """Return ``error`` without its traceback and causes.

    Its frames refer to the request. A client that raises the error again would close a reference cycle, and memory
    would be free only after a garbage collection.
    """
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)


Outcome = ActionChunk | SinewError


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One request, as its protocol has read it.

    Attributes:
        wire: Name of the protocol.
        decode: Makes the observation from the received bytes. It runs on a thread of the scheduler, within a budget
            of pixels that also ends it when no client waits any more. It raises a SinewError that names the field.
        client: The peer, for the log.
        session: The client's name for its episode; "" for none. A newer request of a session replaces a waiting one,
            if both have the same ``owner``.
        deadline_ms: From ``arrived`` on. A request whose turn comes later is not computed. None: the server's own.
        arrived: ``time.perf_counter()`` when the last byte arrived.
        connection: The connection. Connections take turns, and each has a limit of waiting requests. None counts by
            the peer, and without a peer not at all.
        owner: Owner of the session; None for the connection.
        policy: Name of the policy that should answer; "" for the first.
    """

    wire: str
    decode: Callable[[PixelBudget], Observation]
    client: str = ""
    session: str = ""
    deadline_ms: float | None = None
    arrived: float = field(default_factory=time.perf_counter)
    connection: Hashable | None = None
    owner: Hashable | None = None
    policy: str = ""

    def __post_init__(self) -> None:
        if self.connection is None and self.client:
            object.__setattr__(self, "connection", self.client)

    @property
    def episode(self) -> Hashable | None:
        """What ``session`` is one of; None without a session."""
        if not self.session:
            return None
        return self.wire, self.connection if self.owner is None else self.owner, self.session


@dataclass(frozen=True, slots=True)
class WireMessage:
    """One message of a client, before anything large in it is decoded.

    Attributes:
        content: The protocol makes the observation from it.
        endpoint: "infer", "reset", "answered" (``reply`` is the whole answer; None for none), or "seen" (the
            observation is decoded and kept, and nothing is computed).
        session: Session of the request.
        deadline_ms: Deadline of the request.
        policy: Name of the policy.
        observations: The observations of a message with several, each a message itself.
    """

    content: Any = None
    endpoint: Literal["infer", "reset", "answered", "seen"] = "infer"
    session: str = ""
    deadline_ms: float | None = None
    policy: str = ""
    observations: Sequence[WireMessage] = ()
    reply: bytes | None = None
