"""Convert, load and run a random pi0 or pi0.5 at full size on this machine: time and memory of each phase.

``python benchmarks/pi_full_size.py OUT --architecture pi05``; needs 16 GB of disk. The last line is JSON.
"""

from __future__ import annotations

import json
import multiprocessing
import resource
import threading
import time
from pathlib import Path

from cyclopts import run

from sinew.presets.pi_checkpoint import Architecture, write_pi_checkpoint


def phase(target, *args) -> dict:
    """Run ``target`` in a process of its own; return what it returned, its seconds and its memory in MiB.

    ``peak_rss_mib`` counts the pages of mapped files, which the system takes back when it needs them;
    ``extra_mib`` does not: it is what the process allocated on top of what it had before, sampled 50 times a second.
    """
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        found = pool.apply(_measured, (target, *args))
    print(target.__name__, found, flush=True)
    return found


def _measured(target, *args) -> dict:
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


def convert(checkpoint: Path, bundle: Path) -> dict:
    import sinew.convert

    start = time.perf_counter()
    sinew.convert.convert(checkpoint, bundle)
    return {"without_imports_s": round(time.perf_counter() - start, 1)}


def infer(bundle: Path, dtype: str, runs: int, engine: str = "eager") -> dict:
    import sinew

    start = time.perf_counter()
    policy = sinew.load(bundle, "cpu", dtype, engine)
    load_s = time.perf_counter() - start
    chunks = [policy.warm_up() for _ in range(runs)]
    return {
        "load_s": round(load_s, 2),
        "precision": policy.precision_text,
        "reason": policy.dtype_reason,
        "threads": policy.threads,
        "weights_mib": policy.weights_nbytes >> 20,
        "first_ms": round(chunks[0].timing.total_ms),
        "later_ms": [round(chunk.timing.total_ms) for chunk in chunks[1:]],
        "vision_prefix_head_ms": [
            round(getattr(chunks[-1].timing, k)) for k in ("vision_ms", "prefix_ms", "head_ms")
        ],
        "rss_mib": rss(),
    }


def main(
    out: Path,
    /,
    *,
    architecture: Architecture = "pi0",
    dtype: str = "native",
    engine: str = "eager",
    runs: int = 2,
) -> None:
    checkpoint, bundle = out / architecture, out / f"{architecture}.gguf"
    results: dict = {"architecture": architecture, "dtype": dtype, "engine": engine}
    if not bundle.exists():
        if not (checkpoint / "model.safetensors").exists():
            results["write"] = phase(write_pi_checkpoint, checkpoint, architecture)
        results["convert"] = phase(convert, checkpoint, bundle)
    results["infer"] = phase(infer, bundle, dtype, runs, engine)
    print(json.dumps(results))


if __name__ == "__main__":
    run(main)
