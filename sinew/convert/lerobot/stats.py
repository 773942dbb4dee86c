"""Statistics of a LeRobot checkpoint: beside its processors, among its weights, or those of a data set."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

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
Statistics = dict[str, dict[str, np.ndarray]]  # feature -> statistic -> float32 vector


def step_of(feature: str) -> tuple[str, str]:
    """Return the pipeline and the step that normalise ``feature``."""
    return (POST, "unnormalizer_processor") if feature == ACTION else (PRE, "normalizer_processor")


def processor_statistics(path: Path, pipelines: Pipelines) -> Statistics:
    """Return the statistics in the files of the normalising steps: of the action after the model, of all others before
    it."""
    found: Statistics = {}
    for step in (step_of(STATE), step_of(ACTION)):
        file = (pipelines.step(*step) or {}).get("state_file")
        if not file:
            continue
        stored = path / Path(str(file)).name
        if not stored.exists():
            raise ConvertError(
                f"{path / step[0]}.json: names {stored.name}, which is not beside it: copy it, too"
            )
        for name, source in read_safetensors(stored).items():
            feature, _, stat = name.rpartition(".")
            if step_of(feature) == step:
                found.setdefault(feature, {})[stat] = read_array(source)
    return found


def legacy_statistics(weights: Mapping[str, TensorSource], features: Sequence[str]) -> Statistics:
    """Return the statistics that LeRobot before 0.4 kept as buffers; those that were never filled are left out.

    features: those of the configuration, whose names the buffers have without their dots.
    """
    found: Statistics = {}
    for feature in features:
        prefixes = LEGACY_BUFFERS[2:0:-1] if feature == ACTION else LEGACY_BUFFERS[:1]
        for prefix in prefixes:
            start = f"{prefix}buffer_{feature.replace('.', '_')}."
            for name, source in weights.items():
                if name.startswith(start):
                    found.setdefault(feature, {}).setdefault(name[len(start) :], read_array(source))
    return {f: s for f, s in found.items() if all(np.isfinite(v).all() for v in s.values())}


def read_stats_file(file: Path, features: Collection[str] = (STATE, ACTION)) -> Statistics:
    """Return the statistics of ``features`` in a data set's ``meta/stats.json``. Raises :class:`ConvertError`."""
    record = read_json(file)
    try:
        with np.errstate(over="ignore"):  # what becomes infinite is refused with the others that are
            return {
                feature: {stat: np.asarray(values, np.float32) for stat, values in stats.items()}
                for feature, stats in record.items()
                if feature in features
            }
    except (AttributeError, ValueError, TypeError) as error:
        raise ConvertError(f"{file}: not a table of statistics ({error})") from None


def seen_in(file: Path, spec: PolicySpec) -> Seen | None:
    """Return what a data set's ``meta/stats.json`` says of a policy's cameras (the mean and spread of their pixels,
    without a thumbnail) and of its state. Raises :class:`ConvertError`.

    A checkpoint's own statistics of frames are not asked: LeRobot's trainer writes those of ImageNet in their place.
    """
    record = read_json(file)
    try:
        cameras = {
            camera.name: _pixels(record[f"observation.images.{camera.name}"])
            for camera in spec.cameras
            if f"observation.images.{camera.name}" in record
        }
        rows = record.get(STATE, {})
        whole = {"mean", "std", "min", "max"} <= rows.keys() and spec.state.dim > 0
        numbers = (
            [tuple(map(float, np.ravel(rows[name]))) for name in ("mean", "std", "min", "max")]
            if whole
            else []
        )
        frames = int(np.ravel(rows.get("count", 1))[0])
        found = Seen(
            "the data set's meta/stats.json", frames, cameras, SeenState(*numbers) if whole else None
        )
    except (AttributeError, KeyError, ValueError, TypeError, IndexError, OverflowError) as error:
        raise ConvertError(f"{file}: not a table of statistics ({error})") from None
    for problem in (*problems(found, "seen"), *seen_problems(found, spec)):
        raise ConvertError(f"{file}: {problem.removeprefix('seen.')}")
    return found if cameras or whole else None


def _pixels(stats: Mapping[str, Any]) -> SeenCamera:
    """Return a camera's record; LeRobot keeps [3, 1, 1] in [0, 1]."""
    mean, std = (tuple(255 * float(x) for x in np.ravel(stats[name])) for name in ("mean", "std"))
    if len(mean) != 3 or len(std) != 3:
        raise ValueError(f"expected three channels, got {len(mean)} and {len(std)}")
    return SeenCamera((mean[0], mean[1], mean[2]), (std[0], std[1], std[2]))
