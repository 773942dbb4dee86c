"""One server, one policy, every wire at once: nothing is lost or mixed up, and hostile peers hold nobody up.

SINEW_WIRE_REQUESTS sets the number of requests per client; the full run has 200.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from sinew_client import Client

from benchmarks.wire_clients import connect
from sinew.policy import Policy, load
from sinew.records.recorder import read_records
from tests import processes
from tests.serve.test_server import CASE, START_S, ServerProcess

pytest.importorskip("websockets.sync.client", reason="the client of the openpi wire needs websockets")
pytest.importorskip("grpc", reason="the lerobot wire needs grpcio")

REQUESTS = int(os.environ.get("SINEW_WIRE_REQUESTS", "12"))
WIRES = ("native", "openpi", "groot", "lerobot")
CAMERAS = ("camera1", "camera2")
ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 60.0  # of a well-behaved client while others misbehave for as long as it waits


@pytest.fixture(scope="module")
def policy(smolvla_bundle) -> Policy:
    return load(smolvla_bundle(CASE))


@pytest.fixture(scope="module")
def server(smolvla_bundle, tmp_path_factory) -> Iterator[ServerProcess]:
    directory = tmp_path_factory.mktemp("together")
    ports = {wire: processes.free_port() for wire in WIRES}
    wires = [word for wire, port in ports.items() for word in ("--wire", f"{wire}:{port}")]
    options = ["--threads", 1, "--queue", 16, "--record", directory / "records"]
    running = ServerProcess(directory, smolvla_bundle(CASE), *wires, *options)
    running.ports, running.records = ports, directory / "records"
    try:
        yield running
        assert running.stop() == 0
        assert "Traceback" not in running.log.read_text()
    finally:
        running.close()


def address(server: ServerProcess, wire: str) -> str:
    scheme = {"openpi": "ws", "lerobot": "grpc"}.get(wire, "tcp")
    return f"{scheme}://127.0.0.1:{server.ports[wire]}"


def open_client(server: ServerProcess, wire: str):
    client = connect(wire, address(server, wire))
    if wire == "lerobot":
        client.policy = CASE
    return client


def observation(wire: str, number: int) -> tuple[dict[str, np.ndarray], np.ndarray, str, int]:
    """Another one for each wire and number, of several sizes."""
    seed = 1000 * WIRES.index(wire) + number
    rng = np.random.default_rng(seed)
    shape = ((48, 64, 3), (64, 48, 3), (32, 32, 3))[number % 3 if wire != "lerobot" else 0]
    frames = {camera: rng.integers(0, 256, shape, dtype=np.uint8) for camera in CAMERAS}
    return frames, rng.uniform(-1, 1, 6).astype(np.float32), f"{wire} task {number}", seed


def expected(policy: Policy, wire: str, number: int, seed: int | None) -> np.ndarray:
    frames, state, prompt, _ = observation(wire, number)
    return policy.infer({"images": frames, "state": state, "prompt": prompt, "seed": seed}).actions


def drive(server: ServerProcess, wire: str, start: threading.Barrier) -> list[tuple[np.ndarray, float]]:
    client = open_client(server, wire)
    start.wait(START_S)
    found = []
    for number in range(REQUESTS):
        frames, state, prompt, seed = observation(wire, number)
        begin = time.perf_counter()
        answer = client.ask(frames, state, prompt, seed)
        found.append((answer.actions, 1e3 * (time.perf_counter() - begin)))
    client.close()
    return found


@pytest.mark.proves(wire=("native", "openpi", "groot", "lerobot"), family="smolvla")
def test_four_wires_at_once(server, policy, capsys):
    """Every client asks with observations of its own and checks each answer against ``Policy.infer``, bit for bit.
    LeRobot's protocol has no seed; the record of the request has it."""
    start = threading.Barrier(len(WIRES))
    with ThreadPoolExecutor(len(WIRES)) as pool:
        driven = {wire: pool.submit(drive, server, wire, start) for wire in WIRES}
        replies = {wire: each.result() for wire, each in driven.items()}
    seeds = recorded_seeds(server, len(WIRES) * REQUESTS)
    for wire, answers in replies.items():
        assert len(answers) == REQUESTS
        for number, (actions, _) in enumerate(answers):
            seed = seeds[f"{wire} task {number}"]
            if wire != "lerobot":
                assert seed == 1000 * WIRES.index(wire) + number
            np.testing.assert_array_equal(actions, expected(policy, wire, number, seed))
        times = [milliseconds for _, milliseconds in answers]
        p50, p99 = np.percentile(times, [50, 99], method="higher")
        with capsys.disabled():
            print(f"\n  {wire}: {len(answers)} requests, p50 {p50:.1f} ms, p99 {p99:.1f} ms", end="")


def recorded_seeds(server: ServerProcess, count: int) -> dict[str, int]:
    """Prompt -> seed, once all records are written."""
    end = time.monotonic() + START_S
    while len(list(server.records.glob("*.npz"))) < count:
        assert time.monotonic() < end
        time.sleep(0.05)
    return {record.observation.prompt: record.meta["seed"] for record in read_records(server.records)}


# ----------------------------------------------------------------------------- peers that misbehave


@contextlib.contextmanager
def watched(server: ServerProcess, policy: Policy) -> Iterator[None]:
    """Inside, a client asks again and again: every answer is right and comes within the deadline."""
    frames, state, prompt, seed = observation("native", 0)
    wanted = expected(policy, "native", 0, seed)
    sent = {"images": frames, "state": state, "prompt": prompt, "seed": seed}
    end, failures, count = threading.Event(), [], [0]

    def ask() -> None:
        with Client(address(server, "native"), timeout=DEADLINE_S) as client:
            while not end.is_set():
                try:
                    np.testing.assert_array_equal(client.infer(sent).actions, wanted)
                    count[0] += 1
                except Exception as error:  # noqa: BLE001 - told by the test's own thread
                    failures.append(error)
                    return

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        yield
    finally:
        end.set()
        asking.join(START_S)
    assert not failures, failures[0]
    assert count[0] > 0


GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)  # ZMTP 3.0
READY = b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x03REQ"


@pytest.mark.parametrize("wire", ["native", "groot"])
def test_slow_peers_on_the_zeromq_ports(server, policy, wire):
    """Sixty connections: some say nothing, some stop inside the greeting, some announce 60 MiB and send a byte now
    and then. Each costs a socket and no memory."""
    before = resident(server)
    with watched(server, policy), contextlib.ExitStack() as stack:
        peers = []
        for number in range(60):
            peer = stack.enter_context(socket.create_connection(("127.0.0.1", server.ports[wire])))
            head = (b"", GREETING[:10], GREETING + READY + b"\x01\x00\x02" + (60 << 20).to_bytes(8, "big"))
            peer.sendall(head[number % 3])
            peers.append(peer)
        for _ in range(10):
            time.sleep(0.1)
            for peer in peers[2::3]:
                with contextlib.suppress(OSError):
                    peer.sendall(b"x")
        with contextlib.closing(open_client(server, wire)) as client:
            frames, state, prompt, seed = observation(wire, 1)
            np.testing.assert_array_equal(
                client.ask(frames, state, prompt, seed).actions, expected(policy, wire, 1, seed)
            )
        grown = resident(server) - before
    assert grown < 200 << 20, f"{grown >> 20} MiB for 20 messages of 60 MiB that never came"


def resident(server: ServerProcess) -> int:
    """Bytes."""
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1]) << 10


VICTIM = """
import sys, time
import numpy as np
from benchmarks.wire_clients import connect
wire, address, case = sys.argv[1:]
client = connect(wire, address)
if wire == "lerobot":
    client.policy = case
rng = np.random.default_rng(0)
frames = {name: rng.integers(0, 256, (48, 64, 3), dtype=np.uint8) for name in ("camera1", "camera2")}
print("asking", flush=True)
while True:
    client.ask(frames, np.zeros(6, np.float32), "victim", 1)
"""


def test_clients_killed_in_the_middle_of_requests(server, policy):
    """Real processes, SIGKILL, on every wire and at arbitrary moments; the others are answered meanwhile, and the
    server ends with no connection, no waiting request and nothing running on behalf of the dead."""
    with watched(server, policy):
        victims = []
        for wire in WIRES:
            command = [sys.executable, "-c", VICTIM, wire, address(server, wire), CASE]
            victims.append(processes.Process(command, stdout=subprocess.PIPE, cwd=ROOT))
        for number, victim in enumerate(victims):
            assert victim.stdout.readline() == "asking\n"
            time.sleep(0.15 + 0.037 * number)
            victim.kill()
            assert victim.wait() < 0
            victim.stdout.close()
    with Client(address(server, "native"), timeout=START_S) as client:
        end = time.monotonic() + START_S
        while (health := client.health())["waiting"] or health["running"]:
            assert time.monotonic() < end, health
            time.sleep(0.01)
    for wire in WIRES:
        with contextlib.closing(open_client(server, wire)) as client:
            frames, state, prompt, seed = observation(wire, 2)
            assert client.ask(frames, state, prompt, seed).actions.shape == (50, 6)
