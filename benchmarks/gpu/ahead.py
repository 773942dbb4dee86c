"""Compile the kernels of ``make gpu`` on a machine without a GPU, to save time on the machine with the GPU.

``python -m benchmarks.gpu ahead --out build/gpu/tc.tgz [--capability 90] [--only PART,...]`` packs the machine code of
Triton into an archive. ``python -m benchmarks.gpu ahead --check build/gpu/tc.tgz`` tests on the other machine whether
Triton will use this machine code. Triton computes its cache key from its own files and from the files of its compiler.
So both machines need the same wheel of Triton for the same Python version. Both also need the same TRITON_CACHE_DIR,
because its path is in the files.

The program runs the sections on the meta device. It records each kernel launch instead of running it, and compiles the
recorded kernels.
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

Kinds = dict[str, Any]  # cache key -> sinew.engine.cuda.kernels.launch.Specialised
CACHE = "/tmp/tc"
MANIFEST = "ahead.json"
KEPT = (".cubin", ".json")  # a launch reads only these files of a compilation
MOST_THREADS = 16


def parts() -> tuple[str, ...]:
    """Return the names of the parts that can be compiled: section "checks", and the ladder of each model."""
    from benchmarks.gpu.models import MODELS

    return ("checks", *MODELS)


def of_checks() -> Kinds:
    """Return the kernel launches of section "checks"."""
    from tests.engine.cuda import kernel_checks

    with collecting() as found:
        for name, check in kernel_checks.CHECKS.items():
            for dtype in kernel_checks.DTYPES:
                for sizes in ({}, *kernel_checks.EDGES[name]):
                    try:
                        check(kernel_checks.module_of(name), dtype, "cpu", **sizes)
                    except Exception:  # noqa: BLE001 - no kernel ran, so the check of the result fails
                        continue
    return found


def of_model(name: str, tiny: bool = False) -> Kinds:
    """Return the kernel launches of all rungs in the ladder of a model."""
    import torch

    from benchmarks.gpu.ladder import FP8
    from benchmarks.gpu.lowbit import FORMATS, few_rows, low_bit
    from benchmarks.gpu.models import TARGETS, processing, weightless
    from benchmarks.gpu.rungs import plan_of
    from benchmarks.gpu.session import shrunk
    from sinew.engine.cuda.fp8.scales import linears
    from sinew.engine.cuda.fused.launches import Kernels
    from sinew.engine.cuda.kernels import fp8_quantize, weight_only_linear

    case, meta = shrunk(TARGETS[name], tiny), torch.device("meta")
    with torch.no_grad(), collecting() as found:
        model = weightless(name, case.chunk, tiny)
        recipe, plan = processing(name, model.config), plan_of(model)
        calibrated = dict.fromkeys(linears(plan.model, ("language",)), 1.0)
        rungs = [(plan, ()), *((plan, parts) for parts in FP8.values())]
        few = few_rows(case, meta, tiny)
        rungs += [(plan_of(low_bit(model, form, few)), ()) for form in FORMATS.values()]
        for planned, fp8 in rungs:
            made = program(case, planned, recipe, Kernels(meta), fp8, calibrated if fp8 else {})
            # For a layer that is not fused, the meta device would run the references. A GPU runs the kernels.
            with (
                mock.patch.object(fp8_quantize, "reference", fp8_quantize.fp8_quantize),
                mock.patch.object(weight_only_linear, "reference", weight_only_linear.weight_only_linear),
            ):
                made.chunk()
    return found


def program(
    case: Any, plan: Any, recipe: Any, ops: Any, fp8: tuple[str, ...], scales: dict[str, float]
) -> Any:
    """Return the program that the engine would record for an observation of this case."""
    import torch

    from benchmarks.gpu.models import CAMERA, length
    from sinew.engine.cuda.frames import fits
    from sinew.engine.cuda.fused.fuse import fuse
    from sinew.engine.cuda.graphs import Calls
    from sinew.engine.cuda.options import CudaOptions
    from sinew.engine.cuda.program import Key, Program

    fused = fuse(plan, ops, fp8, scales)
    sizes = (CAMERA,) * case.views if fits(recipe.image, fused.model) else ()
    tokens = CudaOptions().bucket(length(case, plan.model.config))
    key = Key(case.views, sizes, tokens, case.steps)
    return Program(key, fused, ops, recipe, Calls(), torch.device("meta"))


@contextmanager
def collecting() -> Iterator[Kinds]:
    """Within the context, record one launch of each kind and run none of them. The outputs of the launches are
    undefined."""
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
    """Within the context, choose tiles as on a GPU of this compute capability."""
    from sinew.engine.cuda.kernels import tiles

    real = tiles.capability
    tiles.capability = lambda _: capability
    try:
        yield
    finally:
        tiles.capability = real


def compile_all(found: Mapping[str, Any], capability: int) -> int:
    """Compile all kernels for ``capability`` on all cores, into the cache folder. Returns the number of compiled
    kernels.

    The compiler rarely holds the lock of the Python interpreter, so threads are enough.
    """
    good = 0
    with ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1), "compile") as pool:
        for future in as_completed([pool.submit(made.compile, capability) for made in found.values()]):
            error = future.exception()
            good += error is None
            if error is not None:  # continue, because the launch on the GPU reports the same error
                print(f"not compiled: {error}", file=sys.stderr)
    return good


def facts() -> dict[str, Any]:
    """Return the facts that are part of Triton's cache key, besides the kernels. Both machines must have the same
    facts."""
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
    """Write an archive with the machine code in the cache folder and the facts ``about`` it. Returns the number of
    kernels."""
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
    """Return the reasons why Triton on this machine cannot use an archive: field, expected, got.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file is not an archive of this program.
    """
    with tarfile.open(archive) as tar:
        member = next((each for each in tar if Path(each.name).name == MANIFEST), None)
        held = tar.extractfile(member) if member is not None else None
        if held is None:
            raise ValueError(f"expected a file {MANIFEST} in the archive, found none")
        about = json.loads(held.read())
    differ = (name for name in here if about.get(name) != here[name])
    return [f"{name}: expected {about.get(name)}, got {here[name]}" for name in differ]


def main(arguments: Sequence[str]) -> int:
    os.environ["TRITON_INTERPRET"] = "0"  # set this variable before the import of triton
    os.environ.setdefault("TRITON_CACHE_DIR", CACHE)
    parser = argparse.ArgumentParser(
        prog="benchmarks.gpu ahead", description=(__doc__ or "").split("\n\n")[0]
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--out", type=Path, help="compile the kernels, and pack them into this file")
    what.add_argument(
        "--check",
        type=Path,
        metavar="FILE",
        help="test whether Triton on this machine can use the kernels in FILE",
    )
    parser.add_argument("--capability", type=int, choices=(80, 89, 90), default=90)
    parser.add_argument("--triton", help="stop if this machine has another version of Triton")
    parser.add_argument("--only", help=f"some of {', '.join(parts())}(default: all)")
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
    """Compile the kernels and pack them. Returns the exit status, which is 1 if no kernel was compiled."""
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
    print(
        f"on the other machine: tar xzf {out.name} -C {cache_folder().parent}; export TRITON_CACHE_DIR={cache_folder()}"
    )
    return int(count == 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
