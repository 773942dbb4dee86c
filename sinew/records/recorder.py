"""Record requests and replies on disk, one ``.npz`` file each, to replay a problem of a robot later.

A file contains these arrays. numpy reads it without pickle.

* ``images/<camera>`` and ``state``
* ``noise``, ``tokens`` and ``previous``, if the client sent them
* ``earlier/<0, 1 ...>/images/<camera>`` and ``earlier/<0, 1 ...>/state``: earlier observation steps, oldest first
* ``actions``, if the reply has actions
* ``meta``: a JSON text with all other fields

``meta`` contains the prompt, seed, wire, session, times, requested texts, the ``text`` of the reply, the requested
``policy``, the error, and whether the reply was a ``context``, which is not stored. ``meta.server`` has the settings
that affect the reply bit for bit (:mod:`sinew.records.arithmetic`). Older files lack ``meta.server``.

In a file of ``sinew run --frames``, a record is a control step and its action is the command.
``meta.by`` then states who drove the robot, and ``meta.names`` has the names of the state's and the action's numbers.
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

MAX_NAME = 256  # a camera's name in a file may have at most this many characters
MAX_META = 1 << 20  # the JSON may have at most this many characters; a prompt of 65,536 needs at most 786,432
MAX_NUMBERS = 1 << 20  # actions, noise, tokens and previous may each have at most this many numbers
_ARRAYS = ("noise", "tokens", "previous")
_REQUEST = ("prompt", "solver_steps", "session", "time", "adapter", *CONDITIONS)
_PLAIN = (*_REQUEST, *(name for name in CONTINUATION if name not in _ARRAYS))
_EARLIER = re.compile(r"^earlier/\d{1,2}/")  # prefix of the arrays of an earlier observation step


@dataclass(frozen=True, slots=True)
class Record:
    """One recorded request and its reply.

    Attributes:
        path: The file.
        wire: Protocol of the request.
        observation: The request, with the seed of its noise, so that it gives the same actions again.
        actions: The actions of the reply; None if the reply was an error, a text or a context.
        error: Error of the reply, "[code] message"; "" if there was none.
        meta: All fields of the file's ``meta``.
        server: Settings that affect the reply bit for bit; empty in files from before 2026-11-23.
        by: Who drove the robot, in a control step (``sinew run --frames``).
        policy: Name of the requested policy; "" for the server's first policy.
        names: Names of the state's and the action's numbers, in a control step.
        text: Text of the reply.
        context: True if the reply was a context. It may have megabytes, so it is not stored.
    """

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
    """Defines the types of the fields of ``meta``, the JSON text in a record.

    Attributes:
        recorded: Seconds since the epoch. The upper bound follows from MCAP, which stores nanoseconds.
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
    """Writes records on its own thread. A slow disk loses records, but never delays answers.

    Two recorders may write to the same folder. If the disk is full, writing is tried again later.

    Args:
        directory: The folder.
        limit_bytes: Largest size of all files together. At this size, recording ends with a warning.
        names: Names of the numbers of ``state`` and ``action``, which are stored in each record.
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
        scratch.sweep(directory, re.compile(r"\d+\.part"))  # remove the partial files of killed recorders
        self.directory = directory
        self._remaining, self._names = limit_bytes, {part: list(each) for part, each in names.items() if each}
        self._number = max(numbers, default=0)
        super().__init__("sinew-record", "the disk")

    @property
    def full(self) -> bool:
        """Return True if the records have reached the size limit. No more records are written then."""
        return self._remaining <= 0

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
        meta |= {name: value for name, value in (("by", by), ("policy", policy)) if value}
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
        # Check with the reader's own rules, so that no file is written that cannot be read again.
        for name, array in arrays.items():
            check_array(name, np.asarray(array))
        arrays["meta"] = np.array(json.dumps(meta))
        if strange := [name for name, each in arrays.items() if np.asarray(each).dtype.hasobject]:
            raise ValueError(f"{strange[0]}: expected numbers or text, got Python objects")
        total = sum(np.asarray(array).nbytes for array in arrays.values())
        if len(arrays) > MAX_ARRAYS or total > MAX_UNPACKED or arrays["meta"].nbytes > 4 * MAX_META:
            raise SinewError(
                f"record: expected at most {MAX_ARRAYS} arrays of {MAX_UNPACKED} bytes, got {total}"
            )
        part, path, lock = self._claim()
        try:
            with part.open("wb") as file:
                np.savez(file, **arrays)  # all dtypes are plain, so numpy uses no pickle
                size = file.tell()
            part.rename(path)  # a killed process leaves no incomplete file with the final name
            self._remaining -= size
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        finally:
            if lock is not None:
                os.close(lock)

    def _claim(self) -> tuple[Path, Path, int | None]:
        """Create the next numbered file. Return it with its final name and its lock (:func:`sinew.core.scratch.hold`).

        No other recorder uses the same number. The lock shows that the file is being written.
        """
        while True:
            self._number += 1
            path = self.directory / f"{self._number:08d}.npz"
            part = path.with_suffix(".part")
            try:
                part.open("xb").close()
            except FileExistsError:
                continue
            lock = scratch.hold(part)
            if scratch.there(part, lock) and not path.exists():
                return part, path, lock
            part.unlink(missing_ok=True)
            if lock is not None:
                os.close(lock)


def read_records(directory: Path) -> Iterator[Record]:
    """Read all records in a folder, oldest first.

    Raises:
        SinewError: The folder has no records, or a file is not a record.
    """
    # record_files runs now and not at the first record, so that an error of the folder is raised at once.
    return (read_record(path) for path in record_files(directory))


def record_files(directory: Path) -> list[Path]:
    """Return the paths of the records in a folder, oldest first.

    Raises:
        SinewError: The folder has no records.
    """
    if not directory.exists():
        raise SinewError(f"{directory}: no such file or folder; pass the folder that --record wrote")
    if paths := sorted(directory.glob("*.npz")):
        return paths
    raise SinewError(
        f"{directory}: no records (*.npz) in this folder; `sinew serve --record` and `sinew run --frames` write records"
    )


@contextlib.contextmanager
def open_record(path: Path) -> Iterator[Npz]:
    """Open the arrays of a record. Each array is read only when it is requested. The file is closed at the end of the
    ``with`` block.

    Raises:
        SinewError: The file is not a record. A ValueError inside the ``with`` block is converted to this error too.
    """
    try:
        with (
            SinewError.at(path, OSError),
            open_npz(path, max_arrays=MAX_ARRAYS, max_unpacked=MAX_UNPACKED) as npz,
        ):
            yield npz
    except ValueError as error:
        raise SinewError(
            f"{path}: not a record ({error!s:.300}); pass files of `sinew serve --record`"
        ) from None


def read_record(path: Path) -> Record:
    """Read a record that ``sinew serve --record`` wrote.

    Raises:
        SinewError: The file is not a record.
    """
    with open_record(path) as npz:
        meta = read_meta(npz)
        arrays = {name: npz.read(name) for name in npz.names if name != "meta"}
    try:
        for name, array in arrays.items():
            check_array(name, array)
        *earlier, newest = _moments(arrays)
    except SinewError as error:
        raise SinewError(
            f"{path}: not a record ({error}); choose a file that `sinew serve --record` wrote"
        ) from None
    observation = Observation(
        images=newest.images,
        state=newest.state,
        earlier=tuple(earlier),
        noise=arrays.get("noise"),
        tokens=arrays.get("tokens"),
        previous=arrays.get("previous"),
        **{name: meta[name] for name in ("seed", *_PLAIN, *WORDS) if name in meta},
    )
    settings = meta.get("server", {})
    try:
        server = arithmetic.kept(settings) if settings else {}
    except ValueError as error:
        raise SinewError(
            f"{path}: not a record (server.{error}); choose a file that `sinew serve --record` wrote"
        ) from None
    more = {name: meta[name] for name in ("by", "policy", "names", "text", "context") if name in meta}
    actions, failed = arrays.get("actions"), meta.get("error", "")
    return Record(path, meta["wire"], observation, actions, failed, meta, server, **more)


def moments_in(names: Iterable[str]) -> int:
    """Return the number of observation steps in a record, from the names of its arrays."""
    return 1 + len({match[0] for name in names if (match := _EARLIER.match(name))})


def _moments(arrays: dict[str, np.ndarray]) -> list[Moment]:
    """Read the observation steps of a record from its arrays, and return them, oldest first.

    Raises:
        SinewError: A step is missing, or an array of a step is not valid.
    """
    prefixes = sorted({match[0] for name in arrays if (match := _EARLIER.match(name))}, key=len)
    if len(prefixes) >= MAX_HISTORY or any(
        f"earlier/{index}/" not in prefixes for index in range(len(prefixes))
    ):
        raise SinewError(
            f"earlier: expected at most {MAX_HISTORY - 1} observation steps, counted from 0, got {prefixes[:4]}"
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
    """Return the JSON part of a record. Its fields have the types of ``_Meta``.

    Raises:
        ValueError: The part is missing, or a field has the wrong type.
    """
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
    # msgspec's errors are ValueErrors.
    except (ValueError, OverflowError) as error:
        raise ValueError(f"meta: {error!s:.300}") from None
    return meta


def check_array(name: str, array: np.ndarray) -> None:
    """Check that an array of a record could come from some policy and request.

    Raises:
        SinewError: The array has an impossible shape, type or value.
    """
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
