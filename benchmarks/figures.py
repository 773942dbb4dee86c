"""Draw the figures in docs/figures: ``python -m benchmarks.figures [NAME ...]``.

This program measures nothing. The sources of the figures are:

* sweeps: the tables in research/log/measurements-closed-loop.md, so that the page and the figure are equal
* learning curves: research/log/training
* chunk merging, streams of the pen task, measured delays, and predictions beside played episodes:
  benchmarks/results
* the two roofline figures: computed
* ``concepts.png`` and ``late_answers.png``: drawings
* ``film.webp``, the film in the README: a new episode

The film shows how long the machine took. So this program draws ``film.webp`` only if you name it. Draw it on a machine
with EGL on which no other program runs.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from sinew_eval.demo.film import compose, shoot
from sinew_eval.episodes.adapters import make_env
from sinew_eval.episodes.policies import ServerPolicy
from sinew_eval.evidence.plots import plot_replan, plot_sweep
from sinew_eval.foreign.server import serving
from sinew_eval.sim.film import frames as film_frames
from sinew_eval.training.curve import plot as curve
from sinew_perf.success import SCHEMA

from benchmarks import pen_streams
from benchmarks.handovers import figure as handovers
from benchmarks.truth import advised_run, stored
from research.vla_perf.__main__ import main as vla_perf
from sinew.cli import main as sinew
from sinew.core import figures
from sinew.core.statistics import wilson

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "docs" / "figures"
BLOCKS = ROOT / "sinew" / "assets" / "blocks.gguf"
FILMED_SEED = 5003
PAGE = ROOT / "research" / "log" / "measurements-closed-loop.md"
EPISODES = 100  # number of episodes of each point in the two sweeps


def table_before(picture: str, page: Path = PAGE) -> list[list[str]]:
    """Return the cells of the last table before a picture in a page, with the header as the first row."""
    before, shown, _ = page.read_text().partition(f"figures/{picture}")
    if not shown:
        raise SystemExit(f"{picture}: {page.name} contains no link to this picture")
    found = re.findall(r"(?:^\|.*\|\n)+", before, re.MULTILINE)[-1].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in found]
    return [rows[0], *rows[2:]]


def entry(success: str, **more: Any) -> dict[str, Any]:
    """Return one variant in the form of an evaluation report.

    Args:
        success: Success rate in percent, over 100 episodes.
    """
    wins = round(float(success.split(maxsplit=1)[0]) * EPISODES / 100)
    variant = {"replan": 8, "latency": "0", "handover": "aligned", **more.pop("variant")}
    return {
        "episodes": EPISODES,
        "success": wins / EPISODES,
        "interval": wilson(wins, EPISODES),
        "variant": variant,
        "delay_ms": 0,
        **more,
    }


def report(env: str, variants: list[dict[str, Any]]) -> dict[str, Any]:
    return {"task": {"env": env}, "seeds": {"count": EPISODES}, "variants": variants}


def replan(env: str, path: Path) -> None:
    """Draw success against the replan interval."""
    rows = table_before(path.name)[1:]
    variants = [
        entry(
            success, control_rate_hz=float(rate), chunk_size=32,
            variant={"replan": 0 if name.startswith("full") else int(name)},
        )
        for name, success, _, _, rate in rows
    ]  # fmt: skip
    plot_replan(report(env, variants), (), path)


def latency(env: str, path: Path) -> None:
    """Draw success against the latency, for each method of chunk merging."""
    (_, *delays), *rows = table_before(path.name)
    variants = [
        entry(cell, variant={"handover": handover, "latency": delay})
        | {"delay_ms": float(delay.removesuffix(" ms"))}
        for handover, *cells in rows
        for delay, cell in zip(delays, cells, strict=True)
    ]
    plot_sweep(report(env, variants), "latency", ("handover",), path)


def points(name: str, title: str) -> Callable[[Path], None]:
    found = json.loads((ROOT / "benchmarks" / "results" / "handovers" / f"{name}.json").read_text())
    return lambda path: handovers(found, path, title)


def pen_over_latency(path: Path) -> None:
    found = json.loads((ROOT / "benchmarks" / "results" / "pen_streams.json").read_text())
    pen_streams.draw(found["rows"], path)


def roofline(path: Path) -> None:
    machines = [word for name in ("agx-orin", "rtx4090", "h200") for word in ("--hardware", name)]
    sinew(["perf", "run", "pi0", *machines, "--plot", str(path)])


def placements(path: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        vla_perf(["--plot", folder])
        path.write_bytes((Path(folder) / path.name).read_bytes())


# The boxes in the drawing of docs/concepts.md: left, bottom, width, height, title, text, colour of the edge.
BOXES: tuple[tuple[float, float, float, float, str, str, str], ...] = (
    (0.0, 7.9, 2.2, 1.6, "checkpoint", "of LeRobot, openpi,\nGR00T, OpenVLA ...", figures.GREY),
    (3.4, 7.9, 3.0, 1.6, "bundle", "one file: weights, tokenizer,\nprocessing, statistics", figures.COLORS[0]),
    (0.0, 3.1, 13.0, 3.4, "", "", figures.GREY),
    (0.3, 3.4, 2.5, 2.5, "wire", "one protocol:\nnative, openpi, http,\ngroot, lerobot, evo1", figures.COLORS[1]),
    (3.4, 3.4, 2.2, 2.5, "scheduler", "fair queue,\ndeadlines,\nbatches", figures.GREY),
    (6.2, 3.4, 6.5, 2.5, "policy", "", figures.COLORS[0]),
    (6.4, 3.6, 1.6, 1.5, "", "prepare:\nresize, tokens,\nnormalise", figures.GREY),
    (8.4, 3.6, 2.4, 1.5, "engine", "runs the model:\nvision, prefix, head", figures.COLORS[2]),
    (11.2, 3.6, 1.3, 1.5, "", "finish:\nrobot units,\nlimits", figures.GREY),
    (0.0, 0.0, 13.0, 2.2, "", "", figures.GREY),
    (0.3, 0.25, 2.5, 1.6, "client", "frames, state and\ninstruction as they are", figures.GREY),
    (3.4, 0.25, 4.6, 1.6, "loop", "one command per step, limits,\nlate chunks, holds with a reason", figures.COLORS[3]),
    (8.6, 0.25, 4.1, 1.6, "robot", "observe, act, hold: your class,\nLeRobot, ROS 2, gymnasium", figures.GREY),
)  # fmt: skip
ARROWS = (
    ((2.2, 8.7), (3.4, 8.7), "convert"),
    ((6.4, 8.7), (9.4, 5.9), "load"),
    ((2.8, 4.6), (3.4, 4.6), ""),
    ((5.6, 4.6), (6.2, 4.6), ""),
    ((8.0, 4.3), (8.4, 4.3), ""),
    ((10.8, 4.3), (11.2, 4.3), ""),
    ((1.3, 1.85), (1.3, 3.4), "observation"),
    ((1.9, 3.4), (1.9, 1.85), "action chunk"),
    ((2.8, 1.05), (3.4, 1.05), ""),
    ((8.0, 1.05), (8.6, 1.05), ""),
)


def concepts(path: Path) -> None:
    """Draw how an observation gets to the policy, and how a chunk gets back to the robot."""
    from matplotlib.patches import FancyBboxPatch

    figure, axis = figures.new(width=9.6, height=5.6)
    axis.set_axis_off()
    axis.set(xlim=(-0.2, 13.2), ylim=(-0.2, 9.8))
    for left, bottom, width, height, head, text, color in BOXES:
        axis.add_patch(
            FancyBboxPatch(
                (left, bottom), width, height, boxstyle="round,pad=0,rounding_size=0.15", fill=False, edgecolor=color,
                linewidth=1.6 if head else 0.8,
            )
        )  # fmt: skip
        top = bottom + height - 0.18
        if head:
            axis.text(left + width / 2, top, head, ha="center", va="top", weight="bold", color=color)
        axis.text(left + width / 2, top - 0.5 * bool(head), text, ha="center", va="top", fontsize=9)
    for start, end, label in ARROWS:
        axis.annotate(
            "", end, start, arrowprops={"arrowstyle": "->", "color": figures.GREY, "linewidth": 1.2}
        )
        at = ((start[0] + end[0]) / 2, (start[1] + end[1]) / 2)
        sideways = start[0] == end[0]
        axis.annotate(
            label, at, xytext=(-6 if end[1] > start[1] else 6, 0) if sideways else (4, 6), textcoords="offset points",
            ha=("right" if end[1] > start[1] else "left") if sideways else "center",
            va="center" if sideways else "bottom", fontsize=9,
        )  # fmt: skip
    axis.text(12.9, 6.68, "sinew serve", ha="right", va="bottom", weight="bold", color=figures.GREY)
    axis.text(12.9, 2.38, "sinew run", ha="right", va="bottom", weight="bold", color=figures.GREY)
    figures.save(figure, path)


# The timeline of docs/late-answers.md. Chunk A runs from step 0. The frame of chunk B is from step 3, and it arrives at
# step 6. Each entry names the source of steps 0 to 11, and "" is a step without a command.
FRAME, ARRIVAL = 3, 6
MERGED: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("freeze", ("A0", "A1", "A2", "", "", "", "B0", "B1", "B2", "B3", "B4", "B5")),
    ("naive", ("A0", "A1", "A2", "A3", "A4", "A5", "B0", "B1", "B2", "B3", "B4", "B5")),
    ("aligned", ("A0", "A1", "A2", "A3", "A4", "A5", "B3", "B4", "B5", "B6", "B7", "B8")),
    ("ensemble", ("A0", "A1", "A2", "A3", "A4", "A5", "A6\nB3", "A7\nB4", "A8\nB5", "A9\nB6", "B7", "B8")),
    ("aggregate", ("A0", "A1", "A2", "A3", "A4", "A5", "A6\nB3", "A7\nB4", "A8\nB5", "A9\nB6", "B7", "B8")),
    ("rtc", ("A0", "A1", "A2", "A3", "A4", "A5", "B3", "B4", "B5", "B6", "B7", "B8")),
)


def late_answers(path: Path) -> None:
    """Draw which actions each way of merging executes when a chunk arrives three control steps late."""
    from matplotlib.patches import Rectangle

    figure, axis = figures.new(width=9.6, height=4.6)
    axis.set_axis_off()
    axis.set(xlim=(-2.2, 12.2), ylim=(-0.9, len(MERGED) + 1.3))
    colors = {"A": figures.COLORS[0], "B": figures.COLORS[1], "": figures.GREY}
    for level, (name, steps) in enumerate(reversed(MERGED)):
        axis.text(-0.2, level + 0.5, name, ha="right", va="center", weight="bold")
        for step, text in enumerate(steps):
            for part, row in enumerate(reversed(text.split("\n"))):
                height = 0.8 / (1 + text.count("\n"))
                box = (step + 0.05, level + 0.1 + part * height)
                color = colors[row[:1]]
                axis.add_patch(Rectangle(box, 0.9, height, facecolor=color, alpha=0.25, edgecolor=color))
                axis.text(
                    step + 0.5, box[1] + height / 2, row or "hold", ha="center", va="center", fontsize=9
                )
    for step in range(12):
        axis.text(step + 0.5, -0.3, str(step), ha="center", va="center", fontsize=9)
    axis.text(-0.2, -0.3, "control step", ha="right", va="center", fontsize=9)
    top = len(MERGED)
    for at, text, side in (
        (FRAME, "frame of chunk B,\nrequest is sent", "right"),
        (ARRIVAL, "chunk B arrives,\nd = 3 steps late", "left"),
    ):
        axis.plot([at, at], [0.0, top + 0.25], color=figures.GREY, linestyle="--", linewidth=1.2)
        axis.text(at, top + 0.35, text, ha=side, va="bottom", fontsize=9)
    figures.save(figure, path)


def measured_delays(path: Path) -> None:
    """Draw the errors of the delays that `sinew doctor --delays` measures, over the true delays (benchmarks.delays)."""
    figure, axis = figures.new(height=3.6)
    rows = json.loads((ROOT / "benchmarks" / "results" / "delays.json").read_text())
    handles = []
    for number, (of, label) in enumerate(
        (("state", "actuators, by the state"), ("image", "camera, by the image"))
    ):
        own = [row for row in rows if row["of"] == of]
        # Points are drawn apart, so that their bars do not overlap.
        x = [row["true"] + 0.6 * (index % 6 - 2.5) for index, row in enumerate(own)]
        y = [row["measured"] - row["true"] for row in own]
        ends = [[row["measured"] - row["low"] for row in own], [row["high"] - row["measured"] for row in own]]
        style = {"color": figures.COLORS[number], "marker": figures.MARKERS[number], "linestyle": "none"}
        handles.append(
            axis.errorbar(x, y, yerr=ends, capsize=2, markersize=4, linewidth=1.0, label=label, **style)
        )
    for bound in (-3.0, 3.0):
        axis.axhline(bound, color=figures.GREY, linestyle="--", linewidth=1.0)
    axis.set_xlabel("true delay, ms")
    axis.set_ylabel("error of the measured delay, ms")
    axis.set_ylim(-6.5, 6.5)
    figures.legend(figure, handles)
    figures.save(figure, path)


def played(row: dict[str, Any]) -> tuple[float, float, float]:
    """Return the success of played episodes with its interval, each from 0 to 1."""
    return row["wins"] / row["episodes"], *row["interval"]


def side_by_side(
    path: Path, labels: list[str], series: dict[str, list[tuple[float, float, float]]], title: str
) -> None:
    """Draw success rates with intervals: one row for each label, one mark for each series."""
    figure, axis = figures.new(width=8.4, height=1.4 + 0.5 * len(labels))
    handles = []
    apart = 0.26
    for number, (name, rates) in enumerate(series.items()):
        x = [100 * rate for rate, _, _ in rates]
        y = [len(labels) - 1 - row - apart * (number - (len(series) - 1) / 2) for row in range(len(labels))]
        ends = [
            [100 * (rate - low) for rate, low, _ in rates],
            [100 * (high - rate) for rate, _, high in rates],
        ]
        style = {"color": figures.COLORS[number], "marker": figures.MARKERS[number], "linestyle": "none"}
        handles.append(axis.errorbar(x, y, xerr=ends, capsize=3, markersize=6, label=name, **style))
    axis.set_yticks(range(len(labels)), labels[::-1])
    axis.set(xlabel="success, % (95 % interval)", xlim=(-3, 103), ylim=(-0.6, len(labels) - 0.4), title=title)
    figures.legend(figure, handles)
    figures.save(figure, path)


def need_success(path: Path) -> None:
    """Draw the pen's success over latency, with the latencies of three machines: `sinew perf need --success`."""
    (_, *latencies), *rows = table_before("pen_latency.png")
    variants = [
        {
            "variant": {"handover": handover, "replan": "2", "latency": latency.replace(" ", "")},
            "wins": round(float(cell.split(maxsplit=1)[0]) * EPISODES / 100),
            "episodes": EPISODES,
        }
        for handover, *cells in rows
        for latency, cell in zip(latencies, cells, strict=True)
    ]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "report.json"
        found = {"schema": SCHEMA, "control_hz": 60.0, **report("sinew/Pen-v0", variants)}
        file.write_text(json.dumps(found))
        machines = ["--model", "pi0.5", "--hardware", "thor,rtx4090,h100", "--network", "wifi7,5g"]
        sinew(["perf", "need", "--success", "0.95", "--report", str(file), *machines, "--plot", str(path)])


def need_truth(path: Path) -> None:
    """Draw the success that `sinew perf need --success` predicts, and the success of new episodes."""
    rows = stored("need")

    def label(row: dict[str, Any]) -> str:
        mean, _, deviation = row["latency"].removeprefix("normal:").removesuffix("ms").partition(",")
        return f"{row['task']}, {mean}{f' ± {deviation}' if deviation else ''} ms"

    pairs = {
        "predicted": [tuple(row["predicted"]) for row in rows],
        "played": [played(row["played"]) for row in rows],
    }
    side_by_side(path, [label(row) for row in rows], pairs, "success at a latency")


def advice_truth(path: Path) -> None:
    """Draw the success with the settings of a recorded run, and with the settings of its advice."""
    rows = [row for row in stored("advise") if "advised" in row]
    labels = [f"{run}\nadvice: {advice}".replace("`", "") for run, advice in map(advised_run, rows)]
    pairs = {"as recorded": "before", "as advised": "after"}
    series = {name: [played(row[key]) for row in rows] for name, key in pairs.items()}
    side_by_side(path, labels, series, "advice from recordings")


def film(path: Path) -> None:
    """Play one episode with a real server, and draw a film of half its size. The film has the speed of the robot."""
    env, adapter = make_env("sinew/Blocks-v0")
    with tempfile.TemporaryDirectory() as folder, serving(BLOCKS, Path(folder) / "log") as address:
        policy = ServerPolicy(address, None)
        try:
            shots = shoot(policy, env, adapter, range(FILMED_SEED, FILMED_SEED + 1))
        finally:
            policy.close()
    shots = shots[::-2][::-1]  # keep every second frame, and always the last frame, which shows the result
    first, *others = (
        compose(scene, shot).reduce(2)
        for scene, shot in zip(film_frames(np.stack([shot.pose for shot in shots])), shots, strict=True)
    )
    durations = [round(2e3 / adapter.control_hz)] * len(others) + [2000]
    first.save(
        path, save_all=True, append_images=others, duration=durations, loop=0, quality=25, method=6, minimize_size=True
    )  # fmt: skip


LOGS = ROOT / "research" / "log" / "training"
FIGURES: dict[str, Callable[[Path], None]] = {
    "blocks_replan.png": lambda path: replan("sinew/Blocks-v0", path),
    "shove_replan.png": lambda path: replan("sinew/BlocksShove-v0", path),
    "blocks_latency.png": lambda path: latency("sinew/Blocks-v0", path),
    "pen_latency.png": lambda path: latency("sinew/Pen-v0", path),
    "pen_streams.png": pen_over_latency,
    "blocks_training.png": lambda path: curve(LOGS / "blocks_training.json", path),
    "pen_training.png": lambda path: curve(LOGS / "pen_training.json", path),
    "blocks_handovers.png": points("blocks", "blocks.gguf"),
    "shove_handovers.png": points("shove", "shove, blocks.gguf"),
    "pen_handovers.png": points("pen", "pen.gguf"),
    "blocks-with-blocks-rtc_handovers.png": points("blocks-with-blocks-rtc", "blocks-rtc.gguf"),
    "roofline_pi0.png": roofline,
    "placements.png": placements,
    "concepts.png": concepts,
    "late_answers.png": late_answers,
    "delays.png": measured_delays,
    "need_success.png": need_success,
    "need_truth.png": need_truth,
    "advice_truth.png": advice_truth,
    "film.webp": film,
}
MEASURED = {"film.webp"}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help=f"of {', '.join(FIGURES)}; all but {', '.join(MEASURED)} by default",
    )
    parser.add_argument("--out", type=Path, default=OUT)
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - FIGURES.keys():
        sys.exit(f"{unknown.pop()}: expected one of {', '.join(FIGURES)}")
    for name in arguments.names or [each for each in FIGURES if each not in MEASURED]:
        FIGURES[name](arguments.out / name)
        print(arguments.out / name, file=sys.stderr)


if __name__ == "__main__":
    main()
