"""The live view of ``sinew run --stream``: rates, ages, misses, and the reaction time of each loop."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.console import Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from sinew_client.control import Loop, Stream, StreamController, StreamReport
from sinew_client.control.facts import RobotFacts
from sinew_client.control.reaction import LOOPS, Reactions, histogram
from sinew_client.control.report import gap

from sinew.cli.run_robot import episodes_text
from sinew.cli.terminal import BARS

WIDEST = 40  # largest number of bins in a histogram


class StreamView:
    """Draws a stream while it runs, for :func:`sinew.cli.terminal.drawn`."""

    def __init__(self, loop: Loop, robot: RobotFacts):
        assert isinstance(loop.source, Stream)
        assert isinstance(loop.controller, StreamController)
        self.loop, self.robot, self.link, self.controller = loop, robot, loop.source.link, loop.controller
        self._before = (time.monotonic(), 0, 0)
        self._rates = (0.0, 0.0)

    def picture(self) -> Panel:
        loop, controller, link = self.loop, self.controller, self.link
        now, ticks, windows = time.monotonic(), loop.steps, controller.windows
        then, old_ticks, old_windows = self._before
        if now - then > 0.5:
            self._rates = ((ticks - old_ticks) / (now - then), (windows - old_windows) / (now - then))
            self._before = (now, ticks, windows)
        facts = Table.grid(padding=(0, 2))
        facts.add_row("instruction", Text(loop.prompt or "-"))
        if episodes := episodes_text(self.robot):
            facts.add_row("episodes", Text(episodes))
        facts.add_row(
            "state", Text(f"holds: {loop.reason}", style="bold red") if loop.reason else Text("moves")
        )
        facts.add_row("made by", link.label or "-")
        facts.add_row("ticks", f"{self._rates[0]:.0f} of {controller.hz:g} per second, {loop.pace.late} late")
        facts.add_row("windows", f"{self._rates[1]:.0f} per second, {controller.misses} ticks without a node")
        if link.errors:
            facts.add_row("errors", Text(f"{link.errors}, the last: {link.error}", style="red"))
        newest = controller.newest
        if newest is not None:
            facts.add_row(
                "newest window",
                f"prefix {newest.prefix_age_ms:.0f} ms old, sample {newest.sensor_age_ms:.1f} ms, head"
                f" {newest.head_ms:.1f} ms, first node {max(1, controller.delay.steps)} ticks after"
                " its sample",
            )
            if newest.text or newest.said:
                facts.add_row("says", Text(newest.text or newest.said))
        for name in LOOPS:
            facts.add_row(f"{name} reaction", reaction_line(controller.reactions, name))
        return Panel(Group(facts), title="sinew run --stream")


def reaction_line(reactions: Reactions, loop: str) -> str:
    """Return a histogram as one line of text, with its range in milliseconds."""
    values = [1e3 * each for each in reactions.anywhere(loop, 400)]
    if not values:
        return "-"
    width = max(max(values) / WIDEST, 0.5)
    counts = histogram(values, width)
    filled = {round(float(low) / width): count for low, count in counts.items()}
    most = max(filled.values())
    line = "".join(
        BARS[min(len(BARS) - 1, filled.get(k, 0) * len(BARS) // (most + 1))] if filled.get(k) else " "
        for k in range(max(filled) + 1)
    )
    return f"|{line}| 0 to {max(values):.1f} ms"


def report_table(report: StreamReport, first: Sequence[tuple[str, str]] = ()) -> Table:
    table = Table(title="stream", show_header=False)
    for name, text in first:
        table.add_row(name, text)
    table.add_row("made by", report.label or "-")
    table.add_row("ticks", f"{report.tick_hz:.1f} Hz of {report.rate:g} over {report.seconds:.1f} s")
    table.add_row("late ticks", f"{report.late} of {report.ticks}, {report.skipped} periods skipped")
    table.add_row("longest gap", gap(report.longest_gap_ms, report.watchdog, report.watchdog_holds))
    table.add_row("windows", f"{report.windows}, {report.window_hz:.1f} Hz")
    table.add_row("frames", f"{report.frames} sent, {report.frames_used} of them looked at")
    table.add_row("first node", f"{report.delay} ticks after its sample")
    table.add_row("ticks without a node", str(report.misses))
    if report.errors:
        table.add_row("errors", f"{report.errors} in place of windows, the last: {report.error}")
    for reason, count in sorted(report.held.items(), key=lambda each: -each[1]):
        table.add_row("held", f"{count} x {reason}")
    for name, values in report.measured.items():
        spread = "  ".join(f"{key} {value:.3g}" for key, value in values.items())
        table.add_row(name.removesuffix("_ms").replace("_", " "), f"{spread} ms" if spread else "-")
    return table
