"""Simulated robots at their control rate for minutes: lost replies, latency, and the server's memory over time.

    python -m benchmarks.soak --robots 10 --hz 10 --minutes 10 --wires native openpi groot

Every robot is a thread with a connection of its own; several client processes share them, so that the clients do not
wait for each other. A robot asks at fixed moments with frames of its own, counts an answer as lost if it is an error,
does not come, or is not bit for bit what the same observation gave before. A request that is still under way when the
next moment comes makes the robot skip that moment: it is counted as skipped, not lost. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.wire_clients import connect
from benchmarks.wires import BUNDLE, observations, serving, statistics
from sinew import machine

WIRES = (
    "native",
    "openpi",
    "http",
    "groot",
)  # LeRobot's protocol has no seed: its answers cannot be compared
KINDS = 4  # different observations per robot
STEPS = 1  # of the solver: the load is on the server's own parts
SETTLE_S = 60.0  # until the allocator and the threads' arenas have what they keep


def robot(
    wire: str, address: str, number: int, hz: float, seconds: float, side: int, bundle: Path, out: list[Any]
) -> None:
    rng = np.random.default_rng(number)
    client = connect(wire, address)
    seen = [
        (frames, state, f"robot {number}, task {kind}", 100 * number + kind, STEPS)
        for kind, (frames, state) in zip(range(KINDS), observations(bundle, side, number), strict=False)
    ]
    known: dict[int, np.ndarray] = {}
    sent = lost = skipped = 0
    calls, errors = [], []
    begin = time.perf_counter() + rng.uniform(0, 1 / hz)  # robots are not in step
    end, moment = begin + seconds, begin
    while moment < end:
        time.sleep(max(0.0, moment - time.perf_counter()))
        start = time.perf_counter()
        try:
            sent += 1
            actions = client.ask(*seen[sent % KINDS]).actions
            calls.append(1e3 * (time.perf_counter() - start))
            if not np.array_equal(known.setdefault(sent % KINDS, actions), actions):
                raise RuntimeError("another answer to the same observation")
        except Exception as error:  # noqa: BLE001 - counted and reported
            lost += 1
            errors.append(f"{type(error).__name__}: {str(error)[:200]}")
        behind = int((time.perf_counter() - moment) * hz)
        skipped += behind
        moment += (behind + 1) / hz
    client.close()
    out.append(
        {"wire": wire, "sent": sent, "lost": lost, "skipped": skipped, "calls": calls, "errors": errors[:3]}
    )


def robots(jobs: list[tuple[Any, ...]], queue: Any) -> None:
    """A client process."""
    out: list[Any] = []
    threads = [threading.Thread(target=robot, args=(*job, out)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    queue.put(out)


def resident_mib(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1]) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--robots", type=int, default=10)
    parser.add_argument("--hz", type=float, default=10.0)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument(
        "--wires", nargs="+", default=["native"], choices=WIRES, help="robots take turns among them"
    )
    parser.add_argument("--bundle", type=Path, default=BUNDLE)
    parser.add_argument("--side", type=int, default=64, help="of the square frames, in pixels")
    parser.add_argument("--processes", type=int, default=2, help="of clients")
    arguments = parser.parse_args()
    seconds, before = 60 * arguments.minutes, os.getloadavg()
    wires = [word for wire in arguments.wires for word in ("--wire", f"{wire}:0")]
    with serving(arguments.bundle, *wires, "--threads", 1, "--queue", 2 * arguments.robots) as (line, pid):
        addresses = dict(zip(arguments.wires, line.split(), strict=True))
        chosen = [arguments.wires[number % len(arguments.wires)] for number in range(arguments.robots)]
        jobs = [
            (wire, addresses[wire], number, arguments.hz, seconds, arguments.side, arguments.bundle)
            for number, wire in enumerate(chosen)
        ]
        context = multiprocessing.get_context("spawn")
        queue = context.Queue()
        processes = [
            context.Process(target=robots, args=(jobs[index :: arguments.processes], queue))
            for index in range(arguments.processes)
        ]
        for process in processes:
            process.start()
        memory, start = [], time.monotonic()
        while any(process.is_alive() for process in processes) and queue.empty():
            time.sleep(1.0)
            memory.append((round(time.monotonic() - start, 1), round(resident_mib(pid), 2)))
        found = [each for _ in processes for each in queue.get(timeout=120)]
        for process in processes:
            process.join()
    settled = [mib for at, mib in memory if at >= min(SETTLE_S, seconds / 2)]
    change = (settled[-1] - settled[0]) / settled[0]
    calls = np.concatenate([each["calls"] for each in found])
    totals = {name: sum(each[name] for each in found) for name in ("sent", "lost", "skipped")}
    latency = statistics(calls)
    print(f"{arguments.robots} robots at {arguments.hz:g} Hz for {arguments.minutes:g} minutes on {chosen}")
    print(
        f"{totals['sent']} requests, {totals['lost']} lost, {totals['skipped']} moments skipped; ms {latency}"
    )
    print(
        f"server RSS {settled[0]:.1f} MiB after settling, {settled[-1]:.1f} MiB at the end: {100 * change:+.2f} %"
    )
    result = {
        "schema": "sinew.benchmark.soak/1",
        "robots": arguments.robots,
        "hz": arguments.hz,
        "minutes": arguments.minutes,
        "wires": arguments.wires,
        "bundle": arguments.bundle.name,
        "frames": f"2 x {arguments.side} x {arguments.side}",
        "solver_steps": STEPS,
        **totals,
        "errors": [error for each in found for error in each["errors"]][:10],
        "latency_ms": latency,
        "rss_mib": {
            "settled": settled[0],
            "end": settled[-1],
            "lowest": min(settled),
            "highest": max(settled),
            "change_percent": round(100 * change, 3),
            "over_time": memory[:: max(1, len(memory) // 60)],
        },
        "hardware": machine.cpu_model(),
        "load_average": {"before": before, "after": os.getloadavg()},
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
