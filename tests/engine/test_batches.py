"""Several observations in one inference against each of them alone, on bundles of every family."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from sinew.core import Observation, SinewError
from sinew.engine.contexts import FORMS, unpack
from sinew.layers.stores import lowbit
from sinew.policy import Policy, load
from sinew.processing import Prepared, batch_key
from sinew.stream.split import read_context, template_of
from tests.closeness import FACTOR, TAIL, UNIT, Rounding, assert_close, rounding
from tests.covering import some

pytestmark = pytest.mark.usefixtures("rounded_by_shape")
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
            seed=k + 1 if drawn else None,
        )
        for k in range(count)
    ]


def eager_of(policy: Policy) -> Policy:
    return load(policy.bundle.path, dtype="float32", engine="eager", threads=1)


def alone(
    policy: Policy,
    eager: Policy,
    member: Prepared,
    derivatives: bool = False,
    asked: Observation | None = None,
) -> Rounding:
    """Return the member's actions on its own, and what rounding does to eager's: products over more rows sum in another
    order (docs/batches.md). Eager prepares ``asked`` itself, if the policy's engine resizes frames."""
    own = member if asked is None else eager.prepare(asked)
    found = rounding(lambda: eager.run(own).actions, derivatives=derivatives)
    return found.about(policy.run(member).actions)


class Decisions:
    """What low-bit products round to whole numbers, of each member alone; its batch decides as they did.

    A value may lie on the border of two whole numbers, where the last bit of a sum decides; either is right, and from
    there on they are two computations. So rows of a batch whose numbers differ from a member's, and whose values do
    not but for rounding, get that member's values. ``swapped`` counts them.
    """

    def __init__(self) -> None:
        self.rows: list[list[Tensor]] = []  # of each product, the members'
        self.swapped = 0

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Note one member's, alone."""
        number = iter(range(1 << 20))

        def note(x: Tensor, smallest: float) -> Tensor:
            at = next(number)
            self.rows += [[]] * (at == len(self.rows))
            self.rows[at] = [*self.rows[at], x.clone()]
            return x

        with self._seen_by(note):
            yield

    @contextlib.contextmanager
    def repeated(self) -> Iterator[None]:
        """Let the products of a batch decide so."""
        rows = iter(self.rows)

        def repeat(x: Tensor, smallest: float) -> Tensor:
            members = torch.cat(next(rows))
            own = members[torch.cdist(x.double(), members.double()).argmin(1)]
            largest = own.abs().amax(1, keepdim=True)
            near = (x - own).abs() <= FACTOR * TAIL * UNIT * math.sqrt(x.shape[1]) * largest
            numbers, others = (lowbit.quantize_rows(each, smallest)[0] for each in (x, own))
            swapped = near.all(1) & (numbers != others).any(1)
            self.swapped += int(swapped.sum())
            return torch.where(swapped[:, None], own, x)

        with self._seen_by(repeat):
            yield

    @contextlib.contextmanager
    def _seen_by(self, look: Callable[[Tensor, float], Tensor]) -> Iterator[None]:
        compute = lowbit._on_cpu[0]
        lowbit.install(lambda x, *more: compute(look(x, more[-1]), *more))
        try:
            yield
        finally:
            lowbit.install(compute)


def compare(policy: Policy, count: int = 4) -> Decisions:
    """Check that the members of a batch get what each gets alone, but for rounding."""
    asked = observations(policy, count)
    members = [policy.prepare(each) for each in asked]
    first = batch_key(members[0])
    asked, members = zip(
        *(pair for pair in zip(asked, members, strict=True) if batch_key(pair[1]) == first), strict=True
    )
    assert len(members) > 1
    decisions, eager, wanted = Decisions(), eager_of(policy), []
    for given, member in zip(asked, members, strict=True):
        with decisions.noting():
            one = policy.run(member)
        assert one.timing.batch == 1
        wanted.append(alone(policy, eager, member, asked=given))
        assert np.array_equal(wanted[-1].found, one.actions)
    with decisions.repeated():
        together = policy.run_batch(members)
    for member, expected, found in zip(members, wanted, together, strict=True):
        assert not isinstance(found, SinewError)
        assert (found.seed, found.timing.batch) == (member.seed, len(members))
        assert_close(expected, found.actions)
    assert wanted[0].refusal(wanted[1].found) or policy.spec.architecture == "openvla"
    return decisions


@pytest.mark.parametrize(
    "case",
    [case if case == "smolvla-2cam" else pytest.param(case, marks=pytest.mark.slow) for case in BUNDLES],
)
@pytest.mark.parametrize("engine", some(["eager", "plan", "cuda"], "plan"))
def test_a_batch_gives_each_member_its_own_actions(case, engine, request):
    """Tokens that are chosen are equal: rounding moves none of them."""
    policy = load(bundle_of(request, case), "cpu", dtype="float32", engine=engine, threads=1)
    assert not policy.unbatched
    decisions = compare(policy)
    assert bool(decisions.rows) == (case == "bitvla")
    print(f"{decisions.swapped} rows were on a border")


def test_a_row_that_is_not_the_members_decides_for_itself(request):
    """What stands in for a value on the border hides nothing else: here one row is off by a thousandth."""
    decisions, x = Decisions(), torch.linspace(-1.0, 1.0, 64)[None]
    weight, scale = torch.ones(8, 64, dtype=torch.uint8), torch.ones(8)
    with decisions.noting():
        wanted = lowbit.lowbit_linear(x, weight, scale, None, "int8")
    for off, swapped in ((0.0, 0), (1e-3, 0)):
        with decisions.repeated():
            found = lowbit.lowbit_linear(x + off, weight, scale, None, "int8")
        assert decisions.swapped == swapped
        assert torch.equal(found, wanted) == (off == 0.0)
    border = (torch.arange(64) % 2 - 0.5) / 127
    border[0] = 1.0
    decisions = Decisions()
    with decisions.noting():
        wanted = lowbit.lowbit_linear(border[None], weight, scale, None, "int8")
    other = border[None] * (1 + UNIT * torch.arange(64))
    with decisions.repeated():
        assert torch.equal(lowbit.lowbit_linear(other, weight, scale, None, "int8"), wanted)
    assert decisions.swapped == 1


def check_guided_members(policy: Policy, rtc: str) -> None:
    """Check that each member of a batch continues its own chunk, and shares none with one that continues nothing."""
    asked, eager = observations(policy, 3), eager_of(policy)
    running = policy.infer(asked[0]).actions
    members = [
        policy.prepare(replace(each, seed=k, previous=running[k:], delay=k, rtc=rtc))
        for k, each in enumerate(asked)
    ]
    free = [policy.prepare(each) for each in asked]
    for member, found, loose in zip(members, policy.run_batch(members), policy.run_batch(free), strict=True):
        wanted = alone(policy, eager, member, derivatives=rtc == "guided")
        assert_close(wanted, found.actions)
        assert wanted.refusal(loose.actions)
    with pytest.raises(SinewError, match="the same batch_key"):
        policy.run_batch([members[0], free[0]])


@pytest.mark.parametrize("rtc", some(["guided", "no-jacobian", "ramp"], "guided"))
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
    with pytest.raises(SinewError, match="the same batch_key"):
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
        with pytest.raises(
            SinewError, match="expected fp32 for .*, because its head chooses tokens, got int8"
        ):
            read_context(policy, prepared, "int8")
    for form in ("fp32",) if policy.facts.chooses_tokens else FORMS:
        context = unpack(read_context(policy, prepared, form), template, torch.device("cpu"), longer)
        (solved,) = policy.engine.solve(context, prepared.noise[None], prepared.steps)
        found = policy.processor.finish(solved, prepared.state)
        off = np.abs(found - wanted).max() / largest
        assert off <= {"fp32": 1e-6, "bf16": 0.1, "int8": 0.1}[form], (form, off)
