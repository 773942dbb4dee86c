"""The view of ``sinew top``: the state of a server as tables and bars."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from sinew.cli import terminal
from sinew.cli.terminal import BARS
from sinew.core.hints import short_reason
from sinew.core.statistics import summarize
from sinew.serve.dashboard.follow import ServerSeen

STAGES = ("queue", "preprocess", "vision", "prefix", "text", "head", "postprocess")
COLOURS = ("magenta", "blue", "green", "yellow", "bright_cyan", "red", "cyan")
HASH = 12  # this many digits of a hash are shown
BAR = 60  # width of a bar in characters
JOINTS, SESSIONS = 16, 8  # the tables have at most this many rows


def view(seen: ServerSeen) -> RenderableType:
    """Return the whole state of a server as tables and bars."""
    parts: list[RenderableType] = [_title(seen)]
    if seen.about:
        parts += [_policy(seen.about), _latency(seen), _sessions(seen)]
        if robots := seen.health.get("robots"):
            parts.append(_robots(robots))
        if seen.last is not None:
            parts.append(_chunk(seen.last, seen.about))
    return Group(*parts)


def _title(seen: ServerSeen) -> Text:
    status = seen.problem or seen.health.get("status", "connected")
    text = Text.assemble(
        ("sinew top ", "bold"),
        f"{seen.address}  ",
        (status, "green" if status in ("ok", "connected") else "red"),
    )
    for problem in seen.health.get("problems", ()):
        text.append(f"  {problem}", "red")
    if up := seen.health.get("uptime_s"):
        text.append(f"  up {up:.0f} s, {seen.health.get('memory_bytes', 0) / 1e6:.0f} MB")
        text.append(f", {seen.health.get('waiting', 0)} waiting, {seen.health.get('served', 0)} served")
    for name in ("recorder", "rerun"):
        if lost := sum(seen.health.get(name, {}).get(kind, 0) for kind in ("dropped", "failed")):
            text.append(f", {lost} records of {name} lost", "red")
    host = seen.health.get("host", {})
    if (busy := host.get("cpu")) is not None:
        text.append(f", {100 * busy:.0f} % of {host.get('cores', 'all')} cores busy")
    return text


def _policy(about: dict[str, Any]) -> Table:
    server, policy = about.get("server", {}), about.get("policy", {})
    rows = [("policy", f"{policy.get('name')} ({policy.get('architecture')})")]
    if text := identity_text(server.get("identity")):
        rows.append(("bundle", text))
    for name, key in (
        ("engine", "engine"),
        ("device", "device"),
        ("precision", "dtype"),
        ("threads", "threads"),
    ):
        reason = short_reason(str(server.get(f"{key}_reason") or ""))
        rows.append((name, f"{server.get(key)}" + (f"  ({reason})" if reason else "")))
    return terminal.facts(rows)


def identity_text(identity: Any) -> str:
    """Return the identity of a served bundle as text; "" if the server states none."""
    if not isinstance(identity, dict) or not identity.get("hash"):
        return ""
    words = {name: str(identity.get(name, ""))[:100] for name in ("hash", "source", "date", "version")}
    return f"{words['hash'][:HASH]} from {words['source']}, file of {words['date']}, by {words['version']}"


def _latency(seen: ServerSeen) -> RenderableType:
    values = list(seen.milliseconds)
    if not values:
        return Text("no answer since this command started", "dim")
    latency = summarize(values)
    line = Text.assemble(
        ("latency  ", "bold"),
        f"p50 {latency['p50']:.1f}  p95 {latency['p95']:.1f}  p99 {latency['p99']:.1f}  max {latency['max']:.1f} ms",
        f"  of {len(values)}; ",
        (f"{seen.missed} missed", "red" if seen.missed else ""),
        *(f", {count} {code}" for code, count in seen.refused.items()),
    )
    parts: list[RenderableType] = [line, Text(spark(values[-BAR:], low=0.0), "cyan")]
    if seen.last is not None:
        parts.append(_stages(seen.last))
    return Group(*parts)


def _stages(answer: dict[str, Any]) -> Text:
    timing = answer.get("timing", {})
    parts = [
        (name, float(timing.get(f"{name}_ms", 0.0)), colour)
        for name, colour in zip(STAGES, COLOURS, strict=True)
    ]
    total = sum(value for _, value, _ in parts) or 1.0
    bar, words = Text(), Text()
    for name, value, colour in parts:
        bar.append("█" * round(BAR * value / total), colour)
        words.append(f"{name} ", colour)
        words.append(f"{value:.1f}  ")
    return Text.assemble(bar, "\n", words)


def _sessions(seen: ServerSeen) -> Table:
    shown = list(reversed(seen.sessions.items()))[:SESSIONS]
    text_columns = ("last words",) if any(one.text for _, one in shown) else ()
    columns = (
        "wire",
        "client",
        "session",
        ">per s",
        ">answers",
        ">missed",
        ">refused",
        "instruction",
        *text_columns,
    )
    table = terminal.plain(*columns)
    now = time.monotonic()
    for (wire, client, name), one in shown:
        numbers = f"{one.rate(now):.1f}", str(one.answers), str(one.missed), str(one.refused)
        table.add_row(
            *map(
                escape,
                (wire, client, name, *numbers, one.prompt[:60], *[one.text[:60] for _ in text_columns]),
            )
        )
    return table


def _robots(rows: Sequence[dict[str, Any]]) -> Table:
    """Return a table with one line for each robot, filled from the robots' own reports."""
    numbers = (">rows per s", ">age p50", ">p95 ms", ">held", ">clipped", ">won")
    table = terminal.plain("robot", "state", *numbers, "most held for")
    for row in rows[:SESSIONS]:
        holds = row["held"]
        table.add_row(
            escape(f"{row['number']} {row['name']}"[:40]),
            escape(row["state"]),
            f"{row['rows_hz']:.1f}",
            number(row["age_p50_ms"]),
            number(row["age_p95_ms"]),
            f"{sum(holds.values())} of {row['steps']}",
            str(row["clipped_commands"]),
            "" if row["episodes"] is None else f"{row['successes']} of {row['episodes']}",
            escape(row["reason"] or max(holds, key=holds.__getitem__, default="")),
        )
    return table


def _chunk(answer: dict[str, Any], about: dict[str, Any]) -> Table:
    """Return a table with one line for each joint: its name, its actions as bars, and the first and last value."""
    rows = answer["actions"]
    action = about.get("policy", {}).get("action", {})
    names, units = action.get("names") or (), action.get("units") or ()
    table = Table(box=None, pad_edge=False)
    for name in ("joint", f"chunk of {len(rows)}", "first", "last", ""):
        table.add_column(name, justify="right" if name in ("first", "last") else "left", no_wrap=True)
    for index, values in enumerate(zip(*rows, strict=True)):
        if index >= JOINTS:
            table.add_row(f"{len(rows[0]) - JOINTS} more")
            break
        label = names[index] if index < len(names) else str(index)
        unit = units[index] if index < len(units) else ""
        table.add_row(escape(label), spark(values), number(values[0]), number(values[-1]), escape(unit))
    return table


def number(value: float | None) -> str:
    """Return a number with four digits, or a dash for None."""
    return "-" if value is None else f"{value:.4g}"


def spark(values: Sequence[float | None], low: float | None = None) -> str:
    """Draw numbers as a line of bars.

    Args:
        values: The numbers. None becomes a gap.
        low: Start of the scale; None starts at the smallest number.
    """
    finite = [value for value in values if value is not None and math.isfinite(value)]
    if not finite:
        return " " * len(values)
    floor = min(finite) if low is None else min(low, *finite)
    span = max(finite) - floor
    return "".join(
        " "
        if value is None or not math.isfinite(value)
        else BARS[min(len(BARS) - 1, int(len(BARS) * (value - floor) / span))]
        if span
        else BARS[0]
        for value in values
    )
