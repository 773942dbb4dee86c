"""Whole programs of the published models through Triton's own launch path, for a GPU that is not there.

A driver that has a GPU's properties and runs nothing stands below it; everything above is the real thing: the
binding of arguments, the specialisation on values and alignment, the cache of compiled kernels, the compiler and
``ptxas``. What is compiled is therefore what a GPU would be given, for every launch of a chunk at full size.

``python -m tests.engine.cuda.fake_gpu CAPABILITY`` prints a line per case; the last line is JSON. It wants
TRITON_CACHE_DIR to be an empty folder, and TRITON_INTERPRET not to be 1.
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

# KiB that a program may have: A100, Orin, RTX 40, H100, B100, Thor, RTX 50.
SHARED = {80: 163, 87: 163, 89: 99, 90: 227, 100: 227, 110: 227, 120: 99}
MODELS = {"pi0.5": (3, 200, 224), "pi0": (2, 16, 224), "smolvla": (2, 48, 512)}  # views, prompt, image
VARIANTS: dict[str, tuple[str, ...]] = {
    "bfloat16": (),
    "FP8": ("vision", "language", "head"),
}  # what is in FP8
CASES = {  # what differs between architectures and models, and not all that there is: each takes seconds
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

QUICK = {  # every variant, for one GPU; what there is beyond it is slow
    "bfloat16": ("pi0.5", "smolvla"),
    "FP8": ("smolvla",),
}


class FakeGpu:
    """``launches``: of each kernel; ``compiled``: each specialisation's name, machine code and shared memory."""

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

    # What Triton asks a driver.

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
    """Return registers, and bytes of stack: where a register does not fit, it is kept there."""
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
    tiles.capability = lambda device: capability  # of the meta device, whose tensors have no memory
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
