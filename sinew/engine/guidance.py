"""Guidances steer a solution. With real-time chunking, it continues the chunk that is being executed; with
classifier-free guidance, it follows an advantage.

Real-time chunking is Black, Galliker and Levine 2025 (arXiv 2506.07339), algorithm 1 and equations 2 to 5. The variant
without the Jacobian is LeRobot's; the ramp is Isaac-GR00T's; committed rows are Black, Ren, Equi and Levine 2025
(arXiv 2512.05964), for policies that were trained on them.

The code works for either direction of time: tau runs from 0 (noise) to 1 (actions),
tau = (t - start) / (end - start), and the head's output is d x / d t. Arrays are those of the engine: torch's, or
numpy's where there is no torch. Only the Jacobian needs torch.
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
    """The guidance that pulls the denoised actions towards a target, row by row.

    With ``x1 = x + (end - t) * act(x)`` and J = d x1 / d x, the output becomes
    ``act(x) + g / (end - start) * J^T [(target - x1) * weights]``.

    ``target`` and ``weights`` are [B, H, A]; rows of a batch do not affect each other. Without ``jacobian``, J is left
    out as LeRobot does, which is cheaper and pulls in another direction.
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
            # The result is the product of J^T and the error, [B, H, A].
            (pull,) = torch.autograd.grad(denoised, at, error.to(denoised.dtype))
        return output.detach() + (g / span) * pull


class Ramp:
    """The guidance that multiplies the velocity of every number by ``strength`` [B, H, A]: frozen actions stay, and
    the next actions move less.

    ``committed`` is bool [B, H], True for final actions, if the head was trained to know which actions are final; else
    None.
    """

    jacobian = False

    def __init__(self, strength: Any, committed: Any = None):
        self.strength, self.committed = strength, committed

    def __call__(self, act: Callable[[Any], Any], x: Any, step: Step) -> Any:
        return act(x) * self.strength


class ClassifierFree:
    """The guidance that extrapolates from the velocity of the prompt without an advantage to the velocity of the prompt
    with an advantage: ``v = v_without + scale * (v_with - v_without)`` (Ho and Salimans 2022, arXiv 2207.12598; for
    advantages Frans et al. 2025, arXiv 2505.23458, and pi*0.6, Amin et al. 2025, arXiv 2511.14759).

    ``scale`` is float32 [B], one number for each request; ``place`` turns an array into one of the engine's. The
    context has the B prompts with an advantage, followed by the B prompts without. ``inner`` is a guidance that takes
    the velocity ``v`` as the head's output: real-time chunking then continues a chunk of the guided policy.
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

    ``noise`` is float32 [B, H, A], one [H, A] for each request, also for a single request. ``place`` turns an array
    into one of the engine's. Raises ValueError for noise of another shape: a missing axis would be broadcast silently.
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
            fixed = each.weights[: each.overlap] < 1.0
            row[: each.overlap][fixed] = each.target[: each.overlap][fixed]
        return Ramp(weights, (weights == 0).all(-1) if kind == "trained" else None), started
    target = place(np.stack([each.target for each in wanted]))
    guided: Any = Inpainting(solver, target, weights, beta, kind == "guided")
    return guided, noise
