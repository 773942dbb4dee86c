"""A command is stopped again and again, and ends as it would alone."""

from __future__ import annotations

import os
import sys

import pytest

from tools.pauses import main, processes

QUICK = ("--every", "0.01", "0.03", "--length", "0.01", "0.03")
# Each of two processes waits for the signal that ends a pause.
RESUMED = """
import signal, subprocess, sys, time
seen = []
signal.signal(signal.SIGCONT, lambda *_: seen.append(1))
child = subprocess.Popen([sys.executable, *sys.orig_argv[1:], "x"]) if len(sys.argv) == 1 else None
end = time.monotonic() + 600
while not seen and time.monotonic() < end:
    time.sleep(0.01)
sys.exit(7 if seen and (child is None or child.wait() == 7) else 1)
"""
# The first thread waits until the second one is stopped by a tracer.
TRACED = """
import sys, threading, time
from pathlib import Path
second = threading.Thread(target=time.sleep, args=(3000,), daemon=True)
second.start()
state, end = Path(f"/proc/self/task/{second.native_id}/status"), time.monotonic() + 600
while "t (tracing stop)" not in state.read_text() and time.monotonic() < end:
    time.sleep(0.001)
sys.exit(7 if time.monotonic() < end else 1)
"""

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")


@pytest.mark.parametrize("kind", ["all", "process"])
def test_all_processes_of_a_command_are_stopped_and_go_on(
    kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*QUICK, "--kinds", kind, "--", sys.executable, "-c", RESUMED]) == 7
    said = capsys.readouterr().err
    assert f"x {kind}" in said
    assert f" 0 x {kind}" not in said
    assert processes(b"SINEW_PAUSES=" + str(os.getpid()).encode()) == []


def test_single_threads_are_stopped(capsys: pytest.CaptureFixture[str]) -> None:
    status = main([*QUICK, "--kinds", "thread", "--", sys.executable, "-c", TRACED])
    if "threads could not be stopped" in capsys.readouterr().err and status == 1:
        pytest.skip("this user may not trace other processes")
    assert status == 7


def test_a_kind_that_is_none_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--kinds", "all,network", "--", "true"])
    assert "--kinds: expected all, process, thread, got network" in capsys.readouterr().err
