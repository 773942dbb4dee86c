"""``python -m research.vla_perf``: papers' printed numbers against ours."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import App, CycloptsError, Parameter
from rich.table import Table
from sinew_perf.cli.run import write_table

from research.vla_perf.defects import defects
from research.vla_perf.published import (
    CORRECTIONS,
    Row,
    compare,
    compare_realtime,
    corrected_study,
    corrections,
)
from research.vla_perf.study import DOF, Study
from research.vla_perf.takeaways import Takeaway, takeaways
from sinew.cli import terminal
from sinew.cli.status import EXIT_ERROR, EXIT_USAGE
from sinew.core import SinewError

app = App("python -m research.vla_perf", version_flags=[], result_action="return_value")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program. Returns its exit status: 2 for arguments that it does not understand, 1 for what differs."""
    tokens = list(sys.argv[1:] if arguments is None else arguments)
    terminal.take_json(tokens)
    try:
        return app(tokens, exit_on_error=False)
    except CycloptsError:
        return EXIT_USAGE
    except SinewError as error:
        terminal.console(stderr=True).print(f"error: {error}", markup=False)
        return EXIT_ERROR
    finally:
        terminal.take_json([])


@app.default
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
            "schema": "research.vla_perf.realtime/1",
            "statuses": statuses,
            "rows": [_row_record(row) for row in rows],
        }
    )
    return int("differs" in statuses)


def _vla_perf(correct: Sequence[str], table: Path | None, plot: Path | None) -> int:
    names = list(CORRECTIONS) if correct == ["all"] else list(correct)
    console, study = terminal.console(), corrected_study(names)
    if plot is not None:
        from sinew_perf import plots

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
        "schema": "research.vla_perf.study/1",
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
    from sinew_perf import plots

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


if __name__ == "__main__":
    sys.exit(main())
