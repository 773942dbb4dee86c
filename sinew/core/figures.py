"""The style of all figures. Text is readable at half size, and colour-blind readers can distinguish the colours."""

from __future__ import annotations

import io
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sinew.core import SinewError
from sinew.core.extras import MissingPackageError

# The colours of Okabe and Ito. Colour-blind readers can distinguish them, also in grey. Lines also differ in markers.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = ("o", "s", "^", "D", "v", "P")
GREY = "#555555"
DPI = 150
PALETTE = 128  # a PNG has at most this many colours


def check() -> None:
    """Raise :class:`MissingPackageError` if matplotlib is not installed.

    Call this before a computation of hours, so that the figure at its end does not fail.
    """
    if find_spec("matplotlib") is None:
        raise MissingPackageError("a figure", "matplotlib")


def new(
    rows: int = 1, columns: int = 1, *, width: float = 6.4, height: float = 4.0, **grid: Any
) -> tuple[Any, Any]:
    """Return a figure and its axes, like matplotlib's ``subplots``.

    Args:
        rows: Rows of axes.
        columns: Columns of axes.
        width: Width in inches. Text has 10 points.
        height: Height in inches.
        **grid: Further arguments of ``subplots``.

    Raises:
        MissingPackageError: matplotlib is not installed.
    """
    check()
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"axes.titlesize": 10}):
        figure = Figure(figsize=(width, height), dpi=DPI, layout="constrained")
        FigureCanvasAgg(figure)  # draws without a window system and without the global state of pyplot
        axes = figure.subplots(rows, columns, **grid)
        for axis in figure.axes:
            axis.grid(color="#dddddd", linewidth=0.6)
            axis.set_axisbelow(True)
            axis.spines[["top", "right"]].set_visible(False)
    return figure, axes


def legend(figure: Any, handles: Sequence[Any], columns: int = 4) -> None:
    """Add a legend below all axes, where it does not cover any plotted line."""
    figure.legend(
        handles=list(handles), loc="outside lower center", ncols=min(columns, len(handles)), frameon=False
    )


def plain_ticks(axis: Any, values: Sequence[float]) -> None:
    """Give a logarithmic axis ticks with plain numbers: 1, 2 or 5 times a power of ten, in the range of the values."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    low, high = min(values), max(values)
    ticks = [m * 10.0**e for e in range(-9, 16) for m in (1, 2, 5)]
    if high > 1000 * low:
        ticks = [10.0**e for e in range(-9, 16)]
    axis.set_major_locator(FixedLocator([t for t in ticks if low / 2.6 <= t <= high * 2.6]))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_locator(NullLocator())


def wilson_bars(
    axis: Any, x: Sequence[float], share: Sequence[float], low: Any, high: Any, **style: Any
) -> Any:
    """Draw shares as percentages with error bars for their confidence intervals. Return the handle for a legend.

    Args:
        axis: The axes.
        x: Horizontal positions.
        share: Shares in [0, 1].
        low: Lower ends of the intervals in [0, 1].
        high: Upper ends of the intervals in [0, 1].
        **style: Further arguments of matplotlib's ``errorbar``.
    """
    y = [100 * value for value in share]
    down = [max(0.0, v - 100 * each) for v, each in zip(y, low, strict=True)]
    up = [max(0.0, 100 * each - v) for v, each in zip(y, high, strict=True)]
    return axis.errorbar(x, y, yerr=[down, up], capsize=3, markersize=5, linewidth=1.4, **style)


def save(figure: Any, path: Path) -> None:
    """Write a figure. A PNG is stored with a colour palette. The file is then a third as large, and few colours lose no
    quality.

    Raises:
        SinewError: The path or the format cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix != ".png":
            figure.savefig(path)
            return
        from PIL import Image  # installed with matplotlib

        plain = io.BytesIO()
        figure.savefig(plain, metadata={"Software": None})
        picture = Image.open(plain).convert("RGB").quantize(PALETTE, dither=Image.Dither.NONE)
        picture.save(path, optimize=True)
    except (OSError, ValueError) as error:
        raise SinewError(f"{path}: {error}; choose another path or format, such as .png") from None
