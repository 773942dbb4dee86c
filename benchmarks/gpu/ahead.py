"""Compile at home, without a GPU, what the sections of ``make gpu`` would compile on borrowed time.

``python -m benchmarks.gpu ahead --out build/gpu/tc.tgz [--capability 90] [--only PART,...]`` packs Triton's machine
code into an archive; ``python -m benchmarks.gpu ahead --check build/gpu/tc.tgz`` says on the other machine if Triton
will find it there. Triton's key is made of its own files and of the compiler's, so both machines need the same wheel,
of the same Python version, and the same TRITON_CACHE_DIR, whose path is in the files.

Everything is launched on the meta device, and what is launched is taken down and compiled instead.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import platform
import sys
import tarfile
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

Kinds = dict[str, Any]  # sinew.engine.cuda.kernels.launch.Specialised by its key
CACHE = "/tmp/tc"
MANIFEST = "ahead.json"
KEPT = (".cubin", ".json")  # what a launch reads; the rest of a compilation is for people
NARROW = ("language",)
MOST_THREADS = 16


def parts() -> tuple[str, ...]:
    """Return the names of what can be compiled: a section, and the ladders of the models."""
    from benchmarks.gpu.models import MODELS

    return ("checks", *MODELS)


def of_checks() -> Kinds:
    """Return what the checks of the kernels launch."""
    from tests.engine.cuda import kernel_checks

    with collecting() as found:
        for name, check in kernel_checks.CHECKS.items():
            for dtype in kernel_checks.DTYPES:
                for sizes in ({}, *kernel_checks.EDGES[name]):
                    try:
                        check(kernel_checks.module_of(name), dtype, "cpu", **sizes)
                    except Exception:  # noqa: BLE001 - nothing ran, so nothing is what it should be
                        continue
    return found


def of_model(name: str, tiny: bool = False) -> Kinds:
    """Return what the rungs of a model's ladder launch."""
    import torch

    from benchmarks.gpu.models import TARGETS, processing, weightless
    from benchmarks.gpu.rungs import plan_of
    from benchmarks.gpu.session import shrunk
    from sinew.engine.cuda.fp8.scales import linears
    from sinew.engine.cuda.fused.launches import Kernels
    from sinew.engine.cuda.kernels import fp8_quantize

    case, meta = shrunk(TARGETS[name], tiny), torch.device("meta")
    with torch.no_grad(), collecting() as found:
        model = weightless(name, case.chunk, tiny)
        recipe, plan = processing(name, model.config), plan_of(model)
        calibrated = dict.fromkeys(linears(plan.model, NARROW), 1.0)
        for fp8, scales in (((), {}), (NARROW, calibrated)):
            made = program(case, plan, recipe, Kernels(meta), fp8, scales)
            # An FP8 layer that is not fused has the reference on this device, where a GPU has the kernel.
            with mock.patch.object(fp8_quantize, "reference", fp8_quantize.fp8_quantize):
                made.chunk()
    return found


def program(
    case: Any, plan: Any, recipe: Any, ops: Any, fp8: tuple[str, ...], scales: dict[str, float]
) -> Any:
    """Return the program that an engine would record for a case's observation."""
    import torch

    from benchmarks.gpu.models import CAMERA, length
    from sinew.engine.cuda.frames import fits
    from sinew.engine.cuda.fused.fuse import fuse
    from sinew.engine.cuda.graphs import Calls
    from sinew.engine.cuda.options import CudaOptions
    from sinew.engine.cuda.program import Key, Program

    fused = fuse(plan, ops, True, fp8, scales)
    sizes = (CAMERA,) * case.views if fits(recipe.image, fused.model) else ()
    tokens = CudaOptions().bucket(length(case, plan.model.config))
    key = Key(case.views, sizes, tokens, case.steps)
    return Program(key, fused, ops, recipe, Calls(), torch.device("meta"))


@contextmanager
def collecting() -> Iterator[Kinds]:
    """Within the context, launches are taken down, each kind once, and not run: what they would have written holds
    anything."""
    from sinew.engine.cuda.kernels.launch import Launch

    found, real = Kinds(), Launch.__call__

    def take_down(launch: Any) -> None:
        made = launch.specialised()
        found.setdefault(made.key(), made)

    Launch.__call__ = take_down  # type: ignore[method-assign]
    try:
        yield found
    finally:
        Launch.__call__ = real  # type: ignore[method-assign]


@contextmanager
def pretending(capability: int) -> Iterator[None]:
    """Tiles are those of a device of this compute capability."""
    from sinew.engine.cuda.kernels import tiles

    real = tiles.capability
    tiles.capability = lambda _: capability
    try:
        yield
    finally:
        tiles.capability = real


def compile_all(found: Mapping[str, Any], capability: int) -> int:
    """Compile for ``capability`` on all cores and keep on disk; returns how many did. The compiler leaves Python's lock
    alone most of the time: threads are enough."""
    good = 0
    with ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1), "compile") as pool:
        for future in as_completed([pool.submit(made.compile, capability) for made in found.values()]):
            error = future.exception()
            good += error is None
            if error is not None:  # it is left to the launch, which says it too
                print(f"not compiled: {error}", file=sys.stderr)
    return good


def facts() -> dict[str, Any]:
    """Return what Triton's key depends on besides the kernels: where these differ, it finds nothing."""
    import triton
    from triton.runtime.cache import triton_key

    return {
        "python": ".".join(platform.python_version_tuple()[:2]),
        "triton": triton.__version__,
        "triton_key": triton_key(),
        "cache": str(cache_folder()),
    }


def cache_folder() -> Path:
    return Path(os.environ.get("TRITON_CACHE_DIR", CACHE))


def pack(out: Path, about: dict[str, Any]) -> int:
    """Write the machine code of the cache and ``about`` it; returns how many kernels there are."""
    folder = cache_folder()
    files = sorted(path for path in folder.rglob("*") if path.suffix in KEPT)
    out.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(about, indent=1).encode()
    with tarfile.open(out, "w:gz") as archive:
        for path in files:
            archive.add(path, str(Path(folder.name) / path.relative_to(folder)))
        member = tarfile.TarInfo(f"{folder.name}/{MANIFEST}")
        member.size = len(text)
        archive.addfile(member, io.BytesIO(text))
    return sum(path.suffix == ".cubin" for path in files)


def differences(archive: Path, here: dict[str, Any]) -> list[str]:
    """Return why Triton would not find here what an archive holds: field, expected, got. OSError and ValueError for a
    file that is no such archive."""
    with tarfile.open(archive) as tar:
        member = next((each for each in tar if Path(each.name).name == MANIFEST), None)
        held = tar.extractfile(member) if member is not None else None
        if held is None:
            raise ValueError(f"expected {MANIFEST} in it, got none")
        about = json.loads(held.read())
    differ = (name for name in here if about.get(name) != here[name])
    return [f"{name}: expected {about.get(name)}, got {here[name]}" for name in differ]


def main(arguments: Sequence[str]) -> int:
    os.environ["TRITON_INTERPRET"] = "0"  # before triton is imported
    os.environ.setdefault("TRITON_CACHE_DIR", CACHE)
    parser = argparse.ArgumentParser(
        prog="benchmarks.gpu ahead", description=(__doc__ or "").split("\n\n")[0]
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--out", type=Path, help="compile, and pack into this file")
    what.add_argument(
        "--check", type=Path, metavar="FILE", help="does this machine's Triton find what FILE holds?"
    )
    parser.add_argument("--capability", type=int, choices=(80, 89, 90), default=90)
    parser.add_argument("--triton", help="refuse to compile with another version")
    parser.add_argument("--only", help=f"some of {', '.join(parts())}; all by default")
    options = parser.parse_args(arguments)
    here = facts()
    if options.check is not None:
        try:
            found = differences(options.check, here)
        except (OSError, EOFError, ValueError, tarfile.TarError, zlib.error) as error:
            found = [f"{options.check}: {error}"]
        print("\n".join(found) or f"{options.check}: fits triton {here['triton']}, Python {here['python']}")
        return int(bool(found))
    if options.triton not in (None, here["triton"]):
        parser.error(f"--triton: expected {options.triton}, got {here['triton']}")
    names = options.only.split(",") if options.only else list(parts())
    if unknown := set(names).difference(parts()):
        parser.error(f"--only: expected some of {', '.join(parts())}, got {', '.join(sorted(unknown))}")
    return compiled(names, options.capability, options.out, here)


def compiled(names: list[str], capability: int, out: Path, here: dict[str, Any]) -> int:
    """Compile and pack; 1 where nothing did."""
    done: set[str] = set()
    rows = {}
    with pretending(capability):
        for name in names:
            start = time.monotonic()
            found = {
                key: each
                for key, each in (of_checks() if name == "checks" else of_model(name)).items()
                if key not in done
            }
            done |= found.keys()
            good = compile_all(found, capability)
            rows[name] = {"kinds": len(found), "compiled": good}
            print(f"{name}: {good} of {len(found)} new kinds, {time.monotonic() - start:.0f} s", flush=True)
    count = pack(out, here | {"capability": capability, "parts": rows})
    print(f"{out}: {count} kernels, {out.stat().st_size / 2**20:.1f} MiB")
    print(f"there: tar xzf {out.name} -C {cache_folder().parent}; export TRITON_CACHE_DIR={cache_folder()}")
    return int(count == 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
