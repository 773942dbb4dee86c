"""Measure the rates of low-bit products and of float32 products of the same shape, in one thread.

python benchmarks/cpu_kernels.py [--rounds 7]

Each round runs each product once, and each round begins with another product. The benchmark measures the CPU time of
the thread, because other programs disturb CPU time less than elapsed time. The rate of a product is 2 M K N operations
divided by its best time. This time includes the rounding of the activations. Except for panels, the time also includes
the expansion of the weights. A printed ratio is the median of the ratios of all rounds. The last line of the output is
JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from sinew.bundle.quant import FORMATS, quantize
from sinew.core import machine
from sinew.engine.cpu.kernels.library import extension
from sinew.layers.stores.lowbit import TINY, lay_out

SHAPES = [
    (300, 2560, 6912),
    (1024, 768, 3072),
    (256, 960, 2560),
    (50, 736, 2048),
    (50, 2048, 736),
]  # the products of BitNet, of the vision tower, of the language model, and of the head


def seconds(call: Callable[[], object]) -> float:
    begin = time.thread_time()
    call()
    return time.thread_time() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    found = extension()
    print(f"{machine.cpu_model()}: {found.kernels} kernels ({found.reason})")
    rng = np.random.default_rng(0)
    results = []
    for M, K, N in SHAPES:
        x, w = (rng.standard_normal(shape).astype(np.float32) for shape in ((M, K), (N, K)))
        rows, wide, transposed = torch.from_numpy(x), torch.from_numpy(w), np.ascontiguousarray(w.T)
        sides: dict[str, Callable[[], object]] = {
            "numpy sgemm": lambda x=x, w=transposed: x @ w,
            "torch linear": lambda x=rows, w=wide: torch.nn.functional.linear(x, w),
        }
        for name in FORMATS:
            stored, scale = quantize(w, name)
            tensors: Any = (
                [torch.from_numpy(stored)],
                [None if scale is None else torch.from_numpy(scale)],
                [None],
            )
            sides[name] = lambda x=rows, t=tensors, n=name: found.multiply_all(x, *t, n, TINY)
            if name == "int8" and (integers := found.integers):
                laid: Any = ([lay_out(tensors[0][0], integers)], *tensors[1:])
                sides[integers] = lambda x=rows, t=laid, n=integers: found.multiply_all(x, *t, n, TINY)
        if halves := found.halves:
            half: Any = ([lay_out(wide.bfloat16())], [None], [None])
            sides[halves] = lambda x=rows, t=half, n=halves: found.multiply_all(x, *t, n, TINY)
        times: dict[str, list[float]] = {name: [] for name in sides}
        for index in range(rounds + 1):
            order = list(sides)[index % len(sides) :] + list(sides)[: index % len(sides)]
            for name in order:
                took = seconds(sides[name])
                if index:  # the first round only warms up
                    times[name].append(took)
        operations = 2e-9 * M * K * N
        for name, taken in times.items():
            ratio = statistics.median(a / b for a, b in zip(times["numpy sgemm"], taken, strict=True))
            rate = operations / min(taken)
            print(f"{M} x {K} x {N}  {name:13} {rate:6.0f} GOP/s  {ratio:5.2f} x sgemm")
            results.append(
                {"shape": [M, K, N], "side": name, "gops": round(rate, 1), "ratio": round(ratio, 3)}
            )
    print(json.dumps({"cpu": machine.cpu_model(), "kernels": found.kernels, "results": results}))


if __name__ == "__main__":
    main()
