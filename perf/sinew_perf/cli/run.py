"""``sinew perf run``: predict the latency of each component on one or more machines, from the traced program."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter
from rich.table import Table
from sinew.cli import terminal
from sinew.cli.options import Count, NotNegative
from sinew.core import SinewError, progress

from sinew_perf.cli.options import Asked, dtypes
from sinew_perf.request import AS_THE_POLICY

if TYPE_CHECKING:
    from sinew_perf.hardware import Hardware
    from sinew_perf.roofline import MatrixProduct


def run(
    source: str,
    /,
    *,
    hardware: Annotated[list[str] | None, Parameter(negative="")] = None,
    request: Asked = AS_THE_POLICY,
    dtype: str | None = None,
    traffic: Literal["fused", "unfused", "weights"] = "fused",
    engine: Literal["eager", "plan"] = "plan",
    operators: Annotated[bool, Parameter(negative="")] = False,
    sync_us: NotNegative = 0.0,
    parallel: Count = 1,
    link: NotNegative | None = None,
    link_us: NotNegative = 0.0,
    data: Path | None = None,
    table: Path | None = None,
    plot: Path | None = None,
) -> int:
    """Predict the latency of each component on one or more machines, from the traced program.

    Args:
        source: Policy, as for `sinew infer`, a family's preset at its published size, or FILE.json in the
            form of a family's published.json for a model of any widths. pi0-l, pi0-xl and pi0-xxl are
            models of the VLA-Perf paper.
        hardware: Names of machines from `sinew perf machines`, separated by commas. Repeatable. Default:
            thor, rtx4090 and h200.
        dtype: WEIGHTS[/ACTIVATIONS[/CACHE]], or COMPONENT=..., separated by commas:
            vision=fp8,language=fp8.
        traffic: Memory traffic: fused (everything between two products stays on the chip), unfused (what
            the eager engine moves) or weights (weights alone, the minimum for any program).
        engine: Program to count: eager, or plan with its rewrites.
        operators: Also list every product with its count, shape and bound.
        sync_us: Microseconds between two products, as `sinew perf sync` measures them. They are added for
            each product.
        parallel: Number of equal devices that share every layer (tensor parallelism). --operators lists
            the layers before they are shared.
        link: Gigabytes per second from one device of --parallel to the next. A data sheet that counts
            both directions states twice this value.
        link_us: Microseconds of each exchange between the devices, whatever its size.
        data: File with further machines, in the format of hardware.toml.
        table: File for the table, as CSV or LaTeX (.tex).
        plot: File for the roofline with each component as a point.
    """
    from sinew_perf.hardware import load_machines

    if (parallel > 1) != bool(link):
        raise SinewError(
            f"--link: pass a rate together with --parallel 2 or more, got --link {link} and --parallel {parallel}"
        )
    # Check the names before the slow import of torch.
    machines = load_machines(hardware or ("thor", "rtx4090", "h200"), data)
    from sinew_perf import plots

    if plot is not None:
        plots.check()
    from sinew_perf.memory import memory_report, missing
    from sinew_perf.parallel import timings as timings_on
    from sinew_perf.program import PublishedProgram
    from sinew_perf.roofline import components_record, products, timing

    with progress.task(f"tracing {source}"):
        program = PublishedProgram.load(source, request, dtypes=dtypes(dtype), engine=engine)
        parts = program.components(traffic)
    timings = {
        machine.name: timings_on(parts, machine, parallel, 1e9 * link, link_us / 1e6)
        if link
        else [timing(part, machine) for part in parts]
        for machine in machines
    }
    launches = sum(part.launches for part in parts)
    records = [components_record(machine, timings[machine.name], launches, sync_us) for machine in machines]
    console = terminal.console()
    if operators:
        shown = [product for part in parts for product in products(part)]
        for machine, record in zip(machines, records, strict=True):
            record["operators"] = [asdict(each) | {"ms": 1e3 * each.seconds(machine)} for each in shown]
            console.print(_operators_table(machine, shown))
    console.print(_component_table(source, records))
    gib = memory_report(program).weights_nbytes / 2**30
    console.print(
        f"weights with token tables: {_shown(gib)} GiB; each operator is as fast as possible, and nothing else is"
        " counted",
    )
    for machine, record in zip(machines, records, strict=True):
        shared = replace(
            machine, memory_gib=parallel * machine.memory_gib, system_gib=parallel * machine.system_gib
        )
        excess = missing(program, shared)
        record["fits"] = not excess
        if excess:
            why = f"`sinew perf fit {source} --hardware {machine.name}` prints the parts"
            warning = f"{machine.title}: the memory is too small by {excess / 2**20:,.0f} MiB; {why}"
            console.print(f"[yellow]{warning}[/]")
    if plot is not None:
        formats = {operator.compute_dtype for part in parts for operator in part.operators}
        plots.roofline(
            machines, timings, plot, formats, f"{source}, {' and '.join(sorted(formats))}, {traffic} traffic"
        )
    if table is not None:
        write_table(table, [{"machine": r["machine"], **c} for r in records for c in r["components"]])
    terminal.emit({"schema": "sinew.perf/1", "source": source, "traffic": traffic, "machines": records})
    return 0


def _component_table(source: str, records: Sequence[dict[str, Any]]) -> Table:
    columns = (">ms", ">share", "bound", ">FLOP/byte", ">GFLOP", ">GB moved", ">TFLOP/s at best")
    table = terminal.table(f"{source}: roofline", "machine", "component", *columns)
    for record in records:
        for part in record["components"]:
            bound = (_shown(part["ms"]), f"{part['share']:.1%}", part["bound"], f"{part['intensity']:.1f}")
            numbers = (_shown(part["gflop"], 1), _shown(part["gbyte"]), f"{part['tflops']:.1f}")
            table.add_row(record["title"], part["component"], *bound, *numbers)
        if record["sync_ms"]:
            table.add_row("", f"between {record['products']:,} products", _shown(record["sync_ms"]))
        rate = f"{record['hz']:.1f} Hz"
        table.add_row("", "end to end", _shown(record["ms"]), "", rate, end_section=True, style="bold")
    return table


def _shown(value: float, decimals: int = 2) -> str:
    """Format a number with ``decimals`` digits after the point. A smaller number gets two significant digits."""
    return f"{value:.{decimals}f}" if value >= 10.0**-decimals or not value else f"{value:.2g}"


def _operators_table(machine: Hardware, shown: Sequence[MatrixProduct]) -> Table:
    columns = (">times", "shape", ">MFLOP", ">MB moved", "bound", ">ms in all")
    table = terminal.table(f"products on {machine.title}", "stage", "product", *columns)
    for each in shown:
        size = (f"{each.flops / 1e6:.1f}", f"{each.nbytes / 1e6:.2f}", each.bound(machine))
        ms = f"{1e3 * each.seconds(machine):.3f}"
        table.add_row(each.stage, each.name, f"{each.times}", each.shape, *size, ms)
    return table


def write_table(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write rows as CSV, or as a LaTeX table if the file's name ends in .tex."""
    if path.suffix == ".tex":
        lines = [[_latex(cell) for cell in cells] for cells in (rows[0], *(row.values() for row in rows))]
        head, *body = [" & ".join(cells) + r" \\" for cells in lines]
        columns = "l" * len(rows[0])
        text = [
            rf"\begin{{tabular}}{{{columns}}}",
            r"\hline",
            head,
            r"\hline",
            *body,
            r"\hline",
            r"\end{tabular}",
        ]
        path.write_text("\n".join(text) + "\n", encoding="utf-8")
        return
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def _latex(cell: object) -> str:
    text = f"{cell:.4g}" if isinstance(cell, float) else str(cell)
    special = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    special |= {letter: f"\\{letter}" for letter in "&%$#_{}"}
    return "".join(special.get(letter, letter) for letter in text).replace("\u2713", r"$\checkmark$")
