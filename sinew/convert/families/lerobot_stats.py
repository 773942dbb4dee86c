"""Statistics of a LeRobot checkpoint: beside its processors, among its weights, or those of a data set."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from sinew.bundle.writer import TensorSource
from sinew.convert.families.lerobot_steps import POST, PRE, Pipelines
from sinew.convert.read.files import read_json
from sinew.convert.read.safetensors import read_safetensors
from sinew.convert.tensors import read_array
from sinew.core import ConvertError

STATE, ACTION = "observation.state", "action"
LEGACY_BUFFERS = ("normalize_inputs.", "normalize_targets.", "unnormalize_outputs.")
Statistics = dict[str, dict[str, np.ndarray]]  # feature -> statistic -> float32 vector


def step_of(feature: str) -> tuple[str, str]:
    """Return the pipeline and the step that normalise ``feature``."""
    return (POST, "unnormalizer_processor") if feature == ACTION else (PRE, "normalizer_processor")


def processor_statistics(path: Path, pipelines: Pipelines) -> Statistics:
    """Return the statistics in the files of the normalising steps."""
    found: Statistics = {}
    for feature in (STATE, ACTION):
        file = (pipelines.step(*step_of(feature)) or {}).get("state_file")
        if not file:
            continue
        for name, source in read_safetensors(path / Path(str(file)).name).items():
            key, _, stat = name.rpartition(".")
            if key == feature:
                found.setdefault(feature, {})[stat] = read_array(source)
    return found


def legacy_statistics(weights: Mapping[str, TensorSource]) -> Statistics:
    """Return the statistics that LeRobot before 0.4 kept as buffers; those that were never filled are left out."""
    found: Statistics = {}
    for feature, prefixes in ((STATE, LEGACY_BUFFERS[:1]), (ACTION, LEGACY_BUFFERS[2:0:-1])):
        for prefix in prefixes:
            start = f"{prefix}buffer_{feature.replace('.', '_')}."
            for name, source in weights.items():
                if name.startswith(start):
                    found.setdefault(feature, {}).setdefault(name[len(start) :], read_array(source))
    return {f: s for f, s in found.items() if all(np.isfinite(v).all() for v in s.values())}


def read_stats_file(file: Path) -> Statistics:
    """Return the statistics of a data set's ``meta/stats.json``. Raises :class:`ConvertError`."""
    record = read_json(file)
    try:
        with np.errstate(over="ignore"):  # what becomes infinite is refused with the others that are
            return {
                feature: {stat: np.asarray(values, np.float32) for stat, values in stats.items()}
                for feature, stats in record.items()
                if feature in (STATE, ACTION)
            }
    except (AttributeError, ValueError, TypeError) as error:
        raise ConvertError(f"{file}: not a table of statistics ({error})") from None
