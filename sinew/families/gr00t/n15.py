"""GR00T N1.5: read cameras, state, actions and embodiments from NVIDIA's layout and from LeRobot's layout.

Some facts are not in the files of any layout. This module contains these facts as constants or assumptions.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from sinew.bundle.schema import VectorPart
from sinew.bundle.writer import TensorSource
from sinew.convert.lerobot.checkpoint import LeRobotCheckpoint, Schema
from sinew.convert.lerobot.stats import unknown_statistics, unread_statistics
from sinew.convert.lerobot.steps import DEVICE, POST, PRE, ProcessorStep
from sinew.convert.options import ConvertOptions
from sinew.convert.read.record import JsonRecord
from sinew.convert.read.safetensors import read_safetensors
from sinew.convert.tensors import read_array
from sinew.convert.tokenizer_files import find_model_dir
from sinew.core import CameraSpec, ConvertError
from sinew.families.gr00t.files import EagleParts, RobotRecord, choose, is_lerobot, model_type, nvidia_weights
from sinew.families.gr00t.images import frame_size
from sinew.families.gr00t.vectors import Vectors, min_max, named
from sinew.steps.image.base import ImageRecipe
from sinew.steps.image.crop import Crop
from sinew.steps.image.resize import Resize

# Embodiment numbers in NVIDIA's gr00t/data/embodiment_tags.py.
TAGS = {"new_embodiment": 31, "oxe_droid": 17, "agibot_genie1": 26, "gr1": 24}
PACK, UNPACK = "groot_pack_inputs_v3", "groot_action_unpack_unnormalize_v1"
PACKED = ProcessorStep(
    "action_horizon max_state_dim max_action_dim embodiment_tag embodiment_mapping",
    fields={
        "state_horizon": (1,),
        "normalize_min_max": (True,),
        "formalize_language": (False,),
        "language_key": ("task",),
    },
    required=True,
)
SCHEMA = Schema(
    defaults={"chunk_size": 50},
    fixed={"lora_rank": 0},
    # Fields that only training uses, and fields that the base model's own file contains.
    unread="n_action_steps max_state_dim max_action_dim normalization_mapping image_size base_model_path"
    " tokenizer_assets_repo embodiment_tag tune_llm tune_visual tune_projector tune_diffusion_model lora_alpha"
    " lora_dropout lora_full_model warmup_ratio use_bf16 video_backend balance_dataset_weights"
    " balance_trajectory_weights dataset_paths output_dir save_steps max_steps batch_size dataloader_num_workers"
    " report_to resume",
    steps={
        PACK: PACKED,
        "groot_eagle_encode_v3": ProcessorStep("tokenizer_assets_repo"),
        "groot_eagle_collate_v3": ProcessorStep("tokenizer_assets_repo"),
    },
    after={
        UNPACK: ProcessorStep("env_action_dim", fields={"normalize_min_max": (True,)}, required=True),
        "device_processor": DEVICE,
    },
)
LEROBOT_ASSETS = "lerobot/eagle2hg-processor-groot-n1p5"
# Share of a frame's sides that the video transforms of NVIDIA's data configurations keep.
CROP = 0.95
TASK = "annotation.human.task_description"


def assets(path: Path) -> tuple[str, str]:
    """Return the hub name of the repository with Eagle's files, and the option with which the user can pass another
    one."""
    return str(JsonRecord(path / "config.json").get("tokenizer_assets_repo", LEROBOT_ASSETS)), "--vlm"


def read(path: Path, options: ConvertOptions, preprocessor: JsonRecord) -> EagleParts:
    """Read the parts of an N1.5 directory in either layout.

    Raises:
        ConvertError: The checkpoint is not supported.
    """
    config = JsonRecord(path / "config.json")
    if is_lerobot(path):
        base_name = str(config.get("base_model_path", "nvidia/GR00T-N1.5-3B"))
        base = find_model_dir(base_name, options.base, path, "--base", "config.json")
        if model_type(base) != "gr00t_n1_5":
            raise ConvertError(
                f"{base / 'config.json'}: expected the base model of a GR00T N1.5 fine-tune (gr00t_n1_5), got"
                f" {model_type(base)!r}. Pass its folder with --base"
            )
        widths, robot_record = JsonRecord(base / "config.json"), _lerobot(path, options)
    else:
        widths, robot_record = config, _nvidia(path, options)
    backbone = widths.part("backbone_cfg")
    backbone.expect(project_to_dim=None)
    tensors, files = nvidia_weights(path)
    return parts(
        "gr00t-n1.5-lerobot" if is_lerobot(path) else "gr00t-n1.5",
        widths.part("action_head_cfg"),
        backbone["select_layer"],
        tensors,
        [*files, *robot_record.files, widths.path],
        robot_record,
        image_recipe(preprocessor, options.setting("center_crop", not is_lerobot(path))),
        is_lerobot(path),
        widths,
    )


def parts(
    form: str,
    head: JsonRecord,
    layers: int,
    tensors: dict[str, TensorSource],
    files: list[Path],
    robot_record: RobotRecord,
    image: ImageRecipe,
    lerobot: bool,
    config: JsonRecord,
) -> EagleParts:
    """Collect the facts and tensors of an N1.5 checkpoint.

    Args:
        form: Name of the checkpoint's layout. The bundle records it as its origin.
        head: Record with the head's sizes.
        layers: Number of layers of the language model that are used.
        tensors: The tensors by their names in the checkpoint.
        files: All files that were read, except Eagle's files.
        robot_record: The description of the robot.
        image: The image recipe.
        lerobot: True for LeRobot's layout.
        config: The record of config.json.
    """
    return EagleParts(
        architecture="gr00t_n1_5",
        format=form,
        head=head,
        records=(config, head),
        layers=layers,
        backbone=r"backbone\.eagle_model\.",
        tensors=tensors,
        files=files,
        robot=robot_record,
        image=image,
        text_first=False,
        generate=True,
        formal=False,
        listed=lerobot,
    )


def image_recipe(preprocessor: JsonRecord, crop: bool) -> ImageRecipe:
    """Build the recipe that converts camera frames to the model's input.

    Args:
        preprocessor: preprocessor_config.json of Eagle.
        crop: True crops a frame to 95 % first, as in NVIDIA's data configurations.
    """
    height, width = (preprocessor.part("size")[side] for side in ("height", "width"))
    resize = Resize(height=height, width=width, method="bicubic")
    if crop:
        resize = Resize(height=height, width=width, method="bilinear_cut")
    steps = (Crop(fraction=CROP, rounded=True), resize) if crop else (resize,)
    mean, std = tuple(preprocessor["image_mean"]), tuple(preprocessor["image_std"])
    return ImageRecipe(height, width, steps=steps, mean=mean, std=std)


def _nvidia(path: Path, options: ConvertOptions) -> RobotRecord:
    file = path / "experiment_cfg" / "metadata.json"
    if not file.is_file():
        raise ConvertError(
            f"{path}: experiment_cfg/metadata.json is missing. Copy it from the training run, because it defines"
            " statistics and cameras"
        )
    horizon = JsonRecord(path / "config.json").part("action_head_cfg")["action_horizon"]
    return robot(JsonRecord(file), horizon, options)


def robot(metadata: JsonRecord, horizon: int, options: ConvertOptions) -> RobotRecord:
    """Read the chosen robot from NVIDIA's metadata.json.

    Raises:
        ConvertError: The choice is missing or wrong, or the robot's embodiment number is unknown.
    """
    file = metadata.path
    numbers: dict[str, Any] = dict(TAGS)
    if (number := options.setting("embodiment_id", None)) is not None:
        numbers |= dict.fromkeys(metadata.content, number)
    tags = [tag for tag in metadata.content if tag in numbers]
    if options.embodiment and options.embodiment not in metadata.content:
        raise ConvertError(
            f"--embodiment {options.embodiment}: unknown in {file}. Use one of: {', '.join(metadata.content)}"
        )
    candidates = [options.embodiment] if options.embodiment else list(metadata.content)
    if not set(candidates) & set(tags):
        raise ConvertError(
            f"{file}: the embodiment number of {', '.join(candidates)} is unknown. Pass the number of the training with"
            f" --set embodiment_id=N ({', '.join(f'{number} of {tag}' for tag, number in TAGS.items())})"
        )
    embodiment = choose(options.embodiment, tags, numbers, file)
    record = metadata.part(embodiment.tag)
    modalities, statistics = record.part("modalities"), record.part("statistics")
    cameras = modalities.part("video")
    specs = []
    for name in cameras.content:
        width, height = cameras.part(name)["resolution"]
        specs.append(CameraSpec(name, *(frame_size(options) or (height, width))))
    action = _parts(modalities.part("action"), statistics.part("action"), clip=False)
    state = _parts(modalities.part("state"), statistics.part("state"), clip=False)
    notes = (
        "N1.5's files do not contain the normalisation of each key; assuming min_max, as in most data configurations",
    )
    return RobotRecord(embodiment, specs, vectors_of(state, action, horizon), TASK, [file], notes)


def _parts(keys: JsonRecord, statistics: JsonRecord, clip: bool) -> tuple[VectorPart, ...]:
    parts = []
    for key in keys.content:
        stats = statistics.part(key)
        low, high = (np.asarray(stats[name], np.float64) for name in ("min", "max"))
        parts.append(VectorPart(key, len(low), min_max(low, high, clip)))
    return tuple(parts)


def _lerobot(path: Path, options: ConvertOptions) -> RobotRecord:
    checkpoint = LeRobotCheckpoint(path, options, SCHEMA)
    pack, unpack = checkpoint.pipelines.step(PRE, PACK), checkpoint.pipelines.step(POST, UNPACK)
    if pack is None or unpack is None:
        raise ConvertError(
            f"{path}: {PRE}.json and {POST}.json are missing. Copy them from the training run, because they contain"
            " the statistics"
        )
    settings = pack.get("config", {})
    numbers: Mapping[str, Any] = settings.get("embodiment_mapping") or {}
    tag = options.embodiment or str(settings.get("embodiment_tag", "new_embodiment"))
    embodiment = choose(tag, list(numbers), numbers, path / "policy_preprocessor.json")
    state = bounds(checkpoint, pack, "observation.state")
    action = bounds(checkpoint, unpack, "action")
    cameras = [camera for _, camera in sorted(zip(checkpoint.slots, checkpoint.cameras, strict=True))]
    vectors = vectors_of((part("state", *state),), (part("actions", *action),), checkpoint["chunk_size"])
    files = [path / "config.json", *sorted(path.glob("policy_*processor*"))]
    return RobotRecord(embodiment, cameras, vectors, TASK, files, tuple(checkpoint.notes))


def part(name: str, low: np.ndarray, high: np.ndarray) -> VectorPart:
    return VectorPart(name, len(low), min_max(low, high, clip=False))


def bounds(
    checkpoint: LeRobotCheckpoint, step: Mapping[str, Any], feature: str
) -> tuple[np.ndarray, np.ndarray]:
    """Read the minimum and the maximum of a feature's values from the statistics file of a pipeline step.

    Statistics that do not belong to any feature are recorded in a note.

    Args:
        checkpoint: The opened checkpoint.
        step: Configuration of the pipeline step.
        feature: Name of the feature.

    Returns:
        The lowest and highest values, float32 [D] each.
    """
    path, file = checkpoint.path, step.get("state_file")
    sources = read_safetensors(path / Path(file).name) if isinstance(file, str) else {}
    features = [*checkpoint["input_features"], *checkpoint["output_features"]]
    if unread := unknown_statistics(sources, features):
        checkpoint.notes.append(unread_statistics(unread))
    limits = [sources.get(f"{feature}.{name}") for name in ("min", "max")]
    if None in limits:
        raise ConvertError(
            f"{path}: the statistics min and max of {feature!r} are missing in the files of the processors. Save the"
            " policy again with LeRobot"
        )
    low, high = (read_array(source).reshape(-1) for source in limits if source is not None)
    return low, high


def vectors_of(state: tuple[VectorPart, ...], action: tuple[VectorPart, ...], horizon: int) -> Vectors:
    return Vectors(named(state), named(action), state, action, (), horizon)
