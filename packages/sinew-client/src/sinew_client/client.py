"""The blocking client: one request, one reply, a time limit on each."""

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
    """Talks to one ``sinew serve``.

    address: ZeroMQ address of the server, ``tcp://host:port`` or ``host:port``, ``tls://host:port`` if the server has
        ``--tls-cert``, on this machine also ``ipc:///path``
        of a Unix socket (and ``#NAME`` behind it for a policy by name); or several of them. Then a request
        that finds no server, whose connection breaks, or that a stopping or unhealthy server refuses goes to the next
        one at once, in the same call, each address once; the client stays with the server that answered.
        ``host:port/NAME`` asks the server's policy of that name, the same at all addresses; without it the first.
    connect_timeout: seconds to wait for a connection before the next address is tried, where there are several.
    timeout: seconds to wait for each answer. Connecting is part of the wait, so a client may be
        created before its server.
    retries: how many times a request that timed out, or whose connection broke, is sent again before
        :class:`RequestTimeout` or :class:`ConnectionLost`. Safe, because an inference changes nothing on the
        server; but a late robot may rather want to send a fresh observation, so the default is 0.
    max_age: seconds; an answer to an older observation raises :class:`UnsafeChunk`. The age counts from the
        observation's ``time`` where it has one, which must then be ``time.time()`` of this machine, else from
        the call. None: any age.
    limits: (lowest, highest) of each action, numbers or [D] in world units; an answer outside raises
        :class:`UnsafeChunk`. Numbers that are not finite always do.
    max_rows: of an answer; one with more raises :class:`UnsafeChunk`. A policy states its own as ``chunk_size``.
    shared_memory: raw frames of 256 KiB and more reach a server at ``ipc://`` in memory that both share, where both can
        (:meth:`infer`; ``frames`` says whether). False: they are sent.
    jpeg_quality: 1 to 95 compresses uint8 frames (needs Pillow); None sends raw pixels.
    api_key: where the server wants one; that of SINEW_API_KEY in the environment if absent, "" for none. With a key,
        ``tcp://`` to another machine raises ClientError, unless SINEW_ALLOW_UNENCRYPTED_KEY is 1 in the environment.

    The first call connects. A connection that missed its reply is thrown away, so that a late one answers nothing
    else, and the next call opens a new one: a server that comes back is found without further ado. One that breaks
    while an answer is awaited is told at once.

    Frames are sent from where they lie: they must not be written to before ``infer`` returns.

    Thread-safe: calls from several threads take turns, each waiting for the one before it. After ``fork`` the
    child's first call opens a connection of its own.
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

    # ------------------------------------------------------------------------- requests

    def infer(
        self, observation: Observation | Mapping[str, Any], *, timeout: float | None = None
    ) -> ActionChunk:
        """Return the actions for one observation.

        observation: ``images`` {camera: uint8 [height, width, 3] RGB, or float in [0, 1], or the bytes
            of a JPEG or PNG file}, ``state`` float [D] in world units, ``prompt`` (or ``tokens``,
            integers [L]); optional: ``noise`` float [H, noise_dim], ``seed``, ``solver_steps``,
            ``session`` (a waiting request is replaced by a newer one of its session), ``time``, ``deadline_ms``
            (the server refuses the request instead of beginning it later than this after its arrival);
            ``previous`` float [R, action_dim], the rows of the running chunk from this frame on, with ``delay``,
            ``horizon``, ``rtc``, ``schedule`` and ``beta``: real-time chunking, which :mod:`sinew_client.control` does;
            ``subtask`` True: a subtask is said first, stands in the chunk's ``text``, and is acted on; ``adapter``,
            which of the policy's computes it; ``advantage`` and ``guidance_scale``, where the prompt has a place.
        timeout: seconds, for this call only.

        Raises InvalidObservation before sending, RequestTimeout, ConnectionLost, ServerError, and UnsafeChunk for
        an answer that must not be executed.
        """
        asked, request_id, given = time.perf_counter(), next(self._ids), protocol.given(observation)
        parts = self._encoded(given, request_id)
        return self._accepted(self._drive(self._asking(parts, request_id, timeout)), given, asked)

    def infer_all(
        self, observations: Sequence[Observation | Mapping[str, Any]], *, timeout: float | None = None
    ) -> list[ActionChunk | ClientError]:
        """Return the actions for several observations, asked in one message, in their order.

        observations: 1 to 64, each as :meth:`infer` takes it, but for ``deadline_ms``.

        What is wrong with one of them stands in its place, the error that :meth:`infer` would raise, and the others are
        answered. Raises what concerns them all: InvalidObservation before sending, RequestTimeout, ConnectionLost,
        ServerError.
        """
        asking, outcomes = self._all(observations, timeout)
        found: list = outcomes(self._drive(asking))
        return found

    def ask(
        self,
        observation: Observation | Mapping[str, Any],
        question: str,
        max_tokens: int | None = None,
        *,
        timeout: float | None = None,
    ) -> str:
        """Return what the policy's language head answers to a question about an observation, in at most ``max_tokens``
        tokens. Raises ObservationError for a question that is none, and what :meth:`infer` does."""
        return self.infer(asking(observation, question, max_tokens), timeout=timeout).text

    def subtask(
        self,
        observation: Observation | Mapping[str, Any],
        max_tokens: int | None = None,
        *,
        timeout: float | None = None,
    ) -> str:
        """Return the subtask that the policy says of an observation and its instruction, without actions."""
        return self.infer(asking(observation, None, max_tokens), timeout=timeout).text

    def context(self, observation: Observation | Mapping[str, Any], *, timeout: float | None = None) -> tuple:
        """Return (bytes, timing): what a head on this machine needs of an observation, from a policy ``context.FORM``.

        Raises InvalidObservation before sending, RequestTimeout, ConnectionLost, ServerError.
        """
        request_id = next(self._ids)
        parts = self._encoded(protocol.given(observation), request_id)
        return self._context(self._drive(self._asking(parts, request_id, timeout)))

    def metadata(self, *, timeout: float | None = None) -> dict:
        """Return what the server runs and expects: ``policy`` (cameras, state, action, chunk size ...), ``server``."""
        return self._said(self._drive(self._control("METADATA", "", timeout)))

    @property
    def spec(self) -> PolicySpec:
        """What the server's policy reads and writes: asked for once a connection, and again once another policy has
        answered. Raises what :meth:`metadata` does."""
        if self._spec is None:
            self._spec = PolicySpec.from_dict(self.metadata().get("policy"))
        return self._spec

    def health(self, *, timeout: float | None = None) -> dict:
        """Return status and counters of the server. Answered at once, also during an inference."""
        return self._said(self._drive(self._control("HEALTH", "", timeout)))

    def reset(self, session: str = "", *, timeout: float | None = None) -> None:
        """Tell the server that a new episode begins in ``session``."""
        self._drive(self._control("RESET", session, timeout))

    def report(self, report: RobotReport, session: str = "", *, timeout: float | None = None) -> None:
        """Tell the server how a robot's run goes (``sinew_client.control.Reporter``). Raises as :meth:`metadata`."""
        self._drive(self._control("REPORT", session, timeout, report))

    def episode(self, *, rows: int | None = None, session: str = "") -> ActionQueue:
        """Return an episode that hands out one action a control step (:class:`sinew_client.ActionQueue`)."""
        return ActionQueue(self, rows=rows, session=session)

    def close(self) -> None:
        """Close the connection. Waits for a call in progress in another thread."""
        self._after_fork()
        with self._lock:
            if not self._closed:
                self._closed = True
                self._forget()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc_info) -> None:
        self.close()

    # ------------------------------------------------------------------------- socket

    def _drive(self, asking: Asking) -> Any:
        """Carry out the attempts of a request, one after the other, and return what comes of it."""
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
        """Send one request and return its reply, None at its end, or how the connection was lost; also where none
        stands in time."""
        answer, (parts, _, connected, end) = None, attempt
        try:
            if self._link is not None and not self._link.stands:
                self._forget()
            if self._link is None:
                parts = protocol.kept(parts)  # what is sent later, too
                self._link = self._connect(connected)
            if self._link is not None:
                answer = self._link.ask(self._placed(parts, self._link, end), end)
        except ConnectionLost as error:
            return error
        except OSError as error:
            lost = ConnectionLost(f"the connection to {self.address} broke before the answer came")
            lost.__cause__ = error
            return lost
        finally:
            if answer is None:  # also on KeyboardInterrupt: the reply may still come, to a call it is not for
                self._forget()
        return answer

    def _placed(self, parts: Sequence, link: Link, end: float) -> Sequence:
        """Return the parts of a request, with its raw frames in memory that is shared with the server, where they are
        large and both can. Raises OSError and ConnectionLost."""
        unix, size = len(self._addresses.host_and_port) == 1, shared.size_of(parts)
        if not (self.shared_memory and unix) or size < shared.LEAST:
            return parts
        if link.frames is None or (link.frames.state == shared.SHARED and link.frames.size < size):
            request_id = next(self._ids)
            asked = protocol.encode_control("METADATA", request_id, "", self.api_key, self.policy)
            link.frames = shared.offered(
                size, lambda beside: self._told(link.ask([asked], end, beside), request_id)
            )
        return link.frames.placed(parts) if link.frames.state == shared.SHARED else parts

    def _told(self, answer: bytes | None, request_id: int) -> str:
        """Return what a server says of the memory that it was offered."""
        if answer is None:
            raise socket.timeout("no answer in time")
        return self._said(protocol.decode_reply(answer, request_id)).get("frames", "")

    @property
    def frames(self) -> str:
        """Return how large frames travel on the present connection: "shared memory", or "in the message" and why."""
        found = None if self._link is None else self._link.frames
        return shared.SENT if found is None else found.state

    def _connect(self, end: float) -> Link | None:
        """Return a connection. None at ``end``, where there is one address, which is tried again until then; else
        raises ConnectionLost."""
        for pause in pauses():
            if time.monotonic() >= end:
                break
            try:
                link = Link(self._addresses.host_and_port, end)
                self._connecting(None)
                return link
            except ConnectionLost:  # somebody else is there
                raise
            except OSError as error:
                self._connecting(error)
                if len(self.addresses) > 1:
                    raise ConnectionLost(f"no server answers at {self.address}") from error
            time.sleep(max(0.0, min(pause, end - time.monotonic())))
        return None

    def _forget(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = self._spec = None
            self.deployment = 0

    def _after_fork(self) -> None:
        """Begin anew in a child process, on a connection of its own."""
        if self._pid != os.getpid():
            self._pid = os.getpid()
            self._lock = threading.Lock()  # another thread of the parent may have held the old one
            self._forget()
