"""Batches on ONNX Runtime: each member's own actions, in float32 and int8, and graphs that take no batch."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest

from sinew.core import SinewError
from sinew.engine.capability import Capability
from sinew.engine.onnx.engine import OnnxEngine
from sinew.engine.onnx.graphs import GraphSet
from sinew.engine.onnx.quantize import quantize_graphs
from sinew.lowbit.recipes import parse_recipe
from sinew.policy import Policy, load
from sinew.processing import Prepared, stack
from sinew.serve.batching import Batcher
from tests.closeness import Rounding, assert_close
from tests.engine.test_batches import (
    BUNDLES,
    alone,
    bundle_of,
    check_guided_members,
    eager_of,
    observations,
)
from tests.engines import eager_rounding, run_one

pytestmark = pytest.mark.usefixtures("rounded_by_shape")
EXPORTED = [case for case in BUNDLES if case != "bitvla"]  # whose ternary weights have no ONNX operator
LOWBIT = 0.05  # of the largest action: a rounding upstream may move a value to the next of 127 steps


@pytest.fixture(scope="module")
def policy(exported: Callable[[Path], Path], tmp_path_factory: pytest.TempPathFactory) -> Policy:
    return load(exported(tmp_path_factory.mktemp("graphs")), engine="onnx", threads=1)


def members_of(policy: Policy, count: int) -> list[Prepared]:
    return [policy.prepare(observation) for observation in observations(policy, count)]


def furthest(found: list[np.ndarray], wanted: list[np.ndarray]) -> float:
    """Return the largest difference over the largest wanted action of each member."""
    return max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize(
    "case",  # an export each
    [case if case == "smolvla-2cam" else pytest.param(case, marks=pytest.mark.slow) for case in EXPORTED],
)
def test_a_batch_gives_each_member_its_own_actions(
    case: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    if case == "smolvla-2cam":
        policy = request.getfixturevalue("policy")
    else:
        path = shutil.copyfile(bundle_of(request, case), tmp_path / "policy.gguf")
        policy = load(path, engine="onnx", threads=1)
    eager = eager_of(policy)
    assert not policy.unbatched
    pool = members_of(policy, 12)
    pool = [member for member in pool if policy.batch_key(member) == policy.batch_key(pool[0])][:4]
    wanted = [alone(policy, eager, member) for member in pool]  # of chosen tokens: equal
    assert wanted[0].refusal(wanted[1].found) or policy.spec.architecture == "openvla"
    for count in (2, 3, 4):
        found = policy.run_batch(pool[:count])
        assert [(chunk.timing.batch, chunk.seed) for chunk in found] == [
            (count, m.seed) for m in pool[:count]
        ]
        for expected, chunk in zip(wanted, found, strict=False):
            assert_close(expected, chunk.actions)
    for expected, member, chunk in zip(wanted, pool, found, strict=True):
        assert_close(expected.about(eager.run(member).actions), chunk.actions)


@pytest.mark.parametrize("rtc", ["no-jacobian", "ramp"])
def test_guided_members(policy: Policy, rtc: str) -> None:
    check_guided_members(policy, rtc)


def test_fewer_views_and_other_steps(policy: Policy) -> None:
    """A batch of one camera, and tables of steps that graphs do not have, as alone."""
    members = [
        replace(
            member,
            inputs=replace(
                member.inputs, pixels=member.inputs.pixels[:1], camera_mask=member.inputs.camera_mask[:1]
            ),
        )
        for member in members_of(policy, 2)
    ]
    eager = eager_of(policy)
    wanted = [alone(policy, eager, member) for member in members]
    for expected, found in zip(wanted, policy.run_batch(members), strict=True):
        assert_close(expected, found.actions)
    with pytest.raises(SinewError, match="the same batch_key"):
        policy.run_batch([members[0], *members_of(policy, 1)])
    with pytest.raises(
        SinewError, match="solver_steps: expected one of the exported numbers of steps 10, got 7"
    ):
        policy.run_batch([replace(member, steps=7) for member in members])


@pytest.mark.parametrize(
    "recipe", ["vision=int8,language=int8", "vision=int8-rows,language=int8-rows,head=int8-rows"]
)
def test_quantised_graphs(policy: Policy, recipe: str, tmp_path: Path) -> None:
    """One scale per tensor is no scale of a batch: such stages compute member by member; with a scale per row all at
    once. A member beside a bright one would otherwise be rounded as that one is."""
    quantize_graphs(policy.engine.directory, tmp_path, parse_recipe(recipe), 7)
    engine = OnnxEngine(tmp_path, threads=1, solver=policy.spec.solver)
    assert Capability.BATCH not in engine.facts.refusals
    dim, *others = [m for m in members_of(policy, 4) if len(m.inputs.tokens) == 19][:2]
    bright = replace(others[0], inputs=replace(others[0].inputs, pixels=8 * others[0].inputs.pixels))
    members = [dim, bright]
    noise = np.stack([member.noise for member in members])
    inputs = stack([member.inputs for member in members], policy.manifest.processing.prompt)
    wanted = [run_one(engine, member.inputs, member.noise, 10)[0] for member in members]
    together = list(engine.run(inputs, noise, 10))
    assert bool(engine.by_member) == ("rows" not in recipe)
    if not engine.by_member:
        assert furthest(together, wanted) <= LOWBIT
        return
    eager = eager_of(policy).engine.model  # the head is in float32, over what each member reads alone
    units = [
        eager_rounding(eager, member.inputs, member.noise, 10).about(wanted[k])
        for k, member in enumerate(members)
    ]
    for expected, found in zip(units, together, strict=True):
        assert_close(expected, found)
    engine.by_member = set()
    assert any(map(Rounding.refusal, units, engine.run(inputs, noise, 10)))


def test_prompts_of_other_lengths_wait_where_the_prefix_has_one_scale(
    policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short, other, same = (policy.prepare(o) for o in observations(policy, 4)[1:])
    assert len(short.inputs.tokens) != len(same.inputs.tokens) or len(other.inputs.tokens) != len(
        same.inputs.tokens
    )
    assert len({policy.batch_key(member) for member in (short, other, same)}) == 1
    monkeypatch.setattr(policy, "facts", replace(policy.facts, exact_lengths=True))
    assert len({policy.batch_key(member) for member in (short, other, same)}) > 1
    with pytest.raises(SinewError, match="the same batch_key"):
        policy.run_batch([short, other, same])


def test_graphs_of_one_observation(policy: Policy, exported: Callable[[Path], Path], tmp_path: Path) -> None:
    """What was exported before there were batches runs as it did, stays at one, and says why."""
    path = exported(tmp_path)
    (folder,) = tmp_path.glob("*.onnx-*")
    for stage in ("vision", "read", "step"):
        model = onnx.load(str(folder / f"{stage}.onnx"), load_external_data=False)
        for value in (*model.graph.input, *model.graph.output):
            first = value.type.tensor_type.shape.dim[0]
            if first.dim_param:
                first.dim_value = 1
        onnx.save(model, str(folder / f"{stage}.onnx"))
    GraphSet.load(folder).save(folder)
    old = load(path, engine="onnx", threads=1)
    prepared = members_of(old, 2)
    for one in prepared:
        assert np.array_equal(old.run(one).actions, policy.run(one).actions)
    reason = (
        r"expected graphs with a batch axis, got .*vision\.onnx, whose input pixels has the fixed shape \[1, "
        r".*export the bundle again"
    )
    with pytest.raises(SinewError, match=f"a batch of 2 observations: {reason}"):
        old.run_batch(prepared)
    with pytest.raises(SinewError, match=f"--max-batch 4: {reason}"):
        Batcher(4).calibrate(old)
    auto = Batcher(None)
    auto.calibrate(old)
    assert (auto.limit, auto.reason) == (1, old.unbatched)


def test_a_head_with_one_scale_is_refused(policy: Policy, tmp_path: Path) -> None:
    quantize_graphs(policy.engine.directory, tmp_path, parse_recipe("head=int8"), 7)
    engine = OnnxEngine(tmp_path, threads=1, solver=policy.spec.solver)
    assert "expected a head in fp32 or int8-rows, got int8" in str(engine.facts.refusals[Capability.BATCH])
