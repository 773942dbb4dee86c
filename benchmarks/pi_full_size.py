"""Convert, load and run a random pi0 or pi0.5 at full size on this machine: time and memory of each phase.

``python benchmarks/pi_full_size.py OUT --architecture pi05``; needs 16 GB of disk. The last line is JSON.
"""

from __future__ import annotations

import json
import multiprocessing
import resource
import time
from pathlib import Path

from cyclopts import run

from sinew.presets.pi_checkpoint import Architecture, write_pi_checkpoint


def phase(target, *args) -> dict:
    """Run ``target`` in a process of its own; returns what it returned, its seconds and its peak RSS in MiB."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_measured, (target, *args))


def _measured(target, *args) -> dict:
    start = time.perf_counter()
    result = target(*args)
    seconds = round(time.perf_counter() - start, 1)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    return {"seconds": seconds, "peak_rss_mib": peak, **(result if isinstance(result, dict) else {})}


def convert(checkpoint: Path, bundle: Path) -> dict:
    import sinew.convert

    start = time.perf_counter()
    sinew.convert.convert(checkpoint, bundle)
    return {"without_imports_s": round(time.perf_counter() - start, 1)}


def infer(bundle: Path, dtype: str, runs: int) -> dict:
    import sinew

    start = time.perf_counter()
    policy = sinew.load(bundle, "cpu", dtype, "eager")
    load_s = time.perf_counter() - start
    chunks = [policy.warm_up() for _ in range(runs)]
    status = Path("/proc/self/status").read_text().splitlines()
    rss = {k: int(v.split()[0]) // 1024 for k, v in (line.split(":", 1) for line in status if "Rss" in line)}
    return {
        "load_s": round(load_s, 2),
        "weights_mib": policy.weights_nbytes >> 20,
        "first_ms": round(chunks[0].timing.total_ms),
        "later_ms": [round(chunk.timing.total_ms) for chunk in chunks[1:]],
        "vision_prefix_head_ms": [
            round(getattr(chunks[-1].timing, k)) for k in ("vision_ms", "prefix_ms", "head_ms")
        ],
        "rss_mib": rss,
    }


def main(out: Path, /, *, architecture: Architecture = "pi0", dtype: str = "native", runs: int = 2) -> None:
    checkpoint, bundle = out / architecture, out / f"{architecture}.gguf"
    results = {"architecture": architecture, "dtype": dtype}
    if not (checkpoint / "model.safetensors").exists():
        results["write"] = phase(write_pi_checkpoint, checkpoint, architecture)
    results["convert"] = phase(convert, checkpoint, bundle)
    results["infer"] = phase(infer, bundle, dtype, runs)
    for name, values in results.items():
        print(name, values)
    print(json.dumps(results))


if __name__ == "__main__":
    run(main)
