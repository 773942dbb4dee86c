"""Read the statistics of a LeRobot checkpoint from the files of its processors, its weights, or a data set."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from sinew_client.untrusted import UntrustedError
from sinew_client.untrusted.texts import read_jsonl

from sinew.bundle.schema import Seen, SeenCamera, SeenState, seen_problems
from sinew.bundle.writer import TensorSource
from sinew.convert.lerobot.steps import POST, PRE, Pipelines
from sinew.convert.read.files import read_json
from sinew.convert.read.safetensors import read_safetensors
from sinew.convert.tensors import read_array
from sinew.core import ConvertError, PolicySpec
from sinew.core.fields import problems

STATE, ACTION, ENVIRONMENT = "observation.state", "action", "observation.environment_state"
LEGACY_BUFFERS = ("normalize_inputs.", "normalize_targets.", "unnormalize_outputs.")
MOST_NAMED = 12  # a message lists at most this many names
MAX_EPISODES = 1 << 20  # a data set may have at most this many episodes
# The names of statistics in LeRobot's compute_stats.py. MolmoAct2 adds "mask", which is 1 for values that are
# normalised, and 0 for the others, such as a gripper.
STATS = (
    "mean",
    "std",
    "min",
    "max",
    "count",
    "q01",
    "q10",
    "q50",
    "q90",
    "q99",
    "mask",
)
# Columns of LeRobot's data sets that no policy reads. Files of statistics contain entries for these columns too.
NOT_OF_POLICIES = (
    "timestamp",
    "frame_index",
    "episode_index",
    "index",
    "task_index",
    "next.reward",
    "next.done",
)
# Name of a feature -> name of a statistic -> its values, a float32 vector.
Statistics = dict[str, dict[str, np.ndarray]]


def step_of(feature: str) -> tuple[str, str]:
    """Return (name of the pipeline, name of its step) of the step that normalises ``feature``."""
    return (POST, "unnormalizer_processor") if feature == ACTION else (PRE, "normalizer_processor")


@dataclass
class Found:
    """The statistics that a checkpoint contains.

    Attributes:
        bare: Feature -> its statistics. These entries of the file do not name a data set.
        sets: Name of a data set -> the statistics of its features.
        unread: Names in the files of entries that do not belong to any feature of the policy.
    """

    bare: Statistics = field(default_factory=dict)
    sets: dict[str, Statistics] = field(default_factory=dict)
    unread: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        """Return True if the checkpoint has any statistic other than the number of frames, because this number alone
        is not enough to normalise values.
        """
        return any(
            stats.keys() - {"count"} for part in (self.bare, *self.sets.values()) for stats in part.values()
        )

    def put(self, feature: str, stat: str, source: TensorSource, features: Sequence[str]) -> None:
        """Add one statistic.

        Args:
            feature: The feature's name in the file.
            stat: Name of the statistic, such as "mean".
            source: The values.
            features: The features of the configuration. An entry of any other feature goes to ``unread``.
        """
        owner, joint, owned_feature = "", "", feature if feature in features else ""
        # Some checkpoints, such as lerobot/smolvla_base, have names of the form DATASET.buffer.FEATURE.
        if not owned_feature:
            ends = (f".buffer.{each}" for each in features)
            joint = next((end for end in ends if feature.endswith(end)), "")
            owner, owned_feature = feature.removesuffix(joint), joint.removeprefix(".buffer.")
        if stat not in STATS or not (owned_feature or feature in NOT_OF_POLICIES):
            if (name := f"{feature}.{stat}") not in self.unread:
                self.unread.append(name)
        elif owned_feature:
            table = self.sets.setdefault(owner, {}) if joint else self.bare
            table.setdefault(owned_feature, {})[stat] = read_array(source)


def unknown_statistics(names: Iterable[str], features: Sequence[str]) -> list[str]:
    """Return the names of entries that belong to a feature which the policy does not have, or to a statistic which
    LeRobot does not have."""
    parts = ((name, *name.rpartition(".")[::2]) for name in names)
    features_and_columns = {*features, *NOT_OF_POLICIES}
    return [name for name, feature, stat in parts if feature not in features_and_columns or stat not in STATS]


def unread_statistics(names: Sequence[str]) -> str:
    """Return a note for the user: the statistics of some features were not read, because the policy does not have
    these features."""
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return f"ignored statistics of features that this policy lacks: {', '.join(names[:MOST_NAMED])}{more}"


def processor_statistics(path: Path, pipelines: Pipelines, features: Sequence[str]) -> Found:
    """Return the statistics in the files of the normalising steps. The step after the model has the statistics of the
    action. The step before the model has the statistics of all other features.

    Args:
        path: The checkpoint's folder.
        pipelines: The checkpoint's pipelines.
        features: The features of the configuration.

    Raises:
        ConvertError: A file that a step names is missing or damaged.
    """
    statistics = Found()
    for step in (step_of(STATE), step_of(ACTION)):
        file = (pipelines.step(*step) or {}).get("state_file")
        if not file:
            continue
        stored = path / Path(str(file)).name
        if not stored.exists():
            raise ConvertError(
                f"{path / step[0]}.json: names {stored.name}, which the folder lacks; copy that file into {path}"
            )
        for name, source in read_safetensors(stored).items():
            feature, _, stat = name.rpartition(".")
            if feature not in features or step_of(feature) == step:
                statistics.put(feature, stat, source, [each for each in features if step_of(each) == step])
    return statistics


def legacy_statistics(weights: Mapping[str, TensorSource], features: Sequence[str]) -> Found:
    """Return the statistics that LeRobot before 0.4 stored as buffers among the weights. Statistics with infinite
    values are omitted: LeRobot initialises the buffers with infinity, and the training did not set them.

    Args:
        weights: Name -> tensor of the checkpoint. A buffer's name has underscores in place of the feature's dots.
        features: The features of the configuration.
    """
    statistics = Found()
    for feature in features:
        prefixes = LEGACY_BUFFERS[2:0:-1] if feature == ACTION else LEGACY_BUFFERS[:1]
        for prefix in prefixes:
            end = f"buffer_{feature.replace('.', '_')}"
            for name, source in weights.items():
                buffer, _, stat = name.removeprefix(prefix).rpartition(".")
                if not name.startswith(prefix) or not (buffer == end or buffer.endswith(f"_{end}")):
                    continue
                owner = buffer.removesuffix(end).rstrip("_")
                table = statistics.sets.setdefault(owner, {}) if owner else statistics.bare
                table.setdefault(feature, {}).setdefault(stat, read_array(source))
    for table in (statistics.bare, *statistics.sets.values()):
        for feature in [f for f, s in table.items() if not all(np.isfinite(v).all() for v in s.values())]:
            del table[feature]
    return statistics


def stats_record(file: Path) -> dict[str, Any]:
    """Return the statistics in a data set's ``meta/stats.json``, feature -> statistic -> numbers.

    Statistics of episodes (``meta/episodes_stats.jsonl`` of version 2.1) are pooled as LeRobot's ``aggregate_stats``
    does: the extremes of all episodes, the mean weighted by the episodes' frames, and the deviation about that mean.

    Raises:
        ConvertError: The file does not contain valid statistics.
    """
    if file.suffix != ".jsonl":
        return read_json(file)
    episodes = []
    with ConvertError.at(file, OSError, UntrustedError):
        for number, record in read_jsonl(file, max_lines=MAX_EPISODES):
            stats = record.get("stats") if isinstance(record, dict) else None
            if not isinstance(stats, dict) or not all(isinstance(each, dict) for each in stats.values()):
                raise ConvertError(
                    f'{file}: line {number}: not the statistics of an episode; expected an object with the key "stats"'
                )
            episodes.append(stats)
    if not episodes:
        raise ConvertError(f"{file}: expected the statistics of episodes, got none")
    with ConvertError.at(
        f"{file}: not a table of statistics", ValueError, TypeError, KeyError, AttributeError
    ):
        return {
            feature: _pooled([each[feature] for each in episodes if feature in each])
            for feature in episodes[0]
        }


def _pooled(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Combine the statistics of several episodes to statistics of all frames."""

    def rows(name: str) -> np.ndarray:
        return np.stack([np.asarray(part[name], np.float64) for part in parts])

    counts = np.asarray([float(np.ravel(part["count"])[0]) for part in parts])
    if not (counts > 0).all():
        raise ValueError("count: expected a number of frames above 0")
    means, stds = rows("mean"), rows("std")
    weights = (counts / counts.sum()).reshape(-1, *[1] * (means.ndim - 1))
    mean = (weights * means).sum(axis=0)
    variance = (weights * (stds**2 + (means - mean) ** 2)).sum(axis=0)
    return {
        "min": rows("min").min(axis=0).tolist(),
        "max": rows("max").max(axis=0).tolist(),
        "mean": mean.tolist(),
        "std": np.sqrt(variance).tolist(),
        "count": [int(counts.sum())],
    }


def read_stats_file(file: Path, features: Collection[str] = (STATE, ACTION)) -> Statistics:
    """Return the statistics of ``features`` in a data set's file (:func:`stats_record`).

    Raises:
        ConvertError: The file does not contain valid statistics of these features.
    """
    record = stats_record(file)
    try:
        # A number too large for float32 becomes infinite here. A later check rejects all infinite statistics.
        with np.errstate(over="ignore"):
            return {
                feature: {stat: np.asarray(values, np.float32) for stat, values in stats.items()}
                for feature, stats in record.items()
                if feature in features
            }
    except (AttributeError, ValueError, TypeError) as error:
        raise ConvertError(
            f"{file}: not a table of statistics ({error}); pass a data set's meta/stats.json"
        ) from None


def seen_in(file: Path, spec: PolicySpec) -> Seen | None:
    """Return a record of a policy's cameras and state from a data set's statistics. A camera's record has the mean and
    the spread of its pixels, and no thumbnail.

    A checkpoint's own statistics of frames are not used, because LeRobot's trainer replaces them with ImageNet's.

    Args:
        file: The data set's file of statistics.
        spec: The policy's cameras and state.

    Raises:
        ConvertError: The file does not contain valid statistics.
    """
    record = stats_record(file)
    try:
        cameras = {
            camera.name: _pixels(record[f"observation.images.{camera.name}"])
            for camera in spec.cameras
            if f"observation.images.{camera.name}" in record
        }
        rows = record.get(STATE, {})
        complete = {"mean", "std", "min", "max"} <= rows.keys() and spec.state.dim > 0
        numbers = (
            [tuple(map(float, np.ravel(rows[name]))) for name in ("mean", "std", "min", "max")]
            if complete
            else []
        )
        frames = int(np.ravel(rows.get("count", 1))[0])
        seen = Seen(
            f"the data set's meta/{file.name}", frames, cameras, SeenState(*numbers) if complete else None
        )
    except (AttributeError, KeyError, ValueError, TypeError, IndexError, OverflowError) as error:
        raise ConvertError(
            f"{file}: not a table of statistics ({error}); expected a data set's meta/stats.json"
        ) from None
    for problem in (*problems(seen, "seen"), *seen_problems(seen, spec)):
        raise ConvertError(f"{file}: {problem.removeprefix('seen.')}")
    return seen if cameras or complete else None


def _pixels(stats: Mapping[str, Any]) -> SeenCamera:
    """Return a camera's record from LeRobot's statistics, which are [3, 1, 1] for pixels in [0, 1]."""
    mean, std = (tuple(255 * float(x) for x in np.ravel(stats[name])) for name in ("mean", "std"))
    if len(mean) != 3 or len(std) != 3:
        raise ValueError(f"expected three channels, got {len(mean)} and {len(std)}")
    return SeenCamera((mean[0], mean[1], mean[2]), (std[0], std[1], std[2]))
