"""Prepare a new chunk that continues the chunk that the robot is executing (the running chunk).

The functions convert the running chunk's actions to model units, and compute how strongly each action
constrains the new chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sinew.core import CONTINUATION, RTC, SCHEDULES, ContinuationRequest, ObservationError, PolicySpec
from sinew.processing.arrays import numbers
from sinew.steps.vector.base import VectorStep, turn_back

BETA = 5.0  # default guidance weight, from Black et al. 2025 (with five solver steps)
MAX_BETA = 1000.0


@dataclass(frozen=True, slots=True)
class Continuation:
    """The running chunk that a new chunk continues, in model units.

    Attributes:
        kind: "guided", "no-jacobian", "ramp" or "trained".
        target: Actions of the running chunk, float32 [rows, A].
        weights: float32 [rows, A]. For "guided" and "no-jacobian": how strongly each number is pulled to the target.
            For "ramp" and "trained": the factor by which the velocity that the model computes for each number is
            multiplied.
        overlap: Number of rows that "ramp" and "trained" start from the target.
        beta: Largest value of the guidance weight.
    """

    kind: str
    target: np.ndarray
    weights: np.ndarray
    overlap: int
    beta: float


def check_continuation(request: ContinuationRequest, spec: PolicySpec) -> None:
    """Raise :class:`ObservationError` if a field of real-time chunking in the request does not fit the policy."""
    fields = {name: getattr(request, name) for name in CONTINUATION if name != "previous"}
    if request.previous is None:
        for name, value in fields.items():
            if value is not None:
                raise ObservationError(name, "`previous` with it, the actions to continue", "none")
        return
    rows = numbers("previous", request.previous)
    if rows.ndim != 2 or rows.shape[1] != spec.action.dim:
        raise ObservationError(
            "previous",
            f"numbers of shape [R, {spec.action.dim}]",
            f"{rows.dtype} of shape {list(rows.shape)}",
        )
    if not 1 <= len(rows) <= 4 * spec.chunk_size:
        raise ObservationError("previous", f"1 to {4 * spec.chunk_size} actions", str(len(rows)))
    if not np.isfinite(rows).all():
        raise ObservationError("previous", "finite numbers", "NaN or infinity")
    for name in ("delay", "horizon"):
        value = fields[name]
        if value is not None and (
            isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 0
        ):
            raise ObservationError(name, "a whole number of actions, 0 or more", repr(value))
    for name, allowed in (("rtc", RTC), ("schedule", SCHEDULES)):
        if fields[name] is not None and not (isinstance(fields[name], str) and fields[name] in allowed):
            raise ObservationError(name, f"one of {', '.join(allowed)}", repr(fields[name]))
    beta = fields["beta"]
    if beta is not None and (
        not isinstance(beta, (int, float, np.integer, np.floating)) or not 0 <= beta <= MAX_BETA
    ):
        raise ObservationError("beta", f"a number from 0 to {MAX_BETA:g}", repr(beta))
    if kind_of(request, spec) == "trained":
        _check_trained(request, spec)


def kind_of(request: ContinuationRequest, spec: PolicySpec) -> str:
    """Return the method by which the new chunk continues the actions in ``previous``.

    The request may state the method. Otherwise it is the method that the policy was trained for, or "guided"
    if the policy was trained for none.
    """
    return request.rtc or ("trained" if spec.committed_rows else "guided")


def _check_trained(request: ContinuationRequest, spec: PolicySpec) -> None:
    if not spec.committed_rows:
        raise ObservationError(
            "rtc",
            "guided, no-jacobian or ramp; this checkpoint was not trained with an action prefix",
            "trained",
        )
    for name in ("schedule", "beta"):
        if (value := getattr(request, name)) is not None:
            raise ObservationError(name, "no value with rtc trained, which uses no weights", repr(value))
    if (delay := int(request.delay or 0)) > spec.committed_rows:
        expected = f"at most the {spec.committed_rows} actions that this checkpoint was trained to continue"
        raise ObservationError("delay", expected, str(delay))


def continuation(
    request: ContinuationRequest,
    spec: PolicySpec,
    normalizer: Any,
    steps: Sequence[VectorStep],
    state: np.ndarray,
    width: int,
    first_row: int = 0,
) -> Continuation | None:
    """Return the continuation that a checked request describes; None if the new chunk need not continue any actions.

    Args:
        request: The actions to continue.
        spec: The policy's specification.
        normalizer: Normaliser of the actions.
        steps: Steps that convert actions after the normaliser. This function applies their inverse.
        state: The robot's state, after the steps that convert it.
        width: Width of the model's action rows.
        first_row: Row of the solution where its chunk begins. Rows before it are not continued.
    """
    kind = kind_of(request, spec)
    beta = BETA if request.beta is None else float(request.beta)
    if request.previous is None or (beta == 0.0 and kind != "ramp"):
        return None
    previous = np.asarray(request.previous, np.float64)[: spec.chunk_size]
    rows, delay = spec.noise_shape[0] - first_row, int(request.delay or 0)
    end = min(spec.chunk_size - int(request.horizon or 0), len(previous))
    # Import this only here. The robot's controller needs protobuf, which may not be installed on a machine that only
    # runs benchmarks.
    from sinew_client.control.blend import guidance_weights, ramp_strength

    if kind == "ramp":
        per_row, free = ramp_strength(rows, delay, end), 1.0
    elif kind == "trained":
        end = min(delay, len(previous))
        if end == 0:
            return None
        per_row, free = (np.arange(rows) >= end).astype(np.float32), 1.0
    else:
        per_row, free = guidance_weights(rows, delay, end, request.schedule or "exp"), 0.0
        if not per_row.any():
            return None
    # Statistics may be per row, so fill up the missing rows. The filled rows have no effect.
    full = np.concatenate([previous, np.repeat(previous[-1:], spec.chunk_size - len(previous), axis=0)])
    normalized = normalizer.normalize(_turned_back(full, steps, state))
    target = np.zeros((first_row + rows, width), np.float32)
    target[first_row : first_row + len(normalized), : normalizer.width] = normalized
    weights = np.full((first_row + rows, width), free, np.float32)
    weights[first_row:, : normalizer.width] = per_row[:, None]
    if kind == "trained":
        # The head was trained to continue whole rows, so the padding columns are fixed too.
        weights[first_row : first_row + end] = 0.0
    return Continuation(kind, target, weights, first_row + max(0, end), beta)


def _turned_back(actions: np.ndarray, steps: Sequence[VectorStep], state: np.ndarray) -> np.ndarray:
    """Convert actions from robot units back to the statistics' units.

    Raises:
        ObservationError: A step has no inverse.
    """
    for step in reversed(steps):
        if why := step.no_inverse:
            raise ObservationError(
                "previous", "actions that Sinew can convert back to model units", f"a step {step.kind}: {why}"
            )
    # Actions that are relative to a state become relative to the state of the new observation.
    return turn_back(actions, steps, state)
