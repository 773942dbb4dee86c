"""What a new chunk should continue: the rows of the running one in model units, and how much each of them counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sinew.core import CONTINUATION, RTC, SCHEDULES, ContinuationRequest, ObservationError, PolicySpec
from sinew.processing.arrays import numbers
from sinew.steps.vector.base import VectorStep, turn_back

BETA = 5.0  # Black et al. 2025: with five steps
MAX_BETA = 1000.0


@dataclass(frozen=True, slots=True)
class Continuation:
    """kind: "guided", "no-jacobian", "ramp" or "trained". target: float32 [rows, A] in model units.

    weights: float32 [rows, A]; how strongly each number is pulled to the target, or for "ramp" and "trained" how much
    of its velocity it gets. overlap: rows that these two start from the target.
    """

    kind: str
    target: np.ndarray
    weights: np.ndarray
    overlap: int
    beta: float


def check_continuation(request: ContinuationRequest, spec: PolicySpec) -> None:
    """Raise :class:`ObservationError` for fields of real-time chunking that do not fit the policy."""
    given = {name: getattr(request, name) for name in CONTINUATION if name != "previous"}
    if request.previous is None:
        for name, value in given.items():
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
        raise ObservationError("previous", f"1 to {4 * spec.chunk_size} rows", str(len(rows)))
    if not np.isfinite(rows).all():
        raise ObservationError("previous", "finite numbers", "NaN or infinity")
    for name in ("delay", "horizon"):
        value = given[name]
        if value is not None and (
            isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 0
        ):
            raise ObservationError(name, "a whole number of rows from 0", repr(value))
    for name, known in (("rtc", RTC), ("schedule", SCHEDULES)):
        if given[name] is not None and not (isinstance(given[name], str) and given[name] in known):
            raise ObservationError(name, f"one of {', '.join(known)}", repr(given[name]))
    beta = given["beta"]
    if beta is not None and (
        not isinstance(beta, (int, float, np.integer, np.floating)) or not 0 <= beta <= MAX_BETA
    ):
        raise ObservationError("beta", f"a number from 0 to {MAX_BETA:g}", repr(beta))
    if kind_of(request, spec) == "trained":
        _check_trained(request, spec)


def kind_of(request: ContinuationRequest, spec: PolicySpec) -> str:
    """Return how ``previous`` is continued: as the request states, else as the policy was trained."""
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
            raise ObservationError(name, "no value with rtc trained, which has no weights", repr(value))
    if (delay := int(request.delay or 0)) > spec.committed_rows:
        expected = f"at most the {spec.committed_rows} rows that this checkpoint was trained to continue"
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
    """Return the continuation that a checked request describes; None without guidance.

    Args:
        request: The actions to continue.
        spec: The policy's specification.
        normalizer: Normaliser of the actions.
        steps: Changes of units after the normaliser. They are inverted here.
        state: The state after its steps.
        width: Width of the model's action rows.
        first_row: Row of the solution where its chunk begins. Nothing is continued before it.
    """
    kind = kind_of(request, spec)
    beta = BETA if request.beta is None else float(request.beta)
    if request.previous is None or (beta == 0.0 and kind != "ramp"):
        return None
    given = np.asarray(request.previous, np.float64)[: spec.chunk_size]
    rows, delay = spec.noise_shape[0] - first_row, int(request.delay or 0)
    end = min(spec.chunk_size - int(request.horizon or 0), len(given))
    # Imported here, because the robot's controller needs protobuf, which a machine that only measures may lack.
    from sinew_client.control.blend import guidance_weights, ramp_strength

    if kind == "ramp":
        per_row, free = ramp_strength(rows, delay, end), 1.0
    elif kind == "trained":
        end = min(delay, len(given))
        if end == 0:
            return None
        per_row, free = (np.arange(rows) >= end).astype(np.float32), 1.0
    else:
        per_row, free = guidance_weights(rows, delay, end, request.schedule or "exp"), 0.0
        if not per_row.any():
            return None
    # Statistics may be per row, so the rows that are missing are filled in; nothing reads them.
    full = np.concatenate([given, np.repeat(given[-1:], spec.chunk_size - len(given), axis=0)])
    known = normalizer.normalize(_turned_back(full, steps, state))
    target = np.zeros((first_row + rows, width), np.float32)
    target[first_row : first_row + len(known), : normalizer.width] = known
    weights = np.full((first_row + rows, width), free, np.float32)
    weights[first_row:, : normalizer.width] = per_row[:, None]
    if kind == "trained":
        # columns that pad the rows are part of what the head was trained to continue
        weights[first_row : first_row + end] = 0.0
    return Continuation(kind, target, weights, first_row + max(0, end), beta)


def _turned_back(actions: np.ndarray, steps: Sequence[VectorStep], state: np.ndarray) -> np.ndarray:
    """Invert the steps, from robot units. Raises :class:`ObservationError` for a step without an inverse."""
    for step in reversed(steps):
        if why := step.no_inverse:
            raise ObservationError(
                "previous", "actions that can be turned back into the model's", f"a step {step.kind}: {why}"
            )
    return turn_back(actions, steps, state)  # re-based on the state of the new frame
