"""The rungs of the ladder: different ways to execute the same model, from frames to actions in host memory.

Each rung reads uint8 frames, tokens, a state and noise from host memory, and writes actions in robot units to host
memory. ``eager`` copies the frames to the device and resizes them there with PyTorch. So the rungs differ only in how
they execute the model, and not in where they resize frames. If no kernel supports the image processing of a policy,
all rungs resize on the host, as a served policy does.
"""

from __future__ import annotations

import gc
import statistics
import time
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from sinew_perf.trace import STAGES
from torch import Tensor

from benchmarks.gpu.models import (
    ACTIONS,
    CAMERA,
    TARGETS,
    Case,
    Sample,
    processing,
    random_model,
    samples,
    with_chunk,
)
from benchmarks.gpu.session import Session, shrunk
from sinew.bundle.schema import Processing
from sinew.core import Timing
from sinew.engine.cuda.graphs import Calls
from sinew.engine.cuda.kernels import preprocess
from sinew.engine.cuda.kernels.resize_tables import ResizeTables
from sinew.engine.watch import Watch
from sinew.models.base import Model
from sinew.models.solvers import solve
from sinew.processing import ModelInputs
from sinew.processing.image import prepare_frame
from sinew.processing.normalize import Normalizer
from sinew.steps.image.base import ImageRecipe

Row = dict[str, Any]
ENOUGH = 500  # number of calls for a p99, so that five of the calls are slower


class Eager:
    """The rung "eager": the PyTorch code of the model."""

    def __init__(self, model: Model, processing: Processing, device: torch.device):
        self.model, self.device, self.image = model, device, processing.image
        self.tables: dict[tuple[int, ...], ResizeTables] = {}

    @torch.inference_mode()
    def run(self, sample: Sample) -> tuple[np.ndarray, Timing]:
        inputs, laps, prepared = sample.inputs, [time.perf_counter()], 0.0
        if ResizeTables.why_not(self.image):
            inputs = resized(inputs, self.image)
            laps.append(time.perf_counter())
            prepared = 1e3 * (laps[1] - laps.pop(0))

        def lap() -> None:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            laps.append(time.perf_counter())

        tensors = (inputs.camera_mask, inputs.tokens, inputs.token_mask, inputs.state, sample.noise)
        cameras, tokens, valid, state, noise = (torch.from_numpy(a)[None].to(self.device) for a in tensors)
        image_tokens = self.model.embed_images(self.pixels(inputs))
        lap()
        context = self.model.read(image_tokens, cameras, tokens, valid, state)
        lap()
        evaluations = self.model.solver.steps(sample.steps), self.model.time_embeddings(sample.steps)
        x = solve(lambda x, m: self.model.act(x, m, context), noise, *evaluations, lap)
        chunk = x[0].float().cpu().numpy()
        spans = [1e3 * (b - a) for a, b in pairwise(laps)]
        return chunk, Timing(prepared, spans[0], spans[1], tuple(spans[2:]))

    def pixels(self, inputs: ModelInputs) -> Tensor:  # returns float32 [1, V, 3, H, W]
        if not inputs.frames:
            return torch.from_numpy(inputs.pixels)[None].to(self.device)
        frames, size = inputs.frames, inputs.frames[0].shape[:2]
        if size not in self.tables:
            self.tables[size] = ResizeTables.of(*size, self.image, self.device)
        batch = torch.from_numpy(np.stack(frames)).to(self.device)
        return preprocess.reference(batch, self.tables[size])[None]


class Engine:
    """A rung that runs :class:`sinew.engine.cuda.engine.CudaEngine`."""

    def __init__(self, engine: Any):
        # if apart is True, the engine runs the stages separately and times each of them
        self.engine, self.apart = engine, False

    def run(self, sample: Sample) -> tuple[np.ndarray, Timing]:
        inputs, prepared = sample.inputs, 0.0
        if not self.engine.facts.takes_frames:
            start = time.perf_counter()
            inputs = resized(inputs, self.engine.processing.image)
            prepared = 1e3 * (time.perf_counter() - start)
        watch = Watch(apart=self.apart)
        (chunk,) = self.engine.run(inputs.batched(), sample.noise[None], sample.steps, watch=watch)
        return chunk, watch.timing(preprocess_ms=prepared)


def resized(inputs: ModelInputs, image: ImageRecipe) -> ModelInputs:
    """Resize the frames on the host, as a policy does. Returns the inputs with pixels instead of frames."""
    pixels = np.stack([prepare_frame(frame, image) for frame in inputs.frames])
    return replace(inputs, pixels=pixels, frames=())


def left_to_torch(engine: Any) -> list[str]:
    """Return the names of modules whose linear layers run as separate operators of torch. If frames are resized on the
    host, the last entry states the reason.
    """
    from sinew.engine.cuda.fp8.linear import Fp8Linear
    from sinew.engine.cuda.fused import layers, vision
    from sinew.engine.plan.rewrite import loaded_class

    kinds = (layers.FusedLayer, layers.FusedAdaptiveLayer, layers.FusedKeyValueLayer, vision.RowwiseViTLayer)
    model = engine.model
    fused = [n for n, m in model.named_modules() if isinstance(m, kinds)]
    # the kernels compute both action layers, or none
    ends = ("action_",) if type(model) is not loaded_class(model) else ()
    found = {}
    for name, module in model.named_modules():
        if not isinstance(module, torch.nn.Linear) or isinstance(module, Fp8Linear):
            continue
        if not name.startswith((*(f"{each}." for each in fused), *ends)):
            parts = name.split(".")
            numbered = next((i for i, part in enumerate(parts) if part.isdigit()), max(1, len(parts) - 1))
            found[".".join(parts[:numbered])] = None
    why = ResizeTables.why_not(engine.processing.image) or "no tower of patches"
    return [*found, *([] if engine.facts.takes_frames else [f"frames, on the host ({why})"])]


def plan_of(model: Model, rewrites: tuple[str, ...] | None = None) -> Any:
    """Return the plan of a model, which all its engines share. The folded weights need as much memory as the model.

    Args:
        model: The model, which is not changed.
        rewrites: Names of the plan's rewrites. None for all that engine cuda uses.
    """
    from sinew.engine.cuda.fused.fuse import ON_CUDA
    from sinew.engine.plan.plan import Plan

    return Plan.of(model, rewrites=ON_CUDA if rewrites is None else rewrites)


def launched(model: str, session: Session) -> tuple[Case, Engine, Sample]:
    """Return the target case of a model, its engine as single launches, and a sample.

    The engine has run once, which compiles its kernels.
    """
    case = shrunk(TARGETS[model], session.tiny)
    base = with_chunk(random_model(model, session.device, tiny=session.tiny), case.chunk)
    recipe, plan = processing(model, base.config), plan_of(base)
    sample = samples(case, base.config, 1, (24, 32) if session.tiny else CAMERA)[0]
    made = Engine(cuda_engine(plan, recipe, session.device, recorder=Calls()))
    made.run(sample)  # the first run compiles the kernels
    return case, made, sample


def cuda_engine(
    plan: Any,
    processing: Processing,
    device: torch.device,
    scales: Any = None,
    recorder: Any = None,
    **options: Any,
) -> Any:
    """Return engine cuda for a plan.

    Args:
        plan: The plan of the model.
        processing: Processing of the policy.
        device: The GPU.
        scales: Scales of FP8 inputs, by layer.
        recorder: Records the programs. None for the recorder of the device.
        options: Fields of ``CudaOptions``.
    """
    from sinew.engine.cuda.engine import CudaEngine
    from sinew.engine.cuda.options import CudaOptions

    made = CudaOptions(**options)
    return CudaEngine(plan, device, processing=processing, options=made, scales=scales, recorder=recorder)


# ----------------------------------------------------------------------------- measuring


def end_to_end(
    rung: Any, samples: list[Sample], processing: Processing, calls: int, seconds: float
) -> tuple[Row, list[np.ndarray]]:
    """Measure the latency of up to ``calls`` calls in ``seconds``. The inputs rotate.

    The first two rounds over the inputs are not timed. ``drift`` is the largest difference between a later answer and
    the first answer to the same input. It is zero if the execution is reproducible to the bit.

    Returns:
        The row of the ladder, and the chunk of each input.
    """
    actions = Normalizer(processing.action, ACTIONS, "action")
    first = [rung.run(sample)[0] for sample in samples]
    for sample in samples:
        rung.run(sample)
    gc.collect()
    gc.freeze()  # a garbage collection that visits all modules of a model takes milliseconds
    try:
        times, drift, until = [], 0.0, time.perf_counter() + seconds
        while len(times) < calls and (time.perf_counter() < until or len(times) < 3):
            index = len(times) % len(samples)
            start = time.perf_counter()
            chunk, _ = rung.run(samples[index])
            actions.unnormalize(chunk[:, :ACTIONS])
            times.append(1e3 * (time.perf_counter() - start))
            drift = max(drift, float(np.abs(chunk - first[index]).max()))
    finally:
        gc.unfreeze()
    return {**percentiles(times), "drift": drift}, first


def stages(rung: Any, samples: list[Sample], calls: int = 20) -> Row:
    """Return the median milliseconds of each stage, and of resizing frames on the host.

    The host waits after each stage, so the sum is more than the time of a whole inference, which waits once.
    """
    rung.run(samples[0])
    timings = [rung.run(samples[i % len(samples)])[1] for i in range(calls)]
    rows = ([t.vision_ms for t in timings], [t.prefix_ms for t in timings], [sum(t.step_ms) for t in timings])
    found = {f"{name}_ms": statistics.median(values) for name, values in zip(STAGES, rows, strict=True)}
    return {"frames_ms": statistics.median(t.preprocess_ms for t in timings), **found}


class PeakMemory:
    """The peak of the device memory from now on, with the memory of a rung. Without a GPU, the row is empty.

    PyTorch's allocator keeps the memory that it has taken from the driver. So the memory in use at the end is also the
    peak.
    """

    def __init__(self, device: torch.device):
        self.device, self.held = device, 0
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
            self.held = torch.cuda.memory_allocated(device)

    def row(self, rung: Any) -> Row:
        """Return the memory of a rung in bytes.

        Returns:
            A dict with these fields:

            * ``weights_bytes``: the weights of the rung, which other rungs may share.
            * ``held_bytes``: memory of tensors before the rung.
            * ``peak_bytes``: the peak of tensors.
            * ``reserved_bytes``: the peak of PyTorch's allocator.
            * ``device_bytes``: memory that all processes use, as the driver reports it.
        """
        if self.device.type != "cuda":
            return {}
        model = rung.engine.model if isinstance(rung, Engine) else rung.model
        weights = {t.data_ptr(): t.nbytes for t in (*model.parameters(), *model.buffers())}
        free, total = torch.cuda.mem_get_info(self.device)
        return {
            "weights_bytes": sum(weights.values()),
            "held_bytes": self.held,
            "peak_bytes": torch.cuda.max_memory_allocated(self.device),
            "reserved_bytes": torch.cuda.max_memory_reserved(self.device),
            "device_bytes": total - free,
        }


def percentiles(times: list[float]) -> Row:
    ordered = sorted(times)

    def at(part: float) -> float:
        return ordered[min(len(ordered) - 1, int(part * len(ordered)))]

    return {
        "calls": len(ordered),
        "p50_ms": statistics.median(ordered),
        "p95_ms": at(0.95),
        "p99_ms": at(0.99) if len(ordered) >= ENOUGH else None,
        "min_ms": ordered[0],
        "max_ms": ordered[-1],
    }


def distance(chunks: list[np.ndarray], reference: list[np.ndarray]) -> Row:
    """Return the largest and the median relative L2 error over the inputs, and the largest absolute difference."""
    errors = [
        float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in zip(chunks, reference, strict=True)
    ]
    worst = max(float(np.abs(a - b).max()) for a, b in zip(chunks, reference, strict=True))
    return {"l2": max(errors), "l2_median": statistics.median(errors), "max_abs": worst}
