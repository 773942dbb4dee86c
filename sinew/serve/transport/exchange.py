"""One request and its reply, for any codec whose requests are single frames: between a transport and the service.

A codec looks a request over on the transport's thread, decodes it on the scheduler's, and writes the reply. What is
refused before it gets to the service says so (``Refused``), so that the transport can slow its sender down.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from sinew_client.shared import ReceivedFrames
from sinew_client.zmtp import Frame, Message

from sinew.core import BusyError, Observation, PolicySpec, RequestError, SinewError
from sinew.serve.decode.frames import PixelBudget
from sinew.serve.request import Outcome, Request
from sinew.serve.service import Service

logger = logging.getLogger(__name__)

MAX_ROUTING_ID = 255  # bytes, ZeroMQ's own limit
MAX_ENVELOPE = 8  # frames: one routing id per proxy on the way, and the empty frame

Envelope = list[Frame]
Decoder = Callable[[PixelBudget], Observation]


class Codec(Protocol):
    """One protocol of requests and replies, each one frame."""

    name: str
    # Takes messages that get no reply of their own (wires/streams.py); None where there are none
    streams: Any

    def bind(self, service: Service) -> None:
        """The policy is loaded; called once, before the first request."""

    def peek(self, payload: memoryview) -> Any:
        """Return the header of a request: its ``session``, ``policy`` (the name of the one that is asked),
        ``deadline_ms``, and ``error``: why it is refused, or None. Never raises, and cheap: it runs on the loop."""

    def authorize(self, header: Any) -> None:
        """Raises UnauthorizedError."""

    def control(self, header: Any, asker: Asker | None = None) -> bytes | None:
        """The reply to everything that is not an inference; None for an inference."""

    def decoders(
        self, header: Any, payload: memoryview, shared: ReceivedFrames | None = None
    ) -> Sequence[Decoder]:
        """The observations of one request, usually one; each runs on the decode thread. shared: memory that its frames
        may lie in."""

    def encode(self, header: Any, outcomes: Sequence[Outcome], server_ms: float) -> bytes:
        """The reply to an inference, an outcome per decoder. server_ms: from arrival to now."""

    def encode_error(self, header: Any, error: SinewError) -> bytes:
        """The reply to a request that failed; header is None where the message could not be read."""

    def guide(self, spec: PolicySpec, address: str) -> Sequence[str]:
        """See Wire."""


class Asker(Protocol):
    """A connection as this file sees it. requests: what is not answered."""

    address: str
    shared: ReceivedFrames | None  # memory of this machine
    unsent: int  # bytes of replies that its socket did not take yet
    requests: set[Series]

    def __hash__(self) -> int: ...

    def reply(self, frames: Sequence[Frame], series: Series | None) -> None:
        """Send one message, from any thread. series: what it answers, whose memory is free now."""

    def release(self, series: Series) -> None:
        """Free what a message held that gets no reply. On the loop."""

    def prove(self) -> None:
        """A request of this connection was taken: it is not a stranger any more."""

    def refuse(self, error: SinewError) -> None:
        """A request of this connection was refused before it got to the service."""


class Exchange:
    """Takes the messages of all connections of one wire. limit: bytes of one request."""

    def __init__(self, codec: Codec, service: Service, limit: int):
        self._codec = codec
        self._service = service
        self._limit = limit

    def take(self, asker: Asker, message: Message, size: int) -> None:
        """Answer one message, or submit it. size: what it holds of its connection's account."""
        codec = self._codec
        arrived = time.perf_counter()
        envelope, payload = _open(message)
        count = message.count - len(envelope)
        series = Series(self._service, size)
        header = None
        try:
            if message.size > self._limit:
                raise RequestError(f"request: expected at most {self._limit} bytes, got {message.size}")
            if count != 1:
                raise RequestError(f"expected a single-frame request, got {count} frames")
            content = memoryview(payload[0])
            header = codec.peek(content)
            if header.error is not None:
                raise header.error
            if self._service.wants_key:
                codec.authorize(header)
                asker.prove()
            reply = codec.control(header, asker)
            if reply is not None:
                asker.reply([*envelope, reply], series)
                return
            if codec.streams is not None and codec.streams.take(asker, envelope, header, content):
                asker.prove()
                asker.release(series)
                return
            decoders = codec.decoders(header, content, asker.shared)
        except SinewError as error:
            self._service.refused(codec.name, asker.address, error)
            asker.refuse(error)
            asker.reply([*envelope, codec.encode_error(header, error)], series)
            return
        except Exception:  # whatever it is, the other clients are served on
            logger.exception("a request could not be taken")
            asker.reply([*envelope, codec.encode_error(header, SinewError("internal error"))], series)
            return
        asker.prove()
        # Observations of one batch do not replace each other.
        session = header.session if len(decoders) == 1 else ""
        series.requests = [
            Request(
                codec.name,
                decode,
                asker.address,
                session,
                header.deadline_ms,
                arrived,
                connection=asker,
                policy=header.policy,
            )
            for decode in decoders
        ]
        series.on_end = partial(self._reply, asker, envelope, header, arrived, series)
        asker.requests.add(series)
        series.ask()

    def _reply(
        self,
        asker: Asker,
        envelope: Envelope,
        header: Any,
        arrived: float,
        series: Series,
        outcomes: Sequence[Outcome],
    ) -> None:
        """Runs on a thread of the scheduler, or on the loop."""
        asker.requests.discard(series)
        try:
            if busy := next((each for each in outcomes if isinstance(each, BusyError)), None):
                asker.refuse(busy)
            reply = self._codec.encode(header, outcomes, (time.perf_counter() - arrived) * 1e3)
        except Exception:  # a client that gets no reply waits for ever
            logger.exception("a reply could not be written")
            reply = self._codec.encode_error(header, SinewError("internal error"))
        asker.reply([*envelope, reply], series)


class Series:
    """The requests of one message, an observation each. size: bytes that it keeps in memory."""

    def __init__(self, service: Service, size: int):
        self.size = size
        self.requests: list[Request] = []
        self.on_end: Callable[[Sequence[Outcome]], None] = _nothing
        self._service = service

    def ask(self) -> None:
        """Submit them. ``on_end`` gets the outcome of each."""
        self._service.submit_all(self.requests, self._end)

    def abandon(self) -> None:
        """Nobody waits for it any more."""
        for request in self.requests:
            self._service.cancel(request)

    def _end(self, outcomes: Sequence[Outcome]) -> None:
        # The requests know this object, and with it the frames; a circle would keep them until the collector comes.
        on_end, self.on_end = self.on_end, _nothing
        self.requests = []
        on_end(outcomes)


def _nothing(_outcomes: Sequence[Outcome]) -> None: ...


def _open(message: Message) -> tuple[Envelope, list[Frame]]:
    """Split a message into what routes the reply and the payload frames.

    REQ sockets put an empty frame before the payload, DEALER sockets may leave it out, and a proxy in
    between adds a routing id of its own in front of that empty frame.
    """
    frames = message.frames
    for index, frame in enumerate(frames[: MAX_ENVELOPE - 1]):
        if index == message.count - 1 or len(frame) > MAX_ROUTING_ID:
            break
        if not frame:
            return frames[: index + 1], frames[index + 1 :]
    return [], frames
