"""Figures of sweeps: success with Wilson intervals over the replan rule, the latency, or another setting."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sinew.core import figures

from sinew_eval.episodes.settings import rows_between
from sinew_eval.report.report import swept

# Callers check for matplotlib before they spend hours on episodes.
check = figures.check


def write_plots(report: dict[str, Any], out: Path) -> list[Path]:
    """Write a PNG for each swept setting.

    Args:
        report: The report.
        out: Folder for the figures.

    Returns:
        Paths of the figures.

    Raises:
        MissingPackageError: matplotlib is missing.
    """
    changed = [name for name in swept(report) if name != "target"]
    if not changed:
        return []
    written = []
    for name in changed:
        others = [other for other in changed if other != name]
        if name == "handover" and others:
            # Make no figure for this field, because the figure of the other field has one line for each of its values.
            continue
        path = out / f"success_{name}.png"
        if name == "replan":
            plot_replan(report, others, path)
        else:
            plot_sweep(report, name, others, path)
        written.append(path)
    return written


def plot_replan(report: dict[str, Any], others: Sequence[str], path: Path) -> None:
    """Draw two panels over the replan interval: above the success, and below the control rate that inference alone
    would allow.
    """
    figure, (axis, rates) = figures.new(2, height=5.2, sharex=True, height_ratios=(3, 2))
    _success_axis(axis, report)
    lines = _lines(report, others)
    handles = []
    for index, (label, entries) in enumerate(lines.items()):
        entries = sorted(entries, key=_replan)
        # Shift the lines a little, so that their intervals do not overlap. Multiply, because the axis is logarithmic.
        x = [_replan(entry) * 2 ** (0.12 * _aside(index, len(lines))) for entry in entries]
        handles.append(_success_line(axis, x, entries, index, label))
        rates.plot(x, [entry["control_rate_hz"] for entry in entries], linewidth=1.4, **_style(index))
    ticks = sorted({_replan(entry): entry for entry in report["variants"]}.items())
    axis.set_xscale("log", base=2)
    axis.set_xticks([x for x, _ in ticks], [_tick(entry) for _, entry in ticks])
    axis.minorticks_off()
    rates.set_xlabel("replan interval S, actions executed per inference")
    rates.set_ylabel("amortised control\nrate, Hz")
    rates.set_yscale("log")
    figures.plain_ticks(rates.yaxis, [entry["control_rate_hz"] for entry in report["variants"]])
    if len(lines) > 1:
        figures.legend(figure, handles)
    figures.save(figure, path)


def plot_sweep(report: dict[str, Any], name: str, others: Sequence[str], path: Path) -> None:
    """Draw the success over the values of the setting ``name``, with one line for each combination of the settings in
    ``others``.
    """
    figure, axis = figures.new()
    _success_axis(axis, report)
    lines = _lines(report, others)
    names = list(dict.fromkeys(_text(entry, name) for entry in report["variants"]))
    longest = max(entry["delay_ms"] for entry in report["variants"])
    spread = 0.012 * longest if name == "latency" else 0.08
    handles = []
    for index, (label, entries) in enumerate(lines.items()):
        # Shift the lines a little, so that their intervals do not overlap.
        shift = spread * _aside(index, len(lines))
        if name == "latency":
            entries = sorted(entries, key=lambda entry: entry["delay_ms"])
            x = [entry["delay_ms"] + shift for entry in entries]
        else:
            x = [names.index(_text(entry, name)) + shift for entry in entries]
        handles.append(_success_line(axis, x, entries, index, label))
    if name == "latency":
        note = "; lines are shifted a little to separate them" if len(lines) > 1 else ""
        axis.set_xlabel(f"injected latency, ms{note}")
    else:
        axis.set_xticks(range(len(names)), names)
        axis.set_xlabel(name.replace("_", " "))
    if len(lines) > 1:
        figures.legend(figure, handles)
    figures.save(figure, path)


def _success_axis(axis: Any, report: dict[str, Any]) -> None:
    axis.set_ylim(-4, 104)
    axis.set_ylabel("success, %\n(95 % Wilson intervals)")
    counts = sorted({entry["episodes"] for entry in report["variants"]})
    each = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else str(counts[0])
    axis.set_title(f"{report['task']['env']}, {each} episodes per point")


def _success_line(
    axis: Any, x: Sequence[float], entries: Sequence[dict[str, Any]], index: int, label: str
) -> Any:
    low, high = zip(*(entry["interval"] for entry in entries), strict=True)
    return figures.wilson_bars(
        axis, x, [entry["success"] for entry in entries], low, high, label=label, **_style(index)
    )


def _style(index: int) -> dict[str, Any]:
    colors, markers = figures.COLORS, figures.MARKERS
    return {"color": colors[index % len(colors)], "marker": markers[index % len(markers)]}


def _aside(index: int, count: int) -> float:
    return index - (count - 1) / 2


def _lines(report: dict[str, Any], others: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
    lines: dict[str, list[dict[str, Any]]] = {}
    for entry in report["variants"]:
        label = ", ".join(
            _text(entry, other) if other == "handover" else f"{other} {_text(entry, other)}"
            for other in others
        )
        if entry["variant"]["handover"] == report.get("default_handover"):
            label += ", the default"
        lines.setdefault(label, []).append(entry)
    return lines


def _text(entry: dict[str, Any], name: str) -> str:
    value = entry["variant"][name]
    if name == "replan" and value == 0:
        return "full"
    return "default" if value is None else str(value)


def _replan(entry: dict[str, Any]) -> int:
    """Return the number of actions per inference. A full chunk has as many as the policy returns."""
    return rows_between(entry["variant"]["replan"], entry["chunk_size"])


def _tick(entry: dict[str, Any]) -> str:
    whole = entry["variant"]["replan"] == 0
    return f"full\n({entry['chunk_size']})" if whole else _text(entry, "replan")
