"""VLA-JEPA on every engine, against eager: the plan, the CUDA engine over its references, ONNX Runtime."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sinew.engine.plan.engine import PlannedEngine
from sinew.engine.plan.plan import Plan
from sinew.policy import load
from tests.convert.test_vla_jepa import observation
from tests.engine.cuda.cuda_cases import Case
from tests.engines import run_one
from tests.golden import Golden, assert_parity


@pytest.fixture(scope="module")
def case(golden, jepa_bundle) -> tuple[Case, Golden]:
    g = Golden(golden / "vla-jepa")
    return Case(load(jepa_bundle, dtype="float32", engine="eager"), observation(g), g.numpy("noise")), g


def check(found: np.ndarray, case: Case, g: Golden) -> None:
    assert not case.refusal(found)
    assert_parity(case.policy.processor.actions(found, case.observation), g.numpy("actions"))


@pytest.mark.proves(engine="plan", family="vla_jepa")
def test_every_rewrite(case):
    case, g = case
    plan = Plan.of(case.model)
    assert {"tabulate-time", "hoist-positions", "fold-norms", "pack-qkv", "pack-gate-up"} <= set(plan.applied)
    check(
        run_one(PlannedEngine(plan, torch.device("cpu")), case.inputs(pixels=True), case.noise, 4)[0], case, g
    )


@pytest.mark.proves(engine="cuda references", family="vla_jepa")
@pytest.mark.parametrize("kernels", [True, False])
def test_cuda_references(case, kernels):
    case, _ = case
    engine = case.engine(kernels=kernels)
    assert not engine.facts.takes_frames  # the device's resize knows no area mean
    inputs = case.inputs(pixels=True)
    assert not case.refusal(run_one(engine, inputs, case.noise, 3)[0], inputs, 3)


@pytest.mark.proves(engine="onnx", family="vla_jepa")
@pytest.mark.slow  # a minute of export
@pytest.mark.timeout(1200)
def test_onnx_runtime(case, tmp_path):
    case, g = case
    check(run_one(case.onnx(tmp_path, 4), case.inputs(pixels=True), case.noise, 4)[0], case, g)
