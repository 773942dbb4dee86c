"""``sinew bench ADDRESS``: time the answers of a server, stage by stage, at a client."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from cyclopts import Parameter, validators
from rich.progress import track
from sinew_client import Client
from sinew_client.auth import api_key_of

from sinew import __version__
from sinew.bench.measure import hardware, make_observation
from sinew.bench.pauses import COLUMNS, TITLE, after_pauses, pause_rows
from sinew.cli import terminal
from sinew.cli.options import Whole
from sinew.core import PolicySpec
from sinew.core.statistics import latencies, p99_of

SCHEMA = "sinew.client/1"
STATISTICS = ("mean", "p50", "p90", "p95", "p99", "max")


@Parameter(name="*", group="Server")
@dataclass(frozen=True)
class AskingFlags:
    """Options for the requests to a server.

    Attributes:
        warmup: Number of requests to send before the timed ones.
        advantage: Advantage label to put into the prompt, for example positive. '' states none. Default: the
            bundle's usual label.
        guidance_scale: Scale of classifier-free guidance towards the advantage, 0 to 100. Default: 1, the
            prompt with the advantage alone.
        jpeg_quality: Compress frames as JPEG with this quality, 1 to 95. Default: raw pixels.
        timeout: Seconds to wait for each answer.
        api_key_file: File with the server's key. Default: SINEW_API_KEY in the environment.
    """

    warmup: Whole = 3
    advantage: str | None = None
    guidance_scale: float | None = None
    jpeg_quality: Annotated[int | None, Parameter(validator=validators.Number(gte=1, lte=95))] = None
    timeout: float = 60.0
    api_key_file: Path | None = None


ASKING = AskingFlags()


def ask(
    address: str,
    requests: int,
    size: tuple[int, int] | None,
    prompt: str,
    solver_steps: int | None,
    deadline_ms: float | None,
    asking: AskingFlags,
    pauses: Sequence[float] = (),
) -> int:
    """Send observations that fit the server's policy, and print a latency table.

    Args:
        address: The server's address.
        requests: Number of timed requests.
        size: Height and width of every frame; None for the sizes that the policy states.
        prompt: The instruction.
        solver_steps: Number of solver steps; None for the policy's own number.
        deadline_ms: Deadline of each request; None for no deadline.
        asking: Further options of the requests.
        pauses: Lengths of pauses in seconds. The first answer after each pause is timed.

    Returns:
        The exit code.
    """
    key = api_key_of(asking.api_key_file)
    jpeg_quality = asking.jpeg_quality
    with Client(address, timeout=asking.timeout, jpeg_quality=jpeg_quality, api_key=key) as server:
        metadata = server.metadata()
        observation = make_observation(PolicySpec.from_dict(metadata["policy"]), size, prompt, solver_steps)
        observation |= {"advantage": asking.advantage, "guidance_scale": asking.guidance_scale}
        if deadline_ms is not None:
            observation["deadline_ms"] = deadline_ms
        for _ in range(asking.warmup):
            server.infer(observation)
        start = time.perf_counter()
        runs = track(range(requests), "requests", console=terminal.console(stderr=True), transient=True)
        chunks = [server.infer({**observation, "seed": run}) for run in runs]
        seconds, travel = time.perf_counter() - start, server.frames
        steady_ms = float(np.median([chunk.round_trip_ms for chunk in chunks]))
        paused = list(after_pauses(lambda: server.infer(observation), pauses, steady_ms))
    result = {
        "schema": SCHEMA,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": terminal.typed(),
        "sinew": __version__,
        "client_hardware": hardware()["cpu"],
        "address": address,
        "server": metadata["server"],
        "policy": {key: metadata["policy"][key] for key in ("architecture", "name", "chunk_size")},
        "frames": {camera: list(frame.shape) for camera, frame in observation["images"].items()},
        "encoding": f"raw, {travel}" if jpeg_quality is None else f"jpeg quality {jpeg_quality}",
        "solver_steps": solver_steps or metadata["policy"]["solver_steps"],
        "requests": requests,
        "latency_ms": latencies(chunks),
        "chunks_per_second": requests / seconds,
        "actions_per_second": requests / seconds * metadata["policy"]["chunk_size"],
        **({"after_pause": paused} if paused else {}),
    }
    print_report(result)
    terminal.emit(result)
    return 0


def print_report(result: dict[str, Any]) -> None:
    server, policy = result["server"], result["policy"]
    height, width, _ = next(iter(result["frames"].values()))
    console = terminal.console()
    console.print(
        f"{policy['name']} ({policy['architecture']}), {server['dtype']} on {server['device']}"
        f" ({server['hardware']}, {server['threads']} threads) at {result['address']}",
        f"{len(result['frames'])} frames {height} x {width} ({result['encoding']}),"
        f" {result['solver_steps']} solver steps",
        sep="\n",
    )
    columns = (f">{name}" for name in STATISTICS)
    title = f"milliseconds over {result['requests']} requests{p99_of(result['requests'])}"
    table = terminal.table(title, "", *columns)
    for name, statistics in result["latency_ms"].items():
        bold = "bold" if name in ("round trip", "overhead") else None
        ends = name in ("server total", "queue", "policy total")
        table.add_row(name, *(f"{statistics[key]:.2f}" for key in STATISTICS), style=bold, end_section=ends)
    console.print(table)
    if "after_pause" in result:
        console.print(terminal.table(TITLE, *COLUMNS, rows=pause_rows(result["after_pause"])))
    console.print(
        f"chunk rate {result['chunks_per_second']:.3f} chunks/s;"
        f" action rate {result['actions_per_second']:.1f} actions/s ({policy['chunk_size']} per chunk)"
    )
