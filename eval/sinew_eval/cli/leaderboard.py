"""``sinew leaderboard``: rank evaluations, and compare them over common seeds.

The last line of standard output is one JSON object.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from rich.markup import escape
from rich.table import Table
from sinew import __version__
from sinew.cli import terminal
from sinew.core import SinewError


def leaderboard(*reports: Path, out: Path | None = None) -> None:
    """Rank the results of `sinew eval --out` and `sinew trials`, one table for each task.

    A table shows success with its interval (in total and by task), inference time per executed action and per
    chunk, seconds to success, memory and size. Policies that played the same seeds are compared in pairs. For
    trials on a robot, the table states whether the planned order was followed.

    Args:
        reports: Reports (JSON or page), or folders whose report.json files all count.
        out: File NAME.html to write. The page contains everything that it shows.
    """
    from sinew_eval.evidence import leaderboard as found

    if not reports:
        raise SinewError("expected the folder of a run; pass a folder that `sinew eval --out` has written")
    if out is not None and out.suffix != ".html":
        raise SinewError(f"--out: expected a file NAME.html, got {out}")
    boards = found.boards(reports)
    record = {
        "schema": found.SCHEMA,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "sinew": __version__,
        "boards": boards,
    }
    console = terminal.console()
    for board in boards:
        console.print(_table(found.title(board), found.COLUMNS, found.rows(board)))
        if by_task := found.task_rows(board):
            title = "Success by task, with 95 % intervals"
            console.print(_table(title, found.task_columns(board), by_task))
        if pairs := found.pair_rows(board, board["entries"][0]["label"]):
            title = "Over common seeds, with 95 % intervals"
            console.print(_table(title, found.PAIR_COLUMNS, pairs))
        for said in found.plans(board):
            console.print(said, markup=False)
        if len({entry["hardware"] for entry in board["entries"]}) > 1:
            terminal.say(
                "the entries were measured on several machines, so their milliseconds cannot be compared"
            )
    if out is not None:
        out.write_text(found.markup(record, found.named_reports(reports)), encoding="utf-8")
        terminal.say(f"wrote {out}")
    terminal.emit(record)


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Return a table whose texts come from reports. Brackets in these texts are not interpreted as markup."""
    cells = [[escape(cell) for cell in row] for row in rows]
    return terminal.table(escape(title), *map(escape, columns), rows=cells)
