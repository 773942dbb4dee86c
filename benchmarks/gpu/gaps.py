"""What lies between kernels: the cost of the next one in a graph, of a barrier inside one, and of reading.

A head's step is 90 kernels of 40 to 132 programs that each read what all programs of the kernel before have written.
So a link of the chain here does that too, and what it costs beyond its own store and load is what one persistent kernel
could save. The rates are those that so few programs reach, from memory and from the L2 cache.
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
WIDE = 128  # programs: as many as multiprocessors, nearly
BLOCK = 1024  # numbers that a program hands on
READ = 8192  # numbers of a load
SMALL, LARGE = 16 << 20, 1 << 30  # bytes: well inside of L2, and far beyond it
FEW = 40  # programs of the narrowest products of a head


@kernel
def link_kernel(source, target, BLOCK: tl.constexpr):
    """target = source + 1, each program from its neighbour's block: all must have written before."""
    at = tl.arange(0, BLOCK)
    neighbour = (tl.program_id(0) + 1) % tl.num_programs(0)
    tl.store(target + tl.program_id(0) * BLOCK + at, tl.load(source + neighbour * BLOCK + at) + 1.0)


@kernel
def barrier_kernel(pair, counter, ROUNDS: tl.constexpr, BLOCK: tl.constexpr):
    """The same chain in one kernel, with a barrier of all programs between two links. pair: [2, programs, BLOCK].

    All programs must run at once, which a cooperative launch makes sure of.
    """
    count, me = tl.num_programs(0), tl.program_id(0)
    at = tl.arange(0, BLOCK)
    for turn in range(ROUNDS):
        source = pair + (turn % 2) * count * BLOCK + ((me + 1) % count) * BLOCK
        target = pair + ((turn + 1) % 2) * count * BLOCK + me * BLOCK
        tl.store(target + at, tl.load(source + at, cache_modifier=".cg") + 1.0)
        tl.debug_barrier()  # this program's stores stand before its sign
        arrived = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") + 1
        while arrived < (turn + 1) * count:
            arrived = tl.atomic_add(counter, 0, sem="acquire", scope="gpu")
        tl.debug_barrier()


@kernel
def read_kernel(source, sums, BLOCKS: tl.constexpr, ROUNDS: tl.constexpr, BLOCK: tl.constexpr):
    """Read so many blocks per program, so many times over, and keep their sum."""
    at = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    first = tl.program_id(0).to(tl.int64) * BLOCKS * BLOCK
    for turn in tl.range(0, BLOCKS * ROUNDS, num_stages=4):
        total += tl.load(source + first + (turn % BLOCKS) * BLOCK + at)
    tl.store(sums + tl.program_id(0), tl.sum(total))


def launches(programs: int, device: str) -> dict[str, Launch]:
    """Return one launch of each kind on tensors of ``device``, which may be meta: to be compiled ahead."""

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
    """source: float32 [programs, blocks, READ]."""
    sizes = {"BLOCKS": source.shape[1], "ROUNDS": rounds, "BLOCK": READ}
    return Launch(
        read_kernel, (len(source),), {"source": source, "sums": sums, **sizes}, Tile(warps=8, stages=4)
    )


def gaps(replays: int) -> Iterator[Row]:
    """Yield a row of each measurement, checked against what it must have computed. Needs a CUDA device."""
    many = torch.cuda.get_device_properties(0).multi_processor_count
    for programs in (1, WIDE):
        yield chain(programs, replays)
    yield barriers(min(WIDE, many))
    for programs in (FEW, many):
        for label, nbytes, rounds in (("L2", SMALL, 64), ("memory", LARGE, 1)):
            yield rate(label, programs, nbytes, rounds, replays)


def chain(programs: int, replays: int) -> Row:
    """Return the time of a link: CHAIN kernels in a graph."""
    one, other = (torch.zeros(programs, BLOCK, device="cuda") for _ in "ab")
    there, back = link(one, other), link(other, one)
    ms = graph_ms([there, back] * (CHAIN // 2), replays)
    name = f"chain of {CHAIN}, {programs} programs"
    row = {"what": name, "us": 1e3 * ms["p50"], "us_min": 1e3 * ms["min"], "us_max": 1e3 * ms["max"]}
    torch.cuda.synchronize()
    # Whole rounds have run, so all blocks hold the same number; who overlapped has handed on an older one.
    row["in_order"] = bool((one == one[0, 0]).all()) and one[0, 0].item() % CHAIN == 0
    if not row["in_order"]:
        row |= {"wrong": True, "error": f"kernels overlapped: {one.min().item()} to {one.max().item()}"}
    return row


def barriers(programs: int) -> Row:
    """Return the time of a barrier, with the store and the load around it."""
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
    """Return the bytes per second that so many programs read."""
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
    """Return the median of a long kernel's time."""
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
