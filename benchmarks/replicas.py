"""Run robots with replicas on Ray, kill replicas from time to time, and replace the policy after half of the time.

    python -m benchmarks.replicas --robots 20 --replicas 3 --seconds 300 --kill-s 20

The benchmark starts ``sinew fleet up`` on this machine. A request counts as lost if it has no answer half a minute
after the end. The longest hold is the largest time between a control step and its answer. The last line of the output
is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import psutil
from sinew_client import Client

from benchmarks.fleet import Robots
from benchmarks.soak import KEY, serving
from benchmarks.wires import BUNDLE
from sinew.core import machine

START_S = 300.0


def replicas(process: int) -> list[int]:
    """Return the process ids of the replicas in the cluster that this process started."""
    found = []
    for child in psutil.Process(process).children(recursive=True):
        try:
            if any("ServeReplica:sinew-default" in word for word in child.cmdline()):
                found.append(child.pid)
        except psutil.Error:  # the process has just ended
            continue
    return found


class Trouble(threading.Thread):
    """A thread that kills replicas at a fixed interval, and replaces the policy after half of the time."""

    def __init__(self, process: int, http: str, source: Path, seconds: float, kill_s: float, update: bool):
        super().__init__(daemon=True)
        self._process, self._http, self._source = process, http, source
        self._seconds, self._kill_s, self._update = seconds, kill_s, update
        self.killed, self.update_s = 0, 0.0

    def run(self) -> None:
        begun = time.monotonic()
        while (at := time.monotonic() - begun) < self._seconds - self._kill_s:
            if self._update and at > self._seconds / 2:
                self._update = False
                self.update_s = self._replace()
            time.sleep(self._kill_s)
            if found := replicas(self._process):
                os.kill(found[self.killed % len(found)], signal.SIGKILL)
                self.killed += 1

    def _replace(self) -> float:
        request = urllib.request.Request(
            f"{self._http}/v1/policies/default",
            json.dumps({"source": str(self._source)}).encode(),
            {"X-API-Key": KEY},
            method="PUT",
        )
        with urllib.request.urlopen(request, timeout=START_S) as answer:
            return float(json.loads(answer.read())["load_s"])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bundle", type=Path, default=BUNDLE)
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--robots", type=int, default=20)
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--hertz", type=float, default=1.0)
    parser.add_argument("--deadline-ms", type=float, default=5000.0)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--kill-s", type=float, default=20.0)
    parser.add_argument("--no-update", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        other = folder / "other.gguf"
        shutil.copy(given.bundle, other)
        (folder / "key").write_text(KEY)
        policy = {
            "source": str(given.bundle.resolve()),
            "replicas": given.replicas,
            "engine": given.engine,
            "threads": 1,
            "cpus": 0.1,  # the replicas share the cores of this machine
            "ongoing": given.batch,
            "max_batch": given.batch,
        }
        (folder / "fleet.yaml").write_text(json.dumps({"policies": {"default": policy}}))
        flags = ("--wire", "native:0", "--wire", "http:0", "--api-key-file", folder / "key")
        with serving(folder / "log", folder / "fleet.yaml", *flags, verb=("fleet", "up")) as (line, process):
            address, http = line.split()
            with Client(address, timeout=60, api_key=KEY) as client:
                while client.health()["policies"]["default"]["replicas"] < given.replicas:
                    time.sleep(1)
            robots = Robots(address, given.bundle, given.robots, given.hertz, given.deadline_ms, False, KEY)
            trouble = Trouble(process, http, other, given.seconds, given.kill_s, not given.no_update)
            trouble.start()
            found: dict[str, Any] = robots.run(given.seconds)
            trouble.join(START_S)
            with Client(address, timeout=60, api_key=KEY) as client:
                health = client.health()
    result = {
        "schema": "sinew.benchmark.replicas/1",
        "bundle": given.bundle.name,
        "replicas": given.replicas,
        "hertz": given.hertz,
        "deadline_ms": given.deadline_ms,
        "killed": trouble.killed,
        "update_s": trouble.update_s,
        "longest_hold_ms": round(max((max(each) for each in robots.latencies if each), default=0.0), 1),
        "retried": health["policies"]["default"]["retried"],
        "hardware": machine.cpu_model(),
        "load_average": os.getloadavg(),
        **found,
    }
    print(json.dumps(result))
    return int(found["lost"] > 0)


if __name__ == "__main__":
    sys.exit(main())
