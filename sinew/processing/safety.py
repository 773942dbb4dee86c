"""Check whether actions and states are plausible, with the policy's own training statistics.

A state far outside of all training data comes from a robot with other units, or from a broken sensor. Actions far
outside come from a broken model or file. The limits are wide and reject only impossible values. Limits of joints,
speeds and distances belong to the robot's own controller (``sinew_client.control``).
"""

from __future__ import annotations

import copy
import time
from dataclasses import replace

import numpy as np

from sinew.core import ActionChunk, Observation, ObservationError, SinewError
from sinew.processing import Processor
from sinew.processing.arrays import KINDS, numbers
from sinew.processing.limits import ranges
from sinew.processing.processor import turned_actions, turned_state

# A state is rejected if its distance from the centre of its range in training exceeds this many half widths
# of the range.
STATE_MARGIN = 20.0
WARN_MARGIN = 3.0  # the reply has a warning about the state at this distance, in half widths of the range
ACTION_MARGIN = 10.0
MAX_NOISE = 100.0  # a request whose noise has a larger value is rejected; the unit is a standard deviation
MODES = ("refuse", "clamp", "off")


class UnsafeActionError(SinewError):
    """The policy computed actions that are far outside of its training data. The actions were not sent to the robot."""

    code = "unsafe_action"


class Safety:
    """Checks actions and states against the training data.

    Args:
        processor: The policy's processor.
        mode: What happens to actions outside of the limits: "refuse", "clamp" or "off".
        action_margin: Limit for actions: the largest distance from the centre of the training range, in units of half
            of the range's width.
        state_margin: The same limit for states.
        max_age: Largest age of an observation with a ``time``, in seconds. An older observation is rejected before it
            is computed, and again before its actions are sent. The client's ``time.time()`` must agree with this
            machine's clock. None allows any age.
    """

    def __init__(
        self,
        processor: Processor,
        mode: str = "refuse",
        action_margin: float = ACTION_MARGIN,
        state_margin: float = STATE_MARGIN,
        max_age: float | None = None,
    ):
        if mode not in MODES:
            raise SinewError(f"action limits: expected one of {', '.join(MODES)}, got {mode!r}")
        self.mode = mode
        self._spec, self._recipe = processor.spec, processor.recipe
        self._state_margin, self.max_age = state_margin, max_age
        self._state_centre, self._state_half = ranges(processor.state_normalizer)
        centre, half = ranges(processor.action_normalizer)
        self._action_low, self._action_high = centre - action_margin * half, centre + action_margin * half
        self._names = self._spec.state.names or tuple(map(str, range(self._spec.state.dim)))
        for step in self._recipe.action_steps:
            if not step.monotone:
                for bound, end in ((self._action_low, -np.inf), (self._action_high, np.inf)):
                    bound[..., list(step.dims)] = end
        relative = any(step.reads for step in self._recipe.action_steps)
        whole = (self._spec.chunk_size, self._spec.action.dim)
        # Limits of absolute actions are the same for every state, so compute them once.
        self._fixed = None if relative else self._allowed(whole)

    def check(self, observation: Observation) -> tuple[str, ...]:
        """Return warnings about a state that is unlike the training data.

        Values of a wrong type or shape are ignored, because the policy's own check reports them.

        Raises:
            ObservationError: The state or the noise is implausible, or the observation is too old.
        """
        if self.max_age is not None:
            self._check_age(observation, self.max_age)
        noise = None if observation.noise is None else _numbers(observation.noise)
        if noise is not None:
            largest = float(np.abs(noise).max(initial=0))
            # The policy's own check reports noise that is not finite.
            if MAX_NOISE < largest < np.inf:
                raise ObservationError("noise", f"numbers up to {MAX_NOISE:g}", f"{largest:g}")
        state = self._state(observation)
        # A policy may read no state.
        if state is None or not state.size:
            return ()
        distance = np.abs(state - self._state_centre) / self._state_half
        worst = int(distance.argmax())
        if distance[worst] > WARN_MARGIN:
            low = self._state_centre[worst] - self._state_half[worst]
            high = self._state_centre[worst] + self._state_half[worst]
            got = f"{state[worst]:g}, {distance[worst]:.3g} times as far from the centre of this range as its ends"
            name = f"state.{self._names[worst]}"
            if distance[worst] > self._state_margin:
                raise ObservationError(
                    name, f"a number like those of the training data ({low:g} to {high:g})", got
                )
            # The warning does not contain the value of the state, so its text stays the same and clients show it only
            # once.
            return (f"{name}: far outside of the training data, which have {low:g} to {high:g}",)
        return ()

    def enforce(self, chunk: ActionChunk, observation: Observation) -> ActionChunk:
        """Apply the limits to the actions of a chunk, and return the chunk.

        Raises:
            UnsafeActionError: An action is outside of the limits, and the mode is "refuse".
            ObservationError: The observation has become too old.
        """
        if self.max_age is not None:
            self._check_age(observation, self.max_age)
        if self.mode == "off" or not len(chunk.actions):
            return chunk
        if self._fixed is not None and self._fixed[0].shape == chunk.actions.shape:
            low, high = self._fixed
        else:
            state = self._state(observation)
            if state is None:
                return chunk
            low, high = self._allowed(chunk.actions.shape, state)
        outside = (chunk.actions < low) | (chunk.actions > high)
        if not outside.any():
            return chunk
        row, column = np.argwhere(outside)[0]
        text = (
            f"action {row}, dimension {column}: the policy's statistics allow {low[row, column]:g} to"
            f" {high[row, column]:g}, and it produced {chunk.actions[row, column]:g}"
        )
        if self.mode == "refuse":
            raise UnsafeActionError(text)
        actions = np.clip(chunk.actions, low, high).astype(np.float32)
        return replace(chunk, actions=actions, warnings=(*chunk.warnings, f"clamped: {text}"))

    def of_windows(self) -> Safety:
        """Return a copy that uses one range for all actions of a chunk.

        A stream sends action windows, which begin and end at other times than chunks and may have another rate. So the
        ranges of single actions in a chunk do not apply to windows.
        """
        if self._action_low.ndim == 1:
            return self
        safety = copy.copy(self)
        safety.widen()
        return safety

    def widen(self) -> None:
        """Replace the range of each step of a chunk by the widest range of all steps."""
        rows = self._spec.chunk_size
        self._action_low = self._action_low[:rows].min(axis=0)
        self._action_high = self._action_high[:rows].max(axis=0)
        if self._fixed is not None:
            self._fixed = self._allowed((rows, self._spec.action.dim))

    def _allowed(
        self, shape: tuple[int, int], state: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the lowest and the highest allowed number for each row and dimension of a chunk [rows, D]."""
        ends, rows = [], shape[0]
        for bound in (self._action_low, self._action_high):
            full = np.array(np.broadcast_to(bound[..., :rows, :] if bound.ndim == 2 else bound, shape))
            ends.append(turned_actions(self._recipe, full, state))
        low, high = np.fmin(*ends), np.fmax(*ends)
        return np.where(np.isnan(low), -np.inf, low), np.where(np.isnan(high), np.inf, high)

    def limits(self) -> dict[str, list[float | None]] | None:
        """Return ``low`` and ``high`` of each action in robot units; None for an action without a limit.

        A server sends them as ``action.limits``, and a robot's controller clips to them. The result is None if no
        limits are enforced, or if actions are relative to the state, because their limits then change with the state.
        """
        if self.mode == "off" or self._fixed is None:
            return None
        low, high = self._fixed[0].min(axis=0), self._fixed[1].max(axis=0)
        return {
            name: [float(x) if np.isfinite(x) else None for x in values]
            for name, values in (("low", low), ("high", high))
        }

    def _check_age(self, observation: Observation, limit: float) -> None:
        """Raise ObservationError for an observation that is too old, or that has a time in the future."""
        stamp = _numbers(observation.time)
        if stamp is None or stamp.ndim:
            return
        age = time.time() - float(stamp)
        if not -limit <= age <= limit:  # NaN fails this comparison too
            expected = f"Unix seconds of the last {limit:g} s (--max-age)"
            when = f"{age:.3f} s ago" if age >= 0 else f"{-age:.3f} s from now; the clocks disagree"
            raise ObservationError("time", expected, when)

    def state_range(self) -> dict[str, list[float | None]] | None:
        """Return ``low`` and ``high`` of each state dimension in the training data; None for a dimension without a
        range.

        The result is None if steps convert the state before it is normalised, because the ranges then belong to the
        converted numbers.
        """
        if self._recipe.state_steps:
            return None
        # [2, D]
        ends = np.stack([self._state_centre - self._state_half, self._state_centre + self._state_half])
        low, high = ([float(x) if np.isfinite(x) else None for x in row] for row in ends)
        return {"low": low, "high": high}

    def _state(self, observation: Observation) -> np.ndarray | None:
        """Return the state of an observation in the units of the training data; None if it is not a valid
        state.
        """
        state = _numbers(observation.state)
        if state is None or state.shape != (self._spec.state.dim,) or not np.isfinite(state).all():
            return None
        return turned_state(self._recipe, state)


def _numbers(value: object) -> np.ndarray | None:
    """Return ``value`` as float64; None if it is not an array of real numbers."""
    if type(value) is np.ndarray and value.dtype.kind in KINDS:
        return value.astype(np.float64)
    try:
        return numbers("state", value).astype(np.float64)
    except ObservationError:
        return None
