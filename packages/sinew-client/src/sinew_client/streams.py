"""The robot's end of a stream: samples and frames go out, windows of nodes come in, and nothing ever waits."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import zmq
from google.protobuf.message import DecodeError

from sinew_client import protocol, schema
from sinew_client.errors import ClientError, UnsafeChunk
from sinew_client.faults import Faults, kind_of

UNSENT = (
    4  # messages that may wait to be sent; then further ones are dropped, for they are old when they leave
)
UNREAD = 256  # windows that may wait to be read
OPTIONS = ("rtc", "interpolation", "solver_steps", "seed", "text_tokens")


@dataclass(frozen=True)
class StreamWindow:
    """Nodes ``step``, ``step + 1`` ... of a trajectory: ``rows``, float32 [K, D] in world units.

    There are no rows where the answer comes later than they would reach; it still tells how long the way takes.
    Node k belongs to k / rate seconds of the robot's clock, on which ``sample_time`` and ``frame_time`` are those of
    the newest sample and frame in it. Ages are of the server's clock: since the prefix was ready, since the sample
    arrived. request_id: of the message with that sample. label: how the server makes windows; "" but in the first one.
    text: what the policy's language head is saying, from its first token on. said: its last text that is complete.
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


class StreamLink:
    """A stream to one ``sinew serve``. Not thread-safe: it belongs to the robot's loop.

    address: as of :class:`sinew_client.Client`, with ``/NAME`` for another policy than the server's first.
    rate: nodes per second. options: ``rtc`` (guided, no-jacobian, ramp, none), ``interpolation`` (linear, hold),
    ``solver_steps``, ``seed``; for checkpoints whose head has one time for all rows. ``text_tokens``: of each text that
    the policy is to say beside its windows, where it keeps a language head.

    max_rows: nodes of a window at most.

    There is no handshake. While nobody listens at the address messages are dropped, and the first one that gets
    through begins the stream, also after the server was restarted. ``sent``, ``dropped``, ``errors`` count;
    ``error`` is the last one. ``faults``: those of them that are errors and not what a busy server says.
    """

    def __init__(
        self,
        address: str,
        rate: float,
        session: str = "",
        api_key: str = "",
        options: Mapping[str, Any] | None = None,
        max_rows: int = protocol.MAX_ROWS,
    ):
        self.max_rows = max_rows
        self.address, self._policy = protocol.split_address(address)
        self.rate, self.session = rate, session
        self._api_key, self._options = api_key, dict(options or {})
        for key in self._options:
            if key not in OPTIONS:
                raise ClientError("stream: {}: unknown option; known are {}".format(key, ", ".join(OPTIONS)))
        self._ids = itertools.count(1)
        self.sent = self.dropped = self.errors = 0
        self.error, self.label, self.faults = "", "", Faults()
        self._ends = False  # before the next sample the stream is to be ended
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.IMMEDIATE, 1),  # nothing is queued for a connection that does not stand
            (zmq.SNDHWM, UNSENT),
            (zmq.RCVHWM, UNREAD),
            (zmq.RECONNECT_IVL_MAX, 500),
            (zmq.IPV6, 1),
        ):
            self._socket.setsockopt(option, value)
        try:
            self._socket.connect(self.address)
        except zmq.ZMQError as error:
            self.close()
            raise ClientError(f"cannot connect to {address}: {error}") from error

    def send(
        self,
        state: Any,
        time: float,
        delay: int = 1,
        images: Mapping[str, Any] | None = None,
        frame_time: float | None = None,
        prompt: str = "",
    ) -> bool:
        """Send a sample of ``time`` seconds, with frames or without; False if it was dropped because nobody takes it.

        delay: nodes from the sample's own to the first one that the answer can still reach. Raises InvalidObservation.
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
            policy=self._policy,
            **self._options,
        )
        request.raw_state.extend(protocol.floats("state", state, ndim=1).tolist())
        if images is not None:
            request.camera_names.extend(str(name) for name in images)
            request.frame_time = time if frame_time is None else frame_time
        payload = b"".join(protocol.with_frames(request, images or {}))
        try:
            if self._ends:
                self._end()
                self._ends = False
            self._socket.send(payload, zmq.NOBLOCK)
        except zmq.Again:
            self.dropped += 1
            return False
        self.sent += 1
        return True

    def windows(self) -> list[StreamWindow]:
        """Return the windows that have arrived since the last call, oldest first; does not wait."""
        found = []
        while True:
            try:
                payload = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return found
            try:
                window = decode_window(payload, self.max_rows)
            except ClientError as error:
                self.errors += 1
                if kind := kind_of(error):
                    self.faults.add(kind, str(error))
                self.error = str(error)
                continue
            self.label = window.label or self.label
            found.append(window)

    def restart(self) -> None:
        """Let the next sample begin a stream that knows nothing of what was before."""
        self._ends = True

    def close(self) -> None:
        """End the stream and close the connection."""
        if self._socket.closed:
            return
        with contextlib.suppress(zmq.ZMQError):
            self._end()
        self._socket.close(linger=50)
        self._context.term()

    def _end(self) -> None:
        end = schema.PredictRequest(
            kind=schema.PredictRequest.Kind.Value("STREAM_END"), session=self.session, api_key=self._api_key
        )
        self._socket.send(end.SerializeToString(), zmq.NOBLOCK)


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
    )
