"""The client for coroutines: requests, answers and errors of :class:`sinew_client.Client`, without a thread."""

from __future__ import annotations

import asyncio
import itertools
import time
from typing import Any, Mapping

import zmq
import zmq.asyncio

from sinew_client import protocol
from sinew_client.errors import ClientError, RequestTimeout
from sinew_client.types import ActionChunk


class AsyncClient:
    """Talks to one ``sinew serve`` from an event loop; several requests may be under way at once.

    address, timeout, jpeg_quality, api_key, max_age, limits, max_rows: as of :class:`sinew_client.Client`. A task that
    is cancelled gives its answer up; the server finishes the inference. Belongs to the loop in which it is first used.
    """

    def __init__(
        self,
        address: str = "tcp://127.0.0.1:5555",
        *,
        timeout: float = 10.0,
        jpeg_quality: int | None = None,
        api_key: str = "",
        max_age: float | None = None,
        limits: tuple | None = None,
        max_rows: int = protocol.MAX_ROWS,
    ):
        if jpeg_quality is not None:
            protocol.need_pillow()
        self.address, self.policy = protocol.split_address(address)
        self.timeout, self.jpeg_quality = timeout, jpeg_quality
        self.api_key, self.max_age, self.limits, self.max_rows = api_key, max_age, limits, max_rows
        self._ids = itertools.count(1)
        self._waiting = {}
        self._context = zmq.asyncio.Context()
        self._socket = None
        self._reader = None
        self._closed = False

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{len(self._waiting)} under way"
        key = ", with a key" if self.api_key else ""
        return f"<sinew_client.AsyncClient {self.address}, {state}, timeout {self.timeout:g} s{key}>"

    async def infer(self, observation: Mapping[str, Any], *, timeout: float | None = None) -> ActionChunk:
        """Return the actions for one observation.

        Raises what :meth:`sinew_client.Client.infer` raises, with RequestTimeout for a connection that broke. The
        server lets one client have two requests wait besides the one that runs; more are refused as busy.
        """
        asked = time.perf_counter()
        request_id = next(self._ids)
        payload = protocol.encode_infer(observation, request_id, self.jpeg_quality, self.api_key, self.policy)
        reply = await self._ask(payload, request_id, timeout)
        return protocol.accepted(reply, observation, asked, self.max_age, self.limits, self.max_rows)

    async def metadata(self, *, timeout: float | None = None) -> dict:
        """Return what the server runs and expects."""
        return await self._control("METADATA", "", timeout)

    async def health(self, *, timeout: float | None = None) -> dict:
        """Return status and counters of the server."""
        return await self._control("HEALTH", "", timeout)

    async def reset(self, session: str = "", *, timeout: float | None = None) -> None:
        """Tell the server that a new episode begins in ``session``."""
        await self._control("RESET", session, timeout)

    async def close(self) -> None:
        """Close the connection; requests under way raise ClientError."""
        if self._closed:
            return
        self._closed = True
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
        self._fail(ClientError("the client is closed"))
        if self._socket is not None:
            self._socket.close(linger=0)
        self._context.term()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *exc_info) -> None:
        await self.close()

    # ------------------------------------------------------------------------- socket

    async def _control(self, kind: str, session: str, timeout: float | None) -> dict:
        request_id = next(self._ids)
        payload = protocol.encode_control(kind, request_id, session, self.api_key, self.policy)
        reply = await self._ask(payload, request_id, timeout)
        return protocol.decode_metadata(reply) if reply.metadata else {}

    async def _ask(self, payload: bytes, request_id: int, timeout: float | None):
        limit = self.timeout if timeout is None else timeout
        if self._closed:
            raise ClientError("the client is closed")
        self._connect()
        answer = self._waiting[request_id] = asyncio.get_running_loop().create_future()
        try:
            data = await asyncio.wait_for(self._exchange(payload, answer), limit)
        except asyncio.TimeoutError:
            raise RequestTimeout(f"no answer from {self.address} within {limit:g} s") from None
        except zmq.ZMQError as error:
            raise ClientError(f"{self.address}: {error}") from error
        finally:
            self._waiting.pop(request_id, None)
        return protocol.decode_reply(data, request_id)

    async def _exchange(self, payload: bytes, answer: asyncio.Future) -> bytes:
        await self._socket.send(payload)
        return await answer

    def _connect(self) -> None:
        if self._socket is not None:
            return
        sock = self._context.socket(zmq.DEALER)
        sock.setsockopt(zmq.LINGER, 0)
        # Without a connection nothing is queued: an observation that is sent later is an old one.
        sock.setsockopt(zmq.IMMEDIATE, 1)
        sock.setsockopt(zmq.TCP_KEEPALIVE, 1)
        sock.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        sock.setsockopt(zmq.IPV6, 1)
        try:
            sock.connect(self.address)
        except zmq.ZMQError as error:
            sock.close(linger=0)
            raise ClientError(f"cannot connect to {self.address}: {error}") from error
        self._socket = sock
        self._reader = asyncio.get_running_loop().create_task(self._read())

    async def _read(self) -> None:
        """Hand each reply to the request that it answers; one that was given up is dropped."""
        while True:
            data = (await self._socket.recv_multipart())[-1]
            request_id = protocol.reply_id(data)
            if request_id:
                answer = self._waiting.get(request_id)
                if answer is not None and not answer.done():
                    answer.set_result(data)
            else:  # the server could not read which request it refuses
                self._fail(self._refusal(data))

    def _refusal(self, data: bytes) -> Exception:
        """Return what the server says of a request that it could not read, or that it says nothing."""
        try:
            protocol.decode_reply(data, 0)
        except ClientError as error:
            return error
        return ClientError(f"{self.address}: a reply without a request id")

    def _fail(self, error: Exception) -> None:
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(error)
