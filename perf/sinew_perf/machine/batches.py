"""How long this machine takes for batches of a policy, predicted from its calibration."""

from __future__ import annotations

from sinew_perf.fleet import batched
from sinew_perf.machine import fit as calibration
from sinew_perf.program import PublishedProgram


def sizes(most: int) -> list[int]:
    """1, 2, 4 ... and the largest."""
    return sorted({*(1 << k for k in range(most.bit_length()) if 1 << k <= most), most})


def predicted(source: str, threads: int, engine: str, max_batch: int) -> tuple[dict[int, float], float]:
    """Return the seconds of each size and the calibration's band. Raises :class:`SinewError` where it is missing."""
    fitted = calibration.calibrated(source, threads, engine)
    program = PublishedProgram.load(source, dtypes="fp32", engine=calibration.program_of(engine))
    stages = program.components("unfused")
    found = {
        size: sum(fitted.predict(batched(stage, size)).seconds for stage in stages)
        for size in sizes(max_batch)
    }
    return found, fitted.band
