"""Measure the latency of a policy while another process keeps one of the policy's CPU cores busy.

python benchmarks/busy_neighbour.py BUNDLE [--engine eager --engine onnx] [--runs 20] [--threads N] [--spin]

Each engine runs in its own process: --runs inferences alone, and --runs inferences next to a process that never
sleeps. A percentile is a measured value, whose rank is rounded up. By default, idle threads of the libraries sleep.
With --spin, idle threads spin, which is the default of the libraries. The output has one JSON object per line.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from sinew.core import machine

# The busy process ends together with the process that started it, also after a crash of that process.
HOG = """
import os, sys
os.sched_setaffinity(0, {int(sys.argv[1])})
parent = os.getppid()
print(flush=True)
while os.getppid() == parent:
    for _ in range(1_000_000):
        pass
"""


def one_engine(bundle: Path, engine: str, runs: int, threads: int | None, spin: bool) -> dict[str, object]:
    if spin:  # `import sinew` has set these variables, and torch is not imported yet
        for name in machine.WAITING:
            os.environ.pop(name, None)
        if engine == "onnx":
            _let_onnxruntime_spin()
    from sinew.bench.measure import PROMPT, make_observation
    from sinew.core.statistics import summarize
    from sinew.policy import load

    policy = load(bundle, engine=engine, threads=threads)
    observation = make_observation(policy.spec, None, PROMPT, None)

    def sample() -> dict[str, float]:
        totals = []
        for seed in range(runs):
            begin = time.perf_counter()
            policy.infer({**observation, "seed": seed})
            totals.append(1e3 * (time.perf_counter() - begin))
        return summarize(totals)

    policy.warm_up()
    load_before = os.getloadavg()[0]
    quiet = sample()
    core = max(os.sched_getaffinity(0))
    hog = subprocess.Popen([sys.executable, "-c", HOG, str(core)], stdout=subprocess.PIPE)
    try:
        assert hog.stdout is not None
        hog.stdout.readline()
        policy.infer({**observation, "seed": 0})
        busy = sample()
    finally:
        hog.kill()
        hog.wait()
    return {
        "bundle": bundle.name,
        "engine": engine,
        "spin": spin,
        "threads": policy.threads,
        "runs": runs,
        "quiet_ms": quiet,
        "busy_ms": busy,
        "busy_p99_over_quiet_p50": round(busy["p99"] / quiet["p50"], 3),
        "load_average_before": load_before,
        "hardware": machine.cpu_model(),
    }


def _let_onnxruntime_spin() -> None:
    """Make ONNX Runtime create sessions with its default settings, so that idle threads spin."""
    import onnxruntime

    class Options(onnxruntime.SessionOptions):
        def add_session_config_entry(self, key: str, value: str) -> None:
            super().add_session_config_entry(key, "1" if key.endswith("allow_spinning") else value)

    onnxruntime.SessionOptions = Options


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--engine", action="append", choices=["eager", "plan", "onnx"])
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--threads", type=int, help="compute threads (default: the choice of the runtime)")
    parser.add_argument("--spin", action="store_true")
    arguments = parser.parse_args()
    engines = arguments.engine or ["eager", "onnx"]
    if len(engines) > 1:
        flags = ["--runs", str(arguments.runs), *(["--spin"] * arguments.spin)]
        flags += [] if arguments.threads is None else ["--threads", str(arguments.threads)]
        for engine in engines:
            command = [sys.executable, __file__, str(arguments.bundle), "--engine", engine, *flags]
            subprocess.run(command, check=True)
        return
    print(
        json.dumps(
            one_engine(arguments.bundle, engines[0], arguments.runs, arguments.threads, arguments.spin)
        )
    )


if __name__ == "__main__":
    main()
