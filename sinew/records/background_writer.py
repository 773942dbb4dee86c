"""Write requests and their answers on a separate thread, so that slow storage never delays the server."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from queue import Empty, Full, Queue
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from sinew.core import ActionChunk, Observation, PolicySpec, SinewError
from sinew.core.rate_limited_log import RateLimitedLog

BACKLOG = 32  # the queue has at most this many records; further records are dropped and counted
BACKLOG_BYTES = 256 << 20  # the frames of waiting records may have at most this many bytes
CLOSE_S = 5.0  # `close` waits at most this many seconds for the remaining records
RETRY_S = 10.0  # after a failure, writing is tried again after this many seconds


class Entry(NamedTuple):
    """One request and its answer.

    Attributes:
        when: Seconds since the epoch.
        wire: Protocol of the request.
        session: Session of the client.
        observation: The request.
        outcome: The answer.
        server: The server's metadata at that time.
        by: Who drove the robot in this control step (``sinew run --frames``).
        policy: Name of the requested policy; "" for the server's first policy.
    """

    when: float
    wire: str
    session: str
    observation: Observation
    outcome: ActionChunk | SinewError
    server: Mapping[str, Any]
    by: str = ""
    policy: str = ""


class BackgroundWriter(ABC):
    """A bounded queue of records, and a thread that writes them. A slow target loses records, but never delays answers.

    Args:
        name: Name of the thread.
        goal: The target of the records, for messages ("the disk").
    """

    def __init__(self, name: str, goal: str):
        self._goal = goal
        self._written = self._dropped = self._failed = 0
        self._lock = threading.Lock()  # several threads add records, and the writer's thread takes them
        self._waiting_bytes = 0  # the caller must have locked `_lock`
        self._retry_at = 0.0
        self._logger = logging.getLogger(type(self).__module__)
        self._quiet = RateLimitedLog(self._logger)
        self._closing = threading.Event()
        self._queue: Queue[Entry | None] = Queue(BACKLOG)
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()

    def put(
        self,
        wire: str,
        session: str,
        observation: Observation,
        outcome: ActionChunk | SinewError,
        server: Mapping[str, Any] = MappingProxyType({}),
        by: str = "",
        policy: str = "",
    ) -> None:
        """Queue one request and its answer. Never blocks. The arguments are those of :class:`Entry`."""
        entry = Entry(time.time(), wire, session, observation, outcome, server, by, policy)
        size = _size(observation)
        try:
            with self._lock:
                if self._waiting_bytes > BACKLOG_BYTES:
                    raise Full
                self._queue.put_nowait(entry)
                self._waiting_bytes += size
        except Full:
            self._dropped += 1
            self._quiet.warning("%s is too slow for the requests, so records are being dropped", self._goal)

    def describe(self, spec: PolicySpec) -> None:  # noqa: B027 - most subclasses need none
        """Receive the policy's specification (names of joints, control rate) before its first request."""

    @property
    def full(self) -> bool:
        """Return True if no more records are accepted."""
        return False

    def stats(self) -> dict[str, int | bool]:
        """Return the counters of the writer: the numbers of written, dropped and failed records, whether the limit is
        reached, and whether the thread is alive.
        """
        return {
            "written": self._written,
            "dropped": self._dropped,
            "failed": self._failed,
            "full": self.full,
            "alive": self._thread.is_alive(),
        }

    def close(self) -> None:
        """Write the waiting records, as many as possible in a few seconds, and end the thread."""
        self._closing.set()
        # Put the value None into the queue to wake the thread. If the queue is full, the thread is awake and checks the
        # event `_closing` soon.
        with contextlib.suppress(Full):
            self._queue.put_nowait(None)
        self._thread.join(CLOSE_S)
        if self._dropped or self._failed:
            self._logger.warning("%d records were dropped and %d failed", self._dropped, self._failed)

    @abstractmethod
    def _write(self, entry: Entry) -> None:
        """Write one record. The writer's own thread calls this method.

        Raises:
            OSError: Writing is impossible at present, for example because the disk is full. The writer tries again
                later.
        """

    def _end(self) -> None:  # noqa: B027 - most subclasses need none
        """Complete the target after the last record. The writer's own thread calls this method."""

    def _loop(self) -> None:
        try:
            self._take()
        finally:
            self._end()

    def _take(self) -> None:
        while True:
            try:
                entry = self._queue.get(timeout=0.5)
            except Empty:
                if self._closing.is_set():
                    return
                continue
            if entry is None:
                return
            size = _size(entry.observation)
            with self._lock:
                self._waiting_bytes -= size
            if self.full:
                continue
            if time.monotonic() < self._retry_at:
                self._failed += 1
                continue
            try:
                self._write(entry)
                self._written += 1
            # The disk is full or was removed, so writing is tried again later.
            except OSError as error:
                self._failed += 1
                self._retry_at = time.monotonic() + RETRY_S
                self._quiet.warning("a record could not be written, trying again in %g s: %s", RETRY_S, error)
            except Exception as error:  # noqa: BLE001 - a client's bad data must not end recording
                self._failed += 1
                self._quiet.error("a record could not be created", error)
            if self.full:
                self._logger.warning("recording has ended, because the size limit is reached")
            del entry


def _size(observation: Observation) -> int:
    return sum(np.asarray(frame).nbytes for moment in observation.moments for frame in moment.images.values())
