"""The closed-loop demo: the trained policy of the package, behind the real server, moves simulated blocks.

Success and latency are measured through the client over the socket. Then the same server is asked again with
injected latency, to show what late actions cost under three ways of taking a late chunk over: aligned, naive, and
real-time chunking.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from sinew.core import SinewError
from sinew.eval.adapters import make_env
from sinew.eval.policies import Remote
from sinew.eval.report import stats
from sinew.eval.report.animation import write_gif
from sinew.eval.report.film import shoot, write_film
from sinew.eval.report.plots import write_plots
from sinew.eval.report.report import document, success_cells
from sinew.eval.report.view import View
from sinew.eval.server import serving
from sinew.eval.settings import Task, Variant, sweep

BUNDLE = Path(__file__).resolve().parents[1] / "assets" / "blocks.gguf"
ENV, FIRST_SEED, FILMED = "sinew/Blocks-v0", 5000, 4
SWEEP = ("handover=aligned,naive,rtc:ramp", "latency=0,200,400ms")
GIF, FILM = "closed_loop.gif", "film.webp"


def run(
    out_dir: Path,
    episodes: int = 50,
    console: Console | None = None,
    *,
    bundle: Path = BUNDLE,
    sweep_episodes: int = 20,
    film: bool = False,
) -> dict[str, Any]:
    """Writes an animation, a figure of success over injected latency, and ``report.json`` into ``out_dir``.

    sweep_episodes: per point of the figure; 0 leaves it out. film: another animation, larger, by MuJoCo's renderer.
    Returns the report. Raises :class:`SinewError` when the bundle is missing, the server does not start, or there is
    nothing to draw the film with.
    """
    console = console or Console(highlight=False, emoji=False)
    if film:
        from sinew.sim.film import backend

        console.print(f"film       drawn by MuJoCo through {backend()}")
    if not bundle.is_file():
        raise SinewError(f"{bundle}: the trained demo policy is missing")
    out_dir.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    console.print(f"server     starting with {bundle.name}", soft_wrap=True)
    with serving(bundle, out_dir / "serve.log") as address:
        console.print(f"server     ready on {address} after {time.perf_counter() - started:.1f} s")
        report = _drive(address, out_dir, episodes, sweep_episodes, console, film)
    if sweep_episodes:
        write_plots(report["injected_latency"], out_dir)
    (out_dir / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    names = sorted(
        path.name for path in out_dir.iterdir() if path.suffix in (".gif", ".json", ".png", ".webp")
    )
    seconds = time.perf_counter() - started
    console.print(f"wrote      {', '.join(names)} into {out_dir}; {seconds:.0f} s in all", soft_wrap=True)
    return report


def _drive(
    address: str, out_dir: Path, episodes: int, sweep_episodes: int, console: Console, film: bool
) -> dict[str, Any]:
    """What happens while the server runs."""
    task, base = Task(ENV), Variant(address)
    env, adapter = make_env(task.env, render_mode="rgb_array", render_size=256)
    policy = Remote(address, None)
    try:
        view = View(console, policy, env, adapter)
        results = view.play([base], range(FIRST_SEED, FIRST_SEED + episodes), film=FILMED)
        report = document(task, adapter.control_hz, [base], results, workers=1)
        report["stages_ms"] = {name: stats.summarize(values) for name, values in view.stages.items()}
        write_gif(view.frames, out_dir / GIF, adapter.control_hz, view.pauses)
        if film:
            shots = shoot(policy, env, adapter, range(FIRST_SEED, FIRST_SEED + FILMED // 2))
            write_film(shots, out_dir / FILM, adapter.control_hz)
        _print_run(report, console)
        if sweep_episodes:
            why = str(policy.client.metadata()["server"].get("unguided", ""))
            variants = [v for v in sweep(base, SWEEP) if not (why and v.handover.startswith("rtc"))]
            if why:
                console.print(f"no real-time chunking: {why}", soft_wrap=True)
            results = view.play(variants, range(FIRST_SEED, FIRST_SEED + sweep_episodes))
            report["injected_latency"] = document(task, adapter.control_hz, variants, results, workers=1)
            _print_sweep(report["injected_latency"], console)
        return report
    finally:
        policy.close()
        env.close()


def _print_run(report: dict[str, Any], console: Console) -> None:
    entry = report["variants"][0]
    wins, interval, steps = success_cells(entry)
    console.print(
        f"success    {wins}, 95 % interval {interval} %, {steps} steps on average; seeds"
        f" {report['seeds']['first']} and up, a new chunk every {entry['variant']['replan']} actions",
        soft_wrap=True,
    )
    table = Table(title=f"milliseconds per request over {entry['chunks']} requests, seen from the client")
    table.add_column("")
    for name in ("p50", "p95", "p99", "max"):
        table.add_column(name, justify="right")
    for stage, values in report["stages_ms"].items():
        table.add_row(stage, *(f"{values[name]:.2f}" for name in ("p50", "p95", "p99", "max")))
    console.print(table)
    console.print(
        f"{entry['chunk_rate_hz']:.1f} chunks/s; amortised control rate {entry['control_rate_hz']:.0f} Hz,"
        f" the robot needs {report['control_hz']:g} Hz ({report['hardware']}, {entry['dtype']})",
        soft_wrap=True,
    )


def _print_sweep(report: dict[str, Any], console: Console) -> None:
    table = Table(title=f"success with injected latency, {report['seeds']['count']} episodes each")
    table.add_column("hand-over")
    table.add_column("latency", justify="right")
    for name in ("success", "95 % interval, %"):
        table.add_column(name, justify="right")
    for entry in report["variants"]:
        variant = entry["variant"]
        table.add_row(variant["handover"], variant["latency"], *success_cells(entry)[:2])
    console.print(table)
    console.print(
        "aligned: a chunk that is late is entered at the row of the present; naive: at its first row; rtc: as aligned,"
        " and the server continued the rows that were still to come (real-time chunking)."
    )
