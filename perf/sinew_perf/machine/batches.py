"""Predict the time of batches of a policy on this machine, from its calibration."""

from __future__ import annotations

from sinew_perf.fleet import batched
from sinew_perf.machine import fit as calibration
from sinew_perf.program import PublishedProgram


def sizes(most: int) -> list[int]:
    """Return 1, 2, 4 and so on up to ``most``, and ``most`` itself."""
    return sorted({*(1 << k for k in range(most.bit_length()) if 1 << k <= most), most})


def predicted(source: str, threads: int, engine: str, max_batch: int) -> tuple[dict[int, float], float]:
    """Predict the time of batches.

    Args:
        source: The policy.
        threads: Number of compute threads of the calibration.
        engine: Engine of the calibration.
        max_batch: Largest batch.

    Returns:
        The seconds of an inference by the size of its batch, and the error band of the calibration.

    Raises:
        SinewError: There is no calibration.
    """
    fitted = calibration.calibrated(source, threads, engine)
    program = PublishedProgram.load(source, dtypes="fp32", engine=calibration.program_of(engine))
    stages = program.components("unfused")
    seconds = {
        size: sum(fitted.predict(batched(stage, size)).seconds for stage in stages)
        for size in sizes(max_batch)
    }
    return seconds, fitted.band
