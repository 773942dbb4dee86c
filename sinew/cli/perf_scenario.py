"""``sinew perf scenario``: on the robot, on a server, split, asynchronous, as two systems."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from sinew.cli import terminal
from sinew.cli.perf_options import Positive, Rate, dtypes

if TYPE_CHECKING:
    from sinew.perf.program import PublishedProgram


def scenario(
    source: str,
    /,
    *,
    server: str = "h200",
    device: str = "agx-orin",
    network: Annotated[list[str] | None, Parameter(negative="")] = None,
    codec: Literal["raw", "jpeg", "float32"] = "raw",
    control_hz: Rate = 50.0,
    replan: Positive = None,
    cap_hz: Rate = 5.0,
    dtype: str | None = None,
    data: Path | None = None,
    links: Path | None = None,
    plot: Path | None = None,
) -> int:
    """Where to run a policy: on the robot, on a server, split; in step or asynchronously; as two systems.

    Args:
        source: as of `sinew infer`, or a family's preset.
        server: the machine at the far end.
        device: the machine on the robot.
        network: links in between, in order, repeatable; wifi7 if absent.
        codec: of the frames on their way up: bytes, JPEG at ten to one, or float32.
        control_hz: control steps per second.
        replan: control steps between two requests; half of the chunk if absent.
        cap_hz: how often System 2 (vision excluded, language) runs beside System 1.
        dtype: see `sinew perf run`.
        data: a file with more machines.
        links: a file with more networks.
        plot: write the comparison as bars.
    """
    from sinew.perf import events, plots, scenarios
    from sinew.perf.hardware import load_hardware, load_network
    from sinew.perf.program import PublishedProgram
    from sinew.perf.roofline import timing

    program = PublishedProgram.load(source, dtypes=dtypes(dtype), engine="plan")
    parts = program.components()
    far, near = load_hardware(server, data), load_hardware(device, data)
    route = [load_network(name, links) for name in network or ("wifi7",)]
    size, cache, chunk = _payload(source, program, codec)
    there, here = ([timing(part, machine).seconds for part in parts] for machine in (far, near))
    every = replan or max(1, chunk // 2)
    ways = " + ".join(link.title for link in route)
    rows: list[dict[str, Any]] = []

    bars: list[tuple[str, dict[str, float]]] = []

    def bar(where: str, latency_s: float, *stages: float) -> None:
        """Keep what a figure shows: what is not computed is the network."""
        names = ("vision", "language", "action")
        taken = {name: 1e3 * stage for name, stage in zip(names, stages, strict=True)}
        bars.append((where, {"network": max(0.0, 1e3 * (latency_s - sum(stages))), **taken}))

    def add(where: str, stages: Sequence[float], hops: Sequence[Any]) -> None:
        compute_s = sum(stages)
        latency = scenarios.synchronous_s(compute_s, size, hops)
        bar(where, latency, *stages)
        played = events.asynchronous(
            compute_s, size, hops, control_hz=control_hz, chunk=chunk, replan=every, duration_s=30
        )
        rate = scenarios.asynchronous_hz(compute_s, size, hops)
        steps = min(chunk, max(every, math.ceil(control_hz / rate - 1e-9)))  # it cannot answer more often
        stale = scenarios.staleness(latency, steps, chunk, control_hz)
        rows.append(
            {
                "where": where,
                "latency_ms": 1e3 * latency,
                "sync_hz": 1 / latency,
                "async_hz": rate,
                "age_p95_ms": 1e3 * played.age_p95_s,
                "age_bound_ms": 1e3 * stale.last_s,
                "underruns": f"{played.underruns}/{played.steps}",
            }
        )

    add("robot", here, [])
    add("server", there, route)
    split = scenarios.split_s(there[0] + there[1], here[2], size.up, cache, route)
    bar("split", split, there[0], there[1], here[2])
    rows.append(
        {
            "where": "split",
            "latency_ms": 1e3 * split,
            "sync_hz": 1 / split,
        }
    )
    for where, stage, hops in (("robot", here, []), ("server", there, route)):
        fast, slow = stage[0] + stage[2], stage[1]
        if not slow:  # no language model that could run beside
            continue
        whole = scenarios.synchronous_s(fast, size, hops)
        bar(f"dual, {where}: System 1", whole, stage[0], 0.0, stage[2])
        dual = events.dual_system(fast, slow, cap_hz, network_s=whole - fast)
        rows.append(
            {
                "where": f"dual, {where}",
                "latency_ms": 1e3 * whole,
                "sync_hz": dual.fast_hz,
                "age_bound_ms": 1e3 * dual.plan_age_max_s,
            }
        )
    console = terminal.console()
    titles = {
        "where": "where", "latency_ms": ">latency, ms", "sync_hz": ">in step, Hz", "async_hz": ">asynchronous, Hz",
        "age_p95_ms": ">age p95, ms", "age_bound_ms": ">age at most, ms", "underruns": ">steps without action",
    }  # fmt: skip
    title = f"{source}, {control_hz:g} Hz control, a request every {every} steps, {codec} frames"
    table = terminal.table(title, *titles.values())
    for row in rows:
        table.add_row(*(_shown(row.get(key)) for key in titles))
    console.print(table)
    notes = [
        f"robot: {near.title}; server: {far.title} over {ways}",
        f"{size.up / 1e3:.0f} kB up, {size.down / 1e3:.1f} kB down",
        f"split: vision and language there, action here, {cache / 1e6:.1f} MB of keys and values in between",
    ]
    if any(row["where"].startswith("dual") for row in rows):
        notes.append(
            f"dual: System 1 (vision, action) beside System 2 (language) at {cap_hz:g} Hz; age: of System 2's result"
        )
    for note in notes:
        console.print(note)
    if plot is not None:
        plots.placements(bars, plot, f"{source}: {near.title}, {far.title}, {ways}")
    terminal.emit(
        {"schema": "sinew.perf.scenario/1", "up_bytes": size.up, "down_bytes": size.down, "rows": rows}
    )
    return 0


def _payload(
    source: str, program: PublishedProgram, codec: Literal["raw", "jpeg", "float32"]
) -> tuple[Any, int, int]:
    """Return (payload, bytes of the prefix's keys and values, chunk) of a policy."""
    from sinew.core import CameraSpec, PolicySpec, VectorSpec
    from sinew.perf.memory import memory_report
    from sinew.perf.program import PRESETS
    from sinew.perf.scenarios import payload

    shapes = program.shapes
    cache, chunk = memory_report(program).cache, program.chunk
    if source not in PRESETS:
        from sinew.policy import open_bundle

        return payload(open_bundle(source).manifest.spec, codec), cache, chunk
    cameras = tuple(CameraSpec(str(n), shapes.height, shapes.width) for n in range(shapes.views))
    spec = PolicySpec(
        source, source, cameras, VectorSpec(14), VectorSpec(14), chunk, 32, shapes.steps, shapes.tokens
    )
    return payload(spec, codec), cache, chunk


def _shown(value: Any) -> str:
    return "" if value is None else value if isinstance(value, str) else f"{value:.1f}"
