"""Compare the methods of chunk merging under added delays: success, smoothness and control steps, in simulated tasks.

``python -m benchmarks.handovers --task blocks --latency 200ms,500ms --episodes 100``

A point is one method at one delay. All points play the same seeds with the same noise, and many episodes in parallel
(benchmarks.side_by_side). A method may have these additions, as in ``aligned+offsets``:

* ``offsets``: follow the targets that result from the delta actions of a chunk, instead of the delta actions
  (sinew_client.control.motion.Offsets)
* ``future``: send the policy the state at which its chunk will begin
* ``halt:LIMIT``: stop if the robot is not where the chunk expects it (sinew_client.control.handover)
* ``ema:SHARE``, ``lowpass:HZ``: filter the actions
* ``velocity:``, ``acceleration:``, ``jerk:`` and ``speed:NUMBER``: limits of the commands per second
  (docs/limits.md)
* ``edge``: refine chunks with an edge adapter (docs/edge-and-cloud.md, ``--edge-adapter``)

The method ``auto`` uses the defaults of the control loop (sinew_client.control.defaults), including the time of the
next request. ``--envelope`` plays every filter and every limit:

    python -m benchmarks.handovers --envelope --task blocks,pen,shove --episodes 40 --out /tmp/envelope

The points are stored in OUT/TASK.json, so that the same command continues an interrupted run. A larger ``--episodes``
plays the seeds that a point lacks. ``--render docs/figures`` draws a figure of the points. ``--against freeze``
compares the points in pairs.

With ``--clock``, the episodes run in real time through the socket of a real server, one after the other. Each answer
is held back until it is as old as the delay. The points are stored in OUT/TASK-clock.json. ``--limit`` is the number
of control steps that an episode may take. At 20 Hz, waiting for a second takes twenty control steps.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import gymnasium
import numpy as np
import torch
from sinew_client.control import AS_IS, choose
from sinew_client.control.defaults import AUTO, REPLAN
from sinew_eval.episodes.adapters import make_env
from sinew_eval.episodes.policies import ServerPolicy
from sinew_eval.episodes.runner import Episode, EpisodeSettings, run_episode
from sinew_eval.episodes.settings import Latency
from sinew_eval.foreign.server import serving
from sinew_eval.report.stats import mcnemar, paired_difference

from benchmarks.side_by_side import SideBySide
from sinew.core import figures
from sinew.core.statistics import wilson
from sinew.policy import load

ROOT = Path(__file__).parents[1]
ASSETS, RESULTS = ROOT / "sinew" / "assets", ROOT / "benchmarks" / "results" / "handovers"
# A unit of action sets a target 2 cm away (sinew_eval.sim.blocks). In one control step, the robot moves 1.7 cm
# towards this target. These values are a least-squares fit over 21,154 frames of research.policies.committed_demos:
# 17.3, 16.9 and 16.9 mm.
COLUMNS = [0, 1, 2]
OFFSETS = {"kind": "offsets", "action": COLUMNS, "state": COLUMNS, "scale": 0.017, "low": -1.0, "high": 1.0}
TASKS: dict[str, dict[str, Any]] = {
    "blocks": {
        "env": "sinew/Blocks-v0",
        "bundle": "blocks.gguf",
        "replan": 8,
        "limit": 400,
        "moved": 3,
        "numbers": 4,
    },
    "shove": {
        "env": "sinew/BlocksShove-v0",
        "bundle": "blocks.gguf",
        "replan": 8,
        "limit": 400,
        "moved": 3,
        "numbers": 4,
    },
    "pen": {"env": "sinew/Pen-v0", "bundle": "pen.gguf", "replan": 2, "limit": 120, "moved": 1, "numbers": 1},
}
FILTERS, LIMITS = ("ema", "lowpass"), ("velocity", "acceleration", "jerk")
# The entries are: the delay, the additions to play, and the methods to compare with. The limits fit a command whose
# range is 2 in the blocks task and 1 in the pen task.
ENVELOPES = {
    "blocks": ("200ms", "aligned+halt:1.5+offsets", ("", "ema:0.5", "lowpass:3", "lowpass:1.5", "velocity:10",
               "velocity:10+acceleration:200", "velocity:10+acceleration:200+jerk:4000", "speed:0.5")),
    "pen": ("100ms", "aligned", ("", "ema:0.5", "lowpass:10", "lowpass:5", "velocity:15",
            "velocity:15+acceleration:900", "velocity:15+acceleration:900+jerk:54000")),
}  # fmt: skip
ENVELOPES["shove"] = ENVELOPES["blocks"]
HANDOVERS = ("freeze", "naive", "aligned", "ensemble", "aggregate", "rtc:guided")


class Late(ServerPolicy):
    """A server whose answers are held back until they are ``milliseconds`` old. It plays one episode after the
    other."""

    milliseconds = 0.0

    def infer(self, observation: Mapping[str, Any], seed: int) -> tuple[np.ndarray, float]:
        sent = time.monotonic()
        images = {name: frame() for name, frame in observation["images"].items()}
        actions, _ = super().infer({**observation, "images": images}, seed)
        time.sleep(max(0.0, sent + 1e-3 * self.milliseconds - time.monotonic()))
        return actions, 1e3 * (time.monotonic() - sent)

    def play(self, episode: Callable[[int], Episode], seeds: Iterable[int], _: int) -> list[Episode]:
        return [episode(seed) for seed in seeds]


def point(
    task: dict[str, Any], policy: SideBySide | Late, handover: str, latency: str, seeds: range, width: int
) -> dict[str, Any]:
    """Play the episodes of one point. Returns a summary and the outcome of each episode."""
    method, *extras = handover.split("+")
    halts = [extra for extra in extras if extra.startswith("halt:")]
    bounds = [extra for extra in extras if extra.partition(":")[0] in (*FILTERS, *LIMITS, "speed")]
    unknown = set(extras) - {"offsets", "future", "edge", *halts, *bounds}
    if unknown:
        raise SystemExit(
            f"--handovers: unknown addition {unknown.pop()!r}; known are offsets, future, edge, halt:LIMIT,"
            f" {', '.join((*FILTERS, *LIMITS, 'speed'))}"
        )
    # A future state can only be computed if the reference of the actions is known.
    motion: dict[str, Any] | None = OFFSETS if {"offsets", "future"} & set(extras) else dict(AS_IS)
    if method == AUTO:
        motion = None
    replan = REPLAN if method == AUTO else task["replan"]
    clock = isinstance(policy, Late)
    if isinstance(policy, Late):
        policy.milliseconds = float(latency.removesuffix("ms"))
    conduct = EpisodeSettings(
        replan,
        Latency() if clock else Latency(latency),
        "+".join([method, *halts]),
        realtime=clock,
        motion=motion,
        future="future" in extras,
        edge_adapter=task["edge_adapter"] if "edge" in extras else "",
        envelope=envelope_of(bounds, task),
    )
    episodes = policy.play(episode_of(task, policy, conduct), seeds, width)
    won = [episode for episode in episodes if episode.success]
    delays = [delay for episode in episodes for delay in episode.delays]
    low, high = wilson(len(won), len(episodes))
    return {
        "handover": handover,
        "latency": latency,
        "replan": replan,
        **({"plays": str(choose(policy={"motion": policy.motion}))} if method == AUTO else {}),
        "limit": task["limit"],
        "episodes": len(episodes),
        "first_seed": seeds[0],
        "success": len(won) / len(episodes),
        "interval": [round(low, 4), round(high, 4)],
        "steps_to_success": round(float(np.mean([e.steps for e in won])), 1) if won else None,
        "seam": round(float(np.mean([e.seam for e in episodes])), 3),
        "jerk": round(float(np.mean([e.jerk for e in episodes])), 3),
        "held": round(float(np.mean([e.held for e in episodes])), 1),
        "delay_steps": round(float(np.mean(delays)), 2)
        if delays
        else None,  # None if no chunk arrived in time
        "outcomes": "".join(str(int(e.success)) for e in episodes),
    }


def envelope_of(bounds: list[str], task: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of the control loop for filters, limits and a speed.

    Args:
        bounds: The additions, such as ``ema:0.5`` or ``jerk:10``.
        task: The task.
    """
    found: dict[str, Any] = {}
    limits = {}
    for each in bounds:
        name, _, number = each.partition(":")
        if name in LIMITS:
            limits[name] = float(number)
        else:
            found |= {"filter": each} if name in FILTERS else {"speed": float(number)}
    if limits:  # limit only the numbers that move; the gripper in the blocks task is a switch
        free = [None] * (task["numbers"] - task["moved"])
        each_of = {name: [number] * task["moved"] + free for name, number in {**limits, "still": 0.0}.items()}
        found["limits"] = each_of
    return found


def episode_of(task: dict[str, Any], policy: Any, conduct: EpisodeSettings) -> Callable[[int], Episode]:
    """Return a function that plays one seed of a task."""

    def play(seed: int) -> Episode:
        env, adapter = make_env(task["env"], env_options={"max_episode_steps": task["limit"]})
        draw_when_asked(env)
        return run_episode(env, adapter, policy, conduct, seed)

    return play


class Drawing:
    """A frame that is drawn when it is read. It must be read in the control step that returned it."""

    def __init__(self, view: Callable[..., np.ndarray], arguments: tuple[Any, ...]):
        self._view, self._arguments = view, arguments

    def __call__(self) -> np.ndarray:
        return self._view(*self._arguments)

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return np.asarray(self(), dtype)


def draw_when_asked(env: gymnasium.Env) -> None:
    """Let an environment of sinew_eval.sim draw a frame only if a policy or an edge adapter reads the frame."""
    base: Any = env.unwrapped
    view = base.view
    base.view = lambda *arguments: Drawing(view, arguments)


def table(points: list[dict[str, Any]]) -> str:
    """Return a Markdown table of the points, with a row for each method and a column for each latency."""
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


def against(points: list[dict[str, Any]], reference: str) -> str:
    """Return a line for each point: its success minus the success of ``reference`` for the same delay and seeds, in
    pairs."""
    lines = []
    for there in points:
        found = [
            p
            for p in points
            if p["handover"] == reference
            and (p["latency"], p["first_seed"]) == (there["latency"], there["first_seed"])
        ]
        if not found or found[0] is there:
            continue
        own, other = ({s: each == "1" for s, each in enumerate(p["outcomes"])} for p in (there, found[0]))
        test = mcnemar(own, other)
        difference, low, high = (100 * value for value in paired_difference(own, other))
        lines.append(
            f"{there['latency']} {there['handover']} every {there['replan']}: {difference:+.1f} points"
            f" ({low:.1f} to {high:.1f}) of {reference}, {test.only_first} against {test.only_second} of"
            f" {test.pairs} pairs, p = {test.p_value:.2g}; steps {there['steps_to_success']} against"
            f" {found[0]['steps_to_success']}"
        )
    return "\n".join(lines)


def figure(points: list[dict[str, Any]], path: Path, title: str) -> None:
    """Draw success, jerk and control steps, with a row for each method and a mark for each delay."""
    latencies = sorted({_milliseconds(p) for p in points})
    # the best method is at the top
    names = sorted({p["handover"] for p in points}, key=lambda name: _rank(points, name))
    row = max(0.42, 0.13 * len(latencies))  # height of a row in inches
    fig, axes = figures.new(
        1, 3, width=8.4, height=1.7 + row * len(names), sharey=True, width_ratios=(4, 3, 3)
    )
    apart = min(0.22, 0.75 / len(latencies))
    handles = []
    for index, latency in enumerate(latencies):
        own = [p for p in points if _milliseconds(p) == latency]
        y = [names.index(p["handover"]) - apart * (index - (len(latencies) - 1) / 2) for p in own]
        look = (
            len(latencies) - 1 - index
        )  # count from the longest delay, so that it has the same mark in every figure
        style = {"color": figures.COLORS[look], "marker": figures.MARKERS[look], "linestyle": "none"}
        x = [100 * p["success"] for p in own]
        spread = [[max(0.0, v - 100 * p["interval"][0]) for v, p in zip(x, own, strict=True)],
                  [max(0.0, 100 * p["interval"][1] - v) for v, p in zip(x, own, strict=True)]]  # fmt: skip
        label = f"delay {latency:g} ms"
        handles.append(axes[0].errorbar(x, y, xerr=spread, capsize=3, markersize=6, label=label, **style))
        axes[1].plot([p["jerk"] for p in own], y, markersize=6, **style)
        taken = [p["steps_to_success"] for p in own]
        axes[2].plot([np.nan if t is None else t for t in taken], y, markersize=6, **style)
    axes[0].set_yticks(range(len(names)), names)
    axes[0].set(xlabel="success, % (95 % Wilson)", xlim=(-4, 104), ylim=(-0.6, len(names) - 0.4))
    axes[1].set(
        xlabel="jerk of the commands,\nper step\u00b3", xlim=(0, 1.08 * max(p["jerk"] for p in points))
    )
    axes[2].set(
        xlabel="control steps\nto success", xlim=(0, 1.08 * max(p["steps_to_success"] or 0 for p in points))
    )
    counts = sorted({p["episodes"] for p in points})
    fig.suptitle(f"{title}, {' or '.join(map(str, counts))} episodes per point", fontsize=10)
    figures.legend(fig, handles)
    figures.save(fig, path)


def _rank(points: list[dict[str, Any]], handover: str) -> float:
    """Return the mean success of a method over its delays."""
    return float(np.mean([p["success"] for p in points if p["handover"] == handover]))


def _milliseconds(point: dict[str, Any]) -> float:
    return float(point["latency"].removesuffix("ms"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", default="blocks", help=f"{', '.join(TASKS)}, separated by commas")
    parser.add_argument(
        "--envelope", action="store_true", help="play every filter and limit, at the delay of the task"
    )
    parser.add_argument("--latency", default="200ms,500ms", help="added delays, separated by commas")
    parser.add_argument("--handovers", default=",".join(HANDOVERS))
    parser.add_argument("--episodes", type=int, default=100)
    parser.add_argument("--seed", type=int, default=5000)
    parser.add_argument(
        "--limit", type=int, help="largest number of control steps of an episode (default: 400, pen 120)"
    )
    parser.add_argument("--replan", type=int, help="control steps between two requests (default: 8, pen 2)")
    parser.add_argument("--width", type=int, default=25, help="number of episodes in parallel")
    parser.add_argument(
        "--bundle", type=Path, help="another policy for the task; its points are stored in another file"
    )
    parser.add_argument(
        "--edge-adapter", help="edge adapter for methods with +edge (default: the adapter in the package)"
    )
    parser.add_argument("--engine", default="plan")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument(
        "--clock", action="store_true", help="play in real time through the socket of a server"
    )
    parser.add_argument(
        "--render",
        type=Path,
        help="folder for figures; prints the tables of stored points and plays nothing",
    )
    parser.add_argument(
        "--against", help="a method; prints the paired difference of every stored point, and plays nothing"
    )
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    tasks = arguments.task.split(",")
    if unknown := [name for name in tasks if name not in TASKS]:
        raise SystemExit(f"--task: expected {', '.join(TASKS)}, got {unknown[0]!r}")
    for name in tasks:
        arguments.task = name
        if arguments.envelope:
            arguments.latency, base, bounds = ENVELOPES[name]
            arguments.handovers = ",".join(f"{base}+{each}" if each else base for each in bounds)
        run(arguments)


def run(arguments: argparse.Namespace) -> None:
    """Play the points of one task, or show the stored points."""
    other = f"-with-{arguments.bundle.stem}" if arguments.bundle else ""
    path = arguments.out / f"{arguments.task}{other}{'-clock' * arguments.clock}.json"
    points: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []
    if arguments.against:
        print(against(points, arguments.against))
        return
    if arguments.render:
        print(table(points))
        figure(points, arguments.render / f"{path.stem}_handovers.png", path.stem)
        return
    task = dict(TASKS[arguments.task])
    task["limit"] = arguments.limit or task["limit"]
    task["replan"] = arguments.replan or task["replan"]
    packaged = ASSETS / task["bundle"].replace(".gguf", "-edge.safetensors")
    task["edge_adapter"] = arguments.edge_adapter or str(packaged)
    bundle = arguments.bundle or ASSETS / task["bundle"]
    with ExitStack() as stack:
        policy: SideBySide | Late
        if arguments.clock:
            log = stack.enter_context(TemporaryDirectory())
            served = serving(bundle, Path(log) / "log", "--engine", arguments.engine, "--threads", "1")
            policy = Late(stack.enter_context(served), None)
            stack.callback(policy.close)
        else:
            torch.set_num_threads(1)
            policy = SideBySide(load(str(bundle), "cpu", engine=arguments.engine, threads=1))
        play(arguments, task, policy, points, path)
    print(table(points))


def play(
    arguments: argparse.Namespace,
    task: dict[str, Any],
    policy: SideBySide | Late,
    points: list[dict[str, Any]],
    path: Path,
) -> None:
    """Play the points and episodes that are not stored yet. Writes each point when it is complete."""
    end = arguments.seed + arguments.episodes
    for latency in arguments.latency.split(","):
        for handover in arguments.handovers.split(","):
            place = lookup(arguments, task, points, handover, latency)
            before = points[place] if place < len(points) else None
            seeds = range(arguments.seed + (before["episodes"] if before else 0), end)
            if not seeds:
                continue
            limit = before["limit"] if before else task["limit"]
            cpu = time.process_time()
            found = point({**task, "limit": limit}, policy, handover, latency, seeds, arguments.width)
            points[place : place + 1] = [joined(before, found) if before else found]
            path.write_text(
                "[\n" + ",\n".join(json.dumps(p, separators=(",", ":")) for p in points) + "\n]\n"
            )
            spent = f"{time.process_time() - cpu:.1f} s of CPU"
            print(
                f"{handover:20} {latency:>7} {_cell(points[place])} {_smooth(points[place])} {spent}",
                flush=True,
            )


def lookup(
    arguments: argparse.Namespace,
    task: dict[str, Any],
    points: list[dict[str, Any]],
    handover: str,
    latency: str,
) -> int:
    """Return the index of the stored point with this method, latency and first seed, or the index for a new point.

    Without ``--limit``, a stored point may have any limit and keeps its limit.
    """
    wanted = {
        "handover": handover,
        "latency": latency,
        "replan": REPLAN if handover == AUTO else task["replan"],
        "first_seed": arguments.seed,
    }
    if arguments.limit:
        wanted["limit"] = arguments.limit
    for place, there in enumerate(points):
        if wanted.items() <= there.items():
            return place
    return len(points)


def joined(first: dict[str, Any], then: dict[str, Any]) -> dict[str, Any]:
    """Return one point with the episodes of two points. The points differ only in their seeds, which follow each
    other."""
    parts = (first, then)
    outcomes = first["outcomes"] + then["outcomes"]
    won = outcomes.count("1")
    low, high = wilson(won, len(outcomes))

    def mean(name: str, digits: int, of: str = "01") -> float | None:
        """Return the mean over the episodes with these outcomes."""
        counts = [sum(map(part["outcomes"].count, of)) for part in parts]
        known = [
            (part[name], count)
            for part, count in zip(parts, counts, strict=True)
            if part.get(name) is not None
        ]
        total = sum(count for _, count in known)
        return round(sum(value * count for value, count in known) / total, digits) if known else None

    return {
        **first,
        "episodes": len(outcomes),
        "success": won / len(outcomes),
        "interval": [round(low, 4), round(high, 4)],
        "steps_to_success": mean("steps_to_success", 1, "1"),
        "seam": mean("seam", 3),
        "jerk": mean("jerk", 3),
        "held": mean("held", 1),
        "delay_steps": mean("delay_steps", 2),
        "outcomes": outcomes,
    }


if __name__ == "__main__":
    main()
