"""Steps of limited jerk from which a robot can always stop: within its range, its velocity and its acceleration.

Everything is counted in control steps: ``u`` is what a command moves by, ``a`` how much that differs from the step
before, and ``jerk`` how much ``a`` may differ from the one before. The fastest stop brings both to 0, never faster than
acceleration and jerk allow. A step is safe where the stop that follows it stays inside; the first step of that very
stop is then safe as well, so there is always one that may be taken.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

MAX_STOP = 2000  # control steps of a stop; a step after which it takes longer is not safe
_PARTS = 12  # into which the way to the furthest safe step is divided, at each look
_LOOKS = 3


@dataclass(frozen=True)
class StepBounds:
    """Hold the limits of each number of a command, float64 [D]: furthest places, largest step, change of it, and of
    that."""

    low: np.ndarray
    high: np.ndarray
    fastest: np.ndarray
    push: np.ndarray
    jerk: np.ndarray

    def take(self, mask: np.ndarray) -> StepBounds:
        """Return the bounds of some of the numbers."""
        return StepBounds(*(getattr(self, name)[mask] for name in ("low", "high", "fastest", "push", "jerk")))


def stop(u: np.ndarray, a: np.ndarray, push: np.ndarray, jerk: np.ndarray) -> np.ndarray:
    """Return by how much the next step of the fastest stop differs from the last one, ``u``; ``a`` is by how much that
    differed.

    Where a change ``b`` is brought to 0 by ``jerk`` a step, steps change by ``b + (b - jerk) + ...`` altogether. The
    one whose sum is ``-u`` ends the motion; what is nearest to it within acceleration and jerk is taken.
    """
    size = np.abs(u)
    n = np.floor((np.sqrt(8.0 * size / jerk + 1.0) - 1.0) / 2.0)
    wanted = -np.sign(u) * (size + jerk * n * (n + 1.0) / 2.0) / (n + 1.0)
    return np.minimum(np.maximum(wanted, np.maximum(a - jerk, -push)), np.minimum(a + jerk, push))


def stopped(
    at: np.ndarray, u: np.ndarray, a: np.ndarray, bounds: StepBounds
) -> tuple[np.ndarray, np.ndarray]:
    """Return where the fastest stop after steps ``u`` to places ``at`` ends, and whether it stays within ``bounds``.

    All [K, D], of K ways to go; the bounds' own [D].
    """
    place, fits = at.copy(), (at >= bounds.low) & (at <= bounds.high) & (np.abs(u) <= bounds.fastest)
    for _ in range(MAX_STOP):
        if not (u.any() or a.any()):
            return place, fits
        a = stop(u, a, bounds.push, bounds.jerk)  # the last one is -u, so that both end at 0 exactly
        u = u + a
        place = place + u
        fits &= (place >= bounds.low) & (place <= bounds.high) & (np.abs(u) <= bounds.fastest)
    return place, fits & (u == 0.0) & (a == 0.0)


def next_step(
    at: np.ndarray, u: np.ndarray, a: np.ndarray, wanted: np.ndarray, bounds: StepBounds
) -> np.ndarray:
    """Return the next step towards places ``wanted``, float64 [D], of a robot at ``at`` whose last step was ``u`` and
    differed by ``a`` from the one before.

    It is the step to there where that is allowed and safe; else the furthest safe one after which the robot can stop
    without passing there, and the first of the fastest stop where it has to pass.
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
    # What cannot stop before the wanted place in time brakes; and so does what was never safe, as after a new limit.
    near, far = np.where(reached, tried[1], brake), furthest
    if reached.all():
        return tried[1]
    parts = np.linspace(0.0, 1.0, _PARTS + 1)[:, None]
    for _ in range(_LOOKS):
        steps = near + (far - near) * parts
        ends, fits = stopped(at + steps, steps, steps - u, bounds)
        fits &= np.where(forward, ends <= wanted, ends >= wanted)
        fits[0] = True
        last = np.cumprod(fits, axis=0).sum(axis=0) - 1  # safe steps lie beside each other
        near = np.where(reached, near, np.take_along_axis(steps, last[None], 0)[0])
        far = np.take_along_axis(steps, np.minimum(last + 1, _PARTS)[None], 0)[0]
    return near


class JerkLimit:
    """The numbers of a command whose jerk is limited, from one command to the next.

    Commands are float32, and what they are rounded from is remembered: or each rounding would count as a jerk.
    """

    def __init__(self, bounds: StepBounds):
        self._bounds = bounds

    def rest(self, at: np.ndarray) -> None:
        """Note that the robot stands still at ``at``, float64 [D]."""
        self._at, self._u, self._a = at, np.zeros(len(at)), np.zeros(len(at))
        self._next = self._at, self._u, self._a

    def towards(self, wanted: np.ndarray, last: np.ndarray) -> np.ndarray:
        """Return the next command towards ``wanted``, float32 [D]; ``last``: the one before as it was sent, which range
        and velocity count from."""
        bounds = self._bounds
        ends = (
            np.minimum(bounds.low, np.minimum(self._at, last)),
            np.maximum(bounds.high, np.maximum(self._at, last)),
        )  # one that stands out of its range is led back
        step = next_step(self._at, self._u, self._a, wanted, replace(bounds, low=ends[0], high=ends[1]))
        at = np.where(step == wanted - self._at, wanted, self._at + step)
        self._next = at, step, step - self._u
        # The last command was rounded, and so is this one: velocity counts between the two.
        sent = np.clip(at, last - bounds.fastest, last + bounds.fastest).astype(np.float32)
        far = np.abs(sent.astype(np.float64) - last) > bounds.fastest
        return np.where(far, np.nextafter(sent, last.astype(np.float32)), sent)

    def sent(self) -> None:
        """Note that the command that :meth:`towards` returned was sent."""
        self._at, self._u, self._a = self._next
