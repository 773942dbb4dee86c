"""One request in the form in which a protocol's code passes it to the server, and the errors of requests that are not
computed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from sinew.core import ActionChunk, Observation, SinewError
from sinew.serve.decode.frames import PixelBudget


class ShuttingDownError(SinewError):
    """Error for a request that was not computed, or not completely, because the server stops."""

    code = "shutting_down"

    def __init__(self) -> None:
        super().__init__("the server is shutting down")


class SupersededError(SinewError):
    """Error for a request that was not computed, because a newer observation of the same session arrived while the
    request waited.
    """

    code = "superseded"


class DeadlineError(SinewError):
    """Error for a request that was not computed, because its deadline passed while the request waited."""

    code = "deadline"


def bare(error: SinewError) -> SinewError:
    """Return ``error`` without its traceback and causes.

    The traceback's frames refer to the request. If a client raised the error again, there would be a reference cycle,
    and the memory would be freed only by the next garbage collection.
    """
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)


Outcome = ActionChunk | SinewError


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One request, in the form in which a protocol's code passes it to the server.

    Attributes:
        wire: Name of the protocol.
        decode: Function that decodes the observation from the received bytes. A thread of the scheduler calls the
            function with a limit of pixels. The limit also stops the decoding when no client waits any more. For an
            invalid observation, the function raises a SinewError that names the field.
        client: The peer, for the log.
        session: The client's name for its episode; "" without a name. A newer request of a session replaces a waiting
            request, if both have the same ``owner``.
        deadline_ms: Milliseconds after ``arrived``. A request whose turn comes later is not computed. None means the
            server's deadline.
        arrived: Time at which the last byte arrived, on the clock ``time.perf_counter()``.
        connection: The connection. Connections take turns, and each connection has a limit of waiting requests. None
            means that ``client`` identifies the connection. Without a connection and a client, there is no limit.
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
        """Key of the episode: protocol, owner and session; None without a session."""
        if not self.session:
            return None
        return self.wire, self.connection if self.owner is None else self.owner, self.session


@dataclass(frozen=True, slots=True)
class WireMessage:
    """One message of a client, before its frames are decoded.

    Attributes:
        content: Content from which the protocol decodes the observation.
        endpoint: "infer", "reset", "answered" (``reply`` is the complete answer; None sends no answer), or "seen" (the
            observation is decoded and stored, but no actions are computed).
        session: Session of the request.
        deadline_ms: Deadline of the request.
        policy: Name of the policy.
        observations: The observations of a message with several observations. Each is a message itself.
        reply: The answer, for the endpoint "answered".
    """

    content: Any = None
    endpoint: Literal["infer", "reset", "answered", "seen"] = "infer"
    session: str = ""
    deadline_ms: float | None = None
    policy: str = ""
    observations: Sequence[WireMessage] = ()
    reply: bytes | None = None
