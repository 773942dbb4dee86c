"""A protocol over WebSockets, as the web transport runs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sinew.core import ActionChunk, Observation, PolicySpec, SinewError
from sinew.serve.request import Outcome
from sinew.serve.transport.routes import Routes

PING_S = 20.0  # between pings; a WebSocket that does not answer is closed
MAX_REASON = 123  # bytes, of RFC 6455's close frame


@dataclass(frozen=True, slots=True)
class Dialect:
    """read: a message of the bytes that came, cheaply; it has an ``endpoint`` (infer, reset, or answered with its own
        ``reply``, None: nothing), a ``session`` and a ``deadline_ms``. observation: of such a message, on the decode
        thread.
    answer: from a chunk, milliseconds since the request came, and those of the connection's request before, or None.
    guide: as of Listener, given the address.
    greet: the first frame of a connection; None: the client speaks first. reset: makes the answer to a ``reset``, None
        where its clients wait for none; None: there is none to ask.
    binary: its clients send binary frames, not text. explains: an error is a text frame before the end of the
        connection. ping_s: between pings, which clients answer; None where they may be busy with their robot instead.
    connect: makes the dialect of one connection, where its messages follow from each other, given what ``greet`` is and
        the query of its address. Raises RequestError for a query that it does not take.
    error: makes the answer that says what is wrong, after which the connection goes on; None, or where it makes None:
        the connection ends. waits: a client that sends more than may wait is not read from meanwhile, instead of being
        refused. beside: routes on the same port that belong to the protocol.
    answers: from the outcomes of a message whose ``observations`` are several, each a message itself, with the
        milliseconds of ``answer``; None: there are no such messages.
    """

    name: str
    read: Callable[[bytes], Any]
    observation: Callable[..., Observation]
    answer: Callable[[ActionChunk, float, float | None], bytes | str]
    guide: Callable[[PolicySpec, str], Sequence[str]]
    greet: Callable[[PolicySpec, Mapping[str, Any]], bytes] | None = None
    reset: Callable[[], bytes | None] | None = None
    binary: bool = True
    explains: bool = True
    ping_s: float | None = PING_S
    connect: Callable[[PolicySpec, Mapping[str, Any], Mapping[str, str]], Dialect] | None = None
    error: Callable[[SinewError], bytes | None] | None = None
    waits: bool = False
    beside: Routes | None = None
    answers: Callable[[Sequence[Outcome], float, float | None], bytes] | None = None
