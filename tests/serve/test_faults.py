"""Faults, one after the other, on a server that must answer as before after each of them.

The short form runs each once. ``--faults-rounds N`` runs them N times in another order each time, on the same server,
which is what ``make soak`` does.
"""

from __future__ import annotations

import contextlib
import json
import random
import resource
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import zmq
from sinew_client import Client, ClientError, ServerError, protocol, zmtp
from sinew_client.control import CommandListener, Loop, Servers, Settings
from sinew_client.control.reaction import histogram
from sinew_client.control.robots import Dry
from websockets.sync.client import connect as websocket

from sinew.serve.supervise import RESTARTS, RESTARTS_S
from tests import processes
from tests.serve.puppet import (
    FRAME,
    GOOD,
    GREETING,
    WAIT_S,
    Puppet,
    connect,
    desk,
    frame,
    request,
    shake,
    until,
)
from tests.serve.test_bounded_work import body, post, progressive
from tests.serve.test_server import ServerProcess, raw_socket, serving

KEY = "secret"
PEN = Path(__file__).resolve().parents[2] / "sinew" / "assets" / "pen.gguf"
AUTHORIZED = {"Authorization": f"Bearer {KEY}"}
READY = frame(b"\x05READY\x0bSocket-Type\0\0\0\x03REQ", 4)
TLS_HELLO = bytes.fromhex("16030100c8010000c40303") + bytes(190)
FAULTS: dict[str, Callable[[SimpleNamespace], None]] = {}


def fault(name: str) -> Callable:
    def add(function: Callable[[SimpleNamespace], None]) -> Callable[[SimpleNamespace], None]:
        FAULTS[name] = function
        return function

    return add


def bytes_then_leave(wire: str, data: bytes, reset: bool = False) -> Callable[[SimpleNamespace], None]:
    def act(at: SimpleNamespace) -> None:
        with connect(getattr(at, wire)) as peer:
            with contextlib.suppress(OSError):
                peer.sendall(data)
            if reset:
                peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    return act


HTTP = b"POST /v1/actions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer secret\r\n"
for _wire, _name, _data in (
    ("native", "nothing", b""),
    ("native", "half a greeting", GREETING[:20]),
    ("native", "a greeting", GREETING),
    ("native", "a handshake", GREETING + READY),
    ("native", "an unfinished frame", GREETING + READY + frame(b"x" * 1000, 0, 1 << 20)),
    ("native", "a frame of a terabyte", GREETING + READY + frame(b"x", 0, 1 << 40)),
    ("native", "millions of parts", GREETING + READY + frame(b"", 1) * 1_000_000),
    ("native", "pings", GREETING + READY + frame(b"\x04PING\0\x10hello", 4) * 10_000),
    ("native", "HTTP", b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"),
    ("native", "TLS", TLS_HELLO),
    ("native", "noise", random.Random(1).randbytes(100_000)),
    ("native", "requests without a key", GREETING + READY + zmtp.message([b"", b"\x08\x01" * 400]) * 50),
    ("native", "an old ZMTP", GREETING[:10] + b"\x01" + bytes(53)),
    ("web", "nothing", b""),
    ("web", "half a head", HTTP),
    ("web", "half a body", HTTP + b"Content-Length: 1000\r\n\r\n{"),
    ("web", "a body of a terabyte", HTTP + b"Content-Length: 1000000000000\r\n\r\n{"),
    ("web", "two lengths", HTTP + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n{"),
    ("web", "a broken chunk", HTTP + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n"),
    ("web", "ZMTP", GREETING + READY),
    ("web", "TLS", TLS_HELLO),
    ("web", "noise", random.Random(2).randbytes(100_000)),
    ("web", "a long head", b"GET /" + b"x" * 1_000_000),
):
    FAULTS[f"{_wire}: {_name}"] = bytes_then_leave(_wire, _data)
    if _name in ("an unfinished frame", "half a body", "a handshake"):
        FAULTS[f"{_wire}: {_name}, reset"] = bytes_then_leave(_wire, _data, reset=True)


# ----------------------------------------------------------------------------- clients


def refused(**changes: Any) -> Callable[[SimpleNamespace], None]:
    def act(at: SimpleNamespace) -> None:
        with Client(at.native, timeout=WAIT_S, api_key=KEY) as client, pytest.raises(ClientError):
            client.infer({**GOOD, **changes})

    return act


for _name, _changes in (
    ("numbers that are not finite", {"state": [float("nan"), 0]}),
    ("a camera's name of 70 kB", {"images": {"x" * 70_000: FRAME}}),
    ("a session's name of 100 kB", {"session": "x" * 100_000}),
    ("a picture of scans", {"images": {"front": progressive(5000)}}),
    ("half a picture", {"images": {"front": progressive(1)[:200]}}),
    ("no deadline at all", {"deadline_ms": 0}),
    ("a policy that fails", {"prompt": "fail"}),
    ("a policy that panics", {"prompt": "panic"}),
    ("a policy that exits", {"prompt": "exit"}),
    ("a policy without memory", {"prompt": "memory"}),
):
    if _name != "numbers that are not finite":  # the puppet takes any number
        FAULTS[f"request: {_name}"] = refused(**_changes)


@fault("a client leaves during an inference")
def leave_running(at: SimpleNamespace) -> None:
    with shake(at.native) as peer:
        peer.sendall(zmtp.message([b"", request(1, "wait") + key_field()]))
        until(lambda: at.service.health()["running"])
    until(lambda: not at.service.health()["running"])


def key_field() -> bytes:
    """The API key behind a request that has none."""
    return protocol.encode_control("METADATA", 0, "", KEY)[
        len(protocol.encode_control("METADATA", 0, "", "")) :
    ]


@fault("many clients leave while they wait")
def leave_waiting(at: SimpleNamespace) -> None:
    peers = [shake(at.native) for _ in range(10)]
    for peer in peers:
        peer.sendall(zmtp.message([b"", request(1, "wait") + key_field()]))
    until(lambda: at.service.health()["waiting"] >= 9)
    for peer in peers:
        peer.close()
    until(lambda: not at.service.health()["waiting"] and not at.service.health()["running"])


@fault("a client floods")
def flood(at: SimpleNamespace) -> None:
    with shake(at.native) as peer:
        peer.settimeout(0.2)
        with contextlib.suppress(TimeoutError, ConnectionError):
            peer.sendall(zmtp.message([b"", request(1) + key_field()]) * 300)


@fault("a client reads nothing")
def read_nothing(at: SimpleNamespace) -> None:
    ask = zmtp.message([b"", protocol.encode_control("METADATA", 1, "", KEY)])
    with shake(at.native) as peer:
        peer.settimeout(0.2)
        with contextlib.suppress(TimeoutError, ConnectionError):
            for _ in range(200):
                peer.sendall(ask * 200)


@fault("two hundred connections come and go")
def churn(at: SimpleNamespace) -> None:
    for _ in range(200):
        connect(at.native).close()


@fault("three hundred connections stay for a while")
def crowd(at: SimpleNamespace) -> None:
    with contextlib.ExitStack() as stack:
        for wire in ("native", "web"):
            for _ in range(150):
                stack.enter_context(connect(getattr(at, wire)))
        canary(at)


@fault("wrong keys")
def wrong_keys(at: SimpleNamespace) -> None:
    for key in ("", "wrong", "s", "secret\0", "\x80" * 10):
        with Client(at.native, timeout=WAIT_S, api_key=key) as client, pytest.raises(ServerError):
            client.health()
    assert post(at.web, body(), Authorization="Bearer wrong")[0] == 401


@fault("many sessions")
def sessions(at: SimpleNamespace) -> None:
    with Client(at.native, timeout=WAIT_S, api_key=KEY) as client:
        for number in range(100):
            client.infer({**GOOD, "session": f"{number}-" + "x" * 100})


@fault("a web page asks")
def web_page(at: SimpleNamespace) -> None:
    assert post(at.web, body(), Origin="https://evil.example", **AUTHORIZED)[0] == 403


@fault("a WebSocket breaks in the middle of a frame")
def broken_websocket(at: SimpleNamespace) -> None:
    with websocket(at.web, additional_headers=AUTHORIZED) as robot:
        robot.recv(WAIT_S)
        robot.socket.sendall(b"\x82\xfe\xff\xff" + bytes(100))
        robot.socket.shutdown(socket.SHUT_RDWR)


@fault("a WebSocket sends text, garbage, and closes")
def odd_websockets(at: SimpleNamespace) -> None:
    for sent in ("text", b"garbage", b"\xdf\xff\xff\xff\xff"):
        with websocket(at.web, additional_headers=AUTHORIZED) as robot:
            robot.recv(WAIT_S)
            robot.send(sent)
            assert isinstance(robot.recv(WAIT_S), str)


# ----------------------------------------------------------------------------- the server's own parts


def kill_thread(name: str) -> Callable[[SimpleNamespace], None]:
    def act(at: SimpleNamespace) -> None:
        import ctypes

        (thread,) = (each for each in threading.enumerate() if each.name == name and each not in at.before)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit))
        with contextlib.suppress(ClientError), Client(at.native, timeout=2, api_key=KEY) as client:
            client.infer(GOOD)
        assert thread.is_alive()

    return act


for _name in ("sinew-infer", "sinew-native"):
    FAULTS[f"the thread {_name} gets an exception"] = kill_thread(_name)


@fault("a policy fails until it does not")
def sick(at: SimpleNamespace) -> None:
    puppet: Puppet = at.puppet
    puppet.sick = MemoryError("no memory")
    with Client(at.native, timeout=WAIT_S, api_key=KEY) as client:
        for _ in range(3):
            with pytest.raises(ServerError):
                client.infer(GOOD)
        assert client.health()["status"] == "unhealthy"
        puppet.sick = None
        client.infer(GOOD)


@fault("no descriptor is free")
def descriptors(at: SimpleNamespace) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(list(Path("/proc/self/fd").iterdir()))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 8, hard))
    try:
        made: list[socket.socket] = []
        with contextlib.suppress(OSError):
            while len(made) < 20:
                made += [connect(at.native)]
        time.sleep(0.1)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for each in made:
            each.close()


@fault("the clock jumps")
def clock(at: SimpleNamespace) -> None:
    real = time.time
    for days in (-10, 10):
        time.time = lambda days=days: real() + 86_400 * days
        try:
            canary(at)
        finally:
            time.time = real


@fault("the record folder disappears")
def no_folder(at: SimpleNamespace) -> None:
    folder = at.recorder.directory
    while folder.exists():  # a record may just be on its way
        shutil.rmtree(folder, ignore_errors=True)
    canary(at)
    folder.mkdir(exist_ok=True)


@fault("the record folder is a full disk")
def full_disk(at: SimpleNamespace) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        canary(at)
        time.sleep(0.1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, old)


@fault("a second recorder writes into the folder")
def second_recorder(at: SimpleNamespace) -> None:
    from sinew.records.recorder import Recorder

    other = Recorder(at.recorder.directory)
    canary(at)
    other.close()


@fault("garbage collection stops the world")
def collect(at: SimpleNamespace) -> None:
    import gc

    for _ in range(5):
        gc.collect()


# ----------------------------------------------------------------------------- the suite


def canary(at: SimpleNamespace) -> None:
    """The server answers a robot on each wire, with the robot's own answer."""
    at.asked += 1
    with Client(at.native, timeout=WAIT_S, api_key=KEY) as robot:
        assert (robot.infer({**GOOD, "state": [at.asked, 0]}).actions == at.asked).all()
        assert robot.health()["status"] == "ok"
    status, answer, _ = post(at.web, body(state=[at.asked, 0]), **AUTHORIZED)
    assert (status, f"[{at.asked}.0, {at.asked}.0]".encode() in answer) == (200, True)
    with urllib.request.urlopen(at.web.replace("ws://", "http://") + "/healthz", timeout=WAIT_S) as found:
        assert found.status == 200


@pytest.fixture(scope="module")
def at(tmp_path_factory) -> Iterator[SimpleNamespace]:
    from sinew.records.recorder import Recorder

    recorder = Recorder(tmp_path_factory.mktemp("records") / "here")
    before = set(threading.enumerate())
    with desk(("native", "web"), api_key=KEY, recorder=recorder) as made:
        made.recorder, made.asked, made.before = recorder, 0, before
        canary(made)
        yield made
        canary(made)
        books = made.opened["native"].ledger
        until(lambda: not books.open, "the last connection to be gone")
        assert (books.held_bytes, books.strangers_held) == (0, 0)
        assert recorder.stats()["alive"]
    recorder.close()


@pytest.mark.parametrize("name", FAULTS)
def test_the_server_answers_after(at, name):
    FAULTS[name](at)
    canary(at)


def test_many_rounds(at, request):
    rounds = request.config.getoption("--faults-rounds")
    for number in range(rounds):
        names = list(FAULTS)
        random.Random(number).shuffle(names)
        begun = time.monotonic()
        for name in names:
            FAULTS[name](at)
        canary(at)
        # Each round kills each thread once, and one may be started again so many times in so many seconds.
        time.sleep(max(0.0, 1 + RESTARTS_S / RESTARTS - (time.monotonic() - begun)))


# ----------------------------------------------------------------------------- processes


def ask(server: Any, **options: Any) -> np.ndarray:
    with Client(server.address, timeout=WAIT_S, **options) as robot:
        policy = robot.metadata()["policy"]
        images = {
            each["name"]: np.zeros((each["height"], each["width"], 3), np.uint8) for each in policy["cameras"]
        }
        state = np.zeros(policy["state"]["dim"])
        found: np.ndarray = robot.infer(
            {"images": images, "state": state, "prompt": "swing", "seed": 1}
        ).actions
        return found


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("process"), PEN, "--wire", "native:0", "--threads", 1) as running:
        running.expected = ask(running)
        yield running
        assert running.stop(timeout=WAIT_S) == 0
        assert "Traceback" not in running.log.read_text()


@pytest.mark.parametrize("seconds", [0.1, 2])
def test_a_process_that_was_stopped_goes_on(server, seconds):
    server.process.send_signal(signal.SIGSTOP)
    time.sleep(seconds)
    server.process.send_signal(signal.SIGCONT)
    np.testing.assert_array_equal(ask(server), server.expected)


def test_a_signal_of_a_broken_pipe(server):
    server.process.send_signal(signal.SIGPIPE)
    np.testing.assert_array_equal(ask(server), server.expected)


def test_signals_that_end_a_server(tmp_path):
    """During an inference. The first two in order, the third by the system's rule; nothing keeps the ports."""
    ends = {signal.SIGTERM: 0, signal.SIGINT: 0, signal.SIGHUP: -signal.SIGHUP}
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(len(ends)) as pool:

        def start(_number: int) -> Any:
            return ServerProcess(tmp_path, PEN, "--wire", "native:0", "--threads", 1)

        servers = dict(zip(ends, pool.map(start, ends), strict=True))  # at once: each imports torch
        for number, other in servers.items():
            stack.callback(other.close)
            dealer = stack.enter_context(raw_socket(other.address, zmq.DEALER))
            for _ in range(3):
                dealer.send(b"")
            ask(other)
            other.process.send_signal(number)
        for number, other in servers.items():
            assert other.process.wait(WAIT_S) == ends[number]


def test_signals_that_a_server_was_started_to_ignore(tmp_path):
    """As `sinew serve ... &` in a script and `nohup sinew serve` do; SIGTERM ends it in any case."""
    ignored = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM)
    with serving(tmp_path, PEN, "--wire", "native:0", "--threads", 1, ignored=ignored) as other:
        expected = ask(other)
        for number in ignored[:2]:
            other.process.send_signal(number)
            np.testing.assert_array_equal(ask(other), expected)
        assert other.stop(timeout=WAIT_S) == 0


@pytest.mark.parametrize("where", ["observe", "act"])
def test_a_robot_whose_own_methods_block_is_held(server, where, monkeypatch: pytest.MonkeyPatch):
    """For 3 s, of a robot that the server answers: two periods are the longest gap between two commands or holds."""
    hz, blocks = 20.0, 3.0
    late = [0.0]  # seconds by which this machine woke the watchdog after its time
    starved = [0.0]  # seconds between a claim of the robot and its command

    class Waking(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            due = time.monotonic() + (timeout or 0.0)
            ended = super().wait(timeout)
            late.append(time.monotonic() - due)
            return ended

    monkeypatch.setattr(
        "sinew_client.control.watchdog.threading",
        SimpleNamespace(Event=Waking, Lock=threading.Lock, Thread=threading.Thread),
    )
    with Client(server.address, timeout=WAIT_S) as client:
        policy = client.metadata()["policy"]
    dim = policy["action"]["dim"]

    class Arm(Dry):
        blocked = False

        def block(self, here: str) -> None:
            if here == where and len(acts) > 10 and not self.blocked:
                self.blocked = True
                time.sleep(blocks)

        def observe(self) -> dict[str, Any]:
            self.block("observe")
            return super().observe()

        def act(self, row: np.ndarray) -> None:
            sent.append(time.monotonic())
            starved.append(sent[-1] - claimed[0])
            acts.append(sent[-1])
            super().act(row)
            self.block("act")

        def hold(self) -> None:
            sent.append(time.monotonic())
            super().hold()

    sent: list[float] = []
    acts: list[float] = []
    arm = Arm(policy)
    settings = Settings(hz, "aligned", "4", deadline=WAIT_S)
    loop = Loop(arm, Servers(server.address, without=("time",)), settings, dim, "swing")
    CommandListener(lambda _: loop.stop() if arm.blocked and len(acts) > 20 else None).attach(loop)
    claim, claimed = loop.watchdog.claim, [time.monotonic()]
    monkeypatch.setattr(
        loop.watchdog, "claim", lambda: (claimed.__setitem__(0, time.monotonic()), claim())[1]
    )
    report = loop.run(int(hz * WAIT_S))
    loop.close()
    gaps = np.diff(sent)
    assert len(acts) > 20  # it went on
    assert report.watchdog_holds > 0  # how many: the longest gap says it
    # The watchdog holds two periods after the last command, and at most two periods after a claim. Where the machine
    # stops the loop between a claim and its command, a gap may have both. Where it stops the loop after a command, the
    # watchdog has held within the last period. A late watchdog adds to each end of a gap.
    longest = (2 + max(1.0, min(hz * max(starved), 2.0))) / hz + 2 * max(late)
    assert gaps.max() <= longest, histogram(gaps)
    assert report.longest_gap_ms <= 1e3 * longest


def test_standard_output_and_error_that_nobody_reads():
    command = [sys.executable, "-u", "-m", "sinew", "serve", PEN, "--wire", "native:0", "--threads", "1"]
    with processes.Process([*map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        address = process.stdout.readline().split()[-1]
        process.stderr.close()
        process.stdout.close()
        server = SimpleNamespace(address=address)
        expected = ask(server)
        with raw_socket(address, zmq.DEALER) as dealer:
            for _ in range(5):
                dealer.send(b"garbage")  # each would be a line of the log
                dealer.recv()
        np.testing.assert_array_equal(ask(server), expected)
        process.terminate()
        assert process.wait(WAIT_S) == 0


# Writes a decision log, records, a finding of an engine and a proof until the disk is full, and goes on with room.
FILLED = """
import json, os, sys, time
from pathlib import Path
import numpy as np
from sinew.core import ActionChunk, Observation
from sinew.engine import prepared, proofs
from sinew.records.recorder import Recorder
from sinew_client.control import Journal, Settings

disk, bundle = Path("disk"), Path(sys.argv[1])
os.environ["XDG_CACHE_HOME"] = str(disk / "cache")
finding = prepared.EngineFinding("cpu", "eager", True, "faster", {"cpu": 1.0, "eager": 2.0})
finding.keep(bundle)
proofs.keep(bundle, "cpu", "cpu", {"passed": True})
before = [path.read_bytes() for path in sorted((disk / "cache").rglob("*.json"))]
recorder, journal = Recorder(disk / "records"), Journal(disk / "run.jsonl", Settings(20.0), 2)
seen = Observation({"front": np.zeros((48, 64, 3), np.uint8)}, np.zeros(2), "go")
seen.images["front"][:] = np.random.default_rng(0).integers(0, 256, (48, 64, 3))
number = refused = 0
while refused < 200 and number < 20_000:  # the recorder's own thread may be late: then the log alone would fit
    recorder.put("native", "", seen, ActionChunk(np.zeros((3, 2), np.float32)), {})
    journal.put("step", {"number": number, "text": "x" * 1000})
    time.sleep(0.002)
    number, refused = number + 1, refused + bool(recorder.stats()["failed"])
failed = []
large = {"passed": True, "x": "y" * 99999}
for keep in (lambda: finding.keep(bundle), lambda: proofs.keep(bundle, "cpu", "cpu", large)):
    try:
        keep()
    except OSError as error:
        failed.append(error.strerror)
journal.close()
room = os.statvfs(disk)
after = [path.read_bytes() for path in sorted((disk / "cache").rglob("*.json"))]
(disk / "run.jsonl").unlink()
end = time.monotonic() + 60
count = recorder.stats()["written"] if "written" in recorder.stats() else len(list((disk / "records").glob("*.npz")))
while len(list((disk / "records").glob("*.npz"))) <= count and time.monotonic() < end:
    recorder.put("native", "", seen, ActionChunk(np.zeros((3, 2), np.float32)), {})
    time.sleep(0.2)
more = len(list((disk / "records").glob("*.npz"))) - count
for path in (disk / "records").glob("*.npz"):
    np.load(path)["state"]  # none is cut short
recorder.close()
print(json.dumps({"same": before == after, "failed": failed, "free": room.f_bavail * room.f_frsize, "more": more}))
"""


def test_a_full_disk_costs_records_and_nothing_else(tmp_path):
    """A file system of 256 kB in a mount namespace: old files stay whole, no writer fails, and writing goes on."""
    (tmp_path / "disk").mkdir()
    mounted = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=256k none disk && exec "$@"', "sh"]
    if shutil.which("unshare") is None or subprocess.run([*mounted, "true"], cwd=tmp_path).returncode:
        pytest.skip("a file system cannot be mounted in a namespace here: it needs root")
    command = [*mounted, sys.executable, "-c", FILLED, PEN]
    done = subprocess.run([*map(str, command)], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    told = json.loads(done.stdout)
    assert told["same"]
    assert told["failed"]
    assert set(told["failed"]) == {"No space left on device"}
    assert told["free"] < 32 << 10
    assert told["more"] > 0
    assert "the decision log ends here, because the file cannot be written: [Errno 28]" in done.stderr
