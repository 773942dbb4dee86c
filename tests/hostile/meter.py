"""Run one input after the other, and measure the processor time and the peak of memory.

An input is a finding if it computes for longer than ``SLOW_S``, or needs more memory than ``ROOM`` plus ``FACTOR``
times its own size, whatever its result is. An input that computes for ``ENDLESS_S`` is stopped.
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

PEAK = b"5"  # this value resets the peak of resident memory, see proc(5)
SLOW_S = 10.0
ENDLESS_S = 60.0
ROOM, FACTOR = 64 << 20, 300  # bytes, and bytes for each byte of an input
WHOLE = 768 << 20  # bytes, if an input is a whole checkpoint or bundle
SPARE = (
    8 << 30
)  # bytes of address space in addition to those at the start; a request for more raises MemoryError
_given = [-1]


class EndlessError(BaseException):
    """The computation for this input does not end."""


def gave(data: Sized) -> None:
    """Record the size of the present input."""
    _given[0] = len(data)


def guard() -> None:
    """Limit the address space of this process, so that a finding does not end other processes."""
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[0])
    most = pages * resource.getpagesize() + SPARE
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.getrlimit(resource.RLIMIT_AS)[1]))


class Memory:
    """The memory of this process in bytes, as Linux counts it: the present value, and the peak since the last
    ``reset``."""

    def __init__(self) -> None:
        self._status = os.open("/proc/self/status", os.O_RDONLY)
        self._clear: int | None = None
        with contextlib.suppress(
            OSError
        ):  # some systems do not allow this; the peak then includes all earlier inputs
            self._clear = os.open("/proc/self/clear_refs", os.O_WRONLY)

    @property
    def exact(self) -> bool:
        """Return True if the peak belongs to one input."""
        return self._clear is not None

    def now(self) -> int:
        return self._read(b"VmRSS:")

    def peak(self) -> int:
        return self._read(b"VmHWM:")

    def reset(self) -> int:
        """Reset the peak. Returns the present memory of the process."""
        if self._clear is not None:
            os.pwrite(self._clear, PEAK, 0)
        return self.now()

    def _read(self, name: bytes) -> int:
        text = os.pread(self._status, 4096, 0)
        return int(text[text.index(name) :].split(None, 2)[1]) << 10


@dataclass
class Kind:
    """The results of one fuzzer.

    Attributes:
        taken: Number of accepted inputs.
        refused: Number of rejected inputs.
        unexpected: Number of unexpected exceptions, by their text with the number of the first input.
    """

    name: str
    taken: int = 0
    refused: int = 0
    unexpected: Counter[str] = field(default_factory=Counter)
    slow: int = 0  # slow inputs, which also count in the fields above
    large: int = 0
    slowest: tuple[float, int] = (0.0, -1)  # seconds of processor time, and number of the input
    largest: tuple[int, int] = (0, -1)  # bytes, and number of the input
    seconds: float = 0.0
    grown: int = 0

    @property
    def inputs(self) -> int:
        return self.taken + self.refused + self.unexpected.total()

    @property
    def bad(self) -> int:
        return self.unexpected.total() + self.slow + self.large

    def row(self) -> str:
        """Return the row of the table."""
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
    """Run inputs by number, and print those that give neither a value nor an expected exception."""
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
            print(f"  {kind.name}, number {number}: {seconds:.0f} s of processor time", flush=True)
        kind.slowest = max(kind.slowest, (seconds, number))
        taken, most = memory.peak() - here, WHOLE if _given[0] < 0 else ROOM + FACTOR * _given[0]
        if taken > most and memory.exact:
            kind.large += 1
            print(f"  {kind.name}, number {number}: {taken >> 20} MiB for {_given[0]} bytes", flush=True)
        kind.largest = max(kind.largest, (taken, number))


@contextlib.contextmanager
def _ended() -> Iterator[None]:
    """Raise EndlessError in code that computes for ``ENDLESS_S``. Only on the main thread, where Python receives
    signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(_number: int, _frame: object) -> None:
        raise EndlessError(f"more than {ENDLESS_S:g} s of processor time")

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
