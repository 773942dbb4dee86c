"""The blocking client: one request, one reply, a time limit on each."""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from sinew_client import protocol
from sinew_client.errors import ClientError, ConnectionLost, RequestTimeout, ServerError
from sinew_client.link import Link, place_of
from sinew_client.types import ActionChunk

logger = logging.getLogger("sinew_client")

_LEAVING = ("shutting_down", "unhealthy")  # codes of a server that will not answer the next request either
_PAUSES_S = (
    0.1,
    1.0,
)  # between two attempts to connect to the only address: the first, doubled up to the second


class Client:
    """Talks to one ``sinew serve``.

    address: ZeroMQ address of the server, ``tcp://host:port`` or ``host:port``; or several of them. Then a request
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
    jpeg_quality: 1 to 95 compresses uint8 frames (needs Pillow); None sends raw pixels.
    api_key: where the server wants one. It travels unencrypted.

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
        timeout: float = 10.0,
        connect_timeout: float = 1.0,
        retries: int = 0,
        jpeg_quality: int | None = None,
        api_key: str = "",
        max_age: float | None = None,
        limits: tuple | None = None,
        max_rows: int = protocol.MAX_ROWS,
    ):
        if jpeg_quality is not None:
            protocol.need_pillow()
        given = [
            protocol.split_address(each) for each in ([address] if isinstance(address, str) else address)
        ]
        if len({policy for _, policy in given}) != 1:
            raise ClientError(f"address: expected one or more, of one policy, got {address!r}")
        self.addresses = tuple(each for each, _ in given)
        self.policy = given[0][1]
        self.address = self.addresses[0]
        self.place = 0  # of the present address among them
        self.timeout = timeout
        self.connect_timeout = connect_timeout
        self.retries = retries
        self.jpeg_quality = jpeg_quality
        self.api_key = api_key
        self.max_age = max_age
        self.limits = limits
        self.max_rows = max_rows
        self._warned = set()
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._ids = itertools.count(1)  # 0 is what a server answers when it could not read the id
        self._places = [place_of(each) for each in self.addresses]
        self._link: Link | None = None
        self._closed = False

    def __repr__(self) -> str:
        state = "closed" if self._closed else "connected" if self._link is not None else "not connected"
        extra = "" if self.jpeg_quality is None else f", JPEG {self.jpeg_quality}"
        key = ", with a key" if self.api_key else ""  # never the key itself: this lands in logs
        return f"<sinew_client.Client {self.address}, {state}, timeout {self.timeout:g} s{extra}{key}>"

    # ------------------------------------------------------------------------- requests

    def infer(self, observation: Mapping[str, Any], *, timeout: float | None = None) -> ActionChunk:
        """Return the actions for one observation.

        observation: ``images`` {camera: uint8 [height, width, 3] RGB, or float in [0, 1], or the bytes
            of a JPEG or PNG file}, ``state`` float [D] in world units, ``prompt`` (or ``tokens``,
            integers [L]); optional: ``noise`` float [H, noise_dim], ``seed``, ``solver_steps``,
            ``session`` (a waiting request is replaced by a newer one of its session), ``time``, ``deadline_ms``
            (the server refuses the request instead of beginning it later than this after its arrival);
            ``previous`` float [R, action_dim], the rows of the running chunk from this frame on, with ``delay``,
            ``horizon``, ``rtc``, ``schedule`` and ``beta``: real-time chunking, which :mod:`sinew_client.control` does.
        timeout: seconds, for this call only.

        Raises InvalidObservation before sending, RequestTimeout, ConnectionLost, ServerError, and UnsafeChunk for
        an answer that must not be executed.
        """
        asked = time.perf_counter()
        request_id = next(self._ids)
        parts = protocol.infer_parts(observation, request_id, self.jpeg_quality, self.api_key, self.policy)
        reply = self._ask(parts, request_id, timeout)
        chunk = protocol.accepted(reply, observation, asked, self.max_age, self.limits, self.max_rows)
        for warning in chunk.warnings:
            if warning not in self._warned and len(self._warned) < 100:
                self._warned.add(warning)
                logger.warning("%s: %s", self.address, warning)
        return chunk

    def context(self, observation: Mapping[str, Any], *, timeout: float | None = None) -> tuple:
        """Return (bytes, timing): what a head on this machine needs of an observation, from a policy ``context.FORM``.

        Raises InvalidObservation before sending, RequestTimeout, ConnectionLost, ServerError.
        """
        request_id = next(self._ids)
        parts = protocol.infer_parts(observation, request_id, self.jpeg_quality, self.api_key, self.policy)
        reply = self._ask(parts, request_id, timeout)
        if not reply.context:
            raise ClientError(f"{self.address}: the policy {self.policy!r} answers with actions")
        return reply.context, protocol.decode_timing(reply)

    def metadata(self, *, timeout: float | None = None) -> dict:
        """Return what the server runs and expects: ``policy`` (cameras, state, action, chunk size ...), ``server``."""
        return self._control("METADATA", "", timeout)

    def health(self, *, timeout: float | None = None) -> dict:
        """Return status and counters of the server. Answered at once, also during an inference."""
        return self._control("HEALTH", "", timeout)

    def reset(self, session: str = "", *, timeout: float | None = None) -> None:
        """Tell the server that a new episode begins in ``session``."""
        self._control("RESET", session, timeout)

    def close(self) -> None:
        """Close the connection. Waits for a call in progress in another thread."""
        self._after_fork()
        with self._lock:
            if not self._closed:
                self._closed = True
                self._drop()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc_info) -> None:
        self.close()

    # ------------------------------------------------------------------------- socket

    def _control(self, kind: str, session: str, timeout: float | None) -> dict:
        request_id = next(self._ids)
        payload = protocol.encode_control(kind, request_id, session, self.api_key, self.policy)
        reply = self._ask([payload], request_id, timeout)
        return protocol.decode_metadata(reply) if reply.metadata else {}

    def _ask(self, parts: Sequence, request_id: int, timeout: float | None):
        limit = self.timeout if timeout is None else timeout
        self._after_fork()
        with self._lock:
            if self._closed:
                raise ClientError("the client is closed")
            if self.retries or len(self.addresses) > 1:
                parts = [b"".join(parts)]  # what may be sent twice is what the cameras saw now
            for attempt in range(self.retries + 1):
                try:
                    reply = self._try_each(parts, request_id, time.monotonic() + limit)
                except ConnectionLost:
                    if attempt == self.retries:
                        raise
                    continue
                if reply is not None:
                    return reply
        raise RequestTimeout(
            "no answer from {} within {:g} s{}".format(
                " or ".join(self.addresses), limit, f" in {self.retries + 1} attempts" if self.retries else ""
            )
        )

    def _try_each(self, parts: Sequence, request_id: int, end: float):
        """Return the reply of the present server, or of the next that gives one; None at ``end``. Raises the last
        server's error."""
        for others in range(len(self.addresses) - 1, 0, -1):
            reply, why = self._try(parts, request_id, end, others)
            if not why:
                return reply
            self._move(why)
        try:
            answer = self._exchange(parts, end)
            if answer is not None:
                return self._decoded(answer, request_id)
        except (ConnectionLost, ServerError) as error:
            if isinstance(error, ConnectionLost) or error.code in _LEAVING:
                self._move(str(error))
            raise
        self._move("no answer in time")
        return None

    def _try(self, parts: Sequence, request_id: int, end: float, others: int):
        """Return (reply, "") or (None, why another server should be asked); (None, "") at ``end``. others: that are
        still to be asked, for each of which as much time is left."""
        try:
            answer = self._exchange(parts, end, others)
            if answer is not None:
                return self._decoded(answer, request_id), ""
        except ConnectionLost as error:
            return None, str(error)
        except ServerError as error:
            if error.code not in _LEAVING:
                raise
            return None, str(error)
        self._move("no answer in time")
        return None, ""

    def _decoded(self, answer: bytes, request_id: int):
        """Return a reply. One that cannot be read, or answers something else, ends the connection: who knows what
        comes next."""
        try:
            return protocol.decode_reply(answer, request_id)
        except ServerError:
            raise
        except ClientError:
            self._drop()
            raise

    def _move(self, why: str) -> None:
        """Turn to the next address, if there is one."""
        if len(self.addresses) < 2:
            return
        self._drop()
        before, self.place = self.address, (self.place + 1) % len(self.addresses)
        self.address = self.addresses[self.place]
        logger.warning("%s: %s; turning to %s", before, why, self.address)

    def _exchange(self, parts: Sequence, end: float, others: int = 0) -> bytes | None:
        """Send one request and return its reply; None at ``end``, ``time.monotonic()``. Raises ConnectionLost, also
        where no connection stands in time to ask ``others`` instead."""
        answer, begin = None, time.monotonic()
        if begin >= end:
            return None
        try:
            if self._link is not None and not self._link.stands:
                self._drop()
            if self._link is None:
                parts = [b"".join(parts)]  # what is sent later, too
                patience = min(self.connect_timeout, (end - begin) / (others + 1))
                self._link = self._connect(begin + patience if len(self.addresses) > 1 else end)
            if self._link is not None:
                answer = self._link.ask(parts, end)
        except ConnectionLost:
            raise
        except OSError as error:
            raise ConnectionLost(f"the connection to {self.address} broke before the answer came") from error
        finally:
            if answer is None:  # also on KeyboardInterrupt: the reply may still come, to a call it is not for
                self._drop()
        return answer

    def _connect(self, end: float) -> Link | None:
        """Return a connection. None at ``end``, where there is one address, which is tried again until then; else
        raises ConnectionLost."""
        several, pause = len(self.addresses) > 1, _PAUSES_S[0]
        while time.monotonic() < end:
            try:
                return Link(self._places[self.place], end)
            except ConnectionLost:  # somebody else is there
                raise
            except OSError as error:
                if several:
                    raise ConnectionLost(f"no server answers at {self.address}") from error
            time.sleep(max(0.0, min(pause, end - time.monotonic())))
            pause = min(2 * pause, _PAUSES_S[1])
        return None

    def _drop(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None

    def _after_fork(self) -> None:
        """Begin anew in a child process, on a connection of its own."""
        if self._pid != os.getpid():
            self._pid = os.getpid()
            self._lock = threading.Lock()  # another thread of the parent may have held the old one
            self._drop()
