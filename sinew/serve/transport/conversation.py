"""Observations and answers of one WebSocket, one after the other. Everything runs on the server's event loop."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from functools import partial

from sinew.core import SinewError
from sinew.serve.request import Job, Outcome
from sinew.serve.service import Inference, Service
from sinew.serve.transport.connections import Connection
from sinew.serve.transport.websocket import Code, WebSocket
from sinew.serve.wires.sockets import SocketKind

logger = logging.getLogger(__name__)

PENDING = 2  # observations of one connection that may wait; openpi's clients have one under way


class Conversation:
    """Hands messages to the service as they come, while no other of the connection is under way.

    Reading goes on during an inference: pings are answered, and a client that leaves is noticed.
    """

    def __init__(
        self,
        service: Service,
        kind: SocketKind,
        connection: Connection,
        client: str,
        policy: str,
        limit: int,
    ):
        self.socket = WebSocket(connection, limit, kind.ping_s, self._take, self._next)
        self._loop = asyncio.get_running_loop()
        self._service, self._kind, self._connection = service, kind, connection
        self._client, self._policy = client, policy
        self._waiting: deque[tuple[float, memoryview, int]] = (
            deque()
        )  # since when, the message, what it holds
        self._job: Job | None = None
        self._busy = False
        self._ended = False
        self._previous_ms: float | None = None

    def greet(self, metadata: bytes) -> None:
        """Speak first, where the protocol wants that."""
        self.socket.send(metadata)

    def end(self) -> None:
        """The connection is over: nobody waits for what is under way."""
        self._ended = True
        self._waiting.clear()
        if self._job is not None:
            self._service.cancel(self._job)

    def fail(self, text: str) -> None:
        """Say that something is wrong and end the connection: openpi's way is a text frame first, which a client that
        takes each frame for an answer would misread; it finds the words in the reason of the end."""
        reason = text
        if self._kind.explains:
            self.socket.send(text.encode(), text=True)
            reason = "Internal server error. The reason is in the previous frame."
        self.socket.close(Code.INTERNAL, reason)
        self._ended = True

    def _take(self, data: memoryview, text: bool) -> None:
        """One message is there."""
        if self._ended:
            return
        if text == self._kind.binary:
            wanted = "binary frame with a msgpack map" if self._kind.binary else "text frame"
            self.fail(f"expected a {wanted}, got the other kind")
        elif len(self._waiting) == PENDING:
            self.fail(f"at most {PENDING} observations of one connection may wait")
        else:
            self._waiting.append((time.perf_counter(), data, self._connection.whole()))
            self._next()

    def _next(self) -> None:
        """Submit what waits, if nothing is under way and the client reads what it is sent."""
        while self._waiting and not (self._busy or self._ended) and self.socket.idle:
            arrived, payload, size = self._waiting.popleft()
            self._busy = True
            try:
                self._submit(payload, arrived, size)
            except SinewError as error:
                self._answered(arrived, size, error)
            except Exception:  # whatever it is, the other clients are served on
                logger.exception("a request could not be answered")
                self._answered(arrived, size, None)

    def _submit(self, payload: memoryview, arrived: float, size: int) -> None:
        service, codec = self._service, self._kind.codec
        with service.reading(codec.NAME, self._client):
            message = codec.read(payload)
        if message.endpoint == "reset":
            service.reset(message.session, self._policy)
            self._reply(arrived, size, codec.reset_answer())
            return
        decode = partial(codec.observation, message, service.policies.get(self._policy).spec)
        inference = Inference(
            codec.NAME,
            decode,
            self._client,
            message.session,
            message.deadline_ms,
            arrived,
            connection=self._connection,
            policy=self._policy,
        )
        self._job = service.submit_from(self._loop, inference, partial(self._answered, arrived, size))

    def _answered(self, arrived: float, size: int, outcome: Outcome | None) -> None:
        """The service is done with a message. None: by an error that nobody foresaw."""
        self._job = None
        text = "internal error; the server's log has the details"
        if isinstance(outcome, SinewError):
            text = f"{outcome} [{outcome.code}]"
        elif outcome is not None:
            try:
                server_ms = 1e3 * (time.perf_counter() - arrived)
                answer = self._kind.codec.answer(outcome, server_ms, self._previous_ms)
            except Exception:  # whatever it is, the other clients are served on
                logger.exception("a reply could not be written")
            else:
                self._reply(arrived, size, answer)
                return
        self._connection.answered(size)
        if not self._ended:
            self.fail(text)

    def _reply(self, arrived: float, size: int, answer: bytes | str) -> None:
        self._busy = False
        if not self._ended:
            data = answer.encode() if isinstance(answer, str) else answer
            self.socket.send(data, text=isinstance(answer, str))
            self._connection.prove()
            self._previous_ms = 1e3 * (time.perf_counter() - arrived)
        self._connection.answered(size)
        self._next()
