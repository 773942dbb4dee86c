"""``sinew perf choose``: which mode of inference costs least, including its failures."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

from cyclopts import Parameter, validators
from rich.markup import escape
from sinew.cli import terminal
from sinew.core import SinewError
from sinew.core.hints import pairs

Pairs = Annotated[list[str], Parameter(negative="")]
PairsIfAny = Annotated[list[str] | None, Parameter(negative="")]
Cost = Annotated[float, Parameter(validator=validators.Number(gte=0))]


def choose(
    *,
    mode: Pairs,
    failure_cost: Cost,
    cost: PairsIfAny = None,
    available: PairsIfAny = None,
) -> int:
    """Choose among modes of inference: the least expected cost of an attempt, including its failures.

    Modes are, for example, a small policy on the robot, a server, or a quantised policy. Play each mode with
    `sinew eval`, with its latency and its way of merging chunks (--handover). The expected cost is the cost of the
    mode, plus the share of failures times the cost of a failure. The output states for which cost of a failure each
    mode is the best one, and how many more episodes would decide. The exit status is 1 if the episodes do not decide.

    Args:
        mode: A mode as NAME=REPORT. REPORT is the folder of `sinew eval --out`, or its report.json, or
            report.json:LABEL for one variant of a sweep. Repeatable, at least twice.
        failure_cost: Cost of a failed attempt, in the same unit as --cost. For example the price of a broken
            part, or the minutes of a person who helps.
        cost: Cost of an attempt with a mode, without its failures, as NAME=COST. Repeatable. Default: 0.
        available: Share of attempts in which a mode can be used, as NAME=SHARE, for example the share of time in
            which the network works. All other attempts count as failures. Repeatable. Default: 1.
    """
    from sinew_perf.choosing import read_mode, select

    reports = pairs("--mode", "NAME=REPORT", mode)
    costs = {
        name: _number("--cost", name, text) for name, text in pairs("--cost", "NAME=COST", cost or []).items()
    }
    shares = {
        name: _number("--available", name, text, 1.0)
        for name, text in pairs("--available", "NAME=SHARE", available or []).items()
    }
    for flag, given in (("--cost", costs), ("--available", shares)):
        for name in given:
            if name not in reports:
                raise SinewError(
                    f"{flag} {name}: expected one of {', '.join(reports)}; name it with --mode first"
                )
    modes = [
        read_mode(name, text, costs.get(name, 0.0), shares.get(name, 1.0)) for name, text in reports.items()
    ]
    selection = select(modes, failure_cost)
    console = terminal.console()
    table = terminal.table(
        escape(f"{modes[0].task}: a failure costs {failure_cost:g}"),
        "mode", "success, %", ">latency", ">cost", ">expected cost", "95 % interval", ">cheapest, %",
    )  # fmt: skip
    for row in selection.modes:
        low, high = row.mode.interval
        table.add_row(
            escape(row.mode.name),
            f"{100 * row.mode.success:.1f} ({100 * low:.1f} to {100 * high:.1f})",
            escape(row.mode.latency) or "-",
            f"{row.mode.cost:g}",
            f"{row.expected:.3g}",
            f"{row.low:.3g} to {row.high:.3g}",
            f"{100 * row.cheapest:.0f}",
        )
    console.print(table)
    best = selection.chosen
    if selection.sure:
        console.print(
            f"choose {best.mode.name}: it has the least expected cost in {best.cheapest:.1%} of the draws",
            markup=False,
        )
    else:
        other = selection.modes[1].mode.name
        more = selection.episodes
        count = (
            "no number of episodes decides, because both cost the same"
            if more is None
            else f"about {more} each"
        )
        console.print(
            f"not decided: {best.mode.name} has the least expected cost in {best.cheapest:.0%} of the draws. To decide"
            f" between {best.mode.name} and {other}, play more episodes: {count}",
            markup=False,
        )
    for number, (start, name) in enumerate(selection.ranges):
        rest = selection.ranges[number + 1 :]
        until = f"to {rest[0][0]:.3g}" if rest else "on"
        console.print(f"{name} is best if a failure costs from {start:.3g} {until}", markup=False)
    terminal.emit(
        {
            "schema": "sinew.perf.choose/1",
            "failure_cost": failure_cost,
            "chosen": best.mode.name,
            "sure": selection.sure,
            "episodes": selection.episodes,
            "modes": [
                {**asdict(row), "success": row.mode.success, "interval": row.mode.interval}
                for row in selection.modes
            ],
            "ranges": selection.ranges,
        }
    )
    return 0 if selection.sure else 1


def _number(flag: str, name: str, text: str, most: float = 1e12) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value <= most:
        raise SinewError(f"{flag} {name}={text}: expected a number from 0 to {most:g}")
    return value
