"""Compare an evaluation in one process, in two processes, and on three hosts: same outcomes, and how much faster.

    python -m benchmarks.hosts --episodes 200 [--delay 20] [--loss 1] [--ray]      # as root, on Linux

The hosts are network namespaces on this machine. Every packet between two hosts waits ``--delay`` milliseconds, and is
lost with a probability of ``--loss`` percent. A program of this file forwards the packets between the TUN devices of
the hosts, because many kernels lack ``tc netem``. The second and the third host join the run with ``sinew eval --join
http://...``, each in its own folder.

With ``--kill SECONDS``, the three hosts play a second time. About every SECONDS, SIGKILL ends one of them at random,
including the host of the run. The same command then starts it again.

With ``--ray``, the hosts are a Ray cluster. The first host has the head of the cluster and the run. Each other host
has a node with one processor. The run uses ``--hosts ray``. With ``--kill``, the benchmark kills the entries of WHATS
in turn.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import heapq
import json
import os
import random
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import sinew

CLONE_NEWNET = 0x40000000
TUNSETIFF, IFF_TUN_NO_PI = 0x400454CA, 0x1001
CLOCKS = ("latency_ms", "wall_s", "peak_bytes", "key")
HOSTS = 3
PORT = 7790
# Ray would take processes in another namespace for its own, so each run uses another port
RAY_PORT = 20000 + os.getpid() % 1000
# The parts of the cluster to kill: an actor during an episode, the raylet of a node, the process with the queue, the
# run, and the whole head.
WHATS = ("actor", "raylet", "carrier", "run", "head")
Begin = Callable[[Sequence[str], Path], subprocess.Popen[bytes]]


def address(host: int) -> str:
    return f"10.77.0.{host + 1}"


@contextlib.contextmanager
def network(delay_s: float, loss: float) -> Iterator[list[str]]:
    """Yield the names of HOSTS network namespaces that reach each other through :func:`forward`."""
    names = [f"sinew-{os.getpid()}-{host}" for host in range(HOSTS)]
    ended = threading.Event()
    try:
        tuns = [_device(name, host) for host, name in enumerate(names)]
        forwarding = threading.Thread(target=forward, args=(tuns, delay_s, loss, ended), daemon=True)
        forwarding.start()
        yield names
        ended.set()
        forwarding.join()
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, stderr=subprocess.DEVNULL)


def _device(name: str, host: int) -> int:
    """Create a network namespace, and return the open file descriptor of its TUN device."""
    subprocess.run(["ip", "netns", "add", name], check=True)
    found: list[int] = []

    def inside() -> None:  # runs in a thread, because a namespace belongs to a thread
        with open(f"/run/netns/{name}") as place:
            if ctypes.CDLL(None, use_errno=True).setns(place.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")
        tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(tun, TUNSETIFF, struct.pack("16sH", b"sinew", IFF_TUN_NO_PI))
        found.append(tun)

    thread = threading.Thread(target=inside)
    thread.start()
    thread.join()
    for words in (f"addr add {address(host)}/24 dev sinew", "link set sinew up", "link set lo up"):
        subprocess.run(["ip", "-n", name, *words.split()], check=True)
    return found[0]


def forward(tuns: Sequence[int], delay_s: float, loss: float, ended: threading.Event) -> None:
    """Forward each packet to the host of its destination, ``delay_s`` seconds after its arrival. Drops some at
    random."""
    rng, waiting, count = random.Random(0), list[tuple[float, int, int, bytes]](), 0
    while not ended.is_set():
        pause = max(0.0, waiting[0][0] - time.monotonic()) if waiting else 0.2
        for tun in select.select(tuns, [], [], min(pause, 0.2))[0]:
            with contextlib.suppress(BlockingIOError):
                while packet := os.read(tun, 65536):
                    to = packet[19] - 1 if packet[0] >> 4 == 4 else -1
                    if 0 <= to < len(tuns) and rng.random() >= loss:
                        count += 1
                        heapq.heappush(waiting, (time.monotonic() + delay_s, count, tuns[to], packet))
        while waiting and waiting[0][0] <= time.monotonic():
            *_, tun, packet = heapq.heappop(waiting)
            with contextlib.suppress(BlockingIOError):
                os.write(tun, packet)


def outcomes(out: Path) -> dict[int, dict[str, Any]]:
    """Return the episodes of a run by seed, without their times. Each episode must occur once."""
    rows = [json.loads(line) for line in (out / "episodes.jsonl").read_text().splitlines()]
    found = {row["seed"]: {k: v for k, v in row.items() if k not in CLOCKS} for row in rows}
    assert len(found) == len(rows), f"{out}: {len(rows) - len(found)} episodes occur twice"
    return found


class Cluster:
    """A Ray cluster whose head and nodes are network namespaces. Each host has its own bundle store."""

    def __init__(self, names: Sequence[str], work: Path, environment: dict[str, str]):
        self.names, self._work, self._environment = names, work, environment

    def start(self, host: int) -> None:
        """Start the head (host 0) or a node, after all processes of an earlier one have ended."""
        self.end(host)
        own = self._work / f"ray {host}"
        own.mkdir(exist_ok=True)
        head = ["--head", f"--port={RAY_PORT}", "--num-cpus=0", "--include-dashboard=false"]
        node = [f"--address={address(0)}:{RAY_PORT}", "--num-cpus=1"]
        ray = [sys.executable, "-m", "ray.scripts.scripts", "start", f"--node-ip-address={address(host)}"]
        # The name of a socket may have at most 107 characters.
        more = ["--object-store-memory=100000000", f"--temp-dir=/tmp/{self.names[host]}"]
        with (own / "log").open("ab") as log:
            subprocess.run(
                ["ip", "netns", "exec", self.names[host], *ray, *(node if host else head), *more],
                check=True, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                env={**self._environment, "HOME": str(own), "XDG_CACHE_HOME": str(own)},
            )  # fmt: skip

    def find(self, host: int, word: str) -> list[int]:
        """Return the process ids on a host whose command line contains a word."""
        found = []
        said = subprocess.run(["ip", "netns", "pids", self.names[host]], check=True, capture_output=True)
        for pid in map(int, said.stdout.split()):
            with contextlib.suppress(OSError):
                if word.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.append(pid)
        return found

    def end(self, host: int) -> None:
        """Kill all processes of Ray on a host."""
        for pid in {*self.find(host, "ray::"), *self.find(host, "/ray/"), *self.find(host, "ray.util")}:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)

    def kill(self, what: str, run: subprocess.Popen[bytes], rng: random.Random) -> bool:
        """Kill one of WHATS, and restart the parts of the cluster that ended. Returns False if there was nothing to
        kill."""
        host = rng.randrange(1, HOSTS)
        if what == "run":
            run.kill()
            run.wait()
        elif what == "head":
            self.end(0)
            time.sleep(rng.uniform(0, 5))
            self.end(1), self.end(2)  # Ray would take these processes for a running head
            for each in range(HOSTS):
                self.start(each)
        else:
            word = {
                "actor": "ray::Episodes",
                "raylet": "raylet/raylet",
                "carrier": "sinew_eval.foreign.cluster",
            }
            found = self.find(0 if what == "carrier" else host, word[what])
            for pid in found[:1]:
                os.kill(pid, signal.SIGKILL)
            if what == "raylet":
                time.sleep(rng.uniform(0, 5))
                self.start(host)
            return bool(found)
        return True


def through_ray(
    play: Sequence[str],
    names: Sequence[str],
    work: Path,
    begin: Begin,
    environment: dict[str, str],
    args: Any,
) -> Iterator[tuple[str, Path, float, dict[str, Any]]]:
    """Yield a row for the undisturbed cluster, and one for a cluster in which a part is killed ``--kills`` times."""
    cluster, run = Cluster(names, work, environment), None
    try:
        for host in range(HOSTS):
            cluster.start(host)
        for often in (None,) if args.kill is None else (None, args.kill):
            label = "Ray" if often is None else "Ray, killed"
            out = work / label
            inside = ["ip", "netns", "exec", names[0], *play]
            here = Path(sinew.__file__).parent / "assets" / f"{args.policy}.gguf"
            if here.is_file():  # copy the policy under a name that no other host can resolve
                (work / f"{label} run").mkdir()
                shutil.copy(here, work / f"{label} run" / "own.gguf")
                inside[inside.index(args.policy)] = "own.gguf"
            words = [*inside, "--shards", str(HOSTS - 1), "--hosts", "ray", "--out", str(out)]
            begun, rng, kills = time.monotonic(), random.Random(0), Counter[str]()
            run = begin(words, work / f"{label} run")
            ended = 0
            while run.poll() is None or run.returncode:
                if often is None or sum(kills.values()) >= args.kills:
                    wait = None
                else:
                    wait = rng.expovariate(1 / often)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    run.wait(wait)
                    if run.returncode:  # the run has lost its cluster, and its error states this
                        ended += 1
                        assert ended <= args.kills, (work / f"{label} run" / "log").read_text()[-2000:]
                        run = begin(words, work / f"{label} run")
                    continue
                what = WHATS[sum(kills.values()) % len(WHATS)]
                kills[what] += cluster.kill(what, run, rng)
                print(json.dumps({"killed": dict(kills)}), flush=True)
                if run.poll() is not None:
                    run = begin(words, work / f"{label} run")
            said = (work / f"{label} run" / "log").read_text()
            more = {
                "kills": dict(kills),
                "ended by itself": ended,
                "bundles sent": len(re.findall(" is sent ", said)),
            }
            yield label, out, begun, more
    finally:
        if run is not None:
            run.kill()
        for host in range(HOSTS):
            cluster.end(host)
            shutil.rmtree(f"/tmp/{names[host]}", ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--policy", default="pen")
    parser.add_argument("--env", default="sinew/Pen-v0")
    parser.add_argument("--episodes", type=int, default=200)
    parser.add_argument("--delay", type=float, default=20.0, help="delay of each packet in ms")
    parser.add_argument("--loss", type=float, default=1.0, help="lost packets in percent")
    parser.add_argument("--kill", type=float, help="average seconds between two kills of a host")
    parser.add_argument("--ray", action="store_true", help="use the hosts as a Ray cluster")
    parser.add_argument("--kills", type=int, default=30, help="largest number of kills of a Ray cluster")
    parser.add_argument("--processes", type=int, nargs="*", default=[1, 2], help="first play without hosts")
    args, options = parser.parse_known_args()
    work = Path(tempfile.mkdtemp(prefix="sinew-hosts-"))
    environment = {
        **os.environ,
        "SINEW_API_KEY": "policy of this run",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    environment |= {"RAY_ADDRESS": f"{address(0)}:{RAY_PORT}", "RAY_USAGE_STATS_ENABLED": "0"}
    verb = [sys.executable, "-m", "sinew", "eval"]
    play = [*verb, args.policy, "--env", args.env, "--episodes", str(args.episodes), *options]
    found: dict[str, Any] = {}

    def begin(words: Sequence[str], folder: Path) -> subprocess.Popen[bytes]:
        folder.mkdir(parents=True, exist_ok=True)
        log = (folder / "log").open("ab")
        return subprocess.Popen(words, cwd=folder, env=environment, stdout=log, stderr=log)

    def row(name: str, out: Path, begun: float, **more: Any) -> None:
        played = outcomes(out)
        first = found.setdefault("_first", played)
        took = time.monotonic() - begun
        found[name] = {
            "seconds": round(took, 1),
            "of the first run": round(took / found.setdefault("_took", took), 2),
            "episodes": len(played),
            "won": sum(each["success"] for each in played.values()),
            "equal": sum(first[seed] == each for seed, each in played.items()),
            **more,
        }
        print(json.dumps({name: found[name]}), flush=True)

    for shards in args.processes:
        out, begun = work / f"{shards}", time.monotonic()
        assert begin([*play, "--shards", str(shards), "--out", str(out)], work / f"at{shards}").wait() == 0
        row(f"{shards} processes", out, begun)
    with network(args.delay / 1e3, args.loss / 100) as names:
        if args.ray:
            for label, out, begun, more in through_ray(play, names, work, begin, environment, args):
                row(label, out, begun, **more)
            shutil.rmtree(work)
            return
        for often in (None,) if args.kill is None else (None, args.kill):
            label = "3 hosts" if often is None else "3 hosts, killed"
            at, out = f"{address(0)}:{PORT}", work / label
            commands = [[*play, "--shards", "1", "--out", str(out), "--listen", at]]
            commands += [[*verb, "--join", f"http://{at}", "--shards", "1"]] * (HOSTS - 1)

            def start(host: int, words: list[str], label: str = label) -> subprocess.Popen[bytes]:
                return begin(["ip", "netns", "exec", names[host], *words], work / f"{label} {host}")

            begun, rng, kills = time.monotonic(), random.Random(0), 0
            running = [start(host, commands[host]) for host in range(HOSTS)]
            while running[0].poll() is None:
                if often is None:
                    running[0].wait()
                    break
                with contextlib.suppress(subprocess.TimeoutExpired):
                    running[0].wait(rng.expovariate(1 / often))
                    break
                host = rng.randrange(HOSTS)
                running[host].kill()
                running[host].wait()
                running[host], kills = start(host, commands[host]), kills + 1
            log = work / f"{label} 0" / "log"
            assert running[0].returncode == 0, log.read_text()[-2000:]
            for process in running[1:]:
                if often is not None:  # the kill may have come after the end of the run
                    process.kill()
                process.wait()
            said = "".join((work / f"{label} {host}" / "log").read_text() for host in range(1, HOSTS))
            elsewhere = [int(n) for n in re.findall(r"played +(\d+) episodes on this machine", said)]
            row(label, out, begun, kills=kills, elsewhere=elsewhere)
    shutil.rmtree(work)


if __name__ == "__main__":
    main()
