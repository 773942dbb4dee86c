"""Set the style of all figures: type that is readable at half size, colours that colour-blind readers tell apart."""

from __future__ import annotations

import io
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sinew.core import SinewError
from sinew.core.extras import MissingPackageError

# Okabe and Ito's colours, told apart by colour-blind readers and in grey; lines differ in their markers as well.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = ("o", "s", "^", "D", "v", "P")
GREY = "#555555"
DPI = 150
PALETTE = 128  # colours of a PNG


def check() -> None:
    """Raise :class:`MissingPackageError` without matplotlib: before the hours whose figure cannot be drawn."""
    if find_spec("matplotlib") is None:
        raise MissingPackageError("a figure", "matplotlib")


def new(
    rows: int = 1, columns: int = 1, *, width: float = 6.4, height: float = 4.0, **grid: Any
) -> tuple[Any, Any]:
    """Return a figure and its axes, as matplotlib's ``subplots`` does. width, height: inches; text is 10 points.

    Raises :class:`MissingPackageError` without matplotlib.
    """
    check()
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"axes.titlesize": 10}):
        figure = Figure(figsize=(width, height), dpi=DPI, layout="constrained")
        FigureCanvasAgg(figure)  # no window system, and no global state of pyplot
        axes = figure.subplots(rows, columns, **grid)
        for axis in figure.axes:
            axis.grid(color="#dddddd", linewidth=0.6)
            axis.set_axisbelow(True)
            axis.spines[["top", "right"]].set_visible(False)
    return figure, axes


def legend(figure: Any, handles: Sequence[Any], columns: int = 4) -> None:
    """Put a legend under everything, where it hides no line."""
    figure.legend(
        handles=list(handles), loc="outside lower center", ncols=min(columns, len(handles)), frameon=False
    )


def plain_ticks(axis: Any, values: Sequence[float]) -> None:
    """Give a logarithmic axis ticks that read as numbers: 1, 2 or 5 times a power of ten, over the values."""
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
    """Draw percentages with their intervals, and return the handle for a legend. share, low, high: in [0, 1]."""
    y = [100 * value for value in share]
    down = [max(0.0, v - 100 * each) for v, each in zip(y, low, strict=True)]
    up = [max(0.0, 100 * each - v) for v, each in zip(y, high, strict=True)]
    return axis.errorbar(x, y, yerr=[down, up], capsize=3, markersize=5, linewidth=1.4, **style)


def save(figure: Any, path: Path) -> None:
    """Write a figure, a PNG with a palette: a third of the bytes, and lines and areas of few colours lose nothing.

    Raises :class:`SinewError` for a path or format that cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix != ".png":
            figure.savefig(path)
            return
        from PIL import Image  # which matplotlib has

        plain = io.BytesIO()
        figure.savefig(plain, metadata={"Software": None})
        picture = Image.open(plain).convert("RGB").quantize(PALETTE, dither=Image.Dither.NONE)
        picture.save(path, optimize=True)
    except (OSError, ValueError) as error:
        raise SinewError(f"{path}: {error}") from None
