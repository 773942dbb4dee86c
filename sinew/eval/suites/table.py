"""Success per suite and policy, as papers print it: one row per group of tasks, one column per variant."""

from __future__ import annotations

from typing import Any

from rich.table import Table

TITLE = "Success by suite, % [95 % interval]"


def rows(report: dict[str, Any]) -> list[list[str]]:
    """Of a report of ``sinew.eval.report.report.document``; empty where tasks are not grouped.

    Rows are the first parts of the tasks' names, which is where their benchmark or difficulty stands, and at
    last all tasks together; cells are success, its Wilson interval, and the number of episodes.
    """
    variants = report["variants"]
    groups = sorted({name.partition("/")[0] for name in variants[0]["by_task"] if "/" in name})
    found = [[group, *(_cell(variant["by_task"][group]) for variant in variants)] for group in groups]
    if len(groups) > 1:
        found.append(["all", *(_cell(variant) for variant in variants)])
    return found


def columns(report: dict[str, Any]) -> list[str]:
    return ["suite", *(variant["label"] for variant in report["variants"])]


def _cell(entry: dict[str, Any]) -> str:
    low, high = entry["interval"]
    return f"{100 * entry['success']:.1f} [{100 * low:.1f}, {100 * high:.1f}] of {entry['episodes']}"


def markdown(report: dict[str, Any]) -> str:
    """A section of a page; empty where tasks are not grouped."""
    if not (found := rows(report)):
        return ""
    head = columns(report)
    lines = [head, ["---"] * len(head), *found]
    return "\n".join([f"\n## {TITLE}\n", *(f"| {' | '.join(cells)} |" for cells in lines)]) + "\n"


def terminal(report: dict[str, Any]) -> list[Table]:
    if not (found := rows(report)):
        return []
    table = Table(title=TITLE)
    for index, column in enumerate(columns(report)):
        table.add_column(column, justify="right" if index else "left")
    for cells in found:
        table.add_row(*(cell.replace("[", r"\[") for cell in cells))
    return [table]
