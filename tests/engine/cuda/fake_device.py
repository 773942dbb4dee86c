"""Run the whole engine cuda at full size on PyTorch's fake tensors, which report that they are on a GPU.

Fake tensors contain no values. Every operation on them makes the checks of a GPU: the operands are on one device, and
no tensor of the host is used instead of a tensor of the device. Streams and graphs of ``torch.cuda`` are replaced by
classes that count. Kernel launches check the devices of their arguments.

A CPU build of PyTorch lacks the guard that switches between devices, so this module compiles one (``GUARD``).
``python -m tests.engine.cuda.fake_device FOLDER`` prints a line for each case. The last line is JSON.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from sinew_perf.program import preset
from torch import nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode

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
# model, and options of the engine. With "apart", the stages run one by one.
CASES: list[tuple[str, dict[str, Any]]] = [
    ("pi0.5", {}),
    ("pi0.5", {"apart": True}),
    ("pi0.5", {"fp8": ("language",)}),
    ("pi0", {}),
    ("smolvla", {"apart": True}),
    ("smolvla", {"kernels": False}),
    ("smolvla", {"fp8": ("language.mlp",)}),
]
QUICK = [
    case for number, case in enumerate(CASES) if number in (1, 2, 3, 5)
]  # contains every model and every option
counted: Counter[str] = Counter()


class Stream:
    def __init__(self, device: Any = None):
        self.device = GPU

    def synchronize(self) -> None:
        counted["synchronize"] += 1


class Graph:
    def replay(self) -> None:
        counted["replay"] += 1

    def pool(self) -> tuple[int, int]:
        return 0, 1


@contextmanager
def capture(
    graph: Graph, pool: Any = None, stream: Any = None, capture_error_mode: str = "global"
) -> Iterator[None]:
    assert capture_error_mode in ("global", "thread_local", "relaxed")
    before = counted["synchronize"]
    yield
    assert counted["synchronize"] == before, "a wait while a graph is captured"
    counted["capture"] += 1


def launch(made: Launch) -> None:
    for name, value in made.arguments.items():
        if isinstance(value, torch.Tensor):
            assert value.device == GPU, f"{made.kernel}: {name} on {value.device}"
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
        "current_stream": lambda device=None: SimpleNamespace(synchronize=lambda: None),
        "stream": lambda stream: nullcontext(),
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
    apart = options.pop("apart", False)
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
    chunk, _ = run_one(engine, inputs, np.zeros(shape.noise, np.float32), 10, apart=apart)
    program = engine.programs[engine.programs.keys()[-1]]
    assert program.actions.device == GPU
    return {"shape": chunk.shape, **counted}


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
