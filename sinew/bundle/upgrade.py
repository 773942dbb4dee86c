"""Upgrade the metadata of older bundle formats while the header is read. Tensors never change.

Fields that a format does not define are left unchanged, so that the decoder rejects them by name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from sinew.core import BundleError

# Key: version of the bundle format. Value: the change that this version introduced.
NEWS = {
    2: "a decoder names its norm and activation instead of a family",
    3: "frames, prompts and vectors are lists of steps, and each step has only the fields of its kind",
}

# Format 1 of bundles stored the name of a model family in place of a decoder's norm and activation.
DECODERS = {"llama": {}, "gemma": {"norm": "gemma_rms", "activation": "gelu_tanh"}}

# Format 2 of bundles stored all fields in every processing step. This table lists the fields that each kind
# of step reads.
IMAGE_STEPS = {
    "resize": ("height", "width", "method", "other_sizes"),
    "centre_crop": ("height", "width", "area"),
    "jpeg": ("quality", "other_sizes"),
    "square": (),
    "short_side": ("edge", "method"),
    "crop": ("height", "width", "fraction", "rounded"),
    "grid": ("unit", "min_pixels", "max_pixels", "method"),
}
IMAGE_DEFAULTS = {
    "height": 0,
    "width": 0,
    "method": "lanczos3",
    "area": 1.0,
    "quality": 95,
    "other_sizes": False,
    "edge": 0,
    "fraction": 0.0,
    "rounded": False,
    "unit": 0,
    "min_pixels": 0,
    "max_pixels": 0,
}
VECTOR_STEPS = {
    "affine": ("dims", "scale", "offset"),
    "linear_to_angle": ("dims", "arm", "horn"),
    "add_state": ("dims", "state_dims"),
    "compose_pose": ("dims", "state_dims"),
    "threshold": ("dims", "offset", "below", "above"),
}
VECTOR_DEFAULTS: dict[str, Any] = {
    "dims": None,  # a step must state its dimensions, so this field has no default
    "scale": 1.0,
    "offset": 0.0,
    "arm": 0.0,
    "horn": 0.0,
    "state_dims": [],
    "below": 1.0,
    "above": -1.0,
}
PROMPT_DEFAULTS: dict[str, Any] = {
    "template": "{prompt}",
    "clean": False,
    "state_bins": 256,
    "state_values": 0,
    "ensure_suffix": "",
    "strip": False,
    "lower": False,
    "ensure_last": -1,
    "drop": [],
    "words_only": False,
    "as_list": False,
    "image_text": "",
    "image_tokens": 0,
    "placeholder": -1,
    "marker": -1,
    "markers": 0,
}
LETTERBOX = {"interpolation": "bilinear", "pad": "top_left", "pad_value": 0.0}


def upgraded(part: str, record: Any, version: int) -> Any:
    """Convert one record of a bundle to the current format.

    Args:
        part: Name of the record, such as "config" or "processing".
        record: The record.
        version: Format of the bundle.
    """
    if not isinstance(record, dict):
        return record
    if part == "config" and version < 2:
        return _config(record)
    if part == "processing" and version < 3:
        return record | {name: make(record[name]) for name, make in _PROCESSING.items() if name in record}
    return record


def _config(config: dict[str, Any]) -> dict[str, Any]:
    """Convert the configuration of format 1: replace each decoder's family by its norm and activation."""
    upgraded_config = dict(config)
    for part, record in config.items():
        if isinstance(record, dict) and (fields := DECODERS.get(str(record.get("family")))) is not None:
            upgraded_config[part] = {key: value for key, value in record.items() if key != "family"} | fields
    return upgraded_config


def _image(image: Any) -> Any:
    """Convert the image recipe of format 2: its letterbox fields become the last step of the recipe."""
    if not isinstance(image, dict):
        return image
    recipe = {key: value for key, value in image.items() if key not in ("resize", *LETTERBOX)}
    steps, resize = image.get("steps", []), image.get("resize", "letterbox")
    if not isinstance(steps, list) or resize not in ("letterbox", "none"):
        return image
    recipe["steps"] = [_fields(step, IMAGE_STEPS, IMAGE_DEFAULTS) for step in steps]
    if resize == "letterbox":
        sides = {side: image[side] for side in ("height", "width") if side in image}
        box = {key: image.get(key, usual) for key, usual in LETTERBOX.items()}
        recipe["steps"].append({"kind": "letterbox", **sides, **box})
    return recipe


def _prompt(prompt: Any) -> Any:
    """Convert the prompt recipe of format 2: its template, and its fields that change the text, become steps."""
    if not isinstance(prompt, dict):
        return prompt
    if "steps" in prompt:
        raise BundleError(
            "sinew.processing.prompt.steps: format 2 has no such field; convert the checkpoint again"
        )
    old = PROMPT_DEFAULTS | {key: value for key, value in prompt.items() if key in PROMPT_DEFAULTS}
    if any(type(old[key]) is not type(usual) for key, usual in PROMPT_DEFAULTS.items()):
        return prompt  # the decoder rejects the invalid fields by name
    # Format 2 of bundles always applied the changes of the text in this order.
    changes = ("clean", "strip", "lower", "words_only", "as_list")
    steps: list[dict[str, Any]] = [{"kind": kind} for kind in changes if old[kind]]
    places = {
        "{prompt}": {"kind": "instruction"},
        "{state}": {"kind": "state", "values": old["state_values"], "bins": old["state_bins"]},
        "{image}": {
            "kind": "image",
            "text": old["image_text"],
            "count": old["image_tokens"],
            "token": old["placeholder"],
        },
    }
    if not old["image_tokens"]:
        places["{image}"] = {}  # format 2 wrote no text for an image without tokens
    for part in re.split(r"(\{prompt\}|\{state\}|\{image\})", old["template"]):
        steps += [step for step in [places.get(part, {"kind": "text", "text": part})] if part and step]
    if old["ensure_suffix"]:
        steps.append({"kind": "suffix", "text": old["ensure_suffix"]})
    if old["drop"]:
        steps.append({"kind": "drop", "ids": old["drop"]})
    if old["ensure_last"] != -1:
        steps.append({"kind": "last", "token": old["ensure_last"]})
    if old["markers"]:
        steps.append({"kind": "marker", "token": old["marker"], "count": old["markers"]})
    return {key: value for key, value in prompt.items() if key not in PROMPT_DEFAULTS} | {"steps": steps}


def _vector_steps(steps: Any) -> Any:
    if not isinstance(steps, list):
        return steps
    return [_fields(step, VECTOR_STEPS, VECTOR_DEFAULTS) for step in steps]


def _fields(step: Any, kinds: Mapping[str, tuple[str, ...]], defaults: Mapping[str, Any]) -> Any:
    """Return a processing step of format 2 with only the fields that its kind reads.

    Args:
        step: The step.
        kinds: Kind of step -> the fields that it reads.
        defaults: Field -> its default in format 2.
    """
    fields = kinds.get(str(step.get("kind"))) if isinstance(step, dict) else None
    if fields is None:
        return step
    unread = defaults.keys() - set(fields)
    usual = {key: defaults[key] for key in fields if defaults[key] is not None}
    return usual | {key: value for key, value in step.items() if key not in unread}


_PROCESSING = {
    "image": _image,
    "prompt": _prompt,
    "state_steps": _vector_steps,
    "action_steps": _vector_steps,
}
