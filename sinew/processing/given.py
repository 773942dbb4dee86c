"""Convert a Python program's values to an :class:`Observation`: PIL images, torch tensors, LeRobot's flat keys.

Nothing is guessed: an ambiguous form is rejected. torch is not imported here, because a program with a tensor has
imported it already.
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
# What a row of a LeRobot data set holds besides, which no policy reads.
UNREAD = ("action", "timestamp", "frame_index", "episode_index", "index", "task_index")
UNREAD_PREFIXES = ("next.", "complementary_info.")
VECTORS = ("noise", "previous", "tokens")
# Modes of 8 bits, whose RGB is defined
PICTURES = ("RGB", "RGBA", "L", "P", "CMYK", "YCbCr", "HSV", "1", "LA")


def observation(given: Observation | Mapping[str, Any], spec: PolicySpec) -> Observation:
    """Return the observation in ``given``: one, a mapping of its fields, or a row with LeRobot's flat keys.

    Frames may be arrays [height, width, 3], PIL images, or torch tensors of either layout; leading axes of length 1 are
    dropped, and so they are of the state. LeRobot's keys: ``observation.images.<camera>``, ``observation.state``,
    ``task``. Raises :class:`ObservationError` with the key as it was given.
    """
    if isinstance(given, Observation):
        return given if _plain(given) else _converted(given, {})
    if not isinstance(given, Mapping):
        several = " (infer_all takes several)" if isinstance(given, list | tuple) else ""
        raise ObservationError("observation", f"an Observation or a mapping{several}", type(given).__name__)
    if any(isinstance(key, str) and key.startswith(LEROBOT) for key in given):
        own, names = _lerobot(given, spec)
        return _converted(Observation.from_mapping(own), names)
    return _converted(Observation.from_mapping(given), {})


def _plain(given: Observation) -> bool:
    """True for an observation as wires make them."""
    vectors = [value for name in VECTORS if (value := getattr(given, name)) is not None]
    return (
        not given.earlier
        and isinstance(given.images, Mapping)
        and {np.ndarray}.issuperset(map(type, (given.state, *vectors, *given.images.values())))
    )


def _converted(given: Observation, names: Mapping[str, str]) -> Observation:
    """names: of fields -> the user's own, for messages."""
    found: dict[str, Any] = {
        name: array(name, getattr(given, name)) for name in VECTORS if getattr(given, name) is not None
    }
    if isinstance(given.earlier, (list, tuple)):
        found["earlier"] = tuple(
            _moment(moment, f"earlier[{index}].", {}) for index, moment in enumerate(given.earlier)
        )
    own = _moment(Moment(given.images, given.state), "", names)
    return replace(given, images=own.images, state=own.state, **found)


def _moment(given: Any, prefix: str, names: Mapping[str, str]) -> Moment:
    """Return a moment, or a mapping of its fields, with arrays. Raises :class:`ObservationError`."""
    if isinstance(given, Mapping) and set(given) == {"images", "state"}:
        given = Moment(**given)
    if not isinstance(given, Moment):
        raise ObservationError(prefix.removesuffix("."), "images and state of a moment", type(given).__name__)
    if not isinstance(given.images, Mapping):
        raise ObservationError(f"{prefix}images", "a mapping of cameras", type(given.images).__name__)
    images = {
        camera: picture(names.get(f"images.{camera}", f"{prefix}images.{camera}"), frame)
        for camera, frame in given.images.items()
    }
    return Moment(images, _state(names.get("state", f"{prefix}state"), given.state))


def picture(key: str, value: Any) -> Any:
    """Return one frame as uint8, or floats in [0, 1], [height, width, 3].

    value: an array, a PIL image of 8 bits a channel, or a torch tensor. [3, height, width] is turned where
    [height, width, 3] does not fit. Raises :class:`ObservationError`.
    """
    if hasattr(value, "getbands") and hasattr(value, "convert"):  # PIL.Image.Image
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
    return frame  # the processor looks at the rest


def array(key: str, value: Any) -> np.ndarray:
    """Return a torch tensor, or real numbers that numpy accepts, as an array. Raises :class:`ObservationError`."""
    if type(value).__module__.partition(".")[0] == "torch" and hasattr(value, "detach"):
        value = value.detach().cpu()
        if str(value.dtype) == "torch.bfloat16":  # numpy lacks it, and float32 represents it exactly
            value = value.float()
        value = value.numpy()
    return numbers(key, value)


def _state(key: str, value: Any) -> np.ndarray:
    state = array(key, value)
    while state.ndim > 1 and state.shape[0] == 1:
        state = state[0]
    return state


def _lerobot(given: Mapping[str, Any], spec: PolicySpec) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the fields of an observation, and what the user called them."""
    slots = {f"{LEROBOT}images.{camera.name}": camera.name for camera in spec.cameras}
    slots |= {LEROBOT + camera.name: camera.name for camera in spec.cameras if camera.name != "state"}
    options = {f.name for f in fields(Observation)} - {"images", "state", "prompt"}
    own: dict[str, Any] = {"images": {}}
    names: dict[str, str] = {}
    for key, value in given.items():
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
    """The instruction, or the only one of a batch."""
    if isinstance(value, (list, tuple)) and len(value) == 1:
        value = value[0]
    if not isinstance(value, str):
        raise ObservationError(key, "one text", f"{type(value).__name__}")
    return value


def _known(slots: Iterable[str]) -> str:
    frames = [key for key in slots if key.startswith(f"{LEROBOT}images.")]
    return f"one of {', '.join([*frames, f'{LEROBOT}state', 'task'])}, or a field of sinew.core.Observation"
