"""Test whether a robot's control loop survives 140 faults of server, network, other clients and its own process.

    python -m benchmarks.faults                 # or: make faults; ``--only NETWORK`` selects faults by their name
    python -m benchmarks.faults --list

The benchmark starts one ``sinew serve`` with the built-in policy of the blocks task, a proxy, and a robot at 20 Hz
that connects through the proxy. Each of them is a process. Each fault begins while the robot moves. The robot has
survived a fault if all of these conditions hold:

* The robot executed twenty more actions after the fault.
* The server still gives the same answer to a known observation, and its health is "ok".
* All commands satisfied the checks of ``tests.control.test_loop_faults.Witness``: one finite command in each period,
  no action older than 1.5 s, no action twice, and a hold in the period in which the loop detects a problem.

Then the benchmark prints a table with the reasons of the holds and the longest time between two commands or holds, and
a histogram of these times. The last line of the output is JSON. The exit status is 1 if the robot did not survive a
fault. The status is also 1 if a time between two commands was longer than three periods plus a tolerance, in a fault
that does not stop the robot's own process. The tolerance is twice the largest delay of a thread that only sleeps.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import resource
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from sinew_client import Client, ClientError
from sinew_client.control.reaction import histogram

from benchmarks.faulty_robot import HZ, PROMPT
from sinew.bundle import Bundle
from tests.bundle.test_bundle import with_manifest
from tests.serve.puppet import GREETING
from tests.serve.test_faults import (
    FAULTS as BYTES,
)  # faults of the server that send bytes of no known protocol
from tests.serve.test_faults import READY

ROOT = Path(__file__).resolve().parents[1]
ENOUGH = 20  # number of actions that the robot must execute after a fault
PATIENCE_S = 90.0  # seconds to wait, long enough for a machine that also runs other programs
PERIOD_MS = 1e3 / HZ
Act = Callable[["Place"], None]


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        name: Name in the table.
        act: The function that causes the fault and ends it.
        own: The fault stops the process of the robot, so that the watchdog in this process also stops.
    """

    name: str
    act: Act
    own: bool = False


# ----------------------------------------------------------------------------- server, network and robot


class CannotRunError(Exception):
    """This machine does not allow the fault. The message states the reason."""


class Network:
    """A TCP proxy between robot and server.

    Attributes:
        up: Changes the data from the robot to the server. Gets one segment, and returns pairs of (seconds to wait,
            bytes to send). None ends the connection.
        down: The same for the data from the server to the robot.
        greet: If set, each new connection gets these bytes and nothing else.
    """

    def __init__(self, to: int):
        self.to, self.up, self.down = to, _plain, _plain
        self.greet: bytes | None = None
        self._open: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def heal(self) -> None:
        self.up = self.down = _plain
        self.greet = None

    def refuse(self, seconds: float) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()
        time.sleep(seconds)
        self._listener = socket.create_server(("127.0.0.1", self.port))
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def cut(self, reset: bool = False) -> None:
        found, self._open = self._open, []
        for each in found:
            with contextlib.suppress(OSError):
                if reset:
                    each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    each.close()
                else:
                    each.shutdown(socket.SHUT_RDWR)

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                ours, _ = listener.accept()
            except OSError:
                return
            self._open.append(ours)
            if self.greet is not None:
                with contextlib.suppress(OSError):
                    ours.sendall(self.greet)
                continue
            try:
                theirs = socket.create_connection(("127.0.0.1", self.to))
            except OSError:
                ours.close()
                continue
            self._open.append(theirs)
            for source, target, way in ((ours, theirs, "up"), (theirs, ours, "down")):
                with contextlib.suppress(OSError):  # the other side has closed the connection in the meantime
                    source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                threading.Thread(target=self._carry, args=(source, target, way), daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket, way: str) -> None:
        lost = False  # after a lost segment, the proxy sends nothing more on this connection
        try:
            while data := source.recv(1400):
                made = getattr(self, way)(data)
                if made is None:
                    break
                lost = lost or not made
                for seconds, part in () if lost else made:
                    time.sleep(seconds)
                    target.sendall(part)
        except OSError:
            pass
        for each in (source, target):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
                each.close()


Segment = list[tuple[float, bytes]] | None


def _plain(data: bytes) -> Segment:
    return [(0.0, data)]


@dataclass
class Place:
    """The server, the proxy in front of the server, and the robot."""

    work: Path
    port: int
    web: int
    network: Network
    server: subprocess.Popen[str] | None = None
    robot: subprocess.Popen[str] | None = None
    expected: np.ndarray | None = None
    gap_ms: float = (
        0.0  # the longest gap in ms, and all reasons of holds, since the start of the current fault
    )
    why: set[str] = field(default_factory=set)

    @property
    def bundle(self) -> Path:
        return self.work / "policy.gguf"

    def start(
        self,
        *options: object,
        wait: bool = True,
        within: Sequence[object] = (),
        program: Sequence[str] = ("-m", "sinew"),
        **variables: str,
    ) -> None:
        """Start the server.

        Args:
            options: Options of ``sinew serve``.
            wait: Wait until the server is ready.
            within: A command that runs the server's command, such as ``unshare``.
            program: Arguments of the Python interpreter.
            variables: Environment variables.
        """
        with (self.work / "server.log").open("a") as log:
            self.server = subprocess.Popen(
                [*map(str, within), sys.executable, *program, "serve", str(self.bundle), "--wire",
                 f"native:{self.port}", "--wire", f"http:{self.web}", "--threads", "1", "--no-prepare",
                 *map(str, options)],
                stdout=subprocess.PIPE, stderr=log, text=True, cwd=self.work,
                env={**environment(self.work), **variables},
            )  # fmt: skip
        if wait:
            assert self.server.stdout is not None
            line = self.server.stdout.readline()
            if not line.startswith("ready on"):
                raise RuntimeError(
                    f"the server did not start: {(self.work / 'server.log').read_text()[-500:]}"
                )

    def end(self, number: int = signal.SIGKILL) -> None:
        if self.server is not None and self.server.poll() is None:
            self.server.send_signal(number)
            self.server.send_signal(signal.SIGCONT)
            try:
                self.server.wait(30)
            except subprocess.TimeoutExpired:
                self.server.kill()
                self.server.wait()

    def tell(self, *call: Any) -> dict[str, Any]:
        assert self.robot is not None
        assert self.robot.stdin is not None
        assert self.robot.stdout is not None
        self.robot.stdin.write(json.dumps(call) + "\n")
        self.robot.stdin.flush()
        answer = json.loads(self.robot.stdout.readline())
        self.gap_ms, self.why = max(self.gap_ms, answer["gap_ms"]), self.why | set(answer["why"])
        return answer

    def begin(self, within: Sequence[object] = (), **variables: str) -> None:
        """Start the robot, and wait until it moves.

        Args:
            within: A command that runs the robot's command, such as ``unshare``.
            variables: Environment variables.
        """
        self.robot = subprocess.Popen(
            [*map(str, within), sys.executable, "-m", "benchmarks.faulty_robot",
             f"tcp://127.0.0.1:{self.network.port}"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
            env={**environment(self.work), **variables},
        )  # fmt: skip
        self.moves(self.tell("look"))

    def moves(self, seen: dict[str, Any]) -> dict[str, Any]:
        """Wait until the robot has executed ``ENOUGH`` more actions than in the report ``seen``. Returns the last
        report."""
        goal, end = seen["rows"] + ENOUGH, time.monotonic() + PATIENCE_S
        found = seen
        while found["rows"] < goal:
            if found["wrong"] or time.monotonic() > end:
                break
            found = self.tell("wait", 0.25)
        if found["rows"] < goal:
            found["wrong"] = [
                *found["wrong"],
                f"the robot executed too few actions in {PATIENCE_S:g} s: {', '.join(sorted(self.why))}",
            ]
        return found

    def answers(self) -> str:
        """Send a known observation to the server. Returns the error, a difference in the actions, or a bad health, or
        ""."""
        try:
            with Client(f"tcp://127.0.0.1:{self.port}", timeout=PATIENCE_S) as client:
                policy = client.metadata()["policy"]
                rng = np.random.default_rng(1)
                images = {
                    each["name"]: rng.integers(0, 256, (each["height"], each["width"], 3), np.uint8)
                    for each in policy["cameras"]
                }
                state = np.zeros(policy["state"]["dim"], np.float32)
                got = client.infer({"images": images, "state": state, "prompt": PROMPT, "seed": 1}).actions
                status = client.health()["status"]
        except (ClientError, OSError) as error:
            return f"{type(error).__name__}: {error}"
        if self.expected is None:
            self.expected = got
        if not np.array_equal(got, self.expected):
            return f"the actions differ by {np.abs(got - self.expected).max():.3g}"
        return "" if status == "ok" else f"health: {status}"


def environment(work: Path) -> dict[str, str]:
    paths = (ROOT, ROOT / "packages" / "sinew-client" / "src")
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "OMP_NUM_THREADS": "1",
        "XDG_CACHE_HOME": str(work / "cache"),
    }


# ----------------------------------------------------------------------------- faults of the network


def for_a_while(seconds: float, **ways: Any) -> Act:
    def act(at: Place) -> None:
        for way, what in ways.items():
            setattr(at.network, way, what)
        at.tell("wait", seconds)
        at.network.heal()

    return act


def greeting(data: bytes, seconds: float) -> Act:
    def act(at: Place) -> None:
        at.network.greet = data
        at.network.cut()
        at.tell("wait", seconds)
        at.network.heal()
        at.network.cut()

    return act


def cuts(count: int, reset: bool) -> Act:
    def act(at: Place) -> None:
        for _ in range(count):
            at.network.cut(reset)
            at.tell("wait", 0.3)

    return act


def late(low: float, high: float = 0.0) -> Callable[[bytes], Segment]:
    return lambda data: [(random.uniform(low, high or low), data)]


def flipped(data: bytes) -> Segment:
    where = random.randrange(8 * len(data))
    spoilt = bytearray(data)
    spoilt[where // 8] ^= 1 << where % 8
    return [(0.0, bytes(spoilt))]


def network() -> Iterator[Fault]:
    for seconds in (0.5, 1, 3, 10):
        yield Fault(f"network: nothing passes for {seconds:g} s", for_a_while(seconds, up=_lost, down=_lost))
    for seconds in (1, 3):
        yield Fault(f"network: requests get lost for {seconds} s", for_a_while(seconds, up=_lost))
        yield Fault(f"network: answers get lost for {seconds} s", for_a_while(seconds, down=_lost))
    for count in (1, 5):
        yield Fault(f"network: {count} x reset", cuts(count, True))
        yield Fault(f"network: {count} x closed", cuts(count, False))
    for seconds in (1, 4):
        yield Fault(
            f"network: connections are refused for {seconds} s", lambda at, s=seconds: at.network.refuse(s)
        )
    for name, data in (("nothing", b""), ("HTTP", b"HTTP/1.1 200 OK\r\n\r\n"), ("SSH", b"SSH-2.0-OpenSSH_9.6\r\n"),
                       ("random bytes", random.Random(3).randbytes(5000))):  # fmt: skip
        yield Fault(f"network: another program answers with {name} for 3 s", greeting(data, 3.0))
    for way in ("up", "down"):
        for seconds in (0.1, 0.3, 1.0, 1.8):
            yield Fault(
                f"network: {seconds:g} s late {way} for 4 s", for_a_while(4.0, **{way: late(seconds)})
            )
        yield Fault(f"network: bits flipped {way} for 2 s", for_a_while(2.0, **{way: flipped}))
        yield Fault(
            f"network: each segment twice, {way}, for 2 s",
            for_a_while(2.0, **{way: lambda d: [(0.0, d)] * 2}),
        )
        yield Fault(f"network: half a segment, then closed, {way}", for_a_while(2.0, **{way: _half()}))
        yield Fault(f"network: bytes one by one {way} for 2 s",
                    for_a_while(2.0, **{way: lambda d: [(0.0, bytes([each])) for each in d]}))  # fmt: skip
    for high in (0.1, 0.4):
        both = late(1e-3, high)
        yield Fault(f"network: 0 to {high:g} s late both ways for 4 s", for_a_while(4.0, up=both, down=both))
    for rate in (5e3, 2e4):
        slow = lambda data, rate=rate: [(len(data) / rate, data)]  # noqa: E731
        yield Fault(f"network: {rate:g} bytes a second for 4 s", for_a_while(4.0, up=slow, down=slow))


def _lost(_data: bytes) -> Segment:
    return []


def _half() -> Callable[[bytes], Segment]:
    seen: list[int] = []

    def once(data: bytes) -> Segment:
        if seen:
            return None
        seen.append(1)
        return [(0.0, data[: len(data) // 2])]

    return once


# ----------------------------------------------------------------------------- faults of the server


def restarted(number: int, after: float = 0.0) -> Act:
    def act(at: Place) -> None:
        at.end(number)
        at.tell("wait", after)
        at.start()

    return act


def stopped(seconds: float, count: int = 1) -> Act:
    def act(at: Place) -> None:
        assert at.server is not None
        for _ in range(count):
            at.server.send_signal(signal.SIGSTOP)
            at.tell("wait", seconds)
            at.server.send_signal(signal.SIGCONT)
            at.tell("wait", seconds)

    return act


def signalled(number: int) -> Act:
    def act(at: Place) -> None:
        assert at.server is not None
        at.server.send_signal(number)
        at.tell("wait", 1.0)

    return act


def limited(which: int, value: int, seconds: float) -> Act:
    def act(at: Place) -> None:
        assert at.server is not None
        before = resource.prlimit(at.server.pid, which)
        most = value
        if which == resource.RLIMIT_AS:
            most += int(Path(f"/proc/{at.server.pid}/statm").read_text().split()[0]) * resource.getpagesize()
        resource.prlimit(at.server.pid, which, (most, before[1]))
        at.tell("wait", seconds)
        resource.prlimit(at.server.pid, which, before)

    return act


def busy(count: int, nice: int, seconds: float = 5.0) -> Act:
    def act(at: Place) -> None:
        assert at.server is not None
        if nice:
            os.setpriority(os.PRIO_PROCESS, at.server.pid, nice)
        hogs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
        try:
            at.tell("wait", seconds)
        finally:
            for each in hogs:
                each.kill()
                each.wait()
        if nice:
            os.setpriority(os.PRIO_PROCESS, at.server.pid, 0)

    return act


def with_options(at: Place, spoil: Callable[[Place], None] | None, *options: object) -> None:
    """Restart the server with ``options``, run ``spoil`` while requests arrive, and restart the server without the
    options."""
    at.end(signal.SIGTERM)
    at.start(*options)
    at.tell("wait", 1.0)
    if spoil is not None:
        spoil(at)
    at.tell("wait", 2.0)
    at.end(signal.SIGTERM)
    at.start()


def full_disk(at: Place) -> None:
    assert at.server is not None
    resource.prlimit(at.server.pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))


def records_gone(at: Place) -> None:
    shutil.rmtree(at.work / "records")


def records_a_file(at: Place) -> None:
    records_gone(at)
    (at.work / "records").write_text("no folder")


def on_bundle(change: Callable[[Path], None], restart: bool) -> Act:
    """Return a fault that changes the bundle of a running server.

    Args:
        change: Changes the bundle file.
        restart: Restart the server after the original file is back.
    """

    def act(at: Place) -> None:
        kept = at.work / "kept.gguf"
        shutil.copyfile(at.bundle, kept)
        change(at.bundle)
        at.tell("wait", 2.0)
        if restart:
            at.end()
        os.replace(kept, at.bundle)
        if restart:
            at.start()

    return act


def _overwrite(path: Path) -> None:
    data = path.read_bytes()
    with path.open("r+b") as file:
        file.write(data)


def _replace(path: Path) -> None:
    other = path.with_suffix(".new")
    shutil.copyfile(path, other)
    os.replace(other, path)


def _started_without(at: Place) -> None:
    away = at.bundle.rename(at.work / "away.gguf")
    at.end()
    at.start(wait=False)
    assert at.server is not None
    assert at.server.wait(60) != 0
    at.tell("wait", 0.5)
    away.rename(at.bundle)
    at.start()


def server() -> Iterator[Fault]:
    for seconds in (0, 5):
        yield Fault(f"server: SIGKILL, started {seconds} s later", restarted(signal.SIGKILL, seconds))
    for name in ("TERM", "INT", "HUP", "SEGV", "ABRT", "ALRM", "USR1", "QUIT", "BUS"):
        yield Fault(f"server: SIG{name}, started again", restarted(getattr(signal, f"SIG{name}")))
    yield Fault("server: SIGPIPE", signalled(signal.SIGPIPE))
    yield Fault("server: SIGWINCH", signalled(signal.SIGWINCH))
    yield Fault("server: stopped 8 x 0.3 s", stopped(0.3, 8))
    yield Fault("server: stopped 2 s", stopped(2.0))
    yield Fault("server: stopped 5 s", stopped(5.0))
    yield Fault("server: stopped, then SIGKILL", _stopped_and_killed)
    yield Fault("server: its bundle replaced by itself", on_bundle(_replace, False))
    yield Fault("server: its bundle touched", on_bundle(lambda path: path.touch(), True))
    yield Fault("server: its bundle overwritten in place by itself", on_bundle(_overwrite, True))
    yield Fault("server: its bundle cut short", on_bundle(lambda path: os.truncate(path, 4096), True))
    yield Fault("server: its bundle deleted", on_bundle(lambda path: path.unlink(), False))
    yield Fault("server: started without its bundle, then with it", _started_without)
    yield Fault("server: at most 12 file descriptors for 4 s", limited(resource.RLIMIT_NOFILE, 12, 4.0))
    yield Fault(
        "server: at most 8 MiB more memory than it uses, for 4 s", limited(resource.RLIMIT_AS, 8 << 20, 4.0)
    )
    yield Fault("server: files may not grow for 4 s", limited(resource.RLIMIT_FSIZE, 0, 4.0))
    yield Fault("server: 6 other programs that compute", busy(6, 0))
    yield Fault("server: nice 19, and 4 other programs that compute", busy(4, 19))
    records = ("--record", "records")
    yield Fault("server: records on a full disk", lambda at: with_options(at, full_disk, *records))
    yield Fault("server: the folder of records is gone", lambda at: with_options(at, records_gone, *records))
    yield Fault(
        "server: the folder of records is a file", lambda at: with_options(at, records_a_file, *records)
    )
    yield Fault(
        "server: access log on a full disk", lambda at: with_options(at, None, "--access-log", "/dev/full")
    )
    yield Fault(
        "server: its cache is deleted", lambda at: shutil.rmtree(at.work / "cache", ignore_errors=True)
    )
    yield Fault("server: a second one on its ports", _second)
    yield Fault("server: a request without a key to replace the policy", _exchange)


def _stopped_and_killed(at: Place) -> None:
    assert at.server is not None
    at.server.send_signal(signal.SIGSTOP)
    at.tell("wait", 1.0)
    at.server.kill()
    at.server.wait()
    at.start()


def _second(at: Place) -> None:
    first = at.server
    at.start(wait=False)
    assert at.server is not None
    status = at.server.wait(60)
    at.server = first
    if not status:
        raise RuntimeError("a second server on the same ports exited with status 0: expected an error")


def _exchange(at: Place) -> None:
    url = f"http://127.0.0.1:{at.web}/v1/policies/default"
    request = urllib.request.Request(url, json.dumps({"source": str(at.bundle)}).encode(), method="PUT")
    with contextlib.suppress(OSError):
        urllib.request.urlopen(request, timeout=30).close()


# ----------------------------------------------------------------------------- disks, memory, clocks, versions


def filled_disk(at: Place) -> None:
    """Let the server write its recordings to a file system of 64 kB, which the first recordings fill."""
    _needs("unshare", "--mount", "true")
    if (at.work / "records").is_file():  # an earlier fault has left a file with this name
        (at.work / "records").unlink()
    (at.work / "records").mkdir(exist_ok=True)
    mounted = 'mount -t tmpfs -o size=64k none records && exec "$@"'
    at.end(signal.SIGTERM)
    log = at.work / "server.log"
    begun = log.stat().st_size
    at.start("--record", "records", within=("unshare", "--mount", "sh", "-c", mounted, "sh"))
    at.moves(at.tell("wait", 3.0))
    if "No space left" not in log.read_text()[begun:]:
        raise RuntimeError("the recordings did not fill the disk; see server.log")
    at.end(signal.SIGTERM)
    at.start()


def memory_cgroup(more: int, seconds: float) -> Act:
    """Return a fault that limits the server's memory to ``more`` bytes above its current use, while clients send large
    messages.

    The fault restarts the server at its end.
    """

    def act(at: Place) -> None:
        group = Path("/sys/fs/cgroup/memory/sinew-faults")
        names = ("memory.usage_in_bytes", "memory.limit_in_bytes")
        if not group.parent.is_dir():
            group, names = Path("/sys/fs/cgroup/sinew-faults"), ("memory.current", "memory.max")
        try:
            group.mkdir()
            limit = group / names[1]
            limit.write_text(limit.read_text())
        except OSError as error:
            raise CannotRunError(f"this process cannot create a memory cgroup: {error}") from error
        try:
            joined = f'echo $$ > {group}/cgroup.procs && exec "$@"'
            at.end(signal.SIGTERM)
            at.start(within=("sh", "-c", joined, "sh"))
            at.tell("wait", 1.0)
            limit.write_text(str(int((group / names[0]).read_text()) + more))
            crowd(8, zmq_greeting() + random.Random(5).randbytes(1 << 20), False, seconds)(at)
            assert at.server is not None
            killed = at.server.poll() is not None
            at.end()
            at.start()
            print(f"  the server was {'killed' if killed else 'not killed'}", file=sys.stderr)
        finally:
            at_end = time.monotonic() + 10
            while time.monotonic() < at_end:
                with contextlib.suppress(OSError):
                    group.rmdir()
                    break
                time.sleep(0.1)

    return act


def zmq_greeting() -> bytes:
    """Return the greeting and handshake of a ZeroMQ peer, and the header of a frame of 48 MiB."""
    return GREETING + READY + b"\x02" + (48 << 20).to_bytes(8, "big")


# This C library adds the seconds in a file to the wall clock of a process, also for libraries in C. The monotonic
# clock stays the same.
STEPPED_CLOCK = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
static volatile long *offset;
static int (*real)(clockid_t, struct timespec *);
__attribute__((constructor)) static void begin(void) {
  int file = open(getenv("STEPPED_CLOCK"), O_RDONLY);
  offset = mmap(0, sizeof(long), PROT_READ, MAP_SHARED, file, 0);
  real = dlsym(RTLD_NEXT, "clock_gettime");
}
int clock_gettime(clockid_t clock, struct timespec *now) {
  int found = real(clock, now);
  if (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE) now->tv_sec += *offset;
  return found;
}
int gettimeofday(struct timeval *now, void *zone) {
  struct timespec exact;
  int found = clock_gettime(CLOCK_REALTIME, &exact);
  now->tv_sec = exact.tv_sec, now->tv_usec = exact.tv_nsec / 1000;
  return found;
}
time_t time(time_t *now) {
  struct timespec exact;
  clock_gettime(CLOCK_REALTIME, &exact);
  if (now) *now = exact.tv_sec;
  return exact.tv_sec;
}
"""


def stepped_clock(work: Path) -> tuple[dict[str, str], Callable[[int], None]]:
    """Compile the library for a shifted wall clock.

    Returns:
        The environment variables of a process that uses the library, and a function that sets the shift in seconds.
    """
    compiler = shutil.which("cc")
    if compiler is None:
        raise CannotRunError("this machine has no C compiler")
    library, place = work / "stepped_clock.so", work / "stepped_clock"
    place.write_bytes(bytes(8))
    source = [compiler, "-shared", "-fPIC", "-O1", "-x", "c", "-", "-o", str(library), "-ldl"]
    subprocess.run(source, input=STEPPED_CLOCK, text=True, check=True)

    def step(seconds: int) -> None:
        with place.open("r+b") as file:
            file.write(struct.pack("l", seconds))

    variables = {"LD_PRELOAD": str(library), "STEPPED_CLOCK": str(place)}
    step(86_400)
    asked = [sys.executable, "-c", "import time; print(time.time())"]
    answer = subprocess.run(
        asked, env={**os.environ, **variables}, capture_output=True, text=True, check=True
    )
    if float(answer.stdout) < time.time() + 80_000:
        raise CannotRunError("the Python interpreter reads the clock without the C library")
    step(0)
    return variables, step


def clock_steps(whose: str) -> Act:
    """Return a fault that shifts the wall clock of the server or the robot forward, back, and to the right time."""

    def act(at: Place) -> None:
        variables, step = stepped_clock(at.work)
        if whose == "server":
            at.end(signal.SIGTERM)
            at.start(**variables)
        else:
            _robot_within(at, (), **variables)
        for seconds in (3600, -3600, 10**8, 0):
            step(seconds)
            at.moves(at.tell("wait", 1.0))
        if whose == "server":
            at.end(signal.SIGTERM)
            at.start()
        else:
            _robot_within(at, ())

    return act


def other_monotonic_clock(whose: str, seconds: int) -> Act:
    """Return a fault that runs the server or the robot in a time namespace, as on a machine that started at another
    time."""

    def act(at: Place) -> None:
        within = ("unshare", "--time", "--monotonic", seconds, "--boottime", seconds)
        _needs(*map(str, within), "true")
        if whose == "server":
            at.end(signal.SIGTERM)
            at.start(within=within)
        else:
            _robot_within(at, within)
        at.moves(at.tell("wait", 1.0))
        if whose == "server":
            at.end(signal.SIGTERM)
            at.start()
        else:
            _robot_within(at, ())

    return act


def _robot_within(at: Place, within: Sequence[object], **variables: str) -> None:
    assert at.robot is not None
    at.robot.kill()
    at.robot.wait()
    at.begin(within, **variables)


def _needs(*command: str) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise CannotRunError(f"{' '.join(command)}: {done.stderr.strip()[:100]}")


NEWER = "import sinew; sinew.__version__ = '99.0.0'; import sys; from sinew.cli import main; sys.exit(main())"


def newer_server(at: Place) -> None:
    """Replace the server by one with another version and the same policy. The robot must continue without a restart."""
    at.end()
    at.start(program=("-c", NEWER))
    with Client(f"tcp://127.0.0.1:{at.port}", timeout=PATIENCE_S) as client:
        version = client.metadata()["server"]["version"]
    if version != "99.0.0":
        raise RuntimeError(f"the newer server reports version {version}, expected 99.0.0")
    _goes_on(at)
    at.end()
    at.start()


def newer_policy(**changes: Any) -> Act:
    """Return a fault with a newer server whose policy has other units or another rate.

    The robot must hold until the old policy is back.
    """

    def act(at: Place) -> None:
        kept = at.work / "kept.gguf"
        shutil.copyfile(at.bundle, kept)
        spec = Bundle(kept).manifest.spec
        at.end()
        if "units" in changes:
            changed = replace(spec, action=replace(spec.action, units=changes["units"](spec.action.dim)))
        else:
            changed = replace(spec, **changes)
        with_manifest(kept, at.work / "newer.gguf", spec=changed)
        os.replace(at.work / "newer.gguf", at.bundle)
        at.start(program=("-c", NEWER))
        at.tell("wait", 2.0)
        before = at.tell("wait", 4.0)["rows"]
        after = at.tell("wait", 0.0)["rows"]
        at.end()
        os.replace(kept, at.bundle)
        at.start()
        if after != before:
            raise RuntimeError(
                f"the robot executed {after - before} actions of a policy with other {[*changes]}"
            )

    return act


def _goes_on(at: Place) -> None:
    found = at.moves(at.tell("look"))
    if found["wrong"]:
        raise RuntimeError("; ".join(found["wrong"]))


def machine() -> Iterator[Fault]:
    yield Fault("server: records fill a small disk", filled_disk)
    yield Fault("server: a memory limit of 256 MiB above its use, for 4 s", memory_cgroup(256 << 20, 4.0))
    yield Fault("server: a memory limit of 1 MiB above its use, for 4 s", memory_cgroup(1 << 20, 4.0))
    yield Fault("server: the wall clock jumps an hour forward and back", clock_steps("server"))
    yield Fault("robot: the wall clock jumps an hour forward and back", clock_steps("robot"), own=True)
    for whose in ("server", "robot"):
        for seconds in (1_000_000, -600):
            yield Fault(f"{whose}: a monotonic clock {seconds:+} s off", other_monotonic_clock(whose, seconds),
                        own=whose == "robot")  # fmt: skip
    yield Fault("server: a newer version with the same policy", newer_server)
    yield Fault("server: a newer version with another rate", newer_policy(control_hz=10.0))
    yield Fault("server: a newer version with other units", newer_policy(units=lambda dim: ("deg",) * dim))


# ----------------------------------------------------------------------------- other clients


def crowd(count: int, data: bytes, web: bool, seconds: float = 3.0) -> Act:
    def act(at: Place) -> None:
        with contextlib.ExitStack() as stack:
            for _ in range(count):
                with contextlib.suppress(OSError):
                    peer = stack.enter_context(
                        socket.create_connection(("127.0.0.1", at.web if web else at.port), 5)
                    )
                    peer.settimeout(5)
                    peer.sendall(data)
            at.tell("wait", seconds)

    return act


@dataclass
class Addresses:
    """The addresses of the server, as the faults of ``tests.serve.test_faults`` expect them."""

    native: str
    web: str


def peers() -> Iterator[Fault]:
    for name, act in BYTES.items():
        if name.startswith(("native: ", "web: ")) and act.__qualname__.startswith("bytes_then_leave"):
            yield Fault(
                f"peer, {name}",
                lambda at, act=act: act(Addresses(f"tcp://127.0.0.1:{at.port}", f"ws://127.0.0.1:{at.web}")),  # type: ignore[arg-type]
            )
    yield Fault("peer: 200 silent connections", crowd(200, b"", False))
    yield Fault("peer: 600 silent connections", crowd(600, b"", False))
    yield Fault(
        "peer: 100 connections with random bytes", crowd(100, random.Random(4).randbytes(4000), False)
    )
    yield Fault("peer: 60 half greetings", crowd(60, b"\xff\0\0\0\0\0\0\0\x01\x7f\x03", False))
    yield Fault(
        "peer: 300 slow web requests", crowd(300, b"POST /v1/actions HTTP/1.1\r\nHost: localhost\r\n", True)
    )


# ----------------------------------------------------------------------------- faults of the robot


def robot_call(*call: Any) -> Act:
    def act(at: Place) -> None:
        at.tell(*call)

    return act


def robot_stopped(seconds: float, count: int = 1) -> Act:
    def act(at: Place) -> None:
        assert at.robot is not None
        for _ in range(count):
            at.robot.send_signal(signal.SIGSTOP)
            time.sleep(seconds)
            at.robot.send_signal(signal.SIGCONT)
            time.sleep(seconds)

    return act


def _robot_again(at: Place) -> None:
    for _ in range(3):
        assert at.robot is not None
        at.robot.kill()
        at.robot.wait()
        at.begin()


def robot() -> Iterator[Fault]:
    yield Fault("robot: stopped 5 s", robot_stopped(5.0), own=True)
    yield Fault("robot: stopped 10 x 0.2 s", robot_stopped(0.2, 10), own=True)
    yield Fault("robot: killed and started 3 times", _robot_again, own=True)
    yield Fault(
        "robot: the lock of its interpreter is held for 2 s",
        robot_call("hold_the_interpreter", 2.0),
        own=True,
    )
    yield Fault("robot: collects two million objects", robot_call("collect", 2_000_000), own=True)
    for where in ("observe", "act", "hold"):
        for seconds in (0.3, 3.0):
            if where != "hold":
                yield Fault(f"robot: {where} blocks {seconds:g} s", robot_call("block", where, seconds))
    yield Fault("robot: cameras repeat one frame for 3 s", robot_call("freeze_cameras", 3.0))
    for value in ("nan", "inf", "-inf"):
        yield Fault(f"robot: its state is {value} for 2 s", robot_call("state", float(value), 2.0))
    for names in (["time"], ["time", "monotonic"]):
        for jump in (3600.0, -3600.0):
            yield Fault(f"robot: {' and '.join(names)} {jump:+g} s and back", robot_call("clock", names, jump, 2.0),
                        own="monotonic" in names)  # fmt: skip
    yield Fault(
        "robot: 20 instructions in 2 s",
        robot_call("say", [f"put block {number} away" for number in range(20)]),
    )
    yield Fault("robot: an instruction that is rejected", robot_call("say", ["x " * 400]))
    yield Fault("robot: paused and resumed 5 times", robot_call("pauses", 5))
    yield Fault("robot: forks", robot_call("fork"))
    yield Fault(
        "robot: forks, and the child sends a request",
        lambda at: at.tell("fork", f"tcp://127.0.0.1:{at.port}") and None,
    )
    yield Fault("robot: at most 6 file descriptors for 3 s", robot_call("limit", "RLIMIT_NOFILE", 6, 3.0))
    yield Fault("robot: no more memory for 3 s", robot_call("limit", "RLIMIT_AS", 0, 3.0))


# ----------------------------------------------------------------------------- the end of a run


def ended(before: Callable[[Place], None], after: Callable[[Place], None], *call: Any) -> Act:
    """Return a fault that ends the run, and begins a new run.

    Args:
        before: Called before the run ends.
        after: Called after the run has ended.
        call: Arguments of ``Faults.end`` in benchmarks/faulty_robot.py.
    """

    def act(at: Place) -> None:
        before(at)
        try:
            at.tell("end", *(call or ("",)))
        finally:
            after(at)

    return act


def _nothing(_at: Place) -> None: ...


def rest() -> Iterator[Fault]:
    """Yield the faults at the end of a run.

    The robot must return to its first pose, or stay where it is if its state is unknown. Then a new run begins.
    """
    yield Fault("rest: the run ends", ended(_nothing, _nothing), own=True)
    yield Fault(
        "rest: the server is killed, and the run ends",
        ended(lambda at: at.end(), lambda at: at.start()),
        own=True,
    )
    yield Fault("rest: the network breaks, and the run ends",
                ended(lambda at: at.network.cut(), lambda at: at.network.heal()), own=True)  # fmt: skip
    yield Fault("rest: observe blocks 0.3 s on the way", ended(_nothing, _nothing, "late", "late", {"observe": 0.3}),
                own=True)  # fmt: skip
    yield Fault(
        "rest: its state is nan", ended(_nothing, _nothing, "strange", "strange", float("nan")), own=True
    )
    yield Fault(
        "rest: its cameras repeat one frame", ended(_nothing, _nothing, "frozen", "frozen", 0.0), own=True
    )
    yield Fault("rest: it gets two stop requests", ended(_nothing, _nothing, "twice"), own=True)


# ----------------------------------------------------------------------------- all faults


def faults() -> list[Fault]:
    return [*network(), *server(), *peers(), *robot(), *rest(), *machine()]


class Bystander:
    """A thread that only sleeps. It measures how late this machine wakes an idle thread."""

    def __init__(self) -> None:
        self.latest, self._ended = 0.0, threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.is_set():
            begun = time.monotonic()
            time.sleep(1 / HZ)
            self.latest = max(self.latest, 1e3 * (time.monotonic() - begun) - PERIOD_MS)

    def read(self) -> float:
        found, self.latest = self.latest, 0.0
        return found


def suffer(at: Place, fault: Fault, bystander: Bystander) -> dict[str, Any]:
    at.tell("look")
    at.gap_ms, at.why = 0.0, set()
    bystander.read()
    begun = time.monotonic()
    wrong, skipped = [], ""
    try:
        fault.act(at)
    except CannotRunError as error:
        skipped = str(error)
    except Exception as error:  # noqa: BLE001 - the fault function itself failed, and the row states this
        wrong.append(f"{type(error).__name__}: {error}")
    finally:
        at.network.heal()
    seen = at.moves(at.tell("look"))
    wrong += seen["wrong"]
    if error := at.answers():
        wrong.append(error)
    return {
        "name": fault.name,
        "own": fault.own,
        "wrong": wrong,
        "skipped": skipped,
        "why": sorted(at.why),
        "gap_ms": at.gap_ms,
        "late_ms": bystander.read(),
        "seconds": time.monotonic() - begun,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", action="append", help="only faults whose names contain this; repeatable")
    parser.add_argument("--list", action="store_true", help="print the names of the faults and exit")
    given = parser.parse_args()
    parts = [part.lower() for part in given.only or [""]]
    chosen = [each for each in faults() if any(part in each.name.lower() for part in parts)]
    if given.list:
        print(*(each.name for each in chosen), sep="\n")
        return 0
    random.seed(0)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        at = Place(Path(folder), *(_free_port() for _ in range(2)), network=None)  # type: ignore[arg-type]
        at.network = Network(at.port)
        shutil.copyfile(ROOT / "sinew" / "assets" / "blocks.gguf", at.bundle)
        try:
            at.start()
            at.answers()
            at.begin()
            bystander = Bystander()
            for number, fault in enumerate(chosen, 1):
                row = suffer(at, fault, bystander)
                rows.append(row)
                print(f"{number}/{len(chosen)} {fault.name}: {', '.join(row['wrong']) or _outcome(row)}, "
                      f"{row['gap_ms']:.0f} ms, {row['seconds']:.0f} s", file=sys.stderr, flush=True)  # fmt: skip
                if row["wrong"]:  # restart server and robot, so that the next fault begins in a known state
                    at.end()
                    assert at.robot is not None
                    at.robot.kill()
                    at.start()
                    at.begin()
        finally:
            at.end()
            if at.robot is not None:
                at.robot.kill()
    print("| fault | survived | what held it | longest gap, ms |\n|---|---|---|--:|")
    for row in rows:
        held = "; ".join(row["why"]) or "no hold"
        print(
            f"| {row['name']} | {'; '.join(row['wrong']) or _outcome(row)} | {held} | {row['gap_ms']:.0f} |"
        )
    watched = [row for row in rows if not row["own"]]
    long = [row["name"] for row in watched if row["gap_ms"] > 3 * PERIOD_MS + 2 * row["late_ms"]]
    print(f"\nlongest gap of each fault outside the robot's process, with a period of {PERIOD_MS:g} ms:")
    print(histogram([row["gap_ms"] / 1e3 for row in watched]))
    lost = [row["name"] for row in rows if row["wrong"]]
    skipped = [row["name"] for row in rows if row["skipped"] and not row["wrong"]]
    print(json.dumps({
        "schema": "sinew.benchmark.faults/1", "faults": len(rows), "skipped": skipped,
        "survived": len(rows) - len(lost) - len(skipped), "lost": lost,
        "long_gaps": long, "longest_gap_ms": round(max((r["gap_ms"] for r in watched), default=0.0), 1),
    }))  # fmt: skip
    return 1 if lost or long else 0


def _outcome(row: dict[str, Any]) -> str:
    return f"skipped: {row['skipped']}" if row["skipped"] else "survived"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    sys.exit(main())
