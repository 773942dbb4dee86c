"""GR00T on every engine, against eager: the plan, the CUDA engine over its references, ONNX Runtime."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sinew.engine.plan.engine import PlannedEngine
from sinew.engine.plan.plan import REWRITES, Plan
from sinew.policy import Policy, load
from tests.convert.test_groot import CASES, observation
from tests.engine.cuda.cuda_cases import Case
from tests.engines import run_one
from tests.golden import Golden, assert_parity


@pytest.fixture(scope="module", params=CASES)
def case(request, golden, groot_bundle) -> tuple[Case, Golden]:
    g = Golden(golden / request.param)
    policy = load(groot_bundle(request.param), dtype="float32", engine="eager")
    return Case(policy, observation(g), g.numpy("noise")[0]), g


def check(policy: Policy, found: np.ndarray, case: Case, g: Golden) -> None:
    assert not case.refusal(found)
    assert_parity(policy.processor.actions(found, case.observation), g.numpy("actions")[0])


@pytest.mark.proves(engine="plan")
def test_every_rewrite(case):
    case, g = case
    plan = Plan.of(case.model)
    assert {"tabulate-time", "hoist-positions", "fold-norms", "pack-qkv", "pack-gate-up"} <= set(plan.applied)
    engine = PlannedEngine(plan, torch.device("cpu"))
    check(case.policy, run_one(engine, case.inputs(pixels=True), case.noise, 4)[0], case, g)


@pytest.mark.proves(engine="cuda references")
@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("steps", [4, 3])
def test_cuda_references(case, kernels, steps):
    """With the kernels' references and as PyTorch alone; the prompt in a bucket."""
    case, _ = case
    engine = case.engine(kernels=kernels)
    assert not engine.facts.takes_frames  # the device's resize knows no area, crop or grid
    inputs = case.inputs(pixels=True)
    assert not case.refusal(run_one(engine, inputs, case.noise, steps)[0], inputs, steps)


@pytest.mark.proves(engine="onnx")
@pytest.mark.timeout(1200)  # a busy machine
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow) for name in ("groot-n17", "groot-n16", "groot-n15")
    ],  # exports
)
def test_onnx_runtime(name, golden, groot_bundle, tmp_path):
    g = Golden(golden / name)
    policy = load(groot_bundle(name), dtype="float32", engine="eager")
    case = Case(policy, observation(g), g.numpy("noise")[0])
    check(policy, run_one(case.onnx(tmp_path, 4), case.inputs(pixels=True), case.noise, 4)[0], case, g)


def test_rewrites_that_do_not_fit_say_so(case):
    case, _ = case
    outcomes = {outcome.name: outcome for outcome in Plan.of(case.model, rewrites=REWRITES).outcomes}
    for name in ("last-layer-kv", "drop-unread"):
        assert outcomes[name].status == "not applicable"
        assert "does not read" in outcomes[name].reason
