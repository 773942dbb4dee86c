"""Compile the kernels for GPUs that are not here and read what the compiler says of them.

``python -m tests.engine.cuda.kernel_compile [--all]`` prints one line per kernel, problem and architecture; ``--all``
takes every problem of every model instead of one per kind. The last line is JSON.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from benchmarks.gpu.shapes import Problem, capability_of, dims, launch, problems
from sinew.engine.cuda.kernels.launch import Tile
from sinew.engine.cuda.kernels.tiles import ARCHITECTURES, default

# One of each kind that the heads and the prefix of pi0.5 ask for, and what only SmolVLA asks for.
IN_CI = (
    "pi0.5 frames",
    "pi0.5 language qkv",
    "pi0.5 language attention",
    "pi0.5 language gate up",
    "pi0.5 language down",
    "pi0.5 head norm",
    "pi0.5 head qkv, scaled",
    "pi0.5 head attention",
    "pi0.5 head o",
    "pi0.5 head gate up, scaled",
    "pi0.5 head qkv, given",
    "pi0.5 head gate up, given",
    "pi0.5 language gate up, given",
    "pi0.5 head out",
    "smolvla frames",
    "smolvla head attention",
    "pi0.5 language down, fp8 input",
    "pi0.5 language gate up, fp8",
    "pi0.5 language down, fp8",
    "pi0.5 head o, fp8",
    "smolvla language qkv, fp8",
    "pi0.5 vision norm",
    "pi0.5 vision norm, to fp8",
    "pi0.5 vision activation",
    "pi0.5 language norm",
    "pi0.5 language activation",
    "pi0.5 language activation, to fp8",
    "pi0.5 language rotation",
    "smolvla language rotation",
)

# Also compiled for dependent launch with a block of the weight asked for in advance, sm_90.
WITH_PREFETCH = (
    "pi0.5 head qkv, scaled",
    "pi0.5 head o",
    "pi0.5 head gate up, scaled",
    "pi0.5 head out",
    "pi0.5 head o, fp8",
)

# A tile that cannot fit into registers: it shows that the reports tell spills.
TOO_LARGE = ("pi0.5 language attention", Tile(128, 32, warps=4, stages=1))
# What a mask of keys alone makes room for.
LARGEST = ("pi0.5 language attention", Tile(128, 64, warps=8, stages=2))
# Compiled with a tile that splits the depth, too, which no default of its kernel does.
IN_PARTS = ("smolvla head qkv", "smolvla head q")
PARTS = Tile(64, 16, 64, 2, stages=3)
WITH_PDL = (
    "pi0.5 head o",
    "pi0.5 head norm",
    "pi0.5 language down, fp8",
    "pi0.5 language down, fp8 input",
    "pi0.5 vision norm, to fp8",
    "pi0.5 language activation, to fp8",
    "pi0.5 language rotation",
)  # also compiled for programmatic dependent launch, sm_90
# Loads, stores, atomics and copies of global memory, and the permission for the next kernel to start.
TOUCHES = r"\b(?:ld\.global|st\.global|atom|red|cp\.async|griddepcontrol\.launch)[\w.:]*"


@dataclass(frozen=True)
class Report:
    problem: str
    kernel: str
    capability: int
    tile: dict[str, int]
    registers: int
    spilled: int  # bytes of stores and loads
    shared: int  # bytes
    tensor_core: str  # the instruction that multiplies, "" if none
    tensor_core_count: int
    eight_bit: int  # of them, those that multiply e4m3
    async_copies: int
    dependencies: int  # griddepcontrol instructions
    prefetches: int  # instructions that bring memory into L2
    early: tuple[str, ...]  # what touches memory before the wait of a dependent launch, in its order
    seconds: float


def architectures_of(problem: Problem) -> list[int]:
    """Those that have its instructions."""
    return [each for each in ARCHITECTURES if each >= capability_of(problem)]


def tile_of(problem: Problem, capability: int) -> Tile:
    dtype = torch.float32 if problem.sizes.get("wide") else torch.bfloat16
    return default(problem.kernel, dims(problem), dtype, capability)


def compile_one(problem: Problem, capability: int, tile: Tile | None = None, **dependent: bool) -> Report:
    """dependent: ``pdl`` and ``prefetch``, as ``prepare`` takes them."""
    tile = tile or tile_of(problem, capability)
    made = launch(problem, "meta", torch.bfloat16, tile, **dependent)
    start = time.perf_counter()
    compiled = made.compile(capability)
    seconds = time.perf_counter() - start
    ptx = compiled.asm["ptx"]
    found = re.findall(r"\b(wgmma\.mma_async|mma\.sync)\.", ptx)
    usage = resource_usage(compiled.asm["cubin"])
    return Report(
        problem.name + (", asks" if dependent.get("prefetch") else ", dependent" if dependent else ""),
        problem.kernel,
        capability,
        asdict(made.tile),
        usage["registers"],
        usage["spilled"],
        compiled.metadata.shared,
        found[0] if found else "",
        len(found),
        len(re.findall(r"\.e4m3\.e4m3\b", ptx)),
        len(re.findall(r"cp\.async\.(?:cg|ca)", ptx)),
        ptx.count("griddepcontrol."),
        ptx.count("cp.async.bulk.prefetch.L2"),
        tuple(re.findall(TOUCHES, ptx.partition("griddepcontrol.wait")[0])) if dependent else (),
        round(seconds, 2),
    )


def resource_usage(cubin: bytes) -> dict[str, int]:
    """Registers, and bytes of stack: where a register does not fit, it is kept there."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    numbers = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    return {"registers": numbers["REG"], "spilled": numbers["STACK"] + numbers["LOCAL"]}


def main(everything: bool) -> list[dict[str, Any]]:
    reports = []
    for problem in problems():
        if not everything and problem.name in IN_PARTS:
            for capability in ARCHITECTURES:
                made = compile_one(problem, capability, PARTS)
                reports.append(replace(made, problem=f"{problem.name}, in parts"))
                show(reports[-1])
        if not everything and problem.name not in IN_CI:
            continue
        for capability in architectures_of(problem):
            reports.append(compile_one(problem, capability))
            show(reports[-1])
        if problem.name in WITH_PDL:
            reports.append(compile_one(problem, 90, pdl=True))
            show(reports[-1])
        if problem.name in WITH_PREFETCH:
            reports.append(compile_one(problem, 90, pdl=True, prefetch=True))
            show(reports[-1])
        if problem.name == TOO_LARGE[0] and not everything:
            too_large = compile_one(problem, 90, TOO_LARGE[1])
            reports.append(replace(too_large, problem=f"{problem.name}, too large"))
            show(reports[-1])
        if problem.name == LARGEST[0] and not everything:
            reports.append(replace(compile_one(problem, 90, LARGEST[1]), problem=f"{problem.name}, largest"))
            show(reports[-1])
    return [asdict(report) for report in reports]


def show(report: Report) -> None:
    print(
        f"{report.problem:28} sm_{report.capability} {report.seconds:5.2f} s {report.registers:4} registers "
        f"{report.spilled:4} spilled {report.shared / 1024:6.1f} KiB {report.tensor_core_count:4} "
        f"{report.tensor_core or '-':16} {report.async_copies:3} cp.async {report.tile}",
        flush=True,
    )


if __name__ == "__main__":
    if set(sys.argv[1:]) - {"--all"}:
        sys.exit("usage: python -m tests.engine.cuda.kernel_compile [--all]")
    print(json.dumps(main("--all" in sys.argv)))
