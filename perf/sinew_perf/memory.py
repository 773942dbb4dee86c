"""Compute the memory that a policy needs on a machine, and the largest request that fits.

Weights are counted by name. Activations come from the traced lifetime of every memory block, as reference counting
frees them in the eager engine. An engine that fuses more operators needs less. Only the rows of a prompt need memory
in a token table, because the table is mapped from the file (``sinew/layers/stores/rows.py``). Engine cuda loads the
whole table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from sinew.bundle import Bundle
from sinew.bundle.quant import WEIGHT
from sinew.bundle.schema import COMPONENTS
from sinew.core import PROMPT_TABLE, SinewError
from sinew.engine.clone import on_meta
from sinew.engine.cuda.fused.fuse import ON_CUDA, fuse
from sinew.engine.cuda.fused.launches import Kernels
from sinew.engine.cuda.kernels.workspace import STREAM_NBYTES
from sinew.engine.cuda.lowbit.choice import rows_of
from sinew.engine.cuda.lowbit.weights import keep_codes
from sinew.engine.example import Inputs, Shapes
from sinew.engine.loading import load_model
from sinew.engine.plan.plan import Plan
from sinew.layers.linear import Stored
from sinew.models.base import AutoregressiveModel
from sinew.policy import open_bundle
from torch import nn

from sinew_perf.hardware import Hardware
from sinew_perf.precision import SMALL_BITS, bits, dtype_name
from sinew_perf.program import Engine, PublishedProgram, is_sizes_alone
from sinew_perf.request import AS_THE_POLICY, LIMITS, TracedRequest
from sinew_perf.trace import STAGES, ProgramTrace, TracedBlock

Device = Literal["cpu", "cuda"]

# Resident memory in bytes before any weight is loaded: the interpreter, torch and its libraries. CPU: 241 MB
# after `import sinew.policy` (`sinew.core.machine.resident_bytes()`, torch 2.13.0 CPU build). CUDA: an estimate
# for the context and the kernels, not measured. Pass the number of your own board if it matters.
RUNTIME = {"cpu": 250_000_000, "cuda": 1_000_000_000}
# Memory in bytes that libraries use in addition to torch's allocator. CPU: in
# perf/tests/test_perf_calibration.py, the peak of anonymous memory was 12 MB (1 thread) and 38 MB (2 threads)
# above the traced peak. This memory grows with the threads and not with the model. CUDA: cuBLAS's largest
# default workspace, 32 MiB, not measured.
WORKSPACE = {"cpu": 40_000_000, "cuda": 32 << 20}

# The C library glibc returns a freed block of at least MMAP_THRESHOLDS[0] bytes at once, until the first such block is
# freed. After that, glibc keeps freed blocks up to the size of this block (at most MMAP_THRESHOLDS[1]), and up to twice
# this size of free memory in total (mallopt(3), M_MMAP_THRESHOLD and M_TRIM_THRESHOLD). Therefore the second
# inference on a CPU has a higher peak than the first.
MMAP_THRESHOLDS = (128 << 10, 32 << 20)
PAGE = 4096  # bytes per page of a mapped file
# Key: an engine. Value: the only device on which the engine runs.
DEVICES: Mapping[str, Device] = {"cpu": "cpu", "cuda": "cuda"}
# Memory in bytes of libraries and of the kernels' workspace in engine cuda, for one CUDA stream.
ENGINE_WORKSPACE = WORKSPACE["cuda"] + STREAM_NBYTES
TWO_STREAMS = "cuda"  # the engine that runs prefix and head of a stream on two CUDA streams
STREAMED_CONTEXTS = 3  # contexts of a stream: the one in use, the next one, and the copy that the head reads
CHUNKS = 2  # a robot stores the chunk that it executes and the chunk that arrives

# Key: a quantity for which `fits` searches the largest value that fits into memory. Value: the field of the request
# that contains this quantity.
AXES = {"chunk": "chunk", "cameras": "cameras", "context": "prompt_tokens"}


@dataclass(frozen=True, slots=True)
class Weights:
    """The parameters of one component in one format.

    Attributes:
        component: Top-level module of the model. Its token or position tables are a component of their own,
            such as "language embeddings".
        dtype: Number format.
        parameters: Number of parameters.
        nbytes: Size in bytes.
        resident: Bytes that have to be in memory. Of a token table, these are only the rows of a prompt.
    """

    component: str
    dtype: str
    parameters: int
    nbytes: int
    resident: int


@dataclass(frozen=True, slots=True)
class Peak:
    """The largest amount of memory that is in use during a stage, without weights.

    Attributes:
        stage: The stage.
        nbytes: Size of all memory blocks that are in use at this time, in bytes.
        cache: The part of these bytes that is the prefix's keys and values.
    """

    stage: str
    nbytes: int
    cache: int


@dataclass(frozen=True, slots=True)
class StreamMemory:
    """Memory in bytes that a stream takes in engine cuda, in addition to the program for whole chunks.

    Prefix and head run on two CUDA streams, so they share no memory with each other or with that program
    (:mod:`sinew.engine.cuda.streams`).

    Attributes:
        inputs: Inputs of the prefix. Noise, actions and time embedding of the head.
        contexts: Contexts of the prefix: the one in use, the next one, and the copy in the head's own memory. The
            result of the recorded prefix is a part of ``intermediate``.
        intermediate: Intermediate results and results of vision, language model and head. Each is a graph with its own
            memory.
        workspace: Workspaces of the second CUDA stream: of the kernels and of cuBLAS.
    """

    inputs: int
    contexts: int
    intermediate: int
    workspace: int

    @property
    def total(self) -> int:
        return self.inputs + self.contexts + self.intermediate + self.workspace


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """Memory of a policy, in bytes.

    Attributes:
        name: Name of the policy.
        shapes: Shapes of a request.
        chunk: Number of actions in a chunk.
        weights: Weights by component and format.
        cache: Blocks that contain the prefix's keys and values. A block counts completely, even if they are only a
            part of it, for example if one product computes Q, K and V.
        peaks: Peak of each stage.
        workspace: Memory of libraries.
        runtime: Memory of the process before weights are loaded.
        actions: Chunks that wait to be executed.
        kept: Freed memory that the C library does not return to the system.
        mapped: True if weights are mapped from the file. The system may reclaim these pages and read them again.
        laid_out: True if the engine copies int8 weights, so that they are not mapped.
        stream: Memory that a stream takes in addition. None if no stream is counted.
    """

    name: str
    shapes: Shapes
    chunk: int
    weights: tuple[Weights, ...]
    cache: int
    peaks: tuple[Peak, ...]
    workspace: int
    runtime: int
    actions: int
    kept: int
    mapped: bool
    laid_out: bool = False
    stream: StreamMemory | None = None

    @property
    def peak(self) -> Peak:
        return max(self.peaks, key=lambda peak: peak.nbytes)

    @property
    def weights_nbytes(self) -> int:
        return sum(row.nbytes for row in self.weights)

    @property
    def resident(self) -> int:
        """Return the bytes of weights that have to be in memory."""
        return sum(row.resident for row in self.weights)

    @property
    def of_the_file(self) -> int:
        """Return the smallest number of bytes of weights that must be in memory as mapped pages of the bundle's file.
        Int8 weights of engine cpu do not count, because the engine copies them into the layout of its kernels.
        """
        rows = () if not self.mapped else self.weights
        return sum(row.resident for row in rows if not (self.laid_out and row.dtype == "int8"))

    @property
    def activations(self) -> int:
        """Return the bytes of activations at the peak, without the cache."""
        return self.peak.nbytes - self.peak.cache

    @property
    def loading(self) -> int:
        """Return the bytes after the last weight was loaded, before the first inference."""
        return self.resident + self.runtime

    @property
    def total(self) -> int:
        """Return the bytes of memory that are in use during an inference."""
        streamed = 0 if self.stream is None else self.stream.total
        return self.loading + self.peak.nbytes + self.kept + self.workspace + self.actions + streamed


@dataclass(frozen=True, slots=True)
class Fit:
    """Result of the check whether a policy fits the memory.

    Attributes:
        report: Memory of the policy.
        memory: Memory of the machine, in bytes.
        system: Memory that the system uses, in bytes.
        largest: For each quantity in :data:`AXES`, the largest value that fits while the other quantities keep their
            requested values. 0 if no value fits.
    """

    report: MemoryReport
    memory: int
    system: int
    largest: Mapping[str, int]

    @property
    def available(self) -> int:
        return self.memory - self.system

    @property
    def headroom(self) -> int:
        """Return the bytes of memory that stay free. Negative if the policy does not fit."""
        return self.available - self.report.total

    @property
    def fits(self) -> bool:
        return self.headroom >= 0


def memory_report(
    program: PublishedProgram,
    device: Device = "cpu",
    runtime: int | None = None,
    workspace: int | None = None,
    *,
    whole_tables: bool = False,
    embodiments: int = 1,
    stages: Collection[str] = STAGES,
    stream: bool = False,
) -> MemoryReport:
    """Compute the memory of one observation.

    Args:
        program: The program.
        device: "cpu" or "cuda".
        runtime: Bytes of the process before weights are loaded. None for the value of the device in ``RUNTIME``.
        workspace: Bytes of libraries. None for the value of the device in ``WORKSPACE``.
        whole_tables: True if token tables are completely in memory, as in engine cuda.
        embodiments: Number of robots whose projections the head contains. A bundle contains those of one robot, and
            published files may contain more.
        stages: Stages that run on this machine, which determine its weights. The prefix's keys and values count where
            the head runs.
        stream: True to count a stream in engine cuda, too.

    Raises:
        SinewError: The device is unknown, or the policy cannot stream on engine cuda.
    """
    if device not in RUNTIME:
        raise SinewError(f"device: expected one of {', '.join(RUNTIME)}, got {device!r}")
    trace = program.trace
    return MemoryReport(
        name=program.name,
        shapes=program.shapes,
        chunk=program.chunk,
        weights=weights(program, whole_tables, embodiments, stages),
        cache=_cache(program, trace),
        peaks=tuple(peak for peak in peaks(trace, cache_scale(program)) if peak.stage in stages),
        workspace=WORKSPACE[device] if workspace is None else workspace,
        runtime=RUNTIME[device] if runtime is None else runtime,
        actions=4 * CHUNKS * math.prod(program.model.noise_shape),
        kept=kept(trace) if device == "cpu" else 0,
        mapped=device == "cpu" and program.precision is None,
        stream=stream_memory(program) if stream else None,
    )


def stream_memory(program: PublishedProgram) -> StreamMemory:
    """Compute the memory that a stream takes in engine cuda, in addition to the program for whole chunks.

    Args:
        program: The program, with its plan.

    Raises:
        SinewError: The policy cannot stream on engine cuda.
    """
    if problem := unstreamed(program):
        raise SinewError(f"stream: {problem}")
    model, recorded, shapes = program.executed, program.trace, program.shapes
    read = sum(tensor.nbytes for tensor in Inputs.example(model, shapes))
    noise = torch.float32.itemsize * math.prod(model.noise_shape)
    # The head holds its noise, the state of the solver, and the actions.
    solved = noise * (2 + max(1, model.solver.draws(shapes.steps)))
    # The engine's own plan, because its rewrites and kernels decide the sizes of the time embedding.
    plan = fuse(Plan.of(on_meta(program.model), rewrites=ON_CUDA), Kernels(torch.device("meta")))
    embeddings = plan.time_embeddings(shapes.steps)
    return StreamMemory(
        inputs=read + solved + embeddings[0].nbytes,
        contexts=STREAMED_CONTEXTS * recorded.context_nbytes,
        intermediate=sum(own_peaks(recorded).values()),
        workspace=STREAM_NBYTES + WORKSPACE["cuda"],
    )


def unstreamed(program: PublishedProgram) -> str:
    """Return the reason why a policy cannot stream on engine cuda. "" if it can."""
    kind = ""
    if isinstance(program.model, AutoregressiveModel):
        kind = "one that generates tokens"
    elif getattr(program.model.config, "rolling", False):
        kind = "one that denoises each action at its own time"
    return f"expected a head with common solver steps on engine {TWO_STREAMS}, got {kind}" if kind else ""


def missing(
    program: PublishedProgram, machine: Hardware, stages: Collection[str] = STAGES, *, stream: bool = False
) -> int:
    """Return the bytes by which stages of a program exceed a machine's free memory. 0 if they fit.

    Args:
        program: The program.
        machine: The machine.
        stages: Stages that run on this machine.
        stream: True to count a stream on a GPU, too, if the policy can stream on engine cuda.
    """
    device: Device = "cpu" if machine.name == "cpu" else "cuda"
    if stream and device == "cuda" and not unstreamed(program):
        report = memory_report(
            program, device, workspace=ENGINE_WORKSPACE, whole_tables=True, stages=stages, stream=True
        )
    else:
        report = memory_report(program, device, stages=stages)
    return max(0, report.total - machine.free_bytes)


def too_large(nbytes: int) -> str:
    """Return the text that a table shows for a machine whose memory is too small. ``sinew perf fit`` prints the
    details.
    """
    return f"has {nbytes / 2**20:,.0f} MiB too little memory"


def fits(
    source: str | Path,
    memory: int,
    system: int = 0,
    request: TracedRequest = AS_THE_POLICY,
    *,
    dtypes: str | Mapping[str, str] | None = None,
    engine: Engine | Literal["cpu", "cuda"] = "eager",
    device: Device = "cpu",
    runtime: int | None = None,
    embodiments: int = 1,
    search: bool = True,
    balance: float = math.inf,
    stream: bool = False,
) -> Fit:
    """Check whether a policy fits a machine's memory, and find the largest request that fits.

    Args:
        source: The policy, as in :meth:`PublishedProgram.load`.
        memory: Memory of the machine, in bytes.
        system: Memory that the system uses, in bytes.
        request: Sizes of a request.
        dtypes: Number formats, as in :meth:`PublishedProgram.load`.
        engine: "eager", "plan", "cpu" (the plan with a bundle's low-bit weights as they are stored), or "cuda" (the
            plan with whole token tables, and with a bundle's low-bit weights by its rule).
        device: "cpu" or "cuda".
        runtime: Bytes of the process before weights are loaded. None for the default.
        embodiments: Number of robots whose projections the head contains, see :func:`memory_report`.
        search: False to leave ``largest`` empty. With True, each axis takes about ten traces of half a second.
        balance: The machine's :attr:`sinew_perf.hardware.Hardware.balance`. It decides which components of a bundle
            keep their low-bit weights in engine cuda.
        stream: True to count the memory of a stream in engine cuda, too.

    Returns:
        The result.

    Raises:
        SinewError: The arguments do not fit each other.
    """
    if engine in DEVICES and device != DEVICES[engine]:
        raise SinewError(f"device: engine {engine} needs {DEVICES[engine]}, got {device!r}")
    if stream and engine != TWO_STREAMS:
        raise SinewError(
            f"stream: expected engine {TWO_STREAMS}, which uses two CUDA streams, got engine {engine}"
        )
    if not 0 <= system < memory:
        raise SinewError(f"system memory: expected 0 to {memory} bytes, got {system}")
    path = Path(source) if engine == "cpu" else None
    if path is not None and stored_weights(path, 1) and dtypes is not None:
        raise SinewError(
            f"dtype: engine {engine} uses the stored formats of the bundle, got {dtypes!r}; omit it"
        )
    kept: Bundle | None = None
    if engine == "cuda" and dtypes is None and not is_sizes_alone(source):
        opened = open_bundle(Path(source))
        if opened.lowbit:
            kept, dtypes = opened, "bf16"
    program = PublishedProgram.load(
        source,
        request,
        dtypes=dtypes,
        engine="eager" if engine == "eager" else "plan",
    )

    def asked(program: PublishedProgram) -> MemoryReport:
        on_gpu = engine == "cuda"
        report = memory_report(
            program, device, runtime, ENGINE_WORKSPACE if on_gpu else None, whole_tables=on_gpu,
            embodiments=embodiments, stream=stream,
        )  # fmt: skip
        if kept is not None:
            return replace(report, weights=cuda_weights(kept, program, balance))
        if path is None:
            return report
        return replace(report, weights=stored_weights(path, program.shapes.tokens), laid_out=True)

    report = asked(program)
    largest = {}
    if search:
        shapes = program.shapes
        asked_for = {"chunk": report.chunk, "cameras": shapes.views, "prompt_tokens": shapes.tokens}
        for axis, argument in AXES.items():
            if argument in program.fixed:
                largest[axis] = program.fixed[argument] if report.total <= memory - system else 0
                continue

            def excess(value: int, argument: str = argument) -> int:
                return asked(program.at(TracedRequest(**{argument: value}))).total - (memory - system)

            largest[axis] = largest_fitting(excess, LIMITS[argument], asked_for[argument])
    return Fit(report, memory, system, largest)


def largest_fitting(excess: Callable[[int], int], limit: int, start: int = 1) -> int:
    """Find the largest n from 1 to ``limit`` with excess(n) <= 0. The excess must grow with n. Each evaluation of it
    traces the policy, which is slow, so the search uses few evaluations. Memory is piecewise quadratic in n. The root
    of the parabola through the three points closest to the boundary is a guess, and its neighbour proves it. Occasional
    halving limits the number of evaluations.

    Args:
        excess: Bytes that are missing for n.
        limit: Largest n.
        start: First guess.

    Returns:
        The number. 0 if no n fits.
    """
    evaluations = {n: excess(n) for n in {1, min(start, limit)}}
    if evaluations[1] > 0:
        return 0
    while max(evaluations.values()) <= 0:
        if limit in evaluations:
            return limit
        n = min(8 * max(evaluations), limit)
        evaluations[n] = excess(n)
    for turn in range(2 * limit.bit_length()):
        low = max(n for n, value in evaluations.items() if value <= 0)
        high = min(n for n, value in evaluations.items() if value > 0)
        if high - low == 1:
            break
        guess = _root(evaluations, low, high) if turn % 4 < 3 else (low + high) // 2
        guess = min(max(guess, low + 1), high - 1)
        evaluations[guess] = excess(guess)
    return low


def _root(evaluations: Mapping[int, int], low: int, high: int) -> int:
    """Estimate where the excess is 0: at the root of the parabola through the three known points closest to [low,
    high], or of the line if only two points are known.
    """
    nearest = sorted(evaluations, key=lambda n: min(abs(n - low), abs(n - high)))[:3]
    coefficients = np.polyfit(nearest, [evaluations[n] for n in nearest], len(nearest) - 1)
    roots = [root.real for root in np.roots(coefficients) if abs(root.imag) < 1 and low <= root.real <= high]
    return math.floor(roots[0] + 1e-6) if roots else (low + high) // 2


def weights(
    program: PublishedProgram,
    whole_tables: bool = False,
    embodiments: int = 1,
    stages: Collection[str] = STAGES,
) -> tuple[Weights, ...]:
    """Return the parameters of the executed model by component and format, in the model's order.

    Args:
        program: The program.
        whole_tables: True if token tables are completely in memory.
        embodiments: Number of robots whose projections the head contains.
        stages: Stages that run on this machine. Weights that only other stages read are left out. A weight that no
            stage reads counts.

    Raises:
        SinewError: ``embodiments`` is above 1, but the model has no weights per robot.
    """
    if embodiments > 1 and not program.model.per_embodiment:
        raise SinewError(
            f"embodiments: expected 1, because {program.name} has no weights per robot, got {embodiments}"
        )
    model, readers = program.executed, program.trace.readers()
    modules = dict(model.named_modules())
    counts: dict[tuple[str, str], list[int]] = {}
    for name, parameter in model.named_parameters():
        read_in = {call.stage for call in readers.get(name, ())} or set(STAGES)
        if read_in.isdisjoint(stages):
            continue
        module, _, part = name.rpartition(".")
        component, layer = name.split(".")[0], modules[module]
        component += " embeddings" if isinstance(layer, nn.Embedding) else ""
        if part == "weight" and isinstance(layer, Stored) and layer.store.coded:
            dtype, count, nbytes = layer.store.kind, math.prod(layer.store.size(layer)), parameter.nbytes
        else:
            dtype = _format(program, name, dtype_name(parameter.dtype), readers)
            count = parameter.numel()
            nbytes = -(-count * bits(dtype) // 8)
        if module.startswith(program.model.per_embodiment):
            count, nbytes = count * embodiments, nbytes * embodiments
        resident = nbytes
        if _is_prompt_table(name) and not whole_tables:
            resident = rows_nbytes(program.shapes.tokens, len(parameter), nbytes)
        _add(counts, (component, dtype), count, nbytes, resident)
    return tuple(Weights(*key, *found) for key, found in counts.items())


def stored_weights(path: Path, tokens: int) -> tuple[Weights, ...]:
    """Return the tensors of a bundle with low-bit weights by component and stored type. They are mapped from the
    file.

    Args:
        path: The bundle.
        tokens: Number of prompt tokens, which determines the rows of token tables that are read.

    Raises:
        SinewError: The bundle has no low-bit weights.
    """
    bundle = open_bundle(path)
    if not bundle.lowbit:
        raise SinewError(f"{path}: expected low-bit weights; quantise this bundle with `sinew quantize`")
    counts: dict[tuple[str, str], list[int]] = {}
    for name, info in bundle.infos.items():
        module = name.removesuffix(WEIGHT)
        stored = bundle.lowbit.get(module) if name.endswith(WEIGHT) else None
        is_table = _is_prompt_table(name)
        component = name.split(".")[0] + (" embeddings" if is_table else "")
        # A word of ternary weights contains 16 weights, and rows are padded to a multiple of 64 weights.
        count = math.prod(info.shape) * (16 if stored == "ternary" else 1)
        resident = rows_nbytes(tokens, info.shape[0], info.nbytes) if is_table else info.nbytes
        _add(counts, (component, stored or info.type.name.lower()), count, info.nbytes, resident)
    return tuple(Weights(*key, *found) for key, found in counts.items())


def cuda_weights(bundle: Bundle, program: PublishedProgram, balance: float) -> tuple[Weights, ...]:
    """Return the weights of a bundle with low-bit weights in the memory of a GPU, as engine cuda stores them.

    Args:
        bundle: The bundle.
        program: The bundle's program in bf16.
        balance: The machine's balance. Components with more rows are converted to bf16.
    """
    rows = rows_of(program.model, program.shapes, bundle.lowbit)
    few = [part for part in COMPONENTS if rows[part] <= balance]
    model = load_model(bundle, torch.device("meta"), "bf16", lowbit=few)
    keep_codes(model, torch.bfloat16)
    model = model.eval().requires_grad_(False)
    return weights(replace(program, model=model, precision=None, like=None), whole_tables=True)


def rows_nbytes(tokens: int, rows: int, nbytes: int) -> int:
    """Return the bytes of the pages that the rows of a prompt touch in a mapped table.

    Args:
        tokens: Number of rows that are read.
        rows: Number of rows in the table.
        nbytes: Size of the table in bytes.
    """
    # A row can begin at any byte of a page, so it may touch one more page.
    pages = 1 + -(-nbytes // (rows * PAGE))
    return min(nbytes, tokens * pages * PAGE)


def _add(counts: dict[tuple[str, str], list[int]], key: tuple[str, str], *numbers: int) -> None:
    counts[key] = [a + b for a, b in zip(counts.get(key, [0, 0, 0]), numbers, strict=True)]


def _is_prompt_table(name: str) -> bool:
    return name.removesuffix(WEIGHT).rpartition(".")[2] == PROMPT_TABLE


def _format(program: PublishedProgram, name: str, stored: str, readers: Mapping) -> str:
    for call in readers.get(name, ()):
        for operand in call.operands:
            if operand.weight == name:
                return program.precision_of(call).of(operand, call)
    return stored


def peaks(recorded: ProgramTrace, cache_scale: float = 1.0) -> tuple[Peak, ...]:
    """Find the largest amount of memory that is in use at one time in each stage, from the recorded allocations and
    releases.

    Args:
        recorded: The trace.
        cache_scale: Factor for the size of the prefix's keys and values.
    """
    live = cache = 0
    highest: dict[str, Peak] = {}
    prefix: set[TracedBlock] = set()
    for event in recorded.events:
        block, size = event.block, event.block.nbytes
        if event.change > 0 and block.kind == "cache" and event.stage != "head":
            # If the head copies the cache (the prefix's keys and values), the copies count as activations.
            prefix.add(block)
        if block in prefix:
            size = round(size * cache_scale)
            cache += event.change * size
        live += event.change * size
        if event.stage not in highest or live > highest[event.stage].nbytes:
            highest[event.stage] = Peak(event.stage, live, cache)
    return tuple(highest.values())


def own_peaks(recorded: ProgramTrace) -> dict[str, int]:
    """Return the largest number of bytes of each stage's own blocks that exist at one time, including its results.

    A graph that records this stage alone needs about this memory. Inputs do not count.
    """
    live: dict[str, int] = dict.fromkeys(STAGES, 0)
    most, owners = dict(live), dict[TracedBlock, str]()
    for event in recorded.events:
        if event.block.maker is None:
            continue
        owner = owners.setdefault(event.block, event.stage)
        live[owner] += event.change * event.block.nbytes
        most[owner] = max(most[owner], live[owner])
    return most


def kept(recorded: ProgramTrace) -> int:
    """Return the bytes of freed memory that the C library may keep: twice the largest block that it keeps."""
    largest = max((event.block.nbytes for event in recorded.events), default=0)
    return 2 * min(largest, MMAP_THRESHOLDS[1]) if largest >= MMAP_THRESHOLDS[0] else 0


def cache_scale(program: PublishedProgram) -> float:
    """Return the number of bits in the format of the cache (the prefix's keys and values), divided by the number of
    bits in the format of the trace.
    """
    if program.precision is None or program.precision["prefix"].cache not in SMALL_BITS:
        return 1.0
    precision = program.precision["prefix"]
    return bits(precision.cache) / bits(dtype_name(precision.stream))


def _cache(program: PublishedProgram, recorded: ProgramTrace) -> int:
    return round(recorded.cache_nbytes * cache_scale(program))
