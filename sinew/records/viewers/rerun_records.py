"""Show a server's requests and answers in Rerun: from records, or while they happen (``sinew serve --rerun``)."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np

from sinew.core import Observation, PolicySpec, SinewError, VectorSpec, scratch
from sinew.records import parts
from sinew.records.background_writer import BackgroundWriter, Entry
from sinew.records.recorder import Record
from sinew.records.viewers.rerun_log import RerunLog

MAX_SESSIONS = 16  # this many sessions have their own entities; all further sessions share one
MAX_SESSION = 128  # characters of a session's name that are used; the server has the same limit
OTHERS = "others"


class Answers:
    """Writes requests and answers to a Rerun log.

    The entities are ``camera/NAME`` (pictures), ``state/JOINT`` and ``action/JOINT`` (numbers over time),
    ``latency_ms``, and the texts ``prompt`` and ``error``. The timelines are ``wall``, seconds of the server's clock,
    and ``answer``, the number of the request. The first session has these entities. Any other session has them under
    ``session/NAME``.

    Args:
        log: The log.
        hz: Control rate. The actions of a chunk are then at the times of their execution, up to the next answer of
            their session. None shows only the first action of each chunk.
        state: Names of the state's joints.
        action: Names of the action's joints.
    """

    def __init__(
        self,
        log: RerunLog,
        *,
        hz: float | None = None,
        state: VectorSpec | None = None,
        action: VectorSpec | None = None,
    ):
        self._log = log
        self._hz = hz
        self._state = () if state is None else tuple(state.names)
        self._action = () if action is None else tuple(action.names)
        self._number = 0
        self._roots: dict[str, tuple[str, ...]] = {}
        # Key: prefix of a session's entities. Value: time and actions of the session's last chunk.
        self._running: dict[tuple[str, ...], tuple[float, np.ndarray]] = {}

    def add(
        self,
        when: float,
        session: str,
        observation: Observation,
        actions: np.ndarray | None,
        error: str = "",
        total_ms: float | None = None,
    ) -> None:
        """Log one request and its answer.

        Args:
            when: Seconds since the epoch.
            session: Session of the client.
            observation: The request.
            actions: Actions of the answer; None if there are none.
            error: Error of the answer; "" if there is none.
            total_ms: Latency in milliseconds; None if unknown.

        Raises:
            OSError: The viewer does not answer.
        """
        log, root = self._log, self._root(session)
        log.at(when, answer=self._number)
        if not self._number:
            log.arrange(root, observation.images, ("action", "state", "latency_ms"))
        self._number += 1
        log.pictures(root, observation.images)
        log.values(root, "state", self._state, observation.state)
        log.text(root, "prompt", str(observation.prompt))
        if error:
            log.text(root, "error", error, level="ERROR")
        if total_ms is not None:
            log.number(root, "latency_ms", total_ms)
        if actions is not None and len(actions):
            self._finish(root, when)
            log.values(root, "action", self._action, actions[0])
            self._running[root] = when, actions

    def end(self) -> None:
        """Log the remaining actions of the last chunk of each session. Call this method after the last request."""
        for root in list(self._running):
            self._finish(root, np.inf)

    def _finish(self, root: tuple[str, ...], now: float) -> None:
        """Log the actions of a session's last chunk that were due before ``now``."""
        begun, actions = self._running.pop(root, (now, np.zeros((0, 0))))
        if self._hz is None:
            return
        times = begun + np.arange(len(actions)) / self._hz
        due = (times < now) & (times > begun)  # the first action was already logged with its chunk
        self._log.rows(root, "action", self._action, times[due], actions[due])

    def _root(self, session: str) -> tuple[str, ...]:
        if session not in self._roots and len(self._roots) >= MAX_SESSIONS:
            return ("session", OTHERS)
        return self._roots.setdefault(session, ("session", session or "none") if self._roots else ())


def write_rrd(
    records: Iterable[Record],
    out: Path,
    *,
    hz: float | None = None,
    state: VectorSpec | None = None,
    action: VectorSpec | None = None,
) -> dict[str, int]:
    """Write records to a Rerun recording, and return the number of entries of each entity.

    Args:
        records: The records.
        out: The new file.
        hz: Rate of the actions, as for :class:`Answers`.
        state: Names of the state's joints.
        action: Names of the action's joints.

    Raises:
        MissingPackageError: rerun-sdk is not installed.
        SinewError: The file exists already.
    """
    if os.path.lexists(out):
        raise SinewError(f"{out}: the file already exists; choose a new one")
    try:
        with scratch.beside(out) as folder:
            partial = folder / out.name
            log = RerunLog(partial)
            try:
                _write(records, Answers(log, hz=hz, state=state, action=action))
            finally:
                log.close()
            partial.rename(out)
    except OSError as error:
        raise SinewError(f"{out}: {error.strerror or error}") from error
    return log.counts


def _write(records: Iterable[Record], answers: Answers) -> None:
    for record in records:
        total_ms, seen = record.meta.get("total_ms"), record.observation
        images = {_camera(record, name): parts.pixels(record, name) for name in seen.images}
        answers.add(
            parts.seconds(record, "recorded", record.meta.get("recorded")),
            str(record.meta.get("session") or "")[:MAX_SESSION],
            replace(seen, images=images, state=parts.numbers(record)),
            parts.rows(record),
            str(record.error),
            None if total_ms is None else parts.seconds(record, "total_ms", total_ms),
        )
    answers.end()


def _camera(record: Record, name: str) -> str:
    if not name.isprintable() or not name:
        raise SinewError(f"{record.path}: images: expected printable names of cameras, got {name[:80]!r}")
    return name


class RerunRecorder(BackgroundWriter):
    """Writes to a file or a viewer on its own thread. A slow viewer loses records, but never delays answers.

    If a viewer is closed, the recorder tries to connect again every ten seconds.

    Args:
        target: The result of :func:`target_of`.

    Raises:
        MissingPackageError: rerun-sdk is not installed.
        SinewError: The file cannot be created, or no viewer answers.
    """

    def __init__(self, target: Path | str):
        self.log = RerunLog(target)
        self._answers = Answers(self.log)
        super().__init__("sinew-rerun", "the viewer" if self.log.live else "the disk")

    def describe(self, spec: PolicySpec) -> None:
        """Receive the policy's specification (names of joints, control rate) before its first request."""
        self._answers = Answers(self.log, hz=spec.control_hz, state=spec.state, action=spec.action)

    def close(self) -> None:
        """Send the waiting entries, as many as possible in a few seconds, and end the thread."""
        super().close()
        if self._thread.is_alive():
            self.log.abandon()

    def _write(self, entry: Entry) -> None:
        when, _, session, observation, outcome, *_ = entry
        name = session or observation.session
        if isinstance(outcome, SinewError):
            self._answers.add(when, name, observation, None, f"[{outcome.code}] {outcome}")
        else:
            self._answers.add(when, name, observation, outcome.actions, "", outcome.timing.total_ms)
        self.log.send()

    def _end(self) -> None:
        with contextlib.suppress(OSError):  # the viewer may have been closed
            self._answers.end()
        self.log.close()
