"""``sinew perf need`` and ``sinew perf machines``: find the known machines that reach a rate."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter, validators
from sinew.cli import terminal
from sinew.cli.options import Count, NotNegative, PositiveIfAny
from sinew.core import SinewError

from sinew_perf.cli.options import Asked, EfficiencyIfAny, print_sources
from sinew_perf.request import AS_THE_POLICY


def need(
    *,
    rate: PositiveIfAny = None,
    task: Literal["tabletop", "manipulation", "reactive", "whole-body", "drone"] | None = None,
    control_hz: PositiveIfAny = None,
    replan: Count = 1,
    model: str = "pi0.5",
    hardware: Annotated[list[str] | None, Parameter(negative="")] = None,
    request: Asked = AS_THE_POLICY,
    efficiency: EfficiencyIfAny = None,
    success: Annotated[float | None, Parameter(validator=validators.Number(gt=0, lt=1))] = None,
    report: Path | None = None,
    network: Annotated[list[str] | None, Parameter(negative="")] = None,
    jitter_ms: NotNegative = 0.0,
    data: Path | None = None,
    links: Path | None = None,
    plot: Path | None = None,
) -> int:
    """Find the machines, precisions and numbers of solver steps that reach a rate and fit the memory.

    The prediction uses the share of the roofline that Sinew's engine reached in the nearest measurement, and prints
    that measurement. The exit status is 1 if no machine reaches the rate.

    With --success and --report, find the machines and networks with which a task still succeeds. The report has the
    success of the task over latency, from `sinew eval POLICY --sweep latency=... --sweep handover=...`.

    Args:
        rate: Required chunks per second. Default: it follows from the task or the control rate.
        task: Class of tasks with its usual control rates and latencies.
        control_hz: Control steps per second.
        replan: Control steps between two inferences, which is the number of actions executed per chunk.
        model: Policy, as for `sinew infer`, or a family's preset.
        hardware: Names of machines, separated by commas. Repeatable. Default: all of `sinew perf machines`.
        efficiency: Fraction of the roofline that the software reaches. Default: what Sinew's engine reached in the
            nearest measurement. Other projects reached 0.7 and more.
        success: Required success of the task, above 0 and below 1, for example 0.95.
        report: File report.json of the evaluation, for --success.
        network: Link between the robot and the machine, for --success. Repeat it for several links in order.
            NAME,NAME tries either. Default: the machine is on the robot.
        jitter_ms: Standard deviation of the latency in milliseconds, for --success. `sinew bench ADDRESS` measures
            it. The prediction itself has none.
        data: File with further machines.
        links: File with further networks.
        plot: File for a figure of success over latency, for --success.
    """
    if (success is None) != (report is None):
        raise SinewError("--success, --report: pass both or neither")
    if success is not None and report is not None:
        if rate is not None or task is not None or control_hz is not None:
            raise SinewError("--success: cannot be combined with --rate, --task or --control-hz; omit them")
        from sinew_perf.cli.need_success import need_success

        return need_success(
            success, report, model, hardware, network, jitter_ms, request, efficiency, data, links, plot
        )
    if network or jitter_ms or links or plot:
        raise SinewError("--network, --jitter-ms, --links, --plot: also pass --success and --report")
    from sinew_perf.hardware import hardware as known
    from sinew_perf.hardware import load_machines
    from sinew_perf.needs import budget, needs
    from sinew_perf.shares import others

    if (rate is None) == (task is None and control_hz is None):
        raise SinewError("pass either --rate, or --task, or --control-hz with --replan")
    requirement = None if rate is not None else budget(control_hz or 0.0, replan, task or "")
    target_hz = rate if requirement is None else requirement.rate
    assert target_hz is not None
    if requirement is not None:
        terminal.console().print(requirement.why)
    among = {each.name: each for each in load_machines(hardware or known(data), data)}
    among_what = f"of {', '.join(among)}" if hardware else "in the table"
    results = needs(model, among, target_hz, efficiency, request)
    console = terminal.console()
    by_others = others()
    columns = (
        *("machine", "precision", ">solver steps at most", ">rate with them, Hz", ">share of roofline"),
        *("share measured with", f">at {by_others.share:.0%}, Hz"),
    )
    table = terminal.table(f"{model}, {target_hz:.3g} chunks a second", *columns)
    for row in results:
        numbers = (str(row.steps), f"{row.hz:.1f}", f"{row.share.share:.1%}", row.share.why)
        table.add_row(row.title, row.precision, *numbers, f"{row.others_hz:.1f}")
    console.print(table if results else f"no machine {among_what} reaches {target_hz:.3g} Hz")
    if efficiency is None:
        print_sources(row.share for row in results)
        here = {(row.machine, row.precision) for row in results}
        more = [
            f"{row.machine} ({row.precision}, {row.steps} steps)"
            for row in needs(model, among, target_hz, by_others.share, request)
            if (row.machine, row.precision) not in here
        ]
        also = f"with {by_others.share:.0%}, which other projects reached ({by_others.source})"
        console.print(f"{also}, also: {', '.join(more) or 'none'}", soft_wrap=True, markup=False)
    if any("int4" in row.precision for row in results):
        console.print(
            "int4: only an upper bound, because the engine for GPUs widens 4-bit weights when it loads them"
        )
    if requirement is None:
        console.print(
            f"the rate counts chunks and not actions; for a robot at {target_hz:g} Hz, pass --control-hz {target_hz:g}"
            " --replan K, where K is the number of actions executed per chunk"
        )
    record = {
        "rate": target_hz,
        "budget_ms": 1e3 / target_hz,
        "model": model,
        "found": [asdict(row) for row in results],
    }
    terminal.emit({"schema": "sinew.perf.need/1", **record})
    return 0 if results else 1


def machines(*, data: Path | None = None, links: Path | None = None) -> int:
    """List the known machines and networks with their sources.

    Args:
        data: File with further machines.
        links: File with further networks.
    """
    from sinew_perf.hardware import hardware, networks

    console = terminal.console()
    formats = ("fp32", "bf16", "int8", "fp8")
    peaks = [f">{name}" for name in formats]
    table = terminal.table("machines, TFLOP/s", "name", "", *peaks, ">GB/s", ">GiB", "source")
    for entry in hardware(data).values():
        rates = [f"{entry.peak[name] / 1e12:g}" if name in entry.peak else "-" for name in formats]
        sizes = (f"{entry.bandwidth / 1e9:g}", f"{entry.memory_gib:g}")
        table.add_row(entry.name, entry.title, *rates, *sizes, entry.source)
    console.print(table)
    table = terminal.table("networks", "name", ">up, Mbit/s", ">down", ">one way, ms", "source")
    for link in networks(links).values():
        up, down = f"{link.upload / 1e6:g}", f"{link.download / 1e6:g}"
        table.add_row(link.name, up, down, f"{link.base_ms:g}", link.source)
    console.print(table)
    record = {
        "machines": [asdict(entry) for entry in hardware(data).values()],
        "networks": [asdict(link) for link in networks(links).values()],
    }
    terminal.emit({"schema": "sinew.perf.machines/1", **record})
    return 0
