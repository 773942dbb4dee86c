"""Count the robots that one server answers in time, with and without batches.

    python -m benchmarks.fleet --robots 10,20,30,40 --rounds 3
    python -m benchmarks.fleet --robots 20 --flood

Each round starts ``sinew serve`` once with ``--max-batch 1`` and once with ``--max-batch N``, in alternating order.
The robots send requests at a constant rate. Each robot has its own phase, connection and session. A robot skips a
control step if the answer to its last request is missing. An answer is in time if it arrives within the deadline,
which begins at the control step of the request. The benchmark counts each request as answered, rejected (late, busy)
or lost. The last line of the output is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import zmq
from sinew_client import Client, protocol, schema

from benchmarks.soak import serving
from benchmarks.wires import BUNDLE, statistics
from sinew.bundle import Bundle
from sinew.core import machine

FLOOD = 8  # number of open requests of the flooding client


class Robots:
    """The robots of one process, each with its own connection.

    Args:
        flood: Add one client that sends requests without a pause.
    """

    def __init__(
        self,
        address: str,
        bundle: Path,
        count: int,
        hertz: float,
        deadline_ms: float,
        flood: bool,
        key: str = "",
    ):
        spec = Bundle(bundle).manifest.spec
        rng = np.random.default_rng(0)
        self.observation = {
            "images": {c.name: rng.integers(0, 255, (c.height, c.width, 3), np.uint8) for c in spec.cameras},
            "state": np.zeros(spec.state.dim),
            "prompt": spec.default_prompt or "do what you were trained for",
        }
        self.count, self.period, self.deadline_ms, self.key = count, 1 / hertz, deadline_ms, key
        self.context = zmq.Context()
        self.sockets = [self._connect(address) for _ in range(count + flood)]
        self.flooder = self.sockets[count] if flood else None
        self.sent = [0] * (count + flood)
        self.latencies: list[list[float]] = [[] for _ in self.sockets]
        self.refused: dict[str, int] = {}
        self.batches: list[int] = []
        self.skipped = [0] * count  # number of control steps at which a robot still waited for an answer

    def _connect(self, address: str) -> zmq.Socket:
        made = self.context.socket(zmq.DEALER)
        made.set(zmq.LINGER, 0)
        made.connect(address)
        return made

    def _ask(self, place: int) -> None:
        self.sent[place] += 1
        own = {"session": f"robot-{place}", "deadline_ms": self.deadline_ms, "seed": self.sent[place]}
        if self.sockets[place] is self.flooder:
            own = {}
        payload = protocol.encode_infer({**self.observation, **own}, self.sent[place], None, self.key)
        self.sockets[place].send(payload)

    def _heard(self, place: int, payload: bytes, since: float) -> None:
        reply = schema.PredictResponse.FromString(payload)
        if reply.error_code:
            self.refused[reply.error_code] = self.refused.get(reply.error_code, 0) + 1
        else:
            self.latencies[place].append(1e3 * (time.perf_counter() - since))
            self.batches.append(max(1, reply.timing.batch))

    def run(self, seconds: float) -> dict[str, Any]:
        """Send the requests of all robots for ``seconds``, and wait for the last answers."""
        poller = zmq.Poller()
        places = {}
        for place, sock in enumerate(self.sockets):
            poller.register(sock, zmq.POLLIN)
            places[sock] = place
        begun = time.perf_counter()
        due = [begun + self.period * place / self.count for place in range(self.count)]
        open_since: list[float | None] = [None] * len(
            self.sockets
        )  # the control step of the open request of each robot
        flooding = 0
        end = begun + seconds
        while True:
            now = time.perf_counter()
            if now >= end and all(at is None for at in open_since[: self.count]):
                break
            if now >= end + 30:
                break
            for place in range(self.count):
                while now < end and due[place] <= now:
                    if open_since[place] is None:
                        open_since[place] = due[place]
                        self._ask(place)
                    else:
                        self.skipped[place] += 1
                    due[place] += self.period
            while self.flooder is not None and flooding < FLOOD and now < end:
                self._ask(self.count)
                flooding += 1
            wait = max(0.0, min([*due, end if now < end else now + 0.1]) - time.perf_counter())
            for sock, _ in poller.poll(int(1e3 * wait) + 1):
                place = places[sock]
                payload = sock.recv()
                if sock is self.flooder:
                    flooding -= 1
                    self._heard(place, payload, now)
                else:
                    self._heard(place, payload, open_since[place] or now)
                    open_since[place] = None
        lost = sum(at is not None for at in open_since[: self.count])
        self.context.destroy(linger=0)
        return self._summary(seconds, lost)

    def _summary(self, seconds: float, lost: int) -> dict[str, Any]:
        robots = self.latencies[: self.count]
        every = np.concatenate([np.array(each) for each in robots])
        in_time = [sum(ms <= self.deadline_ms for ms in each) for each in robots]
        moments = [sent + skipped for sent, skipped in zip(self.sent, self.skipped, strict=False)]
        shares = [hit / max(1, many) for hit, many in zip(in_time, moments, strict=True)]
        return {
            "robots": self.count,
            "answered": len(every),
            "refused": self.refused,
            "skipped": sum(self.skipped),
            "lost": lost,
            "in_time": round(sum(in_time) / max(1, sum(moments)), 4),
            "worst_robot": round(min(shares), 4),
            "answers_per_s": round(len(every) / seconds, 1),
            "latency_ms": statistics(every) if len(every) else {},
            "mean_batch": round(float(np.mean(self.batches)), 2) if self.batches else 0.0,
            "flooder_answers_per_s": round(len(self.latencies[-1]) / seconds, 1) if self.flooder else None,
        }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bundle", type=Path, default=BUNDLE)
    parser.add_argument("--engine", default="plan")
    parser.add_argument(
        "--robots",
        default="10,20,30,40",
        help="numbers of robots, separated by commas; each number is measured in its own round",
    )
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--hertz", type=float, default=10.0)
    parser.add_argument("--deadline-ms", type=float, default=100.0)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--flood", action="store_true")
    given = parser.parse_args()
    found: list[dict[str, Any]] = []
    print("| robots | batch | in time | worst robot | p50 | p99 | answers/s | mean batch | lost | skipped |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for number in range(given.rounds):
            for batch in (1, given.batch) if number % 2 == 0 else (given.batch, 1):
                own = ("--engine", given.engine, "--max-batch", batch, "--max-connections", 512)
                with serving(Path(folder) / "log", given.bundle, "--wire", "native:0", *own) as (address, _):
                    with Client(address, timeout=60) as client:
                        server = client.metadata()["server"]
                    for count in map(int, given.robots.split(",")):
                        robots = Robots(
                            address, given.bundle, count, given.hertz, given.deadline_ms, given.flood
                        )
                        line = robots.run(given.seconds) | {"max_batch": batch, "round": number}
                        found.append(line)
                        ms = line["latency_ms"]
                        print(
                            f"| {count} | {batch} | {line['in_time']:.1%} | {line['worst_robot']:.1%}"
                            f" | {ms.get('p50', 0):.0f} ms | {ms.get('p99', 0):.0f} ms | {line['answers_per_s']:.0f}"
                            f" | {line['mean_batch']:.1f} | {line['lost']} | {line['skipped']} |",
                            flush=True,
                        )
    result = {
        "schema": "sinew.benchmark.fleet/1",
        "bundle": given.bundle.name,
        "engine": given.engine,
        "batching": server.get("max_batch_reason"),
        "hertz": given.hertz,
        "deadline_ms": given.deadline_ms,
        "hardware": machine.cpu_model(),
        "load_average": os.getloadavg(),
        "rounds": found,
    }
    print(json.dumps(result))
    return int(any(line["lost"] for line in found))


if __name__ == "__main__":
    sys.exit(main())
