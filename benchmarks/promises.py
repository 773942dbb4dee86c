"""Play complete control loops with a faulty server, clock, sensor, leader and hot-swap, and check each command.

    python -m benchmarks.promises --scenarios 200000 --processes 2 --out promises.json

A scenario has a kind and a number (``tests/control/scenarios.py``). To play a failed scenario again, pass both:
``python -m benchmarks.promises --kind take-over --first 1234 --scenarios 1``. The time in a scenario is simulated.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import time
from collections import Counter
from pathlib import Path

from tests.control.scenarios import KINDS, play

BLOCK = 100  # scenarios of one kind that a process plays before it reports


def played(block: tuple[str, int, int]) -> tuple[str, int, Counter, list[str]]:
    """Play some scenarios of one kind. Returns the kind, their number, the counts of events, and the broken rules."""
    kind, first, count = block
    logging.disable(logging.CRITICAL)
    happened: Counter = Counter()
    violations = []
    for seed in range(first, first + count):
        try:
            happened += play(seed, kind)
        except Exception as error:  # noqa: BLE001 - every exception of the loop is a violation
            violations.append(f"{kind} {seed}: {type(error).__name__}: {error!s:.300}")
    return kind, count, happened, violations


def blocks(kinds: list[str], first: int, scenarios: int) -> list[tuple[str, int, int]]:
    """Return the blocks of scenarios to play. The kinds alternate, so that an interrupted run has played each kind."""
    each = -(-scenarios // len(kinds))
    starts = range(first, first + each, BLOCK)
    return [(kind, start, min(BLOCK, first + each - start)) for start in starts for kind in kinds]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--scenarios", type=int, default=9_000, help="Number of scenarios to play, of all kinds together."
    )
    parser.add_argument("--kind", choices=KINDS, action="append", help="Play this kind only; repeatable.")
    parser.add_argument("--first", type=int, default=0, help="Number of the first scenario of each kind.")
    parser.add_argument("--processes", type=int, default=1, help="Processes that play at the same time.")
    parser.add_argument("--out", type=Path, help="File for the counts, rewritten after each block.")
    given = parser.parse_args()
    begun, counts, happened = time.monotonic(), Counter[str](), Counter[str]()
    violations: list[str] = []
    with multiprocessing.get_context("spawn").Pool(given.processes) as pool:
        plan = blocks(given.kind or list(KINDS), given.first, given.scenarios)
        for kind, count, what, wrong in pool.imap_unordered(played, plan):
            counts[kind] += count
            happened += what
            violations += wrong
            for line in wrong:
                print(line, flush=True)
            found = {
                "scenarios": counts.total(),
                "kinds": dict(counts),
                "violations": len(violations),
                "seconds": round(time.monotonic() - begun, 1),
                "happened": dict(sorted(happened.items())),
                "first": violations[:100],
            }
            if given.out is not None:
                given.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({name: found[name] for name in ("scenarios", "kinds", "violations", "seconds")}))
    return int(bool(violations))


if __name__ == "__main__":
    raise SystemExit(main())
