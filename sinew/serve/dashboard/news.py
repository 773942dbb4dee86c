"""Messages to the viewers of one event loop. Each message is made once for all viewers, at most ten times a second,
between two requests.

Viewers must never delay a robot. So an answer only sets a flag, after its reply is sent and only if a viewer is
connected. A message contains all answers since the last message, and the numbers of the newest chunk only. If
answers came during the pause, the message waits until no request is computed.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import logging
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from sinew.core import SinewError, machine
from sinew.core.rate_limited_log import RateLimitedLog
from sinew.serve.dashboard.feed import BY_HAND, Answer, Feed
from sinew.serve.dashboard.host import Host
from sinew.serve.service import Service

logger = logging.getLogger(__name__)

EVENTS_S = 0.1  # shortest time between two messages, seconds
HEALTH_S = 2.0  # seconds between two events of the server's health
PATIENCE_S = 0.5  # longest time that a message waits for a gap between two requests, seconds
BEHIND = 16  # largest number of unread messages of a viewer; older messages are dropped


class Outbox:
    """The messages that one viewer has not read yet. At most ``behind`` messages are stored."""

    def __init__(self, behind: int) -> None:
        self.ended = False  # True after the last message
        self._messages: deque[bytes] = deque(maxlen=behind)
        self._some = asyncio.Event()

    def put(self, message: bytes) -> None:
        """Add a message. If the viewer has too many unread messages, the oldest is dropped."""
        self._messages.append(message)
        self._some.set()

    def end(self) -> None:
        """Wake the waiting viewer for the last time, because no further messages will come. Later calls of
        :meth:`get` return b"".
        """
        self.ended = True
        self._some.set()

    async def get(self) -> bytes:
        """Wait for a message, and return all unread messages; b"" at the end."""
        await self._some.wait()
        self._some.clear()
        messages = b"".join(self._messages)
        self._messages.clear()
        return messages


class Broadcast:
    """Sends messages of one kind to all viewers. While there are viewers, one asyncio task makes the messages."""

    behind = BEHIND

    def __init__(self, service: Service, feed: Feed):
        self._service = service
        self._feed = feed
        self._outboxes: set[Outbox] = set()
        self._task: asyncio.Task[None] | None = None
        self._listening = False
        self._rung = asyncio.Event()
        self._quiet = RateLimitedLog(logger)

    @contextlib.contextmanager
    def viewer(self) -> Iterator[Outbox]:
        """Provide an outbox that receives all messages while the ``with`` block runs."""
        outbox = Outbox(self.behind)
        self._outboxes.add(outbox)
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run(self._begin()))
        try:
            yield outbox
        finally:
            self._outboxes.discard(outbox)
            if not self._outboxes:
                self._task.cancel()
                self._task = None
                self._left()

    def end(self) -> None:
        """Send no further messages, and let all viewers disconnect."""
        for outbox in self._outboxes:
            outbox.end()

    async def _run(self, last_number: int) -> None:
        loop = asyncio.get_running_loop()
        try:
            with self._feed.bell(lambda: self._ring(loop)):
                while True:
                    await self._news(last_number)
                    try:
                        last_number, message, pause = await self._make(last_number)
                    except Exception as error:  # noqa: BLE001 - one answer failed; the viewers see the next answers
                        self._quiet.error(
                            "an event of the dashboard could not be created and is skipped", error
                        )
                        last_number, message, pause = self._newest(), b"", EVENTS_S
                    for outbox in self._outboxes if message else ():
                        outbox.put(message)
                    await asyncio.sleep(pause)
        except Exception as error:  # noqa: BLE001 - an error in this code; the viewers reconnect
            self._quiet.error("the dashboard's viewers get no further events", error)
            self.end()

    async def _make(self, last_number: int) -> tuple[int, bytes, float]:
        """Make the next message.

        Args:
            last_number: Number of the last answer in the previous message.

        Returns:
            The number of the last answer in the message, the message, and the seconds until the next message.
        """
        raise NotImplementedError

    def _newest(self) -> int:
        raise NotImplementedError

    def _begin(self) -> int:
        """Return the number of the newest answer before the first message, so that the first viewer receives only
        later answers.
        """
        return self._newest()

    def _patience(self) -> float:
        """Return the seconds after which the next message must be sent, even if no answer has come."""
        return 3600.0

    def _left(self) -> None:
        """Free the stored data of the messages, because the last viewer has disconnected."""

    async def _news(self, last_number: int) -> None:
        """Wait until a message is due. To disturb no robot, prefer a time just after a reply, or a time without a
        running inference.

        Args:
            last_number: Number of the last answer in the previous message.
        """
        after_a_reply = await self._listen(self._patience(), last_number)
        if not after_a_reply and self._busy():
            await self._listen(PATIENCE_S)

    def _busy(self) -> bool:
        stats = self._service.policies.stats()
        return bool(stats["waiting"] or stats["running"])

    async def _listen(self, seconds: float, last_number: int | None = None) -> bool:
        """Return True if an answer came within ``seconds``. Do not wait if there is an answer after
        ``last_number``.
        """
        self._rung.clear()
        self._listening = True
        try:
            if seconds > 0 and (last_number is None or self._newest() == last_number):
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(seconds):
                        return await self._rung.wait()
            return False
        finally:
            self._listening = False

    def _ring(self, loop: asyncio.AbstractEventLoop) -> None:
        """Wake the event loop if it waits for answers. The scheduler's threads call this method."""
        if self._listening:
            self._listening = False
            with contextlib.suppress(RuntimeError):  # the event loop has ended
                loop.call_soon_threadsafe(self._rung.set)


class HealthBroadcast(Broadcast):
    """Sends two kinds of events to the viewers: ``answers`` after new answers, and ``health`` every two seconds."""

    def __init__(self, service: Service, feed: Feed):
        super().__init__(service, feed)
        self._host = Host()
        # (Time, number of the deployment, encoded event) of the last health event.
        self._health: tuple[float, int, bytes] = (float("-inf"), 0, b"")

    def health(self) -> bytes:
        """Return the event of the server's health with the present policy. An event is at most :data:`HEALTH_S` old."""
        now, policy = time.monotonic(), self._service.policies.get().number
        if now >= self._health[0] + HEALTH_S or policy != self._health[1]:
            service = self._service
            record = {"memory_bytes": _resident(), "viewers": self._feed.viewers, "host": self._host.look()}
            if (wiring := self._feed.wiring) is not None:
                record["wiring"] = wiring.report()
            record["robots"] = service.robots.rows()
            self._health = now, policy, encoded("health", service.health() | record)
        return self._health[2]

    async def _make(self, last_number: int) -> tuple[int, bytes, float]:
        new = self._feed.since(last_number)
        message = self._answers(records(new)) if new else b""
        if self._patience() <= 0:
            message += self.health()
        return new[-1].number if new else last_number, message, EVENTS_S

    def _answers(self, answers: list[dict[str, Any]]) -> bytes:
        """Return the event of these answers, without answers that cannot be written as JSON."""
        try:
            return encoded("answers", answers)
        except SinewError as error:
            self._quiet.warning(
                "an answer is missing on the dashboard, because it cannot be written as JSON: %s", error
            )
        written = [each for each in answers if _can_be_written(each)]
        return encoded("answers", written) if written else b""

    def _newest(self) -> int:
        return self._feed.newest

    def _left(self) -> None:
        if (wiring := self._feed.wiring) is not None:
            wiring.forget()

    def _patience(self) -> float:
        return self._health[0] + HEALTH_S - time.monotonic()


class Pictures(Broadcast):
    """Sends the events ``frames`` to the viewers: the camera frames of the newest answer as JPEG files. The event
    loop's thread pool makes the files.
    """

    behind = 1  # viewers need only the newest pictures

    async def _make(self, last_number: int) -> tuple[int, bytes, float]:
        return await asyncio.get_running_loop().run_in_executor(None, self._pictures, last_number)

    def _begin(self) -> int:
        # Number 0 is older than all answers, so a new viewer receives the last frames at once.
        return 0

    def _pictures(self, last_number: int) -> tuple[int, bytes, float]:
        pictures = self._feed.pictures()
        # No newer answer has frames, or the rate does not allow newer pictures yet.
        if pictures.number == last_number:
            return last_number, b"", max(EVENTS_S, pictures.until - time.perf_counter())
        files = {name: base64.b64encode(file).decode() for name, file in pictures.files.items()}
        message = encoded("frames", {"number": pictures.number, "cameras": files}) if files else b""
        return pictures.number, message, max(EVENTS_S, pictures.until - time.perf_counter())

    def _newest(self) -> int:
        return self._feed.newest_frames


def records(answers: Sequence[Answer]) -> list[dict[str, Any]]:
    """Convert answers to values for JSON, for the messages to the dashboard.

    Only the newest chunk of a robot has its numbers and its age. A chunk that a person requested on the page does not
    count.
    """
    shown = max(
        (
            each.number
            for each in answers
            if not isinstance(each.outcome, SinewError)
            and len(each.outcome.actions)
            and each.session != BY_HAND
        ),
        default=0,
    )
    rows = [each.to_dict(actions=each.number == shown) for each in answers]
    for record in rows:
        if record["number"] == shown:
            record["age"] = round(max(0.0, time.time() - record["time"]), 3)
    return rows


def _resident() -> int:
    nbytes = machine.resident_bytes()
    return nbytes.get("now", nbytes["peak"])


def _can_be_written(record: dict[str, Any]) -> bool:
    try:
        encoded("answers", record)
    except SinewError:
        return False
    return True


def encoded(event: str, record: Any) -> bytes:
    """Return a server-sent event as bytes.

    Raises:
        SinewError: The record cannot be written as JSON, because a number is NaN or infinite.
    """
    try:
        text = json.dumps(record, allow_nan=False, separators=(",", ":"))
    except ValueError as error:  # the record contains NaN or infinity
        raise SinewError(f"event {event}: {error}") from None
    return f"event: {event}\ndata: {text}\n\n".encode()
