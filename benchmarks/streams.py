"""Measure how often the head can run while prefixes are computed (table in section 6.1 of Ma et al. 2025).

    python -m benchmarks.streams BUNDLE --seconds 5 [--threads 1,1] [--runs 10,16]

The first rows are those of the paper: one prefix and then ten runs of the head, and one prefix at the same time as ten
or sixteen runs of the head, until both are done. The next rows are those of streams:

* prefixes and runs of the head without a pause, on two threads with their own thread pools
* runs of the head alone
* if the bundle contains its language head: prefixes that also compute one token after a text of 16 tokens

A run of the head is one evaluation. If the head reads the state, each run has a new state. There are no pauses, so the
rates are the largest that this machine reaches. cpu_ms is the processor time of the calling thread, which depends less
on other programs.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sinew_client.control.report import percentiles

import sinew
from sinew.core import machine
from sinew.engine.capability import Capability


class Rounds:
    """The steps of one policy as functions without arguments."""

    def __init__(self, bundle: Path, engine: str):
        self.policy = sinew.load(bundle, engine=engine, threads=1)
        self.policy.warm_up()
        self.engine = self.policy.engine
        self.prepared = self.policy.prepare(self.policy.dummy_observation())
        self.inputs = self.prepared.inputs.batched()
        self.context = self.engine.read(self.inputs)
        self.times = np.full(len(self.prepared.noise), self.policy.spec.solver.start)

    def prefix(self) -> None:
        self.context = self.engine.read(self.inputs)

    def text(self) -> None:
        self.engine.read_text(self.inputs, list(range(16)))

    def head(self) -> None:
        context = self.engine.renew(self.context, self.inputs.state)
        self.engine.evaluate(context, self.prepared.noise[None], self.times[None])


Found = list[tuple[float, float]]  # elapsed seconds and CPU seconds of the thread, for each call


def timed(call: Callable[[], None], seconds: float, threads: int, found: Found) -> None:
    """Repeat a call without a pause for ``seconds``. Appends the times of each call to ``found``."""
    torch.set_num_threads(threads)
    end = time.perf_counter() + seconds
    while (begun := time.perf_counter()) < end:
        spent = time.thread_time()
        call()
        found.append((time.perf_counter() - begun, time.thread_time() - spent))


def prefix_with_heads(rounds: Rounds, seconds: float, threads: tuple[int, int], runs: int) -> Found:
    """Run one prefix and ``runs`` runs of the head at the same time, on two threads. Returns their times."""
    found: Found = []
    begin, done, over = threading.Semaphore(0), threading.Semaphore(0), threading.Event()

    def heads() -> None:
        torch.set_num_threads(threads[1])
        while begin.acquire() and not over.is_set():
            for _ in range(runs):
                rounds.head()
            done.release()

    def both() -> None:
        begin.release()
        rounds.prefix()
        done.acquire()

    thread = threading.Thread(target=heads)
    thread.start()
    timed(both, seconds, threads[0], found)
    over.set()
    begin.release()
    thread.join()
    return found


def measure(rounds: Rounds, seconds: float, threads: tuple[int, int], runs: Sequence[int]) -> dict[str, Any]:
    def one_after_the_other() -> None:
        rounds.prefix()
        for _ in range(runs[0]):
            rounds.head()

    sequential: Found = []
    timed(one_after_the_other, seconds, threads[0], sequential)
    together = {count: prefix_with_heads(rounds, seconds, threads, count) for count in runs}
    slow: Found = []
    fast: Found = []
    both = [
        threading.Thread(target=timed, args=(rounds.prefix, seconds, threads[0], slow)),
        threading.Thread(target=timed, args=(rounds.head, seconds, threads[1], fast)),
    ]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()
    alone: Found = []
    timed(rounds.head, seconds, threads[1], alone)
    pairs: dict[str, Found] = {"prefix_alone": [], "prefix_and_token": []}
    if Capability.SPEAK not in rounds.policy.facts.refusals:
        for _ in range(10):  # alternate, so that other programs disturb both measurements
            timed(rounds.prefix, seconds / 10, threads[0], pairs["prefix_alone"])
            timed(rounds.text, seconds / 10, threads[0], pairs["prefix_and_token"])

    def rates(values: Found) -> dict[str, Any]:
        clock, cpu = zip(*values, strict=True)
        return {
            "hz": round(len(values) / seconds, 2),
            "ms": percentiles(1e3 * value for value in clock),
            "cpu_ms": percentiles(1e3 * value for value in cpu),
        }

    return {
        "sequential": {"heads_per_prefix": runs[0], **rates(sequential)},
        "concurrent": {count: rates(values) for count, values in together.items()},
        "concurrent_prefix": rates(slow),
        "concurrent_head": rates(fast),
        "head_alone": rates(alone),
        **{name: rates(values) for name, values in pairs.items() if values},
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--engine", default="eager")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--threads", default="1,1")
    parser.add_argument(
        "--runs", default="10,16", help="numbers of head runs for each prefix, separated by commas"
    )
    args = parser.parse_args()
    slow, _, fast = args.threads.partition(",")
    rounds = Rounds(args.bundle, args.engine)
    runs = [int(count) for count in args.runs.split(",")]
    found = measure(rounds, args.seconds, (int(slow), int(fast or slow)), runs)
    about = {
        "bundle": args.bundle.name,
        "engine": args.engine,
        "threads": args.threads,
        "hardware": machine.cpu_model(),
    }
    print(json.dumps({**about, **found}))


if __name__ == "__main__":
    main()
