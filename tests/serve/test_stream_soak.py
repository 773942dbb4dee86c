"""Two robots on streams of one real server that is killed and started again: nothing is lost but the time it was away.

Twelve seconds, or ``SINEW_STREAM_SOAK_MINUTES``.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from sinew_client.control.stream import StreamLoop
from sinew_client.streams import StreamLink

from tests.serve.puppet import until
from tests.serve.test_streams import RATE, Robot

SECONDS = 60 * float(os.environ.get("SINEW_STREAM_SOAK_MINUTES", "0.2"))
STALE_S = 0.3


def serve(bundle: Path, port: int) -> subprocess.Popen:
    command = [sys.executable, "-m", "sinew", "serve", str(bundle), "--engine", "eager", "--threads", "1"]
    return subprocess.Popen(
        [*command, "--wire", f"native:{port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


def resident(process: subprocess.Popen) -> int:
    """Return the bytes that a process has in memory."""
    return int(Path(f"/proc/{process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
@pytest.mark.timeout(300 + 2 * SECONDS)
def test_two_robots_and_a_server_that_is_killed(rolling_bundle: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = serve(rolling_bundle, port)
    loops = [
        StreamLoop(Robot(), StreamLink(f"tcp://127.0.0.1:{port}", RATE, name), RATE, 1, "go", stale=STALE_S)
        for name in ("left", "right")
    ]
    threads = [threading.Thread(target=loop.run) for loop in loops]
    for thread in threads:
        thread.start()
    try:
        until(lambda: all(loop.windows > 50 for loop in loops), "windows of both")
        before = resident(server)
        ticks = loops[0].ticks
        until_ticks(loops[0], ticks + int(SECONDS * RATE / 2))
        grown = resident(server) - before
        os.kill(server.pid, signal.SIGKILL)
        server.wait()
        until(
            lambda: all(loop.reason in ("out of nodes", "the newest frame is too old") for loop in loops),
            "a hold",
        )
        server = serve(rolling_bundle, port)
        windows = [loop.windows for loop in loops]
        until(
            lambda: all(loop.windows > old + 50 for loop, old in zip(loops, windows, strict=True)),
            "windows again",
        )
        until_ticks(loops[0], loops[0].ticks + int(SECONDS * RATE / 2))
    finally:
        for loop in loops:
            loop.stop()
        for thread in threads:
            thread.join()
        server.kill()
        server.wait()
        for loop in loops:
            loop.link.close()  # type: ignore[attr-defined]
    assert grown < 32 << 20
    for loop in loops:
        robot: Robot = loop.robot  # type: ignore[assignment]
        assert (
            len(robot.rows) + sum(loop.held.values()) == loop.ticks
        )  # each tick executed or held, never both
        # A busy machine may stop a thread between the look at the clock and the command.
        assert max(loop.reactions.ages("image")) <= STALE_S + 2.0
        assert max(loop.reactions.ages("sensor")) <= 10.0
        print(loop.report().to_dict())


def until_ticks(loop: StreamLoop, ticks: int) -> None:
    """Wait until a loop has begun so many ticks, however long that takes."""
    while loop.ticks < ticks:
        threading.Event().wait(0.2)
