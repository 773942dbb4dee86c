"""The closed-loop demo: a trained policy of this package moves simulated blocks through the real server.

Success and latency are measured by the client over the network socket. Then the same server is used with injected
latency, to show the effect of late actions with three kinds of chunk merging: the default, aligned and naive.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from sinew.convert.sources import ASSETS
from sinew.core import SinewError, statistics
from sinew.core.hints import short_reason
from sinew_client.control import choose

from sinew_eval.demo.film import shoot, write_film
from sinew_eval.demo.view import Player, ReportView
from sinew_eval.episodes.adapters import make_env
from sinew_eval.episodes.policies import ServerPolicy
from sinew_eval.episodes.settings import Task, Variant, rows_between, sweep
from sinew_eval.evidence.animation import write_gif
from sinew_eval.evidence.plots import write_plots
from sinew_eval.foreign.server import serving
from sinew_eval.report.report import document, success_cells

# Key: a policy. Value: (its environment, how the policy receives the instruction).
DEMOS = {
    "blocks": ("sinew/Blocks-v0", "in many wordings"),
    "act": ("sinew/BlocksGoal-v0", "as numbers in the state"),
}
FIRST_SEED, FILMED = 5000, 4
# Compare the default chunk merging with two others. At 400 ms, 38, 32 and 16 of 40 episodes succeeded
# (2026-11-23). With 20 episodes, the Wilson intervals of 95 % and 40 % (76 to 99 and 22 to 61) do not overlap.
SWEEP = ("handover={default},aligned,naive", "latency=0,200,400ms")
SWEEP_EPISODES = 20
# A point of the figure ends after this many episodes if all or none of them succeeded, because its interval is
# narrow then. This early end does not make the intervals too narrow. Averaged over all success probabilities,
# the 95 % Wilson interval of a run that may end after 10 of 20 episodes contains the true probability in 95.4 %
# of runs (92.1 % at worst). The numbers are 95.3 % and 92.1 % for 20 of 50 episodes, and 95.3 % and 85.2 % for
# 20 episodes without an early end (eval/tests/test_eval.py: test_the_demos_early_end_keeps_its_intervals).
LOOK, SWEEP_LOOK = 20, 10
# The sweep plays this many episodes at once. While the server computes actions for one episode, the other one moves.
PLAYERS = 2
GIF, FILM = "closed_loop.gif", "film.webp"


def run(
    out_dir: Path,
    episodes: int = 50,
    console: Console | None = None,
    *,
    policy: str = "blocks",
    sweep_episodes: int = SWEEP_EPISODES,
    film: bool | None = None,
) -> dict[str, Any]:
    """Play the demo, and write an animation, a figure of success over injected latency, and ``report.json``.

    Args:
        out_dir: Folder for the files.
        episodes: Number of episodes.
        console: Rich console for the output.
        policy: Key of ``DEMOS``.
        sweep_episodes: Episodes for each point of the figure. 0 for no figure.
        film: True to draw the animation with MuJoCo's renderer. None to use this renderer if it works.

    Returns:
        The report.

    Raises:
        SinewError: The bundle is missing, the server did not start, or the requested renderer does not work.
    """
    console = console or Console(highlight=False, emoji=False)
    if film is not False:
        from sinew_eval.sim.film import backend

        try:
            console.print(f"film       drawn by MuJoCo through {backend()}")
            film = True
        except SinewError as error:
            if film:
                raise
            console.print(f"film       none, so a GIF shows small frames: {error}", soft_wrap=True)
    bundle = ASSETS / f"{policy}.gguf"
    if not bundle.is_file():
        raise SinewError(f"{bundle}: the trained demo policy is missing; install the package again")
    out_dir.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    # MuJoCo draws the film in another process while the sweep is played.
    with _served(bundle, out_dir, console) as address, ThreadPoolExecutor(1) as drawing:
        env, wording = DEMOS[policy]
        report, drawn = _drive(address, out_dir, episodes, console, bool(film), env, wording, drawing)
        if sweep_episodes:
            report["injected_latency"] = _sweep(address, sweep_episodes, console, env)
        if drawn is not None:
            drawn.result()
    if sweep_episodes:
        write_plots(report["injected_latency"], out_dir)
    (out_dir / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    names = sorted(
        path.name for path in out_dir.iterdir() if path.suffix in (".gif", ".json", ".png", ".webp")
    )
    seconds = time.perf_counter() - started
    console.print(f"wrote      {', '.join(names)} into {out_dir}; {seconds:.0f} s in all", soft_wrap=True)
    return report


@contextmanager
def _served(bundle: Path, out_dir: Path, console: Console) -> Iterator[str]:
    """Serve a bundle while the context is open, and yield the server's address."""
    started = time.perf_counter()
    console.print(f"server     starting with {bundle.name}", soft_wrap=True)
    with serving(bundle, out_dir / f"serve-{bundle.stem}.log") as address:
        console.print(f"server     ready on {address} after {time.perf_counter() - started:.1f} s")
        yield address


def _drive(
    address: str,
    out_dir: Path,
    episodes: int,
    console: Console,
    film: bool,
    played: str,
    wording: str,
    drawing: ThreadPoolExecutor,
) -> tuple[dict[str, Any], Future[None] | None]:
    """Play and print the episodes of the animation.

    Args:
        address: Address of the server.
        out_dir: Folder for the files.
        episodes: Number of episodes.
        console: Rich console for the output.
        film: True to draw a film with MuJoCo's renderer.
        played: The environment.
        wording: How the policy receives the instruction, for the output.
        drawing: Executor in which the film is drawn.

    Returns:
        The report, and the future of the film, which is None without a film.
    """
    task, base = Task(played), Variant(address)
    env, adapter = make_env(task.env, render_mode="rgb_array", render_size=256)
    policy = ServerPolicy(address, None)
    reason = short_reason(policy.engine["engine_reason"])
    console.print(f"engine     {policy.engine['engine']}: {reason}", soft_wrap=True)
    try:
        view = ReportView(console, policy, env, adapter)
        seeds = range(FIRST_SEED, FIRST_SEED + episodes)
        results = view.play([base], seeds, film=0 if film else FILMED, look=LOOK)
        report = document(task, adapter.control_hz, [base], results, workers=1)
        report["stages_ms"] = {name: statistics.summarize(values) for name, values in view.stages.items()}
        drawn = None
        if not film:
            write_gif(view.frames, out_dir / GIF, adapter.control_hz, view.pauses)
        else:
            shots = shoot(policy, env, adapter, range(FIRST_SEED, FIRST_SEED + FILMED // 2))
            drawn = drawing.submit(write_film, shots, out_dir / FILM, adapter.control_hz)
        _print_run(report, wording, console)
        return report, drawn
    finally:
        policy.close()
        env.close()


def _sweep(address: str, episodes: int, console: Console, played: str) -> dict[str, Any]:
    """Play the episodes for each point of the figure that shows success over latency, and print their results. Return
    the report.
    """
    task = Task(played)
    with ExitStack() as stack:
        players: list[Player] = []
        for _ in range(PLAYERS):
            env, adapter = make_env(task.env)
            stack.callback(env.close)
            policy = ServerPolicy(address, None)
            stack.callback(policy.close)
            players.append((policy, env, adapter))
        chosen = choose(policy=policy.served)
        variants = sweep(Variant(address), [text.format(default=chosen.handover) for text in SWEEP])
        view = ReportView(console, *players[0], also=players[1:])
        results = view.play(variants, range(FIRST_SEED, FIRST_SEED + episodes), look=SWEEP_LOOK)
    report = document(task, adapter.control_hz, variants, results, workers=1)
    report["default_handover"] = chosen.handover
    _print_sweep(report, console)
    console.print(f"default    {chosen}", soft_wrap=True)
    return report


def _print_run(report: dict[str, Any], wording: str, console: Console) -> None:
    entry = report["variants"][0]
    wins, interval, steps = success_cells(entry)
    rows = rows_between(entry["variant"]["replan"], entry["chunk_size"])
    each = [
        f"{name} {part['wins']}/{part['episodes']}" for name, part in entry["by_task"].items() if "/" in name
    ]
    console.print(f"tasks      {', '.join(each)}: the policy receives the goal {wording}", soft_wrap=True)
    console.print(
        f"success    {wins}, 95 % interval {interval} %, {steps} steps on average; seeds"
        f" {report['seeds']['first']} and up, a new chunk every {rows} actions",
        soft_wrap=True,
    )
    title = f"milliseconds per request over {entry['chunks']} requests, seen from the client"
    table = Table(title=title + statistics.p99_of(entry["chunks"]))
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
    table = Table(title=f"success with injected latency, at most {report['seeds']['count']} episodes each")
    table.add_column("chunk merging")
    table.add_column("latency", justify="right")
    for name in ("success", "95 % interval, %"):
        table.add_column(name, justify="right")
    for entry in report["variants"]:
        variant = entry["variant"]
        table.add_row(variant["handover"], variant["latency"], *success_cells(entry)[:2])
    console.print(table)
    console.print(
        "freeze: the robot waits for each chunk. aligned: the robot continues, and a late chunk starts at the action"
        " for"
        " the present time. naive: a late chunk starts at its first action."
    )
