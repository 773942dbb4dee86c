"""Convert, load and run a random checkpoint of each family at full size, and print the time and memory of each phase.

    python -m benchmarks.full_size OUT [--only bitvla ...] [--engines eager cpu] [--runs 1] [--keep]

Each family needs disk space for twice its weights. OpenVLA with 7.5 billion parameters needs 31 GB. The benchmark
deletes the files of a family before it begins the next family, unless you pass ``--keep``. For comparison, it copies
the bytes of the checkpoint on the same disk, right before the conversion. With ``--runs 0``, it runs no inference. A
family that needs more than 24 GiB of memory is only converted, unless you name the family. The last line of the output
is JSON.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cyclopts import run
from rich.console import Console
from rich.table import Table

from benchmarks.checkpoints.smolvla import write_checkpoint
from benchmarks.families import FAMILIES
from benchmarks.inflate import inflate

NAMES = ("smolvla", *FAMILIES)
MIB = 1 << 20


def phase(target: Callable[..., Any], *args: Any) -> dict[str, Any]:
    """Run ``target`` in its own process.

    Returns:
        The result of ``target``, its seconds and its memory in MiB. ``peak_rss_mib`` counts pages of mapped files,
        which the system drops when it needs memory. ``extra_mib`` does not count these pages. It is the memory that
        the process allocated after its start, sampled 50 times a second.
    """
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        found: dict[str, Any] = pool.apply(_measured, (target, *args))
    print(target.__name__, found, flush=True)
    return found


def _measured(target: Callable[..., Any], *args: Any) -> dict[str, Any]:
    before, largest, done = rss()["RssAnon"], [0], threading.Event()

    def sample() -> None:
        while not done.wait(0.02):
            largest.append(max(largest.pop(), rss()["RssAnon"]))

    sampler = threading.Thread(target=sample)
    sampler.start()
    start, cpu = time.perf_counter(), time.process_time()
    result = target(*args)
    times = {"seconds": round(time.perf_counter() - start, 1), "cpu_s": round(time.process_time() - cpu, 1)}
    done.set()
    sampler.join()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    memory = {"peak_rss_mib": peak, "extra_mib": largest[0] - before}
    return {**times, **memory, **(result if isinstance(result, dict) else {})}


def rss() -> dict[str, int]:
    """Return the resident memory of this process in MiB: RssAnon, RssFile and RssShmem."""
    status = Path("/proc/self/status").read_text().splitlines()
    return {k: int(v.split()[0]) // 1024 for k, v in (line.split(":", 1) for line in status if "Rss" in line)}


# ----------------------------------------------------------------------------- phases


def write(name: str, out: Path) -> dict[str, Any]:
    """Write the random checkpoint of a family to a folder below ``out``."""
    if name == "smolvla":
        write_checkpoint(out, dtype="native")
    else:
        inflate(FAMILIES[name], out)
    return {"bytes": sum(file.stat().st_size for file in weights(name, out))}


def weights(name: str, out: Path) -> list[Path]:
    folder = out / (FAMILIES[name].folder if name in FAMILIES else "checkpoint")
    return [file for file in folder.iterdir() if file.suffix in (".safetensors", ".pt")]


def given(name: str, out: Path) -> dict[str, Any]:
    """Return the options of the conversion of a family."""
    if name == "smolvla":
        return {"vlm": out / "vlm"}
    return FAMILIES[name].options(out)


def copy(name: str, out: Path) -> None:
    """Copy the weights through a buffer in memory, which a conversion also must do."""
    for file in weights(name, out):
        target = out / "copy"
        with file.open("rb") as source, target.open("wb") as sink:
            shutil.copyfileobj(source, sink, 4 * MIB)
        target.unlink()


def convert(name: str, out: Path, bundle: Path) -> dict[str, Any]:
    import sinew.convert

    folder = out / (FAMILIES[name].folder if name in FAMILIES else "checkpoint")
    start = time.perf_counter()
    sinew.convert(folder, bundle, **given(name, out))
    return {"without_imports_s": round(time.perf_counter() - start, 1), "bytes": bundle.stat().st_size}


def infer(bundle: Path, dtype: str, engine: str, runs: int) -> dict[str, Any]:
    import sinew

    start = time.perf_counter()
    policy = sinew.load(bundle, "cpu", dtype, engine)
    load_s = time.perf_counter() - start
    loaded = rss()
    chunks = [policy.warm_up() for _ in range(runs)]
    timing = chunks[-1].timing
    return {
        "precision": f"{policy.precision_text}: {policy.dtype_reason}",
        "load_s": round(load_s, 2),
        "weights_mib": policy.facts.weights_nbytes >> 20,
        "first_ms": round(chunks[0].timing.total_ms),
        "later_ms": [round(chunk.timing.total_ms) for chunk in chunks[1:]],
        "vision_prefix_head_ms": [round(getattr(timing, k)) for k in ("vision_ms", "prefix_ms", "head_ms")],
        "rss_loaded_mib": loaded,
        "rss_mib": rss(),
    }


# ----------------------------------------------------------------------------- table


def row(name: str, result: dict[str, Any], engine: str) -> list[str]:
    made, copied, converted = (result[key] for key in ("write", "copy", "convert"))
    cells = [
        name,
        f"{made['bytes'] / 1e9:.2f}",
        f"{copied['seconds']:.1f} ({copied['cpu_s']:.1f})",
        f"{converted['without_imports_s']:.1f} ({converted['cpu_s']:.1f})",
        str(converted["extra_mib"]),
        f"{converted['bytes'] / 1e9:.3f} ({converted['bytes'] / MIB:.0f} MiB)",
    ]
    found = result["infer"].get(engine)
    if found is None:
        return [*cells, "", "", "", ""]
    memory = found["rss_mib"]
    stages = " + ".join(f"{ms / 1000:.1f}" for ms in found["vision_prefix_head_ms"])
    resident = f"{memory['RssAnon']} + {memory['RssFile']}"
    return [*cells, engine, f"{found['load_s']:.1f}", f"{found['first_ms'] / 1000:.1f} ({stages})", resident]


COLUMNS = (
    "family",
    "weights, GB",
    "copy, s (CPU)",
    "convert, s (CPU)",
    "allocated, MiB",
    "bundle, GB",
    "engine",
    "load, s",
    "first chunk, s (vision + prefix + head)",
    "resident, MiB (own + mapped)",
)


def main(
    out: Path,
    /,
    *,
    only: list[str] | None = None,
    engines: list[str] | None = None,
    dtype: str = "native",
    runs: int = 1,
    keep: bool = False,
) -> None:
    """Measure the families and print the table.

    Args:
        out: Folder for the checkpoints and bundles.
        only: Families to measure: smolvla, and the names in benchmarks/families.py. Default: all.
        engines: Engines that run each family.
        dtype: Type of the computation.
        runs: Number of inferences.
        keep: Keep the files.
    """
    unknown = [name for name in only or () if name not in NAMES]
    if unknown:
        raise SystemExit(f"--only {unknown[0]}: expected {', '.join(NAMES)}")
    results: dict[str, Any] = {}
    table = Table(*COLUMNS)
    for name in only or NAMES:
        home, bundle = out / name, out / f"{name}.gguf"
        result: dict[str, Any] = {"write": phase(write, name, home), "infer": {}}
        os.sync()  # Write pending data to the disk first, so that it does not slow down the copy.
        result["copy"] = phase(copy, name, home)
        os.sync()
        result["convert"] = phase(convert, name, home, bundle)
        if not keep:
            shutil.rmtree(home)
        if runs and (only or name not in FAMILIES or FAMILIES[name].run):
            for engine in engines or ["eager"]:
                # engine cpu supports only float32 around its low-bit products
                precision = "float32" if engine == "cpu" else dtype
                result["infer"][engine] = phase(infer, bundle, precision, engine, runs)
        if not keep:
            bundle.unlink()
        results[name] = result
        for engine in result["infer"] or [""]:
            table.add_row(*row(name, result, engine))
    Console(width=200).print(table)
    print(json.dumps(results))


if __name__ == "__main__":
    run(main)
