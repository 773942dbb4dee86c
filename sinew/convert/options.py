"""Parse the options that the user can add to a checkpoint, and record the options in the bundle."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, get_args, get_type_hints

from sinew.core import BundleError, ConvertError, MotionSpec, VectorSpec
from sinew.core.fields import from_builtins

COMMON = ("compat", "control_hz", "motion", "settings", "vectors")  # every family supports these options


@dataclass(frozen=True)
class Setting:
    """A choice that a checkpoint's files leave open, and that the user makes with ``--set NAME=VALUE``.

    Attributes:
        kind: The type of the value: bool, int, float or str.
        help: The text of the help.
        low: The smallest allowed number.
        high: The largest allowed number.
        values: The allowed texts; () allows every text.
    """

    kind: type
    help: str
    low: float = -math.inf
    high: float = math.inf
    values: tuple[str, ...] = ()

    def parse(self, name: str, text: str) -> Any:
        """Convert ``text`` to a value of this setting.

        Raises:
            ConvertError: The text is not a valid value.
        """
        if self.kind is bool:
            if text.lower() not in ("true", "false"):
                raise ConvertError(f"--set {name}: expected true or false, got {text!r}")
            return text.lower() == "true"
        if self.kind is str:
            if self.values and text not in self.values:
                raise ConvertError(f"--set {name}: expected one of {', '.join(self.values)}, got {text!r}")
            return text
        try:
            value = self.kind(text)
        except ValueError:
            value = math.nan
        if not self.low <= value <= self.high or not math.isfinite(value):
            what = "a whole number" if self.kind is int else "a number"
            raise ConvertError(f"--set {name}: expected {what} from {self.low} to {self.high}, got {text!r}")
        return value


IGNORE_SETTING = Setting(str, "keys of config.json to skip, separated by commas")
COMMITTED_ROWS_SETTING = Setting(
    int,
    "longest action prefix, in actions, that the head was trained to continue (training-time RTC)",
    0,
    10_000,
)
SOLVER_STEPS_SETTING = Setting(int, "solver steps of a request that does not state their number", 1, 100)


@dataclass(frozen=True)
class Joints:
    """The user's names and units for the values of a vector, in order. A field is () if the user did not state it."""

    names: tuple[str, ...] = ()
    units: tuple[str, ...] = ()

    def named(self, key: str, vector: VectorSpec | None = None) -> VectorSpec:
        """Return the specification of a vector with these names and units.

        Args:
            key: "state" or "action", for messages.
            vector: The checkpoint's vector; None if the checkpoint is not read yet.

        Raises:
            ConvertError: The number of names or units differs from the vector's size, or the checkpoint states other
                names or units.
        """
        size = len(self.names or self.units)
        spec = VectorSpec(size) if vector is None else vector
        for what, names_or_units, own in (
            ("names", self.names, spec.names),
            ("units", self.units, spec.units),
        ):
            if names_or_units and len(names_or_units) != spec.dim:
                raise ConvertError(f"--vectors: {key}.{what}: expected {spec.dim}, got {len(names_or_units)}")
            if names_or_units and own and names_or_units != own:
                mismatch = f"expected {', '.join(own)} as in the checkpoint, got {', '.join(names_or_units)}"
                raise ConvertError(f"--vectors: {key}.{what}: {mismatch}")
        return replace(spec, names=self.names or spec.names, units=self.units or spec.units)


@dataclass(frozen=True)
class CheckpointFlags:
    """Options for facts that a checkpoint does not contain.

    Attributes:
        vlm: directory of the vision-language model that the checkpoint names: its config.json, tokenizer, processor.
        base: directory of the base model, for checkpoints that contain only the trained changes: a LoRA adapter of
            LeRobot's SmolVLA, pi0, pi0.5 or pi0-FAST, which is merged; some checkpoints of GR00T.
        tokenizer: a tokenizer.json or a directory that contains one, instead of the checkpoint's own.
        action_tokenizer: directory of the FAST tokenizer, for policies that generate actions as FAST tokens.
        arch: JSON file with the widths behind a named variant, instead of the language model's config.
        stats: a data set's meta/stats.json, for checkpoints without statistics.
        dataset: directory or hub name of the LeRobot data set: names of joints, actions per second, and statistics if
            the checkpoint has none.
        compat: version to follow where versions of the training project disagree.
        openpi_config: name of openpi's training config, for its checkpoints (e.g. pi05_droid), or a file with your own
            training config, which the page "From openpi to a robot" explains.
        embodiment: tag of the robot, for checkpoints of several robots.
        stats_key: name of the set of statistics to use, if the checkpoint has several (arm/dataset if there are two
            levels).
        control_hz: actions per second at which the robot should execute a chunk; checkpoints do not state it.
    """

    vlm: Path | None = None
    base: Path | None = None
    tokenizer: Path | None = None
    action_tokenizer: Path | None = None
    arch: Path | None = None
    stats: Path | None = None
    dataset: Path | None = None
    compat: Literal["lerobot-0.4", "lerobot-0.6", "openpi"] = "lerobot-0.6"
    openpi_config: str = ""
    embodiment: str = ""
    stats_key: str = ""
    control_hz: float | None = None


@dataclass(frozen=True)
class ConvertOptions(CheckpointFlags):
    """The options that the user can add to a checkpoint: see ``sinew convert --help``. Empty values are not set.

    Attributes:
        cameras: Names of the cameras, for checkpoints that do not state them.
        motion: The reference of the actions, which no checkpoint states.
        vectors: "state" and "action" -> the names and units of their numbers. No checkpoint states units.
        settings: The values of ``--set`` as text. The family parses them.
    """

    cameras: tuple[str, ...] = ()
    motion: MotionSpec | None = None
    vectors: Mapping[str, Joints] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)

    def setting(self, name: str, default: Any) -> Any:
        """Return the value that the user passed with ``--set NAME=VALUE``; ``default`` if the user passed none."""
        return self.settings.get(name, default)

    def for_family(
        self, family: ModuleType, source: Path, common: Mapping[str, Setting] | None = None
    ) -> ConvertOptions:
        """Parse the settings with the types that the family declares.

        Args:
            family: The family's module. OPTIONS and SETTINGS list the options that it supports.
            source: The checkpoint, for messages.
            common: The settings that every family supports.

        Returns:
            The options with settings as values of their types.

        Raises:
            ConvertError: The family does not support an option or a setting. Ignoring it silently would hide the user's
                mistake.
        """
        for name in self.non_defaults:
            if name not in (*COMMON, *family.OPTIONS):
                supported = ", ".join(_flag(option) for option in family.OPTIONS) or "none"
                raise ConvertError(
                    f"{_flag(name)}: {source} is a checkpoint of {' or '.join(family.NAMES)}, which does not support"
                    f" this option; supported options: {supported}"
                )
        settings = {**family.SETTINGS, **(common or {})}
        for name in self.settings:
            if name not in settings:
                supported = "; ".join(f"{key}: {setting.help}" for key, setting in settings.items())
                raise ConvertError(
                    f"--set {name}: expected a setting of {' or '.join(family.NAMES)} ({supported or 'none'})"
                )
        values = {name: settings[name].parse(name, str(text)) for name, text in self.settings.items()}
        return replace(self, settings=values)

    @property
    def non_defaults(self) -> tuple[str, ...]:
        """Return the names of the options that the user set to another value than the default."""
        return tuple(
            f.name for f in fields(self) if getattr(self, f.name) != getattr(ConvertOptions(), f.name)
        )

    def record(self) -> dict[str, str]:
        """Return the options that the user set, as text that the bundle records. A path is recorded as its last two
        names."""
        texts: dict[str, str] = {}
        for name in self.non_defaults:
            value = getattr(self, name)
            if isinstance(value, Path):
                value = "/".join(value.resolve().parts[-2:])
            if name == "settings":
                texts |= {f"set {key}": _text(setting) for key, setting in value.items()}
            elif name == "motion":
                texts[name] = value.kind
            elif name == "vectors":
                texts |= {f"vectors.{key}": ", ".join(each.named(key).labels) for key, each in value.items()}
            else:
                texts[_flag(name)[2:]] = _text(value)
        return texts


COMPAT = get_args(get_type_hints(CheckpointFlags)["compat"])


def parse_motion(record: Mapping[str, Any] | None) -> MotionSpec | None:
    """Return the value of ``--motion``. The numbers are validated later, by the check of the whole bundle.

    Raises:
        ConvertError: The record is not a valid motion.
    """
    if record is None:
        return None
    try:
        return from_builtins(dict(record), MotionSpec, "--motion")
    except BundleError as error:
        raise ConvertError(str(error)) from None


def parse_vectors(record: Mapping[str, Any] | None) -> dict[str, Joints]:
    """Return the value of ``--vectors``: names and units of state and action.

    Raises:
        ConvertError: The value is not valid.
    """
    vectors = {}
    for key, values in (record or {}).items():
        if key not in ("state", "action") or not isinstance(values, Mapping):
            raise ConvertError(
                f"--vectors: expected state and action, each an object with names or units, got {key!r:.80}"
            )
        try:
            vectors[key] = from_builtins(dict(values), Joints, f"--vectors: {key}")
        except BundleError as error:
            raise ConvertError(str(error)) from None
        vectors[key].named(key)
    return vectors


def parse_settings(texts: Sequence[str]) -> dict[str, str]:
    """Return NAME -> VALUE from texts of the form ``NAME=VALUE``.

    Raises:
        ConvertError: A text has another form, or a name occurs twice.
    """
    values: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not name or not equals:
            raise ConvertError(f"--set {text}: expected NAME=VALUE")
        if name in values:
            raise ConvertError(
                f"--set {name}: expected one value, got {values[name]!r} and {value!r}; pass it once"
            )
        values[name] = value
    return values


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(value) if isinstance(value, tuple) else str(value)
