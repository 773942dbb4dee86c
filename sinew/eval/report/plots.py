"""Figures of sweeps: success with Wilson intervals over the replan interval, the latency, or anything else."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sinew.core import MissingPackageError
from sinew.eval.report.report import swept

# Okabe and Ito's colours, told apart by colour-blind readers and in grey.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = ("o", "s", "^", "D", "v", "P")


def write_plots(report: dict[str, Any], out: Path) -> list[Path]:
    """A PNG per swept field. Raises :class:`MissingPackageError` where matplotlib is missing."""
    changed = [name for name in swept(report) if name != "target"]
    if not changed:
        return []
    written = []
    for name in changed:
        others = [other for other in changed if other != name]
        if name == "handover" and others:
            continue  # lines of the other figure
        path = out / f"success_{name}.png"
        if name == "replan":
            plot_replan(report, others, path)
        else:
            plot_sweep(report, name, others, path)
        written.append(path)
    return written


def plot_replan(report: dict[str, Any], others: Sequence[str], path: Path) -> None:
    """Success on the left axis, amortised control rate on the right, after the supplement's figure 1."""
    figure, axis = _figure()
    rates = axis.twinx()
    for index, (label, entries) in enumerate(_lines(report, others).items()):
        entries = sorted(entries, key=_replan)
        x = [_replan(entry) for entry in entries]
        _success_line(axis, x, entries, index, label or "success")
        rates.plot(
            x,
            [entry["control_rate_hz"] for entry in entries],
            color=COLORS[index] if others else "#666666",
            linestyle=":",
            marker=".",
            label="control rate" if not others else None,
        )
    ticks = sorted({_replan(entry): entry for entry in report["variants"]}.items())
    axis.set_xscale("log", base=2)
    axis.set_xticks([x for x, _ in ticks], [_tick(entry) for _, entry in ticks])
    axis.minorticks_off()
    axis.set_xlabel("replan interval S, actions executed per inference")
    rates.set_ylabel("amortised control rate, Hz (dotted)")
    rates.set_yscale("log")
    rates.spines["top"].set_visible(False)
    handles = [*axis.get_legend_handles_labels()[0], *rates.get_legend_handles_labels()[0]]
    axis.legend(handles=handles, frameon=False, loc="lower left")
    _save(figure, report, path)


def plot_sweep(report: dict[str, Any], name: str, others: Sequence[str], path: Path) -> None:
    """Success over a swept field, one line per combination of the other fields."""
    figure, axis = _figure()
    lines = _lines(report, others)
    names = list(dict.fromkeys(_text(entry, name) for entry in report["variants"]))
    spread = 0.012 * max([e["delay_ms"] for e in report["variants"]]) if name == "latency" else 0.04
    for index, (label, entries) in enumerate(lines.items()):
        shift = spread * (index - (len(lines) - 1) / 2)  # intervals of two lines should not cover each other
        if name == "latency":
            entries = sorted(entries, key=lambda entry: entry["delay_ms"])
            x = [entry["delay_ms"] + shift for entry in entries]
        else:
            x = [names.index(_text(entry, name)) + shift for entry in entries]
        _success_line(axis, x, entries, index, label)
    if name == "latency":
        axis.set_xlabel("injected latency, ms")
    else:
        axis.set_xticks(range(len(names)), names)
        axis.set_xlabel(name.replace("_", " "))
    if len(lines) > 1:
        axis.legend(frameon=False, loc="lower left")
    _save(figure, report, path)


def lines_over(
    x: Sequence[float], lines: dict[str, list[dict[str, Any]]], label: str, title: str, path: Path
) -> None:
    """Draw success over ``x`` for each name of ``lines``, whose entries have "success" and "interval", to a PNG."""
    figure, axis = _figure()
    step = 0.006 * (max(x) - min(x))
    for index, (name, entries) in enumerate(lines.items()):
        shift = step * (index - (len(lines) - 1) / 2)  # intervals of two lines should not cover each other
        _success_line(axis, [each + shift for each in x], entries, index, name)
    axis.set_xlabel(label)
    axis.legend(frameon=False, loc="lower left")
    _write(figure, title, path)


def _success_line(
    axis: Any, x: Sequence[float], entries: Sequence[dict[str, Any]], index: int, label: str
) -> None:
    y = [100 * entry["success"] for entry in entries]
    low = [y_i - 100 * entry["interval"][0] for y_i, entry in zip(y, entries, strict=True)]
    high = [100 * entry["interval"][1] - y_i for y_i, entry in zip(y, entries, strict=True)]
    style = {"color": COLORS[index % len(COLORS)], "marker": MARKERS[index % len(MARKERS)]}
    axis.errorbar(x, y, yerr=[low, high], capsize=3, markersize=5, linewidth=1.4, label=label, **style)


def _lines(report: dict[str, Any], others: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
    lines: dict[str, list[dict[str, Any]]] = {}
    for entry in report["variants"]:
        label = ", ".join(
            _text(entry, other) if other == "handover" else f"{other} {_text(entry, other)}"
            for other in others
        )
        lines.setdefault(label, []).append(entry)
    return lines


def _text(entry: dict[str, Any], name: str) -> str:
    value = entry["variant"][name]
    if name == "replan" and value == 0:
        return "full"
    return "default" if value is None else str(value)


def _replan(entry: dict[str, Any]) -> int:
    """Actions per inference as asked for; the full chunk is as long as the policy makes it."""
    return entry["variant"]["replan"] or entry["chunk_size"]


def _tick(entry: dict[str, Any]) -> str:
    return _text(entry, "replan") + (f" ({entry['chunk_size']})" if not entry["variant"]["replan"] else "")


def _figure() -> tuple[Any, Any]:
    try:
        import matplotlib
    except ImportError:
        raise MissingPackageError("a figure", "matplotlib") from None
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    assert matplotlib
    figure = Figure(figsize=(6.4, 4.0), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)  # no window system, and no global state of pyplot
    axis = figure.add_subplot()
    axis.set_ylim(-3, 103)
    axis.set_ylabel("success, % (95 % Wilson intervals)")
    axis.grid(axis="y", color="#dddddd", linewidth=0.6)
    axis.set_axisbelow(True)
    axis.spines["top"].set_visible(False)
    return figure, axis


def _save(figure: Any, report: dict[str, Any], path: Path) -> None:
    task, seeds = report["task"], report["seeds"]
    _write(figure, f"{task['env']}, {seeds['count']} episodes per point", path)


def _write(figure: Any, title: str, path: Path) -> None:
    figure.axes[0].set_title(title, fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Software": None})
