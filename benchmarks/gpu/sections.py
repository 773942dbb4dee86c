"""The sections of ``make gpu``.

Each section runs in its own process, because a CUDA context cannot be used after an illegal memory access. A section
is a function of a :class:`Session`. It emits each row immediately, so that a later failure does not lose earlier rows.
"""

from __future__ import annotations

import importlib.util
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.gaps import gaps
from benchmarks.gpu.ladder import fused_by_inductor, ladder
from benchmarks.gpu.library import library
from benchmarks.gpu.models import MODELS, TARGETS
from benchmarks.gpu.repeats import repeats
from benchmarks.gpu.roofline import work
from benchmarks.gpu.session import NotHere, Row, Session, shrunk, still_there
from benchmarks.gpu.streams import streams
from benchmarks.gpu.sweep import sweep
from benchmarks.gpu.timeline import timeline

ROOT = Path(__file__).resolve().parents[2]
TESTS_NEED = ("pytest", "msgspec", "gguf", "yaml", "tqdm", "tokenizers", "safetensors", "PIL")
GPU_MARK = "pytest.mark." + "gpu"


# ----------------------------------------------------------------------------- machine


def machine(session: Session) -> None:
    """Measure the limits of the device: a copy, a bfloat16 product, and an e4m3 product. The other sections use these
    limits."""
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
        scale = a.float().abs().amax(1, keepdim=True) / 448
        x = (a.float() / scale).to(torch.float8_e4m3fn)
        types = {"out_dtype": torch.bfloat16, "use_fast_accum": True}
        call = partial(torch._scaled_mm, x, x.T, scale, scale.T, **types)  # noqa: SLF001
        session.emit({"what": "product, e4m3", "size": size, "flops": flops / _seconds(session, call)})


def _seconds(session: Session, call: Callable[[], Any], calls: int = 20) -> float:
    """Return the median time of one call in seconds."""
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
    """Compare every kernel with its reference, within the bounds for a GPU. Without a GPU, run the kernels in the
    interpreter."""
    from tests.engine.cuda import kernel_checks

    failed = 0
    for name, dtype, sizes in kernel_checks.all_checks():
        if session.left <= 0:
            raise TimeoutError("the time limit ended before all checks ran")
        row: Row = {"kernel": name, "dtype": str(dtype), "sizes": str(sizes), "error": ""}
        try:
            if kernel_checks.runs_here(name, sizes):
                kernel_checks.run(name, dtype, sizes)
            else:
                row["skipped"] = "FP8 needs compute capability 8.9"
        except ModuleNotFoundError as missing:  # one check also compares its kernel with Pillow
            row["skipped"] = f"{missing.name} is not installed"
        except Exception as caught:  # noqa: BLE001 - the failure of a kernel is a row, and the other kernels run
            row["error"] = f"{type(caught).__name__}: {caught}"[:400]
            failed += 1
        session.emit(row)
        if row["error"]:
            still_there(session, f"the check of {name}, {dtype}, {sizes}")
    if failed:
        raise RuntimeError(f"{failed} kernel checks failed; the rows name them")


def tests(session: Session) -> None:
    """Run the tests with the mark ``gpu``, which run engine cuda on the policies of the package."""
    if not (ROOT / "tests" / "fixtures").is_dir():
        raise NotHere(
            "the golden cases were left at home: pack them with `make gpu-carry CARRY_ARGS=--fixtures`"
        )
    absent = [name for name in TESTS_NEED if importlib.util.find_spec(name) is None]
    if absent:
        raise NotHere(f"these modules are not installed: {', '.join(absent)}")
    files = [
        str(path) for path in sorted((ROOT / "tests").rglob("test_*.py")) if GPU_MARK in path.read_text()
    ]
    if not files:
        raise NotHere("no test is marked gpu")
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", *files]
    session.emit(row := run_tests(command, max(session.left, 1)))
    if row["returncode"] is None:
        raise TimeoutError(f"not all tests ran: {row['summary']}")
    if row["returncode"]:
        raise RuntimeError(row["tail"])


def run_tests(command: list[str], seconds: float) -> Row:
    """Run pytest. Returns the exit code (None if the time limit ended it), its last lines, and the number of passed
    tests."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=seconds, check=False)
        code, out, err = done.returncode, done.stdout, done.stderr
    except subprocess.TimeoutExpired as late:  # the exception contains bytes, although text=True
        code, (out, err) = None, (_text(late.stdout), _text(late.stderr))
    lines = out.strip().splitlines()
    row: Row = {"returncode": code, "summary": lines[-1] if lines else err[-400:]}
    if code is not None:
        found = re.findall(r"(\d+) (passed|skipped|failed|error)", row["summary"])
        row |= {"passed": 0, "skipped": 0} | {word: int(number) for number, word in found}
    return row | {"tail": "\n".join(lines[-15:]) or err[-800:]}


def _text(output: bytes | str | None) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""


# ----------------------------------------------------------------------------- kernel launches


def between(session: Session) -> None:
    """Measure the cost between two kernels (``gaps.py``): links of a chain, a barrier, and reads."""
    if not session.is_gpu:
        raise NotHere("launches and barriers need a GPU")
    measured(session, gaps(50))


def measured(session: Session, rows: Iterator[Row]) -> None:
    """Emit each row immediately, until the time limit.

    Raises:
        RuntimeError: A row has the field ``wrong``, which means that a kernel computed a wrong result.
        TimeoutError: The time limit ended before the last row.
    """
    failures = []
    for row in rows:
        session.emit(row)
        if row.get("wrong"):
            failures.append(f"{row['what']}: {row['error']}")
        if session.left <= 0:
            raise TimeoutError("; ".join(["time limit reached: all later rows did not run", *failures]))
    if failures:
        raise RuntimeError("; ".join(failures))


# ----------------------------------------------------------------------------- rooflines


def bounds(session: Session) -> None:
    """Emit the products of every case, from which the table computes its rooflines. Needs no GPU."""
    for case in TARGETS.values():
        if session.left <= 0:
            raise TimeoutError(f"{case.name} and what follows was not counted")
        case = shrunk(case, session.tiny)
        session.emit({"case": case.name, "work": work(case, session.tiny)})


ORDER = ("pi0.5", "smolvla", "pi0")  # the models of the targets, in the order of need
# name -> function, seconds. The order is the order of need, so that the end of the budget cuts off the least needed.
SECTIONS: dict[str, tuple[Callable[[Session], None], float]] = {
    "machine": (machine, 20),
    "checks": (checks, 60),
    "gaps": (between, 20),
    **{
        f"{what} {name}": (partial(run, name), seconds)
        for name in ORDER
        for what, run, seconds in (("ladder", ladder, 120), ("timeline", timeline, 60))
    },
    **{f"library {name}": (partial(library, name), 60) for name in ORDER},
    **{f"streams {name}": (partial(streams, name), 60) for name in ORDER},
    **{f"repeats {name}": (partial(repeats, name), 40) for name in MODELS},
    "ladder groot": (partial(ladder, "groot"), 120),
    "timeline groot": (partial(timeline, "groot"), 60),
    "tests": (tests, 110),
    **{f"tiles {name}": (partial(sweep, name), 150) for name in MODELS},
    "bounds": (bounds, 300),  # this section runs on a machine without a GPU, so its time does not matter
    **{f"inductor {name}": (partial(fused_by_inductor, name), 300) for name in MODELS},
}
