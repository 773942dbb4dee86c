"""Fuzzers over checkpoints and bundles. Short forms run in the tests; the long one is

    python -m tests.hostile.files GOLDEN --count 100000 --seed 1

with the directory of golden fixtures. Every input ends in a policy, or in a :class:`SinewError`; anything else is
printed with the seed and the number that make it again.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import copy
import io
import json
import os
import random
import resource
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import torch

from sinew.bundle import Bundle
from sinew.bundle.schema import Manifest
from sinew.cli.inspect import describe, show
from sinew.convert import Options, convert, read
from sinew.convert.read.torch_zip import read_torch
from sinew.core import SinewError
from sinew.policy import Policy
from tests.hostile.mutate import dumps, mutate_bytes, mutate_record

Case = Callable[[random.Random], None]


class Checkpoints:
    """Golden checkpoints in a folder of our own, of which one file at a time is damaged."""

    def __init__(
        self, golden: Path, work: Path, cases: tuple[str, ...] = ("smolvla-2cam", "pi0-2cam", "pi05-2cam")
    ):
        self.work, self.golden = work, golden
        self.files: list[tuple[Path, Options]] = []
        for case in cases:
            for folder in ("checkpoint", "vlm"):
                if (golden / case / folder).is_dir():
                    shutil.copytree(
                        golden / case / folder, work / case / folder, copy_function=shutil.copyfile
                    )
            arch = golden / case / "arch.json"
            stats = {"mean": [0.0] * 6, "std": [1.0] * 6}
            (work / case / "stats.json").write_text(json.dumps({"observation.state": stats, "action": stats}))
            options = Options(
                arch=Path(shutil.copyfile(arch, work / case / "arch.json")) if arch.exists() else None
            )
            self.files += [
                (path, options)
                for path in sorted((work / case).rglob("*"))
                if path.suffix in (".json", ".safetensors")
            ]

    def case(self, rng: random.Random) -> None:
        """Damage one file, read the checkpoint as `sinew convert` does up to its weights, and put it back."""
        path, options = rng.choice(self.files)
        original = path.read_bytes()
        checkpoint = self.work / path.relative_to(self.work).parts[0] / "checkpoint"
        try:
            if path.suffix == ".json" and rng.random() < 0.9:
                path.write_text(dumps(mutate_record(json.loads(original), rng, rng.choice((1, 1, 2, 4)))))
            else:
                path.write_bytes(mutate_bytes(original, rng, 40_000))
            if path.name == "stats.json":
                options = Options(arch=options.arch, stats=path)
            conversion = read(checkpoint, options)
            if rng.random() < 0.02:
                conversion.write(self.work / "out.gguf", "out", options)
                Policy(Bundle(self.work / "out.gguf")).warm_up()
        finally:
            path.write_bytes(original)


class Manifests:
    """Bundles of golden checkpoints with damaged metadata, opened, shown, loaded and run."""

    def __init__(self, bundles: list[Path]):
        self.bundles = [Bundle(path) for path in bundles]

    def case(self, rng: random.Random) -> None:
        """Damage one record of the metadata, then do what `inspect` and `serve` do."""
        bundle = copy.copy(rng.choice(self.bundles))
        bundle.file = copy.copy(bundle.file)
        metadata = dict(bundle.file.metadata)
        key = rng.choice([key for key, value in metadata.items() if isinstance(value, str)])
        if metadata[key].startswith("{"):
            record = mutate_record(json.loads(metadata[key]), rng, rng.choice((1, 1, 2, 4)))
            metadata[key] = dumps(record)
        else:
            metadata[key] = rng.choice(("", "[/red]", "x" * 9999, "pi0", "pi05", "smolvla"))
        bundle.file.metadata = metadata
        bundle.manifest = Manifest.from_metadata(metadata)
        with contextlib.redirect_stdout(io.StringIO()):
            describe(bundle)
            if rng.random() < 0.1:
                show(bundle, True)
        policy = Policy(bundle)
        with contextlib.suppress(SinewError):
            policy.warm_up()


class Headers:
    """Files of bundles with damaged bytes before the weights."""

    def __init__(self, bundles: list[Path], work: Path):
        self.work = work
        self.data = [path.read_bytes() for path in bundles]
        self.ends = [min(info.offset for info in Bundle(path).infos.values()) for path in bundles]

    def case(self, rng: random.Random) -> None:
        """Damage bytes and load."""
        index = rng.randrange(len(self.data))
        data, end = self.data[index], self.ends[index]
        within = rng.choice((64, 4096, end))
        file = self.work / "header.gguf"
        if rng.random() < 0.7:
            file.write_bytes(mutate_bytes(data[:end], rng, within) + data[end:])
        else:
            tail = max(end - 12_000, 0)
            file.write_bytes(data[:tail] + mutate_bytes(data[tail:end], rng, end - tail) + data[end:])
        with mock.patch("sinew.bundle.reader.read_hashes", return_value=None):  # else all of them end there
            Policy(Bundle(file))


class TorchFiles:
    """``.pt`` files with damaged bytes."""

    def __init__(self, work: Path):
        self.work = work
        buffer = io.BytesIO()
        torch.save({"module": {"a": torch.ones(7, 3), "b": torch.ones(5).bfloat16()}, "step": 1}, buffer)
        self.data = buffer.getvalue()

    def case(self, rng: random.Random) -> None:
        """Damage bytes and read every tensor."""
        file = self.work / "head.pt"
        file.write_bytes(mutate_bytes(self.data, rng, len(self.data)))
        for source in read_torch(file).values():
            for _ in source.data.blocks():
                pass


def cases(golden: Path, work: Path) -> dict[str, Case]:
    """Return all fuzzers by name, with their files prepared in ``work``."""
    bundles = []
    for name, options in (("smolvla-2cam", "vlm"), ("pi05-2cam", "arch")):
        given = {options: golden / name / ("vlm" if options == "vlm" else "arch.json")}
        bundles.append(convert(golden / name / "checkpoint", work / f"{name}.gguf", **given))
    return {
        "checkpoints": Checkpoints(golden, work).case,
        "manifests": Manifests(bundles).case,
        "headers": Headers(bundles, work).case,
        "torch": TorchFiles(work).case,
    }


def run(case: Case, name: str, seed: int, indices: range) -> Iterator[tuple[int, BaseException, float]]:
    """Run inputs; yield number, exception and seconds of those that end in anything but a SinewError."""
    for index in indices:
        start = time.perf_counter()
        try:
            case(random.Random(f"{name} {seed} {index}"))
        except SinewError:
            pass
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            yield index, error, time.perf_counter() - start
        seconds = time.perf_counter() - start
        if seconds > 5:
            yield index, TimeoutError(f"{seconds:.1f} s"), seconds


def main() -> int:
    """Run the long form and print figures."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("golden", type=Path)
    parser.add_argument("--count", type=int, default=1000, help="inputs of each kind")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--kind", action="append", default=[])
    parser.add_argument("--raise", dest="reraise", action="store_true", help="show the first traceback")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    failed = 0
    with tempfile.TemporaryDirectory() as work:
        for name, case in cases(given.golden, Path(work)).items():
            if given.kind and name not in given.kind:
                continue
            start, kinds = time.perf_counter(), collections.Counter[str]()
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            for index, error, _ in run(case, name, given.seed, range(given.first, given.first + given.count)):
                if given.reraise:
                    raise error
                failed += 1
                kinds[f"{type(error).__name__}: {str(error)[:100]}"] += 1
                if kinds[f"{type(error).__name__}: {str(error)[:100]}"] == 1:
                    print(
                        f"  {name} seed {given.seed} number {index}: {type(error).__name__}: {str(error)[:160]}"
                    )
            after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            seconds = time.perf_counter() - start
            print(
                f"{name}: {given.count} inputs, {sum(kinds.values())} unexpected, {seconds:.0f} s, peak memory"
                f" {before // 1024} -> {after // 1024} MiB",
                flush=True,
            )
    return 1 if failed else 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
