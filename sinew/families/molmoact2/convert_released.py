"""Convert the folders that the authors of MolmoAct2 release, such as allenai/MolmoAct2-SO100_101.

Such a folder has the network's ``config.json``, weights, tokenizer and image processor. Its ``norm_stats.json`` has one
entry (tag) for each robot or data set: the statistics, the description of the robot, the cameras and the length of a
chunk. The bundle is for one tag. The processing is that of LeRobot with ``checkpoint_path`` and ``norm_tag``.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from sinew.bundle.writer import TensorSource
from sinew.convert.conversion import Conversion
from sinew.convert.lerobot.checkpoint import LeRobotCheckpoint
from sinew.convert.lerobot.stats import ACTION, STATE, STATS, Statistics
from sinew.convert.options import ConvertOptions, Setting
from sinew.convert.read.files import directory_config, read_json
from sinew.convert.read.record import JsonRecord
from sinew.convert.tokenizer_files import find_tokenizer
from sinew.core import ConvertError, VectorSpec
from sinew.families.molmoact2.convert import SCHEMA, check_modes, conversion

NAMES = ("molmoact2 (released)",)
OPTIONS = ("cameras", "tokenizer", "stats_key")
SETTINGS = {
    "joint_signs": Setting(
        str, "signs of the joints, separated by commas, if the robot's joints turn in other directions"
    ),
    "joint_offsets": Setting(
        str, "offsets of the joints, separated by commas: training state = sign * state + offset"
    ),
}
STATS_FILE = "norm_stats.json"


def recognises(path: Path) -> bool:
    config = directory_config(path)
    return config.get("model_type") == "molmoact2" and "type" not in config


def read(path: Path, options: ConvertOptions) -> Conversion:
    """Read a released folder. The weights are read later, when the bundle is written.

    Raises:
        ConvertError: The folder is not a supported MolmoAct2, or its statistics have no such tag.
    """
    checkpoint = TaggedCheckpoint(path, options)
    check_modes(checkpoint)
    tokenizer = find_tokenizer(options, path, whose="the folder's")
    return conversion(checkpoint, path, tokenizer, "molmoact2-released")


class TaggedCheckpoint(LeRobotCheckpoint):
    """A released folder as LeRobot reads it for one tag.

    Attributes:
        stats: The file with the statistics of all tags.
        vectors: "observation.state" or "action" -> name of a statistic -> its values.
    """

    def __init__(self, path: Path, options: ConvertOptions):
        network = JsonRecord(path / "config.json")
        self.stats = path / Path(str(network.get("norm_stats_filename", STATS_FILE))).name
        tag, notes = chosen(self.stats, options.stats_key)
        self.vectors = {
            STATE: dict(tag.part("state_stats").content),
            ACTION: dict(tag.part("action_stats").content),
        }
        chunk, side = tag["action_horizon"], network.part("vit_config")["image_default_input_size"]
        cameras = list(options.cameras) or tag.get("camera_keys") or []
        if not isinstance(cameras, list) or not cameras or not all(isinstance(key, str) for key in cameras):
            raise ConvertError(
                f"{self.stats}: {tag.name}camera_keys: expected a list of names, got {cameras!r:.80}; pass the cameras"
                " with --cameras NAME,NAME"
            )
        features: dict[str, dict[str, Any]] = {
            f"observation.images.{key.removeprefix('observation.images.')}": {
                "type": "VISUAL",
                "shape": [3, *side],
            }
            for key in cameras
        }
        sizes = {feature: self.width(feature) for feature in self.vectors}
        given = {
            "type": "molmoact2",
            "action_mode": network["action_mode"],
            "chunk_size": chunk,
            "n_action_steps": tag.get("n_action_steps", chunk),
            "setup_type": tag.get("setup_type", ""),
            "control_mode": tag.get("control_mode", ""),
            "num_state_tokens": network.get("num_state_tokens") or 256,
            "add_setup_tokens": network.get("add_setup_tokens", True),
            "add_control_tokens": network.get("add_control_tokens", True),
            "joint_signs": numbers(options, "joint_signs"),
            "joint_offsets": numbers(options, "joint_offsets"),
            "input_features": {**features, STATE: {"type": "STATE", "shape": [sizes[STATE]]}},
            "output_features": {ACTION: {"type": "ACTION", "shape": [sizes[ACTION]]}},
        }
        super().__init__(path, options, SCHEMA, {**SCHEMA.defaults, **given})
        self.notes += notes

    def width(self, feature: str) -> int:
        values = self.vectors[feature].get("q01")
        if not isinstance(values, list) or not values:
            raise ConvertError(
                f"{self.stats}: the statistics of {feature}: q01: expected a list of numbers, got {values!r:.80}"
            )
        return len(values)

    @cached_property
    def statistics(self) -> Statistics:
        """Return the statistics of the tag. Lists of names are omitted."""
        found: Statistics = {}
        for feature, stats in self.vectors.items():
            with ConvertError.at(f"{self.stats}: the statistics of {feature}", ValueError, TypeError):
                found[feature] = {
                    name: np.asarray(values, np.float32) for name, values in stats.items() if name in STATS
                }
            size = self.width(feature)
            if wrong := [n for n in ("q01", "q99", "mask") if len(found[feature].get(n, [0] * size)) != size]:
                raise ConvertError(
                    f"{self.stats}: the statistics of {feature}: {wrong[0]}: expected {size} values, as in q01, got"
                    f" {found[feature][wrong[0]].size}"
                )
        return found

    @cached_property
    def tensors(self) -> dict[str, TensorSource]:
        """Return the weights under the names that LeRobot gives them."""
        return {f"model.{name}": source for name, source in super().tensors.items()}

    def vector(self, group: str, kind: str, key: str) -> VectorSpec:
        spec, names = super().vector(group, kind, key), self.vectors[key].get("names")
        if isinstance(names, list) and len(names) == spec.dim and all(isinstance(n, str) for n in names):
            return VectorSpec(dim=spec.dim, names=tuple(names))
        return spec

    @property
    def files(self) -> list[Path]:
        return [*super().files, self.stats]


def chosen(file: Path, key: str) -> tuple[JsonRecord, list[str]]:
    """Return the entry of the tag ``key`` in a file of statistics, and notes for the user.

    Raises:
        ConvertError: The file has no such tag, or the user must choose one of several tags.
    """
    record = read_json(file)
    tags, mode = record.get("metadata_by_tag"), record.get("norm_mode", "q01_q99")
    if not isinstance(tags, Mapping) or not tags:
        raise ConvertError(f"{file}: metadata_by_tag: expected a table of tags, got {tags!r:.80}")
    if mode != "q01_q99":
        raise ConvertError(f"{file}: norm_mode: expected 'q01_q99', got {mode!r:.80}")
    notes = []
    if not key and len(tags) == 1:
        (key,) = tags
        notes.append(f"statistics of {key}, the only tag of {file.name}")
    if key not in tags:
        got = repr(key) if key else "none"
        raise ConvertError(f"--stats-key: expected one of the tags {', '.join(sorted(tags))}, got {got}")
    return JsonRecord(file, tags, "metadata_by_tag.").part(key), notes


def numbers(options: ConvertOptions, name: str) -> list[float] | None:
    """Return the numbers of a setting; None if the user did not pass the setting.

    Raises:
        ConvertError: An entry is not a number.
    """
    text = str(options.setting(name, ""))
    with ConvertError.at(f"--set {name}: expected numbers, separated by commas", ValueError):
        return [float(part) for part in text.split(",")] if text else None
