"""``sinew perf gains``: rank the changes that make a policy faster on a machine."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from sinew.cli import terminal
from sinew.core import SinewError


def gains(
    source: str,
    /,
    *,
    hardware: str = "agx-orin",
    server: str = "",
    network: Annotated[list[str] | None, Parameter(negative="")] = None,
    data: Path | None = None,
    links: Path | None = None,
) -> int:
    """Rank the changes that make a policy faster on a machine, and show the effect of each on the actions.

    The first table starts with engine eager in float32. Each row assumes the rows above it. Rows with "or" are
    alternatives. The second table lists changes that help under a condition. The exit status is 1 if nothing helps.

    Args:
        source: Policy, as for `sinew infer`, or a family's preset at its published size.
        hardware: Name of a machine from `sinew perf machines`. cpu has the engines of a CPU, all others
            engine cuda.
        server: Name of a second machine that may compute a part of the work.
        network: Link to the server. Repeat it for several links in order. Default: wifi7.
        data: File with further machines.
        links: File with further networks.
    """
    from sinew_perf.gains import order
    from sinew_perf.hardware import load_hardware, load_network
    from sinew_perf.memory import too_large

    if network and not server:
        raise SinewError(
            f"--network {network[0]}: also pass --server, the machine at the other end of the link"
        )
    machine = load_hardware(hardware, data)
    other = load_hardware(server, data) if server else None
    route = [load_network(name, links) for name in network or ("wifi7",)]
    changes = order(source, machine, other, route)
    console = terminal.console()
    columns = ("do", "type", ">before, ms", ">after, ms", "times as fast", "the actions")
    for title, rows in (
        (f"{source} on {machine.title}, from {changes.start_ms:,.1f} ms of eager float32", changes.taken),
        ("in addition to all of these, under a condition", changes.under),
    ):
        table = terminal.table(title, *columns)
        for gain in rows:
            name = f"or, for {gain.instead}: {gain.name}" if gain.instead else gain.name
            short = f"; the machine {too_large(gain.missing_bytes)}" if gain.missing_bytes else ""
            times = f"{gain.before_ms / gain.after_ms:.2f}"
            ms = (f"{gain.before_ms:,.1f}", f"{gain.after_ms:,.1f}", times)
            table.add_row(name, gain.line, *ms, gain.fidelity + short)
        if rows:
            console.print(table)
    for name, why in changes.without.items():
        console.print(f"not available here: {name}: {why}", markup=False)
    record = asdict(changes) | {"source": source, "machine": machine.name}
    terminal.emit({"schema": "sinew.perf.gains/1", **record})
    return 0 if changes.taken or changes.under else 1
