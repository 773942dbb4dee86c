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
    """Return ``error`` without the frames that it came through. They hold what was read of the request, and whoever
    waits for the error raises it once more, which closes a circle: memory would be free when the collector comes."""
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)


Outcome = ActionChunk | SinewError


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One request, as the wire that makes it has read it.

    Attributes:
        wire: Name of the wire.
        decode: Makes the observation of the bytes that came. It runs on a thread of the scheduler, within a budget of
            pixels that also ends it when nobody waits any more, and raises a SinewError that names the field.
        client: The peer, for the log.
        session: The client's name for its episode; "" for none. Requests of one session replace each other while they
            wait, if they have one ``owner``.
        deadline_ms: From ``arrived`` on. A request whose turn comes later is not computed. None: the server's own.
        arrived: ``time.perf_counter()`` when the last byte was there.
        connection: What it came through. Connections take turns, and each has a limit of waiting requests. None: the
            peer, and without a peer nobody in particular.
        owner: Whose session it is; None for the connection's.
        policy: Name of the policy that is to answer; "" for the first.
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
    """One message of a client as its wire has read it, before anything large of it is decoded.

    content: what the wire makes the observation of. endpoint: answered, where ``reply`` is all that there is to say
    (None: nothing), or seen, where the observation is decoded and kept, and nothing is computed. observations: of a
    message that has several, each a message itself.
    """

    content: Any = None
    endpoint: Literal["infer", "reset", "answered", "seen"] = "infer"
    session: str = ""
    deadline_ms: float | None = None
    policy: str = ""
    observations: Sequence[WireMessage] = ()
    reply: bytes | None = None
