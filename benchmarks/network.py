"""A simulated network between two network namespaces: delay, loss and rate of each direction, below the TCP of the
kernel.

Each namespace has a TUN device. This process carries the packets between these devices, as ``tc netem`` would. It
drops a packet with some probability, lets the packet wait for earlier packets (``rate``), and delivers it ``delay``
later. The layers above are those of the kernel: retransmissions, congestion control and sockets. This module needs
Linux, root, ``ip`` and /dev/net/tun.
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
QUEUE = 1000  # largest number of packets that wait for the rate or the delay, as in netem


@dataclass(frozen=True)
class Way:
    """The properties of one direction.

    Attributes:
        delay: Seconds.
        jitter: Seconds.
        loss: Fraction of packets that are lost.
        rate: Bits per second. 0 means no limit.
    """

    delay: float = 0.0
    jitter: float = 0.0
    loss: float = 0.0
    rate: float = 0.0


@dataclass
class _Queue:
    way: Way
    to: int
    waiting: list[tuple[float, int, bytes]] = field(default_factory=list)
    free: float = 0.0  # time at which the line has sent all earlier packets
    lost: int = 0
    carried: int = 0


def why_not() -> str:
    """Return the reason why this machine cannot have such a network, or ""."""
    if os.name != "posix" or not Path("/dev/net/tun").exists():
        return "/dev/net/tun is missing"
    if os.geteuid() != 0:
        return "only root can create network namespaces"
    return "" if shutil.which("ip") else "the program `ip` is missing; install iproute2"


def ip(*arguments: str) -> None:
    """Run ``ip``.

    Raises:
        CalledProcessError: The command failed. The exception contains its output.
    """
    subprocess.run(("ip", *arguments), check=True, capture_output=True)


class Network:
    """The two namespaces and the process that carries packets between them.

    Attributes:
        robot: Name of the namespace of the robot, with the address ``ROBOT``.
        server: Name of the namespace of the server, with the address ``SERVER``.
        up: Direction from the robot to the server. You may change it while packets travel.
        down: Direction from the server to the robot.
    """

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
        """Return a command line that runs ``command`` in a namespace."""
        return ["ip", "netns", "exec", name, *map(str, command)]

    def shape(self, up: Way, down: Way) -> None:
        """Change the properties of both directions for all later packets."""
        robot, server = self._files
        self._queues[robot].way, self._queues[server].way = up, down

    def roam(self, address: str) -> None:
        """Replace the address of the robot by another one, as when a robot changes from one access point to another."""
        device = self.robot[:15]
        ip("-n", self.robot, "addr", "flush", "dev", device)
        ip("-n", self.robot, "addr", "add", f"{address}/24", "dev", device)

    @property
    def carried(self) -> tuple[int, int, int]:
        """Return the number of packets that were sent up, sent down, and lost."""
        up, down = (self._queues[file] for file in self._files)
        return up.carried, down.carried, up.lost + down.lost

    def close(self) -> None:
        """Remove the namespaces and everything in them."""
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
                    with contextlib.suppress(OSError):  # the device at the other end is down
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
    """Create a network, and remove it at the end of the block.

    Raises:
        OSError: This machine cannot have such a network (``why_not``).
        CalledProcessError: ``ip`` failed.
    """
    made = Network(up, down, seed)
    try:
        yield made
    finally:
        made.close()
