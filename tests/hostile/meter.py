"""Runs one input after the other and keeps what they cost: seconds of the processor, and memory at its peak.

An input that computes for longer than ``SLOW_S``, or takes more memory than ``ROOM`` and ``FACTOR`` times its own size,
is a finding whatever it ends in; one that computes for ``ENDLESS_S`` is ended.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sized
from dataclasses import dataclass, field

PEAK = b"5"  # resets the peak of resident memory, see proc(5)
SLOW_S = 10.0
ENDLESS_S = 60.0
ROOM, FACTOR = 64 << 20, 300  # bytes, and bytes for each byte of an input that says its size
WHOLE = 768 << 20  # bytes where an input is a whole checkpoint or bundle
SPARE = (
    8 << 30
)  # bytes of address space beyond what is there at the beginning; what asks for more gets a MemoryError
_given = [-1]


class EndlessError(BaseException):
    """An input that does not end."""


def gave(data: Sized) -> None:
    """Say of what size the present input is."""
    _given[0] = len(data)


def guard() -> None:
    """Bound the address space of this process, so that a finding does not end others."""
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[0])
    most = pages * resource.getpagesize() + SPARE
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.getrlimit(resource.RLIMIT_AS)[1]))


class Memory:
    """Bytes of this process, as Linux counts them: now, and at most since the last ``reset``."""

    def __init__(self) -> None:
        self._status = os.open("/proc/self/status", os.O_RDONLY)
        self._clear: int | None = None
        with contextlib.suppress(
            OSError
        ):  # not allowed everywhere; peaks are those of all inputs before, then
            self._clear = os.open("/proc/self/clear_refs", os.O_WRONLY)

    @property
    def exact(self) -> bool:
        """Return whether the peak is that of one input."""
        return self._clear is not None

    def now(self) -> int:
        return self._read(b"VmRSS:")

    def peak(self) -> int:
        return self._read(b"VmHWM:")

    def reset(self) -> int:
        """Forget the peak; return what the process has now."""
        if self._clear is not None:
            os.pwrite(self._clear, PEAK, 0)
        return self.now()

    def _read(self, name: bytes) -> int:
        text = os.pread(self._status, 4096, 0)
        return int(text[text.index(name) :].split(None, 2)[1]) << 10


@dataclass
class Kind:
    """What the inputs of one fuzzer did. unexpected: by exception, with the number of the first."""

    name: str
    taken: int = 0
    refused: int = 0
    unexpected: Counter[str] = field(default_factory=Counter)
    slow: int = 0  # beside what else they did
    large: int = 0
    slowest: tuple[float, int] = (0.0, -1)  # seconds of the processor, number
    largest: tuple[int, int] = (0, -1)  # bytes, number
    seconds: float = 0.0
    grown: int = 0

    @property
    def inputs(self) -> int:
        return self.taken + self.refused + self.unexpected.total()

    @property
    def bad(self) -> int:
        return self.unexpected.total() + self.slow + self.large

    def row(self) -> str:
        """Return a row of the table."""
        return (
            f"| {self.name} | {self.inputs:,} | {self.taken:,} | {self.refused:,} | {self.bad} |"
            f" {1e3 * self.slowest[0]:.0f} ms | {self.largest[0] / (1 << 20):.0f} MiB |"
            f" {self.grown / (1 << 20):+.0f} MiB |"
        )


HEAD = (
    "| fuzzer | inputs | taken | refused | unexpected | slowest | most memory of one | the process grew by |\n"
    "|---|---|---|---|---|---|---|---|"
)


def measure(
    name: str, case: Callable[[int], object], numbers: range, expected: tuple[type[BaseException], ...]
) -> Kind:
    """Run inputs by number. Every one ends in a value or in an expected exception; the rest is printed."""
    kind = Kind(name)
    memory = Memory()
    begun, before = time.perf_counter(), memory.now()
    with _ended():
        _run(kind, case, numbers, expected, memory)
    kind.seconds, kind.grown = time.perf_counter() - begun, memory.now() - before
    return kind


def _run(
    kind: Kind,
    case: Callable[[int], object],
    numbers: range,
    expected: tuple[type[BaseException], ...],
    memory: Memory,
) -> None:
    for number in numbers:
        _given[0] = -1
        if threading.current_thread() is threading.main_thread():
            signal.setitimer(signal.ITIMER_VIRTUAL, ENDLESS_S)
        here = memory.reset()
        start = time.process_time()
        try:
            case(number)
            kind.taken += 1
        except expected:
            kind.refused += 1
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 - that is what is looked for
            _tell(kind, number, f"{type(error).__name__}: {str(error)[:160]}")
        seconds = time.process_time() - start
        if seconds > SLOW_S:
            kind.slow += 1
            print(f"  {kind.name}, number {number}: {seconds:.0f} s of the processor", flush=True)
        kind.slowest = max(kind.slowest, (seconds, number))
        taken, most = memory.peak() - here, WHOLE if _given[0] < 0 else ROOM + FACTOR * _given[0]
        if taken > most and memory.exact:
            kind.large += 1
            print(f"  {kind.name}, number {number}: {taken >> 20} MiB for {_given[0]} bytes", flush=True)
        kind.largest = max(kind.largest, (taken, number))


@contextlib.contextmanager
def _ended() -> Iterator[None]:
    """Raise EndlessError in what computes for ``ENDLESS_S``; on the main thread alone, where Python takes signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(_number: int, _frame: object) -> None:
        raise EndlessError(f"more than {ENDLESS_S:g} s of the processor")

    before = signal.signal(signal.SIGVTALRM, end)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def _tell(kind: Kind, number: int, text: str) -> None:
    short = text[:60]
    kind.unexpected[short] += 1
    if kind.unexpected[short] == 1:
        print(f"  {kind.name}, number {number}: {text}", flush=True)
