"""``sinew perf tiers``: compare measurements of seven policies on three boards by vla.cpp's authors with
predictions.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from sinew.cli import terminal
from sinew.core import progress

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sinew_perf.tiers import Tier


def tiers(*policies: Annotated[str, Parameter(negative="")]) -> int:
    """Compare the measurements of vla.cpp's authors, seven policies on three boards, with predictions from a trace of
    each.

    Args:
        policies: Presets of the policies to show. Default: all, which takes a minute.
    """
    from sinew_perf.tiers import tiers as rows

    with progress.task("tracing"):
        comparisons = list(rows(policies))
    _leaderboard(comparisons)
    _architectures(comparisons)
    _boards(comparisons)
    terminal.emit({"schema": "sinew.perf.tiers/1", "policies": [asdict(row) for row in comparisons]})
    return 0


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
