"""``sinew perf scenario``: on the robot, on a server, split, asynchronous, as two systems."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter
from rich.table import Table

from sinew.cli import terminal
from sinew.cli.perf_options import Delay, Positive, Rate, dtypes, too_large

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
    camera_ms: Delay = 0.0,
    actuation_ms: Delay = 0.0,
    data: Path | None = None,
    links: Path | None = None,
    plot: Path | None = None,
) -> int:
    """Where to run a policy: on the robot, on a server, split; in step or asynchronously; as two systems.

    A place whose memory does not hold what would run there is refused, as `sinew perf fit` does. Exit code 1 if nothing
    fits anywhere.

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
        camera_ms: from light to the frame in memory: a part of what an action's age and reaction are.
        actuation_ms: from a command to its effect: a part of the reaction.
        data: a file with more machines.
        links: a file with more networks.
        plot: write the comparison as bars.
    """
    from sinew.perf import events, plots, scenarios
    from sinew.perf.hardware import load_hardware, load_network
    from sinew.perf.memory import missing
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
                "age_p95_ms": 1e3 * played.age_p95_s + camera_ms,
                "age_bound_ms": 1e3 * stale.last_s + camera_ms,
                # What happens just after one request's frame is seen in the next request's.
                "reaction_ms": 1e3 * (steps / control_hz + latency) + camera_ms + actuation_ms,
                "underruns": f"{played.underruns}/{played.steps}",
            }
        )

    def refused(where: str, *placed: tuple[str, int]) -> bool:
        """Add a row that says which machine has too little memory for what would run there, if one has."""
        short = [f"refused, the {name} {too_large(nbytes)}" for name, nbytes in placed if nbytes]
        if short:
            nbytes = max(nbytes for _, nbytes in placed)
            rows.append({"where": where, "fits": False, "missing_bytes": nbytes, "why": "; ".join(short)})
        return bool(short)

    whole = {"robot": missing(program, near), "server": missing(program, far)}
    if not refused("robot", ("robot", whole["robot"])):
        add("robot", here, [])
    if not refused("server", ("server", whole["server"])):
        add("server", there, route)
    *before, last = (part.name for part in parts)
    if not refused(
        "split", ("robot", missing(program, near, (last,))), ("server", missing(program, far, before))
    ):
        split = scenarios.split_s(there[0] + there[1], here[2], size.up, cache, route)
        bar("split", split, there[0], there[1], here[2])
        rows.append({"where": "split", "latency_ms": 1e3 * split, "sync_hz": 1 / split})
    for where, stage, hops in (("robot", here, []), ("server", there, route)):
        fast, slow = stage[0] + stage[2], stage[1]
        if not slow:  # no language model that could run beside
            continue
        if refused(f"dual, {where}", (where, whole[where])):
            continue
        once = scenarios.synchronous_s(fast, size, hops)
        bar(f"dual, {where}: System 1", once, stage[0], 0.0, stage[2])
        dual = events.dual_system(fast, slow, cap_hz, network_s=once - fast)
        rows.append(
            {
                "where": f"dual, {where}",
                "latency_ms": 1e3 * once,
                "sync_hz": dual.fast_hz,
                "age_bound_ms": 1e3 * dual.plan_age_max_s + camera_ms,
            }
        )
    console = terminal.console()
    titles = {
        "where": "where", "latency_ms": "latency, ms", "sync_hz": "in step, Hz", "async_hz": "asynchronous, Hz",
        "age_p95_ms": "age p95, ms", "age_bound_ms": "age at most, ms", "reaction_ms": "reaction at most, ms",
        "underruns": "steps without action",
    }  # fmt: skip
    table = Table(title=f"{source}, {control_hz:g} Hz control, a request every {every} steps, {codec} frames")
    for title in titles.values():
        table.add_column(title, justify="left" if title == "where" else "right")
    for row in rows:
        shown = [_shown(row.get(key)) for key in titles]
        table.add_row(*(shown if "why" not in row else [row["where"], "refused"] + [""] * (len(titles) - 2)))
    console.print(table)
    notes = [f"{row['where']}: {row['why']}" for row in rows if "why" in row] + [
        f"robot: {near.title}; server: {far.title} over {ways}",
        f"{size.up / 1e3:.0f} kB up, {size.down / 1e3:.1f} kB down",
        f"split: vision and language there, action here, {cache / 1e6:.1f} MB of keys and values in between",
    ]
    if any(row["where"].startswith("dual") and "why" not in row for row in rows):
        notes.append(
            f"dual: System 1 (vision, action) beside System 2 (language) at {cap_hz:g} Hz; age: of System 2's result"
        )
    if camera_ms or actuation_ms:
        notes.append(f"with {camera_ms:g} ms of the camera and {actuation_ms:g} ms of the actuator")
    for note in notes:
        console.print(note, highlight=False, soft_wrap=True)
    fits = [row for row in rows if "why" not in row]
    if plot is not None and fits:
        plots.placements(bars, plot, f"{source}: {near.title}, {far.title}, {ways}")
    terminal.emit(
        {"schema": "sinew.perf.scenario/1", "up_bytes": size.up, "down_bytes": size.down, "rows": rows}
    )
    return 0 if fits else 1


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
