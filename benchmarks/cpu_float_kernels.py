"""Compare attention and activations of engine cpu with those of PyTorch, in CPU time of one thread.

python benchmarks/cpu_float_kernels.py [--rounds 15]

The shapes are those of SmolVLA: one view of 1024 patches, the prefix of the language model, and one step of the head.
The two implementations alternate in each round. A printed ratio is the median of the ratios of all rounds. The last
line of the output is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from sinew.core import machine
from sinew.engine.cpu.kernels.float_kernels import attend_reference
from sinew.engine.cpu.kernels.library import extension
from sinew.engine.plan.gelu import gelu_

ATTENTION = {  # number of queries, number of keys, heads, heads of the keys, size of a head
    "vision": (1024, 1024, 12, 12, 64),
    "language": (180, 180, 15, 5, 64),
    "head": (50, 230, 15, 5, 64),
}


def seconds(call: Callable[[], object]) -> float:
    begin = time.thread_time()
    call()
    return time.thread_time() - begin


def _flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def sides() -> dict[str, dict[str, Callable[[], object]]]:
    found = extension().floats
    made: dict[str, dict[str, Callable[[], object]]] = {}
    for name, (Lq, Lk, H, Hkv, D) in ATTENTION.items():
        q, k, v = torch.randn(1, Lq, H, D), torch.randn(1, Lk, Hkv, D), torch.randn(1, Lk, Hkv, D)
        mask = None if name == "vision" else torch.ones(1, Lq, Lk, dtype=torch.bool)
        theirs = partial(attend_reference, q, k, v, mask)
        if name == "vision":
            theirs = partial(_flash, *(t.transpose(1, 2) for t in (q, k, v)))
        made[f"attention, {name}"] = {
            "torch": theirs,
            "ours": partial(found.attend, q, k, v, mask),
            "ours, rounded": partial(found.attend, q, k, v, mask, True),
        }
    x, gate, up = torch.randn(1024, 3072), torch.randn(256, 2560), torch.randn(256, 2560)
    made["GELU, vision"] = {
        "torch": lambda: F.gelu(x, approximate="tanh"),
        "plan": lambda: gelu_(x.clone()),
        "ours": lambda: found.gelu(x.clone()),
    }
    made["SiLU times up, language"] = {
        "torch": lambda: F.silu(gate) * up,
        "ours": lambda: found.silu_times(gate.clone(), up),
    }
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    print(f"{machine.cpu_model()}: {extension().kernels} kernels, load {os.getloadavg()[0]:.0f}")
    results = []
    for name, calls in sides().items():
        taken: dict[str, list[float]] = {side: [] for side in calls}
        for index in range(rounds + 1):
            for side in list(calls)[:: 1 if index % 2 else -1]:
                took = seconds(calls[side])
                if index:  # the first round only warms up
                    taken[side].append(took)
        for side, times in taken.items():
            ratio = statistics.median(a / b for a, b in zip(taken["torch"], times, strict=True))
            print(f"{name:26} {side:6} {1e3 * min(times):8.2f} ms  {ratio:5.2f} x torch")
            row = {"what": name, "side": side, "ms": round(1e3 * min(times), 3), "ratio": round(ratio, 3)}
            results.append(row)
    print(json.dumps({"cpu": machine.cpu_model(), "kernels": extension().kernels, "results": results}))


if __name__ == "__main__":
    main()
