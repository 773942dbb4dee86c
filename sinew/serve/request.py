"""One request on its way from a wire to its answer, and how it may end without being computed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from sinew.core import ActionChunk, Observation, SinewError
from sinew.serve.decode.frames import MIN_BUDGET, PixelBudget

if TYPE_CHECKING:
    from sinew.processing.safety import Safety
    from sinew.serve.policies import Deployment
    from sinew.serve.scheduler import Scheduler


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


class Together:
    """The requests of one message, so many: an inference takes those that fit together, in their order, and nobody
    else's. They are ready when each of them is decoded or has ended. Thread-safe."""

    def __init__(self, count: int):
        self._lock = threading.Lock()
        self._left, self._decoded = count, list[Request]()

    def arrived(self, request: Request | None) -> list[Request]:
        """Note a request that is decoded, or None for one that ended before; return those that are ready now."""
        with self._lock:
            self._left -= 1
            if request is not None:
                self._decoded.append(request)
        return [] if self._left else self.decoded()

    def decoded(self) -> list[Request]:
        """Return those that are decoded and were not returned before, as they came."""
        with self._lock:
            found, self._decoded = self._decoded, []
        return sorted(found, key=lambda request: request.accepted)


Check = Callable[[], None]  # raises an error once nobody wants the result any more


@dataclass(slots=True, eq=False)
class Request:
    """One request, from the wire that makes it to its end.

    decode: makes the observation of the bytes that came; runs on the scheduler's decode thread, within a budget of
        pixels that also ends it when nobody waits any more, and raises a SinewError that names the field where it
        cannot.
    client: the peer, for the log. connection: what it came through; connections take turns, and have so many requests
        waiting at most. None: the peer, and without one nobody in particular.
    session: the client's name for its episode; requests of one session replace each other while they wait, if
        they are of one ``owner`` too (None: the connection). Empty: none.
    deadline_ms: from ``arrived`` on; a request whose turn comes later is not computed. None: what the server says.
    arrived: ``time.perf_counter()`` when the last byte was there. policy: which one is to answer; "": the first.
    deadline: by that clock; the service finds it. together: the others of its message, if there are any.

    What follows is filled in on the way. deployment: what answers it. observation: once it is decoded. safety: its
    limits. episode: what ``session`` is one of. home: the scheduler that it was given to, at ``accepted`` by that
    clock. on_done: takes the outcome, once. begun: when decoding or inference began last. prepared:
    what the policy made of the observation. kind: what those that may be computed with it have in common. alike: what
    those that cost as much have in common. gathered: ``together`` knows of it.
    size: bytes of its decoded frames, while it is not answered. borrowed: raises once frames are others than were read.
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
    deadline: float | None = None
    together: Together | None = None

    deployment: Deployment | None = field(default=None, init=False)
    observation: Observation | None = field(default=None, init=False)
    safety: Safety | None = field(default=None, init=False)
    warnings: list[str] = field(default_factory=list, init=False)
    episode: Hashable | None = field(default=None, init=False)
    home: Scheduler | None = field(default=None, init=False)
    accepted: float = field(default=0.0, init=False)
    on_done: Callable[[Outcome], None] | None = field(default=None, init=False)
    begun: float | None = field(default=None, init=False)
    decode_s: float = field(default=0.0, init=False)
    prepared: Any = field(default=None, init=False)
    kind: Hashable | None = field(default=None, init=False)
    alike: Hashable | None = field(default=None, init=False)
    gathered: bool = field(default=False, init=False)
    size: int = field(default=0, init=False)
    borrowed: Check | None = field(default=None, init=False)
    cancel: threading.Event = field(default_factory=threading.Event, init=False)
    waiting: bool = field(default=True, init=False)
    answered: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        if self.connection is None and self.client:
            self.connection = self.client
        if self.session:
            owner = self.connection if self.owner is None else self.owner
            self.episode = (self.wire, owner, self.session)

    def abandon(self) -> None:
        """Nobody waits for it any more."""
        if self.home is not None:
            self.home.cancel(self)

    def read(self, check: Check) -> Observation:
        """Return the observation, within the limits of what answers it. check: raises once nobody waits for it."""
        deployment = self.deployment
        limit = MIN_BUDGET if deployment is None else deployment.pixels
        budget = PixelBudget(limit, check)
        found = self.observation = self.decode(budget)
        self.borrowed = budget.borrowed
        if deployment is not None:  # an adapter that is not known is refused later
            self.safety = deployment.adapters.get(found.adapter, deployment.safety)
        if self.safety is not None:
            self.warnings += self.safety.check(found)
        return found


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
