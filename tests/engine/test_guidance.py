"""Real-time chunking against an oracle written out from the paper, with whole Jacobians, in both directions of time."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sinew.bench.measure import PROMPT, make_observation
from sinew.core import ObservationError
from sinew.engine.guidance import ClassifierFree, Ramp, guidance_weight, guide
from sinew.models.solvers import Solver, solve
from sinew.policy import Policy, load
from sinew.processing.continuation import Continuation
from tests.closeness import assert_close, rounding

BLOCKS = Path(__file__).parents[2] / "sinew" / "assets" / "blocks.gguf"
H, A = 6, 3


def weights_of(length: int, delay: int, end: int, schedule: str) -> list[float]:
    """Equation 5 of the paper, and the other schedules of its code, row by row."""
    start, found = min(delay, end), []
    for i in range(length):
        if schedule == "ones":
            w = 1.0
        elif schedule == "zeros":
            w = 1.0 if i < start else 0.0
        else:
            w = min(1.0, max(0.0, (start - 1 - i) / (end - start + 1) + 1))
            if schedule == "exp":
                w = w * (math.exp(w) - 1) / (math.e - 1)
        found.append(w if i < end else 0.0)
    return found


class Head(torch.nn.Module):
    """A head that mixes all rows and knows the time; tau runs 0 to 1. float64."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.first = torch.randn(H * A + 1, 24, generator=generator, dtype=torch.float64) / 3
        self.second = torch.randn(24, H * A, generator=generator, dtype=torch.float64) / 3

    def velocity(self, x: torch.Tensor, tau: float) -> torch.Tensor:
        flat = torch.cat([x.reshape(-1), torch.tensor([tau], dtype=torch.float64)])
        return (torch.tanh(flat @ self.first) @ self.second).reshape(x.shape)


def paper(
    head: Head, noise: torch.Tensor, target: torch.Tensor, weights: torch.Tensor, beta: float, n: int
) -> Any:
    """Algorithm 1 in the paper's own time, with the whole Jacobian of the denoiser."""
    x = noise.clone()
    for k in range(n):
        tau = k / n

        def denoise(flat: torch.Tensor, tau: float = tau) -> torch.Tensor:
            return flat + (1 - tau) * head.velocity(flat.reshape(1, H, A), tau).reshape(-1)

        jacobian = torch.autograd.functional.jacobian(denoise, x.reshape(-1))
        error = (target - denoise(x.reshape(-1)).reshape(1, H, A)) * weights
        r2 = (1 - tau) ** 2 / (tau**2 + (1 - tau) ** 2)
        g = beta if tau == 0 else min(beta, (1 - tau) / (tau * r2))
        pull = (jacobian.T @ error.reshape(-1)).reshape(1, H, A)
        x = x + (head.velocity(x, tau) + g * pull) / n
    return x


@pytest.mark.parametrize("direction", [(1.0, 0.0), (0.0, 1.0), (0.0, 2.0)])
@pytest.mark.parametrize("schedule", ["exp", "linear", "ones", "zeros"])
@pytest.mark.parametrize("delay", range(H + 1))
def test_guided_equals_the_paper(direction: tuple[float, float], schedule: str, delay: int) -> None:
    head, (start, end) = Head(), direction
    solver, steps, beta = Solver(start=start, end=end), 5, 4.0
    rng = np.random.default_rng(delay)
    noise, target = rng.normal(size=(2, H, A))
    weights = np.repeat(np.array(weights_of(H, delay, 5, schedule))[:, None], A, axis=1)

    def act(x: torch.Tensor, time: float) -> torch.Tensor:
        return head.velocity(x, (time - start) / (end - start)) / (end - start)

    wanted = Continuation("guided", target, weights, 5, beta)
    guidance, begun = guide([wanted], solver, noise[None], torch.from_numpy)
    with torch.no_grad():
        x = torch.from_numpy(begun)
        got = solve(act, x, solver.steps(steps), solver.times(steps), None, guidance)
    expected = paper(head, *(torch.from_numpy(v)[None] for v in (noise, target, weights)), beta, steps)
    assert float((got - expected).abs().max()) < 1e-10


def test_the_weight_of_guidance_is_the_papers_and_never_more_than_beta() -> None:
    for tau in np.linspace(0.01, 0.99, 99):
        r2 = (1 - tau) ** 2 / (tau**2 + (1 - tau) ** 2)
        assert guidance_weight(float(tau), 1e9) == pytest.approx((1 - tau) / (tau * r2))
        assert guidance_weight(float(tau), 2.5) <= 2.5
        assert guidance_weight(float(tau), 0.0) == 0.0
    for tau in (-0.1, 0.0, 1.0, 1.1, 1e-300, 1 - 1e-16):  # the quotient has poles at both ends
        assert guidance_weight(tau, 5.0) == 5.0


@pytest.mark.parametrize("kind", ["ramp", "trained"])
def test_frozen_rows_begin_as_what_they_continue(kind: str) -> None:
    """Where the velocity is held back; each request of a batch has its own rows, and the noise is its own again."""
    noise = np.random.default_rng(0).normal(size=(2, H, A)).astype(np.float32)
    target = np.arange(H * A, dtype=np.float32).reshape(H, A)
    strength = np.float32([0, 0, 0.5, 1, 1, 1])[:, None].repeat(A, axis=1)
    strength[2, 0] = 0.0  # a number of a row that is not frozen
    wanted = [
        Continuation(kind, target, strength, 4, 5.0),  # row 3 has all of its velocity, and begins as noise
        Continuation(kind, -target, np.roll(strength, -1, axis=0), 2, 5.0),
    ]
    before = noise.copy()
    for odd in (noise[0], noise[:1], noise[:, :-1], noise[..., :-1]):
        with pytest.raises(
            ValueError, match=rf"^noise: expected shape \[2, {H}, {A}\], which is one \[H, A\] for each"
        ):
            guide(wanted, Solver(), odd, np.asarray)
    guidance, begun = guide(wanted, Solver(), noise, np.asarray)
    assert np.array_equal(noise, before)
    assert np.array_equal(begun[0], np.concatenate([target[:3], noise[0, 3:]]))
    assert np.array_equal(begun[1], np.concatenate([-target[:2], noise[1, 2:]]))
    moved = guidance(lambda x: np.full_like(x, 2.0), begun, Solver().steps(1)[0])
    assert np.array_equal(moved, 2 * np.stack([each.weights for each in wanted]))
    committed = guidance.committed  # type: ignore[attr-defined]
    if kind == "ramp":
        assert committed is None
    else:
        assert committed.tolist() == [[True, True] + [False] * 4, [True] + [False] * 4 + [True]]


def test_two_prompts_are_combined_row_by_row() -> None:
    """The context has the prompts with an advantage first; what steers the result needs what it needs alone."""
    x, apart = np.ones((2, H, A), np.float32), np.arange(4, dtype=np.float32)[:, None, None]
    step = Solver().steps(1)[0]

    def act(x: np.ndarray) -> np.ndarray:
        return x * apart  # 0 and 1 with an advantage, 2 and 3 without

    alone = ClassifierFree(np.array([0.5, 3.0]), np.asarray)
    assert np.array_equal(alone(act, x, step)[:, 0, 0], [2 + 0.5 * (0 - 2), 3 + 3.0 * (1 - 3)])
    assert (alone.rows.tolist(), alone.jacobian, alone.committed) == ([0, 1, 0, 1], False, None)
    frozen = np.eye(2, H, dtype=bool)
    ramp = ClassifierFree(np.ones(2), np.asarray, Ramp(np.full((2, H, A), 0.25), frozen))
    assert np.array_equal(ramp(act, x, step)[:, 0, 0], [0.0, 0.25])
    assert not ramp.jacobian
    assert np.array_equal(ramp.committed, np.concatenate([frozen, frozen]))
    assert ClassifierFree(
        np.ones(2), np.asarray, lambda act, x, step: act(x)
    ).jacobian  # which says nothing of it


@pytest.mark.parametrize("end", [1.0, 2.0])
def test_without_the_jacobian_it_is_another_method(end: float) -> None:
    head, solver = Head(), Solver(start=0.0, end=end)

    def act(x: torch.Tensor, time: float) -> torch.Tensor:
        return head.velocity(x, time / end) / end

    noise, target = np.random.default_rng(0).normal(size=(2, H, A))
    weights = np.repeat(np.array(weights_of(H, 2, 5, "exp"))[:, None], A, axis=1)
    found = {}
    for kind in ("guided", "no-jacobian"):
        guidance, begun = guide(
            [Continuation(kind, target, weights, 5, 4.0)], solver, noise[None], torch.from_numpy
        )
        with torch.no_grad():
            x = torch.from_numpy(begun)
            found[kind] = solve(act, x, solver.steps(5), solver.times(5), None, guidance)
    # The identity in place of J, from the definition.
    x = torch.from_numpy(noise)[None]
    for k in range(5):
        tau = k / 5
        v = head.velocity(x, tau)
        error = (torch.from_numpy(target) - (x + (1 - tau) * v)) * torch.from_numpy(weights)
        x = x + (v + guidance_weight(tau, 4.0) * error) / 5
    torch.testing.assert_close(found["no-jacobian"], x, atol=1e-12, rtol=0)
    assert float((found["guided"] - x).abs().max()) > 0.05


# ----------------------------------------------------------------------------- a whole policy

pytestmark = pytest.mark.skipif(not BLOCKS.exists(), reason="no trained policy")


@pytest.fixture(scope="module")
def policies() -> dict[str, Policy]:
    return {engine: load(BLOCKS, engine=engine, threads=1) for engine in ("eager", "plan")}


def observation(**fields: Any) -> dict[str, Any]:
    rng = np.random.default_rng(5)
    frames = {name: rng.integers(0, 256, (64, 64, 3), np.uint8) for name in ("front", "wrist")}
    state = np.float32([0.1, -0.05, 0.2, 0.03])
    return {
        "images": frames,
        "state": state,
        "prompt": "put the red block into the left bin",
        "seed": 3,
        **fields,
    }


@pytest.fixture(scope="module")
def previous(policies: dict[str, Policy]) -> np.ndarray:
    return policies["eager"].infer(observation(seed=11)).actions[6:]


def test_no_guidance_is_the_ordinary_chunk_to_the_bit(
    policies: dict[str, Policy], previous: np.ndarray
) -> None:
    for policy in policies.values():
        plain = policy.infer(observation()).actions
        fields = {"previous": previous, "delay": 4, "horizon": 8}
        assert np.array_equal(policy.infer(observation(**fields, beta=0.0)).actions, plain)
        # the guidance ends before it begins
        assert np.array_equal(
            policy.infer(observation(**{**fields, "horizon": 32, "delay": 0})).actions, plain
        )
        assert not np.array_equal(policy.infer(observation(**fields)).actions, plain)


@pytest.mark.parametrize("kind", ["guided", "no-jacobian", "ramp"])
def test_engines_agree_and_committed_rows_are_continued(
    policies: dict[str, Policy], previous: np.ndarray, kind: str
) -> None:
    fields = {"previous": previous, "delay": 6, "horizon": 8, "rtc": kind}
    eager = rounding(
        lambda: policies["eager"].infer(observation(**fields)).actions, derivatives=kind == "guided"
    )
    assert_close(eager, policies["plan"].infer(observation(**fields)).actions)
    plain, guided = policies["eager"].infer(observation()).actions, eager.found.numpy()
    before, after = (np.abs(found[:6] - previous[:6]).mean() for found in (plain, guided))
    assert after < 0.35 * before
    if kind == "ramp":  # to units of the model and back
        assert_close(eager, np.concatenate([previous[:6], guided[6:]]))


def test_guided_policy_equals_an_oracle_in_the_papers_time(
    policies: dict[str, Policy], previous: np.ndarray
) -> None:
    """The policy's own head, called from outside; normalisation, weights and the loop written out."""
    policy, delay, horizon, steps = policies["eager"], 3, 8, 5
    from sinew.core import Observation
    from sinew.engine.example import Inputs

    plain = Observation.from_mapping(observation())
    model, processor = policy.engine.model, policy.processor
    batch = Inputs.of(processor.inputs(plain).batched(), torch.device("cpu"))
    with torch.no_grad():
        context = model.read(model.embed_images(batch.pixels), *batch[1:])
        time_embeddings = list(model.time_embeddings(steps))
    x = torch.from_numpy(processor.noise(plain)[0])[None]
    rows, dim = policy.spec.chunk_size, policy.spec.action.dim
    scale, offset = processor.action_normalizer.affine()
    target = torch.zeros_like(x)
    target[0, : len(previous), :dim] = torch.from_numpy((previous - offset) / scale)
    weights = torch.zeros_like(x)
    end = min(rows - horizon, len(previous))
    weights[0, :, :dim] = torch.tensor(weights_of(rows, delay, end, "exp"))[:, None]
    for k in range(steps):
        tau = k / steps
        at = x.clone().requires_grad_(True)
        v = -model.act(at, time_embeddings[k], context)  # d x / d tau; the model's time runs from 1 to 0
        denoised = at + (1 - tau) * v
        (pull,) = torch.autograd.grad(denoised, at, ((target - denoised) * weights).detach())
        g = 5.0 if k == 0 else min(5.0, (1 - tau) / tau * (tau**2 + (1 - tau) ** 2) / (1 - tau) ** 2)
        x = (x + (v + g * pull) / steps).detach()
    expected = x[0, :, :dim].double().numpy() * scale + offset
    asked = observation(previous=previous, delay=delay, horizon=horizon, solver_steps=steps)
    assert_close(rounding(lambda: policy.infer(asked).actions, derivatives=True), expected)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"delay": 3}, "delay: expected `previous` with it"),
        ({"rtc": "guided"}, "rtc: expected `previous` with it"),
        ({"previous": np.zeros((3, 2))}, r"previous: expected numbers of shape \[R, 4\]"),
        ({"previous": np.zeros((0, 4))}, "previous: expected 1 to"),
        ({"previous": np.full((3, 4), np.nan)}, "previous: expected finite numbers"),
        ({"previous": np.zeros((3, 4)), "delay": -1}, "delay: expected a whole number"),
        ({"previous": np.zeros((3, 4)), "horizon": 1.5}, "horizon: expected a whole number"),
        ({"previous": np.zeros((3, 4)), "rtc": "soft"}, "rtc: expected one of guided"),
        (
            {"previous": np.zeros((3, 4)), "rtc": "trained"},
            "rtc: expected guided, no-jacobian or ramp; this checkpoint",
        ),
        ({"previous": np.zeros((3, 4)), "schedule": "cosine"}, "schedule: expected one of exp"),
        ({"previous": np.zeros((3, 4)), "beta": float("inf")}, "beta: expected a number from 0"),
    ],
)
def test_bad_fields_are_named(policies: dict[str, Policy], fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ObservationError, match=message):
        policies["eager"].check(observation(**fields))


def test_an_inference_does_not_walk_the_modules_of_its_model(monkeypatch):
    """Which was an eighth of a small policy's time."""
    with load(BLOCKS, engine="eager", threads=1) as policy:
        asked = {**make_observation(policy.spec, None, PROMPT, 2), "seed": 0}
        before = policy.infer(asked).actions
        monkeypatch.setattr(torch.nn.Module, "named_modules", None)
        assert (policy.infer(asked).actions == before).all()
