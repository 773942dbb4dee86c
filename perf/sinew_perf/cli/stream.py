"""``sinew perf stream``: how many head runs a second are left beside prefixes at the camera's rate."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter, validators
from sinew.cli import terminal
from sinew.cli.options import NotNegative, Positive

from sinew_perf.cli.options import Asked, dtypes
from sinew_perf.request import AS_THE_POLICY


def stream(
    source: str,
    /,
    *,
    hardware: Annotated[list[str] | None, Parameter(negative="")] = None,
    camera_hz: Positive = 30.0,
    hz: Positive = 480.0,
    request: Asked = AS_THE_POLICY,
    dtype: str | None = None,
    efficiency: Annotated[float, Parameter(validator=validators.Number(gt=0, lte=1))] = 0.7,
    camera_ms: NotNegative = 0.0,
    actuation_ms: NotNegative = 0.0,
    data: Path | None = None,
) -> int:
    """Predict the rates of a stream's two loops on a machine. The exit status is 1 if no machine reaches the rate.

    A machine whose memory is too small is left out, as in `sinew perf fit`. Prefixes and head runs either take
    turns, or run at the same time on two streams of a GPU. In the second case, computing one hides the memory
    traffic of the other.

    Args:
        source: Policy, as for `sinew infer`, or a family's preset at its published size.
        hardware: Names of machines, separated by commas. Repeatable. Default: rtx4090, h200, thor and
            agx-orin.
        camera_hz: Frames per second, which is also the number of prefixes per second.
        hz: Required head runs per second.
        dtype: Data types, as for `sinew perf run`.
        efficiency: Fraction of the roofline that the software reaches. Well-tuned engines reach 0.6 to 0.85.
        camera_ms: Milliseconds from light to the frame in memory: exposure, read-out and transfer. They count
            in the reaction time.
        actuation_ms: Milliseconds from a command to its effect. They count in the reaction time.
        data: File with further machines.
    """
    from sinew_perf.hardware import load_machines

    names = hardware or ("rtx4090", "h200", "thor", "agx-orin")
    machines = load_machines(names, data)  # before torch
    from sinew_perf.memory import missing, too_large
    from sinew_perf.program import PublishedProgram
    from sinew_perf.streams import loops

    program = PublishedProgram.load(source, request, dtypes=dtypes(dtype), engine="plan")
    parts = program.components()
    rows: list[dict[str, Any]] = []
    table = terminal.table(
        f"{source}: a stream at {camera_hz:g} frames a second, {efficiency:.0%} of the roofline",
        *(
            "machine",
            ">prefix, ms",
            ">head run, ms",
            ">runs alone, Hz",
            ">in turns with prefixes, Hz",
            ">at once, Hz",
            ">image to motion, ms",
            "",
        ),
    )
    for machine in machines:
        if excess := missing(program, machine):
            rows.append({"machine": machine.name, "fits": False, "missing_bytes": excess, "reached": False})
            table.add_row(machine.title, *[""] * 6, too_large(excess))
            continue
        found = loops(
            parts, machine, camera_hz, efficiency, sensing_s=camera_ms / 1e3, actuation_s=actuation_ms / 1e3
        )
        in_turns, at_once = found.beside_hz >= hz, found.overlapped_hz >= hz
        row = {
            "machine": machine.name,
            "fits": True,
            "prefix_ms": 1e3 * found.prefix_s,
            "head_ms": 1e3 * found.head_s,
            "alone_hz": found.alone_hz,
            "beside_hz": found.beside_hz,
            "overlapped_hz": found.overlapped_hz,
            "image_reaction_ms": 1e3 * found.image_reaction_s,
            "reached": in_turns or at_once,
        }
        rows.append(row)
        table.add_row(
            machine.title,
            f"{row['prefix_ms']:.2f}",
            f"{row['head_ms']:.3f}",
            f"{found.alone_hz:,.0f}",
            f"{found.beside_hz:,.0f}",
            f"{found.overlapped_hz:,.0f}",
            f"{row['image_reaction_ms']:.1f}",
            f"{hz:g} Hz" if in_turns else f"{hz:g} Hz at once" if at_once else f"less than {hz:g} Hz",
        )
    console = terminal.console()
    console.print(table)
    console.print(
        f"image to motion: with {camera_ms:g} ms of the camera and {actuation_ms:g} ms of the actuator; "
        "at once: a bound that no scheduler was measured to reach",
        highlight=False,
        soft_wrap=True,
    )
    record = {
        "source": source,
        "camera_hz": camera_hz,
        "hz": hz,
        "efficiency": efficiency,
        "camera_ms": camera_ms,
        "actuation_ms": actuation_ms,
        "machines": rows,
    }
    terminal.emit({"schema": "sinew.perf.stream/1", **record})
    return 0 if any(row["reached"] for row in rows) else 1
