"""Whether the numbers of a state stand where they stood in training, with their sign and in their unit.

Each number's mean and spread in training say how well a value fits a place. A state whose numbers fit their own places
badly and, exchanged, negated or scaled, fit well, is told so; one that fits nowhere is told by joint.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from sinew.bundle.schema import Manifest
from sinew.checks.wiring.finding import CANNOT_TELL, LOOKS_WRONG, WRONG, Finding
from sinew.processing.limits import DEVIATIONS, ranges
from sinew.processing.normalize import normalizer
from sinew.processing.processor import turned_state

GAIN = 12.0  # smallest reduction of squared deviations by an explanation
LEFT = 0.5  # largest remaining share of their sum
FITS = 3.0  # standard deviations within which a number fits its place
OUTSIDE = 2.0  # half ranges from the middle beyond which a joint is outside the training data
REFUSED = 20.0  # half ranges beyond which a server rejects a state (sinew.processing.safety)
NARROW = 0.1 / DEVIATIONS  # spread of joints that never moved in training, relative to the mean or to 1
SCALES = {  # what values are multiplied by -> words
    np.pi / 180: "degrees, where training has radians",
    180 / np.pi: "radians, where training has degrees",
    1e-3: "thousandths (mm for m), where training has whole units",
    1e3: "whole units (m for mm), where training has thousandths",
    1e-2: "hundredths (percent), where training has whole units",
    1e2: "whole units, where training has hundredths (percent)",
}
PART = 0.15  # smallest share of its largest training value, times the scale, of a number in another unit
MAX_JOINTS = 64  # most joints among which exchanges are searched


@dataclass(frozen=True)
class JointFit:
    """What a bundle knows of its state, D numbers. steps: from the robot's state to the numbers that the statistics are
    of. known: where there are any. half: of the range around ``centre``."""

    names: tuple[str, ...]
    mean: np.ndarray
    std: np.ndarray
    centre: np.ndarray
    half: np.ndarray
    known: np.ndarray
    steps: Callable[[np.ndarray], np.ndarray]
    named: bool

    @classmethod
    def of(cls, manifest: Manifest) -> JointFit:
        """Return the statistics of the state in the training frames, or else in its normalisation.

        A number counts as outside only if it is beyond both ranges, because a few episodes do not cover all training
        data.
        """
        spec, recipe, seen = manifest.spec, manifest.processing, manifest.seen
        names = spec.state.names or tuple(map(str, range(spec.state.dim)))
        made = normalizer(recipe.state, recipe.state_parts, spec.state.dim, "state")
        centre, half = (np.atleast_1d(each) for each in ranges(made))
        known = np.isfinite(half)
        if seen is not None and (state := seen.state) is not None:
            mean, std, low, high = (
                np.array(row, np.float64) for row in (state.mean, state.std, state.low, state.high)
            )
            if not recipe.state_steps:  # else that range is of other numbers
                low = np.where(known, np.fmin(low, centre - half), low)
                high = np.where(known, np.fmax(high, centre + half), high)
            centre, half, known = (low + high) / 2, (high - low) / 2, np.ones(len(mean), bool)
            steps: Callable[[np.ndarray], np.ndarray] = np.asarray
        else:
            mean, std = centre, half / DEVIATIONS

            def steps(state: np.ndarray) -> np.ndarray:
                return np.stack([turned_state(recipe, row) for row in np.atleast_2d(state)])

        narrow = NARROW * np.maximum(1.0, np.abs(mean))
        std = np.where(std > 1e-6 * np.maximum(1.0, np.abs(mean)), std, narrow)
        half = np.where(half > 1e-6 * np.maximum(1.0, np.abs(mean)), half, DEVIATIONS * narrow)
        return cls(names, mean, std, centre, half, known, steps, bool(spec.state.names))

    # ------------------------------------------------------------------------- fit

    def mismatch(self, states: np.ndarray) -> np.ndarray:
        """Return the mean squared deviation of each number, [D], of states [n, D]; 0 where nothing is known."""
        found = ((self.steps(states) - self.mean) / self.std) ** 2
        return np.where(self.known, found.mean(0), 0.0)

    def apart(self, states: np.ndarray) -> np.ndarray:
        """Return how far the mean of each number, [D], is from the middle of its range, in half ranges."""
        found = np.abs(self.steps(states).mean(0) - self.centre) / self.half
        return np.where(self.known, found, 0.0)

    def findings(self, states: np.ndarray) -> list[Finding]:
        """Return the suspicious findings about finite states, float [n, D] in the robot's units."""
        if not self.known.any() or not len(states):
            return []
        before = self.mismatch(states)
        tried = [self._exchanged(states, before), self._negated(states, before), self._scaled(states, before)]
        told = [each for each in tried if each is not None]
        best = min(told, key=lambda each: each[0], default=None)
        found = [] if best is None else best[1]
        explained = set() if best is None else best[2]
        return found + self._outside(states, explained)

    def undecided(self) -> list[Finding]:
        """Return the findings about a state that cannot be decided."""
        if not self.known.all():
            names = [name for name, known in zip(self.names, self.known, strict=True) if not known]
            text = f"the bundle has no statistics of {', '.join(names[:8])}{' ...' * (len(names) > 8)}"
            return [Finding("state", CANNOT_TELL, "no statistics", text)]
        found = []
        alike = [
            f"{self.names[i]} and {self.names[j]}"
            for i in range(len(self.mean))
            for j in range(i)
            if self._gain(i, j) < GAIN
        ]
        if alike:
            found.append(
                Finding(
                    "state",
                    CANNOT_TELL,
                    "alike",
                    f"whether {', '.join(alike[:6])}{' ...' * (len(alike) > 6)} are exchanged: they had like values",
                )
            )
        turned = [
            n for n, m, s in zip(self.names, self.mean, self.std, strict=True) if 4 * (m / s) ** 2 < GAIN
        ]
        if turned:
            shown = ", ".join(turned[:8]) + " ..." * (len(turned) > 8)
            text = f"whether {shown} {'have' if turned[1:] else 'has'} the right sign: about zero in training"
            found.append(Finding("state", CANNOT_TELL, "alike", text))
        return found

    def _gain(self, i: int, j: int) -> float:
        """Return the average increase of squared deviations by an exchange of two numbers."""
        apart, (a, b) = (self.mean[i] - self.mean[j]) ** 2, (self.std[i] ** 2, self.std[j] ** 2)
        return float((apart + a) / b + (apart + b) / a - 2)

    # ------------------------------------------------------------------------- explanations

    def _exchanged(
        self, states: np.ndarray, before: np.ndarray
    ) -> tuple[float, list[Finding], set[int]] | None:
        """Return the order in which the numbers fit best, if it is another one by a margin: the mismatch that is left,
        what to say, and which places it explains."""
        size = len(before)
        if not 2 <= size <= MAX_JOINTS:
            return None
        cost = np.empty((size, size))  # cost of the robot's number i in the place j
        for i in range(size):
            full = np.repeat(states[:, i : i + 1], size, axis=1)
            cost[i] = self.mismatch(full)
        cost = np.where(
            self.known[:, None] & self.known[None], cost, np.where(np.eye(size, dtype=bool), 0.0, 1e6)
        )
        to, apart = assignment(cost), self.apart(states)  # to: the place of each number
        moved: set[int] = set()
        for cycle in _cycles(to):
            own, new = sum(cost[i, i] for i in cycle), sum(cost[i, to[i]] for i in cycle)
            fits = new <= LEFT * own and all(cost[i, to[i]] <= FITS**2 for i in cycle)
            if own - new >= GAIN and fits and any(apart[i] > 1 for i in cycle):
                moved.update(cycle)
        if not moved:
            return None
        left = sum(cost[i, to[i]] if i in moved else cost[i, i] for i in range(size))
        pairs = ", ".join(f"{self._called(i)} looks like {self._called(to[i])}" for i in sorted(moved))
        own, new = sum(before[i] for i in moved), sum(cost[i, to[i]] for i in moved)
        finding = Finding(
            "state",
            LOOKS_WRONG,
            "permuted",
            f"{pairs}: {_deviations(new, moved)} from the training data there, {_deviations(own, moved)} as they stand",
            f"the order of training ({', '.join(self.names)})" if self.named else "the order of training",
            "give the joints in the order of training",
        )
        return float(left), [finding], moved

    def _negated(
        self, states: np.ndarray, before: np.ndarray
    ) -> tuple[float, list[Finding], set[int]] | None:
        """Return the numbers that fit with the other sign and not with their own."""
        after = self.mismatch(-states)
        found = self._better(states, before, after)
        if not found:
            return None
        told = [
            Finding(
                f"state.{self.names[i]}",
                LOOKS_WRONG,
                "negated",
                f"{states[:, i].mean():.3g} on average, which with the other sign is {np.sqrt(after[i]):.2g} standard"
                f" deviations from the training data, and {np.sqrt(before[i]):.2g} as it is",
                self._wanted(i),
                "turn its sign around, or the joint's direction in the driver",
            )
            for i in sorted(found)
        ]
        return float(sum(after[i] if i in found else before[i] for i in range(len(before)))), told, found

    def _scaled(self, states: np.ndarray, before: np.ndarray) -> tuple[float, list[Finding], set[int]] | None:
        """Return the unit in which the numbers fit, if it is another one."""
        best: tuple[float, float, set[int]] | None = None
        for scale in SCALES:
            after = self.mismatch(states * scale)
            found = self._better(states, before, after)
            if (
                scale < 1
            ):  # whatever is large fits a place about zero when it is made small: one is as large as said
                largest = PART / scale * (np.abs(self.centre) + self.half)
                found = found if any(np.abs(states[:, i]).mean() > largest[i] for i in found) else set()
            elif len(found) < min(2, len(before)):  # one number about zero is a joint at its stop
                continue
            if not found:
                continue
            # Twice the logarithm of the density: a small scale squeezes many values into a place, and is worth less.
            unlikely = sum(after[i] - 2 * np.log(scale) for i in found) - sum(before[i] for i in found)
            if best is None or unlikely < best[0]:
                best = float(unlikely), scale, found
        if best is None:
            return None
        _, scale, found = best
        after = self.mismatch(states * scale)
        left = float(sum(after[i] if i in found else before[i] for i in range(len(before))))
        first, words = min(found), SCALES[scale]
        names = ", ".join(self.names[i] for i in sorted(found))
        value = float(states[:, first].mean())
        finding = Finding(
            f"state.{self.names[first]}" if len(found) == 1 else "state",
            LOOKS_WRONG,
            words.partition(",")[0].partition(" (")[0],
            f"{names}: as if in {words}: {value:.4g} on average in {self.names[first]}, which times {scale:.3g} is"
            f" {value * scale:.3g}",
            self._wanted(first),
            f"multiply by {scale:.6g} in `observe`, and divide what `act` is given by it",
        )
        return left, [finding], found

    def _better(self, states: np.ndarray, before: np.ndarray, after: np.ndarray) -> set[int]:
        """Return the numbers that are outside of their range, and fit it by a margin where they are changed."""
        apart = self.apart(states)
        return {
            i
            for i in range(len(before))
            if apart[i] > 1 and before[i] - after[i] >= GAIN and after[i] <= min(FITS**2, LEFT * before[i])
        }

    def _outside(self, states: np.ndarray, explained: set[int]) -> list[Finding]:
        """Return the joints that were never so in training, of those that nothing explains."""
        mean, apart = self.steps(states).mean(0), self.apart(states)
        return [
            Finding(
                f"state.{self.names[i]}",
                WRONG if apart[i] > REFUSED else LOOKS_WRONG,
                "outside",
                f"{mean[i]:.4g} on average, {apart[i]:.3g} half ranges from the middle of the training data"
                + (", which a server refuses" if apart[i] > REFUSED else ""),
                self._wanted(i),
                "another unit, another zero or a broken sensor? Where it is meant, the policy was not trained for it",
            )
            for i in map(int, np.flatnonzero(apart > OUTSIDE))
            if i not in explained
        ]

    def _called(self, i: int) -> str:
        return f"number {i} ({self.names[i]})" if self.named else f"number {i}"

    def _wanted(self, i: int) -> str:
        low, high = self.centre[i] - self.half[i], self.centre[i] + self.half[i]
        return f"{low:.3g} to {high:.3g} as in training (mean {self.mean[i]:.3g}, standard deviation {self.std[i]:.2g})"


def _deviations(total: float, of: set[int]) -> str:
    return f"{np.sqrt(total / len(of)):.2g} standard deviations"


def _cycles(to: Sequence[int]) -> list[list[int]]:
    """Return the cycles of a permutation that move something."""
    left, found = set(range(len(to))), []
    while left:
        cycle = [min(left)]
        while (following := to[cycle[-1]]) != cycle[0]:
            cycle.append(following)
        left -= set(cycle)
        if len(cycle) > 1:
            found.append(cycle)
    return found


def assignment(cost: np.ndarray) -> list[int]:
    """Return the column of each row in the assignment of least cost, [n, n]: rows enter one after another, each along
    the shortest path of exchanges with those that are there (Kuhn 1955, with Dijkstra's search over reduced costs)."""
    size = len(cost)
    over, under = np.zeros(size), np.zeros(size)  # prices of rows and columns
    holder = np.full(size, -1)  # the row that has a column
    for row in range(size):
        reach, through = np.full(size, np.inf), np.full(size, -1)
        done = np.zeros(size, bool)
        at, column, walked = row, -1, 0.0
        while True:
            step = np.where(done, np.inf, walked + cost[at] - over[at] - under)
            through = np.where(step < reach, column, through)
            reach = np.minimum(reach, step)
            column = int(np.argmin(np.where(done, np.inf, reach)))
            walked = reach[column]
            done[column] = True
            if holder[column] < 0:
                break
            at = int(holder[column])
        for other in np.flatnonzero(done):
            if other != column:
                over[holder[other]] += walked - reach[other]
                under[other] -= walked - reach[other]
        over[row] += walked
        while column >= 0:
            before = int(through[column])
            holder[column] = row if before < 0 else holder[before]
            column = before
    found = [0] * size
    for column, at in enumerate(holder):
        found[int(at)] = column
    return found
