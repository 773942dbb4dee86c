"""The robot's end of a stream: samples and frames are sent, windows of waypoints are received, and no call waits."""

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

UNSENT = (
    4  # messages that may wait to be sent; then further ones are dropped, for they are old when they leave
)
UNREAD = 256  # windows that are read at once
LINGER_S = 0.05  # seconds for the last message of a stream to leave
OPTIONS = ("rtc", "interpolation", "solver_steps", "seed", "text_tokens")


@dataclass(frozen=True)
class StreamWindow:
    """Waypoints ``step``, ``step + 1`` ... of a trajectory, ``rows`` float32 [K, D] in robot units.

    There are no rows if the answer comes later than they would reach. Such a window still tells the delay.

    Attributes:
        step: Number of the first waypoint. Waypoint k belongs to k / rate seconds of the robot's clock.
        rows: The waypoints.
        sample_time: Time of the newest sample, seconds of the robot's clock.
        frame_time: Time of the newest frame, likewise.
        prefix_age_ms: Milliseconds since the prefix was ready, on the server's clock.
        sensor_age_ms: Milliseconds since the sample arrived, on the server's clock.
        request_id: Id of the message with that sample.
        label: How the server makes windows; "" except in the first one.
        text: Text that the policy's language head is generating, from its first token on.
        said: Its last complete text.
        deployment: Number of the policy that computed it, as in :class:`~sinew_client.ActionChunk`.
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
    """A stream to a policy server. Its methods belong to one thread, the robot's loop, and never wait for the server.

    A thread of its own connects, and sends bytes that the connection did not accept at once. A stream has no
    handshake. While no server listens at the address, messages are dropped. The first one that arrives begins the
    stream, also after a restart of the server. With several addresses, the next one is tried if a connection fails or
    breaks, a stopping or unhealthy server rejects, or no window comes for ``timeout`` seconds after a sample.

    Args:
        address: As for :class:`sinew_client.Client`, with ``/NAME`` for a policy other than the server's first.
        rate: Waypoints per second.
        connect_timeout: As for :class:`sinew_client.Client`.
        max_rows: Most waypoints of a window.
        policy: The server's description of the policy. Another policy gets no sample. None allows any.
        options: ``rtc`` (guided, no-jacobian, ramp, none), ``interpolation`` (linear, hold), ``solver_steps`` and
            ``seed``, for checkpoints whose head has one time for all actions. ``text_tokens``: tokens of each text
            that the policy generates in parallel, if it has a language head.

    Attributes:
        sent: Number of samples that were sent.
        dropped: Number of samples that were dropped.
        errors: Number of errors.
        error: Text of the last one.
        faults: Errors that are not part of normal operation.
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
        self._deployment = 0  # number of the policy that was compared with it
        self._addresses = Addresses(address)
        self.rate, self.session = rate, session
        self.connect_timeout, self.timeout = connect_timeout, timeout
        self._api_key, self._options = api_key, dict(options or {})
        check_key_is_private(self._addresses.all, api_key)
        for key in self._options:
            if key not in OPTIONS:
                raise ClientError("stream: {}: unknown option; known are {}".format(key, ", ".join(OPTIONS)))
        self._ids = itertools.count(1)
        self.sent = self.dropped = self.errors = 0
        self.error, self.label, self.faults = "", "", Faults()
        self._ends = False  # before the next sample the stream is to be ended
        self._asked: float | None = None  # when the first sample left since which nothing has come
        self._closed = False
        self._link: Link | None = None  # the open connection; the thread that made it closes it
        self._changed = threading.Condition()  # guards the link, and tells of its changes
        self._thread = threading.Thread(target=self._keep_connected, name="sinew-stream", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """The present one."""
        return self._addresses.present

    @property
    def present(self) -> str:
        """The present address as the user typed it, with the policy's name."""
        return self._addresses.given[self._addresses.place]

    def wait_connected(self, seconds: float) -> bool:
        """Wait for a connection. Return False if there is none after so many seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self._link is not None, seconds)

    def wait_window(self, seconds: float) -> bool:
        """Wait until something has arrived, or the connection has ended. Return False if neither happens."""
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
        """Send a sample of ``time`` seconds, with or without frames. Return False if it was dropped without a
        connection.

        delay: Waypoints from the sample's own to the first one that the answer can change. Raises InvalidObservation.
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
                self._changed.notify_all()  # the rest is the thread's
        self.sent += 1
        if self._asked is None:
            self._asked = monotonic()
        return True

    def windows(self) -> list[StreamWindow]:
        """Return the windows that have arrived since the last call, oldest first, without waiting."""
        found = []
        for payload in self._arrived():
            try:
                window = decode_window(payload, self.max_rows)
            except ClientError as error:
                self._note(error)
                continue
            if 0 not in (self._deployment, window.deployment) and window.deployment != self._deployment:
                self._note(ConnectionLost(f"{self.present} has replaced its policy; connecting again"))
                with self._changed:
                    if self._link is not None:
                        self._lose(self._link, self.error)  # the next connection begins with a comparison
                break
            self.label = window.label or self.label
            found.append(window)
        return found

    def _arrived(self) -> list[bytes]:
        """Return the messages that have come."""
        found: list[bytes] = []
        with self._changed:
            link = self._link
            if link is None:
                return found
            try:
                while len(found) < UNREAD and (payload := link.get()) is not None:
                    found.append(payload)
            except ConnectionLost as error:
                self._note(error)
                self._lose(link, str(error))
            except OSError as error:
                self._lose(link, str(error))
            else:
                if found:
                    self._asked = None
                elif (
                    self._asked is not None
                    and monotonic() - self._asked > self.timeout
                    and len(self._addresses) > 1
                ):
                    self._lose(link, "no answer in time")
        return found

    def _note(self, error: ClientError) -> None:
        """Count an error, and turn to another server where this one will not answer the next message either."""
        self.errors += 1
        if kind := kind_of(error):
            self.faults.add(kind, str(error))
        self.error = str(error)
        if isinstance(error, ServerError) and error.code in LEAVING and len(self._addresses) > 1:
            with self._changed:
                if self._link is not None:
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
        self._thread.join(LINGER_S)  # it may still try to connect, and ends after that

    def _end(self) -> bytes:
        end = schema.PredictRequest(
            kind=schema.PredictRequest.Kind.Value("STREAM_END"), session=self.session, api_key=self._api_key
        )
        found: bytes = end.SerializeToString()
        return found

    # ------------------------------------------------------------------------- connection

    def _lose(self, link: Link, why: str) -> None:
        """Give a connection up, and turn to the next address if there is one. The caller holds the lock."""
        if self._link is link:
            self._link, self._asked = None, None
            self._addresses.move(self._addresses.place, why)
            link.shut()
            self._changed.notify_all()

    def _keep_connected(self) -> None:
        """Connect, reconnect after a loss, and send bytes that were not accepted at once."""
        patience = self.connect_timeout if len(self._addresses) > 1 else self.timeout
        waits = pauses()
        while not self._closed:
            place = self._addresses.place
            try:
                link = Link(self._addresses.host_and_port, monotonic() + patience, b"DEALER")
            except OSError as error:  # ConnectionLost is one too, if the address belongs to another program
                with self._changed:
                    if isinstance(error, ConnectionLost):
                        self.error = str(error)
                    self._addresses.move(place, str(error))
                    if self._addresses.place == 0:  # all of them have been tried
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
        """Have a connection stand until it is lost or closed."""
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
    """Return the window of a pushed message. Raises ServerError for an error, ClientError for anything else, also for
    more than ``max_rows`` nodes."""
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
        raise UnsafeChunk("a window holds times that are not finite")
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
