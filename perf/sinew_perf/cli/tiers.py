"""``sinew perf tiers``: compare predictions with the measurements that vla.cpp's authors published.

The authors measured seven policies on three boards.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from rich.markup import escape
from sinew.cli import terminal
from sinew.core import SinewError, progress
from sinew_client.untrusted import named

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sinew_perf.tiers import Tier


def tiers(
    *policies: Annotated[str, Parameter(negative="")],
    report: Annotated[list[Path] | None, Parameter(negative="")] = None,
) -> int:
    """Compare the measurements of vla.cpp's authors, seven policies on three boards, with predictions from a trace of
    each.

    With --report, the command shows what Sinew measured on your machines instead.

    Args:
        policies: Presets of the policies to show. Default: all, which takes a minute.
        report: File of `sinew bench BUNDLE --json FILE`, from any machine. Repeatable.
    """
    if report:
        if policies:
            raise SinewError(f"--report: expected no presets with it, got {policies[0]!r}; omit one of them")
        return _measured(report)
    from sinew_perf.tiers import tiers as rows

    with progress.task("tracing"):
        comparisons = list(rows(policies))
    _leaderboard(comparisons)
    _architectures(comparisons)
    _boards(comparisons)
    terminal.emit({"schema": "sinew.perf.tiers/1", "policies": [asdict(row) for row in comparisons]})
    return 0


def _measured(paths: Sequence[Path]) -> int:
    """Print one row for each report of ``sinew bench``, the slowest machine first."""
    rows = sorted(map(_row, paths), key=lambda row: -row["p50_ms"])
    columns = (">p50, ms", ">p95, ms", ">chunks/s", ">peak, MiB", ">threads", "sinew")
    table = terminal.table("measured with Sinew", "machine", "policy", "engine", "precision", *columns)
    for row in rows:
        texts = (escape(row[name]) for name in ("machine", "policy", "engine", "precision"))
        numbers = f"{row['p50_ms']:.1f}", f"{row['p95_ms']:.1f}", f"{1e3 / row['p50_ms']:.1f}"
        table.add_row(*texts, *numbers, str(row["peak_mib"]), str(row["threads"]), escape(row["sinew"]))
    terminal.console().print(table)
    terminal.emit({"schema": "sinew.perf.measured/1", "rows": rows})
    return 0


def _row(path: Path) -> dict[str, Any]:
    """Return the values of a report of ``sinew bench`` that the table shows.

    Raises:
        SinewError: The file is not such a report.
    """
    import numpy as np
    from sinew.cli.bench import read_report

    report = read_report(path, "--report")
    try:
        hardware, policy = report["hardware"], report["policy"]
        p50, p95 = np.percentile(np.asarray(report["samples_ms"]["total"], np.float64), [50, 95])
        if not 0 < p50 <= p95 < np.inf:
            raise ValueError("times must be above 0")
        on = (hardware.get("gpu"), hardware.get("board"), hardware["cpu"])
        return {
            "machine": ", ".join(named(name, 60) for name in on if name),
            "policy": named(policy["name"] or policy["architecture"], 60),
            "engine": named(policy["engine"], 20),
            "precision": named(policy["dtype"], 60),
            "p50_ms": float(p50),
            "p95_ms": float(p95),
            "peak_mib": int(report["memory_bytes"]["steady"]["peak"]) >> 20,
            "threads": int(report["threads"]),
            "sinew": named(report["sinew"], 20),
        }
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise SinewError(
            f"--report {path}: expected a report of `sinew bench BUNDLE --json {path}`, but a value is missing or"
            f" wrong ({type(error).__name__}: {named(str(error), 80)}); write it again with that command"
        ) from None


def _leaderboard(comparisons: Sequence[Tier]) -> None:
    columns = (">chunk", ">success", ">step, ms", ">inference, ms", ">VRAM, MiB", ">roofline, ms", ">reached")
    title = "LIBERO-Object on an RTX 3060: numbers of vla.cpp's authors, and our roofline of an inference"
    table = terminal.table(title, ">", "policy", "backbone", *columns)
    for row in comparisons:
        theirs, bound = row.measured, row.ms["rtx3060"]
        printed = (
            f"{theirs.success:.1f} %",
            f"{theirs.step:.2f}",
            f"{theirs.inference:.1f}",
            f"{theirs.vram:,}",
        )
        ours = (f"{bound:.1f}", f"{bound / theirs.inference:.0%}")
        table.add_row(str(theirs.rank), theirs.title, theirs.backbone, str(theirs.chunk), *printed, *ours)
    terminal.console().print(table)


def _architectures(comparisons: Sequence[Tier]) -> None:
    columns = (
        "vision",
        "language",
        "head",
        ">params, 10\u2079",
        ">ours",
        ">steps",
        ">ours",
        ">prefix",
        ">ours",
    )
    title = "architectures, and the prefix's share of a chunk on an RTX 5070: numbers of vla.cpp's authors, and ours"
    table = terminal.table(title, "policy", *columns, ">FLOP/byte")
    for row in comparisons:
        theirs = row.measured
        share = "-" if theirs.prefix_share is None else f"{theirs.prefix_share:g} %"
        steps = ("-" if theirs.steps is None else str(theirs.steps), str(row.steps or "-"))
        table.add_row(
            *(theirs.title, theirs.vision, theirs.language, theirs.head),
            *(f"{theirs.params:g}", f"{row.params:.2f}", *steps, share, f"{row.prefix_share:.1f} %"),
            ", ".join(f"{value:.0f}" for value in row.intensity.values()),
        )
    terminal.console().print(table)


def _boards(comparisons: Sequence[Tier]) -> None:
    titles = ("RTX 3060", "AGX Orin", "Orin Nano")
    columns = [column for title in titles for column in (f">{title}, step ms", ">roofline")]
    table = terminal.table(
        "hardware tiers: numbers of vla.cpp's authors, our roofline of an inference, and our memory on the Orin Nano",
        *("policy", *columns, ">RSS, MiB", ">ours", "8 GB", "ours"),
    )
    for row in comparisons:
        theirs = row.measured
        steps = (theirs.step, theirs.agx_step, theirs.nano_step)
        cells = [
            text
            for step, bound in zip(steps, row.ms.values(), strict=True)
            for text in ("-" if step is None else f"{step:.2f}", f"{bound:.1f}")
        ]
        memory = ("-" if theirs.rss is None else f"{theirs.rss:,}", f"{row.memory:,.0f}")
        table.add_row(theirs.title, *cells, *memory, theirs.tier, row.tier)
    terminal.console().print(table)
