"""Measure the closed-loop success of quantisation recipes on the built-in tasks, in pairs with float32.

    python -m benchmarks.lowbit_success pen OUT [--episodes 200] [--recipe vision=q4_0,head=int8] [--until 09:30]

A pair has the same seed and the same noise. The bundles of the recipes are written to OUT. Each recipe with 4 bits is
also played with separately rounded weights. Engine cpu plays the low-bit bundles, and engine plan plays float32. All
use one compute thread and no simulated delay.

Each slice of episodes is played with all recipes, so the results are always paired. The same command continues an
interrupted run from OUT/episodes.jsonl. ``--until`` ends the run at a time of day (UTC). The outcomes are in
OUT/TASK.json.
"""

from __future__ import annotations

import argparse
import json
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sinew_eval.episodes import campaign
from sinew_eval.episodes.runner import Episode
from sinew_eval.episodes.settings import Task, Variant
from sinew_eval.judge import GATES
from sinew_eval.report.gate import read_gate
from sinew_eval.report.stats import mcnemar

from sinew.bundle import Bundle
from sinew.core import machine
from sinew.core.statistics import wilson
from sinew.lowbit.quantization import quantize

ASSETS = Path(__file__).parents[1] / "sinew" / "assets"
TASKS: dict[str, dict[str, Any]] = {
    "pen": {"env": "sinew/Pen-v0", "bundle": "pen.gguf", "replan": 2},
    "shove": {"env": "sinew/BlocksShove-v0", "bundle": "blocks.gguf", "replan": 8},
    "blocks": {"env": "sinew/Blocks-v0", "bundle": "blocks.gguf", "replan": 8},
}
FLOAT = "fp32"
RECIPES = (
    "vision=int8,language=int8,head=int8",
    "vision=q4_0,language=q4_0,head=int8",
    "vision=q4_0,language=q4_0,head=fp32",
    "head=int8",
)
FIRST_SEED, SLICE = (
    5000,
    20,
)  # the success gates begin with the same seed; SLICE is the number of episodes in a slice


def store(bundle: Bundle, recipe: str, out: Path, calibration: int) -> Path:
    """Write the weights of a bundle in a quantisation recipe, as ``sinew quantize`` does. Returns the file."""
    alone = "" if calibration or "q4_0" not in recipe else "-alone"
    path = out / f"{bundle.path.stem}-{recipe.replace('=', '-').replace(',', '-')}{alone}.gguf"
    if not path.exists():
        quantize(
            bundle.path,
            path,
            recipe=recipe,
            calibration=calibration,
            observations=8,
            episodes=0,
            engine="cpu",
        )
    return path


def summary(task: str, episodes: dict[str, list[Episode]], files: dict[str, Path]) -> dict[str, Any]:
    """Return the success, its interval and the changes against float32 of each recipe, over the seeds that all
    recipes have."""
    outcomes = {name: {e.seed: e.success for e in played} for name, played in episodes.items()}
    recorded = GATES / f"{task}.json"
    gate = read_gate(recorded) if recorded.exists() else None
    rows = {}
    for name, won in outcomes.items():
        wins, count = sum(won.values()), len(won)
        test = mcnemar(outcomes[FLOAT], won)
        judged = [e for e in episodes[name] if gate is not None and e.seed in gate.outcomes]
        rows[name] = {
            "bytes": files[name].stat().st_size,
            "episodes": count,
            "wins": wins,
            "interval": [round(end, 4) for end in wilson(wins, count)],
            "lost": test.only_first,
            "gained": test.only_second,
            "p_value": float(f"{test.p_value:.3g}"),
            "gate": gate.judge(judged)[1] if gate is not None and judged else None,
            "outcomes": "".join(str(int(won[seed])) for seed in sorted(won)),
        }
    return {
        "task": task,
        "first_seed": FIRST_SEED,
        "hardware": machine.cpu_model(),
        "load_average": os.getloadavg()[0],
        "recipes": rows,
    }


def table(found: dict[str, Any]) -> str:
    """Return the summary as a Markdown table."""
    lines = [f"| {found['task']} | success | 95 % | lost, gained | p |", "|---|---|---|---|---|"]
    for name, row in found["recipes"].items():
        low, high = (f"{100 * end:.1f}" for end in row["interval"])
        wins = f"{row['wins']}/{row['episodes']}"
        lines.append(
            f"| {name} | {wins} | {low} to {high} % | {row['lost']}, {row['gained']} | {row['p_value']:.2g} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("out", type=Path)
    parser.add_argument("--recipe", action="append", default=[])
    parser.add_argument("--episodes", type=int, default=200)
    parser.add_argument("--until", default="", help="HH:MM in UTC; no slice begins after this time")
    arguments = parser.parse_args()
    settings, out = TASKS[arguments.task], arguments.out
    out.mkdir(parents=True, exist_ok=True)
    bundle = Bundle(ASSETS / settings["bundle"])
    files = {FLOAT: bundle.path}
    for recipe in arguments.recipe or RECIPES:
        files[recipe] = store(bundle, recipe, out, 32)
        if "q4_0" in recipe:
            files[f"{recipe}, each weight alone"] = store(bundle, recipe, out, 0)
    variants = [
        Variant(
            str(path),
            settings["replan"],
            dtype="fp32",
            device="cpu",
            engine="plan" if name == FLOAT else "cpu",
        )
        for name, path in files.items()
    ]
    played: dict[str, list[Episode]] = {name: [] for name in files}
    end = FIRST_SEED + arguments.episodes
    for first in range(FIRST_SEED, end, SLICE):
        if arguments.until and f"{datetime.now(UTC):%H:%M}" >= arguments.until:
            break
        seeds = range(first, min(first + SLICE, end))
        slices = campaign.run(Task(settings["env"]), variants, seeds, out=out)
        for name, episodes in zip(files, slices, strict=True):
            played[name] += episodes
        found = summary(arguments.task, played, files)
        (out / f"{arguments.task}.json").write_text(json.dumps(found, indent=1) + "\n")
        print(table(found), flush=True)


if __name__ == "__main__":
    main()
