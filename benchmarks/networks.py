"""Run ``sinew run`` over bad networks, and measure the control rate, the gaps, the holds and the requests.

    python -m benchmarks.networks [--only WAN] [--episodes 20] [--task blocks] [--run='--set frames_as=auto'] [--json]

A server with a built-in policy and a robot each run in a network namespace. ``benchmarks.network`` connects both. The
table has a row for each network with these columns: successful episodes, the control rate, the longest gap between two
commands or holds in periods, the age of the executed actions, holds, requests, and how the frames were sent. Next to
the gap, the table has the largest delay of a thread that only sleeps, as a measure of the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.network import Network, Way, network, why_not

ROOT = Path(__file__).resolve().parents[1]
LOAD_S, RUN_S, NAP_S = 300.0, 900.0, 0.01
ELSEWHERE = ("10.77.0.3", "10.77.0.4")


FREE = Way()


@dataclass(frozen=True)
class Condition:
    """A network condition.

    Attributes:
        roams: Seconds between two changes of the robot's address. 0 means no changes.
    """

    name: str
    up: Way = FREE
    down: Way = FREE
    roams: float = 0.0


def both(**way: float) -> tuple[Way, Way]:
    return Way(**way), Way(**way)


CONDITIONS = (
    Condition("wire"),
    Condition("WAN, 100 ms there and back", *both(delay=0.05)),
    Condition("1 % loss", *both(loss=0.01)),
    Condition("10 % loss", *both(loss=0.1)),
    Condition("WAN and 1 % loss", *both(delay=0.05, jitter=0.005, loss=0.01)),
    Condition("WAN and 10 % loss", *both(delay=0.05, jitter=0.005, loss=0.1)),
    Condition("1 Mbit/s up, 20 down, 30 ms", Way(0.015, rate=1e6), Way(0.015, rate=20e6)),
    Condition("roaming every 5 s", *both(delay=0.01), roams=5.0),
)


def sinew(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "sinew", *map(str, arguments)]


def until_served(address: str, inside: list[str], server: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + LOAD_S
    ask = f"from sinew_client import Client; Client({address!r}, timeout=1.0).health()"
    while subprocess.run([*inside, sys.executable, "-c", ask], check=False, capture_output=True).returncode:
        if time.monotonic() > end or server.poll() is not None:
            raise SystemExit("the server does not answer; its log is printed above")


class Sleeper:
    """A thread that only sleeps. It measures the largest delay with which this machine woke it, in seconds.

    A robot's loop has the same delays, independent of the network.
    """

    def __enter__(self) -> Sleeper:
        self.latest, self._over = 0.0, threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        due = time.monotonic() + NAP_S
        while not self._over.wait(max(0.0, due - time.monotonic())):
            now = time.monotonic()
            self.latest, due = max(self.latest, now - due), now + NAP_S


def drive(
    between: Network, condition: Condition, task: str, episodes: int, more: list[str]
) -> dict[str, Any]:
    """Run the robot under one network condition. Returns the report of ``sinew run``."""
    between.shape(condition.up, condition.down)
    address = f"tcp://{between.SERVER}:5555"
    command = sinew("run", address, "--robot", task, "--episodes", episodes, "--json", *more)
    before = between.carried
    with subprocess.Popen(
        between.inside(between.robot, *command), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as robot:
        roamed, over = 0, threading.Event()

        def roam() -> None:
            nonlocal roamed
            while condition.roams and not over.wait(condition.roams):
                between.roam(ELSEWHERE[roamed % 2])
                roamed += 1

        roaming = threading.Thread(target=roam)
        roaming.start()
        try:
            with Sleeper() as sleeper:
                out, errors = robot.communicate(timeout=RUN_S)
        finally:
            robot.kill()
            over.set()
            roaming.join()
    between.shape(Way(), Way())
    if robot.returncode not in (0, 3):
        raise SystemExit(f"{condition.name}: sinew run ended with {robot.returncode}\n{errors.decode()}")
    found: dict[str, Any] = json.loads(out.decode().splitlines()[-1])
    packets = [after - was for after, was in zip(between.carried, before, strict=True)]
    return found | {
        "network": condition.name,
        "status": robot.returncode,
        "roamed": roamed,
        "packets": packets,
        "machine_ms": 1e3 * sleeper.latest,
    }


def row(found: dict[str, Any]) -> list[str]:
    period = 1e3 / found["hz"]
    steps = max(1, found["steps"])
    ages = found["age_ms"]
    up, down, lost = found["packets"]
    return [
        found["network"],
        f"{found['successes']} of {found['episodes']}",
        f"{found['rate_hz']:.2f} of {found['hz']:g}",
        f"{found['longest_gap_ms'] / period:.1f} ({found['machine_ms'] / period:.1f})",
        " / ".join(f"{ages.get(name, 0):.0f}" for name in ("p50", "p95", "max")),
        f"{100 * sum(found['held'].values()) / steps:.0f} %",
        f"{found['chunks']}, {found['failed_requests']} failed",
        f"{found['request_ms']:.0f}",
        f"{lost} of {up + down + lost}",
        found.get("frames", ""),
    ]


HEAD = (
    *("network", "success", "Hz kept", "longest gap (machine), periods", "age ms: p50 / p95 / max", "held"),
    *("chunks", "a request, ms", "packets lost", "frames"),
)


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", default="", help="only the conditions whose name contains this text")
    parser.add_argument("--task", default="blocks")
    parser.add_argument("--episodes", type=int, default=20)
    parser.add_argument("--run", default="", help="additional options of sinew run")
    parser.add_argument("--json", action="store_true", help="print each report in one line")
    options = parser.parse_args(given)
    if reason := why_not():
        print(f"this machine cannot create the simulated network: {reason}", file=sys.stderr)
        return 1
    wanted = [each for each in CONDITIONS if options.only.lower() in each.name.lower()]
    if not wanted:
        parser.error(f"--only: expected a part of {', '.join(each.name for each in CONDITIONS)}")
    bundle = ROOT / "sinew" / "assets" / f"{options.task}.gguf"
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the namespaces are removed
    environment = os.environ | {"HOME": tempfile.gettempdir()}
    with network() as between:
        serve = sinew("serve", bundle, "--wire", "native", "--host", between.SERVER, "--engine", "plan")
        server = subprocess.Popen(
            between.inside(between.server, *serve),
            env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            until_served(f"tcp://{between.SERVER}:5555", between.inside(between.robot), server)
            print("| " + " | ".join(HEAD) + " |\n|" + "---|" * len(HEAD), flush=True)
            for condition in wanted:
                found = drive(between, condition, options.task, options.episodes, shlex.split(options.run))
                print("| " + " | ".join(row(found)) + " |", flush=True)
                if options.json:
                    print(json.dumps(found), flush=True)
        finally:
            server.terminate()
            server.wait()
            signal.signal(signal.SIGTERM, before)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
