"""Run ``sinew serve`` as a child process, for episodes that must use the real server."""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sinew.core import SinewError
from sinew.core.scratch import ended_by_signals
from sinew_client.untrusted import read_bytes

MAX_LOG = 1 << 28  # largest log of a server that is read, in bytes
READY = "ready on "
STOP_SECONDS = 30


@contextmanager
def serving(bundle: Path, log: Path, *arguments: str) -> Iterator[str]:
    """Serve a bundle. The server stops when the context ends, and also if this process is killed.

    Args:
        bundle: The bundle.
        log: File for the server's log.
        *arguments: Further options of `sinew serve`.

    Yields:
        The server's address, when it is ready.

    Raises:
        SinewError: The server did not start, or did not end cleanly.
    """
    command = [
        sys.executable,
        "-m",
        __name__,
        "serve",
        str(bundle),
        "--wire",
        "native:0",
        "--no-prepare",
        *arguments,
    ]
    with (
        ended_by_signals(),
        log.open("w") as errors,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as server,
    ):
        try:
            yield _wait_until_ready(server, log)
        finally:
            code = _stop(server)
    if code != 0:
        raise SinewError(f"the server ended with exit code {code}; its log is {log}")


def _wait_until_ready(server: subprocess.Popen[str], log: Path) -> str:
    assert server.stdout is not None
    for line in server.stdout:
        if line.startswith(READY):
            return line.removeprefix(READY).strip()
    server.wait()
    tail = "\n".join(read_bytes(log, MAX_LOG).decode(errors="replace").splitlines()[-5:])
    raise SinewError(f"the server did not start (exit code {server.returncode}):\n{tail}")


def _stop(server: subprocess.Popen[str]) -> int:
    if server.poll() is None:
        # Use SIGTERM, because a process that a script started in the background ignores SIGINT.
        server.terminate()
    try:
        return server.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        server.kill()
        return server.wait()


def _end_with_standard_input() -> None:
    """End this process with SIGTERM when its standard input is closed, which also happens when the parent is killed."""
    while os.read(0, 1 << 16):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    threading.Thread(target=_end_with_standard_input, daemon=True).start()
    runpy.run_module("sinew", run_name="__main__")
