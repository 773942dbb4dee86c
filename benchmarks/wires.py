"""Overhead of each wire: the client's call minus the server's inference and waiting, per wire.

    python -m benchmarks.wires --requests 500

One server process and one client process per wire, one request after the other, two frames of 224 x 224, on a policy
so small that the wire counts: one solver step, which LeRobot's protocol cannot ask for. The call is timed where a robot
program would time it, around the client's own function: encoding, both ways through the sockets, decoding, the server's
threads and checks are all in it. The rows "zeromq" and "tcp" are sockets alone, of the library and of the kernel: as
many bytes there, a kilobyte back, and between the two a sleep as long as the native wire's inference. The last line is
JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import zmq

from benchmarks.wire_clients import connect
from sinew import machine
from sinew.bundle import Bundle

BUNDLE = Path(__file__).resolve().parents[1] / "sinew" / "assets" / "pen.gguf"  # the smallest: two cameras
WIRES = ("native", "openpi", "http", "groot", "lerobot")
GOALS_MS = {"native": 0.7, "openpi": 1.0}  # p50
SIDE = 224  # of the square frames that are sent, in pixels
STEPS = 1  # of the solver: as little inference as there can be


@contextlib.contextmanager
def serving(*arguments: object) -> Iterator[tuple[str, int]]:
    """``sinew serve`` until the end of the block; its last address and its process id."""
    command = [sys.executable, "-m", "sinew", "serve", *map(str, arguments)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        line = process.stdout.readline()
        if not line.startswith("ready on "):
            raise SystemExit(f"the server did not start: {process.stderr.read()}")
        yield line.removeprefix("ready on ").strip(), process.pid
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()


def observations(
    bundle: Path, side: int, seed: int = 0
) -> Iterator[tuple[dict[str, np.ndarray], np.ndarray]]:
    """Noise in the shapes of the bundle's cameras and state, without end."""
    spec, rng = Bundle(bundle).manifest.spec, np.random.default_rng(seed)
    while True:
        frames = {each.name: rng.integers(0, 256, (side, side, 3), dtype=np.uint8) for each in spec.cameras}
        yield frames, rng.uniform(-1, 1, spec.state.dim).astype(np.float32)


def measure(wire: str, requests: int, warmup: int, side: int, access: Path) -> dict[str, Any]:
    """LeRobot's replies have no place for the server's timing; there it is read from the access log."""
    # A thread for torch and the wire's: a second one for torch would take the wire's core on small machines.
    log = ["--access-log", access] if wire == "lerobot" else []
    with serving(BUNDLE, "--wire", f"{wire}:0", "--threads", 1, *log) as (address, _):
        client = connect(wire, address)
        if wire == "lerobot":
            client.policy = "pen"
        calls, totals, queues = [], [], []
        for number, (frames, state) in zip(
            range(warmup + requests), observations(BUNDLE, side), strict=False
        ):
            begin = time.perf_counter()
            answer = client.ask(frames, state, "swing it up", number, STEPS)
            calls.append(1e3 * (time.perf_counter() - begin))
            totals.append(answer.total_ms)
            queues.append(answer.queue_ms)
        client.close()
    if wire == "lerobot":
        entries = [json.loads(line) for line in access.read_text().splitlines()]
        entries = [entry for entry in entries if entry["outcome"] == "ok"]
        assert len(entries) == len(calls)
        totals = [entry["infer_ms"] for entry in entries]
        queues = [entry["queue_ms"] for entry in entries]
    overhead = np.subtract(calls, totals) - queues
    return {
        "call_ms": statistics(np.array(calls)[warmup:]),
        "policy_ms": statistics(np.array(totals)[warmup:]),
        "overhead_ms": statistics(overhead[warmup:]),
    }


PAUSE = """
import socket, sys, time
def pause():
    begin = time.perf_counter()
    time.sleep(float(sys.argv[1]) / 1e3)
    return f"{1e3 * (time.perf_counter() - begin):20.6f}".encode().ljust(1024)
"""
ECHOES = {
    "zeromq": """
import zmq
router = zmq.Context().socket(zmq.ROUTER)
print(router.bind_to_random_port("tcp://127.0.0.1"), flush=True)
while True:
    *envelope, payload = router.recv_multipart(copy=False)
    router.send_multipart([frame.bytes for frame in envelope] + [pause()])
""",
    "tcp": """
listening = socket.create_server(("127.0.0.1", 0))
print(listening.getsockname()[1], flush=True)
made, _ = listening.accept()
made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
room = memoryview(bytearray(int(sys.argv[2])))
while True:
    filled = 0
    while filled < len(room):
        filled += made.recv_into(room[filled:])
    made.sendall(pause())
""",
}


def measure_sockets(kind: str, requests: int, warmup: int, side: int, pause_ms: float) -> dict[str, Any]:
    """What no server of this kind of sockets can be faster than, with a processor that has slept meanwhile."""
    payload, calls, pauses = os.urandom(2 * 3 * side * side), [], []
    program = [sys.executable, "-c", PAUSE + ECHOES[kind], str(pause_ms), str(len(payload))]
    process = subprocess.Popen(program, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    port = int(process.stdout.readline())
    with contextlib.ExitStack() as stack:
        if kind == "zeromq":
            sock = stack.enter_context(stack.enter_context(zmq.Context()).socket(zmq.REQ))
            sock.connect(f"tcp://127.0.0.1:{port}")
            send, receive = sock.send, sock.recv
        else:
            made = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            send, receive = made.sendall, partial(made.recv, 1024, socket.MSG_WAITALL)
        for _ in range(warmup + requests):
            begin = time.perf_counter()
            send(payload)
            reply = receive()
            calls.append(1e3 * (time.perf_counter() - begin))
            pauses.append(float(reply))
        process.kill()
    process.wait()
    return {
        "call_ms": statistics(np.array(calls)[warmup:]),
        "policy_ms": statistics(np.array(pauses)[warmup:]),
        "overhead_ms": statistics(np.subtract(calls, pauses)[warmup:]),
    }


def statistics(values: np.ndarray) -> dict[str, float]:
    """Percentiles are observed values, rounded up in rank, as in ``sinew bench``."""
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
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--warmup", type=int, default=30)
    parser.add_argument("--side", type=int, default=SIDE, help="of the square frames, in pixels")
    arguments = parser.parse_args()
    before = os.getloadavg()
    with tempfile.TemporaryDirectory() as folder:
        rows = {
            wire: measure(
                wire, arguments.requests, arguments.warmup, arguments.side, Path(folder) / "access.jsonl"
            )
            for wire in arguments.wires
        }
        pause = rows.get("native", {"policy_ms": {"p50": 5.0}})["policy_ms"]["p50"]
        for kind in ECHOES:
            rows[kind] = measure_sockets(kind, arguments.requests, arguments.warmup, arguments.side, pause)
    print("| wire | call p50 (ms) | policy p50 (ms) | overhead p50 (ms) | overhead p99 (ms) | goal p50 |")
    print("|---|--:|--:|--:|--:|--:|")
    for wire, row in rows.items():
        goal = GOALS_MS.get(wire)
        print(
            f"| {wire} | {row['call_ms']['p50']:.2f} | {row['policy_ms']['p50']:.2f} |"
            f" {row['overhead_ms']['p50']:.2f} | {row['overhead_ms']['p99']:.2f} | {goal or ''} |"
        )
    result = {
        "schema": "sinew.benchmark.wires/1",
        "bundle": BUNDLE.name,
        "frames": f"2 x {arguments.side} x {arguments.side}",
        "solver_steps": STEPS,
        "requests": arguments.requests,
        "hardware": machine.cpu_model(),
        "load_average": {"before": before, "after": os.getloadavg()},
        "wires": rows,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
