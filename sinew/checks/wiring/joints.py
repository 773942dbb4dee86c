"""Check whether the numbers of a robot's state have the order, the sign and the unit of the training data.

The mean and spread of each number in training define how well a value fits a position in the state. If the numbers
fit badly, and fit well after they are exchanged, negated or scaled, this explanation is reported. A number that fits
no position is reported with the name of its joint.
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

GAIN = 12.0  # an explanation must reduce the sum of squared deviations by at least this amount
LEFT = 0.5  # an explanation may leave at most this share of the sum of squared deviations
FITS = 3.0  # a number fits a position if it is within this many standard deviations
OUTSIDE = 2.0  # a joint is outside the training data at this many half ranges from the middle
REFUSED = 20.0  # a server rejects a state at this many half ranges from the middle (sinew.processing.safety)
# The assumed spread of a joint that never moved in training, relative to its mean or to 1.
NARROW = 0.1 / DEVIATIONS
# Key: factor that converts the robot's value to the training unit. Value: (robot's unit, training unit).
SCALES = {
    np.pi / 180: "degrees, where training has radians",
    180 / np.pi: "radians, where training has degrees",
    1e-3: "thousandths (mm for m), where training has whole units",
    1e3: "whole units (m for mm), where training has thousandths",
    1e-2: "hundredths (percent), where training has whole units",
    1e2: "whole units, where training has hundredths (percent)",
}
PART = 0.15  # a value in another unit must reach this share of the largest training value times the scale
MAX_JOINTS = 64  # in states with more numbers than this, no exchanged joints are searched


@dataclass(frozen=True)
class JointFit:
    """The statistics of a bundle's state, D numbers, for comparison with a robot.

    Attributes:
        names: Name of each number.
        mean: Mean of each number in training.
        std: Standard deviation of each number.
        centre: Middle of the range of each number.
        half: Half of the width of the range.
        known: True for each number that has statistics.
        steps: Converts the robot's state to the numbers of the statistics.
        named: True if the bundle names the numbers.
    """

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
        """Return the statistics of the state from the training frames. If the bundle has no record of them, the
        statistics of the normalisation are used.

        A number counts as outside only if it is beyond the range of the training frames and beyond the range of the
        normalisation, because a few episodes do not cover all training data.
        """
        spec, recipe, seen = manifest.spec, manifest.processing, manifest.seen
        names = spec.state.names or tuple(map(str, range(spec.state.dim)))
        normal = normalizer(recipe.state, recipe.state_parts, spec.state.dim, "state")
        centre, half = (np.atleast_1d(each) for each in ranges(normal))
        finite = np.isfinite(half)
        if seen is not None and (state := seen.state) is not None:
            mean, std, low, high = (
                np.array(row, np.float64) for row in (state.mean, state.std, state.low, state.high)
            )
            # If conversion steps change the state first, the range of the normalisation has other units than the
            # robot's state.
            if not recipe.state_steps:
                low = np.where(finite, np.fmin(low, centre - half), low)
                high = np.where(finite, np.fmax(high, centre + half), high)
            centre, half, finite = (low + high) / 2, (high - low) / 2, np.ones(len(mean), bool)
            steps: Callable[[np.ndarray], np.ndarray] = np.asarray
        else:
            mean, std = centre, half / DEVIATIONS

            def steps(state: np.ndarray) -> np.ndarray:
                return np.stack([turned_state(recipe, row) for row in np.atleast_2d(state)])

        narrow = NARROW * np.maximum(1.0, np.abs(mean))
        std = np.where(std > 1e-6 * np.maximum(1.0, np.abs(mean)), std, narrow)
        half = np.where(half > 1e-6 * np.maximum(1.0, np.abs(mean)), half, DEVIATIONS * narrow)
        return cls(names, mean, std, centre, half, finite, steps, bool(spec.state.names))

    def mismatch(self, states: np.ndarray) -> np.ndarray:
        """Return the mean squared deviation of each number of the states from the training data, [D]; 0 for numbers
        without statistics. ``states`` has the shape [n, D].
        """
        squares = ((self.steps(states) - self.mean) / self.std) ** 2
        return np.where(self.known, squares.mean(0), 0.0)

    def apart(self, states: np.ndarray) -> np.ndarray:
        """Return how far the mean of each number of the states is from the middle of the number's training range, [D].
        The unit is half the width of the range, so a value above 1 is outside of the range.
        """
        distances = np.abs(self.steps(states).mean(0) - self.centre) / self.half
        return np.where(self.known, distances, 0.0)

    def findings(self, states: np.ndarray) -> list[Finding]:
        """Return a finding for each number of the states that looks wrong. ``states`` are finite, float [n, D] in
        robot units.
        """
        if not self.known.any() or not len(states):
            return []
        before = self.mismatch(states)
        tried = [self._exchanged(states, before), self._negated(states, before), self._scaled(states, before)]
        explanations = [each for each in tried if each is not None]
        best = min(explanations, key=lambda each: each[0], default=None)
        results = [] if best is None else best[1]
        explained = set() if best is None else best[2]
        return results + self._outside(states, explained)

    def undecided(self) -> list[Finding]:
        """Return the findings about the state that the training data cannot decide, for example because two joints have
        the same statistics.
        """
        if not self.known.all():
            names = [name for name, known in zip(self.names, self.known, strict=True) if not known]
            text = f"the bundle has no statistics of {', '.join(names[:8])}{' ...' * (len(names) > 8)}"
            return [Finding("state", CANNOT_TELL, "no statistics", text)]
        results = []
        alike = [
            f"{self.names[i]} and {self.names[j]}"
            for i in range(len(self.mean))
            for j in range(i)
            if self._gain(i, j) < GAIN
        ]
        if alike:
            results.append(
                Finding(
                    "state",
                    CANNOT_TELL,
                    "alike",
                    f"cannot decide whether {', '.join(alike[:6])}{' ...' * (len(alike) > 6)} are exchanged: their"
                    " values were alike in training",
                )
            )
        turned = [
            n for n, m, s in zip(self.names, self.mean, self.std, strict=True) if 4 * (m / s) ** 2 < GAIN
        ]
        if turned:
            shown = ", ".join(turned[:8]) + " ..." * (len(turned) > 8)
            have = "have" if turned[1:] else "has"
            text = (
                f"cannot decide whether {shown} {have} the right sign: the values were about zero in training"
            )
            results.append(Finding("state", CANNOT_TELL, "alike", text))
        return results

    def _gain(self, i: int, j: int) -> float:
        """Return the average increase of the squared deviations if the numbers ``i`` and ``j`` of a state are exchanged
        by mistake.
        """
        apart, (a, b) = (self.mean[i] - self.mean[j]) ** 2, (self.std[i] ** 2, self.std[j] ** 2)
        return float((apart + a) / b + (apart + b) / a - 2)

    def _exchanged(
        self, states: np.ndarray, before: np.ndarray
    ) -> tuple[float, list[Finding], set[int]] | None:
        """Search the order of the state's numbers that fits the training data best.

        Args:
            states: The robot's states, [n, D].
            before: Mean squared deviation of each number in the present order, [D].

        Returns:
            The remaining deviation, the findings, and the positions that are explained. None if no other order is
            better by a margin.
        """
        size = len(before)
        if not 2 <= size <= MAX_JOINTS:
            return None
        cost = np.empty((size, size))  # cost[i, j]: deviation of the robot's number i in position j
        for i in range(size):
            full = np.repeat(states[:, i : i + 1], size, axis=1)
            cost[i] = self.mismatch(full)
        cost = np.where(
            self.known[:, None] & self.known[None], cost, np.where(np.eye(size, dtype=bool), 0.0, 1e6)
        )
        to, apart = assignment(cost), self.apart(states)  # to[i]: best position of the robot's number i
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
            f"{pairs}: {_deviations(new, moved)} from the training data in this order, {_deviations(own, moved)} as the"
            " robot sends them",
            f"the order of training ({', '.join(self.names)})" if self.named else "the order of training",
            "send the joints in the order of training",
        )
        return float(left), [finding], moved

    def _negated(
        self, states: np.ndarray, before: np.ndarray
    ) -> tuple[float, list[Finding], set[int]] | None:
        """Return an explanation if numbers of the state fit the training data with the opposite sign and not with their
        own sign. Arguments and result are those of :meth:`_exchanged`.
        """
        after = self.mismatch(-states)
        negated = self._better(states, before, after)
        if not negated:
            return None
        results = [
            Finding(
                f"state.{self.names[i]}",
                LOOKS_WRONG,
                "negated",
                f"{states[:, i].mean():.3g} on average; with the opposite sign it is {np.sqrt(after[i]):.2g} standard"
                f" deviations from the training data, and {np.sqrt(before[i]):.2g} as it is",
                self._wanted(i),
                "negate the value, or reverse the joint's direction in the driver",
            )
            for i in sorted(negated)
        ]
        total = float(sum(after[i] if i in negated else before[i] for i in range(len(before))))
        return total, results, negated

    def _scaled(self, states: np.ndarray, before: np.ndarray) -> tuple[float, list[Finding], set[int]] | None:
        """Return an explanation if numbers of the state fit the training data after a conversion to another unit.
        Arguments and result are those of :meth:`_exchanged`.
        """
        best: tuple[float, float, set[int]] | None = None
        for scale in SCALES:
            after = self.mismatch(states * scale)
            scaled = self._better(states, before, after)
            if scale < 1:
                # Any large number fits a position with values about zero after it is scaled down. At least one number
                # must therefore be as large as the other unit makes it.
                largest = PART / scale * (np.abs(self.centre) + self.half)
                scaled = scaled if any(np.abs(states[:, i]).mean() > largest[i] for i in scaled) else set()
            # A single number about zero may be a joint at its stop, so scaling up needs two numbers.
            elif len(scaled) < min(2, len(before)):
                continue
            if not scaled:
                continue
            # Compare likelihoods (twice the log density). A small scale squeezes many values into a position, so it
            # needs a better fit.
            unlikely = sum(after[i] - 2 * np.log(scale) for i in scaled) - sum(before[i] for i in scaled)
            if best is None or unlikely < best[0]:
                best = float(unlikely), scale, scaled
        if best is None:
            return None
        _, scale, scaled = best
        after = self.mismatch(states * scale)
        remaining = float(sum(after[i] if i in scaled else before[i] for i in range(len(before))))
        first, words = min(scaled), SCALES[scale]
        names = ", ".join(self.names[i] for i in sorted(scaled))
        value = float(states[:, first].mean())
        finding = Finding(
            f"state.{self.names[first]}" if len(scaled) == 1 else "state",
            LOOKS_WRONG,
            words.partition(",")[0].partition(" (")[0],
            f"{names}: as if in {words}: {value:.4g} on average in {self.names[first]}, which times {scale:.3g} is"
            f" {value * scale:.3g}",
            self._wanted(first),
            f"multiply by {scale:.6g} in `observe`, and divide the actions in `act` by it",
        )
        return remaining, [finding], scaled

    def _better(self, states: np.ndarray, before: np.ndarray, after: np.ndarray) -> set[int]:
        """Return the indices of the numbers that are outside of their training range now, and that fit the range
        clearly after a change.

        Args:
            states: The robot's states, [n, D].
            before: Mean squared deviation of each number before the change, [D].
            after: The same after the change, [D].
        """
        apart = self.apart(states)
        return {
            i
            for i in range(len(before))
            if apart[i] > 1 and before[i] - after[i] >= GAIN and after[i] <= min(FITS**2, LEFT * before[i])
        }

    def _outside(self, states: np.ndarray, explained: set[int]) -> list[Finding]:
        """Return a finding for each joint whose values never occurred in training.

        Args:
            states: The robot's states, [n, D].
            explained: Positions for which another finding already gives an explanation. They are left out.
        """
        mean, apart = self.steps(states).mean(0), self.apart(states)
        return [
            Finding(
                f"state.{self.names[i]}",
                WRONG if apart[i] > REFUSED else LOOKS_WRONG,
                "outside",
                f"{mean[i]:.4g} on average, {apart[i]:.3g} half ranges from the middle of the training data"
                + (", which a server rejects" if apart[i] > REFUSED else ""),
                self._wanted(i),
                "check the unit, the zero and the sensor; if the value is right, the policy was not trained for it",
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
    """Return the cycles of a permutation that have two or more elements. Element ``i`` moves to the position
    ``to[i]``.
    """
    rest, cycles = set(range(len(to))), []
    while rest:
        cycle = [min(rest)]
        while (following := to[cycle[-1]]) != cycle[0]:
            cycle.append(following)
        rest -= set(cycle)
        if len(cycle) > 1:
            cycles.append(cycle)
    return cycles


def assignment(cost: np.ndarray) -> list[int]:
    """Assign each row to a column of its own, so that the total cost is as small as possible. Return the column of each
    row.

    Rows are added one after another, each along the shortest path of exchanges with the earlier rows (Kuhn 1955, with
    Dijkstra's search over reduced costs).

    Args:
        cost: Cost of each row in each column, [n, n].
    """
    size = len(cost)
    # Prices of rows and of columns in the dual of the assignment problem.
    over, under = np.zeros(size), np.zeros(size)
    holder = np.full(size, -1)  # the row that is assigned to each column; -1 for none
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
    columns = [0] * size
    for column, at in enumerate(holder):
        columns[int(at)] = column
    return columns
