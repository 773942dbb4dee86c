"""Time the first answer after a pause of two servers, with and without ``--keep-warm-s``, in turn.

``python -m benchmarks.truth warm`` runs the measurement. Both servers stay open, and each has its own client on a
socket. While one is measured, the other one is stopped by a signal, so that it cannot warm the processor. A server
first answers some requests at once, then it gets none for the pause, and then the next answer is timed. Which server
begins alternates from pair to pair, so that the load of the machine affects both. Processor time is measured too,
because other programs disturb it less than the time by the clock.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from sinew_client import Client

from benchmarks.dashboard import thread_times
from benchmarks.paired import median_interval
from benchmarks.soak import serving
from sinew.bench.measure import make_observation
from sinew.core import PolicySpec

POLICIES, PAUSES_S, KEEP_WARM_S = ("pen", "blocks"), (2.0, 10.0, 30.0), 0.2
BEFORE = 8  # requests before a pause. The median of the second half is the steady time.
# Milliseconds of the first answer after a pause and of an answer without a pause, by the clock and of the processor.
SAMPLES = ("first_ms", "first_cpu_ms", "steady_ms", "steady_cpu_ms")


class Server:
    """A server that is stopped by a signal except during its own measurements.

    Args:
        address: Its address.
        pid: Its process.
    """

    def __init__(self, address: str, pid: int):
        self.pid = pid
        self._client = Client(address, timeout=60.0)
        spec = PolicySpec.from_dict(self._client.metadata()["policy"])
        self._observation = make_observation(spec, None, "put the red block into the left bin", None)
        self.samples: dict[str, list[float]] = {name: [] for name in SAMPLES}
        self.idle_s = self.idle_cpu_s = 0.0
        for _ in range(2 * BEFORE):
            self._answer()

    def _cpu_s(self) -> float:
        return sum(thread_times(self.pid).values())

    def _answer(self) -> tuple[float, float]:
        """Send a request. Returns the milliseconds of the answer and of the server's processor time."""
        cpu, begun = self._cpu_s(), time.perf_counter()
        self._client.infer(self._observation)
        taken = time.perf_counter() - begun
        return 1e3 * taken, 1e3 * (self._cpu_s() - cpu)

    def measure(self, pause_s: float) -> None:
        """Time the first answer after a pause, and the processor time of the server during the pause."""
        with running(self.pid):
            steady = np.median([self._answer() for _ in range(BEFORE)][BEFORE // 2 :], axis=0)
            cpu, begun = self._cpu_s(), time.perf_counter()
            time.sleep(pause_s)
            self.idle_cpu_s += self._cpu_s() - cpu
            self.idle_s += time.perf_counter() - begun
            for name, value in zip(SAMPLES, (*self._answer(), *steady), strict=True):
                self.samples[name].append(float(value))

    def row(self) -> dict[str, Any]:
        """Return the measurements, and begin again."""
        row: dict[str, Any] = {
            name: [round(each, 3) for each in values] for name, values in self.samples.items()
        }
        row["cpu_s_per_idle_s"] = round(self.idle_cpu_s / self.idle_s, 4)
        self.samples, self.idle_s, self.idle_cpu_s = {name: [] for name in SAMPLES}, 0.0, 0.0
        return row

    def close(self) -> None:
        self._client.close()


@contextmanager
def running(pid: int) -> Iterator[None]:
    """Let a stopped process run until the end of the block."""
    os.kill(pid, signal.SIGCONT)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGSTOP)


@contextmanager
def served(name: str, log: Path, *flags: str) -> Iterator[Server]:
    """Serve a built-in policy by `sinew serve`. The server is stopped by a signal until it is measured."""
    with serving(log, name, "--wire", "native:0", "--engine", "onnx", "--threads", "1", *flags) as (
        address,
        pid,
    ):
        server = Server(address, pid)
        os.kill(pid, signal.SIGSTOP)
        try:
            yield server
        finally:
            os.kill(pid, signal.SIGCONT)  # a stopped process would not end
            server.close()


def ratios(values: Sequence[float], others: Sequence[float]) -> list[float]:
    """Return the median of the paired ratios, with its 95 % interval."""
    return [
        round(each, 4)
        for each in median_interval([own / other for own, other in zip(values, others, strict=True)])
    ]


def warm(pairs: int) -> Iterator[dict[str, Any]]:
    """Measure each policy after each pause.

    Args:
        pairs: Number of pairs for each pause.

    Yields:
        A row for each policy and pause, ready for JSON.
    """
    rng = np.random.default_rng(0)
    for name in POLICIES:
        with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
            servers = {
                label: stack.enter_context(served(name, Path(folder) / label, *flags))
                for label, flags in {"without": (), "with": ("--keep-warm-s", str(KEEP_WARM_S))}.items()
            }
            for pause in PAUSES_S:
                for number in range(pairs):
                    # The end of the pause falls on any moment between two inferences that keep the server warm.
                    seconds = pause + rng.uniform(0.0, KEEP_WARM_S)
                    for label in list(servers)[:: 1 - 2 * (number % 2)]:
                        servers[label].measure(seconds)
                row = {label: server.row() for label, server in servers.items()}
                yield {
                    "policy": name,
                    "pause_s": pause,
                    "keep_warm_s": KEEP_WARM_S,
                    **row,
                    # Below 1, the server that stays warm is faster. The steady times show what chance alone gives.
                    "with_of_without": {
                        each: ratios(row["with"][each], row["without"][each]) for each in SAMPLES
                    },
                    "first_of_steady": {
                        label: {
                            unit: ratios(each[f"first_{unit}"], each[f"steady_{unit}"])
                            for unit in ("ms", "cpu_ms")
                        }
                        for label, each in row.items()
                    },
                }
