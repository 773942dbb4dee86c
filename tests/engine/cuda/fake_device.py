"""Run the whole engine cuda at full size on PyTorch's fake tensors, which report that they are on a GPU.

Fake tensors contain no values. Every operation on them makes the checks of a GPU: the operands are on one device, and
no tensor of the host is used instead of a tensor of the device. Streams and graphs of ``torch.cuda`` are replaced by
classes that count. Kernel launches check the devices of their arguments. A case with two CUDA streams also checks that
no memory that the kernels of one stream read or write, except the weights, is an argument of a kernel of the other.

A CPU build of PyTorch lacks the guard that switches between devices, so this module compiles one (``GUARD``).
``python -m tests.engine.cuda.fake_device FOLDER`` prints a line for each case. The last line is JSON.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from sinew_perf.program import preset
from torch import nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from sinew.bundle.schema import Normalization
from sinew.engine.cuda.engine import CudaEngine
from sinew.engine.cuda.fp8 import linear as fp8
from sinew.engine.cuda.fp8.scales import linears
from sinew.engine.cuda.fused.fuse import ON_CUDA
from sinew.engine.cuda.kernels.launch import Launch
from sinew.engine.cuda.options import CudaOptions
from sinew.engine.plan.plan import Plan
from sinew.processing import ModelInputs
from sinew.processing.normalize import Normalizer
from tests.engine.cuda.test_cuda_full_size import processing_of
from tests.engines import run_one

GPU = torch.device("cuda", 0)
GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
namespace { C10_REGISTER_GUARD_IMPL(CUDA, c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>); }
"""
# model -> number of views, tokens of the prompt, size of the image
MODELS = {"pi0.5": (3, 200, 224), "pi0": (2, 0, 224), "smolvla": (2, 48, 512)}
# model, and options of the engine. With "apart", the stages run one by one. With "streams", prefix and head run on two
# CUDA streams, and then the whole chunk.
CASES: list[tuple[str, dict[str, Any]]] = [
    ("pi0.5", {}),
    ("pi0.5", {"apart": True}),
    ("pi0.5", {"fp8": ("language",)}),
    ("pi0", {}),
    ("smolvla", {"apart": True}),
    ("smolvla", {"kernels": False}),
    ("smolvla", {"fp8": ("language.mlp",)}),
    ("pi0", {"streams": True}),
    ("pi0.5", {"streams": True}),
]
QUICK = [
    case for number, case in enumerate(CASES) if number in (1, 2, 3, 5, 7)
]  # contains every model and every option
counted: Counter[str] = Counter()
log: list[str] = []  # operations on streams, events and graphs
arguments: dict[str, list[torch.Tensor]] = {}  # for each stream, the tensors of its launches


class Stream:
    made = 0

    def __init__(self, device: Any = None, priority: int = 0):
        Stream.made += 1
        self.device, self.cuda_stream = GPU, Stream.made
        self.name = "head" if priority < 0 else "prefix"

    def synchronize(self) -> None:
        counted["synchronize"] += 1
        log.append(f"wait for {self.name}")

    def record_event(self) -> Event:
        log.append(f"{self.name} records")
        return Event()

    def wait_event(self, event: Event) -> None:
        log.append(f"{self.name} follows")


class Event:
    def synchronize(self) -> None:
        log.append("wait for an event")


class Default(Stream):
    """The stream of a thread that has chosen none."""

    def __init__(self) -> None:
        self.cuda_stream, self.name = 0, "default"


current: list[Stream] = [Default()]


@contextmanager
def on(stream: Stream) -> Iterator[None]:
    current.append(stream)
    try:
        yield
    finally:
        current.pop()


class Graph:
    stream: Stream

    def replay(self) -> None:
        counted["replay"] += 1
        assert current[-1] is self.stream, "a replay on another stream than the recording"
        log.append(f"{current[-1].name} replays")

    def pool(self) -> tuple[int, int]:
        return 0, 1


@contextmanager
def capture(
    graph: Graph, pool: Any = None, stream: Any = None, capture_error_mode: str = "global"
) -> Iterator[None]:
    assert capture_error_mode in ("global", "thread_local", "relaxed")
    before, graph.stream = counted["synchronize"], stream
    with on(stream):
        yield
    assert counted["synchronize"] == before, "a wait while a graph is captured"
    counted["capture"] += 1


def launch(made: Launch) -> None:
    for name, value in made.arguments.items():
        if isinstance(value, torch.Tensor):
            assert value.device == GPU, f"{made.kernel}: {name} on {value.device}"
            arguments.setdefault(current[-1].name, []).append(value)
    counted["launch"] += 1


def stand_in(folder: Path) -> None:
    """Compile and load the guard, and replace the functions that would call a driver."""
    source, library = folder / "guard.cpp", folder / "guard.so"
    source.write_text(GUARD)
    home = Path(torch.__file__).parent
    command = ["g++", "-std=c++20", "-shared", "-fPIC", str(source), "-o", str(library)]
    command += [f"-I{home / 'include'}", f"-L{home / 'lib'}", "-lc10"]
    subprocess.run(command, check=True)
    torch.ops.load_library(str(library))
    torch._C._set_only_lift_cpu_tensors(True)
    stand_ins = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_name": lambda device=None: "a fake GPU",
        "get_device_properties": lambda device=None: SimpleNamespace(multi_processor_count=132),
        "current_stream": lambda device=None: current[-1],
        "stream": on,
        "Stream": Stream,
        "CUDAGraph": Graph,
        "graph": capture,
    }
    for name, value in stand_ins.items():
        setattr(torch.cuda, name, value)
    fake_tensor.init_gpu_context = torch.cuda._lazy_init = lambda *_: (
        None
    )  # functions of CUDA builds, which would call the driver
    Launch.__call__ = launch  # type: ignore[method-assign]
    fp8.quantize_weight = fp8.by_channel  # without a check of the values
    kinds = {torch.bool: bool, torch.int64: np.int64, torch.uint8: np.uint8}
    kinds |= {torch.float32: np.float32, torch.float64: np.float64}
    # The memory blocks of the host are written and read with numpy, and fake tensors do not support numpy.
    torch.Tensor.numpy = lambda self, **_: np.zeros(tuple(self.shape), kinds[self.dtype])  # type: ignore[method-assign]


def on_the_gpu(name: str) -> Any:
    """Return a model at its published size, in bfloat16 except for its float32 modules."""
    model = preset(name).model
    for part, module in model.named_modules():
        wide = part.split(".")[0] in model.float32_modules
        for key, tensor in list(module._parameters.items()):
            if tensor is not None:
                made = torch.empty(tensor.shape, dtype=torch.float32 if wide else torch.bfloat16, device=GPU)
                module._parameters[key] = nn.Parameter(made, requires_grad=False)
        for key, tensor in list(module._buffers.items()):
            if tensor is not None:
                module._buffers[key] = torch.empty(tensor.shape, dtype=tensor.dtype, device=GPU)
    return model


def case(name: str, options: dict[str, Any]) -> dict[str, Any]:
    views, tokens, side = MODELS[name]
    options = dict(options)
    apart, streams = options.pop("apart", False), options.pop("streams", False)
    statistics = {"mean": (0.0,) * 7, "std": (1.0,) * 7}
    actions = Normalizer(Normalization("mean_std", statistics, convention="openpi"), 7, "action")
    plan = Plan.of(on_the_gpu(name), rewrites=ON_CUDA)
    shape = SimpleNamespace(noise=plan.model.noise_shape, state=plan.model.state_size)
    scales = dict.fromkeys(linears(plan.model, options.get("fp8", ())), 1.0)
    made = CudaOptions(**options)
    engine = CudaEngine(
        plan, GPU, processing=processing_of(side), actions=actions, options=made, scales=scales
    )
    inputs = ModelInputs(
        np.zeros((0, 3, side, side), np.float32),
        np.ones(views, bool),
        np.ones(tokens, np.int64),
        np.ones(tokens, bool),
        np.zeros(shape.state, np.float32),
        tuple(np.zeros((480, 640, 3), np.uint8) for _ in range(views)),
    )
    counted.clear()
    arguments.clear()
    noise = np.zeros(shape.noise, np.float32)
    report = two_streams(engine, inputs, noise) if streams else {}
    chunk, _ = run_one(engine, inputs, noise, 10, apart=apart)
    program = engine.programs[engine.programs.keys()[-1]]
    assert program.actions.device == GPU
    if streams:
        report |= {"shared": shared(engine), "streams": sorted(arguments)}
    return {"shape": chunk.shape, **report, **counted}


def two_streams(engine: CudaEngine, inputs: ModelInputs, noise: np.ndarray) -> dict[str, Any]:
    """Run prefix and head on two CUDA streams, twice. Return the operations of the second time."""
    context = engine.read(inputs.batched())
    engine.solve(context, noise[None], 10)
    log.clear()
    context = engine.read(inputs.batched())
    log.append("read returns")
    engine.solve(context, noise[None], 10)
    log.append("solve returns")
    return {"order": list(log)}


def shared(engine: CudaEngine) -> list[str]:
    """Return the tensors that kernels of both streams get, except weights and the solver's tables."""
    constants = [
        *engine.model.parameters(),
        *engine.model.buffers(),
        *tree_leaves(engine.plan.time_embeddings(10)),
    ]
    known = {each.untyped_storage()._cdata for each in constants if isinstance(each, torch.Tensor)}
    prefix = {each.untyped_storage()._cdata for each in arguments["prefix"]} - known
    return [
        f"{each.dtype} {list(each.shape)}"
        for each in arguments["head"]
        if each.untyped_storage()._cdata in prefix
    ]


def main(folder: Path, quick: bool = False) -> list[dict[str, Any]]:
    stand_in(folder)
    reports = []
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        for name, options in QUICK if quick else CASES:
            reports.append({"model": name, "options": options, **case(name, options)})
            print(reports[-1], flush=True)
    return reports


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), "--quick" in sys.argv)))
