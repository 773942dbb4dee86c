"""The client of a stream: it sends samples and frames, and receives windows of waypoints, without ever waiting."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from sinew_client import protocol, schema
from sinew_client.addresses import LEAVING, Addresses, pauses
from sinew_client.client import Client
from sinew_client.errors import ClientError, ConnectionLost, ServerError, UnsafeChunk
from sinew_client.faults import Faults, kind_of
from sinew_client.form import Fitted
from sinew_client.link import Link
from sinew_client.tls import check_key_is_private

# At most this many messages wait to be sent. Further messages are dropped, because they would be too old when they are
# sent.
UNSENT = 4
UNREAD = 256  # one call of `windows` reads at most this many messages
LINGER_S = 0.05  # `close` waits at most this many seconds until the last message is sent
OPTIONS = ("rtc", "interpolation", "solver_steps", "seed", "text_tokens")


@dataclass(frozen=True)
class StreamWindow:
    """A window of a stream: the waypoints ``step``, ``step + 1`` and so on.

    If the answer arrives after its last waypoint is due, the window has no waypoints. It still measures the delay.

    Attributes:
        step: Number of the first waypoint. Waypoint k is due at k / rate seconds of the robot's clock.
        rows: The waypoints, float32 [K, D] in robot units.
        sample_time: Time of the newest sample, seconds of the robot's clock.
        frame_time: Time of the newest frame, seconds of the robot's clock.
        prefix_age_ms: Age of the prefix (the computed context of the frames) on the server's clock, ms.
        sensor_age_ms: Time since the sample arrived at the server, ms.
        head_ms: Time of the action head, ms.
        run: Number of the run of the action head.
        request_id: Id of the message with the newest sample.
        label: The server's method to compute windows, in the first window; "" in all others.
        text: Text that the policy's language head is generating, from its first token on.
        said: Last complete text of the language head.
        deployment: Number of the policy that computed the window, as in :class:`~sinew_client.ActionChunk`.
    """

    step: int
    rows: np.ndarray
    sample_time: float
    frame_time: float
    prefix_age_ms: float = 0.0
    sensor_age_ms: float = 0.0
    head_ms: float = 0.0
    run: int = 0
    request_id: int = 0
    label: str = ""
    text: str = ""
    said: str = ""
    deployment: int = 0


class StreamLink:
    """A stream to a policy server. One thread, the robot's control loop, calls its methods. They never wait.

    A second thread of the link connects, and sends the bytes that the connection did not accept at once. While there
    is no server, messages are dropped. The first message that arrives at a server begins the stream, even after a
    restart of the server. With several addresses, the link tries the next address in these cases:

    * A connection fails or breaks.
    * A stopping or unhealthy server rejects a message.
    * No window arrives for ``timeout`` seconds after a sample.

    Args:
        address: Address or addresses, as for :class:`sinew_client.Client`. ``/NAME`` at the end names one of several
            policies of a server.
        rate: Waypoints per second.
        session: Session of the robot.
        api_key: Key of the server.
        options: ``rtc`` (guided, no-jacobian, ramp, none), ``interpolation`` (linear, hold), ``solver_steps`` and
            ``seed``. These four are for checkpoints whose action head has one time for all actions. ``text_tokens`` is
            the number of tokens in each text that a policy with a language head generates in parallel.
        max_rows: Largest number of waypoints in a window.
        connect_timeout: With several addresses: seconds to wait for a connection before the next address is tried.
        timeout: Seconds without a window after which the next address is tried.
        policy: Description of the expected policy. A server with another policy gets no samples. None allows any
            policy.

    Attributes:
        sent: Number of samples that were sent.
        dropped: Number of samples that were dropped.
        errors: Number of errors.
        error: Text of the last error.
        faults: Errors that are not part of normal operation.

    Raises:
        ClientError: The address or an option is not valid, or the key would travel unencrypted.

    Example:
        >>> link = StreamLink("tcp://server:5555", rate=100)
        >>> link.send(state, time, images={"front": frame})
        >>> windows = link.windows()
    """

    def __init__(
        self,
        address: str | Sequence[str],
        rate: float,
        session: str = "",
        api_key: str = "",
        options: Mapping[str, Any] | None = None,
        max_rows: int = protocol.MAX_ROWS,
        *,
        connect_timeout: float = 1.0,
        timeout: float = 10.0,
        policy: Mapping[str, Any] | None = None,
    ):
        self.max_rows, self._fitted = max_rows, None if policy is None else Fitted(policy)
        self._deployment = 0  # deployment number of the policy that was compared with the robot's policy
        self._addresses = Addresses(address)
        self.rate, self.session = rate, session
        self.connect_timeout, self.timeout = connect_timeout, timeout
        self._api_key, self._options = api_key, dict(options or {})
        check_key_is_private(self._addresses.servers, api_key)
        for key in self._options:
            if key not in OPTIONS:
                raise ClientError("stream: {}: unknown option; use one of {}".format(key, ", ".join(OPTIONS)))
        self._ids = itertools.count(1)
        self.sent = self.dropped = self.errors = 0
        self.error, self.label, self.faults = "", "", Faults()
        self._ends = False  # True if the present stream must be ended before the next sample is sent
        self._asked: float | None = None  # time of the first sample after the last received message, seconds
        self._closed = False
        self._link: Link | None = None  # the open connection; the thread that opened it closes it
        self._changed = threading.Condition()  # locks `_link`, and signals its changes to the other thread
        self._thread = threading.Thread(target=self._keep_connected, name="sinew-stream", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """The address of the server that the stream uses now."""
        return self._addresses.present

    @property
    def present(self) -> str:
        """The present address as the user wrote it, with the policy's name."""
        return self._addresses.given[self._addresses.place]

    def wait_connected(self, seconds: float) -> bool:
        """Wait at most ``seconds`` for a connection. Return True if there is one."""
        with self._changed:
            return self._changed.wait_for(lambda: self._link is not None, seconds)

    def wait_window(self, seconds: float) -> bool:
        """Wait at most ``seconds`` until a message arrives or the connection ends. Return False if neither happens."""
        link = self._link
        return link is not None and link.wait(monotonic() + seconds)

    def send(
        self,
        state: Any,
        time: float,
        delay: int = 1,
        images: Mapping[str, Any] | None = None,
        frame_time: float | None = None,
        prompt: str = "",
    ) -> bool:
        """Send a sample, with or without frames.

        Args:
            state: State of the robot, float [S].
            time: Time of the sample, seconds of the robot's clock.
            delay: Number of waypoints from the sample's own waypoint to the first waypoint that can still change when
                the answer arrives.
            images: New frames by camera; None without new frames.
            frame_time: Time of the frames; None takes ``time``.
            prompt: The instruction.

        Returns:
            False if the sample was dropped, because there is no connection or too many messages wait.

        Raises:
            InvalidObservation: The state or a frame cannot be encoded.
        """
        request = schema.PredictRequest(
            kind=schema.PredictRequest.Kind.Value("STREAM"),
            request_id=next(self._ids),
            session=self.session,
            api_key=self._api_key,
            rate=self.rate,
            time=time,
            delay=delay,
            prompt=prompt,
            policy=self._addresses.policy,
            **self._options,
        )
        request.raw_state.extend(protocol.floats("state", state, 1).tolist())
        if images is not None:
            request.camera_names.extend(str(name) for name in images)
            request.frame_time = time if frame_time is None else frame_time
        parts = protocol.with_frames(request, (images or {}).items())
        with self._changed:
            link = self._link
            if self._closed or link is None or link.unsent >= UNSENT:
                self.dropped += 1
                return False
            try:
                if self._ends:
                    link.put([self._end()])
                    self._ends = False
                link.put(parts)
            except OSError as error:
                self._lose(link, str(error))
                self.dropped += 1
                return False
            if link.unsent:
                self._changed.notify_all()  # the stream's own thread sends the remaining bytes
        self.sent += 1
        if self._asked is None:
            self._asked = monotonic()
        return True

    def windows(self) -> list[StreamWindow]:
        """Return the windows that have arrived since the last call, oldest first, without waiting."""
        decoded = []
        for payload in self._arrived():
            try:
                window = decode_window(payload, self.max_rows)
            except ClientError as error:
                self._note(error)
                continue
            if 0 not in (self._deployment, window.deployment) and window.deployment != self._deployment:
                self._note(
                    ConnectionLost(f"{self.present} has replaced its policy; the client connects again")
                )
                with self._changed:
                    if self._link is not None:
                        # Drop the connection, because the next connection compares the new policy with the old one.
                        self._lose(self._link, self.error)
                break
            self.label = window.label or self.label
            decoded.append(window)
        return decoded

    def _arrived(self) -> list[bytes]:
        """Return the encoded messages that have arrived. If the connection is lost, begin to connect again."""
        payloads: list[bytes] = []
        with self._changed:
            link = self._link
            if link is None:
                return payloads
            try:
                while len(payloads) < UNREAD and (payload := link.get()) is not None:
                    payloads.append(payload)
            except ConnectionLost as error:
                self._note(error)
                self._lose(link, str(error))
            except OSError as error:
                self._lose(link, str(error))
            else:
                if payloads:
                    self._asked = None
                elif (
                    self._asked is not None
                    and monotonic() - self._asked > self.timeout
                    and len(self._addresses) > 1
                ):
                    self._lose(link, "no answer in time")
        return payloads

    def _note(self, error: ClientError) -> None:
        """Count an error. If the server stops or is unhealthy, change to the next address."""
        with self._changed:
            # Other threads read the text and the kind as soon as the count has changed, so it changes last.
            self.error = str(error)
            if kind := kind_of(error):
                self.faults.add(kind, str(error))
            self.errors += 1
            leaves = isinstance(error, ServerError) and error.code in LEAVING
            if leaves and len(self._addresses) > 1 and self._link is not None:
                self._lose(self._link, str(error))

    def restart(self) -> None:
        """Begin a new stream with the next sample, without any earlier context."""
        self._ends = True

    def close(self) -> None:
        """End the stream and close the connection."""
        with self._changed:
            if self._closed:
                return
            link = self._link
            if link is not None:
                with contextlib.suppress(OSError):
                    link.put([self._end()])
                    end = monotonic() + LINGER_S
                    while link.unsent and link.wait(end, writable=True):
                        link.flush()
            self._closed, self._link = True, None
            if link is not None:
                link.shut()
            self._changed.notify_all()
        self._thread.join(LINGER_S)  # a thread that still tries to connect ends after this attempt

    def _end(self) -> bytes:
        end = schema.PredictRequest(
            kind=schema.PredictRequest.Kind.Value("STREAM_END"), session=self.session, api_key=self._api_key
        )
        payload: bytes = end.SerializeToString()
        return payload

    def _lose(self, link: Link, why: str) -> None:
        """Drop a connection, and change to the next address if there is one. ``why`` is the reason, for the log. The
        caller must have locked ``_changed``.
        """
        if self._link is link:
            self._link, self._asked = None, None
            self._addresses.move(self._addresses.place, why)
            link.shut()
            self._changed.notify_all()

    def _keep_connected(self) -> None:
        """Run in the link's own thread: connect, reconnect after a loss, and send the bytes that wait."""
        patience = self.connect_timeout if len(self._addresses) > 1 else self.timeout
        waits = pauses()
        while not self._closed:
            place = self._addresses.place
            try:
                link = Link(self._addresses.server, monotonic() + patience, b"DEALER")
            # ConnectionLost is a subclass of OSError. It means that the program at the address is not a Sinew server.
            except OSError as error:
                with self._changed:
                    if isinstance(error, ConnectionLost):
                        self.error = str(error)
                    self._addresses.move(place, str(error))
                    if self._addresses.place == 0:  # wait only after all addresses have been tried
                        self._changed.wait_for(lambda: self._closed, next(waits))
                continue
            try:
                with Client(self.present, api_key=self._api_key, timeout=patience) as client:
                    if self._fitted is not None:
                        self._fitted.check(client)
                        self._deployment = client.deployment
            except ClientError as error:
                with self._changed:
                    self._note(error)
                    self._addresses.move(place, str(error))
                    self._changed.wait_for(lambda: self._closed, next(waits))
            else:
                waits = pauses()
                self._serve(link)
            link.close()

    def _serve(self, link: Link) -> None:
        """Use a new connection until it is lost or closed, and send the bytes that wait."""
        with self._changed:
            if self._closed:
                return
            self._link = link
            self._changed.notify_all()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._link is not link or link.unsent)
                if self._link is not link:
                    return
            link.wait(monotonic() + self.timeout, writable=True)
            with self._changed:
                try:
                    link.flush()
                except OSError as error:
                    self._lose(link, str(error))


def decode_window(payload: bytes, max_rows: int = protocol.MAX_ROWS) -> StreamWindow:
    """Decode a window from a message of the server.

    Args:
        payload: The encoded message.
        max_rows: Largest number of waypoints.

    Returns:
        The window.

    Raises:
        ServerError: The message is an error of the server.
        ClientError: The message is not a valid window, or has too many waypoints.
    """
    reply = schema.PredictResponse()
    try:
        reply.ParseFromString(payload)
    except (DecodeError, ValueError) as error:
        raise ClientError(f"the message is not a PredictResponse: {error}") from error
    protocol.raise_error(reply)
    if not reply.HasField("window"):
        raise ClientError("the message is not a window of a stream")
    rows, about = protocol.decode_rows(reply, max_rows, least=0), reply.window
    if not np.isfinite([about.sample_time, about.frame_time]).all():
        raise UnsafeChunk("a window has times that are not finite")
    return StreamWindow(
        step=about.step,
        rows=rows,
        sample_time=about.sample_time,
        frame_time=about.frame_time,
        prefix_age_ms=about.prefix_age_ms,
        sensor_age_ms=about.sensor_age_ms,
        head_ms=about.head_ms,
        run=about.run,
        request_id=reply.request_id,
        label=about.label,
        text=about.text,
        said=about.said,
        deployment=reply.deployment,
    )
