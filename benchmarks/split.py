"""Measure split inference over a link with known rate and delay, and compare with the prediction of ``sinew perf
scenario``.

    python -m benchmarks.split --requests 20 --links 4g,5g,wifi6,slow-cloud

The vision and the prefix run on a server, and the head runs on the robot. A proxy on this machine delays each byte by
the base latency of the link and by the time to send the earlier bytes. The prediction is
:func:`sinew_perf.scenarios.split_s`. Its inputs are measured without the proxy: the times of the server and of the
head, and the bytes in both directions. The last line of the output is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import tempfile
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
from sinew_client import Client, protocol
from sinew_perf.hardware import Network, load_network
from sinew_perf.scenarios import split_s

from benchmarks.soak import serving
from benchmarks.wires import BUNDLE
from sinew.core import machine
from sinew.policy import load
from sinew.stream.split import SplitPolicy, SplitTiming

FORMS = ("fp32", "bf16", "int8")
PIECE = 16 << 10  # largest number of bytes in one piece


class Link:
    """A proxy that forwards TCP connections to ``port`` with the delays of ``network``."""

    def __init__(self, port: int, network: Network):
        self._to, self._network = port, network
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Stop accepting connections. Open connections end when one of their ends closes."""
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                ours, _ = self._listener.accept()
            except OSError:
                return
            theirs = socket.create_connection(("127.0.0.1", self._to))
            for each in (ours, theirs):
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            up, down = self._network.up_s, self._network.down_s
            for source, target, seconds in ((ours, theirs, up), (theirs, ours, down)):
                line: deque[tuple[float, bytes]] = deque()
                there = threading.Semaphore(0)
                threading.Thread(target=self._read, args=(source, line, there, seconds), daemon=True).start()
                threading.Thread(target=self._write, args=(target, line, there), daemon=True).start()

    def _read(self, source: socket.socket, line: deque, there: threading.Semaphore, seconds: Any) -> None:
        free = 0.0  # time at which the link has sent all earlier bytes
        while True:
            try:
                data = source.recv(PIECE)
            except OSError:
                data = b""
            free = max(free, time.perf_counter()) + seconds(len(data))
            line.append((free + self._network.base_ms / 1e3, data))
            there.release()
            if not data:
                return

    def _write(self, target: socket.socket, line: deque, there: threading.Semaphore) -> None:
        while True:
            there.acquire()
            due, data = line.popleft()
            time.sleep(max(0.0, due - time.perf_counter()))
            try:
                target.sendall(data) if data else target.shutdown(socket.SHUT_WR)
            except OSError:
                return
            if not data:
                return


def measure(
    robot: SplitPolicy, observation: dict[str, Any], count: int
) -> tuple[list[float], list[SplitTiming]]:
    """Return the milliseconds of each request, and the times of its parts. The first request is left out."""
    took, trips = [], []
    for _ in range(1 + count):
        begun = time.perf_counter()
        robot.infer(observation)
        took.append(1e3 * (time.perf_counter() - begun))
        assert robot.last is not None
        trips.append(robot.last)
    return took[1:], trips[1:]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bundle", type=Path, default=BUNDLE)
    parser.add_argument("--engine", default="plan", choices=("eager", "plan"))
    parser.add_argument("--links", default="4g,5g,wifi6,slow-cloud")
    parser.add_argument("--requests", type=int, default=20)
    given = parser.parse_args()
    policy = load(given.bundle, engine=given.engine, threads=1)
    policy.warm_up()
    spec = policy.spec
    rng = np.random.default_rng(0)
    observation = {
        "images": {c.name: rng.integers(0, 255, (c.height, c.width, 3), np.uint8) for c in spec.cameras},
        "state": np.zeros(spec.state.dim),
        "prompt": spec.default_prompt or "do what you were trained for",
    }
    up = len(protocol.encode_infer(observation, 1))
    found = []
    print("| link | form | MB down | p50, ms | predicted, ms | off |\n|---|---|---|---|---|---|")
    flags = [word for form in FORMS for word in ("--context", form)]
    with tempfile.TemporaryDirectory() as folder:
        own = ("--wire", "native:0", "--engine", given.engine, "--threads", 1, *flags)
        with serving(Path(folder) / "log", given.bundle, *own) as (address, _):
            port = int(address.rpartition(":")[2])
            for form in FORMS:
                with Client(f"127.0.0.1:{port}/context.{form}", timeout=120) as client:
                    _took, trips = measure(SplitPolicy(policy, client), observation, given.requests)
                before_s, after_s = (
                    float(np.median([getattr(trip, name) for trip in trips])) / 1e3
                    for name in ("round_trip_ms", "head_ms")
                )
                for name in given.links.split(","):
                    network = load_network(name)
                    link = Link(port, network)
                    with Client(f"127.0.0.1:{link.port}/context.{form}", timeout=120) as client:
                        took, _ = measure(SplitPolicy(policy, client), observation, given.requests)
                    link.close()
                    down = trips[0].nbytes
                    predicted = 1e3 * split_s(before_s, after_s, up, down, [network])
                    p50 = float(np.median(took))
                    found.append(
                        {
                            "link": name,
                            "form": form,
                            "up": up,
                            "down": down,
                            "p50_ms": p50,
                            "predicted_ms": predicted,
                        }
                    )
                    off = f"{p50 / predicted - 1:+.0%}"
                    print(
                        f"| {name} | {form} | {down / 1e6:.3f} | {p50:.1f} | {predicted:.1f} | {off} |",
                        flush=True,
                    )
    result = {
        "schema": "sinew.benchmark.split/1",
        "bundle": given.bundle.name,
        "engine": given.engine,
        "hardware": machine.cpu_model(),
        "load_average": os.getloadavg(),
        "rows": found,
    }
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
