"""Every golden case on every engine: the actions that its reference gave, and in model units what eager computes.

A cell is a case and an engine; an empty one is a row of ``EMPTY`` that says why, and is refused by that word. What
passes is written into ``tests/proofs.json``, by which ``--engine auto`` goes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sinew.core import Observation, SinewError
from sinew.engine.plan.plan import REWRITES as REWRITES_OF_PLAN
from sinew.engine.plan.plan import Plan
from sinew.models.base import AutoregressiveModel
from sinew.policy import Policy, load
from tests.closeness import Rounding, assert_close, rounding
from tests.engine.cpu.test_cpu_engine import stored
from tests.golden import Golden, assert_parity
from tests.models.stages import CASES, LARGE, fast_observation, observation

ENGINES = ("eager", "plan", "cuda", "onnx")  # cuda: the kernels' references and the graph's program, on a CPU
EMPTY = {("bitvla", "onnx"): r"ternary weights, as in vision.* cpu or cuda"}
FAST = (
    "act-2cam",
    "diffusion-ddim",
    "xvla-ee6d",
    "omnivla-edge",
    "vqbet-parallel",
    "mtdit-ddim",
    "turbovla",
    "wallx-2cam",
    "molmoact2-2cam",
)
TWICE = [
    ("plan", "evo1-mint"),
    ("cuda", "evo1-mint"),
    ("plan", "omnivla"),  # as OpenVLA-OFT's, over the same weights
    ("cuda", "omnivla"),
    ("plan", "diffusion-ddpm"),
    ("onnx", "act-env"),
    ("onnx", "act-3cam"),
    ("onnx", "diffusion-ddpm"),
    ("onnx", "xvla-auto"),
    ("onnx", "vqbet-sequential"),
    ("onnx", "mtdit-ddpm"),
    ("onnx", "eo1-fast"),
    ("onnx", "turbovla-3cam"),
    ("onnx", "molmoact2-3cam"),
]  # as another case of its family
PACKED = {"fold-norms", "pack-qkv", "pack-gate-up"}
HEADED = PACKED | {"tabulate-time"}
REWRITES = {  # at least these; a model whose norms are read by what adds to them has none
    **dict.fromkeys(("groot-n15", "groot-n16", "groot-n17", "vla-jepa"), HEADED | {"hoist-positions"}),
    **dict.fromkeys(("smolvla-2cam", "smolvla-3cam-padded", "evo1", "evo1-mint"), HEADED),
    **dict.fromkeys(("pi0-2cam", "pi05-2cam"), HEADED),
    "pi0fast-2cam": PACKED,
    "cogact": HEADED,
    "omnivla": PACKED,
    "omnivla-edge": {"fold-norms", "pack-qkv"},
    **{case: set() for case in ("act-2cam", "act-env", "act-sizes", "act-3cam")},
    **{case: {"tabulate-time"} for case in ("diffusion-ddim", "diffusion-ddpm")},
    **{case: {"fold-norms", "pack-qkv", "tabulate-time"} for case in ("xvla-ee6d", "xvla-auto")},
    **{case: {"fold-norms", "pack-qkv", "tabulate-time"} for case in ("mtdit-ddim", "mtdit-ddpm")},
    **dict.fromkeys(("eo1-2cam", "eo1-fast", "wallx-2cam", "wallx-3cam"), HEADED),
    **{case: {"fold-norms", "pack-qkv"} for case in ("vqbet-parallel", "vqbet-sequential")},
    **{case: {"fold-norms", "pack-qkv"} for case in ("turbovla", "turbovla-3cam")},
    **dict.fromkeys(("molmoact2-2cam", "molmoact2-3cam"), HEADED),
}

Open = Callable[[str, str], Policy]


@pytest.fixture(scope="module")
def opened(case_bundle: Callable[[str], Path]) -> Open:
    """``opened("pi0-2cam", "plan")``: the policy on an engine, in float32; eager's is kept."""

    @cache
    def eager(case: str) -> Policy:
        return load(case_bundle(case), "cpu", "float32", "eager", allow_missing_cameras=True)

    def open_(case: str, engine: str) -> Policy:
        if engine == "eager":
            return eager(case)
        return load(case_bundle(case), "cpu", "float32", engine, allow_missing_cameras=True)

    return open_


@pytest.fixture(scope="module")
def wanted(opened: Open) -> Callable[[str, bool], Rounding]:
    """Eager's actions, and what rounding does to them; of the case's own words, or of shorter ones."""

    @cache
    def make(case: str, shorter: bool) -> Rounding:
        policy = opened(case, "eager")
        given = said(case, observation(case, golden_of(case)), shorter)
        if shorter:
            return make(case, False).about(policy.infer(given).actions)
        return rounding(lambda: policy.infer(given).actions)

    return make


@cache
def golden_of(case: str) -> Golden:
    from tests.cases import golden_cases

    return Golden(golden_cases() / case)


def said(case: str, given: Observation, shorter: bool) -> Observation:
    """Other words; of a policy whose answer may be refused, others that it was made for."""
    if shorter and case.startswith("pi0fast"):
        return fast_observation(golden_of(case), 1)
    return replace(given, prompt="open it") if shorter else given


def is_slow(engine: str, case: str) -> bool:
    """An export takes fifteen seconds to minutes; BitVLA has none. Of plan and cuda, which share their rewrites, a case
    has one by turns."""
    if case == "bitvla" or engine == "eager":
        return False
    other = ("plan", "cuda")[CASES.index(case) % 2]
    return (engine, case) in TWICE or case in LARGE or engine in ("onnx", other)


def cells() -> list[Any]:
    """Return (engine, case) of the whole table; the slow ones are marked."""
    slow = [pytest.mark.slow, pytest.mark.timeout(1200)]
    every = [
        pytest.param(engine, case, marks=slow if is_slow(engine, case) else ())
        for case in CASES
        for engine in ENGINES
    ]
    return [*every, ("cpu", "bitvla")]  # whose weights lie as that engine wants them


@pytest.mark.proves(engine="*", but=("onnx-bitvla",))
@pytest.mark.parametrize(("engine", "case"), cells())
def test_the_references_actions(engine, case, opened: Open, wanted) -> None:
    if why := EMPTY.get((case, engine)):
        with pytest.raises(SinewError, match=why):
            opened(case, engine)
        return
    policy, g = opened(case, engine), golden_of(case)
    given = observation(case, g)
    chunk = policy.infer(given)
    expected = g["actions"].reshape(-1, g["actions"].shape[-1])[:, : chunk.actions.shape[1]]
    assert_parity(chunk.actions, expected)
    if engine == "eager":
        model = policy.engine.model
        steps, most = len(chunk.timing.step_ms), model.head_runs(policy.spec.solver_steps)
        assert steps == most or (isinstance(model, AutoregressiveModel) and steps < most)
        return
    assert_close(wanted(case, False), chunk.actions)
    if case != "bitvla":  # other words may round otherwise, in whole numbers
        found = policy.infer(said(case, given, True)).actions
        assert_close(wanted(case, True), found)
        assert np.array_equal(policy.infer(given).actions, chunk.actions)  # nothing stays of other words


@pytest.mark.parametrize("case", REWRITES)
def test_rewrites_of_the_plan(case, opened: Open) -> None:
    plan = Plan.of(opened(case, "eager").engine.model)
    assert REWRITES[case] <= set(plan.applied)


@pytest.mark.parametrize("case", ["groot-n15", "groot-n16", "groot-n17"])
def test_rewrites_that_do_not_fit_say_so(case, opened: Open) -> None:
    plan = Plan.of(opened(case, "eager").engine.model, rewrites=REWRITES_OF_PLAN)
    outcomes = {outcome.name: outcome for outcome in plan.outcomes}
    for name in ("last-layer-kv", "drop-unread"):
        assert outcomes[name].status == "not applicable"
        assert "does not read" in outcomes[name].reason


@pytest.mark.proves(engine="cpu", precision="int8")
@pytest.mark.parametrize("case", FAST)
def test_a_head_in_int8(case, case_bundle, opened: Open, tmp_path) -> None:
    """Two errors apart: the weights', eager against eager, and the products', cpu against eager on the same weights."""
    small = stored(
        case_bundle(case), {"vision": "fp32", "language": "fp32", "head": "int8"}, tmp_path / "small.gguf"
    )
    given = observation(case, golden_of(case))
    exact = opened(case, "eager").infer(given).actions
    eager, cpu = (load(small, "cpu", "float32", engine).infer(given).actions for engine in ("eager", "cpu"))
    size = np.linalg.norm(exact)
    assert 1e-6 < np.linalg.norm(eager - exact) / size < 0.1
    assert 1e-8 < np.linalg.norm(cpu - eager) / size < 0.1
