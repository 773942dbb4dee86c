"""``sinew perf scenario``: compare a policy on the robot, on a server, split, asynchronous, and as two systems."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter
from sinew.cli import terminal
from sinew.cli.options import CountIfAny, NotNegative, Positive

from sinew_perf.cli.options import dtypes


def scenario(
    source: str,
    /,
    *,
    server: str = "h200",
    device: str = "agx-orin",
    network: Annotated[list[str] | None, Parameter(negative="")] = None,
    codec: Literal["raw", "jpeg", "float32"] = "raw",
    control_hz: Positive = 50.0,
    replan: CountIfAny = None,
    cap_hz: Positive = 5.0,
    dtype: str | None = None,
    camera_ms: NotNegative = 0.0,
    actuation_ms: NotNegative = 0.0,
    data: Path | None = None,
    links: Path | None = None,
    plot: Path | None = None,
) -> int:
    """Compare running a policy on the robot, on a server, or split; in step or asynchronously; as two systems.

    For each split of the stages, the table shows the fastest, and the next one with its additional cost. A machine
    whose memory is too small is left out, as in `sinew perf fit`. The exit status is 1 if nothing fits.

    Args:
        source: Policy, as for `sinew infer`, or a family's preset.
        server: Machine at the far end. Several are separated by commas. The table then shows the machine of
            the fastest split.
        device: Machine on the robot.
        network: Link between both. Repeat it for several links in order. NAME,NAME tries either. Default:
            wifi7.
        codec: Encoding of the frames that are sent: bytes, JPEG at ten to one, or float32.
        control_hz: Control steps per second.
        replan: Control steps between two requests. Default: half of the chunk.
        cap_hz: Maximum rate of System 2 (the language model without vision) next to System 1, in Hz.
        dtype: Data types, as for `sinew perf run`.
        camera_ms: Milliseconds from light to the frame in memory. They count in the age and the reaction time
            of an action.
        actuation_ms: Milliseconds from a command to its effect. They count in the reaction time.
        data: File with further machines.
        links: File with further networks.
        plot: File for the comparison as a bar chart.
    """
    from sinew_perf import plots
    from sinew_perf.cuts import all_cuts
    from sinew_perf.hardware import load_hardware, load_hops, load_machines
    from sinew_perf.placements import payload, placements
    from sinew_perf.program import PublishedProgram

    servers, near = load_machines([server], data), load_hardware(device, data)
    hops = load_hops(network or ("wifi7",), links)
    program = PublishedProgram.load(source, dtypes=dtypes(dtype), engine="plan")
    cuts = all_cuts(program, near, servers, list(product(*hops)), payload(source, program, codec))
    far, route = next((cut.server, cut.route) for cut in cuts if cut.server)
    ways = " + ".join(link.title for link in route)
    placed = placements(
        source,
        program,
        far,
        near,
        route,
        codec=codec,
        control_hz=control_hz,
        replan=replan,
        cap_hz=cap_hz,
        camera_ms=camera_ms,
        actuation_ms=actuation_ms,
    )
    rows, size, cache, every = placed.rows, placed.size, placed.cache, placed.every
    console = terminal.console()
    titles = {
        "where": "where", "latency_ms": ">latency, ms", "sync_hz": ">in step, Hz", "async_hz": ">asynchronous, Hz",
        "age_p95_ms": ">age p95, ms", "age_bound_ms": ">age at most, ms", "reaction_ms": ">reaction at most, ms",
        "underruns": ">steps without action",
    }  # fmt: skip
    title = f"{source}, {control_hz:g} Hz control, a request every {every} steps, {codec} frames"
    table = terminal.table(title, *titles.values())
    for row in rows:
        shown = [_shown(row.get(key)) for key in titles]
        table.add_row(*(shown if "why" not in row else [row["where"], "refused"] + [""] * (len(titles) - 2)))
    console.print(table)
    fitting = [cut for cut in cuts if not cut.refused]
    notes = [f"{row['where']}: {row['why']}" for row in rows if "why" in row] + [
        f"robot: {near.title}; server: {far.title} over {ways}",
        f"{size.up / 1e3:.0f} kB up, {size.down / 1e3:.1f} kB down",
        f"split: vision and language there, action on the robot, {cache / 1e6:.1f} MB of keys and values in between",
    ]
    if any(row["where"].startswith("dual") and "why" not in row for row in rows):
        notes.append(
            f"dual: System 1 (vision, action) and System 2 (language) at {cap_hz:g} Hz; the age is that of System 2's"
            " result"
        )
    if camera_ms or actuation_ms:
        notes.append(f"with {camera_ms:g} ms of the camera and {actuation_ms:g} ms of the actuator")
    for name, cut in zip(("quickest", "next"), fitting, strict=False):
        why = f", {cut.against(fitting[0])}" if cut is not fitting[0] else f" of {len(cuts)} cuts"
        notes.append(f"{name}{why}: {cut.where}: {cut.latency_ms:.1f} ms")
    if len(fitting) < len(cuts):
        notes.append(f"{len(cuts) - len(fitting)} of {len(cuts)} cuts need too much memory")
    for note in notes:
        console.print(note)
    fits = [row for row in rows if "why" not in row]
    if plot is not None and fits:
        plots.placements(placed.bars, plot, f"{source}: {near.title}, {far.title}, {ways}")
    sizes = {"up_bytes": size.up, "down_bytes": size.down}
    terminal.emit(
        {"schema": "sinew.perf.scenario/1", **sizes, "rows": rows, "cuts": [cut.record() for cut in cuts]}
    )
    return 0 if fitting else 1


def _shown(value: Any) -> str:
    return "" if value is None else value if isinstance(value, str) else f"{value:.1f}"
