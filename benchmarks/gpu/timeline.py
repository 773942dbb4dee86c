"""A timeline of one replay: every kernel with its start, its length and the gap before it.

Three stage times do not say which of a thousand launches is slow. The profiler of PyTorch records what the device ran
inside a replayed graph; the rows here are that record, summed per kernel and launch shape, longest first.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.ladder import INPUTS, NARROW, calibrated
from benchmarks.gpu.models import CAMERA, TARGETS, processing, random_model, samples, with_chunk
from benchmarks.gpu.rungs import Engine, cuda_engine, plan_of
from benchmarks.gpu.session import Row, Session, shrunk

ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
ON_CPU = ("cpu_op",)  # what a machine without a GPU has instead: it shows that the section runs
REPLAYS = 3
LONGEST = 40  # kinds of launches in the rows; what is left is one row
VARIANTS: dict[str, dict[str, Any]] = {
    "engine": {},
    "fp8": {"fp8": NARROW},
    "graph": {"kernels": False},
}


def timeline(model: str, session: Session) -> None:
    """Emit, for each variant of the engine at the model's target, the whole replay and then its kinds of launches."""
    case = shrunk(TARGETS[model], session.tiny)
    base = with_chunk(random_model(model, session.device, tiny=session.tiny), case.chunk)
    recipe, plan = processing(model, base.config), plan_of(base)
    inputs = samples(case, base.config, INPUTS, (24, 32) if session.tiny else CAMERA)
    for variant, options in VARIANTS.items():
        if session.left <= 0:
            raise TimeoutError(f"{variant} and what follows did not run")
        scales = calibrated(plan, recipe, inputs, session) if "fp8" in options else None
        made = Engine(cuda_engine(plan, recipe, session.device, scales, **options))
        for sample in inputs:
            made.run(sample)
        for row in rows_of(last_replay(recorded(made, inputs, session), session)):
            session.emit({"case": case.name, "variant": variant, **row})
        del made
        if session.is_gpu:
            torch.cuda.empty_cache()


def recorded(made: Any, inputs: list[Any], session: Session) -> list[Row]:
    """Return the events of REPLAYS replays in the order of their start; times are microseconds."""
    activity = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[activity.CUDA if session.is_gpu else activity.CPU]) as profile:
        for index in range(REPLAYS):
            made.run(inputs[index % len(inputs)])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    wanted = ON_DEVICE if session.is_gpu else ON_CPU
    return sorted((event for event in events if event.get("cat") in wanted), key=lambda event: event["ts"])


def last_replay(events: list[Row], session: Session) -> list[Row]:
    """Return the events of the last replay. Raise if the replays did not launch the same number of kernels."""
    if session.is_gpu and len(events) % REPLAYS:
        raise RuntimeError(f"{len(events)} launches in {REPLAYS} replays: expected the same number in each")
    return events[len(events) - len(events) // REPLAYS :]


def rows_of(events: list[Row]) -> list[Row]:
    """Return one row for the whole, then one per kind of launch (kernel, grid, block, shared memory), longest first.

    A gap is the time between the end of a launch and the start of the next.
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
            }
        )
    rest = [length for _, found in ordered[LONGEST:] for length, _ in found]
    if rest:
        rows.append({"what": "all others", "launches": len(rest), "us": sum(rest)})
    return rows
