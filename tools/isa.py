"""``make test-isa``: run the tests that depend on arithmetic for each instruction set of this machine.

``python -m tools.isa [NAME ...]`` runs TESTS once for each combination and prints a table. ``--list`` prints the
names of the combinations. By default, all of them are run, including the lowest. ``by-shape`` is not an instruction
set. It runs BATCHES with products that round by the shape of their batch, as Intel's MKL computes them
(``shape_rounding.py``). The exit status is 1 if a test failed. ``make test-kernels`` tests emulated instruction sets
and other processors.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tests import shape_rounding

ROOT = Path(__file__).resolve().parents[1]
# All tests whose result depends on arithmetic.
TESTS = (
    *("tests/models", "tests/layers", "tests/processing", "tests/validate"),
    # On the robot's side, only these parts compute actions. Clocks, names, servers and decision logs round nothing.
    *(f"tests/control/test_{name}.py" for name in ("envelope", "kinematics", "logic", "motion_fit")),
    *(f"tests/control/test_{name}.py" for name in ("promises", "rounding", "trajectory")),
    *(f"tests/stream/test_{name}.py" for name in ("stream_defaults", "text", "windows")),
    *(
        "tests/test_solvers.py",
        "tests/engine/cpu",
        "tests/engine/test_choose.py",
        "tests/contract/test_unlike_models.py",
    ),
    *("tests/contract/test_family_engines.py", "tests/engine/test_guidance.py", "tests/engine/test_plan.py"),
    *("tests/engine/test_quantize.py", "tests/engine/test_upcast.py"),
)
# These tests compute batches, also in other processes, or compare answers from different batches.
BATCHES = (
    *(
        f"tests/engine/test_{name}.py"
        for name in ("engine_adapters", "batches", "classifier_free", "onnx_batches")
    ),
    *(f"tests/engine/test_{name}.py" for name in ("committed", "reuse", "speakers", "threads")),
    *(f"eval/tests/test_{name}.py" for name in ("evaluate", "evidence", "exploration", "farm", "rollouts")),
    *(
        f"tests/serve/test_{name}.py"
        for name in ("fleet", "groot_server", "records", "replay", "server", "generated_text")
    ),
)
MARKS = "not slow and not gpu and not kernels"
# Three kinds of tests are left out. ONNX Runtime selects its instructions itself, independent of the variables
# (conftest.py marks all tests with exported graphs as onnx). The CPU of a robot does not compute like engine cuda,
# whose kernels' references these tests run. Planted errors test other tests.
CHOSEN = "not onnx and not cuda and not planted"


@dataclass(frozen=True)
class Combination:
    """The settings of one run.

    Attributes:
        needs: Instruction set that the processor must have, as in /proc/cpuinfo. "" if any processor can run this.
        aten: Value of the variable of ATen. "" lets ATen choose.
        mkl: Value of the variable of MKL. "" lets MKL choose.
        onednn: Value of the variable of oneDNN. "" lets oneDNN choose.
        kernels: Value of SINEW_CPU_KERNELS. "" lets Sinew choose.
        numpy: Features that numpy must not use.
        threads: Compute threads.
        by_shape: True if matrix products round by the shape of their batch (tests/shape_rounding.py).
    """

    name: str
    needs: str = ""  # a flag of the processor
    aten: str = ""
    mkl: str = ""
    onednn: str = ""
    kernels: str = ""
    numpy: tuple[str, ...] = ()
    threads: int = 1
    by_shape: bool = False  # products round by the shape of their batch

    def environment(self) -> dict[str, str]:
        named = {
            "ATEN_CPU_CAPABILITY": self.aten,
            "MKL_ENABLE_INSTRUCTIONS": self.mkl,
            "ONEDNN_MAX_CPU_ISA": self.onednn,
            "SINEW_CPU_KERNELS": self.kernels,
            "NPY_DISABLE_CPU_FEATURES": " ".join(self.numpy),
            "OMP_NUM_THREADS": str(self.threads),
            shape_rounding.VARIABLE: "1" if self.by_shape else "",
        }
        kept = {name: value for name, value in os.environ.items() if name not in named}
        return {**kept, **{name: value for name, value in named.items() if value}}


def combinations() -> list[Combination]:
    """Return the combinations that this machine can run, the lowest first."""
    found = [
        Combination("lowest", "", "default", "SSE4_2", "SSE41", "portable", numpy_features("")),
        Combination("avx2", "avx2", "avx2", "AVX2", "AVX2", "avx2", numpy_features("512|V4|_SPR|_ICL")),
        Combination(
            "avx-vnni", "avx_vnni", "avx2", "AVX2", "AVX2_VNNI", "avxvnni", numpy_features("512|V4|_SPR|_ICL")
        ),
        Combination("avx512", "avx512bw", "avx512", "AVX512", "AVX512_CORE", "avx2"),
        Combination("avx512-vnni", "avx512_vnni", "avx512", "AVX512", "AVX512_CORE_VNNI", "avx512vnni"),
        Combination("avx512-bf16", "avx512_bf16", "avx512", "AVX512", "AVX512_CORE_BF16", "avx512vnni"),
        Combination("amx", "amx_int8", "avx512", "AVX512", "AVX512_CORE_AMX", "amx"),
        Combination("lowest-2", "", "default", "SSE4_2", "SSE41", "portable", numpy_features(""), 2),
        Combination("native"),
        Combination("native-2", threads=2),
        Combination("by-shape", by_shape=True),
    ]
    from sinew.core import machine

    flags = machine.cpu_flags()
    return [each for each in found if not each.needs or each.needs in flags]


def numpy_features(pattern: str) -> tuple[str, ...]:
    """Return the features that numpy selects at run time on this machine, and whose names match the pattern."""
    from numpy._core._multiarray_umath import __cpu_dispatch__, __cpu_features__

    return tuple(name for name in __cpu_dispatch__ if __cpu_features__.get(name) and re.search(pattern, name))


def run(each: Combination, workers: int, more: list[str]) -> tuple[bool, str, list[str]]:
    """Run the tests. Returns whether all passed, pytest's last line, and the failures with their reasons."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-m",
        MARKS,
        "-k",
        CHOSEN,
        *(more or (BATCHES if each.by_shape else TESTS)),
    ]
    if workers > 1:
        command += ["--workers", str(workers)]
    done = subprocess.run(command, cwd=ROOT, env=each.environment(), capture_output=True, text=True)
    lines = done.stdout.strip().splitlines() or done.stderr.strip().splitlines() or ["nothing"]
    failures = [line for line in lines if line.startswith(("FAILED", "ERROR", "E  "))]
    return done.returncode == 0, lines[-1].strip("= "), failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="combinations (default: all that this machine supports)")
    parser.add_argument("--list", action="store_true", help="print the combinations and their variables")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--tests", nargs="+", default=[], help="arguments of pytest (default: all tests)")
    given = parser.parse_args()
    here = {each.name: each for each in combinations()}
    if unknown := [name for name in given.names if name not in here]:
        parser.error(f"unknown combination {', '.join(unknown)}; use one of {', '.join(here)}")
    chosen = [here[name] for name in given.names] or list(here.values())
    width = max(map(len, here))
    if given.list:
        for each in chosen:
            own = {name: value for name, value in each.environment().items() if os.environ.get(name) != value}
            print(f"{each.name:{width}}  " + " ".join(f"{name}={value!r}" for name, value in own.items()))
        return 0
    table, every = [], True
    for each in chosen:
        begun = time.monotonic()
        passed, summary, failures = run(each, given.workers, given.tests)
        every = every and passed
        row = f"{each.name:{width}}  {'passed' if passed else 'FAILED':6}  {time.monotonic() - begun:5.0f} s  {summary}"
        print(row, *failures, sep="\n", flush=True)
        table.append(row)
    if len(table) > 1:
        print("", *table, sep="\n")
    return 0 if every else 1


if __name__ == "__main__":
    sys.exit(main())
