"""What steers a solution: real-time chunking, by which it continues the chunk that is being executed, and
classifier-free guidance, by which it follows an advantage.

Black, Galliker and Levine 2025 (arXiv 2506.07339), algorithm 1 and equations 2 to 5; the variant without the Jacobian
is LeRobot's; the ramp is Isaac-GR00T's; committed rows are Black, Ren, Equi and Levine 2025 (arXiv 2512.05964), for
policies that were trained on them. Written for any direction of time: with tau from 0 (noise) to 1 (actions),
tau = (t - start) / (end - start), and what a head gives is d x / d t. Arrays are those of the engine: torch's, or
numpy's where there is no torch; only the Jacobian needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from sinew.models.solvers import Guidance, Solver, Step
from sinew.processing.continuation import Continuation


def guidance_weight(tau: float, beta: float) -> float:
    """Return min(beta, (1 - tau) / tau * (tau^2 + (1 - tau)^2) / (1 - tau)^2); beta at tau = 0 (equation 2)."""
    if tau <= 0.0 or tau >= 1.0:
        return beta
    return min(beta, (tau**2 + (1 - tau) ** 2) / (tau * (1 - tau)))


class Inpainting:
    """Pulls the denoised actions towards a target, row by row.

    With ``x1 = x + (end - t) * act(x)`` and J = d x1 / d x, the output becomes
    ``act(x) + g / (end - start) * J^T [(target - x1) * weights]``.

    target, weights: [B, H, A]; rows of a batch do not touch each other.
    jacobian: False leaves J out, as LeRobot does: cheaper, and another direction.
    """

    def __init__(self, solver: Solver, target: Any, weights: Any, beta: float, jacobian: bool):
        self.solver, self.target, self.weights, self.beta = solver, target, weights, beta
        self.jacobian = jacobian

    def __call__(self, act: Callable[[Any], Any], x: Any, step: Step) -> Any:
        span = self.solver.end - self.solver.start
        g = guidance_weight((step.time - self.solver.start) / span, self.beta)
        if not self.jacobian:
            output = act(x)
            error = (self.target - self.solver.denoised(x, output, step.time)) * self.weights
            return output + (g / span) * error
        import torch

        with torch.enable_grad():
            at = x.detach().requires_grad_(True)
            output = act(at)
            denoised = self.solver.denoised(at, output, step.time)
            error = ((self.target - denoised) * self.weights).detach()
            (pull,) = torch.autograd.grad(denoised, at, error.to(denoised.dtype))  # J^T error, [B, H, A]
        return output.detach() + (g / span) * pull


class Ramp:
    """Multiplies the velocity of every number by ``strength`` [B, H, A]: frozen actions stay, the next ones move
    less.

    committed: bool [B, H], if the head was trained to know that the frozen actions are final.
    """

    jacobian = False

    def __init__(self, strength: Any, committed: Any = None):
        self.strength, self.committed = strength, committed

    def __call__(self, act: Callable[[Any], Any], x: Any, step: Step) -> Any:
        return act(x) * self.strength


class ClassifierFree:
    """Goes from the velocity of the prompt without an advantage by a multiple of the way to that of the prompt with it:
    ``v = v_without + scale * (v_with - v_without)`` (Ho and Salimans 2022, arXiv 2207.12598; for advantages Frans et
    al. 2025, arXiv 2505.23458, and pi*0.6, Amin et al. 2025, arXiv 2511.14759).

    scale: float32 [B], one for each request. place: turns an array into one of the engine's. The context has the B
    prompts with an advantage and behind them the B without. inner: steers what comes of it, as if a head had said it:
    real-time chunking then continues a chunk of the guided policy.
    """

    def __init__(self, scale: np.ndarray, place: Callable[[np.ndarray], Any], inner: Any = None):
        self.rows = place(np.tile(np.arange(len(scale)), 2))
        self.scale, self.inner = place(np.asarray(scale, np.float32)[:, None, None]), inner
        self.jacobian = inner is not None and getattr(inner, "jacobian", True)
        committed = getattr(inner, "committed", None)
        self.committed = None if committed is None else committed[self.rows]

    def __call__(self, act: Callable[[Any], Any], x: Any, step: Step) -> Any:
        def both(x: Any) -> Any:
            output, count = act(x[self.rows]), len(self.scale)
            without = output[count:]
            return without + self.scale * (output[:count] - without)

        return both(x) if self.inner is None else self.inner(both, x, step)


def guide(
    wanted: Sequence[Continuation], solver: Solver, noise: np.ndarray, place: Callable[[np.ndarray], Any]
) -> tuple[Guidance, np.ndarray]:
    """Return the guidance of requests of one kind and beta, and the start of their solution, float32 [B, H, A].

    noise: float32 [B, H, A], one [H, A] for each request, also where there is a single one. place: turns an array into
    one of the engine's. Raises ValueError for noise of another shape: a missing axis would be broadcast in silence.
    """
    kind, beta = wanted[0].kind, wanted[0].beta
    shape = (len(wanted), *wanted[0].target.shape)
    if noise.shape != shape:
        raise ValueError(
            f"noise: expected {list(shape)}, one [H, A] for each request, got {list(noise.shape)}"
        )
    weights = place(np.stack([each.weights for each in wanted]))
    if kind in ("ramp", "trained"):
        started = noise.copy()
        for row, each in zip(started, wanted, strict=True):
            known = each.weights[: each.overlap] < 1.0
            row[: each.overlap][known] = each.target[: each.overlap][known]
        return Ramp(weights, (weights == 0).all(-1) if kind == "trained" else None), started
    target = place(np.stack([each.target for each in wanted]))
    guided: Any = Inpainting(solver, target, weights, beta, kind == "guided")
    return guided, noise
