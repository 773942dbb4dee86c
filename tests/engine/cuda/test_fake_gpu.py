"""Every launch of the published models' chunks, as Triton would hand it to a GPU. Nothing is run."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
from tests.engine.cuda.fake_gpu import CASES, FORMS, MODELS, QUICK, SHARED

ROOT = Path(__file__).resolve().parents[3]
pytestmark = pytest.mark.kernels


# Each compiles hundreds of kernels; the measurements are planned for an H100 and an H200.
PLANNED = 90
RUNS = [(PLANNED, "--quick"), *(pytest.param((c, ""), marks=pytest.mark.slow) for c in sorted(SHARED))]


@pytest.fixture(scope="module", params=RUNS, ids=lambda run: f"{run[0]}{run[1]}")
def found(request, tmp_path_factory) -> dict:
    """From a process of its own: Triton decides at import whether it compiles or interprets."""
    cache = str(tmp_path_factory.mktemp("triton"))
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": cache}
    command = [sys.executable, "-m", "tests.engine.cuda.fake_gpu", *map(str, request.param)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stderr[-3000:]
    cases = QUICK if request.param[1] else CASES[request.param[0]]
    return json.loads(done.stdout.splitlines()[-1]) | {"cases": cases}


def test_all_cases_reach_the_driver(found) -> None:
    """Bound, specialised, compiled, within the shared memory of the device, and out of no registers."""
    reports = found["chunks"]
    capability = reports[0]["capability"]
    cases = {(report["model"], report["variant"]) for report in reports}
    assert cases == {(name, variant) for variant, models in found["cases"].items() for name in models}
    for report in reports:
        case = report["model"], report["variant"]
        # The widest heads' attention keeps 16 bytes on the stack, and was the fastest of 8 tiles even so.
        assert all(spilled <= 16 for spilled in report["spilled"].values()), case
        assert report["spilled"].keys() <= {"packed_attention"}, case
        assert 0 < report["registers"] <= 255, case
        assert 0 < report["shared"] <= SHARED[capability] << 10, case
        launches = sum(report["launches"].values())
        assert launches > 850, case
        # Kinds of launches that no earlier case of the process has compiled; more would compile for minutes.
        assert 4 <= report["compiled"] <= 64, case


def test_low_bit_products_compile_for_every_gpu(tmp_path) -> None:
    """Orin (87), Thor (110) and the others: within their shared memory, and with no register on the stack."""
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "tests.engine.cuda.fake_gpu", "--lowbit"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stderr[-3000:]
    reports = json.loads(done.stdout.splitlines()[-1])
    assert {(each["capability"], each["form"]) for each in reports} == {*itertools.product(SHARED, FORMS)}
    for each in reports:
        assert 0 < each["shared"] <= SHARED[each["capability"]] << 10, each
        assert 0 < each["registers"] <= 255, each
        assert not each["spilled"], each


def test_the_attention_of_batches_compiles_for_every_gpu(tmp_path) -> None:
    """Two and eight observations: within shared memory and registers, as the attention of one."""
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "tests.engine.cuda.fake_gpu", "--batches"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stderr[-3000:]
    reports = json.loads(done.stdout.splitlines()[-1])
    assert {(each["capability"], each["batch"]) for each in reports} == {*itertools.product(SHARED, (2, 8))}
    for each in reports:
        assert each["shared"] <= SHARED[each["capability"]] << 10, each
        assert 0 < each["registers"] <= 255, each
        assert each["spilled"] <= 32, each  # 24 bytes of pi0.5's head on sm_100 and sm_110


# The operations of an engine on its two CUDA streams, for one prefix and one solution.
TWO_STREAMS = [
    "wait for an event",  # The former upload has read the memory that is written now.
    "prefix records",
    *["prefix replays"] * 2,  # vision, and the language model
    "prefix records",
    "wait for an event",
    "read returns",
    "head follows",
    "head replays",
    "wait for head",
    "solve returns",
]


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("quick", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_everything_is_on_the_device(tmp_path, quick: bool) -> None:
    """Of the engine's own torch operations, whose operands could lie on two devices."""
    command = [sys.executable, "-m", "tests.engine.cuda.fake_device", str(tmp_path), *["--quick"] * quick]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stderr[-3000:]
    reports = json.loads(done.stdout.splitlines()[-1])
    assert {report["model"] for report in reports} == set(MODELS)
    for report in reports:
        options = report["options"]
        stages = "apart" in options
        assert report["shape"] == [50, 7], options
        assert ("launch" in report) == options.get("kernels", True), options
        if "streams" in options:
            assert report["order"] == TWO_STREAMS
            assert report["streams"] == ["head", "prefix"]
            assert report["shared"] == []
            continue
        # The empty first graph of the recorder, and one of the whole, or of vision, prefix and a step, which is
        # replayed ten times.
        assert report["capture"] == (4 if stages else 2), options
        assert report["replay"] == (12 if stages else 1), options
