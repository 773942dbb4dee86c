"""Success over added latency on the falling pen with the seed's camera: a stream against chunks, paired episodes.

    python -m benchmarks.pen_streams simulated --out OUT [--episodes 100] [--figure docs/figures/pen_streams.png]
    python -m benchmarks.pen_streams clock --out OUT [--episodes 30]

The camera has 30 frames a second and each is two frames late (Ma et al. 2025, section 7). A chunk takes 27.3 ms, as the
paper measured on an RTX 4090; a stream's prefix and solution take the same in two parts, 16.5 and 10.8 ms. Chunks are
asked for again as soon as one is there. The added latency is the way there and back, beside what is computed. In
simulated time (sinew.eval.campaign) the outcome does not depend on the machine; points are kept in OUT, so a run that
was ended goes on. ``clock`` plays the same through a real server's socket, behind a forwarder that delays each byte by
half of it (benchmarks.split), with what this machine needs to compute. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.soak import serving
from benchmarks.split import Link
from sinew import machine
from sinew.eval import campaign
from sinew.eval.report.stats import mcnemar, wilson
from sinew.eval.settings import Latency, Task, Variant
from sinew.perf.hardware import Network

BUNDLE = Path(__file__).parents[1] / "sinew" / "assets" / "pen.gguf"
ENV, CAMERA = "sinew/Pen-v0", {"camera_fps": 30, "camera_delay": 2 / 30}
CHUNK_MS, PREFIX_MS, HEAD_MS = 27.3, 16.5, 10.8
ADDED = (0, 33, 67, 100, 133, 167, 200)
KINDS = ("chunks", "stream")
SEED = 5000

Points = dict[tuple[str, int], list[bool]]


def simulated(added: Sequence[int], episodes: int, out: Path, workers: int) -> Points:
    """Play every point in simulated time, and return the outcomes of its seeds."""
    points = [(kind, ms) for ms in added for kind in KINDS]
    variants = [variant(kind, ms) for kind, ms in points]

    def show(played: Variant, episode: Any) -> None:
        kind, ms = points[variants.index(played)]
        print(f"{kind} +{ms} ms, seed {episode.seed}: {episode.success}", file=sys.stderr, flush=True)

    task = Task(env=ENV, env_options=CAMERA)
    found = campaign.run(
        task, variants, range(SEED, SEED + episodes), workers=workers, out=out, on_episode=show
    )
    return {point: [each.success for each in episodes] for point, episodes in zip(points, found, strict=True)}


def variant(kind: str, added_ms: int) -> Variant:
    """Return a point as ``sinew eval`` would play it."""
    if kind == "stream":
        costs = f"{PREFIX_MS}:{HEAD_MS}"
        return Variant(
            str(BUNDLE), latency=Latency(f"{added_ms}ms"), device="cpu", engine="plan", stream=costs
        )
    latency = Latency(f"{CHUNK_MS + added_ms:g}ms")
    return Variant(str(BUNDLE), replan=1, latency=latency, device="cpu", engine="plan")


def clock(added: Sequence[int], episodes: int, out: Path) -> Points:
    """Play every point through a server's socket by the clock. Points that are in OUT are not played again."""
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
            told = json.loads(kept.read_text())
            found[kind, ms] = [
                i < told["successes"] for i in range(told["episodes"])
            ]  # seeds are not told apart
            print(f"{kind} +{ms} ms: {told['successes']} of {told['episodes']}", file=sys.stderr, flush=True)
    return found


def drive(kind: str, address: str, added_ms: int, episodes: int) -> dict[str, Any]:
    """Run a robot in a process of its own; return what it says at its end."""
    link = Link(
        int(address.rpartition(":")[2]), Network("added", "", math.inf, math.inf, base_ms=added_ms / 2)
    )
    robot = ["--robot", f"gym:{ENV}", "--robot-options", json.dumps(CAMERA), "--episodes", str(episodes)]
    verb = (
        ["stream", "--rtc", "none"] if kind == "stream" else ["run", "--handover", "aligned", "--replan", "1"]
    )
    command = [sys.executable, "-m", "sinew", verb[0], f"tcp://127.0.0.1:{link.port}", *verb[1:], *robot]
    ran = subprocess.run([*command, "--stale", "1"], stdout=subprocess.PIPE, text=True, check=True)
    link.close()
    return json.loads(ran.stdout.splitlines()[-1])


def summary(points: Points, paired: bool) -> list[dict[str, Any]]:
    """Return a row per added latency."""
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
    """Write the figure: success with Wilson intervals, a line each."""
    from sinew.eval.report.plots import lines_over

    entries = {
        kind: [
            {"success": row[kind]["wins"] / row[kind]["episodes"], "interval": row[kind]["interval"]}
            for row in rows
        ]
        for kind in KINDS
    }
    title = f"{ENV}, camera 30 fps and two frames late, {rows[0]['stream']['episodes']} episodes per point"
    lines_over([row["added_ms"] for row in rows], entries, "added latency, ms", title, path)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("how", choices=("simulated", "clock"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--episodes", type=int, default=100)
    parser.add_argument(
        "--added", default=",".join(map(str, ADDED)), help="milliseconds, separated by commas"
    )
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--figure", type=Path)
    given = parser.parse_args()
    added = [int(text) for text in given.added.split(",")]
    play: dict[str, Callable[[], Points]] = {
        "simulated": lambda: simulated(added, given.episodes, given.out, given.workers),
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
