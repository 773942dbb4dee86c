"""Measure the cost between two kernels: the next launch in a CUDA graph, a barrier in a kernel, and reads of memory.

A step of an action head has 90 kernels of 40 to 132 programs. Each kernel reads data that all programs of the previous
kernel have written. The kernels of the chain here do the same. One persistent kernel for the whole head could save the
cost of a link beyond its own store and load. The read rates are those of so few programs, from memory and from the L2
cache.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.timing import graph_ms
from sinew.engine.cuda.kernels.lang import kernel, tl
from sinew.engine.cuda.kernels.launch import Launch, Tile

Row = dict[str, Any]
CHAIN = 1000  # kernels in a graph, and barriers in a kernel
WIDE = 128  # programs of a kernel, nearly as many as the multiprocessors of the GPU
BLOCK = 1024  # numbers that one program passes to the next kernel
READ = 8192  # numbers that one load reads
SMALL, LARGE = (
    16 << 20,
    1 << 30,
)  # sizes in bytes: one far below the size of the L2 cache, and one far above it
FEW = 40  # programs of the narrowest products in a head


@kernel
def link_kernel(source, target, BLOCK: tl.constexpr):
    """target = source + 1. Each program reads the block of its neighbour, so all programs of the last link must have
    ended."""
    at = tl.arange(0, BLOCK)
    neighbour = (tl.program_id(0) + 1) % tl.num_programs(0)
    tl.store(target + tl.program_id(0) * BLOCK + at, tl.load(source + neighbour * BLOCK + at) + 1.0)


@kernel
def barrier_kernel(pair, counter, ROUNDS: tl.constexpr, BLOCK: tl.constexpr):
    """The same chain in one kernel, with a barrier of all programs between two links. pair: [2, programs, BLOCK].

    All programs must run at the same time, which a cooperative launch guarantees.
    """
    count, me = tl.num_programs(0), tl.program_id(0)
    at = tl.arange(0, BLOCK)
    for turn in range(ROUNDS):
        source = pair + (turn % 2) * count * BLOCK + ((me + 1) % count) * BLOCK
        target = pair + ((turn + 1) % 2) * count * BLOCK + me * BLOCK
        tl.store(target + at, tl.load(source + at, cache_modifier=".cg") + 1.0)
        tl.debug_barrier()  # the stores of this program must be visible before its signal
        arrived = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") + 1
        while arrived < (turn + 1) * count:
            arrived = tl.atomic_add(counter, 0, sem="acquire", scope="gpu")
        tl.debug_barrier()


@kernel
def read_kernel(source, sums, BLOCKS: tl.constexpr, ROUNDS: tl.constexpr, BLOCK: tl.constexpr):
    """Each program reads BLOCKS blocks ROUNDS times, and stores the sum."""
    at = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    first = tl.program_id(0).to(tl.int64) * BLOCKS * BLOCK
    for turn in tl.range(0, BLOCKS * ROUNDS, num_stages=4):
        total += tl.load(source + first + (turn % BLOCKS) * BLOCK + at)
    tl.store(sums + tl.program_id(0), tl.sum(total))


def launches(programs: int, device: str) -> dict[str, Launch]:
    """Return one launch of each kernel. The device of the tensors may be meta, which is used to compile ahead of
    time."""

    def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    made = {"link": link(zeros(programs, BLOCK), zeros(programs, BLOCK))}
    made["barrier"] = barrier(zeros(2, programs, BLOCK), zeros(1, dtype=torch.int32))
    made["read"] = read(zeros(programs, 16, READ), zeros(programs), 1)
    return made


def link(source: Tensor, target: Tensor) -> Launch:
    arguments = {"source": source, "target": target, "BLOCK": BLOCK}
    return Launch(link_kernel, (len(source),), arguments, Tile(warps=4, stages=1))


def barrier(pair: Tensor, counter: Tensor) -> Launch:
    arguments = {"pair": pair, "counter": counter, "ROUNDS": CHAIN, "BLOCK": BLOCK}
    return Launch(barrier_kernel, (pair.shape[1],), arguments, Tile(warps=4, stages=1))


def read(source: Tensor, sums: Tensor, rounds: int) -> Launch:
    """Return a launch that reads a tensor repeatedly.

    Args:
        source: float32 [programs, blocks, READ].
        sums: Gets the sum of each program.
        rounds: How often each program reads its blocks.
    """
    sizes = {"BLOCKS": source.shape[1], "ROUNDS": rounds, "BLOCK": READ}
    return Launch(
        read_kernel, (len(source),), {"source": source, "sums": sums, **sizes}, Tile(warps=8, stages=4)
    )


def gaps(replays: int) -> Iterator[Row]:
    """Yield a row for each measurement. Each row also has a check of the computed result. Needs a CUDA device."""
    many = torch.cuda.get_device_properties(0).multi_processor_count
    for programs in (1, WIDE):
        yield chain(programs, replays)
    yield barriers(min(WIDE, many))
    for programs in (FEW, many):
        for label, nbytes, rounds in (("L2", SMALL, 64), ("memory", LARGE, 1)):
            yield rate(label, programs, nbytes, rounds, replays)


def chain(programs: int, replays: int) -> Row:
    """Measure the time of one link in a graph of CHAIN kernels."""
    one, other = (torch.zeros(programs, BLOCK, device="cuda") for _ in "ab")
    there, back = link(one, other), link(other, one)
    ms = graph_ms([there, back] * (CHAIN // 2), replays)
    name = f"chain of {CHAIN}, {programs} programs"
    row = {"what": name, "us": 1e3 * ms["p50"], "us_min": 1e3 * ms["min"], "us_max": 1e3 * ms["max"]}
    torch.cuda.synchronize()
    # Only whole rounds have run, so all blocks must have the same number. If kernels overlap, a program reads an
    # older number.
    row["in_order"] = bool((one == one[0, 0]).all()) and one[0, 0].item() % CHAIN == 0
    if not row["in_order"]:
        row |= {"wrong": True, "error": f"kernels overlapped: {one.min().item()} to {one.max().item()}"}
    return row


def barriers(programs: int) -> Row:
    """Measure the time of a barrier, together with the store and the load around it."""
    pair = torch.zeros(2, programs, BLOCK, device="cuda")
    counter = torch.zeros(1, dtype=torch.int32, device="cuda")
    made = barrier(pair, counter)

    def run() -> None:
        counter.zero_()
        made.kernel[made.grid](**made.arguments, **made.options(), launch_cooperative_grid=True)

    ms = elapsed_ms(run)
    final = pair[CHAIN % 2]
    row: Row = {"what": f"software barrier of {programs} programs", "us": 1e3 * ms / CHAIN}
    row["in_order"] = bool((final == final[0, 0]).all()) and final[0, 0].item() % CHAIN == 0
    if not row["in_order"]:
        row |= {"wrong": True, "error": f"programs overlapped: {final.min().item()} to {final.max().item()}"}
    return row


def rate(label: str, programs: int, nbytes: int, rounds: int, replays: int) -> Row:
    """Measure the bytes per second that this number of programs reads."""
    blocks = nbytes // 4 // READ // programs
    source = torch.ones(programs, blocks, READ, device="cuda")
    sums = torch.zeros(programs, device="cuda")
    made = read(source, sums, rounds)
    ms = elapsed_ms(made, max(3, replays // 10))
    moved = source.numel() * 4 * rounds
    row: Row = {"what": f"read from {label}, {programs} programs", "us": 1e3 * ms, "bytes": moved}
    row["gb_s"] = moved / ms / 1e6
    if not bool((sums == blocks * READ * rounds).all()):
        row |= {"wrong": True, "error": f"sums of {sums.min().item()} to {sums.max().item()}"}
    return row


def elapsed_ms(call: Callable[[], None], runs: int = 20) -> float:
    """Return the median time of a long kernel in milliseconds."""
    call()
    torch.cuda.synchronize()
    times = []
    for _ in range(runs):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in "ab")
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)
