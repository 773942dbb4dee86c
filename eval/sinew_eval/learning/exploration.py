"""Sample actions with their log-probabilities, which policy gradients need from an engine.

A flow policy explores by noise at the steps of its solver. Each step is then a Gaussian, and a chunk is a chain of K
of them, whose joint log-probability is the sum. s goes from 1 (noise) to 0 (actions) in steps of d = 1 / K, and u =
dx / ds is the velocity:

* ``flow-sde``: stochastic differential equation with the marginals of the flow, x <- x - d (u + sigma^2 / (2 s) (x +
  (1 - s) u)) with noise of deviation sigma sqrt(d), sigma = level sqrt(s / (1 - s)). At s = 1, 1 - s is that of the
  next step (Flow-GRPO, Liu et al. 2025, arXiv 2505.05470; pi_RL, Chen et al. 2025, arXiv 2510.25889).
* ``flow-cps``: noise that keeps the share of noise of the schedule (Wang and Yu 2025, arXiv 2509.05952).
* ``flow-noise``: Euler steps with noise of deviation ``level`` (ReinFlow, Zhang et al. 2025, arXiv 2505.22094, whose
  network for the deviation is in no bundle).

An autoregressive policy samples tokens from its own scores. A diffusion policy that already draws noise (DDPM) needs
no exploration, because its steps are Gaussians (DPPO, Ren et al. 2024, arXiv 2409.00588).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
from sinew.core import SinewError
from sinew.engine.example import Inputs
from sinew.processing import ModelInputs
from sinew_client.solver import Solver, Step

if TYPE_CHECKING:
    from torch import Tensor

Kind = Literal["flow-sde", "flow-cps", "flow-noise", "tokens"]
HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)


@dataclass(frozen=True)
class Exploration:
    """How actions are sampled for learning.

    Attributes:
        kind: A kind for flow policies, or "tokens" for autoregressive ones.
        level: Level of a flow's noise, above 0 (for flow-cps at most 1; for flow-noise in model units); the
            temperature of tokens.
        step: The only step with noise, as in pi_RL's mixed sampling; None adds noise in all steps.

    Raises:
        SinewError: A value is out of its range.
    """

    kind: Kind
    level: float
    step: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise SinewError(f"exploration: expected one of {', '.join(get_args(Kind))}, got {self.kind!r}")
        if not (0.0 < self.level < math.inf) or (self.kind == "flow-cps" and self.level > 1.0):
            most = ", at most 1" if self.kind == "flow-cps" else ""
            raise SinewError(f"exploration: level: expected a number above 0{most}, got {self.level:g}")
        if self.step is not None and (self.kind == "tokens" or self.step < 0):
            raise SinewError(
                f"exploration: step: expected a step of a flow from 0, got {self.step} with kind {self.kind}"
            )

    def of_flow(self, s: float, d: float) -> tuple[float, float, float]:
        """Return the coefficients of a solver step with noise.

        Args:
            s: Share of noise before the step.
            d: Decrease of this share in the step.

        Returns:
            Factor of x, factor of the velocity dx / ds, and deviation of the noise.
        """
        if self.kind == "flow-noise":
            return 1.0, -d, self.level
        if self.kind == "flow-cps":
            left = s - d
            kept, fresh = (
                left * math.cos(0.5 * math.pi * self.level),
                left * math.sin(0.5 * math.pi * self.level),
            )
            return 1.0 - left + kept, (1.0 - s) * kept - s * (1.0 - left), fresh if left > 0 else 0.0
        variance = self.level**2 * s / (1.0 - (s if s < 1.0 else s - d))
        drift = variance * d / (2 * s)
        return 1.0 - drift, -d - drift * (1.0 - s), math.sqrt(variance * d)


@dataclass(frozen=True)
class ExploringSolver(Solver):
    """A solver that integrates a velocity, with the noise of an exploration. Noise k + 1 belongs to step k.

    Attributes:
        exploration: Kind and level of the noise.
    """

    exploration: Exploration = Exploration("flow-sde", 0.5)

    def draws(self, count: int) -> int:
        return count + 1

    def steps(self, count: int) -> list[Step]:
        only = self.exploration.step
        if only is not None and only >= count:
            raise ValueError(f"exploration: step: expected one below {count}, got {only}")
        result = []
        for k, step in enumerate(super().steps(count)):
            if only in (None, k):
                keep, gain, fresh = self.exploration.of_flow(1.0 - k / count, 1.0 / count)
                step = Step(
                    step.time, keep, gain * (self.start - self.end), None, fresh, k + 1 if fresh else 0
                )
            result.append(step)
        return result


def exploring(solver: Solver, exploration: Exploration | None) -> Solver:
    """Return the solver of a policy that explores.

    Args:
        solver: Solver of the policy.
        exploration: The exploration. None for a policy that already draws noise in its steps.

    Returns:
        The solver with noise.

    Raises:
        SinewError: The exploration does not fit the solver, or no noise would be drawn.
    """
    if exploration is None:
        if solver.draws(2) == 1:
            raise SinewError(
                "exploration: expected a kind of noise, because this policy draws none between its steps; got None"
            )
        return solver
    if exploration.kind == "tokens":
        return solver
    if solver.kind != "euler":
        raise SinewError(
            "exploration: expected kind tokens for an autoregressive policy, or a kind of noise for a flow policy,"
            f" got {exploration.kind} of solver {solver.kind}"
        )
    return ExploringSolver(solver.kind, solver.start, solver.end, solver.noise, exploration=exploration)


def log_density(moved: Any, mean: Any, deviation: float) -> Any:
    """Return the logarithm of the normal density of each number in ``moved``, for a normal distribution with this mean
    and standard deviation.
    """
    return -0.5 * ((moved - mean) / deviation) ** 2 - (math.log(deviation) + HALF_LOG_2PI)


def _mean(step: Step, x: Any, output: Any) -> Any:
    return step._replace(fresh=0.0).advance(x, output)


class DenoisingChain:
    """Records the solver steps of a chunk: the value before each step, and the mean of the value after it, [B, H, A]
    each. It is used as a guidance that changes nothing.

    Attributes:
        begins: Value before each step.
        steps: The solver steps.
    """

    jacobian = False

    def __init__(self) -> None:
        self.begins: list[np.ndarray] = []
        self.steps: list[Step] = []
        self._means: list[np.ndarray] = []

    def __call__(self, act: Callable[[Any], Any], x: Any, step: Step) -> Any:
        output = act(x)
        self.begins.append(x.cpu().numpy().copy())
        self._means.append(_mean(step, x, output).cpu().numpy().copy())
        self.steps.append(step)
        return output

    def ended(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the recorded chain.

        Args:
            x: The solution, [B, H, A].

        Returns:
            The chain, float32 [B, K + 1, H, A], and the log-probabilities, float32 [B, K, H, A], which are 0 for a
            step without noise.
        """
        chain = np.stack([*self.begins, x], axis=1)
        parts = [
            log_density(chain[:, k + 1], mean, step.fresh) if step.draw else np.zeros_like(mean)
            for k, (step, mean) in enumerate(zip(self.steps, self._means, strict=True))
        ]
        return chain, np.stack(parts, axis=1).astype(np.float32)


class TokenChooser:
    """Samples tokens from the scores of a head, or repeats given tokens. It records tokens and log-probabilities.

    Args:
        numbers: Uniform random numbers in [0, 1), one per token, float64 [B, longest]. None with ``fixed_tokens``.
        fixed_tokens: Tokens to repeat, int64 [B, n]. None to sample.
        temperature: Divisor of the scores.
        allowed: First and last allowed token id. None for all.
    """

    def __init__(
        self,
        numbers: np.ndarray | None,
        fixed_tokens: Tensor | None,
        temperature: float,
        allowed: tuple[int, int] | None,
    ):
        self._numbers, self._fixed_tokens = numbers, fixed_tokens
        self._temperature, self._allowed = temperature, allowed
        self.tokens: list[Tensor] = []
        self.log_probs: list[Tensor] = []

    def __call__(self, logits: Tensor) -> Tensor:
        """Choose the next token.

        Args:
            logits: Scores, [B, 1, vocabulary].

        Returns:
            Token ids, int64 [B].
        """
        import torch

        first, last = self._allowed or (0, logits.shape[-1] - 1)
        scores = (logits[:, 0, first : last + 1].float() / self._temperature).log_softmax(dim=-1)
        at = len(self.tokens)
        if self._fixed_tokens is not None:
            # Clamp the tokens to the valid range, because the positions after the end token can contain any number.
            index = (self._fixed_tokens[:, at] - first).clamp(0, last - first)
        else:
            assert self._numbers is not None
            below = scores.double().exp().cumsum(dim=-1)
            drawn = torch.from_numpy(self._numbers[:, at]).to(below.device)[:, None] * below[:, -1:]
            index = torch.searchsorted(below, drawn, right=True)[:, 0].clamp(max=last - first)
        self.log_probs.append(scores.gather(1, index[:, None])[:, 0])
        self.tokens.append(index + first)
        return self.tokens[-1]

    def said(self, end: int) -> tuple[Tensor, Tensor]:
        """Return the chosen tokens.

        Args:
            end: Id of the token that ends a sequence.

        Returns:
            Tokens, int64 [B, n], and log-probabilities, float32 [B, n], which are 0 after the end token.
        """
        import torch

        tokens, log_probs = torch.stack(self.tokens, dim=1), torch.stack(self.log_probs, dim=1)
        ended = (tokens == end).cumsum(dim=1) - (tokens == end).long()
        return tokens, log_probs * (ended == 0)


@contextmanager
def choosing(model: Any, chooser: TokenChooser) -> Iterator[None]:
    """Context manager in which ``chooser`` chooses the model's tokens."""
    model.choose = chooser
    try:
        yield
    finally:
        del model.choose


def allowed_tokens(model: Any) -> tuple[int, int] | None:
    """Return the first and the last id of the tokens that have a meaning. None if these ids are not consecutive."""
    return getattr(model.action_tokens, "ids", None)


def flow_log_probs(model: Any, inputs: ModelInputs, chains: np.ndarray) -> Tensor:
    """Compute the log-probabilities of chains under a model. Autograd goes through them.

    Args:
        model: The model.
        inputs: Inputs of B observations, with a batch axis.
        chains: Recorded solutions of ``model.solver``, float32 [B, K + 1, H, A].

    Returns:
        float32 [B, K, H, A].
    """
    import torch

    chain = torch.from_numpy(chains).to(model.device)
    count = chain.shape[1] - 1
    batch = Inputs.of(inputs, model.device)
    context = model.read(model.embed_images(batch.pixels), *batch[1:])
    densities = []
    steps = model.solver.steps(count)
    for k, (step, embedding) in enumerate(zip(steps, model.time_embeddings(count), strict=True)):
        if step.draw:
            mean = _mean(step, chain[:, k], model.act(chain[:, k], embedding, context))
            densities.append(log_density(chain[:, k + 1], mean, step.fresh))
        else:
            densities.append(torch.zeros_like(chain[:, 0]))
    return torch.stack(densities, dim=1)


def token_log_probs(
    model: Any, inputs: ModelInputs, sentences: Sequence[np.ndarray], temperature: float
) -> Tensor:
    """Compute the log-probabilities of token sequences under a model. Autograd goes through them.

    Args:
        model: The model.
        inputs: Inputs of B observations, with a batch axis.
        sentences: Token sequences, int64 [n] each.
        temperature: Divisor of the scores.

    Returns:
        float32 [B, longest n], which is 0 after the end of a shorter sequence.
    """
    import torch

    longest = max(map(len, sentences))
    padded = np.full((len(sentences), longest), model.action_tokens.end, np.int64)
    for row, sentence in zip(padded, sentences, strict=True):
        row[: len(sentence)] = sentence
    batch = Inputs.of(inputs, model.device)
    context = model.read(model.embed_images(batch.pixels), *batch[1:])
    chooser = TokenChooser(
        None, torch.from_numpy(padded).to(model.device), temperature, allowed_tokens(model)
    )
    with choosing(model, chooser):
        spoken = model.first(context)
        for _ in range(longest - 1):
            spoken = model.next(spoken, context)
    return chooser.said(model.action_tokens.end)[1]
