"""Solvers: what the outputs of a head mean, as data, and the one loop that every engine runs.

A head is asked several times (flow matching, diffusion) or once (regression). In all of them a step has the form

    x <- keep * x + gain * act(x, time_embedding, context)

with numbers that depend on the step alone: Euler keeps x and adds dt times a velocity, a single pass keeps nothing
and takes the output as it is. Diffusion adds a share of the actions that it estimates, cut at a bound, and some steps
add noise. The loop works on anything that can be added and multiplied by a number, so engines without torch use it
too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Protocol

from sinew_client.solver import FLOW, MOST_EARLIER, SINGLE, Array, NoiseLevels, Solver, Step, drawn

__all__ = ["FLOW", "MOST_EARLIER", "SINGLE", "Guidance", "NoiseLevels", "Solver", "Step", "drawn", "solve"]


class Guidance(Protocol):
    """Steers a solution: computes the output that a step uses, in place of ``act(x)``.

    ``act`` is the head at this step (its time embedding and context are bound), so ``torch.func.vjp(act, x)`` is the
    vector-Jacobian product that real-time chunking needs. An engine that is given a guidance runs without inference
    mode, whose tensors autograd refuses.

    An engine gives it a context that autograd takes, unless its attribute ``jacobian`` is False. It may have another,
    ``committed``, bool [B, H]: the rows whose time is the solver's end from the first step on. An engine then gives
    the head a time per row. And another, ``rows``, integers [n]: the context has n rows, over which the guidance asks
    ``act`` for ``x[rows]``; ``committed`` is of these then.
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
    """Return x [B, H, A] after all ``steps`` (of :meth:`Solver.steps`).

    noise: [B, H, A], where x begins; of a solver that draws more, [B, D, H, A] (:func:`sinew_client.solver.drawn`).
    act: (x, time_embedding) -> output [B, H, A]. time_embeddings: what the head takes from each step's time, in
    order; they may be computed lazily. after_step runs after each step: timing, cancellation.
    """
    x = drawn(noise, 0)
    earlier: list[Array] = []  # the x of the steps before, the newest first
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
