"""What ``make gpu`` measures, section by section. Each runs in a process of its own (``gpu.py``), because an illegal
access leaves a CUDA context that answers nothing any more.

A section is a function of a :class:`Session`; it hands over rows as they come, so that what was measured before a
failure is kept.
"""

from __future__ import annotations

import importlib.util
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import kernels
from benchmarks.gpu.ladder import compiled, grid, ladder
from benchmarks.gpu.models import MODELS, TARGETS, cases
from benchmarks.gpu.roofline import work
from benchmarks.gpu.session import NotHere, Row, Session, shrunk

ROOT = Path(__file__).resolve().parents[2]
TESTS_NEED = ("pytest", "msgspec", "gguf", "yaml", "tqdm", "tokenizers", "safetensors", "PIL")
GPU_MARK = "pytest.mark." + "gpu"


# ----------------------------------------------------------------------------- machine


def machine(session: Session) -> None:
    """The ceilings that everything is held against: a copy, a bfloat16 product, an e4m3 product."""
    size, nbytes = (256, 1 << 20) if session.tiny else (8192, 1 << 30)
    a, b = (torch.randn(size, size, device=session.device).bfloat16() for _ in "ab")
    source = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device=session.device)
    target = torch.empty_like(source)
    flops = 2 * size**3
    session.emit(
        {"what": "product, bfloat16", "size": size, "flops": flops / _seconds(session, lambda: a @ b)}
    )
    copied = _seconds(session, lambda: target.copy_(source))
    session.emit({"what": "copy", "bytes": 2 * nbytes, "bandwidth": 2 * nbytes / copied})
    if session.is_gpu and torch.cuda.get_device_capability(session.device) >= (8, 9):
        x, scale = kernels.quantised(a)
        call = partial(torch._scaled_mm, x, x.T, scale, scale.T, out_dtype=torch.bfloat16)  # noqa: SLF001
        session.emit({"what": "product, e4m3", "size": size, "flops": flops / _seconds(session, call)})


def _seconds(session: Session, call: Callable[[], Any], calls: int = 20) -> float:
    """Median of one call."""
    for _ in range(3):
        call()
    return 1e-3 * statistics.median(_each(session, call) for _ in range(calls))


def _each(session: Session, call: Callable[[], Any]) -> float:
    if not session.is_gpu:
        start = time.perf_counter()
        call()
        return 1e3 * (time.perf_counter() - start)
    start_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in "ab")
    start_event.record()
    call()
    end_event.record()
    end_event.synchronize()
    return start_event.elapsed_time(end_event)


# ----------------------------------------------------------------------------- correctness


def checks(session: Session) -> None:
    """Every kernel against its twin, with the bounds of a GPU (in the interpreter without one)."""
    from tests import kernel_checks

    failed = 0
    for name, dtype, sizes in kernel_checks.all_checks():
        if session.left <= 0:
            raise TimeoutError("not all checks ran")
        row: Row = {"kernel": name, "dtype": str(dtype), "sizes": str(sizes), "error": ""}
        try:
            if kernel_checks.runs_here(name):
                kernel_checks.run(name, dtype, sizes)
            else:
                row["skipped"] = "FP8 needs compute capability 8.9"
        except ModuleNotFoundError as missing:  # Pillow, against which one kernel is compared beside its twin
            row["skipped"] = f"{missing.name} is not installed"
        except Exception as caught:  # noqa: BLE001 - one kernel's failure is a row, the others still count
            row["error"] = f"{type(caught).__name__}: {caught}"[:400]
            failed += 1
        session.emit(row)
    if failed:
        raise RuntimeError(f"{failed} checks of kernels do not hold")


def tests(session: Session) -> None:
    """The files with tests marked ``gpu``: the engine on the package's own policies, read from their bundles."""
    absent = [name for name in TESTS_NEED if importlib.util.find_spec(name) is None]
    if absent:
        raise NotHere(f"not installed: {', '.join(absent)}")
    files = [str(path) for path in sorted((ROOT / "tests").glob("test_*.py")) if GPU_MARK in path.read_text()]
    if not files:
        raise NotHere("no test is marked gpu")
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", *files]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=max(session.left, 1), check=False
    )
    lines = done.stdout.strip().splitlines()
    session.emit({"returncode": done.returncode, "summary": lines[-1] if lines else done.stderr[-400:]})
    if done.returncode:
        raise RuntimeError("\n".join(lines[-15:]) or done.stderr[-800:])


# ----------------------------------------------------------------------------- first measurements


def first(session: Session) -> None:
    """(a) to (d) of ``kernels.py``, the tiles tuned on the way."""
    if not session.is_gpu:
        raise NotHere("the first measurements need a GPU")
    parts = (
        lambda: kernels.fixed_cost(50),
        lambda: kernels.skinny(50, True),
        lambda: kernels.gate_up(20, True),
        lambda: kernels.attention(50, True),
    )
    failures = []
    for name, part in zip("abcd", parts, strict=True):
        if session.left <= 0:
            raise TimeoutError(f"({name}) and what follows did not run")
        try:
            for row in part():
                session.emit(row)
        except Exception as error:  # noqa: BLE001 - the other three still count
            failures.append(f"({name}) {type(error).__name__}: {error}"[:400])
            session.emit({"what": f"({name})", "error": failures[-1]})
    if failures:
        raise RuntimeError("; ".join(failures))


# ----------------------------------------------------------------------------- rooflines


def bounds(session: Session) -> None:
    """The products of every case, from which the table makes its rooflines. Needs no GPU."""
    others = [case for model in MODELS for case in cases(model)[1:]]
    for case in [*TARGETS.values(), *([] if session.tiny else others)]:
        if session.left <= 0:
            raise TimeoutError(f"{case.name} and what follows was not counted")
        case = shrunk(case, session.tiny)
        session.emit({"case": case.name, "work": work(case, session.tiny)})


SECTIONS: dict[
    str, tuple[Callable[[Session], None], float]
] = {  # function, seconds; the order is that of need
    "machine": (machine, 30),
    "checks": (checks, 80),
    "first": (first, 80),
    **{f"ladder {name}": (partial(ladder, name), 110 if name == "pi0.5" else 75) for name in MODELS},
    "bounds": (bounds, 40),
    "compile smolvla": (partial(compiled, "smolvla"), 70),
    **{f"grid {name}": (partial(grid, name), 50 if name == "pi0.5" else 30) for name in MODELS},
    "tests": (tests, 60),
    **{f"compile {name}": (partial(compiled, name), 300) for name in MODELS if name != "smolvla"},
}
