"""Solvers: a description of what a head's output means, and the loop over solver steps that all engines share.

A head runs several times (flow matching, diffusion) or once (regression). Every solver step has the form

    x <- keep * x + gain * act(x, time_embedding, context)

The numbers ``keep`` and ``gain`` depend only on the step. An Euler step keeps x and adds dt times a velocity. A
single-pass step discards x and takes the output as the chunk. A diffusion step adds a share of the estimated actions,
which are clipped to a bound, and some diffusion steps add noise. The loop works on any type that supports addition and
multiplication by a number, so engines without PyTorch use the loop too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Protocol

from sinew_client.solver import FLOW, MOST_EARLIER, SINGLE, Array, NoiseLevels, Solver, Step, drawn

__all__ = ["FLOW", "MOST_EARLIER", "SINGLE", "Guidance", "NoiseLevels", "Solver", "Step", "drawn", "solve"]


class Guidance(Protocol):
    """A function that steers the solver: at each step, it computes the output that replaces the head's output
    ``act(x)``.

    ``act`` is the head at this step, with its time embedding and context already bound. So
    ``torch.func.vjp(act, x)`` is the vector-Jacobian product that real-time chunking needs. An engine with a
    guidance runs without inference mode, because autograd rejects tensors from inference mode.

    A guidance may have these optional attributes:

    Attributes:
        jacobian: False if the guidance does not differentiate ``act``. Otherwise the engine passes a context
            that autograd accepts.
        committed: bool [B, H], True for the actions whose time is the solver's end from the first step on.
            The engine then passes one time per action to the head.
        rows: int [n], the batch rows of ``x`` for which the guidance calls ``act``, as ``act(x[rows])``. The
            context and ``committed`` then have n rows.
        part: A method that takes a slice, and returns the guidance of these observations. An engine that computes
            a batch in parts calls it.
    """

    def __call__(self, act: Callable[[Any], Any], x: Any, step: Step) -> Any: ...


def solve(
    act: Callable[[Any, Any], Any],
    noise: Array,
    steps: Sequence[Step],
    time_embeddings: Iterable[Any],
    after_step: Callable[[], None] | None = None,
    guidance: Guidance | None = None,
) -> Array:
    """Run all solver steps.

    Args:
        act: The head. It is called with x and a time embedding, and returns the output [B, H, A].
        noise: [B, H, A], the start of x. A solver that needs more noise takes [B, D, H, A]
            (:func:`sinew_client.solver.drawn`).
        steps: The steps, from :meth:`Solver.steps`.
        time_embeddings: The time embedding of each step, in order. The iterable may compute them lazily.
        after_step: Runs after each step, for example to measure time or to cancel the solution.
        guidance: Replaces the output of the head at each step.

    Returns:
        x [B, H, A] after all steps.
    """
    x = drawn(noise, 0)
    earlier: list[Array] = []  # the values of x at earlier steps, the newest first
    for step, time_embedding in zip(steps, time_embeddings, strict=True):
        if guidance is None:
            output = act(x, time_embedding)
        else:
            output = guidance(partial(_at, act, time_embedding), x, step)
        moved = step.advance(x, output, noise, earlier)
        x, earlier = moved, [x, *earlier[: MOST_EARLIER - 1]]
        if after_step:
            after_step()
    return x


def _at(act: Callable[[Any, Any], Any], time_embedding: Any, x: Any) -> Any:
    return act(x, time_embedding)
