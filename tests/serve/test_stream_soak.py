"""Two robots on streams of one real server that is killed and started again: nothing is lost but the time it was away.

Twelve seconds, or ``SINEW_STREAM_SOAK_MINUTES``, which also holds rates and memory of the second server against those
of the first; it wants a machine with nothing beside. ``-s`` shows the numbers.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sinew_client.control import Loop, Settings, Stream, StreamReport
from sinew_client.streams import StreamLink, StreamWindow

from tests.serve.puppet import until
from tests.serve.test_streams import RATE, Robot

MINUTES = os.environ.get("SINEW_STREAM_SOAK_MINUTES", "")
SECONDS = 60 * float(MINUTES or "0.2")
STALE_S = 0.3
FLAT = 32 << 20  # bytes


class Mover(Robot):
    """A robot that counts what it executes."""

    executed = 0

    def act(self, row: np.ndarray) -> None:
        self.executed += 1


class Link(StreamLink):
    """A link that counts the server's runs of which no window has come. Another session begins with run 1."""

    lost = last = 0

    def windows(self) -> list[StreamWindow]:
        found = super().windows()
        for window in found:
            self.lost += max(0, window.run - self.last - 1)
            self.last = window.run
        return found


def serve(bundle: Path, port: int) -> subprocess.Popen:
    command = [sys.executable, "-m", "sinew", "serve", str(bundle), "--engine", "eager", "--threads", "1"]
    return subprocess.Popen(
        [*command, "--wire", f"native:{port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


def resident(process: int) -> int:
    """Return the bytes that a process has in memory."""
    return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def told(loop: Loop) -> tuple[int, int]:
    """Return the windows that came, and the ticks without a node."""
    return loop.controller.chunks, loop.controller.misses  # type: ignore[attr-defined]


def phase(server: subprocess.Popen, loops: list[Loop], seconds: float) -> dict[str, Any]:
    """Wait until the first robot has begun so many seconds of ticks; return what both did, and the server's memory."""

    def counts() -> np.ndarray:  # [robots, 4]
        return np.array([[loop.steps, *told(loop), loop.source.link.dropped] for loop in loops])  # type: ignore[attr-defined]

    begun, before, memory = time.monotonic(), counts(), [resident(server.pid)]
    end = loops[0].steps + int(seconds * RATE)
    looks = iter(np.linspace(loops[0].steps, end, 12)[1:-1])
    due = next(looks)
    while loops[0].steps < end:
        threading.Event().wait(0.2)
        if loops[0].steps >= due:
            memory.append(resident(server.pid))
            due = next(looks, np.inf)
    memory.append(resident(server.pid))
    took = time.monotonic() - begun
    ticks, windows, misses, dropped = (counts() - before).T
    return {
        "seconds": round(took, 1),
        "tick_hz": np.round(ticks / took, 2).tolist(),
        "window_hz": np.round(windows / took, 2).tolist(),
        "misses": misses.tolist(),
        "dropped": dropped.tolist(),
        "memory_mib": [round(each / (1 << 20), 1) for each in memory],
        "grown": memory[-1] - memory[0],
    }


@pytest.mark.slow
@pytest.mark.timeout(300 + 2 * SECONDS)
def test_two_robots_and_a_server_that_is_killed(rolling_bundle: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = serve(rolling_bundle, port)
    links = [Link(f"tcp://127.0.0.1:{port}", RATE, name) for name in ("left", "right")]
    settings = Settings(RATE, stale=STALE_S, fusion="latest_only")
    loops = [Loop(Mover(), Stream(link), settings, 1, "go") for link in links]
    threads = [threading.Thread(target=loop.run) for loop in loops]
    for thread in threads:
        thread.start()
    try:
        until(lambda: all(loop.controller.chunks > 50 for loop in loops), "windows of both")
        first = phase(server, loops, SECONDS / 2)
        lost = [link.lost for link in links]
        os.kill(server.pid, signal.SIGKILL)
        server.wait()
        until(
            lambda: all(loop.reason in ("out of nodes", "the newest frame is too old") for loop in loops),
            "a hold",
        )
        server = serve(rolling_bundle, port)
        windows = [loop.controller.chunks for loop in loops]
        until(
            lambda: all(loop.controller.chunks > old + 50 for loop, old in zip(loops, windows, strict=True)),
            "windows again",
        )
        for link, count in zip(links, lost, strict=True):
            link.lost = count  # what was under way when the server died
        second = phase(server, loops, SECONDS / 2)
    finally:
        for loop in loops:
            loop.stop()
        for thread in threads:
            thread.join()
        server.kill()
        server.wait()
        for link in links:
            link.close()
    for told in (first, second, *(StreamReport.of(loop).to_dict() for loop in loops)):
        print(json.dumps(told))
    assert [link.lost for link in links] == [0, 0]
    for loop in loops:
        robot: Mover = loop.robot  # type: ignore[assignment]
        assert (
            robot.executed + sum(loop.controller.held.values()) == loop.steps
        )  # each executed or held, never both
        # A busy machine may stop a thread between the look at the clock and the command.
        assert max(loop.controller.reactions.ages("image")) <= STALE_S + 2.0
        assert max(loop.controller.reactions.ages("sensor")) <= 10.0
    assert max(first["grown"], second["grown"]) < FLAT
    if MINUTES:
        for now, then in zip(second["window_hz"], first["window_hz"], strict=True):
            assert now > 0.9 * then
        for rate in (*first["tick_hz"], *second["tick_hz"]):
            assert 0.99 * RATE <= rate <= 1.01 * RATE
        assert abs(second["memory_mib"][-1] - first["memory_mib"][-1]) * (1 << 20) < FLAT
