"""``sinew client``: how long a server takes to answer, stage by stage, seen from a client."""

from __future__ import annotations

import shlex
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter, validators
from rich.progress import track
from sinew_client import Client, ClientError
from sinew_client.control import is_journal

from sinew import __version__
from sinew.auth import api_key_of
from sinew.cli import terminal
from sinew.cli.options import Count, PositiveIfAny, Whole, image_size_of
from sinew.cli.replay import print_replay, replay_journal
from sinew.core import PolicySpec, SinewError
from sinew.eval.report.stats import latencies
from sinew.perf.machine.bench import PROMPT, hardware, make_observation
from sinew.records.comparison import replay_records
from sinew.records.recorder import read_records

SCHEMA = "sinew.client/1"
STATISTICS = ("mean", "p50", "p90", "p95", "p99", "max")


def client(
    address: str = "tcp://127.0.0.1:5555",
    *,
    requests: Count = 50,
    warmup: Whole = 3,
    image_size: str | None = None,
    prompt: str = PROMPT,
    solver_steps: int | None = None,
    advantage: str | None = None,
    guidance_scale: float | None = None,
    jpeg_quality: Annotated[int | None, Parameter(validator=validators.Number(gte=1, lte=95))] = None,
    timeout: float = 60.0,
    deadline_ms: PositiveIfAny = None,
    api_key_file: Path | None = None,
    replay: Path | None = None,
) -> int:
    """Send observations that fit the server's policy, and print a latency table.

    Frames are noise and the state is zero: their content does not change the work. With --replay, send what
    `sinew serve --record` wrote, and compare the actions with the recorded ones: every bit where the server computes as
    it did then, else within a tolerance that is said (docs/wires.md). The exit status is 1 if any is beyond it.

    Args:
        address: of the server.
        requests: how many to time, one after the other.
        warmup: how many to send before that.
        image_size: HEIGHTxWIDTH of every frame; the sizes that the bundle declares if absent.
        prompt: the instruction.
        solver_steps: instead of the bundle's own number.
        advantage: that the prompt shall state, as positive; '' for none, the bundle's usual one if absent.
        guidance_scale: of classifier-free guidance towards it, 0 to 100; 1, the advantage alone, if absent.
        jpeg_quality: compress frames, 1 to 95; raw pixels if absent.
        timeout: seconds to wait for each answer.
        deadline_ms: the server refuses a request that would begin later than this after its arrival.
        api_key_file: a file with the server's key; SINEW_API_KEY in the environment if absent.
        replay: folder of records, or a journal of `sinew run --record`, whose decisions are repeated without a server.
    """
    key = api_key_of(api_key_file)
    size = image_size_of(image_size)
    records = read_records(replay) if replay is not None and not is_journal(replay) else ()
    command = ["sinew", *sys.argv[1:]]
    try:
        if replay is not None and is_journal(replay):
            result = replay_journal(replay)
            terminal.emit(result)
            return 0 if result["differ"] == 0 else 1
        with Client(address, timeout=timeout, jpeg_quality=jpeg_quality, api_key=key) as server:
            metadata = server.metadata()
            if replay is not None:
                result = replay_records(server, records, deadline_ms)
                result |= {"command": shlex.join(command), "address": address, "server": metadata["server"]}
                print_replay(result)
                terminal.emit(result)
                return 0 if result["beyond"] == result["lost"] == 0 else 1
            observation = make_observation(
                PolicySpec.from_dict(metadata["policy"]), size, prompt, solver_steps
            )
            observation |= {"advantage": advantage, "guidance_scale": guidance_scale}
            if deadline_ms is not None:
                observation["deadline_ms"] = deadline_ms
            for _ in range(warmup):
                server.infer(observation)
            start = time.perf_counter()
            runs = track(range(requests), "requests", console=terminal.console(stderr=True), transient=True)
            chunks = [server.infer({**observation, "seed": run}) for run in runs]
            seconds = time.perf_counter() - start
    except ClientError as error:
        raise SinewError(str(error)) from error
    result = {
        "schema": SCHEMA,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(command),
        "sinew": __version__,
        "client_hardware": hardware()["cpu"],
        "address": address,
        "server": metadata["server"],
        "policy": {key: metadata["policy"][key] for key in ("architecture", "name", "chunk_size")},
        "frames": {camera: list(frame.shape) for camera, frame in observation["images"].items()},
        "encoding": "raw" if jpeg_quality is None else f"jpeg quality {jpeg_quality}",
        "solver_steps": solver_steps or metadata["policy"]["solver_steps"],
        "requests": requests,
        "latency_ms": latencies(chunks),
        "chunks_per_second": requests / seconds,
        "actions_per_second": requests / seconds * metadata["policy"]["chunk_size"],
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
    table = terminal.table(f"milliseconds over {result['requests']} requests", "", *columns)
    for name, statistics in result["latency_ms"].items():
        bold = "bold" if name in ("round trip", "overhead") else None
        ends = name in ("server total", "queue", "policy total")
        table.add_row(name, *(f"{statistics[key]:.2f}" for key in STATISTICS), style=bold, end_section=ends)
    console.print(table)
    console.print(
        f"chunk rate {result['chunks_per_second']:.3f} chunks/s;"
        f" action rate {result['actions_per_second']:.1f} actions/s ({policy['chunk_size']} per chunk)",
    )
