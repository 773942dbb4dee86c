"""Flags that several commands share: options of engines, names of cameras, and types of numbers."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, get_type_hints

from cyclopts import Parameter, validators
from sinew_client.untrusted import parse_json

from sinew.core import SinewError
from sinew.engine.backend import AUTO, BACKENDS

if TYPE_CHECKING:
    from sinew.processing import Allowed

    Engine = str
else:
    Engine = Literal[(AUTO, *reversed(tuple(BACKENDS)))]  # includes engines of other distributions
Providers = Annotated[tuple[str, ...], Parameter(name="--provider", negative="")]
Flag = Annotated[bool, Parameter(negative="")]
Texts = Annotated[tuple[str, ...], Parameter(negative="")]
Count = Annotated[int, Parameter(validator=validators.Number(gte=1))]
CountIfAny = Annotated[int | None, Parameter(validator=validators.Number(gte=1))]
Whole = Annotated[int, Parameter(validator=validators.Number(gte=0))]
WholeIfAny = Annotated[int | None, Parameter(validator=validators.Number(gte=0))]
Positive = Annotated[float, Parameter(validator=validators.Number(gt=0))]
PositiveIfAny = Annotated[float | None, Parameter(validator=validators.Number(gt=0))]
NotNegative = Annotated[float, Parameter(validator=validators.Number(gte=0))]
# An option without a flag, which a user sets with --set NAME=VALUE, in a settings file or in the environment.
_NO_FLAG = Parameter(show=False)
_T = TypeVar("_T")
Setting = Annotated[_T, _NO_FLAG]


@Parameter(name="*", group="Engine")
@dataclass(frozen=True)
class Runs:
    """The options for running a bundle.

    Attributes:
        engine: Execution engine: auto, eager, plan, cpu, onnx or cuda. auto takes the fastest one that is
            installed, fits the device and the bundle's quantisation recipe, and is verified for the policy.
        provider: ONNX Runtime execution providers, preferred first: cpu, cuda, tensorrt, openvino, coreml,
            qnn. Repeatable.
        device: Device: cpu or cuda:N. auto takes a GPU if PyTorch finds one.
        dtype: Compute type: fp32, bf16, fp16, or native for the type that the bundle stores. Default: the
            device's default.
        ignore_recipe: Run a quantised bundle without quantisation if the engine does not support its recipe.
    """

    engine: Engine = "auto"
    provider: Providers = ()
    device: str = "auto"
    dtype: str | None = None
    ignore_recipe: Flag = False

    def keywords(self) -> dict[str, Any]:
        """Return these options as arguments of ``sinew.load``."""
        own = asdict(self)
        return {"providers": own.pop("provider"), **own}


@dataclass(frozen=True)
class RobotEngine(Runs):
    """The options for running the policy that drives a robot: those of :class:`Runs`, some of them without a flag."""

    provider: Setting[Providers] = ()
    dtype: Setting[str | None] = None
    ignore_recipe: Setting[Flag] = False


@Parameter(name="*", group="Settings")
@dataclass(frozen=True)
class SettingFlags:
    """How a user sets the options that have no flag. ``sinew.cli.settings`` reads these flags before the command.

    Attributes:
        assignments: Set any option, also one without a flag, for example --set substeps=2. Repeatable.
        show_settings: List the options without a flag, with types and defaults, and end.
    """

    assignments: Annotated[tuple[str, ...], Parameter(name="--set", negative="")] = ()
    show_settings: Annotated[bool, Parameter(name="--settings", negative="")] = False


@Parameter(name="*", group="Cameras")
@dataclass(frozen=True)
class Cameras:
    """The names of the cameras in observations, and the inputs that observations may omit.

    Attributes:
        rename: Camera names of your robot, as NEW=CAMERA, for example front=camera1. Repeatable.
        allow_missing_cameras: Accept observations without some cameras. Each reply then carries a warning.
        allow_empty_prompt: Accept observations without an instruction, for a policy that was trained without
            one.
    """

    rename: Texts = ()
    allow_missing_cameras: Flag = False
    allow_empty_prompt: Flag = False

    def keywords(self) -> dict[str, Any]:
        """Return these options as arguments of ``sinew.load``."""
        from sinew.bundle.rename import parse_renames

        return {"rename": parse_renames(self.rename), **self.allowed}

    @property
    def allowed(self) -> Allowed:
        """Return these options as arguments of :class:`sinew.processing.Processor`."""
        return {
            "allow_missing_cameras": self.allow_missing_cameras,
            "allow_empty_prompt": self.allow_empty_prompt,
        }


def changed(options: Any) -> str | None:
    """Return the first option whose value differs from its default, as a user writes it; None if no value differs."""
    usual, hints = type(options)(), get_type_hints(type(options), include_extras=True)
    for field in fields(options):
        if getattr(options, field.name) != getattr(usual, field.name):
            has_flag = _NO_FLAG not in getattr(hints[field.name], "__metadata__", ())
            return f"--{field.name.replace('_', '-')}" if has_flag else field.name
    return None


RUNS, ROBOT_ENGINE, SETTING_FLAGS, CAMERAS = Runs(), RobotEngine(), SettingFlags(), Cameras()


def motion_of(text: str | None) -> dict[str, Any] | None:
    """Parse the value of --motion: the name of a kind ("absolute" or "as is"), or a JSON object."""
    return {"kind": text} if text in ("absolute", "as is") else json_object("--motion", text)


def json_object(name: str, text: str | None) -> dict[str, Any] | None:
    """Parse the JSON object of an option; None if the option is absent.

    Raises:
        SinewError: The text is not a JSON object.
    """
    if text is None:
        return None
    with SinewError.at(f"{name}: expected a JSON object", ValueError):
        value = parse_json(text)
    if not isinstance(value, dict):
        raise SinewError(f'{name}: expected a JSON object such as {{"key": "value"}}, got {text}')
    return value
