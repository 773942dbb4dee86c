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
from sinew.cli.options import Count, NotNegative, PositiveIfAny
from sinew.cli.perf_options import Asked, dtypes
from sinew.core import SinewError
from sinew.perf.request import AS_THE_POLICY

if TYPE_CHECKING:
    from sinew.perf.hardware import Hardware
    from sinew.perf.paper.published import Row
    from sinew.perf.paper.study import Study
    from sinew.perf.paper.takeaways import Takeaway
    from sinew.perf.roofline import MatrixProduct


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
    data: Path | None = None,
    table: Path | None = None,
    plot: Path | None = None,
) -> int:
    """Latency by component on one or more machines, from the traced program.

    Args:
        source: as of `sinew infer`, or a family's preset at its published size, or FILE.json in the form of a family's
            published.json: a model of any widths. pi0-l, pi0-xl and pi0-xxl are VLA-Perf's.
        hardware: names of machines (`sinew perf machines`), repeatable or with commas; thor, rtx4090, h200 if absent.
        dtype: WEIGHTS[/ACTIVATIONS[/CACHE]], or COMPONENT=..., comma-separated: vision=fp8,language=fp8.
        traffic: fused keeps everything between products on the chip; unfused is what the eager engine moves; weights
            moves nothing but weights, the least that any program can.
        engine: eager, or with the rewrites of the plan.
        operators: also every product with how often it runs, its shape and its bound.
        sync_us: microseconds between two products, as `sinew perf sync` measures them: added for each.
        data: a file with more machines, as sinew/perf/data/hardware.toml.
        table: write the table as CSV, or as LaTeX (.tex).
        plot: write the roofline with each component as a point.
    """
    from sinew.perf.hardware import load_machines

    machines = load_machines(hardware or ("thor", "rtx4090", "h200"), data)  # before torch
    from sinew.perf import plots

    if plot is not None:
        plots.check()
    from sinew.perf.memory import memory_report, missing
    from sinew.perf.program import PublishedProgram
    from sinew.perf.roofline import components_record, products, timing

    with progress.task(f"tracing {source}"):
        program = PublishedProgram.load(source, request, dtypes=dtypes(dtype), engine=engine)
        parts = program.components(traffic)
    timings = {machine.name: [timing(part, machine) for part in parts] for machine in machines}
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
        write_table(table, [{"machine": r["machine"], **c} for r in records for c in r["components"]])
    terminal.emit({"schema": "sinew.perf/1", "source": source, "traffic": traffic, "machines": records})
    return 0


def paper(
    which: Literal["vla-perf", "realtime-vla"] = "vla-perf",
    /,
    *,
    correct: Annotated[list[str] | None, Parameter(negative="")] = None,
    table: Path | None = None,
    plot: Path | None = None,
) -> int:
    """A paper's printed numbers against ours, one by one.

    VLA-Perf's are followed by its 15 takeaways, judged, and what correcting its defects changes.

    Args:
        which: VLA-Perf (arXiv 2602.18397), or the lower bound of Running VLAs at Real-time Speed (arXiv 2510.26742).
        correct: compute with this correction, repeatable; "all" is the preset that other commands use. Rows that move
            are then no fault. Names: decimal-bandwidth, one-qkv, flash-attention, activations-in-memory, state-token.
        table: write all rows as CSV, or as LaTeX (.tex).
        plot: a folder for figures.json, the data behind figures 5 to 9, and for drawings like them.
    """
    from sinew.perf.paper.published import compare_realtime

    if which == "vla-perf":
        return _vla_perf(correct or [], table, plot)
    if correct or plot is not None:
        raise SinewError("--correct and --plot: expected the paper vla-perf, got realtime-vla")
    rows = compare_realtime()
    terminal.console().print(_printed_table(rows, "Running VLAs at Real-time Speed (arXiv 2510.26742)"))
    if table is not None:
        write_table(table, [_row_record(row) for row in rows])
    statuses = dict(Counter(row.status for row in rows))
    terminal.emit(
        {
            "schema": "sinew.perf.paper.realtime/1",
            "statuses": statuses,
            "rows": [_row_record(row) for row in rows],
        }
    )
    return int("differs" in statuses)


def _vla_perf(correct: Sequence[str], table: Path | None, plot: Path | None) -> int:
    from sinew.perf.paper.defects import defects
    from sinew.perf.paper.published import CORRECTIONS, compare, corrected_study, corrections
    from sinew.perf.paper.takeaways import takeaways

    names = list(CORRECTIONS) if correct == ["all"] else list(correct)
    console, study = terminal.console(), corrected_study(names)
    if plot is not None:
        from sinew.perf import plots

        plots.check()
    rows, judged, changed, others = compare(study), takeaways(), corrections(), defects()
    with_what = f"with {', '.join(names)}" if names else "as published"
    console.print(_printed_table(rows, f"VLA-Perf (arXiv 2602.18397), {with_what}"))
    console.print(_takeaways_table(judged))
    console.print(_corrections_table(changed))
    columns = ("defect", "quantity", ">as published", ">put right", "why")
    shown = terminal.table("its other defects, one by one", *columns)
    for defect in others:
        values = (f"{defect.published:.2f}", f"{defect.corrected:.2f}")
        shown.add_row(defect.name, defect.quantity, *values, defect.why)
    console.print(shown)
    if table is not None:
        write_table(table, [_row_record(row) for row in rows])
    if plot is not None:
        _draw_paper(study, plot)
    record = {
        "schema": "sinew.perf.paper.study/1",
        "numbers": len(rows),
        "corrected": names,
        "statuses": dict(Counter(row.status for row in rows)),
        "takeaways": [asdict(takeaway) for takeaway in judged],
        "corrections": changed,
        "defects": [asdict(defect) for defect in others],
    }
    terminal.emit(record)
    return int(not names and any(row.status == "differs" for row in rows))


def _draw_paper(study: Study, folder: Path) -> None:
    from sinew.perf import plots
    from sinew.perf.paper.study import DOF

    folder.mkdir(parents=True, exist_ok=True)
    drawn = study.figures()
    plots.sizes(drawn["figure 5"], folder / "latency_over_size.png")
    plots.denoising(drawn["figure 6"], folder / "latency_over_steps.png")
    plots.decoders(drawn["figure 7"], folder / "decoders.png", DOF)
    for name, file, title in (
        ("figure 8", "placements.png", "where to run pi0, as VLA-Perf computes it"),
        ("figure 9", "split.png", "pi0 in two places, as VLA-Perf computes it"),
    ):
        plots.placements([(str(row["where"]), row["parts_ms"]) for row in drawn[name]], folder / file, title)
    (folder / "figures.json").write_text(json.dumps(drawn, indent=1) + "\n", encoding="utf-8")


def need(
    *,
    rate: PositiveIfAny = None,
    task: Literal["tabletop", "manipulation", "reactive", "whole-body", "drone"] | None = None,
    control_hz: PositiveIfAny = None,
    replan: Count = 1,
    model: str = "pi0.5",
    request: Asked = AS_THE_POLICY,
    efficiency: Annotated[float, Parameter(validator=validators.Number(gt=0, lte=1))] = 0.7,
    data: Path | None = None,
) -> int:
    """Which machine, precision and number of solver steps reach a rate, and fit its memory. Exit status 1 if none does.

    Args:
        rate: chunks per second; or it follows from a task or a control rate.
        task: a class of tasks with its usual control rates and latencies.
        control_hz: control steps per second.
        replan: of them between two inferences: actions of each chunk that are executed.
        model: as of `sinew infer`, or a family's preset.
        efficiency: share of the roofline that software reaches; well-tuned engines reach 0.6 to 0.85.
        data: a file with more machines.
    """
    from sinew.perf.hardware import hardware
    from sinew.perf.needs import budget, needs

    if (rate is None) == (task is None and control_hz is None):
        raise SinewError("expected either --rate, or --task or --control-hz with --replan")
    asked = None if rate is not None else budget(control_hz or 0.0, replan, task or "")
    wanted = rate if asked is None else asked.rate
    assert wanted is not None
    if asked is not None:
        terminal.console().print(asked.why)
    found = [asdict(row) for row in needs(model, hardware(data), wanted, efficiency, request)]
    columns = ("machine", "precision", ">solver steps at most", ">rate with them, Hz")
    table = terminal.table(f"{model} at {wanted:g} Hz with {efficiency:.0%} of the roofline", *columns)
    for row in found:
        table.add_row(row["title"], row["precision"], str(row["steps"]), f"{row['hz']:.1f}")
    terminal.console().print(table if found else f"nothing in the table reaches {wanted:g} Hz")
    record = {"rate": wanted, "budget_ms": 1e3 / wanted, "model": model, "found": found}
    terminal.emit({"schema": "sinew.perf.need/1", **record})
    return 0 if found else 1


def machines(*, data: Path | None = None, links: Path | None = None) -> int:
    """The machines and networks that are known, with their sources.

    Args:
        data: a file with more machines.
        links: a file with more networks.
    """
    from sinew.perf.hardware import hardware, networks

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
    known = {
        "machines": [asdict(entry) for entry in hardware(data).values()],
        "networks": [asdict(link) for link in networks(links).values()],
    }
    terminal.emit({"schema": "sinew.perf.machines/1", **known})
    return 0


# ----------------------------------------------------------------------------- helpers


def _printed_table(rows: Sequence[Row], title: str) -> Table:
    table = terminal.table(title, "where", "quantity", ">printed", ">ours", "status")
    for row in rows:
        style = "red" if row.status == "differs" else None
        table.add_row(row.where, row.quantity, row.printed, row.shown, row.status, style=style)
    return table


def _row_record(row: Row) -> dict[str, Any]:
    return asdict(row) | {"ours": row.shown if row.ours is None else row.ours}


def _takeaways_table(judged: Sequence[Takeaway]) -> Table:
    studies = list(judged[0].verdicts)
    table = terminal.table("its 15 takeaways", ">", "claim", *studies)
    for takeaway in judged:
        verdicts = takeaway.verdicts.values()
        shown = [f"{'holds' if each.holds else 'DOES NOT HOLD'}: {each.numbers}" for each in verdicts]
        table.add_row(str(takeaway.number), takeaway.claim, *shown, end_section=True)
    return table


def _corrections_table(changed: Sequence[dict[str, Any]]) -> Table:
    names = [key for key in changed[0] if key not in ("name", "why")]
    columns = ("", *(f">{name}" for name in names), "why")
    table = terminal.table("pi0 end to end, ms: each correction alone, then all", *columns)
    for entry in changed:
        table.add_row(str(entry["name"]), *(f"{entry[name]:.2f}" for name in names), str(entry["why"]))
    return table


def _component_table(source: str, records: Sequence[dict[str, Any]]) -> Table:
    columns = (">ms", ">share", "bound", ">FLOP/byte", ">GFLOP", ">GB moved", ">TFLOP/s at best")
    table = terminal.table(f"{source}: roofline", "machine", "component", *columns)
    for record in records:
        for part in record["components"]:
            bound = (f"{part['ms']:.2f}", f"{part['share']:.1%}", part["bound"], f"{part['intensity']:.1f}")
            numbers = (f"{part['gflop']:.1f}", f"{part['gbyte']:.2f}", f"{part['tflops']:.1f}")
            table.add_row(record["title"], part["component"], *bound, *numbers)
        if record["sync_ms"]:
            table.add_row("", f"between {record['products']:,} products", f"{record['sync_ms']:.2f}")
        rate = f"{record['hz']:.1f} Hz"
        table.add_row("", "end to end", f"{record['ms']:.2f}", "", rate, end_section=True, style="bold")
    return table


def _operators_table(machine: Hardware, shown: Sequence[MatrixProduct]) -> Table:
    columns = (">times", "shape", ">MFLOP", ">MB moved", "bound", ">ms in all")
    table = terminal.table(f"products on {machine.title}", "stage", "product", *columns)
    for each in shown:
        size = (f"{each.flops / 1e6:.1f}", f"{each.nbytes / 1e6:.2f}", each.bound(machine))
        ms = f"{1e3 * each.seconds(machine):.3f}"
        table.add_row(each.stage, each.name, f"{each.times}", each.shape, *size, ms)
    return table


def write_table(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write rows as CSV, or as LaTeX's tabular where the file's name ends in .tex."""
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
