"""Write the report of ``sinew validate`` as markdown and JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sinew.core import SinewError

COLUMNS = ("stage", "relative L2, worst", "median", "bound", "1 - cosine", "largest", "", "compared")


def stage_rows(parity: dict[str, Any], fine: str, differs: str) -> Iterator[tuple[str, ...]]:
    """Yield one table row for each stage, with a cell for each of :data:`COLUMNS`. The text ``fine`` marks a stage that
    passed, and the text ``differs`` marks the other stages.
    """
    for stage in parity["stages"]:
        median = "-" if stage["median"] is None else f"{stage['median']:.1e}"
        further = f"{stage['one_minus_cosine']:.1e}", f"{stage['largest']:.1e}"
        numbers = f"{stage['error']:.1e}", median, f"{stage['bound']:.0e}", *further
        yield stage["name"], *numbers, fine if stage["passed"] else differs, stage["compared"]


def float32_bounds(parity: dict[str, Any]) -> list[str]:
    """Return a sentence about the bounds that a float32 engine has to reach. The list is empty for other precisions."""
    from sinew.checks.validate.parity import COSINE, LARGEST

    if not all(stage["strict"] for stage in parity["stages"]):
        return []
    verdict = "reached" if all(stage["as_float32"] for stage in parity["stages"]) else "NOT reached"
    bounds = (
        f"1 - cosine of at most {COSINE:.0e} in each stage, and actions within {LARGEST:.0e} of their spread"
    )
    return [f"required of float32: {bounds}: {verdict}"]


def markdown(record: dict[str, Any]) -> str:
    """Return a report as markdown. ``record`` is the output of ``sinew validate --json``."""
    parity, gate = record["parity"], record.get("gate")
    verdict = "passes" if record["passed"] else "FAILS"
    conditions = (
        f"{parity['dtype']} on {parity['device']} ({record['hardware']}), sinew {record['sinew']},"
        f" {record['date'][:10]}. Engine: {parity['engine_reason']}. Compared with eager fp32 on the CPU over"
        f" {parity['observations']} observations: {parity['source']}."
    )
    rows = [COLUMNS, ("---",) * len(COLUMNS), *stage_rows(parity, "ok", "**differs**")]
    lines = [f"# {record['bundle']} on engine {parity['engine']}: {verdict}", "", conditions, ""]
    lines += [*("| " + " | ".join(cells) + " |" for cells in rows), ""]
    for name, same in parity["indices"].items():
        lines.append(f"* indices of {name}: {'equal' if same else '**not equal**'}")
    lines += [f"* {line}" for line in float32_bounds(parity)]
    lines += [f"* **{fault}**" for fault in parity["faults"]]
    lines.append(f"* success gate: {gate['text'] if 'text' in gate else gate['skipped']}" if gate else "")
    lines += [f"* {line}" for line in record.get("weaker", ())]
    lines += ["", "```", record["command"], "```"]
    return "\n".join(lines) + "\n"


def write(record: dict[str, Any], out: Path) -> None:
    """Write report.md and report.json into a folder.

    Raises:
        SinewError: The folder cannot be written.
    """
    with SinewError.at(f"--out {out}", OSError):
        out.mkdir(parents=True, exist_ok=True)
        (out / "report.md").write_text(markdown(record), encoding="utf-8")
        (out / "report.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
