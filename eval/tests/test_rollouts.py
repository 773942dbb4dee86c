"""A policy that explores: its actions in any batch, log-probabilities, weights exchanged while requests wait."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("gymnasium", reason="evaluation needs the sim extra")
pytest.importorskip("mujoco", reason="the pen task needs the sim extra")

import sinew
import torch
from eval.tests.test_eval import PEN, needs_pen
from sinew.core import ObservationError, SinewError

from sinew_eval.learning.rollouts import RolloutPolicy

pytestmark = [needs_pen, pytest.mark.usefixtures("rounded_by_shape")]
SDE = sinew.Exploration("flow-sde", 0.5)


def opened(**more: Any) -> RolloutPolicy:
    return RolloutPolicy(PEN, SDE, **{"batch": 4, "solver_steps": 3, "threads": 1, **more})


@pytest.fixture(scope="module")
def policy() -> RolloutPolicy:
    return opened()


def drawn_of(policy: RolloutPolicy, *seeds: int) -> list[sinew.RolloutSample]:
    return [
        each
        for each in policy.sample([asked(seed) for seed in seeds])
        if isinstance(each, sinew.RolloutSample)
    ]


def asked(seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    frames = {name: rng.integers(0, 256, (64, 64, 3), np.uint8) for name in ("now", "previous")}
    return {"images": frames, "state": rng.random(1, np.float32), "prompt": "catch the pen", "seed": seed}


def near(found: sinew.RolloutSample, other: sinew.RolloutSample) -> bool:
    """Whether two samples differ by no more than the roundings of another batch, of another place in one, or of
    gradients. Densities are of squares of differences, so they are ten times as sensitive."""
    pairs = [(found.chunk.actions, other.chunk.actions), (found.chain, other.chain)]
    close = all(np.allclose(one, two, rtol=0, atol=1e-5 * np.abs(two).max()) for one, two in pairs)
    return close and np.allclose(found.log_probs, other.log_probs, rtol=1e-4, atol=1e-4)


def test_the_same_actions_in_any_batch(policy: RolloutPolicy) -> None:
    """In the same place to the bit, whatever the others are; elsewhere up to rounding; and through every call."""
    alone = {seed: drawn_of(policy, seed)[0] for seed in range(5)}
    for seeds in ((0, 1, 2, 3), (3, 1, 4, 0), (4, 4, 2, 1, 0, 3)):
        for place, (seed, found) in enumerate(zip(seeds, drawn_of(policy, *seeds), strict=True)):
            assert near(found, alone[seed])
            if place % policy.batch == 0:
                assert np.array_equal(found.chunk.actions, alone[seed].chunk.actions)
                assert np.array_equal(found.chain, alone[seed].chain)
                assert np.array_equal(found.log_probs, alone[seed].log_probs)
            assert found.chunk.seed == seed
    assert np.array_equal(policy.infer(asked(2)).actions, alone[2].chunk.actions)
    assert not np.array_equal(alone[1].log_probs, alone[2].log_probs)
    spread = np.std([policy.infer({**asked(0), "seed": k}).actions for k in range(8)], axis=0)
    assert spread.mean() > 0.01


def test_a_batch_of_one_always_gives_the_same_bits() -> None:
    policy = opened(batch=1)
    alone = {seed: drawn_of(policy, seed)[0] for seed in range(3)}
    for seed, found in zip((2, 0, 1), drawn_of(policy, 2, 0, 1), strict=True):
        assert np.array_equal(found.chain, alone[seed].chain)
        assert np.array_equal(found.log_probs, alone[seed].log_probs)


def test_a_learner_is_exchanged_and_saved(policy: RolloutPolicy, tmp_path: Path) -> None:
    """A step up the gradient makes the samples likelier, for the learner, for the policy, and in the bundle."""
    policy = opened()
    samples = drawn_of(policy, *range(4))
    learner = policy.learner()
    before = policy.log_probs(samples, learner)
    assert np.allclose(
        before.detach().numpy(), np.stack([each.log_probs for each in samples]), rtol=1e-4, atol=1e-4
    )
    assert samples[0].log_prob == pytest.approx(float(before[0].detach().sum()), rel=1e-5)
    before.sum().backward()
    with torch.no_grad():
        for name, weight in learner.named_parameters():
            if weight.grad is not None and learner.component_of(name) == "head":
                weight.add_(1e-4 * weight.grad.sign())
    after = policy.log_probs(samples, learner).sum()
    assert after > before.sum()
    head = {n: w for n, w in learner.named_parameters() if learner.component_of(n) == "head"}
    policy.exchange(head)
    assert policy.version == 1
    assert torch.allclose(policy.log_probs(samples).sum(), after, rtol=1e-4, atol=1e-4)
    moved = drawn_of(policy, 0)[0]
    assert moved.version == 1
    assert not np.array_equal(moved.chain, samples[0].chain)
    with torch.no_grad():
        next(iter(head.values())).add_(1.0)  # the learner's own from here on
    assert np.array_equal(drawn_of(policy, 0)[0].chain, moved.chain)

    policy.save(tmp_path / "tuned.gguf")
    again = RolloutPolicy(tmp_path / "tuned.gguf", SDE, batch=4, solver_steps=3)
    assert np.array_equal(drawn_of(again, 0)[0].chain, moved.chain)
    with sinew.load(tmp_path / "tuned.gguf", engine="eager") as still, sinew.load(PEN) as old:
        assert still.spec == old.spec
        first = still.infer(asked(0)).actions
        still.exchange(old_weights := {n: w for n, w in opened().learner().state_dict().items() if n in head})
        assert not np.array_equal(still.infer(asked(0)).actions, first)
        assert len(old_weights) == len(head)


def test_no_request_is_dropped_while_weights_are_exchanged(policy: RolloutPolicy) -> None:
    """Requests of two threads during thirty exchanges: each is answered, by the weights that its version says."""
    policy = opened(batch=1, solver_steps=2)
    learner = policy.learner()
    name = next(n for n, _ in learner.named_parameters() if learner.component_of(n) == "head")
    versions = [{name: w + 0.01 * k} for k in range(1, 31) for w in [learner.state_dict()[name].clone()]]
    found: list[sinew.RolloutSample] = []
    failed: list[SinewError] = []
    done = threading.Event()

    def ask() -> None:
        try:
            while not done.is_set():
                found.extend(drawn_of(policy, 0))
        except SinewError as error:
            failed.append(error)

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for weights in versions:
        count = len(found)
        while len(found) == count and not failed:
            done.wait(0.001)
        policy.exchange(weights)
    done.set()
    for thread in threads:
        thread.join()
    assert not failed
    known: dict[int, bytes] = {}
    for sample in found:
        assert known.setdefault(sample.version, sample.chain.tobytes()) == sample.chain.tobytes()
    assert len(known) >= 15  # and versions differ
    assert len(set(known.values())) == len(known)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"norm": 1.0}, "weights: expected names of weights in the bundle, got 'norm'"),
        (
            {"action_in_proj.bias": np.zeros(3, np.float32)},
            "action_in_proj.bias: expected .* of torch.float32, got",
        ),
        ({"action_in_proj.bias": np.zeros(48, np.int64)}, "got .* of torch.int64"),
        (
            {"action_in_proj.bias": np.full(48, np.nan, np.float32)},
            "action_in_proj.bias: expected finite numbers",
        ),
        (
            {"action_in_proj.bias": np.full(48, 1e300)},
            "action_in_proj.bias: expected finite numbers in torch.float32",
        ),
    ],
)
def test_weights_that_do_not_fit_change_nothing(policy: RolloutPolicy, weights: Any, message: str) -> None:
    before = drawn_of(policy, 0)[0]
    with pytest.raises(SinewError, match=message):
        policy.exchange(weights)
    after = drawn_of(policy, 0)[0]
    assert (after.version, after.chain.tobytes()) == (before.version, before.chain.tobytes())


def test_what_cannot_explore_says_so(policy: RolloutPolicy) -> None:
    with pytest.raises(SinewError, match="batch: expected 1 or more, got 0"):
        opened(batch=0)
    with pytest.raises(SinewError, match="step: expected one below 3, got 3"):
        RolloutPolicy(PEN, sinew.Exploration("flow-sde", 0.5, step=3), solver_steps=3)
    with pytest.raises(SinewError, match="expected a kind of noise"):
        RolloutPolicy(PEN, None)
    with pytest.raises(ObservationError, match="previous"):
        policy.sample([{**asked(0), "previous": np.zeros((24, 1), np.float32), "elapsed": 2}])
    planned = sinew.load(PEN, engine="plan")
    with pytest.raises(
        SinewError, match="^expected engine eager, which accepts new weights while it runs, got engine plan"
    ):
        planned.exchange({})


def test_a_policy_that_says_tokens_draws_them(openvla_bundle: Any) -> None:
    """The golden OpenVLA: other seeds say other sentences, the same one the same, in any batch; and how likely."""
    drawn = RolloutPolicy(openvla_bundle("openvla-ar"), sinew.Exploration("tokens", 1.5), batch=3, threads=1)
    frame = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    asks = [
        {"images": {drawn.spec.cameras[0].name: frame}, "state": np.zeros(0), "prompt": "lift", "seed": seed}
        for seed in range(4)
    ]
    samples = [each for each in drawn.sample(asks) if isinstance(each, sinew.RolloutSample)]
    assert len({sample.chain.tobytes() for sample in samples}) == 4
    assert np.array_equal(drawn.infer(asks[3]).actions, samples[3].chunk.actions)
    assert all(sample.log_probs.shape == (7,) and sample.log_prob < 0 for sample in samples)
    learner = drawn.learner()
    found = drawn.log_probs(samples[:3], learner)
    assert np.array_equal(found.detach().numpy(), np.stack([each.log_probs for each in samples[:3]]))
    found.sum().backward()
    assert any(weight.grad is not None and weight.grad.any() for weight in learner.parameters())
    with pytest.raises(SinewError, match="tokens: expected an autoregressive policy, got smolvla"):
        RolloutPolicy(PEN, sinew.Exploration("tokens", 1.0))
