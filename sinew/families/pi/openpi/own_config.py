"""Read a user's own openpi training configuration from a JSON file.

The file contains those entries of openpi's ``TrainConfig`` that a checkpoint does not contain, with openpi's names
(``training/config.py``, ``transforms.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from sinew.convert.read.record import JsonRecord
from sinew.core import ConvertError, KeyMap, VectorSpec, did_you_mean
from sinew.families.pi.openpi.embodiments import BASE, LEFT, OPENPI_CONFIGS, RIGHT, OpenPIConfig, PiEmbodiment

SLOTS = (BASE, LEFT, RIGHT)
PADDED = 32  # width of openpi's padded states and actions
FIELDS: dict[str, tuple[Callable[[Any], object], str]] = {
    "like": (lambda v: v in OPENPI_CONFIGS, f"one of {', '.join(OPENPI_CONFIGS)}"),
    "model": (lambda v: v in ("pi0", "pi05"), "pi0 or pi05"),
    "action_horizon": (lambda v: _whole(v) and v > 0, "a whole number above 0"),
    "discrete_state_input": (lambda v: isinstance(v, bool), "true or false"),
    "default_prompt": (lambda v: isinstance(v, str), "a sentence"),
    "images": (
        lambda v: isinstance(v, dict) and v and set(v.values()) <= {*SLOTS} and len(set(v.values())) == len(v),
        f"an object from the robot's key to the model's view, with each of {', '.join(SLOTS)} at most once",
    ),
    "state": (
        lambda v: isinstance(v, list) and v and all(isinstance(key, str) for key in v),
        "a list of the robot's keys, in the order in which the state joins their numbers",
    ),
    "state_dim": (lambda v: _whole(v) and 0 < v <= PADDED, f"a whole number from 1 to {PADDED}"),
    "action_dim": (lambda v: _whole(v) and 0 < v <= PADDED, f"a whole number from 1 to {PADDED}"),
    "delta_mask": (
        lambda v: isinstance(v, list) and all(_whole(n) and n for n in v),
        "a list of whole numbers as for openpi's make_bool_mask, for example [6, -1]",
    ),
}  # fmt: skip


def own_config(path: Path, stats: JsonRecord) -> OpenPIConfig:
    """Read a training configuration.

    ``like`` names a published configuration that supplies the missing fields. Without ``like``, ``model`` and
    ``images`` are required.

    Args:
        path: The file.
        stats: norm_stats.json. Its widths are the robot's dimensions if no field sets the dimensions and the widths are
            not padded.

    Raises:
        ConvertError: A field is wrong.
    """
    settings = JsonRecord(path)
    for key, value in settings.content.items():
        if key not in FIELDS:
            raise ConvertError(
                f"{path}: {key}: expected one of {', '.join(FIELDS)}{did_you_mean(key, FIELDS)}"
            )
        fits, expected = FIELDS[key]
        if not fits(value):
            raise ConvertError(f"{path}: {key}: expected {expected}, got {value!r}")
    like = OPENPI_CONFIGS[settings["like"]] if "like" in settings.content else None
    robot = like.embodiment if like else None
    state_dim, action_dim = (
        settings.get(f"{name}_dim") or (spec.dim if spec else _dim(stats, key, path, f"{name}_dim"))
        for name, key, spec in (
            ("state", "state", robot and robot.state),
            ("action", "actions", robot and robot.action),
        )
    )
    if (
        robot
        and (robot.state_steps or robot.action_steps)
        and (state_dim, action_dim) != (robot.state.dim, robot.action.dim)
    ):
        raise ConvertError(
            f"{path}: state_dim, action_dim: expected {robot.state.dim} and {robot.action.dim}, because"
            f" {settings['like']} converts the unit of each dimension, got {state_dim} and {action_dim}"
        )
    images = settings.get("images") or (robot.keys.images if robot else settings["images"])
    keys = robot.keys if robot else KeyMap("openpi", {}, ("observation/state",))
    keys = replace(keys, images=images, state=tuple(settings.get("state", keys.state)))
    relative, is_relative = robot.relative if robot else (), bool(like and like.relative_actions)
    if "delta_mask" in settings.content:
        mask = [number > 0 for number in settings["delta_mask"] for _ in range(abs(number))]
        if len(mask) > (most := min(state_dim, action_dim)):
            raise ConvertError(
                f"{path}: delta_mask: expected at most {most} dimensions, the smaller of state and action, got"
                f" {len(mask)}"
            )
        relative, is_relative = tuple(i for i, delta in enumerate(mask) if delta), any(mask)
    own = PiEmbodiment(
        name=path.stem,
        cameras=tuple(slot for slot in SLOTS if slot in images.values()),
        state=robot.state if robot and robot.state.dim == state_dim else VectorSpec(state_dim),
        action=robot.action if robot and robot.action.dim == action_dim else VectorSpec(action_dim),
        keys=keys,
        relative=relative,
        state_steps=robot.state_steps if robot else (),
        action_steps=robot.action_steps if robot else (),
    )
    return OpenPIConfig(
        own,
        pi05=settings["model"] == "pi05" if "model" in settings.content or like is None else like.pi05,
        chunk_size=settings.get("action_horizon", like.chunk_size if like else 0),
        relative_actions=is_relative,
        state_in_prompt=settings.get("discrete_state_input", like.state_in_prompt if like else True),
        default_prompt=settings.get("default_prompt", like.default_prompt if like else ""),
        # A delta mask changes the meaning of the actions (absolute or relative), so the ``motion`` of the configuration
        # in ``like`` is not valid any more.
        motion=like.motion
        if like and "delta_mask" not in settings.content and action_dim == like.embodiment.action.dim
        else None,
        control_hz=like.control_hz if like else None,
    )


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _dim(stats: JsonRecord, key: str, path: Path, name: str) -> int:
    """Return the number of values in the statistics of a vector.

    Raises:
        ConvertError: The statistics have openpi's padded width, so the robot's dimension is unknown.
    """
    mean = stats.part("norm_stats").part(key)["mean"]
    if not isinstance(mean, list) or not 0 < len(mean) < PADDED:
        raise ConvertError(
            f"{path}: {name} is missing. Add the robot's number of dimensions, because {stats.path} does not contain it"
        )
    return len(mean)
