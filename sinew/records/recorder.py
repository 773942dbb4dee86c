"""Requests and replies on disk, one ``.npz`` file each, so that a problem in the field can be replayed at a desk.

A file holds ``images/<camera>``, ``state`` and, where they came, ``noise``, ``tokens``, ``previous`` and the moments
before as ``earlier/<0, 1 ...>/images/<camera>`` and ``earlier/<0, 1 ...>/state``, oldest first; ``actions`` or nothing;
and ``meta``, a JSON text with the rest: prompt, seed, wire, session, times, which words were asked for and the ``text``
that was said, the ``policy`` that was named, the error if there was one, whether the answer was a ``context``, which is
not kept, who drove the robot (``by``, of the option ``--frames`` of ``sinew run``, where a record is a control step and
its action the command, and ``names`` of the numbers of both), and ``server``, what decided the last bits of the answer
(:mod:`sinew.records.arithmetic`), which older files lack. numpy reads it without pickle.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from sinew_client.untrusted import Npz, UntrustedError, open_npz, parse_json
from sinew_client.untrusted.archives import MAX_ARRAYS, MAX_UNPACKED

from sinew.core import (
    CONDITIONS,
    CONTINUATION,
    MAX_HISTORY,
    MAX_SIZE,
    WORDS,
    Moment,
    Observation,
    SinewError,
    scratch,
)
from sinew.records import arithmetic
from sinew.records.background_writer import BackgroundWriter, Entry

MAX_NAME = 256  # characters of a camera's name in a file
MAX_META = 1 << 20  # characters of JSON; a prompt of 65,536 takes at most 786,432
MAX_NUMBERS = 1 << 20  # most numbers of actions, noise, tokens or previous
_ARRAYS = ("noise", "tokens", "previous")
_ASKED = ("prompt", "solver_steps", "session", "time", "adapter", *CONDITIONS)
_PLAIN = (*_ASKED, *(name for name in CONTINUATION if name not in _ARRAYS))
_EARLIER = re.compile(r"^earlier/\d{1,2}/")  # before the name of an array of an earlier moment


@dataclass(frozen=True, slots=True)
class Record:
    """observation: with the seed that drew the noise, so that it gives the same actions again.
    actions: None where the reply was the error in ``error`` ([code] message), or words alone, or a context. server:
    what decided its bits; empty in files of before 2026-11-23. by: who drove, of a control step of the
    option ``--frames`` of ``sinew run``, whose numbers have ``names``. policy: which one of its server's was asked; "":
    the first. text: the words of the reply. context: it was one, which is not kept: it may be megabytes."""

    path: Path
    wire: str
    observation: Observation
    actions: np.ndarray | None
    error: str
    meta: dict[str, Any]
    server: dict[str, Any]
    by: Literal["", "policy", "human"] = ""
    policy: str = ""
    names: Mapping[str, list[str]] = field(default_factory=dict)
    text: str = ""
    context: bool = False


class _Meta(msgspec.Struct):
    """The types of the fields of ``meta``.

    Attributes:
        recorded: Seconds since the epoch. MCAP stores them in nanoseconds, which bounds them.
    """

    recorded: Annotated[float, msgspec.Meta(ge=0, le=9e9)]
    wire: str
    prompt: str
    session: str
    solver_steps: int | None
    seed: int | None
    time: float | None
    error: str = ""
    total_ms: Annotated[float, msgspec.Meta(ge=0)] | None = None
    delay: int | None = None
    horizon: int | None = None
    rtc: str | None = None
    schedule: str | None = None
    beta: float | None = None
    subtask: bool = False
    question: str = ""
    text_only: bool = False
    text_tokens: int | None = None
    text: str = ""
    context: bool = False
    adapter: str = ""
    advantage: str | None = None
    guidance_scale: float | None = None
    by: Literal["", "policy", "human"] = ""
    policy: str = ""
    names: dict[Literal["state", "action"], list[str]] = {}
    server: dict[str, Any] = {}


class Recorder(BackgroundWriter):
    """Writes from a thread of its own; a slow disk costs records, never latency.

    limit_bytes: of all files together; recording ends there with a warning. A full disk ends nothing: it is tried
    again. Two recorders may share a folder. names: of the numbers of ``state`` and ``action``, kept in each record.
    """

    def __init__(
        self,
        directory: Path,
        limit_bytes: int = 8 << 30,
        names: Mapping[str, Sequence[str]] = MappingProxyType({}),
    ):
        with SinewError.at(f"--record {directory}", OSError):
            directory.mkdir(parents=True, exist_ok=True)
            numbers = [int(path.stem) for path in directory.glob("*.npz") if path.stem.isdigit()]
        scratch.sweep(directory, re.compile(r"\d+\.part"))  # left by a recorder that was killed
        self.directory = directory
        self._left, self._names = limit_bytes, {part: list(each) for part, each in names.items() if each}
        self._number = max(numbers, default=0)
        super().__init__("sinew-record", "the disk")

    @property
    def full(self) -> bool:
        """Return whether the limit is reached."""
        return self._left <= 0

    def _write(self, entry: Entry) -> None:
        when, wire, session, observation, outcome, server, by, policy = entry
        arrays: dict[str, Any] = {}
        for index, moment in enumerate(observation.moments, start=-len(observation.earlier)):
            prefix = f"earlier/{index + len(observation.earlier)}/" if index else ""
            for name, frame in moment.images.items():
                arrays[f"{prefix}images/{name[:MAX_NAME]}"] = np.asarray(frame)
            arrays[f"{prefix}state"] = np.asarray(moment.state)
        for name in _ARRAYS:
            if getattr(observation, name) is not None:
                arrays[name] = np.asarray(getattr(observation, name))
        meta = {"recorded": when, "wire": wire, **{name: getattr(observation, name) for name in _PLAIN}}
        meta["session"] = session or observation.session
        meta |= {name: said for name, said in (("by", by), ("policy", policy)) if said}
        if self._names:
            meta["names"] = self._names
        if observation.asks:
            meta |= {name: getattr(observation, name) for name in WORDS}
        if server:
            meta["server"] = arithmetic.kept(server)
        if isinstance(outcome, SinewError):
            meta |= {"error": f"[{outcome.code}] {outcome}", "seed": observation.seed}
        else:
            if len(outcome.actions):
                arrays["actions"] = outcome.actions
            if outcome.context:
                meta["context"] = True
            meta |= {"seed": outcome.seed, "total_ms": outcome.timing.total_ms}
            if observation.asks:
                meta["text"] = outcome.text
        for name, array in arrays.items():  # what could not be read again is not written
            check_array(name, np.asarray(array))
        arrays["meta"] = np.array(json.dumps(meta))
        if strange := [name for name, each in arrays.items() if np.asarray(each).dtype.hasobject]:
            raise ValueError(f"{strange[0]}: expected numbers or text")
        total = sum(np.asarray(array).nbytes for array in arrays.values())
        if len(arrays) > MAX_ARRAYS or total > MAX_UNPACKED or arrays["meta"].nbytes > 4 * MAX_META:
            raise SinewError(
                f"record: expected at most {MAX_ARRAYS} arrays of {MAX_UNPACKED} bytes, got {total}"
            )
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
        """Create the next numbered file, and return it with its final name and its lock
        (:func:`sinew.core.scratch.hold`).

        The number is free, also among other recorders. The lock marks the file as being written.
        """
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
    """Return the records of a folder, oldest first. Raises :class:`SinewError` for a file that is not a record."""
    return (
        read_record(path) for path in record_files(directory)
    )  # the folder is listed now, not at the first record


def record_files(directory: Path) -> list[Path]:
    """Return the records of a folder, oldest first. Raises :class:`SinewError` where there are none."""
    if not directory.exists():
        raise SinewError(f"{directory}: no such file or folder")
    if paths := sorted(directory.glob("*.npz")):
        return paths
    raise SinewError(
        f"{directory}: no records (*.npz) there; `sinew serve --record` and `sinew run --frames` write them"
    )


@contextlib.contextmanager
def open_record(path: Path) -> Iterator[Npz]:
    """Open the arrays of a record, each read on request.

    Raises:
        SinewError: the file is not a record. Errors of the readers inside the block become this one too.
    """
    try:
        with (
            SinewError.at(path, OSError),
            open_npz(path, max_arrays=MAX_ARRAYS, max_unpacked=MAX_UNPACKED) as npz,
        ):
            yield npz
    except ValueError as error:
        raise SinewError(f"{path}: not a record ({error!s:.300})") from None


def read_record(path: Path) -> Record:
    """Read a file of ``--record``. Raises :class:`SinewError` for a file that is not a record."""
    with open_record(path) as npz:
        meta = read_meta(npz)
        arrays = {name: npz.read(name) for name in npz.names if name != "meta"}
    try:
        for name, array in arrays.items():
            check_array(name, array)
        *earlier, newest = _moments(arrays)
    except SinewError as error:
        raise SinewError(f"{path}: not a record ({error})") from None
    observation = Observation(
        images=newest.images,
        state=newest.state,
        earlier=tuple(earlier),
        noise=arrays.get("noise"),
        tokens=arrays.get("tokens"),
        previous=arrays.get("previous"),
        **{name: meta[name] for name in ("seed", *_PLAIN, *WORDS) if name in meta},
    )
    said = meta.get("server", {})
    try:
        server = arithmetic.kept(said) if said else {}
    except ValueError as error:
        raise SinewError(f"{path}: not a record (server.{error})") from None
    told = {name: meta[name] for name in ("by", "policy", "names", "text", "context") if name in meta}
    actions, failed = arrays.get("actions"), meta.get("error", "")
    return Record(path, meta["wire"], observation, actions, failed, meta, server, **told)


def moments_in(names: Iterable[str]) -> int:
    """Return the number of observation steps in a record, from the names of its arrays."""
    return 1 + len({found[0] for name in names if (found := _EARLIER.match(name))})


def _moments(arrays: dict[str, np.ndarray]) -> list[Moment]:
    """Return the moments of a record, oldest first. Raises :class:`SinewError` where one is missing."""
    prefixes = sorted({found[0] for name in arrays if (found := _EARLIER.match(name))}, key=len)
    if len(prefixes) >= MAX_HISTORY or any(
        f"earlier/{index}/" not in prefixes for index in range(len(prefixes))
    ):
        raise SinewError(
            f"earlier: expected at most {MAX_HISTORY - 1} moments, counted from 0, got {prefixes[:4]}"
        )
    moments = []
    for prefix in (*(f"earlier/{index}/" for index in range(len(prefixes))), ""):
        if f"{prefix}state" not in arrays:
            raise SinewError(f"{prefix}state: expected numbers, got nothing")
        start = f"{prefix}images/"
        images = {name[len(start) :]: frame for name, frame in arrays.items() if name.startswith(start)}
        moments.append(Moment(images, arrays[f"{prefix}state"]))
    return moments


def read_meta(npz: Npz) -> dict[str, Any]:
    """Return the text part of a record, with fields of the types in ``_Meta``. Raises ValueError."""
    array = npz.read("meta")
    if array.dtype.kind != "U" or array.shape or array.nbytes > 4 * MAX_META:
        text = f"one text of at most {MAX_META} characters"
        raise UntrustedError(text, f"{array.dtype} {list(array.shape)}", "meta")
    try:
        meta: dict[str, Any] = parse_json(str(array), finite=False)
        checked = msgspec.convert(meta, _Meta)
        for name, value in (("recorded", checked.recorded), ("total_ms", checked.total_ms)):
            if value is not None and not math.isfinite(value):
                raise ValueError(f"{name}: expected a finite number, got {value}")
    except (ValueError, OverflowError) as error:  # msgspec's are ValueErrors
        raise ValueError(f"meta: {error!s:.300}") from None
    return meta


def check_array(name: str, array: np.ndarray) -> None:
    """Refuse an array of a record that no policy and no request can have. Raises :class:`SinewError`."""
    shape, name = array.shape, _EARLIER.sub("", name)
    if name.startswith("images/"):
        sized = len(shape) == 3 and shape[2] == 3 and all(1 <= side <= MAX_SIZE for side in shape[:2])
        if not sized or (array.dtype != np.uint8 and array.dtype.kind != "f"):
            raise _mismatch(name, f"uint8 or float [height, width, 3], sides from 1 to {MAX_SIZE}", array)
        if not 7 < len(name) <= 7 + MAX_NAME:
            raise SinewError(f"{name[:80]}: expected a camera's name of 1 to {MAX_NAME} characters")
    elif name == "state":
        if len(shape) != 1 or shape[0] > MAX_SIZE or array.dtype.kind not in "biuf":
            raise _mismatch(name, f"at most {MAX_SIZE} numbers", array)
    elif array.size > MAX_NUMBERS or array.dtype.kind not in "biuf":
        raise _mismatch(name, f"at most {MAX_NUMBERS} numbers", array)
    elif name == "actions" and (
        len(shape) != 2 or not array.size or shape[0] > MAX_SIZE or not np.isfinite(array).all()
    ):
        raise _mismatch(name, f"finite numbers [H, D], H at most {MAX_SIZE}", array)


def _mismatch(name: str, expected: str, array: np.ndarray) -> SinewError:
    return SinewError(f"{name[:80]}: expected {expected}, got {array.dtype} {list(array.shape)}")
