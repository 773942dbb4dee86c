"""The long form of the fuzzers: ``make fuzz``, or

    python -m tests.hostile.fuzz --decoders 50000 --sockets 20000 --readers 20000 --files 5000 --seed 1

A million inputs take about an hour of one core. Every input must give a value or an error of this project. The
program prints every other result with the number that repeats it (``--only NAME --first NUMBER --decoders 1``). It
also prints inputs that compute for ten seconds, or that need far more memory than their size. The exit status is then
1. The table has the processor time of the slowest input, and the largest peak of memory.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import sys
import tempfile
import warnings
from functools import partial
from pathlib import Path

import torch

from tests.cases import golden_cases
from tests.hostile import decoders, files, more_readers, readers, sockets
from tests.hostile.meter import HEAD, Kind, gave, guard, measure
from tests.hostile.mutate import mutate_bytes


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--decoders", type=int, default=1000, help="number of inputs for each decoder")
    parser.add_argument("--sockets", type=int, default=1000, help="number of inputs for each protocol")
    parser.add_argument(
        "--readers", type=int, default=1000, help="number of inputs for each reader of texts and small files"
    )
    parser.add_argument("--files", type=int, default=200, help="number of inputs for each kind of file")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="number of the first input, to repeat one")
    parser.add_argument("--only", action="append", default=[], help="a fuzzer's name; repeatable")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    guard()
    found: list[Kind] = []
    print(HEAD, flush=True)

    def go(name: str, case: files.Case, count: int, expected: tuple[type[BaseException], ...]) -> None:
        if count and (not given.only or name in given.only):
            numbers = range(given.first, given.first + count)

            def one(number: int) -> None:
                case(random.Random(f"{name} {given.seed} {number}"))

            found.append(measure(name, one, numbers, expected))
            print(found[-1].row(), flush=True)

    if given.readers:
        with tempfile.TemporaryDirectory() as work:
            targets = readers.targets(Path(work)) | more_readers.targets(Path(work))
            for name, prepare in targets.items():
                if not given.only or name in given.only:
                    go(name, prepare(), given.readers, readers.EXPECTED)
    if given.decoders:
        for name, (good, read) in decoders.targets().items():
            read(good)
            go(name, partial(_mutated, good, read), given.decoders, decoders.EXPECTED)
        for name, value in decoders.values().items():
            go(name, value, given.decoders, decoders.EXPECTED)
    if given.files:
        with tempfile.TemporaryDirectory() as work:
            for name, make in files.makers(golden_cases(), Path(work)).items():
                if not given.only or name in given.only:
                    go(name, make(), given.files, files.EXPECTED)
    if given.sockets:
        with sockets.server() as cases:
            for name, case in cases.items():
                go(name, case, given.sockets, ())
    total = sum(each.inputs for each in found)
    bad = sum(each.bad for each in found)
    print(f"{total:,} inputs, {bad} unexpected, {sum(each.seconds for each in found):.0f} s")
    return int(bool(bad))


def _mutated(good: bytes, read: files.Case, rng: random.Random) -> None:
    changed = decoders.mutate(rng, good) if rng.random() < 0.7 else mutate_bytes(good, rng, len(good))
    gave(changed)
    read(changed)  # type: ignore[arg-type]


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
