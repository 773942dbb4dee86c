"""Record a timeline of one replay of a CUDA graph: each kernel with its start, its duration and the gap before it.

The times of three stages do not show which of a thousand launches is slow. The profiler of PyTorch records the kernels
inside a replayed graph. The rows contain this record, summed for each kernel and launch shape, longest first. The same
record also shows the work of the host: its launches and copies for a chunk, and the time of its parts.
"""

from __future__ import annotations

import gzip
import json
import statistics
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.ladder import FP8, INPUTS, calibrated
from benchmarks.gpu.models import CAMERA, TARGETS, processing, random_model, samples, with_chunk
from benchmarks.gpu.roofline import Counted, launch_work
from benchmarks.gpu.rungs import Engine, cuda_engine, plan_of
from benchmarks.gpu.session import Row, Session, shrunk
from sinew.engine.cuda.graphs import StageRange

ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
ON_CPU = ("cpu_op",)  # without a GPU, the section uses these events, to show that it runs
ON_HOST = ("cuda_runtime", "cuda_driver")
GRAPH_LAUNCH, KERNEL_LAUNCH = "cudaGraphLaunch", ("cudaLaunchKernel", "cuLaunchKernel")
CALL = "infer"  # name of the profiler's range around a chunk
REPLAYS = 3
LONGEST = 40  # number of kinds of launches in the rows; the last row sums all others
MOST_TRACE = 2 << 20  # largest size of a stored trace in bytes
VARIANTS: dict[str, dict[str, Any]] = {
    "engine": {},
    **{name: {"fp8": parts} for name, parts in FP8.items()},
    "graph": {"kernels": False},
}


def timeline(model: str, session: Session) -> None:
    """Emit rows for each variant of the engine on the model's target case: the host, the whole replay, each kind of
    launch.

    Raises:
        RuntimeError: A chunk was not exactly one launch of a graph.
    """
    case = shrunk(TARGETS[model], session.tiny)
    base = with_chunk(random_model(model, session.device, tiny=session.tiny), case.chunk)
    recipe, plan = processing(model, base.config), plan_of(base)
    inputs = samples(case, base.config, INPUTS, (24, 32) if session.tiny else CAMERA)
    launches = {}
    for variant, options in VARIANTS.items():
        if session.left <= 0:
            raise TimeoutError(f"time limit reached: {variant} and all later variants did not run")
        scales = calibrated(plan, recipe, inputs, session) if "fp8" in options else None
        made = Engine(cuda_engine(plan, recipe, session.device, scales, **options))
        for sample in inputs:
            made.run(sample)
        about = {"case": case.name, "variant": variant}
        events = recorded(made, inputs, session)
        host = {**host_row(events), "range_us": range_us()}
        session.emit(about | host)  # emit the row now, because the later steps may fail
        launches[variant] = host["graph_launches"]
        if session.traces is not None:
            name = kept(events, Path(f"{session.traces}-{model}-{variant}.json.gz"))
            session.emit({**about, "what": "trace", "file": name})
        for row in rows_of(last_replay(events, session), launch_work(made.engine)):
            session.emit(about | row)
        del made
        if session.is_gpu:
            torch.cuda.empty_cache()
    if session.is_gpu:
        check_one_launch(launches)


def check_one_launch(launches: dict[str, int]) -> None:
    """Raise RuntimeError unless a chunk of each variant was one launch of a graph."""
    if set(launches.values()) != {1}:
        raise RuntimeError(f"expected one launch of a graph for each chunk, got {launches}")


def recorded(made: Any, inputs: list[Any], session: Session) -> list[Row]:
    """Return the events of REPLAYS chunks, ordered by their start. The first row describes the trace. Times are
    microseconds."""
    activity = torch.profiler.ProfilerActivity
    activities = [activity.CPU, *([activity.CUDA] if session.is_gpu else [])]
    with torch.profiler.profile(activities=activities) as profile:
        for index in range(REPLAYS):
            with torch.profiler.record_function(CALL):
                made.run(inputs[index % len(inputs)])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return sorted(events, key=lambda event: event.get("ts", 0.0) if event.get("ph") != "M" else 0.0)


def last_replay(events: list[Row], session: Session) -> list[Row]:
    """Return the events of the device for the last chunk.

    Raises:
        RuntimeError: The chunks launched different numbers of kernels.
    """
    wanted = ON_DEVICE if session.is_gpu else ON_CPU
    events = [event for event in events if event.get("cat") in wanted]
    if session.is_gpu and len(events) % REPLAYS:
        raise RuntimeError(f"{len(events)} launches in {REPLAYS} replays: expected the same number in each")
    return events[len(events) - len(events) // REPLAYS :]


def within(events: list[Row], span: Row) -> list[Row]:
    """Return the events that begin inside a range."""
    return [e for e in events if span["ts"] <= e.get("ts", -1) < span["ts"] + span["dur"]]


def host_row(events: list[Row]) -> Row:
    """Return the work of the host for the last chunk.

    Returns:
        The launches of graphs and kernels, and the number and bytes of copies by direction. Also these times in
        microseconds: the parts of the chunk, the time before the first work of the device, the time after its last
        work, and the calls of the CUDA runtime, longest first.

    Raises:
        RuntimeError: The chunks differ in their number of graph launches.
    """
    chunks = [within(events, e) for e in events if e.get("cat") == "user_annotation" and e["name"] == CALL]
    counts = {sum(map(_launches_graph, chunk)) for chunk in chunks}
    if len(counts) > 1:
        raise RuntimeError(f"expected as many launches of graphs for each chunk, got {sorted(counts)}")
    last = chunks[-1]
    copies: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for event in last:
        if event.get("cat") == "gpu_memcpy":
            found = copies[event["name"].removeprefix("Memcpy ")]
            found[0] += 1
            found[1] += event.get("args", {}).get("bytes", 0)
    calls = [event for event in last if event.get("cat") in ON_HOST]
    lengths, numbers = Counter[str](), Counter[str]()
    for call in calls:
        lengths[call["name"]] += call["dur"]
        numbers[call["name"]] += 1
    parts = {
        "copying_us": sum(e["dur"] for e in last if _is_range(e, "copies")),
        "launching_us": sum(e["dur"] for e in calls if _launches_graph(e) or _launches_kernel(e)),
        "waiting_us": sum(e["dur"] for e in calls if "Synchronize" in e["name"]),
    }
    (whole,) = (e for e in last if _is_range(e, CALL))
    busy = [(e["ts"], e["ts"] + e["dur"]) for e in last if e.get("cat") in ON_DEVICE]
    ends = (min(start for start, _ in busy), max(end for _, end in busy)) if busy else (None, None)
    return {
        "what": "host",
        "graph_launches": counts.pop(),
        "kernel_launches": sum(map(_launches_kernel, calls)),
        "copies": dict(copies),
        "host_us": whole["dur"],
        **parts,
        "rest_us": whole["dur"] - sum(parts.values()),
        "before_us": None if ends[0] is None else ends[0] - whole["ts"],
        "after_us": None if ends[1] is None else whole["ts"] + whole["dur"] - ends[1],
        "calls": [(name, numbers[name], length) for name, length in lengths.most_common()],
    }


def _launches_graph(event: Row) -> bool:
    return event.get("cat") in ON_HOST and event["name"].startswith(GRAPH_LAUNCH)


def _launches_kernel(event: Row) -> bool:
    return event.get("cat") in ON_HOST and event["name"].startswith(KERNEL_LAUNCH)


def _is_range(event: Row, name: str) -> bool:
    return event.get("cat") == "user_annotation" and event["name"] == name


def range_us(times: int = 1000) -> float:
    """Return the cost of a profiler range when no profiler runs, in microseconds."""
    start = time.perf_counter()
    for _ in range(times):
        with StageRange("nobody listens"):
            pass
    return 1e6 * (time.perf_counter() - start) / times


def kept(events: list[Row], path: Path) -> str:
    """Write the events of the last chunk as a trace for Chrome's viewer. Returns the file name.

    Raises:
        RuntimeError: The trace is too large to be stored.
    """
    calls = [event for event in events if _is_range(event, CALL)]
    shown = [event for event in events if event.get("ph") == "M"] + within(events, calls[-1])
    packed = gzip.compress(json.dumps({"traceEvents": shown}).encode())
    if len(packed) > MOST_TRACE:
        raise RuntimeError(f"{path.name}: expected at most {MOST_TRACE} bytes of a trace, got {len(packed)}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(packed)
    return path.name


def rows_of(events: list[Row], work: Counted | None = None) -> list[Row]:
    """Return one row for the whole replay, and one row for each kind of launch, longest first.

    A kind of launch has the same kernel, grid, block and shared memory. A gap is the time between the end of a launch
    and the start of the next one.

    Args:
        events: The events of the device for one chunk.
        work: Products of the launches of Sinew's own kernels (:func:`launch_work`).
    """
    if not events:
        return []
    kinds: dict[tuple[str, str, str, Any], list[tuple[float, float]]] = defaultdict(list)
    gaps, end = [], None
    for event in events:
        gap = 0.0 if end is None else event["ts"] - end
        if end is not None:
            gaps.append(gap)
        end = event["ts"] + event["dur"]
        facts = event.get("args", {})
        kind = (
            event["name"][:80],
            str(facts.get("grid")),
            str(facts.get("block")),
            facts.get("shared memory"),
        )
        kinds[kind].append((event["dur"], gap))
    busy = sum(event["dur"] for event in events)
    rows: list[Row] = [
        {
            "what": "replay",
            "launches": len(events),
            "span_us": max(e["ts"] + e["dur"] for e in events) - events[0]["ts"],
            "busy_us": busy,
            "gap_us_median": statistics.median(gaps) if gaps else 0.0,
            "gaps_us": sum(gaps),
            "streams": len({event.get("args", {}).get("stream") for event in events}),
        }
    ]
    ordered = sorted(kinds.items(), key=lambda item: -sum(length for length, _ in item[1]))
    for (name, grid, block, shared), found in ordered[:LONGEST]:
        lengths, before = zip(*found, strict=True)
        rows.append(
            {
                "what": name,
                "grid": grid,
                "block": block,
                "shared": shared,
                "launches": len(found),
                "us": sum(lengths),
                "us_median": statistics.median(lengths),
                "gap_us_median": statistics.median(before),
                **_work_of(name, grid, len(found), work or {}),
            }
        )
    rest = [length for _, found in ordered[LONGEST:] for length, _ in found]
    if rest:
        rows.append({"what": "all others", "launches": len(rest), "us": sum(rest)})
    return rows


def _work_of(name: str, grid: str, count: int, work: Counted) -> Row:
    """Return the products of a kind of launch. Returns nothing if two kinds have the same kernel name and grid."""
    known = work.get((name, grid), [])
    return {"work": known} if len(known) == count else {}
