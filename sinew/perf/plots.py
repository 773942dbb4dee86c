"""Figures of a roofline. matplotlib is imported when one is drawn."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sinew.core import MissingPackageError, SinewError
from sinew.perf.hardware import Hardware
from sinew.perf.roofline import Timing

COLORS = {"vision": "#0072b2", "prefix": "#d55e00", "head": "#009e73"}


MARKS = ("o", "s", "^", "D", "v", "P")


def roofline(
    machines: Sequence[Hardware],
    timings: Mapping[str, Sequence[Timing]],
    path: Path,
    formats: Iterable[str] = ("bf16",),
) -> None:
    """FLOP/s over FLOP per byte of memory: each machine's roof, each component as a point under it.

    timings: by machine name. A point lies at the rate that the component reaches if every operator does its best.
    formats: of the arithmetic; the roof is that of the fastest.
    """
    formats = list(formats)
    figure, axes = _figure()
    lowest = min(t.intensity for rows in timings.values() for t in rows) / 3
    highest = max(t.intensity for rows in timings.values() for t in rows) * 4
    for index, machine in enumerate(machines):
        peak = max(machine.peak_flops(each) for each in formats)
        xs = [lowest, min(max(peak / machine.bandwidth, lowest), highest), highest]
        ys = [min(peak, x * machine.bandwidth) / 1e12 for x in xs]
        shade = str(0.15 + 0.5 * index / max(1, len(machines)))
        axes.plot(xs, ys, color=shade, linewidth=1.5)
        axes.annotate(
            machine.title,
            (highest, ys[-1]),
            textcoords="offset points",
            xytext=(-4, 4),
            ha="right",
            fontsize=8,
        )
        for row in timings[machine.name]:
            color = COLORS.get(row.name, "#555555")
            mark = MARKS[index % len(MARKS)]
            rate = row.flops / row.seconds / 1e12
            axes.plot(row.intensity, rate, mark, color=color, markeredgecolor="white", markersize=7)
    for name, color in COLORS.items():
        axes.plot([], [], "s", color=color, label=name)
    for mark, machine in zip(MARKS, machines, strict=False):
        axes.plot([], [], mark, color="#555555", label=machine.title)
    axes.set(
        xscale="log", yscale="log", xlabel="operational intensity, FLOP per byte of memory", ylabel="TFLOP/s"
    )
    axes.legend(frameon=False, loc="lower right", ncols=2, fontsize=8)
    _save(figure, path)


def sizes(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Latency over parameters, one line per part and machine: figure 5's form."""
    figure, axes = _figure()
    marks = {"thor": "o", "rtx4090": "s", "b100": "^"}
    order = ("vision", "prefix", "head")
    for machine, mark in marks.items():
        for part in order:
            own = [row for row in rows if (row["machine"], row["part"]) == (machine, part)]
            points = sorted({(row["params_b"], row["ms"]) for row in own})
            axes.plot(*zip(*points, strict=True), marker=mark, color=COLORS[part], linewidth=1, markersize=5)
    for part in order:
        axes.plot([], [], color=COLORS[part], label=part)
    for machine, mark in marks.items():
        axes.plot([], [], mark, color="#555555", label=machine)
    axes.set(xscale="log", yscale="log", xlabel="parameters of the part, 1e9", ylabel="milliseconds")
    axes.legend(frameon=False, ncols=2, fontsize=8)
    _save(figure, path)


def placements(rows: Sequence[tuple[str, float]], path: Path) -> None:
    """(where, milliseconds) as bars, the shortest on top."""
    rows = sorted(rows, key=lambda row: row[1], reverse=True)
    figure, axes = _figure(height=0.9 + 0.32 * len(rows))
    bars = axes.barh([name for name, _ in rows], [ms for _, ms in rows], color="#0072b2", height=0.6)
    axes.bar_label(bars, labels=[f"{ms:.1f}" for _, ms in rows], padding=4, fontsize=8)
    axes.set(xscale="log", xlabel="milliseconds from observation to actions (logarithmic)")
    axes.set_xlim(left=min(1.0, min(ms for _, ms in rows) / 2), right=2.2 * max(ms for _, ms in rows))
    axes.set_axisbelow(True)
    axes.grid(visible=False, axis="y")
    _save(figure, path)


def _figure(height: float = 5.0) -> tuple[Any, Any]:
    try:
        import matplotlib
    except ImportError:
        raise MissingPackageError("a figure", "matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.5, height), layout="constrained")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="both", alpha=0.25, linewidth=0.6)
    return figure, axes


def _save(figure: Any, path: Path) -> None:
    from matplotlib import pyplot

    try:
        figure.savefig(path, dpi=130)
    except (OSError, ValueError) as error:
        raise SinewError(f"--plot {path}: {error}") from None
    finally:
        pyplot.close(figure)
