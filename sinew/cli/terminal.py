"""The output of all commands: consoles for text, one place for JSON, and the progress of long tasks."""

from __future__ import annotations

import json
import logging
import os
import re
import shlex
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from sinew.core import SinewError

WIDTH = 120  # columns of the output without a terminal and without COLUMNS; 80 are too few for the tables
# If a column would be narrower than this many characters, the table is printed with one line for each cell.
WORD = 14
PATIENCE_S = 2.0  # a task that takes more seconds is announced
MAX_SILENCE_S = 10.0  # a task that makes progress prints a line at least this often, in seconds

# Matches characters that control a terminal, change the direction of writing, or cannot be encoded. Tabs and line ends
# are allowed, so they are not in the pattern.
_STEERS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


@dataclass
class Output:
    """The setting of ``--json``.

    Attributes:
        json: True to print JSON on standard output instead of the text.
        file: File for the JSON, in addition to the text; None for no file.
    """

    json: bool = False
    file: Path | None = None


output = Output()


def shown(text: str) -> str:
    """Escape the control characters of an untrusted text, as in ``\\x1b``, so that it is safe to print."""
    return _STEERS.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


class _Console(Console):
    """A console of rich that escapes control characters of every text, like :func:`shown`. Control codes of rich
    itself are not escaped.
    """

    # rich calls this method before a table measures its cells, so the escaped text fits into its cell.
    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(shown(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            if segment.control or not _STEERS.search(segment.text):
                yield segment
            else:
                yield Segment(shown(segment.text), segment.style)

    def print(self, *objects: Any, **options: Any) -> None:
        """Print objects. A text wraps at the end of a line, and a table is fitted into the line."""
        super().print(*objects, **{"soft_wrap": all(isinstance(each, str) for each in objects), **options})


class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return shown(super().format(record))


def log(level: int, form: str) -> None:
    """Write the log to standard error with escaped control characters, unless logging is already set up.

    Args:
        level: The lowest level that is written.
        form: Format of a line.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(_Formatter(form))
    logging.basicConfig(level=level, handlers=[handler])


def console(stderr: bool = False, **options: Any) -> Console:
    """Create a console that prints text unchanged, without emoji for ``:words:``.

    Without a terminal, the console has at least :data:`WIDTH` columns. The console of standard output prints nothing if
    ``--json`` requests only JSON.

    Args:
        stderr: True for standard error, False for standard output.
        **options: Further options of rich's Console.
    """
    new = _Console(
        stderr=stderr, emoji=False, quiet=output.json and not stderr, **{"highlight": False, **options}
    )
    if not new.is_terminal and "width" not in options and not os.environ.get("COLUMNS", "").isdecimal():
        new.width = max(WIDTH, new.width)
    return new


def typed() -> str:
    """Return this program's command line as text, for records."""
    return shlex.join(["sinew", *sys.argv[1:]])


class _Table(Table):
    """A table that is printed with one line for each cell if it is too wide for the terminal.

    Nothing is cut off: long words, such as paths, are broken.
    """

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if not self.row_count or self._fits(console, options):
            yield from super().__rich_console__(console, options)
            return
        if self.title:
            yield Text.from_markup(str(self.title), style="italic")
        names = [str(column.header) for column in self.columns]
        for cells in zip(*(column.cells for column in self.columns), strict=True):
            row = Table(show_header=False, box=None, pad_edge=False)
            row.add_column(style="bold")
            row.add_column(overflow="fold")
            for name, cell in zip(names, cells, strict=True):
                row.add_row(name, cell)
            yield row
            yield ""

    def _fits(self, console: Console, options: ConsoleOptions) -> bool:
        """Return True if no word of up to WORD characters is broken.

        Rich narrows the widest columns first, and also makes them narrower than their words.
        """
        room = options.update_width(options.max_width - self._extra_width)
        widths = self._calculate_column_widths(console, room)
        words = (self._measure_column(console, options, column).minimum for column in self.columns)
        return all(width >= min(least, WORD + 2) for width, least in zip(widths, words, strict=True))


def table(title: str | None, *columns: str, rows: Iterable[Sequence[str]] = (), **options: Any) -> Table:
    """Create a table. A column whose name begins with ``>`` has numbers and is aligned to the right."""
    new = _Table(title=title, **options)
    for name in columns:
        justify: Any = "right" if name.startswith(">") else "left"
        new.add_column(name.removeprefix(">"), justify=justify, overflow="fold")
    for row in rows:
        new.add_row(*row)
    return new


BARS = "▁▂▃▄▅▆▇█"


def plain(*columns: str, rows: Iterable[Sequence[str]] = ()) -> Table:
    """Create a :func:`table` without border lines."""
    return table(None, *columns, rows=rows, box=None, pad_edge=False)


def facts(rows: Iterable[tuple[str, str]]) -> Table:
    """Create a table without a head. Each row is a name and a text, which may be long."""
    new = Table(show_header=False, box=None, pad_edge=False)
    new.add_column(style="bold")
    new.add_column(overflow="fold")
    for name, text in rows:
        new.add_row(escape(name), escape(text))
    return new


def findings(rows: Iterable[tuple[str, str, str, str]]) -> Table:
    """Create a table of findings without a head. Each row is a mark in markup, a name, a detail and the next step.

    The detail may be long. The next step may be "".
    """
    new = Table(show_header=False, box=None, pad_edge=False)
    for options in ({"no_wrap": True}, {"no_wrap": True, "style": "bold"}, {"overflow": "fold"}):
        new.add_column(**options)
    for mark, name, detail, advice in rows:
        new.add_row(mark, escape(name), escape(f"{detail}\n→ {advice}" if advice else detail))
    return new


def take_json(tokens: list[str]) -> None:
    """Remove ``--json``, ``--json FILE.json`` and ``--json=FILE`` from a command line, and store the setting."""
    output.json, output.file = False, None
    end = tokens.index("--") if "--" in tokens else len(tokens)
    remaining, words = [], iter(range(end))
    for index in words:
        token = tokens[index]
        if token.startswith("--json="):
            output.file = Path(token.removeprefix("--json="))
        elif token == "--json":  # noqa: S105
            if index + 1 < end and _is_file(tokens[index + 1]):
                output.file = Path(tokens[next(words)])
            else:
                output.json = True
        else:
            remaining.append(token)
    tokens[:end] = remaining


def _is_file(token: str) -> bool:
    """Return True if the word after ``--json`` is its file: FILE.json or a device. It may also be another argument."""
    path = Path(token)
    return token.endswith(".json") or path.is_char_device() or path.is_fifo()


def emit(record: dict[str, Any]) -> None:
    """Write a result as JSON if ``--json`` requests it.

    The text of the result was already printed with :func:`console`, which prints nothing if only JSON is requested.
    """
    if output.file is not None:
        with SinewError.at(f"--json {output.file}", OSError):
            output.file.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    if output.json:
        print(json.dumps(record), flush=True)


def drawn(picture: Callable[[], RenderableType], rate: float) -> Live:
    """Return a context manager that draws a picture regularly, on its own thread, so that no loop waits for it.

    Args:
        picture: Returns the picture.
        rate: Pictures per second.
    """
    return Live(get_renderable=picture, refresh_per_second=rate, transient=True)


def say(text: str) -> None:
    """Print a sentence on standard error."""
    console(stderr=True).print(text, markup=False)


_bars: Progress | None = None


@contextmanager
def bars(*columns: Any) -> Iterator[Progress]:
    """Show progress bars on standard error. Tasks of :mod:`sinew.core.progress` join the open bars."""
    global _bars  # noqa: PLW0603 - one terminal
    where = console(stderr=True)
    with Progress(*columns, console=where, transient=True, disable=not where.is_terminal) as progress:
        before, _bars = _bars, progress
        try:
            yield progress
        finally:
            _bars = before


@contextmanager
def show_task(text: str, total: int | None) -> Iterator[Callable[[str], None]]:
    """Show a task: with a spinner or a bar on a terminal, otherwise with lines.

    The first line is printed after two seconds. Then lines with the present part follow at increasing intervals. All
    lines are printed before the task ends.
    """
    where = console(stderr=True)
    if not where.is_terminal:
        current, ended = [text], threading.Event()

        def report() -> None:
            shown, patience = "", PATIENCE_S
            while not ended.wait(patience):
                if (now := current[0]) != shown:
                    where.print(f"{now} ...", markup=False)
                shown, patience = now, min(2 * patience, MAX_SILENCE_S)

        reporter = threading.Thread(target=report, name="sinew-progress", daemon=True)
        reporter.start()
        try:
            yield lambda more: current.__setitem__(0, more or text)
        finally:
            ended.set()
            reporter.join()  # wait until its line is complete, before the caller prints more
        return
    if _bars is None:
        with bars(*_columns(total)), show_task(text, total) as advance:
            yield advance
        return
    shown = _bars.add_task(text.replace("[", r"\["), total=total)
    progress = _bars
    try:
        yield lambda more: progress.update(shown, advance=1, description=more.replace("[", r"\[") or text)
    finally:
        progress.remove_task(shown)


def _columns(total: int | None) -> Sequence[Any]:
    if total is None:
        return SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    return TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
