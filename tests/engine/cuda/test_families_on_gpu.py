"""Every golden case on a GPU, engine by engine, against eager float32 on the CPU. Marked ``gpu``."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from sinew.core import Observation
from sinew.engine.cuda.kernels.lang import interpreted
from sinew.engine.cuda.kernels.norm_linear import norm_linear_kernel
from sinew.policy import Policy, load
from tests.cases import golden_cases
from tests.closeness import rounding
from tests.golden import Golden
from tests.models.stages import CASES, observation

pytest.importorskip("triton")
pytestmark = pytest.mark.gpu

ENGINES = ("eager", "plan", "cuda")
# Relative L2 that bfloat16 may always have. Beyond it, twice what eager has: roundings of the same size may add up.
HALF = 1e-2


@cache
def of(case: str) -> Observation:
    return observation(case, Golden(golden_cases() / case))


def distance(found: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


@pytest.mark.parametrize("case", CASES)
def test_a_gpu_gives_the_references_actions(case: str, case_bundle: Callable[[str], Path]) -> None:
    """In float32 within what rounding does to the computation; in bfloat16 as near as eager in bfloat16."""
    if not torch.cuda.is_available() or interpreted(norm_linear_kernel):
        pytest.skip("needs a CUDA device and TRITON_INTERPRET=0")
    given, problems = of(case), []
    policy = opened(case_bundle(case), "cpu", "fp32", "eager")
    exact = rounding(lambda: policy.infer(given).actions)
    wanted = np.asarray(policy.infer(given).actions)
    own = 0.0
    for dtype in ("fp32", "bf16"):
        for engine in ENGINES:
            try:
                made = opened(case_bundle(case), "cuda", dtype, engine)
                found = made.infer(given).actions
                again = time.perf_counter()
                same = np.array_equal(found, made.infer(given).actions)
                took = 1e3 * (time.perf_counter() - again)
            except Exception:  # noqa: BLE001 - the other engines still count
                problems.append(f"{engine} {dtype}: {traceback.format_exc()[-1500:]}")
                continue
            off = distance(found, wanted)
            own = off if (engine, dtype) == ("eager", "bf16") else own
            row = {
                "case": case,
                "engine": engine,
                "dtype": dtype,
                "l2": off,
                "same": same,
                "ms": round(took, 2),
            }
            print(json.dumps(row))
            if dtype == "fp32" and (why := exact.refusal(found)):
                problems.append(f"{engine} {dtype}: relative L2 {off:.2e}: {why}")
            told = policy.facts.chooses_tokens  # rounding may make it say another word, and any other action
            if dtype == "bf16" and engine != "eager" and not told and off > max(HALF, 2 * own):
                problems.append(f"{engine} {dtype}: relative L2 {off:.2e}, eager's {own:.2e}")
            if not same:
                problems.append(f"{engine} {dtype}: another answer to the same observation")
    assert not problems, "\n".join(problems)


def opened(bundle: Path, device: str, dtype: str, engine: str) -> Policy:
    return load(bundle, device, dtype, engine, allow_missing_cameras=True)
