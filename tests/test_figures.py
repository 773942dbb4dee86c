"""Figures that can be read: nothing is cut off, small or hidden, and the documentation's say what its tables say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("matplotlib", reason="figures need matplotlib")
pytest.importorskip("mujoco", reason="benchmarks.figures draws the task, too")

from sinew_client.control.handover import PlacedChunk, parse_handover
from sinew_client.control.trajectory import Trajectory
from sinew_perf import plots
from sinew_perf.hardware import load_hardware
from sinew_perf.roofline import StageTiming

from benchmarks import figures as documented
from research.vla_perf.study import DOF, Study
from sinew.core import SinewError, figures
from sinew.core.statistics import wilson

SMALLEST = 9  # points
OUT = Path("figure.png")
SWEEPS = ("blocks_replan.png", "shove_replan.png", "blocks_latency.png", "pen_latency.png")
PLACES = [
    ("robot", {"vision": 1.0, "language": 2.0, "action": 3.0}),
    ("a server far away", {"network": 40.0}),
]


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Figures in the order in which they are saved; none is written."""
    found: list[Any] = []
    monkeypatch.setattr(figures, "save", lambda figure, path: found.append(figure))
    return found


def small_policy() -> list[StageTiming]:
    """Components that move far more bytes than they compute: the ridge of every machine is beyond them."""
    return [
        StageTiming(name, 1e-3, 1e-4, 1e-3, flops=1e9, nbytes=1e9) for name in ("vision", "prefix", "head")
    ]


def assert_readable(figure: Any) -> None:
    figure.set_dpi(50)  # extents scale with it; points do not
    figure.canvas.draw()
    renderer, paper = figure.canvas.get_renderer(), figure.bbox
    # A tick may stand for a value outside of the axis' limits, and is not drawn then.
    shown = [
        text for text in figure.findobj(lambda each: hasattr(each, "get_fontsize")) if text.get_text().strip()
    ]
    assert shown
    for text in shown:
        assert text.get_fontsize() >= SMALLEST, text.get_text()
    for axis in figure.axes:
        box = axis.get_tightbbox(renderer)
        assert box.x0 >= -1, "something is cut off"
        assert box.y0 >= -1, "something is cut off"
        assert box.x1 <= paper.x1 + 1, "something is cut off"
        assert box.y1 <= paper.y1 + 1, "something is cut off"
        for legend in figure.legends:
            assert not legend.get_window_extent(renderer).overlaps(axis.get_window_extent(renderer))


@pytest.mark.parametrize(
    "name",
    [
        "blocks_replan.png",
        "pen_latency.png",
        "blocks-with-blocks-rtc_handovers.png",
        "concepts.png",
        "late_answers.png",
        "delays.png",
        "need_truth.png",
        "advice_truth.png",
    ],
)
def test_figures_of_the_pages_are_readable(name: str, drawn: list[Any]) -> None:
    documented.FIGURES[name](Path(name))
    (figure,) = drawn
    assert_readable(figure)


def test_the_timeline_shows_what_each_way_of_merging_executes() -> None:
    """Chunk A has the values 0 to 9 and chunk B 100 to 109, so a value names its action."""
    a = np.arange(10, dtype=np.float32)[:, None]
    for name, cells in documented.MERGED:
        way = parse_handover(name)
        old = PlacedChunk(a, 0, 0, 0)
        begins = documented.FRAME if way.timed else documented.ARRIVAL
        new = PlacedChunk(100 + a, begins, documented.FRAME, 1)
        running = Trajectory()
        running.put(old.nodes())
        merged = {
            node.step: float(node.row[0]) for node in way.merge(running, [old, new], documented.ARRIVAL)
        }
        for step in range(documented.ARRIVAL, len(cells)):
            *from_a, from_b = (int(each[1:]) for each in cells[step].split("\n"))
            assert cells[step].split("\n")[-1][0] == "B"
            if from_a:
                assert from_a[0] < merged[step] < 100 + from_b, (name, step)
            else:
                assert merged[step] == 100 + from_b, (name, step)
        assert ("" in cells) == way.stops


def test_figures_of_steps_and_of_decoders_are_readable(drawn: list[Any]) -> None:
    found = Study().figures()
    plots.denoising(found["figure 6"], OUT)
    plots.decoders(found["figure 7"], OUT, DOF)
    for figure in drawn:
        assert_readable(figure)
    assert [len(axes.get_lines()) for axes in drawn[0].axes] == [6, 6, 6]  # a line for each chunk
    assert [len(axes.get_lines()) for axes in drawn[1].axes] == [4, 4]  # and for each decoder


def test_a_roof_shows_its_ridges_and_where_time_goes_adds_up(drawn: list[Any]) -> None:
    machines = [load_hardware(name) for name in ("orin-nano", "h200")]
    plots.roofline(machines, {machine.name: small_policy() for machine in machines}, OUT, title="a policy")
    plots.placements(PLACES, OUT, "a policy")
    for figure in drawn:
        assert_readable(figure)
    low, high = drawn[0].axes[0].get_xlim()
    for machine in machines:
        assert low < machine.peak_flops("bf16") / machine.bandwidth < high
    stacks = zip(*drawn[1].axes[0].containers, strict=True)
    ends = [max(bar.get_x() + bar.get_width() for bar in bars) for bars in stacks]
    assert ends == [40.0, 6.0]  # the shortest on top


@pytest.mark.parametrize("picture", SWEEPS)
def test_intervals_of_the_page_are_those_of_its_counts(picture: str) -> None:
    _, *rows = documented.table_before(picture)
    cells = [
        cell.replace("(", " ").replace(")", "").split() for row in rows for cell in row[1:] if "(" in cell
    ]
    cells += [[row[1], *row[2].split()] for row in rows if "(" not in row[1]]
    assert len(cells) >= 6
    for share, low, _, high in cells:
        found = wilson(int(share), documented.EPISODES)
        assert [round(100 * each) for each in found] == pytest.approx([int(low), int(high)], abs=0)


def test_a_figure_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    figure, _ = figures.new()
    with pytest.raises(SinewError, match="figure.nonsense"):
        figures.save(figure, tmp_path / "figure.nonsense")
