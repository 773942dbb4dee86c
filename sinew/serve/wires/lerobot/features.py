"""Creates the agreement between a LeRobot client and the served policy (which key belongs to which input), and converts
observations with it.

The client names a policy, a device and the features of its robot before its first observation. A robot's raw
observation is flat: a number per joint, a frame per camera, and the task. The features state which keys form the
state, and in which order.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from sinew_client.untrusted import named, shown

from sinew.core import Observation, ObservationError, PolicySpec
from sinew.core.rate_limited_log import LogOnce
from sinew.serve.decode.frames import MAX_IMAGES, PixelBudget
from sinew.serve.wires import field_names
from sinew.serve.wires.lerobot.types import PolicyFeature, RemotePolicyConfig, TimedObservation

logger = logging.getLogger(__name__)
_once = LogOnce(logger)

DEFAULT_HZ = 30.0  # control rate of bundles that do not state one; the default of LeRobot's server
MAX_NAME = 256  # longest name of a joint or a camera, characters
_STATE = "observation.state"
_IMAGES = "observation.images."


@dataclass(frozen=True, slots=True)
class Agreement:
    """The mapping from a client's raw keys to an observation.

    Attributes:
        state: Raw keys in the policy's order.
        images: Pairs of a raw key and a camera.
        prompt: Raw key of the instruction.
        channels_first: True if a frame of shape [3, height, 3] has its channels first.
        actions: The number of actions of a chunk that the client requests.
        helpers: Module of the client's classes.
    """

    state: tuple[str, ...]
    images: tuple[tuple[str, str], ...]
    prompt: str
    channels_first: bool | None
    actions: int
    helpers: str


def agree(config: RemotePolicyConfig, spec: PolicySpec) -> Agreement:
    """Return the agreement with a client: how the keys of its robot map to the inputs of the policy.

    Raises:
        ObservationError: The client's request does not fit the policy. The error names the field.
    """
    _same_policy(config, spec)
    if config.actions_per_chunk < 1:
        raise ObservationError("actions_per_chunk", "a number above 0", str(config.actions_per_chunk))
    bundle = next(iter(field_names.key_maps(spec, "lerobot")), None)
    features = _renamed(config)
    state = _state_names(features, spec)
    if bundle is not None and not set(bundle.state) <= {_STATE}:
        missing = [name for name in bundle.state if name not in state]
        if missing:
            raise ObservationError(f"lerobot_features.{_STATE}", _names(bundle.state), _names(state))
        state = bundle.state
    if len(state) != spec.state.dim:
        expected = f"{spec.state.dim} names" + (f" ({_names(spec.state.names)})" if spec.state.names else "")
        raise ObservationError(f"lerobot_features.{_STATE}", expected, f"{len(state)} ({_names(state)})")
    if sorted(state) == sorted(spec.state.names) and state != spec.state.names:
        # Actions are returned in the policy's order, so another order of the state would give wrong actions
        # without an error.
        raise ObservationError(
            f"lerobot_features.{_STATE}", f"the order {_names(spec.state.names)}", _names(state)
        )
    cameras = _cameras(features, spec, bundle.images if bundle is not None else {})
    return Agreement(
        state=state,
        images=tuple(cameras.items()),
        prompt=bundle.prompt if bundle is not None else "task",
        channels_first=bundle.channels_first if bundle is not None else None,
        actions=min(config.actions_per_chunk, spec.chunk_size),
        helpers=config.helpers,
    )


def observation(
    timed: TimedObservation, agreement: Agreement, budget: PixelBudget | None = None
) -> Observation:
    """Convert a client's raw observation to an observation for the policy. Frames keep the camera's size.

    Raises:
        ObservationError: A key is missing, or a value is wrong.
    """
    raw = timed.observation
    read = {*agreement.state, *(key for key, _camera in agreement.images), agreement.prompt, "task"}
    for key in raw.keys() - read:
        _once.warning(f"lerobot: the policy does not read {shown(key)}")
    budget = budget or PixelBudget()
    images = {}
    for key, camera in agreement.images:
        frame = _value(raw, key)
        if not isinstance(frame, np.ndarray):
            raise ObservationError(key, "an array [height, width, 3]", type(frame).__name__)
        frame = field_names.frame(key, frame, budget, agreement.channels_first)
        images[camera] = np.require(frame, requirements="A")
    task = raw.get(agreement.prompt, raw.get("task", ""))
    if not isinstance(task, str):
        raise ObservationError(agreement.prompt, "text", type(task).__name__)
    numbers = [field_names.number(key, _value(raw, key)) for key in agreement.state]
    # Ignore the overflow here, because numbers that become infinite are rejected later.
    with np.errstate(over="ignore"):
        state = np.array(numbers, np.float32)
    return Observation(
        images=images, state=state, prompt=field_names.text(agreement.prompt, task), time=timed.timestamp
    )


def _same_policy(config: RemotePolicyConfig, spec: PolicySpec) -> None:
    """Raise ObservationError if the client names another checkpoint than the served one."""
    served = f"{spec.name!r} of type {spec.architecture!r}, the policy that this server serves"
    if config.policy_type != spec.architecture:
        raise ObservationError("policy_type", f"{spec.architecture!r} ({served})", shown(config.policy_type))
    name = config.pretrained_name_or_path
    if spec.name not in (name, name.rstrip("/").rpartition("/")[2]):
        raise ObservationError("pretrained_name_or_path", served, shown(name))


def _renamed(config: RemotePolicyConfig) -> dict[str, tuple[str, Any]]:
    """Rename the client's features with its ``rename_map``. Return a mapping from the policy's name of each feature to
    the client's key and the feature.
    """
    renamed: dict[str, tuple[str, Any]] = {}
    for key, feature in config.lerobot_features.items():
        name = config.rename_map.get(key, key)
        if not _is_name(key) or not _is_name(name):
            raise ObservationError(
                "lerobot_features", f"names of at most {MAX_NAME} characters", "other names"
            )
        if name in renamed:
            raise ObservationError("rename_map", "one feature for each name", f"two for {name}")
        renamed[name] = (key, feature)
    return renamed


def _state_names(features: Mapping[str, tuple[str, Any]], spec: PolicySpec) -> tuple[str, ...]:
    _key, feature = features.get(_STATE, ("", None))
    names = feature.get("names") if isinstance(feature, dict) else None
    if not isinstance(names, (list, tuple)) or not all(map(_is_name, names)):
        got = (
            "no names, or names that are not short text"
            if isinstance(feature, (dict, PolicyFeature))
            else "nothing"
        )
        raise ObservationError(f"lerobot_features.{_STATE}", f"the names of {spec.state.dim} numbers", got)
    return tuple(names)


def _cameras(
    features: Mapping[str, tuple[str, Any]], spec: PolicySpec, by_bundle: Mapping[str, str]
) -> dict[str, str]:
    """Return raw key -> camera. The bundle's key map decides if it has the key. Otherwise the name decides.

    A camera has two names: the robot's name, and the slot's name, which comes from the checkpoint's
    ``rename_map``. A name from the client's ``rename_map`` is first searched among the slots. Any other name is
    first searched among the robot's names.

    If the client has every camera of the policy, further cameras are ignored. If a camera is missing, further
    cameras are rejected: one of them may be the missing camera under another name, and a guess by order could
    swap views without an error.
    """
    own = [camera.name for camera in spec.cameras]
    slots = {camera.slot: camera.name for camera in spec.cameras if camera.slot}
    by_name = dict(zip(own, own, strict=True))
    cameras: dict[str, str] = {}
    # Entries are (short name, raw key, camera with this second name).
    others: list[tuple[str, str, str | None]] = []
    for name, (key, _feature) in features.items():
        if not name.startswith(_IMAGES):
            continue
        short, raw = name.removeprefix(_IMAGES), key.removeprefix(_IMAGES)
        first, second = (by_name, slots) if name == key or short not in slots else (slots, by_name)
        camera = by_bundle.get(name, by_bundle.get(short, first.get(short)))
        if camera not in own:
            others.append((short, raw, second.get(short)))
        elif camera in cameras.values():
            raise ObservationError(
                "lerobot_features", f"one camera as {camera}", f"two; the second one is {raw}"
            )
        else:
            cameras[raw] = camera
    strange = []
    for short, raw, camera in others:
        if camera is None or camera in cameras.values():
            strange.append(short)
        else:
            cameras[raw] = camera
    if len(cameras) > MAX_IMAGES:
        raise ObservationError("lerobot_features", f"at most {MAX_IMAGES} cameras", str(len(cameras)))
    missing = [name for name in own if name not in cameras.values()]
    if not cameras or (strange and missing):
        robots = {camera: key.removeprefix(_IMAGES) for key, camera in by_bundle.items()}
        example = f"{{'{_IMAGES}{(strange or ['top'])[0][:40]}': '{_IMAGES}{missing[0]}'}}"
        raise ObservationError(
            "lerobot_features",
            f"cameras {_names([robots.get(name, name) for name in own])} (use these names on the robot, or send a"
            f" rename_map such as {example})",
            f"cameras {_names([*cameras, *strange])}",
        )
    if strange:
        _once.warning(f"lerobot: the policy does not read the cameras {_names(strange)}")
    return cameras


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= MAX_NAME


def _value(raw: Mapping[str, Any], key: str) -> Any:
    if key not in raw:
        raise ObservationError(
            key, "a value, because the client announced this feature", f"nothing; keys are {_names(raw)}"
        )
    return raw[key]


def _names(names: Any) -> str:
    texts = [named(name, 40) for name in names]
    return ", ".join(texts[:16]) + (", ..." if len(texts) > 16 else "") if texts else "none"
