"""``sinew demo --full-size``: all steps from a checkpoint to actions, without a download, for a policy of full size.

A random checkpoint is written, converted and served by a real server process. The real client sends photographs from
the package scikit-image over a network socket. The weights are random, so the times are realistic and the actions are
not.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table
from sinew.core import BundleError, machine
from sinew.core.extras import MissingPackageError
from sinew.core.registry import families

from sinew_eval.foreign.server import serving

if TYPE_CHECKING:
    from sinew_client import ActionChunk, Client

STATE = [0.0, -45.0, 60.0, 10.0, 0.0, 20.0]  # joint angles of a six-axis arm, in degrees


def run(workdir: Path, console: Console, *, prepare_only: bool, rounds: int, tiny: bool) -> None:
    """Run all steps of the demo.

    Args:
        workdir: Folder for the checkpoint and the bundle.
        console: Rich console for the output.
        prepare_only: True to stop after the conversion.
        rounds: How often each scene is sent.
        tiny: True for a policy of a million parameters, for tests.
    """
    scenes = photographs()
    workdir.mkdir(parents=True, exist_ok=True)
    bundle = prepare_bundle(workdir, console, tiny)
    if prepare_only:
        return
    started = time.perf_counter()
    with console.status("starting the server"), serving(bundle, workdir / "serve.log") as address:
        console.print(f"server      ready on {address} after {time.perf_counter() - started:.1f} s")
        drive(address, scenes, rounds, console)
    console.print("server stopped cleanly")


def photographs() -> list[tuple[str, tuple[np.ndarray, np.ndarray]]]:
    """Return instructions, each with a pair of uint8 frames [height, width, 3] of various sizes."""
    try:
        from skimage import data
    except ImportError:
        raise MissingPackageError("the demo, for its photographs,", "skimage") from None
    left, right, _ = data.stereo_motorcycle()
    return [
        ("grasp the handle of the motorcycle", (left, right)),
        ("hand the helmet to the person in the orange suit", (data.astronaut(), data.rocket())),
        ("put the spoon on the saucer next to the cup", (data.coffee(), data.chelsea())),
    ]


def prepare_bundle(workdir: Path, console: Console, tiny: bool) -> Path:
    """Write the checkpoint and the bundle, unless they exist. Returns the path of the bundle."""
    from sinew.convert import convert

    bundle = workdir / "policy.gguf"
    if is_current(bundle):
        console.print(f"bundle      {bundle} from an earlier run")
        return bundle
    family = next(family for family in families() if family.demo)
    weights = workdir / "checkpoint" / "model.safetensors"
    if weights.is_file():
        console.print(f"checkpoint  {weights.parent} from an earlier run")
    else:
        with transfer(console, "writing") as bar:
            started = time.perf_counter()
            made = family.load(family.demo)(workdir, tiny, bar)
        seconds = time.perf_counter() - started
        console.print(f"checkpoint  {made.parameters:,} random parameters, {_rate(made.nbytes, seconds)}")
    total, done = weights.stat().st_size, 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        bar(done, total)

    with transfer(console, "converting") as bar:
        started = time.perf_counter()
        convert(weights.parent, bundle, vlm=workdir / "vlm", name=f"{family.name}-random", progress=advance)
    seconds = time.perf_counter() - started
    console.print(f"bundle      {bundle}, {_rate(bundle.stat().st_size, seconds)}")
    return bundle


def is_current(bundle: Path) -> bool:
    """Return True if this version of the code can read the bundle."""
    from sinew.bundle import Bundle

    try:
        Bundle(bundle)
    except (BundleError, OSError):
        return False
    return True


@contextmanager
def transfer(console: Console, description: str) -> Iterator[Any]:
    """Show a progress bar of bytes. Yields the function ``update(done, total)``."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    # Without a terminal, a progress bar would only fill the log.
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(description, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def _rate(count: int, seconds: float) -> str:
    return f"{count / 1e9:.2f} GB in {seconds:.1f} s"


def drive(address: str, scenes: list[Any], rounds: int, console: Console) -> None:
    """Send every scene to the server, and print the actions of the last answer and all times.

    Args:
        address: Address of the server.
        scenes: Instructions with their frames.
        rounds: How often each scene is sent.
        console: Rich console for the output.
    """
    from sinew_client import Client

    timings = Table(title="milliseconds per request, seen from the client")
    for name in ("request", "round trip", "preprocess", "vision", "prefix", "head", "overhead"):
        timings.add_column(name, justify="right")
    with Client(address, timeout=120) as client:
        metadata = client.metadata()
        for number, (prompt, frames) in enumerate(scenes * rounds, start=1):
            chunk = _ask(client, metadata, prompt, frames)
            sizes = " and ".join(f"{frame.shape[1]}x{frame.shape[0]}" for frame in frames)
            console.print(f"request {number}   {prompt!r}, photographs of {sizes}")
            timings.add_row(str(number), *_cells(chunk))
    _print_actions(chunk, number, console)
    console.print(timings)
    server = metadata["server"]
    console.print(
        f"{server['dtype']} on {server['device']}, {server['threads']} threads, {machine.cpu_model()};"
        f" {len(frames)} views, {len(chunk.timing.step_ms)} solver steps."
        " Random weights: the actions mean nothing.",
    )


def _ask(client: Client, metadata: Any, prompt: str, frames: Any) -> ActionChunk:
    policy = metadata["policy"]
    names = [camera["name"] for camera in policy["cameras"]]
    observation = {
        "images": dict(zip(names, frames, strict=True)),
        "state": np.array(STATE, dtype=np.float32),
        "prompt": prompt,
        "seed": 0,
    }
    return client.infer(observation)


def _cells(chunk: ActionChunk) -> list[str]:
    timing = chunk.timing
    # Time of the client, of the connection, and of the server outside of the policy.
    overhead = chunk.round_trip_ms - timing.total_ms
    values = (
        chunk.round_trip_ms,
        timing.preprocess_ms,
        timing.vision_ms,
        timing.prefix_ms,
        timing.head_ms,
        overhead,
    )
    return [f"{value:.1f}" for value in values]


def _print_actions(chunk: ActionChunk, number: int, console: Console, rows: int = 5) -> None:
    count, dim = chunk.actions.shape
    table = Table(title=f"answer to request {number}: the first {rows} of {count} actions, degrees")
    table.add_column("step", justify="right")
    for joint in range(dim):
        table.add_column(f"joint {joint}", justify="right")
    for step, action in enumerate(chunk.actions[:rows]):
        table.add_row(str(step), *(f"{value:.3f}" for value in action))
    console.print(table)
