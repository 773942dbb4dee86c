"""Success, smoothness and control steps of every hand-over under injected delays: paired episodes, one process.

``python -m benchmarks.handovers --task blocks --latency 100ms,400ms --episodes 40 --out build/handovers``

Every point plays the same seeds with the same noise. ``offsets`` after a hand-over (``aligned+offsets``) follows the
targets that a chunk's offsets add up to, instead of the offsets themselves (sinew_client.control.motion.Offsets);
``future`` tells the policy the state that it will act in. Results of a point are kept in OUT/TASK.json, so a run that
was ended goes on.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from sinew.eval.adapters import make_env
from sinew.eval.policies import InProcess
from sinew.eval.report.stats import wilson
from sinew.eval.runner import Conduct, run_episode
from sinew.eval.settings import Latency

ASSETS = Path(__file__).parents[1] / "sinew" / "assets"
# Measured once in sinew.sim.blocks: one unit of action is 2 cm (STEP_SIZE).
OFFSETS = {
    "kind": "offsets",
    "action": [0, 1, 2],
    "state": [0, 1, 2],
    "scale": 0.02,
    "low": -1.0,
    "high": 1.0,
}
TASKS: dict[str, dict[str, Any]] = {
    "blocks": {"env": "sinew/Blocks-v0", "bundle": "blocks.gguf", "replan": 8},
    "shove": {"env": "sinew/BlocksShove-v0", "bundle": "blocks.gguf", "replan": 8},
    "pen": {"env": "sinew/Pen-v0", "bundle": "pen.gguf", "replan": 2},
}
HANDOVERS = (
    "freeze",
    "naive",
    "aligned",
    "aligned+offsets",
    "ensemble",
    "aggregate",
    "rtc:guided",
    "rtc:guided+offsets",
    "rtc:no-jacobian",
    "rtc:ramp",
)


def point(
    task: dict[str, Any], policy: InProcess, handover: str, latency: str, seeds: range
) -> dict[str, Any]:
    """Play the episodes of one point and return their summary and outcomes."""
    method, *extras = handover.split("+")
    unknown = set(extras) - {"offsets", "future"}
    if unknown:
        raise SystemExit(f"--handovers: unknown addition {unknown.pop()!r}; known are offsets and future")
    env, adapter = make_env(task["env"])
    conduct = Conduct(
        task["replan"],
        Latency(latency),
        method,
        motion=OFFSETS if "offsets" in extras else None,
        future="future" in extras,
    )
    begun = time.perf_counter()
    episodes = [run_episode(env, adapter, policy, conduct, seed) for seed in seeds]
    won = [episode for episode in episodes if episode.success]
    low, high = wilson(len(won), len(episodes))
    return {
        "handover": handover,
        "latency": latency,
        "episodes": len(episodes),
        "success": len(won) / len(episodes),
        "interval": [low, high],
        "steps_to_success": float(np.mean([e.steps for e in won])) if won else None,
        "seam": float(np.mean([e.seam for e in episodes])),
        "jerk": float(np.mean([e.jerk for e in episodes])),
        "held": float(np.mean([e.held for e in episodes])),
        "outcomes": [e.success for e in episodes],
        "seconds": round(time.perf_counter() - begun, 1),
    }


def table(points: list[dict[str, Any]]) -> str:
    """Return the points as a Markdown table: a row per hand-over, a column per latency."""
    latencies = list(dict.fromkeys(p["latency"] for p in points))
    found = {(p["handover"], p["latency"]): p for p in points}
    lines = ["| success, % (interval) | " + " | ".join(latencies) + " |", "|---|" + "---|" * len(latencies)]
    for handover in dict.fromkeys(p["handover"] for p in points):
        cells = [found.get((handover, latency)) for latency in latencies]
        lines.append(f"| {handover} | " + " | ".join(_cell(cell) for cell in cells) + " |")
    lines += ["", "| seam, jerk, steps | " + " | ".join(latencies) + " |", "|---|" + "---|" * len(latencies)]
    for handover in dict.fromkeys(p["handover"] for p in points):
        cells = [found.get((handover, latency)) for latency in latencies]
        lines.append(f"| {handover} | " + " | ".join(_smooth(cell) for cell in cells) + " |")
    return "\n".join(lines)


def _cell(found: dict[str, Any] | None) -> str:
    if found is None:
        return "-"
    low, high = found["interval"]
    return f"{100 * found['success']:.0f} ({100 * low:.0f} to {100 * high:.0f})"


def _smooth(found: dict[str, Any] | None) -> str:
    if found is None:
        return "-"
    steps = found["steps_to_success"]
    return f"{found['seam']:.2f}, {found['jerk']:.2f}, {'-' if steps is None else f'{steps:.0f}'}"


def figure(points: list[dict[str, Any]], path: Path, title: str) -> None:
    """Draw success over latency, a line per hand-over."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    fig, axes = plt.subplots(1, 2, figsize=(10, 4), constrained_layout=True)
    for handover in dict.fromkeys(p["handover"] for p in points):
        own = [p for p in points if p["handover"] == handover]
        x = [float(p["latency"].removesuffix("ms")) for p in own]
        y = [100 * p["success"] for p in own]
        style = "--" if handover in ("freeze", "naive") else "-"
        spread = [[v - 100 * p["interval"][0] for v, p in zip(y, own, strict=True)],
                  [100 * p["interval"][1] - v for v, p in zip(y, own, strict=True)]]  # fmt: skip
        axes[0].errorbar(x, y, yerr=spread, fmt="o" + style, label=handover, capsize=2, linewidth=1.2)
        axes[1].plot(x, [p["jerk"] for p in own], "o" + style, label=handover, linewidth=1.2)
    axes[0].set(xlabel="injected delay, ms", ylabel="success, %", ylim=(-3, 103), title=title)
    axes[1].set(xlabel="injected delay, ms", ylabel="jerk of the commands", title="smoothness")
    axes[1].legend(fontsize=8)
    fig.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", choices=TASKS, default="blocks")
    parser.add_argument("--latency", default="100ms,400ms", help="injected delays, separated by commas")
    parser.add_argument("--handovers", default=",".join(HANDOVERS))
    parser.add_argument("--episodes", type=int, default=40)
    parser.add_argument("--seed", type=int, default=5000)
    parser.add_argument("--engine", default="plan")
    parser.add_argument("--out", type=Path, default=Path("build/handovers"))
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / f"{arguments.task}.json"
    points: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []
    done = {(p["handover"], p["latency"], p["episodes"]) for p in points}
    task = TASKS[arguments.task]
    policy = InProcess(str(ASSETS / task["bundle"]), "cpu", None, None, arguments.engine, 1)
    seeds = range(arguments.seed, arguments.seed + arguments.episodes)
    for latency in arguments.latency.split(","):
        for handover in arguments.handovers.split(","):
            if (handover, latency, arguments.episodes) in done:
                continue
            points.append(found := point(task, policy, handover, latency, seeds))
            path.write_text(json.dumps(points))
            print(
                f"{handover:20} {latency:>7} {_cell(found)} {_smooth(found)} {found['seconds']} s", flush=True
            )
    print(table(points))
    figure(points, arguments.out / f"{arguments.task}.png", arguments.task)


if __name__ == "__main__":
    main()
