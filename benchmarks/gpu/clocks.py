"""Record the clocks, the power and the temperature of the GPU while the sections run.

A GPU that is hot, or near its power limit, lowers its clocks. Two runs are comparable only if their clocks are. The
program ``nvidia-smi`` reads the values, so that the process of a section does nothing for the record.
"""

from __future__ import annotations

import statistics
import subprocess
import time
from threading import Thread
from typing import Any

Record = dict[str, Any]
# Field of the record -> name of the value in ``nvidia-smi --help-query-gpu``.
FIELDS = {
    "sm_mhz": "clocks.sm",
    "memory_mhz": "clocks.mem",
    "power_w": "power.draw",
    "celsius": "temperature.gpu",
}
EVERY_MS = 500


class Clocks:
    """A record of one GPU, from the entry of the ``with`` block to its end.

    Args:
        gpu: Index, UUID or PCI address of the GPU, as ``nvidia-smi`` accepts them.
        program: Name of ``nvidia-smi``.

    Attributes:
        samples: For each sample, the seconds since the start and the value of each field. A value that the GPU does not
            have is None.
        missing: The reason why there is no record, or "".
    """

    def __init__(self, gpu: str, program: str = "nvidia-smi"):
        self.samples: list[tuple[float | None, ...]] = []
        self.missing = ""
        self.start = time.monotonic()
        self._command = [program, "-i", gpu, f"--query-gpu={','.join(FIELDS.values())}"]
        self._command += ["--format=csv,noheader,nounits", "-lms", str(EVERY_MS)]
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Clocks:
        pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        try:
            self._process = subprocess.Popen(self._command, **pipes)
        except OSError as error:
            self.missing = f"{self._command[0]}: {error.strerror}"
            return self
        self._reader = Thread(target=self._read, args=(self._process,), daemon=True)
        self._reader.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
            self._reader.join()

    def _read(self, process: subprocess.Popen[str]) -> None:
        for line in process.stdout or ():
            values = [_number(text) for text in line.split(",")]
            if len(values) == len(FIELDS):
                self.samples.append((round(time.monotonic() - self.start, 2), *values))
            else:  # a message, for example about an unknown GPU
                self.missing = self.missing or line.strip()

    def record(self) -> Record:
        """Return the whole record."""
        found: Record = {"fields": ["seconds", *FIELDS], "samples": self.samples}
        return found | ({"missing": self.missing} if self.missing else {})

    def since(self, start: float) -> Record:
        """Return the least value, the median and the largest value of each field since a time of ``time.monotonic()``.

        The record of a section that was shorter than the time between two samples has no values.
        """
        rows = [sample for sample in self.samples if (sample[0] or 0.0) >= start - self.start]
        found: Record = {"count": len(rows)}
        for field, column in zip(FIELDS, list(zip(*rows, strict=True))[1:], strict=False):
            values = [value for value in column if value is not None]
            if values:
                found[field] = [min(values), statistics.median(values), max(values)]
        return found


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None  # "[N/A]"
