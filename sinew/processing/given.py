"""Convert the values of a Python program to an :class:`Observation`: PIL images, torch tensors, LeRobot's flat keys.

An ambiguous form is rejected instead of guessed. This module does not import torch, because a program with a tensor has
already imported it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from typing import Any

import numpy as np

from sinew.core import Moment, Observation, ObservationError, PolicySpec
from sinew.processing.arrays import numbers

LEROBOT = "observation."
PROMPT_KEYS = ("prompt", "task", "instruction")
# Further columns of a row in a LeRobot data set. No policy reads these columns, so they are ignored.
UNREAD = ("action", "timestamp", "frame_index", "episode_index", "index", "task_index")
UNREAD_PREFIXES = ("next.", "complementary_info.")
VECTORS = ("noise", "previous", "tokens")
# PIL modes with 8 bits per channel that convert to RGB in a defined way.
PICTURES = ("RGB", "RGBA", "L", "P", "CMYK", "YCbCr", "HSV", "1", "LA")


def observation(value: Observation | Mapping[str, Any], spec: PolicySpec) -> Observation:
    """Convert a value to an observation.

    Frames may be arrays [height, width, 3], PIL images, or torch tensors of either layout. Leading axes of length 1 of
    frames and of the state are dropped.

    Args:
        value: An observation, a mapping of its fields, or a row with LeRobot's flat keys:
            ``observation.images.<camera>``, ``observation.state``, ``task``.
        spec: The policy's specification.

    Raises:
        ObservationError: A value has the wrong form. The message names the user's own key.
    """
    if isinstance(value, Observation):
        return value if _plain(value) else _converted(value, {})
    if not isinstance(value, Mapping):
        several = " (infer_all takes several)" if isinstance(value, list | tuple) else ""
        raise ObservationError("observation", f"an Observation or a mapping{several}", type(value).__name__)
    if any(isinstance(key, str) and key.startswith(LEROBOT) for key in value):
        own, names = _lerobot(value, spec)
        return _converted(Observation.from_mapping(own), names)
    return _converted(Observation.from_mapping(value), {})


def _plain(value: Observation) -> bool:
    """Return True if an observation contains only arrays and needs no conversion, like those that the server's
    protocols create."""
    vectors = [vector for name in VECTORS if (vector := getattr(value, name)) is not None]
    return (
        not value.earlier
        and isinstance(value.images, Mapping)
        and {np.ndarray}.issuperset(map(type, (value.state, *vectors, *value.images.values())))
    )


def _converted(value: Observation, names: Mapping[str, str]) -> Observation:
    """Convert the fields of an observation to arrays. ``names`` maps a field to the user's own key, for messages."""
    converted: dict[str, Any] = {
        name: array(name, getattr(value, name)) for name in VECTORS if getattr(value, name) is not None
    }
    if isinstance(value.earlier, (list, tuple)):
        converted["earlier"] = tuple(
            _moment(moment, f"earlier[{index}].", {}) for index, moment in enumerate(value.earlier)
        )
    own = _moment(Moment(value.images, value.state), "", names)
    return replace(value, images=own.images, state=own.state, **converted)


def _moment(value: Any, prefix: str, names: Mapping[str, str]) -> Moment:
    """Convert the values of an observation step, or of a mapping of its fields, to arrays.

    Args:
        value: The observation step.
        prefix: Prefix of its fields, for messages.
        names: Field -> the user's own key, for messages.
    """
    if isinstance(value, Mapping) and set(value) == {"images", "state"}:
        value = Moment(**value)
    if not isinstance(value, Moment):
        raise ObservationError(
            prefix.removesuffix("."), "images and state of an observation step", type(value).__name__
        )
    if not isinstance(value.images, Mapping):
        raise ObservationError(f"{prefix}images", "a mapping of cameras", type(value.images).__name__)
    images = {
        camera: picture(names.get(f"images.{camera}", f"{prefix}images.{camera}"), frame)
        for camera, frame in value.images.items()
    }
    return Moment(images, _state(names.get("state", f"{prefix}state"), value.state))


def picture(key: str, value: Any) -> Any:
    """Convert one frame to uint8, or floats in [0, 1], [height, width, 3].

    Args:
        key: The field, for messages.
        value: An array, a PIL image with 8 bits per channel, or a torch tensor. [3, height, width] is transposed if
            [height, width, 3] does not fit.

    Raises:
        ObservationError: The value is not a frame.
    """
    # Only PIL.Image.Image has both methods.
    if hasattr(value, "getbands") and hasattr(value, "convert"):
        if value.mode not in PICTURES:
            raise ObservationError(key, "a PIL image of 8 bits a channel", f"mode {value.mode!r}")
        return np.asarray(value.convert("RGB"))
    frame = array(key, value)
    while frame.ndim > 3 and frame.shape[0] == 1:
        frame = frame[0]
    if frame.ndim == 3 and frame.shape[2] != 3 and frame.shape[0] == 3:
        frame = np.ascontiguousarray(frame.transpose(1, 2, 0))
    if frame.dtype.kind == "f" and frame.dtype != np.float32:
        frame = frame.astype(np.float32)
    return frame  # the processor checks its size and its values


def array(key: str, value: Any) -> np.ndarray:
    """Convert a torch tensor, or real numbers that numpy accepts, to an array.

    Raises:
        ObservationError: The value is not an array of real numbers.
    """
    if type(value).__module__.partition(".")[0] == "torch" and hasattr(value, "detach"):
        value = value.detach().cpu()
        if str(value.dtype) == "torch.bfloat16":  # numpy has no bfloat16; float32 represents it exactly
            value = value.float()
        value = value.numpy()
    return numbers(key, value)


def _state(key: str, value: Any) -> np.ndarray:
    state = array(key, value)
    while state.ndim > 1 and state.shape[0] == 1:
        state = state[0]
    return state


def _lerobot(row: Mapping[str, Any], spec: PolicySpec) -> tuple[dict[str, Any], dict[str, str]]:
    """Convert a row with LeRobot's flat keys.

    Returns:
        The fields of an observation, and a dict from each field to the user's own key.
    """
    slots = {f"{LEROBOT}images.{camera.name}": camera.name for camera in spec.cameras}
    slots |= {LEROBOT + camera.name: camera.name for camera in spec.cameras if camera.name != "state"}
    options = {f.name for f in fields(Observation)} - {"images", "state", "prompt"}
    own: dict[str, Any] = {"images": {}}
    names: dict[str, str] = {}
    for key, value in row.items():
        if key == f"{LEROBOT}state":
            own["state"], names["state"] = value, key
        elif (camera := slots.get(key)) is not None:
            if camera in own["images"]:
                raise ObservationError(
                    key, f"one frame of {camera}", f"another as {names[f'images.{camera}']}"
                )
            own["images"][camera], names[f"images.{camera}"] = value, key
        elif key in PROMPT_KEYS:
            if "prompt" in own:
                raise ObservationError(key, "one instruction", "two")
            own["prompt"] = _text(key, value)
        elif key in options:
            own[key] = value
        elif key not in UNREAD and not key.startswith(UNREAD_PREFIXES) and not key.endswith("_is_pad"):
            raise ObservationError.unknown(key, slots, _known(slots))
    if "state" not in own and spec.state.dim:
        raise ObservationError(f"{LEROBOT}state", "a value", "nothing")
    own.setdefault("state", np.zeros(0, np.float32))
    return own, names


def _text(key: str, value: Any) -> str:
    """Return the instruction as text. ``value`` may also be a list with one instruction, as in a batch."""
    if isinstance(value, (list, tuple)) and len(value) == 1:
        value = value[0]
    if not isinstance(value, str):
        raise ObservationError(key, "one text", f"{type(value).__name__}")
    return value


def _known(slots: Iterable[str]) -> str:
    frames = [key for key in slots if key.startswith(f"{LEROBOT}images.")]
    return f"one of {', '.join([*frames, f'{LEROBOT}state', 'task'])}, or a field of sinew.core.Observation"
