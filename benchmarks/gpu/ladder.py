"""The ladder of a model: its execution from eager PyTorch (first rung) to engine cuda with all kernels (last rungs).

Each rung is compared with eager float32 for the same noise.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.host import host_row
from benchmarks.gpu.lowbit import FORMATS, few_rows, low_bit
from benchmarks.gpu.models import (
    CAMERA,
    TARGETS,
    Case,
    Sample,
    in_float32,
    processing,
    random_model,
    samples,
    with_chunk,
)
from benchmarks.gpu.rungs import (
    Eager,
    Engine,
    PeakMemory,
    cuda_engine,
    distance,
    end_to_end,
    left_to_torch,
    plan_of,
    stages,
)
from benchmarks.gpu.session import Row, Session, shrunk, still_there
from sinew.models.base import Model

INPUTS = 4  # number of observations, which are used in rotation
SHORT = 100  # number of calls
FP8 = {"fp8": ("language",), "fp8-mlp": ("language.mlp",)}  # rung -> parts in e4m3
# Rungs of the engine with all of its kernels -> number of calls, and the seconds that they may take.
CALLS = dict.fromkeys(("engine", *FP8), (500, 8.0)) | dict.fromkeys(FORMATS, (SHORT, 3.0))
# The first steps of figure 2 of "Running VLAs at Real-time Speed" (arXiv 2510.26742): the model as it is in a CUDA
# graph, then with folded norms and times and one product for queries, keys and values. "graph" has all rewrites.
STEPS: dict[str, tuple[str, ...]] = {
    "captured": (),
    "simplified": ("tabulate-time", "hoist-positions", "fold-norms", "pack-qkv"),
}
NARROW_NEEDS = (8, 9)  # compute capability that FP8 (e4m3) products need
ROOM = 1.3  # a float32 reference needs this much memory, as a multiple of its weights


def ladder(model: str, session: Session) -> None:
    """Measure every rung on the target case of the model."""
    base, recipe, reference = _models(model, session)
    case = shrunk(TARGETS[model], session.tiny)
    inputs = samples(case, base.config, INPUTS, _camera(session))
    wanted = _answers(reference, case, recipe, session, inputs)
    del reference  # the reference would count in the memory of each rung
    _tidy(session)
    _rungs(case, base, recipe, inputs, wanted, session)


def _models(name: str, session: Session) -> tuple[Model, Any, Model | None]:
    """Return the model, its processing, and its float32 copy, which is None if the memory is too small."""
    base = random_model(name, session.device, tiny=session.tiny)
    reference, why = _reference(base, session)
    if reference is None:
        session.emit({"case": name, "note": f"no reference: {why}"})
    return base, processing(name, base.config), reference


def _rungs(case: Case, base: Model, recipe: Any, inputs: list[Sample], wanted: Any, session: Session) -> None:
    shaped, device = with_chunk(base, case.chunk), session.device
    plan: Any = None

    def planned() -> Any:  # the plan is made once for all engines, because eager PyTorch does not need it
        nonlocal plan
        plan = plan_of(shaped) if plan is None else plan
        return plan

    def engine(**options: Any) -> Engine:
        return Engine(cuda_engine(planned(), recipe, device, **options))

    made = None

    def narrow(parts: tuple[str, ...]) -> Engine:
        return engine(fp8=parts, scales=calibrated(planned(), recipe, inputs, session))

    def coded(form: str) -> Engine:
        components = few_rows(case, device, session.tiny)
        return Engine(cuda_engine(plan_of(low_bit(shaped, form, components)), recipe, device))

    def step(rewrites: tuple[str, ...]) -> Engine:
        return Engine(cuda_engine(plan_of(shaped, rewrites), recipe, device, kernels=False))

    rungs: list[tuple[str, Callable[[], Any]]] = [
        ("eager", lambda: Eager(shaped, recipe, device)),
        *((name, partial(step, rewrites)) for name, rewrites in STEPS.items()),
        ("graph", lambda: engine(kernels=False)),
        ("engine", engine),
    ]
    if torch.device(device).type == "cpu" or torch.cuda.get_device_capability(device) >= NARROW_NEEDS:
        rungs += [(name, partial(narrow, parts)) for name, parts in FP8.items()]
    rungs += [(name, partial(coded, form)) for name, form in FORMATS.items()]
    failures = []
    for rung, make in rungs:
        if session.left <= 0:
            raise TimeoutError(f"time limit reached: {rung} and all later rungs did not run")
        try:
            if rung not in ("eager", *STEPS):
                planned()
            memory = PeakMemory(device)
            made = make()
            most = CALLS.get(rung, (SHORT, 3.0))
            row, _ = _measure(case, rung, made, inputs, wanted, recipe, most, session)
            session.emit(row)  # emit the row now, because the later steps may fail
            if row["drift"]:
                raise ArithmeticError(f"two answers to the same input differ by {row['drift']:.3g}")
            about = memory.row(made)
            if rung in CALLS:
                calls = 3 if session.tiny else SHORT
                about |= {"left": left_to_torch(made.engine), "host": host_row(made, inputs, calls)}
            session.emit(about | _stages(case, rung, made, inputs, session))
        except Exception as error:  # noqa: BLE001 - the other rungs still run
            failures.append(f"{rung}: {type(error).__name__}: {error}"[:600])
            session.emit({"case": case.name, "rung": rung, "error": failures[-1]})
            still_there(session, f"rung {rung}")
        finally:
            made = None  # also free the memory of a rung that failed
        _tidy(session)
    if failures:
        raise RuntimeError("; ".join(failures))


def _stages(case: Case, name: str, rung: Any, inputs: list[Sample], session: Session) -> Row:
    """Return the times of the stages, which the table adds to the row of the rung."""
    if isinstance(rung, Engine):
        rung.apart = True
    return {"case": case.name, "rung": name, **stages(rung, inputs, 3 if session.tiny else 20)}


def calibrated(plan: Any, recipe: Any, inputs: Sequence[Sample], session: Session) -> dict[str, float]:
    """Return the FP8 scales for the inputs of the layers, calibrated with the random frames that are also timed."""
    from sinew.engine.cuda.fp8 import scales as fp8_calibration

    layers = fp8_calibration.linears(plan.model, ("language",))
    rung = Eager(plan.model, recipe, session.device)
    runs = [partial(rung.run, replace(sample, steps=1)) for sample in inputs]
    return fp8_calibration.calibrate(layers, runs, "0" * 64, "random frames").scales


def fused_by_inductor(model: str, session: Session) -> None:
    """Measure a baseline without kernels of Sinew: ``torch.compile`` on the planned model, inside the CUDA graph of the
    engine.

    The rung "graph" of the ladder is the same CUDA graph without ``torch.compile``, and is measured again for
    comparison. The compilation takes minutes, so it may reach the time limit.
    """
    base, recipe, reference = _models(model, session)
    case = shrunk(TARGETS[model], session.tiny)
    shaped = with_chunk(base, case.chunk)
    inputs = samples(case, base.config, INPUTS, _camera(session))
    wanted = _answers(reference, case, recipe, session, inputs)
    plan = plan_of(shaped)
    made = Engine(cuda_engine(plan, recipe, session.device, kernels=False))
    row, plain = _measure(case, "graph", made, inputs, wanted, recipe, (SHORT, 3.0), session)
    session.emit(row)
    # this engine has not recorded a program yet
    made = Engine(cuda_engine(plan, recipe, session.device, kernels=False))
    compiled = made.engine.plan.model
    options: dict[str, Any] = {"dynamic": False, "backend": "inductor" if session.is_gpu else "aot_eager"}
    eyes, call = (
        (compiled.vision, "encode_patches") if made.engine.facts.takes_frames else (compiled, "embed_images")
    )
    setattr(eyes, call, torch.compile(getattr(eyes, call), **options))
    compiled.read, compiled.act = (torch.compile(part, **options) for part in (compiled.read, compiled.act))
    start = time.perf_counter()
    made.run(inputs[0])
    name = "graph + inductor"
    session.emit({"case": case.name, "rung": name, "compiling_s": time.perf_counter() - start})
    row, chunks = _measure(case, name, made, inputs, wanted, recipe, (SHORT, 5.0), session)
    session.emit(row | {"differs_from_graph": _largest(chunks, plain)})
    session.emit(_stages(case, name, made, inputs, session))


# ----------------------------------------------------------------------------- parts of a rung


def _measure(
    case: Case,
    name: str,
    rung: Any,
    inputs: list[Sample],
    wanted: Any,
    recipe: Any,
    most: tuple[int, float],
    session: Session,
) -> tuple[Row, list[np.ndarray]]:
    """Measure one rung.

    Args:
        most: Largest number of calls, and their seconds.

    Returns:
        The row of the ladder, and the chunk of each input.
    """
    calls, seconds = (8, 1.0) if session.tiny else most
    latency, chunks = end_to_end(rung, inputs, recipe, calls, min(seconds, max(session.left, 1.0)))
    row: Row = {"case": case.name, "rung": name, "target_ms": case.target_ms, **latency}
    row |= {"shape": [case.model, case.views, case.chunk, case.prompt]}
    return (row if wanted is None else row | distance(chunks, wanted)), chunks


def _largest(chunks: list[np.ndarray], plain: list[np.ndarray]) -> float:
    return max(float(np.abs(a - b).max()) for a, b in zip(chunks, plain, strict=True))


def _reference(base: Model, session: Session) -> tuple[Model | None, str]:
    """Return a float32 copy that is computed without TF32, or None and the reason if the memory is too small."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    needed = ROOM * 4 * sum(p.numel() for p in base.parameters())
    if session.is_gpu and (free := torch.cuda.mem_get_info(session.device)[0]) < 2 * needed:
        return None, f"{2 * needed / 2**30:.0f} GiB of memory are needed, {free / 2**30:.0f} are free"
    return in_float32(base), ""


def _answers(reference: Model | None, case: Case, recipe: Any, session: Session, inputs: list[Sample]) -> Any:
    if reference is None:
        return None
    rung = Eager(with_chunk(reference, case.chunk), recipe, session.device)
    return [rung.run(sample)[0] for sample in inputs]


def _camera(session: Session) -> tuple[int, int]:
    return (24, 32) if session.tiny else CAMERA


def _tidy(session: Session) -> None:
    gc.collect()
    if session.is_gpu:
        torch.cuda.empty_cache()
