"""Figures of a roofline. matplotlib is imported when a figure is drawn."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sinew.core import figures

from sinew_perf.hardware import Hardware
from sinew_perf.roofline import StageTiming
from sinew_perf.success import Way

# Components in the order of their colours.
COMPONENTS = ("vision", "prefix", "head")
# Callers check for matplotlib before they compute the data of a figure.
check = figures.check

# Key: a component. Value: its name in the figures.
COMPONENT_NAMES = {"prefix": "language", "head": "action"}
PLACES = ("network", "vision", "language", "action")


def roofline(
    machines: Sequence[Hardware],
    timings: Mapping[str, Sequence[StageTiming]],
    path: Path,
    formats: Iterable[str] = ("bf16",),
    title: str = "",
) -> None:
    """Draw FLOP/s over FLOP per byte of memory: the roofline of each machine, and each component as a point below it.

    A point has the rate that the component reaches if every operator is as fast as possible. A component below its
    roofline has operators on both sides of the ridge.

    Args:
        machines: The machines.
        timings: The times of the components on each machine, by the machine's name.
        path: File of the figure.
        formats: Formats of the arithmetic. The roofline is that of the fastest.
        title: Title of the figure.
    """
    formats = list(formats)
    figure, axes = figures.new(height=4.6)
    rows = [row for each in timings.values() for row in each]
    peaks = {machine.name: max(machine.peak_flops(each) for each in formats) for machine in machines}
    ridges = [peaks[machine.name] / machine.bandwidth for machine in machines]
    intensities = [row.intensity for row in rows]
    lowest = min([*intensities, *ridges]) / 3
    # The range includes the ridges (where a machine's two limits meet), and leaves space for the names of the machines.
    highest = max([*intensities, *ridges]) * 9
    heights = []
    for index, machine in enumerate(machines):
        peak = peaks[machine.name]
        xs = [lowest, ridges[index], highest]
        ys = [min(peak, x * machine.bandwidth) / 1e12 for x in xs]
        heights += ys
        axes.plot(xs, ys, color=figures.GREY, linewidth=1.5)
        axes.annotate(
            f"{machine.title}, {_tera(peak)}", (highest, ys[-1]), textcoords="offset points", xytext=(-2, 5),
            ha="right", fontsize=9,
        )  # fmt: skip
        for row in timings[machine.name]:
            axes.plot(row.intensity, row.flops / row.seconds / 1e12, markersize=8, **_style(row.name))
    handles = [
        axes.plot([], [], label=COMPONENT_NAMES.get(n, n), markersize=8, **_style(n))[0]
        for n in _components(rows)
    ]
    axes.set(
        xscale="log", yscale="log", xlabel="operational intensity, FLOP per byte of memory",
        ylabel="TFLOP/s, at most", title=title,
    )  # fmt: skip
    axes.margins(y=0.12)
    figures.plain_ticks(axes.xaxis, [lowest, highest])
    figures.plain_ticks(axes.yaxis, heights)
    figures.legend(figure, handles)
    figures.save(figure, path)


def sizes(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw the latency over the number of parameters, with one line for each component and machine, as in figure 5 of
    VLA-Perf.
    """
    figure, axes = figures.new(height=4.6)
    styles = {"thor": "-", "rtx4090": "--", "b100": ":"}
    titles = {"thor": "Thor", "rtx4090": "RTX 4090", "b100": "B100"}
    for machine, line in styles.items():
        for part in COMPONENTS:
            own = [row for row in rows if (row["machine"], row["part"]) == (machine, part)]
            points = sorted({(row["params_b"], row["ms"]) for row in own})
            axes.plot(*zip(*points, strict=True), linewidth=1.4, **{**_style(part), "linestyle": line})
    handles = [axes.plot([], [], label=COMPONENT_NAMES.get(p, p), **_style(p))[0] for p in COMPONENTS]
    handles += [
        axes.plot([], [], color=figures.GREY, linestyle=line, label=titles[machine])[0]
        for machine, line in styles.items()
    ]
    axes.set(
        xscale="log", yscale="log", xlabel="parameters of the part, 10\u2079", ylabel="latency of the part, ms",
        title="VLA-Perf's models by size, as published",
    )  # fmt: skip
    figures.plain_ticks(axes.xaxis, [row["params_b"] for row in rows])
    figures.plain_ticks(axes.yaxis, [row["ms"] for row in rows])
    figures.legend(figure, handles, columns=3)
    figures.save(figure, path)


def denoising(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw over the solver steps, with one line per chunk size: the latency of the action part, the total latency,
    and the action part's intensity. As in figure 6 of VLA-Perf.

    Args:
        rows: Dicts with steps, chunk, action_ms, ms and oi.
        path: File of the figure.
    """
    figure, panels = figures.new(1, 3, width=9.6, height=3.8)
    chunks = sorted({row["chunk"] for row in rows})
    titles = {"action_ms": "action part, ms", "ms": "end to end, ms", "oi": "action part, MFLOP per MiB"}
    for axes, (quantity, title) in zip(panels, titles.items(), strict=True):
        for index, chunk in enumerate(chunks):
            own = sorted((row["steps"], row[quantity]) for row in rows if row["chunk"] == chunk)
            axes.plot(
                *zip(*own, strict=True), markersize=4, linewidth=1.4, label=f"chunk {chunk}", **_line(index)
            )
        axes.set(xscale="log", xlabel="solver steps", title=title)
        figures.plain_ticks(axes.xaxis, [row["steps"] for row in rows])
        # The end-to-end latency spans less than a power of ten, so its axis stays linear.
        if quantity != "ms":
            axes.set(yscale="log")
            figures.plain_ticks(axes.yaxis, [row[quantity] for row in rows])
    figures.legend(figure, panels[0].get_lines(), columns=6)
    figures.save(figure, path)


def decoders(rows: Sequence[Mapping[str, Any]], path: Path, dof: int) -> None:
    """Draw the latency of four kinds of action decoders over the chunk size and over the size of an action, as in
    figure 7 of VLA-Perf.

    Args:
        rows: Dicts with kind, chunk, dof and ms.
        path: File of the figure.
        dof: Size of an action in the first panel.
    """
    figure, panels = figures.new(1, 2, width=8.4, height=3.8, sharey=True)
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    chosen = (
        ("chunk", "actions per chunk", [row for row in rows if row["dof"] == dof]),
        ("dof", "numbers of a single action", [row for row in rows if row["chunk"] == 1]),
    )
    for axes, (over, title, shown) in zip(panels, chosen, strict=True):
        for index, kind in enumerate(kinds):
            own = sorted((row[over], row["ms"]) for row in shown if row["kind"] == kind)
            axes.plot(*zip(*own, strict=True), markersize=5, linewidth=1.4, label=kind, **_line(index))
        axes.set(yscale="log", xlabel=title)
    panels[0].set_ylabel("end to end, ms")
    figures.plain_ticks(panels[0].yaxis, [row["ms"] for row in rows])
    figures.legend(figure, panels[0].get_lines())
    figures.save(figure, path)


def placements(rows: Sequence[tuple[str, Mapping[str, float]]], path: Path, title: str = "") -> None:
    """Draw the latency of placements as stacked bars, with the shortest on top.

    Args:
        rows: (name, milliseconds of network, vision, language and action).
        path: File of the figure.
        title: Title of the figure.
    """
    rows = sorted(rows, key=lambda row: sum(row[1].values()), reverse=True)
    figure, axes = figures.new(height=1.6 + 0.27 * len(rows))
    names, totals = [name for name, _ in rows], [sum(parts.values()) for _, parts in rows]
    left = [0.0] * len(rows)
    handles = []
    for part, color in zip(PLACES, ("#BBBBBB", *figures.COLORS), strict=False):
        widths = [parts.get(part, 0.0) for _, parts in rows]
        handles.append(axes.barh(names, widths, left=left, color=color, height=0.7, label=part))
        left = [a + b for a, b in zip(left, widths, strict=True)]
    for index, total in enumerate(totals):
        axes.annotate(
            f"{total:.1f}", (total, index), textcoords="offset points", xytext=(4, 0), va="center", fontsize=9
        )
    axes.set(xlabel="milliseconds from observation to actions", title=title)
    axes.set_xlim(0, 1.12 * max(totals))
    axes.grid(visible=False, axis="y")
    figures.legend(figure, handles)
    figures.save(figure, path)


def _components(rows: Sequence[StageTiming]) -> list[str]:
    """Return the names of the components: first the usual ones (vision, prefix, head), then all others."""
    names = {row.name for row in rows}
    return [name for name in COMPONENTS if name in names] + sorted(names - set(COMPONENTS))


def _style(name: str) -> dict[str, Any]:
    index = COMPONENTS.index(name) if name in COMPONENTS else len(COMPONENTS)
    return {
        "color": figures.COLORS[index],
        "marker": figures.MARKERS[index],
        "markeredgecolor": "white",
        "linestyle": "none",
    }


def _line(index: int) -> dict[str, Any]:
    return {"color": figures.COLORS[index], "marker": figures.MARKERS[index], "markeredgecolor": "white"}


def _tera(flops: float) -> str:
    return f"{flops / 1e12:.3g} TFLOP/s"


def success(
    ways: Sequence[Way], required: float, machines: Iterable[tuple[str, float]], path: Path, title: str
) -> None:
    """Draw the success over the latency for each way of driving, with its interval, and the latency of machines.

    Args:
        ways: The measured ways of driving.
        required: Required success, from 0 to 1.
        machines: Names and latencies in milliseconds. A name is drawn above its line.
        path: File of the figure.
        title: Title of the figure.
    """
    figure, axes = figures.new(height=5.8)
    handles = []
    longest = max(way.longest_ms for way in ways)
    for number, way in enumerate(ways):
        color = figures.COLORS[number % len(figures.COLORS)]
        times = [1e3 * steps / way.control_hz for steps in way.measured]
        rates = [rate for each in times if (rate := way.at(each)) is not None]
        marker = figures.MARKERS[number % len(figures.MARKERS)]
        shares = [100 * rate.success for rate in rates]
        handles += axes.plot(times, shares, color=color, marker=marker, label=way.name)
        low, high = (
            [100 * value for value in column]
            for column in zip(*((r.low, r.high) for r in rates), strict=True)
        )
        axes.fill_between(times, low, high, color=color, alpha=0.15, linewidth=0)
    axes.axhline(100 * required, color=figures.GREY, linewidth=1, linestyle="--")
    drawn: list[float] = []
    for name, latency_ms in sorted(machines, key=lambda each: each[1]):
        if latency_ms > longest or any(abs(latency_ms - each) < longest / 25 for each in drawn):
            # Skip a machine beyond the axis, and a name that would overlap with another name.
            continue
        drawn.append(latency_ms)
        axes.axvline(latency_ms, color=figures.GREY, linewidth=1, linestyle=":")
        # The names are above the axes, so that they hide no point of a curve.
        axes.annotate(
            name, (latency_ms, 102), textcoords="offset points", xytext=(-3, 3), rotation=50, ha="left",
            va="bottom", fontsize=9, annotation_clip=False, rotation_mode="anchor",
        )  # fmt: skip
    axes.set(xlabel="latency from request to chunk, ms", ylabel="success, %", ylim=(0, 102))
    figure.suptitle(title)
    axes.set_xlim(left=0)
    figures.legend(figure, handles, columns=2)
    figures.save(figure, path)
