"""The blocking client: one request, one reply, a time limit on each."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import zmq

from sinew_client import protocol
from sinew_client.errors import ClientError, RequestTimeout
from sinew_client.protocol import ActionChunk


class Client:
    """Talks to one ``sinew serve``.

    address: ZeroMQ address of the server, ``tcp://host:port``.
    timeout: seconds to wait for each answer. Connecting is part of the wait, so a client may be
        created before its server.
    retries: how many times a request that timed out is sent again before :class:`RequestTimeout`.
        Safe, because an inference changes nothing on the server; but a late robot may rather want
        to send a fresh observation, so the default is 0.
    jpeg_quality: 1 to 95 compresses uint8 frames (needs Pillow); None sends raw pixels.
    api_key: where the server wants one. It travels unencrypted.

    A REQ socket that missed its reply can never be used again, so it is thrown away after a timeout
    and the next call opens a new one: a server that comes back is found without further ado.

    Thread-safe: calls from several threads take turns, each waiting for the one before it. Not to be
    used across ``fork``.
    """

    def __init__(
        self,
        address: str = "tcp://127.0.0.1:5555",
        *,
        timeout: float = 10.0,
        retries: int = 0,
        jpeg_quality: int | None = None,
        api_key: str = "",
    ):
        if jpeg_quality is not None:
            try:
                import PIL.Image  # noqa: F401
            except ImportError as error:
                raise ClientError(
                    "jpeg_quality needs Pillow: pip install 'sinew-vla-client[jpeg]'"
                ) from error
        self.address = address
        self.timeout = timeout
        self.retries = retries
        self.jpeg_quality = jpeg_quality
        self.api_key = api_key
        self._lock = threading.Lock()
        self._ids = itertools.count(1)  # 0 is what a server answers when it could not read the id
        self._context = zmq.Context()
        self._socket: zmq.Socket | None = None
        self._closed = False
        try:
            self._connect()
        except zmq.ZMQError as error:
            self._drop()  # or term() would wait for the socket
            self._context.term()
            raise ClientError(f"cannot connect to {address}: {error}") from error

    # ------------------------------------------------------------------------- requests

    def infer(self, observation: Mapping[str, Any], *, timeout: float | None = None) -> ActionChunk:
        """Actions for one observation.

        observation: ``images`` {camera: uint8 [height, width, 3] RGB, or float in [0, 1], or the bytes
            of a JPEG or PNG file}, ``state`` float [D] in world units, ``prompt`` (or ``tokens``,
            integers [L]); optional: ``noise`` float [H, noise_dim], ``seed``, ``solver_steps``,
            ``session`` (a waiting request is replaced by a newer one of its session), ``time``, ``deadline_ms``
            (the server refuses the request instead of beginning it later than this after its arrival).
        timeout: seconds, for this call only.

        Raises InvalidObservation before sending, RequestTimeout, ServerError.
        """
        start = time.perf_counter()
        request_id = next(self._ids)
        payload = protocol.encode_infer(observation, request_id, self.jpeg_quality, self.api_key)
        reply = self._ask(payload, request_id, timeout)
        chunk = protocol.decode_chunk(reply)
        return replace(chunk, round_trip_ms=(time.perf_counter() - start) * 1e3)

    def metadata(self, *, timeout: float | None = None) -> dict:
        """What the server runs and expects: ``policy`` (cameras, state, action, chunk size ...), ``server``."""
        return self._control("METADATA", "", timeout)

    def health(self, *, timeout: float | None = None) -> dict:
        """Status and counters of the server. Answered at once, also during an inference."""
        return self._control("HEALTH", "", timeout)

    def reset(self, session: str = "", *, timeout: float | None = None) -> None:
        """Tell the server that a new episode begins in ``session``."""
        self._control("RESET", session, timeout)

    def close(self) -> None:
        """Close the connection. Waits for a call in progress in another thread."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._drop()
                self._context.term()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc_info) -> None:
        self.close()

    # ------------------------------------------------------------------------- socket

    def _control(self, kind: str, session: str, timeout: float | None) -> dict:
        request_id = next(self._ids)
        payload = protocol.encode_control(kind, request_id, session, self.api_key)
        reply = self._ask(payload, request_id, timeout)
        return protocol.decode_metadata(reply) if reply.metadata else {}

    def _ask(self, payload: bytes, request_id: int, timeout: float | None):
        limit = self.timeout if timeout is None else timeout
        with self._lock:
            if self._closed:
                raise ClientError("the client is closed")
            for _ in range(self.retries + 1):
                answer = self._exchange(payload, limit)
                if answer is not None:
                    return protocol.decode_reply(answer, request_id)
        raise RequestTimeout(
            "no answer from {} within {:g} s{}".format(
                self.address, limit, f" in {self.retries + 1} attempts" if self.retries else ""
            )
        )

    def _exchange(self, payload: bytes, limit: float) -> bytes | None:
        """One request and its reply; None after ``limit`` seconds."""
        answer = None
        try:
            sock = self._socket or self._connect()
            sock.send(payload)
            if sock.poll(max(0, int(limit * 1e3)), zmq.POLLIN):
                answer = sock.recv()
        except zmq.ZMQError as error:
            raise ClientError(f"{self.address}: {error}") from error
        finally:
            if answer is None:  # also on KeyboardInterrupt: the reply may still come, to a call it is not for
                self._drop()
        return answer

    def _connect(self) -> zmq.Socket:
        sock = self._socket = self._context.socket(zmq.REQ)
        sock.setsockopt(zmq.LINGER, 0)
        sock.setsockopt(zmq.TCP_KEEPALIVE, 1)
        sock.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)  # backs off from 100 ms; never slower than 1 s
        sock.setsockopt(zmq.IPV6, 1)  # takes IPv4 addresses as well
        sock.connect(self.address)
        return sock

    def _drop(self) -> None:
        if self._socket is not None:
            self._socket.close(linger=0)
            self._socket = None
