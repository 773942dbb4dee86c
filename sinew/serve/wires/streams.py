"""Streams in the native protocol: the server receives states and frames of a robot, and sends windows of waypoints
(lists of future commands; docs/stream.md).

A stream belongs to a connection and a session's name. A stream begins with its first message. Each message contains
everything that a server needs, so a robot's stream continues after a restart of the server. If the policy of a stream
is replaced, the stream ends, and begins again with its next sample (message with a state). The server limits the
streams of one connection and of all connections, the bytes of a message, and the unread windows of a client. Further
windows are dropped.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from sinew_client.schema import PredictRequest, PredictResponse
from sinew_client.types import CONDITIONS

from sinew.core import RTC, ActionChunk, BusyError, Observation, ObservationError, RequestError, SinewError
from sinew.core.rate_limited_log import RateLimitedLog
from sinew.processing.safety import Safety
from sinew.serve.decode.frames import PixelBudget
from sinew.serve.decode.protobuf import packed
from sinew.serve.device_lock import BackgroundTask
from sinew.serve.policies import Deployment
from sinew.serve.request import SupersededError
from sinew.serve.scheduler import Scheduler
from sinew.serve.service import STREAMED, Service, printable
from sinew.stream import Loops, Session, StreamSettings, Window
from sinew.stream.session import StateSample

if TYPE_CHECKING:
    from sinew.serve.transport.zeromq import Envelope, Peer

logger = logging.getLogger(__name__)

# Largest number of streams of a server, each with two frames. On a full server, a client without a stream takes the
# place of a stream of the client with the most streams.
MAX_STREAMS = 8
PER_CONNECTION = 2  # largest number of streams of one connection
MAX_MESSAGE = 16 << 20  # largest message with its frames, bytes
MAX_UNREAD = 64 << 10  # largest size of the unread windows of a client, bytes; further windows are dropped
# Seconds without a sample after which a stream ends, because its robot has lost power or network.
SILENT_S = 10.0
# Seconds without a sample after which a stream may lose its place to another robot, because a live robot sends a
# sample at every tick.
SPARE_S = 2.0
EXCHANGED = "the policy was replaced, and its streams begin again with their next samples"
_ACTIONS = PredictResponse.DESCRIPTOR.fields_by_name["actions"].number


class StreamParser(Protocol):
    """Interface of a codec that reads and writes the messages of streams."""

    def parse(self, payload: memoryview) -> tuple[Any, list[memoryview]]:
        """Return a message without its images, and the images."""

    def decode(self, payload: memoryview, budget: PixelBudget, default_policy: str) -> Observation:
        """Return the observation of a message. ``default_policy`` is the policy for a message that names no policy."""

    def encode_error(self, header: None, error: SinewError) -> bytes:
        """Return an error as a message."""


@dataclass(eq=False)
class StreamingRobot:
    """One stream of a robot. It receives the windows of the stream.

    Attributes:
        session: The session of the stream.
        name: Name of the session.
        policy: Name of the policy.
        settings: Settings of the stream.
        deployment: The deployment of the policy.
        peer: The connection of the robot.
        envelope: Routing frames for messages to the robot.
        safety: Limits of actions; None without limits.
        parser: Reads and writes the messages.
        on_end: Ends the stream. :meth:`abandon` calls it when the connection ends.
        heard: The time at which the last sample came.
        quiet: Log with a limited rate.
        ended: True after the end of the stream.
        dropped: Number of windows that were dropped because the client did not read.
        frames: Bytes of the two messages whose frames the session stores: the newest message, and the message of
            the prefix.
    """

    session: Session
    name: str
    policy: str
    settings: StreamSettings
    deployment: Deployment
    peer: Peer
    envelope: Envelope
    safety: Safety | None
    parser: StreamParser
    on_end: Callable[[StreamingRobot], None]
    heard: float
    quiet: RateLimitedLog
    ended: bool = False
    dropped: int = 0
    frames: deque[int] = field(default_factory=lambda: deque(maxlen=2))
    _label_sent: bool = False

    def window(self, window: Window) -> None:
        """Send one window (a list of future commands) to the robot. The fast loop of the stream calls this method. An
        empty window is sent too, because the robot measures the delay with each window.
        """
        if self.ended:
            return
        if self.peer.unsent > MAX_UNREAD:
            self.dropped += 1
            return
        chunk = ActionChunk(window.rows, session=self.name)
        safety, state = self.safety, window.state
        if safety is not None and state is not None and len(window.rows):
            try:
                chunk = safety.enforce(chunk, Observation(images={}, state=state))
            except SinewError as error:
                self.failed(error)
                return
        self.peer.reply([*self.envelope, self._encode(window, chunk)])

    def failed(self, error: SinewError) -> None:
        """Log and send an error. The stream continues with the next frame or sample."""
        if self.ended:
            return
        self.quiet.warning("a stream failed: %s", printable(error))
        self.tell(error)

    def tell(self, error: SinewError) -> None:
        """Send an error message to the robot."""
        if self.peer.unsent <= MAX_UNREAD:
            self.peer.reply([*self.envelope, self.parser.encode_error(None, error)])

    def abandon(self) -> None:
        self.on_end(self)

    def _encode(self, window: Window, chunk: ActionChunk) -> bytes:
        warnings = (*chunk.warnings, *self.deployment.changed)
        reply = PredictResponse(
            request_id=window.tag, session=self.name, warnings=warnings, deployment=self.deployment.number
        )
        reply.horizon, reply.dim = chunk.actions.shape
        about = reply.window
        about.step, about.run = window.step, window.run
        about.sample_time, about.frame_time = window.sample_time, window.frame_time
        about.prefix_age_ms, about.sensor_age_ms = 1e3 * window.prefix_age, 1e3 * window.sensor_age
        about.head_ms = 1e3 * window.head_s
        about.text, about.said = window.text.running, window.text.said
        if not self._label_sent:
            about.label, self._label_sent = self.session.label, True
        return reply.SerializeToString() + packed(_ACTIONS, chunk.actions)


class Streams:
    """All streams of one server.

    ``take``, ``patience`` and ``end_silent`` run on the server's own loop. All computation runs on the two loops of
    each stream.

    Args:
        service: The service.
        parser: Reads and writes the messages.
        clock: Returns the time in seconds, by which silent robots are noticed.

    Attributes:
        robots: (connection, session) -> robot.
    """

    def __init__(self, service: Service, parser: StreamParser, clock: Callable[[], float] = time.monotonic):
        self._service, self._parser, self._clock = service, parser, clock
        self.robots: dict[tuple[int, str], StreamingRobot] = {}
        self._lock = threading.Lock()
        # Limit the rate of these logs, because a client may begin a stream with each message.
        self._failed, self._changes = RateLimitedLog(logger), RateLimitedLog(logger)
        self.loops = Loops(start=service.supervisor.thread)
        service.policies.watch(self._left)

    def take(self, peer: Peer, envelope: Envelope, header: Any, content: memoryview) -> None:
        """Process a message of a stream: begin a stream, pass a sample or a frame to it, or end it.

        Args:
            peer: The connection.
            envelope: Routing frames for messages to the robot.
            header: Header of the message, of one of the codec's ``stream_kinds``.
            content: The message.

        Raises:
            SinewError: The message is invalid, or a limit is reached.
        """
        if header.kind == PredictRequest.STREAM_END:
            if (robot := self.robots.get((id(peer), header.session))) is not None:
                self._end(robot)
            return
        now = self._clock()
        if len(content) > MAX_MESSAGE:
            raise RequestError(
                f"stream: expected at most {MAX_MESSAGE} bytes in a message, got {len(content)}; send smaller frames"
            )
        request, pictures = self._parser.parse(content)
        for name in ("rate", "time"):
            if not request.HasField(name):
                raise ObservationError(name, "a number in each message of a stream", "none")
        for name in ("noise", "lang_tokens", "state", "previous"):
            if getattr(request, name):
                raise ObservationError(name, "no value in a stream", "numbers; send the state as raw_state")
        for name in ("subtask", "question", "text_only"):
            if getattr(request, name):
                raise ObservationError(name, "no value in a stream", "a value; to get text, set text_tokens")
        if request.adapter:
            raise ObservationError(
                "adapter",
                "none in a stream, because the base policy computes streams",
                repr(request.adapter[:64]),
            )
        state = np.fromiter(request.raw_state, np.float32, len(request.raw_state))
        for name in CONDITIONS:
            if request.HasField(name):
                raise ObservationError(
                    name,
                    "no value in a stream",
                    "a value; omit it, because a stream uses the policy's own condition",
                )
        robot = self._robot(peer, envelope, header.session, request)
        if robot.safety is not None:
            robot.safety.check(Observation(images={}, state=state))
        session = robot.session
        # The robot's clock has started again. The sample is rejected below, and the next message begins
        # a new stream.
        if session.before(request.time):
            self._end(robot)
        delay = request.delay if request.HasField("delay") else 1
        arrived = session.now()
        session.push_sample(StateSample(state, request.time, delay, arrived, request.request_id))
        robot.heard = now
        if request.prompt and request.prompt != session.prompt:
            session.say(request.prompt)
        if pictures:
            frame_time = request.frame_time if request.HasField("frame_time") else request.time
            session.push_frame(partial(self._images, content, header.policy), frame_time)
            robot.frames.append(len(content))
            peer.keeps[robot] = sum(robot.frames)
            if robot.ended:  # another thread has ended the stream in the meantime
                peer.release(robot)
        self.loops.wake()

    def patience(self) -> float:
        """Return the seconds until the next silent stream has to end; infinity if there is no stream."""
        heard = min((robot.heard for robot in self.robots.values()), default=math.inf)
        return max(0.0, heard + SILENT_S - self._clock())

    def end_silent(self, seconds: float | None = None, most: int = MAX_STREAMS) -> int:
        """End the streams of robots that send no samples any more, beginning with the longest silence.

        Args:
            seconds: Seconds without a sample after which a stream is ended; None uses :data:`SILENT_S`.
            most: Largest number of streams to end.

        Returns:
            The number of ended streams.
        """
        oldest = self._clock() - (SILENT_S if seconds is None else seconds)
        silent = sorted((r for r in self.robots.values() if r.heard <= oldest), key=lambda r: r.heard)
        for robot in silent[:most]:
            self._end(robot)
        return len(silent[:most])

    def stop(self) -> None:
        self.loops.stop()

    def _images(self, content: memoryview, policy: str) -> Any:
        """Decode the frames of a message. The slow loop calls this method.

        Raises:
            UnknownPolicyError: The policy was unloaded in the meantime.
        """
        budget = PixelBudget(self._service.policies.get(policy).pixels)
        return self._parser.decode(content, budget, policy).images

    def _robot(self, peer: Peer, envelope: Envelope, name: str, request: Any) -> StreamingRobot:
        settings = StreamSettings(
            rate=request.rate,
            guidance=request.rtc or "none",
            interpolation=request.interpolation or "linear",
            solver_steps=request.solver_steps if request.HasField("solver_steps") else None,
            seed=request.seed % (1 << 62) if request.HasField("seed") else None,
            text_tokens=request.text_tokens,
        )
        key = (id(peer), name)
        robot = self.robots.get(key)
        if robot is not None and (robot.settings, robot.policy) == (settings, request.policy):
            return robot
        if robot is not None:
            self._end(robot)
        self._service.check_session(name)
        deployment = self._service.policies.get(request.policy)
        self._make_place(peer)
        policy: Any = deployment.scheduler.policy
        if not hasattr(policy, "processor"):
            engine = policy.describe()["engine"]
            raise RequestError(
                f"stream: expected a policy that computes in this process, got engine {engine}"
            )
        safety = deployment.safety
        if safety is not None and safety.max_age is not None:
            raise RequestError(
                f"stream: this server compares Unix times (--max-age {safety.max_age:g}), but the times of a stream are"
                " those of the robot's clock; start the server without --max-age, and limit the age of frames with the"
                " setting `stale` of `sinew run`"
            )
        session = Session(policy, settings, request.prompt)
        robot = StreamingRobot(
            session, name, request.policy, settings, deployment, peer, envelope,
            None if safety is None else safety.of_windows(), self._parser, self._end, self._clock(),
            self._failed,
        )  # fmt: skip
        with self._lock:
            self.robots[key] = robot
        # Like a request, the stream ends with its connection.
        peer.under_way.add(robot)
        self.loops.add(session, robot, peer, partial(BackgroundTask, deployment.scheduler.device_lock))
        # A hot-swap has replaced the policy since the stream was created.
        if self._service.policies.get(request.policy) is not deployment:
            self._end(robot)
            raise SupersededError(EXCHANGED)
        self._service.uses |= {STREAMED, *({settings.guidance} & {*RTC})}
        self._changes.info("a stream of %s begins: %s", peer.address, session.label)
        return robot

    def _make_place(self, peer: Peer) -> None:
        """Make room for a stream of this connection.

        If the server is full, a silent stream or a stream of the client with the most streams ends.

        Raises:
            BusyError: The connection has too many streams, or no stream can end.
        """
        robots = list(self.robots.values())
        mine = [each for each in robots if each.peer is peer]
        if len(mine) >= PER_CONNECTION:
            raise BusyError(
                f"{PER_CONNECTION} streams of this connection run, which is the limit; end one of them"
            )
        if len(robots) < MAX_STREAMS or self.end_silent(SPARE_S, 1):
            return
        near = [each for each in robots if each.peer.address == peer.address]
        if not near:
            owned = _most(robots, [each.peer.address for each in robots])
        else:
            owned = [] if mine else _most(near, [id(each.peer) for each in near])
        if len(owned) < 2:
            raise BusyError(f"{MAX_STREAMS} streams run, which is the limit; try again later")
        owned[-1].tell(
            BusyError(f"{MAX_STREAMS} streams run, so this stream has ended for a client without a stream")
        )
        self._end(owned[-1])

    def _left(self, scheduler: Scheduler) -> None:
        """End the streams of a policy that was replaced or unloaded, and wait until their computations have ended.
        After the method returns, the memory of the policy can be freed. The thread that changes the policy calls
        this method.
        """
        with self._lock:
            robots = [each for each in self.robots.values() if each.deployment.scheduler is scheduler]
        for robot in robots:
            self._end(robot)
            robot.tell(SupersededError(EXCHANGED))
        self.loops.settle([robot.session for robot in robots])

    def _end(self, robot: StreamingRobot) -> None:
        with self._lock:
            if robot.ended:
                return
            robot.ended = True
            self.robots = {key: each for key, each in self.robots.items() if each is not robot}
        robot.peer.under_way.discard(robot)
        robot.peer.release(robot)
        self.loops.remove(robot.session)
        session = robot.session
        self._changes.info(
            "a stream of %s ended: %d of %d frames read, %d runs on %d samples, %d windows not read by the client",
            robot.peer.address, session.prefixes, session.frames, session.runs, session.samples, robot.dropped,
        )  # fmt: skip


def _most(robots: Sequence[StreamingRobot], owners: Sequence[Hashable]) -> list[StreamingRobot]:
    """Return the streams of the owner with the most streams, oldest first."""
    most = max(owners, key=owners.count, default=None)
    return [robot for robot, owner in zip(robots, owners, strict=True) if owner == most]
