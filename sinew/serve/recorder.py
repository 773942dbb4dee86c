"""Requests and replies on disk, one ``.npz`` file each, so that a problem in the field can be replayed at a desk.

A file holds ``images/<camera>``, ``state`` and, where they came, ``noise``, ``tokens`` and ``previous``; ``actions``
or nothing; and ``meta``, a JSON text with the rest: prompt, seed, wire, session, times, the error if there was one, and
``server``, what decided the last bits of the answer (:mod:`sinew.serve.arithmetic`), which older files lack.
numpy reads it without pickle.
"""

from __future__ import annotations

import json
import os
import re
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sinew import scratch
from sinew.core import Observation, SinewError
from sinew.serve import arithmetic
from sinew.serve.backlog import Backlog, Entry

MAX_NAME = 256  # bytes of a camera's name in a file
_CONTINUATION = ("delay", "horizon", "rtc", "schedule", "beta")  # older records have none of these
_PLAIN = ("prompt", "solver_steps", "session", "time", *_CONTINUATION)
_ARRAYS = ("noise", "tokens", "previous")


@dataclass(frozen=True, slots=True)
class Record:
    """observation: with the seed that drew the noise, so that it gives the same actions again.
    actions: None where the reply was the error in ``error`` ([code] message). server: what decided its bits; empty in
    files of before 2026-11-23."""

    path: Path
    wire: str
    observation: Observation
    actions: np.ndarray | None
    error: str
    meta: dict[str, Any]
    server: dict[str, Any]


class Recorder(Backlog):
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
        scratch.sweep(directory, re.compile(r"\d+\.part"))  # of one that was killed
        self.directory = directory
        self._left = limit_bytes
        self._number = max(numbers, default=0)
        super().__init__("sinew-record", "the disk")

    @property
    def full(self) -> bool:
        """Return whether the limit is reached."""
        return self._left <= 0

    def _write(self, entry: Entry) -> None:
        when, wire, session, observation, outcome, server = entry
        arrays: dict[str, Any] = {
            f"images/{name[:MAX_NAME]}": np.asarray(frame) for name, frame in observation.images.items()
        }
        arrays["state"] = np.asarray(observation.state)
        for name in _ARRAYS:
            if getattr(observation, name) is not None:
                arrays[name] = np.asarray(getattr(observation, name))
        meta = {"recorded": when, "wire": wire, **{name: getattr(observation, name) for name in _PLAIN}}
        meta["session"] = session or observation.session
        if server:
            meta["server"] = arithmetic.kept(server)
        if isinstance(outcome, SinewError):
            meta |= {"error": f"[{outcome.code}] {outcome}", "seed": observation.seed}
        else:
            arrays["actions"] = outcome.actions
            meta |= {"seed": outcome.seed, "total_ms": outcome.timing.total_ms}
        arrays["meta"] = np.array(json.dumps(meta))
        if strange := [name for name, each in arrays.items() if np.asarray(each).dtype.hasobject]:
            raise ValueError(f"{strange[0]}: expected numbers or text")
        part, path, held = self._claim()
        try:
            with part.open("wb") as file:
                np.savez(file, **arrays)  # plain dtypes only: nothing is pickled
                size = file.tell()
            part.rename(path)  # a kill leaves no half file under the real name
            self._left -= size
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        finally:
            if held is not None:
                os.close(held)

    def _claim(self) -> tuple[Path, Path, int | None]:
        """An empty file, its later name with the next number that nobody has, not even another recorder, and what
        says to others that it is being written (:func:`sinew.scratch.hold`)."""
        while True:
            self._number += 1
            path = self.directory / f"{self._number:08d}.npz"
            part = path.with_suffix(".part")
            try:
                part.open("xb").close()
            except FileExistsError:
                continue
            held = scratch.hold(part)
            if scratch.there(part, held) and not path.exists():
                return part, path, held
            part.unlink(missing_ok=True)
            if held is not None:
                os.close(held)


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
        error, said = meta.get("error", ""), dict(meta.get("server", {}))
        server = arithmetic.kept(said) if said else {}
        return Record(path, meta["wire"], observation, arrays.get("actions"), error, meta, server)
    except _NO_RECORD as error:
        raise SinewError(f"{path}: not a record ({type(error).__name__}: {error})") from error
