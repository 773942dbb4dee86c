"""``sinew client --replay``: recorded requests once more, and whether the server answers as it did then."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table
from sinew_client.control import repeat, watched

from sinew.cli import terminal

JOURNAL_SCHEMA = "sinew.replay/1"
SHOWN = 20  # rows of the table


def replay_journal(path: Path) -> dict[str, Any]:
    """Repeat the decisions of a ``sinew run --record`` file; no server is asked."""
    found = repeat(path)
    console = terminal.console()
    for line in found.differences[:20]:
        console.print(line)
    differ = len(found.differences)
    console.print(f"{found.commands} decisions repeated ({found.held} holds), {differ} differ")
    result = {"schema": JOURNAL_SCHEMA, "commands": found.commands, "held": found.held, "differ": differ}
    if (fit := watched(path)) is not None:
        console.print(fit.advice(), markup=False)
        result["motion"] = asdict(fit)
    return result


def print_replay(result: dict[str, Any]) -> None:
    table = Table(title=f"{result['records']} records replayed at {result['address']}")
    for name in ("record", "wire", "then", "now"):
        table.add_column(name, overflow="fold")
    told = [row for row in result["rows"] if row["result"] in ("beyond", "new", "error")]
    for row in told[:SHOWN]:
        now = row.get("now") or (f"differs by {_where(row)}" if "difference" in row else "actions")
        table.add_row(row["file"], row["wire"], row["then"], now)
    console = terminal.console()
    if table.row_count:
        console.print(table)
    lines = [f"and {len(told) - SHOWN} more: --json has all"] if len(told) > SHOWN else []
    if result["unlike"]:
        tolerance, count = result["tolerance"], result["records"]
        lines.append(
            f"not computed as then: {'; '.join(f'{text} ({n} of {count})' for text, n in result['unlike'].items())}"
        )
        lines.append(
            f"so the tolerance is {tolerance['of']:.2g} of each action's scale, for sums in another order in"
            f" {tolerance['precision']} (docs/wires.md)"
        )
    else:
        lines.append(
            "computed as then (engine, threads, precision, machine, versions): every bit is demanded"
        )
    worst = result["largest"]
    largest = f" (largest {_where(worst)} of {worst['file']})" if worst else ""
    lines.append(
        f"{result['records']} records: {result['equal']} equal to the bit, {result['within']} within the tolerance,"
        f" {result['beyond']} beyond{largest}; {result['error']} answered with an error,"
        f" {result['new']} that had failed gave actions"
        + (f"; {result['unkept']} not asked: records keep no contexts" if result["unkept"] else "")
    )
    console.print("\n".join(lines), markup=False)


def _where(row: dict[str, Any]) -> str:
    return f"{row['difference']:.3g}, {row['of_scale']:.2g} of the scale, in row {row['row']}, joint {row['joint']}"
