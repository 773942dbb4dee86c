"""Convert VLA-JEPA's images, prompt, statistics and gripper to the data of a bundle.

Source: LeRobot ``policies/vla_jepa``.
"""

from __future__ import annotations

import json
import string
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from sinew.bundle.schema import Normalization, Processing, PromptRecipe
from sinew.convert.chat_template import MARK, render
from sinew.convert.lerobot.checkpoint import ACTION, STATE, LeRobotCheckpoint
from sinew.convert.lerobot.steps import POST, PRE
from sinew.convert.read.files import named
from sinew.convert.read.record import JsonRecord
from sinew.convert.tokenizer_files import TokenizerFiles
from sinew.core import CameraSpec, ConvertError, VectorSpec
from sinew.families.gr00t.files import token_prompt
from sinew.steps.image.base import ImageRecipe, ImageStep
from sinew.steps.image.resize import Resize
from sinew.steps.prompt.marker import Marker
from sinew.steps.vector.threshold import Threshold

PREP, CLIP = "vla_jepa_image_prep", "vla_jepa_clip_actions"
SNAP, BINARIZE = "vla_jepa_pre_snap_gripper", "vla_jepa_binarize_gripper"
# Key: step of the postprocessor. Value: field of config.json that enables the step, for checkpoints without pipelines.
SWITCHES = {
    CLIP: "clip_normalized_actions",
    SNAP: "pre_snap_gripper_action",
    BINARIZE: "binarize_gripper_action",
}
ENCODER = "model.video_encoder."


def image_processor(vlm_dir: Path) -> JsonRecord:
    """Read the configuration of Qwen's image processor.

    The file is processor_config.json, or preprocessor_config.json before transformers 5.
    """
    whole = vlm_dir / "processor_config.json"
    if whole.is_file() and "image_processor" in (record := JsonRecord(whole)).content:
        processor = record.part("image_processor")
    else:
        processor = JsonRecord(vlm_dir / "preprocessor_config.json")
    processor.expect(do_resize=True, do_normalize=True, resample=3)
    return processor


def image_recipe(checkpoint: LeRobotCheckpoint, processor: JsonRecord, grid: ImageStep) -> ImageRecipe:
    """Build the steps from a frame to pixels, all in floating point.

    Raises:
        ConvertError: The frames of the cameras get different sizes.
    """
    checkpoint.refuse_image_scales()
    size = checkpoint["resize_images_to"]
    prep = checkpoint.pipelines.config(PRE, PREP)
    if "resize_to" in prep and prep["resize_to"] != size:
        raise ConvertError(
            f"{checkpoint.path / PRE}.json: {PREP}: resize_to: expected {json.dumps(size)}, the resize_images_to in"
            f" config.json, got {json.dumps(prep['resize_to'])}"
        )
    steps: tuple[ImageStep, ...] = (grid,)
    if (sides := checkpoint.sides("resize_images_to")) is not None:
        steps = (Resize(*sides, method="area_float"), grid)
    recipe = ImageRecipe(
        0, 0, steps=steps, mean=tuple(processor["image_mean"]), std=tuple(processor["image_std"])
    )
    sizes = {camera.name: recipe.size_after(*_frame(camera)) for camera in checkpoint.cameras}
    if len(set(sizes.values())) > 1:
        raise ConvertError(
            f"{checkpoint.file}: resize_images_to: expected a size, because the frames of the cameras have different"
            f" sizes without it: {', '.join(f'{name} {h}x{w}' for name, (h, w) in sizes.items())}"
        )
    height, width = next(iter(sizes.values()))
    return replace(recipe, height=height, width=width)


def _frame(camera: CameraSpec) -> tuple[int, int]:
    return camera.height, camera.width


def added_tokens(checkpoint: LeRobotCheckpoint) -> tuple[list[str], str]:
    """Return the action tokens, four per action of a chunk, and the embodied action token."""
    pattern, embodied = checkpoint["special_action_token"], checkpoint["embodied_action_token"]
    if not isinstance(pattern, str) or pattern.count("{}") != 1 or not isinstance(embodied, str):
        raise ConvertError(
            f"{checkpoint.file}: special_action_token, embodied_action_token: expected two texts, the first with one"
            f" {{}}, got {pattern!r}, {embodied!r}"
        )
    return [pattern.replace("{}", str(i)) for i in range(4 * checkpoint.size("chunk_size"))], embodied


def prompt_recipe(
    checkpoint: LeRobotCheckpoint,
    vlm: JsonRecord,
    tokenizer: TokenizerFiles,
    template: str,
    template_file: Path,
    image_tokens: int,
) -> PromptRecipe:
    """Build the prompt: the chat template around LeRobot's sentence, including the added tokens."""
    actions, embodied = added_tokens(checkpoint)
    # If the checkpoint contains the world model, LeRobot reads the tubelet size (frames per patch) from the video
    # encoder. It is the third size of the encoder's patch weight.
    tubelet = next(
        (
            source.shape[2]
            for name, source in checkpoint.tensors.items()
            if name.startswith(ENCODER) and name.endswith("patch_embeddings.proj.weight")
        ),
        checkpoint.size("jepa_tubelet_size"),
    )
    steps = max(checkpoint.size("num_video_frames") // tubelet - 1, 0)
    repeats = checkpoint.size("num_action_tokens_per_timestep")
    markers = checkpoint.size("num_embodied_action_tokens_per_instruction")
    sentence = fill(
        checkpoint,
        {
            "instruction": MARK,
            "actions": "".join(token * repeats for token in actions[:steps]),
            "e_actions": embodied * markers,
        },
    )
    chat = render(template, ["image"] * len(checkpoint.cameras) + ["text"], True, template_file)
    placeholder = tokenizer.token_text(vlm["image_token_id"])
    if chat.count(placeholder) != len(checkpoint.cameras):
        raise ConvertError(
            f"{template_file}: expected exactly one {placeholder} per image in the rendered text. Pass the model's"
            " own folder with --vlm"
        )
    text = chat.replace(MARK, sentence)
    if "{" in text or "}" in text:
        raise ConvertError(
            f"{checkpoint.file}: prompt_template: braces are only allowed around field names. Remove all other braces"
        )
    text = text.replace(placeholder, "{image}").replace(MARK, "{prompt}")
    vocabulary = max(vlm.part("text_config")["vocab_size"], tokenizer.tokenizer.get_vocab_size())
    recipe = token_prompt(text, tokenizer, vocabulary, vlm["image_token_id"], image_tokens, False)
    return replace(recipe, steps=(*recipe.steps, Marker(tokenizer.token_id(embodied), markers)))


def fill(checkpoint: LeRobotCheckpoint, values: Mapping[str, str]) -> str:
    """Return the text of ``prompt_template`` in which the three placeholders are replaced by ``values``.

    Raises:
        ConvertError: The template has other fields or braces.
    """
    template, fields, out = checkpoint["prompt_template"], [], []
    with named(f"{checkpoint.file}: prompt_template"):
        parsed = list(string.Formatter().parse(template))
    for text, field, form, conversion in parsed:
        out.append(text)
        if field is not None:
            if field not in values or form or conversion:
                raise ConvertError(
                    f"{checkpoint.file}: prompt_template: expected only the fields {', '.join(values)}, got {field!r}"
                )
            fields.append(field)
            out.append(values[field])
    if fields.count("instruction") != 1 or fields.count("e_actions") != 1:
        raise ConvertError(
            f"{checkpoint.file}: prompt_template: expected {{instruction}} and {{e_actions}} exactly once, got {fields}"
        )
    return "".join(out)


def processing(
    checkpoint: LeRobotCheckpoint,
    image: ImageRecipe,
    prompt: PromptRecipe,
    vectors: tuple[VectorSpec, VectorSpec],
    has_state: bool,
) -> Processing:
    """Build the processing recipe of a policy: the steps for frames, prompt, state and actions.

    Raises:
        ConvertError: The actions are relative, and the policy has no state.
    """
    action = checkpoint.normalization(ACTION, "ACTION")
    step_names = {name for name in SWITCHES if checkpoint.pipelines.step(POST, name) is not None}
    if not checkpoint.pipelines.there:
        step_names = {name for name, key in SWITCHES.items() if checkpoint[key]}
        # LeRobot clips only actions that are normalised by minimum and maximum.
        if action.mode != "min_max":
            step_names.discard(CLIP)
    elif action.mode == "min_max":
        for name, key in SWITCHES.items():
            if name not in step_names and checkpoint.config.get(key) is True:
                checkpoint.notes.append(
                    f"config.json has {key}=true, but {POST}.json has no step {name}, so this step is omitted"
                )
    action = replace(action, clip=CLIP in step_names)
    if SNAP in step_names:
        dim, threshold = gripper(checkpoint, SNAP, vectors[1].dim)
        action = replace(action, snap=(dim,), snap_at=threshold)
    if not has_state and is_relative(checkpoint):
        raise ConvertError(
            f"{checkpoint.file}: relative actions require a state, but the input features contain none. Train the"
            " policy with a state"
        )
    steps = checkpoint.action_steps() if has_state else ()
    if BINARIZE in step_names:
        dim, threshold = gripper(checkpoint, BINARIZE, vectors[1].dim)
        steps = (*steps, Threshold((dim,), offset=threshold))
    return Processing(
        image=image,
        prompt=prompt,
        state=checkpoint.normalization(STATE, "STATE") if has_state else Normalization("identity"),
        action=action,
        padded_state_dim=vectors[0].dim,
        padded_action_dim=vectors[1].dim,
        all_cameras=True,
        action_steps=steps,
    )


def is_relative(checkpoint: LeRobotCheckpoint) -> Any:
    """Return True (or another value that is true) if the actions of a checkpoint are relative to the state."""
    step = checkpoint.pipelines.config(PRE, "relative_actions_processor")
    return (
        step.get("enabled") if checkpoint.pipelines.there else checkpoint.config.get("use_relative_actions")
    )


def gripper(checkpoint: LeRobotCheckpoint, step: str, action_dim: int) -> tuple[int, float]:
    """Return (index of the gripper in an action, threshold of its value).

    The values of the pipeline step are used first, then the action whose name contains one of ``gripper_joint_names``,
    then the values of the configuration.
    """
    names, joint_names = (
        checkpoint.config.get("action_feature_names"),
        checkpoint["gripper_joint_names"] or [],
    )
    dim = checkpoint["gripper_dim"]
    if isinstance(names, list) and not checkpoint.pipelines.there:
        tokens = [str(token).lower() for token in joint_names if token]
        hits = [i for i, name in enumerate(names) if any(token in str(name).lower() for token in tokens)]
        dim = hits[0] if hits else dim
    record = checkpoint.pipelines.config(POST, step)
    dim, threshold = record.get("gripper_dim", dim), record.get("threshold", checkpoint["gripper_threshold"])
    if type(dim) is not int or not 0 <= dim < action_dim or not isinstance(threshold, int | float):
        raise ConvertError(
            f"{checkpoint.path}: {step}: expected gripper_dim below {action_dim} and a number as threshold, got {dim!r}"
            f" and {threshold!r}"
        )
    return dim, float(threshold)
