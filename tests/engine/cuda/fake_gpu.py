"""Launch whole programs of the published models through Triton's own launch code, for a GPU that does not exist.

A driver with the properties of a GPU replaces the real driver and runs nothing. All other parts are real: the binding
of arguments, the specialisation by values and alignment, the cache of compiled kernels, the compiler and ``ptxas``.
So every kernel of a full-size chunk is compiled as for a real GPU.

``python -m tests.engine.cuda.fake_gpu CAPABILITY`` prints a line for each case. The last line is JSON. With
``--lowbit`` in place of CAPABILITY, the products of low-bit weights are compiled for every capability, and with
``--batches`` the attention of several observations. The command requires that TRITON_CACHE_DIR is an empty folder and
that TRITON_INTERPRET is not 1.
"""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from typing import Any
from unittest import mock

import torch

from sinew.engine.cuda.fused.launches import Kernels
from sinew.engine.cuda.kernels import Workspace, packed_attention, tiles
from sinew.engine.cuda.kernels.weight_only_linear import prepare
from sinew.engine.cuda.kernels.workspace import BLOCKS, PARTS
from tests.engine.cuda.test_cuda_full_size import META, program

# Shared memory of a program in KiB, for A100, Orin, RTX 40, H100, B100, Thor and RTX 50.
SHARED = {80: 163, 87: 163, 89: 99, 90: 227, 100: 227, 110: 227, 120: 99}
# model -> number of views, tokens of the prompt, size of the image
MODELS = {"pi0.5": (3, 200, 224), "pi0": (2, 16, 224), "smolvla": (2, 48, 512)}
VARIANTS: dict[str, dict[str, Any]] = {
    "bfloat16": {},
    "FP8": {"fp8": ("language",)},
    "int8": {"lowbit": "int8"},
    "q4_0": {"lowbit": "q4_0"},
    "batch of 2": {"batch": 2},  # a head of 100 rows
    "batch of 8": {"batch": 8},  # a head of 400 rows, whose products are the library's
}  # name of the variant -> options of the program
BATCHES = {"batch of 2": ("smolvla",), "batch of 8": ("pi0.5",)}
LOWBIT = {"int8": ("pi0.5",), "q4_0": ("smolvla",)}
# these cases cover the differences between architectures and models, but not all combinations, because each takes
# seconds
CASES = {
    80: {"bfloat16": ("pi0.5", "smolvla"), **LOWBIT},
    87: {"bfloat16": ("pi0.5", "smolvla"), **LOWBIT},
    89: {"bfloat16": ("pi0.5", "smolvla"), "FP8": ("pi0.5",), **LOWBIT},
    90: {"bfloat16": tuple(MODELS), "FP8": ("pi0.5", "smolvla"), **LOWBIT, **BATCHES},
    100: {"bfloat16": ("pi0.5", "smolvla"), "FP8": ("smolvla",), **LOWBIT},
    110: {"bfloat16": ("pi0.5", "smolvla"), "FP8": ("smolvla",), **LOWBIT},
    120: {"bfloat16": ("pi0.5", "smolvla"), "FP8": ("smolvla",), **LOWBIT},
}

QUICK = {  # these cases cover every variant for one GPU, and the tests of the other cases are slow
    "bfloat16": ("pi0.5", "smolvla"),
    "FP8": ("smolvla",),
    "q4_0": ("smolvla",),
    "batch of 2": ("smolvla",),
}


FORMS = ("int8", "q8_0", "q4_0")
SIZES = ((50, 1024, 4096), (600, 960, 2560))  # rows, columns, depth of a product
# rows, query heads, key/value heads, size of a head, keys of the prefix, own keys
ATTENTION = ((50, 8, 1, 256, 968, 50), (968, 8, 1, 256, 968, 0), (50, 15, 5, 64, 177, 50))


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
                program(name, *MODELS[name], Kernels(META), **VARIANTS[variant]).chunk()
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


def lowbit_products() -> list[dict[str, Any]]:
    """Products of low-bit weights of pi0.5's and SmolVLA's heads, on every capability: a chunk, a prefix."""
    reports = []
    for capability, form, (rows, N, K) in itertools.product(SHARED, FORMS, SIZES):
        packed = torch.uint8 if form == "q4_0" else torch.int8
        codes = torch.empty(N, K // 2 if form == "q4_0" else K, dtype=packed, device=META)
        grouped = torch.empty(N, K // 32, dtype=torch.float16, device=META)
        scales = torch.empty(N, device=META) if form == "int8" else grouped
        x, out = (torch.empty(rows, size, dtype=torch.bfloat16, device=META) for size in (K, N))
        tile = tiles.default("weight_only_linear", (rows, N, K), packed, capability)
        launch = prepare(x, codes, scales, out, bias=x[0, :N], residual=out, tile=tile)
        made = launch.compile(capability)
        report = {"capability": capability, "form": form, "rows": rows, "shared": made.metadata.shared}
        reports.append(report | resource_usage(made.asm["cubin"]))
        print(reports[-1], flush=True)
    return reports


def attention_of_batches() -> list[dict[str, Any]]:
    """The attention of two and eight observations on every capability: pi0.5's head and language, SmolVLA's head."""
    reports = []
    for capability, batch, sizes in itertools.product(SHARED, (2, 8), ATTENTION):
        (rows, H, KV, D, P, S), dtype = sizes, torch.bfloat16
        with mock.patch.object(tiles, "capability", return_value=capability):
            q = torch.empty(batch, rows, H, D, dtype=dtype, device=META)
            keys = torch.empty(2, batch, P + S, KV, D, dtype=dtype, device=META)
            mask = torch.empty(batch, 1 if D == 256 else rows, P + S, dtype=torch.bool, device=META)
            kv, own = (keys[0, :, :P], keys[1, :, :P]), (keys[0, :, P:], keys[1, :, P:]) if S else None
            room = Workspace(2 * PARTS, 2 * BLOCKS, META)
            launches = packed_attention.prepare(q, kv, mask.expand(batch, rows, -1), q, room, own=own)
        for launch in launches:
            made = launch.compile(capability)
            report = {"capability": capability, "batch": batch, "rows": rows, "shared": made.metadata.shared}
            reports.append(report | resource_usage(made.asm["cubin"]))
            print(reports[-1], flush=True)
    return reports


if __name__ == "__main__":
    alone = {"--lowbit": lowbit_products, "--batches": attention_of_batches}
    if sys.argv[1] in alone:
        print(json.dumps(alone[sys.argv[1]]()))
        sys.exit()
    print(json.dumps(main(int(sys.argv[1]), "--quick" in sys.argv)))
