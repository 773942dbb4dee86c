"""GR00T N1.5: cameras, vectors and embodiments in its two layouts, and the facts that they leave out."""

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

TAGS = {
    "new_embodiment": 31,
    "oxe_droid": 17,
    "agibot_genie1": 26,
    "gr1": 24,
}  # gr00t/data/embodiment_tags.py
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
    # of training, or of the base model, whose own file says it
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
CROP = 0.95  # crop of the video transforms in NVIDIA's data configurations
TASK = "annotation.human.task_description"


def assets(path: Path) -> tuple[str, str]:
    """Return the name of the repository with Eagle's files and the flag that gives it."""
    return str(JsonRecord(path / "config.json").get("tokenizer_assets_repo", LEROBOT_ASSETS)), "--vlm"


def read(path: Path, options: ConvertOptions, preprocessor: JsonRecord) -> EagleParts:
    """Return the parts of an N1.5 directory in either layout. Raises :class:`ConvertError`."""
    config = JsonRecord(path / "config.json")
    if is_lerobot(path):
        base_name = str(config.get("base_model_path", "nvidia/GR00T-N1.5-3B"))
        base = find_model_dir(base_name, options.base, path, "--base", "config.json")
        if model_type(base) != "gr00t_n1_5":
            raise ConvertError(
                f"{base / 'config.json'}: expected the base of a GR00T N1.5 fine-tune (gr00t_n1_5), got"
                f" {model_type(base)!r}"
            )
        widths, found = JsonRecord(base / "config.json"), _lerobot(path, options)
    else:
        widths, found = config, _nvidia(path, options)
    backbone = widths.part("backbone_cfg")
    backbone.expect(project_to_dim=None)
    tensors, files = nvidia_weights(path)
    return parts(
        "gr00t-n1.5-lerobot" if is_lerobot(path) else "gr00t-n1.5",
        widths.part("action_head_cfg"),
        backbone["select_layer"],
        tensors,
        [*files, *found.files, widths.path],
        found,
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
    found: RobotRecord,
    image: ImageRecipe,
    lerobot: bool,
    config: JsonRecord,
) -> EagleParts:
    """Return the parts of N1.5. found: The robot's description."""
    return EagleParts(
        architecture="gr00t_n1_5",
        format=form,
        head=head,
        records=(config, head),
        layers=layers,
        backbone=r"backbone\.eagle_model\.",
        tensors=tensors,
        files=files,
        robot=found,
        image=image,
        text_first=False,
        generate=True,
        formal=False,
        listed=lerobot,
    )


def image_recipe(preprocessor: JsonRecord, crop: bool) -> ImageRecipe:
    """Return the recipe of frames; crop: NVIDIA's, to 95 % of a frame first."""
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
        raise ConvertError(f"{path}: no experiment_cfg/metadata.json, which holds statistics and cameras")
    horizon = JsonRecord(path / "config.json").part("action_head_cfg")["action_horizon"]
    return robot(JsonRecord(file), horizon, options)


def robot(metadata: JsonRecord, horizon: int, options: ConvertOptions) -> RobotRecord:
    """Return the chosen robot's description in NVIDIA's metadata.json. Raises :class:`ConvertError`."""
    file = metadata.path
    numbers: dict[str, Any] = dict(TAGS)
    if (number := options.setting("embodiment_id", None)) is not None:
        numbers |= dict.fromkeys(metadata.content, number)
    known = [tag for tag in metadata.content if tag in numbers]
    if options.embodiment and options.embodiment not in metadata.content:
        raise ConvertError(
            f"--embodiment {options.embodiment}: not one of those in {file}: {', '.join(metadata.content)}"
        )
    asked = [options.embodiment] if options.embodiment else list(metadata.content)
    if not set(asked) & set(known):
        raise ConvertError(
            f"{file}: no file says which row of the weights {', '.join(asked)} uses: give --set embodiment_id=N, as"
            f" training had it ({', '.join(f'{number} of {tag}' for tag, number in TAGS.items())})"
        )
    embodiment = choose(options.embodiment, known, numbers, file)
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
        "the normalisation of N1.5's keys is not in its files: min_max assumed, as most data configurations have",
    )
    return RobotRecord(embodiment, specs, vectors_of(state, action, horizon), TASK, [file], notes)


def _parts(keys: JsonRecord, statistics: JsonRecord, clip: bool) -> tuple[VectorPart, ...]:
    parts = []
    for key in keys.content:
        found = statistics.part(key)
        low, high = (np.asarray(found[name], np.float64) for name in ("min", "max"))
        parts.append(VectorPart(key, len(low), min_max(low, high, clip)))
    return tuple(parts)


def _lerobot(path: Path, options: ConvertOptions) -> RobotRecord:
    checkpoint = LeRobotCheckpoint(path, options, SCHEMA)
    pack, unpack = checkpoint.pipelines.step(PRE, PACK), checkpoint.pipelines.step(POST, UNPACK)
    if pack is None or unpack is None:
        raise ConvertError(f"{path}: no {PRE}.json and {POST}.json, which hold the statistics")
    settings = pack.get("config", {})
    numbers: Mapping[str, Any] = settings.get("embodiment_mapping") or {}
    asked = options.embodiment or str(settings.get("embodiment_tag", "new_embodiment"))
    embodiment = choose(asked, list(numbers), numbers, path / "policy_preprocessor.json")
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
    """Return the least and largest values of a feature, float32 [D] each, from a step's file of statistics. Names in it
    that are of no feature become a note."""
    path, file = checkpoint.path, step.get("state_file")
    sources = read_safetensors(path / Path(file).name) if isinstance(file, str) else {}
    features = [*checkpoint["input_features"], *checkpoint["output_features"]]
    if unread := unknown_statistics(sources, features):
        checkpoint.notes.append(unread_statistics(unread))
    found = [sources.get(f"{feature}.{name}") for name in ("min", "max")]
    if None in found:
        raise ConvertError(f"{path}: no statistics min and max of {feature!r} among the processors' files")
    low, high = (read_array(source).reshape(-1) for source in found if source is not None)
    return low, high


def vectors_of(state: tuple[VectorPart, ...], action: tuple[VectorPart, ...], horizon: int) -> Vectors:
    return Vectors(named(state), named(action), state, action, (), horizon)
