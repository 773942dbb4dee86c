"""Test a server under attack for a long time: robots that send requests, and hostile clients of many kinds.

    python -m benchmarks.soak --minutes 10        # or: make soak

The benchmark starts one ``sinew serve`` with an API key. Ten robots send requests at 10 Hz, and two robots use streams
of 60 waypoints per second. Each robot is a process with ``sinew_client``. The other clients are:

* a flooder with the key, which sends requests as fast as the connection accepts them
* a slow reader with the key, which requests metadata and never reads an answer
* four clients without a key, which send messages with as many fields as the parser accepts
* hogs: eight streams with 100 solver steps, which send frames and samples as fast as the server accepts them
* a liar: streams with times that are not numbers, in the future or in the past, and settings that always change
* three viewers of the dashboard, two of events and one of frames
* a client that replaces the policy every twenty seconds, by one whose actions are larger by 10, and back
* every ten seconds: a message without end, a decompression bomb as a picture, and thirty silent connections

Each answer is compared with the answer to the same observation in this process. An answer or an action window of a
policy that had been replaced before the request is an error. There are three rounds: the robots with requests only,
the same robots with the hogs, and all clients. The last line of the output is JSON. The exit status is 1 if a robot
lost an answer or got a wrong answer.
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
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import zmq
from PIL import Image
from sinew_client import Client, ClientError, ServerError, protocol
from sinew_client.streams import StreamLink

from benchmarks.wires import BUNDLE, statistics
from sinew.bundle import Bundle, write_bundle
from sinew.core import machine
from sinew.lowbit.sources import lowbit_sources

KEY = "soak"
PERIOD_S = 10.0  # seconds between two rounds of the occasional attacks
EXCHANGE_S = 20.0  # seconds between two replacements of the policy
SHIFT = 10.0  # added to all actions by the second policy
SEEDS = 16  # number of observations of each robot with known answers
STREAM_HZ = 60.0  # actions per second in the bundle
CLOSE = 1e-3  # largest difference between an answer and the known answer


def observation(seed: int, steps: int = 1) -> dict[str, Any]:
    """Return an observation with the shapes of the bundle.

    Args:
        seed: Seed of the random values.
        steps: Solver steps of the request.
    """
    spec = Bundle(BUNDLE).manifest.spec
    return {
        "images": {each.name: np.zeros((each.height, each.width, 3), np.uint8) for each in spec.cameras},
        "state": np.zeros(spec.state.dim),
        "prompt": "swing it up",
        "solver_steps": steps,
        "seed": seed,
    }


def shifted(out: Path) -> Path:
    """Write a copy of the bundle whose actions are larger by ``SHIFT``."""
    bundle = Bundle(BUNDLE)
    processing = bundle.manifest.processing
    mean = tuple(each + SHIFT for each in processing.action.stats["mean"])
    action = replace(processing.action, stats={**processing.action.stats, "mean": mean})
    manifest = replace(bundle.manifest, processing=replace(processing, action=action))
    write_bundle(out, lambda: manifest, lowbit_sources(bundle, {}))
    return out


def known_answers(robots: int, steps: int) -> np.ndarray:
    """Return the actions for every observation of every robot, float32 [robots, SEEDS, H, D]."""
    import sinew

    policy = sinew.load(BUNDLE, engine="plan", threads=1)
    return np.array(
        [
            [policy.infer(observation(robot * SEEDS + k, steps)).actions for k in range(SEEDS)]
            for robot in range(robots)
        ]
    )


class Exchanges:
    """The history of the active policy, as :func:`exchanger` writes it.

    Each line of the file has the start of a replacement, its end, and the number of the new policy (0 or 1).
    """

    def __init__(self, log: Path):
        self.changes = [
            (float(begun), float(done), int(which))
            for begun, done, which in (line.split() for line in log.read_text().splitlines())
        ]

    def allowed(self, sent: float, answered: float) -> set[int]:
        """Return the numbers of the policies that may have answered a request that was sent at ``sent``."""
        found, last = set[int](), 0
        for begun, done, which in self.changes:
            if done <= sent:
                last = which
            elif begun < answered:
                found.add(which)
        return found | {last}


# ----------------------------------------------------------------------------- the clients, each in its own process


def robot(given: argparse.Namespace) -> dict[str, Any]:
    """Send requests at a constant rate. If an answer takes longer than a period, the robot skips control steps."""
    known = np.load(given.known)[given.number]
    sent = observation(0, given.steps)
    latencies: list[float] = []
    answers: list[tuple[float, float, int]] = []
    lost: dict[str, int] = {}
    wrong = skipped = count = 0
    end, tick = time.monotonic() + given.seconds, time.monotonic()
    with Client(given.address, timeout=10.0, api_key=KEY) as client:
        while time.monotonic() < end:
            count += 1
            sent["seed"] = seed = given.number * SEEDS + count % SEEDS
            asked = time.monotonic()
            begin = time.perf_counter()
            try:
                chunk = client.infer(sent)
                latencies.append(1e3 * (time.perf_counter() - begin))
                far = [np.abs(chunk.actions - known[count % SEEDS] - SHIFT * k).max() for k in (0, 1)]
                wrong += int(chunk.seed != seed or min(far) > CLOSE)
                answers.append((asked, time.monotonic(), int(np.argmin(far))))
            except ClientError as error:
                name = error.code if isinstance(error, ServerError) else type(error).__name__
                lost[name] = lost.get(name, 0) + 1
            tick += 1 / given.hertz
            while tick < time.monotonic():
                tick += 1 / given.hertz
                skipped += 1
            time.sleep(max(0.0, tick - time.monotonic()))
    exchanges = Exchanges(given.exchanges)
    old = sum(which not in exchanges.allowed(asked, answered) for asked, answered, which in answers)
    return {"latencies": latencies, "lost": lost, "wrong": wrong, "old": old, "skipped": skipped}


def streamer(given: argparse.Namespace) -> dict[str, Any]:
    """Send samples to a stream at the rate of the bundle, with a frame in every fourth sample, and check the windows.

    Returns:
        ``latencies``: from a sample to its window. ``lost``: inferences of the server whose window never arrived.
        ``silent``: the longest time without a window.
    """
    images = observation(0)["images"]
    link = StreamLink(given.address, STREAM_HZ, f"robot-{given.number}", KEY, {"solver_steps": 1})
    sent: dict[int, float] = {}
    latencies: list[float] = []
    windows: list[tuple[float, float, int]] = []
    lost = wrong = last = tick = 0
    silent, heard = 0.0, time.monotonic()
    begun = heard
    while (now := time.monotonic()) < begun + given.seconds:
        for window in link.windows():
            silent, heard = max(silent, now - heard), now
            lost += max(0, window.run - last - 1)
            last = window.run
            asked = sent.get(window.request_id)
            wrong += int(asked is None or (len(window.rows) > 0 and window.rows.shape[1] != 1))
            if asked is None or not len(window.rows):
                continue
            latencies.append(1e3 * (now - asked))
            windows.append((asked, now, int(np.median(window.rows) > SHIFT / 2)))
        moment = now - begun
        if link.send([0.0], moment, 1, None if tick % 4 else images, moment, "swing it up"):
            sent[tick + 1] = now  # dropped messages also have numbers
        tick += 1
        time.sleep(max(0.0, begun + tick / STREAM_HZ - time.monotonic()))
    silent = max(silent, time.monotonic() - heard)
    link.close()
    exchanges = Exchanges(given.exchanges)
    old = sum(which not in exchanges.allowed(asked, came) for asked, came, which in windows)
    return {
        "latencies": latencies, "lost": {"window": lost} if lost else {}, "wrong": wrong, "old": old,
        "errors": dict(link.faults.counts), "error": link.error, "silent_s": round(silent, 2),
    }  # fmt: skip


def hogs(address: str, seconds: float) -> None:
    images = observation(0)["images"]
    links = [StreamLink(address, STREAM_HZ, "", KEY, {"solver_steps": 100}) for _ in range(4)]
    begun = time.monotonic()
    while (now := time.monotonic() - begun) < seconds:
        for link in links:
            for link.session in ("a", "b"):  # two streams on one connection
                link.send([0.0], now, 1, images, now, "swing it up")
            link.windows()
        time.sleep(1 / STREAM_HZ)


def liar(address: str, seconds: float) -> None:
    images = observation(0)["images"]
    dice = np.random.default_rng(0)
    links = [StreamLink(address, STREAM_HZ, f"liar-{number}", KEY) for number in range(2)]
    begun = time.monotonic()
    while (now := time.monotonic() - begun) < seconds:
        for link in links:
            moment = float(dice.choice([now, now - 1, now + 1e6, -1.0, np.nan, np.inf, 1e308]))
            frame = float(dice.choice([moment, now, -1e6, np.nan, 1e308]))
            link.rate = float(dice.choice([STREAM_HZ, 1000.0, 0.5, np.nan]))
            link.send([0.0], moment, int(dice.integers(5000)), images, frame, "swing it up")
        time.sleep(1 / STREAM_HZ)  # this client reads no answers


def viewers(web: str, seconds: float) -> None:
    """View the dashboard: two viewers of events, and one of frames."""

    def look(path: str) -> None:
        while True:
            request = urllib.request.Request(f"{web}{path}", headers={"X-API-Key": KEY})
            with contextlib.suppress(OSError), urllib.request.urlopen(request, timeout=60) as news:
                while news.read1(1 << 16):
                    pass
            time.sleep(1)

    for path in ("/v1/events", "/v1/events", "/v1/frames"):
        threading.Thread(target=look, args=(path,), daemon=True).start()
    time.sleep(seconds)


def exchanger(web: str, seconds: float, sources: Sequence[Path], log: Path) -> None:
    """Make the server load the two bundles in turn, and write the times of each change to a file.

    At the end, the server has the first bundle again.
    """
    which, end = 0, time.monotonic() + seconds - EXCHANGE_S
    while time.monotonic() < end or which:
        time.sleep(EXCHANGE_S / 2)
        begun = time.monotonic()
        request = urllib.request.Request(
            f"{web}/v1/policies/default",
            json.dumps({"source": str(sources[1 - which])}).encode(),
            {"X-API-Key": KEY},
            method="PUT",
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            answer.read()
        which = 1 - which
        with log.open("a") as out:
            out.write(f"{begun} {time.monotonic()} {which}\n")
        time.sleep(EXCHANGE_S / 2)


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


PARTS: dict[str, Callable[[str, float], None]] = {
    "flooder": flooder, "slow_reader": slow_reader, "stranger": stranger, "occasional": occasional,
    "hogs": hogs, "liar": liar, "viewers": viewers,
}  # fmt: skip
WEB = ("viewers", "exchanger")  # the clients that use the HTTP port
ATTACK = ("flooder", "slow_reader", *["stranger"] * 4, "occasional", "hogs", "liar", "viewers", "exchanger")
ROUNDS = {"alone": (), "beside streams": ("hogs",), "attacked": ATTACK}


@contextlib.contextmanager
def dealer(address: str) -> Iterator[zmq.Socket]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as made:
        made.set(zmq.LINGER, 0)
        made.connect(address)
        yield made


# ----------------------------------------------------------------------------- the rounds


@contextlib.contextmanager
def serving(log: Path, *arguments: object, verb: Sequence[str] = ("serve",)) -> Iterator[tuple[str, int]]:
    """Run ``sinew serve`` until the end of the block, with its log in a file. Yields its addresses and its process
    id."""
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


class Soak:
    """The client programs of one server.

    Args:
        addresses: The native address and the HTTP address.
        folder: Folder for the files that the programs exchange.
    """

    def __init__(self, given: argparse.Namespace, addresses: Sequence[str], server: int, folder: Path):
        self._given, self._server, self._folder = given, server, folder
        self._native, self._web = addresses
        self._known, self._other = folder / "known.npy", shifted(folder / "other.gguf")
        np.save(self._known, known_answers(given.robots, given.steps))

    def run(self, name: str, seconds: float) -> dict[str, Any]:
        """Play one round, and measure the memory of the server during the round."""
        given, log = self._given, self._folder / f"exchanges-{name}"
        log.touch()
        parts = ROUNDS[name]
        hostile = [
            self._begin(part, seconds, log, "--address", self._web if part in WEB else self._native)
            for part in parts
        ]
        asked = [("robot", n) for n in range(given.robots)]
        asked += [("streamer", n) for n in range(given.streams if name == "attacked" else 0)]
        asking = [
            self._begin(part, seconds, log, "--address", self._native, "--number", str(number))
            for part, number in asked
        ]
        begun = time.monotonic()
        memory = [(0.0, memory_mib(self._server))]
        while (left := begun + seconds - time.monotonic()) > 0:
            time.sleep(min(5.0, max(0.1, left)))
            memory.append((time.monotonic() - begun, memory_mib(self._server)))
        found = [json.loads(each.communicate(timeout=seconds + 120)[0]) for each in asking]
        for each in hostile:
            each.kill()
            each.wait()
        kinds = [part for part, _ in asked]
        return {
            **summed([each for part, each in zip(kinds, found, strict=True) if part == "robot"]),
            "skipped": sum(each.get("skipped", 0) for each in found),
            "exchanges": len(Exchanges(log).changes),
            "streams": summed([each for part, each in zip(kinds, found, strict=True) if part == "streamer"]),
            "streams_each": [
                {name: value for name, value in each.items() if name != "latencies"}
                for part, each in zip(kinds, found, strict=True)
                if part == "streamer"
            ],
            "memory_mib": by_minute(memory),
            "memory_slope_mib_per_minute": round(slope(memory), 3),
        }

    def _begin(self, part: str, seconds: float, log: Path, *more: str) -> subprocess.Popen:
        command = [sys.executable, "-m", "benchmarks.soak", "--part", part, "--seconds", str(seconds), *more]
        command += ["--known", str(self._known), "--other", str(self._other), "--exchanges", str(log)]
        command += ["--hertz", str(self._given.hertz), "--steps", str(self._given.steps)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def summed(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the sum of the counts of several robots. ``old`` counts answers of a policy that had been replaced before
    the request.
    """
    latencies = np.concatenate([each["latencies"] for each in found]) if found else np.zeros(0)
    lost: dict[str, int] = {}
    for each in found:
        for name, count in each["lost"].items():
            lost[name] = lost.get(name, 0) + count
    return {
        "answers": len(latencies),
        "lost": lost,
        "wrong": sum(each["wrong"] for each in found),
        "old": sum(each["old"] for each in found),
        "latency_ms": statistics(latencies) if len(latencies) else {},
    }


def by_minute(memory: list[tuple[float, float]]) -> list[float]:
    """Return the memory at the start, and the last value of each minute, in MiB. memory: (seconds, MiB)."""
    last = {max(0, int((at - 1) // 60)): round(mib, 1) for at, mib in memory}
    return [round(memory[0][1], 1), *(last[minute] for minute in sorted(last))]


def slope(memory: list[tuple[float, float]]) -> float:
    """Return the growth of the memory in MiB per minute over the second half, after all one-time allocations."""
    half = memory[len(memory) // 2 :]
    if len(half) < 3:
        return 0.0
    return float(60 * np.polyfit([at for at, _ in half], [mib for _, mib in half], 1)[0])


def table(rounds: dict[str, dict[str, Any]]) -> str:
    """Return a table with one column for each round."""
    lines = [
        "| robots | answers | lost | wrong | old | skipped | p50 | p99 | max | memory by minute, MiB | slope |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, found in rounds.items():
        memory = " ".join(f"{mib:.0f}" for mib in found["memory_mib"])
        for who, each in ((name, found), (f"{name}, windows", found["streams"])):
            if not (latency := each["latency_ms"]):
                continue
            lines.append(
                f"| {who} | {each['answers']:,} | {sum(each['lost'].values())} | {each['wrong']} | {each['old']}"
                f" | {each.get('skipped', 0):,} | {latency['p50']:.1f} ms | {latency['p99']:.0f} ms"
                f" | {latency['max']:.0f} ms | {memory} | {found['memory_slope_mib_per_minute']:+.2f} MiB/min |"
            )
    return "\n".join(lines)


def part(given: argparse.Namespace) -> None:
    """Run one of the client programs."""
    if given.part in ("robot", "streamer"):
        print(json.dumps({"robot": robot, "streamer": streamer}[given.part](given)))
    elif given.part == "exchanger":
        exchanger(given.address, given.seconds, (BUNDLE, given.other), given.exchanges)
    else:
        PARTS[given.part](given.address, given.seconds)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--alone", type=float, default=1.0, help="minutes of each of the first two rounds")
    parser.add_argument("--robots", type=int, default=10)
    parser.add_argument("--streams", type=int, default=2, help="number of robots on streams")
    parser.add_argument("--hertz", type=float, default=10.0)
    parser.add_argument("--steps", type=int, default=1, help="solver steps in the requests of the robots")
    parser.add_argument("--part", choices=("robot", "streamer", "exchanger", *PARTS), help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--number", type=int, default=0, help=argparse.SUPPRESS)
    for name in ("--known", "--other", "--exchanges"):
        parser.add_argument(name, type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.part:
        part(given)
        return 0
    minutes = {"alone": given.alone, "beside streams": given.alone, "attacked": given.minutes}
    with tempfile.TemporaryDirectory() as folder:
        key, log = Path(folder) / "key", Path(folder) / "log"
        key.write_text(KEY)
        wires = ("--wire", "native:0", "--wire", "http:0", "--engine", "plan", "--threads", 1)
        with serving(log, BUNDLE, *wires, "--no-prepare", "--api-key-file", key) as (addresses, process):
            soak = Soak(given, addresses.split(), process, Path(folder))
            rounds = {name: soak.run(name, 60 * lasts) for name, lasts in minutes.items() if lasts}
            with Client(addresses.split()[0], timeout=30, api_key=KEY) as client:
                health = client.health()
    print(table(rounds))
    print(f"health afterwards: {health['status']}")
    result = {
        "schema": "sinew.benchmark.soak/2",
        "minutes": given.minutes,
        "robots": given.robots,
        "hertz": given.hertz,
        "hardware": machine.cpu_model(),
        "load_average": os.getloadavg(),
        "health": health,
        **rounds,
    }
    print(json.dumps(result))
    bad = [
        each[kind]
        for found in rounds.values()
        for each in (found, found["streams"])
        for kind in ("lost", "wrong", "old")
    ]
    return int(any(bad) or health["status"] != "ok")


if __name__ == "__main__":
    sys.exit(main())
