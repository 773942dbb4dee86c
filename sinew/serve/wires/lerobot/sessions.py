"""Stores the state of the LeRobot protocol: its clients, the agreement with each client, and the observations that wait
or are being received.

Only the protocol's event loop uses this module.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field

from sinew.core import BusyError, Observation, RequestError, SinewError
from sinew.serve.transport.listen import Listen
from sinew.serve.wires.lerobot.agreements import Agreements
from sinew.serve.wires.lerobot.features import Agreement
from sinew.serve.wires.lerobot.messages import BEGIN, END, MIDDLE, parse

logger = logging.getLogger(__name__)

RECEIVE_S = 10.0  # seconds within which an observation must arrive completely
PREDICTED = 4096  # largest number of predicted timesteps that are stored for a client
LIVE_S = 60.0  # seconds after its last observation during which a client keeps its place
MAX_PIECES = 1024  # largest number of pieces of one observation
HELD = 4  # memory of all waiting observations together, as a multiple of the largest observation


class NoPolicyError(SinewError):
    """Error for a client that has not named a policy yet."""

    code = "no_policy"


class TooSlowError(SinewError):
    """Error for an observation whose last bytes did not arrive in time."""

    code = "too_slow"


@dataclass(frozen=True, slots=True)
class Waiting:
    """An observation that waits for its inference.

    Attributes:
        timestep: Step of the client's control loop.
        observation: The observation.
        size: Bytes that the observation takes in memory.
        arrived: Time of arrival.
    """

    timestep: int
    observation: Observation
    size: int
    arrived: float


@dataclass(slots=True)
class RobotSession:
    """The session of one connection.

    Attributes:
        agreement: The agreement with the client; None before the agreement.
        heard: Time of the last observation.
        waiting: The waiting observation; None without one.
        news: Event that is set when an observation arrives.
        predicted: Timesteps for which chunks were computed.
    """

    agreement: Agreement | None = None
    heard: float = float("-inf")  # time of the last observation
    waiting: Waiting | None = None
    news: asyncio.Event = field(default_factory=asyncio.Event)
    predicted: OrderedDict[int, None] = field(default_factory=OrderedDict)

    def offer(self, waiting: Waiting, must_go: bool) -> bool:
        """Store an observation until it is computed, in place of an older one.

        Args:
            waiting: The observation.
            must_go: True if the client requires a chunk for this observation.

        Returns:
            False if a chunk for its timestep was already computed. The observation is then not stored.
        """
        if waiting.timestep in self.predicted and not must_go:
            return False
        self.waiting = waiting
        self.news.set()
        return True

    def take(self) -> Waiting | None:
        """Return the waiting observation; None if there is none. Its timestep counts as predicted from now on."""
        waiting, self.waiting = self.waiting, None
        self.news.clear()
        if waiting is not None:
            self.predicted[waiting.timestep] = None
            while len(self.predicted) > PREDICTED:
                self.predicted.popitem(last=False)
        return waiting


class Sessions:
    """The sessions of all connections, at most ``listen.max_connections``."""

    def __init__(self, listen: Listen):
        self._limit = listen.max_message_bytes
        self._most = listen.max_connections
        self._sessions: OrderedDict[str, RobotSession] = OrderedDict()
        self.agreements = Agreements(listen.max_connections)  # the agreements of clients that reconnect
        self._arriving = 0  # bytes of observations that are being received or decoded

    def begin(self, client: str) -> RobotSession:
        """Begin the session of a client that starts. The earlier observations of the client are dropped, and its
        agreement (which key belongs to which input) stays.

        A client that drives a robot never loses its place.

        Raises:
            BusyError: No place is free.
        """
        previous = self._sessions.pop(client, None)
        if previous is None and len(self._sessions) >= self._most:
            self._forget_one()
        session = RobotSession() if previous is None else RobotSession(previous.agreement, previous.heard)
        self._sessions[client] = session
        return session

    def _forget_one(self) -> None:
        now = time.monotonic()
        for silent in (lambda each: each.agreement is None, lambda each: now - each.heard > LIVE_S):
            # The session that was used least recently comes first.
            for client, session in self._sessions.items():
                if silent(session) and session.waiting is None:
                    del self._sessions[client]
                    return
        raise BusyError(
            f"{len(self._sessions)} clients are connected, which is the limit; stop another client"
        )

    def agree(self, client: str, agreement: Agreement) -> None:
        session = self._sessions.get(client) or self.begin(client)
        session.agreement = agreement
        self.agreements.add(_host(client), agreement)

    def find(self, client: str) -> tuple[RobotSession, tuple[Agreement, ...]]:
        """Return the session of a client, and its possible agreements (which key belongs to which input).

        Returns:
            The session, and the client's own agreement. If the client has reconnected, all agreements of its host are
            returned.

        Raises:
            NoPolicyError: There is no agreement.
        """
        session = self._sessions.get(client)
        if session is not None and session.agreement is not None:
            self._sessions.move_to_end(client)
            return session, (session.agreement,)
        agreed = self.agreements.of(_host(client))
        if not agreed:
            raise NoPolicyError(
                "expected SendPolicyInstructions on this connection first; start the client again"
            )
        return session or self.begin(client), agreed

    def recognize(self, client: str, session: RobotSession, agreement: Agreement) -> None:
        """Store the agreement with which an observation of this client was read."""
        session.heard = time.monotonic()
        if session.agreement is None:
            logger.info(
                "lerobot: %s sent no policy instructions and is treated as a client that reconnects", client
            )
            session.agreement = agreement

    def wake(self) -> None:
        """Wake all requests that wait for an observation, so that they check again."""
        for session in self._sessions.values():
            session.news.set()

    @contextlib.contextmanager
    def held(self, size: int) -> Iterator[None]:
        """Count ``size`` more bytes in memory while the ``with`` block runs.

        Raises:
            BusyError: The observations of all clients together would exceed the memory limit.
        """
        self._arriving += size
        try:
            self._make_room()
            yield
        finally:
            self._arriving -= size

    async def receive(self, pieces: AsyncIterator[bytes]) -> bytes:
        """Return the bytes of one observation from a stream of pieces.

        The pieces are one END, or BEGIN, any number of MIDDLE, and END.

        Raises:
            RequestError: The order of the pieces is wrong, or the observation is too large.
            TooSlowError: The pieces do not arrive in time.
            BusyError: Too many bytes are in memory.
        """
        received: list[bytes] = []
        size = 0
        began = False
        with contextlib.ExitStack() as memory:
            try:
                async with asyncio.timeout(RECEIVE_S):
                    async for piece in pieces:
                        message = parse("Observation", piece)
                        state, data = message.transfer_state, message.data
                        if state not in (BEGIN, MIDDLE, END):
                            raise RequestError(f"transfer_state: expected BEGIN, MIDDLE or END, got {state}")
                        if state == MIDDLE and not began:
                            raise RequestError("transfer_state: expected BEGIN before MIDDLE")
                        if state == BEGIN:
                            began, size = True, 0
                            received.clear()
                            memory.close()
                        memory.enter_context(self.held(len(data)))
                        received.append(data)
                        size += len(data)
                        if size > self._limit or len(received) > MAX_PIECES:
                            most = f"{self._limit} bytes in {MAX_PIECES} pieces"
                            raise RequestError(
                                f"observation: expected at most {most}, got more; send smaller frames"
                            )
                        if state == END:
                            return received[0] if len(received) == 1 else b"".join(received)
            except TimeoutError:
                raise TooSlowError(
                    f"an observation took longer than {RECEIVE_S:g} s to arrive; send smaller frames"
                ) from None
        raise RequestError("transfer_state: expected END, but the stream ended before it")

    def _make_room(self) -> None:
        """Drop the observations that have waited longest, while too many bytes are in memory.

        Raises:
            BusyError: Even without waiting observations, too many bytes are in memory.
        """
        limit = HELD * self._limit
        waiting = [(each.waiting, each) for each in self._sessions.values() if each.waiting is not None]
        size = self._arriving + sum(each.size for each, _session in waiting)
        for each, session in sorted(waiting, key=lambda pair: pair[0].arrived):
            if size <= limit:
                return
            size -= each.size
            session.waiting = None
        if size > limit:
            raise BusyError("too many large observations are arriving at once; send smaller frames")


def _host(client: str) -> str:
    """Return the host of a peer such as ``ipv4:127.0.0.1:40000``."""
    return client.rpartition(":")[0]
