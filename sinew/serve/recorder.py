"""Requests and replies on disk, one ``.npz`` file each, so that a problem in the field can be replayed at a desk.

A file holds ``images/<camera>``, ``state`` and, where they came, ``noise``, ``tokens`` and ``previous``; ``actions``
or nothing; and ``meta``, a JSON text with the rest: prompt, seed, wire, session, times, the error if there was one.
numpy reads it without pickle.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, Full, Queue
from typing import Any

import numpy as np

from sinew.core import ActionChunk, Observation, SinewError
from sinew.serve.quiet import Quiet

logger = logging.getLogger(__name__)

BACKLOG = 32  # records that may wait for the disk; beyond, they are dropped and counted
BACKLOG_BYTES = 256 << 20  # of the frames in them
CLOSE_S = 5.0  # how long closing waits for the disk
RETRY_S = 10.0  # after a failure of the disk, until it is tried again
MAX_NAME = 256  # bytes of a camera's name in a file
_CONTINUATION = ("delay", "horizon", "rtc", "schedule", "beta")  # older records have none of these
_PLAIN = ("prompt", "solver_steps", "session", "time", *_CONTINUATION)
_ARRAYS = ("noise", "tokens", "previous")


@dataclass(frozen=True, slots=True)
class Record:
    """observation: with the seed that drew the noise, so that it gives the same actions again.
    actions: None where the reply was the error in ``error`` ([code] message)."""

    path: Path
    wire: str
    observation: Observation
    actions: np.ndarray | None
    error: str
    meta: dict[str, Any]


class Recorder:
    """Writes from a thread of its own; a slow disk costs records, never latency.

    limit_bytes: of all files together; recording ends there with a warning. A full disk ends nothing: it is tried
    again. Two recorders may share a folder.
    """

    def __init__(self, directory: Path, limit_bytes: int = 8 << 30):
        try:
            directory.mkdir(parents=True, exist_ok=True)
            numbers = [int(path.stem) for path in directory.glob("*.npz") if path.stem.isdigit()]
        except OSError as error:
            raise SinewError(f"--record {directory}: {error.strerror}") from error
        self.directory = directory
        self._left = limit_bytes
        self._number = max(numbers, default=0)
        self._written = self._dropped = self._failed = 0
        self._waiting_bytes = 0
        self._retry_at = 0.0
        self._quiet = Quiet(logger)
        self._closing = threading.Event()
        self._queue: Queue[tuple[Any, ...] | None] = Queue(BACKLOG)
        self._thread = threading.Thread(target=self._loop, name="sinew-record", daemon=True)
        self._thread.start()

    def put(
        self, wire: str, session: str, observation: Observation, outcome: ActionChunk | SinewError
    ) -> None:
        """Keep one request and its answer. Never blocks."""
        try:
            if self._waiting_bytes > BACKLOG_BYTES:
                raise Full
            self._queue.put_nowait((time.time(), wire, session, observation, outcome))
            self._waiting_bytes += _size(observation)
        except Full:
            self._dropped += 1
            self._quiet.warning("the disk is slower than the requests: records are being dropped")

    def stats(self) -> dict[str, int | bool]:
        """Records written, dropped for lack of time, failed; whether the limit was reached; the thread's life."""
        return {
            "written": self._written,
            "dropped": self._dropped,
            "failed": self._failed,
            "full": self._left <= 0,
            "alive": self._thread.is_alive(),
        }

    def close(self) -> None:
        """Write what is there, as far as the disk takes it in a few seconds."""
        self._closing.set()
        with contextlib.suppress(Full):  # the loop looks at the flag as well
            self._queue.put_nowait(None)
        self._thread.join(CLOSE_S)
        if self._dropped or self._failed:
            logger.warning("%d records were dropped and %d failed", self._dropped, self._failed)

    def _loop(self) -> None:
        while True:
            try:
                entry = self._queue.get(timeout=0.5)
            except Empty:
                if self._closing.is_set():
                    return
                continue
            if entry is None:
                return
            self._waiting_bytes -= _size(entry[3])
            if self._left <= 0:
                continue
            if time.monotonic() < self._retry_at:
                self._failed += 1
                continue
            try:
                self._write(*entry)
                self._written += 1
            except OSError as error:  # the disk is full, or gone
                self._failed += 1
                self._retry_at = time.monotonic() + RETRY_S
                self._quiet.warning("a record could not be written: %s", error)
            except Exception as error:  # noqa: BLE001 - what a client sent must not end recording
                self._failed += 1
                self._quiet.error("a record could not be made", error)
            if self._left <= 0:
                logger.warning("recording has ended: the limit is reached")
            del entry

    def _write(
        self,
        when: float,
        wire: str,
        session: str,
        observation: Observation,
        outcome: ActionChunk | SinewError,
    ) -> None:
        arrays: dict[str, Any] = {
            f"images/{name[:MAX_NAME]}": np.asarray(frame) for name, frame in observation.images.items()
        }
        arrays["state"] = np.asarray(observation.state)
        for name in _ARRAYS:
            if getattr(observation, name) is not None:
                arrays[name] = np.asarray(getattr(observation, name))
        meta = {"recorded": when, "wire": wire, **{name: getattr(observation, name) for name in _PLAIN}}
        meta["session"] = session or observation.session
        if isinstance(outcome, SinewError):
            meta |= {"error": f"[{outcome.code}] {outcome}", "seed": observation.seed}
        else:
            arrays["actions"] = outcome.actions
            meta |= {"seed": outcome.seed, "total_ms": outcome.timing.total_ms}
        arrays["meta"] = np.array(json.dumps(meta))
        if strange := [name for name, each in arrays.items() if np.asarray(each).dtype.hasobject]:
            raise ValueError(f"{strange[0]}: expected numbers or text")
        part, path = self._claim()
        try:
            with part.open("wb") as file:
                np.savez(file, **arrays)  # plain dtypes only: nothing is pickled
                size = file.tell()
            part.rename(path)  # a kill leaves no half file under the real name
            self._left -= size
        except BaseException:
            part.unlink(missing_ok=True)
            raise

    def _claim(self) -> tuple[Path, Path]:
        """An empty file, and its later name with the next number that nobody has, not even another recorder."""
        while True:
            self._number += 1
            path = self.directory / f"{self._number:08d}.npz"
            part = path.with_suffix(".part")
            try:
                part.open("xb").close()
            except FileExistsError:
                continue
            if not path.exists():
                return part, path
            part.unlink()


def _size(observation: Observation) -> int:
    return sum(np.asarray(frame).nbytes for frame in observation.images.values())


def read_records(directory: Path) -> Iterator[Record]:
    """The records of a folder, oldest first. Raises :class:`SinewError` for a file that is none."""
    paths = sorted(directory.glob("*.npz"))
    if not paths:
        raise SinewError(f"{directory}: no records (*.npz) there")
    return (read_record(path) for path in paths)  # the folder is looked at now, its files one by one


_NO_RECORD = (  # RuntimeError: encrypted; NotImplementedError, one of its kinds: methods and versions of zip
    *(OSError, ValueError, KeyError, TypeError, EOFError, RuntimeError, MemoryError),
    *(zipfile.BadZipFile, zlib.error),
)


def read_record(path: Path) -> Record:
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        meta = json.loads(str(arrays["meta"]))
        observation = Observation(
            images={name[7:]: frame for name, frame in arrays.items() if name.startswith("images/")},
            state=arrays["state"],
            noise=arrays.get("noise"),
            tokens=arrays.get("tokens"),
            previous=arrays.get("previous"),
            seed=meta["seed"],
            **{name: meta.get(name) if name in _CONTINUATION else meta[name] for name in _PLAIN},
        )
        return Record(path, meta["wire"], observation, arrays.get("actions"), meta.get("error", ""), meta)
    except _NO_RECORD as error:
        raise SinewError(f"{path}: not a record ({type(error).__name__}: {error})") from error
