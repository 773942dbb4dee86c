"""Your own training configuration of openpi as a JSON file: the entries of a ``TrainConfig`` that its checkpoint
lacks, with openpi's names (``training/config.py``, ``transforms.py``).
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
PADDED = 32  # numbers of openpi's padded states and actions
FIELDS: dict[str, tuple[Callable[[Any], object], str]] = {
    "like": (lambda v: v in OPENPI_CONFIGS, f"one of {', '.join(OPENPI_CONFIGS)}"),
    "model": (lambda v: v in ("pi0", "pi05"), "pi0 or pi05"),
    "action_horizon": (lambda v: _whole(v) and v > 0, "a whole number above 0"),
    "discrete_state_input": (lambda v: isinstance(v, bool), "true or false"),
    "default_prompt": (lambda v: isinstance(v, str), "a sentence"),
    "images": (
        lambda v: isinstance(v, dict) and v and set(v.values()) <= {*SLOTS} and len(set(v.values())) == len(v),
        f"an object, the robot's key to the model's view, each of {', '.join(SLOTS)} once at most",
    ),
    "state": (
        lambda v: isinstance(v, list) and v and all(isinstance(key, str) for key in v),
        "a list of the robot's keys, whose numbers are joined in this order",
    ),
    "state_dim": (lambda v: _whole(v) and 0 < v <= PADDED, f"a whole number from 1 to {PADDED}"),
    "action_dim": (lambda v: _whole(v) and 0 < v <= PADDED, f"a whole number from 1 to {PADDED}"),
    "delta_mask": (
        lambda v: isinstance(v, list) and all(_whole(n) and n for n in v),
        "a list of whole numbers as make_bool_mask takes them, [6, -1] for six relative and one absolute",
    ),
}  # fmt: skip


def own_config(path: Path, stats: JsonRecord) -> OpenPIConfig:
    """Read a training configuration.

    Without ``like``, which names a published configuration to start from, ``model`` and ``images`` are required.

    Args:
        path: The file.
        stats: norm_stats.json. Its widths are the robot's if nothing else states them and they are not padded.

    Raises:
        ConvertError: A field is wrong.
    """
    given = JsonRecord(path)
    for key, value in given.content.items():
        if key not in FIELDS:
            raise ConvertError(
                f"{path}: {key}: expected one of {', '.join(FIELDS)}{did_you_mean(key, FIELDS)}"
            )
        fits, expected = FIELDS[key]
        if not fits(value):
            raise ConvertError(f"{path}: {key}: expected {expected}, got {value!r}")
    like = OPENPI_CONFIGS[given["like"]] if "like" in given.content else None
    robot = like.embodiment if like else None
    state_dim, action_dim = (
        given.get(f"{name}_dim") or (spec.dim if spec else _dim(stats, key, path, f"{name}_dim"))
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
            f"{path}: state_dim, action_dim: expected {robot.state.dim} and {robot.action.dim}, whose units"
            f" {given['like']} changes one by one, got {state_dim} and {action_dim}"
        )
    images = given.get("images") or (robot.keys.images if robot else given["images"])
    keys = robot.keys if robot else KeyMap("openpi", {}, ("observation/state",))
    keys = replace(keys, images=images, state=tuple(given.get("state", keys.state)))
    relative, is_relative = robot.relative if robot else (), bool(like and like.relative_actions)
    if "delta_mask" in given.content:
        mask = [number > 0 for number in given["delta_mask"] for _ in range(abs(number))]
        if len(mask) > (most := min(state_dim, action_dim)):
            raise ConvertError(
                f"{path}: delta_mask: expected at most {most} numbers of state and action, got {len(mask)}"
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
        pi05=given["model"] == "pi05" if "model" in given.content or like is None else like.pi05,
        chunk_size=given.get("action_horizon", like.chunk_size if like else 0),
        relative_actions=is_relative,
        state_in_prompt=given.get("discrete_state_input", like.state_in_prompt if like else True),
        default_prompt=given.get("default_prompt", like.default_prompt if like else ""),
        # A mask says how this run's actions differ from those of the configuration that it is like
        motion=like.motion
        if like and "delta_mask" not in given.content and action_dim == like.embodiment.action.dim
        else None,
        control_hz=like.control_hz if like else None,
    )


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _dim(stats: JsonRecord, key: str, path: Path, name: str) -> int:
    """Return the count of numbers in the statistics, if they do not have the padded width."""
    found = stats.part("norm_stats").part(key)["mean"]
    if not isinstance(found, list) or not 0 < len(found) < PADDED:
        raise ConvertError(
            f"{path}: {name}: expected the robot's count of numbers, which {stats.path} does not say, got none"
        )
    return len(found)
