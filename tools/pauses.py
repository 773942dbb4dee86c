"""Run a command and stop its processes and threads at random moments, as a busy machine does.

``python -m tools.pauses --seed 7 -- .venv/bin/python -m pytest tests/serve`` runs these tests. A test that passes
alone and fails here depends on time, or has found a race. Repeat it with the same seed, and with others: the moments of
the pauses are random, but the machine decides what runs at these moments. Each pause stops one of:

* all processes of the command, as if the machine stood still,
* one process, as a server that gets no processor,
* some threads of one process, which finds races. This needs the right to trace the process (ptrace).

Pauses take no processor time. The exit status is that of the command. Linux only.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

KINDS = ("all", "process", "thread")
MOST_THREADS = 3  # stopped at the same time
STOP_S = 1.0  # a thread in the kernel may need this long to stop; else it goes on as soon as it has stopped
# These numbers are from linux/ptrace.h and linux/wait.h.
SEIZE, INTERRUPT, DETACH, EVERY_CHILD = 0x4206, 0x4207, 17, 0x40000000
Resume = Callable[[], None]


def processes(mark: bytes) -> list[int]:
    """Return the processes that were started with ``mark`` in their environment, and all processes forked from them."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or belongs to another user
            if mark in (path / "environ").read_bytes():
                found.append(int(path.name))
    return sorted(found)


def stop_processes(pids: Sequence[int]) -> Resume:
    """Stop processes. Returns the function that lets them go on."""
    stopped = [pid for pid in pids if _signalled(pid, signal.SIGSTOP)]
    return lambda: [_signalled(pid, signal.SIGCONT) for pid in stopped] and None


def _signalled(pid: int, number: signal.Signals) -> bool:
    with contextlib.suppress(OSError):
        os.kill(pid, number)
        return True
    return False


class Threads:
    """Stops single threads of other processes.

    Attributes:
        refused: Number of threads that could not be stopped.
    """

    def __init__(self, child: subprocess.Popen[bytes]):
        self._child, self.refused = child, 0
        self._late: set[int] = set()  # threads that were asked to stop, and have not stopped yet
        self._ptrace = ctypes.CDLL(None, use_errno=True).ptrace
        self._ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
        self._ptrace.restype = ctypes.c_long

    def stop(self, tids: Sequence[int]) -> Resume:
        """Stop threads. Returns the function that lets them go on."""
        seized = [tid for tid in tids if self._ptrace(SEIZE, tid, None, None) == 0]
        self.refused += len(tids) - len(seized)
        for tid in seized:
            self._ptrace(INTERRUPT, tid, None, None)
        self._late.update(seized)
        stopped = {}
        end = time.monotonic() + STOP_S
        while self._late.intersection(seized) and time.monotonic() < end:
            stopped |= self._stopped()
            time.sleep(0.001)
        return lambda: self._resume(stopped)

    def resume_late(self) -> None:
        """Let threads go on that stopped only after the pause for which they were asked to."""
        self._resume(self._stopped())

    def _stopped(self) -> dict[int, int]:
        """Return the wait status of each thread that has stopped since the last call."""
        found = {}
        for tid in sorted(self._late):
            try:
                ready, status = os.waitpid(tid, EVERY_CHILD | os.WNOHANG)
            except OSError:  # it has ended
                self._late.discard(tid)
                continue
            if not ready:
                continue
            self._late.discard(tid)
            if os.WIFSTOPPED(status):
                found[tid] = status
            elif tid == self._child.pid:  # Popen cannot ask for this status again
                self._child.returncode = os.waitstatus_to_exitcode(status)
        return found

    def _resume(self, stopped: Mapping[int, int]) -> None:
        for tid, status in stopped.items():
            # A signal that came meanwhile goes to the thread. The stop itself is an event and no signal.
            number = 0 if status >> 16 else os.WSTOPSIG(status)
            if self._ptrace(DETACH, tid, None, ctypes.c_void_p(number)) != 0:
                self._late.add(tid)  # a signal has moved it out of its stop, and it will stop again


def threads_of(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(path.name) for path in Path(f"/proc/{pid}/task").iterdir()]
    return []


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=1, help="number for the moments of the pauses")
    parser.add_argument("--every", type=float, nargs=2, default=(0.1, 0.9), help="seconds between two pauses")
    parser.add_argument("--length", type=float, nargs=2, default=(0.05, 1.2), help="seconds of a pause")
    parser.add_argument(
        "--kinds", default="all,process,thread,thread", help=f"what to stop: {', '.join(KINDS)}"
    )
    parser.add_argument("command", nargs="+", help="the command and its arguments, after --")
    given = parser.parse_args(arguments)
    kinds = given.kinds.split(",")
    if unknown := sorted(set(kinds) - set(KINDS)):
        parser.error(f"--kinds: expected {', '.join(KINDS)}, got {', '.join(unknown)}")
    rng, counts, seconds = random.Random(given.seed), Counter[str](), 0.0
    name, value = "SINEW_PAUSES", f"{os.getpid()}-{time.monotonic_ns()}"
    child = subprocess.Popen(given.command, env={**os.environ, name: value})
    threads = Threads(child)
    while child.poll() is None:
        time.sleep(rng.uniform(*given.every))
        threads.resume_late()
        if not (found := processes(f"{name}={value}".encode())):
            continue
        kind, length, one = rng.choice(kinds), rng.uniform(*given.length), rng.choice(found)
        if kind == "thread":
            tids = threads_of(one)
            resume = threads.stop(rng.sample(tids, min(len(tids), rng.randint(1, MOST_THREADS))))
        else:
            resume = stop_processes(found if kind == "all" else [one])
        try:
            time.sleep(length)
        finally:
            resume()
        counts[kind], seconds = counts[kind] + 1, seconds + length
    made = ", ".join(f"{counts[kind]} x {kind}" for kind in KINDS)
    refused = f"; {threads.refused} threads could not be stopped" if threads.refused else ""
    print(f"pauses with seed {given.seed}: {made}, {seconds:.0f} s together{refused}", file=sys.stderr)
    return int(child.returncode)


if __name__ == "__main__":
    sys.exit(main())
