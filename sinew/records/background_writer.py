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

BACKLOG = 32  # records that may wait; beyond, they are dropped and counted
BACKLOG_BYTES = 256 << 20  # most bytes of frames in waiting records
CLOSE_S = 5.0  # how long closing waits for what takes them
RETRY_S = 10.0  # after a failure of what takes them, until it is tried again


class Entry(NamedTuple):
    """One request and its answer. when: seconds since the epoch. server: what it said of itself then. by: who drove the
    robot, of a control step (option ``--frames`` of ``sinew run``). policy: which one of a server's was asked; "": the
    first."""

    when: float
    wire: str
    session: str
    observation: Observation
    outcome: ActionChunk | SinewError
    server: Mapping[str, Any]
    by: str = ""
    policy: str = ""


class BackgroundWriter(ABC):
    """A bounded queue of records and the thread that writes them. What is too slow costs records, never latency.

    name: of the thread. goal: what takes the records, for messages ("the disk").
    """

    def __init__(self, name: str, goal: str):
        self._goal = goal
        self._written = self._dropped = self._failed = 0
        self._waiting_bytes = 0
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
        """Keep one request and its answer, as :class:`Entry` has them. Never blocks."""
        try:
            if self._waiting_bytes > BACKLOG_BYTES:
                raise Full
            entry = Entry(time.time(), wire, session, observation, outcome, server, by, policy)
            self._queue.put_nowait(entry)
            self._waiting_bytes += _size(observation)
        except Full:
            self._dropped += 1
            self._quiet.warning("%s is slower than the requests: records are being dropped", self._goal)

    def describe(self, spec: PolicySpec) -> None:  # noqa: B027 - most need none
        """Take names and rates of the policy, before its first request."""

    @property
    def full(self) -> bool:
        """Return whether nothing more is taken, for good."""
        return False

    def stats(self) -> dict[str, int | bool]:
        """Return records written, dropped for lack of time, failed; is the limit reached; does the thread live."""
        return {
            "written": self._written,
            "dropped": self._dropped,
            "failed": self._failed,
            "full": self.full,
            "alive": self._thread.is_alive(),
        }

    def close(self) -> None:
        """Write what is there, as far as it is taken in a few seconds."""
        self._closing.set()
        with contextlib.suppress(Full):  # the loop looks at the flag as well
            self._queue.put_nowait(None)
        self._thread.join(CLOSE_S)
        if self._dropped or self._failed:
            self._logger.warning("%d records were dropped and %d failed", self._dropped, self._failed)

    @abstractmethod
    def _write(self, entry: Entry) -> None:
        """Write one record, on the thread. Raises OSError where nothing can be written for a while."""

    def _end(self) -> None:  # noqa: B027 - most need none
        """Finish what was written; on the thread, after the last record."""

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
            self._waiting_bytes -= _size(entry.observation)
            if self.full:
                continue
            if time.monotonic() < self._retry_at:
                self._failed += 1
                continue
            try:
                self._write(entry)
                self._written += 1
            except OSError as error:  # the disk is full, or gone
                self._failed += 1
                self._retry_at = time.monotonic() + RETRY_S
                self._quiet.warning("a record could not be written: %s", error)
            except Exception as error:  # noqa: BLE001 - what a client sent must not end recording
                self._failed += 1
                self._quiet.error("a record could not be made", error)
            if self.full:
                self._logger.warning("recording has ended: the limit is reached")
            del entry


def _size(observation: Observation) -> int:
    return sum(np.asarray(frame).nbytes for moment in observation.moments for frame in moment.images.values())
