"""Several observations in one inference against each of them alone, on bundles of every family."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from sinew.core import Observation, SinewError
from sinew.engine.contexts import FORMS, unpack
from sinew.policy import Policy, load
from sinew.processing import batch_key
from sinew.stream.split import template_of

BOUND = 1e-5  # of the largest action, float32: products over more rows sum in another order (docs/fleet.md)
BUNDLES = {
    "smolvla-2cam": "smolvla_bundle",
    "smolvla-3cam-padded": "smolvla_bundle",
    "pi0-2cam": "pi_bundle",
    "pi05-2cam": "pi_bundle",
    "groot-n17": "groot_bundle",
    "groot-n16": "groot_bundle",
    "groot-n15": "groot_bundle",
    "evo1": "evo1_bundle",
    "evo1-mint": "evo1_bundle",
    "openvla-ar": "openvla_bundle",
    "openvla-oft": "openvla_bundle",
    "vla-adapter": "openvla_bundle",
    "bitvla": "openvla_bundle",
    "vla-jepa": "jepa_bundle",
}
PROMPT = "reach for the cube"  # of 17 to 32 tokens in bytes and less without its last letters


def bundle_of(request: pytest.FixtureRequest, case: str) -> Path:
    made: Callable[[str], Path] | Path = request.getfixturevalue(BUNDLES[case])
    return made if isinstance(made, Path) else made(case)


def observations(policy: Policy, count: int) -> list[Observation]:
    """Robots that see, feel and are told different things; the instructions' lengths differ too."""
    rng, like = np.random.default_rng(0), policy.dummy_observation()
    drawn = policy.spec.solver.noise != "zeros"
    return [
        Observation(
            images={name: rng.integers(0, 255, frame.shape, np.uint8) for name, frame in like.images.items()},
            state=np.full_like(like.state, 0.01 * k),
            prompt=PROMPT[: len(PROMPT) - k % 3],
            seed=k if drawn else None,
        )
        for k in range(count)
    ]


def compare(policy: Policy, count: int = 4) -> float:
    """Return the largest difference between a batch and its members alone, over the largest action."""
    members = [policy.prepare(each) for each in observations(policy, count)]
    first = batch_key(members[0])
    members = [member for member in members if batch_key(member) == first]
    assert len(members) > 1
    alone = [policy.run(member) for member in members]
    together = policy.run_batch(members)
    worst = 0.0
    for one, found in zip(alone, together, strict=True):
        assert not isinstance(found, SinewError)
        assert (found.seed, found.timing.batch, one.timing.batch) == (one.seed, len(members), 1)
        worst = max(worst, float(np.abs(found.actions - one.actions).max() / np.abs(one.actions).max()))
    different = [one.actions for one in alone]
    assert not np.array_equal(different[0], different[1]) or policy.spec.architecture == "openvla"
    return worst


@pytest.mark.parametrize(
    "case",
    [case if case == "smolvla-2cam" else pytest.param(case, marks=pytest.mark.slow) for case in BUNDLES],
)
@pytest.mark.parametrize("engine", ["eager", "plan"])
def test_a_batch_gives_each_member_its_own_actions(case, engine, request):
    policy = load(bundle_of(request, case), dtype="float32", engine=engine, threads=1)
    assert not policy.unbatched
    worst = compare(policy)
    assert worst <= (0.0 if case == "openvla-ar" else BOUND)  # tokens are chosen, so they are equal


def check_guided_members(policy: Policy, rtc: str) -> None:
    """Check that each member of a batch continues its own chunk, and shares none with one that continues nothing."""
    asked = observations(policy, 3)
    running = policy.infer(asked[0]).actions
    members = [
        policy.prepare(replace(each, seed=k, previous=running[k:], delay=k, rtc=rtc))
        for k, each in enumerate(asked)
    ]
    free = [policy.prepare(each) for each in asked]
    for member, found, loose in zip(members, policy.run_batch(members), policy.run_batch(free), strict=True):
        alone = policy.run(member).actions
        largest = float(np.abs(alone).max())
        assert float(np.abs(found.actions - alone).max()) <= BOUND * largest
        assert float(np.abs(loose.actions - alone).max()) > 100 * BOUND * largest
    with pytest.raises(SinewError, match="one batch_key"):
        policy.run_batch([members[0], free[0]])


@pytest.mark.parametrize("rtc", ["guided", "no-jacobian", "ramp"])
def test_guided_members(rtc, request):
    policy = load(bundle_of(request, "smolvla-2cam"), dtype="float32", engine="plan", threads=1)
    check_guided_members(policy, rtc)


def test_what_shares_no_batch(request):
    """Steps, views, and prompts of other buckets."""
    policy = load(bundle_of(request, "smolvla-2cam"), dtype="float32", engine="eager", threads=1)
    first, *_ = observations(policy, 1)
    given = {"images": first.images, "state": first.state, "prompt": first.prompt}
    key = batch_key(policy.prepare(given))
    assert key == batch_key(policy.prepare({**given, "seed": 9, "state": first.state * 1.01}))
    assert key != batch_key(policy.prepare({**given, "solver_steps": 3}))
    long = policy.prepare({**given, "prompt": first.prompt * 2})
    assert key != batch_key(long)
    with pytest.raises(SinewError, match="one batch_key"):
        policy.run_batch([policy.prepare(given), long])


def test_an_error_of_one_member(request, monkeypatch):
    policy = load(bundle_of(request, "smolvla-2cam"), dtype="float32", engine="eager", threads=1)
    members = [policy.prepare(o) for o in observations(policy, 3)]
    wanted = policy.run_batch(members)
    finish, seen = policy.processor.finish, []

    def failing(chunk, state, normalized=True):
        seen.append(chunk)
        if len(seen) == 2:
            chunk = np.full_like(chunk, np.nan)
        return finish(chunk, state, normalized)

    monkeypatch.setattr(policy.processor, "finish", failing)
    found = policy.run_batch(members)
    assert "not finite" in str(found[1])
    for k in (0, 2):
        assert np.array_equal(found[k].actions, wanted[k].actions)


@pytest.mark.parametrize(
    "case",
    [case if case == "smolvla-2cam" else pytest.param(case, marks=pytest.mark.slow) for case in BUNDLES],
)
def test_a_head_elsewhere_computes_what_the_policy_does(request: pytest.FixtureRequest, case: str):
    """Its context travels as bytes (:mod:`sinew.engine.contexts`); rounded ones may be off by a tenth of the largest
    action: random weights are no kinder than trained ones."""
    policy = load(bundle_of(request, case), engine="eager", threads=1)
    prepared = policy.prepare(observations(policy, 1)[0])
    template, longer = template_of(policy)
    wanted = policy.run(prepared).actions
    largest = np.abs(wanted).max()
    if policy.facts.chooses_tokens:
        with pytest.raises(SinewError, match="expected fp32 for .*, whose head chooses tokens, got int8"):
            policy.read_context(prepared, "int8")
    for form in ("fp32",) if policy.facts.chooses_tokens else FORMS:
        context = unpack(policy.read_context(prepared, form), template, torch.device("cpu"), longer)
        (solved,) = policy.engine.solve(context, prepared.noise[None], prepared.steps)
        found = policy.processor.finish(solved, prepared.state)
        off = np.abs(found - wanted).max() / largest
        assert off <= {"fp32": 1e-6, "bf16": 0.1, "int8": 0.1}[form], (form, off)
