"""Compare two implementations of GELU at the shapes of SmolVLA, pi0 and pi0.5: PyTorch and engine plan.

python benchmarks/gelu.py [--threads 2] [--runs 11]

Engine plan computes GELU with the sigmoid function. Each run reads its input from newly allocated memory, as in a
model, where a matrix product has just written the input. The printed times are medians in milliseconds. The last line
of the output is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable

from sinew.core import machine  # import this module before torch, so that idle threads of torch sleep

# isort: split

import torch
import torch.nn.functional as F
from torch import Tensor

from sinew.engine.plan import gelu

SHAPES = {
    "SmolVLA vision, 2 views of 512": (2, 1024, 3072),
    "pi0 vision, 2 views of 224": (2, 256, 4304),
    "pi0 language, 524 tokens": (1, 524, 16384),
    "pi0 expert, 50 actions": (1, 50, 4096),
}
# for smaller tensors with several threads, engine plan uses the GELU of PyTorch
BLOCKS = (1 << 15, 1 << 17, 1 << 19, 1 << 21)


def torch_gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def by_blocks(size: int) -> Callable[[Tensor], Tensor]:
    def call(x: Tensor) -> Tensor:
        gelu.BLOCK = gelu.SHARED_BLOCK = size
        return gelu.gelu_(x)

    return call


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--runs", type=int, default=11)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    calls = {"torch": torch_gelu} | {f"blocks of {size >> 10} Ki": by_blocks(size) for size in BLOCKS}
    rows = {}
    for name, shape in SHAPES.items():
        base = torch.randn(shape) * 2
        samples: dict[str, list[float]] = {call: [] for call in calls}
        for run in range(arguments.runs + 1):
            for label, call in calls.items():
                x = base.clone()
                begin = time.perf_counter()
                result = call(x)
                if run:
                    samples[label].append(1e3 * (time.perf_counter() - begin))
                del x, result
        rows[name] = {label: round(statistics.median(found), 2) for label, found in samples.items()}
        exact = F.gelu(base.double(), approximate="tanh")
        rows[name]["largest difference"] = float((gelu.gelu_(base) - exact).abs().max())
        print(name, rows[name])
    facts = {"hardware": machine.cpu_model(), "threads": arguments.threads, "load": os.getloadavg()[0]}
    print(json.dumps({**facts, "ms": rows}))


if __name__ == "__main__":
    main()
