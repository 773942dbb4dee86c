"""How every verb talks: one kind of console, one place for JSON, one way to show that something takes its time."""

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

WIDTH = 120  # columns where there is neither a terminal nor COLUMNS to ask; tables of 80 are cut to pieces
WORD = 14  # characters that a column has room for, before rows stand one below the other
PATIENCE_S = 2.0  # what takes longer is announced
MAX_SILENCE_S = 10.0  # between two lines of a task whose parts go on

# What steers a terminal, turns the direction of writing, or cannot be encoded; tabs and new lines stay.
_STEERS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


@dataclass
class Output:
    """What ``--json`` asked for: on standard output instead of the text, or in a file beside it."""

    json: bool = False
    file: Path | None = None


output = Output()


def shown(text: str) -> str:
    """Return a text of strangers as it can be printed: what steers a terminal stands as ``\\x1b``."""
    return _STEERS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class _Console(Console):
    """Prints every text as :func:`shown`; what rich itself tells the terminal passes."""

    def render_str(self, text: str, **options: Any) -> Text:  # before a table measures its cells
        return super().render_str(shown(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            if segment.control or not _STEERS.search(segment.text):
                yield segment
            else:
                yield Segment(shown(segment.text), segment.style)

    def print(self, *objects: Any, **options: Any) -> None:
        """Print; a text runs over the end of a line, where a table is fitted to it."""
        super().print(*objects, **{"soft_wrap": all(isinstance(each, str) for each in objects), **options})


class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return shown(super().format(record))


def log(level: int, form: str) -> None:
    """Write the log to standard error, as :func:`shown`, where nothing else was set up. form: of the lines."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Formatter(form))
    logging.basicConfig(level=level, handlers=[handler])


def console(stderr: bool = False, **options: Any) -> Console:
    """Return a console that prints text as it is: no emoji for ``:words:``, wide enough where nobody looks.

    The one of standard output is quiet where ``--json`` asked for JSON alone.
    """
    made = _Console(
        stderr=stderr, emoji=False, quiet=output.json and not stderr, **{"highlight": False, **options}
    )
    if not made.is_terminal and "width" not in options and not os.environ.get("COLUMNS", "").isdecimal():
        made.width = max(WIDTH, made.width)
    return made


def typed() -> str:
    """Return this program's command line, for records of what it did."""
    return shlex.join(["sinew", *sys.argv[1:]])


class _Table(Table):
    """A table whose rows stand one below the other, a line for each column, where it is too wide for the terminal.
    Nothing is left out: words that are too long, as paths, are broken."""

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
        """Say whether no word of up to WORD characters is broken: Rich narrows the widest columns first, below their
        words, too."""
        room = options.update_width(options.max_width - self._extra_width)
        widths = self._calculate_column_widths(console, room)
        words = (self._measure_column(console, options, column).minimum for column in self.columns)
        return all(width >= min(least, WORD + 2) for width, least in zip(widths, words, strict=True))


def table(title: str | None, *columns: str, rows: Iterable[Sequence[str]] = (), **options: Any) -> Table:
    """Return a table of rows; a column whose name begins with ``>`` has numbers, and is set to the right."""
    made = _Table(title=title, **options)
    for name in columns:
        justify: Any = "right" if name.startswith(">") else "left"
        made.add_column(name.removeprefix(">"), justify=justify, overflow="fold")
    for row in rows:
        made.add_row(*row)
    return made


BARS = "▁▂▃▄▅▆▇█"


def plain(*columns: str, rows: Iterable[Sequence[str]] = ()) -> Table:
    """Return a :func:`table` without lines."""
    return table(None, *columns, rows=rows, box=None, pad_edge=False)


def facts(rows: Iterable[tuple[str, str]]) -> Table:
    """Return a table without a head: of each row a name and what it is, which may be long."""
    made = Table(show_header=False, box=None, pad_edge=False)
    made.add_column(style="bold")
    made.add_column(overflow="fold")
    for name, text in rows:
        made.add_row(escape(name), escape(text))
    return made


def findings(rows: Iterable[tuple[str, str, str, str]]) -> Table:
    """Return a table without a head: of each row a mark, which is markup, a name, a detail, which may be long, and what
    to do, if anything."""
    made = Table(show_header=False, box=None, pad_edge=False)
    for options in ({"no_wrap": True}, {"no_wrap": True, "style": "bold"}, {"overflow": "fold"}):
        made.add_column(**options)
    for mark, name, detail, advice in rows:
        made.add_row(mark, escape(name), escape(f"{detail}\n→ {advice}" if advice else detail))
    return made


def take_json(tokens: list[str]) -> None:
    """Remove ``--json``, ``--json FILE.json`` and ``--json=FILE`` from a command line, and remember what they ask."""
    output.json, output.file = False, None
    end = tokens.index("--") if "--" in tokens else len(tokens)
    left, words = [], iter(range(end))
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
            left.append(token)
    tokens[:end] = left


def _is_file(token: str) -> bool:
    """Return True for what follows ``--json`` as its file, and is no argument of the verb: FILE.json, or a device."""
    path = Path(token)
    return token.endswith(".json") or path.is_char_device() or path.is_fifo()


def emit(record: dict[str, Any]) -> None:
    """Write a result as JSON where ``--json`` asks for it.

    Its text has been printed with :func:`console`, which is quiet where JSON alone was asked for.
    """
    if output.file is not None:
        with SinewError.at(f"--json {output.file}", OSError):
            output.file.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    if output.json:
        print(json.dumps(record), flush=True)


def drawn(picture: Callable[[], RenderableType], rate: float) -> Live:
    """Return a context that draws a picture ``rate`` times a second, on its own thread, so that no loop waits
    for it.
    """
    return Live(get_renderable=picture, refresh_per_second=rate, transient=True)


# ----------------------------------------------------------------------------- progress


def say(text: str) -> None:
    """Print a sentence on standard error."""
    console(stderr=True).print(text, markup=False)


_bars: Progress | None = None


@contextmanager
def bars(*columns: Any) -> Iterator[Progress]:
    """Progress on standard error; the tasks of :mod:`sinew.core.progress` join the one that is open."""
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
    """Show a task: a spinner or a bar on a terminal, elsewhere a line once it takes longer than two seconds, and
    then, less and less often, a line with the part that it has come to.

    A line is printed before whatever follows the task, or not at all.
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
            reporter.join()  # a line that has begun ends before what comes next is printed
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
