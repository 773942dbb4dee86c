"""Flags that several verbs share: what runs a bundle, and how its observations are named."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from sinew.core import SinewError

if TYPE_CHECKING:
    from sinew.processing import Allowed

Engine = Literal["auto", "eager", "plan", "cpu", "onnx", "cuda"]
Providers = Annotated[tuple[str, ...], Parameter(name="--provider", negative="")]
Flag = Annotated[bool, Parameter(negative="")]
Texts = Annotated[tuple[str, ...], Parameter(negative="")]


@Parameter(name="*")
@dataclass(frozen=True)
class Runs:
    """What runs a bundle.

    Attributes:
        engine: eager, plan, cpu, onnx or cuda; auto takes the fastest that is installed, fits the device, follows the
            bundle's recipe and is proved for it.
        provider: of ONNX Runtime, in order of preference: cpu, cuda, tensorrt, openvino, coreml, qnn.
        device: cpu, or cuda:N; auto takes a GPU where PyTorch has one.
        dtype: fp32, bf16, fp16, or native for what the bundle stores; the device's default if absent.
        ignore_recipe: run a quantised bundle unquantised where the engine does not compute its recipe.
    """

    engine: Engine = "auto"
    provider: Providers = ()
    device: str = "auto"
    dtype: str | None = None
    ignore_recipe: Flag = False

    def keywords(self) -> dict[str, Any]:
        """Return the arguments of ``sinew.load``."""
        return {
            "engine": self.engine,
            "providers": self.provider,
            "device": self.device,
            "dtype": self.dtype,
            "ignore_recipe": self.ignore_recipe,
        }


@Parameter(name="*")
@dataclass(frozen=True)
class Cameras:
    """How the cameras of observations are named, and what observations may lack.

    Attributes:
        rename: NEW=CAMERA, repeatable: the bundle's CAMERA is called NEW by your robot, as front=camera1.
        allow_missing_cameras: take observations without a frame of some cameras; each reply then carries a warning.
        allow_empty_prompt: take observations without an instruction, for a policy that was trained without one.
    """

    rename: Texts = ()
    allow_missing_cameras: Flag = False
    allow_empty_prompt: Flag = False

    def keywords(self) -> dict[str, Any]:
        """Return the arguments of ``sinew.load``."""
        from sinew.bundle.rename import parse_renames

        return {
            "rename": parse_renames(self.rename),
            **self.allowed,
        }

    @property
    def allowed(self) -> Allowed:
        """Return the arguments of :class:`sinew.processing.Processor`."""
        return {
            "allow_missing_cameras": self.allow_missing_cameras,
            "allow_empty_prompt": self.allow_empty_prompt,
        }


RUNS, CAMERAS = Runs(), Cameras()


def json_object(name: str, text: str | None) -> dict[str, Any] | None:
    """Return what a flag says as JSON; None where it is absent. Raises :class:`SinewError`."""
    if text is None:
        return None
    try:
        value = json.loads(text)
    except ValueError as error:
        raise SinewError(f"{name}: expected a JSON object: {error}") from error
    if not isinstance(value, dict):
        raise SinewError(f"{name}: expected a JSON object, got {text}")
    return value
