"""A server under attack for a long time: ten robots at 10 Hz beside a flooder, a slow reader and a keyless parser.

    python -m benchmarks.soak --minutes 10        # or: make soak

One ``sinew serve`` with a key, and beside its robots, each a process with ``sinew_client``:

* a flooder with the key, which sends requests as fast as the connection takes them,
* a slow reader with the key, which asks for metadata and never reads an answer,
* four strangers without a key, which send messages of as many fields as a parser would look at,
* and every ten seconds a message without end, a bomb of a picture and thirty connections that say nothing.

The robots check that every answer is theirs (the observation's seed comes back) and count what is lost. The same robots
run alone first, for a comparison. The last line is JSON. The exit code is 1 if a robot lost an answer.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import zmq
from PIL import Image
from sinew_client import Client, ClientError, ServerError, protocol

from benchmarks.wires import BUNDLE, statistics
from sinew import machine
from sinew.bundle import Bundle

KEY = "soak"
PERIOD_S = 10.0  # between two rounds of the occasional attacks


def observation(seed: int) -> dict[str, Any]:
    """An observation of the bundle's shapes."""
    spec = Bundle(BUNDLE).manifest.spec
    return {
        "images": {each.name: np.zeros((each.height, each.width, 3), np.uint8) for each in spec.cameras},
        "state": np.zeros(spec.state.dim),
        "prompt": "swing it up",
        "solver_steps": 1,
        "seed": seed,
    }


# ----------------------------------------------------------------------------- the parts, each a process


def robot(address: str, seconds: float, number: int, hertz: float) -> dict[str, Any]:
    """Ask at a steady rate; what took longer than a period makes the robot skip moments, not hurry."""
    sent = observation(0)
    latencies: list[float] = []
    lost: dict[str, int] = {}
    wrong = skipped = 0
    end, tick = time.monotonic() + seconds, time.monotonic()
    with Client(address, timeout=10.0, api_key=KEY) as client:
        while time.monotonic() < end:
            sent["seed"] = seed = number * 1_000_000 + len(latencies) + sum(lost.values())
            begin = time.perf_counter()
            try:
                wrong += client.infer(sent).seed != seed
                latencies.append(1e3 * (time.perf_counter() - begin))
            except ClientError as error:
                name = error.code if isinstance(error, ServerError) else type(error).__name__
                lost[name] = lost.get(name, 0) + 1
            tick += 1 / hertz
            while tick < time.monotonic():
                tick += 1 / hertz
                skipped += 1
            time.sleep(max(0.0, tick - time.monotonic()))
    return {"latencies": latencies, "lost": lost, "wrong": wrong, "skipped": skipped}


def flooder(address: str, seconds: float) -> None:
    payload = protocol.encode_infer(observation(1), 1, None, KEY)
    with dealer(address) as rude:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            with contextlib.suppress(zmq.Again):
                rude.send(payload, zmq.NOBLOCK)
            while rude.poll(0):
                rude.recv()


def slow_reader(address: str, seconds: float) -> None:
    payload = protocol.encode_control("METADATA", 1, "", KEY)
    with dealer(address) as rude:
        rude.set(zmq.RCVHWM, 1)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            with contextlib.suppress(zmq.Again):
                rude.send(payload, zmq.NOBLOCK)
            time.sleep(0.001)


def stranger(address: str, seconds: float) -> None:
    payload = b"\x28\x01" * 8000
    with dealer(address) as rude:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            with contextlib.suppress(zmq.Again):
                rude.send(payload, zmq.NOBLOCK)
            while rude.poll(0):
                rude.recv()
            time.sleep(0.001)


def occasional(address: str, seconds: float) -> None:
    bomb = io.BytesIO()
    Image.new("RGB", (8000, 8000)).save(bomb, "PNG")
    pictures = observation(2)
    pictures["images"] = dict.fromkeys(pictures["images"], bomb.getvalue())
    end = time.monotonic() + seconds
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    while time.monotonic() < end:
        silent = []
        with contextlib.suppress(OSError):
            while len(silent) < 30:
                silent += [socket.create_connection((host, int(port)), 2)]
        with dealer(address) as rude, contextlib.suppress(zmq.Again):
            rude.send(protocol.encode_infer(pictures, 1, None, KEY), zmq.NOBLOCK)
            rude.send(b"x" * (64 << 20), zmq.NOBLOCK | zmq.SNDMORE)
            for _ in range(100):
                rude.send(b"x" * (1 << 20), zmq.NOBLOCK | zmq.SNDMORE)
            rude.send(b"", zmq.NOBLOCK)
        time.sleep(PERIOD_S)
        for each in silent:
            each.close()


PARTS = {"flooder": flooder, "slow_reader": slow_reader, "stranger": stranger, "occasional": occasional}


@contextlib.contextmanager
def dealer(address: str) -> Iterator[zmq.Socket]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as made:
        made.set(zmq.LINGER, 0)
        made.connect(address)
        yield made


# ----------------------------------------------------------------------------- the round


@contextlib.contextmanager
def serving(log: Path, *arguments: object, verb: Sequence[str] = ("serve",)) -> Iterator[tuple[str, int]]:
    """``sinew serve`` until the end of the block, its log in a file: its addresses and its process id."""
    command = [sys.executable, "-m", "sinew", *verb, *map(str, arguments)]
    with log.open("w") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        if not line.startswith("ready on "):
            raise SystemExit(f"the server did not start: {log.read_text()}")
        yield line.removeprefix("ready on ").strip(), process.pid
    finally:
        process.terminate()
        process.wait(30)
        print(f"log: {log.stat().st_size} bytes")


def memory_mib(process: int) -> float:
    pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


def run(address: str, server: int, seconds: float, robots: int, hertz: float, attack: bool) -> dict[str, Any]:
    """One round; the server's memory is looked at meanwhile."""
    me = [sys.executable, "-m", "benchmarks.soak", "--address", address, "--seconds", str(seconds)]
    attackers = ["flooder", "slow_reader", *["stranger"] * 4, "occasional"] if attack else []
    hostile = [subprocess.Popen([*me, "--part", name]) for name in attackers]
    asking = [
        subprocess.Popen(
            [*me, "--part", "robot", "--number", str(number), "--hertz", str(hertz)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(robots)
    ]
    begun = time.monotonic()
    memory = [(0.0, memory_mib(server))]
    while (left := begun + seconds - time.monotonic()) > 0:
        time.sleep(min(5.0, max(0.1, left)))
        memory.append((time.monotonic() - begun, memory_mib(server)))
    found = [json.loads(each.communicate(timeout=seconds + 120)[0]) for each in asking]
    for each in hostile:
        each.kill()
        each.wait()
    latencies = np.concatenate([each["latencies"] for each in found])
    lost: dict[str, int] = {}
    for each in found:
        for name, count in each["lost"].items():
            lost[name] = lost.get(name, 0) + count
    return {
        "answers": len(latencies),
        "lost": lost,
        "wrong": sum(each["wrong"] for each in found),
        "skipped": sum(each["skipped"] for each in found),
        "latency_ms": statistics(latencies),
        "memory_mib": by_minute(memory),
        "memory_slope_mib_per_minute": round(slope(memory), 3),
    }


def by_minute(memory: list[tuple[float, float]]) -> list[float]:
    """Return the memory at the start and the last of each minute, MiB. memory: (seconds, MiB)."""
    last = {max(0, int((at - 1) // 60)): round(mib, 1) for at, mib in memory}
    return [round(memory[0][1], 1), *(last[minute] for minute in sorted(last))]


def slope(memory: list[tuple[float, float]]) -> float:
    """Return MiB per minute over the second half, when what is allocated once has been."""
    half = memory[len(memory) // 2 :]
    if len(half) < 3:
        return 0.0
    return float(60 * np.polyfit([at for at, _ in half], [mib for _, mib in half], 1)[0])


def table(rounds: dict[str, dict[str, Any]]) -> str:
    """Return the rounds side by side."""
    lines = [
        "| robots | answers | lost | wrong | moments skipped | p50 | p99 | max | memory by minute, MiB | slope |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, found in rounds.items():
        latency = found["latency_ms"]
        memory = " ".join(f"{mib:.0f}" for mib in found["memory_mib"])
        lines.append(
            f"| {name} | {found['answers']:,} | {sum(found['lost'].values())} | {found['wrong']}"
            f" | {found['skipped']:,} | {latency['p50']:.0f} ms | {latency['p99']:.0f} ms | {latency['max']:.0f} ms"
            f" | {memory} | {found['memory_slope_mib_per_minute']:+.2f} MiB/min |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--alone", type=float, default=1.0, help="minutes of the robots without the others")
    parser.add_argument("--robots", type=int, default=10)
    parser.add_argument("--hertz", type=float, default=10.0)
    parser.add_argument("--part", choices=("robot", *PARTS), help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--number", type=int, default=0, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.part == "robot":
        print(json.dumps(robot(given.address, given.seconds, given.number, given.hertz)))
        return 0
    if given.part:
        PARTS[given.part](given.address, given.seconds)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        key = Path(folder) / "key"
        key.write_text(KEY)
        log = Path(folder) / "log"
        with serving(log, BUNDLE, "--wire", "native:0", "--threads", 1, "--api-key-file", key) as (
            address,
            process,
        ):
            rounds = {
                name: run(address, process, 60 * minutes, given.robots, given.hertz, attack)
                for name, minutes, attack in (
                    ("alone", given.alone, False),
                    ("attacked", given.minutes, True),
                )
            }
            with Client(address, timeout=30, api_key=KEY) as client:
                health = client.health()
    print(table(rounds))
    print(f"health afterwards: {health['status']}")
    result = {
        "schema": "sinew.benchmark.soak/1",
        "minutes": given.minutes,
        "robots": given.robots,
        "hertz": given.hertz,
        "hardware": machine.cpu_model(),
        "load_average": os.getloadavg(),
        "health": health,
        **rounds,
    }
    print(json.dumps(result))
    attacked = rounds["attacked"]
    return int(bool(attacked["lost"] or attacked["wrong"] or health["status"] != "ok"))


if __name__ == "__main__":
    sys.exit(main())
