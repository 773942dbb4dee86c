"""Limit the jerk of commands so that the robot can always stop within its range, velocity and acceleration.

All quantities are per control step. ``u`` is the change of position by a command, ``a`` is the change of ``u``, and
``jerk`` is the largest change of ``a``. The fastest stop brings ``u`` and ``a`` to 0 within the limits of acceleration
and jerk. A step is safe if the fastest stop after it stays inside the range. The first step of that stop is then safe
too, so there is always a safe step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

MAX_STOP = 2000  # longest stop in control steps; a step is unsafe if the robot needs longer to stop after it
_PARTS = 12  # number of candidate steps in each pass of the search for the largest safe step
_LOOKS = 3


@dataclass(frozen=True)
class StepBounds:
    """The limits of each value in a command, per control step, float64 [D].

    Attributes:
        low: Lowest position.
        high: Highest position.
        fastest: Largest step: velocity * period.
        push: Largest change from one step to the next: acceleration * period^2.
        jerk: Largest change of ``push`` from one step to the next: jerk * period^3.
    """

    low: np.ndarray
    high: np.ndarray
    fastest: np.ndarray
    push: np.ndarray
    jerk: np.ndarray

    def take(self, mask: np.ndarray) -> StepBounds:
        """Return the bounds of the values that ``mask``, bool [D], selects."""
        return StepBounds(*(getattr(self, name)[mask] for name in ("low", "high", "fastest", "push", "jerk")))


def stop(u: np.ndarray, a: np.ndarray, push: np.ndarray, jerk: np.ndarray) -> np.ndarray:
    """Compute how the next step must change in the fastest stop.

    If the change of the step is ``b`` and shrinks by ``jerk`` each time, the step changes by ``b + (b - jerk) + ...``
    in total. The motion ends if this sum is ``-u``. The result is the nearest change within acceleration and jerk.

    Args:
        u: Last step, [..., D].
        a: Change of the last step, [..., D].
        push: Largest change of a step, [D].
        jerk: Largest change of ``a``, [D].

    Returns:
        The change of the next step, float64 [..., D].
    """
    size = np.abs(u)
    n = np.floor((np.sqrt(8.0 * size / jerk + 1.0) - 1.0) / 2.0)
    change = -np.sign(u) * (size + jerk * n * (n + 1.0) / 2.0) / (n + 1.0)
    return np.minimum(np.maximum(change, np.maximum(a - jerk, -push)), np.minimum(a + jerk, push))


def stopped(
    at: np.ndarray, u: np.ndarray, a: np.ndarray, bounds: StepBounds
) -> tuple[np.ndarray, np.ndarray]:
    """Simulate the fastest stop after each of K candidate steps.

    Args:
        at: Positions after the candidate steps, [K, D].
        u: The candidate steps, [K, D].
        a: Changes of the candidate steps, [K, D].
        bounds: The limits, [D].

    Returns:
        The position at the end of each stop, float64 [K, D], and True if the stop stays within the limits, bool [K, D].
    """
    place, fits = at.copy(), (at >= bounds.low) & (at <= bounds.high) & (np.abs(u) <= bounds.fastest)
    for _ in range(MAX_STOP):
        if not (u.any() or a.any()):
            return place, fits
        # `u` is the last step and `a` is its change. In the last step of a stop the change is exactly -u, so `u` and
        # `a` become exactly 0.
        a = stop(u, a, bounds.push, bounds.jerk)
        u = u + a
        place = place + u
        fits &= (place >= bounds.low) & (place <= bounds.high) & (np.abs(u) <= bounds.fastest)
    return place, fits & (u == 0.0) & (a == 0.0)


def next_step(
    at: np.ndarray, u: np.ndarray, a: np.ndarray, wanted: np.ndarray, bounds: StepBounds
) -> np.ndarray:
    """Compute the next step towards a goal.

    The result is the whole step if that is allowed and safe. Otherwise it is the largest safe step from which the robot
    can stop before the goal. If the robot cannot stop in time, it is the first step of the fastest stop.

    Args:
        at: Position, [D].
        u: Last step, [D].
        a: Change of the last step, [D].
        wanted: Goal position, [D].
        bounds: The limits.

    Returns:
        The step, float64 [D].
    """
    brake = u + stop(u, a, bounds.push, bounds.jerk)
    lowest = u + np.maximum(a - bounds.jerk, -bounds.push)
    highest = u + np.minimum(a + bounds.jerk, bounds.push)
    exact = wanted - at
    tried = np.stack([brake, np.clip(exact, lowest, highest)])
    ends, fits = stopped(at + tried, tried, tried - u, bounds)
    reached = fits[1] & (tried[1] == exact)
    forward = wanted > ends[0]
    furthest = np.where(forward, np.maximum(highest, brake), np.minimum(lowest, brake))
    # A joint brakes if it cannot stop before its goal, or if it was outside its limits from the start.
    near, far = np.where(reached, tried[1], brake), furthest
    if reached.all():
        return tried[1]
    parts = np.linspace(0.0, 1.0, _PARTS + 1)[:, None]
    for _ in range(_LOOKS):
        steps = near + (far - near) * parts
        ends, fits = stopped(at + steps, steps, steps - u, bounds)
        fits &= np.where(forward, ends <= wanted, ends >= wanted)
        fits[0] = True
        # Candidates are ordered by size, and all candidates up to the largest safe one are safe. Find its index.
        last = np.cumprod(fits, axis=0).sum(axis=0) - 1
        near = np.where(reached, near, np.take_along_axis(steps, last[None], 0)[0])
        far = np.take_along_axis(steps, np.minimum(last + 1, _PARTS)[None], 0)[0]
    return near


class JerkLimit:
    """Limits the jerk of the values in a command, from one command to the next.

    Commands are rounded to float32. This object stores the unrounded values, because otherwise each rounding would
    count as jerk.

    Args:
        bounds: The limits.
    """

    def __init__(self, bounds: StepBounds):
        self._bounds = bounds

    def rest(self, at: np.ndarray) -> None:
        """Set the position of a robot that stands still, float64 [D]."""
        self._at, self._u, self._a = at, np.zeros(len(at)), np.zeros(len(at))
        self._next = self._at, self._u, self._a

    def towards(self, wanted: np.ndarray, last: np.ndarray) -> np.ndarray:
        """Compute the next command towards a goal. Call :meth:`sent` if the command is sent.

        Args:
            wanted: Goal position, float64 [D].
            last: The last command as it was sent, float64 [D]. Range and velocity start at this command.

        Returns:
            The command, float32 [D].
        """
        bounds = self._bounds
        # A robot that is already outside its range may stay there and move back, so its position extends the range.
        ends = (
            np.minimum(bounds.low, np.minimum(self._at, last)),
            np.maximum(bounds.high, np.maximum(self._at, last)),
        )
        step = next_step(self._at, self._u, self._a, wanted, replace(bounds, low=ends[0], high=ends[1]))
        at = np.where(step == wanted - self._at, wanted, self._at + step)
        self._next = at, step, step - self._u
        # Both commands are rounded to float32. Check the velocity limit with the rounded commands.
        sent = np.clip(at, last - bounds.fastest, last + bounds.fastest).astype(np.float32)
        far = np.abs(sent.astype(np.float64) - last) > bounds.fastest
        return np.where(far, np.nextafter(sent, last.astype(np.float32)), sent)

    def sent(self) -> None:
        """Record that the last result of :meth:`towards` was sent to the robot."""
        self._at, self._u, self._a = self._next
