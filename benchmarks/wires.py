"""Measure the overhead of each protocol: the time of the client's call minus the times of inference and queue.

    python -m benchmarks.wires [--wires native openpi] [--pin] [--pause MS]

Each protocol has its own server process. One client process sends one request after the other, with two frames of
224 x 224. The policy is small and runs one solver step, so that the protocol dominates. LeRobot's protocol cannot set
the solver steps. The benchmark times the client's own function, as a robot program would. The time includes encoding,
both directions through the sockets, decoding, and the threads and checks of the server.

The last rows are limits that no server can improve:

* "zeromq" and "tcp" are sockets alone, of the library and of the kernel. They send as many bytes, sleep as long as the
  inference of the first protocol, and receive a kilobyte.
* "openpi client" is openpi's client with a WebSocket that receives the bytes, ignores them, and answers after such a
  sleep.

All rows run in each round, so that a change in the speed of the machine affects all of them. With --pin, the client
has one core and the servers have another core, as on two machines. With --pause, the client sleeps before each
request, as a robot does. The last line of the output is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import zmq
from rich.console import Console
from rich.progress import track
from sinew_client.link import unconnected

from benchmarks.paired import median_interval
from benchmarks.wire_clients import connect
from sinew.bundle import Bundle
from sinew.core import machine

BUNDLE = (
    Path(__file__).resolve().parents[1] / "sinew" / "assets" / "pen.gguf"
)  # the smallest policy with two cameras
WIRES = (
    "native",
    "ipc",
    "openpi",
    "http",
    "groot",
    "lerobot",
)  # "ipc" is the native protocol over a Unix socket
GOALS_MS = {"native": 0.35, "openpi": 1.0}  # goals for the p50 of the overhead
SIDE = 224  # height and width of the frames, in pixels
STEPS = 1  # solver steps, as few as possible


SERVERS: list[int] = []  # the core of the servers, if --pin is set
SLEEPS: list[float] = []  # seconds before each request, if --pause is set


def elsewhere(process: int) -> None:
    """Move a new process to the core of the servers, if --pin is set."""
    if SERVERS:
        os.sched_setaffinity(process, SERVERS)


def sleep() -> None:
    """Sleep before a request if --pause is set, so that processor caches become cold."""
    for seconds in SLEEPS:
        time.sleep(seconds)


@contextlib.contextmanager
def serving(*arguments: object) -> Iterator[tuple[str, int]]:
    """Run ``sinew serve`` until the end of the block. Yields its last address and its process id."""
    command = [sys.executable, "-m", "sinew", "serve", "--no-prepare", *map(str, arguments)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    elsewhere(process.pid)
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        line = process.stdout.readline()
        if not line.startswith("ready on "):
            raise SystemExit(f"the server did not start: {process.stderr.read()}")
        yield line.removeprefix("ready on ").strip(), process.pid
    finally:
        process.terminate()
        try:
            process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()


def observations(
    bundle: Path, side: int, seed: int = 0
) -> Iterator[tuple[dict[str, np.ndarray], np.ndarray]]:
    """Yield random frames and states in the shapes of the bundle, without end."""
    spec, rng = Bundle(bundle).manifest.spec, np.random.default_rng(seed)
    while True:
        frames = {each.name: rng.integers(0, 256, (side, side, 3), dtype=np.uint8) for each in spec.cameras}
        yield frames, rng.uniform(-1, 1, spec.state.dim).astype(np.float32)


class TimedClient:
    """A client of one protocol with random observations."""

    def __init__(self, stack: contextlib.ExitStack, wire: str, address: str, side: int):
        self._client = connect(wire, address)
        stack.callback(self._client.close)
        self._observations = observations(BUNDLE, side)
        self._sent = 0

    def __call__(self, requests: int) -> list[tuple[float, float]]:
        """Send requests. Returns (time of the call, time of policy and queue) for each request, in milliseconds."""
        rows = []
        for frames, state in itertools.islice(self._observations, requests):
            sleep()
            begin = time.perf_counter()
            answer = self._client.ask(frames, state, "swing it up", self._sent, STEPS)
            call = 1e3 * (time.perf_counter() - begin)
            rows.append((call, (answer.total_ms or 0) + (answer.queue_ms or 0)))
            self._sent += 1
        return rows


class TimedServer(TimedClient):
    """A server of one protocol and its client.

    LeRobot's answers do not contain the times of the server. So this class reads the times from the access log.
    """

    def __init__(self, stack: contextlib.ExitStack, wire: str, side: int, access: Path):
        self._access = access if wire == "lerobot" else None
        # The server gets one thread for torch. On small machines, a second one would take the core of the protocol's
        # thread.
        log = ["--access-log", access] if self._access else []
        where = f"native:ipc://{access.with_suffix('.sock')}" if wire == "ipc" else f"{wire}:0"
        address, _ = stack.enter_context(serving(BUNDLE, "--wire", where, "--threads", 1, *log))
        super().__init__(stack, "native" if wire == "ipc" else wire, address, side)
        if wire == "lerobot":
            self._client.policy = "pen"

    def __call__(self, requests: int) -> list[tuple[float, float]]:
        """Send requests. Returns (time of the call, time of policy and queue) for each request, in milliseconds."""
        rows = super().__call__(requests)
        if self._access is None:
            return rows
        entries = [json.loads(line) for line in self._access.read_text().splitlines()]
        entries = [entry for entry in entries if entry["outcome"] == "ok"]
        assert len(entries) == self._sent
        return [
            (call, entry["infer_ms"] + entry["queue_ms"])
            for (call, _), entry in zip(rows, entries[-requests:], strict=True)
        ]


PAUSE = """
import socket, sys, time
def pause():
    begin = time.perf_counter()
    time.sleep(float(sys.argv[1]) / 1e3)
    return 1e3 * (time.perf_counter() - begin)
def kilobyte():
    return f"{pause():20.6f}".encode().ljust(1024)
def accept():
    listening = socket.create_server(("127.0.0.1", 0))
    print(listening.getsockname()[1], flush=True)
    made, _ = listening.accept()
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return made
def fill(made, room):
    filled = 0
    while filled < len(room):
        filled += made.recv_into(room[filled:]) or sys.exit()
"""
ECHOES = {
    "zeromq": """
import zmq
router = zmq.Context().socket(zmq.ROUTER)
print(router.bind_to_random_port("tcp://127.0.0.1"), flush=True)
while True:
    *envelope, payload = router.recv_multipart(copy=False)
    router.send_multipart([frame.bytes for frame in envelope] + [kilobyte()])
""",
    "tcp": """
made, room = accept(), memoryview(bytearray(int(sys.argv[2])))
while True:
    fill(made, room)
    made.sendall(kilobyte())
""",
    "openpi client": """
import msgpack
from websockets.server import ServerProtocol
made, protocol, room = accept(), ServerProtocol(), memoryview(bytearray(1 << 24))
def send(reply):
    protocol.send_binary(msgpack.packb(reply))
    made.sendall(b"".join(protocol.data_to_send()))
while protocol.state.name != "OPEN":
    protocol.receive_data(made.recv(1 << 16))
    for request in protocol.events_received():
        protocol.send_response(protocol.accept(request))
send({})
header = room[:14]  # of a masked frame of 64 KiB and more
while True:
    fill(made, header)
    fill(made, room[: int.from_bytes(header[2:10], "big")])
    send({"actions": bytes(1024), "policy_timing": {"infer_ms": pause()}, "server_timing": {"queue_ms": 0.0}})
""",
}


@contextlib.contextmanager
def echo(kind: str, pause_ms: float, size: int) -> Iterator[int]:
    """Run a program of ``ECHOES`` until the end of the block. Yields its port."""
    command = [sys.executable, "-c", PAUSE + ECHOES[kind], str(pause_ms), str(size)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        elsewhere(process.pid)
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline())
        finally:
            process.kill()


class Sockets:
    """Sockets alone, which are a lower bound for every server. The other side sleeps before its answer, so its core
    is idle."""

    def __init__(self, stack: contextlib.ExitStack, kind: str, side: int, pause_ms: float):
        self._payload = os.urandom(2 * 3 * side * side)
        port = stack.enter_context(echo(kind, pause_ms, len(self._payload)))
        if kind == "zeromq":
            sock = stack.enter_context(stack.enter_context(zmq.Context()).socket(zmq.REQ))
            sock.connect(f"tcp://127.0.0.1:{port}")
            self._send, self._receive = sock.send, sock.recv
        else:
            place = "127.0.0.1", port
            made = stack.enter_context(unconnected(socket.AF_INET, socket.SOCK_STREAM, 0, place))
            made.connect(place)
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._send, self._receive = made.sendall, partial(made.recv, 1024, socket.MSG_WAITALL)

    def __call__(self, requests: int) -> list[tuple[float, float]]:
        """Send requests. Returns (time of the call, time of the sleep) for each request, in milliseconds."""
        rows = []
        for _ in range(requests):
            sleep()
            begin = time.perf_counter()
            self._send(self._payload)
            reply = self._receive()
            rows.append((1e3 * (time.perf_counter() - begin), float(reply)))
        return rows


def rounds(
    wires: Sequence[str], count: int, requests: int, warmup: int, side: int
) -> dict[str, list[np.ndarray]]:
    """Measure each protocol and each kind of socket. All of them run in each round, in random order.

    Returns:
        Name -> one array [requests, 2] for each round: the time of the call, and the time of policy and queue.
    """
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        timed: dict[str, TimedClient | Sockets] = {
            wire: TimedServer(stack, wire, side, Path(folder) / "access.jsonl") for wire in wires
        }
        first = [timed[wire](warmup) for wire in wires]
        pause = float(np.median([rest for _, rest in first[0]]))
        for kind in ("zeromq", "tcp"):
            timed[kind] = Sockets(stack, kind, side, pause)
        port = stack.enter_context(echo("openpi client", pause, 0))
        timed["openpi client"] = TimedClient(stack, "openpi", f"ws://127.0.0.1:{port}", side)
        for name in ECHOES:
            timed[name](warmup)
        found: dict[str, list[np.ndarray]] = {name: [] for name in timed}
        for _ in track(range(count), "rounds", console=Console(stderr=True), transient=True):
            for name in rng.permutation(list(timed)):
                timed[name](2)  # this client has been idle, so two requests warm it up
                found[name].append(np.array(timed[name](requests)))
    return found


def row(own: Sequence[np.ndarray], bare: Sequence[np.ndarray]) -> dict[str, Any]:
    """Return the statistics of one protocol.

    Args:
        own: The rounds of the protocol.
        bare: The rounds of the TCP socket.

    Returns:
        The times of the call, the policy and the overhead. ``above_tcp_ms`` is the median over the rounds of the
        difference between both medians, with a 95 % interval of ranks.
    """
    call, rest = np.concatenate(own).T
    above = [medians(mine) - medians(theirs) for mine, theirs in zip(own, bare, strict=True)]
    return {
        "call_ms": statistics(call),
        "policy_ms": statistics(rest),
        "overhead_ms": statistics(call - rest),
        "above_tcp_ms": [round(value, 3) for value in median_interval(above)],
    }


def medians(rows: np.ndarray) -> float:
    """Return the median time outside the policy for calls [n, 2]."""
    return float(np.median(rows[:, 0] - rows[:, 1]))


def statistics(values: np.ndarray) -> dict[str, float]:
    """Return p50, p90, p99 and the largest of the values.

    Each percentile is one of the values: its rank is rounded up, as in ``sinew bench``.
    """
    found = np.percentile(values, [50, 90, 99], method="higher")
    return {
        name: round(float(value), 3)
        for name, value in zip(("p50", "p90", "p99", "max"), (*found, values.max()), strict=True)
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--wires", nargs="+", default=WIRES, choices=WIRES)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument(
        "--requests", type=int, default=25, help="number of requests for each protocol in a round"
    )
    parser.add_argument("--warmup", type=int, default=30)
    parser.add_argument("--side", type=int, default=SIDE, help="height and width of the frames, in pixels")
    parser.add_argument(
        "--pin", action="store_true", help="run the client on one core, and the servers on another"
    )
    parser.add_argument(
        "--pause", type=float, default=0.0, help="milliseconds that clients sleep before each request"
    )
    arguments = parser.parse_args()
    if arguments.pause:
        SLEEPS.append(arguments.pause / 1e3)
    if arguments.pin:
        if not hasattr(os, "sched_setaffinity"):
            parser.error("--pin: this system cannot fix a process to a core; use Linux")
        if len(cores := sorted(os.sched_getaffinity(0))) < 2:
            parser.error("--pin: needs two cores, and this machine has fewer")
        os.sched_setaffinity(0, cores[:1])
        SERVERS.append(cores[1])
    before = os.getloadavg()
    found = rounds(arguments.wires, arguments.rounds, arguments.requests, arguments.warmup, arguments.side)
    rows = {name: row(own, found["tcp"]) for name, own in found.items()}
    print("| wire | call p50 (ms) | policy p50 | overhead p50 | p99 | above tcp, 95 % interval | goal p50 |")
    print("|---|--:|--:|--:|--:|--:|--:|")
    for wire, each in rows.items():
        middle, low, high = each["above_tcp_ms"]
        print(
            f"| {wire} | {each['call_ms']['p50']:.2f} | {each['policy_ms']['p50']:.2f} |"
            f" {each['overhead_ms']['p50']:.2f} | {each['overhead_ms']['p99']:.2f} |"
            f" {middle:.2f} ({low:.2f} to {high:.2f}) | {GOALS_MS.get(wire, '')} |"
        )
    result = {
        "schema": "sinew.benchmark.wires/2",
        "bundle": BUNDLE.name,
        "frames": f"2 x {arguments.side} x {arguments.side}",
        "solver_steps": STEPS,
        "rounds": arguments.rounds,
        "requests": arguments.requests,
        "pinned": arguments.pin,
        "pause_ms": arguments.pause,
        "hardware": machine.cpu_model(),
        "load_average": {"before": before, "after": os.getloadavg()},
        "wires": rows,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
