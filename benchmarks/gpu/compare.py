"""Compare this tree with another one on the same GPU: ``python -m benchmarks.gpu --base build/gpu/base.tgz``.

Each tree runs in a process of its own, which holds the model. The processes compute in turns: base, new, base, new. A
pair of turns gives one difference, so the slow changes of the GPU's clocks are in both. The row of a model has the
median of the differences with its 95 % interval, and the relative L2 between the chunks of both trees.

Both processes run this file. All other modules of a process come from its tree. The archive of the
base is made by ``python -m benchmarks.gpu.carry --base COMMIT``.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

Record = dict[str, Any]
ROOT = Path(__file__).resolve().parents[2]
RUNGS = ("engine", "fp8")
CALLS = 40  # in a turn
LEAST = 6  # pairs, so that the interval can exclude the extremes
MOST = 60  # pairs
START = 240.0  # seconds to build the model and to record the graph


# ----------------------------------------------------------------------------- the process of one tree


def worker(model: str, device_name: str, tiny: bool) -> None:
    """Build the engines of this tree. Then answer each line of the standard input, "RUNG CALLS", with one line: the
    median milliseconds of these calls."""
    import numpy as np
    import torch

    from benchmarks.gpu import models
    from benchmarks.gpu.ladder import INPUTS, calibrated
    from benchmarks.gpu.rungs import Engine, cuda_engine, end_to_end, plan_of
    from benchmarks.gpu.session import Session, shrunk

    answers, sys.stdout = sys.stdout, sys.stderr  # a print of a library is no answer
    torch.manual_seed(0)
    device = torch.device("cuda", 0) if device_name == "cuda" else torch.device(device_name)
    case = shrunk(models.TARGETS[model], tiny)
    base = models.with_chunk(models.random_model(model, device, tiny=tiny), case.chunk)
    recipe, plan = models.processing(model, base.config), plan_of(base)
    camera = (24, 32) if tiny else models.CAMERA
    inputs = models.samples(case, base.config, INPUTS, camera)
    scales = calibrated(plan, recipe, inputs, Session(device, START, print, tiny))
    engines = {
        "engine": Engine(cuda_engine(plan, recipe, device)),
        "fp8": Engine(cuda_engine(plan, recipe, device, scales, fp8=("language",))),
    }
    chunks = {name: np.stack([made.run(sample)[0] for sample in inputs]) for name, made in engines.items()}
    ready = {"case": case.name, "chunks": {name: chunk.ravel().tolist() for name, chunk in chunks.items()}}
    print(json.dumps(ready), file=answers, flush=True)
    for line in sys.stdin:
        name, calls = line.split()
        row, _ = end_to_end(engines[name], inputs, recipe, int(calls), 1e3)
        print(json.dumps({"ms": row["p50_ms"], "drift": row["drift"]}), file=answers, flush=True)


# ----------------------------------------------------------------------------- both trees


def compared(archive: Path, device: str, tiny: bool, model: str, seconds: float) -> Record:
    """Compare the trees on one model. Returns {"status", "reason", "seconds", "rows"}.

    Args:
        archive: The base, an archive with ``sinew`` and ``benchmarks`` at its top or in one folder.
        device: Torch name of the device.
        tiny: Use small models.
        model: Key of ``MODELS``.
        seconds: Time limit.
    """
    start = time.monotonic()
    until = start + seconds
    rows: list[Record] = []
    status, reason = "done", ""
    try:
        with ExitStack() as held:
            folder = Path(held.enter_context(tempfile.TemporaryDirectory()))
            trees = [unpacked(archive, folder), ROOT]
            both = [held.enter_context(running(tree, model, device, tiny)) for tree in trees]
            ready = [_answer(process, min(START, seconds)) for process in both]
            for number, rung in enumerate(RUNGS):
                left = (until - time.monotonic()) / (len(RUNGS) - number)
                turns = list(alternated(both, rung, left, 3 if tiny else CALLS))
                row = {"case": ready[0]["case"], "rung": rung, **difference(turns)}
                rows.append(row | {"l2": distance(*(each["chunks"][rung] for each in ready))})
    except TimeoutError as error:
        status, reason = "partial", str(error)
    except (ArithmeticError, OSError, ValueError, tarfile.TarError) as error:
        status, reason = "failed", f"{type(error).__name__}: {error}"
    return {"status": status, "reason": reason, "rows": rows, "seconds": round(time.monotonic() - start, 1)}


def unpacked(archive: Path, folder: Path) -> Path:
    """Unpack the base. Returns the folder that contains ``benchmarks``.

    Raises:
        ValueError: The archive has no such folder.
    """
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    for found in (folder, *folder.iterdir()):
        if (found / "benchmarks" / "gpu" / "rungs.py").is_file() and (found / "sinew").is_dir():
            return found
    raise ValueError(f"{archive}: expected the folders sinew, perf, packages and benchmarks of a checkout")


@contextmanager
def running(tree: Path, model: str, device: str, tiny: bool) -> Iterator[subprocess.Popen[str]]:
    """Start the process of a tree, and end it with the context."""
    command = [sys.executable, str(Path(__file__).resolve()), model, "--device", device]
    paths = [str(tree / each) for each in ("", "packages/sinew-client/src", "perf")]
    environment = dict(os.environ) | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1"}
    environment.setdefault("TRITON_INTERPRET", "0" if device.startswith("cuda") else "1")
    process = subprocess.Popen(
        [*command, *(["--tiny"] if tiny else [])],
        cwd=tree,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _answer(process: subprocess.Popen[str], seconds: float) -> Any:
    """Return the next answer of a process.

    Raises:
        TimeoutError: There was no answer in time.
        ValueError: The process ended.
    """
    import select

    if not select.select([process.stdout], [], [], max(seconds, 0.0))[0]:
        raise TimeoutError(f"a tree did not answer in {seconds:.0f} s")
    assert process.stdout is not None
    if not (line := process.stdout.readline()):
        raise ValueError("the process of a tree ended; its messages are above")
    return json.loads(line)


def alternated(
    both: Sequence[subprocess.Popen[str]], rung: str, seconds: float, calls: int
) -> Iterator[tuple[float, float]]:
    """Yield the milliseconds of base and new for each pair of turns.

    Raises:
        ArithmeticError: A tree gave two answers to the same input.
        TimeoutError: The time ended before the least number of pairs.
    """
    until = time.monotonic() + seconds
    for pair in range(MOST):
        if time.monotonic() > until:
            if pair < LEAST:
                raise TimeoutError(f"{rung}: {pair} pairs of turns, and {LEAST} are needed for an interval")
            return
        turn = []
        for process in both:
            assert process.stdin is not None
            process.stdin.write(f"{rung} {calls}\n")
            process.stdin.flush()
            answer = _answer(process, max(until - time.monotonic(), 30.0))
            if answer["drift"]:
                raise ArithmeticError(
                    f"{rung}: two answers to the same input differ by {answer['drift']:.3g}"
                )
            turn.append(answer["ms"])
        yield turn[0], turn[1]


def difference(turns: Sequence[tuple[float, float]]) -> Record:
    """Return the median difference, new minus base, with its 95 % interval, which is by the ranks of the differences.

    Args:
        turns: Milliseconds of base and new.
    """
    from benchmarks.paired import median_interval

    base, new = zip(*turns, strict=True)
    middle, low, high = median_interval([after - before for before, after in turns])
    return {
        "pairs": len(turns),
        "base_ms": statistics.median(base),
        "new_ms": statistics.median(new),
        "difference_ms": middle,
        "low_ms": low,
        "high_ms": high,
        "turns_ms": [list(turn) for turn in turns],
    }


def distance(base: Sequence[float], new: Sequence[float]) -> float:
    """Return the relative L2 between the chunks of two trees. 0 means that they have the same bits."""
    squares = sum((a - b) ** 2 for a, b in zip(base, new, strict=True))
    return float((squares / sum(b**2 for b in base)) ** 0.5)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--device")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    worker(options.model, options.device, options.tiny)
