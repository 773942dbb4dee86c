"""Read the parts that all LeRobot checkpoints have: files, configuration, features, statistics, tokenizer.

Two layouts exist. Since 0.4 the pre- and post-processor pipelines are JSON files next to the weights, with their
statistics in small safetensors files. Before 0.4, statistics were buffers inside ``model.safetensors``
(``normalize_inputs.buffer_observation_state.mean``). Both layouts are supported. If a checkpoint has both, the
pipelines are used.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from sinew.bundle.schema import STATISTICS, ImageRecipe, Normalization, Processing, PromptRecipe, VectorPart
from sinew.bundle.statistics import impossible
from sinew.bundle.writer import TensorSource
from sinew.convert.adapter import merge, merge_inside
from sinew.convert.lerobot.folder import (
    EPISODES,
    Dataset,
    name_of,
    read_dataset,
    resolve,
    run_dataset,
    run_folder,
    trained_on,
)
from sinew.convert.lerobot.stats import (
    ACTION,
    ENVIRONMENT,
    LEGACY_BUFFERS,
    MOST_NAMED,
    STATE,
    Found,
    Statistics,
    legacy_statistics,
    processor_statistics,
    read_stats_file,
    stats_record,
    step_of,
    unread_statistics,
)
from sinew.convert.lerobot.steps import (
    ANYWHERE,
    POST,
    POSTPROCESSOR,
    PRE,
    RENAME,
    Pipelines,
    ProcessorStep,
    action_steps,
)
from sinew.convert.options import ConvertOptions
from sinew.convert.read.files import directory_config, named, read_json
from sinew.convert.read.record import MOST_SHOWN, TRAINING, shown_fields, training_note
from sinew.convert.read.safetensors import ADAPTER_CONFIG, adapter_alone, is_adapter, read_weights
from sinew.convert.tokenizer_files import given_folder
from sinew.core import (
    MAX_SIZE,
    SCHEDULES,
    CameraSpec,
    ConvertError,
    PolicySpec,
    RealTimeChunking,
    VectorSpec,
    did_you_mean,
)
from sinew.steps.image.base import CameraScale
from sinew.steps.vector.base import VectorStep

IMAGE_PREFIXES = ("observation.images.", "observation.")
# Fields about training, loading and upload that every LeRobot configuration has. These fields do not change the
# computation. Whatever n_obs_steps is, only the newest observation is read, unless a family's schema names this field.
# rtc_config states how the robot joins chunks.
UNREAD = (
    "type device use_amp use_peft push_to_hub repo_id private tags license pretrained_path pretrained_revision"
    " use_cache compile_model compile_mode gradient_checkpointing freeze_vision_encoder train_expert_only"
    " train_state_proj optimizer_lr optimizer_betas optimizer_eps optimizer_weight_decay optimizer_grad_clip_norm"
    " scheduler_warmup_steps scheduler_decay_steps scheduler_decay_lr n_obs_steps rtc_config"
)


def config_type(path: Path) -> str | None:
    """Return the "type" in a directory's config.json; None if there is none."""
    kind = directory_config(path).get("type")
    return kind if isinstance(kind, str) else None


def of_type(*names: str) -> Callable[[Path], bool]:
    """Return a function that tests a path: True for a LeRobot directory whose config.json has one of the types
    ``names``."""
    return lambda path: config_type(path) in names


@dataclass(frozen=True)
class Schema:
    """The keys that a family supports in its ``config.json``.

    Attributes:
        defaults: The training project's defaults, for keys that a file may lack.
        required: Keys, separated by spaces, that a file must have. Their defaults differ between versions of LeRobot.
        fixed: Keys for which Sinew supports only one value, with this value.
        unread: Keys, separated by spaces, that do not affect inference.
        features: Types of input features that the family reads. Every family reads a prompt (LANGUAGE).
        steps: Steps that the preprocessor may have, in order, without the steps that are the same for all families.
        after: Steps that the postprocessor may have, in order.
        adapters: True if ``--base`` names the model that an adapter changes.
        adapters_inside: True if the weights may contain LoRA adapters that are not merged. ``lora_rank`` and
            ``lora_alpha`` of the configuration then state their scale.
    """

    defaults: Mapping[str, Any]
    required: str = ""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    unread: str = ""
    features: tuple[str, ...] = ("STATE", "VISUAL", "LANGUAGE")
    steps: Mapping[str, ProcessorStep] = field(default_factory=dict)
    after: Mapping[str, ProcessorStep] = field(default_factory=lambda: POSTPROCESSOR)
    adapters: bool = False
    adapters_inside: bool = False

    @property
    def keys(self) -> set[str]:
        """Return the keys that a ``config.json`` of the family may have."""
        own = {*self.defaults, *self.required.split(), *self.fixed, *self.unread.split()}
        return {"input_features", "output_features", *UNREAD.split(), *own}

    def fits(self, record: Mapping[str, Any]) -> bool:
        """Return True if a ``config.json`` that does not state its type has all required keys of this family, and no
        unknown keys.
        """
        keys = {key for key in record if not TRAINING.search(key)}
        own = keys - {"input_features", "output_features", *UNREAD.split()}
        return bool(own) and keys <= self.keys and all(key in record for key in self.required.split())


class LeRobotCheckpoint:
    """A checkpoint directory. Its configuration and pipelines are checked against a family's ``schema``.

    Attributes:
        format: The name of the checkpoint's format, which the bundle records, if it differs from the family's name.
        notes: Notes about choices that the checkpoint leaves open.
    """

    format = ""

    def __init__(
        self, path: Path, options: ConvertOptions, schema: Schema, config: dict[str, Any] | None = None
    ):
        self.path, self.options, self.schema = path, options, schema
        self.file = path / "config.json"
        self.config = read_json(self.file) if config is None else config
        self.type = self.config.get("type")
        self.notes: list[str] = []
        self._check_keys()
        self._check_features()
        pre = {"rename_observations_processor": RENAME, **schema.steps, **ANYWHERE}
        self.pipelines = Pipelines(path, {PRE: pre, POST: schema.after})
        self.notes += self.pipelines.absent

    def __getitem__(self, key: str) -> Any:
        if key in self.config:
            return self.config[key]
        if key not in self.schema.defaults:
            raise ConvertError(
                f"{self.file}: {key!r} is missing; use the config.json that the training wrote"
            )
        return self.schema.defaults[key]

    def _check_keys(self) -> None:
        keys = self.schema.keys
        ignored = self._ignored
        unknown = {k: v for k, v in self.config.items() if k not in keys and k not in ignored}
        training = [key for key in unknown if TRAINING.search(key)]
        if training:
            self.notes.append(training_note(training))
        if strange := [key for key in unknown if key not in training]:
            listing = shown_fields({key: unknown[key] for key in strange})
            verb = "is" if len(strange) == 1 else "are"
            raise ConvertError(
                f"{self.file}: {listing} {verb} not understood; if the computation does not depend on it, pass"
                f" --set ignore={','.join([*ignored, *strange])} to skip it"
            )
        inputs = self.config.get("input_features")
        read = {*self.schema.defaults, *self.schema.required.split()}
        aside = {*self.config, *(inputs if isinstance(inputs, dict) else ())} - read
        for key in ignored:
            if key not in aside:
                why = (
                    "is read by the conversion"
                    if key in read
                    else f"does not exist{did_you_mean(key, aside)}"
                )
                raise ConvertError(
                    f"--set ignore={key}: expected an unread key of {self.file} or one of its inputs; this key {why}"
                )
        for key, value in self.schema.fixed.items():
            if key not in ignored and self.config.get(key, value) != value:
                raise ConvertError(
                    f"{self.file}: {key}={json.dumps(self.config[key])} is not supported yet, expected"
                    f" {json.dumps(value)}; the checkpoint cannot be converted"
                )
        if self.real_time_chunking is not None:
            self.notes.append(
                f"rtc_config={json.dumps(self.config['rtc_config'])[:MOST_SHOWN]}: LeRobot joins chunks by real-time"
                " chunking. The bundle stores these settings, and each run prints the flags for them"
            )
        absent = [
            f"{key}={json.dumps(v)}" for key, v in self.schema.defaults.items() if key not in self.config
        ]
        if absent:
            self.notes.append(f"not in config.json, so LeRobot's defaults are used: {', '.join(absent)}")

    @property
    def _ignored(self) -> list[str]:
        return [name for name in str(self.options.setting("ignore", "")).split(",") if name]

    def _check_features(self) -> None:
        """Raise ConvertError if the policy was trained with an input that the family does not read."""
        table = self.config.get("input_features")
        for name, feature in table.items() if isinstance(table, dict) else ():
            kind = feature.get("type") if isinstance(feature, dict) else None
            if not isinstance(kind, str) or kind in self.schema.features or name in self._ignored:
                continue
            raise ConvertError(
                f"{self.file}: input_features.{name}: expected type {', '.join(self.schema.features)}, got {kind};"
                " if the actions do not depend on this input, skip it with --set"
                f" ignore={','.join([*self._ignored, name])}"
            )

    @property
    def name(self) -> str:
        return name_of(self.path)

    def check_tokens(self, image: int, marker: int) -> None:
        """Do nothing. LeRobot's checkpoints contain no ids of special tokens that could differ from the tokenizer's
        ids. Subclasses check the ids in their files.
        """

    @cached_property
    def _weights(self) -> tuple[dict[str, TensorSource], list[Path]]:
        """Return the weights and their files. The weights of an adapter are merged into the weights of its base."""
        base = self.options.base if self.schema.adapters else None
        if not is_adapter(self.path):
            if base is not None:
                raise ConvertError(
                    f"--base {base}: {self.path} is a complete model and not an adapter; omit --base"
                )
            if not self.schema.adapters_inside:
                return read_weights(self.path)
            tensors, files = read_weights(self.path, lora=True)
            alpha, rank = self.number("lora_alpha"), self.size("lora_rank")
            with ConvertError.at(self.path, ConvertError):
                return merge_inside(tensors, alpha, rank), files
        if base is None:
            raise adapter_alone(self.path)
        base = resolve(self._base_folder(base))
        if not (base / "config.json").is_file():
            raise ConvertError(
                f"--base {self.options.base}: expected a checkpoint, a folder with config.json, got a folder without it"
            )
        if (kind := config_type(base)) != self.type:
            raise ConvertError(
                f"--base {base}: expected a policy of the adapter's type {self.type}, got {kind or 'no type'}; pass the"
                " model that the adapter was trained on"
            )
        tensors, files = read_weights(base)
        merged, own = merge(tensors, self.path)
        return merged, [*files, *own]

    def _base_folder(self, base: Path) -> Path:
        """Return the folder that ``--base`` names, or a download of the hub repository that ``--base`` names. If the
        adapter names the same repository, the adapter's revision is downloaded."""
        file = self.path / ADAPTER_CONFIG
        record = read_json(file) if file.is_file() else {}
        revision = (
            record.get("revision") if record.get("base_model_name_or_path") == base.as_posix() else None
        )
        revision = revision if isinstance(revision, str) and revision else None
        patterns = "*.json *.safetensors tokenizer/*"
        return given_folder(base, "--base", patterns, revision)

    @property
    def files(self) -> list[Path]:
        """Return all files of this checkpoint that the bundle depends on, except the tokenizer."""
        extra = [self.options.stats] if self.options.stats else []
        extra += self.dataset.files if self.dataset else []
        return [*self._weights[1], self.file, *sorted(self.path.glob("policy_*processor*")), *extra]

    @cached_property
    def tensors(self) -> dict[str, TensorSource]:
        """Return a dict: name in the checkpoint -> weight, in the order of the file.

        The statistics that the old layout stores among the weights are omitted.
        """
        return {name: t for name, t in self._weights[0].items() if not name.startswith(LEGACY_BUFFERS)}

    @cached_property
    def dataset(self) -> Dataset | None:
        """Return the facts of the data set that ``--dataset`` names, else of a data set inside the run's own folder;
        None if neither exists."""
        if self.options.dataset:
            return read_dataset(self.options.dataset)
        if (inside := run_dataset(self.path)) is None:
            return None
        name = inside.relative_to(run_folder(self.path)).as_posix()
        self.notes.append(
            f"joint names and actions per second are from the data set {name} in this run's folder"
        )
        return read_dataset(inside)

    @property
    def control_hz(self) -> float | None:
        """Return the actions per second: ``--control-hz``, else the data set's frames per second; None if unknown."""
        return self.options.control_hz or (self.dataset.fps if self.dataset else None)

    def _features(self, group: str, kind: str) -> dict[str, tuple[int, ...]]:
        try:
            features = {name: (f["type"], tuple(f["shape"])) for name, f in self[group].items()}
        except (AttributeError, KeyError, TypeError):
            raise ConvertError(
                f'{self.file}: {group} is not a feature table; each entry needs "type" and "shape"'
            ) from None
        shapes = {name: shape for name, (type_, shape) in features.items() if type_ == kind}
        for name, shape in shapes.items():
            if not all(type(n) is int and 1 <= n <= MAX_SIZE for n in shape):
                raise ConvertError(
                    f"{self.file}: {group}.{name}: expected sizes up to {MAX_SIZE}, got {list(shape)}"
                )
        return shapes

    @cached_property
    def cameras(self) -> tuple[CameraSpec, ...]:
        """Return the cameras in the order of the configuration, with the robot's names.

        LeRobot's configuration also lists empty cameras, which are only padding. They are skipped. If the pipeline has
        a ``rename_map``, it contains the robot's names of the cameras.
        """
        cameras, theirs = [], self._rename_map
        for key, shape in self._features("input_features", "VISUAL").items():
            if _short(key).startswith("empty_camera_"):
                continue
            if len(shape) != 3 or shape[0] != 3:
                raise ConvertError(
                    f"{self.file}: camera {key!r} has shape {list(shape)}, expected [3, height, width]"
                )
            slot = _short(key)
            name = theirs.pop(slot, slot)
            cameras.append(CameraSpec(name, shape[1], shape[2], slot=slot if name != slot else ""))
        if not cameras:
            raise ConvertError(
                f"{self.file}: input_features names no camera; expected a feature of type VISUAL"
            )
        theirs.pop(STATE, None)
        slots = [_short(key) for key in self._features("input_features", "VISUAL")]
        if theirs:
            renamed = ", ".join(f"{robot} for {slot}" for slot, robot in theirs.items())
            self.notes.append(
                f"rename_map: {renamed} is ignored, as in LeRobot, because the policy reads only {', '.join(slots)}"
            )
        if len({camera.name for camera in cameras}) != len(cameras):
            names = ", ".join(camera.name for camera in cameras)
            raise ConvertError(
                f"{self.path / PRE}.json: rename_map gives two cameras one name ({names}); give each camera its own"
            )
        return tuple(cameras)

    @property
    def frame_size(self) -> tuple[int, int]:
        """Return the height and width of the frames, which must be the same for all cameras.

        Raises:
            ConvertError: Cameras have different frame sizes.
        """
        sizes = {(camera.height, camera.width) for camera in self.cameras}
        if len(sizes) > 1:
            sized = ", ".join(f"{each.name} {each.height} x {each.width}" for each in self.cameras)
            raise ConvertError(
                f"{self.file}: expected cameras of one size, got {sized}; policies of type {self['type']} read"
                " all cameras at one size, so this checkpoint cannot be converted. Train again with frames that are"
                " resized to one size"
            )
        return sizes.pop()

    def unresized_frames(self) -> ImageRecipe:
        """Return the image recipe of a model that reads frames at their camera's size, with the cameras' statistics.

        If cameras have different sizes, the model's image has the largest height and the largest width of all cameras,
        and each frame is in its top left corner.

        Raises:
            ConvertError: The statistics of the cameras are not valid.
        """
        sizes = tuple((camera.height, camera.width) for camera in self.cameras)
        height, width = (max(sides) for sides in zip(*sizes, strict=True))
        differ = len(set(sizes)) > 1
        return ImageRecipe(height, width, **self.image_scales(), sizes=sizes if differ else ())

    @property
    def slots(self) -> tuple[str, ...]:
        """Return the names of the cameras in the model's configuration, in the order of ``cameras``. The robot may
        use other names.
        """
        names = map(_short, self._features("input_features", "VISUAL"))
        return tuple(name for name in names if not name.startswith("empty_camera_"))

    @property
    def _rename_map(self) -> dict[str, str]:
        """Return a dict: the model's name of a camera -> the robot's name of this camera, both without their
        prefixes."""
        table = self.pipelines.config(PRE, "rename_observations_processor").get("rename_map") or {}
        where = f"{self.path / PRE}.json: rename_map"
        if not isinstance(table, dict) or not all(isinstance(v, str) and v and k for k, v in table.items()):
            raise ConvertError(f"{where}: expected a table of names, got {table!r}")
        turned = {_short(slot): _short(robot) for robot, slot in table.items()}
        if len(turned) != len(table):
            raise ConvertError(f"{where}: expected one name for each slot, got {table!r}")
        if changed := {slot: robot for slot, robot in turned.items() if slot != robot}:
            renames = ", ".join(f"{robot} for {slot}" for slot, robot in changed.items())
            self.notes.append(f"camera names from rename_observations_processor: {renames}")
        return turned

    def vector(self, group: str, kind: str, key: str) -> VectorSpec:
        """Return the specification of a vector feature: its size, and the names of its values if they are known."""
        shape = self._features(group, kind).get(key)
        if shape is None or len(shape) != 1:
            raise ConvertError(
                f"{self.file}: {group} has no vector {key!r}; expected this entry with shape [N]"
            )
        names = self.dataset.names.get(key, ()) if self.dataset else ()
        if names and len(names) != shape[0]:
            raise ConvertError(
                f"--dataset: expected {shape[0]} names for {key!r}, got {len(names)}; pass the data set of this run"
            )
        own = self.config.get("action_feature_names") if key == ACTION else None
        if not names and isinstance(own, list) and len(own) == shape[0]:
            names = tuple(map(str, own))
        return VectorSpec(dim=shape[0], names=names)

    @property
    def state(self) -> VectorSpec:
        return self.vector("input_features", "STATE", STATE)

    @property
    def action(self) -> VectorSpec:
        """Return the size and the names of the robot's actions."""
        return self.vector("output_features", "ACTION", ACTION)

    @property
    def environment_dim(self) -> int:
        """Return how many values of the policy's state describe the environment; 0 if there are none. They follow
        the robot's values."""
        there = ENVIRONMENT in self["input_features"]
        return self.vector("input_features", "ENV", ENVIRONMENT).dim if there else 0

    def whole_state(self) -> VectorSpec:
        """Return the robot's state, followed by the environment's state if the policy reads it."""
        own = self.state
        if not (count := self.environment_dim):
            return own
        other = self.vector("input_features", "ENV", ENVIRONMENT).names
        names = other or tuple(f"environment_{index}" for index in range(count))
        whole = VectorSpec(own.dim + count, (*own.names, *names) if own.names else ())
        self.notes.append(f"{ENVIRONMENT}: the last {count} of the state's {whole.dim} numbers")
        return whole

    def state_parts(self) -> tuple[VectorPart, ...]:
        """Return the normalisation of each part of :meth:`whole_state`; () if the policy does not read the
        environment's state."""
        if not (count := self.environment_dim):
            return ()
        return (
            VectorPart("state", self.state.dim, self.normalization(STATE, "STATE")),
            VectorPart("environment", count, self.normalization(ENVIRONMENT, "ENV")),
        )

    def action_steps(self) -> tuple[VectorStep, ...]:
        """Return the steps that convert the model's actions, after the normalisation is inverted, to the robot's
        actions."""
        before = len(self.pipelines.absent)
        steps = action_steps(self.pipelines, self.config, self.state.dim, self.action.dim)
        self.notes += self.pipelines.absent[before:]
        return steps

    @property
    def max_tokens(self) -> int:
        """Return the largest number of tokens that a prompt may have."""
        return self.size("tokenizer_max_length", self._tokenizer.get("max_length"))

    @property
    def padding(self) -> Any:
        """Return the padding of prompts that the pipeline states; None if the pipeline states no padding."""
        return self._tokenizer.get("padding")

    @property
    def tokenizer_name(self) -> str:
        """Return the tokenizer's name on the hub; "" if the tokenizer is in the checkpoint, or is not stated."""
        name = self._tokenizer.get("tokenizer_name")
        return name if isinstance(name, str) and name != "tokenizer" else ""

    @property
    def _tokenizer(self) -> dict[str, Any]:
        return self.pipelines.config(PRE, "tokenizer_processor")

    def size(self, key: str, value: Any = None, low: int = 1, high: int = MAX_SIZE) -> int:
        """Return ``value``, or the whole number ``key`` of the configuration if ``value`` is None.

        Raises:
            ConvertError: The value is not a whole number from ``low`` to ``high``.
        """
        value = self[key] if value is None else value
        if type(value) is not int or not low <= value <= high:
            raise ConvertError(
                f"{self.file}: {key}: expected a whole number from {low} to {high}, got {value!r}"
            )
        return value

    def number(self, key: str, below: float = math.inf) -> float:
        """Return the value of ``key`` in the configuration, which must be a number above 0.

        Raises:
            ConvertError: The value is not such a number.
        """
        value = self[key]
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < below:
            raise ConvertError(f"{self.file}: {key}: expected a number above 0, got {value!r}")
        return float(value)

    def sides(self, key: str) -> tuple[int, int] | None:
        """Return the value (height, width) of ``key`` in the configuration; None if the value is null."""
        value = self[key]
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != 2:
            raise ConvertError(f"{self.file}: {key}: expected height and width, got {value!r}")
        return self.size(key, value[0]), self.size(key, value[1])

    def one_of(self, key: str, *allowed: str) -> Any:
        """Return the value of ``key`` in the configuration.

        Raises:
            ConvertError: The value is not one of ``allowed``.
        """
        if (value := self[key]) not in allowed:
            raise ConvertError(f"{self.file}: {key}: expected one of {', '.join(allowed)}, got {value!r}")
        return value

    def named(self) -> AbstractContextManager[None]:
        """Return a context manager that adds the path of the checkpoint's file to errors about the model's
        configuration.
        """
        return named(self.file)

    def committed_rows(self, chunk_size: int) -> int:
        """Return the length of the longest action prefix that the policy was trained to continue (actions that it
        takes over from the running chunk); 0 if it was not trained to do so.

        LeRobot's key is ``rtc_training_max_delay``. ``--set committed_rows=N`` sets the length for files without that
        key.
        """
        rows = self.options.setting("committed_rows", self.config.get("rtc_training_max_delay", 0))
        return self.size("rtc_training_max_delay", rows, low=0, high=chunk_size - 1)

    def policy_spec(
        self, architecture: str, chunk_size: int, *, state: VectorSpec | None = None, **fields: Any
    ) -> PolicySpec:
        """Return the policy's specification.

        Args:
            architecture: Name of the architecture.
            chunk_size: Actions per chunk.
            state: The state, if it has more than the robot's state.
            **fields: Further fields, and fields for which the family has its own value.
        """
        if not self.dataset and not (state or self.state).names and (name := trained_on(self.path)):
            self.notes.append(
                f"joints have no names, and the rate is not known; pass --dataset {shlex.quote(name)}, on which this"
                " run was trained (train_config.json), to add both"
            )
        return PolicySpec(
            architecture=architecture,
            chunk_size=chunk_size,
            state=state or self.state,
            n_action_steps=fields.pop("n_action_steps", None) or self.size("n_action_steps", high=chunk_size),
            action=fields.pop("action", None) or self.action,
            real_time_chunking=self.real_time_chunking,
            **{"name": self.name, "cameras": self.cameras, "control_hz": self.control_hz} | fields,
        )

    @cached_property
    def real_time_chunking(self) -> RealTimeChunking | None:
        """Return the real-time chunking settings of the checkpoint; None if the checkpoint does not enable real-time
        chunking. Fields that the file lacks have LeRobot's defaults."""
        settings = self.config.get("rtc_config")
        if not isinstance(settings, dict) or not settings.get("enabled", True):
            return None
        weight = settings.get("max_guidance_weight", 10.0)
        schedule = str(settings.get("prefix_attention_schedule", "linear")).rpartition(".")[2].lower()
        mode = settings.get("mode", "guided")
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0.0 <= weight < 1e30:
            raise ConvertError(
                f"{self.file}: rtc_config.max_guidance_weight: expected a number, at least 0, got {weight!r:.80}"
            )
        for key, value, allowed in (
            ("prefix_attention_schedule", schedule, SCHEDULES),
            ("mode", mode, ("guided", "trained")),
        ):
            if value not in allowed:
                raise ConvertError(
                    f"{self.file}: rtc_config.{key}: expected one of {', '.join(allowed)}, got {value!r:.80}"
                )
        horizon = self.size("rtc_config.execution_horizon", settings.get("execution_horizon", 10), low=0)
        return RealTimeChunking(horizon, schedule, float(weight), mode)

    def processing(self, image: ImageRecipe, prompt: PromptRecipe, config: Any, **fields: Any) -> Processing:
        """Return the processing of a policy whose vectors are normalised by the pipelines and padded to the model's
        sizes.

        Args:
            image: The image recipe.
            prompt: The prompt recipe.
            config: The model's configuration. It states the padded sizes.
            **fields: Further fields of :class:`Processing`, which the family sets.
        """
        return Processing(
            image=image,
            prompt=prompt,
            state=self.normalization(STATE, "STATE"),
            action=self.normalization(ACTION, "ACTION"),
            padded_state_dim=config.max_state_dim,
            padded_action_dim=config.max_action_dim,
            **fields,
        )

    def _mode(self, feature: str, kind: str) -> Any:
        mapping = self.pipelines.config(*step_of(feature)).get("norm_map") or self["normalization_mapping"]
        if not isinstance(mapping, dict):
            raise ConvertError(
                f"{self.path}: normalization_mapping or norm_map: expected a table of modes, got {mapping!r}"
            )
        return str(mapping.get(kind, "IDENTITY")).removeprefix("NormalizationMode.")

    def normalization(self, feature: str, kind: str) -> Normalization:
        """Return the normalisation of ``feature``. ``kind`` is the feature's key in normalization_mapping, "STATE",
        "ACTION" or "ENV"."""
        mode: Any = self._mode(feature, kind).lower()
        if mode not in STATISTICS:
            raise ConvertError(
                f"{self.path}: normalisation {mode!r} of {feature} is not one of {', '.join(STATISTICS)}"
            )
        config = self.pipelines.config(*step_of(feature))
        keys = config.get("normalize_observation_keys")
        if feature == STATE and self.pipelines.there:
            features = config.get("features")
            if isinstance(features, dict) and features and STATE not in features:
                raise ConvertError(
                    f"{self.path / PRE}.json: normalizer_processor: features has no {STATE!r}; use the file that the"
                    " training run wrote"
                )
            if keys is not None and STATE not in keys:
                mode = "identity"
        needed = STATISTICS[mode]
        statistics = self.statistics.get(feature, {})
        if missing := [stat for stat in needed if stat not in statistics]:
            raise ConvertError(self._no_statistics(feature, missing, mode, statistics))
        if needed and (wrong := impossible(statistics)):
            self.notes.append(
                f"statistics of {feature} are impossible for any data set: {'; '.join(wrong)}; compute them again"
            )
        eps = config.get("eps", 1e-8)
        # The conversion from float32 to float is exact, and JSON stores all digits, so the statistics are not rounded
        # in the bundle.
        return Normalization(
            mode, {s: tuple(float(v) for v in statistics[s].reshape(-1)) for s in needed}, eps
        )

    def image_scales(self) -> dict[str, Any]:
        """Return the fields of an image recipe for the normaliser before the model: ``mean`` and ``std``, or
        ``cameras`` if the cameras have different values.

        Raises:
            ConvertError: The normalisation is not supported, or its statistics are not valid.
        """
        mode = self.image_mode()
        if mode == "IDENTITY":
            return {"mean": (0.0,) * 3, "std": (1.0,) * 3}
        if mode != "MEAN_STD":
            raise ConvertError(f"{self.path}: normalisation {mode} of images: expected MEAN_STD or IDENTITY")
        eps = np.float32(self.pipelines.config(*step_of(STATE)).get("eps", 1e-8))
        scales = []
        for key in self._features("input_features", "VISUAL"):
            if _short(key).startswith("empty_camera_"):
                continue
            statistics = self.statistics.get(key, {})
            if missing := [stat for stat in ("mean", "std") if np.size(statistics.get(stat, ())) != 3]:
                raise ConvertError(self._no_statistics(key, missing, f"{mode}, three colours", statistics))
            mean, std = (np.float32(statistics[stat]).ravel() for stat in ("mean", "std"))
            scales.append(CameraScale(_colours(mean), _colours(std + eps)))
        if len(set(scales)) == 1:
            return {"mean": scales[0].mean, "std": scales[0].std}
        return {"cameras": tuple(scales)}

    def refuse_image_scales(self) -> None:
        """Raise :class:`ConvertError` if the checkpoint normalises images, because the model scales images itself."""
        if (mode := self.image_mode()) != "IDENTITY":
            raise ConvertError(
                f"{self.file}: VISUAL normalisation {mode!r}: expected IDENTITY, because the model scales its images"
                " itself"
            )

    def image_mode(self) -> str:
        """Return how images are normalised before the model, in LeRobot's words; "IDENTITY" if they are not
        normalised."""
        return self._mode(STATE, "VISUAL")

    @cached_property
    def statistics(self) -> Statistics:
        """Return the statistics: feature -> name of a statistic -> its values. The source is ``--stats``, the
        processors, the weights or ``--dataset``, in this order."""
        features = [*self["input_features"], *self["output_features"]]
        if self.options.stats:
            return read_stats_file(self.options.stats, features)
        own = self._own_statistics
        if own.unread:
            self.notes.append(unread_statistics(own.unread))
        if (key := self.options.stats_key) or (own.sets and not own.bare):
            if key in own.sets:
                self.notes.append(f"statistics of the data set {key}, one of {', '.join(sorted(own.sets))}")
                return {**own.bare, **own.sets[key]}
            if key:
                available = ", ".join(sorted(own.sets)) or "none: the checkpoint has one set of statistics"
                raise ConvertError(f"--stats-key {key}: expected one of the data sets {available}")
        if not own and self.dataset and self.dataset.stats:
            self.notes.append("the checkpoint has no statistics, so those of --dataset are used")
            return read_stats_file(self.dataset.stats, features)
        return own.bare

    @cached_property
    def _own_statistics(self) -> Found:
        """Return the statistics in the files of the processors. If these files have no statistics, return the
        statistics among the weights.
        """
        features = [*self["input_features"], *self["output_features"]]
        statistics = processor_statistics(self.path, self.pipelines, features)
        return statistics or legacy_statistics(self._weights[0], features)

    def _no_statistics(self, feature: str, missing: list[str], mode: str, present: Mapping[str, Any]) -> str:
        """Return the error message for missing statistics. It lists the statistics that exist, and states which flag to
        pass.

        Args:
            feature: The feature that lacks statistics.
            missing: Names of the missing statistics.
            mode: The mode of normalisation that needs them.
            present: The statistics of the feature that exist.
        """
        what = f"no statistics {missing} for {feature!r} ({mode})"
        own = Found() if self.options.stats else self._own_statistics
        file = self.options.stats or (
            self.dataset.stats if self.dataset and not (own.bare or own.sets) else None
        )
        if file is not None:
            flag = "--stats" if self.options.stats else "--dataset"
            has = f"it has {', '.join(sorted(present))}" if present else "it has none of this feature"
            if present and any(stat.startswith("q") for stat in missing):
                has += (
                    "; to add quantiles to a data set (version 3), run LeRobot's"
                    " lerobot/scripts/augment_dataset_quantile_stats.py --repo-id=NAME, and use its meta/stats.json"
                )
            elif not present:
                has += f", only of {', '.join(sorted(stats_record(file))[:MOST_NAMED]) or 'no feature'}"
            return f"{flag} {file}: {what}; {has}"
        if self.dataset is not None and not own:
            version = f" (version {self.dataset.version})" if self.dataset.version else ""
            return (
                f"--dataset {self.options.dataset}: {what}; the data set{version} has neither meta/stats.json nor"
                f" meta/{EPISODES}"
            )
        if own.sets:
            names = sorted(own.sets)
            complete = [name for name in names if not set(missing) - set(own.sets[name].get(feature, {}))]
            how = (
                f"choose one with --stats-key {complete[0]}"
                if complete and not self.options.stats_key
                else "none of these sets has the missing statistics"
                if not complete
                else f"{', '.join(complete)} have the missing statistics"
            )
            return (
                f"{self.path}: {what}, but those of the data sets {', '.join(names)}: {how}, or pass the statistics of"
                " your own data set with --stats FILE (meta/stats.json)"
            )
        has = f"; it has {', '.join(sorted(present))}" if present else ""
        return (
            f"{self.path}: {what}{has}; pass the training data set's meta/stats.json with --stats FILE"
            f"{self._dataset_to_type('or the data set itself with')}"
        )

    def _dataset_to_type(self, before: str) -> str:
        """Return a hint for an error message: the flag ``--dataset`` with the data set of the training run; "" if it is
        unknown.

        Its path comes from a file, so only the user may open it.
        """
        name = trained_on(self.path)
        return f", {before} --dataset {shlex.quote(name)} (train_config.json)" if name else ""


def _colours(values: np.ndarray) -> tuple[float, float, float]:
    red, green, blue = map(float, values)
    return red, green, blue


def _short(key: str) -> str:
    """Return a camera's name without the prefix that LeRobot writes before it, such as "observation.images."."""
    return next((key[len(p) :] for p in IMAGE_PREFIXES if key.startswith(p) and key != STATE), key)
