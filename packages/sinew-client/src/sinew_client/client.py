"""The blocking client: one request, one reply, each with a time limit."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from sinew_client import protocol, shared
from sinew_client.addresses import pauses
from sinew_client.base_client import Asking, Attempt, BaseClient
from sinew_client.episode import ActionQueue
from sinew_client.errors import ClientError, ConnectionLost
from sinew_client.link import Link
from sinew_client.open_policy import asking
from sinew_client.robot_report import RobotReport
from sinew_client.types import ActionChunk, Observation, PolicySpec


class Client(BaseClient):
    """A connection to a policy server (``sinew serve``). It connects at the first call.

    A connection without a reply in time is closed, so a late reply can never answer a later request. The next call
    opens a new connection, so the client recovers when the server restarts. Do not write to a frame before ``infer``
    has returned: frames are sent without a copy.

    Thread-safe: calls from several threads wait for each other. After ``fork`` the child's first call opens its own
    connection.

    Args:
        address: ``tcp://host:port`` or ``host:port``; ``tls://host:port`` for a server with ``--tls-cert``;
            ``ipc:///path`` for a Unix socket of this machine. ``host:port/NAME`` names one of several policies of a
            server. With a list of addresses, a request that finds no server, loses its connection, or reaches a
            stopping or unhealthy server goes to the next address at once. The client stays with the server that
            answered.
        shared_memory: True passes raw frames of 256 KiB and more to a server at ``ipc://`` in shared memory, if both
            sides support it. :attr:`frames` states whether this happens. False sends all frames in the message.
        timeout: Seconds to wait for each answer, including the connection. A client may be created before its server.
        connect_timeout: With several addresses: seconds to wait for a connection before the next address is tried.
        retries: How often a request is sent again after a timeout or a lost connection. An inference changes nothing
            on the server, so this is safe. The default is 0, because a late robot should rather send a fresh
            observation.
        jpeg_quality: Quality 1 to 95 of the JPEG compression of uint8 frames (needs Pillow). None sends raw pixels.
        api_key: Key of the server. None takes SINEW_API_KEY from the environment, "" sends none. With a key,
            ``tcp://`` to another machine raises ClientError, unless SINEW_ALLOW_UNENCRYPTED_KEY is 1 in the
            environment.
        max_age: Seconds. An answer to an older observation raises :class:`UnsafeChunk`. The age counts from the
            observation's ``time`` if it has one (``time.time()`` of this machine), else from the call. None allows
            any age.
        limits: Smallest and largest allowed action, (low, high), each a number or [D] in robot units. An answer with an
            action outside raises :class:`UnsafeChunk`. An answer with NaN or infinity always raises it.
        max_rows: Largest number of actions in an answer. A longer answer raises :class:`UnsafeChunk`. The policy
            states its own number as ``chunk_size``.

    Raises:
        ClientError: The address is not valid, or the key would travel unencrypted.

    Example:
        >>> with Client("tcp://server:5555") as client:
        ...     chunk = client.infer({"images": {"front": frame}, "state": state, "prompt": "stack the cups"})
    """

    def __init__(
        self,
        address: str | Sequence[str] = "tcp://127.0.0.1:5555",
        *,
        shared_memory: bool = True,
        **settings: Any,
    ):
        self.shared_memory = shared_memory
        super().__init__(address, **settings)

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()

    def infer(
        self, observation: Observation | Mapping[str, Any], *, timeout: float | None = None
    ) -> ActionChunk:
        """Compute the actions for one observation.

        Args:
            observation: An :class:`Observation`, or a dict with its fields. ``images`` {camera: uint8 [height, width,
                3] RGB, float in [0, 1], or the bytes of a JPEG or PNG file}, ``state`` float [D] in robot units, and
                ``prompt`` are enough for most policies. A dict may also have ``deadline_ms``: the server then rejects
                the request if it cannot begin the inference within this time after the request has arrived.
            timeout: Seconds for this call; None for the client's own.

        Returns:
            The action chunk, with ``round_trip_ms``.

        Raises:
            InvalidObservation: The observation cannot be encoded. Nothing was sent.
            RequestTimeout: There was no answer in time.
            ConnectionLost: The connection broke.
            ServerError: The server answered with an error, such as ``bad_observation``.
            UnsafeChunk: The answer must not be executed.
        """
        start, request_id, fields = time.perf_counter(), next(self._ids), protocol.given(observation)
        parts = self._encoded(fields, request_id)
        return self._accepted(self._drive(self._asking(parts, request_id, timeout)), fields, start)

    def infer_all(
        self, observations: Sequence[Observation | Mapping[str, Any]], *, timeout: float | None = None
    ) -> list[ActionChunk | ClientError]:
        """Compute the actions for several observations with one message.

        Args:
            observations: 1 to 64 observations, each as in :meth:`infer`, without ``deadline_ms``.
            timeout: Seconds for this call; None for the client's own.

        Returns:
            One entry per observation, in their order: its chunk, or the error that :meth:`infer` would raise for it.

        Raises:
            InvalidObservation: The observations cannot be encoded. Nothing was sent.
            RequestTimeout: There was no answer in time.
            ConnectionLost: The connection broke.
            ServerError: The server rejected the whole message.
        """
        asking, outcomes = self._all(observations, timeout)
        results: list = outcomes(self._drive(asking))
        return results

    def ask(
        self,
        observation: Observation | Mapping[str, Any],
        question: str,
        max_tokens: int | None = None,
        *,
        timeout: float | None = None,
    ) -> str:
        """Let the policy's language head answer a question about an observation.

        Args:
            observation: As in :meth:`infer`.
            question: The question; not empty.
            max_tokens: Largest number of tokens in the answer; None for the bundle's own.
            timeout: Seconds for this call; None for the client's own.

        Returns:
            The answer.

        Raises:
            ObservationError: The question is empty. All errors of :meth:`infer` are possible too.
        """
        return self.infer(asking(observation, question, max_tokens), timeout=timeout).text

    def subtask(
        self,
        observation: Observation | Mapping[str, Any],
        max_tokens: int | None = None,
        *,
        timeout: float | None = None,
    ) -> str:
        """Let the policy's language head name the next subtask of the instruction, without computing actions.

        Args:
            observation: As in :meth:`infer`.
            max_tokens: Largest number of tokens; None for the bundle's own.
            timeout: Seconds for this call; None for the client's own.

        Returns:
            The subtask.

        Raises:
            ServerError: The policy has no language head. All errors of :meth:`infer` are possible too.
        """
        return self.infer(asking(observation, None, max_tokens), timeout=timeout).text

    def context(self, observation: Observation | Mapping[str, Any], *, timeout: float | None = None) -> tuple:
        """Compute the context of an observation: all that the action head needs from the vision and language model. The
        head then runs on this machine (split inference).

        Args:
            observation: As in :meth:`infer`. The server must serve the policy ``context.FORM``.
            timeout: Seconds for this call; None for the client's own.

        Returns:
            The context as bytes, and its :class:`Timing`.

        Raises:
            InvalidObservation: The observation cannot be encoded. Nothing was sent.
            RequestTimeout: There was no answer in time.
            ConnectionLost: The connection broke.
            ServerError: The server answered with an error.
        """
        request_id = next(self._ids)
        parts = self._encoded(protocol.given(observation), request_id)
        return self._context(self._drive(self._asking(parts, request_id, timeout)))

    def metadata(self, *, timeout: float | None = None) -> dict:
        """Request the server's description of itself and its policy.

        Args:
            timeout: Seconds for this call; None for the client's own.

        Returns:
            A dict with "policy" (cameras, state, action, chunk size ...) and "server".

        Raises:
            RequestTimeout: There was no answer in time.
            ConnectionLost: The connection broke.
            ServerError: The server answered with an error.
            ClientError: The answer describes no policy.
        """
        return protocol.described(self._said(self._drive(self._control("METADATA", "", timeout))))

    @property
    def spec(self) -> PolicySpec:
        """Inputs and outputs of the server's policy. The client requests them once per connection, and again after the
        server has replaced its policy (hot-swap).

        Raises:
            ClientError: See :meth:`metadata`.
        """
        if self._spec is None:
            self._spec = PolicySpec.from_dict(self.metadata().get("policy"))
        return self._spec

    def health(self, *, timeout: float | None = None) -> dict:
        """Request the status and the counters of the server. The server answers at once, even during an inference.

        Args:
            timeout: Seconds for this call; None for the client's own.

        Returns:
            A dict with the status and the counters.

        Raises:
            RequestTimeout: There was no answer in time.
            ConnectionLost: The connection broke.
            ServerError: The server answered with an error.
        """
        return self._said(self._drive(self._control("HEALTH", "", timeout)))

    def reset(self, session: str = "", *, timeout: float | None = None) -> None:
        """Begin a new episode.

        Args:
            session: Session of the robot, as in its observations.
            timeout: Seconds for this call; None for the client's own.

        Raises:
            RequestTimeout: There was no answer in time.
            ConnectionLost: The connection broke.
            ServerError: The server answered with an error.
        """
        self._drive(self._control("RESET", session, timeout))

    def report(self, report: RobotReport, session: str = "", *, timeout: float | None = None) -> None:
        """Send the state of a robot's run to the server's dashboard, as ``sinew_client.control.Reporter`` does.

        Args:
            report: The state of the run.
            session: Session of the robot, as in its observations.
            timeout: Seconds for this call; None for the client's own.

        Raises:
            RequestTimeout: There was no answer in time.
            ConnectionLost: The connection broke.
            ServerError: The server answered with an error.
        """
        self._drive(self._control("REPORT", session, timeout, report))

    def episode(self, *, rows: int | None = None, session: str = "") -> ActionQueue:
        """Begin an episode that returns one action per control step.

        Args:
            rows: Number of actions per chunk that are executed; see :class:`sinew_client.ActionQueue`.
            session: Session of the episode.

        Returns:
            The episode.
        """
        return ActionQueue(self, rows=rows, session=session)

    def close(self) -> None:
        """Close the connection. Wait first for a call in progress in another thread. Safe to call twice."""
        self._after_fork()
        with self._lock:
            if not self._closed:
                self._closed = True
                self._forget()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc_info) -> None:
        self.close()

    def _drive(self, asking: Asking) -> Any:
        """Send the attempts of a request one after the other, until one succeeds.

        Args:
            asking: The generator of the attempts (:mod:`sinew_client.base_client`).

        Returns:
            The result of the generator.

        Raises:
            ClientError: All attempts failed.
        """
        self._after_fork()
        with self._lock:
            try:
                attempt = next(asking)
                while True:
                    answer = self._tried(attempt)
                    if isinstance(answer, ConnectionLost):
                        attempt = asking.throw(answer)
                    else:
                        attempt = asking.send(answer)
            except StopIteration as done:
                return done.value

    def _tried(self, attempt: Attempt) -> bytes | ConnectionLost | None:
        """Send one attempt of a request.

        Args:
            attempt: The request and its time limits.

        Returns:
            The reply, None if no reply arrived in time, or the error if the connection was lost or could not be
            opened.
        """
        answer, (parts, _, connected, end) = None, attempt
        try:
            if self._link is not None and not self._link.stands:
                self._forget()
            if self._link is None:
                # Copy the frames, because connecting takes time and the camera may overwrite its buffers meanwhile.
                parts = protocol.kept(parts)
                self._link = self._connect(connected)
            if self._link is not None:
                answer = self._link.ask(self._placed(parts, self._link, end), end)
        except ConnectionLost as error:
            return error
        except OSError as error:
            lost = ConnectionLost(
                f"the connection to {self.address} broke before the answer arrived; send the request again"
            )
            lost.__cause__ = error
            return lost
        finally:
            # Close the connection also after KeyboardInterrupt, so that a late reply cannot answer a later call.
            if answer is None:
                self._forget()
        return answer

    def _placed(self, parts: Sequence, link: Link, end: float) -> Sequence:
        """Move the large raw frames of a request to shared memory, if client and server support it.

        Args:
            parts: The encoded request in parts.
            link: The connection.
            end: Time limit, seconds of ``time.monotonic()``.

        Returns:
            The parts of the request to send.

        Raises:
            OSError: The connection broke while shared memory was offered to the server.
            ConnectionLost: The server's answer to the offer is not valid.
        """
        unix, size = self._addresses.server.scheme == "ipc", shared.size_of(parts)
        if not (self.shared_memory and unix) or size < shared.LEAST:
            return parts
        if link.frames is None or (link.frames.state == shared.SHARED and link.frames.size < size):
            request_id = next(self._ids)
            request = protocol.encode_control("METADATA", request_id, "", self.api_key, self.policy)
            link.frames = shared.offered(
                size, lambda beside: self._told(link.ask([request], end, beside), request_id)
            )
        return link.frames.placed(parts) if link.frames.state == shared.SHARED else parts

    def _told(self, answer: bytes | None, request_id: int) -> str:
        """Decode the server's answer to an offer of shared memory.

        Args:
            answer: The encoded answer; None if it did not arrive in time.
            request_id: Id of the request with the offer.

        Returns:
            The server's statement about the shared memory: that it is used, or the reason why it is not used.

        Raises:
            OSError: The answer did not arrive in time.
        """
        if answer is None:
            raise socket.timeout("no answer in time")
        return self._said(protocol.decode_reply(answer, request_id)).get("frames", "")

    @property
    def frames(self) -> str:
        """The way in which large frames are sent on the present connection: "shared memory", or "in the message" with
        the reason.
        """
        channel = None if self._link is None else self._link.frames
        return shared.SENT if channel is None else channel.state

    def _connect(self, end: float) -> Link | None:
        """Open a connection to the present address.

        Args:
            end: Time limit, seconds of ``time.monotonic()``.

        Returns:
            The connection; None if the only address could not be reached until ``end``.

        Raises:
            ConnectionLost: The address could not be reached, and the client has further addresses.
        """
        for pause in pauses():
            if time.monotonic() >= end:
                break
            try:
                link = Link(self._addresses.server, end)
                self._connecting(None)
                return link
            except ConnectionLost:
                # Do not try again: the program at this address is not a Sinew server.
                raise
            except OSError as error:
                self._connecting(error)
                if len(self.addresses) > 1:
                    raise ConnectionLost(
                        f"no server answers at {self.address}; is `sinew serve` running there?"
                    ) from error
            time.sleep(max(0.0, min(pause, end - time.monotonic())))
        return None

    def _forget(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = self._spec = None
            self.deployment = 0

    def _after_fork(self) -> None:
        """In a forked process, drop the connection of the parent process, so that the next request opens a new one."""
        if self._pid != os.getpid():
            self._pid = os.getpid()
            # Create a new lock, because another thread of the parent process may have locked the old one.
            self._lock = threading.Lock()
            self._forget()
