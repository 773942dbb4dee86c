"""Guidances: functions that change the head's output at each solver step, to steer the resulting chunk.

With real-time chunking, the solution continues the chunk that the robot is executing. With classifier-free guidance,
the solution follows an advantage.

Sources: real-time chunking is algorithm 1 and equations 2 to 5 in Black, Galliker and Levine 2025 (arXiv 2506.07339).
The variant without the Jacobian is from LeRobot. The ramp is from Isaac-GR00T. Training with an action prefix is from
Black, Ren, Equi and Levine 2025 (arXiv 2512.05964).

The code works for either direction of time: tau = (t - start) / (end - start) runs from 0 (noise) to 1 (actions), and
the head's output is d x / d t. Arrays are PyTorch tensors, or numpy arrays for engines without PyTorch. Only the
Jacobian needs PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from sinew.models.solvers import Guidance, Solver, Step
from sinew.processing.continuation import Continuation


def guidance_weight(tau: float, beta: float) -> float:
    """Return the weight of a guidance (equation 2 of arXiv 2506.07339).

    The weight is min(beta, (1 - tau) / tau * (tau^2 + (1 - tau)^2) / (1 - tau)^2), and beta at tau = 0.

    Args:
        tau: Time of the solver, from 0 (noise) to 1 (actions).
        beta: The largest weight.
    """
    if tau <= 0.0 or tau >= 1.0:
        return beta
    return min(beta, (tau**2 + (1 - tau) ** 2) / (tau * (1 - tau)))


class Inpainting:
    """The guidance that pulls the denoised actions towards a target, such as the actions of the running chunk.

    With ``x1 = x + (end - t) * act(x)`` and J = d x1 / d x, the output becomes ``act(x) + g / (end - start) * J^T
    [(target - x1) * weights]``, where g is :func:`guidance_weight`. Observations of a batch do not affect each other.

    Args:
        solver: The policy's solver.
        target: The actions to continue, [B, H, A].
        weights: The weight of each number of the target, [B, H, A].
        beta: The largest guidance weight.
        jacobian: False leaves J out, as LeRobot does. This is cheaper, but changes the output in another direction.
    """

    def __init__(self, solver: Solver, target: Any, weights: Any, beta: float, jacobian: bool):
        self.solver, self.target, self.weights, self.beta = solver, target, weights, beta
        self.jacobian = jacobian

    def part(self, rows: slice) -> Inpainting:
        return Inpainting(self.solver, self.target[rows], self.weights[rows], self.beta, self.jacobian)

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
            # ``pull`` is the product of J^T (the transposed Jacobian) and the error, [B, H, A].
            (pull,) = torch.autograd.grad(denoised, at, error.to(denoised.dtype))
        return output.detach() + (g / span) * pull


class Ramp:
    """The guidance that multiplies the velocity of every number by a factor from ``strength``.

    Actions with strength 0 do not change, and the next actions change less than without the guidance.

    Args:
        strength: Factors of the velocity, [B, H, A].
        committed: bool [B, H], True for final actions, if the head was trained with an action prefix. Otherwise None.
    """

    jacobian = False

    def __init__(self, strength: Any, committed: Any = None):
        self.strength, self.committed = strength, committed

    def part(self, rows: slice) -> Ramp:
        return Ramp(self.strength[rows], None if self.committed is None else self.committed[rows])

    def __call__(self, act: Callable[[Any], Any], x: Any, step: Step) -> Any:
        return act(x) * self.strength


class ClassifierFree:
    """The guidance that combines the velocities of a prompt with and without an advantage.

    The velocity is ``v = v_without + scale * (v_with - v_without)``. Sources: Ho and Salimans 2022 (arXiv 2207.12598),
    and for advantages Frans et al. 2025 (arXiv 2505.23458) and pi*0.6, Amin et al. 2025 (arXiv 2511.14759). The context
    contains the B prompts with an advantage, followed by the B prompts without an advantage.

    Args:
        scale: One factor for each request, float32 [B].
        place: Converts a numpy array to the engine's array type.
        inner: A guidance that uses the velocity ``v`` as the head's output. Real-time chunking then continues a chunk
            of the guided policy.
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
    """Return the guidance for a batch of requests, and the noise from which the solver starts, float32 [B, H, A].

    Args:
        wanted: The continuation (the running chunk and its method) of each request. All have the same method and beta.
        solver: The policy's solver.
        noise: float32 [B, H, A], also for a single request.
        place: Converts a numpy array to the engine's array type.

    Raises:
        ValueError: The noise has another shape. A missing axis would broadcast silently.
    """
    kind, beta = wanted[0].kind, wanted[0].beta
    shape = (len(wanted), *wanted[0].target.shape)
    if noise.shape != shape:
        raise ValueError(
            f"noise: expected shape {list(shape)}, which is one [H, A] for each request, got {list(noise.shape)}"
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
