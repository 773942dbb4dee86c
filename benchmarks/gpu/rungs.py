"""The rungs of the ladder: the same model, executed in different ways, each from host frames to host actions.

Every rung takes uint8 frames, tokens, a state and noise from host memory and returns world actions in host memory.
``eager`` copies the frames to the device and prepares them there with PyTorch (the reference of the
kernel), so that what differs is how the model is executed and not where frames are resized. Where no kernel has a
policy's recipe, all rungs resize on the host, as a served policy does.
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

from benchmarks.gpu.models import ACTIONS, Sample
from sinew.bundle.schema import Processing
from sinew.core import Timing
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
ENOUGH = 500  # calls for a p99, of which five are then slower


class Eager:
    """The model's own PyTorch code."""

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

    def pixels(self, inputs: ModelInputs) -> Tensor:  # float32 [1, V, 3, H, W]
        if not inputs.frames:
            return torch.from_numpy(inputs.pixels)[None].to(self.device)
        frames, size = inputs.frames, inputs.frames[0].shape[:2]
        if size not in self.tables:
            self.tables[size] = ResizeTables.of(*size, self.image, self.device)
        batch = torch.from_numpy(np.stack(frames)).to(self.device)
        return preprocess.reference(batch, self.tables[size])[None]


class Engine:
    """A :class:`sinew.engine.cuda.engine.CudaEngine`."""

    def __init__(self, engine: Any):
        self.engine, self.apart = engine, False  # apart: stages one by one, with a time each

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
    """Return the inputs with pixels in the place of frames, made on the host, where a policy makes them."""
    pixels = np.stack([prepare_frame(frame, image) for frame in inputs.frames])
    return replace(inputs, pixels=pixels, frames=())


def left_to_torch(engine: Any) -> list[str]:
    """Return where linear layers run as torch's operators, one by one, by module; and why frames are resized on the
    host, if they are."""
    from sinew.engine.cuda.fp8.linear import Fp8Linear
    from sinew.engine.cuda.fused import layers, vision
    from sinew.engine.plan.rewrite import loaded_class

    kinds = (layers.FusedLayer, layers.FusedAdaptiveLayer, layers.FusedKeyValueLayer, vision.RowwiseViTLayer)
    model = engine.model
    fused = [n for n, m in model.named_modules() if isinstance(m, kinds)]
    ends = ("action_",) if type(model) is not loaded_class(model) else ()  # both are in kernels, or none
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


def plan_of(model: Model) -> Any:
    """The plan that all engines of a model start from; they leave it as it is. It folds weights: as much memory."""
    from sinew.engine.cuda.fused.fuse import ON_CUDA
    from sinew.engine.plan.plan import Plan

    return Plan.of(model, rewrites=ON_CUDA)


def cuda_engine(
    plan: Any, processing: Processing, device: torch.device, scales: Any = None, **options: Any
) -> Any:
    """The engine over a plan. options: of ``CudaOptions``; scales: of FP8 inputs, by layer."""
    from sinew.engine.cuda.engine import CudaEngine
    from sinew.engine.cuda.options import CudaOptions

    return CudaEngine(plan, device, processing=processing, options=CudaOptions(**options), scales=scales)


# ----------------------------------------------------------------------------- measuring


def end_to_end(
    rung: Any, samples: list[Sample], processing: Processing, calls: int, seconds: float
) -> tuple[Row, list[np.ndarray]]:
    """Latency over up to ``calls`` calls in ``seconds``, inputs rotating; and the chunk of each input.

    The first two rounds over the inputs are not timed. ``drift`` is the largest difference of a later answer
    from the first to the same input: zero where execution is reproducible to the bit.
    """
    actions = Normalizer(processing.action, ACTIONS, "action")
    first = [rung.run(sample)[0] for sample in samples]
    for sample in samples:
        rung.run(sample)
    gc.collect()
    gc.freeze()  # a collection that walks a model's modules takes milliseconds
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
    """Median milliseconds per stage, each waited for: the sum is more than the whole, which waits once; and of frames
    on the host."""
    rung.run(samples[0])
    timings = [rung.run(samples[i % len(samples)])[1] for i in range(calls)]
    rows = ([t.vision_ms for t in timings], [t.prefix_ms for t in timings], [sum(t.step_ms) for t in timings])
    found = {f"{name}_ms": statistics.median(values) for name, values in zip(STAGES, rows, strict=True)}
    return {"frames_ms": statistics.median(t.preprocess_ms for t in timings), **found}


class PeakMemory:
    """The device's memory from now on, of what a rung makes and runs; nothing without a GPU.

    What PyTorch's allocator has once taken from the driver stays with it until it is told otherwise, so what the driver
    says at the end is the most that it said.
    """

    def __init__(self, device: torch.device):
        self.device, self.held = device, 0
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
            self.held = torch.cuda.memory_allocated(device)

    def row(self, rung: Any) -> Row:
        """Return bytes: of the rung's ``weights``, some of which others hold too; that were ``held`` before; of
        tensors, and what the allocator ``reserved``, at most; that the driver says are in use, by everybody."""
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
    """Relative L2 over the inputs, the largest and the median; the largest absolute difference."""
    errors = [
        float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in zip(chunks, reference, strict=True)
    ]
    worst = max(float(np.abs(a - b).max()) for a, b in zip(chunks, reference, strict=True))
    return {"l2": max(errors), "l2_median": statistics.median(errors), "max_abs": worst}
