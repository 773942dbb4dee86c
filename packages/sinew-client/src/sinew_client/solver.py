"""The solver of an action head, described by numbers, so that a bundle can store it.

A solver turns noise x into actions in several steps. Each step evaluates the head and computes
``x <- keep * x + gain * output``. Some solvers add ``weight * estimate``, ``fresh * noise``, or weights times the x of
earlier steps. The factors depend only on the number of the step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Sequence, TypeVar

import numpy as np

Array = TypeVar("Array")  # a torch tensor, or an array of an engine that does not use torch

LARGEST_BETA = 0.999  # upper limit of each beta in the schedule "squaredcos_cap_v2" of diffusers
# This is the smallest beta of the schedule "linear". With a smaller beta, the noise would be 0 in single precision, and
# the solver divides by the noise.
LEAST_BETA = 2.0**-24
SMALLEST_VARIANCE = 1e-20  # lower limit of the variance of the noise that DDPM adds, as in diffusers
MAX_LEVELS = 100_000
MOST_EARLIER = 3  # largest number of weights in ``Step.earlier``


class Estimate(NamedTuple):
    """The estimate of the final actions in a step of a diffusion solver.

    The estimate is ``(x - sigma * output) / alpha``, or the output itself if ``alpha`` is 0.

    Attributes:
        weight: Factor of the estimate in the step.
        sigma: Standard deviation of the noise in x.
        alpha: Factor of the actions in x.
        clip: Largest magnitude of the estimate.
    """

    weight: float
    sigma: float = 0.0
    alpha: float = 0.0
    clip: float = math.inf

    def of(self, x: Any, output: Any) -> Any:
        """Compute the estimate from ``x`` and the output of the head, which have the same shape."""
        estimate = (x - self.sigma * output) / self.alpha if self.alpha else output
        return estimate if self.clip == math.inf else estimate.clip(-self.clip, self.clip)


class Step(NamedTuple):
    """One step of a solver: evaluate the head at ``time``, then compute ``x <- keep * x + gain * output``.

    Attributes:
        time: Time input of the head.
        keep: Factor of x.
        gain: Factor of the head's output.
        estimate: If set, the step also adds this estimate of the actions, times its ``weight``.
        fresh: Factor of new noise that the step adds; 0 for none.
        draw: Number of this noise. Noise 0 is the start of the solver.
        earlier: The step also adds the x of earlier steps with these weights, newest first.
    """

    time: float
    keep: float
    gain: float
    estimate: Estimate | None = None
    fresh: float = 0.0
    draw: int = 0
    earlier: tuple[float, ...] = ()

    def advance(self, x: Array, output: Array, noise: Any = None, earlier: Sequence[Array] = ()) -> Array:
        """Compute the x of the next step.

        Args:
            x: The x of this step, [B, H, A].
            output: Output of the head for this x, [B, H, A].
            noise: All noises of the solution (:func:`drawn`); not used if ``fresh`` is 0.
            earlier: The x of the earlier steps, newest first, at least one for each weight in ``earlier``.

        Returns:
            The next x, [B, H, A].
        """
        parts: list[Any] = []
        product: Any = output
        if self.keep != 0.0:
            parts.append(x if self.keep == 1.0 else self.keep * x)  # type: ignore[operator]
        if self.gain != 0.0 or self.estimate is None:
            parts.append(product if self.gain == 1.0 else self.gain * product)
        if self.estimate is not None:
            parts.append(self.estimate.weight * self.estimate.of(x, product))
        if self.fresh != 0.0:
            parts.append(self.fresh * drawn(noise, self.draw))
        parts += [weight * before for weight, before in zip(self.earlier, earlier) if weight != 0.0]
        moved = parts[0]
        for part in parts[1:]:
            moved = moved + part
        return moved


def drawn(noise: Any, index: int) -> Any:
    """Select the noise with number ``index``, [B, H, A], from D noises, [B, D, H, A]. If there is only one noise,
    ``noise`` may be [B, H, A] itself.
    """
    return noise[:, index] if noise.ndim == 4 else noise


@dataclass(frozen=True)
class NoiseLevels:
    """The noise levels of a diffusion model, for the solvers DDIM and DDPM of diffusers.

    Attributes:
        count: Number of levels in training.
        betas: "squaredcos_cap_v2", or "linear" from ``first_beta`` to ``last_beta``.
        first_beta: First beta of "linear".
        last_beta: Last beta of "linear".
        predicts: Output of the head: "epsilon" (the noise in x) or "sample" (the actions).
        clip: Largest magnitude of the estimated actions in model units; 0 sets no limit.
        fresh: True adds new noise in each step except the last (DDPM). False is DDIM with eta 0.
        spacing: The levels that a solution in n steps visits, from the last level down. "leading" takes the first
            level of each group of count // n levels. "even" takes every s-th level, with the smallest s that gives n
            levels, and the middle level for n = 1 (OpenAI's guided-diffusion, "ddimN"). With "even", some n are
            impossible.

    Raises:
        ValueError: A number is out of its range.
    """

    count: int
    betas: Literal["squaredcos_cap_v2", "linear"] = "squaredcos_cap_v2"
    first_beta: float = 0.0001
    last_beta: float = 0.02
    predicts: Literal["epsilon", "sample"] = "epsilon"
    clip: float = 0.0
    fresh: bool = False
    spacing: Literal["leading", "even"] = "leading"

    def __post_init__(self) -> None:
        if not 1 <= self.count <= MAX_LEVELS:
            raise ValueError(f"levels: count: expected 1 to {MAX_LEVELS}, got {self.count}")
        if not (LEAST_BETA <= self.first_beta <= self.last_beta < 1.0):
            raise ValueError(
                f"levels: expected first_beta up to last_beta from {LEAST_BETA:.3g} to below 1, got"
                f" {self.first_beta}, {self.last_beta}"
            )
        if not (self.clip >= 0.0 and math.isfinite(self.clip)):
            raise ValueError(f"levels: clip: expected 0 or more, got {self.clip}")

    def alphas(self) -> np.ndarray:
        """Compute the share of the actions in the variance of x at each level (``alphas_cumprod`` of diffusers).

        As in diffusers, the cumulative products of 1 - beta are computed in double precision and stored in single
        precision.

        Returns:
            The shares, float32 [count], from the largest to the smallest.
        """
        if self.betas == "linear":
            betas = np.linspace(self.first_beta, self.last_beta, self.count, dtype=np.float32)
        else:

            def kept(part: float) -> float:
                return math.cos((part + 0.008) / 1.008 * math.pi / 2) ** 2

            n = self.count
            ratios = [min(1 - kept((i + 1) / n) / kept(i / n), LARGEST_BETA) for i in range(n)]
            betas = np.array(ratios, np.float32)
        return np.cumprod((np.float32(1) - betas).astype(np.float64)).astype(np.float32)

    def possible(self, count: int) -> tuple[int, ...]:
        """Return (count,) if a solution in ``count`` steps is possible, else the nearest possible numbers of steps."""
        if count > self.count:
            return (self.count,)
        stride = -(-self.count // count)
        fewer = -(-self.count // stride)
        if self.spacing == "leading" or count == fewer:
            return (count,)
        return fewer, -(-self.count // (stride - 1))

    def visited(self, count: int) -> range:
        """Return the noise levels of a solution in ``count`` steps, from the highest to the lowest.

        Raises:
            ValueError: A solution in this number of steps is impossible.
        """
        if count not in (near := self.possible(count)):
            raise ValueError(f"solver_steps: expected {' or '.join(map(str, near))}, got {count}")
        if self.spacing == "leading":
            stride = self.count // count
            return range(0, count * stride, stride)[::-1]
        if count == 1:
            return range(self.count // 2, self.count // 2 + 1)
        return range(0, self.count, -(-self.count // count))[::-1]

    def steps(self, count: int) -> list[Step]:
        """Return the steps of a solution in ``count`` steps, by the formulas of diffusers' DDIM or DDPM."""
        levels, alphas, solution = self.visited(count), self.alphas(), []
        one = np.float32(1)
        for k, level in enumerate(levels):
            a, b = alphas[level], alphas[levels[k + 1]] if k + 1 < count else one
            sigma, alpha = float(np.sqrt(one - a)), float(np.sqrt(a))
            of_noise, clip = self.predicts == "epsilon", self.clip or math.inf
            if self.fresh:
                ratio = a / b
                weight = float(np.sqrt(b) * (one - ratio) / (one - a))
                keep = float(np.sqrt(ratio) * (one - b) / (one - a))
                variance = max(float((one - b) / (one - a) * (one - ratio)), SMALLEST_VARIANCE)
                gain, fresh = 0.0, math.sqrt(variance) if k + 1 < count else 0.0
            else:
                weight, fresh = float(np.sqrt(b)), 0.0
                spread = float(np.sqrt(one - b))
                keep, gain = (0.0, spread) if of_noise else (spread / sigma, -spread * alpha / sigma)
            estimate = Estimate(weight, sigma, alpha, clip) if of_noise else Estimate(weight, clip=clip)
            solution.append(Step(float(level), keep, gain, estimate, fresh, k + 1 if fresh else 0))
        return solution


@dataclass(frozen=True)
class Solver:
    """The method by which an action head turns noise into actions. It is part of a policy's specification.

    Attributes:
        kind: "euler" integrates a velocity from ``start`` to ``end`` in equal steps. "rk4" does so by the classic
            Runge-Kutta method. Each of its intervals takes four evaluations, and each evaluation counts as a step.
            "single" takes the output of one evaluation as the actions. "renoise" takes each output as the actions and
            mixes them with the initial noise, whose share falls from ``start`` to ``end``. "diffusion" is DDIM or DDPM
            with ``levels``. "table" has its steps in ``table``.
        start: Time of pure noise: 1 in openpi and LeRobot, 0 in GR00T and Evo-1.
        end: Time of the actions: 0 in openpi and LeRobot, 1 in GR00T and Evo-1.
        noise: x at the start: "normal" (standard), "uniform" in [-1, 1], or "zeros".
        table: The steps of "table", as rows (time, keep, gain).
        levels: The noise levels of "diffusion".

    Raises:
        ValueError: The values do not fit ``kind``.

    Example:
        >>> [step.time for step in Solver().steps(4)]
        [1.0, 0.75, 0.5, 0.25]
    """

    kind: Literal["euler", "rk4", "single", "renoise", "diffusion", "table"] = "euler"
    start: float = 1.0
    end: float = 0.0
    noise: Literal["normal", "uniform", "exponential", "zeros"] = "normal"
    table: tuple[tuple[float, float, float], ...] = ()
    levels: NoiseLevels | None = None

    def __post_init__(self) -> None:
        if self.kind in ("euler", "rk4", "renoise") and self.start == self.end:
            raise ValueError(f"solver: expected start and end to differ, got {self.start} twice")
        if (self.kind == "table") != bool(self.table):
            raise ValueError(
                f"solver: expected the field table for kind 'table' only, got kind {self.kind!r}"
                f" {'with' if self.table else 'without'} a table"
            )
        if (self.kind == "diffusion") != (self.levels is not None):
            raise ValueError(
                f"solver: expected the field levels for kind 'diffusion' only, got kind {self.kind!r}"
                f" {'without' if self.levels is None else 'with'} levels"
            )

    @property
    def fixed_steps(self) -> int | None:
        """The only possible number of steps; None if a request may choose the number."""
        fixed: dict[str, int] = {"single": 1, "table": len(self.table)}
        return fixed.get(self.kind)

    @property
    def most_steps(self) -> int | None:
        """The largest possible number of steps; None without a limit."""
        return self.levels.count if self.levels is not None else self.fixed_steps

    def possible(self, count: int) -> tuple[int, ...]:
        """Return (count,) if a solution in ``count`` steps is possible, else the nearest possible numbers of steps."""
        if self.levels is not None:
            return self.levels.possible(count)
        if self.fixed_steps is not None:
            return (self.fixed_steps,)
        if self.kind == "rk4" and count % 4:
            below = count - count % 4
            return (below, below + 4) if below else (4,)
        return (count,)

    def draws(self, count: int) -> int:
        """Return how many noises a solution in ``count`` steps needs, including the noise at the start."""
        return count if self.levels is not None and self.levels.fresh else 1

    def steps(self, count: int) -> list[Step]:
        """Return the steps of a solution in ``count`` steps.

        Raises:
            ValueError: A solution in this number of steps is impossible.
        """
        if count < 1 or self.fixed_steps not in (None, count):
            raise ValueError(f"solver_steps: expected {self.fixed_steps or '1 or more'}, got {count}")
        if self.most_steps is not None and count > self.most_steps:
            raise ValueError(f"solver_steps: expected at most {self.most_steps}, got {count}")
        if count not in (near := self.possible(count)):
            raise ValueError(f"solver_steps: expected {' or '.join(map(str, near))}, got {count}")
        if self.levels is not None:
            return self.levels.steps(count)
        if self.kind == "single":
            return [Step(self.start, 0.0, 1.0)]
        if self.kind == "table":
            return [Step(*row) for row in self.table]
        span = self.end - self.start
        if self.kind == "rk4":
            return [step for k in range(count // 4) for step in self._interval(k, count // 4)]
        # Compute k * span / n in this order. GR00T and Evo-1 derive integer time buckets from exactly this quotient,
        # and k * (span / n) would be rounded differently.
        times = [self.start + k * span / count for k in range(count)]
        if self.kind == "euler":
            return [Step(time, 1.0, span / count) for time in times]
        # `shares` is the share of the noise in x after each step.
        shares = [(time - self.end) / -span for time in [*times[1:], self.end]]
        return [Step(time, 0.0, 1.0 - part, fresh=part) for time, part in zip(times, shares)]

    def _interval(self, index: int, count: int) -> list[Step]:
        """Return the four evaluations of one interval of the classic Runge-Kutta method (RK4).

        The textbook formula is ``x0 + h / 6 * (k1 + 2 k2 + 2 k3 + k4)``. The first three velocities can be computed
        from the points ``y1 = x0 + h / 2 * k1``, ``y2 = x0 + h / 2 * k2`` and ``y3 = x0 + h * k3``. So the result is
        ``(y3 + 2 y2 + y1 - x0) / 3 + h / 6 * k4``, and the solver does not have to store velocities.

        Args:
            index: Number of the interval, from 0.
            count: Number of intervals of the solution.
        """
        h = (self.end - self.start) / count
        time = self.start + index * (self.end - self.start) / count
        return [
            Step(time, 1.0, h / 2),
            Step(time + h / 2, 0.0, h / 2, earlier=(1.0,)),
            Step(time + h / 2, 0.0, h, earlier=(0.0, 1.0)),
            Step(time + h, 1 / 3, h / 6, earlier=(2 / 3, 1 / 3, -1 / 3)),
        ]

    def times(self, count: int) -> list[float]:
        """Return the time inputs of the head for a solution in ``count`` steps."""
        return [step.time for step in self.steps(count)]

    def denoised(self, x: Any, output: Any, time: float) -> Any:
        """Estimate the final actions in the middle of a solution, by one Euler step to the end. Guidance needs this.

        Args:
            x: The present x.
            output: Output of the head at ``time``.
            time: Time input of the head.

        Returns:
            The estimate, in the shape of ``x``.

        Raises:
            ValueError: This kind of solver has no such estimate.
        """
        if self.kind in ("table", "diffusion", "rk4"):
            raise ValueError(f"solver: kind {self.kind} has no estimate of the denoised actions")
        return x + (self.end - time) * output if self.kind == "euler" else output


FLOW = Solver()  # the convention of openpi and LeRobot: t = 1 is noise, and t = 0 are the actions
SINGLE = Solver("single", noise="zeros")
