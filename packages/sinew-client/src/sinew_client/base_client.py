"""The rules that the blocking and the asyncio client share: choice of the address, retries, and time limits.

This module opens no sockets. Each rule is a generator. It yields the attempts of a request, and the client sends each
attempt over its own kind of connection and sends the reply back into the generator. So both clients fail over, retry
and time out in the same way.
"""

from __future__ import annotations

import functools
import itertools
import logging
import os
import socket
import time
from typing import Any, Generator, Mapping, Optional, Sequence, Tuple

from sinew_client import protocol
from sinew_client.addresses import LEAVING, Addresses
from sinew_client.auth import key_from_environment
from sinew_client.errors import ClientError, ClosedError, ConnectionLost, RequestTimeout, ServerError
from sinew_client.robot_report import RobotReport
from sinew_client.tls import check_key_is_private
from sinew_client.types import ActionChunk, PolicySpec

logger = logging.getLogger("sinew_client")

MOST_WARNINGS = 100  # the client logs each different warning of a server once, and at most this many


# An attempt is one request to the present address: (parts, request id, connected, end). ``connected`` is the deadline
# for the connection and ``end`` the deadline for the answer, both in seconds of ``time.monotonic()``. For each attempt,
# the client sends the reply's bytes into the generator. It sends None if ``end`` has passed, or throws ConnectionLost.
Attempt = Tuple[Sequence, int, float, float]
Asking = Generator[Attempt, Optional[bytes], Any]


class BaseClient:
    """Base class of the clients: their settings and the rules for requests.

    :class:`sinew_client.Client` describes the arguments.
    """

    def __init__(
        self,
        address: str | Sequence[str] = "tcp://127.0.0.1:5555",
        *,
        timeout: float = 10.0,
        connect_timeout: float = 1.0,
        retries: int = 0,
        jpeg_quality: int | None = None,
        api_key: str | None = None,
        max_age: float | None = None,
        limits: tuple | None = None,
        max_rows: int = protocol.MAX_ROWS,
    ):
        if jpeg_quality is not None:
            protocol.need_pillow()
        self._addresses = Addresses(address)
        self.policy = self._addresses.policy
        self.timeout = timeout
        self.connect_timeout = connect_timeout
        self.retries = retries
        self.jpeg_quality = jpeg_quality
        self.api_key = key_from_environment() if api_key is None else api_key
        check_key_is_private(self._addresses.servers, self.api_key)
        self.max_age = max_age
        self.limits = limits
        self.max_rows = max_rows
        self._warned: set = set()  # warnings that were logged already
        # Request ids start at 1, because a server that cannot read a request's id answers with id 0.
        self._ids = itertools.count(1)
        self._spec: PolicySpec | None = None  # specification of the connected server's policy
        self._answered = 0  # deployment number in the newest answer; 0 if the server states no number
        self.deployment = 0  # deployment number in the newest metadata; 0 if the server states no number
        self._link: Any = None
        self._closed = False
        self._unreached = ""  # the reason why the last attempt to connect failed
        self._begin()

    @property
    def addresses(self) -> tuple:
        """All addresses, in the order in which they are tried."""
        return self._addresses.all

    @property
    def address(self) -> str:
        """The address of the server that the client uses now."""
        return self._addresses.present

    @property
    def place(self) -> int:
        """Index of the present address among :attr:`addresses`."""
        return self._addresses.place

    def __repr__(self) -> str:
        state = "closed" if self._closed else self._state()
        extra = "" if self.jpeg_quality is None else f", JPEG {self.jpeg_quality}"
        # Do not include the key itself, because this text appears in logs.
        key = ", with a key" if self.api_key else ""
        kind = type(self).__name__
        return f"<sinew_client.{kind} {self.address}, {state}, timeout {self.timeout:g} s{extra}{key}>"

    def _state(self) -> str:
        return "connected" if self._link is not None else "not connected"

    def _connecting(self, error: Exception | None) -> None:
        """Store the reason why connecting failed, for the final error message.

        None clears the reason after a success. The last attempt of a request may have too little time, so a timeout
        does not replace the reason of an earlier attempt.
        """
        if isinstance(error, (socket.timeout, TimeoutError)) and self._unreached:
            return
        # Prefer the system's text for an error number, because asyncio writes longer texts of its own. Errors of name
        # resolution have negative numbers without such a text.
        number = getattr(error, "errno", None) or 0
        text = os.strerror(number) if number > 0 else getattr(error, "strerror", None)
        self._unreached = "" if error is None else text or str(error)

    def _begin(self) -> None:
        """Initialise a subclass. The constructor calls this at its end."""

    def _forget(self) -> None:
        """Close the connection, so that the next request opens a new one."""
        raise NotImplementedError

    def _encoded(self, observation: Mapping[str, Any], request_id: int) -> list:
        return protocol.infer_parts(observation, request_id, self.jpeg_quality, self.api_key, self.policy)

    def _accepted(self, reply: Any, observation: Mapping[str, Any], start: float) -> ActionChunk:
        """Decode and check the chunk of a reply. Log each different warning of the server once.

        Args:
            reply: The decoded reply.
            observation: The observation of the request.
            start: ``time.perf_counter()`` at the call.

        Returns:
            The chunk.

        Raises:
            UnsafeChunk: The chunk must not be executed.
        """
        chunk = protocol.accepted(reply, observation, start, self.max_age, self.limits, self.max_rows)
        self._heard(chunk.deployment)
        self._warn(chunk.warnings)
        return chunk

    def _all(self, observations: Sequence[Any], timeout: float | None) -> tuple:
        """Prepare one message with several observations.

        Args:
            observations: The observations.
            timeout: Seconds for this call; None for the client's own.

        Returns:
            The generator of the attempts, and a function that converts the reply to one outcome per observation.
        """
        start, request_id = time.perf_counter(), next(self._ids)
        given = [protocol.given(each) for each in observations]
        parts = protocol.infer_all_parts(given, request_id, self.jpeg_quality, self.api_key, self.policy)

        def outcomes(reply: Any) -> list:
            chunk = functools.partial(self._accepted, start=start)
            return protocol.accepted_all(reply, given, chunk)

        return self._asking(parts, request_id, timeout), outcomes

    def _warn(self, warnings: Sequence[str]) -> None:
        for warning in warnings:
            if warning not in self._warned and len(self._warned) < MOST_WARNINGS:
                self._warned.add(warning)
                logger.warning("%s: %s", self.address, warning)

    def _said(self, reply: Any) -> dict:
        """Decode the description in a server's reply ({} without one), and store the server's deployment number."""
        description = protocol.decode_metadata(reply) if reply.metadata else {}
        if reply.deployment:  # only replies to METADATA have a deployment number
            self.deployment = reply.deployment
            self._heard(self._answered)
        return description

    def _heard(self, deployment: int) -> None:
        """Store the deployment number of an answer.

        If it has changed (hot-swap), forget the old policy's specification.
        """
        self._answered = deployment
        if self.exchanged:
            self._spec = None

    @property
    def exchanged(self) -> bool:
        """True if the server replaced its policy (hot-swap) after the last metadata.

        Servers without deployment numbers never report a replacement.
        """
        return 0 not in (self._answered, self.deployment) and self._answered != self.deployment

    def _context(self, reply: Any) -> tuple:
        """Return the context of a reply as bytes, and its timing.

        Raises:
            ClientError: The policy returns actions and not a context.
        """
        self._heard(reply.deployment)
        self._warn(reply.warnings)
        if not reply.context:
            raise ClientError(
                f"{self.address}: the policy {self.policy!r} returns actions and no context; call `infer`"
            )
        return reply.context, protocol.decode_timing(reply)

    def _control(
        self, kind: str, session: str, timeout: float | None, report: RobotReport | None = None
    ) -> Asking:
        """Prepare a request without an observation.

        Args:
            kind: "METADATA", "HEALTH", "RESET" or "REPORT".
            session: Session of the robot.
            timeout: Seconds for this call; None for the client's own.
            report: The report of a robot's run, for "REPORT".

        Returns:
            The generator of the attempts.
        """
        request_id = next(self._ids)
        payload = protocol.encode_control(kind, request_id, session, self.api_key, self.policy, report)
        return self._asking([payload], request_id, timeout)

    def _asking(self, parts: Sequence, request_id: int, timeout: float | None) -> Asking:
        """Yield the attempts of a request: first one attempt for the present address, then one for each of the next
        addresses, then the same again.

        Args:
            parts: The encoded request in parts.
            request_id: Id of the request.
            timeout: Seconds for one round through the addresses; None for the client's own limit.

        Returns:
            The decoded reply.

        Raises:
            ClientError: See ``Client.infer``.
        """
        limit = self.timeout if timeout is None else timeout
        self._unreached = ""
        addresses = self._addresses
        count = len(addresses.all)
        if self.retries or count > 1:
            # Copy the frames now, so that a second attempt sends the same frames even if the caller overwrites them.
            parts = protocol.kept(parts)
        for retry in range(self.retries, -1, -1):
            end = time.monotonic() + limit
            # `others` is the number of addresses that the client has not tried yet in this round.
            for others in range(count - 1, -1, -1):
                if self._closed:
                    raise ClosedError("the client is closed; create a new client")
                place, begin = addresses.place, time.monotonic()
                if begin >= end:
                    break
                connected = end
                if count > 1:
                    connected = begin + min(self.connect_timeout, (end - begin) / (others + 1))
                try:
                    answer = yield parts, request_id, connected, end
                    if answer is not None:
                        return self._decoded(answer, request_id)
                except (ConnectionLost, ServerError) as error:
                    lost = isinstance(error, ConnectionLost)
                    if not lost and error.code not in LEAVING:
                        raise
                    self._move(place, str(error))
                    if others:
                        continue
                    if not (lost and retry):
                        raise
                    break
                self._move(place, "no answer in time")
                break
        raise RequestTimeout(
            "no answer from {} within {:g} s{}{}".format(
                " or ".join(self.addresses),
                limit,
                f" in {self.retries + 1} attempts" if self.retries else "",
                f": no connection ({self._unreached})" if self._unreached else "",
            )
        )

    def _decoded(self, answer: bytes, request_id: int) -> Any:
        """Decode a reply.

        If the reply cannot be decoded, or has another request id, the connection is closed, because later replies
        would not match their requests either.

        Args:
            answer: The encoded reply.
            request_id: Id of the request.

        Returns:
            The decoded reply.

        Raises:
            ServerError: The reply is an error of the server.
            ClientError: The reply is not valid.
        """
        try:
            return protocol.decode_reply(answer, request_id)
        except ServerError:
            raise
        except ClientError:
            self._forget()
            raise

    def _move(self, place: int, why: str) -> None:
        if self._addresses.move(place, why):
            self._forget()
