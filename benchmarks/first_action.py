"""Measure the seconds from `import torch` to the first action of a policy, with warm and with cold files.

python -m benchmarks.first_action BUNDLE [BUNDLE...] [--engine cpu] [--threads 2] [--rounds 5] [--cold]

Each measurement runs in a new process. It has these parts: `import sinew`, loading (opening, weights, kernels), and
the first inference. The second inference is measured for comparison. An earlier run, which is not measured, compiles
kernels and graphs and reads the file. With --cold, the system drops the file and its graphs from the page cache before
each round, so that the weights come from the disk. Compiled kernels stay. The benchmark prints elapsed seconds and
processor seconds of the process. The last line of the output is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from sinew.core import machine

LAPS = ("import", "load", "first", "second")


def once(bundle: Path, engine: str, threads: int) -> dict[str, list[float]]:
    """Return the elapsed seconds and the processor seconds of each part of the start, measured in this process."""
    import torch  # noqa: F401 - the time of this import is not a part of the measurement

    laps: dict[str, list[float]] = {}
    last = [time.perf_counter(), time.process_time()]

    def lap(name: str) -> None:
        nonlocal last
        now = [time.perf_counter(), time.process_time()]
        laps[name] = [b - a for a, b in zip(last, now, strict=True)]
        last = [time.perf_counter(), time.process_time()]

    from sinew.policy import load

    lap("import")
    policy = load(bundle, engine=engine, dtype="fp32", threads=threads)
    lap("load")
    observation = policy.dummy_observation()
    policy.infer(observation)
    lap("first")
    policy.infer(observation)
    lap("second")
    return laps


def forget(path: Path) -> None:
    """Drop the pages of a file from the page cache of the system."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bundles", type=Path, nargs="+")
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.here:
        print(json.dumps(once(arguments.bundles[0], arguments.engine, arguments.threads)))
        return
    found: dict[str, list[dict[str, list[float]]]] = {str(path): [] for path in arguments.bundles}
    options = ["--engine", arguments.engine, "--threads", str(arguments.threads), "--here"]
    for index in range(arguments.rounds + 1):
        for path in arguments.bundles:
            if arguments.cold and index:
                for file in (path, *path.parent.glob(f"{path.stem}.onnx-*/*")):
                    forget(file)
            command = [sys.executable, "-m", "benchmarks.first_action", str(path), *options]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            if index:  # the first round only compiles and warms up
                found[str(path)].append(json.loads(done.stdout.splitlines()[-1]))
    rows = {}
    for name, rounds in found.items():
        for at, what in enumerate(("elapsed time", "processor time")):
            laps = {lap: statistics.median(taken[lap][at] for taken in rounds) for lap in LAPS}
            total = statistics.median(sum(taken[lap][at] for lap in LAPS[:-1]) for taken in rounds)
            rows[f"{name}, {what}"] = {lap: round(value, 3) for lap, value in laps.items()} | {
                "to the first action": round(total, 3)
            }
            print(f"{name:40} {what:14} {rows[f'{name}, {what}']}")
    record = {
        "hardware": machine.cpu_model(),
        "threads": arguments.threads,
        "engine": arguments.engine,
        "cold": arguments.cold,
        "load_average": os.getloadavg()[0],
        "seconds": rows,
    }
    print(json.dumps(record))


if __name__ == "__main__":
    main()
