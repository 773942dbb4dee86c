"""The report of ``sinew validate``, as a page."""

from __future__ import annotations

from typing import Any


def markdown(found: dict[str, Any]) -> str:
    """Return a report as markdown. ``found``: what ``sinew validate --json`` prints."""
    parity, gate = found["parity"], found.get("gate")
    verdict = "passes" if found["passed"] else "FAILS"
    conditions = (
        f"{parity['dtype']} on {parity['device']} ({found['hardware']}), sinew {found['sinew']}, {found['date'][:10]}."
        f" Engine: {parity['engine_reason']}. Held against eager fp32 on the CPU over {parity['observations']}"
        f" observations: {parity['source']}."
    )
    lines = [
        f"# {found['bundle']} on engine {parity['engine']}: {verdict}",
        "",
        conditions,
        "",
        "| stage | relative L2, worst | median | bound | | compared |",
        "|---|---|---|---|---|---|",
    ]
    for stage in parity["stages"]:
        median = "-" if stage["median"] is None else f"{stage['median']:.1e}"
        mark = "ok" if stage["passed"] else "**differs**"
        cells = (
            stage["name"],
            f"{stage['error']:.1e}",
            median,
            f"{stage['bound']:.0e}",
            mark,
            stage["compared"],
        )
        lines.append("| " + " | ".join(cells) + " |")
    lines.append("")
    for name, same in parity["indices"].items():
        lines.append(f"* indices of {name}: {'equal' if same else '**not equal**'}")
    lines += [f"* **{fault}**" for fault in parity["faults"]]
    lines.append(f"* success gate: {gate['text'] if 'text' in gate else gate['skipped']}" if gate else "")
    lines += ["", "```", found["command"], "```"]
    return "\n".join(lines) + "\n"
