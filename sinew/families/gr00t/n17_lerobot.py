"""GR00T N1.7 as LeRobot fine-tunes store it: one weight file, and pipelines that contain geometry and statistics.

The model has the sizes of the base model that config.json names (--base). The last step of the postprocessor defines
the units of the actions:

* ``groot_n1_7_action_decode_v1`` decodes each group of actions with the statistics of the base model, or with those of
  relative actions.
* ``groot_action_unpack_unnormalize_v2`` decodes the whole vector with the statistics of the data set.

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
    # The values of the last two of these fields are read from the pipelines' steps.
    " use_relative_actions relative_exclude_joints",
    steps={"relative_actions_processor": RELATIVE, PACK: PACKED, ENCODE: ENCODED},
    after={
        DECODE: ProcessorStep(
            "env_action_dim raw_stats modality_config action_decode_transform",
            "use_percentiles use_relative_action",
        ),
        UNPACK: ProcessorStep(
            "env_action_dim",
            # LeRobot replaces these two fields by config.json's action_decode_transform when it loads the pipeline.
            "libero_gripper_action libero_gripper_binarize",
            {"normalize_min_max": (True,), "clip_normalized_action": (True,)},
        ),
        "absolute_actions_processor": POSTPROCESSOR["absolute_actions_processor"],
        "device_processor": DEVICE,
    },
)
GEOMETRY = {  # default arguments of the ENCODE step
    "image_crop_size": None,
    "image_target_size": None,
    "shortest_image_edge": None,
    "crop_fraction": None,
    "use_albumentations": False,
    "letter_box_transform": False,
}
# Key: name of a camera in the base model. Value: name of the same camera in LeRobot's LIBERO data sets.
ALIASES = {"wrist_image": "image2"}
LIBERO, GRIPPER = "libero", Threshold((), offset=0.5, below=1.0, above=-1.0)


def recognises(path: Path) -> bool:
    """Return True if a LeRobot folder's preprocessor is that of N1.7."""
    file = path / f"{PRE}.json"
    steps = JsonRecord(file).get("steps") if file.is_file() else None
    names = [step.get("registry_name") for step in steps or () if isinstance(step, dict)]
    return any(str(name).startswith("groot_n1_7") for name in names)


class LeRobotFiles(NvidiaFiles):
    """A LeRobot folder of N1.7. The class has the same methods as the class for NVIDIA's folders."""

    format = "gr00t-n1.7-lerobot"
    transforms = "lerobot"

    def __init__(self, path: Path, options: ConvertOptions):
        self.path, self.options = path, options
        for name in ("frames", "transforms", "embodiment_id"):
            if name in options.settings:
                raise ConvertError(f"--set {name}: a LeRobot fine-tune contains this value. Omit the option")
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
        if (base_type := model_type(self._base)) != "Gr00tN1d7":
            raise ConvertError(
                f"{self._base / 'config.json'}: expected the base model of a GR00T N1.7 fine-tune (Gr00tN1d7), got"
                f" {base_type!r}. Pass its folder with --base"
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
        """The embodiment of the fine-tune, to which the statistics belong."""
        tag, numbers = str(self.checkpoint["embodiment_tag"]), self.pack.get("embodiment_mapping") or {}
        choice = self.options.embodiment or tag
        return choose(choice, [tag] if tag in numbers else [], numbers, self.processor.path)

    @property
    def language(self) -> str:
        """The instruction's key in the GR00T protocol. LeRobot's own key for the task differs."""
        return n15.TASK

    @property
    def frames(self) -> tuple[int, int]:  # type: ignore[override]
        """Height and width of the first camera's frames."""
        first = next(iter(self._views.values()))
        return first.height, first.width

    @property
    def history(self) -> tuple[int, int]:
        """(Number of observation steps, distance between them): one step, because LeRobot only supports a
        ``video_horizon`` of 1."""
        return 1, 1

    @property
    def notes(self) -> tuple[str, ...]:  # type: ignore[override]
        """Notes for the user: assumptions about facts that the files do not contain."""
        return tuple(self.checkpoint.notes)

    def cameras(self, frames: tuple[int, int]) -> list[CameraSpec]:
        """Return the cameras in the order of the base model's keys, or of their names if no camera has such a key."""
        keys = self.pack.get("video_modality_keys") or []
        if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
            raise ConvertError(
                f"{self.processor.path}: video_modality_keys: expected a list of names, got {keys!r}"
            )
        camera_of_key = {
            key: next((n for n in (key, ALIASES.get(key)) if n in self._views), None) for key in keys
        }
        names = [name for name in camera_of_key.values() if name is not None]
        if not names:
            return [self._views[name] for name in sorted(self._views)]
        absent = [key for key, name in camera_of_key.items() if name is None]
        unused = [camera.name for slot, camera in self._views.items() if slot not in names]
        if absent or unused:
            self.checkpoint.notes.append(
                f"cameras are chosen by the base model's keys {', '.join(keys)}, as in LeRobot; not used:"
                f" {', '.join([*absent, *unused])}"
            )
        return [self._views[name] for name in names]

    @cached_property
    def vectors(self) -> Vectors:
        """State and action with their normalisation, as LeRobot computes it."""
        vectors = read_vectors(self.modalities, self.processor.content, same=np.equal)
        self._fits("input_features", "STATE", STATE, vectors.state)
        self._fits("output_features", "ACTION", ACTION, vectors.action)
        steps = (*vectors.action_steps, *self._gripper(vectors), *self.checkpoint.action_steps())
        horizon = min(vectors.horizon, self.checkpoint.size("chunk_size"))
        return replace(vectors, action_steps=steps, horizon=horizon)

    @cached_property
    def modalities(self) -> Modalities:
        """The groups of state and action with their statistics. There is one group each if the whole vector is
        decoded.
        """
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
            raise ConvertError(
                f"{where}: expected groups with {len(low)} values of {STATE} in total, got {start}"
            )
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
        """The files of this folder that the bundle depends on, and the configuration of the base model."""
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

    def _fits(self, group: str, kind: str, key: str, vector: VectorSpec) -> None:
        if (expected := self.checkpoint.vector(group, kind, key).dim) != vector.dim:
            raise ConvertError(
                f"{self.path}: statistics of {key}: expected {expected} values as in config.json, got {vector.dim}"
            )

    def _gripper(self, vectors: Vectors) -> tuple[VectorStep, ...]:
        """Return the step that converts the gripper action to -1 or 1 for LIBERO, if config.json requires it; else
        ()."""
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
            return (replace(GRIPPER, dims=(vectors.action.dim - 1,)),) if vectors.action.dim >= 7 else ()
        dims = tuple(i for i, name in enumerate(vectors.action.names) if name.rpartition(".")[0] == "gripper")
        if len(dims) != 1:
            raise ConvertError(
                f"{self.path}: action_decode_transform=libero: expected one group 'gripper' with one value, got"
                f" {len(dims)}"
            )
        return (replace(GRIPPER, dims=dims),)


def _upper(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of an action group with its values in capital letters, as NVIDIA writes them.

    LeRobot also accepts lower-case letters.
    """
    fields = {key: str(config.get(key)).upper().replace("+", "_") for key in ("rep", "type", "format")}
    return {**fields, "state_key": config.get("state_key")}
