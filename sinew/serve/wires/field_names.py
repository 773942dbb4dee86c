"""Convert a client's message to an :class:`Observation`, for protocols whose messages map names to values.

The bundle defines a robot's names of cameras and joints (``PolicySpec.keys``). Without an entry for a protocol, the
bundle's own names apply, in any spelling that clients use.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
from sinew_client.types import MOST_TOGETHER
from sinew_client.untrusted import named

from sinew.core import KeyMap, Moment, Observation, ObservationError, PolicySpec, RequestError
from sinew.processing.arrays import numbers
from sinew.processing.given import LEROBOT as _LEROBOT
from sinew.processing.given import PROMPT_KEYS, UNREAD, UNREAD_PREFIXES
from sinew.serve.decode.frames import MAX_IMAGES, PixelBudget

MAX_DEPTH = 4  # largest nesting depth of containers
MAX_KEYS = 256  # largest number of keys of one observation, in all containers together
MAX_KEY = 512  # longest key in characters, including the keys of its containers
MAX_PROMPT = 1 << 16  # characters
MAX_NUMBERS = 1 << 16  # largest number of values of a state, a noise or a chunk

# Accepted keys of a camera's frame and of the state, for bundles without a key map for the protocol. {} is
# the camera's name.
_CAMERA_KEYS = ("images/{}", "observation.images.{}", "observation/images/{}", "observation/{}", "{}")
_FRAME_PREFIXES = ("images/", "observation.images.", "observation/images/")
_STATE_KEYS = ("state", "observation.state", "observation/state")


def flatten(tree: Mapping[Any, Any]) -> dict[str, Any]:
    """Convert nested mappings to one mapping, with keys joined by "/".

    Raises:
        ObservationError: The mapping is too deep, has too many keys or a key that is too long, or two values
            have the same key.
    """
    flat: dict[str, Any] = {}
    _walk(tree, "", 1, flat)
    return flat


def _walk(node: Mapping[Any, Any], path: str, depth: int, found: dict[str, Any]) -> None:
    """Flatten one mapping into ``found``.

    The function is not defined inside ``flatten``, because a recursive inner function is a reference cycle. The
    frames would then stay in memory until the garbage collector runs.
    """
    if depth > MAX_DEPTH:
        raise ObservationError(path, f"at most {MAX_DEPTH} levels of containers", "more")
    for key, value in node.items():
        if not isinstance(key, (str, bytes)):
            raise ObservationError(path or "observation", "text as keys", type(key).__name__)
        name = key if isinstance(key, str) else key.decode("utf-8", "replace")
        if len(path) + len(name) > MAX_KEY:
            raise ObservationError(path or name[:40], f"keys of at most {MAX_KEY} characters", "a longer key")
        full = f"{path}/{name}" if path else name
        if isinstance(value, dict):
            _walk(value, full, depth + 1, found)
        elif full in found:
            raise ObservationError(
                full,
                "one value",
                "two values, one in a container and one under the joined key; send only one of them",
            )
        else:
            found[full] = value
        if len(found) > MAX_KEYS:
            raise ObservationError("observation", f"at most {MAX_KEYS} keys", "more")


def key_maps(spec: PolicySpec, wire: str) -> list[KeyMap]:
    """Return the bundle's key maps for a protocol. A key map assigns the names that a robot uses in this protocol to
    the policy's inputs. The list may be empty.
    """
    return [keys for keys in spec.keys if keys.wire == wire]


def camera_keys(spec: PolicySpec, wire: str) -> dict[str, str]:
    """Return a mapping from each camera to the key under which this protocol's clients send its frame. If several keys
    are accepted, the first one is returned.
    """
    for keys in key_maps(spec, wire):
        return {camera: key for key, camera in keys.images.items()}
    return {camera.name: _CAMERA_KEYS[0].format(camera.name) for camera in spec.cameras}


def state_keys(spec: PolicySpec, wire: str) -> tuple[str, ...]:
    """Return the keys of this protocol's messages whose values are joined, in this order, to the state."""
    for keys in key_maps(spec, wire):
        return keys.state
    return (_STATE_KEYS[0],)


def prompt_key(spec: PolicySpec, wire: str) -> str:
    for keys in key_maps(spec, wire):
        return keys.prompt
    return PROMPT_KEYS[0]


def keys_read(spec: PolicySpec, wire: str) -> frozenset[str]:
    """Return the keys under which this protocol's clients may send the policy's inputs."""
    maps = key_maps(spec, wire)
    cameras = [key for camera in spec.cameras for key in _spellings(camera.name)]
    if maps:
        named_keys = ({*keys.images, *keys.state, keys.prompt, *keys.unread} for keys in maps)
        return frozenset(cameras).union(*named_keys)
    return frozenset((*cameras, *_STATE_KEYS, *PROMPT_KEYS))


def read_observation(
    flat: Mapping[str, Any],
    spec: PolicySpec,
    wire: str,
    budget: PixelBudget | None = None,
    beside: Collection[str] = (),
    **extra: Any,
) -> Observation:
    """Return the observation in a flattened mapping of arrays, numbers and text.

    An unknown key is rejected: it may be a misspelt camera or state, or an option that would be ignored.

    Args:
        flat: The mapping.
        spec: The policy's specification.
        wire: The protocol.
        budget: Budget of pixels.
        beside: Further allowed keys, which the protocol reads itself or ignores.
        **extra: Further fields of the Observation.

    Raises:
        ObservationError: A key is missing, wrong or unknown.
    """
    budget = budget or PixelBudget()
    maps = key_maps(spec, wire)
    keys = next((k for k in maps if any(key in flat for key in k.images)), maps[0] if maps else None)
    frames: dict[str, Any] = {}
    cameras = _cameras(spec, keys)
    for camera, candidates in cameras.items():
        key = next((key for key in candidates if key in flat), None)
        if key is not None:
            frames[camera] = (key, flat[key])
    if not frames:
        names = ", ".join(candidates[0] for candidates in cameras.values())
        raise ObservationError("images", f"a frame under one of the keys {names}", f"keys {_some(flat)}")
    if len(frames) > MAX_IMAGES:
        raise ObservationError("images", f"at most {MAX_IMAGES}", str(len(frames)))
    unread = {key for each in maps for key in each.unread}
    _refuse_strange_frames(flat, cameras, {key for key, _value in frames.values()} | unread)
    prompts = (keys.prompt, *PROMPT_KEYS) if keys is not None else PROMPT_KEYS
    states = keys.state if keys is not None else _STATE_KEYS
    known_keys = {key for key, _value in frames.values()} | unread | {*states, *prompts, *beside}
    _refuse_unknown(
        flat, known_keys, [*(some[0] for some in cameras.values()), states[0], prompts[0], *beside]
    )
    channels_first = keys.channels_first if keys is not None else None
    seen = {
        camera: _frames(key, value, budget, channels_first, spec.history)
        for camera, (key, value) in frames.items()
    }
    (key, _value), moments = next(iter(frames.values())), {len(each) for each in seen.values()}
    if len(moments) > 1:
        raise ObservationError(
            key, "the same number of observation steps for each camera", ", ".join(map(str, sorted(moments)))
        )
    places = _state(flat, spec, keys, *moments)
    *earlier, newest = (
        Moment({camera: each[index] for camera, each in seen.items()}, state)
        for index, state in enumerate(places)
    )
    return Observation(
        images=newest.images,
        state=newest.state,
        earlier=tuple(earlier),
        prompt=_prompt(flat, prompts),
        **extra,
    )


def frame(key: str, value: Any, budget: PixelBudget, channels_first: bool | None = None) -> np.ndarray:
    """Return one picture as uint8, or float in [0, 1], [height, width, 3].

    Both layouts are accepted, as in openpi's own servers. Leading axes of length 1 are dropped.

    Args:
        key: Key of the picture, for errors.
        value: The picture.
        budget: Budget of pixels.
        channels_first: True if a shape that fits both layouts is [3, height, width]. Other shapes are
            unambiguous.

    Raises:
        ObservationError: The value is not a picture, or exceeds the budget.
    """
    array = numbers(key, value)
    if array.dtype.kind not in "uf" or (array.dtype.kind == "u" and array.dtype != np.uint8):
        raise ObservationError(key, "uint8 or float pixels", f"dtype {array.dtype}")
    while array.ndim > 3 and array.shape[0] == 1:
        array = array[0]
    if array.ndim != 3:
        raise ObservationError(key, "[height, width, 3]", f"shape {list(array.shape)}")
    if array.shape[0] == 3 and (channels_first or array.shape[2] != 3):
        array = array.transpose(1, 2, 0)
    if array.shape[2] != 3:
        raise ObservationError(key, "three colour channels", f"shape {list(array.shape)}")
    budget.take(key, array.shape[0], array.shape[1])
    return array if array.dtype == np.uint8 else array.astype(np.float32, copy=False)


def _frames(
    key: str, value: Any, budget: PixelBudget, channels_first: bool | None, most: int
) -> list[np.ndarray]:
    """Return the pictures of one camera, oldest first.

    Args:
        key: Key of the camera, for errors.
        value: A single picture, or pictures of several observation steps along a leading axis.
        budget: Budget of pixels.
        channels_first: See :func:`frame`.
        most: Largest number of observation steps.
    """
    array = numbers(key, value)
    while array.ndim > 3 and array.shape[0] == 1:
        array = array[0]
    if array.ndim != 4 or most == 1:
        return [frame(key, array, budget, channels_first)]
    if not 1 <= len(array) <= most:
        raise ObservationError(key, f"frames of 1 to {most} observation steps", f"shape {list(array.shape)}")
    return [frame(key, each, budget, channels_first) for each in array]


def _vectors(key: str, value: Any, moments: int) -> np.ndarray:
    """Return a vector for each observation step, float64 [moments, n].

    Args:
        key: Key of the value in the message, for errors.
        value: The received value: one vector, or one vector per step.
        moments: Number of observation steps.
    """
    if moments == 1:
        return vector(key, value)[None]
    array = numbers(key, value, MAX_NUMBERS)
    while array.ndim > 2 and array.shape[0] == 1:
        array = array[0]
    if array.ndim != 2 or len(array) != moments:
        raise ObservationError(
            key, f"a row of numbers for each of {moments} observation steps", f"shape {list(array.shape)}"
        )
    return array.astype(np.float64)


def vector(key: str, value: Any) -> np.ndarray:
    """Return values as float64 [n]. A scalar is one value, and leading axes of length 1 are dropped."""
    array = numbers(key, value, MAX_NUMBERS)
    while array.ndim > 1 and array.shape[0] == 1:
        array = array[0]
    if array.ndim > 1:
        raise ObservationError(key, "one row of numbers", f"shape {list(array.shape)}")
    return array.astype(np.float64).reshape(-1)


def text(key: str, value: Any) -> str:
    """Return a text, or the only text in a list or array of length 1. Bytes are decoded as UTF-8."""
    # Convert only arrays with one element, because larger arrays would take much more memory as lists.
    if isinstance(value, np.ndarray) and value.size == 1:
        value = value.item()
    while isinstance(value, (list, tuple)) and len(value) == 1:
        value = value[0]
    if isinstance(value, bytes):
        if len(value) > 4 * MAX_PROMPT:
            raise ObservationError(key, f"at most {MAX_PROMPT} characters", f"{len(value)} bytes")
        value = value.decode("utf-8", "replace")
    if not isinstance(value, str):
        raise ObservationError(key, "text", type(value).__name__)
    if len(value) > MAX_PROMPT:
        raise ObservationError(key, f"at most {MAX_PROMPT} characters", str(len(value)))
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ObservationError(key, "Unicode text", "code points that are not characters") from None
    return str(value)


def optional_text(key: str, value: Any) -> str:
    """Return a value as text (:func:`text`); "" if the value is None."""
    return "" if value is None else text(key, value)


def floats(key: str, value: Any) -> np.ndarray:
    """Convert a received value, such as nested lists, to a float32 array of any shape.

    Args:
        key: Key of the value in the message, for errors.
        value: The received value.
    """
    # Ignore the overflow here, because numbers that become infinite are rejected later.
    with np.errstate(over="ignore"):
        return numbers(key, value, MAX_NUMBERS).astype(np.float32)


def plain(value: Any) -> Any:
    """Return the only element of an array of length 1. Any other value is returned unchanged."""
    return value.item() if isinstance(value, (np.ndarray, np.generic)) and value.size == 1 else value


def truth(name: str, value: Any) -> bool:
    value = plain(value)
    if not isinstance(value, bool):
        raise ObservationError(name, "true or false", type(value).__name__)
    return value


def number(name: str, value: Any) -> float:
    value = plain(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ObservationError(name, "a number", type(value).__name__)
    try:
        return float(value)
    except OverflowError:
        raise ObservationError(name, "a number", "an integer that is too large for a float") from None


def integer(name: str, value: Any) -> int:
    value = plain(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ObservationError(name, "an integer", type(value).__name__)
    return value


# Accepted names of the guidance scale; image generators use the second name.
SCALES = ("guidance_scale", "cfg_scale")
# Key: name of an optional field of a request. Value: function that reads the field. The fields are seed, noise,
# solver_steps, time, adapter, the fields of real-time chunking, the fields that request text, and an advantage with the
# scale of its guidance.
_KINDS: dict[str, Callable[[str, Any], Any]] = {
    **dict.fromkeys(("seed", "solver_steps", "delay", "horizon", "text_tokens"), integer),
    **dict.fromkeys(("noise", "previous"), floats),
    **dict.fromkeys(("time", "beta", *SCALES), number),
    **dict.fromkeys(("rtc", "schedule", "question", "adapter", "advantage"), text),
    **dict.fromkeys(("subtask", "text_only"), truth),
}
OPTIONS = tuple(_KINDS)


def options(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return the optional fields of an observation, such as ``seed``, by name.

    Raises:
        ObservationError: A field has the wrong type or value.
    """
    values = {name: read(name, flat[name]) for name, read in _KINDS.items() if flat.get(name) is not None}
    if "question" in values and not values["question"].strip():
        raise ObservationError("question", "text", "an empty string")
    if scales := {values.pop(name) for name in SCALES if name in values}:
        if len(scales) > 1:
            raise ObservationError(
                SCALES[1], f"one scale, as {SCALES[0]}", "two values; send only one of the keys"
            )
        values[SCALES[0]] = scales.pop()
    return values


SEVERAL = "observations"  # key of the list in a message with several observations


def members_of(tree: Mapping[str, Any], alone: Sequence[str]) -> list[Mapping[str, Any]]:
    """Return the observations of a message with several observations.

    Args:
        tree: The message.
        alone: Keys that apply to all observations. These keys may be in the message, but not in an observation.

    Raises:
        RequestError: The list of observations or a key is wrong.
    """
    members = tree[SEVERAL]
    if not isinstance(members, list) or not 0 < len(members) <= MOST_TOGETHER:
        got = f"{len(members)}" if isinstance(members, list) else type(members).__name__
        raise RequestError(f"{SEVERAL}: expected a list of 1 to {MOST_TOGETHER} maps, got {got}")
    if beside := [key for key in tree if key not in (SEVERAL, *alone)]:
        raise RequestError(f"{named(beside[0], 40)}: move it into the entries of {SEVERAL}")
    for index, each in enumerate(members):
        if not isinstance(each, Mapping):
            raise RequestError(f"{SEVERAL}[{index}]: expected a map, got {type(each).__name__}")
        if inside := [key for key in (SEVERAL, "endpoint", *alone) if key in each]:
            raise RequestError(
                f"{SEVERAL}[{index}].{inside[0]}: not allowed in an observation; move it into the message"
            )
    return members


def _cameras(spec: PolicySpec, keys: KeyMap | None) -> dict[str, Sequence[str]]:
    """Return camera -> keys under which its frame may come.

    The first key is the one of the key map. The camera's own name, which may come from `--rename`, is also
    accepted.
    """
    if keys is not None:
        taken = {*keys.images, *keys.unread}
        return {
            camera: (key, *(each for each in _spellings(camera) if each not in taken))
            for key, camera in keys.images.items()
        }
    return {camera.name: _spellings(camera.name) for camera in spec.cameras}


@functools.lru_cache(maxsize=64)
def _spellings(camera: str) -> tuple[str, ...]:
    return tuple(form.format(camera) for form in _CAMERA_KEYS)


def _refuse_strange_frames(
    flat: Mapping[str, Any], cameras: Mapping[str, Sequence[str]], taken: set[str]
) -> None:
    """Check that every frame of a message belongs to a camera of the policy.

    Args:
        flat: The message.
        cameras: Camera -> keys under which its frame may come.
        taken: Keys of the frames that were already assigned to cameras.

    Raises:
        ObservationError: A frame belongs to no camera.
    """
    for key, value in flat.items():
        named = key.startswith(_FRAME_PREFIXES)
        looks = isinstance(value, np.ndarray) and value.ndim >= 3 and key != "noise"
        if key not in taken and (named or looks):
            first_keys = [candidates[0] for candidates in cameras.values()]
            close = difflib.get_close_matches(key, [each for some in cameras.values() for each in some], n=1)
            hint = f"; did you mean {close[0]!r}?" if close and close[0] not in taken else ""
            raise ObservationError(
                key[:100], f"one of the cameras {', '.join(first_keys)}", f"an unknown camera{hint}"
            )


def _refuse_unknown(flat: Mapping[str, Any], known: Collection[str], shown: Sequence[str]) -> None:
    """Raise ObservationError for a key that the server does not read. The error message lists the keys in ``shown``."""
    # A row of a LeRobot data set has further entries that no policy reads.
    rows = any(key.startswith(_LEROBOT) for key in flat)
    for key in flat:
        if key in known or (
            rows and (key in UNREAD or key.startswith(UNREAD_PREFIXES) or key.endswith("_is_pad"))
        ):
            continue
        raise ObservationError.unknown(key, known, f"one of the keys {', '.join(shown)}")


def _state(flat: Mapping[str, Any], spec: PolicySpec, keys: KeyMap | None, moments: int) -> np.ndarray:
    """Return the robot's state for each observation step, float64 [moments, D].

    Args:
        flat: The message.
        spec: The policy's specification.
        keys: The bundle's key map; None without one.
        moments: Number of observation steps.
    """
    if keys is not None:
        missing = [key for key in keys.state if key not in flat]
        if missing:
            raise ObservationError(missing[0], "numbers of the state", f"nothing; keys are {_some(flat)}")
        return np.concatenate([_vectors(key, flat[key], moments) for key in keys.state], axis=1)
    keys_present = [key for key in _STATE_KEYS if key in flat]
    if len(keys_present) > 1:
        raise ObservationError(
            keys_present[1], f"one state, as {keys_present[0]}", "two values; send only one of the keys"
        )
    if keys_present:
        return _vectors(keys_present[0], flat[keys_present[0]], moments)
    raise ObservationError("state", f"{spec.state.dim} numbers", f"nothing; keys are {_some(flat)}")


def _prompt(flat: Mapping[str, Any], candidates: Sequence[str]) -> str:
    prompts = {key: text(key, flat[key]) for key in candidates if flat.get(key) is not None}
    if len(set(prompts.values())) > 1:
        raise ObservationError(
            list(prompts)[1],
            f"one instruction, as {next(iter(prompts))}",
            "two values; send only one of the keys",
        )
    return next(iter(prompts.values()), "")


def _some(flat: Mapping[str, Any]) -> str:
    names = sorted(named(name, 40) for name in flat)
    return ", ".join(names[:12]) + (", ..." if len(names) > 12 else "") if names else "none"
