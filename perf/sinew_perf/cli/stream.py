"""``sinew perf stream``: predict how many head runs per second are possible next to prefixes at the camera's rate."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from sinew.cli import terminal
from sinew.cli.options import NotNegative, Positive

from sinew_perf.cli.options import Asked, EfficiencyIfAny, dtypes, print_sources
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
    efficiency: EfficiencyIfAny = None,
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
        efficiency: Fraction of the roofline that the software reaches. Default: what Sinew's engine reached in the
            nearest measurement of a whole chunk. Other projects reached 0.7 and more.
        camera_ms: Milliseconds from light to the frame in memory: exposure, read-out and transfer. They count
            in the reaction time.
        actuation_ms: Milliseconds from a command to its effect. They count in the reaction time.
        data: File with further machines.
    """
    from sinew_perf.hardware import load_machines

    names = hardware or ("rtx4090", "h200", "thor", "agx-orin")
    # Check the names before the slow import of torch.
    machines = load_machines(names, data)
    from sinew_perf.gains import ON_GPU
    from sinew_perf.memory import missing, too_large
    from sinew_perf.program import PublishedProgram
    from sinew_perf.roofline import seconds
    from sinew_perf.shares import UsedShare, others, used
    from sinew_perf.streams import loops

    program = PublishedProgram.load(source, request, dtypes=dtypes(dtype), engine="plan")
    parts = program.components()
    rows: list[dict[str, Any]] = []
    shares: dict[str, UsedShare] = {}
    table = terminal.table(
        f"{source}: a stream at {camera_hz:g} frames a second",
        *(
            "machine",
            ">prefix, ms",
            ">head run, ms",
            ">runs alone, Hz",
            ">in turns with prefixes, Hz",
            ">at once, Hz",
            ">image to motion, ms",
            ">share of roofline",
            "",
        ),
    )
    for machine in machines:
        if excess := missing(program, machine, stream=True):
            rows.append({"machine": machine.name, "fits": False, "missing_bytes": excess, "reached": False})
            table.add_row(machine.title, *[""] * 7, too_large(excess))
            continue
        share = used(program.family, program.number_format, machine, seconds(parts, machine), efficiency)
        shares[machine.name] = share
        rates = loops(
            parts, machine, camera_hz, share.share, sensing_s=camera_ms / 1e3, actuation_s=actuation_ms / 1e3
        )
        in_turns, at_once = rates.beside_hz >= hz, rates.overlapped_hz >= hz
        row = {
            "machine": machine.name,
            "fits": True,
            "prefix_ms": 1e3 * rates.prefix_s,
            "head_ms": 1e3 * rates.head_s,
            "alone_hz": rates.alone_hz,
            "beside_hz": rates.beside_hz,
            "overlapped_hz": rates.overlapped_hz,
            "image_reaction_ms": 1e3 * rates.image_reaction_s,
            "share": asdict(share),
            "reached": in_turns or at_once,
        }
        rows.append(row)
        table.add_row(
            machine.title,
            f"{row['prefix_ms']:.2f}",
            f"{row['head_ms']:.3f}",
            f"{rates.alone_hz:,.0f}",
            f"{rates.beside_hz:,.0f}",
            f"{rates.overlapped_hz:,.0f}",
            f"{row['image_reaction_ms']:.1f}",
            f"{share.share:.1%}",
            f"{hz:g} Hz" if in_turns else f"{hz:g} Hz at once" if at_once else f"less than {hz:g} Hz",
        )
    console = terminal.console()
    console.print(table)
    console.print(
        f"image to motion: includes {camera_ms:g} ms of the camera and {actuation_ms:g} ms of the actuator; "
        "at once: an upper bound that no measured scheduler has reached; "
        f"engine {ON_GPU} runs both loops at once, on two CUDA streams, and nobody has measured it on a GPU",
        highlight=False,
        soft_wrap=True,
    )
    if efficiency is None:
        for name, share in shares.items():
            console.print(f"{name}: {share.share:.1%} {share.why}", soft_wrap=True)
        print_sources(shares.values())
        console.print(
            f"{others().share:.0%}, --efficiency {others().share:g}: {others().source}", soft_wrap=True
        )
    record = {
        "source": source,
        "camera_hz": camera_hz,
        "hz": hz,
        "camera_ms": camera_ms,
        "actuation_ms": actuation_ms,
        "machines": rows,
    }
    terminal.emit({"schema": "sinew.perf.stream/1", **record})
    return 0 if any(row["reached"] for row in rows) else 1
