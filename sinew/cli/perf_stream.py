"""``sinew perf stream``: how many head runs a second are left beside prefixes at the camera's rate."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter, validators

from sinew.cli import terminal
from sinew.cli.perf_options import Asked, Rate, dtypes
from sinew.perf.request import AS_THE_POLICY


def stream(
    source: str,
    /,
    *,
    hardware: Annotated[list[str] | None, Parameter(negative="")] = None,
    camera_hz: Rate = 30.0,
    hz: Rate = 480.0,
    request: Asked = AS_THE_POLICY,
    dtype: str | None = None,
    efficiency: Annotated[float, Parameter(validator=validators.Number(gt=0, lte=1))] = 0.7,
    data: Path | None = None,
) -> int:
    """How fast the loops of a stream turn on one machine. Exit code 1 if none of the machines reaches the rate.

    Args:
        source: as of `sinew infer`, or a family's preset, at their published size.
        hardware: names of machines, repeatable or separated by commas; rtx4090, h200, thor and agx-orin if absent.
        camera_hz: frames, and so prefixes, per second.
        hz: head runs per second that are wanted beside them.
        dtype: see `sinew perf run`.
        efficiency: share of the roofline that software reaches; well-tuned engines reach 0.6 to 0.85.
        data: a file with more machines.
    """
    from sinew.perf.hardware import load_machines

    names = hardware or ("rtx4090", "h200", "thor", "agx-orin")
    machines = load_machines(names, data)  # before torch
    from sinew.perf.program import PublishedProgram
    from sinew.perf.streams import loops

    parts = PublishedProgram.load(source, request, dtypes=dtypes(dtype), engine="plan").components()
    rows = []
    table = terminal.table(
        f"{source}: a stream at {camera_hz:g} frames a second, {efficiency:.0%} of the roofline",
        *(
            "machine",
            ">prefix, ms",
            ">head run, ms",
            ">runs alone, Hz",
            ">beside prefixes, Hz",
            ">image, ms",
            "",
        ),
    )
    for machine in machines:
        found = loops(parts, machine, camera_hz, efficiency)
        row = {
            "machine": machine.name,
            "prefix_ms": 1e3 * found.prefix_s,
            "head_ms": 1e3 * found.head_s,
            "alone_hz": found.alone_hz,
            "beside_hz": found.beside_hz,
            "image_reaction_ms": 1e3 * found.image_reaction_s,
            "reached": found.beside_hz >= hz,
        }
        rows.append(row)
        table.add_row(
            machine.title,
            f"{row['prefix_ms']:.2f}",
            f"{row['head_ms']:.3f}",
            f"{found.alone_hz:,.0f}",
            f"{found.beside_hz:,.0f}",
            f"{row['image_reaction_ms']:.1f}",
            f"{hz:g} Hz" if row["reached"] else f"less than {hz:g} Hz",
        )
    terminal.console().print(table)
    record = {"source": source, "camera_hz": camera_hz, "hz": hz, "efficiency": efficiency, "machines": rows}
    terminal.emit({"schema": "sinew.perf.stream/1", **record})
    return 0 if any(row["reached"] for row in rows) else 1
