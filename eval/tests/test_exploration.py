"""Noise at the steps of a solver: what it leaves as it was, and the log-probabilities of what it draws."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import pytest
import torch
from sinew.core import SinewError
from sinew.engine.eager.engine import EagerEngine
from sinew.models.solvers import FLOW, SINGLE, NoiseLevels, Solver, solve
from sinew.processing import stack
from sinew.steps.action_tokens.bins import BinTokens
from tests.contract.test_unlike_models import CPU, observation, processing
from tests.engine.stand_ins import make

from sinew_eval.learning.exploration import (
    DenoisingChain,
    Exploration,
    TokenChooser,
    choosing,
    exploring,
    flow_log_probs,
    log_density,
    token_log_probs,
)

pytestmark = pytest.mark.usefixtures("rounded_by_shape")

MEAN, DEVIATION = 1.5, 0.4


def velocity(x: np.ndarray, s: float) -> np.ndarray:
    """dx / ds of the flow from N(0, 1) at s = 1 to N(MEAN, DEVIATION^2) at s = 0 over straight lines: what a perfect
    head would say, E[noise - action | x]."""
    variance = s**2 + ((1 - s) * DEVIATION) ** 2
    noise = s / variance * (x - (1 - s) * MEAN)
    return noise - (MEAN + (1 - s) * DEVIATION**2 / variance * (x - (1 - s) * MEAN))


@pytest.mark.parametrize("base", [FLOW, Solver(start=0.0, end=1.0)])
@pytest.mark.parametrize(("kind", "level"), [("flow-sde", 0.5), ("flow-sde", 1.0)])
def test_what_is_drawn_is_distributed_as_without_noise(kind: str, level: float, base: Solver) -> None:
    """The stochastic solvers keep the marginals of the flow, in either direction of time."""
    count, solver = 200, exploring(base, Exploration(kind, level))
    noise = np.random.default_rng(0).standard_normal((20_000, count + 1, 1, 1))
    sign = base.start - base.end  # dx / dt where time runs the other way
    got = solve(
        lambda x, t: velocity(x, t if base.start else 1 - t) * sign,
        noise,
        solver.steps(count),
        solver.times(count),
    )
    assert np.mean(got) == pytest.approx(MEAN, abs=0.03)
    assert np.std(got) == pytest.approx(DEVIATION, abs=0.03)
    euler = exploring(base, Exploration("flow-noise", 0.05)).steps(count)[0]
    step = base.steps(count)[0]
    assert euler._replace(fresh=0.0, draw=0)[:3] == pytest.approx(step[:3])
    assert euler._replace(fresh=0.0, draw=0)[3:] == step[3:]


def test_steps_are_those_of_pi_rl() -> None:
    """By hand, of four steps: sigma = 0.5 sqrt(t / (1 - t)), at t = 1 with the next step's 1 - t = 0.25."""
    steps = exploring(FLOW, Exploration("flow-sde", 0.5)).steps(4)
    sigma = [0.5 * math.sqrt(1 / 0.25), 0.5 * math.sqrt(0.75 / 0.25), 0.5, 0.5 * math.sqrt(0.25 / 0.75)]
    assert [step.fresh for step in steps] == pytest.approx([0.5 * s for s in sigma])
    for step, s in zip(
        steps, sigma, strict=True
    ):  # x0 and x1 as the head's velocity says, weighted as pi_RL does
        t = step.time
        x1 = t - 0.25 - s**2 * 0.25 / (2 * t)
        assert step.keep == pytest.approx(1 - (t - 0.25) + x1)
        assert step.gain == pytest.approx(-t * (1 - (t - 0.25)) + (1 - t) * x1)
    assert [step.draw for step in steps] == [1, 2, 3, 4]
    second, last = exploring(FLOW, Exploration("flow-cps", 0.5)).steps(4)[1::2]
    x0 = 0.5  # by hand: the share of actions of the schedule, and of noise, cos^2 + sin^2 of it
    noise = second.keep - x0
    assert second.gain == pytest.approx(-0.75 * x0 + 0.25 * noise)
    assert math.hypot(noise, second.fresh) == pytest.approx(0.5)
    assert last == FLOW.steps(4)[-1]._replace(keep=pytest.approx(1.0), gain=pytest.approx(-0.25))
    only = exploring(FLOW, Exploration("flow-sde", 0.5, step=2)).steps(4)
    assert [bool(step.draw) for step in only] == [False, False, True, False]
    assert only[0] == FLOW.steps(4)[0]


def test_densities_are_those_of_torch() -> None:
    moved, mean = torch.randn(2, 3), torch.randn(2, 3)
    theirs = torch.distributions.Normal(mean, 0.3).log_prob(moved)
    assert torch.allclose(log_density(moved, mean, 0.3), theirs)


def inputs_of(model: Any, count: int) -> Any:
    """Return so many observations as a batch."""
    return stack([observation(model, tokens=5 + k)[0] for k in range(count)], processing(model).prompt)


def slope(
    value: Callable[[], torch.Tensor], weights: Sequence[torch.Tensor], gradients: Sequence[Any]
) -> tuple[float, float]:
    """Return how fast a value changes along its gradient, by a central difference and as the gradient says."""
    found = [(w, g) for w, g in zip(weights, gradients, strict=True) if g is not None]
    norm = math.sqrt(sum(float((g.double() ** 2).sum()) for _, g in found))
    values, small = [], 0.1 / norm**2
    with torch.no_grad():
        for sign in (1, -2):
            for weight, gradient in found:
                weight.add_(sign * small * gradient)
            values.append(float(value().double().sum()))
    return (values[0] - values[1]) / (2 * small), norm**2


FLOWS = {
    "flow-sde": exploring(Solver(start=0.0, end=1.0), Exploration("flow-sde", 0.7)),
    "flow-noise, one step": exploring(Solver(start=0.0, end=1.0), Exploration("flow-noise", 0.2, step=1)),
    "ddpm": exploring(Solver("diffusion", levels=NoiseLevels(100, fresh=True, clip=1.0)), None),
}


@pytest.mark.parametrize("solver", FLOWS.values(), ids=FLOWS)
def test_of_a_flow_what_is_drawn_is_recomputed_and_differentiated(solver: Solver) -> None:
    """On random weights: from the stored chain, from the noise alone, and the gradient against a finite difference."""
    model: Any = make("hidden states")
    count = 3
    model.solver = solver
    if solver.levels is not None:  # its times are levels, which are buckets already
        model.embed_time = lambda t: model.buckets(t.long())
    inputs, draws = inputs_of(model, 2), solver.draws(count)
    noise = np.random.default_rng(1).standard_normal((2, draws, *model.noise_shape), np.float32)
    chain = DenoisingChain()
    chains, drawn = chain.ended(EagerEngine(model, CPU).run(inputs, noise, count, chain))
    assert chains.shape == (2, count + 1, *model.noise_shape)
    for k, step in enumerate(solver.steps(count)):
        alone = log_density(noise[:, step.draw], 0, 1.0) - math.log(step.fresh) if step.draw else 0
        assert np.abs(alone - drawn[:, k]).max() < 1e-4

    def recomputed() -> torch.Tensor:
        return flow_log_probs(model, inputs, chains)

    weights = list(model.requires_grad_().parameters())
    again = recomputed()
    assert np.allclose(again.detach().numpy(), drawn, rtol=1e-4, atol=1e-4)  # gradients take other products
    gradients = torch.autograd.grad(again.sum(), weights, allow_unused=True)
    assert sum(g is not None for g in gradients) > 20
    measured, said = slope(recomputed, weights, gradients)
    assert measured == pytest.approx(said, rel=0.02)


def test_of_tokens_what_is_drawn_is_recomputed_and_differentiated() -> None:
    """The same of a head that says tokens, of which one sentence ends before the other."""
    model: Any = make("speaking")
    temperature = 0.8
    inputs = inputs_of(model, 4)
    numbers = np.random.default_rng(3).random((4, model.action_tokens.most))
    engine = EagerEngine(model, CPU)
    chooser = TokenChooser(numbers, None, temperature, None)
    with choosing(model, chooser):
        engine.say(engine.read(inputs))
    tokens, drawn = (each.numpy() for each in chooser.said(model.action_tokens.end))
    likeliest = engine.say(engine.read(inputs))
    assert not np.array_equal(tokens, likeliest)  # and outside, the likeliest again
    sentences = list(tokens)
    weights = list(model.requires_grad_().parameters())
    again = token_log_probs(model, inputs, sentences, temperature)
    assert np.allclose(again.detach().numpy(), drawn, rtol=1e-4, atol=1e-4)  # gradients take other products
    gradients = torch.autograd.grad(again.sum(), weights, allow_unused=True)
    measured, said = slope(lambda: token_log_probs(model, inputs, sentences, temperature), weights, gradients)
    assert measured == pytest.approx(said, rel=0.02)


def test_tokens_come_as_often_as_their_probability_says() -> None:
    """Over many uniform numbers, within four deviations; what may not be said never comes."""
    scores = torch.randn(1, 1, 12, generator=torch.Generator().manual_seed(0)).expand(20_000, 1, 12)
    chooser = TokenChooser(np.random.default_rng(0).random((20_000, 1)), None, 0.7, (3, 8))
    said = chooser(scores)
    assert (int(said.min()), int(said.max())) == (3, 8)
    expected = (scores[0, 0, 3:9] / 0.7).softmax(dim=0).numpy()
    counts = np.bincount(said.numpy() - 3, minlength=6) / 20_000
    assert (np.abs(counts - expected) < 4 * np.sqrt(expected * (1 - expected) / 20_000)).all()
    assert torch.allclose(chooser.log_probs[0].exp(), torch.from_numpy(expected)[said - 3])
    assert BinTokens(1, 7, 256, 32000).ids == (31745, 31999)


def test_behind_the_end_of_a_sentence_nothing_counts() -> None:
    chooser = TokenChooser(None, torch.tensor([[4, 7, 1], [4, 4, 4]]), 1.0, None)
    for _ in range(3):
        chooser(torch.randn(2, 1, 9))
    tokens, found = chooser.said(7)
    assert (found != 0).tolist() == [[True, True, False], [True, True, True]]
    assert tokens.tolist() == [[4, 7, 1], [4, 4, 4]]


@pytest.mark.parametrize(
    ("make_it", "message"),
    [
        (
            lambda: Exploration(cast(Any, "noise"), 1.0),
            "expected one of flow-sde, flow-cps, flow-noise, tokens, got 'noise'",
        ),
        (lambda: Exploration("flow-sde", 0.0), "level: expected a number above 0, got 0"),
        (lambda: Exploration("flow-cps", 1.5), "level: expected a number above 0, at most 1, got 1.5"),
        (
            lambda: Exploration("tokens", 1.0, step=1),
            "step: expected a step of a flow from 0, got 1 with kind tokens",
        ),
        (lambda: exploring(FLOW, None), "expected a kind of noise"),
        (lambda: exploring(SINGLE, Exploration("flow-sde", 1.0)), "got flow-sde of solver single"),
    ],
)
def test_what_does_not_fit_is_refused(make_it: Callable[[], Any], message: str) -> None:
    with pytest.raises(SinewError, match=message):
        make_it()
