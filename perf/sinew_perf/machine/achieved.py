"""Compare an engine with the roofline of this machine and with the calibrated prediction, for ``sinew bench``.

Both need the machine's measured peaks, which ``sinew perf calibrate`` stores for a processor and a number of threads.
If they are missing, or do not cover a dtype or device, the result is a reason. ONNX Runtime is predicted only if it
was calibrated itself. If necessary, its peak in fp32 is measured on demand.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sinew.core import SinewError, machine

if TYPE_CHECKING:
    from sinew.engine.example import Shapes
    from sinew.policy import Policy

    from sinew_perf.program import PublishedProgram

SIDE, RUNS = 2048, 5  # side of the matrix product that defines the peak, and number of its runs


def roofline_record(policy: Policy, threads: int, described: dict[str, Any]) -> dict[str, Any]:
    """Return for each stage two times: the milliseconds if the machine works at its measured peaks, and the calibrated
    prediction with its error band.

    Args:
        policy: The open policy.
        threads: Number of compute threads.
        described: The field ``policy`` of the benchmark's report.

    Returns:
        The times, ready for JSON. Or ``reason``, if they are unknown.
    """
    if policy.device != "cpu":
        return {"reason": f"no measured peaks for {policy.device}"}
    if policy.facts.one_graph:
        return {"reason": "there is no CPU calibration for the program of the cuda engine"}
    try:
        from sinew.engine.example import Shapes

        from sinew_perf.machine import fit as calibration
    except ImportError as error:
        return {"reason": f"counting operations needs {error.name}"}
    try:
        eager = calibration.load(machine.cpu_model(), threads)
        own = calibration.load(machine.cpu_model(), threads, engine=policy.engine_name)
        fitted = own or eager
        runs_torch = policy.engine.model is not None
        if fitted is None and runs_torch:
            command = f"sinew perf calibrate {policy.bundle.path} --threads {threads}"
            return {"reason": f"not calibrated for {threads} threads; run `{command}`"}
        # Measurements of PyTorch's kernels do not predict ONNX Runtime, and measurements in fp32 do not predict int8.
        predictable = (own is not None or runs_torch) and not policy.facts.recipe
        image = policy.manifest.processing.image
        shapes = Shapes(
            described["views"],
            image.height,
            image.width,
            described["prompt_tokens"],
            described["solver_steps"],
        )
        program = _program(policy, shapes)
        if program is None:
            return {"reason": f"{policy.bundle.path} has no weights from which operations can be counted"}
        fused, unfused = program.components("fused"), program.components("unfused")
        stages: dict[str, dict[str, float | None]] = {}
        for ideal, real in zip(fused, unfused, strict=True):
            stage: dict[str, float | None] = {
                "gflop": 1e-9 * ideal.repeats * sum(r.count * r.flops for r in calibration.work(ideal))
            }
            stages[ideal.name] = stage
            if fitted is None:
                continue
            stage["roofline"] = 1e3 * calibration.roofline_seconds(ideal, fitted.speeds)
            if predictable:
                predicted = fitted.predict(real)
                stage["predicted"] = 1e3 * predicted.seconds
                stage["low"] = 1e3 * predicted.low
                stage["high"] = None if predicted.high is None else 1e3 * predicted.high
    except SinewError as error:
        return {"reason": str(error)}
    if fitted is None:
        return {"sgemm_gflops": max(sgemm_gflops(threads).values()), "stages_ms": stages}
    peak = fitted.speeds.peak_flops.get("fp32")
    return {"band": fitted.band, "sgemm_gflops": None if peak is None else 1e-9 * peak, "stages_ms": stages}


def _program(policy: Policy, shapes: Shapes) -> PublishedProgram | None:
    """Return the program that the engine runs. ONNX Runtime's graphs are the planned model with all rewrites, in
    fp32.
    """
    from sinew_perf.program import PublishedProgram, of_engine

    if policy.engine.model is not None:
        return of_engine(policy.engine, shapes, policy.spec.name)
    if not policy.bundle.infos:
        return None
    program = PublishedProgram.load(policy.bundle.path, dtypes="fp32", engine="plan")
    return replace(program, shapes=shapes)


def sgemm_gflops(threads: int) -> dict[str, float]:
    """Measure the GFLOP/s of large matrix products in torch and numpy.

    Args:
        threads: Number of compute threads of torch. numpy uses its own number of threads (OMP_NUM_THREADS), so it is
            measured only if ``threads`` is the number of cores.

    Returns:
        For each library, the largest rate of five products.
    """
    import numpy as np
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        a = torch.randn(SIDE, SIDE)
        peaks = {"torch": _gflops(lambda: torch.mm(a, a))}
    finally:
        torch.set_num_threads(before)
    if threads == machine.cores().physical:
        b: np.ndarray = a.numpy()
        peaks["numpy"] = _gflops(lambda: b @ b)
    return peaks


def _gflops(product: Callable[[], object]) -> float:
    product()
    seconds = []
    for _ in range(RUNS):
        begin = time.perf_counter()
        product()
        seconds.append(time.perf_counter() - begin)
    return 2e-9 * SIDE**3 / min(seconds)
