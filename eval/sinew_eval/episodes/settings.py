"""Settings of a run: the task, and the variants that are compared. Both have text forms."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import numpy as np
from sinew.core import SinewError, dtype_word
from sinew.engine.backend import AUTO, BACKENDS
from sinew_client.control import Settings, choose, parse_rule
from sinew_client.control.defaults import HANDOVER, REPLAN
from sinew_client.target import EXPERT, MODEL_SERVER, Target
from sinew_client.typed_names import file_name, portable
from sinew_client.untrusted import named, shown

TASKS_GROUP = "sinew.tasks"  # entry-point group where other packages register tasks: name -> "module:Class"
# Key: name of an adapter of this package. Value: "module:Class".
ADAPTERS = {"direct": "sinew_eval.episodes.adapters:Direct"}
MOST_DELAY = 1_000_000  # largest latency, in control steps or milliseconds
MOST_WHOLE = 1 << 53  # largest whole number in a record
MOST_TEXT = 4096  # longest text in a record, in characters
MOST_SOLVER_STEPS, MOST_BATCH = 10_000, 65_536  # largest values in a record
_NUMBER = r"\d{1,12}(?:\.\d{1,12})?"
_LATENCY = re.compile(
    rf"(?:(?P<kind>uniform|normal):)?(?P<first>{_NUMBER})(?:[-,](?P<second>{_NUMBER}))?(?P<unit>ms)?"
)


@dataclass(frozen=True, slots=True)
class Latency:
    """Simulated delay from a request to its chunk. The text form is a number, ``uniform:LOW-HIGH`` or
    ``normal:MEAN,DEVIATION``. Numbers are control steps, or milliseconds with a final ``ms``. Uniform control steps are
    whole numbers and include both ends. A robot sends commands at control ticks, so a delay takes effect at the next
    tick: 60 ms are two steps at 20 Hz.

    Attributes:
        text: The text that the user typed, which reports show.
    """

    text: str = "0"

    def __post_init__(self) -> None:
        match = _LATENCY.fullmatch(self.text) if isinstance(self.text, str) else None
        if match is None or (match["kind"] is None) != (match["second"] is None):
            raise SinewError(
                f"latency: expected N, Nms, uniform:LOW-HIGH[ms] or normal:MEAN,DEVIATION[ms], got {shown(self.text)}"
            )
        if match["kind"] is None and not match["unit"] and not float(match["first"]).is_integer():
            raise SinewError(
                f"latency: expected a whole number of control steps, or milliseconds such as 50ms, got {self.text!r}"
            )
        if match["kind"] == "uniform" and float(match["first"]) > float(match["second"]):
            raise SinewError(
                f"latency: expected the lower end before the upper end, got {self.text!r}; swap them"
            )
        if max(float(match["first"]), float(match["second"] or 0)) > MOST_DELAY:
            raise SinewError(f"latency: expected at most {MOST_DELAY}, got {self.text!r}")

    def steps(self, rng: np.random.Generator, control_hz: float) -> int:
        """Draw one delay.

        Args:
            rng: Random generator.
            control_hz: Control steps per second.

        Returns:
            The delay in control steps.
        """
        match = _LATENCY.fullmatch(self.text)
        assert match is not None
        first, second = float(match["first"]), float(match["second"] or 0)
        if match["kind"] == "uniform" and not match["unit"]:
            return int(rng.integers(int(first), int(second) + 1))
        if match["kind"] == "uniform":
            first = float(rng.uniform(first, second))
        elif match["kind"] == "normal":
            first = max(0.0, float(rng.normal(first, second)))
        steps = first * control_hz / 1e3 if match["unit"] else first
        # Subtract a small number before rounding up, because the product may be rounded up: 100 ms at 60 Hz must be
        # exactly six steps.
        return math.ceil(steps - 1e-9)

    def milliseconds(self, control_hz: float) -> float:
        """Return the expected delay in milliseconds, for the axes of figures."""
        match = _LATENCY.fullmatch(self.text)
        assert match is not None
        first = float(match["first"])
        mean = (first + float(match["second"])) / 2 if match["kind"] == "uniform" else first
        return mean if match["unit"] else 1e3 * mean / control_hz


NONE = "none"  # value of --sweep for no stream or no edge adapter


_COSTS = re.compile(
    rf"(?P<prefix>{_NUMBER}):(?P<head>{_NUMBER})(?::(?P<guidance>guided|no-jacobian|ramp|none))?"
)


@dataclass(frozen=True)
class StreamCosts:
    """Simulated computing times of a stream's two loops: the prefix (context of the frames) and the action head.

    Attributes:
        prefix: Seconds of simulated time for one prefix.
        head: Seconds of simulated time for one run of the action head.
        guidance: Guidance of whole chunks: "guided", "no-jacobian", "ramp" or "none".
    """

    prefix: float
    head: float
    guidance: str = "none"

    @classmethod
    def parse(cls, text: str) -> StreamCosts:
        """Read the text ``PREFIX:HEAD[:GUIDANCE]``, with both times in milliseconds.

        Raises:
            SinewError: The text has another format.
        """
        match = _COSTS.fullmatch(text)
        if match is None:
            raise SinewError(
                f"stream: expected PREFIX:HEAD[:GUIDANCE] in milliseconds, such as 33:2, got {text!r}"
            )
        return cls(float(match["prefix"]) / 1e3, float(match["head"]) / 1e3, match["guidance"] or "none")


@dataclass(frozen=True, slots=True)
class Variant:
    """A policy with the settings that a sweep changes.

    Attributes:
        target: Bundle, server (tcp://host:port), or "expert".
        replan: Actions per inference, 0 for the whole chunk, or another rule of the robot
            (``sinew_client.control.parse_rule``).
        latency: Simulated delay from request to chunk.
        handover: Chunk merging. "auto" chooses it by the policy's actions.
        solver_steps: Number of solver steps. None for the policy's own number.
        dtype: Number format. None for the engine's choice.
        device: Device of the engine.
        engine: Engine. None for the fastest engine that fits.
        ignore_recipe: True to ignore the bundle's quantisation recipe.
        rename: Renamed cameras, as ``NEW=OLD``.
        allow_missing_cameras: True to accept observations without all cameras.
        allow_empty_prompt: True to accept observations without a prompt.
        stream: PREFIX:HEAD[:GUIDANCE], the milliseconds of a stream's two loops (:mod:`sinew_eval.episodes.sources`).
            The stream then replaces chunks. "" for chunks, which a sweep writes as "none".
        edge_adapter: File of an edge adapter. "" for none, which a sweep writes as "none".
        batch: Episodes that one process plays in lockstep. One inference answers their simultaneous requests.
    """

    target: str
    replan: int | str = REPLAN
    latency: Latency = Latency()
    handover: str = HANDOVER
    solver_steps: int | None = None
    dtype: str | None = None
    device: str = "auto"
    engine: str | None = None
    ignore_recipe: bool = False
    rename: tuple[str, ...] = ()
    allow_missing_cameras: bool = False
    allow_empty_prompt: bool = False
    stream: str = ""
    edge_adapter: str = ""
    batch: int = 1

    def __post_init__(self) -> None:
        if isinstance(self.replan, int) and self.replan < 0:
            raise SinewError(f"replan: expected 1 or more, or full, got {self.replan}")
        try:
            choose(self.handover)
        except ValueError as error:
            raise SinewError(str(error)) from error
        if self.solver_steps is not None and self.solver_steps < 1:
            raise SinewError(f"solver_steps: expected 1 or more, got {self.solver_steps}")
        if self.dtype is not None:
            dtype_word(self.dtype)
        if self.edge_adapter and self.stream:
            raise SinewError(
                "edge_adapter: cannot be combined with a stream, whose action head already runs in every control step;"
                " omit one"
            )
        if self.batch < 1:
            raise SinewError(f"batch: expected 1 or more, got {self.batch}")
        alone = Target.parse(self.target).kind in (MODEL_SERVER, EXPERT)
        if self.batch > 1 and (self.stream or alone):
            got = "a stream" if self.stream else self.target
            raise SinewError(f"batch: expected a bundle or a server that answers with chunks, got {got}")
        if self.engine not in (None, AUTO, *BACKENDS):
            raise SinewError(f"engine: expected one of {', '.join((AUTO, *BACKENDS))}, got {self.engine!r}")

    def with_text(self, key: str, value: str) -> Variant:
        """Return a copy with one field read from text, as in ``--sweep`` and ``--compare``.

        Args:
            key: Name of the field, one of ``SWEEPABLE``.
            value: Text of its value.

        Raises:
            SinewError: The field or the value is invalid.
        """
        if key not in SWEEPABLE:
            raise SinewError(f"expected one of {', '.join(SWEEPABLE)}, got {key!r}")
        try:
            return replace(self, **{key: _PARSERS[key](value)})
        except ValueError:
            raise SinewError(f"{key}: expected a number, got {value!r}") from None

    def label(self, others: Sequence[Variant]) -> str:
        """Return a short name that distinguishes this variant from the others.

        Args:
            others: All variants of the run.

        Returns:
            The fields in which the variants differ, or the target's file name if no field differs. Folders precede a
            file name that is not unique.
        """
        differing = [f.name for f in fields(self) if len({getattr(v, f.name) for v in others}) > 1]
        name = distinct_names([v.target for v in others if v is not self] + [self.target])[-1]
        return ", ".join(name if f == "target" else f"{f} {self.show(f)}" for f in differing) or name

    def show(self, name: str) -> str:
        value = getattr(self, name)
        if name == "replan" and value == 0:
            return "full"
        if name == "target":
            return value if Target.parse(value).remote else file_name(value)
        if value is None:
            return "default"
        if name in ("stream", "edge_adapter"):
            return file_name(value) if value else NONE
        return value.text if isinstance(value, Latency) else str(value)

    def to_dict(self) -> dict[str, Any]:
        record = {**asdict(self), "latency": self.latency.text, "rename": list(self.rename)}
        # Omit fields with default values that older versions did not have, so that the keys of old logs stay valid.
        later = (
            *("engine", "ignore_recipe", "rename", "allow_missing_cameras", "allow_empty_prompt"),
            *("stream", "edge_adapter", "batch"),
        )
        record["batch"] = self.batch if self.batch > 1 else 0
        return {name: value for name, value in record.items() if value or name not in later}

    def record(self) -> dict[str, Any]:
        """Return the fields as a dict for a report. Paths are written without the folders of this machine."""
        values = self.to_dict()
        if self.edge_adapter:
            values["edge_adapter"] = file_name(self.edge_adapter)
        return {
            **values,
            "target": portable(self.target) if Target.parse(self.target).remote else self.show("target"),
        }

    @classmethod
    def from_dict(cls, values: Any) -> Variant:
        """Build a variant from a record. Files and addresses in the record are not opened.

        Args:
            values: The record.

        Returns:
            The variant.

        Raises:
            SinewError: A field is unknown, or has a wrong type.
        """
        checked = _checked("variant", values, _VARIANT_FIELDS)
        if "target" not in checked:
            raise SinewError("variant.target: expected a text, got nothing")
        with SinewError.at("variant", ValueError):
            if isinstance(checked.get("replan"), str):
                checked["replan"] = parse_replan(checked["replan"])
            rename = tuple(checked.get("rename", ()))
            return cls(**{**checked, "latency": Latency(checked.get("latency", "0")), "rename": rename})


def distinct_names(targets: Sequence[str]) -> list[str]:
    """Return a short unique name for each target.

    Args:
        targets: Paths and addresses.

    Returns:
        An address unchanged. Of a path, the file name with as many folders as distinguish it from the other targets.
    """
    paths = {each: [part for part in re.split(r"[\\/]", each) if part] or [each] for each in targets}

    def name(target: str) -> str:
        if Target.parse(target).remote:
            return target
        parts = paths[target]
        for count in range(1, len(parts) + 1):
            others = [each for each in paths if each != target and paths[each][-count:] == parts[-count:]]
            if not others:
                break
        return "/".join(parts[-count:])

    return [name(each) for each in targets]


def parse_replan(text: str) -> int | str:
    """Read a replan rule.

    Args:
        text: Number of control steps, "full", or another rule of the robot.

    Returns:
        A number of control steps, 0 for a full chunk, or the text of another rule.

    Raises:
        ValueError: The text is not a rule. The message states what is allowed.
    """
    if text == "full" or text.isdecimal():
        return 0 if text == "full" else int(text)
    parse_rule(text)
    return text


def rows_between(replan: int | str, chunk_size: int) -> int:
    """Return the number of actions that are executed between two requests if every answer arrives in time.

    Args:
        replan: Replan rule, as :func:`parse_replan` returns it.
        chunk_size: Number of actions in a chunk.
    """
    if isinstance(replan, int):
        return min(replan or chunk_size, chunk_size)
    return parse_rule(replan).horizon(chunk_size)


# Some values contain a comma themselves, for example normal:80,20ms and disagreement:0.1,8.
_WITH_A_COMMA = {"latency": "normal:", "replan": "disagreement:"}


def _listed(key: str, text: str) -> list[str]:
    """Split the list of values of one setting at its commas. A unit at the end, as in ``0,50,100ms``, applies to all
    numbers without a unit.
    """
    parts = [part for part in text.split(",") if part]
    if key == "latency" and parts and parts[-1].endswith("ms"):
        parts = [part + "ms" if re.fullmatch(_NUMBER, part) else part for part in parts]
    joined: list[str] = []
    for part in parts:
        if joined and joined[-1].startswith(_WITH_A_COMMA.get(key, ",")) and "," not in joined[-1]:
            joined[-1] = joined[-1].removesuffix("ms") + "," + part
        else:
            joined.append(part)
    return joined


_PARSERS: dict[str, Any] = {
    "replan": parse_replan,
    "latency": Latency,
    "handover": str,
    "solver_steps": int,
    "batch": int,
    "dtype": str,
    "device": str,
    "engine": str,
    "stream": lambda text: "" if text == NONE else text,
    "edge_adapter": lambda text: "" if text == NONE else text,
}
SWEEPABLE = tuple(_PARSERS)


def sweep(base: Variant, sweeps: Sequence[str]) -> list[Variant]:
    """Combine the values of several settings.

    Args:
        base: Variant that is changed.
        sweeps: Texts ``KEY=VALUE,VALUE...``, one per setting.

    Returns:
        A variant for every combination. The first setting varies slowest.

    Raises:
        SinewError: A text is invalid.
    """
    axes = []
    for text in sweeps:
        key, separator, values = text.partition("=")
        key = key.replace("-", "_")
        parts = _listed(key, values)
        if not separator or not parts:
            raise SinewError(f"--sweep: expected KEY=VALUE,VALUE..., got {text!r}")
        axes.append([(key, value) for value in parts])
    variants = []
    for combination in itertools.product(*axes):
        variant = base
        for key, value in combination:
            variant = variant.with_text(key, value)
        if variant not in variants:
            variants.append(variant)
    return variants


def _whole(least: int, most: int = MOST_WHOLE) -> tuple[str, Any]:
    def fits(value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most

    return f"a whole number from {least} to {most}", fits


def _optional(field: tuple[str, Any]) -> tuple[str, Any]:
    words, fits = field
    return f"{words}, or null", lambda value: value is None or fits(value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= MOST_TEXT


_TEXT = (f"a text of at most {MOST_TEXT} characters", _is_text)
_FLAG = ("true or false", lambda value: isinstance(value, bool))
_OBJECT = ("an object", lambda value: isinstance(value, dict))
_TEXTS = ("a list of texts", lambda value: isinstance(value, list) and all(map(_is_text, value)))
_REPLAN = ("a whole number or a rule", lambda value: _is_text(value) or _whole(0)[1](value))
# Key: a field of a task. Value: (description of the expected value, test of the value).
_TASK_FIELDS = {
    "env": _TEXT,
    "env_options": _optional(_OBJECT),
    "reset_options": _optional(_OBJECT),
    "adapter": _TEXT,
    "noise": _whole(0),
    "realtime": _FLAG,
    "motion": _optional(_OBJECT),
    "future": _FLAG,
}
_VARIANT_FIELDS = {
    "target": _TEXT,
    "replan": _REPLAN,
    "latency": _TEXT,
    "handover": _TEXT,
    "solver_steps": _optional(_whole(1, MOST_SOLVER_STEPS)),
    "dtype": _optional(_TEXT),
    "device": _TEXT,
    "engine": _optional(_TEXT),
    "ignore_recipe": _FLAG,
    "rename": _TEXTS,
    "allow_missing_cameras": _FLAG,
    "allow_empty_prompt": _FLAG,
    "stream": _TEXT,
    "edge_adapter": _TEXT,
    "batch": _whole(1, MOST_BATCH),
}
# A gate (a test of a policy with fixed conditions) fixes these fields of a task and of a variant.
PROTOCOL_FIELDS = {
    **{name: _TASK_FIELDS[name] for name in ("env", "env_options", "reset_options", "adapter", "noise")},
    **{name: _VARIANT_FIELDS[name] for name in ("replan", "latency", "handover", "solver_steps")},
}


def _checked(where: str, values: Any, expected_fields: Mapping[str, tuple[str, Any]]) -> dict[str, Any]:
    """Check the fields of a record.

    Args:
        where: Name of the record, for messages.
        values: The record.
        expected_fields: For each allowed field: (description of the expected value, function that tests a value).

    Returns:
        The fields.

    Raises:
        SinewError: A field is unknown, or has a wrong type.
    """
    if not isinstance(values, dict):
        raise SinewError(f"{where}: expected an object, got {shown(values)}")
    for name, value in values.items():
        if name not in expected_fields:
            raise SinewError(
                f"{where}: expected fields of this version of Sinew, got {named(name)}; update Sinew"
            )
        words, fits = expected_fields[name]
        if not fits(value):
            raise SinewError(f"{where}.{name}: expected {words}, got {shown(value)}")
    return dict(values)


def checked_protocol(values: Any) -> dict[str, Any]:
    """Check the protocol of a gate, which must have all fields.

    Raises:
        SinewError: A field is missing or wrong.
    """
    checked = _checked("protocol", values, PROTOCOL_FIELDS)
    if missing := [name for name in PROTOCOL_FIELDS if name not in checked]:
        raise SinewError(f"protocol.{missing[0]}: expected a value, got nothing")
    with SinewError.at("protocol", ValueError):
        choose(checked["handover"])
        parse_replan(str(checked["replan"]))
        Latency(checked["latency"])
    return checked


@dataclass(frozen=True, slots=True)
class Task:
    """Settings that all variants of a run share.

    Attributes:
        env: Gymnasium id.
        env_options: Arguments of the environment's constructor.
        reset_options: Options of the environment's ``reset``.
        adapter: Name of the adapter (:mod:`sinew_eval.episodes.adapters`). "" to choose the adapter by the id.
        noise: Number that enters every noise seed. Another number repeats a run with other noise.
        realtime: True to use the wall clock and the measured latency.
        motion: Reference of the actions (``sinew_client.control.Settings``). None for the policy's own statement.
        future: True to send the state that the robot will have when the answer arrives. Needs ``motion``.

    Raises:
        SinewError: ``motion`` is not a valid reference.
    """

    env: str = "sinew/Blocks-v0"
    env_options: dict[str, Any] | None = None
    reset_options: dict[str, Any] | None = None
    adapter: str = ""
    noise: int = 0
    realtime: bool = False
    motion: dict[str, Any] | None = None
    future: bool = False

    def __post_init__(self) -> None:
        # Building a controller checks motion and future, and raises SinewError with the reason.
        Settings(1.0, motion=self.motion, future=self.future).controller(0)

    @classmethod
    def from_dict(cls, values: Any) -> Task:
        """Build a task from a record. Files and code in the record are neither opened nor imported.

        Args:
            values: The record.

        Returns:
            The task.

        Raises:
            SinewError: A field is unknown, or has a wrong type.
        """
        return cls(**_checked("task", values, _TASK_FIELDS))

    def record(self) -> dict[str, Any]:
        """Return the fields as a dict for a report. Paths are written without the folders of this machine."""
        values: dict[str, Any] = portable(self.to_dict())
        return {
            **values,
            "adapter": file_name(self.adapter) if self.adapter.endswith(".json") else self.adapter,
        }

    def to_dict(self) -> dict[str, Any]:
        # Omit fields with default values that older versions did not have, so that the keys of old logs stay valid.
        return {k: v for k, v in asdict(self).items() if v or k not in ("motion", "future")}
