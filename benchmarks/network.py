"""A network between two network namespaces: delay, loss and rate of each direction, below the kernel's own TCP and UDP.

Each namespace has a TUN device; this process carries their packets, as ``tc netem`` would where the kernel has it: a
packet is lost with some probability, waits for those before it (``rate``), and arrives ``delay`` later. What is above
is the kernel's: retransmissions, congestion control, sockets. Needs root, ``ip`` and /dev/net/tun; Linux alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import os
import random
import select
import shutil
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 1, 0x1000
MTU = 1500
QUEUE = 1000  # packets that wait for the rate or the delay, netem's own default


@dataclass(frozen=True)
class Way:
    """One direction. delay, jitter: seconds; loss: share of packets; rate: bits a second, 0 for any."""

    delay: float = 0.0
    jitter: float = 0.0
    loss: float = 0.0
    rate: float = 0.0


@dataclass
class _Queue:
    way: Way
    to: int
    waiting: list[tuple[float, int, bytes]] = field(default_factory=list)
    free: float = 0.0  # when the line has sent what it was given
    lost: int = 0
    carried: int = 0


def why_not() -> str:
    """Return why there can be no such network here; nothing where there can."""
    if os.name != "posix" or not Path("/dev/net/tun").exists():
        return "there is no /dev/net/tun"
    if os.geteuid() != 0:
        return "only root makes network namespaces"
    return "" if shutil.which("ip") else "there is no `ip` (iproute2)"


def ip(*arguments: str) -> None:
    """Call ``ip``; raises CalledProcessError with what it said."""
    subprocess.run(("ip", *arguments), check=True, capture_output=True)


class Network:
    """robot, server: names of the two namespaces, whose addresses are ``ROBOT`` and ``SERVER``; ``inside`` makes a
    command that runs in one. up: from the robot to the server. Both directions may be changed while packets travel."""

    ROBOT, SERVER = "10.77.0.2", "10.77.0.1"

    def __init__(self, up: Way | None = None, down: Way | None = None, seed: int = 0):
        tag = f"{os.getpid() % 100000}"
        self.robot, self.server = f"sinew-r{tag}", f"sinew-s{tag}"
        self._random, self._count, self._end = random.Random(seed), 0, threading.Event()
        self._made: list[str] = []
        self._files: list[int] = []
        try:
            for name, own, other in (
                (self.robot, self.ROBOT, self.SERVER),
                (self.server, self.SERVER, self.ROBOT),
            ):
                self._files.append(self._device(name, own, other))
        except BaseException:
            self.close()
            raise
        robot, server = self._files
        self._queues = {robot: _Queue(up or Way(), server), server: _Queue(down or Way(), robot)}
        self._thread = threading.Thread(target=self._carry, daemon=True)
        self._thread.start()

    def _device(self, name: str, own: str, other: str) -> int:
        ip("netns", "add", name)
        self._made.append(name)
        file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        device = name[:15]
        fcntl.ioctl(file, _TUNSETIFF, struct.pack("16sH14x", device.encode(), _IFF_TUN | _IFF_NO_PI))
        ip("link", "set", device, "netns", name)
        ip("-n", name, "link", "set", "lo", "up")
        ip("-n", name, "link", "set", device, "mtu", str(MTU), "multicast", "on", "up")
        ip("-n", name, "addr", "add", f"{own}/24", "dev", device)
        return file

    def inside(self, name: str, *command: object) -> list[str]:
        """Return a command line that runs in a namespace."""
        return ["ip", "netns", "exec", name, *map(str, command)]

    def shape(self, up: Way, down: Way) -> None:
        """Have packets that are sent from now on travel in another way."""
        robot, server = self._files
        self._queues[robot].way, self._queues[server].way = up, down

    def roam(self, address: str) -> None:
        """Give the robot another address in the place of its own, as a change from one access point to another does."""
        device = self.robot[:15]
        ip("-n", self.robot, "addr", "flush", "dev", device)
        ip("-n", self.robot, "addr", "add", f"{address}/24", "dev", device)

    @property
    def carried(self) -> tuple[int, int, int]:
        """Packets that were sent up, down, and lost."""
        up, down = (self._queues[file] for file in self._files)
        return up.carried, down.carried, up.lost + down.lost

    def close(self) -> None:
        """Remove the namespaces, with all that is in them."""
        self._end.set()
        if hasattr(self, "_thread"):
            self._thread.join()
        for file in self._files:
            os.close(file)
        for name in self._made:
            with contextlib.suppress(subprocess.CalledProcessError):
                ip("netns", "del", name)

    def _carry(self) -> None:
        while not self._end.is_set():
            now = time.monotonic()
            due = [queue.waiting[0][0] for queue in self._queues.values() if queue.waiting]
            wait = min(0.1, max(0.0, min(due) - now)) if due else 0.1
            ready, _, _ = select.select(self._files, [], [], wait)
            for file in ready:
                with contextlib.suppress(BlockingIOError):
                    while True:
                        self._take(self._queues[file], os.read(file, 1 << 16))
            now = time.monotonic()
            for queue in self._queues.values():
                while queue.waiting and queue.waiting[0][0] <= now:
                    with contextlib.suppress(OSError):  # the other end is down
                        os.write(queue.to, heapq.heappop(queue.waiting)[2])

    def _take(self, queue: _Queue, packet: bytes) -> None:
        way, now = queue.way, time.monotonic()
        if (way.loss and self._random.random() < way.loss) or len(queue.waiting) >= QUEUE:
            queue.lost += 1
            return
        queue.carried += 1
        sent = now
        if way.rate:
            sent = queue.free = max(now, queue.free) + 8 * len(packet) / way.rate
        self._count += 1
        late = way.delay + way.jitter * self._random.uniform(-1, 1)
        heapq.heappush(queue.waiting, (sent + max(0.0, late), self._count, packet))


@contextlib.contextmanager
def network(up: Way | None = None, down: Way | None = None, seed: int = 0) -> Iterator[Network]:
    """Make a network and take it away. Raises OSError or CalledProcessError where there can be none (``why_not``)."""
    made = Network(up, down, seed)
    try:
        yield made
    finally:
        made.close()
