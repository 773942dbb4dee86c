"""Measure how much one or several busy clients slow down the requests of one robot.

    python -m benchmarks.fairness                       # --max-batch 1, 8 and auto, each with each kind of attack
    python -m benchmarks.fairness --against CHECKOUT    # the same for another checkout, and pairs of requests to both

The benchmark starts one ``sinew serve`` with a built-in policy, one robot, and attacking clients. Each of them is a
process. The robot sends its next request after each answer. Each attacking client sends as much as the server accepts.
The table has the median, the 95th percentile and the longest latency of the robot. The table also has the ratio of the
median to the median of the robot without attackers on the same server. SECURITY.md states a ratio of about 2 for one
attacking client. The last line of the output is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from sinew_client import Client, ClientError
from sinew_client.streams import StreamLink

from sinew.core import machine

ROOT = Path(__file__).resolve().parents[1]
STEPS = 100  # solver steps in the requests of the attackers
PROMPT = "swing it up"
# name of the attack -> the kind of messages that each attacking client sends
ATTACKS = {
    "100 steps": ("steps",),
    "messages of 64": ("message",),
    "messages of 64, 100 steps": ("message steps",),
    "two streams of 100 steps": ("stream",),
    "four clients, 100 steps": ("steps",) * 4,
}


def observation(policy: Mapping[str, Any], steps: int | None = None) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    images = {
        each["name"]: rng.integers(0, 256, (each["height"], each["width"], 3), np.uint8)
        for each in policy["cameras"]
    }
    state = np.zeros(policy["state"]["dim"], np.float32)
    return {
        "images": images,
        "state": state,
        "prompt": PROMPT,
        "seed": 1,
        **({"solver_steps": steps} if steps else {}),
    }


def attack(kind: str, address: str) -> None:
    """Send requests as fast as the server accepts them, until this process is ended."""
    with Client(address, timeout=600.0) as client:
        policy = client.metadata()["policy"]
        if kind == "stream":
            _stream(address, observation(policy))
        observed = observation(policy, STEPS if "steps" in kind else None)
        print("attacking", flush=True)
        while True:
            with contextlib.suppress(ClientError):
                if "message" in kind:
                    client.infer_all([observed] * 64)
                else:
                    client.infer(observed)


def _stream(address: str, seen: Mapping[str, Any]) -> None:
    link = StreamLink(address, 60.0, "", "", {"solver_steps": STEPS})
    print("attacking", flush=True)
    begun = time.monotonic()
    while True:
        now = time.monotonic() - begun
        for link.session in ("a", "b"):
            link.send(list(seen["state"]), now, 1, seen["images"], now, PROMPT)
        link.windows()
        time.sleep(1 / 60)


@contextlib.contextmanager
def serving(root: Path, bundle: Path, max_batch: str, folder: Path) -> Iterator[str]:
    command = [sys.executable, "-m", "sinew", "serve", str(bundle), "--wire", "native:0", "--threads", "1"]
    paths = os.pathsep.join(map(str, (root, root / "packages" / "sinew-client" / "src")))
    with (folder / "server.log").open("a") as log:
        process = subprocess.Popen(
            [*command, "--no-prepare", "--max-batch", max_batch],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            cwd=folder,
            env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        )
    try:
        assert process.stdout is not None
        ready = process.stdout.readline()
        if not ready.startswith("ready on"):
            raise RuntimeError(f"the server did not start: {(folder / 'server.log').read_text()[-500:]}")
        yield ready.split()[-1]
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def attacked(kinds: tuple[str, ...], address: str) -> Iterator[None]:
    command = [sys.executable, "-m", "benchmarks.fairness", "--attack"]
    attackers = [
        subprocess.Popen([*command, kind, address], stdout=subprocess.PIPE, text=True, cwd=ROOT)
        for kind in kinds
    ]
    try:
        for each in attackers:
            assert each.stdout is not None
            each.stdout.readline()
        yield
    finally:
        for each in attackers:
            each.kill()
            each.wait()


def call_ms(client: Client, seen: Mapping[str, Any]) -> float:
    begun = time.perf_counter()
    client.infer(seen)
    return 1e3 * (time.perf_counter() - begun)


def times(address: str, seconds: float, least: int = 10) -> dict[str, float]:
    """Measure the latency of a robot's requests.

    Args:
        address: Address of the server.
        seconds: How long to send requests.
        least: Smallest number of requests, also if they take longer than ``seconds``.

    Returns:
        The percentiles of the latency in milliseconds.
    """
    found: list[float] = []
    with Client(address, timeout=600.0) as client:
        seen = observation(client.metadata()["policy"])
        for _ in range(3):
            client.infer(seen)
        end = time.monotonic() + seconds
        while time.monotonic() < end or len(found) < least:
            found.append(call_ms(client, seen))
    p50, p95 = np.percentile(found, [50, 95], method="higher")
    return {"p50": float(p50), "p95": float(p95), "max": max(found), "count": len(found)}


def table(root: Path, bundle: Path, batches: list[str], seconds: float, folder: Path) -> list[dict[str, Any]]:
    rows = []
    print("| --max-batch | attack | p50 ms | p95 ms | longest ms | ratio of p50 |\n|---|---|--:|--:|--:|--:|")
    for max_batch in batches:
        with serving(root, bundle, max_batch, folder) as address:
            alone = 0.0
            for name, kinds in {"none": (), **ATTACKS}.items():
                with attacked(kinds, address):
                    time.sleep(1.0 if kinds else 0.0)
                    found = times(address, seconds)
                alone = alone or found["p50"]
                ratio = found["p50"] / alone
                rows.append({"max_batch": max_batch, "attack": name, **found, "ratio": ratio})
                print(
                    f"| {max_batch} | {name} | {found['p50']:.1f} | {found['p95']:.1f} | {found['max']:.1f} |"
                    f" {ratio:.2f} |",
                    flush=True,
                )
    return rows


def pairs(other: Path, bundle: Path, folder: Path, count: int = 300) -> dict[str, float]:
    """Send requests to a server of this checkout and to a server of another checkout, alternately.

    Returns:
        The median latency of both servers, and the median of the differences of the pairs, in milliseconds.
    """
    with (
        serving(ROOT, bundle, "1", folder) as here,
        serving(other, bundle, "1", folder) as there,
        Client(here, timeout=60.0) as mine,
        Client(there, timeout=60.0) as theirs,
    ):
        seen = observation(mine.metadata()["policy"])
        found = np.array([[call_ms(client, seen) for client in (mine, theirs)] for _ in range(20 + count)])[
            20:
        ]
    middle = np.median(found, 0)
    difference = float(np.median(found[:, 0] - found[:, 1]))
    print(
        f"\none robot, {count} pairs: p50 {middle[0]:.3f} ms here, {middle[1]:.3f} ms there,"
        f" median of the differences {difference:+.3f} ms"
    )
    return {"here_ms": float(middle[0]), "there_ms": float(middle[1]), "difference_ms": difference}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bundle", type=Path, default=ROOT / "sinew" / "assets" / "pen.gguf")
    parser.add_argument(
        "--max-batch", action="append", help="value of this option of `sinew serve`; repeatable"
    )
    parser.add_argument("--seconds", type=float, default=10.0, help="seconds for each row of the table")
    parser.add_argument("--against", type=Path, help="root folder of another checkout, to compare with")
    parser.add_argument("--attack", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.attack:
        attack(*options.attack)
    batches, bundle = options.max_batch or ["1", "8", "auto"], options.bundle.resolve()
    report: dict[str, Any] = {"schema": "sinew.benchmark.fairness/1", "hardware": machine.cpu_model()}
    with tempfile.TemporaryDirectory() as folder:
        report["rows"] = table(ROOT, bundle, batches, options.seconds, Path(folder))
        if options.against is not None:
            print(f"\n{options.against.name}:")
            other = options.against.resolve()
            report["against"] = table(other, bundle, batches, options.seconds, Path(folder))
            report["pairs"] = pairs(other, bundle, Path(folder))
    print(json.dumps({**report, "load_average": os.getloadavg()[0]}))


if __name__ == "__main__":
    main()
