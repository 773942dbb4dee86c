"""Adapters between a gymnasium environment and Sinew's observations and actions.

An environment whose observation is a nested dict needs no code. Write a JSON file with the fields of :class:`Mapping`
and pass it as ``--adapter FILE.json``. For any other environment, write a class and pass ``--adapter
package.module:Class``. The module :mod:`sinew_eval.suites` has the adapters of public benchmarks.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Sequence
from collections.abc import Mapping as AnyMapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Protocol

import gymnasium
import numpy as np
from sinew.core import SinewError, hints
from sinew.core.registry import action_units, place_of, plain
from sinew_client.documentation import page
from sinew_client.modules import ModuleError, load_module, load_named
from sinew_client.untrusted import read_json, shown

from sinew_eval import suites
from sinew_eval.episodes.settings import ADAPTERS, TASKS_GROUP
from sinew_eval.suites.conventions import ACTIONS, STATES, turned
from sinew_eval.suites.mapping import Mapping


class EnvAdapter(Protocol):
    """Interface between the runner of episodes and an environment. It converts observations and actions. Each
    environment has its own instance.
    """

    @property
    def control_hz(self) -> float: ...

    @property
    def max_steps(self) -> int:
        """Maximum number of control steps in the present episode."""

    def observation(self, raw: Any) -> dict[str, Any]:
        """Convert an observation of the environment for the policy.

        Args:
            raw: Observation from ``reset`` or ``step``.

        Returns:
            A dict with ``images``, ``state`` and ``prompt``.
        """

    def action(self, row: np.ndarray) -> Any:
        """Convert an action of the policy for the environment.

        Args:
            row: One action, float32 [D], in robot units.

        Returns:
            The argument of the environment's ``step``.
        """

    def hold(self, last: Any | None) -> Any:
        """Return the action that keeps the robot in its present place.

        Args:
            last: The action that was executed last. None before the first action.
        """

    def success(self, info: dict[str, Any], terminated: bool, reward: float) -> bool: ...

    def task(self, info: dict[str, Any]) -> str:
        """Return the name of this episode's task.

        Args:
            info: Info dict of the last ``reset`` or ``step``.

        Returns:
            A name. "/" separates parts, and reports have a row for each part.
        """


class Direct:
    """Adapter for an environment that already returns Sinew's observations, such as those of :mod:`sinew_eval.sim`.

    To hold the robot, an action of several numbers is zero except for the gripper, which is the last number and keeps
    its value. The gripper opens before the first action. An action of a single number keeps its value. Before the
    first action it is the low end of the action space.
    """

    def __init__(self, env: gymnasium.Env):
        self.env = env
        self.control_hz = _control_hz(env, None)
        self.max_steps = _max_steps(env, None)
        space = env.action_space
        if not isinstance(space, gymnasium.spaces.Box) or len(space.shape) != 1:
            raise SinewError(f"action space: expected a gymnasium Box with one dimension, got {space}")
        self._low, self._high = space.low, space.high

    def observation(self, raw: Any) -> dict[str, Any]:
        if not isinstance(raw, dict) or not {"images", "state"} <= raw.keys():
            names = sorted(raw) if isinstance(raw, dict) else type(raw).__name__
            parts = "{'images': {'front': 'PART'}, 'state': ['PART'], 'prompt': 'what to do'}"
            way = hints.choice(f"adapter={parts}", "--adapter mapping.json")
            raise SinewError(
                "observation: expected a dict with images, state and prompt, as Sinew's environments return;"
                f" got {names}. Name its parts: {way} (see {page('eval')})"
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


class Mapped:
    """Adapter that follows a :class:`Mapping`."""

    def __init__(self, env: gymnasium.Env, mapping: Mapping):
        self.env, self.mapping = env, mapping
        self.control_hz = _control_hz(env, mapping.control_hz)
        self._images = mapping.images
        self._convert = ACTIONS["as_is" if isinstance(mapping.action, dict) else mapping.action]
        self._last_raw: Any = None

    @property
    def max_steps(self) -> int:
        return _max_steps(self.env, self.mapping.max_steps)

    def fit(self, policy: AnyMapping[str, Any]) -> None:
        """Choose a frame for each camera of a policy, and the conversion of its actions.

        Args:
            policy: Metadata of the policy, as a server returns them.

        Raises:
            SinewError: The policy does not fit the environment.
        """
        self._images = self._frames_for([camera["name"] for camera in policy["cameras"]])
        self.fit_actions(policy)

    def fit_actions(self, policy: AnyMapping[str, Any]) -> None:
        """Choose the conversion of a policy's actions.

        Args:
            policy: Metadata of the policy, as a server returns them.

        Raises:
            SinewError: The policy's actions do not fit the environment.
        """
        self._convert = ACTIONS[self._action_of(policy)]
        shape, dim = self.env.action_space.shape, int(policy["action"]["dim"])
        if shape and shape != (dim,):
            raise SinewError(
                f"the policy's actions have {dim} numbers, but the environment expects {shape[0]}; choose another"
                " policy or environment"
            )

    def _frames_for(self, cameras: Sequence[str]) -> dict[str, str]:
        frames = {}
        for camera in cameras:
            names = [key for key, others in self.mapping.known_as.items() if camera in others]
            if key := self.mapping.images.get(camera) or next(iter(names), ""):
                frames[camera] = key
        lost = [camera for camera in cameras if camera not in frames and camera not in self.mapping.unseen]
        if lost or not frames:
            names_by_key = {
                **self.mapping.known_as,
                **{key: (name,) for name, key in self.mapping.images.items()},
            }
            example = json.dumps({"cameras": {cameras[0]: next(iter(names_by_key), "")}})
            raise SinewError(
                f"the environment has no frame for the policy's cameras {', '.join(lost or cameras)}; name a frame for"
                " each camera,"
                f" one of {', '.join(names_by_key)}: --env-options '{example}'"
            )
        return frames

    def _action_of(self, policy: AnyMapping[str, Any]) -> str:
        if isinstance(self.mapping.action, str):
            return self.mapping.action
        architecture = str(policy["architecture"])
        units = [unit for unit in policy["action"]["units"] if unit in self.mapping.action]
        units = units or list(action_units(architecture))
        for said, action in self.mapping.action.items():
            if said and (said in units or plain(said) == plain(architecture)):
                return action
        if "" in self.mapping.action:
            return self.mapping.action[""]
        stated_units = ", ".join(filter(None, policy["action"]["units"])) or "none"
        raise SinewError(
            f"the policy's action.units: expected one of {', '.join(self.mapping.action)}, got {stated_units}; choose"
            f" the conversion of its gripper, one of {', '.join(ACTIONS)}, as an option of the environment:"
            f" '{json.dumps({'action': 'as_is'})}' (--env-options, --robot-options of sinew run)"
        )

    def observation(self, raw: Any) -> dict[str, Any]:
        self._last_raw = raw
        prompt = self.mapping.prompt or str(getattr(self.env.unwrapped, "task_description", ""))
        images = {camera: _find(raw, key) for camera, key in self._images.items()}
        if self.mapping.turned:
            images = {camera: turned(frame) for camera, frame in images.items()}
        return {"images": images, "state": self._state(raw), "prompt": prompt}

    def _state(self, raw: Any) -> np.ndarray:
        parts = []
        for entry in self.mapping.state:
            key, _, name = entry.partition("|")
            value = _find(raw, key)
            parts.append(np.ravel(STATES[name](value) if name else value))
        return np.concatenate(parts).astype(np.float32)

    def action(self, row: np.ndarray) -> np.ndarray:
        row = self._convert(row)
        space = self.env.action_space
        if not self.mapping.clip:
            return row
        assert isinstance(space, gymnasium.spaces.Box)
        return np.clip(row, space.low, space.high)

    def hold(self, last: np.ndarray | None) -> np.ndarray:
        # The environment defines its own way to hold, which takes precedence over the mapping.
        if hasattr(self.env.unwrapped, "hold_action"):
            return self.env.unwrapped.hold_action(last)
        zeros = np.zeros(self.env.action_space.shape or (), np.float32)
        if self.mapping.hold == "zero":
            return zeros
        if self.mapping.hold == "rest":
            rest = np.array(self.mapping.rest, np.float32)
            rest[-1] = rest[-1] if last is None else last[-1]
            return rest
        if last is not None:
            return last
        # With absolute actions, hold the present state if it has the size of an action.
        state = self._state(self._last_raw)
        return state if state.shape == zeros.shape else zeros

    def success(self, info: dict[str, Any], terminated: bool, reward: float) -> bool:
        return bool(info.get(self.mapping.success, False))

    def task(self, info: dict[str, Any]) -> str:
        return self.mapping.task or str(info.get("task", getattr(self.env.unwrapped, "task", "")))


def make_env(
    env_id: str, adapter: str = "", env_options: dict[str, Any] | None = None, **extra: Any
) -> tuple[gymnasium.Env, EnvAdapter]:
    """Make an environment and its adapter.

    Args:
        env_id: Gymnasium id, ``module:id``, ``module:Class``, or the name that an installed package registers.
        adapter: Name of the adapter. "" to choose the adapter by the environment's id.
        env_options: Arguments of the environment's constructor.
        **extra: Further arguments of the constructor, such as ``render_mode``.

    Returns:
        The environment and its adapter.

    Raises:
        SinewError: The environment or the adapter cannot be made.
    """
    if (suite := suites.find(env_id)) is not None:
        return _open_suite(*suite, adapter, env_options or {})
    env_id = place_of(TASKS_GROUP, env_id)
    if env_id.startswith("sinew/"):
        # Importing the module registers its environments with gymnasium.
        importlib.import_module("sinew_eval.sim")
    module, colon, name = env_id.partition(":")
    # Gymnasium accepts "module:Env-v0" and imports the module first. An environment class needs no such id.
    try:
        made = getattr(load_module(module, f"env {env_id}"), name, None) if colon else None
    except ModuleError as error:
        raise SinewError(str(error)) from error
    options = {**(env_options or {}), **extra}
    try:
        # Gymnasium's checker would print a warning at every reset for images in nested dicts. The runner checks
        # the fields that it uses.
        env = made(**options) if made else gymnasium.make(env_id, disable_env_checker=True, **options)
    except (gymnasium.error.Error, ModuleNotFoundError, TypeError, ValueError) as error:
        own = (
            ""
            if made
            else "; pass your own environment as MODULE:CLASS, or as MODULE:ID if the module registers it"
        )
        raise SinewError(f"cannot make the environment {env_id}: {error}{own}") from error
    return env, named_adapter(adapter or "direct", env)


def _open_suite(
    suite: suites.Suite, tasks: Sequence[str], adapter: str, options: dict[str, Any]
) -> tuple[gymnasium.Env, EnvAdapter]:
    """Open tasks of a suite.

    Args:
        suite: The suite.
        tasks: Names of the tasks.
        adapter: Name of an adapter. "" for the suite's own mapping.
        options: Options of ``--env-options``. ``cameras``, ``prompt``, ``action`` and ``max_steps`` change the
            mapping. All others are arguments of the simulator.

    Returns:
        The environment and its adapter.
    """
    module = importlib.import_module(suite.module)
    options = dict(options)
    changes: dict[str, Any] = {k: options.pop(k) for k in ("prompt", "action", "max_steps") if k in options}
    if "cameras" in options:
        changes["images"] = options.pop("cameras")
    with SinewError.at(f"--env-options for {suite.name}", TypeError):
        env = module.Simulator(tasks, **options)
    if suite.control_hz and not getattr(env, "control_hz", None):
        # A user's adapter may not state the control rate, so set the suite's rate on the environment.
        env.control_hz = suite.control_hz
    if adapter:
        return env, named_adapter(adapter, env)
    return env, Mapped(env, replace(getattr(env, "mapping", module.MAPPING), **changes))


def named_adapter(name: str, env: gymnasium.Env) -> EnvAdapter:
    """Make an adapter from its name.

    Args:
        name: A key of ``ADAPTERS``, a .json file, or ``module:Class``.
        env: The environment.

    Returns:
        The adapter.

    Raises:
        SinewError: The name is unknown, or the adapter cannot be made.
    """
    if name.endswith(".json"):
        return Mapped(env, read_mapping(Path(name)))
    named = ADAPTERS.get(name, name)
    if ":" not in named:
        raise SinewError(
            f"adapter: expected one of {', '.join(ADAPTERS)}, a .json file or module:Class, got {name!r}"
        )
    try:
        return load_named(named, f"adapter {name}")(env)
    except SinewError:
        raise
    except ModuleError as error:
        raise SinewError(str(error)) from error
    # A user's adapter class can raise any exception.
    except Exception as error:
        raise SinewError(f"adapter {name}: {type(error).__name__}: {error}") from error


def read_mapping(path: Path) -> Mapping:
    """Read a :class:`Mapping` from a JSON file.

    Args:
        path: The file.

    Returns:
        The mapping.

    Raises:
        SinewError: The file is not readable, or a key is unknown, missing or has a wrong value.
    """
    with SinewError.at(path, ValueError, OSError):
        values = read_json(path)
    field_names = {f.name for f in fields(Mapping)}
    if not isinstance(values, dict) or not {"images", "state"} <= values.keys() <= field_names:
        raise SinewError(
            f"{path}: expected an object with images and state, and only keys of {sorted(field_names)}"
        )
    with SinewError.at(path, SinewError):
        for name, value in values.items():
            words, fits = _MAPPING[name]
            if not fits(value):
                raise SinewError(f"{name}: expected {words}, got {shown(value)}")
        return mapping_of(values)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _is_named(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_text, value.values()))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


_TEXT = ("a text", _is_text)
_FLAG = ("true or false", lambda value: isinstance(value, bool))
# Key: a field of a JSON mapping. Value: (description of the expected value, test of the value).
_MAPPING: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "images": ("an object of texts", _is_named),
    "state": ("a list of texts", _are_texts),
    **dict.fromkeys(("prompt", "task", "hold", "success"), _TEXT),
    "control_hz": (
        "a number above 0, or null",
        lambda value: value is None or (_is_number(value) and value > 0),
    ),
    "max_steps": (
        "a whole number from 1, or null",
        lambda value: value is None or (type(value) is int and value > 0),
    ),
    "known_as": (
        "an object of lists of texts",
        lambda value: isinstance(value, dict) and all(map(_are_texts, value.values())),
    ),
    "unseen": ("a list of texts", _are_texts),
    **dict.fromkeys(("turned", "clip"), _FLAG),
    "action": ("a text, or an object of texts", lambda value: _is_text(value) or _is_named(value)),
    "rest": ("a list of numbers", lambda value: isinstance(value, list) and all(map(_is_number, value))),
}


def mapping_of(values: AnyMapping[str, Any]) -> Mapping:
    """Build a :class:`Mapping` from a JSON object.

    Args:
        values: Fields of the mapping. Lists become tuples.

    Returns:
        The mapping.

    Raises:
        TypeError: A key is not a field of :class:`Mapping`.
    """
    lists = {name: tuple(values[name]) for name in ("state", "unseen", "rest") if name in values}
    return Mapping(**{**values, **lists})


def _find(raw: Any, key: str) -> np.ndarray:
    for part in filter(None, key.split("/")):
        if not isinstance(raw, dict) or part not in raw:
            got = sorted(raw) if isinstance(raw, dict) else type(raw).__name__
            raise SinewError(f"observation: expected the key {key!r}, got {got}")
        raw = raw[part]
    return np.asarray(raw)


def _control_hz(env: gymnasium.Env, override: float | None) -> float:
    rate = override or getattr(env.unwrapped, "control_hz", None) or env.metadata.get("render_fps")
    if not rate:
        raise SinewError(
            "the environment has neither control_hz nor render_fps; set control_hz in an adapter"
        )
    return float(rate)


def _max_steps(env: gymnasium.Env, override: int | None) -> int:
    limit = override or time_limit(env)
    if not limit:
        raise SinewError(
            "the environment does not state the number of control steps of an episode; add an attribute max_steps,"
            " register"
            " the environment with max_episode_steps, or set max_steps in an adapter"
        )
    return int(limit)


def time_limit(env: gymnasium.Env) -> int | None:
    """Read the maximum number of control steps from an environment, its id, or a wrapper around it.

    Args:
        env: The environment.

    Returns:
        The number of steps. None if the environment states none.
    """
    limit = getattr(env.unwrapped, "max_steps", None)
    if not limit and env.spec is not None:
        limit = env.spec.max_episode_steps
    while not limit and isinstance(env, gymnasium.Wrapper):
        # Gymnasium's TimeLimit wrapper has no public attribute for its limit.
        limit = getattr(env, "_max_episode_steps", None)
        env = env.env
    return limit
