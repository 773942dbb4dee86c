"""Measure how much viewers of the dashboard slow down the requests of a robot.

    python -m benchmarks.dashboard [--viewers 3] [--pictures] [--bundle FILE] [--rounds 40] [--requests 40] [--hz 0]

The benchmark starts one `sinew serve`, and one robot that uses the native protocol. In each round, the robot sends the
same requests once without and once with viewers, in random order. A viewer is a client that is connected to the stream
of events. With --pictures, a viewer also reads the stream of all cameras ten times a second, as a visible page does.
Robot and viewers run in their own processes. If the machine has two cores or more, robot and viewers run on other
cores than the server.

The benchmark prints p50 and p95 of the latency without and with viewers. It also prints the median ratio of the two
medians of a round, with a 95 % interval (of ranks). Slow changes in the speed of the machine do not change this ratio.
Then it prints the processor time of the server for each request. The last number is the processor time of all server
threads except the busiest thread, which computes the inference. This number is the cost of the viewers, and it does
not depend on other programs. The last line of the output is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from sinew_eval.foreign.server import serving

ROOT = Path(__file__).resolve().parents[1]
SETTLE_S = 0.3  # seconds to wait after viewers connect or disconnect


class Helper:
    """A process of this file that reads one command per line, and writes one answer per line."""

    def __init__(self, cores: set[int], *words: str):
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.dashboard", *words],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )  # fmt: skip
        os.sched_setaffinity(self._process.pid, cores)

    def tell(self, what: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()
        if not (line := self._process.stdout.readline()):
            raise SystemExit("a helper process of the benchmark has ended; its error is printed above")
        return json.loads(line)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def robot(address: str, hz: float) -> None:
    """Read numbers of requests from standard input. For each line, send that many requests and print their latencies in
    ms."""
    from sinew_client import Client

    rng = np.random.default_rng(0)
    with Client(address, timeout=120.0) as client:
        about = client.metadata()["policy"]
        images = {c["name"]: rng.integers(0, 256, (480, 640, 3), dtype=np.uint8) for c in about["cameras"]}
        state = np.zeros(about["state"]["dim"], np.float32)
        for line in sys.stdin:
            taken = []
            for seed in range(json.loads(line)):
                begun = time.perf_counter()
                client.infer({"images": images, "state": state, "prompt": "go", "seed": seed})
                taken.append(1e3 * (time.perf_counter() - begun))
                if hz:
                    time.sleep(max(0.0, 1 / hz - (time.perf_counter() - begun)))
            print(json.dumps(taken), flush=True)


def viewers(address: str, pictures: bool) -> None:
    """Keep viewers connected to the dashboard. For each number on standard input, connect or disconnect viewers until
    there are that many. Then print the number of events that have arrived since the last line.
    """
    import aiohttp

    events = 0

    async def look(session: aiohttp.ClientSession, path: str, there: asyncio.Event) -> None:
        nonlocal events
        async with session.get(address + path) as stream:
            there.set()
            async for line in stream.content:
                events += line.startswith((b"event: answers", b"event: frames"))

    async def run() -> None:
        nonlocal events
        loop = asyncio.get_running_loop()
        tasks: list[asyncio.Task[None]] = []
        async with aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=None), read_bufsize=1 << 22
        ) as session:
            while line := await loop.run_in_executor(None, sys.stdin.readline):
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                tasks, seen, events = [], events, 0
                for path in json.loads(line) * ["/v1/events", *["/v1/frames"] * pictures]:
                    there = asyncio.Event()
                    tasks.append(asyncio.create_task(look(session, path, there)))
                    await there.wait()
                print(json.dumps(seen), flush=True)

    asyncio.run(run())


def compare(
    server: psutil.Process, robots: Helper, lookers: Helper, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Run all rounds. Returns the latencies and the processor time of the server, without and with viewers."""
    rng = np.random.default_rng(0)
    taken: dict[bool, list[list[float]]] = {False: [], True: []}
    spent: dict[bool, list[float]] = {False: [], True: []}
    other_threads: dict[bool, list[float]] = {False: [], True: []}
    events = 0
    robots.tell(max(10, arguments.requests))  # The first requests are slower, so they are not measured.
    for _ in range(arguments.rounds):
        for looked_at in rng.permutation([False, True]):
            lookers.tell(arguments.viewers if looked_at else 0)
            time.sleep(SETTLE_S)
            before = thread_times(server.pid)
            taken[bool(looked_at)].append(robots.tell(arguments.requests))
            grown = [now - before.get(thread, 0.0) for thread, now in thread_times(server.pid).items()]
            spent[bool(looked_at)].append(sum(grown))
            other_threads[bool(looked_at)].append(sum(grown) - max(grown))
            events += lookers.tell(0)
    requests = arguments.rounds * arguments.requests
    cpu, others = (
        [1e3 * float(np.sum(times[k])) / requests for k in (False, True)] for times in (spent, other_threads)
    )
    return {
        "without_ms": _percentiles(taken[False]),
        "with_ms": _percentiles(taken[True]),
        "p50": _overhead(
            [np.median(each) for each in taken[False]], [np.median(each) for each in taken[True]]
        ),
        "cpu_ms": [round(each, 2) for each in cpu],
        "cpu": _overhead(spent[False], spent[True]),
        "other_threads_ms": [round(each, 3) for each in others],
        "other_threads_percent": round(100 * (others[1] - others[0]) / cpu[0], 2),
        "events": events,
    }


def thread_times(process: int) -> dict[str, float]:
    """Return the processor time of each thread of a process in seconds (Linux)."""
    threads = Path(f"/proc/{process}/task").iterdir()
    return {each.name: 1e-9 * int((each / "schedstat").read_text().split()[0]) for each in threads}


def _overhead(without: Sequence[float], viewed: Sequence[float]) -> dict[str, Any]:
    """Return the median overhead in percent, and the ranks of its 95 % interval.

    Args:
        without: One value for each round without viewers.
        viewed: One value for each round with viewers, in the same order.
    """
    ratios = sorted(100 * (b / a - 1) for a, b in zip(without, viewed, strict=True))
    half = 0.98 * np.sqrt(len(ratios))  # This is the normal approximation of the binomial distribution.
    ranks = (int(np.clip(round(len(ratios) / 2 + s * half), 0, len(ratios) - 1)) for s in (-1, 1))
    return {
        "percent": round(float(np.median(ratios)), 2),
        "interval": [round(float(ratios[r]), 2) for r in ranks],
    }


def _percentiles(rounds: list[list[float]]) -> dict[str, float]:
    values = np.concatenate(rounds)
    return {f"p{q}": round(float(np.percentile(values, q)), 3) for q in (50, 95)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bundle", type=Path, default=ROOT / "sinew" / "assets" / "blocks.gguf")
    parser.add_argument("--engine", default="plan")
    parser.add_argument("--viewers", type=int, default=3)
    parser.add_argument(
        "--pictures",
        action="store_true",
        help="viewers also fetch camera frames, as the page of the dashboard does",
    )
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument(
        "--requests",
        type=int,
        default=40,
        help="number of requests without viewers, and again with viewers, in each round",
    )
    parser.add_argument(
        "--hz",
        type=float,
        default=0.0,
        help="requests per second (0: send the next request after each answer)",
    )
    parser.add_argument("--part", nargs=2, metavar=("WHICH", "ADDRESS"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part:
        which, address = arguments.part
        robot(address, arguments.hz) if which == "robot" else viewers(address, arguments.pictures)
        return
    cores = sorted(os.sched_getaffinity(0))
    first, others = {cores[0]}, set(cores[1:]) or {cores[0]}
    begun = os.getloadavg()[0]
    os.sched_setaffinity(0, first)  # the server inherits this set of cores
    with tempfile.TemporaryDirectory() as folder:
        flags = ("--wire", "http:0", "--engine", arguments.engine, "--threads", "1")
        with serving(arguments.bundle, Path(folder) / "log", *flags) as addresses:
            native, web = addresses.split()
            (server,) = psutil.Process().children()
            os.sched_setaffinity(0, others)
            robots = Helper(others, "--part", "robot", native, "--hz", str(arguments.hz))
            lookers = Helper(others, "--part", "viewers", web, *["--pictures"] * arguments.pictures)
            try:
                found = compare(server, robots, lookers, arguments)
            finally:
                robots.close()
                lookers.close()
    found |= {
        "viewers": arguments.viewers, "pictures": arguments.pictures, "bundle": arguments.bundle.name,
        "engine": arguments.engine, "rounds": arguments.rounds, "requests": arguments.requests, "hz": arguments.hz,
        "cores": len(cores), "load": [round(begun, 1), round(os.getloadavg()[0], 1)],
    }  # fmt: skip
    for name in ("without", "with"):
        each = found[f"{name}_ms"]
        print(f"{name:8} {arguments.viewers} viewers: p50 {each['p50']}, p95 {each['p95']} ms")
    for name, what in (("p50", "p50 of a round"), ("cpu", "processor time of the server,")):
        low, high = found[name]["interval"]
        print(f"{what}: {found[name]['percent']:+.2f} % ({low:+.2f} to {high:+.2f})")
    without, viewed = found["other_threads_ms"]
    print(
        f"server threads that do not compute: {without} -> {viewed} ms per request,"
        f" {found['other_threads_percent']:+.2f} % of the time of all threads"
    )
    print(f"load {found['load'][0]} to {found['load'][1]} on {len(cores)} cores")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
