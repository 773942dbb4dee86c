"""Measure how regular the control steps of the robot's loop are, alone and next to a busy process, and their cost.

``python -m benchmarks.ticks --hz 100,500 --seconds 10``

The loop of ``sinew_client.control`` drives a robot without hardware. A function returns each chunk immediately. So the
benchmark measures only the loop, the thread that requests chunks, and the machine. The busy process never sleeps and
runs on the core of the loop. Rounds without and with the busy process alternate. Lateness is the delay of the start of
a control step. Skipped periods are periods without a control step.

With --server ADDRESS, the chunks come from a ``sinew serve``. In every second round, the robot sends reports about the
run to the server, as `sinew run` does. The benchmark prints the medians of the rounds without and with these reports,
and the medians of the differences of pairs, with 95 % intervals.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from sinew_client.control import Loop, Reporter, Servers, Settings
from sinew_client.control.report import percentiles
from sinew_client.control.robots import Dry

from benchmarks.paired import median_interval
from sinew.core import machine

POLICY = {
    "cameras": [{"name": "front", "height": 64, "width": 64}],
    "state": {"dim": 7},
    "action": {"dim": 7},
}
HOG = "import os; os.sched_setaffinity(0, {%d})\nprint('spinning', flush=True)\nwhile True: pass"


def compare_reports(arguments: argparse.Namespace) -> None:
    """Run pairs of rounds against a server, without and with reports, and print the effect of the reports."""
    hz, servers, trips = float(arguments.hz.split(",")[0]), Servers(arguments.server), list[float]()
    with servers.client() as client:
        policy = client.metadata()["policy"]
    call = servers()

    def timed(observation: Any, limit: float) -> Any:
        begun = time.perf_counter()
        rows = call(observation, limit)
        trips.append(1e3 * (time.perf_counter() - begun))
        return rows

    settings = Settings(hz=hz, handover=arguments.handover, replan="8", motion={"kind": "absolute"})
    found: list[dict[str, list[float]]] = [{}, {}]
    for number in range(2 * arguments.rounds):
        loop = Loop(Dry(policy), lambda: timed, settings, policy["action"]["dim"], "go")
        reports, cpu = (number + number // 2) % 2, time.process_time()
        with Reporter(loop, servers) if reports else contextlib.nullcontext():
            report = loop.run(steps=int(hz * arguments.seconds))
        loop.close()
        run = {"cpu_ms": 1e3 * (time.process_time() - cpu), "skipped": report.skipped}
        for name, values in (("round_trip", percentiles(trips)), ("lateness", report.jitter_ms)):
            run |= {f"{name}_{mark}": values[mark] for mark in ("p50", "p95")}
        trips.clear()
        for name, value in run.items():
            found[reports].setdefault(name, []).append(value)
    for name, silent in found[0].items():
        pairs = list(zip(silent, found[1][name], strict=True))
        change = median_interval([100 * (b - a) / a if a else 0.0 for a, b in pairs])
        print(
            f"{name:15} {np.median(silent):8.3f} {np.median(found[1][name]):8.3f}",
            "{:+.1f} % ({:+.1f} to {:+.1f})".format(*change),
        )


def one(hz: float, seconds: float, handover: str) -> dict[str, Any]:
    """Run the loop for some seconds. Returns its report, with the fraction of a core that the process used."""
    rng = np.random.default_rng(0)
    chunk = rng.normal(size=(max(8, int(hz)), 7)).astype(np.float32)  # enough actions for one second
    settings = Settings(
        hz=hz, handover=handover, replan="queue:0.5", limits={"velocity": 1e6}, motion={"kind": "absolute"}
    )
    loop = Loop(Dry(POLICY), lambda: lambda *_: chunk, settings, dim=7)
    wall, cpu = time.perf_counter(), time.process_time()
    report = loop.run(steps=int(hz * seconds))
    share = (time.process_time() - cpu) / (time.perf_counter() - wall)
    loop.close()
    return {
        "rate_hz": report.rate_hz,
        "periods": int(report.hz * report.seconds),
        "late": report.late,
        "skipped": report.skipped,
        "lateness_ms": report.jitter_ms,
        "core_share": round(share, 4),
        "load": round(os.getloadavg()[0], 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hz", default="100,500")
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--handover", default="aligned")
    parser.add_argument("--server", metavar="ADDRESS")
    parser.add_argument("--out", type=Path, help="a JSON file for the results")
    arguments = parser.parse_args()
    if arguments.server:
        compare_reports(arguments)
        return
    core = min(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {core})
    found: list[dict[str, Any]] = []
    for _ in range(arguments.rounds):
        for hz in map(float, arguments.hz.split(",")):
            for neighbour in (False, True):
                hog = (
                    subprocess.Popen([sys.executable, "-c", HOG % core], stdout=subprocess.PIPE)
                    if neighbour
                    else None
                )
                try:
                    if hog is not None and hog.stdout is not None:
                        hog.stdout.readline()
                    result = one(hz, arguments.seconds, arguments.handover)
                finally:
                    if hog is not None:
                        hog.kill()
                        hog.wait()
                found.append({"hz": hz, "neighbour": neighbour, **result})
                print(json.dumps(found[-1]), flush=True)
    if arguments.out is not None:
        text = ",\n".join(json.dumps(entry) for entry in found)
        about = json.dumps({"hardware": machine.cpu_model(), "command": " ".join(sys.argv[1:])})
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(f'{{"about": {about}, "runs": [\n{text}\n]}}\n')


if __name__ == "__main__":
    main()
