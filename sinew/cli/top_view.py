"""What ``sinew top`` has heard of a server, and how it looks."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from sinew.cli import terminal
from sinew.core import SinewError
from sinew.eval.report.stats import summarize

STAGES = ("queue", "preprocess", "vision", "prefix", "text", "head", "postprocess")
COLOURS = ("magenta", "blue", "green", "yellow", "bright_cyan", "red", "cyan")
BARS = "▁▂▃▄▅▆▇█"
LAST, BAR, JOINTS, SESSIONS = 240, 60, 16, 8  # answers remembered; columns of a bar; rows of tables
RATE_S = 10.0  # over which rates are counted


@dataclass
class SessionRow:
    """One client's episode."""

    wire: str
    client: str
    answers: int = 0
    refused: int = 0
    missed: int = 0
    prompt: str = ""
    text: str = ""  # the last words that were said to it
    times: deque[float] = field(default_factory=lambda: deque(maxlen=64))

    def rate(self, now: float) -> float:
        """Return answers per second over the last ten seconds."""
        return sum(now - when <= RATE_S for when in self.times) / RATE_S


@dataclass
class ServerSeen:
    """Everything that was heard. problem: why nothing is heard at present, or nothing."""

    address: str
    about: dict[str, Any] = field(default_factory=dict)
    health: dict[str, Any] = field(default_factory=dict)
    last: dict[str, Any] | None = None
    problem: str = "connecting"
    count: int = 0
    missed: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    milliseconds: deque[float] = field(default_factory=lambda: deque(maxlen=LAST))
    sessions: dict[tuple[str, str, str], SessionRow] = field(default_factory=dict)

    def hear(self, event: str, record: dict[str, Any]) -> None:
        """Take one event: about, health or one of answers. Raises :class:`SinewError` for an answer that is none."""
        self.problem = ""
        if event == "about":
            self.about = record
        elif event == "health":
            self.health = record
            if "engine" in record and self.about.get("server"):  # which may have been exchanged
                now = {name: record[name] for name in ("engine", "engine_reason") if name in record}
                self.about = {**self.about, "server": {**self.about["server"], **now}}
        elif event == "answers":
            try:
                self._answer(record)
                view(self)  # whatever is drawn is there
            except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
                raise SinewError(
                    f"{self.address}: expected answers of a Sinew server, got {type(error).__name__}: {error}"
                ) from None

    def lost(self, why: str) -> None:
        """Remember that the server is not heard."""
        self.problem = why

    def _answer(self, record: dict[str, Any]) -> None:
        self.count += 1
        self.missed += bool(record["missed"])
        key = record["wire"], record["client"], record["session"]
        session = self.sessions.pop(key, None) or SessionRow(*key[:2])
        self.sessions[key] = session  # the newest stand last
        while len(self.sessions) > 4 * SESSIONS:
            del self.sessions[next(iter(self.sessions))]
        session.times.append(time.monotonic())
        session.prompt = record["prompt"] or session.prompt
        session.text = record.get("text") or session.text
        session.missed += bool(record["missed"])
        if record["outcome"] == "ok":
            session.answers += 1
            self.last = record if "actions" in record else self.last  # each message has one chunk's numbers
            self.milliseconds.append(record["ms"])
        else:
            session.refused += 1
            self.refused[record["outcome"]] = self.refused.get(record["outcome"], 0) + 1

    def to_dict(self) -> dict[str, Any]:
        """Return what was heard, ready for JSON."""
        return {
            "address": self.address,
            "server": self.about.get("server", {}),
            "policy": self.about.get("policy", {}).get("name"),
            "health": self.health,
            "answers": self.count,
            "missed": self.missed,
            "refused": self.refused,
            "latency_ms": summarize(list(self.milliseconds)) if self.milliseconds else None,
            "sessions": len(self.sessions),
        }


def view(seen: ServerSeen) -> RenderableType:
    """Return everything as tables and bars."""
    parts: list[RenderableType] = [_title(seen)]
    if seen.about:
        parts += [_policy(seen.about), _latency(seen), _sessions(seen)]
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
    host = seen.health.get("host", {})
    if (busy := host.get("cpu")) is not None:
        text.append(f", {100 * busy:.0f} % of {host['cores']} cores busy")
    return text


def _policy(about: dict[str, Any]) -> Table:
    server, policy = about.get("server", {}), about.get("policy", {})
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value, reason in (
        ("policy", f"{policy.get('name')} ({policy.get('architecture')})", ""),
        ("engine", server.get("engine"), server.get("engine_reason")),
        ("device", server.get("device"), server.get("device_reason")),
        ("precision", server.get("dtype"), server.get("dtype_reason")),
        ("threads", server.get("threads"), server.get("threads_reason")),
    ):
        table.add_row(name, escape(f"{value}" + (f"  ({reason})" if reason else "")))
    return table


def _latency(seen: ServerSeen) -> RenderableType:
    values = list(seen.milliseconds)
    if not values:
        return Text("no answer yet", "dim")
    found = summarize(values)
    line = Text.assemble(
        ("latency  ", "bold"),
        f"p50 {found['p50']:.1f}  p95 {found['p95']:.1f}  p99 {found['p99']:.1f}  max {found['max']:.1f} ms",
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
    said = ("last words",) if any(one.text for _, one in shown) else ()
    columns = ("wire", "client", "session", ">per s", ">answers", ">missed", ">refused", "instruction", *said)
    table = terminal.table(None, *columns, box=None, pad_edge=False)
    now = time.monotonic()
    for (wire, client, name), one in shown:
        numbers = f"{one.rate(now):.1f}", str(one.answers), str(one.missed), str(one.refused)
        table.add_row(
            *map(escape, (wire, client, name, *numbers, one.prompt[:60], *[one.text[:60] for _ in said]))
        )
    return table


def _chunk(answer: dict[str, Any], about: dict[str, Any]) -> Table:
    """One line for each joint: its name, its rows as bars, first and last value."""
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


def spark(values: Sequence[float | None], low: float | None = None) -> str:
    """Return numbers as a line of bars, lowest to highest; ``low`` is where the bars begin. None is a gap."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    if not known:
        return " " * len(values)
    floor = min(known) if low is None else min(low, *known)
    span = max(known) - floor
    return "".join(
        " "
        if value is None or not math.isfinite(value)
        else BARS[min(len(BARS) - 1, int(len(BARS) * (value - floor) / span))]
        if span
        else BARS[0]
        for value in values
    )


def number(value: float | None) -> str:
    """Return a number of four digits, or a dash."""
    return "-" if value is None else f"{value:.4g}"
