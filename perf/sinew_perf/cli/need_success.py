"""``sinew perf need --success``: find the machines and networks with which a task still succeeds."""

from __future__ import annotations

from dataclasses import asdict
from itertools import product
from pathlib import Path

from sinew.cli import terminal

from sinew_perf.cli.options import print_sources
from sinew_perf.request import TracedRequest

SLOWEST_HZ = 1e-3  # a rate so low (in Hz) that every machine reaches it, even with all solver steps


def need_success(
    required: float,
    report: Path,
    model: str,
    machines: list[str] | None,
    network: list[str] | None,
    jitter_ms: float,
    request: TracedRequest,
    efficiency: float | None,
    data: Path | None,
    links: Path | None,
    plot: Path | None,
) -> int:
    """Print the machines and networks with which a task succeeds often enough, and the reasons.

    Args:
        required: Required success, from 0 to 1.
        report: Report of the task's success over latency.
        model: Policy that runs on the machine.
        machines: Names of machines. None for all.
        network: Links between robot and machine. None if the machine is on the robot.
        jitter_ms: Standard deviation of the latency, in milliseconds.
        request: Sizes of the request.
        efficiency: Share of the roofline that the software reaches. None for the share that Sinew's engines reached.
        data: File with further machines.
        links: File with further networks.
        plot: File for a figure of success over latency. None for none.

    Returns:
        The exit status: 1 if no machine is fast enough.
    """
    from sinew_perf import plots, scenarios
    from sinew_perf.hardware import hardware as known
    from sinew_perf.hardware import load_hops, load_machines
    from sinew_perf.needs import needs
    from sinew_perf.placements import payload
    from sinew_perf.program import PublishedProgram
    from sinew_perf.success import LatencySpread, best, read_surface, reasons

    if plot is not None:
        plots.check()
    task, ways = read_surface(report)
    console = terminal.console(markup=False)
    console.print(f"{task}, {required:.0%} success required:")
    for line in reasons(ways, required, jitter_ms):
        console.print(f"  {line}", soft_wrap=True)
    among = {each.name: each for each in load_machines(machines or known(data), data)}
    routes = [()] if not network else list(product(*load_hops(network, links)))
    size = payload(model, PublishedProgram.load(model, request, engine="plan"), "jpeg")
    rows = []
    for row in needs(model, among, SLOWEST_HZ, efficiency, request):
        for route in routes:
            latency_ms = 1e3 * scenarios.synchronous_s(1 / row.hz, size, route)
            chosen = best(ways, LatencySpread(latency_ms, jitter_ms))
            rows.append((row, " + ".join(link.title for link in route) or "on the robot", latency_ms, chosen))
    rows.sort(key=lambda each: -each[2])
    enough = [each for each in rows if each[3] is not None and each[3][1].success >= required]
    table = terminal.table(
        f"{model}, the slowest sufficient machine first",
        *(
            "machine",
            "precision",
            ">solver steps",
            "place",
            ">latency, ms",
            "way of driving",
            "success predicted",
        ),
    )
    for row, place, latency_ms, chosen in enough:
        assert chosen is not None
        way, rate = chosen
        table.add_row(
            row.title, row.precision, str(row.steps), place, f"{latency_ms:.0f}", way.name, rate.text()
        )
    terminal.console().print(table if enough else f"no machine reaches {required:.0%}")
    late = [each for each in rows if each[3] is None]
    if late:
        console.print(f"{len(late)} machines and precisions are slower than every latency in the report")
    if not jitter_ms:
        console.print(
            "all requests are assumed to have the same latency; for a deviation, pass --jitter-ms as `sinew bench`"
            " measures it"
        )
    if efficiency is None:
        print_sources(each[0].share for each in enough)
    if plot is not None:
        marks = [
            (f"{row.title}, {row.precision.split()[0]}, {place}", latency_ms)
            for row, place, latency_ms, _ in rows
        ]
        plots.success(ways, required, marks, plot, f"{task}; latencies of {model}")
        console.print(f"figure: {plot}")
    entries = [
        {
            "machine": row.machine,
            "precision": row.precision,
            "steps": row.steps,
            "place": place,
            "latency_ms": latency_ms,
            "way": None if chosen is None else {"handover": chosen[0].handover, "replan": chosen[0].replan},
            "success": None if chosen is None else asdict(chosen[1]),
            "enough": chosen is not None and chosen[1].success >= required,
        }
        for row, place, latency_ms, chosen in rows
    ]
    terminal.emit(
        {
            "schema": "sinew.perf.need-success/1",
            "task": task,
            "wanted": required,
            "jitter_ms": jitter_ms,
            "found": entries,
        }
    )
    return 0 if enough else 1
