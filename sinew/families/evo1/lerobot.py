"""Read Evo-1 checkpoints in LeRobot's layout (``policies/evo1`` of LeRobot 0.6)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from sinew.bundle.schema import Normalization
from sinew.convert.lerobot.checkpoint import LeRobotCheckpoint, Schema
from sinew.convert.lerobot.stats import ACTION, STATE
from sinew.convert.lerobot.steps import DEVICE, NORMALIZER, ProcessorStep
from sinew.convert.options import ConvertOptions
from sinew.core import ConvertError
from sinew.families.evo1.parts import Parts
from sinew.steps.image.resize import Resize
from sinew.steps.vector.base import VectorStep
from sinew.steps.vector.threshold import Threshold

GRIPPER = {
    "binarize_gripper": False,
    "gripper_index": 6,
    "gripper_threshold": 0.5,
    "gripper_below_threshold_value": 1.0,
    "gripper_above_threshold_value": -1.0,
}
SCHEMA = Schema(
    # Default values of the configuration's keys, from LeRobot's configuration_evo1.py.
    defaults={
        "chunk_size": 50,
        "n_action_steps": 50,
        "max_state_dim": 24,
        "max_action_dim": 24,
        "max_views": 3,
        "image_resolution": [448, 448],
        "postprocess_action_dim": None,
        **GRIPPER,
        "normalization_mapping": {"VISUAL": "IDENTITY", "STATE": "MIN_MAX", "ACTION": "MIN_MAX"},
        "vlm_model_name": "OpenGVLab/InternVL3-1B-hf",
        "vlm_num_layers": 14,
        "max_text_length": 1024,
        "embed_dim": 896,
        "hidden_dim": 1024,
        "state_hidden_dim": 1024,
        "num_heads": 8,
        "num_layers": 8,
        "num_inference_timesteps": 32,
        "num_categories": 1,
        "default_embodiment_id": 0,
    },
    fixed={"action_head": "flowmatching", "return_cls_only": False},
    # The last of these fields, empty_cameras, is not needed, because the model masks every view that is missing, up to
    # max_views views.
    unread="training_stage vlm_dtype use_flash_attn dropout enable_gradient_checkpointing finetune_vlm"
    " gradient_checkpointing_use_reentrant finetune_language_model finetune_vision_model finetune_action_head"
    " apply_training_stage_defaults task_field embodiment_id_field empty_cameras",
    steps={
        "evo1_pad_state_processor": ProcessorStep("max_state_dim"),
        "evo1_pad_action_processor": ProcessorStep("max_action_dim"),
        "normalizer_processor": NORMALIZER,
    },
    after={
        "unnormalizer_processor": NORMALIZER,
        "evo1_action_processor": ProcessorStep(" ".join(("action_dim", *GRIPPER))),
        "device_processor": DEVICE,
    },
)


def read(path: Path, options: ConvertOptions) -> Parts:
    """Read an Evo-1 checkpoint in LeRobot's layout.

    Raises:
        ConvertError: The checkpoint is not supported.
    """
    checkpoint = LeRobotCheckpoint(path, options, SCHEMA)
    checkpoint.refuse_image_scales()
    side, *other = checkpoint["image_resolution"]
    if other != [side]:
        raise ConvertError(f"{checkpoint.file}: image_resolution: expected a square, got {[side, *other]}")
    views, cameras = checkpoint.size("max_views", high=16), checkpoint.cameras
    if len(cameras) > views:
        raise ConvertError(
            f"{checkpoint.file}: max_views: expected at least {len(cameras)}, the number of cameras, got {views}."
            " Correct the file"
        )
    action = checkpoint.action
    if checkpoint["postprocess_action_dim"] is not None:
        action = replace(
            action, dim=checkpoint.size("postprocess_action_dim", high=checkpoint["max_action_dim"]), names=()
        )
    state = checkpoint.state
    layers = checkpoint["vlm_num_layers"]
    return Parts(
        format="lerobot-evo1",
        name=checkpoint.name,
        vlm=str(checkpoint["vlm_model_name"]),
        layers=0 if layers is None else checkpoint.size("vlm_num_layers"),
        views=views,
        category=_category(checkpoint),
        max_tokens=checkpoint.size("max_text_length"),
        side=side,
        resize=Resize(height=side, width=side, method="bicubic_round"),
        every_row=False,
        sizes={
            "chunk_size": checkpoint.size("chunk_size"),
            "max_state_dim": checkpoint.size("max_state_dim"),
            "max_action_dim": checkpoint.size("max_action_dim"),
            "head_size": checkpoint.size("embed_dim"),
            "decoder_size": checkpoint.size("hidden_dim"),
            "state_size": checkpoint.size("state_hidden_dim"),
            "head_heads": checkpoint.size("num_heads"),
            "head_layers": checkpoint.size("num_layers"),
        },
        cameras=cameras,
        state=state,
        action=action,
        state_normalization=_cut(checkpoint.normalization(STATE, "STATE"), state.dim),
        action_normalization=_cut(checkpoint.normalization(ACTION, "ACTION"), action.dim),
        action_steps=_gripper(checkpoint, action.dim),
        solver_steps=checkpoint.size("num_inference_timesteps"),
        n_action_steps=checkpoint.size("n_action_steps", high=checkpoint["chunk_size"]),
        control_hz=checkpoint.control_hz,
        embodiment=options.embodiment,
        optional_cameras=0,
        tensors={name.removeprefix("model."): source for name, source in checkpoint.tensors.items()},
        files=checkpoint.files,
        notes=tuple(checkpoint.notes),
        real_time_chunking=checkpoint.real_time_chunking,
    )


def _category(checkpoint: LeRobotCheckpoint) -> int:
    count = checkpoint.size("num_categories")
    choice = checkpoint.options.embodiment
    if not choice:
        if checkpoint.config.get("embodiment_id_field") and count > 1:
            raise ConvertError(
                f"{checkpoint.file}: embodiment_id_field: each observation of training chose one of {count} categories;"
                " pass the category of the robot with --embodiment N"
            )
        return checkpoint.size("default_embodiment_id", low=0, high=count - 1)
    if not choice.isdecimal() or int(choice) >= count:
        raise ConvertError(f"--embodiment {choice}: expected the number of a category, 0 to {count - 1}")
    return int(choice)


def _cut(normalization: Normalization, dim: int) -> Normalization:
    """Return the normalisation of only the first ``dim`` values of a vector, without the statistics of the padding."""
    short = [name for name, values in normalization.stats.items() if len(values) < dim]
    if short:
        raise ConvertError(
            f"statistics {short[0]}: expected at least {dim} values, got {len(normalization.stats[short[0]])}"
        )
    return replace(normalization, stats={name: values[:dim] for name, values in normalization.stats.items()})


def _gripper(checkpoint: LeRobotCheckpoint, dim: int) -> tuple[VectorStep, ...]:
    if not checkpoint["binarize_gripper"]:
        return ()
    threshold, below, above = (
        float(checkpoint[f"gripper_{name}"])
        for name in ("threshold", "below_threshold_value", "above_threshold_value")
    )
    index = checkpoint.size("gripper_index", low=0, high=dim - 1)
    return (Threshold((index,), offset=threshold, below=below, above=above),)
