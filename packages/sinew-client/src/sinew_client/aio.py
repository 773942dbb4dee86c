"""The asyncio client. It has the same requests, answers and errors as :class:`sinew_client.Client`."""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from typing import Any, Mapping, Sequence

from sinew_client import protocol, tls, zmtp
from sinew_client.addresses import ServerAddress, pauses
from sinew_client.base_client import Asking, Attempt, BaseClient
from sinew_client.errors import ClientError, ClosedError, ConnectionLost
from sinew_client.link import (
    MAX_REPLY,
    check_owner,
    payload_of,
    set_options,
    unconnected,
    unix_candidates,
)
from sinew_client.open_policy import asking
from sinew_client.types import ActionChunk, Observation


class AsyncClient(BaseClient):
    """A connection to a policy server for asyncio. Several requests may be in progress at the same time.

    The client belongs to the event loop in which you first use it. After a request times out, the next request opens a
    new connection, while other requests in progress stay on the old connection. If you cancel a task, the client drops
    its answer, but the server still finishes the inference.

    The arguments are those of :class:`sinew_client.Client`, except ``shared_memory``.

    Example:
        >>> async with AsyncClient("tcp://server:5555") as client:
        ...     chunk = await client.infer({"images": {"front": frame}, "state": state, "prompt": "stack the cups"})
    """

    def _begin(self) -> None:
        self._loop: Any = None
        self._opening: Any = None  # the task that opens a connection
        # The set has the present connection and the older connections that still wait for a reply.
        self._links: set = set()

    def _state(self) -> str:
        return f"{sum(len(link.waiting) for link in self._links)} under way"

    async def infer(
        self, observation: Observation | Mapping[str, Any], *, timeout: float | None = None
    ) -> ActionChunk:
        """Compute the actions for one observation.

        One client may have one running and two waiting requests at a server. The server rejects further requests with
        the code ``busy``.

        Args:
            observation: As in :meth:`sinew_client.Client.infer`.
            timeout: Seconds for this call; None for the client's own.

        Returns:
            The action chunk.

        Raises:
            ClientError: See :meth:`sinew_client.Client.infer`.

        Example:
            >>> chunks = await asyncio.gather(client.infer(left), client.infer(right))
        """
        start, request_id, fields = time.perf_counter(), next(self._ids), protocol.given(observation)
        parts = self._encoded(fields, request_id)
        return self._accepted(await self._drive(self._asking(parts, request_id, timeout)), fields, start)

    async def infer_all(
        self, observations: Sequence[Observation | Mapping[str, Any]], *, timeout: float | None = None
    ) -> list[ActionChunk | ClientError]:
        """Compute the actions for several observations with one message.

        Args:
            observations: 1 to 64 observations, each as in :meth:`infer`.
            timeout: Seconds for this call; None for the client's own.

        Returns:
            One entry per observation, in the same order: its chunk, or its error.

        Raises:
            ClientError: See :meth:`sinew_client.Client.infer_all`.
        """
        asking, outcomes = self._all(observations, timeout)
        results: list = outcomes(await self._drive(asking))
        return results

    async def ask(
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
            SinewError: See :meth:`sinew_client.Client.ask`.
        """
        return (await self.infer(asking(observation, question, max_tokens), timeout=timeout)).text

    async def subtask(
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
            ClientError: See :meth:`sinew_client.Client.subtask`.
        """
        return (await self.infer(asking(observation, None, max_tokens), timeout=timeout)).text

    async def context(
        self, observation: Observation | Mapping[str, Any], *, timeout: float | None = None
    ) -> tuple:
        """Compute the context of an observation: all that the action head needs from the vision and language model. The
        head then runs on this machine (split inference).

        Args:
            observation: As in :meth:`infer`.
            timeout: Seconds for this call; None for the client's own.

        Returns:
            The context as bytes, and its :class:`Timing`.

        Raises:
            ClientError: See :meth:`sinew_client.Client.context`.
        """
        request_id = next(self._ids)
        parts = self._encoded(protocol.given(observation), request_id)
        return self._context(await self._drive(self._asking(parts, request_id, timeout)))

    async def metadata(self, *, timeout: float | None = None) -> dict:
        """Request the server's description of itself and its policy.

        Args:
            timeout: Seconds for this call; None for the client's own.

        Returns:
            A dict with "policy" (cameras, state, action, chunk size ...) and "server".

        Raises:
            ClientError: See :meth:`sinew_client.Client.metadata`.
        """
        return protocol.described(self._said(await self._drive(self._control("METADATA", "", timeout))))

    async def health(self, *, timeout: float | None = None) -> dict:
        """Request the status and the counters of the server.

        Args:
            timeout: Seconds for this call; None for the client's own.

        Returns:
            A dict with the status and the counters.

        Raises:
            ClientError: See :meth:`sinew_client.Client.health`.
        """
        return self._said(await self._drive(self._control("HEALTH", "", timeout)))

    async def reset(self, session: str = "", *, timeout: float | None = None) -> None:
        """Begin a new episode.

        Args:
            session: Session of the robot, as in its observations.
            timeout: Seconds for this call; None for the client's own.

        Raises:
            ClientError: See :meth:`sinew_client.Client.reset`.
        """
        await self._drive(self._control("RESET", session, timeout))

    async def close(self) -> None:
        """Close the connection. Requests in progress raise ClosedError."""
        self._closed, self._link = True, None
        if self._opening is not None:
            self._opening.cancel()
        for link in list(self._links):
            link.end(ClosedError("the client is closed; create a new client"))
        self._links.clear()
        await asyncio.sleep(0)  # the event loop closes the sockets during this call

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *exc_info: Any) -> None:
        await self.close()

    async def _drive(self, asking: Asking) -> Any:
        """Send the attempts of a request one after the other, until one succeeds.

        Args:
            asking: The generator of the attempts (:mod:`sinew_client.base_client`).

        Returns:
            The result of the generator.

        Raises:
            ClientError: All attempts failed, or the client is used in another event loop.
        """
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
        elif self._loop is not loop:
            raise ClientError(
                "the client belongs to another event loop; create one AsyncClient in each event loop"
            )
        try:
            attempt = next(asking)
            while True:
                answer = await self._tried(attempt)
                if isinstance(answer, ConnectionLost):
                    attempt = asking.throw(answer)
                else:
                    attempt = asking.send(answer)
        except StopIteration as done:
            return done.value

    async def _tried(self, attempt: Attempt) -> bytes | ConnectionLost | None:
        """Send one attempt of a request.

        Args:
            attempt: The request and its time limits.

        Returns:
            The reply, None if no reply arrived in time, or the error if the connection was lost or could not be
            opened.
        """
        parts, request_id, connected, end = attempt
        # Copy the frames now, because the caller may overwrite its buffers while this coroutine waits.
        payload = b"".join(parts)
        try:
            link = await self._connected(connected)
        except ConnectionLost as error:
            return error
        if link is None:
            return None
        try:
            answer = link.ask(payload, request_id)
            return await asyncio.wait_for(answer, max(0.0, end - time.monotonic()))
        except asyncio.TimeoutError:
            if self._link is link:
                self._forget()
            return None
        except ConnectionLost as error:
            return error
        finally:
            link.waiting.pop(request_id, None)
            self._tidy(link)

    async def _connected(self, end: float) -> AsyncLink | None:
        """Return an open connection to the present address.

        Args:
            end: Time limit, seconds of ``time.monotonic()``.

        Returns:
            The connection; None if the only address could not be reached until ``end``.

        Raises:
            ConnectionLost: The address could not be reached, and the client has further addresses.
        """
        if self._link is not None:
            # Let the event loop run, so that a disconnect that has already arrived is noticed before the request.
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        for pause in pauses():
            if self._link is not None and self._link.stands:
                return self._link  # type: ignore[no-any-return]
            self._forget()
            error = await self._open(end)
            self._connecting(error)
            if error is None and self._link is not None:
                return self._link  # type: ignore[no-any-return]
            if self._closed:
                raise ClosedError("the client is closed; create a new client")
            if isinstance(error, ConnectionLost):
                # Do not try again: the program at this address is not a Sinew server.
                raise error
            if len(self.addresses) > 1:
                raise ConnectionLost(
                    f"no server answers at {self.address}; is `sinew serve` running there?"
                ) from error
            await asyncio.sleep(max(0.0, min(pause, end - time.monotonic())))
            if time.monotonic() >= end:
                break
        return None

    async def _open(self, end: float) -> Exception | None:
        """Open one connection for all requests that wait for a connection.

        Args:
            end: Time limit, seconds of ``time.monotonic()``.

        Returns:
            None after a success, else the error.
        """
        if self._opening is None:
            opened = AsyncLink.opened(self._addresses.server, end)
            self._opening = asyncio.get_running_loop().create_task(opened)
            self._opening.add_done_callback(self._take)
        task = self._opening
        await asyncio.wait({task}, timeout=max(0.0, end - time.monotonic()))
        if not task.done():
            return socket.timeout("timed out")
        return (
            ClosedError("the client is closed; create a new client") if task.cancelled() else task.exception()
        )

    def _take(self, task: Any) -> None:
        """Use the connection that ``task`` has opened for the next requests, or close it if the client is closed."""
        self._opening = None
        if task.cancelled() or task.exception() is not None:
            return
        if self._closed:
            task.result().end()
        else:
            self._link = task.result()
            self._links.add(self._link)

    def _forget(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            self._tidy(link)

    def _tidy(self, link: AsyncLink) -> None:
        """Close a connection if it was replaced and no request waits for a reply on it."""
        if link is not self._link and not link.waiting:
            self._links.discard(link)
            link.end()


class AsyncLink(asyncio.BufferedProtocol):
    """A ZeroMQ connection to a ROUTER socket, in the role of a DEALER socket. The event loop reads the connection.

    Args:
        address: Address of the server, for error messages.

    Attributes:
        waiting: For each request id, the future of its reply.
    """

    def __init__(self, address: str) -> None:
        self.waiting: dict[int, asyncio.Future] = {}
        self._address = address
        self._framing = zmtp.Framing(MAX_REPLY, b"DEALER")
        self._ready = asyncio.get_running_loop().create_future()  # it resolves when the handshake is complete
        self._transport: Any = None
        self._ended = False

    @classmethod
    async def opened(cls, server: ServerAddress, end: float) -> AsyncLink:
        """Open a connection and complete its handshake.

        Args:
            server: Address of the server.
            end: Time limit, seconds of ``time.monotonic()``.

        Returns:
            The open connection.

        Raises:
            OSError: The connection cannot be opened. At ``end``, the error is ``socket.timeout``.
            ConnectionLost: The other end is not a ZeroMQ server.
        """
        loop = asyncio.get_running_loop()
        connection = await _connected(loop, server, end)
        link = cls(server.text)
        try:
            set_options(connection)
            options: dict = {}
            if server.scheme == "tls":
                options = {"ssl": ssl.create_default_context(), "server_hostname": server.host}
            await _within(loop.create_connection(lambda: link, sock=connection, **options), end)
            await _within(link._ready, end)
        except ssl.SSLError as error:
            link.end()
            connection.close()
            raise ConnectionLost(tls.refusal_of(error, server.text)) from error
        except BaseException:
            link.end()
            connection.close()
            raise
        return link

    @property
    def stands(self) -> bool:
        """True while the connection to the server is open."""
        return not self._ended

    def ask(self, payload: bytes, request_id: int) -> asyncio.Future:
        """Send a request.

        Args:
            payload: The encoded request.
            request_id: Id of the request.

        Returns:
            The future of the reply. It raises an error if the connection ends before the reply arrives.
        """
        answer = self.waiting[request_id] = asyncio.get_running_loop().create_future()
        if self._ended:
            answer.set_exception(self._broken())
        else:
            self._transport.write(zmtp.head(len(payload)))
            self._transport.write(payload)
        return answer

    def end(self, error: Exception | None = None) -> None:
        """Close the connection at once.

        Args:
            error: The error that waiting requests raise; None for the error of a broken connection.
        """
        self._ended = True
        for answer in self.waiting.values():
            if not answer.done():
                answer.set_exception(error or self._broken())
        if not self._ready.done():
            self._ready.set_exception(error or ConnectionResetError("the server has closed the connection"))
            # Read the exception once. Otherwise asyncio logs "exception was never retrieved" if no task waits.
            self._ready.exception()
        if self._transport is not None:
            self._transport.abort()

    def _broken(self) -> ConnectionLost:
        return ConnectionLost(
            f"the connection to {self._address} broke before the answer arrived; send the request again"
        )

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._reply()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._framing.room()

    def buffer_updated(self, nbytes: int) -> None:
        self._framing.take(nbytes)
        try:
            while (message := self._framing.next()) is not None:
                self._hand_over(payload_of(message, 0))
        except zmtp.ZmtpError as error:
            self.end(
                ConnectionLost(
                    f"the program at this address is not a Sinew server: {error}; correct the host or the port"
                )
            )
        except ConnectionLost as error:
            self.end(error)
        else:
            self._reply()
            if self._framing.ready and not self._ready.done():
                self._ready.set_result(None)

    def eof_received(self) -> None:
        self.end()

    def connection_lost(self, exc: Exception | None) -> None:
        self.end()

    def _reply(self) -> None:
        """Send the messages that the ZeroMQ protocol itself requires: greeting, handshake, PONG."""
        while self._framing.replies and not self._ended:
            self._transport.write(self._framing.replies.pop(0))

    def _hand_over(self, payload: bytes) -> None:
        """Pass a reply to the request that waits for it. Drop the reply if its request was abandoned.

        Args:
            payload: The encoded reply.
        """
        request_id = protocol.reply_id(payload)
        if request_id:
            answer = self.waiting.get(request_id)
            if answer is not None and not answer.done():
                answer.set_result(payload)
            return
        # A reply without an id is an error for a request whose id the server could not read.
        try:
            protocol.decode_reply(payload, 0)
        except ClientError as error:
            refusal = error
        else:
            refusal = ClientError("the server sent a reply without a request id")
        for answer in self.waiting.values():
            if not answer.done():
                answer.set_exception(refusal)


async def _connected(loop: Any, server: ServerAddress, end: float) -> socket.socket:
    """Connect a socket without TLS. This is the asyncio version of :func:`sinew_client.link.connected`.

    Args:
        loop: The running event loop.
        server: Address of the server.
        end: Time limit, seconds of ``time.monotonic()``.

    Returns:
        The connected socket.

    Raises:
        OSError: No address of the host can be reached. At ``end``, the error is ``socket.timeout``.
    """
    candidates = unix_candidates(server)
    if not candidates:
        candidates = await _within(loop.getaddrinfo(server.host, server.port, type=socket.SOCK_STREAM), end)
    error = OSError("the host has no address")
    for index, (family, kind, number, _, address) in enumerate(candidates):
        connection = unconnected(family, kind, number, address)
        try:
            connection.setblocking(False)
            now = time.monotonic()
            await _within(
                loop.sock_connect(connection, address), now + (end - now) / (len(candidates) - index)
            )
            check_owner(connection)
        except OSError as wrong:
            connection.close()
            error = wrong
        except BaseException:
            connection.close()
            raise
        else:
            return connection
    raise error


async def _within(awaited: Any, end: float) -> Any:
    """Await a coroutine or future with a time limit.

    Args:
        awaited: The coroutine or future.
        end: Time limit, seconds of ``time.monotonic()``.

    Returns:
        The result of ``awaited``.

    Raises:
        socket.timeout: There is no result at ``end``.
    """
    try:
        return await asyncio.wait_for(awaited, max(1e-3, end - time.monotonic()))
    except asyncio.TimeoutError:
        raise socket.timeout("no connection in time") from None
