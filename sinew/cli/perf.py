"""``sinew perf``: what is possible, before and after you buy the hardware."""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter, validators
from rich.table import Table

from sinew import progress
from sinew.cli import terminal
from sinew.cli.options import Positive
from sinew.cli.perf_options import Asked, dtypes
from sinew.perf.request import AS_THE_POLICY

if TYPE_CHECKING:
    from sinew.perf.paper.published import Row


def run(
    source: str,
    /,
    *,
    hardware: Annotated[list[str] | None, Parameter(negative="")] = None,
    request: Asked = AS_THE_POLICY,
    dtype: str | None = None,
    traffic: Literal["fused", "unfused"] = "fused",
    engine: Literal["eager", "plan"] = "plan",
    data: Path | None = None,
    table: Path | None = None,
    plot: Path | None = None,
) -> int:
    """Latency by component on one or more machines, from the traced program.

    Args:
        source: as of `sinew infer`, or a family's preset, at their published size.
        hardware: names of machines (`sinew perf machines`), repeatable or with commas; thor, rtx4090, h200 if absent.
        dtype: WEIGHTS[/ACTIVATIONS[/CACHE]], or COMPONENT=..., comma-separated: vision=fp8,language=fp8.
        traffic: fused keeps everything between products on the chip; unfused is what the eager engine moves.
        engine: eager, or with the rewrites of the plan.
        data: a file with more machines, as sinew/perf/data/hardware.toml.
        table: write the table as CSV.
        plot: write the roofline with each component as a point.
    """
    from sinew.perf.hardware import load_machines

    machines = load_machines(hardware or ("thor", "rtx4090", "h200"), data)  # before torch
    from sinew.perf import plots

    if plot is not None:
        plots.check()
    from sinew.perf.memory import memory_report, missing
    from sinew.perf.program import PublishedProgram
    from sinew.perf.roofline import components_record, timing

    with progress.task(f"tracing {source}"):
        program = PublishedProgram.load(source, request, dtypes=dtypes(dtype), engine=engine)
        parts = program.components(traffic)
    timings = {machine.name: [timing(part, machine) for part in parts] for machine in machines}
    records = [components_record(machine, timings[machine.name]) for machine in machines]
    console = terminal.console()
    console.print(_component_table(source, records))
    gib = memory_report(program).weights_nbytes / 2**30
    console.print(
        f"weights, tables included: {gib:.2f} GiB; every operator at its best, nothing else counted",
    )
    for machine, record in zip(machines, records, strict=True):
        excess = missing(program, machine)
        record["fits"] = not excess
        if excess:
            why = f"`sinew perf fit {source} --hardware {machine.name}` says what takes it"
            warning = f"{machine.title}: does not fit its memory, {excess / 2**20:,.0f} MiB too much; {why}"
            console.print(f"[yellow]{warning}[/]")
    if plot is not None:
        formats = {operator.compute_dtype for part in parts for operator in part.operators}
        plots.roofline(
            machines, timings, plot, formats, f"{source}, {' and '.join(sorted(formats))}, {traffic} traffic"
        )
    if table is not None:
        write_csv(table, [{"machine": r["machine"], **c} for r in records for c in r["components"]])
    terminal.emit({"schema": "sinew.perf/1", "source": source, "traffic": traffic, "machines": records})
    return 0


def paper(
    *,
    correct: Annotated[list[str] | None, Parameter(negative="")] = None,
    table: Path | None = None,
    plot: Path | None = None,
) -> int:
    """VLA-Perf's printed numbers against ours, one by one; then what correcting its defects changes.

    Args:
        correct: compute with this correction, repeatable; "all" is the preset that other commands use. Rows that move
            are then no fault. Names: decimal-bandwidth, one-qkv, flash-attention, activations-in-memory, state-token.
        table: write all rows as CSV.
        plot: a folder for figures.json, the data behind figures 5 to 9, and for drawings like figures 5, 8 and 9.
    """
    from sinew.perf import plots
    from sinew.perf.paper.defects import defects
    from sinew.perf.paper.published import CORRECTIONS, compare, corrected_study, corrections

    names = list(CORRECTIONS) if correct == ["all"] else correct or []
    console, study = terminal.console(), corrected_study(names)
    rows, changed, others = compare(study), corrections(), defects()
    console.print(_printed_table(rows, names))
    console.print(_corrections_table(changed))
    columns = ("defect", "quantity", ">as published", ">put right", "why")
    shown = terminal.table("its other defects, one by one", *columns)
    for defect in others:
        values = (f"{defect.published:.2f}", f"{defect.corrected:.2f}")
        shown.add_row(defect.name, defect.quantity, *values, defect.why)
    console.print(shown)
    if table is not None:
        write_csv(table, [asdict(row) for row in rows])
    if plot is not None:
        plot.mkdir(parents=True, exist_ok=True)
        figures = study.figures()
        plots.sizes(figures["figure 5"], plot / "latency_over_size.png")
        bars = [(str(row["where"]), row["parts_ms"]) for row in (*figures["figure 8"], *figures["figure 9"])]
        plots.placements(bars, plot / "placements.png", "where to run pi0, as VLA-Perf computes it")
        (plot / "figures.json").write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    record = {
        "schema": "sinew.perf.paper.study/1",
        "numbers": len(rows),
        "corrected": names,
        "statuses": dict(Counter(row.status for row in rows)),
        "corrections": changed,
        "defects": [asdict(defect) for defect in others],
    }
    terminal.emit(record)
    return int(not names and any(row.status == "differs" for row in rows))


def need(
    *,
    rate: Positive,
    model: str = "pi0.5",
    request: Asked = AS_THE_POLICY,
    efficiency: Annotated[float, Parameter(validator=validators.Number(gt=0, lte=1))] = 0.7,
    data: Path | None = None,
) -> int:
    """Which machine, precision and number of solver steps reach a rate, and fit its memory. Exit status 1 if none does.

    Args:
        rate: chunks per second.
        model: as of `sinew infer`, or a family's preset.
        efficiency: share of the roofline that software reaches; well-tuned engines reach 0.6 to 0.85.
        data: a file with more machines.
    """
    from sinew.perf.hardware import hardware
    from sinew.perf.needs import needs

    found = [asdict(row) for row in needs(model, hardware(data), rate, efficiency, request)]
    columns = ("machine", "precision", ">solver steps at most", ">rate with them, Hz")
    table = terminal.table(f"{model} at {rate:g} Hz with {efficiency:.0%} of the roofline", *columns)
    for row in found:
        table.add_row(row["title"], row["precision"], str(row["steps"]), f"{row['hz']:.1f}")
    terminal.console().print(table if found else f"nothing in the table reaches {rate:g} Hz")
    terminal.emit({"schema": "sinew.perf.need/1", "rate": rate, "model": model, "found": found})
    return 0 if found else 1


def machines(*, data: Path | None = None, links: Path | None = None) -> int:
    """The machines and networks that are known, with their sources.

    Args:
        data: a file with more machines.
        links: a file with more networks.
    """
    from sinew.perf.hardware import hardware, networks

    console = terminal.console()
    table = terminal.table("machines", "name", "", ">bf16, TFLOP/s", ">GB/s", ">GiB", "source")
    for entry in hardware(data).values():
        peak = f"{entry.peak_flops('bf16') / 1e12:g}" if "bf16" in entry.peak else "-"
        table.add_row(
            entry.name, entry.title, peak, f"{entry.bandwidth / 1e9:g}", f"{entry.memory_gib:g}", entry.source
        )
    console.print(table)
    table = terminal.table("networks", "name", ">up, Mbit/s", ">down", ">one way, ms", "source")
    for link in networks(links).values():
        up, down = f"{link.upload / 1e6:g}", f"{link.download / 1e6:g}"
        table.add_row(link.name, up, down, f"{link.base_ms:g}", link.source)
    console.print(table)
    known = {
        "machines": [asdict(entry) for entry in hardware(data).values()],
        "networks": [asdict(link) for link in networks(links).values()],
    }
    terminal.emit({"schema": "sinew.perf.machines/1", **known})
    return 0


# ----------------------------------------------------------------------------- helpers


def _printed_table(rows: Sequence[Row], names: Sequence[str]) -> Table:
    with_what = f"with {', '.join(names)}" if names else "as published"
    title = f"VLA-Perf (arXiv 2602.18397), {with_what}"
    table = terminal.table(title, "where", "quantity", ">printed", ">ours", "status")
    for row in rows:
        ours = "does not fit" if row.ours is None else f"{row.ours:.4f}"
        style = "red" if row.status == "differs" else None
        table.add_row(row.where, row.quantity, row.printed, ours, row.status, style=style)
    return table


def _corrections_table(changed: Sequence[dict[str, Any]]) -> Table:
    names = [key for key in changed[0] if key not in ("name", "why")]
    columns = ("", *(f">{name}" for name in names), "why")
    table = terminal.table("pi0 end to end, ms: each correction alone, then all", *columns)
    for entry in changed:
        table.add_row(str(entry["name"]), *(f"{entry[name]:.2f}" for name in names), str(entry["why"]))
    return table


def _component_table(source: str, records: Sequence[dict[str, Any]]) -> Table:
    columns = ("machine", "component", ">ms", "bound", ">GFLOP", ">GB through memory", ">TFLOP/s at best")
    table = terminal.table(f"{source}: roofline", *columns)
    for record in records:
        for part in record["components"]:
            numbers = (f"{part['gflop']:.1f}", f"{part['gbyte']:.2f}", f"{part['tflops']:.1f}")
            table.add_row(record["title"], part["component"], f"{part['ms']:.2f}", part["bound"], *numbers)
        table.add_row(
            "", "end to end", f"{record['ms']:.2f}", f"{record['hz']:.1f} Hz", end_section=True, style="bold"
        )
    return table


def write_csv(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
