"""Learning curve as a picture: ``python -m train.curve runs/blocks/log.json docs/figures/blocks_training.png``."""

from __future__ import annotations

import json
import sys
from pathlib import Path


def plot(log: Path, out: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    history = json.loads(log.read_text())["history"]
    losses = [h for h in history if "flow" in h]
    wins = [h for h in history if "success" in h]
    figure, left = plt.subplots(figsize=(7, 4))
    for key, label in (("flow", "flow matching"), ("auxiliary", "where things are (auxiliary)")):
        left.plot([h["cpu_seconds"] for h in losses], [h[key] for h in losses], label=label)
    left.set_yscale("log")
    left.set_xlabel("CPU-seconds, all processes")
    left.set_ylabel("loss, mean of 50 steps")
    left.grid(alpha=0.3)
    right = left.twinx()
    right.plot([h["cpu_seconds"] for h in wins], [100 * h["success"] for h in wins], "k.--", label="success")
    right.set_ylim(0, 102)
    right.set_ylabel("closed-loop success, %")
    lines = [*left.get_lines(), *right.get_lines()]
    left.legend(lines, [str(line.get_label()) for line in lines], loc="lower left")
    figure.tight_layout()
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=110)


if __name__ == "__main__":
    plot(Path(sys.argv[1]), Path(sys.argv[2]))
