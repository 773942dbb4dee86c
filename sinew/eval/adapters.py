"""Between a gymnasium environment and Sinew's observations and actions.

Adding an environment whose observation is a nested dict takes no code: write a JSON file with the fields of
:class:`Mapping` and give it as ``--adapter FILE.json``. Anything else: ``--adapter package.module:Class``.
"""

from __future__ import annotations

import importlib
import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Protocol

import gymnasium
import numpy as np

from sinew.core import SinewError

ADAPTERS = {"direct": "sinew.eval.adapters:Direct"}


class EnvAdapter(Protocol):
    """What the runner asks of an environment. One instance belongs to one environment."""

    control_hz: float
    max_steps: int

    def observation(self, raw: Any) -> dict[str, Any]:
        """The environment's observation -> ``images``, ``state``, ``prompt``."""

    def action(self, row: np.ndarray) -> Any:
        """A row of a chunk, float32 [D] in world units -> what ``step`` takes."""

    def hold(self, last: Any | None) -> Any:
        """What keeps the robot where it is, given the last action sent (None: none yet)."""

    def success(self, info: dict[str, Any], terminated: bool, reward: float) -> bool: ...

    def task(self, info: dict[str, Any]) -> str:
        """Name of the task of this episode; "/" separates parts that get rows of their own in reports."""


class Direct:
    """An environment whose observation is Sinew's, such as those of :mod:`sinew.sim`.

    To hold, an action of several numbers that moves relative to the present pose is all zeros but for the last
    number, the gripper, which stays; before the first action it opens. A single number stays, or is the low end.
    """

    def __init__(self, env: gymnasium.Env):
        self.env = env
        self.control_hz = _control_hz(env, None)
        self.max_steps = _max_steps(env, None)
        space = env.action_space
        if not isinstance(space, gymnasium.spaces.Box) or len(space.shape) != 1:
            raise SinewError(f"action space: expected a Box of one dimension, got {space}")
        self._low, self._high = space.low, space.high

    def observation(self, raw: Any) -> dict[str, Any]:
        if not isinstance(raw, dict) or not {"images", "state"} <= raw.keys():
            raise SinewError(
                "observation: expected a dict with images, state and prompt, as Sinew's environments give;"
                f" got {sorted(raw) if isinstance(raw, dict) else type(raw).__name__}. Choose an --adapter"
            )
        return dict(raw)

    def action(self, row: np.ndarray) -> np.ndarray:
        return np.clip(row, self._low, self._high)

    def hold(self, last: np.ndarray | None) -> np.ndarray:
        if len(self._low) == 1:
            return self._low.copy() if last is None else last
        hold = np.zeros_like(self._low)
        hold[-1] = self._high[-1] if last is None else last[-1]
        return hold

    def success(self, info: dict[str, Any], terminated: bool, reward: float) -> bool:
        return bool(info["is_success"])

    def task(self, info: dict[str, Any]) -> str:
        return str(info.get("task", ""))


@dataclass(frozen=True)
class Mapping:
    """How an environment names things. Keys of nested dicts are joined with "/"; "" is the whole observation.

    images: camera of the policy -> key of a uint8 frame. state: keys whose values are concatenated.
    prompt: the instruction; empty takes the environment's ``task_description``.
    hold: "last" repeats the last action (absolute actions), "zero" sends zeros (relative ones).
    success: key of ``info``. control_hz, max_steps: where the environment does not say.
    """

    images: dict[str, str]
    state: tuple[str, ...]
    prompt: str = ""
    task: str = ""
    hold: str = "last"
    success: str = "is_success"
    control_hz: float | None = None
    max_steps: int | None = None


class Mapped:
    """An environment described by a :class:`Mapping`."""

    def __init__(self, env: gymnasium.Env, mapping: Mapping):
        self.env, self.mapping = env, mapping
        self.control_hz = _control_hz(env, mapping.control_hz)
        self.max_steps = _max_steps(env, mapping.max_steps)
        self._last_raw: Any = None

    def observation(self, raw: Any) -> dict[str, Any]:
        self._last_raw = raw
        prompt = self.mapping.prompt or str(getattr(self.env.unwrapped, "task_description", ""))
        return {
            "images": {camera: _find(raw, key) for camera, key in self.mapping.images.items()},
            "state": self._state(raw),
            "prompt": prompt,
        }

    def _state(self, raw: Any) -> np.ndarray:
        return np.concatenate([np.ravel(_find(raw, key)) for key in self.mapping.state]).astype(np.float32)

    def action(self, row: np.ndarray) -> np.ndarray:
        space = self.env.action_space
        assert isinstance(space, gymnasium.spaces.Box)
        return np.clip(row, space.low, space.high)

    def hold(self, last: np.ndarray | None) -> np.ndarray:
        zeros = np.zeros(self.env.action_space.shape or (), np.float32)
        if self.mapping.hold == "zero":
            return zeros
        if last is not None:
            return last
        state = self._state(self._last_raw)  # absolute actions: the present state, where it has the same size
        return state if state.shape == zeros.shape else zeros

    def success(self, info: dict[str, Any], terminated: bool, reward: float) -> bool:
        return bool(info.get(self.mapping.success, False))

    def task(self, info: dict[str, Any]) -> str:
        return self.mapping.task or str(info.get("task", getattr(self.env.unwrapped, "task", "")))


# ----------------------------------------------------------------------------- making


def make_env(
    env_id: str, adapter: str = "", env_options: dict[str, Any] | None = None, **extra: Any
) -> tuple[gymnasium.Env, EnvAdapter]:
    """An environment and its adapter. ``extra`` (such as ``render_mode``) goes to the constructor as well."""
    if env_id.startswith("sinew/"):
        importlib.import_module("sinew.sim")  # registers them
    try:
        # The checker warns about images inside nested dicts on every reset; the runner checks what it uses.
        env = gymnasium.make(env_id, disable_env_checker=True, **{**(env_options or {}), **extra})
    except (gymnasium.error.Error, ModuleNotFoundError, TypeError, ValueError) as error:
        raise SinewError(f"cannot make the environment {env_id}: {error}") from error
    return env, _adapter(adapter or "direct", env)


def _adapter(name: str, env: gymnasium.Env) -> EnvAdapter:
    if name.endswith(".json"):
        return Mapped(env, read_mapping(Path(name)))
    module, separator, attribute = ADAPTERS.get(name, name).partition(":")
    if not separator:
        raise SinewError(
            f"adapter: expected one of {', '.join(ADAPTERS)}, a .json file or module:Class, got {name!r}"
        )
    try:
        return getattr(importlib.import_module(module), attribute)(env)
    except (ImportError, AttributeError) as error:
        raise SinewError(f"adapter {name}: {error}") from error


def read_mapping(path: Path) -> Mapping:
    """A :class:`Mapping` from a JSON object; an unknown or missing key is an error that names it."""
    try:
        values = json.loads(path.read_text())
    except ValueError as error:
        raise SinewError(f"{path}: {error}") from error
    known = {f.name for f in fields(Mapping)}
    if not isinstance(values, dict) or not {"images", "state"} <= values.keys() <= known:
        raise SinewError(f"{path}: expected an object with images and state, keys of {sorted(known)}")
    return Mapping(**{**values, "state": tuple(values["state"])})


def _find(raw: Any, key: str) -> np.ndarray:
    for part in filter(None, key.split("/")):
        if not isinstance(raw, dict) or part not in raw:
            got = sorted(raw) if isinstance(raw, dict) else type(raw).__name__
            raise SinewError(f"observation: expected the key {key!r}, got {got}")
        raw = raw[part]
    return np.asarray(raw)


def _control_hz(env: gymnasium.Env, given: float | None) -> float:
    rate = given or getattr(env.unwrapped, "control_hz", None) or env.metadata.get("render_fps")
    if not rate:
        raise SinewError(
            "the environment has neither control_hz nor render_fps; give control_hz in an adapter"
        )
    return float(rate)


def _max_steps(env: gymnasium.Env, given: int | None) -> int:
    limit = given or (env.spec.max_episode_steps if env.spec is not None else None)
    if not limit:
        raise SinewError("the environment has no max_episode_steps; give max_steps in an adapter")
    return int(limit)
