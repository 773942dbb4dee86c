"""What all LeRobot checkpoints share: files, features, statistics, tokenizer.

Two layouts exist. Since 0.4 the pre- and post-processor pipelines are JSON files beside the weights, with
their statistics in small safetensors files; before, statistics were buffers inside ``model.safetensors``
(``normalize_inputs.buffer_observation_state.mean``). Both are read; processors win when both are there.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from sinew.bundle.schema import Normalization
from sinew.bundle.writer import TensorSource
from sinew.convert.read.files import read_json
from sinew.convert.read.safetensors import read_safetensors, read_weights
from sinew.convert.tensors import read_array
from sinew.core import CameraSpec, ConvertError, VectorSpec
from sinew.processing.normalize import STATISTICS

STATE, ACTION = "observation.state", "action"
IMAGE_PREFIXES = ("observation.images.", "observation.")
LEGACY_BUFFERS = ("normalize_inputs.", "normalize_targets.", "unnormalize_outputs.")
Statistics = dict[str, dict[str, np.ndarray]]  # feature -> statistic -> float32 vector


def config_type(path: Path) -> str | None:
    """Return the "type" in a directory's config.json, or None where there is none."""
    config = path / "config.json"
    kind = read_json(config).get("type") if config.exists() else None
    return kind if isinstance(kind, str) else None


class LeRobotCheckpoint:
    """A checkpoint directory. ``stats`` replaces its statistics by those of a data set's ``stats.json``."""

    def __init__(self, path: Path, stats: Path | None = None):
        self.path = path
        self.stats_file = stats
        self.config = read_json(path / "config.json")
        self.type = self.config.get("type")

    def __getitem__(self, key: str) -> Any:
        if key not in self.config:
            raise ConvertError(f"{self.path / 'config.json'}: {key!r} is missing")
        return self.config[key]

    # ------------------------------------------------------------------ weights

    @cached_property
    def _weights(self) -> tuple[dict[str, TensorSource], list[Path]]:
        return read_weights(self.path)

    @property
    def files(self) -> list[Path]:
        """Everything that a bundle takes from this checkpoint, the tokenizer aside."""
        extra = [self.stats_file] if self.stats_file else []
        return [
            *self._weights[1],
            self.path / "config.json",
            *sorted(self.path.glob("policy_*processor*")),
            *extra,
        ]

    @cached_property
    def tensors(self) -> dict[str, TensorSource]:
        """All weights by upstream name, in file order; legacy statistics buffers are left out."""
        return {name: t for name, t in self._weights[0].items() if not name.startswith(LEGACY_BUFFERS)}

    # ------------------------------------------------------------------ features

    def _features(self, group: str, kind: str) -> dict[str, tuple[int, ...]]:
        try:
            features = self[group].items()
            return {name: tuple(f["shape"]) for name, f in features if f["type"] == kind}
        except (AttributeError, KeyError, TypeError):
            raise ConvertError(f"{self.path / 'config.json'}: {group} is not a feature table") from None

    @property
    def cameras(self) -> tuple[CameraSpec, ...]:
        """Camera slots in config order. LeRobot lists its padding slots as features too; they are not
        cameras, so they are left to ``empty_cameras``."""
        cameras = []
        for key, shape in self._features("input_features", "VISUAL").items():
            name = next((key[len(p) :] for p in IMAGE_PREFIXES if key.startswith(p)), key)
            if name.startswith("empty_camera_"):
                continue
            if len(shape) != 3 or shape[0] != 3:
                raise ConvertError(f"camera {key!r} has shape {list(shape)}, expected [3, height, width]")
            cameras.append(CameraSpec(name, shape[1], shape[2]))
        if not cameras:
            raise ConvertError(f"{self.path / 'config.json'}: input_features names no camera")
        return tuple(cameras)

    def vector(self, group: str, kind: str, key: str) -> VectorSpec:
        shape = self._features(group, kind).get(key)
        if shape is None or len(shape) != 1:
            raise ConvertError(f"{self.path / 'config.json'}: {group} has no vector {key!r}")
        return VectorSpec(dim=shape[0])

    # ------------------------------------------------------------------ statistics

    def normalization(self, feature: str, kind: str) -> Normalization:
        """How ``feature`` is normalised; ``kind`` is its key in the mapping (STATE or ACTION)."""
        step = self._processor_step(feature)
        mapping = (step or {}).get("config", {}).get("norm_map") or self.config.get(
            "normalization_mapping", {}
        )
        mode: Any = str(mapping.get(kind, "IDENTITY")).removeprefix("NormalizationMode.").lower()
        if mode not in STATISTICS:
            raise ConvertError(f"normalisation {mode!r} of {feature} is not one of {', '.join(STATISTICS)}")
        needed = STATISTICS[mode]
        found = self.statistics.get(feature, {})
        if missing := [stat for stat in needed if stat not in found]:
            raise ConvertError(
                f"{self.path}: no statistics {missing} for {feature!r} ({mode}); give the training data set's"
                " meta/stats.json with --stats FILE"
            )
        eps = (step or {}).get("config", {}).get("eps", 1e-8)
        # float() of a float32 is exact, and JSON keeps all of its digits.
        return Normalization(mode, {s: tuple(float(v) for v in found[s].reshape(-1)) for s in needed}, eps)

    def image_mode(self) -> str:
        return str(self.config.get("normalization_mapping", {}).get("VISUAL", "IDENTITY"))

    @cached_property
    def statistics(self) -> Statistics:
        if self.stats_file:
            record = read_json(self.stats_file)
            try:
                return {
                    feature: {stat: np.asarray(values, np.float32) for stat, values in stats.items()}
                    for feature, stats in record.items()
                    if feature in (STATE, ACTION)
                }
            except (AttributeError, ValueError, TypeError) as error:
                raise ConvertError(f"{self.stats_file}: not a table of statistics ({error})") from None
        return self._processor_statistics() or self._legacy_statistics()

    def _pipeline(self, name: str) -> list[dict[str, Any]]:
        path = self.path / f"{name}.json"
        return read_json(path).get("steps", []) if path.exists() else []

    def step(self, pipeline: str, registry_name: str) -> dict[str, Any] | None:
        """A processor step by its registry name; positions differ between versions, names do not."""
        steps = (s for s in self._pipeline(pipeline) if s.get("registry_name") == registry_name)
        return next(steps, None)

    def _processor_step(self, feature: str) -> dict[str, Any] | None:
        if feature == ACTION:
            return self.step("policy_postprocessor", "unnormalizer_processor")
        return self.step("policy_preprocessor", "normalizer_processor")

    def _processor_statistics(self) -> Statistics:
        found: Statistics = {}
        for feature in (STATE, ACTION):
            step = self._processor_step(feature)
            if not step or not step.get("state_file"):
                continue
            for name, source in read_safetensors(self.path / Path(step["state_file"]).name).items():
                key, _, stat = name.rpartition(".")
                if key == feature:
                    found.setdefault(feature, {})[stat] = read_array(source)
        return found

    def _legacy_statistics(self) -> Statistics:
        found: Statistics = {}
        for feature, prefixes in ((STATE, LEGACY_BUFFERS[:1]), (ACTION, LEGACY_BUFFERS[2:0:-1])):
            for prefix in prefixes:
                start = f"{prefix}buffer_{feature.replace('.', '_')}."
                for name, source in self._weights[0].items():
                    if name.startswith(start):
                        found.setdefault(feature, {}).setdefault(name[len(start) :], read_array(source))
        return {f: s for f, s in found.items() if all(np.isfinite(v).all() for v in s.values())}
