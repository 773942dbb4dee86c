"""Draw the learning curve of a run: ``python -m sinew_eval.training.curve runs/log.json docs/figures/training.png``."""

from __future__ import annotations

import sys
from pathlib import Path

from sinew.core import figures
from sinew.core.statistics import wilson
from sinew_client.untrusted import read_json

LOSSES = (
    ("flow", "loss of flow matching"),
    ("distance", "mean distance of the chunk, normalised"),
    ("auxiliary", "loss of the auxiliary head (where things are)"),
)


def plot(log: Path, out: Path) -> None:
    """Draw the closed-loop success above and the losses below, over CPU-seconds.

    Args:
        log: The training log, ``log.json``.
        out: File of the figure.
    """
    record = read_json(log)
    history, recipe = record["history"], record["recipe"]
    # Every process plays its own episodes.
    episodes = recipe["episodes"] * recipe["ranks"]
    losses = [h for h in history if "success" not in h]
    wins = [h for h in history if "success" in h]
    figure, (above, below) = figures.new(2, height=4.8, sharex=True, height_ratios=(2, 3))
    low, high = zip(*(wilson(round(h["success"] * episodes), episodes) for h in wins), strict=True)
    figures.wilson_bars(
        above, [h["cpu_seconds"] for h in wins], [h["success"] for h in wins], low, high,
        color=figures.GREY, marker="o",
    )  # fmt: skip
    above.set_ylim(-4, 104)
    above.set_ylabel(f"success, %, of {episodes}\n(95 % Wilson)")
    above.set_title(f"{log.stem.removesuffix('_training')}: closed loop and losses during training")
    kinds, handles = [kind for kind in LOSSES if kind[0] in losses[0]], []
    for (key, label), color, line in zip(kinds, figures.COLORS, ("-", "--"), strict=False):
        seconds, values = [h["cpu_seconds"] for h in losses], [h[key] for h in losses]
        handles += below.plot(seconds, values, label=label, color=color, linestyle=line, linewidth=1.4)
    below.set_yscale("log")
    figures.plain_ticks(below.yaxis, [h[key] for h in losses for key, _ in kinds])
    below.set_xlim(left=0)
    below.set_xlabel("CPU-seconds, all processes")
    below.set_ylabel("loss, mean of 50 steps")
    figures.legend(figure, handles, columns=1)
    figures.save(figure, out)


if __name__ == "__main__":
    plot(Path(sys.argv[1]), Path(sys.argv[2]))
