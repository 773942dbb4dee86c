"""Draw the figures of docs/figures: ``python -m benchmarks.figures [NAME ...]``.

Sweeps come from the tables of docs/log/measurements-closed-loop.md, so page and figure cannot differ; learning
curves from docs/log/training, hand-overs and the pen's streams from benchmarks/results, and the two of the roofline are
computed. None of them measures. The README's picture is a frame of an episode that is played for it, and shows how
long the machine took: ``film.png`` is drawn only when it is named, on a machine with EGL that does nothing else.
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

from benchmarks import pen_streams
from benchmarks.handovers import figure as handovers
from sinew.cli import main as sinew
from sinew.eval.adapters import make_env
from sinew.eval.policies import ServerPolicy
from sinew.eval.report.film import compose, shoot
from sinew.eval.report.plots import plot_replan, plot_sweep
from sinew.eval.report.stats import wilson
from sinew.eval.server import serving
from sinew.sim.film import frames as film_frames
from train.curve import plot as curve

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "docs" / "figures"
BLOCKS = ROOT / "sinew" / "assets" / "blocks.gguf"
FILMED_SEED = 5003
PAGE = ROOT / "docs" / "log" / "measurements-closed-loop.md"
EPISODES = 100  # of every point of its two sweeps


def table_before(picture: str) -> list[list[str]]:
    """Return the cells of the last table of the page before a picture, header first."""
    before, shown, _ = PAGE.read_text().partition(f"figures/{picture}")
    if not shown:
        raise SystemExit(f"{picture}: {PAGE.name} does not show it")
    found = re.findall(r"(?:^\|.*\|\n)+", before, re.MULTILINE)[-1].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in found]
    return [rows[0], *rows[2:]]


def entry(success: str, **more: Any) -> dict[str, Any]:
    """Return what a report says of one variant. success: percent, which are episodes of a hundred."""
    wins = round(float(success.split(maxsplit=1)[0]) * EPISODES / 100)
    variant = {"replan": 8, "latency": "0", "handover": "aligned", **more.pop("variant")}
    return {
        "success": wins / EPISODES,
        "interval": wilson(wins, EPISODES),
        "variant": variant,
        "delay_ms": 0,
        **more,
    }


def report(env: str, variants: list[dict[str, Any]]) -> dict[str, Any]:
    return {"task": {"env": env}, "seeds": {"count": EPISODES}, "variants": variants}


def replan(env: str, path: Path) -> None:
    """Draw a sweep over the replan interval."""
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
    """Draw a sweep over hand-over and latency."""
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
        sinew(["perf", "paper", "--plot", folder])
        path.write_bytes((Path(folder) / path.name).read_bytes())


def film(path: Path) -> None:
    """Play one episode through the real server, and draw what its film shows in the middle of the last third."""
    env, adapter = make_env("sinew/Blocks-v0")
    with tempfile.TemporaryDirectory() as folder, serving(BLOCKS, Path(folder) / "log") as address:
        policy = ServerPolicy(address, None)
        try:
            shots = shoot(policy, env, adapter, range(FILMED_SEED, FILMED_SEED + 1))
        finally:
            policy.close()
    shot = shots[round(0.73 * len(shots))]
    (scene,) = film_frames(shot.pose[None])
    picture = compose(scene, shot)
    picture.resize((picture.width * 3 // 4, picture.height * 3 // 4)).save(path, optimize=True)


LOGS = ROOT / "docs" / "log" / "training"
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
    "film.png": film,
}
MEASURED = {"film.png"}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help=f"of {', '.join(FIGURES)}; all but {', '.join(MEASURED)} if absent",
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
