"""Evo-1 on every engine, against eager: the plan, the CUDA engine over its references, ONNX Runtime."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sinew.engine.plan.engine import PlannedEngine
from sinew.engine.plan.plan import Plan
from sinew.policy import load
from tests.engine.cuda.cuda_cases import Case
from tests.engines import run_one
from tests.golden import Golden
from tests.models.test_evo1_parity import CASES, observation

STEPS = 3


def open_case(golden, evo1_bundle, name: str) -> Case:
    g = Golden(golden / name)
    policy = load(evo1_bundle(name), dtype="float32", engine="eager")
    return Case(policy, observation(g), g.numpy("noise")[0])


@pytest.fixture(scope="module")
def case(golden, evo1_bundle) -> Case:
    return open_case(golden, evo1_bundle, "evo1")


def check(found: np.ndarray, case: Case) -> None:
    assert not case.refusal(found, steps=STEPS)


@pytest.mark.proves(engine="plan")
@pytest.mark.parametrize("name", ["evo1", pytest.param("evo1-mint", marks=pytest.mark.slow)])
def test_every_rewrite(name, golden, evo1_bundle):
    case = open_case(golden, evo1_bundle, name)
    plan = Plan.of(case.model)
    assert {"tabulate-time", "fold-norms", "pack-qkv", "pack-gate-up"} <= set(plan.applied)
    engine = PlannedEngine(plan, torch.device("cpu"))
    check(run_one(engine, case.inputs(pixels=True), case.noise, STEPS)[0], case)


@pytest.mark.proves(engine="cuda references", family="evo1")
@pytest.mark.parametrize("kernels", [True, False])
def test_cuda_references(case, kernels):
    """With the kernels' references and as PyTorch alone; the prompt in a bucket."""
    engine = case.engine(kernels=kernels)
    assert not engine.facts.takes_frames  # the device's resize is another
    inputs = case.inputs(pixels=True)
    assert not case.refusal(run_one(engine, inputs, case.noise, STEPS)[0], inputs, STEPS)


@pytest.mark.slow
def test_cuda_references_of_a_head_that_reads_every_row(golden, evo1_bundle):
    case = open_case(golden, evo1_bundle, "evo1-mint")
    check(run_one(case.engine(), case.inputs(pixels=True), case.noise, STEPS)[0], case)


@pytest.mark.proves(engine="onnx")
@pytest.mark.timeout(1200)  # a busy machine
@pytest.mark.slow  # an export takes half a minute; the stand-ins of test_contract.py are the fast case
@pytest.mark.parametrize("name", CASES)
def test_onnx_runtime(name, golden, evo1_bundle, tmp_path):
    case = open_case(golden, evo1_bundle, name)
    check(run_one(case.onnx(tmp_path, STEPS), case.inputs(pixels=True), case.noise, STEPS)[0], case)
