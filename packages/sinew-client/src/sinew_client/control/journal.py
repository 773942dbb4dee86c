"""The decision log of a controller: all its inputs and commands, one JSON object per line.

:func:`repeat` applies the logged inputs to a new controller, and compares its commands with the logged ones.
"""

from __future__ import annotations

import contextlib
import json
import logging
import platform
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Callable, Iterator

import numpy as np

from sinew_client.control.abrupt import AbruptMoves
from sinew_client.control.controller import BaseController, Command, Controller
from sinew_client.control.motion_fit import MotionFit, MotionWatch
from sinew_client.control.safety import MAX_DIM
from sinew_client.control.settings import Settings
from sinew_client.errors import ClientError
from sinew_client.untrusted import TornLineError, UntrustedError, open_regular, read_jsonl, shown

logger = logging.getLogger(__name__)

SCHEMA = "sinew.control/1"
TORN = "torn"  # name of the event that represents an incomplete last line
MAX_LINE = 1 << 24  # bytes of a line, enough for a chunk of 8,192 actions with 80 numbers each
MAX_STEP = 1 << 53
# On another machine, a repeated command may differ by this fraction of the command's largest number. The sums have up
# to 2^16 terms in float32. Rounding errors of either sign add up like a random walk, so the error of such a sum is
# about 2^8 times the rounding error of one term, 2^-24.
TOLERANCE = 2.0**-16


class JournalError(ClientError, ValueError):
    """The file is not a valid decision log, or cannot be created. The message names the line or the reason."""


class Journal:
    """Writes the events of a controller to a file, on its own thread, so that a slow disk does not delay a command.

    Args:
        path: The file; it must not exist.
        settings: The settings of the controller.
        dim: Number of values in a command (D).
        **about: Further entries of the first line, such as the robot's name.

    Raises:
        JournalError: The file cannot be created, or it already exists.
    """

    def __init__(self, path: Path, settings: Settings, dim: int, **about: Any):
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("x", encoding="utf-8")  # mode "x" never overwrites the log of another run
        except OSError as error:
            there = isinstance(error, FileExistsError)
            why = "the file already exists; choose a new name" if there else error.strerror
            raise JournalError(f"{path}: {why}") from error
        self._events: SimpleQueue = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="sinew-journal", daemon=True)
        self._thread.start()
        head = {"schema": SCHEMA, "settings": settings.to_dict(), "dim": dim, "computed": _arithmetic()}
        self.put("begin", {**head, **about})

    def put(self, event: str, values: dict[str, Any]) -> None:
        """Queue an event with its values. Pass this method to ``Controller.listeners``. It never blocks."""
        self._events.put({"event": event, **values})

    def close(self) -> None:
        """Write all queued events, and close the file."""
        self._events.put(None)
        self._thread.join()
        # Ignore errors such as a full disk, because the writing thread has logged them already.
        with contextlib.suppress(OSError):
            self._file.close()

    def _run(self) -> None:
        writes = True
        while True:
            event = self._events.get()
            if event is None:
                break
            try:
                if writes:
                    self._file.write(json.dumps(event, default=_plain) + "\n")
                    if self._events.empty():
                        # Flush, so that the log has every event until now even if the process is killed.
                        self._file.flush()
            except (OSError, TypeError) as error:
                logger.warning("the decision log ends here, because the file cannot be written: %s", error)
                writes = False


def _plain(value: Any) -> Any:
    if isinstance(value, Command):
        return asdict(value)
    if isinstance(value, np.ndarray):
        # `tolist` converts float32 to Python floats of exactly the same value, so reading gives the same bits.
        return value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"a decision log cannot store a value of type {type(value).__name__}")


@dataclass(frozen=True)
class Repeated:
    """The result of :func:`repeat`.

    Attributes:
        commands: Number of repeated commands.
        held: Number of holds among the logged commands.
        differences: One line of text for each command that differs from the log.
        torn: True if the file's last line is incomplete, for example because the process was killed or the disk was
            full.
        abrupt: The most abrupt commands (:class:`~sinew_client.control.abrupt.AbruptMoves`).
        rounded: Number of commands that differ by less than :data:`TOLERANCE`, with the same decision to send or to
            hold. They occur if another machine wrote the log.
    """

    commands: int
    held: int
    differences: list[str]
    torn: bool = False
    abrupt: tuple[dict[str, Any], ...] = ()
    rounded: int = 0


def is_journal(path: Path) -> bool:
    """Return True if the first bytes of a file are those of a decision log."""
    try:
        with open_regular(path) as file:
            head = file.read(64)
    except OSError:
        return False
    return b'"schema": "%s"' % SCHEMA.encode() in head


def repeat(path: Path) -> Repeated:
    """Apply the logged inputs to a new controller, and compare each command with the logged command.

    If a machine with the same processor and the same numpy wrote the log, the commands must be equal bit for bit. On
    other machines numbers are rounded differently. Then only the decisions must be equal, and numbers may differ by
    :data:`TOLERANCE`. An incomplete last line is skipped.

    Args:
        path: The decision log.

    Returns:
        The counts and the differences.

    Raises:
        JournalError: The file is not a decision log.
    """
    controller: BaseController | None = None
    moves: AbruptMoves | None = None
    commands, holds, rounded, torn = 0, 0, 0, False
    tolerance = 0.0
    differences: list[str] = []
    for number, event in read_events(path):
        try:
            if controller is None:
                if event["event"] != "begin" or event["schema"] != SCHEMA:
                    raise JournalError(
                        f"{path}: line {number}: expected the first event of a decision log (begin)"
                    )
                tolerance = 0.0 if event.get("computed") == _arithmetic() else TOLERANCE
                settings = Settings(**event["settings"])
                controller = settings.controller(event["dim"])
                names, targets = (
                    (settings.limits or {}).get("names"),
                    settings.parse_motion().placed(event["dim"]),
                )
                moves = AbruptMoves(settings.hz, event["dim"], bool(targets.all()), names or ())
                continue
            torn = event["event"] == TORN
            if moves is not None and event["event"] == "stood":
                moves.stood()
            then = apply_event(controller, event)
            if then is not None and moves is not None:
                moves.add(then)
                commands, holds = commands + 1, holds + (then.row is None)
                now = controller.command(then.step, _array(event["state"]))
                if not _same(then, now, tolerance):
                    differences.append(f"step {then.step}: then {_text(then)}, now {_text(now)}")
                elif not _same(then, now):
                    rounded += 1
        except JournalError:
            raise
        except Exception as error:  # events in a wrong order or with wrong widths can raise any exception
            raise JournalError(f"{path}: line {number}: {type(error).__name__}: {error!s:.300}") from error
    if moves is None:
        raise JournalError(f"{path}: the decision log is empty")
    return Repeated(commands, holds, differences, torn, tuple(moves.worst()), rounded)


def watched(path: Path) -> MotionFit | None:
    """Find out from a decision log what the robot's actions are relative to.

    Args:
        path: The decision log.

    Returns:
        The fitted motion; None if the run's settings already state a motion, or if no motion fits the commands.

    Raises:
        JournalError: The file is not a decision log.
    """
    watch = MotionWatch()
    try:
        for _number, event in read_events(path):
            if event["event"] == "begin" and event["settings"].get("motion"):
                return None
            watch.put(event["event"], event)
        return watch.fit()
    except JournalError:
        raise
    except Exception as error:  # events in a wrong order or with wrong widths can raise any exception
        raise JournalError(f"{path}: {type(error).__name__}: {error!s:.300}") from error


def read_events(path: Path) -> Iterator[Any]:
    """Yield (line number, event) for each line of a decision log. For an incomplete last line, yield the event
    :data:`TORN`.
    """
    number = 0
    try:
        # Allow infinite numbers, because invalid chunks are logged too, with all their numbers.
        for number, event in read_jsonl(path, MAX_LINE, finite=False):
            if not isinstance(event, dict) or not isinstance(event.get("event"), str):
                raise UntrustedError("an object with an event", shown(event), f"line {number}")
            try:
                _check(event)
            except ValueError as error:
                raise JournalError(f"{path}: line {number}: {error}") from None
            yield number, event
    except TornLineError as error:
        if not number:
            raise JournalError(
                f"{path}: not a decision log (`sinew run --record FILE` writes one): {error}"
            ) from None
        yield number + 1, {"event": TORN}
    except UntrustedError as error:
        raise JournalError(
            f"{path}: not a decision log (`sinew run --record FILE` writes one): {error}"
        ) from None
    except OSError as error:
        raise JournalError(f"{path}: the decision log cannot be read: {error!s:.300}") from error


def _check(event: dict[str, Any]) -> None:
    """Check that the fields of an event have the right types.

    Raises:
        ValueError: A field has another type. The message names it.
    """
    fields = _FIELDS.get(event["event"], {})
    values = event
    if event["event"] == "command":
        values = event.get("command")  # type: ignore[assignment]
        if not isinstance(values, dict):
            raise ValueError(f"command: expected an object, got {shown(values)}")
        _vector("state", event.get("state"))
    for name, kind in fields.items():
        if name not in values and name not in _OPTIONAL:
            raise ValueError(f"{name}: expected a value, got nothing")
        if name in values:
            kind(name, values[name])


def _time(name: str, value: Any) -> None:
    if not _is_number(value):
        raise ValueError(f"{name}: expected a number, got {shown(value)}")


def _step(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) > MAX_STEP:
        raise ValueError(f"{name}: expected a whole number up to {MAX_STEP}, got {shown(value)}")


def _dim(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_DIM:
        raise ValueError(f"{name}: expected a whole number from 1 to {MAX_DIM}, got {shown(value)}")


def _plain_text(name: str, value: Any) -> None:
    if not isinstance(value, str):
        raise ValueError(f"{name}: expected a text, got {shown(value)}")


def _flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name}: expected true or false, got {shown(value)}")


def _texts(name: str, value: Any) -> None:
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise ValueError(f"{name}: expected texts, got {shown(value)}")


def _object(name: str, value: Any) -> None:
    if not isinstance(value, dict):
        raise ValueError(f"{name}: expected an object, got {shown(value)}")


def _vector(name: str, value: Any) -> None:
    if value is not None and not (
        isinstance(value, list) and len(value) <= MAX_DIM and all(map(_is_number, value))
    ):
        raise ValueError(f"{name}: expected numbers, got {shown(value)}")


def _rows(name: str, value: Any) -> None:
    """Check a logged chunk. Any shape with up to 4 dimensions is allowed, because invalid chunks are logged too."""
    if not isinstance(value, list) or not _are_numbers(value, 4):
        raise ValueError(f"{name}: expected actions (lists of numbers), got {shown(value)}")
    if len(value) > MAX_DIM:
        raise ValueError(f"{name}: expected at most {MAX_DIM} actions, got {len(value)}")
    try:
        np.array(value, np.float64)
    except ValueError:
        raise ValueError(
            f"{name}: expected actions with the same number of values each, got {shown(value)}"
        ) from None


def _are_numbers(value: Any, depth: int) -> bool:
    if isinstance(value, list):
        return depth > 0 and all(_are_numbers(each, depth - 1) for each in value)
    return _is_number(value)


def _is_number(value: Any) -> bool:
    """Return True for a number that fits into float64. An integer of 400 digits does not fit."""
    return isinstance(value, float) or (
        isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1e300
    )


_FIELDS: dict[str, dict[str, Callable[[str, Any], None]]] = {
    "begin": {"schema": _plain_text, "settings": _object, "dim": _dim},
    "command": {
        **dict.fromkeys(("step", "age", "chunk", "index"), _step),
        "row": _vector,
        "reason": _plain_text,
        "clipped": _texts,
        "seam": _flag,
        "by": _plain_text,
        "wanted": _vector,
    },
    "ask": {"step": _step, "frame": _step, "state": _vector, "time": _time},
    "arrived": {"step": _step, "actions": _rows},
    "window": {"step": _step, "first": _step, "rows": _rows, "sample_time": _time, "frame_time": _time},
    "refined": {"step": _step, "rows": _rows, "state": _vector},
    "failed": {"step": _step, "reason": _plain_text, "kind": _plain_text},
    "fault": {"step": _step, "reason": _plain_text},
    "resume": {"position": _vector, "moved": _flag},
    "take_over": {"step": _step, "shadow": _flag},
    "aligned": {"step": _step},
    "realign": {"step": _step},
    "led": {"step": _step, "row": _vector, "reason": _plain_text},
    "hand_back": {"step": _step},
    "returns": {"step": _step},
}
# Older logs do not have these fields.
_OPTIONAL = ("kind", "moved", "time", "by", "wanted")


def apply_event(controller: BaseController, event: dict[str, Any]) -> Command | None:
    """Apply a logged event to the controller. If the event is a command, return it instead, for the comparison."""
    kind = event["event"]
    if kind == "command":
        values = dict(event["command"])
        arrays = {name: _array(values.get(name)) for name in ("row", "wanted")}
        return Command(**{**values, **arrays, "clipped": tuple(values["clipped"])})
    if kind == "ask":
        controller.ask(event["step"], event["frame"], _array(event["state"]), event.get("time", 0.0))
    elif kind == "arrived":
        controller.arrived(event["step"], np.array(event["actions"], np.float32))
    elif kind == "window":
        # Import the module here, because it needs protobuf. All other events need only numpy.
        from sinew_client.streams import StreamWindow

        rows = np.array(event["rows"], np.float32)
        # A window that arrived too late has no waypoints left. JSON does not store the width of such an empty array.
        rows = rows if rows.size else rows.reshape(0, controller.dim)
        times = event["sample_time"], event["frame_time"]
        controller.arrived(event["step"], StreamWindow(event["first"], rows, *times))
    elif kind == "refined":
        assert isinstance(controller, Controller)
        controller.refined(event["step"], np.array(event["rows"], np.float32), _array(event["state"]))
    elif kind == "failed":
        controller.failed(event["step"], event["reason"], event.get("kind", ""))
    elif kind == "fault":
        controller.fault(event["step"], event["reason"], event.get("moved", False))
    elif kind == "bad_chunk":
        controller.broken(event["step"], event["reason"])
    elif kind == "stands":
        controller.stands(_array(event["position"]))
    elif kind == "stood":
        controller.stood()
    elif kind == "pause":
        controller.pause()
    elif kind == "resume":
        controller.resume(_array(event["position"]), event.get("moved", True))
    elif kind == "take_over":
        controller.take_over(event["step"], event["shadow"])
    elif kind == "aligned":
        controller.aligned(event["step"])
    elif kind == "realign":
        controller.realign(event["step"])
    elif kind == "led":
        controller.led(event["step"], _array(event["row"]), event["reason"])
    elif kind == "hand_back":
        controller.hand_back(event["step"])
    elif kind == "returns":
        controller.returns(event["step"])
    # All other events are information for the reader of the log. They do not change the controller.
    return None


def _array(values: Any) -> np.ndarray | None:
    return None if values is None else np.array(values, np.float32)


def _same(then: Command, now: Command, tolerance: float = 0.0) -> bool:
    facts = (then.reason, then.clipped, then.age, then.chunk, then.index, then.seam, then.by)
    same = facts == (now.reason, now.clipped, now.age, now.chunk, now.index, now.seam, now.by)
    return same and _near(then.row, now.row, tolerance) and _near(then.wanted, now.wanted, tolerance)


def _near(then: Any, now: Any, tolerance: float) -> bool:
    if np.array_equal(then, now):
        return True
    if not tolerance or then is None or now is None or np.shape(then) != np.shape(now):
        return False
    then, now = np.asarray(then, np.float64), np.asarray(now, np.float64)
    # The comparison is False if one of the numbers is NaN.
    return bool(np.abs(then - now).max() <= tolerance * np.abs(then).max())


def _arithmetic() -> dict[str, str]:
    """Return the processor and the numpy version, which determine how the numbers of a command are rounded."""
    model = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        text = Path("/proc/cpuinfo").read_text(errors="replace")  # own file: of the operating system
        for line in text.splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    return {"hardware": model, "numpy": np.__version__}


def _text(command: Command) -> str:
    if command.row is None:
        return f"hold ({command.reason})"
    return f"chunk {command.chunk} row {command.index} {np.array2string(command.row, precision=4)}"
