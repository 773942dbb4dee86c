"""Compare streams with chunks on the falling pen at several added latencies: success over paired episodes.

    python -m benchmarks.pen_streams simulated --out OUT [--episodes 100] [--figure FILE.png]
    python -m benchmarks.pen_streams clock --out OUT [--episodes 30]

The camera has 30 frames per second, and each frame is two frames late (Ma et al. 2025, section 7). A chunk takes
27.3 ms, as the paper measured on an RTX 4090. A stream takes the same time in two parts: 16.5 ms for the prefix and
10.8 ms for the solution. A new chunk is requested when the last one arrives. The added latency is the time of both
directions of the network.

``simulated`` uses simulated time, so the outcome does not depend on the machine. The episodes are stored in OUT, and
the same command continues an interrupted run. benchmarks.figures draws the files in benchmarks/results.

``clock`` plays the same episodes in real time through the socket of a server. A forwarder delays each byte in each
direction by half of the added latency (benchmarks.split). The computation takes the time of this machine. The last
line of the output is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sinew_eval.episodes.adapters import make_env
from sinew_eval.episodes.runner import Episode, EpisodeSettings, run_episode, run_stream_episode
from sinew_eval.episodes.settings import Latency, StreamCosts
from sinew_eval.report.stats import mcnemar
from sinew_perf.hardware import Network

from benchmarks.handovers import draw_when_asked
from benchmarks.side_by_side import SideBySide
from benchmarks.soak import serving
from benchmarks.split import Link
from sinew.core import figures, machine
from sinew.core.statistics import wilson
from sinew.engine.eager.engine import EagerEngine
from sinew.policy import Policy, load
from sinew.processing import ModelInputs

BUNDLE = Path(__file__).parents[1] / "sinew" / "assets" / "pen.gguf"
ENV, CAMERA = "sinew/Pen-v0", {"camera_fps": 30, "camera_delay": 2 / 30}
CHUNK_MS, COSTS = 27.3, StreamCosts.parse("16.5:10.8")
ADDED = (0, 33, 67, 100, 133, 167, 200)
KINDS = ("chunks", "stream")
SEED = 5000

Points = dict[tuple[str, int], list[bool]]


def simulated(added: Sequence[int], episodes: int, out: Path) -> Points:
    """Play every point in simulated time. Returns the outcomes of its seeds."""
    out.mkdir(parents=True, exist_ok=True)
    log = out / "episodes.jsonl"
    lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    found = {(line["kind"], line["added_ms"], line["seed"]): line["success"] for line in lines}
    seeds = range(SEED, SEED + episodes)
    torch.set_num_threads(1)
    policy = load(BUNDLE, "cpu", engine="plan", threads=1)
    with log.open("a") as file:

        def note(kind: str, ms: int, seed: int, success: bool) -> None:
            found[kind, ms, seed] = success
            line = {"kind": kind, "added_ms": ms, "seed": seed, "success": success}
            print(json.dumps(line), file=file, flush=True)

        for ms in added:
            todo = [seed for seed in seeds if ("chunks", ms, seed) not in found]
            for seed, success in zip(todo, chunks(policy, ms, todo), strict=True):
                note("chunks", ms, seed, success)
        with remembering() as forget:
            env, adapter = make_env(ENV, env_options=CAMERA)
            for seed in seeds:
                for ms in added:
                    if ("stream", ms, seed) not in found:
                        conduct = EpisodeSettings(latency=Latency(f"{ms}ms"))
                        played = run_stream_episode(env, adapter, policy, conduct, seed, COSTS)
                        note("stream", ms, seed, played.success)
                forget()
    return {(kind, ms): [found[kind, ms, seed] for seed in seeds] for ms in added for kind in KINDS}


def chunks(policy: Policy, added_ms: int, seeds: Sequence[int]) -> list[bool]:
    """Return the outcomes of chunks at an added latency. Plays many episodes in parallel."""
    conduct = EpisodeSettings(1, Latency(f"{CHUNK_MS + added_ms:g}ms"))
    together = SideBySide(policy)

    def play(seed: int) -> Episode:
        env, adapter = make_env(ENV, env_options=CAMERA)
        draw_when_asked(env)
        return run_episode(env, adapter, together, conduct, seed)

    return [episode.success for episode in together.play(play, seeds)]


@contextlib.contextmanager
def remembering() -> Iterator[Callable[[], None]]:
    """Within the block, streams reuse the result for equal inputs and equal noise.

    Until their first action, episodes of one seed see the same frames for every added latency. Yields a function that
    clears the stored results.
    """
    known: dict[bytes, np.ndarray] = {}

    real_read, real_solve = EagerEngine.read, EagerEngine.solve

    def read(_: EagerEngine, inputs: ModelInputs, *_watch: Any) -> ModelInputs:
        return inputs

    def solve(self: EagerEngine, context: Any, noise: Any, steps: int, *how: Any) -> np.ndarray:
        arrays = (context.pixels, context.camera_mask, context.tokens, context.state, noise)
        key = hashlib.sha256(b"".join(each.tobytes() for each in arrays)).digest()
        if key not in known:
            known[key] = real_solve(self, real_read(self, context), noise, steps, *how)
        return known[key]

    EagerEngine.read, EagerEngine.solve = read, solve  # type: ignore[method-assign, assignment]
    try:
        yield known.clear
    finally:
        EagerEngine.read, EagerEngine.solve = real_read, real_solve  # type: ignore[method-assign]


def clock(added: Sequence[int], episodes: int, out: Path) -> Points:
    """Play every point in real time through the socket of a server. Points that are in OUT are not played again."""
    out.mkdir(parents=True, exist_ok=True)
    found: Points = {}
    for ms in added:
        for kind in KINDS:
            kept = out / f"{kind}-{ms}-{episodes}.json"
            if not kept.exists():
                with tempfile.TemporaryDirectory() as folder:
                    own = ("--wire", "native:0", "--engine", "plan", "--threads", 1)
                    with serving(Path(folder) / "log", BUNDLE, *own) as (address, _):
                        kept.write_text(json.dumps(drive(kind, address, ms, episodes)) + "\n")
            saved = json.loads(kept.read_text())
            found[kind, ms] = [
                i < saved["successes"] for i in range(saved["episodes"])
            ]  # the file has no outcomes of single seeds, only their number
            print(
                f"{kind} +{ms} ms: {saved['successes']} of {saved['episodes']}", file=sys.stderr, flush=True
            )
    return found


def drive(kind: str, address: str, added_ms: int, episodes: int) -> dict[str, Any]:
    """Run a robot in its own process. Returns its report."""
    link = Link(
        int(address.rpartition(":")[2]), Network("added", "", math.inf, math.inf, base_ms=added_ms / 2)
    )
    robot = ["--robot", f"gym:{ENV}", "--robot-options", json.dumps(CAMERA), "--episodes", str(episodes)]
    how = (
        ["--stream", "--set", "rtc=none"] if kind == "stream" else ["--handover", "aligned", "--replan", "1"]
    )
    command = [sys.executable, "-m", "sinew", "run", f"tcp://127.0.0.1:{link.port}", *how, *robot]
    ran = subprocess.run(
        [*command, "--set", "stale=1", "--json"], stdout=subprocess.PIPE, text=True, check=True
    )
    link.close()
    return json.loads(ran.stdout)


def summary(points: Points, paired: bool) -> list[dict[str, Any]]:
    """Return a row for each added latency."""
    rows = []
    for ms in dict.fromkeys(ms for _, ms in points):
        row: dict[str, Any] = {"added_ms": ms}
        for kind in KINDS:
            won = points[kind, ms]
            low, high = wilson(sum(won), len(won))
            row[kind] = {"wins": sum(won), "episodes": len(won), "interval": [round(low, 3), round(high, 3)]}
        if paired:
            test = mcnemar(*(dict(enumerate(points[kind, ms])) for kind in reversed(KINDS)))
            row["only_stream"], row["only_chunks"] = test.only_first, test.only_second
            row["p"] = float(f"{test.p_value:.2g}")
        rows.append(row)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as a Markdown table."""

    def cell(found: dict[str, Any]) -> str:
        low, high = (100 * each for each in found["interval"])
        return f"{found['wins']} of {found['episodes']} ({low:.0f} to {high:.0f} %)"

    lines = ["| added latency | chunks | stream |", "|---|---|---|"]
    lines += [f"| {row['added_ms']} ms | {cell(row['chunks'])} | {cell(row['stream'])} |" for row in rows]
    return "\n".join(lines)


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw success with Wilson intervals, one line for each kind."""
    figure, axis = figures.new()
    step = 0.006 * (rows[-1]["added_ms"] - rows[0]["added_ms"])
    handles = []
    for index, kind in enumerate(KINDS):
        x = [
            row["added_ms"] + step * (2 * index - 1) for row in rows
        ]  # shift the lines, so that their intervals do not overlap
        share = [row[kind]["wins"] / row[kind]["episodes"] for row in rows]
        low, high = zip(*(row[kind]["interval"] for row in rows), strict=True)
        style = {"color": figures.COLORS[index], "marker": figures.MARKERS[index], "label": kind}
        handles.append(figures.wilson_bars(axis, x, share, low, high, **style))
    axis.set_ylim(-4, 104)
    axis.set_ylabel("success, %\n(95 % Wilson intervals)")
    axis.set_xlabel("added latency, ms (lines are shifted a little)")
    axis.set_title(f"{ENV}, camera two frames late, {rows[0]['stream']['episodes']} episodes per point")
    figures.legend(figure, handles)
    figures.save(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("how", choices=("simulated", "clock"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--episodes", type=int, default=100)
    parser.add_argument(
        "--added",
        default=",".join(map(str, ADDED)),
        help="added latencies in milliseconds, separated by commas",
    )
    parser.add_argument("--figure", type=Path)
    given = parser.parse_args()
    added = [int(text) for text in given.added.split(",")]
    play: dict[str, Callable[[], Points]] = {
        "simulated": lambda: simulated(added, given.episodes, given.out),
        "clock": lambda: clock(added, given.episodes, given.out),
    }
    rows = summary(play[given.how](), given.how == "simulated")
    print(table(rows))
    if given.figure is not None:
        draw(rows, given.figure)
    about = {"schema": "sinew.benchmark.pen_streams/1", "how": given.how, "hardware": machine.cpu_model()}
    print(json.dumps({**about, "load_average": os.getloadavg(), "rows": rows}))


if __name__ == "__main__":
    main()
