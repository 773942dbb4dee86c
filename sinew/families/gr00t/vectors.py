"""Convert the state and action entries of a GR00T checkpoint, and their statistics, to Sinew's normalisation.

Source: Isaac-GR00T ``gr00t/data/state_action/state_action_processor.py`` and ``gr00t/data/utils.py`` (N1.6, N1.7).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from sinew_client.types import MAX_HISTORY, MAX_HISTORY_STEPS, history_problem

from sinew.bundle.schema import Normalization, VectorPart
from sinew.core import ConvertError, VectorSpec
from sinew.steps.vector.add_state import AddState
from sinew.steps.vector.base import VectorStep
from sinew.steps.vector.compose_pose import ComposePose

POSES = {"XYZ_ROT6D": 9, "XYZ_ROTVEC": 6}


@dataclass(frozen=True)
class Vectors:
    """The state and the actions of a policy.

    Attributes:
        state: Size and names of the state's values.
        action: Size and names of an action's values.
        state_parts: Parts of the state with their normalisation.
        action_parts: Parts of an action with their normalisation.
        action_steps: Conversions of the actions after the normalisation.
        horizon: Number of valid actions in a chunk.
    """

    state: VectorSpec
    action: VectorSpec
    state_parts: tuple[VectorPart, ...]
    action_parts: tuple[VectorPart, ...]
    action_steps: tuple[VectorStep, ...]
    horizon: int


class Modalities:
    """The configuration of one robot's inputs and outputs ("modalities"), and their statistics.

    Error messages name the file and the field.
    """

    def __init__(self, record: Mapping[str, Any], statistics: Mapping[str, Any], tag: str, where: Path):
        self.record, self.statistics, self.tag, self.where = record, statistics, tag, where

    def keys(self, modality: str) -> tuple[str, ...]:
        """Return the names of the parts of a modality ("video", "state", "action", "language"), in the order in
        which the model reads them."""
        keys = self._modality(modality).get("modality_keys")
        if not isinstance(keys, list) or not keys or not all(isinstance(key, str) for key in keys):
            raise ConvertError(f"{self.where}: {self.tag}.{modality}.modality_keys: expected a list of names")
        return tuple(keys)

    def moments(self, modality: str) -> list[int]:
        """Return the time steps that the model reads, relative to the current step, which is 0."""
        indices = self._modality(modality).get("delta_indices")
        if not isinstance(indices, list) or not indices or not all(isinstance(i, int) for i in indices):
            raise ConvertError(
                f"{self.where}: {self.tag}.{modality}.delta_indices: expected a list of whole numbers"
            )
        return indices

    def only_now(self, modality: str) -> None:
        """Raise ConvertError unless the policy reads only the current step of ``modality``."""
        if self.moments(modality) != [0]:
            raise ConvertError(
                f"{self.where}: {self.tag}.{modality}.delta_indices: expected [0], got {self.moments(modality)}"
                f"; Sinew does not support a history of the {modality} for this version of GR00T"
            )

    def history(self, modality: str) -> tuple[int, int]:
        """Return the number of observation steps of ``modality``, and the number of control steps between two of them.

        Raises:
            ConvertError: The last step is not the current step, the distances differ, or there are too many steps.
        """
        offsets = self.moments(modality)
        strides = {later - earlier for earlier, later in pairwise(offsets)} or {1}
        stride = min(strides)
        if offsets[-1] != 0 or len(strides) > 1 or history_problem(len(offsets), stride):
            raise ConvertError(
                f"{self.where}: {self.tag}.{modality}.delta_indices: expected at most {MAX_HISTORY} steps at equal"
                f" distances, of which the last is 0 and the first at least -{MAX_HISTORY_STEPS}, for example [-20, 0],"
                f" got {offsets}"
            )
        return len(offsets), stride

    def listed(self, modality: str, name: str) -> tuple[str, ...]:
        """Return a list of part names that a modality's configuration may contain, for example
        ``sin_cos_embedding_keys``; () if it is absent."""
        return tuple(self._modality(modality).get(name) or ())

    def flag(self, modality: str, name: str) -> bool:
        """Return the value of a true-or-false field of a modality's configuration; False if it is absent."""
        return bool(self._modality(modality).get(name))

    def actions(self) -> list[dict[str, Any]]:
        """Return the configuration of each part of an action (absolute or relative, type and format), in order.

        The default is absolute actions.
        """
        count = len(self.keys("action"))
        configs = self._modality("action").get("action_configs") or [{}] * count
        if len(configs) != count:
            raise ConvertError(
                f"{self.where}: {self.tag}.action.action_configs: expected {count} entries, one per key, got"
                f" {len(configs)}"
            )
        return configs

    def stats(self, kind: str, key: str, names: tuple[str, str]) -> tuple[np.ndarray, np.ndarray]:
        """Return the two statistics ``names`` of one part of a vector, float64 [D] or [T, D] each."""
        arrays = []
        for name in names:
            try:
                values = np.asarray(self.statistics[kind][key][name], np.float64)
            except (KeyError, TypeError, ValueError):
                raise ConvertError(
                    f"{self.where.parent}: the statistics {kind}.{key}.{name} of {self.tag!r} are missing. Use the"
                    " statistics.json of the robot that the policy was trained on"
                ) from None
            if values.ndim not in (1, 2) or not values.size or not np.isfinite(values).all():
                raise ConvertError(
                    f"statistics {kind}.{key}.{name} of {self.tag!r}: expected finite vectors. Compute the statistics"
                    " again"
                )
            arrays.append(values)
        first, second = arrays
        if first.shape != second.shape:
            raise ConvertError(
                f"statistics {kind}.{key} of {self.tag!r}: expected equal shapes, got {first.shape} and {second.shape}"
            )
        return first, second

    def _modality(self, name: str) -> Mapping[str, Any]:
        modality = self.record.get(name)
        if not isinstance(modality, dict):
            raise ConvertError(
                f"{self.where}: {self.tag}: the modality {name!r} is missing. Use the complete files of the training"
                " run"
            )
        return modality


def read_vectors(
    modalities: Modalities, settings: Mapping[str, Any], same: Callable[..., Any] = np.isclose
) -> Vectors:
    """Build the state and action vectors of an embodiment.

    Args:
        modalities: The embodiment's modality configuration.
        settings: The processor's own settings (``processor_kwargs``).
        same: Function that tests whether the lower and the upper bound of a state value are equal. The value is then
            constant. NVIDIA's code uses ``np.isclose``, LeRobot uses ``np.equal``.
    """
    bounds = ("q01", "q99") if settings.get("use_percentiles") else ("min", "max")
    sin_cos = modalities.listed("state", "sin_cos_embedding_keys")
    if not settings.get("apply_sincos_state_encoding"):
        sin_cos = ()
    mean_std = modalities.listed("state", "mean_std_embedding_keys")
    blank = bool(settings.get("exclude_state")) or modalities.flag("state", "exclude_state")
    clip = bool(settings.get("clip_outliers", True))
    state_parts = []
    for key in modalities.keys("state"):
        (low, high) = modalities.stats("state", key, bounds)
        dim = low.shape[-1]
        if blank:  # The model was trained with a state of zeros.
            part = VectorPart(key, dim, min_max(np.zeros(dim), np.zeros(dim), clip))
        elif key in sin_cos:
            part = VectorPart(key, dim, Normalization("identity"), sin_cos=True)
        elif key in mean_std:
            part = VectorPart(key, dim, standard(*modalities.stats("state", key, ("mean", "std"))))
        else:
            equal = same(high, low)
            part = VectorPart(key, dim, min_max(low, np.where(equal, low, high), clip))
        state_parts.append(part)

    ends = np.cumsum([part.dim for part in state_parts]).tolist()
    offsets = {part.name: slice(end - part.dim, end) for end, part in zip(ends, state_parts, strict=True)}
    horizon = len(modalities.moments("action"))
    action_parts: list[VectorPart] = []
    steps: list[VectorStep] = []
    for key, config in zip(modalities.keys("action"), modalities.actions(), strict=True):
        relative = config.get("rep") == "RELATIVE" and bool(settings.get("use_relative_action"))
        # NVIDIA's code always uses the minimum and maximum of relative actions, even with use_percentiles.
        kind, names = ("relative_action", ("min", "max")) if relative else ("action", bounds)
        if key in modalities.listed("action", "mean_std_embedding_keys"):
            normalization = standard(*modalities.stats(kind, key, ("mean", "std")), horizon=horizon)
        else:
            normalization = min_max(*modalities.stats(kind, key, names), clip=True, horizon=horizon)
        dim = modalities.stats(kind, key, names)[0].shape[-1]
        start = sum(part.dim for part in action_parts)
        action_parts.append(VectorPart(key, dim, normalization))
        if relative:
            steps.append(_relative(config, key, dim, start, offsets, modalities))
    return Vectors(
        state=named(state_parts),
        action=named(action_parts),
        state_parts=tuple(state_parts),
        action_parts=tuple(action_parts),
        action_steps=tuple(steps),
        horizon=horizon,
    )


def _relative(
    config: Mapping[str, Any],
    key: str,
    dim: int,
    start: int,
    offsets: Mapping[str, slice],
    modalities: Modalities,
) -> VectorStep:
    reference = config.get("state_key") or key
    if reference not in offsets:
        raise ConvertError(
            f"{modalities.where}: action {key!r} is relative to the unknown state {reference!r}. Use one of:"
            f" {', '.join(offsets)}"
        )
    part = offsets[reference]
    if part.stop - part.start != dim:
        raise ConvertError(
            f"{modalities.where}: action {key!r}: expected as many values as the state {reference!r}, which has"
            f" {part.stop - part.start}, got {dim}"
        )
    dims, state_dims = tuple(range(start, start + dim)), tuple(range(part.start, part.stop))
    if config.get("type") == "NON_EEF":
        return AddState(dims, state_dims=state_dims)
    form = str(config.get("format"))
    if config.get("type") != "EEF" or POSES.get(form) != dim:
        raise ConvertError(
            f"{modalities.where}: relative action {key!r} of {dim} values: expected type NON_EEF, or type EEF with"
            f" format {' or '.join(POSES)}, got type {config.get('type')} with format {form}"
        )
    return ComposePose(dims, state_dims=state_dims)


def named(parts: Sequence[VectorPart]) -> VectorSpec:
    """Return a vector whose dimensions are named after their parts, as the GR00T protocol groups them."""
    names = tuple(f"{part.name}.{i}" for part in parts for i in range(part.dim))
    return VectorSpec(len(names), names)


def min_max(low: np.ndarray, high: np.ndarray, clip: bool, horizon: int = 0) -> Normalization:
    """Return a normalisation to [-1, 1].

    Args:
        low: Minimum, [D], or [T, D] for statistics of each time step.
        high: Maximum, like ``low``.
        clip: True clips the result to [-1, 1].
        horizon: Number of actions of a chunk, for statistics [T, D].
    """
    return _per_step("min_max", {"min": low, "max": high}, clip, horizon)


def standard(mean: np.ndarray, std: np.ndarray, horizon: int = 0) -> Normalization:
    """Return the normalisation (x - mean) / std. A value whose std is zero is unchanged, as in NVIDIA's code."""
    still = std == 0
    return _per_step(
        "mean_std", {"mean": np.where(still, 0, mean), "std": np.where(still, 1, std)}, False, horizon
    )


def _per_step(mode: Any, stats: Mapping[str, np.ndarray], clip: bool, horizon: int) -> Normalization:
    first = next(iter(stats.values()))
    rows = 0
    if first.ndim == 2:
        rows = horizon
        if len(first) < horizon:
            raise ConvertError(
                f"statistics: expected at least {horizon} time steps, the length of a chunk, got {len(first)}"
            )
        stats = {name: values[:horizon] for name, values in stats.items()}
    statistics = {name: tuple(float(v) for v in values.reshape(-1)) for name, values in stats.items()}
    return Normalization(mode, statistics, eps=0.0, convention="gr00t", clip=clip, rows=rows)
