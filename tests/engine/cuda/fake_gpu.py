"""Launch whole programs of the published models through Triton's own launch code, for a GPU that does not exist.

A driver with the properties of a GPU replaces the real driver and runs nothing. All other parts are real: the binding
of arguments, the specialisation by values and alignment, the cache of compiled kernels, the compiler and ``ptxas``.
So every kernel of a full-size chunk is compiled as for a real GPU.

``python -m tests.engine.cuda.fake_gpu CAPABILITY`` prints a line for each case. The last line is JSON. It requires
that TRITON_CACHE_DIR is an empty folder and that TRITON_INTERPRET is not 1.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from typing import Any

import torch

from sinew.engine.cuda.fused.launches import Kernels
from sinew.engine.cuda.kernels import tiles
from tests.engine.cuda.test_cuda_full_size import META, program

# Shared memory of a program in KiB, for A100, Orin, RTX 40, H100, B100, Thor and RTX 50.
SHARED = {80: 163, 87: 163, 89: 99, 90: 227, 100: 227, 110: 227, 120: 99}
# model -> number of views, tokens of the prompt, size of the image
MODELS = {"pi0.5": (3, 200, 224), "pi0": (2, 16, 224), "smolvla": (2, 48, 512)}
VARIANTS: dict[str, tuple[str, ...]] = {
    "bfloat16": (),
    "FP8": ("vision", "language", "head"),
}  # name of the variant -> components in FP8
# these cases cover the differences between architectures and models, but not all combinations, because each takes
# seconds
CASES = {
    80: {"bfloat16": ("pi0.5", "smolvla")},
    87: {"bfloat16": ("pi0.5", "smolvla")},
    89: {"bfloat16": ("pi0.5", "smolvla"), "FP8": ("pi0.5",)},
    90: {
        "bfloat16": tuple(MODELS),
        "FP8": ("pi0.5", "smolvla"),
    },
    100: {"bfloat16": ("pi0.5", "smolvla"), "FP8": ("smolvla",)},
    110: {"bfloat16": ("pi0.5", "smolvla"), "FP8": ("smolvla",)},
    120: {"bfloat16": ("pi0.5", "smolvla"), "FP8": ("smolvla",)},
}

QUICK = {  # these cases cover every variant for one GPU, and the tests of the other cases are slow
    "bfloat16": ("pi0.5", "smolvla"),
    "FP8": ("smolvla",),
}


class FakeGpu:
    """The driver of a GPU that does not exist.

    Attributes:
        launches: Number of launches of each kernel.
        compiled: Name, machine code and shared memory of each specialisation.
    """

    def __init__(self, capability: int):
        self.capability = capability
        self.launches: Counter[str] = Counter()
        self.compiled: list[tuple[str, bytes, int]] = []
        self.utils, self.launcher_cls = self, self.launcher

    def launcher(self, source: Any, metadata: Any) -> Any:
        name = source.fn.__name__.removesuffix("_kernel")

        def launch(x: int, y: int, z: int, *rest: Any) -> None:
            assert 1 <= x < 2**31, f"{name}: grid {x}"
            assert all(1 <= size < 2**16 for size in (y, z)), f"{name}: grid {x}, {y}, {z}"
            self.launches[name] += 1

        return launch

    # Triton calls these methods of a driver.

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": SHARED[self.capability] << 10, "warpSize": 32}

    def load_binary(self, name: str, code: bytes, shared: int, device: int) -> tuple[int, int, int, int, int]:
        self.compiled.append((name.removesuffix("_kernel"), code, shared))
        return 1, 1, 0, 0, 1024


def resource_usage(cubin: bytes) -> dict[str, int]:
    """Return the registers of a kernel, and its stack in bytes, which holds values that do not fit into registers."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    numbers = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    return {"registers": numbers["REG"], "spilled": numbers["STACK"] + numbers["LOCAL"]}


def main(capability: int, quick: bool = False) -> dict[str, Any]:
    from triton.runtime import driver

    driver.set_active(gpu := FakeGpu(capability))
    tiles.capability = lambda device: capability  # the device is meta, whose tensors have no memory
    return {"chunks": chunks(gpu, QUICK if quick else CASES[capability])}


def chunks(gpu: FakeGpu, cases: dict[str, tuple[str, ...]]) -> list[dict[str, Any]]:
    rows, capability = [], gpu.capability
    for variant, models in cases.items():
        for name in models:
            gpu.launches.clear()
            gpu.compiled.clear()
            start = time.perf_counter()
            with torch.no_grad():
                program(name, *MODELS[name], Kernels(META), fp8=VARIANTS[variant]).chunk()
            seconds = time.perf_counter() - start
            usage = [(kernel, resource_usage(code), shared) for kernel, code, shared in gpu.compiled]
            rows.append(
                {
                    "model": name,
                    "variant": variant,
                    "capability": capability,
                    "seconds": round(seconds, 1),
                    "launches": dict(gpu.launches),
                    "compiled": len(usage),
                    "spilled": {kernel: use["spilled"] for kernel, use, _ in usage if use["spilled"]},
                    "registers": max(use["registers"] for _, use, _ in usage) if usage else 0,
                    "shared": max(shared for *_, shared in usage) if usage else 0,
                }
            )
            print(rows[-1], flush=True)
    return rows


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]), "--quick" in sys.argv)))
