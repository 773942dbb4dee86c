"""GR00T N1.7 as LeRobot's fine-tunes have it: one weight file, and pipelines that hold geometry and statistics.

The model's sizes are those of the base that config.json names (--base). What ends the postprocessor says whose units
actions have: ``groot_n1_7_action_decode_v1`` decodes group by group with the base's own statistics or those of relative
actions, ``groot_action_unpack_unnormalize_v2`` a whole vector with the data set's.
Source: LeRobot ``policies/groot/{configuration,modeling,processor}_groot.py``, ``utils.py`` (commit 7427f318).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from sinew.bundle.writer import TensorSource
from sinew.convert.lerobot.checkpoint import ACTION, STATE, LeRobotCheckpoint, Schema
from sinew.convert.lerobot.steps import DEVICE, POST, POSTPROCESSOR, PRE, RELATIVE, ProcessorStep
from sinew.convert.options import ConvertOptions
from sinew.convert.read.record import JsonRecord
from sinew.convert.tokenizer_files import find_model_dir
from sinew.core import CameraSpec, ConvertError, VectorSpec
from sinew.families.gr00t import n15
from sinew.families.gr00t.files import Embodiment, NvidiaFiles, choose, model_type, nvidia_weights, untied
from sinew.families.gr00t.vectors import Modalities, Vectors, read_vectors
from sinew.steps.vector.base import VectorStep
from sinew.steps.vector.threshold import Threshold

PACK, ENCODE = "groot_n1_7_pack_inputs_v1", "groot_n1_7_vlm_encode_v1"
DECODE, UNPACK = "groot_n1_7_action_decode_v1", "groot_action_unpack_unnormalize_v2"
PACKED = ProcessorStep(
    "action_horizon valid_action_horizon max_state_dim max_action_dim embodiment_tag embodiment_mapping"
    " state_dropout_prob video_modality_keys raw_stats modality_config",
    "formalize_language clip_outliers use_percentiles",
    {
        "state_horizon": (1,),
        "video_horizon": (None, 1),
        "language_key": ("task",),
        "normalize_min_max": (True,),
    },
    required=True,
)
ENCODED = ProcessorStep(
    "model_name image_crop_size image_target_size shortest_image_edge crop_fraction device",
    "use_albumentations letter_box_transform",
    required=True,
)
SCHEMA = Schema(
    defaults={
        "base_model_path": "nvidia/GR00T-N1.7-3B",
        "embodiment_tag": "new_embodiment",
        "chunk_size": 40,
        "num_inference_timesteps": None,
        "action_decode_transform": "auto",
    },
    fixed=n15.SCHEMA.fixed,
    unread=f"{n15.SCHEMA.unread} tune_vlln tune_top_llm_layers model_params_fp32 use_flash_attention rtc_ramp_rate"
    " use_relative_actions relative_exclude_joints",  # the pipelines' steps say the last two
    steps={"relative_actions_processor": RELATIVE, PACK: PACKED, ENCODE: ENCODED},
    after={
        DECODE: ProcessorStep(
            "env_action_dim raw_stats modality_config action_decode_transform",
            "use_percentiles use_relative_action",
        ),
        UNPACK: ProcessorStep(
            "env_action_dim",
            # config.json's action_decode_transform takes their place when LeRobot loads the pipeline
            "libero_gripper_action libero_gripper_binarize",
            {"normalize_min_max": (True,), "clip_normalized_action": (True,)},
        ),
        "absolute_actions_processor": POSTPROCESSOR["absolute_actions_processor"],
        "device_processor": DEVICE,
    },
)
GEOMETRY = {  # defaults of ENCODE
    "image_crop_size": None,
    "image_target_size": None,
    "shortest_image_edge": None,
    "crop_fraction": None,
    "use_albumentations": False,
    "letter_box_transform": False,
}
ALIASES = {"wrist_image": "image2"}  # a base's camera -> the name that LeRobot's LIBERO data sets have for it
LIBERO, GRIPPER = "libero", Threshold((), offset=0.5, below=1.0, above=-1.0)


def recognises(path: Path) -> bool:
    """Return True where a LeRobot folder's preprocessor is N1.7's."""
    file = path / f"{PRE}.json"
    steps = JsonRecord(file).get("steps") if file.is_file() else None
    names = [step.get("registry_name") for step in steps or () if isinstance(step, dict)]
    return any(str(name).startswith("groot_n1_7") for name in names)


class LeRobotFiles(NvidiaFiles):
    """A LeRobot folder of N1.7 under the names and the configuration of NVIDIA's."""

    format = "gr00t-n1.7-lerobot"
    transforms = "lerobot"

    def __init__(self, path: Path, options: ConvertOptions):
        self.path, self.options = path, options
        for name in ("frames", "transforms", "embodiment_id"):
            if name in options.settings:
                raise ConvertError(f"--set {name}: the files of a LeRobot fine-tune say it; leave it out")
        self.checkpoint = LeRobotCheckpoint(path, options, SCHEMA)
        pipelines = self.checkpoint.pipelines
        ends = [name for name in (DECODE, UNPACK) if pipelines.step(POST, name) is not None]
        if pipelines.step(PRE, PACK) is None or len(ends) != 1:
            raise ConvertError(
                f"{path}: expected {PRE}.json and {POST}.json with either {DECODE} or {UNPACK}, got"
                f" {' and '.join(ends) or 'neither'}"
            )
        self.end = ends[0]
        self.pack, self.decode = pipelines.config(PRE, PACK), pipelines.config(POST, self.end)
        self._base = find_model_dir(
            str(self.checkpoint["base_model_path"]), options.base, path, "--base", "config.json"
        )
        if (found := model_type(self._base)) != "Gr00tN1d7":
            raise ConvertError(
                f"{self._base / 'config.json'}: expected the base of a GR00T N1.7 fine-tune (Gr00tN1d7), got {found!r}"
            )
        base = JsonRecord(self._base / "config.json")
        steps = self.checkpoint["num_inference_timesteps"]
        own = {} if steps is None else {"num_inference_timesteps": steps}
        self.config = JsonRecord(base.path, {**base.content, **own})
        settings = {
            "formalize_language": self.pack.get("formalize_language", True),
            "clip_outliers": self.pack.get("clip_outliers", True),
            "use_percentiles": self.decode.get("use_percentiles", False),
            "use_relative_action": self.decode.get("use_relative_action", False),
        }
        encode = pipelines.config(PRE, ENCODE)
        self.processor = JsonRecord(path / f"{PRE}.json", {**GEOMETRY, **encode, **settings})
        self._views = dict(zip(self.checkpoint.slots, self.checkpoint.cameras, strict=True))

    @cached_property
    def embodiment(self) -> Embodiment:
        """The one that was fine-tuned, whose statistics these are."""
        tag, numbers = str(self.checkpoint["embodiment_tag"]), self.pack.get("embodiment_mapping") or {}
        asked = self.options.embodiment or tag
        return choose(asked, [tag] if tag in numbers else [], numbers, self.processor.path)

    @property
    def language(self) -> str:
        """The instruction's key on the GR00T wire, where LeRobot has its own for the task."""
        return n15.TASK

    @property
    def frames(self) -> tuple[int, int]:  # type: ignore[override]
        """Height and width of the first camera's frames."""
        first = next(iter(self._views.values()))
        return first.height, first.width

    @property
    def history(self) -> tuple[int, int]:
        """One step, as ``video_horizon`` may be 1 alone."""
        return 1, 1

    @property
    def notes(self) -> tuple[str, ...]:  # type: ignore[override]
        """Assumptions for facts that the files leave out."""
        return tuple(self.checkpoint.notes)

    def cameras(self, frames: tuple[int, int]) -> list[CameraSpec]:
        """Return the cameras by the base's keys, or where it names none of them in the order of their names."""
        keys = self.pack.get("video_modality_keys") or []
        if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
            raise ConvertError(f"{self.processor.path}: video_modality_keys: expected names, got {keys!r}")
        found = {key: next((n for n in (key, ALIASES.get(key)) if n in self._views), None) for key in keys}
        names = [name for name in found.values() if name is not None]
        if not names:
            return [self._views[name] for name in sorted(self._views)]
        absent = [key for key, name in found.items() if name is None]
        left = [camera.name for slot, camera in self._views.items() if slot not in names]
        if absent or left:
            self.checkpoint.notes.append(
                f"cameras, as LeRobot chooses them by the base's keys {', '.join(keys)}: without"
                f" {', '.join([*absent, *left])}"
            )
        return [self._views[name] for name in names]

    @cached_property
    def vectors(self) -> Vectors:
        """State and action with their normalisation, as LeRobot computes it."""
        found = read_vectors(self.modalities, self.processor.content, same=np.equal)
        self._fits("input_features", "STATE", STATE, found.state)
        self._fits("output_features", "ACTION", ACTION, found.action)
        steps = (*found.action_steps, *self._gripper(found), *self.checkpoint.action_steps())
        horizon = min(found.horizon, self.checkpoint.size("chunk_size"))
        return replace(found, action_steps=steps, horizon=horizon)

    @cached_property
    def modalities(self) -> Modalities:
        """The groups of state and action with their statistics: one of each where the whole vector is decoded."""
        tag, where = self.embodiment.tag, self.path / f"{POST}.json"
        pipelines = self.checkpoint.pipelines
        low, high = self._statistics_of(pipelines.step(PRE, PACK), STATE)
        if self.end == UNPACK:
            bounds = dict(
                zip(("min", "max"), self._statistics_of(pipelines.step(POST, UNPACK), ACTION), strict=True)
            )
            rows = list(range(min(self.config["action_horizon"], self.checkpoint.size("chunk_size"))))
            record = {
                "state": {"modality_keys": ["state"]},
                "action": {"modality_keys": ["actions"], "delta_indices": rows},
            }
            statistics = {"state": {"state": {"min": low, "max": high}}, "action": {"actions": bounds}}
            return Modalities(record, statistics, tag, where)
        decode = JsonRecord(where, self.decode)
        raw = Modalities(decode.part("modality_config").content, decode.part("raw_stats").content, tag, where)
        names = ("q01", "q99") if self.decode.get("use_percentiles") else ("min", "max")
        state, start = {}, 0
        for key in raw.keys("state"):
            end = start + raw.stats("state", key, names)[0].shape[-1]
            state[key] = dict(zip(names, (low[start:end], high[start:end]), strict=True))
            start = end
        if start != len(low):
            raise ConvertError(f"{where}: expected groups of {len(low)} values of {STATE}, got {start}")
        record = {
            "state": {"modality_keys": list(state)},
            "action": {
                "modality_keys": list(raw.keys("action")),
                "delta_indices": raw.moments("action"),
                "action_configs": [_upper(config) for config in raw.actions()],
            },
        }
        return Modalities(record, {**raw.statistics, "state": state}, tag, where)

    @property
    def files(self) -> list[Path]:
        """The files that a bundle takes from this folder, and the base's configuration."""
        return [*self.checkpoint.files, self.config.path]

    @cached_property
    def weights(self) -> tuple[dict[str, TensorSource], list[Path]]:
        """The tensors under NVIDIA's names, and their files."""
        tensors, files = nvidia_weights(self.path)
        backbone = "backbone.model."
        return untied(
            tensors, f"{backbone}lm_head.weight", f"{backbone}model.language_model.embed_tokens.weight"
        ), files

    def _statistics_of(self, step: Mapping[str, Any] | None, feature: str) -> tuple[np.ndarray, np.ndarray]:
        return n15.bounds(self.checkpoint, step or {}, feature)

    def _fits(self, group: str, kind: str, key: str, found: VectorSpec) -> None:
        if (expected := self.checkpoint.vector(group, kind, key).dim) != found.dim:
            raise ConvertError(
                f"{self.path}: statistics of {key}: expected {expected} values as in config.json, got {found.dim}"
            )

    def _gripper(self, found: Vectors) -> tuple[VectorStep, ...]:
        """The sign that LIBERO's simulator expects of a gripper, where config.json asks for it."""
        transform = self.checkpoint["action_decode_transform"]
        if transform == "auto":
            transform = LIBERO if self.checkpoint["embodiment_tag"] == "libero_sim" else None
        if transform in (None, "none", ""):
            return ()
        if transform != LIBERO:
            raise ConvertError(
                f"{self.checkpoint.file}: action_decode_transform: expected libero or none, got {transform!r}"
            )
        if self.end == UNPACK:
            return (replace(GRIPPER, dims=(found.action.dim - 1,)),) if found.action.dim >= 7 else ()
        dims = tuple(i for i, name in enumerate(found.action.names) if name.rpartition(".")[0] == "gripper")
        if len(dims) != 1:
            raise ConvertError(
                f"{self.path}: action_decode_transform=libero: expected a group 'gripper' of one value, got {len(dims)}"
            )
        return (replace(GRIPPER, dims=dims),)


def _upper(config: Mapping[str, Any]) -> dict[str, Any]:
    """One action group's representation as NVIDIA spells it; LeRobot reads small letters too."""
    words = {key: str(config.get(key)).upper().replace("+", "_") for key in ("rep", "type", "format")}
    return {**words, "state_key": config.get("state_key")}
